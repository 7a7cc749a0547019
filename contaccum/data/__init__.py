"""From text files to the micro-batches of a step: readers, tables, the order of examples, tokens, and the demo set."""

"""Read data sets of every format, and make the micro-batches of a training step."""

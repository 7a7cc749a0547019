"""Read data sets of every format, and make the micro-batches of a training step.

The demo data set is here too.
"""

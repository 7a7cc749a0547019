"""The dual bank in training loops of other libraries; thin, and imported by nothing else."""

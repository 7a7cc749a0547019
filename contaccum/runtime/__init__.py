"""Code for devices, processes, lock files, atomic files, the Hugging Face Hub and signals."""

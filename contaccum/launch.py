"""What a launcher (torchrun, accelerate launch) says to the processes that it starts, in their environment. Imports no torch."""

import os


def process_place() -> tuple[int, int]:
    """Rank and number of processes; (0, 1) without a launcher."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def local_place() -> tuple[int, int]:
    """Rank and number among the processes of this machine; (0, 1) without a launcher."""
    rank, world = process_place()
    return int(os.environ.get("LOCAL_RANK", rank)), int(os.environ.get("LOCAL_WORLD_SIZE", world))


def is_main() -> bool:
    """Whether this is the process that prints results and writes files."""
    return process_place()[0] == 0

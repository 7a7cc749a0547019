"""Runs the command line under a limit on the address space, so many MB above what the process has when training begins.

usage: limited.py MEGABYTES ARGUMENT…
"""

import ctypes
import resource
import sys
from pathlib import Path

from contaccum.cli import main
from contaccum.runtime.engine import Engine

M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8  # malloc.h
begin_step = Engine.begin_step


def limited(engine: Engine, step: int) -> None:
    if step == 0 and not hasattr(engine, "under_limit"):
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        limit = used + int(sys.argv[1]) * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        engine.under_limit = True
    begin_step(engine, step)


def return_freed_memory() -> None:
    """Let a failed step give all its address space back.

    glibc would keep freed tensors in its heap; how many depends on the timing of the threads, and then a retry with smaller
    micro-batches or the stack of its prefetch thread (8 MB) may find no room. It would also reserve 64 MB for each thread.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc
        libc.mallopt(M_MMAP_THRESHOLD, 2**16)
        libc.mallopt(M_ARENA_MAX, 1)


return_freed_memory()
Engine.begin_step = limited
sys.exit(main(sys.argv[2:]))

"""Runs the command line under a limit on the address space, so many MB above what the process has when training begins.

usage: limited.py MEGABYTES ARGUMENT…
"""

import resource
import sys
from pathlib import Path

from contaccum.cli import main
from contaccum.runtime.engine import Engine

begin_step = Engine.begin_step


def limited(engine: Engine, step: int) -> None:
    if step == 0 and not hasattr(engine, "under_limit"):
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        limit = used + int(sys.argv[1]) * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        engine.under_limit = True
    begin_step(engine, step)


Engine.begin_step = limited
sys.exit(main(sys.argv[2:]))

"""Run a benchmark's own script in a new process, so that its peak memory is measured separately."""

import argparse
import json
import shlex
import subprocess
import sys
from typing import Any


def add_worker(parser: argparse.ArgumentParser) -> None:
    """Add the option with the request of a new process, as JSON."""
    parser.add_argument("--worker", help=argparse.SUPPRESS)


def in_fresh_process(request: dict[str, Any]) -> dict[str, Any]:
    """Run this script with ``--worker request`` and return the JSON of its last line."""
    call = [sys.executable, sys.argv[0], "--worker", json.dumps(request)]
    done = subprocess.run(call, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{shlex.join(call)}\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])

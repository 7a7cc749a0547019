"""Server that imports everything once and forks a process for each requested run.

A line of its standard input is JSON: ``{"arguments": [...], "at": n}``. The child runs the command
line with them and is killed just before its n-th system call that changes files (0: never). The
answer is the child's exit code, as subprocess gives it, and its number of such calls.
"""

import ctypes
import json
import os
import sys

from contaccum.cli import main
from contaccum.training import loop

library = ctypes.CDLL(None)
assert loop


def run(job: dict) -> dict:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - ends with the process
        library.arm(ctypes.c_long(job["at"] or -1))
        code = main(job["arguments"])
        calls = library.counted()
        library.arm(ctypes.c_long(0))
        os.write(write, str(calls).encode())
        os._exit(code)
    os.close(write)
    with os.fdopen(read) as pipe:
        calls = pipe.read()
    return {"code": os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), "calls": int(calls or 0)}


for line in sys.stdin:
    print(json.dumps(run(json.loads(line))), flush=True)

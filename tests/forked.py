"""A Python for tests that starts in milliseconds: a server imports everything once and forks each process.

``python()`` returns an executable that takes what ``python`` takes after its name: ``-m``, ``-c`` or a file, with arguments. It
passes them, its environment, its folder and its standard streams to the server, relays signals to the forked process, and
ends as that process ends. What this process starts with ``sys.executable`` is forked too.

``doctor``, which checks how things are imported, gets a Python of its own.

Not for other tests of imports, of a terminal, or of variables that a library reads when it is imported (``HF_*``, ``OMP_*``).
SIGKILL ends the executable first and the forked process a moment later; a test that goes on after it takes a new Python.
"""

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import types
from pathlib import Path

HERE = Path(__file__).parent
HEAVY = (
    "contaccum.cli.commands",
    "contaccum.evaluation.answers",
    "contaccum.experiments.compare",
    "contaccum.experiments.measure",
    "contaccum.retrieval.index",
    "contaccum.training.loop",
    "faiss",
    "faults",
    "torch._dynamo",
)
M_MMAP_THRESHOLD = -3
"""Number of this option of mallopt in glibc's malloc.h."""
CLIENT = """#!{python} -IS
import json, os, signal, socket, sys
if "doctor" in sys.argv:
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
relayed = {{signal.SIGTERM, signal.SIGINT, signal.SIGHUP}}
signal.pthread_sigmask(signal.SIG_BLOCK, relayed)
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
request = json.dumps([sys.argv[1:], dict(os.environ), os.getcwd()]).encode()
socket.send_fds(server, [len(request).to_bytes(4, "big")], [0, 1, 2])
server.sendall(request)
pid = int.from_bytes(server.recv(4), "big")
for number in relayed:
    signal.signal(number, lambda number, _: os.kill(pid, number))
signal.pthread_sigmask(signal.SIG_UNBLOCK, relayed)
code = int.from_bytes(server.recv(4), "big", signed=True)
if code < 0:
    for number in relayed:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""


@functools.cache
def python() -> str:
    """Start the server, which ends with this process, and return the path of the executable."""
    folder = tempfile.TemporaryDirectory()
    paths = os.pathsep.join([str(HERE.parent), str(HERE)])
    environment = {**os.environ, "PYTHONPATH": paths, "TOKENIZERS_PARALLELISM": "false"}
    server = subprocess.Popen(
        [sys.executable, __file__, folder.name], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )

    def stop() -> None:
        server.stdin.close()
        server.wait()
        folder.cleanup()

    atexit.register(stop)
    assert server.stdout.read(6) == b"ready\n"
    return f"{folder.name}/python"


def serve(folder: Path) -> list[str]:
    """Fork a process per connection until standard input closes. Return in each forked process, with its arguments."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "socket"))
    listener.listen(64)
    client = folder / "python"
    client.write_text(CLIENT.format(python=sys.executable, address=str(folder / "socket")))
    client.chmod(0o700)
    sys.executable = str(client)
    os.write(1, b"ready\n")
    gc.freeze()  # a collection in a forked process would copy the pages of the server's objects
    running: dict[int, socket.socket] = {}
    while True:
        ready, _, _ = select.select([0, listener, *running.values()], [], [], 0.01 if running else None)
        for pid, connection in list(running.items()):
            if 0 in ready or connection in ready:  # the tests ended, or the client was killed
                os.kill(pid, signal.SIGKILL)
            ended, status = os.waitpid(pid, 0 if connection in ready else os.WNOHANG)
            if ended:
                with running.pop(pid), contextlib.suppress(OSError):
                    connection.send(os.waitstatus_to_exitcode(status).to_bytes(4, "big", signed=True))
        if 0 in ready:
            os._exit(0)
        if listener in ready:
            connection, _ = listener.accept()
            size, streams, _, _ = socket.recv_fds(connection, 4, 3)
            request = connection.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL)
            pid = os.fork()
            if pid == 0:
                for each in (listener, connection, *running.values()):
                    each.close()
                return become(streams, *json.loads(request))
            for stream in streams:
                os.close(stream)
            running[pid] = connection
            connection.send(pid.to_bytes(4, "big"))


def become(streams: list[int], arguments: list[str], environment: dict[str, str], folder: str) -> list[str]:
    """Give this forked process its streams, session, environment and folder; return ``arguments``."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored if a shell runs the tests in the background
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ |= environment
    if threshold := environment.get("MALLOC_MMAP_THRESHOLD_"):  # the C library reads it when a process starts
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, int(threshold))
    os.chdir(folder)
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    return arguments


def run(kind: str, *rest: str) -> None:
    """Run what ``python`` runs with these arguments."""
    arguments = list(rest)
    if kind == "-u":  # torch's launcher asks for unbuffered streams
        kind, *arguments = arguments
    if kind == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv = arguments
        sys.modules.pop(arguments[0], None)
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *arguments[1:]]
        module = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(arguments[0], vars(module))
    else:
        sys.path.insert(0, str(Path(kind).resolve().parent))
        sys.argv = [kind, *arguments]
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    for name in HEAVY:
        importlib.import_module(name)
    get_checkpoint_conversion_mapping("bert")  # a table of all architectures, built on first use
    arguments = serve(Path(sys.argv[1]))
    code = 0
    try:
        run(*arguments)
    except SystemExit as end:
        code = end.code or 0
        if isinstance(code, str):  # as Python does it
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # without the teardown of all modules, which copies their pages

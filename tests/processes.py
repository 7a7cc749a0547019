"""Processes for tests: a Python that starts in milliseconds, launches of several processes, faults,
limits and small disks.

- ``python()`` returns an executable that behaves like ``python``, but is forked from a server that
  has imported everything.
- ``run_jobs`` starts processes as torchrun does, each a fork of an interpreter that has imported
  everything.
- A fault is a function that spoils one process of a job, such as ``is_killed``; ``Job.fault`` names
  it.
- ``small_disk`` and ``read_only`` mount file systems.

As a script, this file runs the server (``serve FOLDER``), the jobs of a folder (``jobs FOLDER``),
or the command line under a limit on its memory (``limited MEGABYTES ARGUMENT…``).
"""

import atexit
import contextlib
import ctypes
import faulthandler
import functools
import gc
import importlib
import json
import os
import resource
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8
"""Numbers of these options of mallopt in glibc's malloc.h."""

# a Python that starts in milliseconds

HEAVY = (
    "contaccum.cli.commands",
    "contaccum.evaluation.answers",
    "contaccum.experiments.compare",
    "contaccum.experiments.measure",
    "contaccum.retrieval.index",
    "contaccum.training.loop",
    "faiss",
    "torch._dynamo",
)
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


def environment_of_tests() -> dict[str, str]:
    """Environment in which contaccum and the modules of the tests can be imported."""
    paths = os.pathsep.join([str(HERE.parent), str(HERE)])
    return {**os.environ, "PYTHONPATH": paths, "TOKENIZERS_PARALLELISM": "false"}


@functools.cache
def python() -> str:
    """Start the server, which ends with this process, and return the path of the executable.

    The executable takes what ``python`` takes after its name: ``-m``, ``-c`` or a file, with
    arguments. It passes them, its environment, its folder and its standard streams to the server,
    relays signals to the forked process, and ends as that process ends. What this process starts
    with ``sys.executable`` is forked too. ``doctor``, which checks how things are imported, gets a
    Python of its own.

    Not for other tests of imports, of a terminal, or of variables that a library reads when it is
    imported (``HF_*``, ``OMP_*``). SIGKILL ends the executable first and the forked process a
    moment later; a test that goes on after it takes a new Python.
    """
    folder = tempfile.TemporaryDirectory()
    server = subprocess.Popen(
        [sys.executable, __file__, "serve", folder.name],
        env=environment_of_tests(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )

    def stop() -> None:
        server.stdin.close()
        server.wait()
        folder.cleanup()

    atexit.register(stop)
    assert server.stdout.read(6) == b"ready\n"
    return f"{folder.name}/python"


def serve(folder: Path) -> None:
    """Fork a process per connection until standard input closes."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    for name in HEAVY:
        importlib.import_module(name)
    get_checkpoint_conversion_mapping("bert")  # a table of all architectures, built on first use
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
        ready, _, _ = select.select(
            [0, listener, *running.values()], [], [], 0.01 if running else None
        )
        for pid, connection in list(running.items()):
            if 0 in ready or connection in ready:  # the tests ended, or the client was killed
                os.kill(pid, signal.SIGKILL)
            ended, status = os.waitpid(pid, 0 if connection in ready else os.WNOHANG)
            if ended:
                with running.pop(pid), contextlib.suppress(OSError):
                    connection.send(
                        os.waitstatus_to_exitcode(status).to_bytes(4, "big", signed=True)
                    )
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
                become_python(streams, *json.loads(request))
            for stream in streams:
                os.close(stream)
            running[pid] = connection
            connection.send(pid.to_bytes(4, "big"))


def become_python(
    streams: list[int], arguments: list[str], environment: dict[str, str], folder: str
) -> None:
    """Run in this forked process what ``python`` runs with these arguments, and exit."""
    os.setsid()
    # ignored if a shell runs the tests in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ |= environment
    if threshold := environment.get(
        "MALLOC_MMAP_THRESHOLD_"
    ):  # the C library reads it when a process starts
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, int(threshold))
    os.chdir(folder)
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    code = 0
    try:
        run_python(*arguments)
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


def run_python(kind: str, *rest: str) -> None:
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


# launches of one or several processes

PORT_BYTES = 2


@dataclass
class Job:
    """One launch."""

    call: list[str]
    """Arguments of contaccum, or of the worker."""
    processes: int = 1
    worker: str = ""
    """A module of the tests whose ``main`` is called instead of contaccum's."""
    imports: list[str] = field(default_factory=list)
    """Other modules that are imported once, before all processes are forked."""
    fault: str = ""
    """A function of this file that injects a fault into one of the processes."""
    machines: int = 1
    """Simulated machines, each with its own cache."""
    seconds: float = 120
    """Time limit; a process that runs longer hangs."""
    grace: float = 30
    """Time limit after another process of the launch has failed, in seconds."""


@dataclass
class Outcome:
    """Results of a launch, per process in rank order."""

    codes: list[int | None]
    """Exit codes; minus the signal's number; None for a process that hung."""
    out: list[str]
    err: list[str]

    def check(self) -> "Outcome":
        assert self.codes == [0] * len(self.codes), "\n".join(self.err)[-4000:]
        return self


def run_jobs(jobs: dict[str, Job], folder: Path) -> dict[str, Outcome]:
    """Run the jobs in their order, with caches in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "jobs.json").write_text(json.dumps({name: asdict(job) for name, job in jobs.items()}))
    call = [python(), __file__, "jobs", str(folder)]
    done = subprocess.run(
        call, env=environment_of_tests(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {
        name: Outcome(**found)
        for name, found in json.loads((folder / "outcomes.json").read_text()).items()
    }


def run_jobs_of(folder: Path) -> None:
    jobs = {
        name: Job(**values)
        for name, values in json.loads((folder / "jobs.json").read_text()).items()
    }
    for module in {name for job in jobs.values() for name in (job.worker, *job.imports)} - {""}:
        importlib.import_module(module)  # before the first fork
    outcomes = {name: asdict(launch(job, folder, folder / name)) for name, job in jobs.items()}
    (folder / "outcomes.json").write_text(json.dumps(outcomes))


def launch(job: Job, folder: Path, output: Path) -> Outcome:
    import torch.distributed as dist

    output.mkdir()
    receive, send = os.pipe()
    pids = [
        os.fork() or become_rank(job, rank, folder, output, receive, send)
        for rank in range(job.processes)
    ]
    # the launcher hosts the store, as torchrun does; a process forked while the store runs would
    # share its connections, and some launches would hang
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(send, store.port.to_bytes(PORT_BYTES, "little") * job.processes)
    os.close(send)
    os.close(receive)
    codes: dict[int, int] = {}
    deadline = time.monotonic() + job.seconds
    while len(codes) < len(pids) and time.monotonic() < deadline:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            codes[pid] = os.waitstatus_to_exitcode(status)
            if codes[pid] != 0:
                deadline = min(deadline, time.monotonic() + job.grace)
        else:
            time.sleep(0.01)
    for pid in (pid for pid in pids if pid not in codes):
        os.kill(pid, signal.SIGABRT)  # prints where each thread hangs
    for pid in (pid for pid in pids if pid not in codes):
        os.waitpid(pid, 0)
    said = {
        kind: [(output / f"{rank}.{kind}").read_text() for rank in range(job.processes)]
        for kind in ("out", "err")
    }
    return Outcome([codes.get(pid) for pid in pids], **said)


def become_rank(job: Job, rank: int, folder: Path, output: Path, receive: int, send: int) -> int:
    """Run as process ``rank`` in the forked process, and exit. receive, send: ends of the pipe with
    the store's port."""
    os.close(send)  # so that reading ends if the launcher does
    port = int.from_bytes(os.read(receive, PORT_BYTES), "little")
    local = -(-job.processes // job.machines)
    os.environ["CONTACCUM_CACHE"] = str(folder / f"cache-{job.machines}-{rank // local}")
    if job.processes > 1:
        place = {
            "RANK": rank,
            "WORLD_SIZE": job.processes,
            "LOCAL_RANK": rank % local,
            "LOCAL_WORLD_SIZE": local,
        }
        address = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        os.environ |= {name: str(value) for name, value in (place | address).items()}
    for number, kind in ((1, "out"), (2, "err")):
        os.dup2(os.open(output / f"{rank}.{kind}", os.O_WRONLY | os.O_CREAT), number)
    faulthandler.enable(2)
    code = 1
    try:
        if job.fault:
            globals()[job.fault](rank)
        code = importlib.import_module(job.worker or "contaccum.cli").main(job.call) or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


# faults; their imports are inside, because every test imports this file

LAST_STEP = 3  # steps before the fault


def before_step(act: Callable[[], object]) -> None:
    from contaccum.training.loop import Training

    take_step = Training.take_step

    def spoiled(self, micro_batches):
        if self.done == LAST_STEP:
            act()
        return take_step(self, micro_batches)

    Training.take_step = spoiled


def flips_a_bit_of_its_bank(rank: int) -> None:
    """Process 1 stores one number that differs from the other processes'."""
    from contaccum.methods.bank import Bank

    push = Bank.push

    def spoiled(self, *given):
        push(self, *given)
        if rank == 1 and self.step == LAST_STEP:
            self.passages.view(-1)[0] *= 1 + 2**-20

    Bank.push = spoiled


def raises(rank: int) -> None:
    def act() -> None:
        raise ZeroDivisionError("a fault of process 1 alone")

    if rank == 1:
        before_step(act)


def cannot_evaluate(rank: int) -> None:
    from contaccum.training.loop import Training

    def spoiled(self):
        raise ZeroDivisionError("a fault in the evaluation of process 1 alone")

    if rank == 1:
        Training.evaluate = spoiled


def is_killed(rank: int) -> None:
    """Kill the last process, or the only one."""
    if rank == int(os.environ.get("WORLD_SIZE", 1)) - 1:
        before_step(lambda: os.kill(os.getpid(), signal.SIGKILL))


def runs_out_of_memory(rank: int) -> None:
    """Ask the allocator for 2^60 bytes in a backward pass."""
    import torch

    from contaccum.runtime.engine import Engine

    backward = Engine.backward

    def spoiled(self, value):
        if self.step == LAST_STEP:
            torch.empty(1 << 60, dtype=torch.uint8)
        backward(self, value)

    if rank == 1:
        Engine.backward = spoiled


def is_stuck(rank: int) -> None:
    if rank == 1:
        before_step(lambda: time.sleep(1000))


def has_a_full_disk(rank: int) -> None:
    """Limit the main process's files to 10 KB, so that no checkpoint can be written."""
    if rank == 0:
        before_step(lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000)))


def tells_what_it_builds(rank: int) -> None:
    """No fault: print a line for each entry that this process adds to the cache."""
    from contaccum.runtime import cache

    whole_folder = cache.whole_folder

    def told(path):
        print(f"builds {path}", file=sys.stderr)
        return whole_folder(path)

    cache.whole_folder = told


def sees_no_checkpoint(rank: int) -> None:
    """Simulate a second machine with another disk under the same path."""
    from contaccum.training import loop

    if rank == 1:
        loop.newest_checkpoint = lambda folder: None


def counts_gradient_messages(rank: int) -> None:
    """No fault: print how many messages each step sends for how many gradients."""
    import torch.distributed as dist

    from contaccum.runtime.engine import Engine

    sent: list[str] = []

    def counted(original):
        return lambda *given, **named: sent.append("message") or original(*given, **named)

    for name in ("all_reduce", "all_gather", "broadcast", "reduce", "reduce_scatter"):
        setattr(dist, name, counted(getattr(dist, name)))
    reduce = Engine.reduce_gradients

    def told(self):
        sent.clear()
        reduce(self)
        gradients = sum(parameter.grad is not None for parameter in self.parameters)
        print(f"messages: {len(sent)}, gradients: {gradients}", file=sys.stderr)

    Engine.reduce_gradients = told


def encodes_few_texts_at_a_time(rank: int) -> None:
    """No fault: encode a small corpus in several chunks, in all processes."""
    from contaccum.retrieval import encode

    encode.CHUNK = 8


# limits and disks


def run_limited(megabytes: int, arguments: list[str]) -> int:
    """Run the command line under a limit on the address space, so many MB above what the process
    has when training begins."""
    from contaccum.cli import main
    from contaccum.runtime.engine import Engine

    begin_step = Engine.begin_step

    def limited(engine: Engine, step: int) -> None:
        if step == 0 and not hasattr(engine, "under_limit"):
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            limit = used + megabytes * 2**20
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            engine.under_limit = True
        begin_step(engine, step)

    # Let a failed step give all its address space back. glibc would keep freed tensors in its heap;
    # how many depends on the timing of the threads, and then a retry with smaller micro-batches or
    # the stack of its prefetch thread (8 MB) may find no room. It would also reserve 64 MB for each
    # thread.
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc
        libc.mallopt(M_MMAP_THRESHOLD, 2**16)
        libc.mallopt(M_ARENA_MAX, 1)
    Engine.begin_step = limited
    return main(arguments)


@contextlib.contextmanager
def small_disk(folder: Path, size: int = 1 << 20) -> Iterator[Path]:
    """A file system of ``size`` bytes in memory, mounted at ``folder``.

    Skips the test where none can be mounted.
    """
    with _mounted(folder, f"size={size}"):
        yield folder


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[Path]:
    """A file system that nobody can write to, root included, mounted at ``folder``.

    Skips the test as ``small_disk``.
    """
    with _mounted(folder, "ro"):
        yield folder


@contextlib.contextmanager
def _mounted(folder: Path, options: str) -> Iterator[None]:
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        import pytest  # not at the top: a benchmark that uses run_limited needs no pytest

        pytest.skip(f"needs the right to mount a file system ({done.stderr.strip()})")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(Path(sys.argv[2]))
    elif sys.argv[1] == "jobs":
        run_jobs_of(Path(sys.argv[2]))
    else:
        sys.exit(run_limited(int(sys.argv[2]), sys.argv[3:]))

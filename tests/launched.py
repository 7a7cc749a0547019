"""Start processes as torchrun does, each process a fork of an interpreter that has imported everything.

``run_jobs`` is for tests; the script reads a list of jobs and runs them one after the other, each with all its processes.
"""

import faulthandler
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path

from forked import python

HERE = Path(__file__).parent
PORT = 2
"""Bytes of a port."""


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
    """A function of ``faults`` that injects a fault into one of the processes."""
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
    paths = os.pathsep.join([str(HERE.parent), str(HERE)])
    environment = {**os.environ, "PYTHONPATH": paths, "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [python(), __file__, str(folder)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {name: Outcome(**found) for name, found in json.loads((folder / "outcomes.json").read_text()).items()}


def main(folder: Path) -> None:
    jobs = json.loads((folder / "jobs.json").read_text())
    for module in {name for values in jobs.values() for name in (values["worker"], *values["imports"])} - {""}:
        importlib.import_module(module)  # before the first fork
    outcomes = {}
    for name, values in jobs.items():
        outcomes[name] = asdict(launch(Job(**values), folder, folder / name))
    (folder / "outcomes.json").write_text(json.dumps(outcomes))


def launch(job: Job, folder: Path, output: Path) -> Outcome:
    import torch.distributed as dist

    output.mkdir()
    receive, send = os.pipe()
    pids = [os.fork() or become(job, rank, folder, output, receive, send) for rank in range(job.processes)]
    # the launcher hosts the store, as torchrun does; a process forked while the store runs would share its connections,
    # and some launches would hang
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(send, store.port.to_bytes(PORT, "little") * job.processes)
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
    said = {kind: [(output / f"{rank}.{kind}").read_text() for rank in range(job.processes)] for kind in ("out", "err")}
    return Outcome([codes.get(pid) for pid in pids], **said)


def become(job: Job, rank: int, folder: Path, output: Path, receive: int, send: int) -> int:
    """Run as process ``rank`` in the forked process, and exit. receive, send: ends of the pipe with the store's port."""
    os.close(send)  # so that reading ends if the launcher does
    port = int.from_bytes(os.read(receive, PORT), "little")
    local = -(-job.processes // job.machines)
    os.environ["CONTACCUM_CACHE"] = str(folder / f"cache-{job.machines}-{rank // local}")
    if job.processes > 1:
        place = {"RANK": rank, "WORLD_SIZE": job.processes, "LOCAL_RANK": rank % local, "LOCAL_WORLD_SIZE": local}
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "True"}
        os.environ |= {name: str(value) for name, value in (place | address).items()}
    for number, kind in ((1, "out"), (2, "err")):
        os.dup2(os.open(output / f"{rank}.{kind}", os.O_WRONLY | os.O_CREAT), number)
    faulthandler.enable(2)
    code = 1
    try:
        if job.fault:
            getattr(importlib.import_module("faults"), job.fault)(rank)
        code = importlib.import_module(job.worker or "contaccum.cli").main(job.call) or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

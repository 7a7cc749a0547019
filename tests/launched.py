"""Starts processes as torchrun does, many launches from one interpreter: what takes seconds is imported once, then forked.

``run_jobs`` is for tests; the script beside it reads a list of jobs and runs one after the other, the processes of each at once.
"""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

HERE = Path(__file__).parent


@dataclass
class Job:
    """One launch."""

    call: list[str]
    """Arguments of contaccum, or of the worker."""
    processes: int = 1
    worker: str = ""
    """A module of the tests whose ``main`` is called instead of contaccum's."""
    fault: str = ""
    """A function of ``faults`` that spoils something in one of the processes."""
    machines: int = 1
    """Over how many machines the processes are told that they are divided; each has a cache of its own."""
    seconds: float = 120
    """A process that has not ended by then hangs."""
    grace: float = 30
    """The same, in seconds after another process of the launch has ended badly."""


@dataclass
class Outcome:
    """What became of a launch, per process in rank order."""

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
    call = [sys.executable, __file__, str(folder)]
    done = subprocess.run(call, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return {name: Outcome(**found) for name, found in json.loads((folder / "outcomes.json").read_text()).items()}


def main(folder: Path) -> None:
    import torch.distributed as dist
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    jobs = json.loads((folder / "jobs.json").read_text())
    workers = {values["worker"] for values in jobs.values()} - {""}
    heavy = ("contaccum.api", "contaccum.cli", "contaccum.training.loop", "faiss", "faults")
    for module in (*heavy, *workers):  # before the first fork
        importlib.import_module(module)
    get_checkpoint_conversion_mapping("bert")  # a table of all architectures, made when the first is asked for
    outcomes = {}
    for name, values in jobs.items():
        # the launcher hosts the store, as torchrun does
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        outcomes[name] = asdict(launch(Job(**values), folder, folder / name, store.port))
    (folder / "outcomes.json").write_text(json.dumps(outcomes))


def launch(job: Job, folder: Path, output: Path, port: int) -> Outcome:
    output.mkdir()
    pids = [os.fork() or become(job, rank, folder, output, port) for rank in range(job.processes)]
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
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    said = {kind: [(output / f"{rank}.{kind}").read_text() for rank in range(job.processes)] for kind in ("out", "err")}
    return Outcome([codes.get(pid) for pid in pids], **said)


def become(job: Job, rank: int, folder: Path, output: Path, port: int) -> int:
    """In the forked process: take the place that torchrun would give, run, and leave."""
    local = -(-job.processes // job.machines)
    os.environ["CONTACCUM_CACHE"] = str(folder / f"cache-{job.machines}-{rank // local}")
    if job.processes > 1:
        place = {"RANK": rank, "WORLD_SIZE": job.processes, "LOCAL_RANK": rank % local, "LOCAL_WORLD_SIZE": local}
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "True"}
        os.environ |= {name: str(value) for name, value in (place | address).items()}
    for number, kind in ((1, "out"), (2, "err")):
        os.dup2(os.open(output / f"{rank}.{kind}", os.O_WRONLY | os.O_CREAT), number)
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

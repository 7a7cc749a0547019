"""Runs several jobs at a time, each in a process of its own, one on each device."""

import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, NamedTuple

import torch

from contaccum.errors import InputError, Interrupted
from contaccum.launch import process_place
from contaccum.training.signals import StopSignals

WORKER = "contaccum.study.worker"
PAUSE = 0.1  # seconds between two looks at the processes


@dataclass(frozen=True)
class Job:
    """What a process is told, and where what it says is kept."""

    name: str
    file: Path
    """JSON that the worker reads."""

    @property
    def log(self) -> Path:
        return self.file.with_suffix(".log")


class Outcome(NamedTuple):
    job: Job
    code: int
    """Exit code."""
    seconds: float
    last: str
    """The last line that the process said."""


@dataclass
class Place:
    """Where one job at a time runs."""

    environment: dict[str, str]
    job: Job | None = None
    process: subprocess.Popen | None = None
    log: IO | None = None
    began: float = field(default=0.0)


def one_process(verb: str) -> None:
    """InputError where a launcher has started several processes of a verb that starts its own."""
    world = process_place()[1]
    if world > 1:
        raise InputError(f"contaccum {verb} was launched in {world} processes, expected one: it starts its own")


def places(device: str, parallel: int | None) -> list[Place]:
    """One place a GPU, or ``parallel`` of them, dealt out over the GPUs; a run on the CPU sees no GPU.

    Runs side by side on a CPU share its cores, unless OMP_NUM_THREADS says otherwise.
    """
    gpus = _gpus() if device == "auto" else []
    count = parallel or max(1, len(gpus))
    if gpus:
        return [Place({"CUDA_VISIBLE_DEVICES": gpus[number % len(gpus)]}) for number in range(count)]
    threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // count))} if count > 1 else {}
    return [Place({name: value for name, value in threads.items() if name not in os.environ}) for _ in range(count)]


def _gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    count = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",")[:count] if named else [str(number) for number in range(count)]


def run_jobs(
    jobs: list[Job], free: list[Place], signals: StopSignals, report: Callable[[Outcome], None], lock: int
) -> list[Outcome]:
    """Run every job; returns the outcomes of those that ended with another code than 0, after all have ended.

    lock: a file that every process holds open. A signal ends the processes, which save what they have, and raises Interrupted.
    """
    waiting, failed = deque(jobs), []
    try:
        while waiting or any(place.process for place in free):
            for place in free:
                if place.process is None and waiting:
                    _start(place, waiting.popleft(), lock)
                elif place.process is not None and place.process.poll() is not None:
                    outcome = _end(place)
                    report(outcome)
                    if outcome.code:
                        failed.append(outcome)
            if signals.received:
                raise Interrupted(signals.received, "stopped; the same command goes on with what is missing")
            time.sleep(PAUSE)
    finally:
        busy = [place for place in free if place.process is not None]
        for place in busy:
            assert place.process is not None
            place.process.terminate()
        for place in busy:
            _end(place)
    return failed


def _start(place: Place, job: Job, lock: int) -> None:
    place.job, place.began = job, time.monotonic()
    place.log = open(job.log, "ab")  # noqa: SIM115 - closed by _end
    # a session of its own, so that Ctrl-C reaches it once, by us; the pipe tells it when we are gone
    place.process = subprocess.Popen(
        [sys.executable, "-m", WORKER, str(job.file)],
        stdin=subprocess.PIPE,
        stdout=place.log,
        stderr=place.log,
        env={**os.environ, **place.environment},
        start_new_session=True,
        pass_fds=[lock],
    )


def _end(place: Place) -> Outcome:
    assert place.job is not None
    assert place.process is not None
    assert place.process.stdin is not None
    assert place.log is not None
    code = place.process.wait()
    place.process.stdin.close()
    place.log.close()
    said = place.job.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    outcome = Outcome(place.job, code, time.monotonic() - place.began, said[-1] if said else "")
    place.process = place.job = place.log = None
    return outcome

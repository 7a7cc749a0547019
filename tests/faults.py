"""Faults injected into one of several processes; the jobs of ``launched`` name them."""

import os
import resource
import signal
import sys
import time

import torch
import torch.distributed as dist

from contaccum.methods.bank import Bank
from contaccum.retrieval import encode
from contaccum.runtime import locks
from contaccum.runtime.engine import Engine
from contaccum.training import loop
from contaccum.training.loop import Training

LAST_STEP = 3  # steps before the fault


def before_step(act) -> None:
    take_step = Training.take_step

    def spoiled(self, micro_batches):
        if self.done == LAST_STEP:
            act()
        return take_step(self, micro_batches)

    Training.take_step = spoiled


def flips_a_bit_of_its_bank(rank: int) -> None:
    """Process 1 stores one number that differs from the other processes'."""
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


def is_killed(rank: int) -> None:
    """Kill the last process, or the only one."""
    if rank == int(os.environ.get("WORLD_SIZE", 1)) - 1:
        before_step(lambda: os.kill(os.getpid(), signal.SIGKILL))


def runs_out_of_memory(rank: int) -> None:
    """Ask the allocator for 2^60 bytes in a backward pass."""
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
    whole_folder = locks.whole_folder

    def told(path):
        print(f"builds {path}", file=sys.stderr)
        return whole_folder(path)

    locks.whole_folder = told


def sees_no_checkpoint(rank: int) -> None:
    """Simulate a second machine with another disk under the same path."""
    if rank == 1:
        loop.newest_checkpoint = lambda folder: None


def counts_gradient_messages(rank: int) -> None:
    """No fault: print how many messages each step sends for how many gradients."""
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
    encode.CHUNK = 8

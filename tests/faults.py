"""What can go wrong in one of several processes, brought about in real code; named by the jobs of ``launched``."""

import os
import resource
import signal
import sys
import time

from contaccum.data import arrow
from contaccum.methods.bank import Bank
from contaccum.retrieval import encode
from contaccum.training import loop
from contaccum.training.loop import Training

LAST_STEP = 3  # steps that go well before


def before_step(act) -> None:
    take_step = Training.take_step

    def spoiled(self, micro_batches):
        if self.done == LAST_STEP:
            act()
        return take_step(self, micro_batches)

    Training.take_step = spoiled


def flips_a_bit_of_its_bank(rank: int) -> None:
    """Process 1 stores one number that is not the others'."""
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
    """The last of the processes, or the only one."""
    if rank == int(os.environ.get("WORLD_SIZE", 1)) - 1:
        before_step(lambda: os.kill(os.getpid(), signal.SIGKILL))


def is_stuck(rank: int) -> None:
    if rank == 1:
        before_step(lambda: time.sleep(1000))


def has_a_full_disk(rank: int) -> None:
    """The main process can write no file beyond 10 KB, so no checkpoint."""
    if rank == 0:
        before_step(lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000)))


def tells_what_it_builds(rank: int) -> None:
    """No fault: a line on stderr for each entry that this process adds to the cache."""
    whole_folder = arrow.whole_folder

    def told(path):
        print(f"builds {path}", file=sys.stderr)
        return whole_folder(path)

    arrow.whole_folder = told


def sees_no_checkpoint(rank: int) -> None:
    """As on a second machine that has another disk under the same name."""
    if rank == 1:
        loop.newest_checkpoint = lambda folder: None


def encodes_few_texts_at_a_time(rank: int) -> None:
    """So that a small corpus has several slices; no fault, but as one must reach into all processes."""
    encode.CHUNK = 8

"""Progress of a long task: a bar in a terminal, lines elsewhere."""

import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TypeVar

from contaccum.runtime.launch import is_main
from contaccum.runtime.units import duration

FIRST_SECONDS = 5.0  # time until the first line about a task
LINE_SECONDS = 60.0  # time between two other lines where stderr is no terminal
ITEMS = 1000  # number of items between two looks at the clock

Item = TypeVar("Item")


@contextmanager
def announced(task: str) -> Iterator[None]:
    """Print ``task`` to stderr, once, if the block takes longer than FIRST_SECONDS.

    With several processes, only process 0 prints.
    """
    timer = threading.Timer(FIRST_SECONDS, _say, [task])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _say(text: str) -> None:
    from tqdm.auto import tqdm

    if is_main():
        tqdm.write(f"contaccum: {text}", file=sys.stderr)


class Progress:
    """Progress of a task.

    Where stderr is no terminal, process 0 prints a line after FIRST_SECONDS and then each minute.
    """

    def __init__(self, total: int | None, task: str, unit: str) -> None:
        """Show the bar of the task.

        total: None if it is unknown. unit: what ``total`` counts, such as ``passages``.
        """
        from tqdm.auto import tqdm  # not above, because it would slow down every --help

        self.total, self.task, self.unit = total, task, unit
        self.done = 0
        self.began = time.monotonic()
        self.next_line = self.began + FIRST_SECONDS
        self.bar = tqdm(total=total, desc=task, unit=f" {unit}", disable=None, leave=False)

    @classmethod
    def over(cls, items: Iterable[Item], task: str, unit: str) -> Iterator[Item]:
        """Yield the items, and count them."""
        with cls(None, task, unit) as progress:
            for count, item in enumerate(items, 1):
                yield item
                if count % ITEMS == 0:
                    progress.update(ITEMS)

    def update(self, count: int) -> None:
        """Add ``count`` to what is done."""
        self.bar.update(count)
        self.done += count
        now = time.monotonic()
        if not self.bar.disable or now < self.next_line or self.done == self.total:
            return
        self.next_line = now + LINE_SECONDS
        done = f"{self.done:,}"
        left = ""
        if self.total is not None:
            done += f" of {self.total:,}"
            spent = now - self.began
            if spent >= LINE_SECONDS:  # the start is slow: the longest texts are encoded first
                left = f", about {duration(spent / self.done * (self.total - self.done))} left"
        _say(f"{self.task}: {done} {self.unit}{left}")

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.bar.close()

"""Progress of a long task."""

import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from contaccum.runtime.launch import is_main

if TYPE_CHECKING:
    from tqdm import tqdm

FIRST_SECONDS = 5.0  # time until the first line about a task
LINE_SECONDS = 60.0  # time between two other lines where stderr is no terminal


@contextmanager
def announced(task: str) -> Iterator[None]:
    """Print ``task`` to stderr, once, if the block takes longer than FIRST_SECONDS.

    With several processes, only process 0 prints.
    """

    def say() -> None:
        if is_main():
            print(f"contaccum: {task}", file=sys.stderr)

    timer = threading.Timer(FIRST_SECONDS, say)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def progress_bar(total: int | None, task: str, unit: str, items: Iterable | None = None) -> "tqdm":
    """Return a bar of tqdm, which process 0 shows; where stderr is no terminal, once a minute.

    total: None if it is unknown. unit: what ``total`` counts, such as ``passages``. items: items
    that the bar yields and counts.
    """
    from tqdm import tqdm  # not above, because it would slow down every --help

    terminal = sys.stderr.isatty()
    return tqdm(
        items,
        total=total,
        desc=task,
        unit=f" {unit}",
        leave=False,
        disable=not is_main(),
        mininterval=0.1 if terminal else LINE_SECONDS,
        delay=0 if terminal else FIRST_SECONDS,
    )

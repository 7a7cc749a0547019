"""Progress of a long task: a bar in a terminal, a line each minute elsewhere."""

import os
import sys
import time
from types import TracebackType

from tqdm.auto import tqdm

from contaccum.runtime.units import duration

LINE_SECONDS = 60.0  # time between two lines where stderr is no terminal


class Progress:
    """Progress of a task. Where stderr is no terminal, process 0 prints a line each minute."""

    def __init__(self, total: int, task: str, unit: str) -> None:
        """Show the bar of the task. unit: what ``total`` counts, such as ``passages``."""
        self.total, self.task, self.unit = total, task, unit
        self.done = 0
        self.began = self.printed = time.monotonic()
        self.bar = tqdm(total=total, desc=task, unit=f" {unit}", disable=None, leave=False)
        self.prints = self.bar.disable and int(os.environ.get("RANK", 0)) == 0

    def update(self, count: int) -> None:
        """Add ``count`` to what is done."""
        self.bar.update(count)
        self.done += count
        now = time.monotonic()
        if self.prints and now - self.printed >= LINE_SECONDS and self.done < self.total:
            self.printed = now
            left = duration((now - self.began) / self.done * (self.total - self.done))
            print(
                f"contaccum: {self.task}: {self.done:,} of {self.total:,} {self.unit}, "
                f"about {left} left",
                file=sys.stderr,
            )

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.bar.close()

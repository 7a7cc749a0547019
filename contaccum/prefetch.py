"""A thread that has the next items ready in time."""

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Prefetch(Generic[Item]):
    """Iterates over ``items`` in a background thread that stays at most ``depth`` items ahead.

    An error of ``items`` is raised in the consumer, behind the items that came before it. ``waited`` counts the seconds
    for which the consumer had to wait. Close it (or leave its ``with`` block) to end the thread early.
    """

    def __init__(self, items: Iterable[Item], depth: int = 2) -> None:
        self.waited = 0.0
        self._items, self._depth = items, depth
        self._ready: deque[Item] = deque()
        self._error: BaseException | None = None
        self._done = self._closed = False
        self._change = threading.Condition()
        self._thread = threading.Thread(target=self._fill, name="prefetch", daemon=True)
        self._thread.start()

    def _fill(self) -> None:
        try:
            for item in self._items:
                with self._change:
                    self._change.wait_for(lambda: self._closed or len(self._ready) < self._depth)
                    if self._closed:
                        return
                    self._ready.append(item)
                    self._change.notify_all()
        except BaseException as error:
            self._error = error
        finally:
            with self._change:
                self._done = True
                self._change.notify_all()

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        start = time.perf_counter()
        with self._change:
            self._change.wait_for(lambda: self._ready or self._done)
            self.waited += time.perf_counter() - start
            if self._ready:
                item = self._ready.popleft()
                self._change.notify_all()
                return item
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        raise StopIteration

    def close(self) -> None:
        """End the thread; waits for the item it is working on."""
        with self._change:
            self._closed = True
            self._ready.clear()
            self._change.notify_all()
        self._thread.join()

    def __enter__(self) -> "Prefetch[Item]":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

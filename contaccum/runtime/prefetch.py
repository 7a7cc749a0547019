"""Prefetch, an iterator that prepares the next items in a background thread."""

import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")
_END: Any = object()


class Prefetch(Generic[Item]):
    """Iterator over ``items``. A background thread prepares the next ``depth + 1`` items.

    If ``items`` raises an error, the iterator first returns all earlier items and then raises this error. ``waited`` is the
    total number of seconds that the consumer has waited for items. ``close`` and the end of the ``with`` block end the thread.
    """

    def __init__(self, items: Iterable[Item], depth: int = 2) -> None:
        self.waited = 0.0
        self._items = iter(items)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetch")
        self._ready: deque[Future] = deque(self._submit() for _ in range(depth + 1))

    def _submit(self) -> Future:
        return self._thread.submit(next, self._items, _END)

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        start = time.perf_counter()
        try:
            item = self._ready.popleft().result() if self._ready else _END
        except BaseException:
            self.close()
            raise
        self.waited += time.perf_counter() - start
        if item is _END:
            self.close()
            raise StopIteration
        self._ready.append(self._submit())
        return item

    def close(self) -> None:
        """End the thread. If the thread is preparing an item, it finishes this item first."""
        self._ready.clear()
        self._thread.shutdown(cancel_futures=True)

    def __enter__(self) -> "Prefetch[Item]":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

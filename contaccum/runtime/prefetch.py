"""Prefetching: a background thread prepares the next items of an iteration."""

from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

Item = TypeVar("Item")


def prefetch(items: Iterable[Item], depth: int = 2) -> Generator[Item, None, None]:
    """Yield ``items``, while a background thread prepares the next ``depth + 1`` items.

    An error of ``items`` is raised after all earlier items. Closing the generator ends the thread,
    which first finishes the item that it is preparing.
    """
    iterator = iter(items)
    end = object()
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetch")
    try:
        ready: deque[Any] = deque(thread.submit(next, iterator, end) for _ in range(depth + 1))
        while (item := ready.popleft().result()) is not end:
            ready.append(thread.submit(next, iterator, end))
            yield item
    finally:
        thread.shutdown(cancel_futures=True)

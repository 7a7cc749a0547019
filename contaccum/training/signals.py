"""Ctrl-C and SIGTERM: the first asks the run to save and leave, the second leaves at once."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType

from contaccum.errors import Interrupted


class StopSignals:
    """While the block runs, a signal raises Interrupted; within ``deferred``, ``received`` turns to its number instead.

    So what has nothing to save stops where it is, and what has finishes its step first. A second signal ends the process.
    """

    def __init__(self) -> None:
        self.received = 0
        self._deferred = False

    def __enter__(self) -> "StopSignals":
        self.before = {}
        if threading.current_thread() is threading.main_thread():  # Python lets no other thread handle signals
            self.before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """A block that asks ``received`` itself when it can stop."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received:
            os._exit(128 + number)
        self.received = number
        if not self._deferred:
            raise Interrupted(number, f"stopped by {signal.Signals(number).name}")
        print("stopping after this step: a checkpoint is being written (again to leave at once)", file=sys.stderr)

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

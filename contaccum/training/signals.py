"""Ctrl-C and SIGTERM: the first asks the run to save and leave, the second leaves at once."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

from contaccum.errors import Interrupted


class StopSignals:
    """While the block runs, a signal raises Interrupted; within ``deferred``, ``received`` turns to its number instead.

    So what has nothing to save stops where it is, and what has finishes its step first. A second signal ends the process. Under a
    launcher of several processes nothing is raised: one that waits for the others inside a library could not hear it, and ends at
    once, as the system has it.
    """

    def __init__(self) -> None:
        self.received = 0
        self._deferred = False

    def __enter__(self) -> "StopSignals":
        self.before: dict[int, Any] = {}
        if int(os.environ.get("WORLD_SIZE", 1)) == 1:
            self._handle()
        return self

    def _handle(self) -> None:
        if threading.current_thread() is threading.main_thread():  # Python lets no other thread handle signals
            for number in (signal.SIGINT, signal.SIGTERM):
                self.before.setdefault(number, signal.signal(number, self._note))

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """A block that asks ``received`` itself when it can stop."""
        self._handle()
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

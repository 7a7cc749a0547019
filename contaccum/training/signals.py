"""Ctrl-C and SIGTERM: the first asks the run to save and leave, the second leaves at once."""

import os
import signal
import sys
import threading
from types import FrameType, TracebackType


class StopSignals:
    """While the block runs, ``received`` turns from 0 to the signal's number instead of ending the process."""

    def __init__(self) -> None:
        self.received = 0

    def __enter__(self) -> "StopSignals":
        self.before = {}
        if threading.current_thread() is threading.main_thread():  # Python lets no other thread handle signals
            self.before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received:
            os._exit(128 + number)
        self.received = number
        print("stopping after this step: a checkpoint is being written (again to leave at once)", file=sys.stderr)

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

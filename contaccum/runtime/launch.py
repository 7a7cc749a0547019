"""Rank and number of processes, as set by torchrun or accelerate launch, and signal handling.

This module does not import torch.
"""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from contaccum.errors import InputError, Interrupted

_LAUNCH_HELP = (
    "Start the processes with torchrun or accelerate launch. With another launcher, set RANK, "
    "LOCAL_RANK, WORLD_SIZE, MASTER_ADDR (the host of rank 0) and MASTER_PORT (a free port on that "
    "host). With srun, copy the first three from SLURM_PROCID, SLURM_LOCALID and SLURM_NTASKS. "
    "With mpirun, copy them from OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_LOCAL_RANK and "
    "OMPI_COMM_WORLD_SIZE."
)


def _variable(name: str, default: int) -> int:
    """Return the environment variable ``name`` as a number, ``default`` if it is not set."""
    text = os.environ.get(name, "").strip() or str(default)
    if not text.isdecimal():
        raise InputError(f"{name} is {text[:40]!r}, expected a whole number. {_LAUNCH_HELP}")
    return int(text)


def process_place() -> tuple[int, int]:
    """Return the rank of this process and the number of processes. Without a launcher: (0, 1)."""
    world = _variable("WORLD_SIZE", 1)
    return (_variable("RANK", 0), world) if world > 1 else (0, 1)


def local_place() -> tuple[int, int]:
    """Return the rank of this process on its machine, and the number of processes there.

    Without a launcher: (0, 1).
    """
    rank, world = process_place()
    if world == 1:
        return 0, 1
    return _variable("LOCAL_RANK", rank), _variable("LOCAL_WORLD_SIZE", world)


def require_one_process(command: str) -> None:
    """Raise InputError if a launcher such as torchrun started several processes."""
    if (world := process_place()[1]) > 1:
        raise InputError(f"{command} needs one process, but {world} were started. Start only one.")


def check_launch() -> int:
    """Return the number of processes.

    Raise InputError if a variable of the launcher is missing or out of range.
    """
    rank, world = process_place()
    if world == 1:
        return world
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name):
            raise InputError(f"WORLD_SIZE is {world}, but {name} is not set. {_LAUNCH_HELP}")
    local_rank, local_world = local_place()
    port = _variable("MASTER_PORT", 0)
    if not (rank < world and local_rank < local_world <= world and 0 < port < 2**16):
        raise InputError(
            f"RANK {rank}, WORLD_SIZE {world}, LOCAL_RANK {local_rank}, LOCAL_WORLD_SIZE "
            f"{local_world} and MASTER_PORT {port} do not fit together. {_LAUNCH_HELP}"
        )
    return world


def is_main() -> bool:
    """Return whether this is process 0, which prints results and writes files."""
    return process_place()[0] == 0


def refuse_ignored_launch(precision: str) -> None:
    """Raise InputError for options of ``accelerate launch`` that contaccum would ignore.

    precision: `run.precision`.
    """
    for name, setting, allowed in (
        ("MIXED_PRECISION", "run.precision", ("no", precision)),
        ("USE_FSDP", "run.sharding", ("false",)),
        ("USE_DEEPSPEED", "run.sharding", ("false",)),
    ):
        value = os.environ.get(f"ACCELERATE_{name}", allowed[0]).lower()
        if value not in allowed:
            raise InputError(
                f"accelerate launch set ACCELERATE_{name} to {value}, which has no effect here. "
                f"Set {setting}, and remove the option from the command line or from accelerate's "
                "config file."
            )


class StopSignals:
    """Context manager that handles Ctrl-C and SIGTERM.

    Inside a ``deferred`` block, the first signal only sets ``received`` to the number of the
    signal, so that the block can finish its work. A second signal ends the process at once, but a
    second Ctrl-C in a program that is not the command line raises KeyboardInterrupt. Outside such a
    block, the effect depends on the number of processes. In a single process, the first signal
    raises Interrupted, and a second signal ends the process at once. With several processes, every
    signal has its usual effect: Ctrl-C raises KeyboardInterrupt, and SIGTERM ends the process.
    Interrupted is not used there, because a process that waits for others inside a library could
    not react to it.
    """

    def __init__(self) -> None:
        self.received = 0
        self.before: dict[int, Any] = {}
        self._deferred = False

    def __enter__(self) -> "StopSignals":
        if process_place()[1] == 1:
            self._handle()
        return self

    def _handle(self) -> None:
        # in Python, only the main thread can handle signals
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self.before.setdefault(number, signal.signal(number, self._note))

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Do not stop at the first signal: only set ``received``.

        The ``with`` block must check ``received`` and stop itself.
        """
        self._handle()
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False
            if process_place()[1] > 1:
                self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received:
            if (
                self._deferred
                and self.before.get(number) is signal.default_int_handler
                and process_place()[1] == 1
            ):
                # in a program that called ``train``, such as a notebook, which should not end
                raise KeyboardInterrupt
            # not print: the signal may have interrupted a print
            os.write(2, b"contaccum: stopped at once by a second signal\n")
            os._exit(128 + number)
        self.received = number
        if not self._deferred:
            raise Interrupted(number, f"stopped by {signal.Signals(number).name}")
        if is_main():
            unit = "pass" if process_place()[1] == 1 else "step"
            print(
                f"stopping after this {unit} or evaluation, and then saving the last finished step "
                "(send the signal again to stop at once)",
                file=sys.stderr,
            )

    def __exit__(self, *error: object) -> None:
        self._restore()

    def _restore(self) -> None:
        while self.before:
            signal.signal(*self.before.popitem())

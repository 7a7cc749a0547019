"""Lock files, so that only one run uses a folder and only one process builds a cache folder.

``filelock.SoftFileLock`` creates the lock file, also on NFS. The file contains the process number,
the host and the start time of the process that holds the lock. SoftFileLock takes over the lock of
a dead process of this machine. SoftFileLock cannot see the processes of other machines and
containers.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import SoftFileLock, Timeout

from contaccum.errors import InputError
from contaccum.runtime.files import created_folder, write_errors

LOCK_FILE = "contaccum.lock"
# seconds to wait; after 2 seconds, filelock takes over a lock file without a process number
_PATIENCE = 3.0


@contextmanager
def folder_lock(folder: str | Path) -> Iterator[None]:
    """Lock ``folder`` for this process inside the ``with`` block.

    Create the folder if it is missing.

    If the folder was missing and is empty at the end, the folder is removed. Raises InputError if
    another process holds the lock or if the folder cannot be written.
    """
    path = Path(folder) / LOCK_FILE
    lock = SoftFileLock(path)
    with created_folder(path.parent):
        _acquire(lock, path)
        try:
            yield
        finally:
            lock.release()


@contextmanager
def waiting_lock(path: Path, after: float = 10.0) -> Iterator[None]:
    """Lock the file ``path`` for this process inside the ``with`` block.

    Wait while another process holds the lock.

    After ``after`` seconds of waiting, print which process holds the lock (process number and
    host).
    """
    lock = SoftFileLock(path)
    with write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=after)
        except Timeout:
            if not _remove_empty(path):
                advice = "If that process has ended, delete this lock file."
                print(f"{path}: waiting for {_holder(path)}. {advice}", file=sys.stderr)
            lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def lock_if_free(path: Path) -> Iterator[bool]:
    """Lock the file ``path`` inside the ``with`` block, unless another process holds the lock.

    Yield whether this process holds the lock now.
    """
    lock = SoftFileLock(path)
    try:
        _acquire(lock, path)
    except InputError:
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


def _acquire(lock: SoftFileLock, path: Path) -> None:
    """Acquire the lock, or raise InputError if another process has it.

    Wait a few seconds if the file has no process number.
    """
    before = _holder(path) if path.exists() else ""
    with write_errors(path):
        try:
            try:
                # a file without a process number is not complete yet, or filelock has just removed
                # the file of a dead process
                lock.acquire(timeout=_PATIENCE, cancel_check=lambda: lock.pid is not None)
            except Timeout:
                if not _remove_empty(path):
                    raise
                lock.acquire(timeout=0)
        except Timeout as error:
            raise InputError(
                f"{path}: {_holder(path)} is using the folder of this lock file. If that process "
                "has ended, delete the lock file. Otherwise, wait until it ends, or choose "
                "another folder."
            ) from error
    if before:
        print(f"{path}: {before} has ended; this process takes over its lock", file=sys.stderr)


def _remove_empty(path: Path) -> bool:
    """Remove a lock file if it is empty. Return whether it was.

    The process was killed before it wrote its number, and filelock would wait for it forever.
    """
    with suppress(FileNotFoundError):
        before = path.stat()
        if not before.st_size:
            time.sleep(0.1)  # another process may have just created the file
            if path.stat() == before:
                path.unlink()
                return True
    return False


def _holder(path: Path) -> str:
    """Return the process number and the host that are in a lock file."""
    with suppress(OSError, ValueError):
        pid, host = path.read_text(encoding="utf-8").split()[:2]
        return f"process {int(pid)} on host {host}"
    return "an unknown process"

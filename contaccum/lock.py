"""One run at a time in a folder: a lock file that names the process holding it, and knows when that process is gone.

A lock file and not ``flock``: over NFS that works on one machine alone or not at all, and it cannot say who holds it. The file
is created exclusively (``O_EXCL``, which NFS keeps since version 3). A lock left by a killed process of this machine is taken
over; whether a process on another machine still lives cannot be known from here, so its lock is a refusal. ``flock`` has one
small part: of two processes of this machine that find the same lock left behind, one removes it at a time.
"""

import fcntl
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from contaccum.errors import InputError
from contaccum.files import make_folder, remove_empty

LOCK_FILE = "contaccum.lock"
_PATIENCE = 1.0  # seconds that a process is given between creating its lock and writing its name into it


@contextmanager
def folder_lock(folder: str | Path) -> Iterator[None]:
    """Hold ``folder`` for this process while the block runs; a folder that was not there is made, and goes again if left empty.

    Raises InputError naming the holder when another process holds it, or when it cannot be written.
    """
    folder = Path(folder)
    made = make_folder(folder)
    lock = folder / LOCK_FILE
    try:
        _acquire(lock)
        try:
            yield
        finally:
            with suppress(OSError):  # on a disk gone read-only it stays, and is taken over as stale
                lock.unlink()
    finally:
        remove_empty(made)


def _acquire(lock: Path) -> None:
    with _one_at_a_time(lock.parent):
        if lock.exists():
            _clear_stale(lock)
        try:
            descriptor = os.open(lock, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError as error:  # from another machine, just now
            raise InputError(
                f"{lock}: made by another run at this moment, expected no other run in this folder"
            ) from error
        except OSError as error:
            raise InputError(f"{lock}: could not be written ({error.strerror})") from error
        try:
            os.write(descriptor, json.dumps(_myself()).encode())
        except OSError as error:
            lock.unlink(missing_ok=True)
            raise InputError(f"{lock}: could not be written ({error.strerror})") from error
        finally:
            os.close(descriptor)


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Let the processes of this machine into the block one after the other; its end, or the process's, lets the next one in."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(
            OSError
        ):  # a file system without flock: two that start within a millisecond may not see each other
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _clear_stale(lock: Path) -> None:
    """Remove the lock of a process that is gone, with a note; InputError when it may still be at work."""
    holder = _read(lock)
    if holder is None:  # just created on another machine, or its process died before it could write its name
        time.sleep(_PATIENCE)
        holder = _read(lock)
    if holder is not None:
        _refuse_living(lock, holder)
    lock.unlink(missing_ok=True)
    who = f"process {holder['pid']}" if holder else "a process that died at once"
    print(f"{lock}: left by {who}, which is gone; taken over", file=sys.stderr)


def _refuse_living(lock: Path, holder: dict[str, Any]) -> None:
    me = _myself()
    if holder["host"] != me["host"]:
        raise InputError(
            f"{lock}: held by process {holder['pid']} on host {holder['host']}, expected no other run in this folder; "
            "whether it lives cannot be seen from here: if it is gone, delete this file"
        )
    if holder["boot"] == me["boot"] and holder["started"] == _started(holder["pid"]):
        raise InputError(
            f"{lock}: held by process {holder['pid']} on this host, expected no other run in this folder; "
            "wait for it to end, or give another folder"
        )


def _read(lock: Path) -> dict[str, Any] | None:
    """Who holds it; None while its name is not there."""
    try:
        found = json.loads(lock.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    except OSError as error:
        raise InputError(f"{lock}: could not be read ({error.strerror})") from error
    return found if isinstance(found, dict) and found.keys() == _myself().keys() else None


def _myself() -> dict[str, Any]:
    return {"host": _host(), "pid": os.getpid(), "started": _started(os.getpid()), "boot": _boot()}


def _host() -> str:
    """Name of this machine; containers, whose process numbers are their own, count as machines."""
    namespace = Path("/proc/self/ns/pid")
    return platform.node() + (f" ({os.readlink(namespace)})" if namespace.is_symlink() else "")


def _boot() -> str:
    """What changes when the machine is started anew; empty where it cannot be known."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else ""


def _started(pid: int) -> str:
    """When a process was started, since its number is given again after its end; empty where there is no such process."""
    status = Path(f"/proc/{pid}/stat")
    if Path("/proc/self").exists():
        with suppress(OSError):
            fields = status.read_text().rpartition(")")[2].split()  # behind the name, which may hold anything
            return "" if fields[0] == "Z" else fields[19]  # a zombie is gone; ticks since the machine started
        return ""
    found = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return found.stdout.strip()

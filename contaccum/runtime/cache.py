"""Folders of the cache that are built once and then read by every later process."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from contaccum.runtime.files import cache_folder, whole_folder
from contaccum.runtime.locks import waiting_lock


def cached_folder(kind: str, key: object, build: Callable[[Path], None]) -> Path:
    """Return the cache folder for ``key``. If it does not exist, call ``build(folder)`` to fill it.

    kind: subfolder of the cache in which the folder is created. key: any JSON value. Whoever reads
    the folder puts the version of its format into the key, so that another version is built again.
    """
    name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]
    folder = cache_folder() / kind / name
    if not folder.is_dir():
        with waiting_lock(cache_folder() / "locks" / f"{name}.lock"):
            if not folder.is_dir():  # another process may have built the folder during the wait
                with whole_folder(folder) as part:
                    build(part)
    return folder


def file_key(path: Path) -> list[Any]:
    """Return path, size and times (ns) of a file: a key that changes with the file."""
    status = path.stat()
    # programs such as rsync and tar set the modification time, but nobody can set the change time
    return [str(path.resolve()), status.st_size, status.st_mtime_ns, status.st_ctime_ns]

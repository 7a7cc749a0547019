"""Folders of the cache that are built once and then read by every later process."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from contaccum.errors import InputError
from contaccum.runtime.files import cache_folder, read_json, whole_folder, write_json
from contaccum.runtime.locks import waiting_lock

SIZES = ".sizes.json"  # path of each file of a folder -> number of bytes


def cached_folder(kind: str, key: object, build: Callable[[Path], None]) -> Path:
    """Return the cache folder for ``key``. If it does not exist, call ``build(folder)`` to fill it.

    A folder in which a file is missing or has another size is built again: some systems delete the
    files of a cache by their age.

    kind: subfolder of the cache in which the folder is created. key: any JSON value. Whoever reads
    the folder puts the version of its format into the key, so that another version is built again.
    """
    name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]
    folder = cache_folder() / kind / name
    if not _is_whole(folder):
        with waiting_lock(cache_folder() / "locks" / f"{name}.lock"):
            if not _is_whole(folder):  # another process may have built the folder during the wait
                with whole_folder(folder) as part:
                    build(part)
                    files = [path for path in part.rglob("*") if path.is_file()]
                    sizes = {str(path.relative_to(part)): path.stat().st_size for path in files}
                    write_json(part / SIZES, sizes)
    return folder


def _is_whole(folder: Path) -> bool:
    try:
        sizes = read_json(folder / SIZES, dict[str, int])
    except InputError:  # missing or damaged
        return False
    files = {name: folder / name for name in sizes}
    return all(
        path.is_file() and path.stat().st_size == sizes[name] for name, path in files.items()
    )


def file_key(path: Path) -> list[Any]:
    """Return path, size and times (ns) of a file: a key that changes with the file."""
    status = path.stat()
    # programs such as rsync and tar set the modification time, but nobody can set the change time
    return [str(path.resolve()), status.st_size, status.st_mtime_ns, status.st_ctime_ns]

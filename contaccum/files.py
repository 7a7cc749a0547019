"""Files and folders that appear whole or not at all, and the hashes that tell whether they are still whole."""

import hashlib
import json
import os
import platform
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from safetensors import SafetensorError

from contaccum.errors import InputError

_LEFTOVER = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{8}-\d+\.(?P<kind>part|old|gone)", re.DOTALL)
_LONGEST = 200  # bytes of a name that a leftover's name may repeat; file systems end at 255


def _beside(path: Path, kind: str) -> Path:
    """Hidden name beside ``path`` that no other process on any machine uses."""
    name = path.name
    if len(os.fsencode(name)) > _LONGEST:
        name = hashlib.sha256(os.fsencode(name)).hexdigest()
    host = hashlib.sha256(platform.node().encode()).hexdigest()[:8]
    return path.with_name(f".{name}.{host}-{os.getpid()}.{kind}")


def is_leftover(name: str) -> bool:
    """Whether a file or folder of this name is one that a killed process did not finish or did not remove."""
    return _LEFTOVER.fullmatch(name) is not None


def sweep(folder: str | Path, name: str | None = None) -> None:
    """Remove what killed processes left in a folder that is now this process's alone; with ``name`` what they left of it.

    Where a folder was killed between moving the old one away and the new one in, the old one is put back.
    """
    for path in sorted(Path(folder).iterdir()):
        found = _LEFTOVER.fullmatch(path.name)
        if found is None or name not in (None, found["name"]):
            continue
        target = path.with_name(found["name"])
        if found["kind"] == "old" and not target.exists():
            os.replace(path, target)
        elif path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def remove_folder(path: Path) -> None:
    """Delete a folder, which is gone as a whole before its files go one by one."""
    gone = _beside(path, "gone")
    os.replace(path, gone)
    shutil.rmtree(gone)


def make_folder(path: Path) -> list[Path]:
    """Make a folder and those above it, flushed; returns the new ones, outermost first. InputError where it cannot be."""
    missing: list[Path] = []
    try:
        missing = [each for each in (path, *path.parents) if not each.exists()][::-1]
        for each in missing:
            each.mkdir(exist_ok=True)
            if not _inside_a_whole_folder(each):
                _sync_folder(each.parent)
        if not path.is_dir():
            raise NotADirectoryError(None, "is a file, expected a folder")
    except OSError as error:
        remove_empty(missing)
        raise InputError(f"{path}: could not be made ({error.strerror or error})") from error
    return missing


def remove_empty(folders: list[Path]) -> None:
    """Remove folders that ``make_folder`` made, where nothing came to stand in them."""
    for each in reversed(folders):
        with suppress(OSError):  # not empty, or never made
            each.rmdir()


def _sync_folder(folder: Path) -> None:
    """Flush a folder's entries, so that a rename survives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_filling: list[Path] = []
"""Folders that ``whole_folder`` has given out and not yet renamed: it flushes what is in them, once, at its end."""


def _inside_a_whole_folder(path: Path) -> bool:
    return any(part in path.parents for part in _filling)


def _sync_all(folder: Path) -> None:
    """Flush a folder and all that it holds, the files before the folders that name them."""
    for child in sorted(folder.rglob("*"), key=lambda child: child.is_dir()):
        if child.is_dir():
            _sync_folder(child)
        else:
            with open(child, "rb") as file:
                os.fsync(file.fileno())
    _sync_folder(folder)


@contextmanager
def whole_file(path: str | Path) -> Iterator[BinaryIO]:
    """Open a binary file beside ``path``; when the block ends well it is flushed and renamed to ``path``, else removed.

    Raises InputError when the disk is full or the folder cannot be written.
    """
    path = Path(path)
    part, made = _beside(path, "part"), make_folder(path.parent)
    try:
        with open(part, "wb") as file:
            yield file
            file.flush()
            if not _inside_a_whole_folder(path):
                os.fsync(file.fileno())
        os.replace(part, path)
        if not _inside_a_whole_folder(path):
            _sync_folder(path.parent)
    except OSError as error:
        if _inside_a_whole_folder(path):
            raise  # the folder's own sentence names a path that the user knows
        raise InputError(f"{path}: could not be written ({error.strerror or error})") from error
    finally:
        with suppress(NotADirectoryError):  # the folder's own path is a file
            part.unlink(missing_ok=True)
        remove_empty(made)


def write_text(path: str | Path, text: str) -> None:
    """Write UTF-8 text; the file appears whole or not at all."""
    with whole_file(path) as file:
        file.write(text.encode("utf-8"))


def write_json(path: str | Path, value: Any) -> None:
    """Write ``value`` as indented JSON; the file appears whole or not at all."""
    write_text(path, json.dumps(value, ensure_ascii=False, indent=2) + "\n")


def read_json(path: str | Path) -> Any:
    """Read a JSON file, or raise InputError naming it and the line where it stops being JSON."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: could not be read ({error.strerror or error})") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: byte {error.start} is not UTF-8, expected a UTF-8 JSON file") from error
    except json.JSONDecodeError as error:
        raise InputError(f"{path}, line {error.lineno}: {error.msg}, expected JSON") from error
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, brackets without end
        raise InputError(f"{path}: not usable JSON ({error}), expected JSON") from error


@contextmanager
def whole_folder(path: str | Path) -> Iterator[Path]:
    """Give a folder beside ``path`` to fill; when the block ends well it is flushed and renamed to ``path``, else removed.

    An older folder at ``path`` is replaced, and is deleted only after the new one stands in its place.
    """
    path = Path(path)
    part, old, made = _beside(path, "part"), _beside(path, "old"), make_folder(path.parent)
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        _filling.append(part)
        yield part
        _filling.remove(part)
        if not _inside_a_whole_folder(path):
            _sync_all(part)
        if path.exists():
            os.replace(path, old)
        try:
            os.replace(part, path)
        except OSError:
            if old.exists():
                os.replace(old, path)
            raise
        if not _inside_a_whole_folder(path):
            _sync_folder(path.parent)
    except (OSError, SafetensorError) as error:  # safetensors wraps a full disk in an error of its own
        if _inside_a_whole_folder(path):
            raise
        raise InputError(f"{path}: could not be written ({getattr(error, 'strerror', None) or error})") from error
    finally:
        with suppress(ValueError):
            _filling.remove(part)
        shutil.rmtree(part, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
        remove_empty(made)


def sha256_of(path: str | Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _digest(file)


def _digest(file: BinaryIO) -> str:
    # Python 3.10 has no hashlib.file_digest
    digest = hashlib.sha256()
    while chunk := file.read(1 << 20):
        digest.update(chunk)
    return digest.hexdigest()


def cache_folder() -> Path:
    """Where prepared tables and tokens are kept: $CONTACCUM_CACHE, else $XDG_CACHE_HOME/contaccum, else ~/.cache/contaccum."""
    if own := os.environ.get("CONTACCUM_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "contaccum"

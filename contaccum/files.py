"""Files and folders that appear whole or not at all, and the hashes that tell whether they are still whole."""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from safetensors import SafetensorError

from contaccum.errors import InputError


def _sync_folder(folder: Path) -> None:
    """Flush a folder's entries, so that a rename survives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _beside(path: Path, ending: str) -> Path:
    """This process's own hidden sibling of a path; its name is cut, because a file's name has at most 255 bytes."""
    name = os.fsencode(path.name)[:200].decode("utf-8", errors="ignore")
    return path.with_name(f".{name}.{os.getpid()}.{ending}")


@contextmanager
def whole_file(path: str | Path) -> Iterator[BinaryIO]:
    """Open a binary file beside ``path``; when the block ends well it is flushed and renamed to ``path``, else removed.

    Raises InputError when the disk is full or the folder cannot be written.
    """
    path = Path(path)
    part = _beside(path, "part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(part, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
        _sync_folder(path.parent)
    except OSError as error:
        raise InputError(f"{path}: could not be written ({error.strerror or error})") from error
    finally:
        with suppress(NotADirectoryError):  # the folder's own path is a file
            part.unlink(missing_ok=True)


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
    part, old = _beside(path, "part"), _beside(path, "old")
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        yield part
        for child in part.rglob("*"):
            if child.is_file():
                with open(child, "rb") as file:
                    os.fsync(file.fileno())
            else:
                _sync_folder(child)
        _sync_folder(part)
        if path.exists():
            os.replace(path, old)
        try:
            os.replace(part, path)
        except OSError:
            if old.exists():
                os.replace(old, path)
            raise
        _sync_folder(path.parent)
    except (OSError, SafetensorError) as error:  # safetensors wraps a full disk in an error of its own
        raise InputError(f"{path}: could not be written ({getattr(error, 'strerror', None) or error})") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


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

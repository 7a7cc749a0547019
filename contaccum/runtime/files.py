"""Functions that write files and folders atomically, read JSON files, and compute hashes."""

import errno
import hashlib
import json
import os
import platform
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import psutil
from safetensors import SafetensorError

from contaccum.errors import InputError, library_errors
from contaccum.runtime.checks import require_utf8

_LEFTOVER = re.compile(
    r"\.(?P<name>.+)\.(?P<host>[0-9a-f]{8})-(?P<pid>\d+)\.(?P<kind>part|old|gone)", re.DOTALL
)
# hub:/folder is a local data set in the format of the Hub
_URL = re.compile(r"(?!hub:)([A-Za-z][A-Za-z0-9+.-]+):/+(.*)", re.DOTALL)


def _temporary_path(path: Path, kind: str) -> Path:
    """Return a hidden path in the folder of ``path``.

    No other process, on this or another machine, uses the hidden path.
    """
    return require_name(path).with_name(f".{path.name}.{_host()}-{os.getpid()}.{kind}")


def require_name(path: Path) -> Path:
    """Return ``path``.

    Raise InputError if its last part is not a name, as in ``.``, ``..`` and ``/``.
    """
    if path.name in ("", ".."):
        raise InputError(f"{path}: this folder cannot be replaced; choose a new path")
    return path


def _host() -> str:
    return hashlib.sha256(platform.node().encode()).hexdigest()[:8]


def is_leftover(name: str) -> bool:
    """Return whether ``name`` has the form of a temporary file or folder of contaccum.

    A running process may still use it.
    """
    return _LEFTOVER.fullmatch(name) is not None


def sweep(folder: str | Path, name: str | None = None, shared: bool = False) -> None:
    """Remove the temporary files and folders that killed processes left in ``folder``.

    To replace a folder, a process first moves the old folder away. If it was killed before the new
    folder was in place, the old folder is moved back. name: remove only what belongs to the file or
    folder ``name``. shared: other processes may be writing in ``folder``, so remove only the files
    of dead processes of this machine.
    """
    if not os.path.isdir(folder):
        return
    for entry in sorted(os.listdir(folder)):
        leftover = _LEFTOVER.fullmatch(entry)
        if leftover is None or (name is not None and name != leftover["name"]):
            continue
        if shared and (leftover["host"] != _host() or psutil.pid_exists(int(leftover["pid"]))):
            continue
        path = Path(folder, entry)
        target = path.with_name(leftover["name"])
        if leftover["kind"] == "old" and not target.exists():
            os.replace(path, target)
        elif path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def remove_folder(path: Path) -> None:
    """Delete a folder, or a link to a folder.

    First rename it, so that no half-deleted folder has the name ``path``.
    """
    gone = _temporary_path(path, "gone")
    os.replace(path, gone)
    if gone.is_symlink():
        gone.unlink()
    else:
        shutil.rmtree(gone)


def refuse_url(path: str | Path) -> None:
    """Raise InputError if ``path`` has a URL scheme, such as s3://bucket/folder."""
    address = _URL.match(os.fspath(path))  # Path writes s3://bucket as s3:/bucket
    if address:
        scheme, rest = address.groups()
        raise InputError(
            f"{scheme}://{rest}: an address with the scheme {scheme} is not a local path. Mount "
            "the storage as a folder, for example with rclone mount, and use the folder."
        )


@contextmanager
def created_folder(path: Path) -> Iterator[None]:
    """Create a folder and its missing parents.

    At the end of the ``with`` block, remove the created folders that are empty.
    """
    refuse_url(path)
    missing: list[Path] = []
    try:
        try:
            missing = [folder for folder in (path, *path.parents) if not folder.exists()]
            for folder in reversed(missing):
                folder.mkdir(exist_ok=True)
                _sync(folder.parent)
            if not path.is_dir():
                raise NotADirectoryError(None, "this is a file, not a folder")
        except OSError as error:
            raise InputError(f"{path}: cannot be created ({error.strerror or error})") from error
        yield
    finally:
        for folder in missing:
            with suppress(OSError):  # the folder is not empty or was not created
                folder.rmdir()


@contextmanager
def write_errors(path: str | Path) -> Iterator[None]:
    """Raise InputError if ``path`` cannot be written inside the ``with`` block.

    If ``path`` is in the temporary folder of ``whole_folder``, this function passes the original
    error on. ``whole_folder`` then raises an InputError that names the final folder.
    """
    try:
        yield
    # if the disk is full, safetensors raises SafetensorError
    except (OSError, SafetensorError) as error:
        if _is_unfinished(Path(path)):
            raise
        raise InputError(
            f"{path}: cannot be written ({getattr(error, 'strerror', None) or error})"
        ) from error


def _sync(path: Path) -> None:
    """Flush the content of a file, or the directory entries of a folder, to disk.

    Flushed data survives a power cut.

    Nothing is flushed inside the temporary folder of ``whole_folder``, because ``whole_folder``
    flushes all files at its end. File systems that cannot flush, such as mounts of object stores,
    cause no error.
    """
    if _is_unfinished(path):
        return
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in _NO_FLUSH:
            raise


_NO_FLUSH = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EBADF, errno.EISDIR}
_filling: list[Path] = []  # folders that whole_folder has yielded and not finished


def _is_unfinished(path: Path) -> bool:
    return any(folder in (path, *path.parents) for folder in _filling)


def _linked(path: str | Path) -> Path:
    """Return the target of a symbolic link. Return any other path unchanged."""
    return Path(os.path.realpath(path) if os.path.islink(path) else path)


@contextmanager
def whole_file(path: str | Path) -> Iterator[BinaryIO]:
    """Yield a temporary binary file.

    At the end of the ``with`` block, flush it to disk and rename it to ``path``.

    If the block raises an error, the temporary file is removed. If ``path`` is a symbolic link, the
    target of the link is replaced. Raises InputError if the disk is full, the folder cannot be
    written, or ``path`` is a device such as /dev/null.
    """
    path = _linked(path)
    part = _temporary_path(path, "part")
    with created_folder(path.parent), write_errors(path), ExitStack() as cleanup:
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise OSError(None, "this is a device or a pipe, not a file")
        with suppress(OSError):  # a leftover of another user cannot be removed
            sweep(path.parent, path.name, shared=True)
        cleanup.callback(part.unlink, missing_ok=True)
        part.unlink(missing_ok=True)
        # x: in a shared folder, somebody could make this name a link to one of our files
        with open(part, "xb") as file:
            yield file
        _sync(part)
        os.replace(part, path)
        _sync(path.parent)


def write_text(path: str | Path, text: str) -> None:
    """Write ``text`` to a file in UTF-8.

    After an error or a crash, the file has the old or the new content, never a part.
    """
    with whole_file(path) as file:
        file.write(text.encode("utf-8"))


def write_json(path: str | Path, value: Any) -> None:
    """Write ``value`` as indented JSON, atomically.

    Paths become texts; bytes in them that are not UTF-8 are escaped.
    """
    with whole_file(path) as file:
        text = json.dumps(value, ensure_ascii=False, indent=2, default=os.fspath)
        file.write(text.encode("utf-8", "backslashreplace") + b"\n")


def read_json(path: str | Path, type_: Any = Any, *, version: int | None = None) -> Any:
    """Read a JSON file and check the types of its values.

    type_: any type that msgspec knows, such as a dataclass or ``dict[str, float]``. Unknown keys of
    a dataclass are dropped. version: the only ``format_version`` that is accepted, if the file
    contains one. If the content is wrong, raises an InputError that names the file, and the line or
    the field.
    """
    text = read_text(path, "a JSON file")
    return decode_json(text, type_, str(path), version=version)


def read_text(path: str | Path, what: str) -> str:
    """Read a UTF-8 file. what: name for error messages, such as "a JSON file"."""
    refuse_url(path)
    if Path(path).is_fifo():  # without a writer, opening it would block
        raise InputError(f"{path}: not a regular file; expected {what}")
    try:
        return Path(path).read_text(encoding="utf-8-sig")  # drops a byte order mark
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}: byte {error.start} is not UTF-8; expected {what} in UTF-8"
        ) from error
    except (OSError, ValueError) as error:
        raise InputError(
            f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})"
        ) from error


def decode_json(text: str, type_: Any, where: str, *, version: int | None = None) -> Any:
    """Decode JSON text and check the types of its values.

    type_, version: see ``read_json``. where: source of the text.
    """
    try:
        value = json.loads(text)
        if version is not None and isinstance(value, dict):
            found = value.get("format_version", version)
            if found != version:
                raise InputError(
                    f"{where}: has format_version {found!r}, but this version of contaccum reads "
                    f"{version}. Use the version of contaccum that wrote the file."
                )
        return check_type(value, type_, where)
    except InputError:
        raise
    except json.JSONDecodeError as error:
        raise InputError(f"{where}, line {error.lineno}: not JSON ({error.msg})") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not usable JSON ({error})") from error


def check_type(value: Any, type_: Any, where: str) -> Any:
    """Convert ``value`` to ``type_``, a type that msgspec knows, or raise InputError.

    where: beginning of the message.
    """
    import msgspec  # this import takes 25 ms; only commands that read JSON need it

    try:
        return value if type_ is Any else msgspec.convert(value, type_)
    except msgspec.ValidationError as error:
        raise InputError(f"{where}: {error}") from error


def refuse_other_files(folder: Path, what: str, *markers: str) -> None:
    """Raise InputError if ``folder`` has files, but not all files in ``markers``.

    ``whole_folder`` would delete these files. what: what a folder with ``markers`` contains, such
    as "an index".
    """
    if not folder.is_dir() or all((folder / marker).is_file() for marker in markers):
        return
    if any(path.name != ".DS_Store" for path in folder.iterdir()):
        raise InputError(
            f"{folder}: contains files that do not belong to {what}; choose an empty folder or "
            f"the folder of {what}"
        )


@contextmanager
def whole_folder(path: str | Path) -> Iterator[Path]:
    """Yield a temporary folder.

    At the end of the ``with`` block, flush it to disk and rename it to ``path``.

    If the block raises an error, the temporary folder is removed. An older folder at ``path`` is
    deleted only after the new folder has replaced it. If ``path`` is a symbolic link, the target of
    the link is replaced. Raises InputError if ``path`` is a file.
    """
    path = _linked(path)
    part = _temporary_path(path, "part")
    old = _temporary_path(path, "old")
    with created_folder(path.parent), write_errors(path), ExitStack() as cleanup:
        with suppress(OSError):  # a leftover of another user cannot be removed
            sweep(path.parent, path.name, shared=True)
        cleanup.callback(shutil.rmtree, old, ignore_errors=True)
        cleanup.callback(shutil.rmtree, part, ignore_errors=True)
        if path.is_file():
            raise NotADirectoryError(None, "this is a file, not a folder")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        _filling.append(part)
        try:
            yield part
        finally:
            _filling.remove(part)
        # follows the umask; safetensors writes files that only the owner can read
        mode = part.stat().st_mode & 0o666
        for written in (*sorted(part.rglob("*"), key=Path.is_dir), part):  # files before folders
            if written.is_file():
                with suppress(OSError):  # some mounts have no file modes
                    written.chmod(mode)
            _sync(written)
        try:
            if path.exists():
                os.replace(path, old)
            os.replace(part, path)
        except BaseException:  # also Ctrl-C between the two
            if old.exists() and not path.exists():
                os.replace(old, path)
            raise
        _sync(path.parent)


def sha256_of(path: str | Path) -> str:
    """Return the SHA-256 of a file as hexadecimal digits."""
    digest = hashlib.sha256()  # Python 3.10 has no hashlib.file_digest
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def cache_folder() -> Path:
    """Return the cache: $CONTACCUM_CACHE, $XDG_CACHE_HOME/contaccum or ~/.cache/contaccum."""
    with library_errors(
        "there is no home folder for the cache",
        RuntimeError,
        fix="; set CONTACCUM_CACHE to a folder",
    ):
        path = Path(
            os.environ.get("CONTACCUM_CACHE")
            or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "contaccum"
        )
    # Arrow opens only files with UTF-8 names
    require_utf8(str(path), f"CONTACCUM_CACHE, {str(path)!a}")
    return path

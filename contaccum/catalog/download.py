"""Download BEIR data sets and DPR files into the cache, check the files, and unpack archives safely.

A download is first written to a temporary file, the part file. If the connection breaks, the next call can continue the
part file. It does so only for files that can be checked when they are complete: archives with a known MD5, and gzip files.
Every other file is downloaded again from the start.
"""

import gzip
import hashlib
import os
import stat
import time
import zipfile
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path, PurePosixPath
from typing import BinaryIO

import requests
from tqdm.auto import tqdm
from urllib3.exceptions import HTTPError

from contaccum.catalog import table
from contaccum.errors import InputError
from contaccum.runtime.files import cache_folder, sweep, whole_folder
from contaccum.runtime.locks import waiting_lock

BASE_URL = "https://public.ukp.informatik.tu-darmstadt.de/thakur/BEIR/datasets"
DPR_URL = "https://dl.fbaipublicfiles.com/dpr"
MD5 = {name: md5 or None for name, _, md5 in table("archives.tsv") if not name.startswith("dpr/")}
"""Name of a BEIR data set -> MD5 checksum of the archive, or None if BEIR publishes no checksum."""
DPR = {name.removeprefix("dpr/"): path for name, path, _ in table("archives.tsv") if name.startswith("dpr/")}
"""Name of a DPR file -> path below ``DPR_URL``. The files have Wikipedia passages, training data or questions."""
LICENSED = ("bioasq", "signal1m", "trec-news", "robust04")  # BEIR is not allowed to distribute these data sets
FORUMS = (
    *("android", "english", "gaming", "gis", "mathematica", "physics"),
    *("programmers", "stats", "tex", "unix", "webmasters", "wordpress"),
)

CHUNK = 1 << 20  # bytes per read
_WRONG_RANGE = (206, 416)  # HTTP status codes: the server sent another part of the file; the file has no such part
_TIMEOUT = 30  # maximum number of seconds without data
_MIN_RATE = 1024  # minimum number of bytes per second, averaged over _TIMEOUT seconds
MAX_DOWNLOAD = 16 << 30  # 16 GiB; the largest archive, cqadupstack, has 5 GiB
MAX_UNPACKED = 64 << 30  # 64 GiB
_MAX_ENTRIES = 1000
MAX_RATIO = 100  # maximum number of unpacked bytes for each packed byte; text has 3 to 10


def beir_folder(
    name: str | Path, cache: str | Path | None = None, *, base_url: str = BASE_URL, md5: str | None = None
) -> Path:
    """Return the folder of a BEIR data set; download the data set into ``cache`` if necessary.

    name: such as ``scifact`` or ``cqadupstack/android`` (``cqadupstack`` has twelve data sets). md5: expected MD5 checksum of
    the archive; None: the checksum that BEIR publishes, if there is one.

    Raises InputError if the name is unknown, if the licence forbids the download, if the download fails, if the checksum is
    wrong, or if the archive is too large or unsafe to unpack.
    """
    name, _, forum = str(name).partition("/")
    folder = Path(cache or cache_folder() / "beir") / _checked_name(name, forum)
    if folder.is_dir():
        return folder / forum
    archive, checksum = folder.with_name(f"{folder.name}.zip"), md5 or MD5[name]
    with alone(folder.parent, "beir"):
        if folder.is_dir():  # another process downloaded the data set while this process waited
            return folder / forum
        sweep(folder.parent)
        try:
            test = partial(_refuse_wrong_md5, checksum) if checksum else None
            transfer(f"{base_url}/{name}.zip", archive, test, folder)
            unpack(archive, folder.name, folder)
        finally:
            archive.unlink(missing_ok=True)
    return folder / forum


def dpr_file(name: str, cache: str | Path | None = None, *, base_url: str = DPR_URL) -> Path:
    """Return the path of a DPR file; download the file into ``cache`` if necessary.

    name: name of the file without ``dpr/``, such as ``nq-train``. Raises InputError if the name is unknown, the download fails,
    or the gzip file is damaged.
    """
    if name not in DPR:
        raise InputError(f"dpr/{name}: no DPR file has this name; expected dpr/ and one of {', '.join(DPR)}")
    file = Path(cache or cache_folder() / "dpr") / Path(DPR[name]).name
    if file.is_file():
        return file
    with alone(file.parent, "dpr"):
        if not file.is_file():  # another process may have downloaded the file while this process waited
            test = _refuse_broken_gzip if file.suffix == ".gz" else None
            transfer(f"{base_url}/{DPR[name]}", file, test, file)
    return file


def _refuse_broken_gzip(url: str, part: Path) -> None:
    try:
        with gzip.open(part) as file:
            while file.read(CHUNK):
                pass
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{url}: the gzip stream is damaged or truncated ({error})") from error


def _refuse_wrong_md5(md5: str, url: str, part: Path) -> None:
    digest = hashlib.md5(usedforsecurity=False)  # BEIR publishes no other checksum
    with open(part, "rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    if (found := digest.hexdigest()) != md5:
        raise InputError(f"{url}: the archive has MD5 {found}; expected {md5}. Try the download again.")


def _checked_name(name: str, forum: str) -> str:
    """Return ``name`` if the data set exists and may be downloaded, else raise InputError. forum: part of cqadupstack."""
    if name in LICENSED:
        raise InputError(
            f"{name}: its licence forbids the download. Build the data set as BEIR explains, and give the path of its folder."
        )
    if name not in MD5:
        raise InputError(
            f"{name}: no folder or data set has this name; expected a path, one of {', '.join(sorted(MD5))}, or a name that "
            "starts with nanobeir/, mteb/, miracl/, dpr/ or hub: (see contaccum data fetch --help)"
        )
    if name == "cqadupstack" and forum not in FORUMS:
        given = f"{name}/{forum}".rstrip("/")
        raise InputError(f"{given}: not a data set; expected cqadupstack/ and one of {', '.join(FORUMS)}")
    if name != "cqadupstack" and forum:
        raise InputError(f"{name}/{forum}: not a data set; {name} has no parts. Use {name!r}.")
    return name


def unpack(archive: Path, name: str, target: Path, limit: int = MAX_UNPACKED) -> None:
    """Unpack the folder ``name`` of a zip archive to ``target``. If an error occurs, ``target`` is not created.

    limit: maximum bytes of the unpacked files. A second limit is 1 MiB + 100 times the size of the archive. Raises InputError if
    the archive is damaged, is encrypted, exceeds a limit or lacks the folder ``name``, or if an entry of the archive is a link or
    has a path that leaves the folder.
    """
    limit = min(limit, MAX_RATIO * archive.stat().st_size + (1 << 20))
    try:
        with zipfile.ZipFile(archive) as bundle, whole_folder(target) as part:
            if (number := len(bundle.infolist())) > _MAX_ENTRIES:
                raise InputError(f"{archive}: has {number} entries; at most {_MAX_ENTRIES} are allowed")
            entries = [(_safe_path(entry, archive), entry) for entry in bundle.infolist()]
            own = [
                (path, entry)
                for path, entry in entries
                if path.parts[1:] and path.parts[0] == name and not entry.is_dir()
            ]
            if not own:
                raise InputError(
                    f"{archive}: has no folder {name!r}; a BEIR archive must contain a folder with the name of the data set"
                )
            # zipfile stops with an error at an entry that unpacks to more than its file_size
            if sum(entry.file_size for _, entry in own) > limit:
                raise InputError(
                    f"{archive}: unpacks to more than {limit} bytes; the archive may be damaged or wrong. Try the download again."
                )
            for path, entry in own:
                entry.filename = str(PurePosixPath(*path.parts[1:]))
                bundle.extract(entry, part)
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, EOFError, UnicodeDecodeError) as error:
        raise InputError(f"{archive}: not a readable zip archive ({error})") from error


def _safe_path(entry: zipfile.ZipInfo, archive: Path) -> PurePosixPath:
    """Return the relative path of an entry. Raise InputError for a path outside the folder, a link or an encrypted entry."""
    path = PurePosixPath(entry.filename)
    kind = stat.S_IFMT(entry.external_attr >> 16)
    if path.is_absolute() or ".." in path.parts or "\\" in entry.filename or ":" in entry.filename:
        raise InputError(f"{archive}: entry {entry.filename!r} has a path outside the folder; do not use this archive")
    if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
        raise InputError(f"{archive}: entry {entry.filename!r} is a link or device; only files and folders are allowed")
    if entry.flag_bits & 1 or entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise InputError(f"{archive}: entry {entry.filename!r} is encrypted or has an unknown compression")
    return path


def alone(folder: Path, kind: str) -> AbstractContextManager[None]:
    """Return a context in which only this process downloads into ``folder``; other processes wait until the context ends."""
    digest = hashlib.sha256(os.fsencode(folder.absolute())).hexdigest()[:32]
    return waiting_lock(cache_folder() / "locks" / f"{kind}-{digest}.lock")


def transfer(url: str, archive: Path, test: Callable[[str, Path], None] | None, target: Path) -> None:
    """Download ``url`` to a part file, check the part file with ``test``, and rename the part file to ``archive``.

    test: function of URL and part file that raises InputError if the file is wrong. None: the file is not checked, and a broken
    download is not resumed. target: path where the error message tells users to put a copy of the data.
    """
    part = archive.with_name(f".{archive.name}.part")
    keep = test is not None
    try:
        part.parent.mkdir(parents=True, exist_ok=True)
        with open(part, "ab" if test else "wb") as file:
            _fetch(url, file, target)
        if test:
            test(url, part)
        os.replace(part, archive)
    except InputError as error:
        keep = keep and isinstance(error, _DownloadFailed)
        raise
    except OSError as error:
        raise InputError(f"{archive}: cannot be written ({error.strerror or error})") from error
    finally:
        with suppress(FileNotFoundError, NotADirectoryError):
            if not keep or not part.stat().st_size:
                part.unlink()


class _DownloadFailed(InputError):
    """The download failed or broke off. The part file is kept if the next call can continue the download."""


def _fetch(url: str, file: BinaryIO, folder: Path) -> None:
    """Download the rest of an unfinished file, or the complete file if the server cannot send only the rest."""
    start = file.tell()
    headers = {"Range": f"bytes={start}-", "Accept-Encoding": "identity"} if start else {}
    try:
        with requests.get(url, stream=True, timeout=_TIMEOUT, headers=headers) as response:
            range_given = response.headers.get("Content-Range", "")
            if start and range_given == f"bytes */{start}":
                return  # the part file is complete: an earlier process was stopped before it checked the file
            continues = range_given.startswith(f"bytes {start}-")
            usable = continues or not start or response.status_code not in _WRONG_RANGE
            if usable:
                response.raise_for_status()  # an error keeps the part file, so that the next call can continue it
            if not continues:
                file.truncate(0)
                file.seek(0)
            if usable:
                _copy(response, url, file, folder.name)
                return
        _fetch(url, file, folder)  # the part file was of another file and is now empty: start again
    except InputError:
        raise
    except (requests.RequestException, HTTPError, ValueError, TimeoutError) as error:  # ValueError: a broken redirect
        answer, reason = getattr(error, "response", None), type(error).__name__
        if answer is not None:
            reason = f"HTTP status {answer.status_code}"
        elif isinstance(error, TimeoutError):
            reason = f"the server is too slow: {error}"
        what = "the file" if folder.suffix else "the data set's folder (corpus.jsonl, queries.jsonl, qrels/)"
        raise _DownloadFailed(
            f"{folder.name}: not found in {folder.parent}, and {url} cannot be downloaded ({reason}). Put {what} at {folder}, or "
            "give the path of a local copy."
        ) from error


def _copy(response: requests.Response, url: str, file: BinaryIO, name: str) -> None:
    """Write the data of a response to a file. Raise TimeoutError if the server sends less than 1 KiB per second."""
    length = response.headers.get("Content-Length", "")
    total = int(length) if length.isascii() and length.isdigit() and len(length) < 16 else None
    received, since = 0, time.monotonic()
    with tqdm(total=total, desc=name, unit="B", unit_scale=True, disable=None) as bar:
        while chunk := response.raw.read1(CHUNK, decode_content=True):  # read1 returns the bytes received so far
            if file.tell() + len(chunk) > MAX_DOWNLOAD:
                raise InputError(f"{url}: the file has more than {MAX_DOWNLOAD} bytes, which is the allowed maximum")
            file.write(chunk)
            bar.update(len(chunk))
            received += len(chunk)
            if (seconds := time.monotonic() - since) > _TIMEOUT:
                if received < _MIN_RATE * seconds:
                    raise TimeoutError(f"received {received} bytes in {seconds:.0f} s")
                received, since = 0, time.monotonic()

"""Download BEIR data sets and DPR files into the cache, and unpack archives."""

import hashlib
import os
import zipfile
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import requests
from tqdm.auto import tqdm

from contaccum.catalog import table
from contaccum.errors import InputError, library_errors
from contaccum.runtime.files import (
    cache_folder,
    created_folder,
    sweep,
    whole_folder,
    write_errors,
    write_text,
)
from contaccum.runtime.locks import waiting_lock

BASE_URL = "https://public.ukp.informatik.tu-darmstadt.de/thakur/BEIR/datasets"
DPR_URL = "https://dl.fbaipublicfiles.com/dpr"
MD5 = {name: md5 or None for name, _, md5 in table("archives.tsv") if not name.startswith("dpr/")}
"""Name of a BEIR data set -> MD5 checksum of the archive, or None if BEIR publishes no checksum."""
DPR = {
    name.removeprefix("dpr/"): path
    for name, path, _ in table("archives.tsv")
    if name.startswith("dpr/")
}
"""Name of a DPR file -> path below ``DPR_URL``. The files have Wikipedia passages, training data or
questions."""
FORUMS = (
    *("android", "english", "gaming", "gis", "mathematica", "physics"),
    *("programmers", "stats", "tex", "unix", "webmasters", "wordpress"),
)


_CHUNK = 1 << 20  # bytes per read
_TIMEOUT = 30  # maximum number of seconds without data


def beir_folder(
    name: str | Path,
    cache: str | Path | None = None,
    *,
    base_url: str = BASE_URL,
    md5: str | None = None,
) -> Path:
    """Return the folder of a BEIR data set; download the data set into ``cache`` if necessary.

    name: such as ``scifact`` or ``cqadupstack/android`` (``cqadupstack`` has twelve data sets).
    md5: expected MD5 checksum of the archive; None: the checksum that BEIR publishes, if there is
    one.

    Raises InputError if the name is unknown, if the download fails, if the checksum is wrong, or if
    the archive cannot be unpacked.
    """
    check_beir_name(str(name))
    name, _, forum = str(name).partition("/")
    folder = Path(cache or cache_folder() / "beir") / name
    archive = folder.with_name(f"{name}.zip")
    if not folder.is_dir():
        with _one_download(folder.parent, "beir"):
            if not folder.is_dir():  # another process may have downloaded it during the wait
                sweep(folder.parent)
                try:
                    _download(f"{base_url}/{name}.zip", archive, folder)
                    # BEIR publishes no other checksum
                    content: Any = np.memmap(archive, mode="r")
                    digest = hashlib.md5(content, usedforsecurity=False).hexdigest()
                    expected = md5 or MD5[name]
                    if expected and digest != expected:
                        raise InputError(
                            f"{base_url}/{name}.zip: the archive has MD5 {digest}; expected "
                            f"{expected}. Try the download again."
                        )
                    unpack(archive, name, folder)
                finally:
                    archive.unlink(missing_ok=True)
    return folder / forum


def dpr_file(name: str, cache: str | Path | None = None, *, base_url: str = DPR_URL) -> Path:
    """Return the path of a DPR file; download the file into ``cache`` if necessary.

    name: name of the file without ``dpr/``, such as ``nq-train``. Raises InputError if the name is
    unknown or the download fails.
    """
    check_dpr_name(name)
    file = Path(cache or cache_folder() / "dpr") / Path(DPR[name]).name
    if file.is_file():
        return file
    with _one_download(file.parent, "dpr"):
        if not file.is_file():  # another process may have downloaded it during the wait
            _download(f"{base_url}/{DPR[name]}", file, file)
    return file


def check_dpr_name(name: str) -> None:
    """Raise InputError unless DPR has the file ``name``, such as ``nq-train``."""
    if name not in DPR:
        raise InputError(
            f"dpr/{name}: no DPR file has this name; expected dpr/ and one of {', '.join(DPR)}"
        )


def check_beir_name(given: str) -> None:
    """Raise InputError unless BEIR has a data set of this name that may be downloaded."""
    forums = {f"cqadupstack/{forum}" for forum in FORUMS}
    names = sorted(MD5.keys() - {"cqadupstack"})
    if given not in forums and given.startswith("cqadupstack"):
        raise InputError(f"{given}: not a data set; expected one of {', '.join(sorted(forums))}")
    if given not in names and given not in forums:
        raise InputError(
            f"{given}: no folder or data set has this name; expected a path, one of "
            f"{', '.join(names)}, cqadupstack/FORUM, or a name that starts with nanobeir/, mteb/, "
            "miracl/, dpr/ or hub: (see contaccum data fetch --help)"
        )


def unpack(archive: Path, name: str, target: Path) -> None:
    """Unpack the folder ``name`` of a zip archive to ``target``.

    If an error occurs, ``target`` is not created. ``zipfile`` never writes outside the folder and
    creates no links. Raises InputError if the archive is damaged or lacks the folder ``name``.
    """
    with (
        library_errors(f"{archive}: not a readable zip archive", Exception),
        zipfile.ZipFile(archive) as bundle,
        whole_folder(target) as part,
    ):
        bundle.extractall(part)
        root = part / name
        if not root.is_dir():
            raise InputError(
                f"{archive}: has no folder {name!r}; a BEIR archive must contain a folder with the "
                "name of the data set"
            )
        for path in root.iterdir():
            path.rename(part / path.name)
        root.rmdir()


def _one_download(folder: Path, kind: str) -> AbstractContextManager[None]:
    """Return a context in which only this process downloads into ``folder``; others wait."""
    digest = hashlib.sha256(os.fsencode(folder.absolute())).hexdigest()[:32]
    return waiting_lock(cache_folder() / "locks" / f"{kind}-{digest}.lock")


def _download(url: str, path: Path, target: Path) -> None:
    """Download ``url`` to the file ``path``, which appears whole or not at all.

    If the connection breaks, the received bytes stay in a hidden file, and the next call asks the
    server for the rest of this version of the file.

    target: path where the error message tells users to put a copy of the data.
    """
    part = path.with_name(f".{path.name}.unfinished")
    version = path.with_name(f".{path.name}.version")
    headers = {"Accept-Encoding": "identity"}  # so that Content-Length counts the bytes of the file
    start = 0
    with created_folder(path.parent), write_errors(path):
        if part.exists():
            start = part.stat().st_size
            headers["Range"] = f"bytes={start}-"
            if version.exists():  # the server sends a changed file from its start
                headers["If-Range"] = version.read_text(encoding="utf-8")
        try:
            with requests.get(url, stream=True, timeout=_TIMEOUT, headers=headers) as response:
                if response.status_code != 206:
                    part.unlink(missing_ok=True)
                    if start and response.status_code == requests.codes.range_not_satisfiable:
                        # a killed process had all bytes, but their hash is unknown
                        return _download(url, path, target)
                    start = 0
                response.raise_for_status()
                if start == 0:
                    tag = response.headers.get("ETag", "")
                    if tag.startswith("W/"):  # of equal content, but not of equal bytes
                        tag = ""
                    version.unlink(missing_ok=True)
                    if tag or (tag := response.headers.get("Last-Modified", "")):
                        write_text(version, tag)
                length = int(response.headers.get("Content-Length", 0))
                with (
                    open(part, "ab") as file,
                    tqdm(
                        total=start + length if length else None,
                        initial=start,
                        desc=target.name,
                        unit="B",
                        unit_scale=True,
                        disable=None,
                    ) as bar,
                ):
                    for chunk in response.iter_content(_CHUNK):
                        file.write(chunk)
                        bar.update(len(chunk))
                    file.flush()
                    os.fsync(file.fileno())
            os.replace(part, path)
            version.unlink(missing_ok=True)
        except (requests.RequestException, ValueError) as error:  # ValueError: a broken redirect
            reason = type(error).__name__
            if isinstance(error, requests.HTTPError):
                reason = f"HTTP status {error.response.status_code}"
            copy = "the file"
            if not target.suffix:
                copy = "the data set's folder (corpus.jsonl, queries.jsonl, qrels/)"
            raise InputError(
                f"{target.name}: not found in {target.parent}, and {url} cannot be downloaded "
                f"({reason}). Put {copy} at {target}, or give the path of a local copy."
            ) from error

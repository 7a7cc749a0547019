"""One file over HTTP to a part beside its place: continued where it broke, tried as a whole, and only then renamed."""

import hashlib
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO

import requests
from tqdm.auto import tqdm

from contaccum.data.arrow import one_at_a_time
from contaccum.errors import InputError
from contaccum.files import cache_folder

CHUNK = 1 << 20  # bytes read at a time
_OTHER_RANGE = (206, 416)  # HTTP status of a part that was not asked for, and of a part that there is not
_TIMEOUT = 30  # seconds without any byte


def alone(folder: Path, kind: str) -> AbstractContextManager[None]:
    """Inside the block, no other process of this machine fetches into the folder."""
    digest = hashlib.sha256(os.fsencode(folder.absolute())).hexdigest()[:32]
    return one_at_a_time(cache_folder() / "locks" / f"{kind}-{digest}")


def transfer(
    url: str,
    archive: Path,
    test: Callable[[str, Path], None] | None,
    limit: int,
    target: Path,
    headers: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Download to a part file beside ``archive``, try it by ``test``, which raises where it is not whole, and rename it.

    What a broken, interrupted or killed download left is continued where a test tells whether the halves belong together; what
    the test refuses, or is longer than ``limit`` bytes, is not kept. ``target`` is what the user is told to put there by hand
    where nothing can be fetched. ``headers`` go with each request.
    """
    part = archive.with_name(f".{archive.name}.part")
    keep = test is not None
    try:
        part.parent.mkdir(parents=True, exist_ok=True)
        with open(part, "ab" if test else "wb") as file:
            _fetch(url, file, limit, target, headers)
        if test:
            test(url, part)
        os.replace(part, archive)
    except _Broken:
        raise
    except InputError:
        keep = False
        raise
    except OSError as error:
        raise InputError(f"{archive}: could not be written ({error.strerror or error})") from error
    finally:
        with suppress(FileNotFoundError, NotADirectoryError):
            if not keep or not part.stat().st_size:
                part.unlink()


class _Broken(InputError):
    """A connection that failed; what it brought may be continued."""


def _fetch(url: str, file: BinaryIO, limit: int, folder: Path, more: Mapping[str, str]) -> None:
    """Download what an open file lacks, or all where the server does not continue; at most ``limit`` bytes in all."""
    start = file.tell()
    headers = {**more, **({"Range": f"bytes={start}-", "Accept-Encoding": "identity"} if start else {})}
    try:
        with requests.get(url, stream=True, timeout=_TIMEOUT, headers=headers) as response:
            range_given = response.headers.get("Content-Range", "")
            if start and range_given == f"bytes */{start}":
                return  # there is no more: whoever fetched the last byte was stopped before the test
            continues = range_given.startswith(f"bytes {start}-")
            if not continues:
                file.truncate(0)
                file.seek(0)
            if continues or not start or response.status_code not in _OTHER_RANGE:
                response.raise_for_status()
                _copy(response, url, file, limit, folder)
                return
        _fetch(url, file, limit, folder, more)  # the part, which is not of this archive, is empty now
    except requests.RequestException as error:
        reason = type(error).__name__ if error.response is None else f"HTTP status {error.response.status_code}"
        what = "the file" if folder.suffix else "its folder (corpus.jsonl, queries.jsonl, qrels/)"
        raise _Broken(
            f"{folder.name}: not in {folder.parent}, and {url} could not be fetched ({reason}); put {what} at {folder}, or "
            "give the path of a local copy"
        ) from error


def _copy(response: requests.Response, url: str, file: BinaryIO, limit: int, folder: Path) -> None:
    total = int(response.headers.get("Content-Length", 0))
    with tqdm(total=total or None, desc=folder.name, unit="B", unit_scale=True, disable=None) as bar:
        for chunk in response.iter_content(CHUNK):
            if file.tell() + len(chunk) > limit:
                raise InputError(f"{url}: the archive has more than {limit} bytes, expected at most that")
            file.write(chunk)
            bar.update(len(chunk))

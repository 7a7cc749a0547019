"""Files of a data set's repository on the Hub, at one commit: fetched once, and each tried by the checksum that the Hub lists.

They lie in the cache under ``repositories/owner/name`` as in the repository, beside ``.manifest.json`` with the checksums.
The Hub's client finds the address and the token; the bytes come by ``transfer``, since the client begins a broken file anew.
"""

import hashlib
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, hf_hub_url
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import build_hf_headers

from contaccum.data.transfer import CHUNK, alone, transfer
from contaccum.errors import InputError
from contaccum.files import cache_folder, read_json, sha256_of, write_json

MANIFEST = ".manifest.json"  # hidden, as nothing of the repository is meant
MAX_FILE = 1 << 36  # bytes; the Hub's own client refuses files above 50 GB
_CHECKSUM = re.compile(r"sha256:[0-9a-f]{64}|git:[0-9a-f]{40}")
CLIENT_ERROR: Any = HfHubHTTPError.__bases__[0]
"""What the HTTP client of this version of huggingface_hub raises where there is no connection."""


@dataclass(frozen=True)
class Repository:
    """A data set on the Hub."""

    name: str  # owner/name
    revision: str  # a commit

    @property
    def folder(self) -> Path:
        """Where its files lie, or are put by hand where there is no network."""
        return cache_folder() / "repositories" / self.name

    def open(self) -> "Files":
        """Its files, listed by the Hub or by the manifest of an earlier list.

        Where the Hub cannot be asked, files that were put into the folder by hand are taken as they are, with a warning;
        InputError where there are none.
        """
        with alone(self.folder, "repository"):
            return Files(self, self._checksums())

    def _checksums(self) -> dict[str, str | None]:
        """The checksum of each file by its path; None for those of a folder that no list is known of."""
        manifest = self.folder / MANIFEST
        if found := _read(manifest, self.revision):
            return found
        try:
            found = self._listed()
        except InputError:
            raise
        except (OSError, ValueError, CLIENT_ERROR) as error:
            return self._as_it_is(error)
        write_json(manifest, {"repository": self.name, "revision": self.revision, "files": found})
        return found

    def _listed(self) -> dict[str, str | None]:
        tree = HfApi().list_repo_tree(self.name, recursive=True, revision=self.revision, repo_type="dataset")
        files = [entry for entry in tree if isinstance(entry, RepoFile)]  # the others are folders
        for file in files:
            if _leads_outside(file.path):
                raise InputError(f"{self.name}: its file {file.path!r} would land outside the folder")
        return {file.path: f"sha256:{file.lfs.sha256}" if file.lfs else f"git:{file.blob_id}" for file in files}

    def _as_it_is(self, error: Exception) -> dict[str, str | None]:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        found = [path for path in self.folder.rglob("*") if path.is_file() and not path.name.startswith(".")]
        if not found:
            raise InputError(
                f"{self.name}: not in {self.folder}, and the Hub could not be asked ({reason}); put the files of its commit "
                f"{self.revision} there"
            ) from error
        warnings.warn(
            f"{self.folder}: taken as it is, the Hub could not be asked for checksums ({reason})", stacklevel=4
        )
        return dict.fromkeys(path.relative_to(self.folder).as_posix() for path in found)


@dataclass(frozen=True)
class Files:
    """The files of a repository that can be had."""

    repository: Repository
    checksums: Mapping[str, str | None]  # by path; None in a folder that no list is known of

    def fetch(self, *patterns: str) -> list[Path]:
        """The files that match (``*`` stands for ``/`` too), in the order of the patterns; those that are not there are fetched.

        InputError where a pattern matches none, where a file cannot be had, and where one is not what the Hub lists.
        """
        found = [path for pattern in patterns for path in self._matching(pattern)]
        with alone(self.repository.folder, "repository"):
            for path in found:
                self._provide(path)
        return [self.repository.folder / path for path in found]

    def _matching(self, pattern: str) -> list[str]:
        if matching := sorted(path for path in self.checksums if fnmatchcase(path, pattern)):
            return matching
        where = self.repository.folder if None in self.checksums.values() else self.repository.name
        raise InputError(f"{where}: holds no file {pattern}, expected those of commit {self.repository.revision}")

    def _provide(self, path: str) -> None:
        checksum, file = self.checksums[path], self.repository.folder / path
        if checksum is None or (file.is_file() and _checksum_of(file, checksum) == checksum):
            return
        if constants.HF_HUB_OFFLINE:
            raise InputError(
                f"{file}: not there as the Hub lists it, and HF_HUB_OFFLINE is set, expected a copy or a network"
            )
        url = hf_hub_url(self.repository.name, path, repo_type="dataset", revision=self.repository.revision)
        transfer(url, file, partial(_refuse_other, checksum), MAX_FILE, file, build_hf_headers())


def _read(manifest: Path, revision: str) -> dict[str, str | None]:
    """The checksums that a manifest of that commit has; none where it is not there, or not as it was written."""
    try:
        found = read_json(manifest)
    except InputError:
        return {}
    if not isinstance(found, dict) or found.get("revision") != revision or not isinstance(found.get("files"), dict):
        return {}
    files: dict[str, Any] = found["files"]
    sound = all(
        isinstance(checksum, str) and _CHECKSUM.fullmatch(checksum) and not _leads_outside(path)
        for path, checksum in files.items()
    )
    return dict(files) if sound else {}


def _leads_outside(path: str) -> bool:
    """Whether a list's path is none inside the folder."""
    return "\0" in path or any(part in ("", ".", "..") for part in path.split("/"))


def _checksum_of(file: Path, like: str) -> str:
    """A file's checksum of the kind that another one is: SHA-256, or git's name for its content."""
    if like.startswith("sha256:"):
        return f"sha256:{sha256_of(file)}"
    digest = hashlib.sha1(b"blob %d\0" % file.stat().st_size, usedforsecurity=False)
    with open(file, "rb") as content:
        while chunk := content.read(CHUNK):
            digest.update(chunk)
    return f"git:{digest.hexdigest()}"


def _refuse_other(checksum: str, url: str, part: Path) -> None:
    if (found := _checksum_of(part, checksum)) != checksum:
        raise InputError(f"{url}: the file's checksum is {found}, expected {checksum}")

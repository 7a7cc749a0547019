"""Embedding shards: .npy files of vectors beside their ids, under one manifest that tells whether they are whole.

A folder holds, for shard 0, ``00000.npy`` (vectors), ``00000.ids.json`` (a list of ids) and ``00000.shard.json`` (its
record: sizes, SHA-256 and the job it belongs to), and ``manifest.json``, written when every record is there. Writing
goes by the records, so that processes need not talk to each other; reading goes by the manifest alone.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from contaccum.errors import InputError
from contaccum.files import read_json, sha256_of, whole_file, write_json, write_text

FORMAT = "contaccum-embeddings"
VERSION = 1
MANIFEST = "manifest.json"
DTYPES = ("float16", "float32")

_PARTS = ("vectors", "ids")
_OWN_FILE = re.compile(r"\d{5,}\.(npy|ids\.json|shard\.json)|manifest\.json|contaccum\.lock|\..*\.part")


class Shard(NamedTuple):
    """Consecutive passages or queries of one set."""

    ids: Sequence[str]  # n
    vectors: np.ndarray  # (n, d) float16 or float32; memory-mapped when it comes from a folder


class Shards(Protocol):
    """Anything that gives shards by number: a list in memory, or a ShardFolder."""

    def __len__(self) -> int: ...
    def __getitem__(self, number: int, /) -> Shard: ...
    def __iter__(self) -> Iterator[Shard]: ...


class Followed:
    """Shards, and one more behind them."""

    def __init__(self, shards: Shards, last: Shard) -> None:
        self._shards, self._last = shards, last

    def __len__(self) -> int:
        return len(self._shards) + 1

    def __getitem__(self, number: int) -> Shard:
        return self._last if number == len(self._shards) else self._shards[number]

    def __iter__(self) -> Iterator[Shard]:
        yield from self._shards
        yield self._last


@dataclass(frozen=True)
class Job:
    """What is encoded, by what, in which form; folders of equal jobs hold the same shards."""

    kind: str
    """``query`` or ``passage``."""
    encoder: str
    """Fingerprint of the encoder's weights and settings."""
    source: str
    """Fingerprint of the ids and texts."""
    rows: int
    shard_size: int
    """Rows in every shard but the last."""
    dtype: str
    """``float16`` or ``float32``."""

    @property
    def count(self) -> int:
        """Number of shards."""
        return -(-self.rows // self.shard_size)

    def span(self, number: int) -> tuple[int, int]:
        """First row of a shard, and the row behind its last."""
        return number * self.shard_size, min(self.rows, (number + 1) * self.shard_size)


def _names(number: int) -> dict[str, str]:
    return {"vectors": f"{number:05d}.npy", "ids": f"{number:05d}.ids.json"}


def _record_path(folder: Path, number: int) -> Path:
    return folder / f"{number:05d}.shard.json"


def check_folder(folder: Path, job: Job) -> None:
    """Refuse a folder that holds other files, or embeddings of another job; a folder that is not there yet is fine."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder}: is a file, expected a folder for embeddings")
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if not _OWN_FILE.fullmatch(path.name):
            raise InputError(
                f"{folder}: already holds {path.name!r}, expected an empty folder or unfinished embeddings"
            )
        if path.name == MANIFEST or path.name.endswith(".shard.json"):
            found = _json_or_none(path)
            if found is not None:  # one that is no JSON is damaged, not foreign: it is written anew
                _refuse_other_job(path, found.get("job"), job)


def kept_dtype(folder: str | Path) -> str | None:
    """Form of the vectors of a finished folder, whoever made them; None where nothing is finished."""
    found = _json_or_none(Path(folder) / MANIFEST) if (Path(folder) / MANIFEST).is_file() else None
    job = (found or {}).get("job")
    return job.get("dtype") if isinstance(job, dict) else None


def _json_or_none(path: Path) -> dict[str, Any] | None:
    try:
        found = read_json(path)
    except InputError:
        return None
    return found if isinstance(found, dict) else None


def _refuse_other_job(path: Path, found: Any, job: Job) -> None:
    if not isinstance(found, dict):
        raise InputError(f"{path}: names no job, expected a file written by contaccum (format {FORMAT})")
    for name, expected in asdict(job).items():
        if found.get(name) != expected:
            raise InputError(
                f"{path}: belongs to other embeddings ({name} {found.get(name)!r}, expected {expected!r}); "
                "give another folder, or delete this one"
            )


def refuse_infinite(kind: str, ids: Sequence[str], vectors: np.ndarray) -> None:
    """InputError naming the first ``query`` or ``passage`` whose vector, in the form in which it is kept, is not finite."""
    finite = np.isfinite(vectors).all(axis=1)
    if not finite.all():
        raise InputError(
            f"{kind} {ids[int(np.argmin(finite))]!r}: its embedding holds NaN, infinity or a number beyond "
            f"{vectors.dtype}, expected finite numbers"
        )


def write_shard(folder: Path, number: int, job: Job, shard: Shard) -> None:
    """Write one shard; its record comes last, so a shard with a record is a shard that was finished.

    Raises InputError naming the id of a vector that holds NaN or infinity, or does not fit the job's dtype.
    """
    for stale in folder.glob(f".{number:05d}.*.part"):  # left by a process that was killed
        stale.unlink(missing_ok=True)
    with np.errstate(over="ignore"):  # what is too large becomes infinity, which is refused below
        vectors = shard.vectors.astype(job.dtype, copy=False)
    refuse_infinite(job.kind, shard.ids, vectors)
    names = _names(number)
    with whole_file(folder / names["vectors"]) as file:
        np.save(file, vectors, allow_pickle=False)
    write_text(folder / names["ids"], json.dumps(list(shard.ids), ensure_ascii=False))
    paths = {part: folder / names[part] for part in _PARTS}
    entry = {
        **names,
        "rows": len(shard.ids),
        "dimension": vectors.shape[1],
        "bytes": {part: path.stat().st_size for part, path in paths.items()},
        "sha256": {part: sha256_of(path) for part, path in paths.items()},
    }
    write_json(_record_path(folder, number), {"job": asdict(job), "shard": entry})


def damage(folder: Path, number: int, entry: dict[str, Any]) -> str | None:
    """What is wrong with a shard's files, in words that end a sentence, or None when sizes and hashes are right."""
    for part, name in _names(number).items():
        path = folder / name
        if not path.is_file():
            return f"{path} is missing"
        if path.stat().st_size != entry["bytes"][part]:
            return f"{path} has {path.stat().st_size} bytes, expected {entry['bytes'][part]}"
        if sha256_of(path) != entry["sha256"][part]:
            return f"{path} is damaged: its SHA-256 differs from the one noted when it was written"
    return None


def read_entry(folder: Path, number: int, job: Job) -> dict[str, Any] | None:
    """The record of a finished shard of this job; None where there is none, or none that can be read."""
    found = _json_or_none(_record_path(folder, number))
    if found is None or found.get("job") != asdict(job):
        return None
    return _checked_entry(found.get("shard"), number)


def _checked_entry(entry: Any, number: int) -> dict[str, Any] | None:
    """The entry, if it has the form we write: names are never taken from a file, only compared."""
    if not isinstance(entry, dict) or any(entry.get(part) != name for part, name in _names(number).items()):
        return None
    numbers = [entry.get("rows"), entry.get("dimension")]
    tables = [entry.get("bytes"), entry.get("sha256")]
    whole = all(isinstance(n, int) for n in numbers) and all(
        isinstance(t, dict) and set(_PARTS) <= set(t) for t in tables
    )
    return entry if whole else None


def write_manifest(folder: Path, job: Job) -> bool:
    """Write ``manifest.json`` from the records, and nothing else; False while a shard is missing."""
    entries = [entry for number in range(job.count) if (entry := read_entry(folder, number, job)) is not None]
    if len(entries) < job.count:
        return False
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "job": asdict(job),
        "dimension": entries[0]["dimension"] if entries else 0,
        "shards": entries,
    }
    write_json(folder / MANIFEST, manifest)
    return True


class ShardFolder:
    """The finished shards of a folder; each is checked against its hash when first read, and memory-mapped.

    ``encoder`` and ``source`` are fingerprints; given, a folder made by another encoder or from other data is refused.
    Raises InputError when the manifest is missing, foreign or incomplete, and, on access, when a shard is damaged.
    """

    def __init__(self, folder: str | Path, encoder: str | None = None, source: str | None = None) -> None:
        self.folder = Path(folder)
        path = self.folder / MANIFEST
        if not path.is_file():
            finished = len(list(self.folder.glob("*.shard.json")))
            state = f"{finished} finished shards, the encoding was not ended" if finished else "no embeddings"
            raise InputError(f"{self.folder}: no {MANIFEST} ({state}), expected a folder written by contaccum encode")
        manifest = read_json(path)
        if not isinstance(manifest, dict) or (manifest.get("format"), manifest.get("version")) != (FORMAT, VERSION):
            raise InputError(f"{path}: not a manifest of embeddings, expected format {FORMAT}, version {VERSION}")
        self.job = _job_of(manifest.get("job"), path)
        self.dimension, self._entries = _entries_of(manifest, self.job, path)
        self._checked: set[int] = set()
        for name, expected in (("encoder", encoder), ("source", source)):
            if expected is not None and getattr(self.job, name) != expected:
                what = "by another encoder" if name == "encoder" else "from other data"
                raise InputError(
                    f"{path}: these embeddings were made {what} ({name} {getattr(self.job, name)!r}, not {expected!r})"
                )

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Shard]:
        return (self[number] for number in range(len(self)))

    def __getitem__(self, number: int) -> Shard:
        entry = self._entries[number]
        if number not in self._checked:
            if fault := damage(self.folder, number, entry):
                raise InputError(f"{fault}; run the encoding again to repair it")
            self._checked.add(number)
        try:
            vectors = np.load(self.folder / entry["vectors"], mmap_mode="r", allow_pickle=False)
        except ValueError as error:
            raise InputError(f"{self.folder / entry['vectors']}: no array of numbers can be read ({error})") from error
        ids = read_json(self.folder / entry["ids"])
        if (
            vectors.shape != (entry["rows"], self.dimension)
            or vectors.dtype != self.job.dtype
            or len(ids) != len(vectors)
        ):
            raise InputError(
                f"{self.folder / entry['vectors']}: holds {vectors.dtype} of shape {vectors.shape} with "
                f"{len(ids)} ids, expected {self.job.dtype} of shape {(entry['rows'], self.dimension)}"
            )
        return Shard(ids, vectors)


def count_rows(shards: Shards) -> int:
    """Rows of all shards; a folder's manifest knows them, so that counting does not read every shard."""
    return shards.job.rows if isinstance(shards, ShardFolder) else sum(len(shard.vectors) for shard in shards)


def _job_of(found: Any, path: Path) -> Job:
    types = {field.name: field.type for field in fields(Job)}
    if not isinstance(found, dict) or {name: type(value) for name, value in found.items()} != types:
        raise InputError(f"{path}: its job is {found!r}, expected the fields {', '.join(types)}")
    job = Job(**found)
    if job.dtype not in DTYPES or job.shard_size < 1 or job.rows < 0:
        raise InputError(f"{path}: its job is {found!r}, expected dtype float16 or float32 and sizes that can be")
    return job


def _entries_of(manifest: dict[str, Any], job: Job, path: Path) -> tuple[int, list[dict[str, Any]]]:
    """Dimension and entries of a manifest, or InputError naming the first entry that is not as it should be."""
    dimension, found = manifest.get("dimension"), manifest.get("shards")
    if not isinstance(dimension, int) or not isinstance(found, list) or len(found) != job.count:
        count = len(found) if isinstance(found, list) else "no"
        raise InputError(f"{path}: lists {count} shards of dimension {dimension!r}, expected {job.count} shards")
    entries = []
    for number in range(job.count):
        entry = _checked_entry(found[number], number)
        start, stop = job.span(number)
        if entry is None or (entry["rows"], entry["dimension"]) != (stop - start, dimension):
            raise InputError(
                f"{path}: its entry {number} is {found[number]!r}, "
                f"expected shard {number} with {stop - start} rows of {dimension}"
            )
        entries.append(entry)
    return dimension, entries

"""Write and read embedding shards: files of vectors and ids, and a manifest per folder.

The files of shard 0 are ``00000.npy`` (vectors), ``00000.ids.json`` (list of ids) and
``00000.shard.json`` (record: sizes, SHA-256 and the encoding job). In the format parquet, which
databases and data-frame libraries can read, ``00000.parquet`` has the columns ``id`` (string),
``text`` (string, only on request) and ``embedding`` (fixed-size list of float16 or float32).
``manifest.json`` is written when all shards have a record, so several processes can write one
folder without communication.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from contaccum.config.commands import ShardFormat, VectorType
from contaccum.config.declare import PositiveInt
from contaccum.config.load import converted
from contaccum.errors import InputError
from contaccum.runtime.cache import file_key
from contaccum.runtime.files import read_json, sha256_of, whole_file, write_json, write_text
from contaccum.runtime.processes import PRECISIONS
from contaccum.runtime.units import counted

VERSION = 1
MANIFEST = "manifest.json"
BLOCK = 65_536  # number of rows that are searched or added to an index at a time
EXTENSIONS = {"npy": ("npy", "ids.json"), "parquet": ("parquet",)}
"""Format -> extensions of the files of a shard. The first file has the vectors."""


class Shard(NamedTuple):
    """Ids and vectors of consecutive passages or queries."""

    ids: Sequence[str]  # n ids
    vectors: np.ndarray  # (n, d) float16 or float32; memory-mapped if read from .npy files
    texts: Sequence[str] | None = None  # n texts, or None if texts are not written


Shards = Sequence[Shard]
"""Shards in memory, or a ShardFolder."""


@dataclass(frozen=True)
class EncodingJob:
    """Description of the shards in a folder: texts, encoder and format.

    Equal jobs have equal shards.
    """

    kind: str  # query or passage
    encoder: str  # DualEncoder.fingerprint
    source: str  # fingerprint of all ids and texts
    rows: int  # number of texts
    shard_size: int  # number of rows in each shard; the last shard may have fewer rows
    dtype: str  # float16 or float32
    format: str = "npy"  # npy or parquet
    text: bool = False  # whether the shards contain the texts, too; only parquet can contain them

    def __post_init__(self) -> None:
        """Raise InputError for an unknown dtype or format, or a shard size below 1."""
        converted(PositiveInt, self.shard_size, "shard_size")
        converted(VectorType, self.dtype, "dtype")
        converted(ShardFormat, self.format, "format")

    @property
    def count(self) -> int:
        """Number of shards."""
        return -(-self.rows // self.shard_size)

    def span(self, number: int) -> tuple[int, int]:
        """Return the rows of a shard as (first row, last row + 1)."""
        return number * self.shard_size, min(self.rows, (number + 1) * self.shard_size)

    def files(self, number: int) -> list[str]:
        """Return the names of the files of a shard. The first file has the vectors."""
        return [f"{number:05d}.{extension}" for extension in EXTENSIONS[self.format]]


@dataclass(frozen=True)
class ShardRecord:
    """Size of a finished shard, and the hashes of its files."""

    rows: int
    dimension: int
    sha256: dict[str, str]  # name of each file -> its SHA-256


@dataclass(frozen=True)
class _RecordFile:
    job: EncodingJob
    shard: ShardRecord


@dataclass(frozen=True)
class _Manifest:
    job: EncodingJob
    dimension: int
    shards: list[ShardRecord]


@dataclass(frozen=True)
class _Maker:
    encoder: str


@dataclass(frozen=True)
class _Origins:
    """Part of a manifest or record of vectors (job), or of the manifest of an index (origin)."""

    job: _Maker | None = None
    origin: _Maker | None = None


def require_origin(path: Path, found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raise InputError if a saved result belongs to another encoder, other texts or settings.

    path: file that describes the result. found, expected: name -> value. An expected value None is
    not compared.
    """
    for name, value in expected.items():
        if value is not None and found.get(name) != value:
            made = f"with other data or settings ({name} {found.get(name)!r}, but now {value!r})"
            if name == "source":  # hashes say nothing
                made = "from other texts"
            raise InputError(f"{path}: was made {made}. Choose another folder, or delete this one.")


def finished_shards(folder: Path, job: EncodingJob) -> dict[int, ShardRecord]:
    """Return the records of the finished shards in a folder by their numbers.

    Raises InputError if the folder has embeddings of another job, or the manifest or vectors of
    something else, such as an index.
    """
    finished = {}
    for path in sorted(folder.glob("*.shard.json")):
        found = read_json(path, _RecordFile, version=VERSION)
        require_origin(path, asdict(found.job), asdict(job))
        number = path.name.removesuffix(".shard.json")
        if not number.isdecimal():
            raise InputError(f"{path}: expected a number before .shard.json; remove this file")
        finished[int(number)] = found.shard
    if not finished:
        if (folder / MANIFEST).is_file():
            read_json(folder / MANIFEST, _Manifest, version=VERSION)
        for path in (*folder.glob("*.npy"), *folder.glob("*.parquet")):
            if not path.stem.isdecimal():
                raise InputError(
                    f"{path}: is not a shard of contaccum, so its vectors would not be read; "
                    "choose another folder"
                )
    return finished


def started_format(folder: str | Path) -> dict[str, Any]:
    """Return how a folder's shards are written, as arguments of ``encode_texts``.

    Return {} if the folder has no finished shard.
    """
    for path in Path(folder).glob("*.shard.json"):
        job = read_json(path, _RecordFile, version=VERSION).job
        return {name: getattr(job, name) for name in ("shard_size", "dtype", "format", "text")}
    return {}


def saved_precision(folder: str | Path) -> str | None:
    """Return the precision of the vectors or the index in a folder, or None if there are none."""
    for path in (Path(folder) / MANIFEST, *Path(folder).glob("*.shard.json")):
        with suppress(InputError):  # not finished
            about = read_json(path, _Origins)
            if source := about.job or about.origin:
                precision = source.encoder.partition(" ")[0]
                return precision if precision in PRECISIONS else None
    return None


def refuse_infinite(kind: str, ids: Sequence[str], vectors: np.ndarray) -> None:
    """Raise InputError if a vector contains NaN or infinity.

    The message contains the id of the first such vector.
    """
    finite = np.isfinite(vectors).all(axis=1)
    if not finite.all():
        raise InputError(
            f"{kind} {ids[int(np.argmin(finite))]!r}: its vector contains NaN, infinity or a "
            f"number too large for {vectors.dtype}; expected finite numbers"
        )


def write_shard(folder: Path, number: int, job: EncodingJob, shard: Shard) -> None:
    """Write the vectors and the ids of a shard, then its record.

    Raises InputError if a vector is not finite in the dtype of the job. The message contains the id
    of the vector.
    """
    with np.errstate(over="ignore"):  # an overflow gives infinity, which is refused below
        vectors = shard.vectors.astype(job.dtype, copy=False)
    refuse_infinite(job.kind, shard.ids, vectors)
    names = job.files(number)
    with whole_file(folder / names[0]) as file:
        if job.format == "npy":
            np.save(file, vectors, allow_pickle=False)
        else:
            columns = {"id": pa.array(shard.ids, pa.string())}
            if shard.texts is not None:
                columns["text"] = pa.array(shard.texts, pa.string())
            values = pa.array(np.ascontiguousarray(vectors).reshape(-1))
            columns["embedding"] = pa.FixedSizeListArray.from_arrays(values, vectors.shape[1])
            # if all values differ, a dictionary takes more space
            pq.write_table(pa.table(columns), file, use_dictionary=False)
    if job.format == "npy":
        write_text(folder / names[1], json.dumps(list(shard.ids), ensure_ascii=False))
    hashes = {name: sha256_of(folder / name) for name in names}
    record = _RecordFile(job, ShardRecord(len(shard.ids), vectors.shape[1], hashes))
    write_json(folder / f"{number:05d}.shard.json", {"format_version": VERSION, **asdict(record)})


_hashes: dict[tuple[Any, ...], str] = {}  # key of a file, see ``file_key`` -> its SHA-256


def damage(folder: Path, record: ShardRecord) -> str | None:
    """Return a sentence about a shard's first missing or damaged file, or None.

    A process reads a file only once to compute its hash.
    """
    for name, digest in record.sha256.items():
        path = folder / name
        if not path.is_file():
            return f"{path} is missing"
        key = tuple(file_key(path))
        if key not in _hashes:
            _hashes[key] = sha256_of(path)
        if _hashes[key] != digest:
            return f"{path} is damaged: its SHA-256 differs from the recorded SHA-256"
    return None


def write_manifest(folder: Path, job: EncodingJob) -> bool:
    """Write ``manifest.json`` from the records and return True.

    If a shard has no record yet, return False instead.
    """
    finished = finished_shards(folder, job)
    if len(finished) < job.count:
        return False
    records = [finished[number] for number in range(job.count)]
    manifest = _Manifest(job, records[0].dimension if records else 0, records)
    write_json(folder / MANIFEST, {"format_version": VERSION, **asdict(manifest)})
    return True


class ShardFolder(Sequence[Shard]):
    """Shards of a finished folder. The hashes of a shard are checked when the shard is first read.

    Vectors in .npy files are memory-mapped. A Parquet file is read into memory at each access to
    its shard. encoder, source: expected fingerprints of the encoder and the texts; None accepts
    any. rank, world: use only part ``rank`` of ``world`` parts of consecutive shards. Raises
    InputError if the manifest is invalid or has other fingerprints, or if a damaged shard is read.
    """

    def __init__(
        self,
        folder: str | Path,
        encoder: str | None = None,
        source: str | None = None,
        *,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        self.folder = Path(folder)
        path = self.folder / MANIFEST
        if not path.is_file():
            finished = len(list(self.folder.glob("*.shard.json")))
            raise InputError(
                f"{self.folder}: has no {MANIFEST}, only {counted(finished, 'finished shard')}. "
                "Run `contaccum encode` to the end."
            )
        manifest = read_json(path, _Manifest, version=VERSION)
        self.job, self.dimension, self._records = manifest.job, manifest.dimension, manifest.shards
        require_origin(path, asdict(self.job), {"encoder": encoder, "source": source})
        count = len(self._records)
        self._numbers = range(count * rank // world, count * (rank + 1) // world)

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[Shard]:
        # the inherited method would treat an IndexError as the end
        return map(self.__getitem__, range(len(self)))

    @property
    def first_row(self) -> int:
        """Row number of the first vector among all texts."""
        return self._numbers.start * self.job.shard_size

    @property
    def rows(self) -> int:
        return sum(self._records[number].rows for number in self._numbers)

    def __getitem__(self, index: int) -> Shard:  # type: ignore[override]
        number = self._numbers[index]
        if fault := damage(self.folder, self._records[number]):
            raise InputError(
                f"{fault}. Run `contaccum encode` again to repair it, or delete the folder."
            )
        paths = [self.folder / name for name in self.job.files(number)]
        if self.job.format == "npy":
            vectors = np.load(paths[0], mmap_mode="r", allow_pickle=False)
            return Shard(read_json(paths[1], list[str]), vectors)
        table = pq.read_table(paths[0], columns=["id", "embedding"])
        values = table["embedding"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
        return Shard(table["id"].to_pylist(), values.reshape(-1, self.dimension))


def count_rows(shards: Shards) -> int:
    """Return the number of rows in all shards. For a ShardFolder this reads no shard."""
    return (
        shards.rows
        if isinstance(shards, ShardFolder)
        else sum(len(shard.vectors) for shard in shards)
    )


def row_blocks(shards: Iterable[Shard], dtype: Any = None) -> Iterator[np.ndarray]:
    """Yield the vectors of the shards in contiguous blocks of at most ``BLOCK`` rows, (m, d).

    dtype: None keeps that of the shards.
    """
    for shard in shards:
        for start in range(0, len(shard.vectors), BLOCK):
            yield np.ascontiguousarray(shard.vectors[start : start + BLOCK], dtype=dtype)

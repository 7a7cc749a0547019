"""Write and read embedding shards: files of vectors and ids, and a manifest per folder.

The files of shard 0 are ``00000.npy`` (vectors), ``00000.ids.json`` (list of ids) and
``00000.shard.json`` (record: sizes, SHA-256 and the encoding job). In the format parquet, which
databases and data-frame libraries can read, ``00000.parquet`` has the columns ``id`` (string),
``text`` (string, only on request) and ``embedding`` (fixed-size list of float16 or float32).
``manifest.json`` is written when all shards have a record, so several processes can write one
folder without communication.
"""

import json
import re
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from contaccum.errors import InputError, library_errors
from contaccum.runtime.files import read_json, sha256_of, whole_file, write_json, write_text
from contaccum.runtime.processes import PRECISIONS

FORMAT = "contaccum-embeddings"
VERSION = 1
MANIFEST = "manifest.json"
DTYPES = ("float16", "float32")
BLOCK = 65_536  # number of rows that are searched or added to an index at a time
FILES = {"npy": ("npy", "ids.json"), "parquet": ("parquet", "parquet")}
"""Format -> file extensions of the vectors and of the ids."""

# raised by np.load
_BAD_HEADER = (
    ValueError,
    EOFError,
    SyntaxError,
    TypeError,
    OverflowError,
    tokenize.TokenError,
)
_OUR_FILES = re.compile(  # filelock may leave contaccum.lock.break.*
    r"\d{5,}\.(npy|ids\.json|parquet|shard\.json)|manifest\.json"
    r"|contaccum\.lock(\.break\..+)?|\..*\.part|\.DS_Store"
)


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
        """Raise InputError for an unknown dtype or format, and for impossible sizes."""
        if self.dtype not in DTYPES:
            raise InputError(f"dtype is {self.dtype!r}; expected {' or '.join(DTYPES)}")
        if self.format not in FILES:
            raise InputError(f"format is {self.format!r}; expected {' or '.join(FILES)}")
        if self.shard_size < 1:
            raise InputError(f"shard_size is {self.shard_size}; expected at least 1")
        if self.rows < 0:
            raise InputError(f"rows is {self.rows}; expected at least 0")

    @property
    def count(self) -> int:
        """Number of shards."""
        return -(-self.rows // self.shard_size)

    def span(self, number: int) -> tuple[int, int]:
        """Return the rows of a shard as (first row, last row + 1)."""
        return number * self.shard_size, min(self.rows, (number + 1) * self.shard_size)


@dataclass(frozen=True)
class ShardRecord:
    """Names, sizes and hashes of the two files of a finished shard: vectors and ids.

    In Parquet, one file contains both.
    """

    vectors: str  # name of the file with the vectors
    ids: str  # name of the file with the ids
    rows: int
    dimension: int
    # size of each file; keys: ``vectors`` and, unless one file contains both, ``ids``
    bytes: dict[str, int]
    sha256: dict[str, str]  # SHA-256 of each file; same keys as in ``bytes``

    def fits(self, job: EncodingJob, number: int) -> bool:
        """Return whether the file names and the rows are those of shard ``number`` of the job."""
        start, stop = job.span(number)
        return (self.vectors, self.ids) == _names(number, job) and self.rows == stop - start

    @property
    def files(self) -> dict[str, str]:
        """Name of each file.

        Keys: ``vectors`` and ``ids``, or only ``vectors`` if one file contains both.
        """
        return {"vectors": self.vectors} | ({"ids": self.ids} if self.ids != self.vectors else {})


@dataclass(frozen=True)
class _JobFile:
    job: EncodingJob


@dataclass(frozen=True)
class _Source:
    encoder: str


@dataclass(frozen=True)
class _About:
    """Origin of vectors (``job``) or of an index (``origin``)."""

    job: _Source | None = None
    origin: _Source | None = None


@dataclass(frozen=True)
class _RecordFile(_JobFile):
    shard: ShardRecord


@dataclass(frozen=True)
class _Manifest(_JobFile):
    format: str
    dimension: int
    shards: list[ShardRecord]

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise ValueError(
                f"found format {self.format!r}; a manifest of embeddings has {FORMAT!r}"
            )


def _names(number: int, job: EncodingJob) -> tuple[str, str]:
    vectors, ids = FILES[job.format]
    return f"{number:05d}.{vectors}", f"{number:05d}.{ids}"


def check_folder(folder: Path, job: EncodingJob) -> None:
    """Raise InputError if a folder has embeddings of another job, or other files."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder}: is a file; expected a folder for embeddings")
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if not _OUR_FILES.fullmatch(path.name):
            raise InputError(
                f"{folder}: contains {path.name!r}, which is not a file of embeddings; choose an "
                "empty folder or a folder of embeddings"
            )
        if path.name != MANIFEST and not path.name.endswith(".shard.json"):
            continue
        try:
            read_json(path)
        except InputError:  # a damaged file is written again
            continue
        found = asdict(read_json(path, _JobFile, version=VERSION).job)
        for name, value in asdict(job).items():
            if found[name] != value:
                now = f"{name} {found[name]!r}, but now {value!r}"
                raise InputError(
                    f"{path}: belongs to other embeddings ({now}). Choose another folder, or "
                    "delete this one."
                )


def saved_dtype(folder: str | Path) -> str | None:
    """Return the dtype of the embeddings in a folder, or None if there are none."""
    try:
        return str(read_json(Path(folder) / MANIFEST, _JobFile).job.dtype)
    except InputError:  # not finished
        return started_options(folder).get("dtype")


def saved_precision(folder: str | Path) -> str | None:
    """Return the precision of the vectors or the index in a folder, or None if there are none."""
    for path in (Path(folder) / MANIFEST, *Path(folder).glob("*.shard.json")):
        with suppress(InputError):  # not finished, or damaged and written again
            about = read_json(path, _About)
            source = about.job or about.origin
            precision = source.encoder.partition(" ")[0] if source else ""
            return precision if precision in PRECISIONS else None
    return None


def started_options(folder: str | Path) -> dict[str, Any]:
    """Return settings of the shards in a folder, as arguments of ``encode_texts``, or {}.

    The settings are shard_size, dtype, format and text.
    """
    for path in Path(folder).glob("*.shard.json"):
        with suppress(InputError):  # a damaged file is written again
            job = read_json(path, _JobFile).job
            return {name: getattr(job, name) for name in ("shard_size", "dtype", "format", "text")}
    return {}


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
    for stale in folder.glob(f".{number:05d}.*.part"):  # files that a killed process left
        stale.unlink(missing_ok=True)
    with np.errstate(over="ignore"):  # an overflow gives infinity, which is refused below
        vectors = shard.vectors.astype(job.dtype, copy=False)
    refuse_infinite(job.kind, shard.ids, vectors)
    names = _names(number, job)
    with whole_file(folder / names[0]) as file:
        if job.format == "parquet":
            _write_parquet(file, shard._replace(vectors=vectors))
        else:
            np.save(file, vectors, allow_pickle=False)
    if job.format == "npy":
        write_text(folder / names[1], json.dumps(list(shard.ids), ensure_ascii=False))
    record = ShardRecord(
        *names, rows=len(shard.ids), dimension=vectors.shape[1], bytes={}, sha256={}
    )
    for part, name in record.files.items():
        record.bytes[part] = (folder / name).stat().st_size
        record.sha256[part] = sha256_of(folder / name)
    write_json(folder / f"{number:05d}.shard.json", {"job": asdict(job), "shard": asdict(record)})


def _write_parquet(file: BinaryIO, shard: Shard) -> None:
    """Write a shard. The column ``text`` is written if the shard has texts."""
    values = pa.array(np.ascontiguousarray(shard.vectors).reshape(-1))
    columns = {"id": pa.array(shard.ids, pa.string())}
    columns |= {} if shard.texts is None else {"text": pa.array(shard.texts, pa.string())}
    columns["embedding"] = pa.FixedSizeListArray.from_arrays(values, shard.vectors.shape[1])
    # if all values differ, a dictionary takes more space
    pq.write_table(pa.table(columns), file, use_dictionary=False)


def _read_parquet(
    path: Path, rows: int, dimension: int, dtype: str
) -> tuple[list[str], np.ndarray]:
    """Return the ids and the vectors (rows, dimension) of a file that ``_write_parquet`` wrote.

    Raises InputError if this is not a Parquet file, or if its columns, types or sizes are wrong.
    """
    expected = (
        f"; expected {rows} rows with the columns id (string) and embedding ({dtype}, "
        f"{dimension} numbers)"
    )
    with (
        library_errors(
            f"{path}: not a Parquet file", pa.ArrowException, OSError, OverflowError, fix=expected
        ),
        pq.ParquetFile(path) as file,
    ):
        kind = pa.list_(pa.from_numpy_dtype(dtype), dimension)
        found = {field.name: field.type for field in file.schema_arrow}
        if (file.metadata.num_rows, found.get("id"), found.get("embedding")) != (
            rows,
            pa.string(),
            kind,
        ):
            raise InputError(
                f"{path}: has {file.metadata.num_rows} rows with the columns {found}{expected}"
            )
        table = file.read(["id", "embedding"])
    vectors = table["embedding"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
    return table["id"].to_pylist(), vectors.reshape(rows, dimension)


def damage(folder: Path, record: ShardRecord) -> str | None:
    """Return a sentence about a shard's first missing or damaged file, or None."""
    for part, name in record.files.items():
        path = folder / name
        if not path.is_file():
            return f"{path} is missing"
        if path.stat().st_size != record.bytes.get(part):
            return f"{path} has {path.stat().st_size} bytes instead of {record.bytes.get(part)}"
        if sha256_of(path) != record.sha256.get(part):
            return f"{path} is damaged: its SHA-256 differs from the recorded SHA-256"
    return None


def read_record(folder: Path, number: int, job: EncodingJob) -> ShardRecord | None:
    """Return the record of shard ``number``, or None if missing, damaged or of another job."""
    try:
        found = read_json(folder / f"{number:05d}.shard.json", _RecordFile)
    except InputError:
        return None
    return found.shard if found.job == job and found.shard.fits(job, number) else None


def write_manifest(folder: Path, job: EncodingJob) -> bool:
    """Write ``manifest.json`` from the records and return True.

    If a shard has no record yet, return False instead.
    """
    records = [
        record
        for number in range(job.count)
        if (record := read_record(folder, number, job)) is not None
    ]
    if len(records) < job.count:
        return False
    manifest = {
        "format": FORMAT,
        "format_version": VERSION,
        "job": asdict(job),
        "dimension": records[0].dimension if records else 0,
        "shards": [asdict(record) for record in records],
    }
    write_json(folder / MANIFEST, manifest)
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
            state = (
                f"{finished} shards are finished, others are missing"
                if finished
                else "no embeddings"
            )
            raise InputError(
                f"{self.folder}: has no {MANIFEST} ({state}). Run `contaccum encode` to the end."
            )
        manifest = read_json(path, _Manifest, version=VERSION)
        self.job, self.dimension, self._records = manifest.job, manifest.dimension, manifest.shards
        if len(self._records) != self.job.count:
            raise InputError(
                f"{path}: lists {len(self._records)} shards, but its job has {self.job.count}. "
                "Encode the texts again."
            )
        for number, record in enumerate(self._records):
            if not record.fits(self.job, number) or record.dimension != self.dimension:
                start, stop = self.job.span(number)
                raise InputError(
                    f"{path}: shards[{number}] is {record.vectors} with {record.rows} vectors of "
                    f"dimension {record.dimension}; expected {_names(number, self.job)[0]} with "
                    f"{stop - start} vectors of dimension {self.dimension}"
                )
        count = len(self._records)
        self._numbers = range(count * rank // world, count * (rank + 1) // world)
        self._checked: set[int] = set()
        if encoder is not None and self.job.encoder != encoder:
            raise InputError(
                f"{path}: these embeddings were made by a different encoder (encoder "
                f"{self.job.encoder!r}, not {encoder!r}). Use another folder."
            )
        if source is not None and self.job.source != source:
            raise InputError(
                f"{path}: these embeddings were made from different data (source "
                f"{self.job.source!r}, not {source!r}). Use another folder."
            )

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(
        self,
    ) -> Iterator[Shard]:  # the inherited method would treat an IndexError as the end
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
        record = self._records[number]
        if number not in self._checked:
            if fault := damage(self.folder, record):
                raise InputError(
                    f"{fault}. Run `contaccum encode` again to repair it, or delete the folder."
                )
            self._checked.add(number)
        path, shape = self.folder / record.vectors, (record.rows, self.dimension)
        if self.job.format == "parquet":
            return Shard(*_read_parquet(path, *shape, self.job.dtype))
        with library_errors(f"{path}: contains no array of numbers", *_BAD_HEADER):
            vectors = np.load(path, mmap_mode="r", allow_pickle=False)
        ids = read_json(self.folder / record.ids, list[str])
        if (vectors.shape, vectors.dtype, len(ids)) != (shape, self.job.dtype, len(vectors)):
            raise InputError(
                f"{path}: contains {vectors.dtype} vectors of shape {vectors.shape}, with "
                f"{len(ids)} ids in {record.ids}; expected {self.job.dtype} vectors of shape "
                f"{shape}, each with an id"
            )
        return Shard(ids, vectors)


def count_rows(shards: Shards) -> int:
    """Return the number of rows in all shards. For a ShardFolder this reads no shard."""
    return (
        shards.rows
        if isinstance(shards, ShardFolder)
        else sum(len(shard.vectors) for shard in shards)
    )


def row_blocks(shards: Iterable[Shard], dtype: Any = None) -> Iterator[Shard]:
    """Divide shards into blocks of at most ``BLOCK`` rows, with contiguous vectors.

    dtype: None keeps that of the shards.
    """
    for shard in shards:
        for start in range(0, len(shard.vectors), BLOCK):
            rows = slice(start, start + BLOCK)
            yield Shard(shard.ids[rows], np.ascontiguousarray(shard.vectors[rows], dtype=dtype))

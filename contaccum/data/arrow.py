"""Tables that stay on disk: written once as Arrow streams into the cache, opened memory-mapped, never loaded whole."""

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
from datasets import Dataset

from contaccum.errors import InputError
from contaccum.files import cache_folder, sweep, whole_folder

READER_VERSION = 4  # raise it whenever a reader reads the same file differently, so that older tables are built anew

PASSAGE_COLUMNS = ("id", "title", "text")
QUERY_COLUMNS = ("id", "text")
_BATCH = 5000  # rows of one record batch: about 4 MB of passages


@dataclass(frozen=True)
class Ragged:
    """n lists of whole numbers, end to end; list i is ``values[offsets[i]:offsets[i + 1]]``."""

    offsets: np.ndarray  # (n + 1,) int64
    values: np.ndarray  # (offsets[n],) int64

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def row(self, index: SupportsIndex) -> np.ndarray:
        """List ``index``, an int64 view of shape (its length,)."""
        place = index.__index__()
        return self.values[self.offsets[place] : self.offsets[place + 1]]

    @property
    def lengths(self) -> np.ndarray:
        """The length of every list, (n,) int64."""
        return np.diff(self.offsets)

    def renumbered(self, kept: np.ndarray) -> "Ragged":
        """The same lists, each number replaced by its place in ``kept``, which is sorted and holds them all."""
        return Ragged(self.offsets, np.searchsorted(kept, self.values))

    @classmethod
    def of(cls, rows: Iterable[Iterable[int]]) -> "Ragged":
        """From any lists."""
        values: list[int] = []
        ends = [0]
        for row in rows:
            values.extend(row)
            ends.append(len(values))
        return cls(np.array(ends, dtype=np.int64), np.array(values, dtype=np.int64))


class TableWriter:
    """Writes rows of strings to an Arrow stream batch by batch, and hashes what it wrote."""

    def __init__(self, path: Path, columns: tuple[str, ...]) -> None:
        self._schema = pa.schema([(name, pa.string()) for name in columns])
        self._sink = pa.OSFile(str(path), "wb")
        self._stream = pa.ipc.new_stream(self._sink, self._schema)
        self._digest = hashlib.blake2b(digest_size=16)
        self._rows: list[tuple[str, ...]] = []
        self.rows = 0

    def add(self, row: tuple[str, ...]) -> int:
        """Take one row, in the order of the columns; returns its number."""
        self._rows.append(row)
        self.rows += 1
        if len(self._rows) == _BATCH:
            self._flush()
        return self.rows - 1

    def _flush(self) -> None:
        columns = zip(*self._rows, strict=True)
        batch = pa.record_batch([pa.array(column, pa.string()) for column in columns], schema=self._schema)
        for column in batch.columns:
            for buffer in column.buffers():
                if buffer is not None:
                    self._digest.update(buffer)
        self._stream.write_batch(batch)
        self._rows.clear()

    def close(self) -> str:
        """Finish the file; returns the hash of all rows, in hex."""
        if self._rows:
            self._flush()
        self._stream.close()
        self._sink.close()
        return self._digest.hexdigest()


def open_table(path: Path) -> Dataset:
    """Open a written table memory-mapped."""
    return Dataset.from_file(str(path))


def column_batches(table: Dataset, columns: Iterable[str], size: int = 10_000) -> Iterator[dict[str, list[str]]]:
    """The named columns of a table, ``size`` rows at a time."""
    narrow = table.select_columns(list(columns))
    for start in range(0, len(narrow), size):
        yield narrow[start : start + size]


def cached_folder(kind: str, key: object, build: Callable[[Path], None]) -> Path:
    """The cache's folder for ``key`` (anything JSON can hold); where there is none, ``build(folder)`` fills it."""
    name = hashlib.sha256(json.dumps([READER_VERSION, key]).encode()).hexdigest()[:32]
    folder = cache_folder() / kind / name
    if not folder.is_dir():
        with one_at_a_time(cache_folder() / "locks" / name):
            if not folder.is_dir():  # another process may have built it while this one waited
                if folder.parent.is_dir():
                    sweep(folder.parent, name)
                with whole_folder(folder) as part:
                    build(part)
    return folder


@contextmanager
def one_at_a_time(path: Path) -> Iterator[None]:
    """The block, in one process after another; the lock of a process that dies is free again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise InputError(f"{path}: could not be written ({error.strerror or error})") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def file_key(path: Path) -> list[Any]:
    """What tells one state of a file from another: where it is, its size, and when it was last written (ns)."""
    status = path.stat()
    return [str(path.resolve()), status.st_size, status.st_mtime_ns]

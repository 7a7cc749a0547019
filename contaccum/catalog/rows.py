"""Read rows from JSON, Parquet, CSV and TSV files, local or on the Hub, and write rows to a BEIR folder."""

import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from io import BufferedReader
from itertools import starmap
from pathlib import Path
from typing import Any

from datasets import load_dataset
from datasets.exceptions import DatasetsError
from huggingface_hub import HfFileSystem

from contaccum.errors import InputError, in_one_line
from contaccum.formats import SourceLocation, decoded, open_bytes, unpacked_limit, write_beir_folder
from contaccum.formats.json_records import Record, id_field, json_stream, string_field, title_field
from contaccum.formats.readers import grade_of

Rows = Iterable[tuple[SourceLocation, Record]]
"""Rows of a file: pairs of the location (for error messages) and the record."""
_UNREADABLE = (OSError, ValueError, RuntimeError, DatasetsError, EOFError, TypeError, zlib.error)
"""Errors that a damaged file causes. EOFError and zlib.error: a damaged gzip file."""


class _RowLocation(SourceLocation):
    """Location of a row in a Parquet or CSV file, for error messages."""

    def __str__(self) -> str:
        return f"{self.path}, row {self.line}"


def local_rows(paths: Iterable[Path]) -> Iterator[tuple[SourceLocation, Record]]:
    """Read the rows of local files. ``datasets`` does not copy the rows into its cache."""
    for path in paths:
        yield from _reader(str(path))(path)


def remote_rows(url: str) -> Iterator[tuple[SourceLocation, Record]]:
    """Read the rows of a Hub file over the network, without storing the file."""
    reader = _reader(url)
    if reader is not _objects:
        yield from reader(url)
        return
    with HfFileSystem().open(url, "rb") as remote, decoded(BufferedReader(remote), unpacked_limit(remote.size)) as file:
        yield from json_stream(file, Path(url), "a row (an object)")


def _reader(name: str) -> Callable[[Any], Rows]:
    reader = _READERS.get(Path(name.removesuffix(".gz")).suffix)
    if reader is None:
        raise InputError(f"{name}: unknown file ending; expected one of {', '.join(_READERS)}")
    return reader


def _objects(path: Path) -> Iterator[tuple[SourceLocation, Record]]:
    with open_bytes(path) as file:
        yield from json_stream(file, path, "a row (an object)")


def _table(form: str, path: Path | str, **options: Any) -> Rows:
    def rows() -> Iterator[Record]:
        yield from load_dataset(form, data_files=[str(path)], split="train", streaming=True, **options)

    return numbered(Path(path), rows())


_READERS: dict[str, Callable[[Any], Rows]] = {
    ".parquet": partial(_table, "parquet"), ".jsonl": _objects, ".json": _objects,
    ".csv": partial(_table, "csv"), ".tsv": partial(_table, "csv", sep="\t"),
}  # fmt: skip
"""File ending -> function that reads the file. The file may also be gzipped (such as .jsonl.gz)."""


def numbered(path: Path, rows: Iterable[Record]) -> Iterator[tuple[SourceLocation, Record]]:
    """Yield each row with its location; row numbers start at 1. Raise InputError if a row cannot be read."""
    number = 0
    try:
        for number, row in enumerate(rows, 1):
            yield _RowLocation(path, number), row
    except _UNREADABLE as error:
        raise InputError(
            f"{path}: cannot be read after row {number} ({in_one_line(error)}); the file is probably damaged"
        ) from error


def beir_from_rows(folder: Path, name: str, corpus: Rows, queries: Rows, grades: Mapping[str, Rows]) -> None:
    """Write rows with the column names of MTEB to a BEIR folder.

    name: name of the data set, for error messages. grades: split -> rows of the judgements.
    """
    judged = {split: starmap(_judgement, rows) for split, rows in grades.items()}
    try:
        write_beir_folder(folder, starmap(_passage, corpus), starmap(_query, queries), judged)
    except InputError as error:
        raise InputError(f"{name}: {error}") from error


def _passage(location: SourceLocation, row: Record) -> dict[str, str]:
    return {**_query(location, row), "title": title_field(row, location)}


def _query(location: SourceLocation, row: Record) -> dict[str, str]:
    """Return the id and text of a row. In some data sets the column of the id is named ``id`` and contains numbers."""
    key = "id" if "id" in row and "_id" not in row else "_id"
    return {"_id": id_field(row, key, location), "text": string_field(row, "text", location)}


def _judgement(location: SourceLocation, row: Record) -> tuple[str, str, int]:
    score = row.get("score", 1)
    if isinstance(score, float) and score.is_integer():
        score = int(score)
    text = score if isinstance(score, str) else json.dumps(score, default=str)
    return id_field(row, "query-id", location), id_field(row, "corpus-id", location), grade_of(text, location)

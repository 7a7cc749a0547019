"""Read a corpus as a memory-mapped table, and read files of queries.

The first call for a corpus checks it and writes an Arrow file into the cache. Later calls map this
Arrow file into memory.
"""

import os
import warnings
from array import array
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
from datasets import Dataset

from contaccum.config import DataPolicy
from contaccum.data.identity import text_hash
from contaccum.data.tables import (
    PASSAGE_COLUMNS,
    TableWriter,
    cached_tables,
    column_batches,
    text_hashes,
)
from contaccum.errors import InputError
from contaccum.formats.readers import beir_file, numbered_corpus, numbered_queries
from contaccum.formats.records import OnError, Passage, SourceLocation, ignore, is_blank, stop
from contaccum.runtime.cache import file_key
from contaccum.runtime.progress import Progress

REPAIR = "Use --repair (in training: --data.repair true)"


class Corpus(NamedTuple):
    table: Dataset  # n rows, columns id, title, text
    hashes: np.ndarray  # (n,) int64, hash of each passage's text
    fingerprint: str
    source: Path


class Queries(NamedTuple):
    texts: dict[str, str]  # query id -> text
    source: Path


def open_corpus(path: Path, policy: DataPolicy) -> Corpus:
    """Open a corpus: a BEIR folder, a corpus.jsonl, a DPR TSV or MS MARCO's collection.tsv.

    A passage with a duplicate id or without text is invalid, but common in public data sets. With
    ``repair``, it only causes a warning: of several passages with the same id, the last is used, as
    in BEIR's loader; empty texts are kept.
    """
    source = corpus_file(path)
    key = [file_key(source), policy.repair]
    folder, about = cached_tables(
        "corpus", key, lambda folder: build_corpus(source, policy.repair, folder)
    )
    if about["repeated"]:
        warnings.warn(
            f"{source}: {about['repeated']} passages are skipped, because a later passage has the "
            "same id",
            stacklevel=4,
        )
    if about["empty"]:
        warnings.warn(f"{source}: {about['empty']} passages have no text", stacklevel=4)
    passages = folder / "passages.arrow"
    table = Dataset.from_file(str(passages))
    return Corpus(table, text_hashes(passages), about["fingerprint"], source)


def corpus_file(path: Path) -> Path:
    """Return the file of passages: ``path`` itself, or the corpus of a BEIR folder."""
    # Path.is_dir raises an error for some strings
    source = beir_file(path, "corpus.jsonl") if os.path.isdir(path) else path
    if not os.path.isfile(source):
        raise InputError(f"{source}: no such file or folder")
    return source


def build_corpus(
    source: Path, repair: bool, folder: Path, on_error: OnError = stop
) -> dict[str, Any]:
    """Write the table of passages into ``folder``. Return what about.json is to contain.

    A set of all ids would need too much memory, so the first pass over the file keeps only a hash
    of each id. If two hashes are equal, a second pass reads the ids to find the duplicates. With
    ``repair``, a third pass writes the table again without them.
    """
    hashes, about = _write_corpus(source, repair, folder, set(), on_error)
    passages = _valid_passages(source, repair, ignore)
    ids = ((location.line, passage.id) for location, passage in passages)
    repeated = repeated_ids(hashes, ids)
    if repeated and repair:
        dropped = {line for lines in repeated.values() for line in lines[:-1]}
        _, about = _write_corpus(source, repair, folder, dropped, on_error)
    else:
        for key, lines in repeated.items():
            message = duplicate_id("passage", key, f"line {lines[0]}")
            for line in lines[1:]:
                on_error(SourceLocation(source, line).error(message))
    return about


def _write_corpus(
    source: Path, repair: bool, folder: Path, dropped: set[int], on_error: OnError
) -> tuple[array, dict[str, Any]]:
    """Write the table of passages without the lines in ``dropped``.

    Returns the hash of every passage id, and the content of about.json.
    """
    writer = TableWriter(folder / "passages.arrow", PASSAGE_COLUMNS)
    hashes = array("q")
    empty = 0
    passages = _valid_passages(source, repair, on_error)
    for location, passage in Progress.over(passages, f"reading {source.name}", "passages"):
        if location.line in dropped:
            continue
        empty += is_blank(passage.text)
        hashes.append(hash(passage.id))
        writer.add(passage, text_hash(passage.content))
    fingerprint = writer.close()
    if not writer.rows:
        raise InputError(f"{source}: has no passage that can be used; a corpus needs at least one")
    return hashes, {"fingerprint": fingerprint, "repeated": len(dropped), "empty": empty}


def _valid_passages(
    source: Path, repair: bool, on_error: OnError
) -> Iterator[tuple[SourceLocation, Passage]]:
    """Yield the location and the passage of each record. Without ``repair``, a text is required."""
    for location, passage in numbered_corpus(source, on_error):
        if not repair and is_blank(passage.text):
            on_error(
                location.error(
                    f"passage {passage.id!r} has an empty text; every passage needs a text. "
                    f"{REPAIR} to accept empty texts."
                )
            )
        else:
            yield location, passage


def duplicate_id(what: str, key: str, first: str, repairable: bool = True) -> str:
    """Return the error message for a duplicate id. first: location of the first record with it."""
    fix = f" {REPAIR} to keep the last one." if repairable else ""
    return f"duplicate {what} id {key!r} (first at {first}); ids must be unique.{fix}"


def repeated_ids(hashes: array, ids: Iterable[tuple[int, str]]) -> dict[str, list[int]]:
    """Return every duplicate id with the line numbers of all its records.

    ``hashes`` has a 64-bit hash of every id. ``ids`` yields the line number and the id of every
    record, in the same order. Only if two hashes are equal, ``ids`` is read to check whether the
    ids are equal.
    """
    ordered = np.sort(np.frombuffer(hashes, dtype=np.int64))
    suspects = set(ordered[1:][ordered[1:] == ordered[:-1]].tolist())
    lines: dict[str, list[int]] = {}
    if suspects:
        for (line, key), hashed in zip(ids, hashes, strict=True):
            if hashed in suspects:
                lines.setdefault(key, []).append(line)
    return {key: numbers for key, numbers in lines.items() if len(numbers) > 1}


def open_queries(path: Path, policy: DataPolicy, ids: Collection[str] | None = None) -> Queries:
    """Read queries from a BEIR folder, a queries.jsonl or a queries.tsv.

    If ``ids`` is given, only these queries are returned. A duplicate query id is invalid. With
    ``repair``, the last query with the id is used, and a warning gives the number of skipped
    queries.
    """
    return read_query_texts(queries_file(path), policy.repair, ids)


def queries_file(path: Path) -> Path:
    """Return the file of queries: ``path`` itself, or the queries of a BEIR folder."""
    return beir_file(path, "queries.jsonl") if os.path.isdir(path) else path


def read_query_texts(
    source: Path, repair: bool, ids: Collection[str] | None = None, on_error: OnError = stop
) -> Queries:
    """Read a file of queries (see ``open_queries``)."""
    texts: dict[str, str] = {}
    lines: dict[str, int] = {}  # query id -> line number
    repeated = 0
    for location, query in numbered_queries(source, on_error):
        if query.id in lines:
            if not repair:
                message = duplicate_id("query", query.id, f"line {lines[query.id]}")
                on_error(location.error(message))
                continue
            repeated += 1
        lines[query.id] = location.line
        if ids is None or query.id in ids:
            texts[query.id] = query.text
    if not lines:
        raise InputError(f"{source}: has no valid query; it needs at least one")
    if repeated:
        warnings.warn(
            f"{source}: {repeated} queries are skipped, because a later query has the same id",
            stacklevel=2,
        )
    return Queries(texts, source)


def beir_records(table: Dataset) -> Iterator[dict[str, str]]:
    """Yield the rows of a table of passages or queries as records of a BEIR file."""
    columns = table.column_names  # id, then title and text, or text alone
    for batch in column_batches(table, columns):
        for row in zip(*(batch[column] for column in columns), strict=True):
            record = dict(zip(columns, row, strict=True))
            yield {"_id": record.pop("id"), **record}


def find_rows(corpus: Dataset, ids: Iterable[str]) -> dict[str, int]:
    """Map each passage id to its row number in ``corpus``. Ids that are not in it are left out."""
    column = corpus.data.column("id")
    rows = pc.indices_nonzero(pc.is_in(column, value_set=pa.array(list(ids), pa.string())))
    return dict(zip(column.take(rows).to_pylist(), rows.to_pylist(), strict=True))

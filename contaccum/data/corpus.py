"""Read a corpus as a memory-mapped table, and read files of queries.

The first call for a corpus checks it and writes an Arrow file into the cache. Later calls map this Arrow file into memory.
"""

import os
import warnings
from array import array
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
from datasets import Dataset
from tqdm import tqdm

from contaccum.config import DataPolicy
from contaccum.data.tables import (
    PASSAGE_COLUMNS,
    About,
    TableWriter,
    column_batches,
    read_about,
    report_rejected,
    warn_of_rejected,
    write_about,
    write_rejected,
)
from contaccum.errors import InputError
from contaccum.formats.readers import beir_file, numbered_corpus, numbered_queries
from contaccum.formats.records import Passage, RejectedRecords, SourceLocation, is_blank
from contaccum.runtime.locks import cached_folder, file_key

REPAIR = "Use --repair (in training: --data.repair true)"


class Corpus(NamedTuple):
    table: Dataset  # columns id, title, text
    fingerprint: str
    source: Path
    left_out: int  # number of rejected records


@dataclass(frozen=True, kw_only=True)
class _About(About):
    repeated: int
    empty: int


class Queries(NamedTuple):
    texts: dict[str, str]  # query id -> text
    source: Path
    left_out: int  # number of rejected records


def duplicate_id(what: str, key: str, first: object, repairable: bool = True) -> str:
    """Return the error message for a duplicate id. ``first`` is the location of the first record with this id."""
    fix = f" {REPAIR} to keep the last one." if repairable else ""
    return f"duplicate {what} id {key!r} (first at {first}); ids must be unique.{fix}"


def open_corpus(path: Path, policy: DataPolicy) -> Corpus:
    """Open a corpus: a BEIR folder, a corpus.jsonl, a DPR TSV or MS MARCO's collection.tsv.

    A passage with a duplicate id or without text is invalid, but common in public data sets. With ``repair``, it only
    causes a warning: of several passages with the same id, the last is used, as in BEIR's loader; empty texts are kept.
    """
    # Path.is_dir raises an error for some strings
    source = beir_file(path, "corpus.jsonl") if os.path.isdir(path) else path
    if not os.path.isfile(source):
        raise InputError(f"{source}: no such file or folder")
    RejectedRecords.of(policy)  # raises an error if max_bad_records is negative
    key = [file_key(source), policy.repair, policy.max_bad_records]
    folder = cached_folder("corpus", key, lambda folder: _build_corpus(source, policy, folder))
    about = read_about(folder, _About)
    warn_of_rejected(source, about.bad, folder)
    if about.repeated:
        warnings.warn(
            f"{source}: {about.repeated} passages are skipped, because a later passage has the same id", stacklevel=4
        )
    if about.empty:
        warnings.warn(f"{source}: {about.empty} passages have no text", stacklevel=4)
    return Corpus(Dataset.from_file(str(folder / "passages.arrow")), about.fingerprint, source, about.bad)


def _build_corpus(source: Path, policy: DataPolicy, folder: Path) -> None:
    """Write the table of passages into the cache folder ``folder``.

    A set of all ids would need too much memory, so the first pass keeps only a hash of each id. If two hashes are equal, a second
    pass reads the ids to find the duplicates, and a third pass writes the table again without the duplicates.
    """
    hashes, about, rejected = _write_corpus(source, policy, folder, {})
    again = _passages(source, policy.repair, RejectedRecords.of(policy))
    repeated = repeated_ids(hashes, ((location.line, passage.id) for location, passage in again)).values()
    if repeated:
        dropped = [lines[:-1] if policy.repair else lines[1:] for lines in repeated]
        first = {line: lines[0] for lines, gone in zip(repeated, dropped, strict=True) for line in gone}
        _, about, rejected = _write_corpus(source, policy, folder, first)
    write_rejected(folder, rejected)
    write_about(folder, about)


def _write_corpus(
    source: Path, policy: DataPolicy, folder: Path, dropped: dict[int, int]
) -> tuple[array, dict[str, object], RejectedRecords]:
    """Write the table of passages without the lines in ``dropped``.

    dropped: line number -> number of the first line with the same passage id. Without ``repair``, dropped lines are rejected
    records. Returns the hash of every passage id, the content of about.json, and the rejected records.
    """
    writer, rejected = TableWriter(folder / "passages.arrow", PASSAGE_COLUMNS), RejectedRecords.of(policy)
    hashes, empty = array("q"), 0
    passages = _passages(source, policy.repair, rejected)
    for location, passage in tqdm(passages, desc=f"reading {source.name}", unit=" passages", disable=None):
        if location.line in dropped:
            if not policy.repair:
                message = duplicate_id("passage", passage.id, f"line {dropped[location.line]}")
                rejected.reject(location.error(message))
            continue
        empty += is_blank(passage.text)
        hashes.append(hash(passage.id))
        writer.add(passage)
    fingerprint = writer.close()
    if not writer.rows:
        raise InputError(f"{source}: has no passage that can be used; a corpus needs at least one")
    repeated = len(dropped) if policy.repair else 0
    about = {"fingerprint": fingerprint, "repeated": repeated, "empty": empty, "bad": len(rejected.entries)}
    return hashes, about, rejected


def _passages(source: Path, repair: bool, rejected: RejectedRecords) -> Iterator[tuple[SourceLocation, Passage]]:
    """Yield the location and the passage of each record. Without ``repair``, a passage without text is rejected."""
    for location, passage in numbered_corpus(source, rejected):
        if not repair and is_blank(passage.text):
            found = (
                f"passage {passage.id!r} has an empty text; every passage needs a text. {REPAIR} to accept empty texts."
            )
            rejected.reject(location.error(found))
        else:
            yield location, passage


def repeated_ids(hashes: array, ids: Iterable[tuple[int, str]]) -> dict[str, list[int]]:
    """Return every duplicate id with the line numbers of all its records.

    ``hashes`` has a 64-bit hash of every id. ``ids`` yields the line number and the id of every record, in the same order.
    If two hashes are equal, ``ids`` is read to check whether the ids are equal too. Otherwise, ``ids`` is not read.
    """
    ordered = np.sort(np.frombuffer(hashes, dtype=np.int64))
    suspects = set(ordered[1:][ordered[1:] == ordered[:-1]].tolist())
    lines: dict[str, list[int]] = {}
    if suspects:
        for (line, key), hashed in zip(ids, hashes, strict=True):
            if hashed in suspects:
                lines.setdefault(key, []).append(line)
    return {key: found for key, found in lines.items() if len(found) > 1}


def open_queries(path: Path, policy: DataPolicy, ids: Collection[str] | None = None) -> Queries:
    """Read queries from a BEIR folder, a queries.jsonl or a queries.tsv. If ``ids`` is given, return only these queries.

    A duplicate query id is an invalid record. With ``repair``, the last query with the id is used, and a warning gives the number
    of skipped queries.
    """
    source = beir_file(path, "queries.jsonl") if os.path.isdir(path) else path
    rejected = RejectedRecords.of(policy)
    texts: dict[str, str] = {}
    lines: dict[str, int] = {}
    repeated = 0
    for location, query in numbered_queries(source, rejected):
        if query.id in lines:
            if not policy.repair:
                message = duplicate_id("query", query.id, f"line {lines[query.id]}")
                rejected.reject(location.error(message))
                continue
            repeated += 1
        lines[query.id] = location.line
        if ids is None or query.id in ids:
            texts[query.id] = query.text
    if not lines:
        raise InputError(f"{source}: has no valid query; it needs at least one")
    report_rejected(source, rejected)
    if repeated:
        warnings.warn(f"{source}: {repeated} queries are skipped, because a later query has the same id", stacklevel=2)
    return Queries(texts, source, len(rejected.entries))


def beir_records(table: Dataset) -> Iterator[dict[str, str]]:
    """Yield the rows of a table of passages or queries as records of a BEIR file."""
    names = ["_id", *table.column_names[1:]]
    for batch in column_batches(table, table.column_names):
        yield from (dict(zip(names, row, strict=True)) for row in zip(*batch.values(), strict=True))


def find_rows(corpus: Dataset, ids: Iterable[str]) -> dict[str, int]:
    """Map each passage id to its row number in ``corpus``. Ids that are not in ``corpus`` are left out."""
    column = corpus.data.column("id")
    rows = pc.indices_nonzero(pc.is_in(column, value_set=pa.array(list(ids), pa.string())))
    return dict(zip(column.take(rows).to_pylist(), rows.to_pylist(), strict=True))

"""Read a corpus as a memory-mapped table, and read files of queries.

The first call for a corpus checks it and writes an Arrow file into the cache. Later calls map this
Arrow file into memory.
"""

import os
import warnings
from array import array
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
from datasets import Dataset

from contaccum.config import DataPolicy
from contaccum.data.identity import first_with_same_text, text_hash
from contaccum.data.tables import (
    PASSAGE_COLUMNS,
    TableWriter,
    cached_tables,
    column_batches,
    rewrite,
    text_hashes,
)
from contaccum.errors import InputError
from contaccum.formats.readers import beir_file, numbered_corpus, numbered_queries
from contaccum.formats.records import OnError, SourceLocation, is_blank, stop
from contaccum.runtime.cache import file_key
from contaccum.runtime.progress import progress_bar
from contaccum.runtime.units import counted

REPAIR = "Use --repair (in training: --data.repair true)"


class Corpus(NamedTuple):
    table: Dataset  # n rows, columns id, title, text
    hashes: np.ndarray  # (n,) int64, hash of each passage's text
    fingerprint: str


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
            f"{source}: skipped {counted(about['repeated'], 'passage')} with the id of a later one",
            stacklevel=4,
        )
    if about["empty"]:
        warnings.warn(f"{source}: {counted(about['empty'], 'passage')} without text", stacklevel=4)
    passages = folder / "passages.arrow"
    table = Dataset.from_file(str(passages))
    return Corpus(table, text_hashes(passages), about["fingerprint"])


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

    A set of all ids would need too much memory, so ids are compared by 64-bit hashes.
    """
    writer = TableWriter(folder / "passages.arrow", PASSAGE_COLUMNS)
    hashes = array("q")  # of ids
    lines = array("q")
    empty = []  # row numbers
    passages = numbered_corpus(source, on_error)
    for location, passage in progress_bar(None, f"reading {source.name}", "passages", passages):
        if is_blank(passage.text):
            empty.append(writer.rows)
            if not repair:
                on_error(
                    location.error(
                        f"passage {passage.id!r} has an empty text; every passage needs a text. "
                        f"{REPAIR} to accept empty texts."
                    )
                )
        hashes.append(hash(passage.id))
        lines.append(location.line)
        writer.add(passage, text_hash(passage.content))
    fingerprint = writer.close()
    if not writer.rows:
        raise InputError(f"{source}: has no passage that can be used; a corpus needs at least one")
    ids = np.array(hashes)
    last = np.sort(len(ids) - 1 - np.unique(ids[::-1], return_index=True)[1])
    repeated = len(ids) - len(last)
    if repeated and repair:
        fingerprint = rewrite(writer, last)
    elif repeated:
        first = first_with_same_text(ids).tolist()
        table = Dataset.from_file(str(writer.path))
        for row, earlier in enumerate(first):
            if row != earlier:
                message = duplicate_id("passage", table[row]["id"], lines[earlier])
                on_error(SourceLocation(source, lines[row]).error(message))
    empty_count = int(np.isin(empty, last).sum())
    return {"fingerprint": fingerprint, "repeated": repeated, "empty": empty_count}


def duplicate_id(what: str, key: str, line: int) -> str:
    """Return the error message for a duplicate id. line: that of the first record with the id."""
    return (
        f"duplicate {what} id {key!r} (first at line {line}); ids must be unique. {REPAIR} to keep "
        "the last one."
    )


def queries_file(path: Path) -> Path:
    """Return the file of queries: ``path`` itself, or the queries of a BEIR folder."""
    return beir_file(path, "queries.jsonl") if os.path.isdir(path) else path


def read_query_texts(
    source: Path, repair: bool, ids: Collection[str] | None = None, on_error: OnError = stop
) -> dict[str, str]:
    """Read a queries.jsonl or a queries.tsv: query id -> text.

    If ``ids`` is given, only these queries are returned. A duplicate query id is invalid. With
    ``repair``, the last query with the id is used, and a warning gives the number of skipped
    queries.
    """
    texts: dict[str, str] = {}
    lines: dict[str, int] = {}  # query id -> line number
    repeated = 0
    different: set[str] = set()  # ids of several texts
    for location, query in numbered_queries(source, on_error):
        if query.id in lines:
            repeated += 1
            if not repair:
                on_error(location.error(duplicate_id("query", query.id, lines[query.id])))
        lines.setdefault(query.id, location.line)
        if ids is None or query.id in ids:
            if texts.setdefault(query.id, query.text) != query.text:
                different.add(query.id)
            texts[query.id] = query.text
    if not lines:
        raise InputError(f"{source}: has no valid query; it needs at least one")
    if repeated:
        doubt = ""
        if different:
            doubt = (
                f"; the texts of {counted(len(different), 'id')} differ, such as "
                f"{min(different)!r}, so judgements of the earlier ones now belong to the last"
            )
        warnings.warn(
            f"{source}: skipped {counted(repeated, 'query')} with the id of a later one{doubt}",
            stacklevel=2,
        )
    return texts


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


def beir_query_ids(ids: Sequence[str], passages: Dataset) -> list[str]:
    """Return ids for the queries of a new BEIR folder. A query with a passage's id gets another.

    Ids of training examples are only labels, but in a BEIR folder, a search leaves out the passage
    with the id of the query.
    """
    shared = find_rows(passages, ids)
    prefix = "query-"
    while True:
        new = {key: prefix + key for key in shared}
        if set(ids).isdisjoint(new.values()) and not find_rows(passages, new.values()):
            return [new.get(key, key) for key in ids]
        prefix += "query-"

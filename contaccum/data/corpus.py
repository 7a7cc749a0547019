"""Corpora and files of queries: passages as a memory-mapped table, queries in a plain dictionary.

The first reading of a corpus checks it and writes an Arrow file into the cache; later readings map that file.
"""

import os
import warnings
from array import array
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
from datasets import Dataset
from tqdm import tqdm

from contaccum.data.arrow import PASSAGE_COLUMNS, TableWriter, cached_folder, file_key, open_table
from contaccum.data.bad_records import BadRecords, Place
from contaccum.data.formats import beir_file, numbered_corpus, numbered_queries, read_questions
from contaccum.data.quarantine import keep_quarantine, warn_of, write_quarantine
from contaccum.data.records import Passage, Question, is_blank
from contaccum.errors import InputError
from contaccum.files import read_json, write_json


class Corpus(NamedTuple):
    """A corpus as it was read."""

    table: Dataset  # columns id, title, text
    fingerprint: str
    source: Path
    left_out: int  # bad records


class Queries(NamedTuple):
    """Queries as they were read."""

    texts: dict[str, str]  # id -> text
    source: Path
    left_out: int  # bad records


def load_corpus(path: str | Path, repair: bool = False, max_bad_records: int = 0) -> Dataset:
    """Open a corpus (BEIR folder, corpus.jsonl or DPR TSV) memory-mapped, with the columns id, title and text.

    Raises InputError, naming the line, for a passage id that stands twice and for a passage without text. Published
    data sets have both; with ``repair`` the last passage of an id stands (as in BEIR's own loader) and empty texts
    stay, and warnings count them. Up to ``max_bad_records`` records that would be refused are left out instead, listed in
    a quarantine file that a warning names.
    """
    return open_corpus(path, repair, max_bad_records).table


def open_corpus(path: str | Path, repair: bool, max_bad_records: int) -> Corpus:
    """As ``load_corpus``, with what is to be known of it."""
    source = Path(path)
    if os.path.isdir(source):  # unlike Path.is_dir, takes whatever a user may have typed
        source = beir_file(source, "corpus.jsonl")
    if not os.path.isfile(source):
        raise InputError(f"{source}: no such file or folder")
    BadRecords(max_bad_records)  # refuses a number below 0
    key = [file_key(source), repair, max_bad_records]
    folder = cached_folder("corpus", key, lambda folder: _build_corpus(source, repair, max_bad_records, folder))
    about = read_json(folder / "about.json")
    warn_of(source, about["bad"], folder)
    if about["repeated"]:
        warnings.warn(f"{source}: {about['repeated']} passages are left out, their ids stand again below", stacklevel=4)
    if about["empty"]:
        warnings.warn(f"{source}: {about['empty']} passages have no text", stacklevel=4)
    return Corpus(open_table(folder / "passages.arrow"), about["fingerprint"], source, about["bad"])


def _build_corpus(source: Path, repair: bool, max_bad_records: int, folder: Path) -> None:
    hashes, about, bad = _write_corpus(source, repair, max_bad_records, folder, {})
    again = _passages(source, repair, BadRecords(max_bad_records))
    repeated = repeated_ids(hashes, ((line, passage.id) for line, passage in again)).values()
    if repeated:
        left = [lines[:-1] if repair else lines[1:] for lines in repeated]
        dropped = {line: lines[0] for lines, gone in zip(repeated, left, strict=True) for line in gone}
        _, about, bad = _write_corpus(source, repair, max_bad_records, folder, dropped)
    write_quarantine(folder, bad)
    write_json(folder / "about.json", about)


def _write_corpus(
    source: Path, repair: bool, max_bad_records: int, folder: Path, dropped: dict[int, int]
) -> tuple[array, dict[str, object], BadRecords]:
    """Write the table without the dropped lines, of which those are bad that ``repair`` does not mend; each names the line at
    which its id stood first. Returns a hash of every id, what is to be known of the table, and what was left out."""
    writer, bad = TableWriter(folder / "passages.arrow", PASSAGE_COLUMNS), BadRecords(max_bad_records)
    hashes, empty = array("q"), 0
    passages = _passages(source, repair, bad)
    for line, passage in tqdm(passages, desc=f"reading {source.name}", unit=" passages", disable=None):
        if line in dropped:
            if not repair:
                found = f"passage id {passage.id!r} stood already in line {dropped[line]}"
                bad.leave_out(Place(source, line).error(f"{found}, expected every id once"))
            continue
        empty += is_blank(passage.text)
        hashes.append(hash(passage.id))
        writer.add(passage)
    fingerprint = writer.close()
    if not writer.rows:
        raise InputError(f"{source}: is empty, expected at least one passage")
    repeated = len(dropped) if repair else 0
    return hashes, {"fingerprint": fingerprint, "repeated": repeated, "empty": empty, "bad": len(bad.found)}, bad


def _passages(source: Path, repair: bool, bad: BadRecords) -> Iterator[tuple[int, Passage]]:
    """The passages of a corpus with their lines; one without text is bad unless ``repair`` accepts it."""
    for line, passage in numbered_corpus(source, bad):
        if not repair and is_blank(passage.text):
            error = Place(source, line).error(f"the text of passage {passage.id!r} is empty, expected some text")
            bad.leave_out(error)
        else:
            yield line, passage


def repeated_ids(hashes: array, ids: Iterable[tuple[int, str]]) -> dict[str, list[int]]:
    """The ids that stand more than once, each with all its lines, given a 64-bit hash of every id in order.

    Equal hashes only raise the suspicion; ``ids``, the lines and ids themselves, is read on suspicion alone and
    decides.
    """
    ordered = np.sort(np.frombuffer(hashes, dtype=np.int64))
    suspects = set(ordered[1:][ordered[1:] == ordered[:-1]].tolist())
    lines: dict[str, list[int]] = {}
    if suspects:
        for (line, key), hashed in zip(ids, hashes, strict=True):
            if hashed in suspects:
                lines.setdefault(key, []).append(line)
    return {key: found for key, found in lines.items() if len(found) > 1}


def load_queries(
    path: str | Path, ids: Collection[str] | None = None, repair: bool = False, max_bad_records: int = 0
) -> dict[str, str]:
    """Query texts by id, from a BEIR folder or a queries.jsonl; with ``ids`` only those (an unknown id is left out).

    An id that stands twice is refused; with ``repair`` its last text stands, and a warning counts them.
    ``max_bad_records`` as in ``load_corpus``.
    """
    return open_queries(path, ids, repair, max_bad_records).texts


def open_queries(path: str | Path, ids: Collection[str] | None, repair: bool, max_bad_records: int) -> Queries:
    """As ``load_queries``, with what is to be known of them."""
    source = beir_file(path, "queries.jsonl") if os.path.isdir(path) else Path(path)
    bad = BadRecords(max_bad_records)
    texts: dict[str, str] = {}
    lines: dict[str, int] = {}
    repeated = 0
    for line, query in numbered_queries(source, bad):
        if query.id in lines:
            if not repair:
                found = f"query id {query.id!r} stood already in line {lines[query.id]}"
                bad.leave_out(Place(source, line).error(f"{found}, expected every id once"))
                continue
            repeated += 1
        lines[query.id] = line
        if ids is None or query.id in ids:
            texts[query.id] = query.text
    if not lines:
        raise InputError(f"{source}: is empty, expected at least one query")
    keep_quarantine(source, bad)
    if repeated:
        warnings.warn(f"{source}: {repeated} queries are left out, their ids stand again below", stacklevel=2)
    return Queries(texts, source, len(bad.found))


def load_questions(path: str | Path, max_bad_records: int = 0) -> tuple[list[Question], int]:
    """The questions of a DPR question file, and how many bad records are left out; ``max_bad_records`` as in ``load_corpus``."""
    bad = BadRecords(max_bad_records)
    questions = list(read_questions(path, bad))
    if not questions:
        raise InputError(f"{path}: is empty, expected at least one question")
    keep_quarantine(Path(path), bad)
    return questions, len(bad.found)


def find_rows(corpus: Dataset, ids: Iterable[str]) -> dict[str, int]:
    """The rows at which passages stand in a corpus; ids that it does not hold are left out."""
    column = corpus.data.column("id")
    rows = pc.indices_nonzero(pc.is_in(column, value_set=pa.array(list(ids), pa.string())))
    return dict(zip(column.take(rows).to_pylist(), rows.to_pylist(), strict=True))

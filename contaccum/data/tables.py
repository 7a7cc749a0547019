"""Corpora, queries and judgements as tables: passages memory-mapped, what is judged in plain dictionaries.

The first reading of a corpus checks it and writes an Arrow file into the cache; later readings map that file.
"""

import os
import warnings
from array import array
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
from datasets import Dataset
from tqdm import tqdm

from contaccum.data.arrow import PASSAGE_COLUMNS, TableWriter, cached_folder, file_key, open_table
from contaccum.data.examples import load_examples
from contaccum.data.formats import beir_file, kind_of_data, numbered_corpus, numbered_queries, read_qrels
from contaccum.data.lines import Place
from contaccum.data.sources import resolve
from contaccum.errors import InputError
from contaccum.files import read_json, write_json


@dataclass(frozen=True)
class RetrievalSet:
    """What an evaluation needs; every query has at least one passage of grade above 0."""

    corpus: Dataset  # columns id, title, text
    queries: dict[str, str]  # id -> text, the judged queries alone
    qrels: dict[str, dict[str, int]]  # query id -> passage id -> grade


@dataclass(frozen=True)
class JudgedSplit:
    """One split of a BEIR folder, its ids known to exist. ``rows`` finds each judged passage in ``corpus``."""

    corpus: Dataset
    fingerprint: str  # of the corpus
    queries: dict[str, str]
    qrels: dict[str, dict[str, int]]
    rows: dict[str, int]

    def graded_rows(self) -> tuple[list[list[int]], list[list[int]]]:
        """For each query the rows of its passages of grade above 0, and those of the others."""
        grades = self.qrels.values()
        positives = [[self.rows[key] for key, grade in judged.items() if grade > 0] for judged in grades]
        return positives, [[self.rows[key] for key, grade in judged.items() if grade <= 0] for judged in grades]


def load_corpus(path: str | Path, repair: bool = False) -> Dataset:
    """Open a corpus (BEIR folder, corpus.jsonl or DPR TSV) memory-mapped, with the columns id, title and text.

    Raises InputError, naming the line, for a passage id that stands twice and for a passage without text. Published
    data sets have both; with ``repair`` the last passage of an id stands (as in BEIR's own loader) and empty texts
    stay, and warnings count them.
    """
    return _open_corpus(path, repair)[0]


def _open_corpus(path: str | Path, repair: bool) -> tuple[Dataset, str]:
    """The corpus and its fingerprint."""
    source = Path(path)
    if os.path.isdir(source):  # unlike Path.is_dir, takes whatever a user may have typed
        source = beir_file(source, "corpus.jsonl")
    if not os.path.isfile(source):
        raise InputError(f"{source}: no such file or folder")
    folder = cached_folder("corpus", [file_key(source), repair], lambda folder: _build_corpus(source, repair, folder))
    about = read_json(folder / "about.json")
    if about["repeated"]:
        warnings.warn(f"{source}: {about['repeated']} passages are left out, their ids stand again below", stacklevel=4)
    if about["empty"]:
        warnings.warn(f"{source}: {about['empty']} passages have no text", stacklevel=4)
    return open_table(folder / "passages.arrow"), about["fingerprint"]


def _build_corpus(source: Path, repair: bool, folder: Path) -> None:
    hashes, about = _write_corpus(source, repair, folder, frozenset())
    repeated = repeated_ids(hashes, ((line, passage.id) for line, passage in numbered_corpus(source)))
    if repeated and not repair:
        key, lines = min(repeated.items(), key=lambda item: item[1][1])
        place = Place(source, lines[1])
        raise place.error(f"passage id {key!r} stood already in line {lines[0]}, expected every id once")
    if repeated:
        dropped = frozenset(line for lines in repeated.values() for line in lines[:-1])
        _, about = _write_corpus(source, repair, folder, dropped)
    write_json(folder / "about.json", about)


def _write_corpus(source: Path, repair: bool, folder: Path, dropped: frozenset[int]) -> tuple[array, dict[str, object]]:
    """Write the table without the dropped lines; returns a hash of every id, and what is to be known of the table."""
    writer = TableWriter(folder / "passages.arrow", PASSAGE_COLUMNS)
    hashes, empty = array("q"), 0
    for line, passage in tqdm(numbered_corpus(source), desc=f"reading {source.name}", unit=" passages", disable=None):
        if line in dropped:
            continue
        if not passage.text or passage.text.isspace():
            empty += 1
            if not repair:
                raise Place(source, line).error(f"the text of passage {passage.id!r} is empty, expected some text")
        hashes.append(hash(passage.id))
        writer.add(passage)
    fingerprint = writer.close()
    if not writer.rows:
        raise InputError(f"{source}: is empty, expected at least one passage")
    return hashes, {"fingerprint": fingerprint, "repeated": len(dropped), "empty": empty}


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


def load_queries(path: str | Path, ids: Collection[str] | None = None, repair: bool = False) -> dict[str, str]:
    """Query texts by id, from a BEIR folder or a queries.jsonl; with ``ids`` only those (an unknown id is left out).

    An id that stands twice is refused; with ``repair`` its last text stands, and a warning counts them.
    """
    source = beir_file(path, "queries.jsonl") if os.path.isdir(path) else Path(path)
    queries: dict[str, str] = {}
    lines: dict[str, int] = {}
    repeated = 0
    for line, query in numbered_queries(source):
        if query.id in lines:
            repeated += 1
            if not repair:
                found = f"query id {query.id!r} stood already in line {lines[query.id]}"
                raise Place(source, line).error(f"{found}, expected every id once")
        lines[query.id] = line
        if ids is None or query.id in ids:
            queries[query.id] = query.text
    if not lines:
        raise InputError(f"{source}: is empty, expected at least one query")
    if repeated:
        warnings.warn(f"{source}: {repeated} queries are left out, their ids stand again below", stacklevel=2)
    return queries


def qrels_file(folder: str | Path, split: str) -> Path:
    """The judgements of a split; InputError that lists the splits there are."""
    splits = splits_of(folder)
    if split not in splits:
        raise InputError(f"{folder}: holds no split {split!r}, found {', '.join(splits) or 'no qrels/<split>.tsv'}")
    return beir_file(folder, f"qrels/{split}.tsv")


def splits_of(folder: str | Path) -> list[str]:
    """The names of a BEIR folder's splits, sorted."""
    files = [path.name for path in (Path(folder) / "qrels").glob("*") if path.name.endswith((".tsv", ".tsv.gz"))]
    return sorted({name.removesuffix(".gz").removesuffix(".tsv") for name in files})


def load_qrels(path: str | Path, split: str, repair: bool = False) -> dict[str, dict[str, int]]:
    """Grades by query id and passage id of a BEIR folder's split; an id that the folder does not hold is refused."""
    return judged_split(path, split, repair).qrels


def judged_split(path: str | Path, split: str, repair: bool = False) -> JudgedSplit:
    """A split of a BEIR folder with everything it refers to; queries come in the order in which they are judged."""
    source = qrels_file(path, split)
    qrels, query_lines, passage_lines = _read_grades(source)
    queries = load_queries(path, qrels.keys(), repair)
    _refuse_unknown(source, "query", query_lines, queries, beir_file(path, "queries.jsonl"))
    corpus, fingerprint = _open_corpus(path, repair)
    rows = find_rows(corpus, passage_lines)
    _refuse_unknown(source, "passage", passage_lines, rows, beir_file(path, "corpus.jsonl"))
    return JudgedSplit(corpus, fingerprint, {query: queries[query] for query in qrels}, qrels, rows)


def load_grades(path: str | Path) -> dict[str, dict[str, int]]:
    """Grades by query id and passage id of a qrels file that stands alone; a pair with two grades is refused."""
    return _read_grades(Path(path))[0]


def _read_grades(source: Path) -> tuple[dict[str, dict[str, int]], dict[str, int], dict[str, int]]:
    """Grades by query id and passage id, and the line at which each query and each passage is first judged."""
    qrels: dict[str, dict[str, int]] = {}
    query_lines: dict[str, int] = {}
    passage_lines: dict[str, int] = {}
    for query, passage, grade, line in read_qrels(source):
        if qrels.setdefault(query, {}).setdefault(passage, grade) != grade:
            found = f"query {query!r} and passage {passage!r} have grade {grade} here and {qrels[query][passage]} above"
            raise Place(source, line).error(f"{found}, expected one grade")
        query_lines.setdefault(query, line)
        passage_lines.setdefault(passage, line)
    if not qrels:
        raise InputError(f"{source}: is empty, expected at least one judgement")
    return qrels, query_lines, passage_lines


def _refuse_unknown(source: Path, what: str, lines: dict[str, int], known: Collection[str], file: Path) -> None:
    for key, line in lines.items():
        if key not in known:
            raise Place(source, line).error(f"found the {what} id {key!r}, expected one that {file.name} holds")


def find_rows(corpus: Dataset, ids: Iterable[str]) -> dict[str, int]:
    """The rows at which passages stand in a corpus; ids that it does not hold are left out."""
    column = corpus.data.column("id")
    rows = pc.indices_nonzero(pc.is_in(column, value_set=pa.array(list(ids), pa.string())))
    return dict(zip(column.take(rows).to_pylist(), rows.to_pylist(), strict=True))


def load_retrieval_set(
    path: str | Path, split: str = "test", strict: bool = False, repair: bool = False
) -> RetrievalSet:
    """The corpus, judged queries and judgements of a BEIR folder's split, or of a file of training examples.

    Of examples the corpus is the union of their passages, and their positives have grade 1 (``split`` means nothing
    there). Queries without a positive are left out with a warning that counts them, and refused when ``strict``.
    ``repair`` as in ``load_corpus`` and ``load_queries``; it has no effect on examples.
    """
    path, repair = resolve(path, split, repair)
    if kind_of_data(path) != "beir":
        return _examples_as_retrieval(path, strict, repair)
    judged = answerable_split(path, split, strict, repair)
    return RetrievalSet(judged.corpus, judged.queries, judged.qrels)


def answerable_split(path: str | Path, split: str, strict: bool = False, repair: bool = False) -> JudgedSplit:
    """As ``judged_split``, without the queries that have no positive: counted in a warning, or refused when strict."""
    judged = judged_split(path, split, repair)
    kept = keep_answerable(qrels_file(path, split), judged.qrels, strict)
    return replace(judged, queries={query: judged.queries[query] for query in kept}, qrels=kept)


def keep_answerable(source: Path, qrels: dict[str, dict[str, int]], strict: bool) -> dict[str, dict[str, int]]:
    """The queries that have a passage of grade above 0; the others are counted in a warning, or refused when strict."""
    kept = {query: grades for query, grades in qrels.items() if max(grades.values()) > 0}
    without = [query for query in qrels if query not in kept]
    if without and strict:
        raise InputError(f"{source}: query {without[0]!r} has no positive, expected a passage of grade above 0")
    if not kept:
        raise InputError(f"{source}: no query has a positive, expected grades above 0")
    if without:
        warnings.warn(f"{source}: {len(without)} queries without a positive are left out", stacklevel=4)
    return kept


def _examples_as_retrieval(path: str | Path, strict: bool, repair: bool) -> RetrievalSet:
    examples = load_examples(path, strict, repair)
    ids = examples.passages.data.column("id").take(pa.array(examples.positives.values)).to_pylist()
    ends = examples.positives.offsets.tolist()
    queries, qrels = {}, {}
    for number, (key, text) in enumerate(zip(examples.queries["id"], examples.queries["text"], strict=True)):
        if positives := ids[ends[number] : ends[number + 1]]:
            queries[key] = text
            qrels[key] = dict.fromkeys(positives, 1)
    return RetrievalSet(examples.passages, queries, qrels)

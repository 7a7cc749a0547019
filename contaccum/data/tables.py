"""Judged splits and retrieval sets: corpora as tables, what is judged in plain dictionaries."""

import hashlib
import json
import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa  # type: ignore[import-untyped]
from datasets import Dataset

from contaccum.data.bad_records import BadRecords, Place
from contaccum.data.corpus import find_rows, load_corpus, open_corpus, open_queries
from contaccum.data.examples import load_examples
from contaccum.data.formats import beir_file, kind_of_data, read_qrels
from contaccum.data.quarantine import keep_quarantine
from contaccum.data.records import Judgement
from contaccum.data.sources import resolve
from contaccum.errors import InputError

LeftOut = dict[str, int]
"""Bad records that were left out, by file; and the judgements that name one of them."""


@dataclass(frozen=True)
class RetrievalSet:
    """What an evaluation needs; every query has at least one passage of grade above 0."""

    corpus: Dataset  # columns id, title, text
    queries: dict[str, str]  # id -> text, the judged queries alone
    qrels: dict[str, dict[str, int]]  # query id -> passage id -> grade
    left_out: LeftOut = field(default_factory=dict)

    def fingerprint(self) -> str:
        """Hash of queries, judgements and the number of passages, whose texts are not read."""
        content = json.dumps([self.queries, self.qrels, len(self.corpus)], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()


@dataclass(frozen=True)
class JudgedSplit:
    """One split of a BEIR folder, its ids known to exist. ``rows`` finds each judged passage in ``corpus``."""

    corpus: Dataset
    fingerprint: str  # of the corpus
    queries: dict[str, str]
    qrels: dict[str, dict[str, int]]
    rows: dict[str, int]
    judgements: int  # lines, those that repeat another counted too
    left_out: LeftOut

    def graded_rows(self) -> tuple[list[list[int]], list[list[int]]]:
        """For each query the rows of its passages of grade above 0, and those of the others."""
        grades = self.qrels.values()
        positives = [[self.rows[key] for key, grade in judged.items() if grade > 0] for judged in grades]
        return positives, [[self.rows[key] for key, grade in judged.items() if grade <= 0] for judged in grades]


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


def judged_split(path: str | Path, split: str, repair: bool = False, max_bad_records: int = 0) -> JudgedSplit:
    """A split of a BEIR folder with everything it refers to; queries come in the order in which they are judged.

    ``max_bad_records`` as in ``load_corpus``, for each of the three files; a judgement that names what was left out of the
    other two is left out too, and is not counted as bad.
    """
    source = qrels_file(path, split)
    grades = read_grades(source, max_bad_records)
    queries = open_queries(path, grades.queries.keys(), repair, max_bad_records)
    known = [_Known("query", grades.queries, queries.texts, queries.source, queries.left_out)]
    if known[0].missing:
        grades = read_grades(source, max_bad_records, known)
    corpus = open_corpus(path, repair, max_bad_records)
    rows = find_rows(corpus.table, grades.passages)
    known.append(_Known("passage", grades.passages, rows, corpus.source, corpus.left_out))
    if known[1].missing:
        grades = read_grades(source, max_bad_records, known)
    keep_quarantine(source, grades.bad)
    if grades.without:
        warnings.warn(
            f"{source}: {grades.without} judgements are left out, which name a passage or a query that is left out",
            stacklevel=2,
        )
    counts = {
        corpus.source.name: corpus.left_out,
        queries.source.name: queries.left_out,
        f"qrels/{source.name}": len(grades.bad.found),
        "judgements of what is left out": grades.without,
    }
    left_out = {name: count for name, count in counts.items() if count}
    judged = {query: queries.texts[query] for query in grades.qrels}
    return JudgedSplit(corpus.table, corpus.fingerprint, judged, grades.qrels, rows, grades.judgements, left_out)


def open_grades(path: str | Path, max_bad_records: int) -> tuple[dict[str, dict[str, int]], LeftOut]:
    """Grades by query id and passage id of a qrels file that stands alone, and what is left out of it.

    A pair with two grades is refused; ``max_bad_records`` as in ``load_corpus``.
    """
    source = Path(path)
    grades = read_grades(source, max_bad_records)
    keep_quarantine(source, grades.bad)
    return grades.qrels, {source.name: len(grades.bad.found)} if grades.bad.found else {}


class Grades(NamedTuple):
    """A qrels file as it was read."""

    qrels: dict[str, dict[str, int]]  # query id -> passage id -> grade
    queries: dict[str, int]  # id -> line at which it is first judged
    passages: dict[str, int]
    judgements: int  # lines that count
    without: int  # lines that name what is left out of the data set
    bad: BadRecords


class _Known:
    """What a data set holds of the ids that its judgements name."""

    def __init__(self, what: str, named: Collection[str], held: Collection[str], file: Path, left_out: int) -> None:
        self.what, self.file = what, file
        self.missing = [key for key in named if key not in held]
        # a record that was left out stands for one id, which often cannot be read from it
        self.gone = frozenset(self.missing[:left_out])
        self.unknown = frozenset(self.missing[left_out:])


def read_grades(source: Path, max_bad_records: int, known: Sequence[_Known] = ()) -> Grades:
    """The judgements of a file. One that names an id which is missing is bad, unless a record that is left out explains it."""
    qrels: dict[str, dict[str, int]] = {}
    lines: tuple[dict[str, int], dict[str, int]] = ({}, {})
    judgements = without = 0
    bad = BadRecords(max_bad_records)
    for judgement in read_qrels(source, bad):
        ids = judgement.query_id, judgement.passage_id
        if any(key in each.gone for key, each in zip(ids, known, strict=False)):
            without += 1
            continue
        try:
            _refuse(source, judgement, known, qrels)
        except InputError as error:
            bad.leave_out(error)
            continue
        judgements += 1
        qrels.setdefault(ids[0], {})[ids[1]] = judgement.grade
        for key, first in zip(ids, lines, strict=True):
            first.setdefault(key, judgement.line)
    if not qrels:
        found = "no judgement is left" if without or bad.found else "is empty"
        raise InputError(f"{source}: {found}, expected at least one judgement")
    return Grades(qrels, *lines, judgements, without, bad)


def _refuse(source: Path, judgement: Judgement, known: Sequence[_Known], qrels: dict[str, dict[str, int]]) -> None:
    """InputError for an id that the data set does not hold, and for a pair that was judged otherwise above."""
    query, passage, grade, line = judgement
    for key, each in zip((query, passage), known, strict=False):
        if key in each.unknown:
            expected = f"one that {each.file.name} holds"
            raise Place(source, line).error(f"found the {each.what} id {key!r}, expected {expected}")
    before = qrels.get(query, {}).get(passage, grade)
    if before != grade:
        found = f"query {query!r} and passage {passage!r} have grade {grade} here and {before} above"
        raise Place(source, line).error(f"{found}, expected one grade")


def load_retrieval_set(
    path: str | Path, split: str = "test", strict: bool = False, repair: bool = False, max_bad_records: int = 0
) -> RetrievalSet:
    """The corpus, judged queries and judgements of a BEIR folder's split, or of a file of training examples.

    Of examples the corpus is the union of their passages, and their positives have grade 1 (``split`` means nothing
    there). Queries without a positive are left out with a warning that counts them, and refused when ``strict``.
    ``repair`` as in ``load_corpus`` and ``load_queries``; it has no effect on examples. ``max_bad_records`` as in
    ``judged_split`` and ``load_examples``.
    """
    path, repair = resolve(path, split, repair)
    if kind_of_data(path, max_bad_records) != "beir":
        return _examples_as_retrieval(path, strict, repair, max_bad_records)
    judged = answerable_split(path, split, strict, repair, max_bad_records)
    return RetrievalSet(judged.corpus, judged.queries, judged.qrels, judged.left_out)


def load_searchable(
    path: str | Path, split: str = "test", repair: bool = False, max_bad_records: int = 0
) -> RetrievalSet:
    """As ``load_retrieval_set``, or a corpus alone, without queries, where nothing is judged: a folder without qrels, or a file
    of passages."""
    path, repair = resolve(path, split, repair)
    judged = splits_of(path) if path.is_dir() else kind_of_data(path, max_bad_records) in ("dpr", "jsonl", "tevatron")
    if judged:
        return load_retrieval_set(path, split, repair=repair, max_bad_records=max_bad_records)
    return RetrievalSet(load_corpus(path, repair, max_bad_records), {}, {})


def answerable_split(
    path: str | Path, split: str, strict: bool = False, repair: bool = False, max_bad_records: int = 0
) -> JudgedSplit:
    """As ``judged_split``, without the queries that have no positive: counted in a warning, or refused when strict."""
    judged = judged_split(path, split, repair, max_bad_records)
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


def _examples_as_retrieval(path: Path, strict: bool, repair: bool, max_bad_records: int) -> RetrievalSet:
    examples = load_examples(path, strict, repair, max_bad_records)
    ids = examples.passages.data.column("id").take(pa.array(examples.positives.values)).to_pylist()
    ends = examples.positives.offsets.tolist()
    queries, qrels = {}, {}
    for number, (key, text) in enumerate(zip(examples.queries["id"], examples.queries["text"], strict=True)):
        if positives := ids[ends[number] : ends[number + 1]]:
            queries[key] = text
            qrels[key] = dict.fromkeys(positives, 1)
    left_out = {path.name: examples.left_out} if examples.left_out else {}
    return RetrievalSet(examples.passages, queries, qrels, left_out)

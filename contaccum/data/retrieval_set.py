"""Retrieval sets. The corpus is a table; the judged queries and the qrels are dictionaries."""

import hashlib
import json
import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa  # type: ignore[import-untyped]
from datasets import Dataset

from contaccum.config import DataPolicy
from contaccum.data.corpus import find_rows, open_corpus, open_queries
from contaccum.data.examples import ExampleTable, load_examples
from contaccum.data.tables import Ragged, report_rejected
from contaccum.errors import InputError
from contaccum.formats.readers import beir_file, read_qrels
from contaccum.formats.records import Judgement, RejectedRecords, SourceLocation

Qrels = dict[str, dict[str, int]]
"""Query id -> passage id -> grade."""
LeftOut = dict[str, int]
"""File name -> number of rejected records. One more entry counts the judgements that name a rejected record."""


@dataclass(frozen=True)
class RetrievalSet:
    """Corpus, queries and qrels of an evaluation. Every query has at least one passage with a grade above 0."""

    corpus: Dataset  # columns id, title, text
    queries: dict[str, str]  # query id -> text; contains only judged queries
    qrels: Qrels
    left_out: LeftOut = field(default_factory=dict)
    corpus_hash: str = ""

    def fingerprint(self) -> str:
        """Return a hash of the queries, the qrels and the passages.

        The hash has two parts, separated by a dash. Older checkpoints have only the first part, which does not cover the texts of
        the passages.
        """
        content = json.dumps([self.queries, self.qrels, len(self.corpus)], sort_keys=True)
        older = hashlib.sha256(content.encode()).hexdigest()
        return f"{older}-{self.corpus_hash}" if self.corpus_hash else older


def same_content(saved: str, now: str) -> bool:
    """Return whether two fingerprints are equal. If ``saved`` has no dash, ignore the dash in ``now`` and the part after it."""
    return saved in (now, now.partition("-")[0])


@dataclass(frozen=True, kw_only=True)
class JudgedSplit(RetrievalSet):
    """One split of a BEIR folder. Unlike in a RetrievalSet, a query may have no positive."""

    rows: dict[str, int]  # passage id -> row number in ``corpus``; contains only judged passages
    judgements: int  # number of accepted lines of the qrels file, repeated lines included

    def examples(self) -> ExampleTable:
        """Convert the split to training examples. Judged passages with a grade of 0 or less become hard negatives."""
        grades = self.qrels.values()
        positives = Ragged.of([self.rows[key] for key, grade in each.items() if grade > 0] for each in grades)
        negatives = Ragged.of([self.rows[key] for key, grade in each.items() if grade <= 0] for each in grades)
        others = Ragged.of([] for _ in grades)
        queries = Dataset.from_dict({"id": list(self.queries), "text": list(self.queries.values())})
        return ExampleTable(queries, self.corpus, positives, negatives, others, self.corpus_hash)


def qrels_file(folder: Path, split: str) -> Path:
    """Return the path of the qrels file of a split. If the split does not exist, raise an InputError that lists the splits."""
    splits = splits_of(folder)
    if split not in splits:
        available = ", ".join(splits) or "none (no qrels/<split>.tsv)"
        raise InputError(f"{folder}: split {split!r} not found; available: {available}")
    return beir_file(folder, f"qrels/{split}.tsv")


def splits_of(folder: Path) -> list[str]:
    """Return the names of the splits of a BEIR folder, in alphabetical order."""
    files = [path.name for path in (folder / "qrels").glob("[!.]*") if path.name.endswith((".tsv", ".tsv.gz"))]
    return sorted({name.removesuffix(".gz").removesuffix(".tsv") for name in files})


def judged_split(path: Path, split: str, policy: DataPolicy) -> JudgedSplit:
    """Read one split of a BEIR folder: queries, corpus and qrels. The queries have the order of the qrels file.

    ``max_bad_records`` applies to each of the three files. A judgement that names a rejected query or passage is skipped, but
    is not counted as a rejected record.
    """
    source = qrels_file(path, split)
    grades = read_grades(source, policy)
    queries = open_queries(path, policy, grades.qrels.keys())
    known = [_MissingIds("query", grades.qrels, queries.texts, queries.source, queries.left_out)]
    if known[0].missing:
        grades = read_grades(source, policy, known)
    corpus = open_corpus(path, policy)
    rows = find_rows(corpus.table, grades.passages)
    known.append(_MissingIds("passage", grades.passages, rows, corpus.source, corpus.left_out))
    if known[1].missing:
        grades = read_grades(source, policy, known)
    report_rejected(source, grades.rejected)
    if grades.orphaned:
        warnings.warn(
            f"{source}: {grades.orphaned} judgements are skipped, because they name a skipped passage or query",
            stacklevel=2,
        )
    counts = {
        corpus.source.name: corpus.left_out,
        queries.source.name: queries.left_out,
        f"qrels/{source.name}": len(grades.rejected.entries),
        "judgements of skipped texts": grades.orphaned,
    }
    return JudgedSplit(
        corpus.table,
        {query: queries.texts[query] for query in grades.qrels},
        grades.qrels,
        {name: count for name, count in counts.items() if count},
        corpus_hash=corpus.fingerprint,
        rows=rows,
        judgements=grades.judgements,
    )


class Grades(NamedTuple):
    qrels: Qrels
    passages: dict[str, None]  # ids of the judged passages, in the order of the file
    judgements: int  # number of accepted lines
    orphaned: int  # number of lines that name a rejected query or passage
    rejected: RejectedRecords


class _MissingIds:
    """Ids that the qrels name, but that are missing in the file of queries (or of passages).

    A missing id may be the id of a rejected record. If n records are rejected, the first n missing ids are assumed to be theirs
    (``rejected``). The other missing ids are in ``unknown``.
    """

    def __init__(self, what: str, named: Collection[str], known: Collection[str], file: Path, left_out: int) -> None:
        self.what, self.file = what, file
        self.missing = [key for key in named if key not in known]
        # often the id of a rejected record cannot be read, so one missing id is assumed for each rejected record
        self.rejected = frozenset(self.missing[:left_out])
        self.unknown = frozenset(self.missing[left_out:])


def read_grades(source: Path, policy: DataPolicy, known: Sequence[_MissingIds] = ()) -> Grades:
    """Read a qrels file. Reject judgements with an unknown id; skip judgements that name a rejected query or passage.

    known: missing ids found so far. The first element is for query ids, the second one for passage ids. Without the second
    element, passage ids are not checked. If ``known`` is empty, no ids are checked.
    """
    qrels: Qrels = {}
    passages: dict[str, None] = {}
    judgements = orphaned = 0
    rejected = RejectedRecords.of(policy)
    for judgement in read_qrels(source, rejected):
        ids = judgement.query_id, judgement.passage_id
        if any(key in each.rejected for key, each in zip(ids, known, strict=False)):
            orphaned += 1
            continue
        with rejected:
            _check_judgement(source, judgement, known, qrels)
            judgements += 1
            qrels.setdefault(ids[0], {})[ids[1]] = judgement.grade
            passages[ids[1]] = None
    if not qrels:
        raise InputError(f"{source}: has no valid judgement; a split needs at least one")
    return Grades(qrels, passages, judgements, orphaned, rejected)


def _check_judgement(source: Path, judgement: Judgement, known: Sequence[_MissingIds], qrels: Qrels) -> None:
    """Raise InputError for an unknown id, or if an earlier line gives the same query and passage a different grade."""
    query, passage, grade, line = judgement
    location = SourceLocation(source, line)
    for key, each in zip((query, passage), known, strict=False):
        if key in each.unknown:
            raise location.error(f"unknown {each.what} id {key!r}; {each.file.name} has no such id")
    if (before := qrels.get(query, {}).get(passage, grade)) != grade:
        raise location.error(
            f"query {query!r} and passage {passage!r} have grade {grade} here and {before} earlier; a pair can have only one "
            "grade"
        )


def keep_answerable(source: Path, qrels: Qrels, strict: bool) -> Qrels:
    """Return the qrels of the queries that have a positive (a grade above 0). Raise InputError if no query has one.

    If only some queries have no positive, warn; with ``strict``, raise InputError.
    """
    kept = {query: grades for query, grades in qrels.items() if max(grades.values()) > 0}
    without = [query for query in qrels if query not in kept]
    if without and strict:
        raise InputError(
            f"{source}: query {without[0]!r} has no positive; every query needs a passage with a grade above 0"
        )
    if not kept:
        raise InputError(f"{source}: no query has a positive; at least one grade must be above 0")
    if without:
        warnings.warn(f"{source}: {len(without)} queries without a positive are skipped", stacklevel=4)
    return kept


def warn_of_own_ids(source: Path, qrels: Qrels) -> None:
    """Warn about queries that have the id of one of their positives. As in BEIR, a search leaves out such a passage."""
    if count := sum(grades.get(query, 0) > 0 for query, grades in qrels.items()):
        warnings.warn(
            f"{source}: {count} queries have the same id as one of their positives. As in BEIR, a search leaves out the passage "
            "with the id of the query, so these positives count as not found. Use different ids, such as q1 and p1.",
            stacklevel=4,
        )


def examples_as_retrieval(path: Path, policy: DataPolicy) -> RetrievalSet:
    """Convert a file of training examples to a retrieval set. The corpus has all passages; positives get grade 1."""
    examples = load_examples(path, policy)
    ids = examples.passages.data.column("id").take(pa.array(examples.positives.values)).to_pylist()
    ends = examples.positives.offsets.tolist()
    queries, qrels = {}, {}
    for number, (key, text) in enumerate(zip(examples.queries["id"][:], examples.queries["text"][:], strict=True)):
        if positives := ids[ends[number] : ends[number + 1]]:
            queries[key] = text
            qrels[key] = dict.fromkeys(positives, 1)
    left_out = {path.name: examples.left_out} if examples.left_out else {}
    return RetrievalSet(examples.passages, queries, qrels, left_out, examples.fingerprint)

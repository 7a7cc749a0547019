"""Retrieval sets. The corpus is a table; the judged queries and the qrels are dictionaries."""

import hashlib
import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
from datasets import Dataset

from contaccum.config import DataPolicy
from contaccum.data.corpus import (
    REPAIR,
    find_rows,
    open_corpus,
    queries_file,
    read_query_texts,
)
from contaccum.data.examples import ExampleTable, left_out, lists_of
from contaccum.data.identity import text_hash
from contaccum.errors import InputError
from contaccum.formats.readers import beir_file, read_qrels
from contaccum.formats.records import OnError, stop
from contaccum.runtime.units import counted

Qrels = dict[str, dict[str, int]]
"""Query id -> passage id -> grade."""


@dataclass(frozen=True)
class RetrievalSet:
    """Corpus, queries and qrels of an evaluation, or of a search, which needs no qrels.

    In an evaluation, every query has a passage with a grade above 0.
    """

    corpus: Dataset  # columns id, title, text
    queries: dict[str, str]  # query id -> text; in an evaluation, only judged queries
    qrels: Qrels
    corpus_hash: str = ""
    skips_own_id: bool = True
    """Whether a search leaves out the passage that has the id of the query, as in BEIR. False for
    training examples, whose ids are only labels."""

    def fingerprint(self) -> str:
        """Return a hash of the queries, the qrels and the passages."""
        content = json.dumps([self.queries, self.qrels, self.corpus_hash], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class JudgedSplit(RetrievalSet):
    """One split of a BEIR folder. Unlike in a RetrievalSet, a query may have no positive."""

    source: Path  # the qrels file
    passage_hashes: np.ndarray  # (n,) int64, hash of the text of each passage of the corpus
    rows: dict[str, int]  # judged passages of the corpus: passage id -> row number

    @cached_property
    def unknown(self) -> list[str]:
        """Passage id of each judgement whose passage the corpus lacks."""
        judged = (passage for grades in self.qrels.values() for passage in grades)
        return [passage for passage in judged if passage not in self.rows]

    def unknown_judgements(self) -> str:
        """Return a sentence part with the number of judgements whose passage the corpus lacks."""
        unknown = self.unknown
        return (
            f"{self.source}: {counted(len(unknown), 'judgement')} of a passage that is not in the "
            f"corpus (first: {unknown[0]!r})"
        )

    def examples(self, repair: bool = False, merge: bool = True) -> ExampleTable:
        """Convert the split to training examples.

        merge: whether queries with the same text become one; the highest of their grades is used.
        Judged passages with a grade of 0 or less become hard negatives. A judgement whose passage
        is not in the corpus raises InputError; with ``repair``, it is dropped, and a warning gives
        the number.
        """
        if self.unknown and not repair:
            raise InputError(
                f"{self.unknown_judgements()}; training needs the text of every judged passage. "
                f"{REPAIR} to drop these judgements."
            )
        if self.unknown:
            warnings.warn(
                f"{self.unknown_judgements()}; training drops these judgements with repair, and "
                "evaluation counts the passages as not found",
                stacklevel=4,
            )
        queries: dict[object, tuple[int, str, str]] = {}  # different queries: number, id, text
        entries = []  # query, kind and row of each judged passage
        qrels: Qrels = {}
        for key, text in self.queries.items():
            same = text_hash(text) if merge else key
            number, first, _ = queries.setdefault(same, (len(queries), key, text))
            grades = qrels.setdefault(first, {})
            for passage, grade in self.qrels[key].items():
                if passage in self.rows:
                    entries.append((number, int(grade <= 0), self.rows[passage]))
                    grades[passage] = max(grade, grades.get(passage, grade))
        numbers, kinds, rows = np.array(entries, dtype=np.int64).reshape(-1, 3).T
        lists = lists_of(numbers, kinds, rows, self.passage_hashes, len(queries))
        if len(lists.copies):
            warnings.warn(f"{self.source}: {left_out(len(lists.copies))}", stacklevel=4)
        _, ids, texts = zip(*queries.values(), strict=True)
        return ExampleTable(
            Dataset.from_dict({"id": ids, "text": texts}),
            self.corpus,
            np.array([text_hash(text) for text in texts], dtype=np.int64),
            self.passage_hashes,
            lists.positives,
            lists.negatives,
            lists.others,
            self.corpus_hash,
            copies=len(lists.copies),
            qrels=qrels,
        )


def qrels_file(folder: Path, split: str) -> Path:
    """Return the path of the qrels file of a split.

    If the split does not exist, raise an InputError that lists the splits.
    """
    splits = splits_of(folder)
    if split not in splits:
        available = ", ".join(splits) or "none (no qrels/<split>.tsv)"
        hint = "" if split == "train" else ". contaccum data convert --splits makes splits"
        raise InputError(f"{folder}: split {split!r} not found; available: {available}{hint}")
    return beir_file(folder, f"qrels/{split}.tsv")


def splits_of(folder: Path) -> list[str]:
    """Return the names of the splits of a BEIR folder, in alphabetical order."""
    splits = set()
    for path in (folder / "qrels").glob("[!.]*"):
        name = path.name.removesuffix(".gz")
        if name.endswith(".tsv"):
            splits.add(name.removesuffix(".tsv"))
    return sorted(splits)


def judged_split(path: Path, split: str, policy: DataPolicy) -> JudgedSplit:
    """Read one split of a BEIR folder: queries, corpus and qrels.

    The queries have the order of the qrels file. Raises InputError for a judgement of an unknown
    query, and if the corpus has none of the judged passages.
    """
    source = qrels_file(path, split)
    qrels = read_grades(source)
    file = queries_file(path)
    queries = read_query_texts(file, policy.repair, qrels)
    for error in unknown_queries(source, qrels, queries, file):
        raise error
    corpus = open_corpus(path, policy)
    judged = list(dict.fromkeys(passage for grades in qrels.values() for passage in grades))
    rows = find_rows(corpus.table, judged)
    if not rows:
        raise InputError(
            f"{source}: none of the {len(judged)} judged passages, such as {judged[0]!r}, is in "
            "the corpus; give the corpus that was judged"
        )
    return JudgedSplit(
        corpus=corpus.table,
        queries={query: queries[query] for query in qrels},
        qrels=qrels,
        corpus_hash=corpus.fingerprint,
        source=source,
        passage_hashes=corpus.hashes,
        rows=rows,
    )


def unknown_queries(
    source: Path, qrels: Qrels, queries: Mapping[str, str], file: Path
) -> list[InputError]:
    """Return an InputError for each judged query that ``file``, with ``queries``, lacks."""
    return [
        InputError(f"{source}: unknown query id {key!r}; {file.name} has no such id")
        for key in qrels
        if key not in queries
    ]


def read_grades(source: Path, on_error: OnError = stop) -> Qrels:
    """Read a qrels file. Two different grades of the same query and passage raise InputError."""
    qrels: Qrels = {}
    for location, query, passage, grade in read_qrels(source, on_error):
        before = qrels.setdefault(query, {}).setdefault(passage, grade)
        if before != grade:
            on_error(
                location.error(
                    f"query {query!r} and passage {passage!r} have grade {grade} here and {before} "
                    "earlier; a pair can have only one grade"
                )
            )
    if not qrels:
        raise InputError(f"{source}: has no valid judgement; a split needs at least one")
    return qrels


def keep_answerable(source: Path, qrels: Qrels, strict: bool) -> Qrels:
    """Return the qrels of the queries that have a positive (a grade above 0).

    Raise InputError if no query has one.

    If only some queries have no positive, warn; with ``strict``, raise InputError.
    """
    kept = {query: grades for query, grades in qrels.items() if max(grades.values()) > 0}
    without = [query for query in qrels if query not in kept]
    if not kept:
        raise InputError(f"{source}: no query has a positive; at least one grade must be above 0")
    if without:
        skipped = counted(len(without), "query")
        sentence = f"{source}: skipped {skipped} without a positive (the first: {without[0]!r})"
        if strict:
            raise InputError(f"{sentence}; strict is set, so this is an error")
        warnings.warn(sentence, stacklevel=4)
    return kept


def warn_of_own_ids(source: Path, qrels: Qrels) -> None:
    """Warn about queries that have the id of one of their positives.

    As in BEIR, a search leaves out such a passage.
    """
    if count := sum(grades.get(query, 0) > 0 for query, grades in qrels.items()):
        warnings.warn(
            f"{source}: {counted(count, 'query')} with the id of a positive. As in BEIR, a search "
            "leaves out the passage with the id of the query, so these positives count as "
            "not found. Use different ids, such as q1 and p1.",
            stacklevel=4,
        )


def require_other_ids(source: Path, qrels: Qrels) -> None:
    """Raise InputError if each query has the id of its only judged passage.

    As in BEIR, a search leaves out such a passage.
    """
    if all(set(grades) == {query} for query, grades in qrels.items()):
        raise InputError(
            f"{source}: each query has the id of its only judged passage. As in BEIR, a search "
            "leaves out the passage with the id of the query, so nothing would be found. Use "
            "different ids, such as q1 and p1."
        )


def examples_as_retrieval(examples: ExampleTable) -> RetrievalSet:
    """Convert training examples to a retrieval set.

    The corpus has all passages; positives get grade 1.
    """
    column = examples.passages.data.column("id")
    positives = column.take(pa.array(examples.positives.values)).to_pylist()
    queries = {}
    qrels = {}
    rows = zip(examples.queries["id"][:], examples.queries["text"][:], strict=True)
    for number, (key, text) in enumerate(rows):
        if passages := positives[examples.positives.span(number)]:
            queries[key] = text
            qrels[key] = dict.fromkeys(passages, 1)
    return RetrievalSet(examples.passages, queries, qrels, examples.fingerprint, skips_own_id=False)

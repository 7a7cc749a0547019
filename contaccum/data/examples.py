"""Tables of training examples: a table of passages, a table of queries, and for each query the row numbers of its passages.

Every passage is stored once. The first call for a file checks the file and writes the tables into the cache. Later calls map
these tables into memory.
"""

import math
import os
import warnings
from array import array
from collections.abc import Container, Iterator
from dataclasses import dataclass
from itertools import islice, repeat
from pathlib import Path

import numpy as np
from datasets import Dataset
from tqdm import tqdm

from contaccum.config import DataPolicy
from contaccum.data.corpus import duplicate_id
from contaccum.data.tables import (
    PASSAGE_COLUMNS,
    QUERY_COLUMNS,
    About,
    Ragged,
    TableWriter,
    load_array,
    read_about,
    warn_of_rejected,
    write_about,
    write_rejected,
)
from contaccum.errors import InputError
from contaccum.formats.readers import numbered_examples
from contaccum.formats.records import Example, Passage, Query, RejectedRecords, SourceLocation, TeacherScores, is_blank
from contaccum.runtime.locks import cached_folder, file_key

_BATCH = 1000  # number of queries that are read at a time
_LISTS = ("positives", "negatives", "others")
_SCORED = ("positives", "negatives")


@dataclass
class _Problem:
    """Problem that causes a warning: description, number of cases, and message of the first case."""

    text: str
    count: int = 0
    first: str = ""

    def add(self, location: SourceLocation, message: str) -> None:
        self.count += 1
        self.first = self.first or str(location.error(message))


@dataclass(frozen=True, kw_only=True)
class _About(About):
    examples: int
    answerable: int
    problems: list[_Problem]
    scored: int = 0  # number of examples with scores; caches of older versions lack it


@dataclass(frozen=True)
class ExampleTable:
    """Training examples as tables.

    ``positives``, ``negatives`` and ``others`` (DPR's ``negative_ctxs``) have one list for each query: row numbers in the table
    ``passages``. Positives and negatives may have teacher scores. Iteration reads the passages from disk and yields the examples
    that have a positive, in file order.
    """

    queries: Dataset  # columns id, text
    passages: Dataset  # columns id, title, text
    positives: Ragged  # a list may be empty; no passage is in two lists of the same query
    negatives: Ragged
    others: Ragged
    fingerprint: str = ""
    left_out: int = 0  # number of rejected records

    def __len__(self) -> int:
        return int(np.count_nonzero(self.positives.lengths))

    def __iter__(self) -> Iterator[Example]:
        return self.part(0, len(self))

    def part(self, start: int, stop: int) -> Iterator[Example]:
        """Yield examples ``start`` to ``stop - 1``, counting only examples with a positive."""
        kept = np.flatnonzero(self.positives.lengths)[start:stop]
        for first in range(0, len(kept), _BATCH):
            numbers = kept[first : first + _BATCH]
            batch = self.queries[numbers]
            for number, *query in zip(numbers, batch["id"], batch["text"], strict=True):
                lists = (self.positives, self.negatives, self.others)
                positives, negatives, others = (self._read(ragged.row(number)) for ragged in lists)
                yield Example(Query(*query), positives, negatives, others, self._scores(number))

    def _read(self, rows: np.ndarray) -> list[Passage]:
        batch = self.passages[rows.tolist()]
        return [Passage(*row) for row in zip(*(batch[column] for column in PASSAGE_COLUMNS), strict=True)]

    def _scores(self, number: int) -> TeacherScores | None:
        """Return the teacher scores of an example, or None if it has none.

        Each score is the shortest decimal that rounds to the stored float32: 0.1, not 0.10000000149.
        """
        if self.positives.scores is None:
            return None
        found = [ragged.scores_or_nan[ragged.span(number)] for ragged in (self.positives, self.negatives)]
        if np.isnan(found[0][0]):
            return None
        return TeacherScores(*([float(str(score)) for score in part] for part in found))


def load_examples(path: Path, policy: DataPolicy, scores: bool = False) -> ExampleTable:
    """Open a file of training examples: DPR JSON, JSONL of query, pos and neg, or Tevatron JSONL.

    An example with an empty text or a duplicate query id is invalid. Two problems cause a warning, or InputError with ``strict``:
    queries without a positive, and passages with the same id but different texts (the first text is used). ``repair`` has no
    effect on a file of examples and causes a warning.

    scores: read teacher scores too. In each example, either all positives and negatives must have a finite score, or none.
    """
    if not os.path.isfile(path):
        raise InputError(f"{path}: no such file or folder")
    if policy.repair:
        warnings.warn(f"{path}: repair has no effect on a file of examples", stacklevel=4)
    rejected = RejectedRecords.of(policy)
    key = [file_key(path), policy.max_bad_records, *(["scores"] if scores else [])]
    folder = cached_folder("examples", key, lambda folder: _Builder(path, folder, rejected, scores).build())
    about = read_about(folder, _About)
    warn_of_rejected(path, about.bad, folder)
    for problem in about.problems:
        if policy.strict:
            raise InputError(problem.first)
        warnings.warn(f"{path}: {problem.count} {problem.text}", stacklevel=4)
    if not about.examples:
        raise InputError(f"{path}: has no valid example; it needs at least one")
    if not about.answerable:
        raise InputError(f"{path}: no query has a positive passage; at least one query must have one")
    lists = {}
    for name in _LISTS:
        parts = ("offsets", "values", "scores") if about.scored and name in _SCORED else ("offsets", "values")
        lists[name] = Ragged(*(load_array(folder / f"{name}_{part}.npy") for part in parts))
    queries, passages = (Dataset.from_file(str(folder / f"{name}.arrow")) for name in ("queries", "passages"))
    return ExampleTable(queries, passages, **lists, fingerprint=about.fingerprint, left_out=about.bad)


def _save(folder: Path, name: str, numbers: array, dtype: type = np.int64) -> None:
    np.save(folder / f"{name}.npy", np.array(numbers, dtype=dtype), allow_pickle=False)


def check_texts(location: SourceLocation, example: Example, known: Container[str] = ()) -> None:
    """Raise InputError if the query or a passage of an example has an empty text.

    A passage is not checked if its id is in ``known``, or if an earlier passage of the example has the same id.
    """
    query = example.query
    if is_blank(query.text):
        raise location.error(f"query {query.id!r} has an empty text; every query needs a text")
    first = {passage.id: passage for name in reversed(_LISTS) for passage in reversed(getattr(example, name))}
    for name in _LISTS:
        for passage in getattr(example, name):
            if is_blank(passage.text) and passage.id not in known and passage is first[passage.id]:
                raise location.error(f"passage {passage.id!r} has an empty text; every passage needs a text")


class _Builder:
    """Reads and checks a file of examples, and writes the tables into a cache folder."""

    def __init__(self, path: Path, folder: Path, rejected: RejectedRecords, scores: bool) -> None:
        self.path, self.folder, self.rejected, self.with_scores = path, folder, rejected, scores
        self.scored = 0  # number of examples with scores
        self.scores: dict[str, array] = {name: array("f") for name in _SCORED}
        self.queries = TableWriter(folder / "queries.arrow", QUERY_COLUMNS)
        self.passages = TableWriter(folder / "passages.arrow", PASSAGE_COLUMNS)
        self.rows: dict[str, int] = {}  # passage id -> row number
        self.contents = array("q")  # hash of title and text of each passage
        self.locations: dict[str, SourceLocation] = {}  # query id -> location
        self.unanswerable = _Problem("queries without a positive are skipped")
        self.conflicts = _Problem("passages have the id of an earlier passage but another text; the first text is used")
        self.ends: dict[str, array] = {name: array("q", [0]) for name in _LISTS}
        self.values: dict[str, array] = {name: array("q") for name in _LISTS}

    def build(self) -> None:
        examples = numbered_examples(self.path, self.rejected, self.with_scores)
        for location, example in tqdm(examples, desc=f"reading {self.path.name}", unit=" examples", disable=None):
            with self.rejected:
                check_texts(location, example, self.rows)
                if first := self.locations.get(example.query.id):
                    where = f"record {first.record}" if first.record else f"line {first.line}"
                    raise location.error(duplicate_id("query", example.query.id, where, repairable=False))
                self._add(location, example)
        for name in _LISTS:
            _save(self.folder, f"{name}_offsets", self.ends[name])
            _save(self.folder, f"{name}_values", self.values[name])
        for name in _SCORED if self.scored else ():
            _save(self.folder, f"{name}_scores", self.scores[name], np.float32)
        about = {
            "fingerprint": self.queries.close() + self.passages.close(),
            "examples": len(self.locations),
            "answerable": len(self.locations) - self.unanswerable.count,
            "problems": [vars(problem) for problem in (self.unanswerable, self.conflicts) if problem.count],
            "bad": len(self.rejected.entries),
            "scored": self.scored,
        }
        write_rejected(self.folder, self.rejected)
        write_about(self.folder, about)

    def _add(self, location: SourceLocation, example: Example) -> None:
        query = example.query
        self.locations[query.id] = location
        if not example.positives:
            self.unanswerable.add(location, f"query {query.id!r} has no positive; every query needs a positive")
        self.queries.add(query)
        rows: dict[int, float] = {}  # row number of each passage -> first score of the passage
        self.scored += example.scores is not None
        for name in _LISTS:
            known, passages = len(rows), getattr(example, name)
            scores = getattr(example.scores, name, None) or repeat(math.nan, len(passages))
            for passage, score in zip(passages, scores, strict=True):
                rows.setdefault(self._row_of(passage, location), score)
            self.values[name].extend(islice(rows, known, None))
            self.ends[name].append(len(self.values[name]))
            if self.with_scores and name in _SCORED:
                self.scores[name].extend(islice(rows.values(), known, None))

    def _row_of(self, passage: Passage, location: SourceLocation) -> int:
        content = hash((passage.title, passage.text))
        row = self.rows.get(passage.id)
        if row is None:
            row = self.rows[passage.id] = self.passages.add(passage)
            self.contents.append(content)
        elif self.contents[row] != content:
            self.conflicts.add(
                location, f"passage id {passage.id!r} occurs with two texts; an id must always have the same text"
            )
        return row

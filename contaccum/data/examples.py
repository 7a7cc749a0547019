"""Tables of training examples: passages, queries, and the row numbers of each query's passages.

Every passage is stored once. The first call for a file checks the file and writes the tables into
the cache. Later calls map these tables into memory.
"""

import math
import os
import warnings
from array import array
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from tqdm import tqdm

from contaccum.config import DataPolicy
from contaccum.data.corpus import duplicate_id
from contaccum.data.tables import PASSAGE_COLUMNS, QUERY_COLUMNS, Ragged, TableWriter, cached_tables
from contaccum.errors import InputError
from contaccum.formats.readers import numbered_examples
from contaccum.formats.records import (
    Example,
    OnError,
    Passage,
    Query,
    SourceLocation,
    TeacherScores,
    is_blank,
    stop,
)
from contaccum.runtime.cache import file_key

_BATCH = 1000  # number of queries that are read at a time
_LISTS = ("positives", "negatives", "others")


@dataclass(frozen=True)
class ExampleTable:
    """Training examples as tables.

    ``positives``, ``negatives`` and ``others`` (DPR's ``negative_ctxs``) have one list for each
    query: row numbers in the table ``passages``. Positives and negatives may have teacher scores.
    Iteration reads the passages from disk and yields the examples that have a positive, in file
    order.
    """

    queries: Dataset  # columns id, text
    passages: Dataset  # columns id, title, text
    positives: Ragged  # a list may be empty; no passage is in two lists of the same query
    negatives: Ragged
    others: Ragged
    fingerprint: str = ""

    def __len__(self) -> int:
        return int(np.count_nonzero(self.positives.lengths))

    def __iter__(self) -> Iterator[Example]:
        return self.part(0, len(self))

    def part(self, start: int, stop: int) -> Iterator[Example]:
        """Yield examples ``start`` to ``stop - 1``, counting only examples with a positive."""
        kept = np.flatnonzero(self.positives.lengths)[start:stop]
        for first in range(0, len(kept), _BATCH):
            numbers = kept[first : first + _BATCH]
            queries = self.queries[numbers]
            for number, key, text in zip(numbers, queries["id"], queries["text"], strict=True):
                yield Example(
                    Query(key, text),
                    positives=self._passages(self.positives.row(number)),
                    negatives=self._passages(self.negatives.row(number)),
                    others=self._passages(self.others.row(number)),
                    scores=self._scores(number),
                )

    def _passages(self, rows: np.ndarray) -> list[Passage]:
        return list(Passage.of_columns(self.passages[rows.tolist()]))

    def _scores(self, number: int) -> TeacherScores | None:
        """Return the teacher scores of an example, or None if it has none.

        Each score is the shortest decimal that rounds to the stored float32: 0.1, not
        0.10000000149.
        """
        if self.positives.scores is None:
            return None
        positives = self.positives.scores[self.positives.span(number)]
        negatives = self.negatives.scores_or_nan[self.negatives.span(number)]
        if np.isnan(positives[0]):
            return None
        return TeacherScores(
            [float(str(score)) for score in positives], [float(str(score)) for score in negatives]
        )


def load_examples(path: Path, policy: DataPolicy, scores: bool = False) -> ExampleTable:
    """Open a file of training examples: DPR JSON, JSONL of query, pos and neg, or Tevatron JSONL.

    An example with an empty text or a duplicate query id is invalid. Two problems cause a warning,
    or InputError with ``strict``: queries without a positive, and passages with the same id but
    different texts (the first text is used). ``repair`` has no effect on a file of examples and
    causes a warning.

    scores: read teacher scores too. In each example, either all positives and negatives must have a
    finite score, or none.
    """
    if not os.path.isfile(path):
        raise InputError(f"{path}: no such file or folder")
    if policy.repair:
        warnings.warn(f"{path}: repair has no effect on a file of examples", stacklevel=4)
    folder, about = cached_tables(
        "examples", [file_key(path), scores], lambda folder: build_examples(path, scores, folder)
    )
    for problem in about["problems"]:
        if policy.strict:
            raise InputError(problem["first"])
        warnings.warn(f"{path}: {problem['count']} {problem['text']}", stacklevel=4)
    if not about["examples"]:
        raise InputError(f"{path}: has no valid example; it needs at least one")
    if not about["answerable"]:
        raise InputError(
            f"{path}: no query has a positive passage; at least one query must have one"
        )
    return ExampleTable(
        queries=Dataset.from_file(str(folder / "queries.arrow")),
        passages=Dataset.from_file(str(folder / "passages.arrow")),
        positives=_load_lists(folder, "positives"),
        negatives=_load_lists(folder, "negatives"),
        others=_load_lists(folder, "others"),
        fingerprint=about["fingerprint"],
    )


def build_examples(
    path: Path, with_scores: bool, folder: Path, on_error: OnError = stop
) -> dict[str, Any]:
    """Write the tables of a file of examples into ``folder``. Return the content of about.json."""
    queries = TableWriter(folder / "queries.arrow", QUERY_COLUMNS)
    passages = TableWriter(folder / "passages.arrow", PASSAGE_COLUMNS)
    lists = {name: _Lists() for name in _LISTS}
    locations: dict[str, SourceLocation] = {}  # query id -> location
    rows: dict[str, int] = {}  # passage id -> row number
    contents = array("q")  # hash of title and text of each passage
    unanswerable = _Problem("queries without a positive are skipped")
    conflicts = _Problem(
        "passages have the id of an earlier passage but another text; the first text is used"
    )
    scored = 0  # number of examples with scores
    examples = numbered_examples(path, on_error, with_scores)
    for location, example in tqdm(
        examples, desc=f"reading {path.name}", unit=" examples", disable=None
    ):
        query = example.query
        try:
            _check_texts(location, example, rows)
            if query.id in locations:
                first = locations[query.id]
                where = f"record {first.record}" if first.record else f"line {first.line}"
                raise location.error(duplicate_id("query", query.id, where, repairable=False))
        except InputError as error:
            on_error(error)
            continue
        locations[query.id] = location
        queries.add(query)
        if not example.positives:
            message = f"query {query.id!r} has no positive; every query needs a positive"
            unanswerable.add(location.error(message))
        scored += example.scores is not None
        used: set[int] = set()  # row numbers of the passages of this example
        for name in _LISTS:
            scores = getattr(example.scores, name, None)
            for number, passage in enumerate(getattr(example, name)):
                content = hash((passage.title, passage.text))
                row = rows.get(passage.id)
                if row is None:
                    row = passages.add(passage)
                    rows[passage.id] = row
                    contents.append(content)
                elif contents[row] != content:
                    message = f"passage id {passage.id!r} occurs with two texts"
                    conflicts.add(
                        location.error(f"{message}; an id must always have the same text")
                    )
                if row not in used:  # a passage is in one list of an example, the first
                    used.add(row)
                    lists[name].add(row, math.nan if scores is None else scores[number])
            lists[name].end()
    for name in _LISTS:
        lists[name].save(folder, name, bool(scored) and name in ("positives", "negatives"))
    return {
        "fingerprint": queries.close() + passages.close(),
        "examples": len(locations),
        "answerable": len(locations) - unanswerable.count,
        "problems": [vars(problem) for problem in (unanswerable, conflicts) if problem.count],
    }


@dataclass
class _Problem:
    """Problem that causes a warning: description, count, and message of the first case."""

    text: str
    count: int = 0
    first: str = ""

    def add(self, error: InputError) -> None:
        self.count += 1
        self.first = self.first or str(error)


class _Lists:
    """Lists of row numbers with their scores, in growing arrays."""

    def __init__(self) -> None:
        self._ends = array("q", [0])
        self._values = array("q")
        self._scores = array("f")

    def add(self, row: int, score: float) -> None:
        self._values.append(row)
        self._scores.append(score)

    def end(self) -> None:
        """End the current list."""
        self._ends.append(len(self._values))

    def save(self, folder: Path, name: str, with_scores: bool) -> None:
        np.save(
            folder / f"{name}_offsets.npy", np.array(self._ends, dtype=np.int64), allow_pickle=False
        )
        np.save(
            folder / f"{name}_values.npy",
            np.array(self._values, dtype=np.int64),
            allow_pickle=False,
        )
        if with_scores:
            np.save(
                folder / f"{name}_scores.npy",
                np.array(self._scores, dtype=np.float32),
                allow_pickle=False,
            )


def _load_lists(folder: Path, name: str) -> Ragged:
    def load(part: str) -> np.ndarray:
        path = folder / f"{name}_{part}.npy"
        array: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
        return array

    has_scores = (folder / f"{name}_scores.npy").is_file()
    return Ragged(load("offsets"), load("values"), load("scores") if has_scores else None)


def _check_texts(location: SourceLocation, example: Example, known: Container[str]) -> None:
    """Raise InputError if the query or a passage of an example has an empty text.

    A passage is not checked if an earlier passage of the file has its id; that passage's text is
    used.
    """
    if is_blank(example.query.text):
        raise location.error(
            f"query {example.query.id!r} has an empty text; every query needs a text"
        )
    checked: set[str] = set()
    for passage in (*example.positives, *example.negatives, *example.others):
        if passage.id in checked or passage.id in known:
            continue
        if is_blank(passage.text):
            raise location.error(
                f"passage {passage.id!r} has an empty text; every passage needs a text"
            )
        checked.add(passage.id)

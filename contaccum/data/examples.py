"""Tables of training examples: passages, queries, and the row numbers of each query's passages.

Every passage is stored once, and so is every query: two with the same text are the same (see
``contaccum.data.identity``). The first call for a file checks the file and writes the tables into
the cache. Later calls map these tables into memory.
"""

import math
import os
import warnings
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset

from contaccum.config import DataPolicy
from contaccum.data.identity import first_with_same_text, text_hash
from contaccum.data.tables import (
    PASSAGE_COLUMNS,
    QUERY_COLUMNS,
    Ragged,
    TableWriter,
    cached_tables,
    hashes_file,
    text_hashes,
)
from contaccum.errors import InputError
from contaccum.formats.readers import numbered_examples
from contaccum.formats.records import (
    Example,
    OnError,
    Passage,
    Query,
    SourceLocation,
    TeacherScores,
    content_id,
    is_blank,
    stop,
)
from contaccum.runtime.cache import file_key
from contaccum.runtime.progress import Progress

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

    queries: Dataset  # n rows, columns id, text
    passages: Dataset  # m rows, columns id, title, text
    query_hashes: np.ndarray  # (n,) int64, hash of each query's text
    passage_hashes: np.ndarray  # (m,) int64
    positives: Ragged  # a list may be empty; no passage is in two lists of the same query
    negatives: Ragged
    others: Ragged
    fingerprint: str = ""
    merged: int = 0  # number of records with the query of an earlier record

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
        if np.isnan(positives).any() or np.isnan(negatives).any():
            return None
        return TeacherScores(
            [float(str(score)) for score in positives], [float(str(score)) for score in negatives]
        )


def load_examples(path: Path, policy: DataPolicy, scores: bool = False) -> ExampleTable:
    """Open a file of training examples: DPR JSON, JSONL of query, pos and neg, or Tevatron JSONL.

    Rows with the same query text become one query, which has the passages of all of them. An
    example with an empty text is invalid. Other problems cause a warning, or InputError with
    ``strict``: queries without a positive, ids that have several texts, and hard negatives with the
    text of a positive. ``repair`` has no effect on a file of examples and causes a warning.

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
    queries = folder / "queries.arrow"
    passages = folder / "passages.arrow"
    return ExampleTable(
        queries=Dataset.from_file(str(queries)),
        passages=Dataset.from_file(str(passages)),
        query_hashes=text_hashes(queries),
        passage_hashes=text_hashes(passages),
        positives=_load_lists(folder, "positives"),
        negatives=_load_lists(folder, "negatives"),
        others=_load_lists(folder, "others"),
        fingerprint=about["fingerprint"],
        merged=about["merged"],
    )


def build_examples(
    path: Path, with_scores: bool, folder: Path, on_error: OnError = stop
) -> dict[str, Any]:
    """Write the tables of a file of examples into ``folder``. Return the content of about.json."""
    queries = TableWriter(folder / "queries.arrow", QUERY_COLUMNS)
    passages = TableWriter(folder / "passages.arrow", PASSAGE_COLUMNS)
    lists = {name: _Lists() for name in _LISTS}
    query_hashes = array("q")
    rows: dict[int, int] = {}  # hash of a passage's text -> row number
    query_ids = _Ids("query")
    passage_ids = _Ids("passage")
    locations: list[SourceLocation] = []  # of each record
    scored = 0  # number of examples with scores
    examples = numbered_examples(path, on_error, with_scores)
    for location, example in Progress.over(examples, f"reading {path.name}", "examples"):
        query = example.query
        try:
            _check_texts(location, example)
        except InputError as error:
            on_error(error)
            continue
        query_hash = text_hash(query.text)
        query_ids.add(query.id, query_hash, location)
        query_hashes.append(query_hash)
        queries.add(query, query_hash)
        locations.append(location)
        scored += example.scores is not None
        for name in _LISTS:
            scores = getattr(example.scores, name, None)
            for position, passage in enumerate(getattr(example, name)):
                passage_hash = text_hash(passage.content)
                passage_ids.add(passage.id, passage_hash, location)
                row = rows.get(passage_hash)
                if row is None:
                    row = passages.add(passage, passage_hash)
                    rows[passage_hash] = row
                lists[name].add(row, math.nan if scores is None else scores[position])
            lists[name].end()
    fingerprints = [queries.close(), passages.close()]

    first = first_with_same_text(np.array(query_hashes, dtype=np.int64))
    kept_rows = np.unique(first)
    given = {name: lists[name].ragged() for name in _LISTS}
    grouped = {name: given[name].merged(first).distinct() for name in _LISTS}
    positives = grouped["positives"]
    is_positive = grouped["negatives"].contained_in(positives)
    negatives = grouped["negatives"].where(~is_positive)
    others = grouped["others"]
    others = others.where(~(others.contained_in(positives) | others.contained_in(negatives)))
    for name, ragged in (("positives", positives), ("negatives", negatives), ("others", others)):
        _save_lists(folder, name, ragged, bool(scored) and name != "others")
    if len(kept_rows) < len(first) or query_ids.repeated:
        fingerprints[0] = _rewrite(folder / "queries.arrow", QUERY_COLUMNS, kept_rows, query_ids)
    if passage_ids.repeated:
        fingerprints[1] = _rewrite(folder / "passages.arrow", PASSAGE_COLUMNS, None, passage_ids)

    unanswerable = np.flatnonzero(positives.lengths == 0)
    without_positive = copied = ""  # the first error of each kind
    if len(unanswerable):
        without_positive = str(
            locations[kept_rows[unanswerable[0]]].error(
                "the query has no positive; every query needs a positive"
            )
        )
    if is_positive.any():
        place = int(np.argmax(is_positive))
        copied_query = int(np.searchsorted(grouped["negatives"].offsets, place, side="right")) - 1
        passage = grouped["negatives"].values[place]
        record = next(
            record
            for record in np.flatnonzero(first == kept_rows[copied_query]).tolist()
            if passage in given["negatives"].row(record)
        )
        copied = str(
            locations[record].error(
                "a hard negative has the text of a positive of its query; it needs another text"
            )
        )
    problems = [
        {
            "count": len(unanswerable),
            "text": "queries without a positive are skipped",
            "first": without_positive,
        },
        {
            "count": int(is_positive.sum()),
            "text": "hard negatives have the text of a positive of their query; they are left out "
            f"(the first: {copied.partition(': ')[0]})",
            "first": copied,
        },
        query_ids.problem(),
        passage_ids.problem(),
    ]
    return {
        "fingerprint": "".join(fingerprints),
        "examples": len(kept_rows),
        "merged": len(first) - len(kept_rows),
        "answerable": len(kept_rows) - len(unanswerable),
        "problems": [problem for problem in problems if problem["count"]],
    }


class _Ids:
    """Ids of queries or passages, and the ids among them that are used for several texts."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._text: dict[str, int] = {}  # id -> hash of its first text
        self.repeated: dict[str, InputError] = {}  # id with several texts -> error at the second

    def add(self, key: str, hashed: int, location: SourceLocation) -> None:
        if self._text.setdefault(key, hashed) != hashed and key not in self.repeated:
            self.repeated[key] = location.error(
                f"{self._what} id {key!r} occurs with two texts; an id must always have the same "
                "text"
            )

    def problem(self) -> dict[str, Any]:
        plural = {"query": "queries", "passage": "passages"}[self._what]
        return {
            "count": len(self.repeated),
            "text": f"{self._what} ids stand for several texts; these {plural} get new ids",
            "first": str(next(iter(self.repeated.values()), "")),
        }


def _rewrite(path: Path, columns: tuple[str, ...], rows: np.ndarray | None, ids: _Ids) -> str:
    """Write a table again: only ``rows`` (None: all), and with a new id for each repeated id.

    A new id is a hash of the text. Returns the hash of all rows.
    """
    table = Dataset.from_file(str(path))
    hashes = np.array(text_hashes(path))
    new = path.with_name(f"new-{path.name}")
    writer = TableWriter(new, columns)
    numbers = np.arange(len(table)) if rows is None else rows
    for start in range(0, len(numbers), _BATCH):
        part = numbers[start : start + _BATCH]
        read = table[part]
        texts = zip(*(read[column] for column in columns), strict=True)
        for (key, *text), hashed in zip(texts, hashes[part].tolist(), strict=True):
            if key in ids.repeated:
                key = f"unnamed-{content_id(text[0] if len(text) > 1 else '', text[-1])}"
            writer.add((key, *text), hashed)
    digest = writer.close()
    os.replace(new, path)
    os.replace(hashes_file(new), hashes_file(path))
    return digest


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

    def ragged(self) -> Ragged:
        return Ragged(
            np.array(self._ends, dtype=np.int64),
            np.array(self._values, dtype=np.int64),
            np.array(self._scores, dtype=np.float32),
        )


def _save_lists(folder: Path, name: str, lists: Ragged, with_scores: bool) -> None:
    np.save(folder / f"{name}_offsets.npy", lists.offsets, allow_pickle=False)
    np.save(folder / f"{name}_values.npy", lists.values, allow_pickle=False)
    if with_scores:
        np.save(folder / f"{name}_scores.npy", lists.scores_or_nan, allow_pickle=False)


def _load_lists(folder: Path, name: str) -> Ragged:
    def load(part: str) -> np.ndarray:
        path = folder / f"{name}_{part}.npy"
        array: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
        return array

    has_scores = (folder / f"{name}_scores.npy").is_file()
    return Ragged(load("offsets"), load("values"), load("scores") if has_scores else None)


def _check_texts(location: SourceLocation, example: Example) -> None:
    """Raise InputError if the query or a passage of an example has an empty text."""
    if is_blank(example.query.text):
        raise location.error(
            f"query {example.query.id!r} has an empty text; every query needs a text"
        )
    for passage in (*example.positives, *example.negatives, *example.others):
        if is_blank(passage.text):
            raise location.error(
                f"passage {passage.id!r} has an empty text; every passage needs a text"
            )

"""Files of training examples as tables: each passage once, each query with the numbers of its passages.

The first reading checks the file and writes the tables into the cache; later readings map them.
"""

import math
import os
import warnings
from array import array
from collections.abc import Container
from dataclasses import dataclass
from itertools import islice, repeat
from pathlib import Path
from typing import NamedTuple

import numpy as np
from datasets import Dataset
from tqdm import tqdm

from contaccum.data.arrow import (
    PASSAGE_COLUMNS,
    QUERY_COLUMNS,
    Ragged,
    TableWriter,
    cached_folder,
    file_key,
    open_table,
)
from contaccum.data.bad_records import BadRecords, Place
from contaccum.data.formats import numbered_examples
from contaccum.data.quarantine import warn_of, write_quarantine
from contaccum.data.records import Example, Passage, is_blank
from contaccum.errors import InputError
from contaccum.files import read_json, write_json

_LISTS = ("positives", "negatives", "further")
_SCORED = ("positives", "negatives")


class Teacher(NamedTuple):
    """A teacher's scores, float32, in the order of the values of two Ragged lists; NaN where it gave none."""

    positives: np.ndarray
    negatives: np.ndarray


@dataclass(frozen=True)
class ExampleTable:
    """The examples of one file; the numbers in the lists are rows of ``passages``."""

    queries: Dataset  # columns id, text
    passages: Dataset  # columns id, title, text; every passage that any example names, once
    positives: Ragged  # one list a query, any of which may be empty; a query's lists share no passage
    negatives: Ragged
    further: Ragged
    fingerprint: str
    left_out: int  # bad records
    teacher: Teacher | None = None  # None: not asked for, or not a single score was found


def load_examples(
    path: str | Path, strict: bool = False, repair: bool = False, max_bad_records: int = 0, scores: bool = False
) -> ExampleTable:
    """Open a DPR JSON, a JSONL of query, pos and neg, or a Tevatron JSONL.

    A positive of a query is never its negative, and none of its hard negatives is among the further ones.

    Raises InputError, naming line and record, for an empty text and for a query id that stands twice. Warns, with
    their number, of queries without a positive and of passages whose id stood already with another text (the first
    text is kept); both are refused when ``strict``. ``repair``, which is for BEIR folders, has no effect but a warning.
    Up to ``max_bad_records`` records that would be refused are left out whole, listed in a quarantine file that a warning
    names. With ``scores`` those of a teacher are read too, and refused where they are not one finite number for each passage.
    """
    path = Path(path)
    if not os.path.isfile(path):
        raise InputError(f"{path}: no such file or folder")
    if repair:
        warnings.warn(f"{path}: repair has no effect on a file of examples", stacklevel=4)
    bad = BadRecords(max_bad_records)
    key = [file_key(path), max_bad_records, *(["scores"] if scores else [])]
    folder = cached_folder("examples", key, lambda folder: _Builder(path, folder, bad, scores).build())
    about = read_json(folder / "about.json")
    warn_of(path, about["bad"], folder)
    for problem in about["problems"]:
        if strict:
            raise InputError(problem["first"])
        warnings.warn(f"{path}: {problem['count']} {problem['text']}", stacklevel=4)
    if not about["examples"]:
        raise InputError(f"{path}: is empty, expected at least one example")
    if not about["answerable"]:
        raise InputError(f"{path}: no query has a positive, expected at least one")
    lists = {name: Ragged(*(_load(folder, f"{name}_{part}") for part in ("offsets", "values"))) for name in _LISTS}
    tables = open_table(folder / "queries.arrow"), open_table(folder / "passages.arrow")
    teacher = Teacher(*(_load(folder, f"{name}_scores") for name in _SCORED)) if about.get("scored") else None
    return ExampleTable(*tables, **lists, fingerprint=about["fingerprint"], left_out=about["bad"], teacher=teacher)


def _load(folder: Path, name: str) -> np.ndarray:
    return np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False)


def _save(folder: Path, name: str, numbers: array, dtype: type = np.int64) -> None:
    np.save(folder / f"{name}.npy", np.array(numbers, dtype=dtype), allow_pickle=False)


def check_texts(place: Place, example: Example, known: Container[str] = ()) -> None:
    """Refuse an empty query, and an empty passage whose id did not stand before, in ``known`` or in the example, with a text."""
    query = example.query
    if is_blank(query.text):
        raise place.error(f"the text of query {query.id!r} is empty, expected a query")
    first = {passage.id: passage for name in reversed(_LISTS) for passage in reversed(getattr(example, name))}
    for name in _LISTS:
        for passage in getattr(example, name):
            if is_blank(passage.text) and passage.id not in known and passage is first[passage.id]:
                raise place.error(f"the text of passage {passage.id!r} is empty, expected some text")


class _Problem:
    """Counts what is no reason to stop, and keeps the sentence of the first case."""

    def __init__(self, text: str) -> None:
        self.text, self.count, self.first = text, 0, ""

    def add(self, place: Place, sentence: str) -> None:
        self.count += 1
        self.first = self.first or str(place.error(sentence))


class _Builder:
    def __init__(self, path: Path, folder: Path, bad: BadRecords, scores: bool) -> None:
        self.path, self.folder, self.bad = path, folder, bad
        self.asked = scores
        self.scored = 0  # examples with scores
        self.scores: dict[str, array] = {name: array("f") for name in _SCORED}
        self.queries = TableWriter(folder / "queries.arrow", QUERY_COLUMNS)
        self.passages = TableWriter(folder / "passages.arrow", PASSAGE_COLUMNS)
        self.rows: dict[str, int] = {}  # passage id -> row
        self.contents = array("q")  # hash of each row's title and text
        self.places: dict[str, Place] = {}  # query id -> where it stands
        self.unanswerable = _Problem("queries without a positive are left out")
        self.conflicts = _Problem("passages have an id that stood already with another text; the first text is kept")
        self.ends: dict[str, array] = {name: array("q", [0]) for name in _LISTS}
        self.values: dict[str, array] = {name: array("q") for name in _LISTS}

    def build(self) -> None:
        examples = numbered_examples(self.path, self.bad, self.asked)
        for place, example in tqdm(examples, desc=f"reading {self.path.name}", unit=" examples", disable=None):
            try:
                self._check(place, example)
            except InputError as error:
                self.bad.leave_out(error)
            else:
                self._add(place, example)
        for name in _LISTS:
            _save(self.folder, f"{name}_offsets", self.ends[name])
            _save(self.folder, f"{name}_values", self.values[name])
        for name in _SCORED if self.scored else ():
            _save(self.folder, f"{name}_scores", self.scores[name], np.float32)
        problems = [problem for problem in (self.unanswerable, self.conflicts) if problem.count]
        about = {
            "fingerprint": self.queries.close() + self.passages.close(),
            "examples": len(self.places),
            "answerable": len(self.places) - self.unanswerable.count,
            "problems": [vars(problem) for problem in problems],
            "bad": len(self.bad.found),
            "scored": self.scored,
        }
        write_quarantine(self.folder, self.bad)
        write_json(self.folder / "about.json", about)

    def _check(self, place: Place, example: Example) -> None:
        """Refuse an example before anything of it is written."""
        check_texts(place, example, self.rows)
        query = example.query
        if query.id in self.places:
            where = str(self.places[query.id]).removeprefix(f"{self.path}, ")
            raise place.error(f"query id {query.id!r} stood already in {where}, expected every id once")

    def _add(self, place: Place, example: Example) -> None:
        query = example.query
        self.places[query.id] = place
        if not example.positives:
            self.unanswerable.add(place, f"query {query.id!r} has no positive, expected at least one")
        self.queries.add(query)
        rows: dict[int, float] = {}  # in order, each once, with its first score
        self.scored += example.scores is not None
        for name in _LISTS:
            known, passages = len(rows), getattr(example, name)
            scores = getattr(example.scores, name, None) or repeat(math.nan, len(passages))
            for passage, score in zip(passages, scores, strict=True):
                rows.setdefault(self._row_of(passage, place), score)
            self.values[name].extend(islice(rows, known, None))
            self.ends[name].append(len(self.values[name]))
            if self.asked and name in _SCORED:
                self.scores[name].extend(islice(rows.values(), known, None))

    def _row_of(self, passage: Passage, place: Place) -> int:
        content = hash((passage.title, passage.text))
        row = self.rows.get(passage.id)
        if row is None:
            row = self.rows[passage.id] = self.passages.add(passage)
            self.contents.append(content)
        elif self.contents[row] != content:
            self.conflicts.add(place, f"passage id {passage.id!r} stood already with another text, expected one text")
        return row

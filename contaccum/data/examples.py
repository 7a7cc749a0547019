"""Tables of training examples: passages, queries, and the row numbers of each query's passages.

Every passage is stored once, and so is every query: two with the same text are the same (see
``contaccum.data.identity``). The first call for a file checks the file and writes the tables into
the cache. Later calls map these tables into memory.
"""

import math
import os
import re
import warnings
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from datasets import Dataset

from contaccum.config import DataPolicy
from contaccum.data.corpus import beir_query_ids
from contaccum.data.identity import first_with_same_text, text_hash
from contaccum.data.tables import (
    PASSAGE_COLUMNS,
    QUERY_COLUMNS,
    Ragged,
    TableWriter,
    cached_tables,
    rewrite,
    text_hashes,
)
from contaccum.errors import InputError
from contaccum.formats.readers import numbered_examples, unread_fields
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
from contaccum.runtime.progress import progress_bar
from contaccum.runtime.units import counted

_BATCH = 1000  # number of queries that are read at a time
POSITIVE, NEGATIVE, OTHER = range(3)  # kinds of passages of an example
_LISTS = ("positives", "negatives", "others")


def left_out(copies: int) -> str:
    """Return the warning about hard negatives with the text of a positive of their query."""
    return f"left out {counted(copies, 'hard negative')} with the text of a positive of the query"


class Lists(NamedTuple):
    """Passages of n queries, and the positions of the hard negatives that are left out."""

    positives: Ragged
    negatives: Ragged
    others: Ragged
    copies: np.ndarray


def lists_of(
    queries: np.ndarray,
    kinds: np.ndarray,
    rows: np.ndarray,
    passage_hashes: np.ndarray,
    count: int,
    scores: np.ndarray | None = None,
) -> Lists:
    """Divide k passages into the lists of ``count`` queries.

    queries, kinds, rows, scores: (k,); query number, kind, row number and teacher score of each
    passage. A hard negative with the text of a positive of its query is left out, and so is another
    negative with the text of a positive or of a hard negative. Of negatives with the same text, a
    query has one.
    """
    first = first_with_same_text(passage_hashes)[rows]
    keys = queries * len(passage_hashes) + first
    is_positive = np.isin(keys, keys[kinds == POSITIVE])
    is_negative = np.isin(keys, keys[kinds == NEGATIVE])
    lists = []
    for used, values in (
        (kinds == POSITIVE, rows),
        ((kinds == NEGATIVE) & ~is_positive, first),
        ((kinds == OTHER) & ~is_positive & ~is_negative, first),
    ):
        used_scores = None if scores is None else scores[used]
        lists.append(Ragged.grouped(queries[used], values[used], count, used_scores))
    copies = np.flatnonzero((kinds == NEGATIVE) & is_positive)
    copies = copies[np.unique(keys[copies], return_index=True)[1]]
    return Lists(lists[POSITIVE], lists[NEGATIVE], lists[OTHER], copies)


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
    fingerprint: str
    merged: int = 0  # number of records with the query of an earlier record
    copies: int = 0  # number of hard negatives that are left out: they have a positive's text
    # grades of a BEIR folder: query id -> passage id -> grade
    qrels: dict[str, dict[str, int]] | None = None

    def __len__(self) -> int:
        return int(np.count_nonzero(self.positives.lengths))

    def __iter__(self) -> Iterator[Example]:
        return self.part(0, len(self))

    def with_beir_ids(self) -> "ExampleTable":
        """Return the examples with query ids for a BEIR folder. Those of a BEIR folder stay."""
        if self.qrels is not None:
            return self
        ids = beir_query_ids(self.queries["id"][:], self.passages)
        return replace(
            self, queries=Dataset.from_dict({"id": ids, "text": self.queries["text"][:]})
        )

    @property
    def half_scored(self) -> int:
        """Number of queries of which some positives and hard negatives have a score, and some not.

        Iteration yields them without scores.
        """
        missing = np.zeros(len(self.positives.lengths), dtype=int)
        for lists in (self.positives, self.negatives):
            np.add.at(missing, lists.owners[np.isnan(lists.scores)], 1)
        texts = self.positives.lengths + self.negatives.lengths
        return int(np.count_nonzero((missing > 0) & (missing < texts)))

    def part(self, start: int, stop: int) -> Iterator[Example]:
        """Yield examples ``start`` to ``stop - 1``, counting only examples with a positive."""
        kept = np.flatnonzero(self.positives.lengths)[start:stop]
        for first in range(0, len(kept), _BATCH):
            numbers = kept[first : first + _BATCH]
            queries = self.queries[numbers]
            lists = [part.take(numbers) for part in (self.positives, self.negatives, self.others)]
            # one read for all lists: a read takes longer than its passages
            rows = np.unique(np.concatenate([part.values for part in lists]))
            passages = list(Passage.of_columns(self.passages[rows]))
            lists = [part.renumbered(rows) for part in lists]
            for place, (key, text) in enumerate(zip(queries["id"], queries["text"], strict=True)):
                positives, negatives, others = (
                    [passages[row] for row in part.row(place)] for part in lists
                )
                scores = [part.scores[part.span(place)] for part in lists[:OTHER]]
                teacher = None
                if not np.isnan(np.concatenate(scores)).any():
                    # the shortest decimals that round to the float32: 0.1, not 0.10000000149
                    decimals = [[float(str(score)) for score in part] for part in scores]
                    teacher = TeacherScores(decimals[POSITIVE], decimals[NEGATIVE])
                yield Example(Query(key, text), positives, negatives, others, teacher)


def with_name(message: str, path: Path, name: str) -> str:
    """Return a message with the name that the user gave for ``path``, which may be in the cache.

    A line of a file in the cache is a row of the data set.
    """
    if Path(name) == path:
        return message
    place = rf"{re.escape(str(path))}(:(?=\d))?"
    return re.sub(place, lambda found: name + (", row " if found[1] else ""), message)


def load_examples(path: Path, policy: DataPolicy, name: str) -> ExampleTable:
    """Open a file of training examples: DPR JSON, JSONL of query, pos and neg, or Tevatron JSONL.

    Rows with the same query text become one query, which has the passages of all of them. An
    example with an empty text is invalid. Other problems cause a warning, or InputError with
    ``strict``: queries without a positive, ids that have several texts, and hard negatives with the
    text of a positive. ``repair`` has no effect on a file of examples.

    name: path or name of the data set as the user gave it, for messages.
    """

    named = partial(with_name, path=path, name=name)
    if not os.path.isfile(path):
        raise InputError(f"{path}: no such file or folder")
    try:
        folder, about = cached_tables(
            "examples", file_key(path), lambda folder: build_examples(path, folder)
        )
    except InputError as error:
        raise InputError(named(str(error))) from error
    for problem in about["problems"]:
        sentence = named(f"{path}: {problem}")
        if policy.strict:
            raise InputError(f"{sentence}; strict is set, so this is an error")
        warnings.warn(sentence, stacklevel=4)
    if not about["examples"]:
        raise InputError(named(f"{path}: has no valid example; it needs at least one"))
    queries = folder / "queries.arrow"
    passages = folder / "passages.arrow"
    lists = [Ragged.load(folder / f"{name}.npz") for name in _LISTS]
    if not len(lists[POSITIVE].values):
        raise InputError(
            named(f"{path}: no query has a positive passage; at least one query must have one")
        )
    return ExampleTable(
        Dataset.from_file(str(queries)),
        Dataset.from_file(str(passages)),
        text_hashes(queries),
        text_hashes(passages),
        lists[POSITIVE],
        lists[NEGATIVE],
        lists[OTHER],
        about["fingerprint"],
        about["merged"],
        about["copies"],
    )


def build_examples(path: Path, folder: Path, on_error: OnError = stop) -> dict[str, Any]:
    """Write the tables of a file of examples into ``folder``. Return the content of about.json."""
    queries = _DifferentTexts(folder / "queries.arrow", QUERY_COLUMNS)
    passages = _DifferentTexts(folder / "passages.arrow", PASSAGE_COLUMNS)
    locations: list[SourceLocation] = []  # of each record
    query_of_record = array("q")
    records = array("q")  # for each passage of a record: number of the record, kind, row, score
    kinds = array("b")
    rows = array("q")
    scores = array("f")
    examples = numbered_examples(path, on_error)
    for location, example in progress_bar(None, f"reading {path.name}", "examples", examples):
        lists = (example.positives, example.negatives, example.others)
        empty = next((each for part in lists for each in part if is_blank(each.content)), None)
        if is_blank(example.query.text) or empty:
            what, which = ("passage", f"passage {empty.id!r}") if empty else ("query", "the query")
            on_error(location.error(f"{which} has an empty text; every {what} needs a text"))
            continue
        query_of_record.append(queries.add(example.query, example.query.text, location))
        given = example.scores or ([math.nan] * len(lists[0]), [math.nan] * len(lists[1]))
        for kind, part in enumerate(lists):
            records.extend([len(locations)] * len(part))
            kinds.extend([kind] * len(part))
            rows.extend(passages.add(passage, passage.content, location) for passage in part)
            scores.extend([math.nan] * len(part) if kind == OTHER else given[kind])
        locations.append(location)
    fingerprint = queries.close() + passages.close()
    grouped = lists_of(
        np.array(query_of_record)[np.array(records, dtype=np.int64)],
        np.array(kinds),
        np.array(rows, dtype=np.int64),
        text_hashes(folder / "passages.arrow"),
        len(queries.rows),
        np.array(scores),
    )
    for name in _LISTS:
        getattr(grouped, name).save(folder / f"{name}.npz")

    problems = unread_fields(path)
    unanswerable = np.flatnonzero(grouped.positives.lengths == 0)
    if len(unanswerable):
        first = locations[query_of_record.index(unanswerable[0])]
        skipped = counted(len(unanswerable), "query")
        problems.append(f"skipped {skipped} without a positive (the first: {first})")
    if len(grouped.copies):
        first = locations[records[grouped.copies.min()]]
        problems.append(f"{left_out(len(grouped.copies))} (the first: {first})")
    for what, texts in (("query id", queries), ("passage id", passages)):
        if texts.repeated:
            key, first = next(iter(texts.repeated.items()))
            problems.append(
                f"{counted(len(texts.repeated), what)} used for several texts; these texts get "
                f"new ids (the first: {key!r} in {first})"
            )
    return {
        "fingerprint": fingerprint,
        "examples": len(queries.rows),
        "merged": len(locations) - len(queries.rows),
        "copies": len(grouped.copies),
        "problems": problems,
    }


class _DifferentTexts:
    """Table of queries or passages with different texts.

    An id that is used for several texts is replaced.
    """

    def __init__(self, path: Path, columns: tuple[str, ...]) -> None:
        self._writer = TableWriter(path, columns)
        self._text_of_id: dict[str, int] = {}  # id -> hash of its first text
        self.rows: dict[int, int] = {}  # hash of a text -> row number
        self.repeated: dict[str, SourceLocation] = {}  # id with several texts -> the second

    def add(self, row: Query | Passage, text: str, location: SourceLocation) -> int:
        """Add a text unless the table has it. Return its row number."""
        hashed = text_hash(text)
        if self._text_of_id.setdefault(row.id, hashed) != hashed:
            self.repeated.setdefault(row.id, location)
        if hashed not in self.rows:
            self.rows[hashed] = self._writer.add(row, hashed)
        return self.rows[hashed]

    def close(self) -> str:
        """Finish the table. Return the hash of all rows in hexadecimal."""
        digest = self._writer.close()
        if self.repeated:
            digest = rewrite(self._writer, np.arange(len(self.rows)), self.repeated)
        return digest

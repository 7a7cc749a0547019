"""Training examples that are read as they are needed: for sets that neither disk nor cache can hold.

A stream is read in its order through a shuffle buffer, again from its start when it ends. What a step holds is a function of
the seed, the buffer's size and the step, as for any other data set; to find it, everything before it is read.
"""

import hashlib
import json
import math
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import count, islice, repeat
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from contaccum.batch import NO_PASSAGE
from contaccum.config import DataConfig
from contaccum.data.bad_records import BadRecords, Place
from contaccum.data.dataset import TrainSet, load_training, no_scores
from contaccum.data.draws import NEGATIVES, ORDER, POSITIVES, random_stream
from contaccum.data.examples import check_texts
from contaccum.data.formats import kind_of_data, kind_of_record, line_examples, numbered_examples
from contaccum.data.hub import PREFIX, HubLines
from contaccum.data.records import Example, Passage, Query, Scores
from contaccum.data.sources import resolve
from contaccum.errors import InputError

Reader = Callable[[BadRecords], Iterator[tuple[Place, Example]]]
_ENDS = 1 << 20  # bytes at either end of a file that tell it from another


class StreamSet:
    """A file of examples, or a set of the Hub, that is read from its start to its end, time and again."""

    def __init__(self, name: str, read: Reader, fingerprint: str, data: DataConfig, scores: bool = False) -> None:
        """read: all examples anew, with their places, leaving out bad records. data: what of them is wanted; with ``scores``,
        those of a teacher too, which ``read`` then reads."""
        self.name, self.fingerprint, self.data, self.scores = name, fingerprint, data, scores
        self._read = read
        self._said: set[str] = set()

    def texts(self) -> list[str]:
        """Queries, titles and texts of as many examples as the shuffle buffer holds."""
        first = list(islice(self.examples(), self.data.shuffle_buffer))
        parts = [
            part for example in first for passage in (*example.positives, *example.negatives) for part in passage[1:]
        ]
        return [*(example.query.text for example in first), *parts]

    def examples(self) -> Iterator[Example]:
        """Those that have a positive, in their order; each names a passage once, and has its negatives all in one list.

        What another reader counts in one warning is said when it is met, once. That an id stands twice, with two queries or
        two texts, is not seen: nobody remembers what went by.
        """
        bad, found, answerable = BadRecords(self.data.max_bad_records), False, 0
        told, compared = 0, not self.scores
        for place, example in self._read(bad):
            try:
                check_texts(place, example)
            except InputError as error:
                bad.leave_out(error)
                continue
            told = self._say_bad(bad, told)
            found = True
            if not example.positives:
                self._unanswerable(place, example)
                continue
            answerable += 1
            merged = self._merged(example)
            compared = (self.scores and self._compared(merged)) or compared
            if not compared and answerable == self.data.shuffle_buffer:
                break
            yield merged
        self._say_bad(bad, told)
        if not answerable:
            what = (
                "no query has a positive, expected at least one" if found else "is empty, expected at least one example"
            )
            raise InputError(f"{self.name}: {what}")
        if not compared:
            raise no_scores(self.name, f" in its first {answerable} examples")

    def _merged(self, example: Example) -> Example:
        known: dict[str, tuple[Passage, float]] = {}  # in order, each once, with its first score
        parts = []
        for name in ("positives", "negatives", "further"):
            before, passages = len(known), getattr(example, name)
            scores = getattr(example.scores, name, None) or repeat(math.nan, len(passages))
            for passage, score in zip(passages, scores, strict=True):
                known.setdefault(passage.id, (passage, score))
            parts.append(list(islice(known.values(), before, None)))
        positives, negatives, further = parts
        wanted = self.data.hard_negatives
        kept = [*negatives, *further[: max(0, wanted - len(negatives))]] if wanted else []
        if len(kept) < wanted:
            self._say(
                "few",
                f"query {example.query.id!r} has {len(kept)} hard negatives of {wanted}; where they are missing, passages of"
                " other examples of the step or the shuffle buffer take their places",
            )
        own, hard = ([passage for passage, _ in part] for part in (positives, kept))
        given = Scores(*([score for _, score in part] for part in (positives, kept))) if self.scores else None
        return Example(example.query, own, hard, scores=given)

    def _compared(self, example: Example) -> bool:
        """Whether a teacher scored one of an example's positives and one of its negatives; the first that it did not is told."""
        found = all(any(not math.isnan(score) for score in part) for part in example.scores or ())
        if not found:
            self._say(
                "unscored",
                f"query {example.query.id!r} has no scores of a teacher for a positive and a negative; such queries learn by "
                "InfoNCE alone",
            )
        return found

    def _unanswerable(self, place: Place, example: Example) -> None:
        sentence = str(place.error(f"query {example.query.id!r} has no positive, expected at least one"))
        if self.data.strict:
            raise InputError(sentence)
        self._say("unanswerable", f"{sentence}; such queries are left out")

    def _say_bad(self, bad: BadRecords, told: int) -> int:
        for entry in bad.found[told:]:
            self._say(f"{entry['line']}/{entry.get('record')}", f"{entry['error']}; the record is left out")
        return len(bad.found)

    def _say(self, what: str, sentence: str) -> None:
        """Warn, of each thing once however often it is read."""
        if what not in self._said:
            self._said.add(what)
            warnings.warn(f"{self.name}: {sentence}" if self.name not in sentence else sentence, stacklevel=2)


def open_training(data: DataConfig, scores: bool = False) -> TrainSet | StreamSet:
    """What a config says to train on, tables or a stream; InputError as ``load_training`` and ``open_stream``."""
    return open_stream(data, scores) if data.streaming else load_training(data, scores)


def open_stream(data: DataConfig, scores: bool = False) -> StreamSet:
    """The stream of ``data.train``: a file of examples of any form, or a set of the Hub; with ``scores``, those of a teacher too.

    The fingerprint is of a file's size and both its ends, or of the Hub's version. Raises InputError for a BEIR folder, and
    whatever else holds no examples.
    """
    if data.train.startswith(PREFIX) and not os.path.exists(data.train):
        rows = HubLines(data.train, data.split)
        kind = kind_of_record(dict.fromkeys(rows.columns()), Place(rows.path, 1))
        return StreamSet(
            data.train,
            lambda bad: line_examples(rows.path, rows.lines(bad), kind, bad, scores),
            _hash([rows.version(), data.split]),
            data,
            scores,
        )
    path, _ = resolve(data.train, data.split)
    if kind_of_data(path, data.max_bad_records) == "beir":
        raise InputError(f"{path}: is a BEIR folder, expected a file of examples: data.streaming joins nothing")
    numbered_examples(path, BadRecords(data.max_bad_records))  # refuses what holds no examples
    return StreamSet(str(path), lambda bad: numbered_examples(path, bad, scores), _file_hash(path), data, scores)


def _hash(key: object) -> str:
    return hashlib.blake2b(json.dumps(key).encode(), digest_size=16).hexdigest()


def _file_hash(path: Path) -> str:
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        first = file.read(_ENDS)
        file.seek(max(0, size - _ENDS))
        return _hash([size, *(hashlib.sha256(part).hexdigest() for part in (first, file.read(_ENDS)))])


class StreamRows(NamedTuple):
    """One optimizer step of a stream: N queries, each with its positive and H hard negatives."""

    queries: list[Query]
    passages: list[list[Passage]]  # N lists of 1 + H, the positive first
    columns: np.ndarray  # (N, 1 + H) int64, the numbers of these passages
    positives: np.ndarray  # (N, P) int64, every known positive, padded with NO_PASSAGE
    teacher: np.ndarray | None = None  # (N, 1 + H) float32, its scores of the passages, NaN where it gave none


def passage_number(key: str) -> int:
    """63 bits of a hash of a passage's id: the same passage has the same number whenever it comes by."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") >> 1


class StreamSampler:
    """Says which examples make up a step; a pure function of (seed, step), found by reading on from the last one asked for.

    Examples pass through the shuffle buffer: one that is drawn from it at random gives its place to the next one of the
    stream; at the end of an epoch it empties. Positives and hard negatives are drawn as by StepSampler. What is missing of the
    latter comes from the passages of the step's other examples and of the buffer as the step leaves it.
    """

    def __init__(
        self, source: StreamSet, seed: int, global_batch_size: int, hard_negatives: int, shuffle_buffer: int, kept: int
    ) -> None:
        """kept: how many of the last steps can be asked for again without reading the stream from its start."""
        self._source, self._seed, self._capacity, self._keep = source, seed, shuffle_buffer, kept
        self.size, self.hard_negatives = global_batch_size, hard_negatives
        self._lock = threading.Lock()
        self._start()

    def _start(self) -> None:
        self._buffer: list[Example] = []
        self._steps: dict[int, StreamRows] = {}
        self._next = 0
        self._examples = self._endless()

    def __call__(self, step: int) -> StreamRows:
        """The examples of optimizer step ``step``, counted from 0; from any thread."""
        with self._lock:
            if step < self._next and step not in self._steps:
                self._start()
            ahead = range(self._next, step + 1)
            far = len(ahead) > self._keep  # a resumed run reads what the broken one has read
            for _ in tqdm(ahead, desc="reading on", unit=" steps", disable=None if far else True):
                examples = list(islice(self._examples, self.size))
                assert len(examples) == self.size, "a stream that failed is not read on"
                if self._next > step - self._keep:
                    self._steps[self._next] = self._draw(self._next, examples)
                self._steps.pop(self._next - self._keep, None)
                self._next += 1
            return self._steps[step]

    def _endless(self) -> Iterator[Example]:
        for epoch in count():
            random = random_stream(self._seed, ORDER, epoch)
            for example in self._source.examples():
                if len(self._buffer) < self._capacity:
                    self._buffer.append(example)
                    continue
                place = int(random.integers(self._capacity))
                drawn, self._buffer[place] = self._buffer[place], example
                yield drawn
            random.shuffle(self._buffer)
            while self._buffer:
                yield self._buffer.pop()

    def _draw(self, step: int, examples: list[Example]) -> StreamRows:
        """One positive and H negatives for each of a step's examples."""
        shares = random_stream(self._seed, POSITIVES, step).random(len(examples))
        random = random_stream(self._seed, NEGATIVES, step)
        pool = [*examples, *self._buffer] if self.hard_negatives else []
        passages = []
        teacher = np.full((len(examples), 1 + self.hard_negatives), np.nan, dtype=np.float32)
        for scores, example, share in zip(teacher, examples, shares, strict=True):
            chosen = int(share * len(example.positives))
            own = [example.positives[chosen]]
            if example.scores:
                scores[0] = example.scores.positives[chosen]
            if self.hard_negatives:
                places = random.permutation(len(example.negatives))[: self.hard_negatives]
                if example.scores:
                    scores[1 : 1 + len(places)] = [example.scores.negatives[place] for place in places]
                own += self._filled_up([example.negatives[place] for place in places], example, pool, random)
            passages.append(own)
        columns = np.array([[passage_number(passage.id) for passage in own] for own in passages], dtype=np.int64)
        width = max(len(example.positives) for example in examples)
        positives = np.full((len(examples), width), NO_PASSAGE, dtype=np.int64)  # (N, P)
        for row, example in zip(positives, examples, strict=True):
            row[: len(example.positives)] = [passage_number(passage.id) for passage in example.positives]
        queries = [example.query for example in examples]
        return StreamRows(queries, passages, columns, positives, teacher if self._source.scores else None)

    def _filled_up(
        self, hard: list[Passage], example: Example, pool: Sequence[Example], random: np.random.Generator
    ) -> list[Passage]:
        """The hard negatives of a query, and behind them what is missing of H, each from an example drawn at random."""
        taken = {passage.id for passage in (*example.positives, *hard)}
        while len(hard) < self.hard_negatives:
            before = len(hard)
            for place in random.permutation(len(pool)):
                others = [p for p in (*pool[place].positives, *pool[place].negatives) if p.id not in taken]
                if others:
                    hard.append(others[int(random.integers(len(others)))])
                    taken.add(hard[-1].id)
                if len(hard) == self.hard_negatives:
                    return hard
            if len(hard) == before:
                raise InputError(
                    f"query {example.query.id!r} finds {before} passages in its step and the shuffle buffer that are not its"
                    f" positives, expected at least the {self.hard_negatives} of hard_negatives"
                )
        return hard

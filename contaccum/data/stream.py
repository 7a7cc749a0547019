"""Streams of training examples, for data sets that are too large for the cache."""

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

from contaccum.batch import MISSING, NO_PASSAGE
from contaccum.catalog import HUB_PREFIX, fetch
from contaccum.catalog.hub_sets import HubLines
from contaccum.config import DataConfig
from contaccum.data.examples import check_texts
from contaccum.data.sampler import NEGATIVES, ORDER, POSITIVES, random_stream
from contaccum.data.train_set import no_scores
from contaccum.errors import InputError
from contaccum.formats.readers import kind_of_data, kind_of_record, line_examples, numbered_examples
from contaccum.formats.records import Example, Passage, Query, RejectedRecords, SourceLocation, TeacherScores
from contaccum.runtime.files import sha256_of

Reader = Callable[[RejectedRecords], Iterator[tuple[SourceLocation, Example]]]
_ENDS = 1 << 20  # number of bytes at the start and at the end of a file; older checkpoints have a hash of only these


class StreamSet:
    """Examples of a file or of a Hub set. Every iteration reads the examples again, in order."""

    def __init__(self, name: str, read: Reader, fingerprint: str, data: DataConfig, scores: bool = False) -> None:
        """Prepare a stream. read: function that yields all examples with their locations. scores: require teacher scores."""
        self.name, self.fingerprint, self.data, self.scores = name, fingerprint, data, scores
        self._read = read
        self._warned: set[str] = set()

    def texts(self) -> list[str]:
        """Return all texts and titles of the first ``data.shuffle_buffer`` examples, to learn a vocabulary from."""
        first = list(islice(self.examples(), self.data.shuffle_buffer))
        parts = [
            part for example in first for passage in (*example.positives, *example.negatives) for part in passage[1:]
        ]
        return [*(example.query.text for example in first), *parts]

    def examples(self) -> Iterator[Example]:
        """Yield the examples that have a positive, in order.

        If an example has too few hard negatives, other negatives (DPR's ``negative_ctxs``) are appended to
        ``negatives``. Each rejected record causes a warning. For every other kind of problem, only the first example
        that has it causes a warning. Duplicate query ids are not detected, because the ids of all earlier examples may not fit
        into memory. Raises InputError if no example has a positive, or if teacher scores are needed but the first
        ``data.shuffle_buffer`` examples have none.
        """
        rejected, scored = RejectedRecords.of(self.data), not self.scores
        found = answerable = reported = 0
        for location, example in self._read(rejected):
            try:
                check_texts(location, example)
            except InputError as error:
                rejected.reject(error)
                continue
            reported = self._warn_rejected(rejected, reported)
            found += 1
            if not example.positives:
                problem = location.error(f"query {example.query.id!r} has no positive; every query needs a positive")
                if self.data.strict:
                    raise problem
                self._warn("unanswerable", f"{problem}. Such queries are skipped")
                continue
            answerable += 1
            merged = self._merged(example)
            scored = (self.scores and self._has_scores(merged)) or scored
            if not scored and answerable == self.data.shuffle_buffer:
                break
            yield merged
        self._warn_rejected(rejected, reported)
        if not answerable:
            what = "no query has a positive passage; at least one query must have one"
            raise InputError(f"{self.name}: {what if found else 'has no valid example; it needs at least one'}")
        if not scored:
            raise no_scores(self.name, f" in its first {answerable} examples")

    def _merged(self, example: Example) -> Example:
        """Remove repeated passages. If there are too few ``negatives``, append the example's ``others`` to them."""
        known: dict[str, tuple[Passage, float]] = {}  # passage id -> passage and its first score
        parts = []
        for name in ("positives", "negatives", "others"):
            before, passages = len(known), getattr(example, name)
            scores = getattr(example.scores, name, None) or repeat(math.nan, len(passages))
            for passage, score in zip(passages, scores, strict=True):
                known.setdefault(passage.id, (passage, score))
            parts.append(list(islice(known.values(), before, None)))
        positives, negatives, others = parts
        wanted = self.data.hard_negatives
        kept = [*negatives, *others[: max(0, wanted - len(negatives))]] if wanted else []
        if len(kept) < wanted and self.data.fill_negatives == "random":
            self._warn(
                "few",
                f"query {example.query.id!r} has {len(kept)} hard negatives, fewer than {wanted}; for such queries, passages of "
                "other examples in the step or the shuffle buffer are added",
            )
        own, hard = ([passage for passage, _ in part] for part in (positives, kept))
        given = TeacherScores(*([score for _, score in part] for part in (positives, kept))) if self.scores else None
        return Example(example.query, own, hard, scores=given)

    def _has_scores(self, example: Example) -> bool:
        """Return whether at least one positive and one negative have teacher scores. If not, warn once for the whole stream."""
        found = all(any(not math.isnan(score) for score in part) for part in example.scores or ())
        if not found:
            self._warn(
                "unscored",
                f"distillation needs the teacher scores of a positive and a negative, but query {example.query.id!r} lacks them; "
                "the loss of such queries is InfoNCE only",
            )
        return found

    def _warn_rejected(self, rejected: RejectedRecords, reported: int) -> int:
        for entry in rejected.entries[reported:]:
            self._warn(f"{entry['line']}/{entry.get('record')}", f"{entry['error'].rstrip('.')}. The record is skipped")
        return len(rejected.entries)

    def _warn(self, what: str, sentence: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            warnings.warn(f"{self.name}: {sentence}" if self.name not in sentence else sentence, stacklevel=2)


def open_stream(data: DataConfig, scores: bool = False) -> StreamSet:
    """Open ``data.train`` as a stream. scores: require teacher scores.

    ``data.train`` is a file of examples or a Hub set. The fingerprint of the result is a hash: for a file, of all bytes (about
    one second for each GB); for a Hub set, of its version. Raises InputError for a BEIR folder and for every other format
    without examples.
    """
    if data.train.startswith(HUB_PREFIX) and not os.path.exists(data.train):
        rows = HubLines(data.train, data.split, data.max_unpacked)
        kind = kind_of_record(dict.fromkeys(rows.columns()), SourceLocation(rows.path, 1))
        return StreamSet(
            data.train,
            lambda rejected: line_examples(rows.path, rows.lines(rejected), kind, rejected, scores),
            _hash([rows.version, data.split]),
            data,
            scores,
        )
    path = fetch(data.train, data.split, data.max_unpacked)
    if kind_of_data(path, data.max_bad_records) == "beir":
        raise InputError(
            f"{path}: is a BEIR folder, but data.streaming reads one file of examples. Set data.streaming to false."
        )
    numbered_examples(path, RejectedRecords.of(data))  # raises an error for a file of another format
    return StreamSet(
        str(path), lambda rejected: numbered_examples(path, rejected, scores), _file_hash(path), data, scores
    )


def _hash(key: object) -> str:
    return hashlib.blake2b(json.dumps(key).encode(), digest_size=16).hexdigest()


def _file_hash(path: Path) -> str:
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        first = file.read(_ENDS)
        file.seek(max(0, size - _ENDS))
        ends = _hash([size, *(hashlib.sha256(part).hexdigest() for part in (first, file.read(_ENDS)))])
    return f"{ends}-{sha256_of(path)[:32]}"


class StreamRows(NamedTuple):
    """Examples of one optimizer step: N queries, each with one positive and H hard negatives."""

    queries: list[Query]
    passages: list[list[Passage]]  # N lists of at most 1 + H passages, the positive first
    columns: np.ndarray  # (N, 1 + H) int64, ``passage_number`` of each passage, or MISSING
    positives: np.ndarray  # (N, P) int64, all known positives of each query, padded with NO_PASSAGE
    teacher: np.ndarray | None = None  # (N, 1 + H) float32, teacher score of each passage, NaN if missing


def passage_number(key: str) -> int:
    """Return a 63-bit hash of the passage id ``key``. It identifies the passage in every step."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") >> 1


class StreamSampler:
    """Chooses the examples of each step from a stream.

    The choice depends only on the seed, the size of the shuffle buffer and the step number. A stream has no random access: each
    step reads the next examples. Therefore a resumed run first reads the examples of all earlier steps again. The shuffle buffer
    yields a random example, and the next example of the stream takes its place. At the end of an epoch, the buffer yields all
    remaining examples in random order, and the stream starts again.

    Positives and hard negatives are drawn as in StepSampler. If a query has too few hard negatives, ``data.fill_negatives``
    decides: ``random`` adds random passages of other examples in the step and shuffle buffer, ``none`` leaves gaps (MISSING).
    """

    def __init__(
        self,
        source: StreamSet,
        seed: int,
        global_batch_size: int,
        hard_negatives: int,
        shuffle_buffer: int,
        cached_steps: int,
    ) -> None:
        """Start the stream. cached_steps: number of steps that stay in memory, so that they can be returned again."""
        self._source, self._seed, self._capacity, self._keep = source, seed, shuffle_buffer, cached_steps
        self.size, self.hard_negatives = global_batch_size, hard_negatives
        self._lock = threading.Lock()
        self._start()

    def _start(self) -> None:
        self._buffer: list[Example] = []
        self._steps: dict[int, StreamRows] = {}
        self._next = 0
        self._examples = self._endless()

    def __call__(self, step: int) -> StreamRows:
        """Return the examples of optimizer step ``step``. Steps count from 0. Threads may call this at the same time."""
        with self._lock:
            if step < self._next and step not in self._steps:
                self._start()
            missing = range(self._next, step + 1)
            far = len(missing) > self._keep  # after a resume, which skips the examples of all earlier steps
            for _ in tqdm(missing, desc="skipping", unit=" steps", disable=None if far else True):
                examples = list(islice(self._examples, self.size))
                assert len(examples) == self.size, "only an error can end the stream"
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
        """Draw one positive and up to H hard negatives for each example of a step."""
        shares = random_stream(self._seed, POSITIVES, step).random(len(examples))
        random = random_stream(self._seed, NEGATIVES, step)
        fill = self._source.data.fill_negatives == "random"
        pool = [*examples, *self._buffer] if self.hard_negatives and fill else []
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
                hard = [example.negatives[place] for place in places]
                own += self._filled_up(hard, example, pool, random) if fill else hard
            passages.append(own)
        columns = np.full(teacher.shape, MISSING, dtype=np.int64)
        for row, own in zip(columns, passages, strict=True):
            row[: len(own)] = [passage_number(passage.id) for passage in own]
        width = max(len(example.positives) for example in examples)
        positives = np.full((len(examples), width), NO_PASSAGE, dtype=np.int64)  # (N, P)
        for row, example in zip(positives, examples, strict=True):
            row[: len(example.positives)] = [passage_number(passage.id) for passage in example.positives]
        queries = [example.query for example in examples]
        return StreamRows(queries, passages, columns, positives, teacher if self._source.scores else None)

    def _filled_up(
        self, hard: list[Passage], example: Example, pool: Sequence[Example], random: np.random.Generator
    ) -> list[Passage]:
        """Add random passages of the examples in ``pool`` to ``hard`` until there are H hard negatives."""
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
                    f"query {example.query.id!r}: the step and the shuffle buffer have only {before} possible negatives for this "
                    f"query, but data.hard_negatives is {self.hard_negatives}. Lower data.hard_negatives, or set "
                    "data.fill_negatives to none."
                )
        return hard

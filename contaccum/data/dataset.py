"""What training trains on, and in which order: the rows of a step are a pure function of (seed, step)."""

import hashlib
import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from datasets import Dataset

from contaccum.batch import NO_PASSAGE
from contaccum.data.arrow import Ragged
from contaccum.data.examples import load_examples
from contaccum.data.formats import kind_of_data
from contaccum.data.sources import resolve
from contaccum.data.tables import answerable_split
from contaccum.errors import InputError

__all__ = ["Ragged", "StepRows", "StepSampler", "TrainSet", "load_train_set"]

_ORDER, _POSITIVES, _NEGATIVES = range(
    3
)  # independent random streams: more hard negatives leave the positives as they were


@dataclass(frozen=True)
class TrainSet:
    """n queries and the passages that training can meet; the numbers in the lists are rows of ``passages``."""

    queries: Dataset  # n rows, columns id and text
    passages: Dataset  # columns id, title, text
    positives: Ragged  # n lists, none empty
    negatives: Ragged  # n lists of hard negatives; all empty where none were asked for
    fingerprint: str  # of everything above, in hex; the same wherever the files lie


class StepRows(NamedTuple):
    """One optimizer step in numbers: N queries, each with its positive and H hard negatives."""

    queries: np.ndarray  # (N,) int64, rows of TrainSet.queries
    passages: np.ndarray  # (N, 1 + H) int64, rows of TrainSet.passages, the positive first
    positives: np.ndarray  # (N, P) int64, every known positive, padded with NO_PASSAGE


def load_train_set(
    path: str | Path, split: str = "train", hard_negatives: int = 0, strict: bool = False, repair: bool = False
) -> TrainSet:
    """Open a BEIR folder's split, a file of training examples, which has no splits, or a set by its name (sources.py).

    In a BEIR folder a grade above 0 makes a positive, any other a hard negative. Hard negatives are kept where
    ``hard_negatives``, the number a step will draw per query, is above 0; a query with fewer is filled up from its
    ``further`` negatives, first come first taken. A passage that is a positive of a query is never its negative.

    Queries without a positive are left out with a warning that counts them, and refused when ``strict``; ``repair`` as
    in ``load_corpus``. Raises InputError for whatever else is wrong with the files.
    """
    path, repair = resolve(path, split, repair)
    if kind_of_data(path) == "beir":
        return _from_judgements(path, split, hard_negatives, strict, repair)
    return _from_examples(path, hard_negatives, strict, repair)


def _from_judgements(path: Path, split: str, hard_negatives: int, strict: bool, repair: bool) -> TrainSet:
    judged = answerable_split(path, split, strict, repair)
    positives, negatives = judged.graded_rows()
    queries = Dataset.from_dict({"id": list(judged.queries), "text": list(judged.queries.values())})
    kept = negatives if hard_negatives else [[] for _ in negatives]
    return _train_set(queries, judged.corpus, positives, kept, judged.fingerprint)


def _from_examples(path: Path, hard_negatives: int, strict: bool, repair: bool) -> TrainSet:
    examples = load_examples(path, strict, repair)
    kept = np.flatnonzero(examples.positives.lengths)
    positives = [examples.positives.row(number).tolist() for number in kept]
    negatives: list[list[int]] = [[] for _ in kept]
    if hard_negatives:
        for number, hard in zip(kept, negatives, strict=True):
            hard += examples.negatives.row(number).tolist()
            hard += examples.further.row(number)[: max(0, hard_negatives - len(hard))].tolist()
    return _train_set(examples.queries.select(kept), examples.passages, positives, negatives, examples.fingerprint)


def _train_set(
    queries: Dataset, corpus: Dataset, positives: list[list[int]], negatives: list[list[int]], source: str
) -> TrainSet:
    """Keep the passages that occur, renumber the lists, and take the fingerprint."""
    lists = Ragged.of(positives), Ragged.of(negatives)
    used = np.unique(np.concatenate([ragged.values for ragged in lists]))
    lists = lists[0].renumbered(used), lists[1].renumbered(used)
    digest = hashlib.blake2b(json.dumps([source, queries["id"][:], queries["text"][:]]).encode(), digest_size=16)
    for numbers in (used, *(part for ragged in lists for part in (ragged.offsets, ragged.values))):
        digest.update(np.array(len(numbers)).tobytes())
        digest.update(numbers.tobytes())
    return TrainSet(queries, corpus.select(used), *lists, fingerprint=digest.hexdigest())


def narrowed(train_set: TrainSet, queries: np.ndarray) -> TrainSet:
    """The training set of some of its queries, given as rows, in that order; passages that no longer occur are left out."""
    positives, negatives = (
        [ragged.row(query).tolist() for query in queries] for ragged in (train_set.positives, train_set.negatives)
    )
    return _train_set(
        train_set.queries.select(queries), train_set.passages, positives, negatives, train_set.fingerprint
    )


class StepSampler:
    """Says which rows make up a step; a pure function of (seed, step), so nothing needs saving but the step's number.

    The examples come as one endless stream, in a fresh order each epoch (a function of the seed and the epoch alone);
    step s takes the N places from s * N on, so that a step may straddle two epochs and no example is ever dropped. Each
    query gets one of its positives, all equally likely, and H different hard negatives; what is missing of those is
    drawn from the other passages of the set that are not its positives.
    """

    def __init__(self, train_set: TrainSet, seed: int, global_batch_size: int, hard_negatives: int) -> None:
        self._positives, self._negatives = train_set.positives, train_set.negatives
        self._passages = len(train_set.passages)
        self._seed, self.size, self.hard_negatives = seed, global_batch_size, hard_negatives
        self._epoch = -1
        self._order = np.empty(0, dtype=np.int64)
        short = int(np.count_nonzero(self._negatives.lengths < hard_negatives))
        if short:
            self._refuse_too_few(train_set)
            warnings.warn(
                f"{short} of {len(self._negatives)} queries have fewer than {hard_negatives} hard negatives; random"
                " passages take the missing places",
                stacklevel=2,
            )

    def _refuse_too_few(self, train_set: TrainSet) -> None:
        most = int(self._positives.lengths.argmax())
        others = self._passages - int(self._positives.lengths[most])
        if others < self.hard_negatives:
            query = train_set.queries[most]["id"]
            raise InputError(
                f"query {query!r} has {others} passages in the training set that are not its positives, expected at"
                f" least the {self.hard_negatives} of hard_negatives"
            )

    def __call__(self, step: int) -> StepRows:
        """The rows of optimizer step ``step``, counted from 0."""
        queries = self._stream(step * self.size, self.size)
        known = [self._positives.row(query) for query in queries]
        draw = self._random(_POSITIVES, step).random(len(queries))
        chosen = [rows[int(share * len(rows))] for rows, share in zip(known, draw, strict=True)]
        passages = np.empty((len(queries), 1 + self.hard_negatives), dtype=np.int64)  # (N, 1 + H)
        passages[:, 0] = chosen
        if self.hard_negatives:
            random = self._random(_NEGATIVES, step)
            for number, query in enumerate(queries):
                passages[number, 1:] = self._draw_negatives(query, known[number], random)
        positives = np.full((len(queries), max(map(len, known))), NO_PASSAGE, dtype=np.int64)  # (N, P)
        for number, rows in enumerate(known):
            positives[number, : len(rows)] = rows
        return StepRows(queries, passages, positives)

    def _random(self, *key: int) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(np.random.SeedSequence([self._seed, *key])))

    def _stream(self, start: int, count: int) -> np.ndarray:
        """Places [start, start + count) of the endless stream of queries, (count,) int64."""
        parts = []
        while count:
            epoch, place = divmod(start, len(self._positives))
            part = self._permutation(epoch)[place : place + count]
            parts.append(part)
            start, count = start + len(part), count - len(part)
        return np.concatenate(parts)

    def _permutation(self, epoch: int) -> np.ndarray:
        if epoch != self._epoch:
            self._order = self._random(_ORDER, epoch).permutation(len(self._positives))
            self._epoch = epoch
        return self._order

    def _draw_negatives(self, query: int, known: np.ndarray, random: np.random.Generator) -> np.ndarray:
        hard = random.permutation(self._negatives.row(query))[: self.hard_negatives]
        if len(hard) == self.hard_negatives:
            return hard
        taken = {*known.tolist(), *hard.tolist()}
        drawn = hard.tolist()
        while len(drawn) < self.hard_negatives:
            row = int(random.integers(self._passages))
            if row not in taken:
                taken.add(row)
                drawn.append(row)
        return np.array(drawn, dtype=np.int64)

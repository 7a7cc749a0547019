"""In which order training meets its examples: the rows of a step are a pure function of (seed, step)."""

import warnings
from typing import NamedTuple

import numpy as np

from contaccum.batch import NO_PASSAGE
from contaccum.data.dataset import Mixture, TrainSet
from contaccum.data.draws import MEMBER, NEGATIVES, ORDER, POSITIVES, SETS, SHUFFLE, random_stream
from contaccum.errors import InputError


class StepRows(NamedTuple):
    """One optimizer step in numbers: N queries, each with its positive and H hard negatives."""

    queries: np.ndarray  # (N,) int64, rows of TrainSet.queries
    passages: np.ndarray  # (N, 1 + H) int64, rows of TrainSet.passages, the positive first
    positives: np.ndarray  # (N, P) int64, every known positive, padded with NO_PASSAGE
    teacher: np.ndarray | None = None  # (N, 1 + H) float32, its scores of the passages, NaN where it gave none


class StepSampler:
    """Says which rows make up a step; a pure function of (seed, step), so nothing needs saving but the step's number.

    The examples come as one endless stream, in a fresh order each epoch (a function of the seed and the epoch alone);
    step s takes the N places from s * N on, so that a step may straddle two epochs and no example is ever dropped. Each
    query gets one of its positives, all equally likely, and H different hard negatives; what is missing of those is
    drawn from the other passages of the set that are not its positives.
    """

    def __init__(
        self, train_set: TrainSet, seed: int, global_batch_size: int, hard_negatives: int, member: int | None = None
    ) -> None:
        """member: its number in a mixture, whose sets have random streams of their own."""
        self._positives, self._negatives, self._teacher = train_set.positives, train_set.negatives, train_set.teacher
        self._passages = len(train_set.passages)
        self._seed = [seed] if member is None else [seed, MEMBER, member]
        self.size, self.hard_negatives = global_batch_size, hard_negatives
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
        return self.rows(step, step * self.size, self.size)

    def rows(self, step: int, start: int, count: int) -> StepRows:
        """Places [start, start + count) of the stream, with what step ``step`` draws for them."""
        queries = self._stream(start, count)
        known = [self._positives.row(query) for query in queries]
        draw = self._random(POSITIVES, step).random(len(queries))
        chosen = [int(share * len(rows)) for rows, share in zip(known, draw, strict=True)]
        passages = np.empty((len(queries), 1 + self.hard_negatives), dtype=np.int64)  # (N, 1 + H)
        passages[:, 0] = [rows[place] for rows, place in zip(known, chosen, strict=True)]
        teacher = np.full(passages.shape, np.nan, dtype=np.float32)  # (N, 1 + H)
        if self._teacher is not None:
            teacher[:, 0] = self._teacher.positives[self._positives.offsets[queries] + chosen]
        if self.hard_negatives:
            random = self._random(NEGATIVES, step)
            for number, query in enumerate(queries):
                hard = random.permutation(len(self._negatives.row(query)))[: self.hard_negatives]
                passages[number, 1:] = self._filled_up(self._negatives.row(query)[hard], known[number], random)
                if self._teacher is not None:
                    own = self._teacher.negatives[self._negatives.offsets[query] + hard]
                    teacher[number, 1 : 1 + len(hard)] = own
        positives = np.full((len(queries), max(map(len, known))), NO_PASSAGE, dtype=np.int64)  # (N, P)
        for number, rows in enumerate(known):
            positives[number, : len(rows)] = rows
        return StepRows(queries, passages, positives, None if self._teacher is None else teacher)

    def _random(self, *key: int) -> np.random.Generator:
        return random_stream(*self._seed, *key)

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
            self._order = self._random(ORDER, epoch).permutation(len(self._positives))
            self._epoch = epoch
        return self._order

    def _filled_up(self, hard: np.ndarray, known: np.ndarray, random: np.random.Generator) -> np.ndarray:
        """The hard negatives of a query, and behind them what is missing of H, drawn from the passages of the set."""
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


class MixtureSampler:
    """Says which rows make up a step of a mixture; as StepSampler, a pure function of (seed, step).

    A step draws how many of its N examples each set gives, by weight (``mixed``), or which set gives all (``one_set``). Each set
    has an endless stream of its own, read on where the steps before have left it: that is their draws, taken once more.
    """

    def __init__(self, mixture: Mixture, seed: int, global_batch_size: int, hard_negatives: int, batches: str) -> None:
        self._samplers = [
            StepSampler(member.set, seed, global_batch_size, hard_negatives, number)
            for number, member in enumerate(mixture.members)
        ]
        weights = np.array([member.weight for member in mixture.members], dtype=np.float64)
        self._shares = weights / weights.sum()
        self._one_set = batches == "one_set"
        self._scored = mixture.teacher is not None
        self._seed, self.size, self.hard_negatives = seed, global_batch_size, hard_negatives
        sizes = [(len(member.set.queries), len(member.set.passages)) for member in mixture.members]
        self._starts = np.cumsum([(0, 0), *sizes], axis=0)  # (sets + 1, 2), first row of queries and of passages
        self._drawn = (
            0,
            np.zeros(len(self._shares), dtype=np.int64),
        )  # a step, and what the ones before it took of each set

    def __call__(self, step: int) -> StepRows:
        """The rows of optimizer step ``step``, counted from 0."""
        before, counts = self._before(step), self.counts(step)
        parts = [
            _moved(sampler.rows(step, int(start), int(count)), *offsets)
            for sampler, start, count, offsets in zip(self._samplers, before, counts, self._starts, strict=False)
            if count
        ]
        width = max(part.positives.shape[1] for part in parts)
        padded = [
            np.pad(part.positives, ((0, 0), (0, width - part.positives.shape[1])), constant_values=NO_PASSAGE)
            for part in parts
        ]
        order = self._random(SHUFFLE, step).permutation(self.size)
        rows = [[part.queries for part in parts], [part.passages for part in parts], padded]
        if self._scored:
            none = np.float32(np.nan)
            rows.append([np.full(p.passages.shape, none) if p.teacher is None else p.teacher for p in parts])
        return StepRows(*(np.concatenate(each)[order] for each in rows))

    def counts(self, step: int) -> np.ndarray:
        """How many examples of each set step ``step`` takes, (sets,) int64; their sum is N."""
        random = self._random(SETS, step)
        if self._one_set:
            return random.multinomial(1, self._shares) * self.size
        return random.multinomial(self.size, self._shares)

    def _before(self, step: int) -> np.ndarray:
        """How many examples of each set the steps before ``step`` took, (sets,)."""
        known, taken = self._drawn
        if step < known:
            known, taken = 0, np.zeros_like(taken)
        for each in range(known, step):
            taken = taken + self.counts(each)
        self._drawn = step, taken
        return taken

    def _random(self, *key: int) -> np.random.Generator:
        return random_stream(self._seed, *key)


def _moved(rows: StepRows, queries: int, passages: int) -> StepRows:
    """The rows of one set as rows of the mixture."""
    known = np.where(rows.positives == NO_PASSAGE, NO_PASSAGE, rows.positives + passages)
    return StepRows(rows.queries + queries, rows.passages + passages, known, rows.teacher)


def make_sampler(
    train_set: TrainSet, seed: int, global_batch_size: int, hard_negatives: int, batches: str = "mixed"
) -> StepSampler | MixtureSampler:
    """The order of a training set or of a mixture, whose steps are ``mixed`` or of ``one_set``."""
    if isinstance(train_set, Mixture):
        return MixtureSampler(train_set, seed, global_batch_size, hard_negatives, batches)
    return StepSampler(train_set, seed, global_batch_size, hard_negatives)

"""Choose the training examples of each step.

The choice depends only on the seed and the step number, so a checkpoint stores only the step
number.
"""

import warnings
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from contaccum.batch import MISSING
from contaccum.config.groups import Fill, MixtureBatches, Order
from contaccum.data.train_set import TrainSet
from contaccum.errors import InputError
from contaccum.runtime.units import counted

# Each constant gives an independent random stream, so the number of hard negatives does not affect
# the choice of positives.
ORDER, POSITIVES, NEGATIVES, SETS, SHUFFLE, MEMBER = range(6)


def random_stream(*key: int) -> np.random.Generator:
    """Return a random generator.

    key: the seed, a constant for the purpose (such as POSITIVES), and a step or epoch.
    """
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))


class StepRows(NamedTuple):
    """Row numbers of the examples of one step: N queries, each with a positive and H negatives."""

    queries: np.ndarray  # (N,) int64, row numbers in TrainSet.queries
    # (N, 1 + H) int64, rows of TrainSet.passages or MISSING, the positive first
    passages: np.ndarray
    teacher: np.ndarray | None = None  # (N, 1 + H) float32, teacher scores, NaN if missing


class StepSampler:
    """Chooses the examples of each step from one training set.

    The epochs follow each other without end. ``order`` is the order of the examples in each epoch:
    random (``shuffled``) or as in the training set (``file``). Step s takes examples s * N to
    (s + 1) * N - 1. A step may have examples of two epochs, and no example is dropped.

    Each query gets a random positive and H different random hard negatives. If a query has fewer
    than H hard negatives, ``fill`` decides: ``random`` adds random passages of the set that are not
    positives of the query, ``none`` leaves gaps (MISSING).
    """

    def __init__(
        self,
        train_set: TrainSet,
        seed: int,
        global_batch_size: int,
        hard_negatives: int,
        fill: Fill = "random",
        order: Order = "shuffled",
        member: int | None = None,
    ) -> None:
        """Prepare the sampler.

        member: number of the set in a mixture; each set of a mixture has separate random streams.
        Raises InputError if some query cannot get ``hard_negatives`` random negatives.
        """
        self.size = global_batch_size
        self.hard_negatives = hard_negatives
        self._positives = train_set.positives
        self._scored = train_set.positives.scored
        self._negatives = train_set.negatives
        self._passages = len(train_set.passages)
        self._seed = [seed] if member is None else [seed, MEMBER, member]
        self._fill = fill
        self._in_file_order = order == "file"
        # an epoch and its order, in one tuple because threads may share a sampler
        self._epoch_order = (-1, np.empty(0, dtype=np.int64))
        if hard_negatives and fill == "none" and not self._negatives.lengths.any():
            warnings.warn(
                f"no query has a hard negative, so data.hard_negatives {hard_negatives} has no "
                "effect",
                stacklevel=2,
            )
        short = int(np.count_nonzero(self._negatives.lengths < hard_negatives))
        if short and fill == "random":
            most = int(self._positives.lengths.argmax())
            others = self._passages - int(self._positives.lengths[most])
            if others < hard_negatives:
                raise InputError(
                    f"query {train_set.queries[most]['id']!r}: the training set has only {others} "
                    "possible negatives for this query, but data.hard_negatives is "
                    f"{hard_negatives}. Lower data.hard_negatives, or set data.fill_negatives to "
                    "none."
                )
            few = "no hard negative"
            if hard_negatives > 1:
                few = f"fewer than {hard_negatives} hard negatives"
            warnings.warn(
                f"{few} for {short} of {counted(len(self._negatives), 'query')}; random passages "
                "are added",
                stacklevel=2,
            )

    def __call__(self, step: int) -> StepRows:
        """Return the examples of optimizer step ``step``. Steps count from 0."""
        return self.rows(step, step * self.size, self.size)

    def rows(self, step: int, start: int, count: int) -> StepRows:
        """Return the examples ``start`` to ``start + count - 1``, counted over all epochs.

        The random generators of step ``step`` choose the positives and the hard negatives.
        """
        queries = self._query_rows(start, count)
        passages = np.full((count, 1 + self.hard_negatives), MISSING, dtype=np.int64)  # (N, 1 + H)
        teacher = np.full(passages.shape, np.nan, dtype=np.float32)  # (N, 1 + H)

        draws = random_stream(*self._seed, POSITIVES, step).random(count)
        for number, query in enumerate(queries):
            known = self._positives.row(query)
            chosen = int(draws[number] * len(known))
            passages[number, 0] = known[chosen]
            teacher[number, 0] = self._positives.scores[self._positives.span(query)][chosen]

        if self.hard_negatives:
            random = random_stream(*self._seed, NEGATIVES, step)
            for number, query in enumerate(queries):
                negatives = self._negatives.row(query)
                drawn = random.permutation(len(negatives))[: self.hard_negatives]
                passages[number, 1 : 1 + len(drawn)] = negatives[drawn]
                scores = self._negatives.scores[self._negatives.span(query)]
                teacher[number, 1 : 1 + len(drawn)] = scores[drawn]
                if self._fill == "random":
                    self._fill_gaps(passages[number], self._positives.row(query), random)

        return StepRows(queries, passages, teacher if self._scored else None)

    def _query_rows(self, start: int, count: int) -> np.ndarray:
        """Return the queries of the examples ``start`` to ``start + count - 1``, (count,) int64."""
        parts = []
        while count:
            epoch, offset = divmod(start, len(self._positives))
            part = self._permutation(epoch)[offset : offset + count]
            parts.append(part)
            start += len(part)
            count -= len(part)
        return np.concatenate(parts)

    def _permutation(self, epoch: int) -> np.ndarray:
        """Return the order of the queries in an epoch. The order of the last epoch is cached."""
        cached, order = self._epoch_order
        if epoch != cached:
            order = np.arange(len(self._positives))
            if not self._in_file_order:
                order = random_stream(*self._seed, ORDER, epoch).permutation(order)
            self._epoch_order = (epoch, order)
        return order

    def _fill_gaps(
        self, passages: np.ndarray, positives: np.ndarray, random: np.random.Generator
    ) -> None:
        """Replace MISSING in the passages of one query, (1 + H,), by random passages.

        A positive of the query is never added, and no passage twice.
        """
        taken = {*positives.tolist(), *passages[1:].tolist()}
        for column in np.flatnonzero(passages == MISSING):
            row = int(random.integers(self._passages))
            while row in taken:
                row = int(random.integers(self._passages))
            taken.add(row)
            passages[column] = row


class MixtureSampler:
    """Chooses the examples of each step from a mixture of training sets.

    If ``batches`` is ``mixed``, each of the N examples of a step comes from a random set; if
    ``one_set``, all N come from the same random set. The probability of a set is proportional to
    its weight. Each set has one StepSampler. A resumed run repeats the random choice of sets for
    all earlier steps. It then knows how many examples of each set to skip.
    """

    def __init__(
        self,
        mixture: TrainSet,
        samplers: Sequence[StepSampler],
        seed: int,
        batches: MixtureBatches = "mixed",
    ) -> None:
        self.size = samplers[0].size
        self.hard_negatives = samplers[0].hard_negatives
        self._samplers = samplers
        self._seed = seed
        self._one_set = batches == "one_set"
        self._scored = mixture.positives.scored
        sets = [member.set for member in mixture.parts]
        # row numbers of the first query and of the first passage of each set
        self._first_query = np.cumsum([0, *(len(each.queries) for each in sets)])
        self._first_passage = np.cumsum([0, *(len(each.passages) for each in sets)])
        weights = np.array([member.weight for member in mixture.parts], dtype=np.float64)
        self._shares = weights / weights.sum()
        # step -> number of examples of each set in all earlier steps; threads share it
        self._drawn = {0: np.zeros(len(self._shares), dtype=np.int64)}

    def __call__(self, step: int) -> StepRows:
        """Return the examples of optimizer step ``step``. Steps count from 0."""
        starts = self._before(step)
        counts = self.counts(step)
        queries = []
        passages = []
        teacher = []
        for number, sampler in enumerate(self._samplers):
            if not counts[number]:
                continue
            rows = sampler.rows(step, int(starts[number]), int(counts[number]))
            first = self._first_passage[number]
            queries.append(rows.queries + self._first_query[number])
            passages.append(np.where(rows.passages == MISSING, MISSING, rows.passages + first))
            unscored = np.full(rows.passages.shape, np.nan, dtype=np.float32)
            teacher.append(unscored if rows.teacher is None else rows.teacher)
        order = random_stream(self._seed, SHUFFLE, step).permutation(self.size)
        return StepRows(
            np.concatenate(queries)[order],
            np.concatenate(passages)[order],
            np.concatenate(teacher)[order] if self._scored else None,
        )

    def counts(self, step: int) -> np.ndarray:
        """Return the number of examples of each set in step ``step``, (sets,) int64.

        The sum is N.
        """
        random = random_stream(self._seed, SETS, step)
        if self._one_set:
            return random.multinomial(1, self._shares) * self.size
        return random.multinomial(self.size, self._shares)

    def _before(self, step: int) -> np.ndarray:
        """Return the number of examples of each set in all steps before ``step``, (sets,)."""
        known = step
        while known not in self._drawn:
            known -= 1
        for earlier in range(known, step):
            self._drawn[earlier + 1] = self._drawn[earlier] + self.counts(earlier)
        return self._drawn[step]


def make_sampler(
    train_set: TrainSet,
    seed: int,
    global_batch_size: int,
    hard_negatives: int,
    batches: MixtureBatches = "mixed",
    fill: Fill = "random",
    order: Order = "shuffled",
) -> StepSampler | MixtureSampler:
    """Return the sampler for a training set or a mixture.

    batches: see MixtureSampler; only a mixture uses it. Other arguments: see StepSampler.
    """

    def sampler(part: TrainSet, member: int | None = None) -> StepSampler:
        return StepSampler(part, seed, global_batch_size, hard_negatives, fill, order, member)

    if not train_set.parts:
        return sampler(train_set)
    samplers = [sampler(member.set, number) for number, member in enumerate(train_set.parts)]
    return MixtureSampler(train_set, samplers, seed, batches)

"""Choose the training examples of each step.

The choice depends only on the seed and the step number, so a checkpoint stores only the step number.
"""

import warnings
from typing import NamedTuple

import numpy as np

from contaccum.batch import MISSING, NO_PASSAGE
from contaccum.data.train_set import TrainSet
from contaccum.errors import InputError

# Each constant gives an independent random stream, so the number of hard negatives does not affect the choice of positives.
ORDER, POSITIVES, NEGATIVES, SETS, SHUFFLE, MEMBER = range(6)

_SAMPLE = 1024  # number of examples that decide the direction of a split
_ROUNDS = 4  # number of iterations of 2-means
_LEVELS = 1023  # largest absolute value in a rounded vector
_BLOCK = 65_536  # number of vectors to multiply at once
_STRIDE = 16  # number of steps between two stored positions of a mixture


def random_stream(*key: int) -> np.random.Generator:
    """Return a random generator. ``key``: the seed, a constant for the purpose (such as POSITIVES), and a step or epoch."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))


class StepRows(NamedTuple):
    """Row numbers of the examples of one optimizer step: N queries, each with one positive and H hard negatives."""

    queries: np.ndarray  # (N,) int64, row numbers in TrainSet.queries
    passages: np.ndarray  # (N, 1 + H) int64, row numbers in TrainSet.passages or MISSING, the positive first
    positives: np.ndarray  # (N, P) int64, all known positives of each query, padded with NO_PASSAGE
    teacher: np.ndarray | None = None  # (N, 1 + H) float32, teacher score of each passage, NaN if missing

    @property
    def columns(self) -> np.ndarray:
        """Integer ids of the passages, (N, 1 + H). Here they are row numbers; in StreamRows, they are hashes."""
        return self.passages


class StepSampler:
    """Chooses the examples of each step from one training set.

    The epochs follow each other without end. ``order`` is the order of the examples in each epoch: random (``shuffled``), as in
    the training set (``file``), or with similar queries in each step (``near``, see ``near_order``). Step s takes examples s * N
    to (s + 1) * N - 1. A step may have examples of two epochs, and no example is dropped.

    Each query gets a random positive and H different random hard negatives. If a query has fewer than H hard negatives, ``fill``
    decides: ``random`` adds random passages of the set that are not positives of the query, ``none`` leaves gaps (MISSING).
    """

    def __init__(
        self,
        train_set: TrainSet,
        seed: int,
        global_batch_size: int,
        hard_negatives: int,
        member: int | None = None,
        fill: str = "random",
        order: str = "shuffled",
        vectors: np.ndarray | None = None,
    ) -> None:
        """Prepare the sampler. In a mixture, ``member`` is the number of the set; each set has separate random streams.

        vectors: one vector for each query, (n, d), for the order ``near``.
        """
        self._in_file_order, self._vectors = order == "file", None if vectors is None else rounded(vectors)
        self._positives, self._negatives = train_set.positives, train_set.negatives
        self._passages = len(train_set.passages)
        self._seed = [seed] if member is None else [seed, MEMBER, member]
        self.size, self.hard_negatives, self._fill = global_batch_size, hard_negatives, fill
        # an epoch and its order, in one tuple because threads may share a sampler
        self._order = (-1, np.empty(0, dtype=np.int64))
        short = int(np.count_nonzero(self._negatives.lengths < hard_negatives))
        if short and fill == "random":
            self._refuse_too_few(train_set)
            warnings.warn(
                f"{short} of {len(self._negatives)} queries have fewer than {hard_negatives} hard negatives; random"
                " passages are added",
                stacklevel=2,
            )

    def _refuse_too_few(self, train_set: TrainSet) -> None:
        most = int(self._positives.lengths.argmax())
        others = self._passages - int(self._positives.lengths[most])
        if others < self.hard_negatives:
            query = train_set.queries[most]["id"]
            raise InputError(
                f"query {query!r}: the training set has only {others} possible negatives for this query, but data.hard_negatives "
                f"is {self.hard_negatives}. Lower data.hard_negatives, or set data.fill_negatives to none."
            )

    def __call__(self, step: int) -> StepRows:
        """Return the examples of optimizer step ``step``. Steps count from 0."""
        return self.rows(step, step * self.size, self.size)

    def rows(self, step: int, start: int, count: int) -> StepRows:
        """Return the examples ``start`` to ``start + count - 1``, counted over all epochs.

        The random generators of step ``step`` choose the positives and the hard negatives.
        """
        queries = self._query_rows(start, count)
        known = [self._positives.row(query) for query in queries]
        draw = random_stream(*self._seed, POSITIVES, step).random(len(queries))
        chosen = [int(share * len(rows)) for rows, share in zip(known, draw, strict=True)]
        passages = np.empty((len(queries), 1 + self.hard_negatives), dtype=np.int64)  # (N, 1 + H)
        passages[:, 0] = [rows[index] for rows, index in zip(known, chosen, strict=True)]
        teacher = np.full(passages.shape, np.nan, dtype=np.float32)  # (N, 1 + H)
        if self._positives.scores is not None:
            teacher[:, 0] = self._positives.scores[self._positives.offsets[queries] + chosen]
        if self.hard_negatives:
            random = random_stream(*self._seed, NEGATIVES, step)
            for number, query in enumerate(queries):
                hard = random.permutation(len(self._negatives.row(query)))[: self.hard_negatives]
                passages[number, 1:] = self._filled_up(self._negatives.row(query)[hard], known[number], random)
                if self._negatives.scores is not None:
                    rows = self._negatives.offsets[query] + hard
                    teacher[number, 1 : 1 + len(hard)] = self._negatives.scores[rows]
        positives = np.full((len(queries), max(map(len, known))), NO_PASSAGE, dtype=np.int64)  # (N, P)
        for number, rows in enumerate(known):
            positives[number, : len(rows)] = rows
        return StepRows(queries, passages, positives, None if self._positives.scores is None else teacher)

    def _query_rows(self, start: int, count: int) -> np.ndarray:
        """Return the row numbers of the queries of the examples ``start`` to ``start + count - 1``, (count,) int64."""
        parts = []
        while count:
            epoch, offset = divmod(start, len(self._positives))
            part = self._permutation(epoch)[offset : offset + count]
            parts.append(part)
            start, count = start + len(part), count - len(part)
        return np.concatenate(parts)

    def _permutation(self, epoch: int) -> np.ndarray:
        known, order = self._order
        if epoch != known:
            order = self._ordered(epoch)
            self._order = epoch, order
        return order

    def _ordered(self, epoch: int) -> np.ndarray:
        count, random = len(self._positives), random_stream(*self._seed, ORDER, epoch)
        if self._in_file_order:
            return np.arange(count)
        if self._vectors is None:
            return random.permutation(count)
        return near_order(self._vectors, random, self.size, -epoch * count % self.size)

    def _filled_up(self, hard: np.ndarray, known: np.ndarray, random: np.random.Generator) -> np.ndarray:
        """Add random passages (or the padding value MISSING) to ``hard``, up to H entries. Never add a positive (``known``)."""
        if self._fill == "none":
            return np.pad(hard, (0, self.hard_negatives - len(hard)), constant_values=MISSING)
        drawn = hard.tolist()
        taken = {*known.tolist(), *drawn}
        while len(drawn) < self.hard_negatives:
            row = int(random.integers(self._passages))
            if row not in taken:
                taken.add(row)
                drawn.append(row)
        return np.array(drawn, dtype=np.int64)


class MixtureSampler:
    """Chooses the examples of each step from a mixture of training sets.

    If ``batches`` is ``mixed``, each of the N examples of a step comes from a random set; if ``one_set``, all N come
    from the same random set. The probability of a set is proportional to its weight. Each set has one StepSampler. A
    resumed run repeats the random choice of sets for all earlier steps. It then knows how many examples of each set to skip.
    """

    def __init__(
        self,
        mixture: TrainSet,
        seed: int,
        global_batch_size: int,
        hard_negatives: int,
        batches: str,
        fill: str,
        order: str,
    ) -> None:
        self._samplers = [
            StepSampler(member.set, seed, global_batch_size, hard_negatives, number, fill, order)
            for number, member in enumerate(mixture.members)
        ]
        weights = np.array([member.weight for member in mixture.members], dtype=np.float64)
        self._shares = weights / weights.sum()
        self._one_set = batches == "one_set"
        self._scored = mixture.positives.scores is not None
        self._seed, self.size, self.hard_negatives = seed, global_batch_size, hard_negatives
        sizes = [(len(member.set.queries), len(member.set.passages)) for member in mixture.members]
        # row numbers of the first query and of the first passage of each set, (sets + 1, 2)
        self._starts = np.cumsum([(0, 0), *sizes], axis=0)
        # i -> the number of examples of each set in all steps before step _STRIDE * i; threads may share it
        self._drawn = {0: np.zeros(len(self._shares), dtype=np.int64)}

    def __call__(self, step: int) -> StepRows:
        """Return the examples of optimizer step ``step``. Steps count from 0."""
        before, counts = self._before(step), self.counts(step)
        parts = [
            _shifted(sampler.rows(step, int(start), int(count)), *offsets)
            for sampler, start, count, offsets in zip(self._samplers, before, counts, self._starts, strict=False)
            if count
        ]
        width = max(part.positives.shape[1] for part in parts)
        padded = [
            np.pad(part.positives, ((0, 0), (0, width - part.positives.shape[1])), constant_values=NO_PASSAGE)
            for part in parts
        ]
        order = random_stream(self._seed, SHUFFLE, step).permutation(self.size)
        rows = [[part.queries for part in parts], [part.passages for part in parts], padded]
        if self._scored:
            none = np.float32(np.nan)
            rows.append([np.full(p.passages.shape, none) if p.teacher is None else p.teacher for p in parts])
        return StepRows(*(np.concatenate(each)[order] for each in rows))

    def counts(self, step: int) -> np.ndarray:
        """Return the number of examples of each set in step ``step``, (sets,) int64. The sum is N."""
        random = random_stream(self._seed, SETS, step)
        if self._one_set:
            return random.multinomial(1, self._shares) * self.size
        return random.multinomial(self.size, self._shares)

    def _before(self, step: int) -> np.ndarray:
        """Return the number of examples of each set in all steps before ``step``, (sets,)."""
        known = step // _STRIDE
        while known not in self._drawn:
            known -= 1
        taken = self._drawn[known]
        for each in range(known * _STRIDE, step):
            taken = taken + self.counts(each)
            if (each + 1) % _STRIDE == 0:
                self._drawn[(each + 1) // _STRIDE] = taken
        return taken


def _shifted(rows: StepRows, queries: int, passages: int) -> StepRows:
    """Add the offset ``queries`` to the row numbers of queries, and ``passages`` to the row numbers of passages."""
    known = np.where(rows.positives == NO_PASSAGE, NO_PASSAGE, rows.positives + passages)
    columns = np.where(rows.passages == MISSING, MISSING, rows.passages + passages)
    return StepRows(rows.queries + queries, columns, known, rows.teacher)


def make_sampler(
    train_set: TrainSet,
    seed: int,
    global_batch_size: int,
    hard_negatives: int,
    batches: str = "mixed",
    fill: str = "random",
    order: str = "shuffled",
    vectors: np.ndarray | None = None,
) -> StepSampler | MixtureSampler:
    """Return the sampler for a training set or a mixture.

    batches: ``mixed`` or ``one_set``, see MixtureSampler. Other arguments: see StepSampler. A mixture does not use ``vectors``.
    """
    if train_set.parts:
        return MixtureSampler(train_set, seed, global_batch_size, hard_negatives, batches, fill, order)
    return StepSampler(train_set, seed, global_batch_size, hard_negatives, None, fill, order, vectors)


def rounded(vectors: np.ndarray) -> np.ndarray:
    """Scale vectors (n, d) and round them to integers from -1023 to 1023. Return them as (n, d) int16.

    The inner products in ``near_order`` are then integers below 2^53. float64 computes them without rounding, so ``near_order``
    returns the same order on every machine.
    """
    scale = _LEVELS / (float(np.abs(vectors).max(initial=0)) or 1.0)
    dtype = vectors.dtype if scale <= float(np.finfo(vectors.dtype).max) else np.float64  # float16 ends at 65,504
    blocks = (vectors[start : start + _BLOCK].astype(dtype, copy=False) for start in range(0, len(vectors), _BLOCK))
    return np.concatenate([np.rint(block * scale).astype(np.int16) for block in blocks])


def near_order(vectors: np.ndarray, random: np.random.Generator, size: int, first: int) -> np.ndarray:
    """Order n examples so that the examples of each step have similar vectors. Return the row numbers in this order, (n,) int64.

    The examples are split in two, then each part is split in two, until there is one group for each step. For each split,
    balanced 2-means of a sample gives a direction, and the examples are sorted by their inner product with this direction.
    Sources: Hofstaetter et al. 2021 (arXiv 2104.06967) take the examples of a step from one cluster. Thirukovalluru et al. 2025
    (arXiv 2505.11293) put similar examples into one step as hard negatives of each other.

    vectors: (n, d) from ``rounded``. size: number of examples of a full group. first: number of examples that the last
    step of the previous epoch still needs. A group of ``first`` examples comes first. Then the full groups follow in random
    order, and then the remaining examples.
    """
    first = min(first, len(vectors))
    full, last = divmod(len(vectors) - first, size)
    sizes = [first] * (first > 0) + [size] * full + [last] * (last > 0)
    groups = _bisected(vectors, np.arange(len(vectors)), sizes, random)
    start = int(first > 0)
    middle = [groups[start + number] for number in random.permutation(full)]
    return np.concatenate([*groups[:start], *middle, *groups[start + full :]])


def _bisected(vectors: np.ndarray, rows: np.ndarray, sizes: list[int], random: np.random.Generator) -> list[np.ndarray]:
    """Divide the row numbers ``rows`` by bisection, as in ``near_order``, into groups of the given sizes."""
    if len(sizes) == 1:
        return [rows]
    direction = _direction(vectors[random.permutation(rows)[:_SAMPLE]].astype(np.float64), random)
    products = [vectors[rows[start : start + _BLOCK]] @ direction for start in range(0, len(rows), _BLOCK)]
    rows = rows[np.argsort(np.concatenate(products), kind="stable")]
    half = len(sizes) // 2
    count = sum(sizes[:half])
    left = _bisected(vectors, rows[:count], sizes[:half], random)
    return left + _bisected(vectors, rows[count:], sizes[half:], random)


def _direction(sample: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Divide a sample (s, d) by balanced 2-means. Return the difference of the sums of both halves, (d,)."""
    one, other = random.choice(len(sample), 2, replace=False)
    direction = sample[one] - sample[other]
    half = len(sample) // 2
    for _ in range(_ROUNDS):
        order = np.argsort(sample @ direction, kind="stable")
        direction = sample[order[-half:]].sum(0) - sample[order[:half]].sum(0)
    return direction

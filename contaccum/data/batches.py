"""Make the micro-batches of an optimizer step.

A pair is a query with 1 + H passages: a positive and H hard negatives. The size of a micro-batch is
a number of pairs or of tokens.

A partition divides the N pairs of a step into micro-batches. It is a list of index arrays, one for
each micro-batch. The array of micro-batch k has shape (W * B_k,) for W processes: B_k pairs of
process 0, then B_k pairs of process 1, and so on. Every process computes the same partition.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from contaccum.batch import MISSING, NO_PASSAGE, MicroBatch, RowIds, pad
from contaccum.data.sampler import MixtureSampler, StepRows, StepSampler
from contaccum.data.tables import TokenTable
from contaccum.data.train_set import TrainSet
from contaccum.errors import InputError


def partition_by_pairs(pairs: int, size: int, world: int) -> list[np.ndarray]:
    """Divide a step into micro-batches of ``size`` pairs per process, in their order."""
    width = size * world
    assert pairs % width == 0, "the number of pairs must be divisible by size * world"
    return np.split(np.arange(pairs), range(width, pairs, width))


def partition_by_tokens(
    queries: np.ndarray, passages: np.ndarray, budget: int, world: int, padded: bool = True
) -> list[np.ndarray]:
    """Divide a step into micro-batches of at most ``budget`` tokens per process.

    queries (N,) and passages (N, 1 + H) are lengths in tokens. Each of the ``world`` processes gets
    one of every ``world`` consecutive pairs. The step has as few micro-batches as ``budget``
    allows. With this number of micro-batches, the largest one has as few tokens as possible.

    padded: whether texts are padded, so that B pairs have B * (longest query + (1 + H) * longest
    passage) tokens. Pairs are then sorted by length, the longest pairs first, so that an
    out-of-memory error comes early. Without padding, the tokens are those of the texts, and pairs
    keep their order.
    """
    if padded:
        longest = passages.max(axis=1)
        order = np.lexsort((-queries, -longest)).reshape(-1, world)  # (N / W, W); stable
        query_tokens = queries[order].max(axis=1)
        passage_tokens = longest[order].max(axis=1) * passages.shape[1]  # (N / W,), descending
        single = int((query_tokens + passage_tokens).max())
        ends = partial(_padded_ends, query_tokens, passage_tokens)
    else:
        order = np.arange(len(queries)).reshape(-1, world)  # (N / W, W)
        tokens = (queries + passages.sum(axis=1))[order].max(axis=1)  # (N / W,)
        single = int(tokens.max())
        ends = partial(_ends, tokens.cumsum())
    assert single <= budget, "the budget must be at least the tokens of the longest pair"
    fewest = len(ends(budget))
    low = single
    high = budget
    while low < high:
        middle = (low + high) // 2
        if len(ends(middle)) > fewest:
            low = middle + 1
        else:
            high = middle
    partition = []
    start = 0
    for end in ends(low):
        partition.append(order[start:end].T.reshape(-1))
        start = end
    return partition


def _ends(totals: np.ndarray, limit: int) -> list[int]:
    """Fill micro-batches in order, each up to ``limit`` tokens.

    totals: tokens of the first pair, of the first two pairs, and so on. Returns the end of each
    micro-batch as an index into ``totals``.
    """
    ends: list[int] = []
    before = 0
    while not ends or ends[-1] < len(totals):
        ends.append(int(np.searchsorted(totals, before + limit, side="right")))
        before = int(totals[ends[-1] - 1])
    return ends


def _padded_ends(query_tokens: np.ndarray, passage_tokens: np.ndarray, limit: int) -> list[int]:
    """Fill micro-batches in order, each up to ``limit`` padded tokens.

    Returns the end of each micro-batch as an index into ``query_tokens``.
    """
    ends = []
    start = 0
    while start < len(query_tokens):
        tokens = int(passage_tokens[start])
        widest = np.maximum.accumulate(query_tokens[start : start + limit // tokens])
        costs = np.arange(1, len(widest) + 1) * (widest + tokens)
        start += int(np.searchsorted(costs, limit, side="right"))
        ends.append(start)
    return ends


@dataclass(frozen=True)
class BatchForm:
    """Size and padding of the micro-batches of one process."""

    micro_batch_size: int  # number of pairs
    micro_batch_tokens: int | None = None  # maximum of tokens; replaces micro_batch_size
    padded: bool = True  # whether padding counts as tokens
    pad_ids: tuple[int, int] = (0, 0)  # padding token ids of queries and of passages
    rank: int = 0  # number of this process
    world: int = 1  # number of processes

    def local(self, pairs: np.ndarray) -> np.ndarray:
        """Select the pairs of this process from the pairs of a micro-batch."""
        return np.split(pairs, self.world)[self.rank]


class JoinedTokens:
    """Concatenation of token tables."""

    def __init__(self, tables: Sequence[TokenTable]) -> None:
        self._tables = tables
        self._starts = np.cumsum([0, *map(len, tables)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def rows(self, indices: np.ndarray) -> list[np.ndarray]:
        """Return the token ids of the texts at ``indices`` (k,): k int32 arrays."""
        found: dict[int, np.ndarray] = {}  # place in ``indices`` -> token ids
        for table, places, rows in self._by_table(indices):
            found |= zip(places.tolist(), table.rows(rows), strict=True)
        return [found[place] for place in range(len(indices))]

    def lengths(self, indices: np.ndarray) -> np.ndarray:
        """Return the number of tokens of the texts at ``indices`` (k,): (k,) int64."""
        lengths = np.empty(len(indices), dtype=np.int64)
        for table, places, rows in self._by_table(indices):
            lengths[places] = table.lengths(rows)
        return lengths

    def _by_table(self, indices: np.ndarray) -> Iterator[tuple[TokenTable, np.ndarray, np.ndarray]]:
        """Yield each table, the places of its texts in ``indices``, and their rows in the table."""
        for number, table in enumerate(self._tables):
            start, stop = self._starts[number : number + 2]
            places = np.flatnonzero((indices >= start) & (indices < stop))
            yield table, places, indices[places] - start

    def longest(self) -> int:
        """Return the number of tokens of the longest text."""
        return max(table.longest() for table in self._tables)


class Batches:
    """Micro-batches of one process. Several threads may use one object.

    Micro-batch k has the texts of the B_k pairs of this process, and the ids of the W * B_k pairs
    of all W processes, in rank order.
    """

    def __init__(
        self,
        train_set: TrainSet,
        sampler: StepSampler | MixtureSampler,
        query_tokens: TokenTable | JoinedTokens,
        passage_tokens: TokenTable | JoinedTokens,
        form: BatchForm,
        query_prefix: str = "",
    ) -> None:
        """Raise InputError if a query and its passages exceed ``micro_batch_tokens`` tokens.

        query_prefix: that of the model, which the sets of a mixture without an own one use.
        """
        assert 0 <= form.rank < form.world
        assert len(query_tokens) == len(train_set.queries)
        assert len(passage_tokens) == len(train_set.passages)
        self._sampler = sampler
        self._form = form
        self._query_ids = train_set.queries["id"]
        self._passage_numbers = train_set.passage_numbers
        self._relevant = train_set.relevant(query_prefix)
        self._query_tokens = query_tokens
        self._passage_tokens = passage_tokens
        self.size = form.micro_batch_tokens or form.micro_batch_size
        """Pairs of a micro-batch in one process. With ``micro_batch_tokens``: most tokens."""
        self.smallest = 1
        """Smallest valid ``size``: one pair. With ``micro_batch_tokens``: tokens of the longest
        pair."""
        if form.micro_batch_tokens:
            query = query_tokens.longest()
            passage = passage_tokens.longest()
            per_query = 1 + sampler.hard_negatives
            self.smallest = query + per_query * passage
            if self.smallest > form.micro_batch_tokens:
                raise InputError(
                    f"batch.micro_batch_tokens is {form.micro_batch_tokens}, but a query with its "
                    f"passages can have {self.smallest} tokens: {query} for the query and "
                    f"{per_query} times {passage} for its passages. Raise "
                    "batch.micro_batch_tokens, or lower model.max_query_length and "
                    "model.max_passage_length."
                )

    def share_of_length(self, length: int) -> float:
        """Return the share of passages with at least ``length`` tokens, in at most 100,000."""
        count = len(self._passage_tokens)
        rows = np.linspace(0, count - 1, min(count, 100_000)).astype(np.int64)
        return float(np.mean(self._passage_tokens.lengths(rows) >= length))

    def step(self, step: int, size: int | None = None) -> list[MicroBatch]:
        """Return the micro-batches of step ``step``. size: used instead of ``self.size``."""
        rows = self._sampler(step)
        size = size or self.size
        if self._form.micro_batch_tokens:
            partition = self._partition_by_tokens(rows, size)
            return [self._micro_batch(rows, pairs, budget=size) for pairs in partition]
        partition = partition_by_pairs(len(rows.queries), size, self._form.world)
        return [self._micro_batch(rows, pairs, budget=0) for pairs in partition]

    def rows_of(self, step: int, size: int | None = None) -> list[int]:
        """Return the number of pairs of each micro-batch of a step, summed over all processes."""
        size = size or self.size
        if self._form.micro_batch_tokens:
            return [len(pairs) for pairs in self._partition_by_tokens(self._sampler(step), size)]
        width = size * self._form.world
        return [width] * (self._sampler.size // width)

    def _partition_by_tokens(self, rows: StepRows, size: int) -> list[np.ndarray]:
        """Divide a step by the lengths of all its texts, also those of other processes."""
        queries = self._query_tokens.lengths(rows.queries)  # (N,)
        passages = np.ones(rows.passages.shape, dtype=np.int64)  # (N, 1 + H); 1 token if missing
        is_passage = rows.passages != MISSING
        passages[is_passage] = self._passage_tokens.lengths(rows.passages[is_passage])
        return partition_by_tokens(queries, passages, size, self._form.world, self._form.padded)

    def _passage_texts(self, numbers: np.ndarray) -> list[np.ndarray]:
        """Return the token ids of passages, pair by pair. numbers: (B, 1 + H), or MISSING.

        A missing passage is replaced by a single token, the first one of the positive; the loss
        masks its column.
        """
        missing = numbers == MISSING
        texts = self._passage_tokens.rows(np.where(missing, numbers[:, :1], numbers).flatten())
        for place in np.flatnonzero(missing).tolist():
            texts[place] = texts[place][:1]
        return texts

    def _micro_batch(self, rows: StepRows, pairs: np.ndarray, budget: int) -> MicroBatch:
        form = self._form
        local = form.local(pairs)
        teacher = None if rows.teacher is None else torch.from_numpy(rows.teacher[pairs])
        numbers = rows.passages[pairs]  # (W * B_k, 1 + H)
        is_passage = numbers != MISSING
        numbers[is_passage] = self._passage_numbers[numbers[is_passage]]
        relevant = self._relevant.take(rows.queries[pairs])
        # the width is that of the step, because its micro-batches are concatenated
        width = self._relevant.lengths[rows.queries].max()
        positives = np.full((len(pairs), width), NO_PASSAGE)  # (W * B_k, P)
        positives[np.arange(positives.shape[1]) < relevant.lengths[:, None]] = relevant.values
        ids = RowIds(
            torch.from_numpy(numbers),
            torch.from_numpy(positives),
            teacher,
            torch.from_numpy(rows.queries[pairs]),  # (W * B_k,)
        )
        return MicroBatch(
            pad(self._query_tokens.rows(rows.queries[local]), form.pad_ids[0]),
            pad(self._passage_texts(rows.passages[local]), form.pad_ids[1]),
            ids,
            # all at once, because one id at a time takes 20 times as long
            list(self._query_ids[rows.queries[local].tolist()]),
            budget,
        )

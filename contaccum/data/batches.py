"""Make the padded micro-batches of an optimizer step from tables or from a stream.

A pair is a query with 1 + H passages: a positive and H hard negatives. The size of a micro-batch is a number of pairs or of
padded tokens.

A partition divides the N pairs of a step into micro-batches. It is a list of index arrays, one for each micro-batch. The array of
micro-batch k has shape (W * B_k,) for W processes: B_k pairs of process 0, then B_k pairs of process 1, and so on. Every process
computes the same partition.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import numpy as np
import torch

from contaccum.batch import MISSING, MicroBatch, RowIds, Tokens
from contaccum.data.sampler import MixtureSampler, StepRows, StepSampler
from contaccum.data.stream import StreamRows, StreamSampler
from contaccum.data.tables import TextTokens, TokenTable
from contaccum.data.train_set import TrainSet
from contaccum.errors import InputError

Side = Literal["right", "left"]
Tokenized = dict[int, tuple[np.ndarray, list[np.ndarray]]]
"""Index of a pair in the step -> (token ids of the query, token ids of each passage).

A missing passage is replaced by a single token: the first token of the positive. The loss masks the column of a missing passage.
"""


def partition_by_pairs(pairs: int, size: int, world: int) -> list[np.ndarray]:
    """Divide the pairs of a step into micro-batches of ``size`` pairs per process; keep the order of the pairs."""
    width = size * world
    assert pairs % width == 0, "the number of pairs must be divisible by size * world"
    return np.split(np.arange(pairs), range(width, pairs, width))


def partition_by_tokens(queries: np.ndarray, passages: np.ndarray, budget: int, world: int) -> list[np.ndarray]:
    """Divide the pairs of a step into micro-batches of at most ``budget`` padded tokens per process.

    queries (N,) and passages (N, 1 + H) are lengths in tokens. B pairs have B * (longest query + (1 + H) * longest
    passage) padded tokens. Pairs are sorted by length. The longest pairs come first, so that an out-of-memory error
    comes early. Each of the ``world`` processes gets one of every ``world`` consecutive pairs. The step has as few micro-batches
    as ``budget`` allows. With this number of micro-batches, the largest one has as few padded tokens as possible.
    """
    longest = passages.max(axis=1)
    order = np.lexsort((-queries, -longest)).reshape(-1, world)  # (N / W, W); stable
    query_tokens = queries[order].max(axis=1)
    passage_tokens = longest[order].max(axis=1) * passages.shape[1]  # (N / W,), in descending order
    single = int((query_tokens + passage_tokens).max())
    assert single <= budget, "the budget must be at least the number of padded tokens of the longest pair"
    fewest = len(_ends(query_tokens, passage_tokens, budget))
    low, high = single, budget
    while low < high:
        middle = (low + high) // 2
        if len(_ends(query_tokens, passage_tokens, middle)) > fewest:
            low = middle + 1
        else:
            high = middle
    ends = _ends(query_tokens, passage_tokens, low)
    return [order[start:end].T.reshape(-1) for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def _ends(query_tokens: np.ndarray, passage_tokens: np.ndarray, limit: int) -> list[int]:
    """Fill micro-batches in order, each up to ``limit`` padded tokens. Return their ends as indices into ``query_tokens``."""
    ends = [0]
    while ends[-1] < len(query_tokens):
        start = ends[-1]
        tokens = int(passage_tokens[start])
        widest = np.maximum.accumulate(query_tokens[start : start + limit // tokens])
        costs = np.arange(1, len(widest) + 1) * (widest + tokens)
        ends.append(start + int(np.searchsorted(costs, limit, side="right")))
    return ends[1:]


def pad(rows: Sequence[np.ndarray], pad_id: int, side: Side = "right") -> Tokens:
    """Pad n lists of token ids to the length of the longest list. The result has shape (n, length)."""
    length = max(map(len, rows))
    ids = np.full((len(rows), length), pad_id, dtype=np.int64)
    mask = np.zeros((len(rows), length), dtype=np.int64)
    for number, row in enumerate(rows):
        columns = slice(0, len(row)) if side == "right" else slice(length - len(row), length)
        ids[number, columns] = row
        mask[number, columns] = 1
    return Tokens(torch.from_numpy(ids), torch.from_numpy(mask))


@dataclass(frozen=True)
class BatchForm:
    """Size and padding of the micro-batches of one process."""

    micro_batch_size: int  # number of pairs
    micro_batch_tokens: int | None = None  # maximum number of padded tokens; replaces micro_batch_size
    pad_ids: tuple[int, int] = (0, 0)  # padding token ids of queries and of passages
    side: Side = "right"  # side of each text on which padding tokens are added
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

    def rows(self, indices: Sequence[int] | np.ndarray) -> list[np.ndarray]:
        """Return the token ids of the texts at ``indices``: one int32 array for each index."""
        numbers = np.searchsorted(self._starts, indices, side="right") - 1
        return [
            self._tables[number].rows([index - self._starts[number]])[0]
            for index, number in zip(indices, numbers, strict=True)
        ]

    def longest(self) -> int:
        """Return the number of tokens of the longest text."""
        return max(table.longest() for table in self._tables)


class Batches(ABC):
    """Micro-batches of one process.

    Micro-batch k has the texts of the B_k pairs of this process, and the ids of the W * B_k pairs of all W processes, in rank
    order.
    """

    def __init__(
        self,
        sampler: StepSampler | MixtureSampler | StreamSampler,
        query_tokens: TokenTable | JoinedTokens | TextTokens,
        passage_tokens: TokenTable | JoinedTokens | TextTokens,
        form: BatchForm,
    ) -> None:
        """Raise InputError if a query with its passages can have more than ``micro_batch_tokens`` tokens."""
        assert 0 <= form.rank < form.world
        self._sampler, self._form = sampler, form
        self._query_tokens, self._passage_tokens = query_tokens, passage_tokens
        self.size = form.micro_batch_tokens or form.micro_batch_size
        """Number of pairs of a micro-batch in one process. With ``micro_batch_tokens``: maximum number of padded tokens."""
        self.smallest = self._longest_pair(form.micro_batch_tokens) if form.micro_batch_tokens else 1
        """Smallest valid ``size``: one pair. With ``micro_batch_tokens``: number of tokens of the longest possible pair."""

    def _longest_pair(self, limit: int) -> int:
        query, passage = self._query_tokens.longest(), self._passage_tokens.longest()
        per_query = 1 + self._sampler.hard_negatives
        needed = query + per_query * passage
        if needed > limit:
            raise InputError(
                f"batch.micro_batch_tokens is {limit}, but a query with its passages can have {needed} tokens: {query} for the "
                f"query and {per_query} times {passage} for its passages. Raise batch.micro_batch_tokens, or lower "
                "model.max_query_length and model.max_passage_length."
            )
        return needed

    @abstractmethod
    def clone(self) -> "Batches":
        """Return a copy that another thread can use."""

    def step(self, step: int, size: int | None = None) -> list[MicroBatch]:
        """Return the micro-batches of optimizer step ``step``. If ``size`` is given, it is used instead of ``self.size``."""
        rows = self._sampler(step)
        partition, tokens = self._partition(rows, size or self.size)
        return [self._micro_batch(rows, tokens, pairs) for pairs in partition]

    def rows_of(self, step: int, size: int | None = None) -> list[int]:
        """Return the number of pairs of each micro-batch of step ``step``, summed over all processes."""
        size = size or self.size
        if self._form.micro_batch_tokens:
            return [len(pairs) for pairs in self._partition(self._sampler(step), size)[0]]
        width = size * self._form.world
        return [width] * (self._sampler.size // width)

    def _partition(self, rows: StepRows | StreamRows, size: int) -> tuple[list[np.ndarray], Tokenized]:
        """Return the partition of a step (the pair indices of each micro-batch), and the token ids of its pairs.

        The token ids are those of the pairs of this process. With ``micro_batch_tokens``, they are those of all pairs,
        because the lengths of all texts determine the partition.
        """
        if self._form.micro_batch_tokens:
            tokens = self._tokenized(rows, np.arange(len(rows.queries)))
            queries = np.array([len(query) for query, _ in tokens.values()])
            passages = np.array([[len(passage) for passage in own] for _, own in tokens.values()])
            return partition_by_tokens(queries, passages, size, self._form.world), tokens
        partition = partition_by_pairs(len(rows.queries), size, self._form.world)
        return partition, self._tokenized(rows, np.concatenate([self._form.local(pairs) for pairs in partition]))

    def _tokenized(self, rows: StepRows | StreamRows, indices: np.ndarray) -> Tokenized:
        queries, passages = self._tokens(rows, indices)
        found, present = iter(passages), (rows.columns[indices] != MISSING).tolist()
        tokens = {}
        for index, query, own in zip(indices.tolist(), queries, present, strict=True):
            positive = next(found)
            tokens[index] = query, [positive, *(next(found) if each else positive[:1] for each in own[1:])]
        return tokens

    @abstractmethod
    def _tokens(self, rows: Any, indices: np.ndarray) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Return the token ids of the queries and of the passages of the pairs at ``indices``. Skip missing passages."""

    @abstractmethod
    def _ids(self, rows: Any, indices: np.ndarray) -> list[str]:
        """Return the query ids of the pairs at ``indices``."""

    def _micro_batch(self, rows: StepRows | StreamRows, tokens: Tokenized, pairs: np.ndarray) -> MicroBatch:
        local = self._form.local(pairs)
        queries, passages = zip(*(tokens[index] for index in local.tolist()), strict=True)
        teacher = None if rows.teacher is None else torch.from_numpy(rows.teacher[pairs])
        # a stream has no table of queries
        numbers = torch.from_numpy(rows.queries[pairs]) if isinstance(rows, StepRows) else None
        return MicroBatch(
            pad(queries, self._form.pad_ids[0], self._form.side),
            pad(list(chain(*passages)), self._form.pad_ids[1], self._form.side),
            RowIds(torch.from_numpy(rows.columns[pairs]), torch.from_numpy(rows.positives[pairs]), teacher, numbers),
            self._ids(rows, local),
        )


class BatchSource(Batches):
    """Micro-batches of one process, from token tables."""

    _query_tokens: TokenTable | JoinedTokens
    _passage_tokens: TokenTable | JoinedTokens

    def __init__(
        self,
        train_set: TrainSet,
        sampler: StepSampler | MixtureSampler,
        query_tokens: TokenTable | JoinedTokens,
        passage_tokens: TokenTable | JoinedTokens,
        form: BatchForm,
    ) -> None:
        assert len(query_tokens) == len(train_set.queries)
        assert len(passage_tokens) == len(train_set.passages)
        super().__init__(sampler, query_tokens, passage_tokens, form)
        self._query_ids = train_set.queries["id"]

    def clone(self) -> "Batches":
        other = copy.copy(self)
        other._sampler = copy.copy(self._sampler)  # a sampler keeps the order of one epoch, so each thread needs a copy
        return other

    def _tokens(self, rows: StepRows, indices: np.ndarray) -> tuple[list[np.ndarray], list[np.ndarray]]:
        queries, passages = self._query_tokens.rows(rows.queries[indices]), rows.passages[indices]
        return queries, self._passage_tokens.rows(passages[passages != MISSING])

    def _ids(self, rows: StepRows, indices: np.ndarray) -> list[str]:
        return list(self._query_ids[rows.queries[indices].tolist()])  # one query at a time takes 20 times as long


class StreamSource(Batches):
    """Micro-batches of one process, from a stream. Every process reads the whole stream, so processes do not exchange ids."""

    _query_tokens: TextTokens
    _passage_tokens: TextTokens

    def clone(self) -> "Batches":
        other = copy.copy(self)  # the clone reads the same stream
        other._query_tokens, other._passage_tokens = copy.deepcopy((self._query_tokens, self._passage_tokens))
        return other

    def _tokens(self, rows: StreamRows, indices: np.ndarray) -> tuple[list[np.ndarray], list[np.ndarray]]:
        queries = self._query_tokens.rows((rows.queries[index].text,) for index in indices)
        return queries, self._passage_tokens.rows(passage[1:] for index in indices for passage in rows.passages[index])

    def _ids(self, rows: StreamRows, indices: np.ndarray) -> list[str]:
        return [rows.queries[index].id for index in indices]

"""From the rows of a step to padded micro-batches."""

import copy
from collections.abc import Sequence
from typing import Literal, Protocol

import numpy as np
import torch

from contaccum.batch import MicroBatch, RowIds, Tokens
from contaccum.data.cut import cut_by_pairs, cut_by_tokens
from contaccum.data.dataset import TrainSet
from contaccum.data.sampler import MixtureSampler, StepRows, StepSampler
from contaccum.data.tokens import JoinedTokens, TokenTable
from contaccum.errors import InputError

Side = Literal["right", "left"]


def pad(rows: Sequence[np.ndarray], pad_id: int, side: Side = "right") -> Tokens:
    """Bring n lists of token ids to the longest one's length, (n, length)."""
    length = max(map(len, rows))
    ids = np.full((len(rows), length), pad_id, dtype=np.int64)
    mask = np.zeros((len(rows), length), dtype=np.int64)
    for number, row in enumerate(rows):
        place = slice(0, len(row)) if side == "right" else slice(length - len(row), length)
        ids[number, place] = row
        mask[number, place] = 1
    return Tokens(torch.from_numpy(ids), torch.from_numpy(mask))


def refuse_small_budget(budget: int, query: int, passage: int, per_query: int) -> int:
    """The tokens of the longest pair that may occur, by the longest query and passage; InputError where the budget is less."""
    needed = query + per_query * passage
    if needed > budget:
        raise InputError(
            f"batch.micro_batch_tokens is {budget}, expected at least the {needed} that one pair may need (the longest"
            f" query has {query} tokens, the longest passage {passage}, times {per_query} per query); lower"
            " model.max_query_length and model.max_passage_length make pairs smaller"
        )
    return needed


class Batches(Protocol):
    """What training and the measurement of drift ask for micro-batches."""

    size: int
    smallest: int

    def twin(self) -> "Batches":
        """The same batches for another thread."""

    def step(self, step: int, size: int | None = None) -> list[MicroBatch]:
        """The micro-batches of optimizer step ``step``, in their order; of ``size`` where that is given."""

    def rows_of(self, step: int, size: int | None = None) -> list[int]:
        """How many rows, those of all processes, each of the step's micro-batches has."""


class BatchSource:
    """Gives the micro-batches of a step that one process computes.

    Micro-batch k of process r holds B_k of the step's N pairs, and the ids of the pairs of all processes in that micro-batch,
    W * B_k rows in rank order (see cut.py). ``pad_ids`` are the padding tokens of queries and of passages.
    """

    def __init__(
        self,
        train_set: TrainSet,
        sampler: StepSampler | MixtureSampler,
        query_tokens: TokenTable | JoinedTokens,
        passage_tokens: TokenTable | JoinedTokens,
        micro_batch_size: int,
        *,
        micro_batch_tokens: int | None = None,
        pad_ids: tuple[int, int],
        side: Side = "right",
        rank: int = 0,
        world: int = 1,
    ) -> None:
        """``micro_batch_tokens`` goes before ``micro_batch_size``; InputError where it is less than one pair may need."""
        assert len(query_tokens) == len(train_set.queries)
        assert len(passage_tokens) == len(train_set.passages)
        assert 0 <= rank < world
        self._names = train_set.queries["id"]
        self._sampler = sampler
        self._query_tokens, self._passage_tokens = query_tokens, passage_tokens
        self._pad_ids, self._side = pad_ids, side
        self._rank, self._world = rank, world
        self._by_tokens = micro_batch_tokens is not None
        self.size = micro_batch_size if micro_batch_tokens is None else micro_batch_tokens
        """Of a micro-batch in one process, in pairs or in tokens."""
        self.smallest = 1
        """The least that ``size`` may be: one pair, or the tokens of the longest pair that may occur."""
        if micro_batch_tokens is not None:
            longest = query_tokens.longest(), passage_tokens.longest()
            self.smallest = refuse_small_budget(micro_batch_tokens, *longest, 1 + sampler.hard_negatives)

    def twin(self) -> "BatchSource":
        """The same batches for another thread: a sampler keeps the order of the epoch that it was last asked for."""
        other = copy.copy(self)
        other._sampler = copy.copy(self._sampler)
        return other

    def step(self, step: int, size: int | None = None) -> list[MicroBatch]:
        """The micro-batches of optimizer step ``step``, in their order; of ``size`` where that is given."""
        rows = self._sampler(step)
        return [self._micro_batch(rows, everyone) for everyone in self._cut(rows, size or self.size)]

    def rows_of(self, step: int, size: int | None = None) -> list[int]:
        """How many rows, those of all processes, each of the step's micro-batches has."""
        size = size or self.size
        if self._by_tokens:
            return [len(everyone) for everyone in self._cut(self._sampler(step), size)]
        return [size * self._world] * (self._sampler.size // (size * self._world))

    def _cut(self, rows: StepRows, size: int) -> list[np.ndarray]:
        if not self._by_tokens:
            return cut_by_pairs(len(rows.queries), size, self._world)
        lengths = self._query_tokens.lengths(rows.queries), self._passage_tokens.lengths(rows.passages)
        return cut_by_tokens(*lengths, size, self._world)

    def _micro_batch(self, rows: StepRows, everyone: np.ndarray) -> MicroBatch:
        own = np.split(everyone, self._world)[self._rank]
        queries = rows.queries[own]
        teacher = None if rows.teacher is None else torch.from_numpy(rows.teacher[everyone])
        return MicroBatch(
            pad(self._query_tokens.rows(queries), self._pad_ids[0], self._side),
            pad(self._passage_tokens.rows(rows.passages[own].reshape(-1)), self._pad_ids[1], self._side),
            RowIds(torch.from_numpy(rows.passages[everyone]), torch.from_numpy(rows.positives[everyone]), teacher),
            [self._names[int(query)] for query in queries],
        )

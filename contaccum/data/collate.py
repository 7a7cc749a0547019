"""From the rows of a step to padded micro-batches."""

import copy
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch

from contaccum.batch import MicroBatch, RowIds, Tokens
from contaccum.data.dataset import StepRows, StepSampler, TrainSet
from contaccum.data.tokens import TokenTable

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


class BatchSource:
    """Gives the micro-batches of a step that one process computes: K = N / (B * W) of them.

    Micro-batch k of process r holds rows [k*W*B + r*B, +B) of the step's N, and the ids of all processes' rows of that
    micro-batch, [k*W*B, (k+1)*W*B). ``pad_ids`` are the padding tokens of queries and of passages.
    """

    def __init__(
        self,
        train_set: TrainSet,
        sampler: StepSampler,
        query_tokens: TokenTable,
        passage_tokens: TokenTable,
        micro_batch_size: int,
        *,
        pad_ids: tuple[int, int],
        side: Side = "right",
        rank: int = 0,
        world: int = 1,
    ) -> None:
        assert len(query_tokens) == len(train_set.queries)
        assert len(passage_tokens) == len(train_set.passages)
        assert 0 <= rank < world
        self._names = train_set.queries["id"]
        self._sampler = sampler
        self._query_tokens, self._passage_tokens = query_tokens, passage_tokens
        self._size, self._pad_ids, self._side = micro_batch_size, pad_ids, side
        self._rank, self._world = rank, world

    def twin(self) -> "BatchSource":
        """The same batches for another thread: a sampler keeps the order of the epoch that it was last asked for."""
        other = copy.copy(self)
        other._sampler = copy.copy(self._sampler)
        return other

    @property
    def width(self) -> int:
        """Rows of one micro-batch of all processes, B * W."""
        return self._size * self._world

    def step(self, step: int) -> list[MicroBatch]:
        """The micro-batches of optimizer step ``step``, in their order."""
        rows = self._sampler(step)
        assert len(rows.queries) % self.width == 0, "the configuration divides the global batch evenly"
        return [self._micro_batch(rows, start) for start in range(0, len(rows.queries), self.width)]

    def _micro_batch(self, rows: StepRows, start: int) -> MicroBatch:
        everyone = slice(start, start + self.width)
        own = slice(start + self._rank * self._size, start + (self._rank + 1) * self._size)
        queries = rows.queries[own]
        return MicroBatch(
            pad(self._query_tokens.rows(queries), self._pad_ids[0], self._side),
            pad(self._passage_tokens.rows(rows.passages[own].reshape(-1)), self._pad_ids[1], self._side),
            RowIds(torch.from_numpy(rows.passages[everyone]), torch.from_numpy(rows.positives[everyone])),
            [self._names[int(query)] for query in queries],
        )

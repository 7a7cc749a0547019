"""From the texts of a stream's step to padded micro-batches, tokenised as they come."""

import copy
from collections.abc import Iterable

import numpy as np
import torch

from contaccum.batch import MicroBatch, RowIds
from contaccum.data.collate import Side, pad, refuse_small_budget
from contaccum.data.cut import cut_by_pairs, cut_by_tokens
from contaccum.data.stream import StreamRows, StreamSampler
from contaccum.data.tokens import TextTokens

Tokenised = dict[int, tuple[np.ndarray, list[np.ndarray]]]
"""By its place in the step the token ids of a query, and those of its 1 + H passages."""


class StreamSource:
    """Gives the micro-batches of a step that one process computes, as BatchSource does.

    Every process reads the whole stream, so that ids need no communication, and tokenises its own rows; all rows where the cut
    is by tokens.
    """

    def __init__(
        self,
        sampler: StreamSampler,
        query_tokens: TextTokens,
        passage_tokens: TextTokens,
        micro_batch_size: int,
        *,
        micro_batch_tokens: int | None = None,
        pad_ids: tuple[int, int],
        side: Side = "right",
        rank: int = 0,
        world: int = 1,
    ) -> None:
        """``micro_batch_tokens`` goes before ``micro_batch_size``; InputError where it is less than a pair of the greatest
        lengths needs, since nobody knows which lengths will come."""
        assert 0 <= rank < world
        self._sampler = sampler
        self._query_tokens, self._passage_tokens = query_tokens, passage_tokens
        self._pad_ids, self._side = pad_ids, side
        self._rank, self._world = rank, world
        self._by_tokens = micro_batch_tokens is not None
        self.size, self.smallest = micro_batch_size, 1
        if micro_batch_tokens is not None:
            longest = query_tokens.max_length, passage_tokens.max_length
            self.size = micro_batch_tokens
            self.smallest = refuse_small_budget(micro_batch_tokens, *longest, 1 + sampler.hard_negatives)

    def twin(self) -> "StreamSource":
        """The same batches for another thread, of the same reading: what one asks for is there for the other."""
        other = copy.copy(self)
        other._query_tokens, other._passage_tokens = self._query_tokens.twin(), self._passage_tokens.twin()
        return other

    def step(self, step: int, size: int | None = None) -> list[MicroBatch]:
        """See BatchSource."""
        rows = self._sampler(step)
        if self._by_tokens:
            tokens = self._tokenised(rows, range(len(rows.queries)))
            cut = self._cut(tokens, size or self.size)
        else:
            cut = cut_by_pairs(len(rows.queries), size or self.size, self._world)
            tokens = self._tokenised(rows, np.concatenate([self._own(everyone) for everyone in cut]).tolist())
        return [self._micro_batch(rows, tokens, everyone) for everyone in cut]

    def rows_of(self, step: int, size: int | None = None) -> list[int]:
        """See BatchSource."""
        if self._by_tokens:
            rows = self._sampler(step)
            cut = self._cut(self._tokenised(rows, range(len(rows.queries))), size or self.size)
        else:
            cut = cut_by_pairs(self._sampler.size, size or self.size, self._world)
        return [len(everyone) for everyone in cut]

    def _tokenised(self, rows: StreamRows, places: Iterable[int]) -> Tokenised:
        places = list(places)
        queries = self._query_tokens.rows((rows.queries[place].text,) for place in places)
        passages = self._passage_tokens.rows(passage[1:] for place in places for passage in rows.passages[place])
        width = rows.columns.shape[1]
        return {
            place: (query, passages[number * width : (number + 1) * width])
            for number, (place, query) in enumerate(zip(places, queries, strict=True))
        }

    def _cut(self, tokens: Tokenised, size: int) -> list[np.ndarray]:
        queries = np.array([len(tokens[place][0]) for place in range(len(tokens))])
        passages = np.array([[len(passage) for passage in tokens[place][1]] for place in range(len(tokens))])
        return cut_by_tokens(queries, passages, size, self._world)

    def _own(self, everyone: np.ndarray) -> np.ndarray:
        """Those of a micro-batch's places that are this process's."""
        return np.split(everyone, self._world)[self._rank]

    def _micro_batch(self, rows: StreamRows, tokens: Tokenised, everyone: np.ndarray) -> MicroBatch:
        own = self._own(everyone).tolist()
        teacher = None if rows.teacher is None else torch.from_numpy(rows.teacher[everyone])
        return MicroBatch(
            pad([tokens[place][0] for place in own], self._pad_ids[0], self._side),
            pad([passage for place in own for passage in tokens[place][1]], self._pad_ids[1], self._side),
            RowIds(torch.from_numpy(rows.columns[everyone]), torch.from_numpy(rows.positives[everyone]), teacher),
            [rows.queries[place].id for place in own],
        )

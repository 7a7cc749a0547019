"""Micro-batches (token ids and passage ids), and batches with a maximum number of tokens."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

NO_PASSAGE = -1
"""Padding value in RowIds.positives. No passage has this id."""
MISSING = -2
"""Padding value in RowIds.columns, for a query with fewer than H hard negatives. No passage has
this id."""


@dataclass(frozen=True)
class Tokens:
    """Padded token ids of n texts."""

    input_ids: Tensor  # (n, length) int64
    attention_mask: Tensor  # (n, length) int64, 0 at padding
    # attention_mask on the CPU, to read lengths without waiting for the device
    host_mask: Tensor | None = None

    def to(self, device: torch.device) -> "Tokens":
        """Return the texts on ``device``. The copy does not block the CPU."""
        ids, mask = self.input_ids, self.attention_mask
        on_cpu = mask.device.type == "cpu"
        if on_cpu and device.type == "cuda":  # a copy of other memory would block
            ids, mask = ids.pin_memory(), mask.pin_memory()
        return Tokens(
            ids.to(device, non_blocking=True),
            mask.to(device, non_blocking=True),
            mask if on_cpu else self.host_mask,
        )

    def count(self, padded: bool) -> int:
        """Return the number of tokens, with padding if ``padded``."""
        mask = self.attention_mask if self.host_mask is None else self.host_mask
        return self.input_ids.numel() if padded else int(mask.sum())

    @staticmethod
    def join(parts: "list[Tokens]", pad_id: int) -> "Tokens":
        """Concatenate the texts of all ``parts``, padded to the length of the longest text."""
        length = max(part.input_ids.shape[1] for part in parts)

        def widened(rows: Tensor, value: int) -> Tensor:
            return F.pad(rows, (0, length - rows.shape[1]), value=value)

        host_masks = [part.host_mask for part in parts if part.host_mask is not None]
        return Tokens(
            torch.cat([widened(part.input_ids, pad_id) for part in parts]),
            torch.cat([widened(part.attention_mask, 0) for part in parts]),
            torch.cat([widened(mask, 0) for mask in host_masks]) if host_masks else None,
        )

    def select(self, rows: Tensor) -> "Tokens":
        """Return the texts at the positions ``rows``, padded to the longest of these texts."""
        mask = self.attention_mask[rows]
        used = mask.any(0)  # False where all texts have padding
        return Tokens(self.input_ids[rows][:, used], mask[:, used])


def pad(rows: Sequence[Sequence[int] | np.ndarray], pad_id: int) -> Tokens:
    """Pad n lists of token ids at their ends to the length of the longest list.

    The result has shape (n, length).
    """
    lengths = np.array(list(map(len, rows)))  # (n,)
    mask = np.arange(lengths.max()) < lengths[:, None]  # (n, length)
    ids = np.full(mask.shape, pad_id, dtype=np.int64)  # (n, length)
    ids[mask] = np.concatenate(rows)
    return Tokens(torch.from_numpy(ids), torch.from_numpy(mask.astype(np.int64)))


def token_batches(lengths: Sequence[int], budget: int, padded: bool = True) -> Iterator[list[int]]:
    """Group texts into batches of at most ``budget`` tokens, including padding if ``padded``.

    Yield the text indices of each batch.

    lengths: number of tokens of each text. With padding, texts are sorted by length, so that
    batches have little of it. The longest texts come first, so that a budget too large for the
    memory fails in the first batch. Without padding, texts keep their order. A text with more than
    ``budget`` tokens is a batch by itself.
    """
    batch: list[int] = []
    tokens = 0
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index] if padded else 0)
    for index in order:
        length = lengths[batch[0]] if padded and batch else lengths[index]
        if batch and tokens + length > budget:
            yield batch
            batch = []
            tokens = 0
            length = lengths[index]
        batch.append(index)
        tokens += length
    if batch:
        yield batch


ONE_TOKEN = Tokens(torch.zeros(1, 1, dtype=torch.long), torch.ones(1, 1, dtype=torch.long))
"""Dummy text for a forward pass whose result is not used."""


@dataclass(frozen=True)
class RowIds:
    """Passage ids for each query: numbers that are equal for passages with equal text.

    ``columns`` has one positive and the hard negatives, ``positives`` all known positives.

    Optional: teacher scores of the passages in ``columns``, and the row number of each query in the
    training set.
    """

    # (b, 1 + H) int64: the positive of each query, then its hard negatives, padded with MISSING
    columns: Tensor
    # (b, P) int64: all passages known to be relevant for each query, padded with NO_PASSAGE
    positives: Tensor
    # (b, 1 + H) float32: scores of the passages by a teacher, NaN for a missing score
    teacher: Tensor | None = None
    queries: Tensor | None = None  # (b,) int64: row number of each query in the training set

    def __getitem__(self, rows: slice | Tensor) -> "RowIds":
        """Return the ids of some of the b queries. rows: a slice, or row numbers on the CPU."""
        return RowIds.merge([self], lambda tensors: tensors[0][rows])

    @staticmethod
    def merge(parts: "list[RowIds]", how: Callable[[list[Tensor]], Tensor]) -> "RowIds":
        """Merge ``parts`` field by field.

        how: function that merges the tensors of one field, such as torch.cat.
        """
        merged: dict[str, Tensor] = {}
        for name in ("columns", "positives", "teacher", "queries"):
            given = [tensor for part in parts if (tensor := getattr(part, name)) is not None]
            assert len(given) in (0, len(parts))
            if given:
                merged[name] = how(given)
        return RowIds(**merged)


@dataclass(frozen=True)
class MicroBatch:
    """Input of one forward pass of one process: B queries with 1 + H passages each.

    H is the number of hard negatives per query. ``ids`` has the ids of the b = W * B pairs of all W
    processes, in rank order. Every process computes the pairs of a step from the seed and the step
    number, so processes need not exchange ``ids``. ``query_ids`` are the ids of the queries of this
    process, for error messages.
    """

    queries: Tokens  # (B, length)
    passages: Tokens  # (B * (1 + H), length), pair by pair, the positive first
    ids: RowIds  # (W * B, ...)
    query_ids: list[str]
    budget: int = 0  # maximum of tokens of a pass; 0: those of the largest micro-batch

    @property
    def tokens(self) -> int:
        """Number of tokens, without padding."""
        return self.queries.count(padded=False) + self.passages.count(padded=False)

    def to(self, device: torch.device) -> "MicroBatch":
        """Return a copy whose texts are on ``device``.

        The ids stay on the CPU, where masks are computed.
        """
        queries, passages = self.queries.to(device), self.passages.to(device)
        return replace(self, queries=queries, passages=passages)


def step_ids(micro_batches: Sequence[MicroBatch]) -> RowIds:
    """Return the ids of all pairs of a step."""
    return RowIds.merge([batch.ids for batch in micro_batches], torch.cat)


class Pass(NamedTuple):
    """Texts that a tower of one process encodes at once, if the loss is that of the whole step."""

    number: int
    """Number of the pass in the step. It seeds the dropout noise."""
    side: int
    """0: the query tower encodes the texts, 1: the passage tower."""
    text_numbers: Tensor
    """Numbers of the texts, (t,). All queries of the process in the step come first, then all its
    passages, pair by pair."""
    texts: Tokens
    """The texts, (t, length)."""

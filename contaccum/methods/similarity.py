"""Compute logits: similarities of rows and columns, divided by the temperature, with known positives masked.

A row is a query, and a column is a passage. The pairs to mask are found by passage id. They are stored as a list, because a
matrix of flags would be as large as the matrix of logits. Ids are always on the CPU, so that masking never waits for a device.
"""

import contextlib
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from contaccum.batch import MISSING, NO_PASSAGE
from contaccum.methods.masking import NO_RULES, PairRules

CPU_TILE = 1 << 20  # number of similarities to compute at once; this many fit in the cache of a CPU
TILE = 1 << 27  # number of similarities at once on other devices, where large operations are fastest; 0.5 GiB
NO_IDS = {NO_PASSAGE, MISSING}  # padding values in tensors of passage ids


class MaskedPairs(NamedTuple):
    """Indices (row, column) of the masked elements of a matrix of logits, in any order, without duplicates."""

    rows: Tensor  # (pairs,) int64, on the CPU
    columns: Tensor  # (pairs,) int64, on the CPU

    def __len__(self) -> int:
        return len(self.rows)

    def transposed(self) -> "MaskedPairs":
        return MaskedPairs(self.columns, self.rows)

    def without(self, rows: Tensor, columns: Tensor) -> "MaskedPairs":
        """Return all pairs except (rows[i], columns[i]) for every i. ``rows`` must be ascending, without duplicates."""
        index = torch.searchsorted(rows, self.rows).clamp(max=len(rows) - 1)
        other = (rows[index] != self.rows) | (columns[index] != self.columns)
        return MaskedPairs(self.rows[other], self.columns[other])

    def block(self, rows: slice, columns: slice) -> "MaskedPairs":
        """Return the pairs inside a block of the matrix. Their indices count from the first row and column of the block."""
        if not self.rows.numel():
            return self
        inside = (self.rows >= rows.start) & (self.rows < rows.stop)
        inside &= (self.columns >= columns.start) & (self.columns < columns.stop)
        return MaskedPairs(self.rows[inside] - rows.start, self.columns[inside] - columns.start)


class EntriesById:
    """Map from each passage id to the entries that contain the id.

    An entry is a numbered set of passage ids, for example the known positives of a bank row. The map is on the CPU. The
    time of a lookup does not depend on the number of entries.
    """

    def __init__(self) -> None:
        self._entries: dict[int, list[int]] = {}

    def add(self, first: int, ids: Tensor) -> None:
        """Add n entries, which get the numbers ``first``, ``first + 1`` and so on. ids: (n, P), the passage ids of each entry."""
        for entry, own in enumerate(ids.tolist(), first):
            for passage in {*own} - NO_IDS:
                self._entries.setdefault(passage, []).append(entry)

    def remove(self, first: int, ids: Tensor) -> None:
        """Remove the n entries ``first``, ``first + 1`` and so on. ids: (n, P), the ids with which they were added."""
        for entry, own in enumerate(ids.tolist(), first):
            for passage in {*own} - NO_IDS:
                # fast, because the bank removes the oldest entry first, and that entry is at the front of the list
                self._entries[passage].remove(entry)
                if not self._entries[passage]:
                    del self._entries[passage]

    def find(self, ids: Tensor, entries: slice) -> MaskedPairs:
        """Return all pairs (i, j) for which row i of ``ids`` and entry number ``entries.start + j`` share a passage id.

        ids: (r, P), P passage ids for each row. entries: numbers of the entries to search.
        """
        pairs = [
            (row, entry - entries.start)
            for row, own in enumerate(ids.tolist())
            for entry in {entry for passage in own for entry in self._entries.get(passage, ())}
            if entries.start <= entry < entries.stop
        ]
        return MaskedPairs(*(torch.tensor([pair[side] for pair in pairs], dtype=torch.long) for side in (0, 1)))


def full_precision(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which autocast is disabled. On a device without autocast, the context does nothing."""
    available = torch.amp.is_autocast_available(device.type)
    return torch.autocast(device.type, enabled=False) if available else contextlib.nullcontext()


def tiles(count: int, height: int) -> list[slice]:
    """Divide ``count`` rows into slices of ``height`` rows. The last slice may be shorter. A ``height`` below 1 counts as 1."""
    height = max(1, height)
    return [slice(start, min(start + height, count)) for start in range(0, count, height)]


@dataclass(frozen=True)
class Similarity:
    """Settings that turn similarities into logits. The loss and the bank use the same settings."""

    temperature: float
    """Number that divides every similarity."""
    mask_false_negatives: bool = True
    """Whether to mask the known positives of a query, except the positive of its own pair."""
    tile: int | None = None
    """Number of similarities to compute at once. Default: 2^20 on a CPU, 2^27 on other devices."""
    rules: PairRules = NO_RULES
    """Rules that mask pairs in addition to the known positives."""
    hardness: float = 0.0
    """A negative with similarity s has the weight exp(hardness * s), which has no gradient. With 0, all weights are 1."""

    @property
    def positive_share(self) -> float:
        """Factor that turns ``scale * s`` into ``s / temperature``, where s is the similarity of a row and its own positive."""
        return 1 / (1 + self.hardness * self.temperature)

    @property
    def scale(self) -> float:
        """Factor that turns a similarity into a logit: 1 / temperature + hardness."""
        return 1 / self.temperature + self.hardness

    def tile_on(self, device: torch.device) -> int:
        return self.tile or (CPU_TILE if device.type == "cpu" else TILE)

    def settings(self) -> dict[str, Any]:
        """Return the settings on which stored log-sum-exps depend.

        Old checkpoints do not have ``hardness`` and ``rules``. So the result has them only if they differ from the default.
        """
        newer = {name: value for name, value in (("hardness", self.hardness), ("rules", self.rules.key)) if value}
        return {"temperature": self.temperature, "mask_false_negatives": self.mask_false_negatives, **newer}

    def masked_pairs(self, positives: Tensor, column_ids: Tensor) -> MaskedPairs:
        """Return all pairs (row, column) where the column is a known positive of the row. The row's own positive is included.

        If masking is off, there are no pairs. positives: (r, P), the ids of the known positives of each row, padded with
        NO_PASSAGE. column_ids: (c,), the passage id of each column. The time is O(r * P + c + number of pairs).
        """
        columns = EntriesById()
        if self.mask_false_negatives:
            columns.add(0, column_ids.unsqueeze(1))
        return columns.find(positives, slice(0, len(column_ids)))

    def logits(self, rows: Tensor, columns: Tensor, masked: MaskedPairs) -> Tensor:
        """Return the logits of rows and columns: similarity / temperature + hardness * similarity, (r, c) float32.

        The caller must remove the second term from the logit of a row's own positive, with ``positive_share``. rows:
        (r, d). columns: (c, d). masked: the pairs whose logit is minus infinity.
        """
        with full_precision(rows.device):
            # on a CPU, a short matrix times a long one takes 1.5 times as long as the reverse
            swap = len(rows) < len(columns) and rows.device.type == "cpu"
            left, right = (columns, rows) if swap else (rows, columns)
            logits = torch.addmm(left.new_empty(()), left, right.T, beta=0, alpha=self.scale)
            if swap:
                logits = logits.T.contiguous()
            if masked.rows.numel():
                where = masked.rows * len(columns) + masked.columns
                logits.view(-1).index_fill_(0, where.to(logits.device, non_blocking=True), -torch.inf)
            return logits

"""Log-sum-exp of each bank row over all bank columns, kept up to date while pushes overwrite columns.

Subtracting an overwritten column from a sum would add a rounding error in every push. Therefore the columns are divided into
blocks, the table stores one log-sum-exp per row and block, and a push recomputes changed blocks. Small blocks make a push cheap
but the table large, so there are several levels of blocks. Level 0 divides the bank into ``fan`` blocks. At each level except the
last, one block is open: the block that the pushes overwrite now. The next level divides the open block into ``fan`` smaller
blocks. To open a block, the log-sum-exps of its smaller blocks are computed from the stored embeddings. To close a block, the
log-sum-exps of its smaller blocks are combined into one.

In one pass of the pushes over all slots, the logits between each column and all rows are computed LEVELS times: once when a push
overwrites the column, and once at each level except the last, when the block that contains the column is opened.
With M rows and pushes of b rows, one push costs O(M * b) on average, and the table has LEVELS * fan = O((M / b)^(1 / LEVELS))
numbers per row.
"""

from collections.abc import Callable
from itertools import accumulate, count
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

LEVELS = 3
"""Number of levels of blocks.

With 3 levels, M = 131,072 and b = 8, the table has 79 numbers per row, few compared with the 768 or more of a usual embedding.
"""

Logits = Callable[[slice, slice], Tensor]
"""Function that returns the logits between some bank rows and some bank columns.

The first slice selects the rows. The second slice selects slots, and the columns are all columns in these slots. The shape of the
result is (slots * columns per slot, rows). Logits of masked pairs are minus infinity.
"""


class RollbackJournal:
    """Old contents of the tensor regions that an optimizer step overwrote. They are written back to undo a failed step."""

    def __init__(self) -> None:
        self._copies: dict[tuple[int, str], tuple[Tensor, Any, Tensor]] = {}

    def record(self, tensor: Tensor, region: Any) -> None:
        """Copy ``tensor[region]`` before it is overwritten, unless the journal already has a copy of it from this step."""
        key = (id(tensor), repr(region))  # slices cannot be hashed before Python 3.12
        if key not in self._copies:
            self._copies[key] = (tensor, region, tensor[region].clone())

    def restore(self) -> None:
        """Write all copies back, newest first: where regions overlap, the oldest copy, from before the step, is written last."""
        for tensor, region, old in reversed(self._copies.values()):
            tensor[region] = old
        self.clear()

    def clear(self) -> None:
        self._copies = {}


class PartialLogSumExp:
    """Log-sum-exps of the logits between b current rows and the bank.

    The loss computes these log-sum-exps, and the push of the same b rows writes them to the table of ``NestedLogSumExp``.
    """

    def __init__(self, slot: int, fill: int, rows: int, per_slot: int, sums: "NestedLogSumExp") -> None:
        """Create the tensors ``self.columns`` and ``self.rows``. The loss fills them later.

        slot: first bank slot that the next push will overwrite. fill: number of filled bank slots. Each filled slot stores one
        row (a query) and its columns (passages). rows: number of current rows, b. per_slot: number of columns in a slot. sums:
        the bank's table of log-sum-exps.
        """
        self.slot = slot
        self.columns = sums.values.new_empty((fill,))
        """Log-sum-exp of each stored row over the current columns, (fill,)."""
        self.rows = sums.values.new_full((LEVELS, sums.fan, rows), -torch.inf)
        """Log-sum-exp of each current row over each block of stored columns, (LEVELS, fan, b)."""
        self.open = list(sums.open)
        self._widths = [width * per_slot for width in sums.widths]  # number of columns of a block at each level
        self._starts = [first * per_slot for first in sums.first_slots()]

    def add(self, rows: slice, first: int, logits: Tensor) -> None:
        """Include logits (r, c) in the log-sum-exps.

        They are the logits between the r current rows ``rows`` and the stored columns ``first`` to ``first`` + c - 1. All calls
        together must include the logit of each pair (current row, stored column) exactly once.
        """
        for level, (width, start) in enumerate(zip(self._widths, self._starts, strict=True)):
            begin, end = max(start, first), min(start + self.rows.shape[1] * width, first + logits.shape[1])
            while begin < end:  # first the rest of a block, then all whole blocks, then the beginning of the last block
                block, before = divmod(begin - start, width)
                stop = min(end, begin - before + width)
                if not before and end > stop:
                    stop = end - (end - begin) % width
                part = logits.T[begin - first : stop - first]
                sums = self.rows[level, block : block + -(-len(part) // width), rows]
                if before or len(part) % width:
                    torch.logaddexp(sums, part.logsumexp(0, keepdim=True), out=sums)
                else:
                    _block_sums(part, width, sums)
                begin = stop


class NestedLogSumExp:
    """Table of the log-sum-exp of each row over each block of columns.

    Each level has blocks of one size. The table is ``values``, (LEVELS, fan, M): one entry for each level, block and bank row.
    At each level except the last, one block is open: the block that the pushes overwrite now. The entries of a block are minus
    infinity if the block is open or contains no column. The columns of an open block are included in the
    entries of the smaller blocks at the next level. The rows are the last dimension, so that a sum over blocks reads contiguous
    memory.
    """

    def __init__(
        self, logits: Logits, size: int, push: int, tile: int, journal: RollbackJournal, device: Any = None
    ) -> None:
        """Create the table of an empty bank.

        logits: function for the logits between bank rows and bank columns. size: number of slots of the bank. push: number of
        slots that a push usually overwrites. The smallest blocks have this number of slots. tile: number of (row, slot) pairs to
        compute at once. journal: receives a copy of every region of ``values`` and ``closed`` before it is overwritten.
        """
        self.fan = fan = next(fan for fan in count(1) if fan**LEVELS * push >= size)
        # number of slots in a block at each level
        self.widths = [push * fan ** (LEVELS - 1 - level) for level in range(LEVELS)]
        self.values = torch.full((LEVELS, fan, size), -torch.inf, device=device)
        # log-sum-exp of each row over all levels except the last
        self.closed = torch.full((size,), -torch.inf, device=device)
        self.open = [0] * (LEVELS - 1)  # index of the open block at each level except the last
        self.logits, self.tile, self.journal = logits, tile, journal

    def total(self, fill: int) -> Tensor:
        """Return the log-sum-exp over all columns for each of the first ``fill`` rows, (fill,)."""
        return torch.logaddexp(self.closed[:fill], self.values[-1, :, :fill].logsumexp(0))

    def first_slots(self) -> list[int]:
        """Return one slot per level: the slot where the first block of the level starts.

        At level 0, this is slot 0. The blocks of any other level divide the open block of the previous level, so they start where
        the open block starts.
        """
        steps = zip(self.open, self.widths, strict=False)
        return [0, *accumulate(block * width for block, width in steps)]

    def overwrite(self, start: int, stop: int, fill: int, partial: PartialLogSumExp | None = None) -> None:
        """Update the table after a push overwrote slots [start, stop).

        fill: number of filled slots of the bank after the push. partial: log-sum-exps that the loss computed for the pushed rows
        just before the push. This function does not compute these log-sum-exps again.
        """
        assert partial is None or partial.slot == start, "the partial log-sum-exps belong to other slots"
        width = self.widths[-1]
        for slot in range(start - start % width, stop, width):
            path = [slot // width % self.fan for width in self.widths[:-1]]
            if path != self.open:
                self._open_blocks(slot, path, fill)
            block = slot // width % self.fan
            self.journal.record(self.values, (-1, block))
            if partial is not None:  # _write_rows computes the rows of the overwritten slots
                self.values[-1, block, : len(partial.columns)] = partial.columns
            else:
                self._compute(self.values[-1, block : block + 1, :fill], 0, slot, width, fill)
        self._write_rows(start, stop, fill, partial)

    def _open_blocks(self, slot: int, path: list[int], fill: int) -> None:
        """Close each open block that does not contain ``slot``. At the same level, open the block that contains ``slot``.

        path: for each level except the last, the number of the block that contains ``slot``. fill: see ``overwrite``.
        """
        first = next(level for level, block in enumerate(path) if block != self.open[level])
        for level in reversed(range(first, LEVELS - 1)):
            self.journal.record(self.values, (level, self.open[level]))
            torch.logsumexp(self.values[level + 1], 0, out=self.values[level, self.open[level]])
        for level in range(first, LEVELS - 1):
            self.journal.record(self.values, (level, path[level]))
            self.journal.record(self.values, level + 1)
            self.values[level, path[level]].fill_(-torch.inf)
            start = slot - slot % self.widths[level]
            self._compute(self.values[level + 1, :, :fill], 0, start, self.widths[level + 1], fill)
        self.open = path
        self.journal.record(self.closed, slice(None))
        torch.logsumexp(self.values[:-1], (0, 1), out=self.closed)

    def _write_rows(self, start: int, stop: int, fill: int, partial: PartialLogSumExp | None) -> None:
        """Write the log-sum-exps of bank rows [start, stop) over the blocks of all levels. Arguments: see ``overwrite``."""
        firsts = self.first_slots()
        rows = self.values[:, :, start:stop]
        self.journal.record(self.values, (slice(None), slice(None), slice(start, stop)))
        if partial is not None and partial.open == self.open:
            rows.copy_(partial.rows)
            # recompute the block of these slots: the loss used the columns that this push replaced
            own = (start - firsts[-1]) // self.widths[-1]
            self._compute(rows[-1, own : own + 1], start, start, self.widths[-1], fill)
        else:
            for sums, first, width in zip(rows, firsts, self.widths, strict=True):
                self._compute(sums, start, first, width, fill)
        for sums, block in zip(rows, self.open, strict=False):
            sums[block].fill_(-torch.inf)
        self.journal.record(self.closed, slice(start, stop))
        torch.logsumexp(rows[:-1], (0, 1), out=self.closed[start:stop])

    def _compute(self, sums: Tensor, top: int, slot: int, width: int, fill: int) -> None:
        """Compute the log-sum-exps of bank rows over blocks of columns, and write them to ``sums`` (blocks, rows).

        The rows are consecutive, and so are the blocks. The shape of ``sums`` gives the number of rows and the number of blocks.
        top: first row. slot: first slot of the first block. width: number of slots in a block. fill: number of slots that
        contain a row.
        """
        count, rows = sums.shape
        end = min(slot + count * width, fill)
        if end < slot + count * width:
            sums.fill_(-torch.inf)  # blocks that contain no row keep minus infinity
        # a tile contains all rows and as many blocks as fit, or one block and as many rows as fit
        step = width * max(1, min(count, self.tile // (width * rows)))
        height = max(1, self.tile // step)
        for left in range(slot, end, step):
            used = min(left + step, end)
            block, blocks = (left - slot) // width, -(-(used - left) // width)
            for row in range(0, rows, height):
                below = min(row + height, rows)
                part = self.logits(slice(top + row, top + below), slice(left, used))  # (columns, rows)
                _block_sums(part, width * len(part) // (used - left), sums[block : block + blocks, row:below])


def _block_sums(logits: Tensor, width: int, sums: Tensor) -> None:
    """Compute log-sum-exps over blocks of ``width`` columns. Write them to ``sums`` (blocks, rows). logits: (columns, rows)."""
    missing = -len(logits) % width
    if missing:
        logits = F.pad(logits, (0, 0, 0, missing), value=-torch.inf)
    torch.logsumexp(logits.unflatten(0, (-1, width)), 1, out=sums)

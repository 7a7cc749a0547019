"""Each bank row's log-sum-exp over all bank columns, kept exact while pushes overwrite the ring.

A log-sum-exp cannot be taken back: subtracting an overwritten column from a sum loses digits without bound. So the columns
are divided into blocks, and a block's value is replaced as a whole. Narrow blocks make a push cheap but the table wide; hence
several levels. The top level divides the ring into ``fan`` blocks; of each level one block, the one being overwritten, stands
open and is divided into ``fan`` blocks of the level below. A block is opened by computing its parts from the stored vectors,
and closed by summing them up, so each column is met once per level and turn of the ring: for M rows and pushes of b rows a
push costs O(M * b) on average, and the state holds LEVELS * fan = O((M / b)^(1 / LEVELS)) numbers a row.
"""

from collections.abc import Callable
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from contaccum.methods.undo import Undo

LEVELS = 3
"""At 131,072 rows pushed 8 at a time this makes 79 numbers a row, beside 768 or more for its vectors."""

Logits = Callable[[slice, slice], Tensor]
"""Bank rows and bank slots, both without gaps -> logits (slots * columns per slot, rows), minus infinity where masked."""


class Preview:
    """What a loss finds of b current rows and their columns against the bank: the push that follows need not compute it again."""

    def __init__(self, slot: int, fill: int, rows: int, per_slot: int, sums: "NestedLogSumExp") -> None:
        """slot: where the b = ``rows`` rows are going to be stored; fill: rows in use until then; per_slot: columns of a slot."""
        self.slot = slot
        self.columns = sums.values.new_full((fill,), -torch.inf)
        """Log-sum-exp of each stored row over the current columns."""
        self.rows = sums.values.new_full((LEVELS, sums.fan, rows), -torch.inf)
        """Log-sum-exp of each current row over blocks of stored columns, the blocks of ``NestedLogSumExp.values``."""
        self.open = list(sums.open)
        self._widths = [width * per_slot for width in sums.widths]  # in columns
        steps = zip(self.open, self._widths, strict=False)
        self._inside = [0, *accumulate(block * width for block, width in steps)]  # the first column of each level

    def take(self, rows: slice, first: int, logits: Tensor) -> None:
        """Take in logits (r, c) of current rows against stored columns from ``first`` on; each column once, in any order."""
        for level, (width, inside) in enumerate(zip(self._widths, self._inside, strict=True)):
            begin, end = max(inside, first), min(inside + self.rows.shape[1] * width, first + logits.shape[1])
            while begin < end:  # what is left of a block, whole blocks, what there is of the last one
                block, before = divmod(begin - inside, width)
                stop = min(end, begin - before + width)
                if not before and end > stop:
                    stop = end - (end - begin) % width
                part = logits.T[begin - first : stop - first]
                held = self.rows[level, block : block + -(-len(part) // width), rows]
                torch.logaddexp(held, _block_sums(part, min(width, len(part))), out=held)
                begin = stop


class NestedLogSumExp:
    """values (LEVELS, fan, M): log-sum-exp of a row per block; minus infinity where a block is open or has no column yet.

    Blocks come first: sums over them then run along memory, many rows at a time.
    """

    def __init__(self, size: int, push: int, tile: int, undo: Undo, device: torch.device | None = None) -> None:
        """size: slots of the ring; push: slots that a push usually overwrites, the width of the finest block; tile: (row, slot)
        pairs whose logits are held at once; undo: is told of what is overwritten (``open`` is the caller's to keep)."""
        finest = -(-size // push)
        fan = 1
        while fan**LEVELS < finest:
            fan += 1
        self.fan = fan
        # slots in one block of each level
        self.widths = [push * fan ** (LEVELS - 1 - level) for level in range(LEVELS)]
        self.values = torch.full((LEVELS, fan, size), -torch.inf, device=device)
        self.closed = torch.full((size,), -torch.inf, device=device)  # a row's sum over all levels but the finest
        self.open = [0] * (LEVELS - 1)  # which block stands open at each level but the finest
        self.tile = tile
        self.undo = undo

    def total(self, fill: int) -> Tensor:
        """Log-sum-exp of each of the first ``fill`` rows over all columns, (fill,)."""
        return torch.logaddexp(self.closed[:fill], self.values[-1, :, :fill].logsumexp(0))

    def load(self, values: Tensor, closed: Tensor, open_blocks: list[int]) -> None:
        """Take over the state of another one of the same shape."""
        self.values.copy_(values)
        self.closed.copy_(closed)
        self.open = list(open_blocks)

    def preview(self, slot: int, fill: int, rows: int, per_slot: int) -> Preview | None:
        """To be filled by a loss of ``rows`` rows that are then stored from ``slot`` on; None unless they make a block of the
        finest level. Slots [0, fill) are in use, each with ``per_slot`` columns."""
        whole = rows == self.widths[-1] and slot % rows == 0 and slot + rows <= self.values.shape[2]
        return Preview(slot, fill, rows, per_slot, self) if whole else None

    def overwrite(self, start: int, stop: int, fill: int, logits: Logits, preview: Preview | None = None) -> None:
        """Take in that slots [start, stop) hold new rows and columns; slots [0, fill) are in use. preview: what a loss has found
        of these rows and columns since the last change."""
        assert preview is None or preview.slot == start, "a preview of rows that go elsewhere"
        width = self.widths[-1]
        for slot in range(start - start % width, stop, width):
            self._open_around(slot, fill, logits)
            block = slot // width % self.fan
            self.undo.note(self.values, (-1, block))
            if preview is not None:  # the rows that are new themselves are entered below
                self.values[-1, block, : len(preview.columns)] = preview.columns
            else:
                self.values[-1, block, :fill] = self._blocks(0, fill, slot, 1, width, fill, logits)[0]
        self._enter_rows(start, stop, fill, logits, preview)

    def _open_around(self, slot: int, fill: int, logits: Logits) -> None:
        """Let the blocks around ``slot`` stand open at every level but the finest, and close those that stood open instead."""
        path = [slot // width % self.fan for width in self.widths[:-1]]
        if path == self.open:
            return
        first = next(level for level, block in enumerate(path) if block != self.open[level])
        for level in reversed(range(first, LEVELS - 1)):
            self.undo.note(self.values, (level, self.open[level]))
            self.values[level, self.open[level]] = self.values[level + 1].logsumexp(0)
        for level in range(first, LEVELS - 1):
            self.undo.note(self.values, (level, path[level]))
            self.undo.note(self.values, level + 1)
            self.values[level, path[level]] = -torch.inf
            inside = slot - slot % self.widths[level]
            width = self.widths[level + 1]
            self.values[level + 1, :, :fill] = self._blocks(0, fill, inside, self.fan, width, fill, logits)
        self.open = path
        self.undo.note(self.closed, slice(None))
        self.closed.copy_(self.values[:-1].logsumexp((0, 1)))

    def _enter_rows(self, start: int, stop: int, fill: int, logits: Logits, preview: Preview | None) -> None:
        """Compute rows [start, stop) at every level."""
        inside = 0
        seen = preview if preview is not None and preview.open == self.open else None
        for level, width in enumerate(self.widths):
            self.undo.note(self.values, (level, slice(None), slice(start, stop)))
            if seen is not None:
                self.values[level, :, start:stop] = seen.rows[level]
            else:
                self.values[level, :, start:stop] = self._blocks(start, stop, inside, self.fan, width, fill, logits)
            if level < LEVELS - 1:
                self.values[level, self.open[level], start:stop] = -torch.inf
                inside += self.open[level] * width
        if seen is not None:  # it met the columns that were overwritten
            own = (start - inside) // self.widths[-1]
            self.values[-1, own, start:stop] = self._blocks(start, stop, start, 1, self.widths[-1], fill, logits)[0]
        self.undo.note(self.closed, slice(start, stop))
        self.closed[start:stop] = self.values[:-1, :, start:stop].logsumexp((0, 1))

    def _blocks(self, top: int, bottom: int, slot: int, count: int, width: int, fill: int, logits: Logits) -> Tensor:
        """Log-sum-exp of rows [top, bottom) over ``count`` blocks of ``width`` slots from ``slot`` on, (count, bottom - top)."""
        sums = self.values.new_full((count, bottom - top), -torch.inf)
        end = min(slot + count * width, fill)
        # whole blocks while they fit into a tile, else one block at a time and as many rows of it as fit
        step = width * max(1, min(count, self.tile // (width * (bottom - top))))
        height = max(1, self.tile // step)
        for left in range(slot, end, step):
            used = min(left + step, end)
            block, blocks = (left - slot) // width, -(-(used - left) // width)
            for row in range(top, bottom, height):
                below = min(row + height, bottom)
                part = logits(slice(row, below), slice(left, used))  # (columns, rows)
                per_block = width * len(part) // (used - left)
                sums[block : block + blocks, row - top : below - top] = _block_sums(part, per_block)
        return sums


def _block_sums(logits: Tensor, width: int) -> Tensor:
    """Log-sum-exp of logits (columns, rows) over blocks of ``width`` columns, the last maybe narrower, (blocks, rows)."""
    missing = -len(logits) % width
    if missing:
        logits = F.pad(logits, (0, 0, 0, missing), value=-torch.inf)
    return logits.unflatten(0, (-1, width)).logsumexp(1)

"""Each bank row's log-sum-exp over all bank columns, kept exact while pushes overwrite the ring.

A log-sum-exp cannot be taken back: subtracting an overwritten column from a sum loses digits without bound. So the columns
are divided into blocks, and a block's value is replaced as a whole. Narrow blocks make a push cheap but the table wide; hence
several levels. The top level divides the ring into ``fan`` blocks; of each level one block, the one being overwritten, stands
open and is divided into ``fan`` blocks of the level below. A block is opened by computing its parts from the stored vectors,
and closed by summing them up, so each column is met once per level and turn of the ring: for M rows and pushes of b rows a
push costs O(M * b) on average, and the state holds LEVELS * fan = O((M / b)^(1 / LEVELS)) numbers a row.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from contaccum.methods.undo import Undo

LEVELS = 3
"""At 131,072 rows pushed 8 at a time this makes 79 numbers a row, beside 768 or more for its vectors."""

Logits = Callable[[slice, slice], Tensor]
"""Bank rows and bank slots, both without gaps -> logits (slots * columns per slot, rows), minus infinity where masked."""


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

    def overwrite(self, start: int, stop: int, fill: int, logits: Logits) -> None:
        """Take in that slots [start, stop) hold new rows and columns; slots [0, fill) are in use."""
        width = self.widths[-1]
        for slot in range(start - start % width, stop, width):
            self._open_around(slot, fill, logits)
            self.undo.note(self.values, (-1, slot // width % self.fan))
            self.values[-1, slot // width % self.fan, :fill] = self._blocks(0, fill, slot, 1, width, fill, logits)[0]
        self._enter_rows(start, stop, fill, logits)

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

    def _enter_rows(self, start: int, stop: int, fill: int, logits: Logits) -> None:
        """Compute rows [start, stop) at every level."""
        inside = 0
        for level, width in enumerate(self.widths):
            self.undo.note(self.values, (level, slice(None), slice(start, stop)))
            self.values[level, :, start:stop] = self._blocks(start, stop, inside, self.fan, width, fill, logits)
            if level < LEVELS - 1:
                self.values[level, self.open[level], start:stop] = -torch.inf
                inside += self.open[level] * width
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
                part = F.pad(part, (0, 0, 0, blocks * per_block - len(part)), value=-torch.inf)
                sums[block : block + blocks, row - top : below - top] = part.view(blocks, per_block, -1).logsumexp(1)
        return sums

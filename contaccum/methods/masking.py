"""Which (row, column) pairs the loss leaves out because the passage is known to be relevant for the row.

Found by id, as a list of pairs: known positives are few, and a matrix of flags would be as large as the similarities. Ids
stay on the CPU, where every process has them without communication, so that no device is ever waited for.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from contaccum.batch import NO_PASSAGE


class LeftOut(NamedTuple):
    """Pairs of a matrix, each once, in no order."""

    rows: Tensor  # (pairs,) int64, on the CPU
    columns: Tensor  # (pairs,) int64, on the CPU

    @classmethod
    def nothing(cls) -> "LeftOut":
        return cls(torch.empty(0, dtype=torch.long), torch.empty(0, dtype=torch.long))

    def __len__(self) -> int:
        return len(self.rows)

    def transposed(self) -> "LeftOut":
        return LeftOut(self.columns, self.rows)

    def without(self, rows: Tensor, columns: Tensor) -> "LeftOut":
        """All pairs but these, of which no row has two. rows (n,) ascending, columns (n,)."""
        place = torch.searchsorted(rows, self.rows).clamp(max=len(rows) - 1)
        stays = (rows[place] != self.rows) | (columns[place] != self.columns)
        return LeftOut(self.rows[stays], self.columns[stays])

    def block(self, rows: slice, columns: slice) -> "LeftOut":
        """The pairs within a block of the matrix, counted from its corner."""
        if not len(self):
            return self
        inside = (self.rows >= rows.start) & (self.rows < rows.stop)
        inside &= (self.columns >= columns.start) & (self.columns < columns.stop)
        return LeftOut(self.rows[inside] - rows.start, self.columns[inside] - columns.start)

    def clear(self, logits: Tensor) -> Tensor:
        """Set these places of a matrix to minus infinity, in place."""
        if len(self):
            where = tuple(numbers.to(logits.device, non_blocking=True) for numbers in (self.rows, self.columns))
            logits.index_put_(where, logits.new_full((), -torch.inf))
        return logits


def find_left_out(positives: Tensor, column_ids: Tensor) -> LeftOut:
    """The columns that hold a passage known to be relevant for a row.

    positives (r, P) passage ids padded with NO_PASSAGE; column_ids (c,). Time grows with r * P + c and the pairs found, not
    with r * c.
    """
    rows, columns = torch.arange(len(positives)), torch.arange(len(column_ids))
    if len(column_ids) > positives.numel():  # of the longer side mostly few can match at all
        columns = torch.isin(column_ids, positives).nonzero().squeeze(1)
    else:
        rows = torch.isin(positives, column_ids).any(1).nonzero().squeeze(1)
    if not len(rows) or not len(columns):
        return LeftOut.nothing()
    ids, order = column_ids[columns].sort()
    wanted = positives[rows].flatten()  # (r' * P,)
    first = torch.searchsorted(ids, wanted)
    counts = torch.searchsorted(ids, wanted, right=True) - first
    counts[wanted == NO_PASSAGE] = 0
    row = rows.repeat_interleave(positives.shape[1]).repeat_interleave(counts)
    begin = (counts.cumsum(0) - counts).repeat_interleave(counts)
    column = columns[order[first.repeat_interleave(counts) + torch.arange(len(row)) - begin]]
    pairs = torch.unique(row * len(column_ids) + column)  # a row may list a passage twice
    return LeftOut(pairs // len(column_ids), pairs % len(column_ids))

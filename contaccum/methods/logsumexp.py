"""Log-sum-exp of each stored query over its negatives in the bank, updated by each push.

A push replaces b slots, and so b (1 + H) terms in the sum of every row. Subtracting the old terms
would add a rounding error in every push. But pushes overwrite the slots in order, so it is known
which terms leave the sums next. The ring is divided into blocks of slots. One block is open: the
one that pushes overwrite now. The sum of a row has three parts:

    closed     all other blocks
    new        the slots of the open block that pushes have overwritten since they entered it
    old[k]     the slots of the open block that remain after its first k groups of b slots are
               overwritten

A push adds its columns to ``new`` and moves from old[k] to old[k + 1]. When pushes enter the next
block, ``new`` is the log-sum-exp of the block that they leave, and ``old`` is computed from the
embeddings in the block that they enter. So the logits of a column are computed twice in one turn of
the ring: when the column is pushed, and when its block is opened. With M rows and sqrt(M / b)
groups in a block, a push costs O(M b) on average, and the table has about 2 sqrt(M / b) + 3 numbers
for each row.
"""

import math
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from contaccum.methods.similarity import chunks

Logits = Callable[[slice, slice], Tensor]
"""Function that returns the logits of the queries in r slots and the passages in s slots, (r, s, 1
+ H)."""


class CachedLogSumExp:
    """Log-sum-exp of every row over all columns.

    A slot holds one row (a query) and 1 + H columns (its passages).
    """

    def __init__(
        self, logits: Logits, size: int, push: int, chunk: int, device: torch.device | None
    ) -> None:
        """Create the table of an empty bank.

        logits: function for the logits of stored vectors. size: number of slots, M. push: number of
        slots that a push usually overwrites, b. chunk: number of (row, slot) to compute at once.
        """
        self.logits, self.push, self.chunk = logits, push, chunk
        groups = math.ceil(math.sqrt(size / push))
        self.width = groups * push  # number of slots in a block; the last block may have fewer
        blocks = math.ceil(size / self.width)
        # one tensor, so that one operation reads or writes all numbers of some rows
        self.table = torch.full((2 + groups + 1 + blocks, size), -torch.inf, device=device)
        self.closed, self.new = self.table[0], self.table[1]  # (M,)
        self.old = self.table[2 : 3 + groups]  # (groups + 1, M)
        self.blocks = self.table[3 + groups :]  # (blocks, M); minus infinity for the open block
        # k, the number of groups of the open block that pushes have overwritten
        self.groups_overwritten = 0
        # (part of the table, its content before it was overwritten)
        self._before: list[tuple[Tensor, Tensor]] = []
        self._groups_before = 0

    def total(self, fill: int) -> Tensor:
        """Return the log-sum-exp of each of the first ``fill`` rows over all columns, (fill,)."""
        old = self.old[self.groups_overwritten]
        return torch.stack([self.closed[:fill], self.new[:fill], old[:fill]]).logsumexp(0)

    def overwrite(
        self,
        pieces: list[slice],
        fill: int,
        column_logits: Tensor | None = None,
        row_logits: Tensor | None = None,
    ) -> None:
        """Update the table after a push overwrote the slots in ``pieces``, in this order.

        fill: number of filled slots after the push. column_logits: logits of the r rows that were
        filled before the push and the b pushed slots, (r, b, 1 + H). row_logits: logits of the b
        pushed queries and all stored passages, (b, fill, 1 + H). None: compute them.
        """
        pushed = 0  # number of slots that are in the sums
        for piece in pieces:
            for slots in self._of_blocks(piece):
                if slots.start % self.width == 0:
                    self._open(slots.start // self.width, fill)
                self._save(self.new)
                count = slots.stop - slots.start
                added = (
                    self._over(slots, fill)
                    if column_logits is None
                    else column_logits[:, pushed : pushed + count].logsumexp((1, 2))
                )
                new = self.new[: len(added)]
                torch.logaddexp(new, added, out=new)
                pushed += count
        stop, row = pieces[-1].stop, 0
        for slots in pieces:
            count = slots.stop - slots.start
            self._save(self.table[:, slots])
            self._write_rows(
                slots, stop, fill, None if row_logits is None else row_logits[row : row + count]
            )
            row += count
        self._find_old(stop, fill)

    def load(self, table: Tensor, stop: int) -> None:
        """Restore a saved ``table``. stop: end of the last push before it was saved."""
        self.table.copy_(table)
        self.groups_overwritten = (stop - self._begin(stop)) // self.push

    def compute(self, stop: int, fill: int) -> None:
        """Compute the whole table from the stored vectors.

        stop: end of the last push. fill: number of filled slots.
        """
        self._write_rows(slice(0, fill), stop, fill)
        self._find_old(stop, fill)

    def begin_step(self) -> None:
        """Begin an optimizer step: ``rollback`` will restore the table as it is now."""
        self._before = []
        self._groups_before = self.groups_overwritten

    def rollback(self) -> None:
        """Restore exactly the table that ``begin_step`` found."""
        for part, before in reversed(self._before):
            part.copy_(before)
        self._before = []
        self.groups_overwritten = self._groups_before

    def _of_blocks(self, slots: slice) -> Iterator[slice]:
        """Divide slots at the ends of the blocks."""
        start = slots.start
        while start < slots.stop:
            stop = min(slots.stop, (start // self.width + 1) * self.width)
            yield slice(start, stop)
            start = stop

    def _save(self, part: Tensor) -> None:
        """Keep a copy of a part of the table that is about to be overwritten."""
        self._before.append((part, part.clone()))

    def _open(self, block: int, fill: int) -> None:
        """Close the open block, and open ``block``."""
        self._save(self.table[: 2 + len(self.old)])  # closed, new, old
        # the block before block 0 is the last block of the ring, at index -1
        self._save(self.blocks[block - 1])
        self._save(self.blocks[block])
        self.blocks[block - 1] = self.new
        self.blocks[block].fill_(-torch.inf)
        torch.logsumexp(self.blocks, 0, out=self.closed)
        self.new.fill_(-torch.inf)
        self.old.fill_(-torch.inf)
        # the push that opens the block overwrites its first group at once
        remaining = self._after_first_group(block, fill)
        if remaining.start == remaining.stop:
            return
        for rows in chunks(fill, self.chunk // (remaining.stop - remaining.start)):
            self._write_old(rows, self.logits(rows, remaining))

    def _write_rows(self, rows: slice, stop: int, fill: int, logits: Tensor | None = None) -> None:
        """Compute all numbers of ``rows``.

        stop: end of the last push. fill: number of filled slots. logits: logits of the rows and all
        stored passages, (r, fill, 1 + H). None: compute them.
        """
        block = (stop - 1) // self.width  # the open block
        count = rows.stop - rows.start
        for part in chunks(count, self.chunk // fill if logits is None else count):
            of_part = slice(rows.start + part.start, rows.start + part.stop)
            # (r, fill, 1 + H)
            values = self.logits(of_part, slice(0, fill)) if logits is None else logits[part]
            sums = _sums(values, self.width)  # (blocks with a filled slot, r)
            self.blocks[: len(sums), of_part] = sums
            self.blocks[block, of_part].fill_(-torch.inf)
            self.closed[of_part] = self.blocks[:, of_part].logsumexp(0)
            self.new[of_part] = values[:, block * self.width : stop].logsumexp((1, 2))
            self.old[:, of_part].fill_(-torch.inf)
            self._write_old(of_part, values[:, self._after_first_group(block, fill)])

    def _begin(self, stop: int) -> int:
        """Return the first slot of the block that a push up to ``stop`` has opened."""
        return (stop - 1) // self.width * self.width

    def _after_first_group(self, block: int, fill: int) -> slice:
        """Return the filled slots of a block except its first group."""
        begin, end = block * self.width, min((block + 1) * self.width, fill)
        return slice(min(begin + self.push, end), end)

    def _write_old(self, rows: slice, logits: Tensor) -> None:
        """Compute ``old``, which contains only minus infinity, for r rows.

        logits: logits of the rows and the open block except its first group, (r, s, 1 + H).
        """
        if logits.shape[1]:
            sums = _sums(logits, self.push)  # (groups, r)
            # old[k] is the sum over the groups k, k + 1 and so on, so the sums are added up from
            # the last group on
            self.old[1 : 1 + len(sums), rows] = sums.flip(0).logcumsumexp(0).flip(0)

    def _find_old(self, stop: int, fill: int) -> None:
        """Set k for an open block that is overwritten up to ``stop``.

        If ``stop`` is inside a group, compute old[k].
        """
        begin = self._begin(stop)
        k, overwritten = divmod(stop - begin, self.push)
        self.groups_overwritten = k
        if overwritten:  # the rest of the group remains, in addition to the groups after it
            self._save(self.old[k])
            self.old[k] = self.old[k + 1]
            end = min(begin + (k + 1) * self.push, begin + self.width, fill)
            if stop < end:
                old = self.old[k, :fill]
                torch.logaddexp(old, self._over(slice(stop, end), fill), out=old)

    def _over(self, slots: slice, fill: int) -> Tensor:
        """Return the log-sum-exp of all filled rows over the columns in ``slots``, (fill,)."""
        parts = chunks(fill, self.chunk // (slots.stop - slots.start))
        return torch.cat([self.logits(rows, slots).logsumexp((1, 2)) for rows in parts])


def _sums(logits: Tensor, width: int) -> Tensor:
    """Return the log-sum-exps over each ``width`` slots, (blocks, r). logits: (r, slots, 1 + H).

    The last block may be shorter.
    """
    missing = -logits.shape[1] % width
    if missing:
        logits = F.pad(logits, (0, 0, 0, missing), value=-torch.inf)
    return logits.unflatten(1, (-1, width)).logsumexp((2, 3)).T

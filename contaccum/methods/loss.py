"""InfoNCE over current and banked rows and columns: the only cross-entropy in the project, and the rule of who meets whom.

A row is a query, a column a candidate passage. A row's loss is  -log( exp(s+/t) / sum over columns of exp(s/t) ), t the
temperature, s an inner product, s+ the row's own positive. The similarity matrix of current and bank rows against current
and bank columns has four blocks:

                      current columns      bank columns
    current rows      gradient to both     gradient to the rows
    bank rows         gradient to columns  constant: the bank keeps its log-sum-exp

so no block is ever larger than what one push adds to it, and the cost of a bank is linear in its size.
Sources: van den Oord et al. 2018 (arXiv 1807.03748); Karpukhin et al. 2020 (arXiv 2004.04906), eq. 2; Kim et al. 2024 (arXiv
2406.12356), eq. 5-9.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from contaccum.batch import RowIds

TILE = 1 << 22
"""Similarities held at once: a larger block is taken in tiles of rows, each recomputed in the backward pass."""


class LossValue(NamedTuple):
    """The loss, and what it was taken over."""

    value: Tensor
    """Mean over rows, with gradient; scalar."""
    negatives: Tensor
    """Negatives that a current row meets, masked ones not counted, mean over the current rows; scalar."""
    masked: Tensor
    """(row, column) pairs of the current rows that were left out as false negatives; scalar."""

    def detach(self) -> "LossValue":
        return LossValue(*(number.detach() for number in self))

    def weighted(self, weight: float) -> "LossValue":
        """The same, the loss times ``weight``: what it counts for in the mean over a step's micro-batches."""
        return self._replace(value=self.value * weight)


class BankRows(Protocol):
    """What the loss needs of a bank; M' is its fill."""

    passages: Tensor  # (M, columns per row, d)
    column_ids: Tensor  # (M, columns per row)
    queries: Tensor | None  # (M, d), None when no query is banked
    positives: Tensor  # (M, P)
    positive_logits: Tensor  # (M,)
    row_weight: str

    @property
    def fill(self) -> int: ...  # how many rows, from the first on, may be used

    def logsumexp(self) -> Tensor: ...  # (fill,)


def relevant(positives: Tensor, column_ids: Tensor) -> Tensor:
    """Which columns hold a passage known to be relevant for a row.

    positives (r, P) passage ids padded with NO_PASSAGE; column_ids (c,). Returns (r, c) bool.
    """
    found = torch.zeros(len(positives), len(column_ids), dtype=torch.bool, device=column_ids.device)
    for wanted in positives.T:  # one (r, c) comparison at a time: (r, c, P) could be large
        found |= wanted.unsqueeze(1) == column_ids
    return found


class InfoNCE:
    """The loss of one micro-batch (or of a whole step, in the two-pass methods) against itself and a bank."""

    def __init__(self, temperature: float, mask_false_negatives: bool = True, tile: int = TILE) -> None:
        """
        temperature: divides every similarity.
        mask_false_negatives: leave out columns whose passage is known to be relevant for the row, other than its own positive.
        tile: similarities held at once (see TILE).
        """
        self.temperature = temperature
        self.mask_false_negatives = mask_false_negatives
        self.tile = tile

    def __call__(
        self,
        queries: Tensor,
        passages: Tensor,
        ids: RowIds,
        *,
        columns: BankRows | None = None,
        rows: BankRows | None = None,
    ) -> LossValue:
        """
        queries (b, d); passages (b, 1 + H, d), the positive first; ids of all b rows. Both carry gradient for the rows of this
        process alone. columns: a bank whose passages are further columns; rows: a bank whose queries are further rows (it then
        gives columns too). The mean is over current and bank rows, or over the current rows, as the bank's row_weight says.
        """
        b, per_row, _ = passages.shape
        current, current_ids = passages.flatten(0, 1), ids.columns.flatten()  # (b * (1 + H), d)
        own = torch.arange(b, device=queries.device) * per_row  # the column of each row's positive
        denominator, positive, masked = self.contrast(queries, current, ids.positives, current_ids, own)
        n_columns, n_rows = len(current), b
        if columns is not None and columns.fill:
            stored, stored_ids = (
                columns.passages[: columns.fill].flatten(0, 1),
                columns.column_ids[: columns.fill].flatten(),
            )
            against_bank, _, masked_in_bank = self.contrast(queries, stored, ids.positives, stored_ids)
            denominator = torch.logaddexp(denominator, against_bank)  # (b,)
            masked = masked + masked_in_bank
            n_columns += len(stored)
        total = (denominator - positive).sum()
        if rows is not None and rows.queries is not None and rows.fill:
            total = total + self._bank_rows(rows, rows.queries, current, current_ids)
            n_rows += rows.fill if rows.row_weight == "all" else 0
        return LossValue(total / n_rows, n_columns - 1 - masked / b, masked)

    def _bank_rows(self, bank: BankRows, queries: Tensor, columns: Tensor, column_ids: Tensor) -> Tensor:
        """Sum of the losses of all bank rows: they have no gradient of their own, but push current passages away."""
        against_current, _, _ = self.contrast(
            queries[: bank.fill], columns, bank.positives[: bank.fill], column_ids
        )  # (M',)
        return (torch.logaddexp(against_current, bank.logsumexp()) - bank.positive_logits[: bank.fill]).sum()

    def contrast(
        self, rows: Tensor, columns: Tensor, positives: Tensor, column_ids: Tensor, own: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rows against one block of columns.

        rows (r, d); columns (c, d); positives (r, P); column_ids (c,); own (r,): which column is the row's own positive, never
        masked, or None where the block does not hold it. Returns the log-sum-exp of each row (r,), the logit of each row's own
        positive (r,) or nothing (0,), and the number of masked pairs ().
        """
        height = max(1, self.tile // max(1, len(columns)))
        owns = own.split(height) if own is not None else [None] * -(-len(rows) // height)
        remake = len(rows) > height and torch.is_grad_enabled()
        parts = []
        for tile in zip(rows.split(height), positives.split(height), owns, strict=True):
            if remake:
                part = checkpoint(self._tile, columns, column_ids, *tile, use_reentrant=False, preserve_rng_state=False)
            else:
                part = self._tile(columns, column_ids, *tile)
            parts.append(part)
        sums, kept, masked = zip(*parts, strict=True)
        return torch.cat(sums), torch.cat(kept), torch.stack(masked).sum()

    def _tile(
        self, columns: Tensor, column_ids: Tensor, rows: Tensor, positives: Tensor, own: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        mask = self.false_negatives(positives, column_ids)
        if mask is not None and own is not None:
            mask.scatter_(1, own.unsqueeze(1), False)
        logits = self.logits(rows, columns, mask)
        kept = logits.new_empty(0) if own is None else logits.gather(1, own.unsqueeze(1)).squeeze(1)
        masked = logits.new_zeros(()) if mask is None else mask.sum()
        return logits.logsumexp(1), kept, masked

    def false_negatives(self, positives: Tensor, column_ids: Tensor) -> Tensor | None:
        """Which columns to leave out for which rows, (r, c) bool, a row's own positive among them; None when masking is off."""
        return relevant(positives, column_ids) if self.mask_false_negatives else None

    def logits(self, rows: Tensor, columns: Tensor, mask: Tensor | None) -> Tensor:
        """Similarities over the temperature, (r, c) float32, minus infinity where masked."""
        with torch.autocast(rows.device.type, enabled=False):
            logits = rows @ columns.T / self.temperature
        return logits if mask is None else logits.masked_fill(mask, -torch.inf)

"""InfoNCE over current and banked rows and columns: the only cross-entropy in the project, and the rule of who meets whom.

A row is a query, a column a candidate passage. A row's loss is  -log( exp(s+/t) / sum over columns of exp(s/t) ), t the
temperature, s an inner product, s+ the row's own positive. The similarity matrix of current and bank rows against current
and bank columns has four blocks:

                      current columns      bank columns
    current rows      gradient to both     gradient to the rows
    bank rows         gradient to columns  constant: the bank keeps its log-sum-exp

so no block is ever larger than what one push adds to it, and the cost of a bank is linear in its size. Loss and gradients
are taken together, tile by tile, while a tile's similarities are at hand: none outlives its tile, and none is computed twice.
Sources: van den Oord et al. 2018 (arXiv 1807.03748); Karpukhin et al. 2020 (arXiv 2004.04906), eq. 2; Kim et al. 2024 (arXiv
2406.12356), eq. 5-9; the running maximum over tiles: Milakov and Gimelshein 2018 (arXiv 1805.02867).
"""

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from contaccum.batch import RowIds
from contaccum.methods.logsumexp import Preview
from contaccum.methods.masking import LeftOut, find_left_out

TILE = 1 << 20
"""Similarities held at once."""


class LossValue(NamedTuple):
    """The loss, and what it was taken over; of several widths, the whole one's counts."""

    contrast: Tensor
    """InfoNCE: the mean over rows, with gradient; scalar."""
    negatives: Tensor
    """Negatives that a current row meets, masked ones not counted, mean over the current rows; scalar."""
    masked: Tensor
    """(row, column) pairs of the current rows that were left out as false negatives; scalar."""
    row_weight: Tensor
    """Weight of each row, current or banked, in ``contrast``; scalar."""
    distilled: Tensor | None = None
    """What a teacher's scores add (contaccum.methods.distillation), with gradient; scalar."""
    previews: tuple[Preview | None, ...] = ()
    """For each bank that gave rows and columns (the whole width's, then the narrower ones') what its next push can take over."""

    @property
    def value(self) -> Tensor:
        """What is differentiated; scalar."""
        return self.contrast if self.distilled is None else self.contrast + self.distilled

    def detach(self) -> "LossValue":
        """What the log keeps: no graph, no previews."""
        distilled = None if self.distilled is None else self.distilled.detach()
        return self._replace(contrast=self.contrast.detach(), distilled=distilled, previews=())

    def weighted(self, rows: float, pairs: float | None = None) -> "LossValue":
        """The same, times what it counts for in the mean over a step's micro-batches: ``rows`` for InfoNCE, whose rows may be
        banked too, ``pairs`` (not given: the same) for the teacher's part."""
        taught = None if self.distilled is None else self.distilled * (rows if pairs is None else pairs)
        return self._replace(contrast=self.contrast * rows, distilled=taught)

    def plus(self, other: "LossValue", weight: float) -> "LossValue":
        """The same, ``weight`` times the losses of ``other`` added."""
        pairs = zip((self.contrast, self.distilled), (other.contrast, other.distilled), strict=True)
        contrast, distilled = (None if one is None or two is None else one + weight * two for one, two in pairs)
        assert contrast is not None
        return self._replace(contrast=contrast, distilled=distilled, previews=self.previews + other.previews)


class BankRows(Protocol):
    """What the loss needs of a bank; M' is its fill. Ids are on the CPU, everything else on the device."""

    passages: Tensor  # (M, columns per row, d)
    column_ids: Tensor  # (M, columns per row)
    queries: Tensor | None  # (M, d), None when no query is banked
    positives: Tensor  # (M, P)
    positive_logits: Tensor  # (M,)
    row_weight: str

    @property
    def fill(self) -> int: ...  # how many rows, from the first on, may be used

    def logsumexp(self) -> Tensor: ...  # (fill,)

    def falls(self) -> Tensor | None: ...  # (fill,), by how much age lowers the logits of a stored and a current vector

    def preview(self, rows: int, columns: int) -> Preview | None: ...  # to be filled for a push of so many


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
        queries (b, d); passages (b, 1 + H, d), the positive first; ids of all b rows, on the CPU. Both carry gradient for the
        rows of this process alone. columns: a bank whose passages are further columns; rows: a bank whose queries are further
        rows (it then gives columns too). The mean is over current and bank rows, or over the current rows, as the bank's
        row_weight says.
        """
        current = passages.flatten(0, 1)  # (b * (1 + H), d)
        with torch.no_grad(), torch.autocast(queries.device.type, enabled=False):
            preview = rows.preview(*passages.shape[:2]) if rows is not None and rows is columns else None
            sums = _Sums(self, queries.detach(), current.detach(), preview)
            sums.add_current_rows(ids, columns if columns is not None and columns.fill else None)
            n_rows = len(queries)
            if rows is not None and rows.queries is not None and rows.fill:
                sums.add_bank_rows(rows, rows.queries, ids.columns.flatten())
                n_rows += rows.fill if rows.row_weight == "all" else 0
        value = _WithGradients.apply(queries, current, sums.total, sums.for_queries, sums.for_columns) / n_rows
        met = sums.columns_met - 1 - sums.masked / len(queries)
        negatives, masked, weight = (value.new_full((), number) for number in (met, sums.masked, 1 / n_rows))
        return LossValue(value, negatives, masked, weight, previews=(preview,))

    def left_out(self, positives: Tensor, column_ids: Tensor) -> LeftOut:
        """Which columns (c,) to leave out for which rows (r, P), a row's own positive among them; none when masking is off."""
        return find_left_out(positives, column_ids) if self.mask_false_negatives else LeftOut.nothing()

    def logits(self, rows: Tensor, columns: Tensor, left_out: LeftOut) -> Tensor:
        """Similarities over the temperature, (r, c) float32, minus infinity where left out."""
        with torch.autocast(rows.device.type, enabled=False):
            if len(rows) >= len(columns):
                return left_out.clear(self._products(rows, columns))
            # a short matrix times a long one takes half as long again as the other way round
            return left_out.clear(self._products(columns, rows).T.contiguous())

    def _products(self, left: Tensor, right: Tensor) -> Tensor:
        return torch.addmm(left.new_empty(()), left, right.T, beta=0, alpha=1 / self.temperature)


class _Sums:
    """Sum of the rows' losses and its gradients for queries (b, d) and columns (c, d), gathered tile by tile."""

    def __init__(self, loss: InfoNCE, queries: Tensor, columns: Tensor, preview: Preview | None) -> None:
        self.loss, self.queries, self.columns, self.preview = loss, queries, columns, preview
        self.total = queries.new_zeros(())
        self.for_queries = torch.zeros_like(queries)
        self.for_columns = torch.zeros_like(columns)
        self.masked = self.columns_met = 0

    def add_current_rows(self, ids: RowIds, bank: BankRows | None) -> None:
        """The upper blocks: each current row against the current columns and the bank's."""
        b, c = len(self.queries), len(self.columns)
        own = torch.arange(b, device=self.queries.device) * (c // b)  # the column of each row's positive
        falls = None if bank is None else bank.falls()
        near = self.loss.left_out(ids.positives, ids.columns.flatten()).without(torch.arange(b), own.cpu())
        stored, far = self.queries.new_empty(0, self.queries.shape[1]), LeftOut.nothing()
        if bank is not None:
            stored = bank.passages[: bank.fill].flatten(0, 1)
            far = self.loss.left_out(ids.positives, bank.column_ids[: bank.fill].flatten())
            if falls is not None:
                falls = falls.repeat_interleave(bank.passages.shape[1])
        self.masked, self.columns_met = len(near) + len(far), c + len(stored)
        for tile in _tiles(b, self.loss.tile // c):
            rows = self.queries[tile]
            logits = self.loss.logits(rows, self.columns, near.block(tile, slice(0, c)))  # (r, c)
            positive = logits.gather(1, own[tile].unsqueeze(1)).squeeze(1)
            denominator = logits.logsumexp(1)
            if len(stored):
                against_bank, mean = self._against_bank(tile, stored, falls, far.block(tile, slice(0, len(stored))))
                denominator = torch.logaddexp(denominator, against_bank)
                self.for_queries[tile] += (against_bank - denominator).exp().unsqueeze(1) * mean
            self.total += (denominator - positive).sum()
            weights = logits.sub_(denominator.unsqueeze(1)).exp_()  # (r, c), what the softmax gives each column
            weights.scatter_add_(1, own[tile].unsqueeze(1), weights.new_full((len(rows), 1), -1))
            self.for_queries[tile].addmm_(weights, self.columns, alpha=1 / self.loss.temperature)
            self.for_columns.addmm_(weights.T, rows, alpha=1 / self.loss.temperature)

    def _against_bank(
        self, current: slice, stored: Tensor, falls: Tensor | None, left_out: LeftOut
    ) -> tuple[Tensor, Tensor]:
        """Log-sum-exp of ``current`` rows over bank columns (m, d), (r,), and its gradient for the rows, (r, d)."""
        rows = self.queries[current]
        highest = rows.new_full((len(rows), 1), torch.finfo(rows.dtype).min)
        mass, mean = rows.new_zeros(len(rows), 1), torch.zeros_like(rows)
        for tile in _tiles(len(stored), self.loss.tile // len(rows)):
            logits = self.loss.logits(rows, stored[tile], left_out.block(slice(0, len(rows)), tile))  # (r, t)
            if falls is not None:
                logits.sub_(falls[tile])
            if self.preview is not None:
                self.preview.take(current, tile.start, logits)
            raised = torch.maximum(highest, logits.amax(1, keepdim=True))
            shrink = (highest - raised).exp()
            weights = logits.sub_(raised).exp_()
            mass = mass * shrink + weights.sum(1, keepdim=True)
            mean = mean.mul_(shrink).addmm_(weights, stored[tile])
            highest = raised
        # a row all of whose columns are left out has no mass: its log-sum-exp is minus infinity, its gradient zero
        mean /= mass.clamp(min=torch.finfo(rows.dtype).tiny) * self.loss.temperature
        return (highest + mass.log()).squeeze(1), mean

    def add_bank_rows(self, bank: BankRows, queries: Tensor, column_ids: Tensor) -> None:
        """The lower left block: bank rows have no gradient of their own, but push current passages away."""
        left_out = self.loss.left_out(bank.positives[: bank.fill], column_ids).transposed()
        kept, falls = bank.logsumexp(), bank.falls()
        for tile in _tiles(bank.fill, self.loss.tile // len(self.columns)):
            block = left_out.block(slice(0, len(column_ids)), tile)
            logits = self.loss.logits(
                self.columns, queries[tile], block
            )  # (c, r): sums run fastest over the outer side
            if falls is not None:
                logits.sub_(falls[tile])
            over_columns = logits.logsumexp(0)
            if self.preview is not None:
                self.preview.columns[tile] = over_columns
            denominator = torch.logaddexp(over_columns, kept[tile])
            self.total += (denominator - bank.positive_logits[tile]).sum()
            weights = logits.sub_(denominator).exp_()
            self.for_columns.addmm_(weights, queries[tile], alpha=1 / self.loss.temperature)


def _tiles(count: int, height: int) -> list[slice]:
    """``count`` rows in slices of ``height``, at least one row each."""
    height = max(1, height)
    return [slice(start, min(start + height, count)) for start in range(0, count, height)]


class _WithGradients(torch.autograd.Function):
    """Lets autograd know a scalar's gradients, which were computed along with it."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, columns: Tensor, total: Tensor, *gradients: Tensor) -> Tensor:
        ctx.save_for_backward(*gradients)
        return total.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        for_queries, for_columns = ctx.saved_tensors
        return upstream * for_queries, upstream * for_columns, None, None, None

"""InfoNCE loss and its gradients. The rows and columns come from the current micro-batch and from the bank.

A row is a query, and a column is a candidate passage. Current rows and columns belong to the micro-batch; the bank contains past
rows and columns. The loss of a row is

    -log( exp(s+/t) / sum over columns of exp(s/t) )

where t is the temperature, s is the inner product of row and column, and s+ is the inner product of the row and its own positive.
With hardness a, the term of each negative is multiplied by exp(a * s), whose gradient is stopped. The similarity matrix has
four blocks:

                      current columns       bank columns
    current rows      gradient for both     gradient for rows
    bank rows         gradient for columns  no gradient

The bank stores the log-sum-exps of the last block, so that the loss does not compute this block. Therefore the cost of a bank is
linear in its size. The matrix is computed in tiles, and the gradients are computed together with the loss. Only one tile is in
memory at a time, and no similarity is computed twice.
Sources: van den Oord et al. 2018 (arXiv 1807.03748); Karpukhin et al. 2020 (arXiv 2004.04906), eq. 2; Kim et al. 2024 (arXiv
2406.12356), eq. 5-9; the running maximum over tiles: Milakov and Gimelshein 2018 (arXiv 1805.02867); hardness: Lan et al. 2025
(arXiv 2503.04812), eq. 5, here for all negatives.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from contaccum.batch import MicroBatch, RowIds
from contaccum.methods.bank import Bank
from contaccum.methods.directions import PassageToQuery, QueryToPassage
from contaccum.methods.logsumexp import PartialLogSumExp
from contaccum.methods.masking import NO_RULES, PairRules
from contaccum.methods.similarity import Similarity, full_precision


class LossValue(NamedTuple):
    """Loss of one micro-batch or step, with statistics for the log. With Matryoshka, the statistics are of the full vectors."""

    contrast: Tensor
    """InfoNCE loss: the mean over the rows. Scalar with gradient."""
    negatives: Tensor
    """Mean number of unmasked negatives per query of the current batch. Scalar."""
    masked: Tensor
    """Number of (current row, column) pairs that are masked because the column is a known positive of the row. Scalar."""
    row_weight: Tensor
    """Weight of one row in ``contrast``. Scalar, because all current rows and bank rows have the same weight."""
    filtered: Tensor | None = None
    """Number of (current row, column) pairs that only the similarity rule masks. Scalar; None without a similarity rule."""
    distilled: Tensor | None = None
    """Distillation loss (see ``contaccum.methods.objective.Distillation``). Scalar with gradient; None without distillation."""
    partials: tuple[PartialLogSumExp | None, ...] = ()
    """Log-sum-exps that are reused when the current rows are pushed into the bank: one element per width, full width first."""
    replayed: tuple[float, float] | None = None
    """Partial replay: ratio of encoded texts to all texts, and relative variance (see ``replay_sample``). Otherwise None."""
    counted_share: float = 1.0
    """Ratio d / s: ``contrast`` is the sum of the losses of s rows, divided by d.

    The ratio is below 1 only if ``bank.row_weight`` is ``current``: d counts only current rows, and s also counts bank rows.
    """

    @property
    def value(self) -> Tensor:
        """InfoNCE loss plus distillation loss. Training differentiates this scalar."""
        return self.contrast if self.distilled is None else self.contrast + self.distilled

    @property
    def mean(self) -> Tensor:
        """Loss for the log: InfoNCE loss as a mean over all current and bank rows, plus distillation loss."""
        return self.value - self.contrast * (1 - self.counted_share)

    def detach(self) -> "LossValue":
        """Return a copy for the log, without graph and without ``partials``."""
        distilled = None if self.distilled is None else self.distilled.detach()
        return self._replace(contrast=self.contrast.detach(), distilled=distilled, partials=())

    def weighted(self, rows: float, pairs: float | None = None) -> "LossValue":
        """Return a copy with the InfoNCE loss times ``rows``, and the distillation loss times ``pairs`` (default: ``rows``)."""
        distilled = None if self.distilled is None else self.distilled * (rows if pairs is None else pairs)
        return self._replace(contrast=self.contrast * rows, distilled=distilled)

    def plus(self, other: "LossValue", weight: float) -> "LossValue":
        """Return the sum of this loss and ``weight`` times ``other``. The result has the ``partials`` of both."""
        pairs = zip((self.contrast, self.distilled), (other.contrast, other.distilled), strict=True)
        contrast, distilled = (None if one is None or two is None else one + weight * two for one, two in pairs)
        assert contrast is not None
        return self._replace(contrast=contrast, distilled=distilled, partials=self.partials + other.partials)


def row_weights(micro_batches: Sequence[MicroBatch], bank: Bank | None = None) -> list[float]:
    """Return the weight of each micro-batch in the mean loss of the step.

    The loss of a micro-batch is a mean over its rows, so its weight is proportional to its number of rows. This number is the
    number of pairs plus the value of ``bank.weighted_rows`` at the beginning of the step. With these weights, all rows of the
    step count equally, unless the bank grows during the step. If all micro-batches have the same size, all weights are 1.
    """
    rows = [len(batch.ids.columns) + (bank.weighted_rows if bank else 0) for batch in micro_batches]
    return [len(rows) * count / sum(rows) for count in rows]


class InfoNCE:
    """InfoNCE loss of one micro-batch or of a whole step. A bank is optional."""

    def __init__(
        self,
        temperature: float,
        mask_false_negatives: bool = True,
        tile: int | None = None,
        rules: PairRules = NO_RULES,
        hardness: float = 0.0,
        symmetric: bool = False,
    ) -> None:
        self.similarity = Similarity(temperature, mask_false_negatives, tile, rules, hardness)
        self.symmetric = symmetric

    def __call__(
        self,
        queries: Tensor,
        passages: Tensor,
        ids: RowIds,
        *,
        columns: Bank | None = None,
        rows: Bank | None = None,
    ) -> LossValue:
        """Return the mean loss over the current rows and the bank rows.

        queries: (b, d). passages: (b, 1 + H, d), where the first passage of each query is its positive. ids: passage ids of the
        b rows, on the CPU. The b rows come from all processes, but only the rows of this process have a gradient. columns: bank
        whose passages are additional columns. rows: bank whose queries are additional rows. If ``rows`` is set, ``columns``
        must be the same bank.
        """
        current = passages.flatten(0, 1)  # (b * (1 + H), d)
        b = len(queries)
        with torch.no_grad(), full_precision(queries.device):
            partial = rows.partial(*passages.shape[:2]) if rows is not None and rows is columns else None
            bank = columns if columns is not None and columns.fill else None
            stored = rows if rows is not None and rows.queries is not None and rows.fill else None
            sums = QueryToPassage(self.similarity, queries.detach(), current.detach(), bank, partial)
            sums.add_current_rows(ids, bank)
            if stored is not None:
                sums.add_bank_queries(ids, stored)
            if self.symmetric:
                positives = passages[:, 0].detach()
                sums.average(PassageToQuery(self.similarity, queries.detach(), positives, ids, stored))
        # rows in the denominator, and rows in the sum
        n_counted, n_summed = (b, b) if stored is None else (b + stored.weighted_rows, b + stored.fill)
        value = _WithGradients.apply(queries, current, sums.total, sums.for_rows, sums.for_columns) / n_counted
        found = (sums.n_columns - 1 - sums.n_masked / b, sums.n_masked, 1 / n_counted)
        negatives, masked, weight = (value.new_full((), number) for number in found)
        kept, by_similarity = sums.counts.unbind()
        if self.similarity.rules:
            negatives = kept / b - 1  # a row's own positive is always kept
        filtered = None if self.similarity.rules.margin is None else by_similarity
        share = n_counted / n_summed
        return LossValue(value, negatives, masked, weight, filtered, partials=(partial,), counted_share=share)


class _WithGradients(torch.autograd.Function):
    """Autograd function for a loss whose value and gradients are already computed. Its backward pass uses these gradients."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, columns: Tensor, total: Tensor, *gradients: Tensor) -> Tensor:
        ctx.save_for_backward(*gradients)
        return total.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        for_queries, for_columns = ctx.saved_tensors
        return upstream * for_queries, upstream * for_columns, None, None, None

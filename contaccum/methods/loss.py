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
from contaccum.methods.logsumexp import PartialLogSumExp
from contaccum.methods.masking import NO_RULES, PairRows, PairRules
from contaccum.methods.similarity import MaskedPairs, Similarity, full_precision, tiles
from contaccum.methods.symmetric import PassageToQuery


class LossValue(NamedTuple):
    """Loss of one micro-batch or step, with statistics for the log. With Matryoshka, the statistics are of the full vectors."""

    contrast: Tensor
    """InfoNCE loss: the mean over the rows. Scalar with gradient."""
    negatives: Tensor
    """Mean number of unmasked negatives per query of the current batch. Scalar."""
    masked: Tensor
    """Number of (current row, column) pairs that are masked because the column is a known positive of the row. Scalar."""
    row_weight: Tensor
    """Weight of each row in ``contrast``, the same for current rows and bank rows. Scalar."""
    filtered: Tensor | None = None
    """Number of other (current row, column) pairs that the similarity rule masked. Scalar; None without a similarity rule."""
    distilled: Tensor | None = None
    """Distillation loss (see ``contaccum.methods.objective.Distillation``). Scalar with gradient; None without distillation."""
    partials: tuple[PartialLogSumExp | None, ...] = ()
    """Log-sum-exps that the push of the current rows reuses: one element for the bank of each width, the full width first."""
    replayed: tuple[float, float] | None = None
    """Partial replay: share of the texts that were encoded, and relative variance that the sampling added."""
    counted_share: float = 1.0
    """Number of rows in the denominator of ``contrast``, divided by the number of rows in the sum.

    Below 1 only if the sum has bank rows that the denominator does not count (``bank.row_weight`` is ``current``).
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
        """Return these losses plus ``weight`` times the losses of ``other``, with the partial log-sum-exps of both."""
        pairs = zip((self.contrast, self.distilled), (other.contrast, other.distilled), strict=True)
        contrast, distilled = (None if one is None or two is None else one + weight * two for one, two in pairs)
        assert contrast is not None
        return self._replace(contrast=contrast, distilled=distilled, partials=self.partials + other.partials)


def row_weights(micro_batches: Sequence[MicroBatch], bank: Bank | None = None) -> list[float]:
    """Return the weight of each micro-batch in the mean loss of the step.

    The loss of a micro-batch is a mean over its rows, so its weight is proportional to its number of rows. The rows of a
    micro-batch are its pairs, plus ``bank.weighted_rows`` at the beginning of the step. All rows of the step then count equally,
    unless the bank grows during the step. If all micro-batches have the same size, all weights are 1.
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
        with torch.no_grad(), full_precision(queries.device):
            partial = rows.partial(*passages.shape[:2]) if rows is not None and rows is columns else None
            bank = columns if columns is not None and columns.fill else None
            penalty = bank.age_penalty() if bank is not None else None
            sums = _Sums(self.similarity, queries.detach(), current.detach(), partial, penalty)
            sums.add_current_rows(ids, bank)
            n_counted = n_summed = len(queries)  # rows in the denominator, and rows in the sum
            if rows is not None and rows.queries is not None and rows.fill:
                sums.add_bank_rows(rows, rows.queries, ids.columns.flatten())
                n_counted, n_summed = n_counted + rows.weighted_rows, n_summed + rows.fill
            if self.symmetric:
                stored = rows if n_summed > len(queries) else None
                sums.average(PassageToQuery(self.similarity, queries.detach(), passages[:, 0].detach(), ids, stored))
        value = _WithGradients.apply(queries, current, sums.total, sums.for_queries, sums.for_columns) / n_counted
        found = (sums.n_columns - 1 - sums.n_masked / len(queries), sums.n_masked, 1 / n_counted)
        negatives, masked, weight = (value.new_full((), number) for number in found)
        kept, by_similarity = sums.counts.unbind()
        if self.similarity.rules:
            negatives = kept / len(queries) - 1  # a row's own positive is always kept
        filtered = None if self.similarity.rules.margin is None else by_similarity
        share = n_counted / n_summed
        return LossValue(value, negatives, masked, weight, filtered, partials=(partial,), counted_share=share)


class _Sums:
    """Sum of the losses of all rows, and its gradients for the current queries (b, d) and columns (c, d)."""

    def __init__(
        self,
        similarity: Similarity,
        queries: Tensor,
        columns: Tensor,
        partial: PartialLogSumExp | None,
        penalty: Tensor | None,
    ) -> None:
        self.similarity, self.queries, self.columns = similarity, queries, columns
        self.partial, self.penalty, self.tile = partial, penalty, similarity.tile_on(queries.device)
        self.scale = 1 / similarity.temperature
        self.total = queries.new_zeros(())
        self.for_queries = torch.zeros_like(queries)
        self.for_columns = torch.zeros_like(columns)
        self.n_masked = self.n_columns = 0
        # numbers of (current row, column) pairs: kept by the rules, masked by the similarity rule; 0 without rules
        self.counts = queries.new_zeros(2, dtype=torch.long)

    def add_current_rows(self, ids: RowIds, bank: Bank | None) -> None:
        """Add the losses and gradients of the current rows over the current columns and the columns of ``bank``.

        The loss of a row is ``log_sum - positive``, where ``log_sum`` is the log-sum-exp of the row's logits. The gradient of
        this loss for a logit is exp(logit - log_sum), minus 1 for the row's own positive.
        """
        b, c = len(self.queries), len(self.columns)
        own = torch.arange(0, c, c // b, device=self.queries.device)  # index of the column with each row's own positive
        masked = self.similarity.masked_pairs(ids.positives, ids.columns.flatten())
        masked = masked.without(torch.arange(b), torch.arange(0, c, c // b))
        self.n_masked, self.n_columns = len(masked), c
        bank_columns, for_rules = None if bank is None else self._bank_columns(ids, bank), None
        for tile in tiles(b, self.tile // c):
            rows = self.queries[tile]
            logits = self.similarity.logits(rows, self.columns, masked.block(tile, slice(0, c)))  # (r, c)
            positive = scores = logits.gather(1, own[tile].unsqueeze(1)).squeeze(1)
            if self.similarity.hardness:
                positive = positive * self.similarity.positive_share
                logits.scatter_(1, own[tile].unsqueeze(1), positive.unsqueeze(1))
            if rules := self.similarity.rules:
                queries = None if ids.queries is None else ids.queries[tile]
                for_rules = PairRows(queries, ids.columns[tile, 0], scores, self.similarity.scale)
                own_pairs = tile, slice(0, b)
                rules.leave_out(logits, for_rules, ids.columns.flatten(), own_pairs, counts=self.counts)
            log_sum = logits.logsumexp(1)
            if bank_columns is not None:
                over_bank, gradient = self._over_bank(tile, for_rules, *bank_columns)
                log_sum = torch.logaddexp(log_sum, over_bank)
                self.for_queries[tile].add_((over_bank - log_sum).exp().unsqueeze(1) * gradient)
            self.total += (log_sum - positive).sum()
            weights = logits.sub_(log_sum.unsqueeze(1)).exp_()  # (r, c), softmax over the columns
            weights.scatter_add_(1, own[tile].unsqueeze(1), weights.new_full((len(rows), 1), -1))
            self.for_queries[tile].addmm_(weights, self.columns, alpha=self.scale)
            self.for_columns.addmm_(weights.T, rows, alpha=self.scale)

    def _bank_columns(self, ids: RowIds, bank: Bank) -> tuple[Tensor, Tensor, Tensor | None, MaskedPairs]:
        """Return all bank columns (m, d), their passage ids (m,) and age penalties (m,), and the pairs to mask.

        A pair is (current row, bank column). This function also adds the number of bank columns to ``n_columns``, and the number
        of these pairs to ``n_masked``.
        """
        columns, per_slot = bank.passages[: bank.fill].flatten(0, 1), bank.passages.shape[1]
        penalty = None if self.penalty is None else self.penalty.unsqueeze(1).expand(-1, per_slot).reshape(-1)
        masked = bank.masked_columns(ids.positives, slice(0, bank.fill))
        self.n_masked += len(masked)
        self.n_columns += len(columns)
        return columns, bank.column_ids[: bank.fill].flatten(), penalty, masked

    def _over_bank(
        self,
        current: slice,
        for_rules: PairRows | None,
        columns: Tensor,
        ids: Tensor,
        penalty: Tensor | None,
        masked: MaskedPairs,
    ) -> tuple[Tensor, Tensor]:
        """Return the log-sum-exp L of r current rows q over all bank columns k, (r,), and its gradient, (r, d).

            L(q) = log( sum over k of exp(l(q, k)) )        dL/dq = sum over k of exp(l(q, k) - L(q)) k/t

        where l is the logit. Both sums are computed tile by tile, as sums of exp(l - m) with the running maximum m.
        current: slice of the r current rows. for_rules: these rows as input of the rules, or None without rules. The other
        arguments are the values that ``_bank_columns`` returned.
        """
        rows, rules = self.queries[current], self.similarity.rules
        masked = masked.block(current, slice(0, len(columns)))
        limits, maximum = torch.finfo(rows.dtype), None
        for tile in tiles(len(columns), self.tile // len(rows)):
            block = masked.block(slice(0, len(rows)), tile)
            logits = self.similarity.logits(rows, columns[tile], block)  # (r, t)
            if for_rules is not None:
                rules.leave_out(logits, for_rules, ids[tile], counts=self.counts)
            if penalty is not None:
                logits.sub_(penalty[tile])
            if self.partial is not None:
                self.partial.add(current, tile.start, logits)
            larger = logits.amax(1, keepdim=True)
            if rules or len(block):  # a row may be masked in all columns of the tile
                larger.clamp_(min=limits.min)
            larger = larger if maximum is None else torch.maximum(maximum, larger)
            weights = logits.sub_(larger).exp_()
            if maximum is None:
                total, weighted = weights.sum(1, keepdim=True), weights @ columns[tile]
            else:
                rescale = (maximum - larger).exp()
                total = total * rescale + weights.sum(1, keepdim=True)
                weighted.mul_(rescale).addmm_(weights, columns[tile])
            maximum = larger
        assert maximum is not None
        over_bank = (maximum + total.log()).squeeze(1)
        # if all columns of a row are masked, its log-sum-exp is minus infinity and its gradient is zero
        if rules or len(masked):
            total = total.clamp(min=limits.tiny)
        return over_bank, weighted.div_(total * self.similarity.temperature)

    def add_bank_rows(self, bank: Bank, queries: Tensor, column_ids: Tensor) -> None:
        """Add the losses of the bank rows, and their gradients for the current columns.

        The bank rows themselves get no gradient. queries: bank queries. column_ids: passage id of each current column.
        """
        masked = bank.masked_rows(column_ids, slice(0, bank.fill))
        over_bank = bank.logsumexp()
        sums = over_bank.new_empty(bank.fill) if self.partial is None else self.partial.columns
        for tile in tiles(bank.fill, self.tile // len(self.columns)):
            block = masked.block(slice(0, len(column_ids)), tile)
            # (c, r), because a sum is fastest over dimension 0
            logits = self.similarity.logits(self.columns, queries[tile], block)
            if self.similarity.rules:
                self.similarity.rules.leave_out(logits.T, bank.rule_rows(tile), column_ids)
            if self.penalty is not None:
                logits.sub_(self.penalty[tile])
            log_sum = torch.logaddexp(torch.logsumexp(logits, 0, out=sums[tile]), over_bank[tile])
            self.total += (log_sum - bank.positive_logits[tile]).sum()
            weights = logits.sub_(log_sum).exp_()
            self.for_columns.addmm_(weights, queries[tile], alpha=self.scale)

    def average(self, other: PassageToQuery) -> None:
        """Replace the sum and the gradients by means over both directions. other: passage-to-query direction."""
        self.total = (self.total + other.total) / 2
        self.for_queries.add_(other.for_queries).div_(2)
        self.for_columns.unflatten(0, (len(self.queries), -1))[:, 0].add_(other.for_positives)
        self.for_columns.div_(2)


class _WithGradients(torch.autograd.Function):
    """Autograd function that returns ``total``. Its backward pass uses gradients that were already computed."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, columns: Tensor, total: Tensor, *gradients: Tensor) -> Tensor:
        ctx.save_for_backward(*gradients)
        return total.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        for_queries, for_columns = ctx.saved_tensors
        return upstream * for_queries, upstream * for_columns, None, None, None

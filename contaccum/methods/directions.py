"""Sums of InfoNCE losses and their gradients, in both directions: from queries to passages, and from passages to queries.

In the second direction, which only the symmetric loss has, the rows are positives and the columns are queries. The loss of a
positive p with its own query q+ is

    -log( exp(s(q+,p)/t) / sum over queries q of exp(s(q,p)/t) )

Otherwise the directions are alike. Only current vectors get gradients. A query other than q+ is masked if p is one of its known
positives. The log-sum-exps between stored positives and stored queries are cached. Hard negatives have no query, so the second
direction does not use them. The symmetric loss is the mean of both directions.
Sources: Radford et al. 2021 (arXiv 2103.00020), figure 3; with negatives in both directions, Li et al. 2023 (arXiv 2308.03281).
"""

import torch
from torch import Tensor

from contaccum.batch import RowIds
from contaccum.methods.bank import Bank
from contaccum.methods.logsumexp import PartialLogSumExp
from contaccum.methods.masking import PairRows
from contaccum.methods.similarity import MaskedPairs, Similarity, tiles


class Direction:
    """Sum of the losses of all rows, and its gradients with respect to the current rows (b, d) and current columns (c, d).

    The loss of a row is ``log_sum - positive``: the log-sum-exp of the row's logits, minus the logit of its own positive. The
    gradient of this loss with respect to a logit is exp(logit - log_sum), minus 1 for the row's own positive.
    """

    def __init__(self, similarity: Similarity, rows: Tensor, columns: Tensor, bank: Bank | None) -> None:
        """Start with a loss sum of 0 and zero gradients. bank: bank with additional rows or columns, or None."""
        self.similarity, self.rows, self.columns = similarity, rows, columns
        self.penalty = None if bank is None else bank.age_penalty()
        self.scale, self.tile = 1 / similarity.temperature, similarity.tile_on(rows.device)
        self.total = rows.new_zeros(())
        self.for_rows, self.for_columns = torch.zeros_like(rows), torch.zeros_like(columns)

    def _add_bank_rows(
        self,
        bank: Bank,
        rows: Tensor,
        ids: Tensor | None,
        masked: MaskedPairs,
        sums: Tensor | None = None,
        reverse: bool = False,
    ) -> None:
        """Add the losses of the bank rows, and the gradients of these losses with respect to the current columns.

        The bank rows get no gradient. rows: the bank rows (fill, d). ids: argument ``columns`` of ``PairRules.leave_out``.
        masked: pairs (current column, bank row). sums: tensor (fill,) to which the log-sum-exp of each bank row over the current
        columns is written. reverse: whether the rows are positives and the columns are queries.
        """
        over_bank = bank.logsumexp(reverse)
        sums = torch.empty_like(over_bank) if sums is None else sums
        for tile in tiles(bank.fill, self.tile // len(self.columns)):
            block = masked.block(slice(0, len(self.columns)), tile)
            # (c, r), because a sum is fastest over dimension 0
            logits = self.similarity.logits(self.columns, rows[tile], block)
            if self.similarity.rules:
                self.similarity.rules.leave_out(logits.T, bank.rule_rows(tile), ids, of_queries=reverse)
            if self.penalty is not None:
                logits.sub_(self.penalty[tile])
            log_sum = torch.logaddexp(torch.logsumexp(logits, 0, out=sums[tile]), over_bank[tile])
            self.total += (log_sum - bank.positive_logits[tile]).sum()
            self.for_columns.addmm_(logits.sub_(log_sum).exp_(), rows[tile], alpha=self.scale)


class QueryToPassage(Direction):
    """Direction from queries to passages: rows are current queries and bank queries, columns are passages."""

    def __init__(
        self,
        similarity: Similarity,
        queries: Tensor,
        passages: Tensor,
        bank: Bank | None,
        partial: PartialLogSumExp | None,
    ) -> None:
        """Start with a loss sum of 0. queries: (b, d). passages: (c, d).

        bank: bank whose passages are additional columns. partial: object to fill with log-sum-exps for the next push, or None.
        """
        super().__init__(similarity, queries, passages, bank)
        self.partial = partial
        self.n_masked, self.n_columns = 0, len(passages)
        # numbers of (current row, column) pairs: kept by the rules, masked by the similarity rule; 0 without rules
        self.counts = queries.new_zeros(2, dtype=torch.long)

    def add_current_rows(self, ids: RowIds, bank: Bank | None) -> None:
        """Add the losses of the current rows and their gradients. The columns are the current columns and those of ``bank``."""
        b, c = len(self.rows), len(self.columns)
        own = torch.arange(0, c, c // b, device=self.rows.device)  # index of the column with each row's own positive
        masked = self.similarity.masked_pairs(ids.positives, ids.columns.flatten())
        masked = masked.without(torch.arange(b), torch.arange(0, c, c // b))
        self.n_masked, for_rules = len(masked), None
        if bank is not None:
            masked_in_bank = bank.masked_columns(ids.positives, slice(0, bank.fill))
            self.n_masked += len(masked_in_bank)
            self.n_columns += bank.column_ids[: bank.fill].numel()
        for tile in tiles(b, self.tile // c):
            rows = self.rows[tile]
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
            if bank is not None:
                over_bank, gradient = self._over_bank(tile, for_rules, bank, masked_in_bank)
                log_sum = torch.logaddexp(log_sum, over_bank)
                self.for_rows[tile].add_((over_bank - log_sum).exp().unsqueeze(1) * gradient)
            self.total += (log_sum - positive).sum()
            weights = logits.sub_(log_sum.unsqueeze(1)).exp_()  # (r, c), softmax over the columns
            weights.scatter_add_(1, own[tile].unsqueeze(1), weights.new_full((len(rows), 1), -1))
            self.for_rows[tile].addmm_(weights, self.columns, alpha=self.scale)
            self.for_columns.addmm_(weights.T, rows, alpha=self.scale)

    def add_bank_queries(self, ids: RowIds, bank: Bank) -> None:
        """Add the losses of the bank queries, and the gradients of these losses with respect to the current columns."""
        assert bank.queries is not None
        column_ids = ids.columns.flatten()
        masked = bank.masked_rows(column_ids, slice(0, bank.fill))
        sums = None if self.partial is None else self.partial.columns
        self._add_bank_rows(bank, bank.queries, column_ids, masked, sums)

    def _over_bank(
        self, current: slice, for_rules: PairRows | None, bank: Bank, masked: MaskedPairs
    ) -> tuple[Tensor, Tensor]:
        """Return the log-sum-exp L of r current rows q over all bank columns k, (r,), and its gradient, (r, d).

            L(q) = log( sum over k of exp(l(q, k)) )        dL/dq = sum over k of exp(l(q, k) - L(q)) * k / t

        where l is the logit and t the temperature. Both sums are computed tile by tile, as sums of exp(l - m) with the
        running maximum m.

        current: slice of the r current rows. for_rules: argument ``rows`` of ``PairRules.leave_out`` for these rows, or
        None if there are no rules. masked: pairs (current row, bank column).
        """
        rows, rules = self.rows[current], self.similarity.rules
        columns, ids = bank.passages[: bank.fill].flatten(0, 1), bank.column_ids[: bank.fill].flatten()
        penalty = self.penalty
        if penalty is not None:  # the columns of a slot have the same age
            penalty = penalty.unsqueeze(1).expand(-1, bank.passages.shape[1]).reshape(-1)
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

    def average(self, other: "PassageToQuery") -> None:
        """Replace the loss sum and the gradients by their means over both directions. other: passage-to-query direction."""
        self.total = (self.total + other.total) / 2
        self.for_rows.add_(other.for_columns).div_(2)
        self.for_columns.unflatten(0, (len(self.rows), -1))[:, 0].add_(other.for_rows)
        self.for_columns.div_(2)


class PassageToQuery(Direction):
    """Direction from passages to queries: rows are positives, columns are queries."""

    def __init__(
        self, similarity: Similarity, queries: Tensor, positives: Tensor, ids: RowIds, bank: Bank | None
    ) -> None:
        """Compute the loss sum and its gradients. queries, positives: (b, d). bank: bank with additional pairs, or None."""
        super().__init__(similarity, positives, queries, bank)
        self._add_current_rows(ids, bank)
        if bank is not None:
            pairs, per_slot = bank.masked_columns(ids.positives, slice(0, bank.fill)), bank.passages.shape[1]
            first = pairs.columns % per_slot == 0  # the other columns of a slot are hard negatives
            masked = MaskedPairs(pairs.rows[first], pairs.columns[first] // per_slot)
            self._add_bank_rows(bank, bank.passages[: bank.fill, 0], ids.queries, masked, reverse=True)

    def _add_current_rows(self, ids: RowIds, bank: Bank | None) -> None:
        b, positives, own = len(self.rows), ids.columns[:, 0], torch.arange(len(self.rows))
        masked = self.similarity.masked_pairs(ids.positives, positives).without(own, own)
        columns, masks = [self.columns], [masked.transposed()]
        if bank is not None:
            assert bank.queries is not None
            columns.append(bank.queries[: bank.fill])
            masks.append(bank.masked_rows(positives, slice(0, bank.fill)))
        for tile in tiles(b, self.tile // sum(map(len, columns))):
            rows = self.rows[tile]
            blocks = [
                self.similarity.logits(rows, each, masked.block(tile, slice(0, len(each))))
                for each, masked in zip(columns, masks, strict=True)
            ]  # (r, b), (r, m)
            positive = blocks[0][:, tile].diagonal()
            scores = positive.clone()
            if self.similarity.hardness:
                positive.mul_(self.similarity.positive_share)
            if rules := self.similarity.rules:
                queries = None if ids.queries is None else ids.queries[tile]
                for_rules = PairRows(queries, positives[tile], scores, self.similarity.scale)
                rules.leave_out(blocks[0], for_rules, ids.queries, (tile, slice(0, b)), of_queries=True)
                if bank is not None:
                    rules.leave_out(blocks[1], for_rules, bank.query_numbers[: bank.fill], of_queries=True)
            self.total -= positive.sum()
            if self.penalty is not None:
                blocks[1].sub_(self.penalty)
            logits = torch.cat(blocks, 1)
            log_sum = logits.logsumexp(1, keepdim=True)
            self.total += log_sum.sum()
            weights = logits.sub_(log_sum).exp_()
            weights[:, tile].diagonal().sub_(1)
            for each, part in zip(columns, weights.split([len(each) for each in columns], 1), strict=True):
                self.for_rows[tile].addmm_(part, each, alpha=self.scale)
            self.for_columns.addmm_(weights[:, :b].T, rows, alpha=self.scale)

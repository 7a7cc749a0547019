"""Passage-to-query direction of the symmetric loss.

The rows are positives, and the columns are queries. The loss of a positive p with its own query q+ is

    -log( exp(s(q+,p)/t) / sum over queries q of exp(s(q,p)/t) )

Current and stored pairs take part as in the query-to-passage direction: gradients reach current vectors only, a query for which p
is a known positive is masked, and the log-sum-exps between stored positives and stored queries are cached. Hard negatives have no
query, so they take no part. The symmetric loss is the mean of both directions.
Sources: Radford et al. 2021 (arXiv 2103.00020), figure 3; with negatives in both directions, Li et al. 2023 (arXiv 2308.03281).
"""

import torch
from torch import Tensor

from contaccum.batch import RowIds
from contaccum.methods.bank import Bank
from contaccum.methods.masking import PairRows
from contaccum.methods.similarity import MaskedPairs, Similarity, tiles


class PassageToQuery:
    """Sum of the losses of all positives, and its gradients for the current queries (b, d) and the current positives (b, d)."""

    def __init__(
        self, similarity: Similarity, queries: Tensor, positives: Tensor, ids: RowIds, bank: Bank | None
    ) -> None:
        """Compute the sum and the gradients. bank: bank whose stored pairs take part, or None."""
        self.similarity, self.queries, self.positives, self.ids = similarity, queries, positives, ids
        self.scale, self.tile = 1 / similarity.temperature, similarity.tile_on(queries.device)
        self.total = queries.new_zeros(())
        self.for_queries, self.for_positives = torch.zeros_like(queries), torch.zeros_like(positives)
        self._add_current_rows(bank)
        if bank is not None:
            self._add_bank_rows(bank)

    def _add_current_rows(self, bank: Bank | None) -> None:
        b, ids, own = len(self.queries), self.ids.columns[:, 0], torch.arange(len(self.queries))
        masked = self.similarity.masked_pairs(self.ids.positives, ids).without(own, own)
        columns, masks = [self.queries], [masked.transposed()]
        if bank is not None:
            assert bank.queries is not None
            columns.append(bank.queries[: bank.fill])
            masks.append(bank.masked_rows(ids, slice(0, bank.fill)))
        penalty = None if bank is None else bank.age_penalty()
        for tile in tiles(b, self.tile // sum(map(len, columns))):
            rows = self.positives[tile]
            blocks = [
                self.similarity.logits(rows, each, masked.block(tile, slice(0, len(each))))
                for each, masked in zip(columns, masks, strict=True)
            ]  # (r, b), (r, m)
            positive = blocks[0][:, tile].diagonal()
            scores = positive.clone()
            if self.similarity.hardness:
                positive.mul_(self.similarity.positive_share)
            if self.similarity.rules:
                self._apply_rules(blocks, tile, scores, bank)
            self.total -= positive.sum()
            if penalty is not None:
                blocks[1].sub_(penalty)
            logits = torch.cat(blocks, 1)
            denominator = logits.logsumexp(1, keepdim=True)
            self.total += denominator.sum()
            weights = logits.sub_(denominator).exp_()
            weights[:, tile].diagonal().sub_(1)
            for each, part in zip(columns, weights.split([len(each) for each in columns], 1), strict=True):
                self.for_positives[tile].addmm_(part, each, alpha=self.scale)
            self.for_queries.addmm_(weights[:, :b].T, rows, alpha=self.scale)

    def _apply_rules(self, blocks: list[Tensor], tile: slice, scores: Tensor, bank: Bank | None) -> None:
        """Apply the rules to the logits of the current rows ``tile``, with current queries (r, b) and bank queries (r, m)."""
        queries, rules = self.ids.queries, self.similarity.rules
        own = None if queries is None else queries[tile]
        rows = PairRows(own, self.ids.columns[tile, 0], scores, self.similarity.scale)
        rules.leave_out(blocks[0], rows, queries, (tile, slice(0, len(self.queries))), of_queries=True)
        if bank is not None:
            rules.leave_out(blocks[1], rows, bank.query_numbers[: bank.fill], of_queries=True)

    def _add_bank_rows(self, bank: Bank) -> None:
        """Add the losses of the stored positives to ``total``, and their gradients for the current queries to ``for_queries``."""
        positives, per_slot = bank.passages[: bank.fill, 0], bank.passages.shape[1]
        pairs = bank.masked_columns(self.ids.positives, slice(0, bank.fill))
        first = pairs.columns % per_slot == 0  # the other columns of a slot are hard negatives
        masked = MaskedPairs(pairs.rows[first], pairs.columns[first] // per_slot)
        over_bank, penalty = bank.logsumexp(reverse=True), bank.age_penalty()
        for tile in tiles(bank.fill, self.tile // len(self.queries)):
            block = masked.block(slice(0, len(self.queries)), tile)
            logits = self.similarity.logits(self.queries, positives[tile], block)  # (b, r)
            if self.similarity.rules:
                self.similarity.rules.leave_out(logits.T, bank.rule_rows(tile), self.ids.queries, of_queries=True)
            if penalty is not None:
                logits.sub_(penalty[tile])
            denominator = torch.logaddexp(logits.logsumexp(0), over_bank[tile])
            self.total += (denominator - bank.positive_logits[tile]).sum()
            self.for_queries.addmm_(logits.sub_(denominator).exp_(), positives[tile], alpha=self.scale)

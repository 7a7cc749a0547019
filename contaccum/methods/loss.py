"""InfoNCE loss with an optional bank of past pairs.

A row is a query, a column is a passage. The loss of a row, with similarities s, temperature t and
its own positive s+, is

    -log( exp(s+/t) / (exp(s+/t) + sum over negatives of exp(s/t)) )
        =  -log sigmoid( s+/t - logsumexp over negatives of s/t )

The right-hand form subtracts no nearly equal numbers, so float32 gradients stay exact when the loss
is small. The rows and columns are those of the current micro-batch and those of the bank, so the
matrix of similarities has four blocks:

                      current columns       bank columns
    current rows      gradient for both     gradient for rows
    bank rows         gradient for columns  no gradient: the bank caches the log-sum-exp of each row

Therefore the cost of a bank is linear in its size. These are the equations of Kim et al. 2024
(arXiv 2406.12356, sections 3.2 and 3.3) for b current pairs and M pairs of the bank, each with H
hard negatives:

    eq. 5, 6    queries (b + M, d) and passages ((b + M)(1 + H), d): the current ones, then
                those of the bank, which have no gradient
    eq. 7       their similarities (b + M, (b + M)(1 + H)), the matrix above
    eq. 8       gradient of a current query: a sum over all (b + M)(1 + H) passages
    eq. 9       gradient of a current passage: a sum over all b + M queries

Other sources: van den Oord et al. 2018 (arXiv 1807.03748); Karpukhin et al. 2020 (arXiv
2004.04906), eq. 2.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from contaccum.batch import MicroBatch, RowIds
from contaccum.methods.bank import Bank, BankLogits
from contaccum.methods.pairs import IdIndex, Pairs
from contaccum.methods.rules import NO_RULES, PairRules
from contaccum.methods.similarity import Similarity, full_precision


@dataclass(frozen=True)
class LossValue:
    """Loss of one micro-batch or step, with statistics for the log.

    With Matryoshka, they are of the full vectors.
    """

    contrast: Tensor
    """InfoNCE loss that training differentiates: the sum over the rows, divided by their number, or
    by the number of current rows if ``bank.row_weight`` is ``current``. Scalar with gradient."""
    mean_factor: float = 1.0
    """Factor that turns ``contrast`` into the mean over all rows, which the log shows: the divisor
    of the sum, divided by the number of its rows."""
    distilled: Tensor | None = None
    """Distillation loss (see ``contaccum.methods.distillation``). Scalar with gradient; None
    without."""
    statistics: dict[str, float | Tensor] = field(default_factory=dict)
    """Values for log.jsonl, by their names there. Means over the queries of the micro-batch or
    step."""
    bank_logits: tuple[BankLogits | None, ...] = ()
    """Logits for ``Bank.push``: one element per embedding width, the full width first."""

    @property
    def value(self) -> Tensor:
        """InfoNCE loss plus distillation loss. Training differentiates this scalar."""
        return self.contrast if self.distilled is None else self.contrast + self.distilled

    def log(self) -> dict[str, float | Tensor]:
        """Return all values for log.jsonl, by their names there."""
        values = {"loss": self.contrast * self.mean_factor, "differentiated_loss": self.value}
        if self.distilled is not None:
            values["loss"] = values["loss"] + self.distilled
            values["distillation"] = self.distilled
        return {**values, **self.statistics}

    def detach(self) -> "LossValue":
        """Return a copy for the log, without graph and without ``bank_logits``."""
        distilled = None if self.distilled is None else self.distilled.detach()
        return replace(self, contrast=self.contrast.detach(), distilled=distilled, bank_logits=())

    def weighted(self, row_factor: float, pair_factor: float) -> "LossValue":
        """Return a copy with the weight of a micro-batch in the mean over those of a step.

        row_factor: of the InfoNCE loss, which is a mean over rows. pair_factor: of the means over
        queries.
        """
        return replace(
            self,
            contrast=self.contrast * row_factor,
            distilled=None if self.distilled is None else self.distilled * pair_factor,
            statistics={name: value * pair_factor for name, value in self.statistics.items()},
        )


def row_weights(micro_batches: Sequence[MicroBatch], bank: Bank | None = None) -> list[float]:
    """Return the weight of each micro-batch in the mean loss of the step.

    The loss of a micro-batch is a mean over its rows, so its weight is proportional to its number
    of rows. This number is the number of pairs plus the value of ``bank.weighted_rows`` at the
    beginning of the step. With these weights, all rows of the step count equally, unless the bank
    grows during the step. The weights have the mean 1: the caller divides by the number of
    micro-batches.
    """
    rows = [len(batch.ids.columns) + (bank.weighted_rows if bank else 0) for batch in micro_batches]
    return [len(rows) * count / sum(rows) for count in rows]


class InfoNCE:
    """InfoNCE loss of one micro-batch or of a whole step. A bank is optional."""

    def __init__(
        self,
        temperature: float,
        mask_false_negatives: bool = True,
        rules: PairRules = NO_RULES,
        chunk: int | None = None,
    ) -> None:
        """Set the options of the loss: see ``Similarity``."""
        self.similarity = Similarity(temperature, mask_false_negatives, rules, chunk)

    def __call__(
        self, queries: Tensor, passages: Tensor, ids: RowIds, bank: Bank | None = None
    ) -> LossValue:
        """Return the mean loss over the current rows and the bank rows.

        queries: (b, d). passages: (b, 1 + H, d), where the first passage of each query is its
        positive. ids: passage ids of the b pairs, on the CPU. The b pairs come from all processes,
        but only those of this process have a gradient. bank: M pairs. Its passages are additional
        columns. Its queries, if it stores queries, are additional rows.
        """
        b = len(queries)
        with full_precision(queries.device):
            # Eq. 5 and 6: the queries and passages of the micro-batch, and those of the bank, which
            # have no gradient.
            current = self._pairs(queries, passages, ids, bank)
            bank_pairs = bank.pairs(slice(0, bank.fill)) if bank is not None and bank.fill else None

            # Eq. 7, current rows. Their negatives are current columns and bank columns.
            # (b, b (1 + H)) -> (b,)
            blocks = [self.similarity.logsumexp(current, current)]
            if bank_pairs is not None:
                # (b, M (1 + H)) -> (b,)
                blocks.append(self.similarity.logsumexp(current, bank_pairs))
            negatives = torch.stack([block.values for block in blocks]).logsumexp(0)  # (b,)
            log_likelihood = F.logsigmoid(current.positive_logits - negatives).sum()
            rows_in_sum = rows_in_divisor = b

            # Eq. 7, bank rows. Their negatives are current columns and, from the cache, bank
            # columns.
            bank_logits = None
            if bank is not None and bank_pairs is not None and bank_pairs.queries is not None:
                # (M, b (1 + H)) -> (M,)
                over_current = self.similarity.logsumexp(bank_pairs, current)
                negatives = torch.stack([over_current.values, bank.logsumexp()]).logsumexp(0)
                log_likelihood = (
                    log_likelihood + F.logsigmoid(bank_pairs.positive_logits - negatives).sum()
                )
                rows_in_sum += bank.fill
                rows_in_divisor += bank.weighted_rows
                with_current, with_stored = blocks[0].logits, blocks[1].logits
                if (
                    with_current is not None
                    and with_stored is not None
                    and over_current.logits is not None
                ):
                    bank_logits = BankLogits(
                        pointer=bank.pointer,
                        positive=current.positive_logits.detach(),
                        over_current=over_current.logits,
                        current=with_current,
                        stored=with_stored,
                    )

            # The mean over the rows. Its backward pass computes eq. 8 through the two blocks of the
            # current rows, and eq. 9 through the two blocks of the current columns.
            contrast = -log_likelihood / rows_in_divisor

        # Statistics are of the current rows only. ``positives`` contains each query's own positive,
        # which is not reported as masked, hence - 1.
        statistics: dict[str, float | Tensor] = {
            "negatives": sum(block.negatives for block in blocks) / b,
            "masked": sum(block.positives for block in blocks) / b - 1,
            "weight_per_row": 1 / rows_in_divisor,
        }
        if self.similarity.rules.margin is not None:
            statistics["filtered"] = sum(block.filtered for block in blocks) / b
        return LossValue(
            contrast,
            rows_in_divisor / rows_in_sum,
            statistics=statistics,
            bank_logits=(bank_logits,),
        )

    def _pairs(self, queries: Tensor, passages: Tensor, ids: RowIds, bank: Bank | None) -> Pairs:
        """Return the micro-batch as pairs, with numbers below 0, which no pair of the bank has."""
        b, per_pair = ids.columns.shape
        columns_by_id = IdIndex()
        if self.similarity.mask_false_negatives:
            columns_by_id.add(-b * per_pair, ids.columns.reshape(-1, 1))
        return Pairs(
            queries,
            passages,
            self.similarity.positive_logits(queries, passages),
            ids,
            first=-b,
            columns_by_id=columns_by_id,
            age_decay=0.0 if bank is None else bank.options.age_decay,
        )

"""Training objective: InfoNCE, with optional Matryoshka losses and distillation."""

from dataclasses import replace

from torch import Tensor

from contaccum.batch import RowIds
from contaccum.methods.bank import Bank
from contaccum.methods.distillation import Distillation
from contaccum.methods.loss import InfoNCE, LossValue
from contaccum.methods.matryoshka import FULL_WIDTH, Matryoshka


class Objective:
    """Training loss: InfoNCE loss plus distillation loss.

    With Matryoshka, a weighted sum over all embedding widths.
    """

    def __init__(
        self,
        info_nce: InfoNCE,
        matryoshka: Matryoshka = FULL_WIDTH,
        distillation: Distillation | None = None,
    ) -> None:
        self.info_nce, self.matryoshka, self.distillation = info_nce, matryoshka, distillation
        self.similarity = info_nce.similarity

    def __call__(
        self, queries: Tensor, passages: Tensor, ids: RowIds, bank: Bank | None = None
    ) -> LossValue:
        """Return the loss.

        Arguments: see InfoNCE. With Matryoshka, a bank must be a MatryoshkaBank of equal widths.
        """
        value = self._at_one_width(queries, passages, ids, bank)
        for index, (width, weight) in enumerate(
            zip(self.matryoshka.widths, self.matryoshka.weights, strict=True)
        ):
            truncated = self._at_one_width(
                self.matryoshka.truncate(queries, width),
                self.matryoshka.truncate(passages, width),
                ids,
                None if bank is None else bank.truncated[index],
            )
            distilled = value.distilled
            if distilled is not None and truncated.distilled is not None:
                distilled = distilled + weight * truncated.distilled
            value = replace(
                value,
                contrast=value.contrast + weight * truncated.contrast,
                distilled=distilled,
                bank_logits=value.bank_logits + truncated.bank_logits,
            )
        return value

    def _at_one_width(
        self, queries: Tensor, passages: Tensor, ids: RowIds, bank: Bank | None
    ) -> LossValue:
        value = self.info_nce(queries, passages, ids, bank)
        if self.distillation is None:
            return value
        assert ids.teacher is not None
        return replace(value, distilled=self.distillation(queries, passages, ids.teacher))


Loss = InfoNCE | Objective
"""Loss function that a training method calls."""

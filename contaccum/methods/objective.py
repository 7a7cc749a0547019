"""What a step minimises: InfoNCE at the whole width, and where they are asked for at smaller ones and against a teacher.

An Objective is called as InfoNCE is, so no method asks which of the two it was given.
"""

from functools import partial

from torch import Tensor

from contaccum.batch import RowIds
from contaccum.methods.bank import Bank
from contaccum.methods.distillation import Distillation
from contaccum.methods.loss import InfoNCE, LossValue
from contaccum.methods.matryoshka import WHOLE, Prefixes


class Objective:
    """The sum over widths of what each counts for times (InfoNCE + the distillation's weight times its loss)."""

    def __init__(self, info_nce: InfoNCE, prefixes: Prefixes = WHOLE, distillation: Distillation | None = None) -> None:
        self.info_nce, self.prefixes, self.distillation = info_nce, prefixes, distillation

    def __call__(
        self, queries: Tensor, passages: Tensor, ids: RowIds, *, columns: Bank | None = None, rows: Bank | None = None
    ) -> LossValue:
        """As InfoNCE's; the banks are to have been made with the same ``prefixes``."""
        value = self._at_one_width(queries, passages, ids, columns, rows)
        for number, (width, weight) in enumerate(zip(self.prefixes.widths, self.prefixes.weights, strict=True)):
            one, other = (bank if bank is None else bank.narrower[number] for bank in (columns, rows))
            cut = partial(self.prefixes.cut, width=width)
            value = value.plus(self._at_one_width(cut(queries), cut(passages), ids, one, other), weight)
        return value

    def _at_one_width(
        self, queries: Tensor, passages: Tensor, ids: RowIds, columns: Bank | None, rows: Bank | None
    ) -> LossValue:
        value = self.info_nce(queries, passages, ids, columns=columns, rows=rows)
        if self.distillation is None:
            return value
        assert ids.teacher is not None
        return value._replace(distilled=self.distillation(queries, passages, ids.teacher))

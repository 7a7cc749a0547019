"""Learning a teacher's scores of a query's own passages, beside InfoNCE.

s(p) is the student's similarity of a query and one of its 1 + H passages over the temperature, as in InfoNCE; t(p) the
teacher's score over a temperature of its own. Passages that the teacher did not score take no part. The loss is the mean over
rows of

    kl       sum over p of softmax(t)(p) * (log softmax(t)(p) - log softmax(s)(p))
    margin   mean over hard negatives p of ((s+ - s(p)) - (t+ - t(p)))^2

Sources: Hinton et al. 2015 (arXiv 1503.02531) and, over the passages of a query, Ren et al. 2021 (arXiv 2110.07367), eq. 2;
Hofstaetter et al. 2020 (arXiv 2010.02666), eq. 1.
"""

from typing import Literal

import torch
from torch import Tensor


class Distillation:
    """The weighted loss of one micro-batch (or of a whole step, in the two-pass methods) against a teacher."""

    def __init__(
        self, kind: Literal["kl", "margin"], temperature: float, teacher_temperature: float = 1.0, weight: float = 1.0
    ) -> None:
        """temperature: divides the student's similarities; teacher_temperature: the teacher's scores; weight: the loss."""
        self.take = {"kl": _divergence, "margin": _margins}[kind]
        self.temperature, self.teacher_temperature, self.weight = temperature, teacher_temperature, weight

    def __call__(self, queries: Tensor, passages: Tensor, teacher: Tensor) -> Tensor:
        """
        queries (b, d); passages (b, 1 + H, d), the positive first; teacher (b, 1 + H) float32, on any device, NaN where the
        teacher did not score. A row that has no positive, or no negative, with a score counts as 0. Returns a scalar.
        """
        with torch.autocast(queries.device.type, enabled=False):
            student = torch.einsum("bd,bpd->bp", queries, passages) / self.temperature  # (b, 1 + H)
            scored = ~teacher.isnan()
            scored &= scored[:, :1] & scored[:, 1:].any(1, keepdim=True)
            scores = (teacher / self.teacher_temperature).nan_to_num()
            scored, scores = (each.to(student.device, non_blocking=True) for each in (scored, scores))
            return self.weight * self.take(student, scores, scored).sum() / len(queries)


def _divergence(student: Tensor, teacher: Tensor, scored: Tensor) -> Tensor:
    """Kullback-Leibler divergence of each row, (b,)."""
    lowest = torch.finfo(student.dtype).min  # a row without any score is even on both sides, where -inf would be NaN
    target = teacher.masked_fill(~scored, lowest).log_softmax(1)
    found = student.masked_fill(~scored, lowest).log_softmax(1)
    return (target.exp() * (target - found)).masked_fill(~scored, 0).sum(1)


def _margins(student: Tensor, teacher: Tensor, scored: Tensor) -> Tensor:
    """Mean squared error of each row's margins, (b,)."""
    apart = (student[:, :1] - student[:, 1:]) - (teacher[:, :1] - teacher[:, 1:])  # (b, H)
    counts = scored[:, 1:].sum(1).clamp(min=1)
    return apart.square().masked_fill(~scored[:, 1:], 0).sum(1) / counts

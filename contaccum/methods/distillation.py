"""Distillation loss: learn from the scores of a teacher."""

from typing import Literal

import torch
from torch import Tensor

from contaccum.methods.similarity import full_precision


class Distillation:
    """Distillation loss.

    It compares the scores of a student and a teacher for the passages of each query.

    The student is the trained model. s(p) is the student's similarity of passage p, divided by the
    student's temperature. t(p) is the teacher's score of passage p, divided by the teacher's
    temperature. s+ and t+ are the values for the positive. Passages without a teacher score do not
    count. ``kind`` selects the loss of a query:

        kl       sum over p of softmax(t)(p) * (log softmax(t)(p) - log softmax(s)(p))
        margin   mean over hard negatives p of ((s+ - s(p)) - (t+ - t(p)))^2

    The result is the mean over the queries. Sources of kl: Hinton et al. 2015 (arXiv 1503.02531);
    for the passages of a query, Ren et al. 2021 (arXiv 2110.07367), eq. 2. Source of margin:
    Hofstaetter et al. 2020 (arXiv 2010.02666), eq. 1.
    """

    def __init__(
        self,
        kind: Literal["kl", "margin"],
        temperature: float,
        teacher_temperature: float = 1.0,
        weight: float = 1.0,
    ) -> None:
        """Set the options of the loss.

        temperature: number that divides the student's similarities. teacher_temperature: number
        that divides the teacher's scores. weight: number that multiplies the loss.
        """
        self.row_losses = {"kl": _divergence, "margin": _margins}[kind]
        self.temperature, self.teacher_temperature = temperature, teacher_temperature
        self.weight = weight

    def __call__(self, queries: Tensor, passages: Tensor, teacher: Tensor) -> Tensor:
        """Return the weighted loss, a scalar.

        queries: (b, d). passages: (b, 1 + H, d), where the first passage of each query is its
        positive. teacher: the teacher's scores (b, 1 + H), float32 on any device, NaN for a missing
        score. If a query has no score for its positive, or no score for any negative, its loss is
        0.
        """
        with full_precision(queries.device):
            student = torch.einsum("bd,bpd->bp", queries, passages) / self.temperature  # (b, 1 + H)
            scored = ~teacher.isnan()
            scored &= scored[:, :1] & scored[:, 1:].any(1, keepdim=True)
            scores = (teacher / self.teacher_temperature).nan_to_num()
            scored, scores = (
                each.to(student.device, non_blocking=True) for each in (scored, scores)
            )
            return self.weight * self.row_losses(student, scores, scored).sum() / len(queries)


def _divergence(student: Tensor, teacher: Tensor, scored: Tensor) -> Tensor:
    """Return KL(teacher || student) over the scored passages of each query, (b,)."""
    # not minus infinity, because a row without scores would give NaN
    lowest = torch.finfo(student.dtype).min
    target = teacher.masked_fill(~scored, lowest).log_softmax(1)
    found = student.masked_fill(~scored, lowest).log_softmax(1)
    return (target.exp() * (target - found)).masked_fill(~scored, 0).sum(1)


def _margins(student: Tensor, teacher: Tensor, scored: Tensor) -> Tensor:
    """Return the mean squared error of each query's margins over the scored negatives, (b,)."""
    error = (student[:, :1] - student[:, 1:]) - (teacher[:, :1] - teacher[:, 1:])  # (b, H)
    counts = scored[:, 1:].sum(1).clamp(min=1)
    return error.square().masked_fill(~scored[:, 1:], 0).sum(1) / counts

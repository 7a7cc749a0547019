"""Training objective: InfoNCE, with optional Matryoshka losses and distillation."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from contaccum.batch import MicroBatch, Pass, RowIds
from contaccum.methods.bank import Bank, BankLogits, BankOptions
from contaccum.methods.loss import InfoNCE, LossValue
from contaccum.methods.similarity import Similarity, full_precision


@dataclass(frozen=True)
class Matryoshka:
    """Settings of the additional losses on truncated embeddings.

    Source: Kusupati et al. 2022 (arXiv 2205.13147), eq. 1.
    """

    widths: tuple[int, ...] = ()
    """Widths of the truncated embeddings. Each width is smaller than the full width d."""
    weights: tuple[float, ...] = ()
    """Weight of the loss at each truncated width. The loss at the full width has weight 1."""
    unit: bool = False
    """Whether truncated embeddings are scaled to length 1."""

    def truncate(self, vectors: Tensor, width: int) -> Tensor:
        """Return the first ``width`` dimensions of ``vectors`` (..., d).

        The result is (..., width).
        """
        part = vectors[..., :width]
        return F.normalize(part, dim=-1) if self.unit else part


FULL_WIDTH = Matryoshka()


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


class StepEngine(Protocol):
    """Attributes and functions of ``contaccum.runtime.engine.Engine`` that training methods use.

    For docstrings, see Engine.
    """

    no_grad_group_size: int
    replay_share: float

    def backward(self, value: Tensor) -> None: ...

    # methods with one loss per micro-batch
    def micro_steps(self, micro_batches: list[MicroBatch]) -> Iterator[MicroBatch]: ...
    def encode(self, batch: MicroBatch) -> tuple[Tensor, Tensor]: ...

    # methods with one loss per step
    def passes(
        self, micro_batches: list[MicroBatch], text_numbers: Tensor | None = None, size: int = 1
    ) -> list[Pass]: ...
    def encoded(self, passes: Iterable[Pass]) -> Iterator[Tensor]: ...
    def gather_pairs(
        self, micro_batches: list[MicroBatch], passes: list[Pass], vectors: list[Tensor]
    ) -> tuple[Tensor, Tensor]: ...
    def own_texts(
        self, micro_batches: list[MicroBatch], queries: Tensor, passages: Tensor
    ) -> Tensor: ...
    def of_passes(
        self, micro_batches: list[MicroBatch], passes: list[Pass], queries: Tensor, passages: Tensor
    ) -> list[Tensor]: ...
    def uniform(self, index: int) -> float: ...


class MatryoshkaBank(Bank):
    """Bank of embeddings of the full width, with another bank for each truncated width."""

    def __init__(
        self,
        size: int,
        dim: int,
        similarity: Similarity,
        options: BankOptions,
        matryoshka: Matryoshka,
        *,
        push: int,
        device: torch.device | None = None,
    ) -> None:
        """Create empty banks. matryoshka: the widths. Other arguments: see ``Bank``."""
        super().__init__(size, dim, similarity, options, push=push, device=device)
        self.matryoshka = matryoshka
        self.truncated = tuple(
            Bank(size, width, similarity, options, push=push, device=device)
            for width in matryoshka.widths
        )

    def push(
        self,
        queries: Tensor,
        passages: Tensor,
        ids: RowIds,
        bank_logits: tuple[BankLogits | None, ...] = (),
    ) -> None:
        super().push(queries, passages, ids, bank_logits)
        for index, bank in enumerate(self.truncated, 1):
            truncated_queries = self.matryoshka.truncate(queries.detach(), bank.dim)
            truncated_passages = self.matryoshka.truncate(passages.detach(), bank.dim)
            bank.push(truncated_queries, truncated_passages, ids, bank_logits[index : index + 1])

    def end_step(self) -> None:
        super().end_step()
        for bank in self.truncated:
            bank.end_step()

    def empty(self) -> None:
        super().empty()
        for bank in self.truncated:
            bank.empty()

    def rollback(self) -> None:
        super().rollback()
        for bank in self.truncated:
            bank.rollback()

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, numbers = super().state()
        for bank in self.truncated:
            bank_tensors, bank_numbers = bank.state()
            tensors |= {f"{bank.dim}/{name}": tensor for name, tensor in bank_tensors.items()}
            numbers[str(bank.dim)] = bank_numbers
        return tensors, numbers

    def load_state(self, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
        super().load_state(
            {name: tensor for name, tensor in tensors.items() if "/" not in name}, numbers
        )
        for bank in self.truncated:
            prefix = f"{bank.dim}/"
            bank_tensors = {
                name.removeprefix(prefix): tensor
                for name, tensor in tensors.items()
                if name.startswith(prefix)
            }
            bank.load_state(bank_tensors, numbers.get(str(bank.dim), {}))

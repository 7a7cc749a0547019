"""Matryoshka embeddings: truncated to smaller widths, each with its own bank."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from contaccum.batch import RowIds
from contaccum.methods.bank import Bank, BankLogits, BankOptions
from contaccum.methods.similarity import Similarity


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

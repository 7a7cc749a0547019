"""What a method is given for one optimizer step, and the two passes that GradCache and its hybrid share."""

from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from contaccum.batch import MicroBatch, RowIds
from contaccum.methods.bank import Bank
from contaccum.methods.loss import InfoNCE, LossValue


class Engine(Protocol):
    """What a method needs of the machine that it runs on; b = W * B rows, those of all processes in rank order."""

    def micro_steps(self, micro_batches: list[MicroBatch]) -> Iterator[MicroBatch]:
        """The micro-batches in order, on the device, each with its own dropout noise: the same at every call in one step."""

    def encode(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Queries (b, d) and passages (b, 1 + H, d) of all processes; the rows of this process carry gradient."""

    def backward(self, value: Tensor) -> None:
        """Add this process's share of the gradient of ``value`` to the model; shares are summed at the end of the step."""


Method = Callable[[Engine, list[MicroBatch], Bank, InfoNCE], list[LossValue]]
"""One optimizer step: leaves gradients on the model, returns the losses whose mean was differentiated (detached)."""

Rows = tuple[Tensor, Tensor, RowIds]
"""Queries (n, d), passages (n, 1 + H, d) and their ids."""


def whole_step(parts: list[Rows]) -> Rows:
    """The rows of several micro-batches as one block."""
    queries, passages, ids = zip(*parts, strict=True)
    return (
        torch.cat(queries),
        torch.cat(passages),
        RowIds(torch.cat([part.columns for part in ids]), torch.cat([part.positives for part in ids])),
    )


def represent(engine: Engine, micro_batches: list[MicroBatch]) -> list[Rows]:
    """First pass: the embeddings of every micro-batch, without graph. (Gao et al. 2021, step 1)

    The last micro-batch keeps its graph, which is one micro-batch's memory, and so needs no second forward pass.
    """
    parts = []
    for index, batch in enumerate(engine.micro_steps(micro_batches), start=1):
        with torch.set_grad_enabled(index == len(micro_batches)):
            parts.append((*engine.encode(batch), batch.ids))
    return parts


def cache_gradients(
    parts: list[Rows], take_loss: Callable[[Tensor, Tensor, RowIds], LossValue]
) -> tuple[LossValue, list]:
    """The loss over the whole step, and its gradient for each micro-batch's embeddings. (step 2)

    Returns the loss and, per micro-batch, the gradients of queries (b, d) and passages (b, 1 + H, d).
    """
    queries, passages, ids = whole_step(parts)
    queries, passages = queries.detach().requires_grad_(), passages.detach().requires_grad_()  # (N, d), (N, 1 + H, d)
    value = take_loss(queries, passages, ids)
    gradients = torch.autograd.grad(value.value, (queries, passages))
    sizes = [len(part[0]) for part in parts]
    return value.detach(), list(zip(*(gradient.split(sizes) for gradient in gradients), strict=True))


def replay(engine: Engine, micro_batches: list[MicroBatch], last: Rows, cache: list[tuple[Tensor, Tensor]]) -> None:
    """Second pass: encode again with graph and the same dropout, and let the cached gradients flow on. (steps 3 and 4)"""
    _flow(engine, last[0], last[1], cache[-1])  # first of all, so that only one graph stands at a time
    for batch, gradients in zip(engine.micro_steps(micro_batches[:-1]), cache, strict=False):
        queries, passages = engine.encode(batch)
        _flow(engine, queries, passages, gradients)


def _flow(engine: Engine, queries: Tensor, passages: Tensor, gradients: tuple[Tensor, Tensor]) -> None:
    # the gradient of this inner product for the embeddings is the cached one
    engine.backward((queries * gradients[0]).sum() + (passages * gradients[1]).sum())

"""What a method is given for one optimizer step, and the two passes that GradCache and its hybrid share."""

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from contaccum.batch import MicroBatch, RowIds
from contaccum.methods.bank import Bank
from contaccum.methods.loss import InfoNCE, LossValue
from contaccum.methods.objective import Objective


class Engine(Protocol):
    """What a method needs of the machine that it runs on; b = W * B rows, those of all processes in rank order."""

    ahead: int
    """How many micro-batches may be encoded at once where no graph is kept; 1 where dropout has to be replayed."""

    def join(self, micro_batches: list[MicroBatch]) -> MicroBatch:
        """Several micro-batches as one; the rows of each process stay together."""

    def micro_steps(self, micro_batches: list[MicroBatch]) -> Iterator[MicroBatch]:
        """The micro-batches in order, on the device, each with its own dropout noise: the same at every call in one step."""

    def encode(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Queries (b, d) and passages (b, 1 + H, d) of all processes; the rows of this process carry gradient."""

    def backward(self, value: Tensor) -> None:
        """Add this process's share of the gradient of ``value`` to the model; shares are summed at the end of the step."""


Loss = InfoNCE | Objective
"""What a method minimises; both are called alike."""

Method = Callable[[Engine, list[MicroBatch], Bank, Loss], list[LossValue]]
"""One optimizer step: leaves gradients on the model, returns the losses whose mean was differentiated (detached)."""

Rows = tuple[Tensor, Tensor, RowIds]
"""Queries (n, d), passages (n, 1 + H, d) and their ids."""


def whole_step(parts: list[Rows]) -> Rows:
    """The rows of several micro-batches as one block."""
    queries, passages, ids = zip(*parts, strict=True)
    return torch.cat(queries), torch.cat(passages), RowIds.merge(list(ids), torch.cat)


def row_weights(micro_batches: list[MicroBatch], bank: Bank | None = None) -> list[float]:
    """How much each micro-batch's loss counts in the mean over the step's micro-batches; 1 each where all have one size.

    The loss of a micro-batch is a mean over its rows: b pairs and, where ``bank`` brings rows that count, those that the bank
    holds when the step begins. Weighted by its share of all rows it leaves every row of the step the same weight, however
    unequal the cut.
    """
    stored = bank.fill if bank is not None and bank.queries is not None and bank.row_weight == "all" else 0
    rows = [len(batch.ids.columns) + stored for batch in micro_batches]
    return [len(rows) * count / sum(rows) for count in rows]


def represent(engine: Engine, micro_batches: list[MicroBatch]) -> list[Rows]:
    """First pass: the embeddings of every micro-batch, without graph. (Gao et al. 2021, step 1)

    The last micro-batch keeps its graph, which is one micro-batch's memory, and so needs no second forward pass.
    """
    *earlier, last = micro_batches
    groups = [earlier[start : start + engine.ahead] for start in range(0, len(earlier), engine.ahead)] + [[last]]
    parts: list[Rows] = []
    for group, batch in zip(groups, engine.micro_steps([engine.join(group) for group in groups]), strict=True):
        with torch.set_grad_enabled(len(parts) == len(earlier)):
            queries, passages = engine.encode(batch)
        parts += _apart((queries, passages, batch.ids), [len(member.query_ids) for member in group])
    return parts


def _apart(rows: Rows, sizes: list[int]) -> list[Rows]:
    """The rows of joined micro-batches, which have ``sizes`` rows in each process, one by one."""
    queries, passages, ids = rows  # (W * sum(sizes), ...), process after process, so each process's share is divided
    ends = list(accumulate(sizes))

    def piece(tensor: Tensor, end: int, size: int) -> Tensor:
        return tensor.unflatten(0, (-1, sum(sizes)))[:, end - size : end].flatten(0, 1)

    return [
        (piece(queries, *own), piece(passages, *own), RowIds.merge([ids], lambda part, own=own: piece(part[0], *own)))  # type: ignore[misc]
        for own in zip(ends, sizes, strict=True)
    ]


def cache_gradients(
    parts: list[Rows], take_loss: Callable[[Tensor, Tensor, RowIds], LossValue]
) -> tuple[LossValue, list]:
    """The loss over the whole step, and its gradient for each micro-batch's embeddings. (step 2)

    Returns the loss, without graph, and, per micro-batch, the gradients of queries (b, d) and passages (b, 1 + H, d).
    """
    queries, passages, ids = whole_step(parts)
    queries, passages = queries.detach().requires_grad_(), passages.detach().requires_grad_()  # (N, d), (N, 1 + H, d)
    value = take_loss(queries, passages, ids)
    gradients = torch.autograd.grad(value.value, (queries, passages))
    sizes = [len(part[0]) for part in parts]
    per_batch = list(zip(*(gradient.split(sizes) for gradient in gradients), strict=True))
    return value.detach()._replace(previews=value.previews), per_batch


def replay(engine: Engine, micro_batches: list[MicroBatch], last: Rows, cache: list[tuple[Tensor, Tensor]]) -> None:
    """Second pass: encode again with graph and the same dropout, and let the cached gradients flow on. (steps 3 and 4)"""
    _flow(engine, last[0], last[1], cache[-1])  # first of all, so that only one graph stands at a time
    for batch, gradients in zip(engine.micro_steps(micro_batches[:-1]), cache, strict=False):
        queries, passages = engine.encode(batch)
        _flow(engine, queries, passages, gradients)


def _flow(engine: Engine, queries: Tensor, passages: Tensor, gradients: tuple[Tensor, Tensor]) -> None:
    # the gradient of this inner product for the embeddings is the cached one
    engine.backward((queries * gradients[0]).sum() + (passages * gradients[1]).sum())

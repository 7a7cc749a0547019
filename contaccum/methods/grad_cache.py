"""GradCache, with and without a bank.

GradCache computes the loss over a whole step with the memory of one micro-batch, at the cost of a second forward pass. The
functions are named after the steps of the algorithm in Gao et al. 2021 (arXiv 2101.06983).
"""

from collections.abc import Callable
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from contaccum.batch import MicroBatch, RowIds, Rows, concatenate
from contaccum.methods.bank import Bank
from contaccum.methods.loss import LossValue
from contaccum.methods.objective import Loss, StepEngine
from contaccum.methods.replay import Cache, replay_sample


def grad_cache(engine: StepEngine, micro_batches: list[MicroBatch], bank: Bank, loss: Loss) -> list[LossValue]:
    """Compute the loss and the gradients of one optimizer step with GradCache, in two passes over the texts.

    The logits matrix of a step of N pairs has N rows and N (1 + H) columns. H: number of hard negatives of a query. Without
    partial replay, the gradients are those of in_batch, except for rounding.
    """
    parts = represent(engine, micro_batches)
    value, cache = cache_gradients(parts, loss)
    return [replay(engine, micro_batches, parts[-1], cache, value)]


def cont_cache(engine: StepEngine, micro_batches: list[MicroBatch], bank: Bank, loss: Loss) -> list[LossValue]:
    """Compute the loss and the gradients of one optimizer step with GradCache and a bank, in two passes over the texts.

    The logits matrix of a step of N pairs has N current rows and all bank rows. Its columns are N (1 + H) current columns and
    all bank columns. H: number of hard negatives of a query. After the second pass, the N pairs go into the bank.
    """
    parts = represent(engine, micro_batches)
    value, cache = cache_gradients(parts, partial(loss, columns=bank, rows=bank))
    value = replay(engine, micro_batches, parts[-1], cache, value)
    bank.push(*concatenate(parts), value.partials)
    return [value.detach()]


def represent(engine: StepEngine, micro_batches: list[MicroBatch]) -> list[Rows]:
    """Compute the embeddings of every micro-batch: the first pass, step 1 of the paper.

    Without partial replay, the last micro-batch keeps its autograd graph, so the second pass does not encode it again. With
    partial replay, the second pass encodes only a sample of the texts, so all micro-batches are encoded here without a graph.
    """
    earlier, last = (micro_batches[:-1], [micro_batches[-1:]]) if engine.replay_share == 1 else (micro_batches, [])
    groups = _groups(earlier, engine.no_grad_group_size) + last
    parts: list[Rows] = []
    for group, batch in zip(groups, engine.micro_steps([engine.join(group) for group in groups]), strict=True):
        with torch.set_grad_enabled(len(parts) == len(earlier)):
            queries, passages = engine.encode(batch)
        parts += _split((queries, passages, batch.ids), [len(member.query_ids) for member in group])
    return parts


def _groups(micro_batches: list[MicroBatch], size: int) -> list[list[MicroBatch]]:
    """Divide micro-batches into groups to join. A group has at most ``size`` times as many pairs as its first micro-batch.

    A joined group is padded to its longest text. ``micro_batch_tokens`` sorts the micro-batches: the first one has the longest
    texts and the fewest pairs. So a group has about as many padded tokens as ``size`` micro-batches.
    """
    groups: list[list[MicroBatch]] = []
    room = 0
    for batch in micro_batches:
        pairs = len(batch.query_ids)
        if pairs > room:
            groups.append([])
            room = size * pairs
        groups[-1].append(batch)
        room -= pairs
    return groups


def _split(rows: Rows, sizes: list[int]) -> list[Rows]:
    """Undo ``StepEngine.join``: divide ``rows`` into micro-batches. sizes: number of rows per process in each micro-batch."""
    # (W * sum(sizes), ...) for W processes: all rows of process 0, then all rows of process 1, and so on
    queries, passages, ids = rows
    ends = list(accumulate(sizes))

    def piece(tensor: Tensor, end: int, size: int) -> Tensor:
        return tensor.unflatten(0, (-1, sum(sizes)))[:, end - size : end].flatten(0, 1)

    return [
        (piece(queries, *own), piece(passages, *own), RowIds.merge([ids], lambda part, own=own: piece(part[0], *own)))  # type: ignore[misc]
        for own in zip(ends, sizes, strict=True)
    ]


def cache_gradients(parts: list[Rows], loss: Callable[[Tensor, Tensor, RowIds], LossValue]) -> tuple[LossValue, Cache]:
    """Return the loss of the step, without graph, and its gradients for each micro-batch's embeddings (step 2 of the paper)."""
    queries, passages, ids = concatenate(parts)
    queries, passages = queries.detach().requires_grad_(), passages.detach().requires_grad_()  # (N, d), (N, 1 + H, d)
    value = loss(queries, passages, ids)
    gradients = torch.autograd.grad(value.value, (queries, passages))
    sizes = [len(part[0]) for part in parts]
    per_batch = list(zip(*(gradient.split(sizes) for gradient in gradients), strict=True))
    return value.detach()._replace(partials=value.partials), per_batch


def replay(
    engine: StepEngine, micro_batches: list[MicroBatch], last: Rows, cache: Cache, value: LossValue
) -> LossValue:
    """Make the second pass: encode texts again with a graph, and backpropagate their cached gradients (paper: steps 3, 4).

    Without partial replay, the dropout noise is that of the first pass. last: the rows of the last micro-batch, with the graph
    from the first pass; partial replay does not use ``last``. Returns ``value``. With partial replay, the field ``replayed`` is
    set.
    """
    if engine.replay_share < 1:
        return value._replace(replayed=replay_sample(engine, micro_batches, cache))
    _backward(engine, last[0], last[1], cache[-1])  # first, to free the graph of the first pass
    for batch, gradients in zip(engine.micro_steps(micro_batches[:-1]), cache, strict=False):
        queries, passages = engine.encode(batch)
        _backward(engine, queries, passages, gradients)
    return value


def _backward(engine: StepEngine, queries: Tensor, passages: Tensor, gradients: tuple[Tensor, Tensor]) -> None:
    # the gradient of this inner product with respect to the embeddings is the cached gradient
    engine.backward((queries * gradients[0]).sum() + (passages * gradients[1]).sum())

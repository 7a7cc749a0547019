"""GradCache, with and without a bank.

GradCache computes the loss over a whole step with the memory of one micro-batch, at the cost of a
second forward pass. The functions are named after the steps of the algorithm in Gao et al. 2021
(arXiv 2101.06983).
"""

from dataclasses import replace

import torch
from torch import Tensor

from contaccum.batch import MicroBatch, Rows, concatenate
from contaccum.methods.bank import Bank
from contaccum.methods.loss import LossValue
from contaccum.methods.objective import Loss, StepEngine
from contaccum.methods.replay import Cache, replay_sample


def grad_cache(
    engine: StepEngine, micro_batches: list[MicroBatch], bank: Bank, loss: Loss
) -> list[LossValue]:
    """Compute the loss and the gradients of one step with GradCache, in two passes.

    The logits matrix of a step of N pairs has N rows and N (1 + H) columns. H: number of hard
    negatives of a query. Without partial replay, the gradients are those of in_batch, except for
    rounding.
    """
    parts = represent(engine, micro_batches)
    value, cache = cache_gradients(parts, loss)
    return [replay(engine, micro_batches, parts[-1], cache, value.detach())]


def cont_cache(
    engine: StepEngine, micro_batches: list[MicroBatch], bank: Bank, loss: Loss
) -> list[LossValue]:
    """Compute the loss and the gradients of one step with GradCache and a bank, in two passes.

    The logits matrix of a step of N pairs has N current rows and all bank rows. Its columns are N
    (1 + H) current columns and all bank columns. H: number of hard negatives of a query. After the
    loss, the N pairs go into the bank.
    """
    parts = represent(engine, micro_batches)
    value, cache = cache_gradients(parts, loss, bank)
    # before the second pass, which needs the memory of these logits
    bank.push(*concatenate(parts), value.computed)
    return [replay(engine, micro_batches, parts[-1], cache, value.detach())]


def represent(engine: StepEngine, micro_batches: list[MicroBatch]) -> list[Rows]:
    """Compute the embeddings of every micro-batch: the first pass, step 1 of the paper.

    Without partial replay, the last micro-batch keeps its autograd graph, so the second pass does
    not encode it again. With partial replay, the second pass encodes only a sample of the texts, so
    all micro-batches are encoded here without a graph.
    """
    keep_last = engine.replay_share == 1
    without_graph = micro_batches[:-1] if keep_last else micro_batches
    # The dropout noise depends on the index of a pass in the step. With dropout, the group size is
    # 1, so a micro-batch has the same index here and in the second pass.
    groups = _groups(without_graph, engine.no_grad_group_size, engine.padded)
    with_graph = [False] * len(groups)
    if keep_last:
        groups.append(micro_batches[-1:])
        with_graph.append(True)
    joined = [engine.join(group) for group in groups]
    parts: list[Rows] = []
    for group, batch, graph in zip(groups, engine.micro_steps(joined), with_graph, strict=True):
        with torch.set_grad_enabled(graph):
            queries, passages = engine.encode(batch)
        parts += _split((queries, passages, batch.ids), [len(member.query_ids) for member in group])
    return parts


def _groups(micro_batches: list[MicroBatch], size: int, padded: bool) -> list[list[MicroBatch]]:
    """Divide micro-batches into groups to join.

    Without padding, a group has ``size`` micro-batches. With padding, it has at most ``size`` times
    as many pairs as its first micro-batch.

    A joined group is padded to its longest text. ``micro_batch_tokens`` sorts the micro-batches:
    the first one has the longest texts and the fewest pairs. So a group has about as many padded
    tokens as ``size`` micro-batches.
    """
    if not padded:
        return [micro_batches[i : i + size] for i in range(0, len(micro_batches), size)]
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
    """Undo ``StepEngine.join``: divide ``rows`` into micro-batches.

    rows: W * sum(sizes) pairs of W processes, all pairs of process 0, then all pairs of process 1,
    and so on. sizes: number of pairs per process in each micro-batch.
    """
    queries, passages, ids = rows

    def split(tensor: Tensor) -> list[Tensor]:
        by_process = tensor.unflatten(0, (-1, sum(sizes)))  # (W, sum(sizes), ...)
        return [part.flatten(0, 1) for part in by_process.split(sizes, dim=1)]

    numbers = torch.arange(len(queries))
    parts = [ids[numbers_of_part] for numbers_of_part in split(numbers)]
    return list(zip(split(queries), split(passages), parts, strict=True))


def cache_gradients(
    parts: list[Rows], loss: Loss, bank: Bank | None = None
) -> tuple[LossValue, Cache]:
    """Return the loss of the step, without graph, and its gradients for the embeddings.

    This is step 2 of the paper.
    """
    queries, passages, ids = concatenate(parts)
    queries = queries.detach().requires_grad_()  # (N, d)
    passages = passages.detach().requires_grad_()  # (N, 1 + H, d)
    value = loss(queries, passages, ids, bank)
    for_queries, for_passages = torch.autograd.grad(value.value, (queries, passages))
    sizes = [len(part[0]) for part in parts]
    cache = list(zip(for_queries.split(sizes), for_passages.split(sizes), strict=True))
    return replace(value.detach(), computed=value.computed), cache


def replay(
    engine: StepEngine, micro_batches: list[MicroBatch], last: Rows, cache: Cache, value: LossValue
) -> LossValue:
    """Make the second pass: encode with a graph, and backpropagate the cached gradients.

    These are the steps 3 and 4 of the paper. Without partial replay, the dropout noise is that of
    the first pass. last: the rows of the last micro-batch, with the graph from the first pass;
    partial replay does not use it. Returns ``value``. Partial replay adds its share and its
    variance to the statistics.
    """
    if engine.replay_share < 1:
        share, variance = replay_sample(engine, micro_batches, cache)
        replayed = {"replay_share": share, "replay_variance": variance}
        return replace(value, statistics={**value.statistics, **replayed})
    _backward(engine, last[0], last[1], cache[-1])  # first, to free the graph of the first pass
    others = engine.micro_steps(micro_batches[:-1])
    for batch, gradients in zip(others, cache[:-1], strict=True):
        queries, passages = engine.encode(batch)
        _backward(engine, queries, passages, gradients)
    return value


def _backward(
    engine: StepEngine, queries: Tensor, passages: Tensor, gradients: tuple[Tensor, Tensor]
) -> None:
    # the gradient of this inner product with respect to the embeddings is the cached gradient
    engine.backward((queries * gradients[0]).sum() + (passages * gradients[1]).sum())

"""GradCache, with and without a bank.

GradCache computes the loss over a whole step with the memory of one micro-batch, at the cost of a
second forward pass. The functions are named after the steps of the algorithm in Gao et al. 2021
(arXiv 2101.06983).
"""

from dataclasses import replace

import torch
from torch import Tensor

from contaccum.batch import MicroBatch, RowIds, step_ids
from contaccum.methods.bank import Bank
from contaccum.methods.loss import LossValue
from contaccum.methods.objective import Loss
from contaccum.methods.replay import sample
from contaccum.methods.step_engine import StepEngine, StepTexts


def grad_cache(
    engine: StepEngine, micro_batches: list[MicroBatch], bank: Bank, loss: Loss
) -> list[LossValue]:
    """Compute the loss and the gradients of one step with GradCache, in two passes.

    The logits matrix of a step of N pairs has N rows and N (1 + H) columns. H: number of hard
    negatives of a query. Without partial replay, the gradients are those of in_batch, except for
    rounding.
    """
    texts = engine.texts(micro_batches)
    queries, passages, kept = represent(engine, texts)
    value, gradients = cache_gradients(queries, passages, step_ids(micro_batches), loss)
    return [replay(engine, texts, kept, gradients, value)]


def cont_cache(
    engine: StepEngine, micro_batches: list[MicroBatch], bank: Bank, loss: Loss
) -> list[LossValue]:
    """Compute the loss and the gradients of one step with GradCache and a bank, in two passes.

    The logits matrix of a step of N pairs has N current rows and all bank rows. Its columns are N
    (1 + H) current columns and all bank columns. H: number of hard negatives of a query. After the
    loss, the N pairs go into the bank.
    """
    texts = engine.texts(micro_batches)
    queries, passages, kept = represent(engine, texts)
    ids = step_ids(micro_batches)
    value, gradients = cache_gradients(queries, passages, ids, loss, bank)
    bank.push(queries, passages, ids, value.bank_logits)
    value = value.detach()  # frees the bank logits, whose memory the second pass needs
    return [replay(engine, texts, kept, gradients, value)]


def represent(engine: StepEngine, texts: StepTexts) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Compute the embeddings of the step: the first pass, step 1 of the paper.

    Returns the queries (N, d) and the passages (N, 1 + H, d) without graph, and the embeddings of
    the last of ``passes`` (see ``kept_passes``) with their graph, (t, d) each.
    """
    first_kept = len(texts.passes) - kept_passes(engine, texts)
    without_graph, with_graph = texts.passes[:first_kept], texts.passes[first_kept:]
    if engine.no_grad_group_size > 1 and without_graph:
        # Larger passes. The group size is above 1 only if there is no dropout in them, so no noise
        # must be that of the second pass.
        numbers = torch.cat([each.text_numbers for each in without_graph])
        without_graph = texts.passes_of(numbers, engine.no_grad_group_size)
    with torch.no_grad():
        vectors = list(engine.encoded(without_graph))
    kept = list(engine.encoded(with_graph))
    vectors += [each.detach() for each in kept]
    queries, passages = texts.gather(without_graph + with_graph, vectors)
    return queries, passages, kept


def kept_passes(engine: StepEngine, texts: StepTexts) -> int:
    """Return how many of the last passes keep their graph, so that their texts are encoded once.

    One, because its graph has the size of a micro-batch; in a step of one micro-batch, all. With
    partial replay, none, because the second pass encodes only a sample of the texts.
    """
    if engine.replay_share < 1:
        return 0
    return len(texts.passes) if len(texts.pairs) == 1 else 1


def cache_gradients(
    queries: Tensor, passages: Tensor, ids: RowIds, loss: Loss, bank: Bank | None = None
) -> tuple[LossValue, tuple[Tensor, Tensor]]:
    """Return the loss of the step, without graph, and its gradients for the embeddings.

    queries: (N, d). passages: (N, 1 + H, d). This is step 2 of the paper.
    """
    queries, passages = queries.requires_grad_(), passages.requires_grad_()
    value = loss(queries, passages, ids, bank)
    for_queries, for_passages = torch.autograd.grad(value.value, (queries, passages))
    return replace(value.detach(), bank_logits=value.bank_logits), (for_queries, for_passages)


def replay(
    engine: StepEngine,
    texts: StepTexts,
    kept: list[Tensor],
    gradients: tuple[Tensor, Tensor],
    value: LossValue,
) -> LossValue:
    """Make the second pass: encode with a graph, and backpropagate the cached gradients.

    These are the steps 3 and 4 of the paper. Without partial replay, the dropout noise is that of
    the first pass. kept: the result of ``represent``. Returns ``value``. Partial replay adds its
    share and its variance to the statistics.
    """
    passes = texts.passes
    statistics: dict[str, float | Tensor] = {}
    if engine.replay_share < 1:
        gradients, numbers, statistics = sample(engine, texts, gradients)
        passes = texts.passes_of(numbers)
    of_passes = texts.rows_of(passes, *gradients)
    # The gradient of an inner product with respect to the embeddings is the other factor, here the
    # cached gradient. The last passes come first, to free the graphs of the first pass.
    to_encode = len(passes) - len(kept)  # number of passes without a graph
    if kept:
        pairs = zip(kept, of_passes[to_encode:], strict=True)
        engine.backward(torch.stack([(vectors * each).sum() for vectors, each in pairs]).sum())
    for vectors, each in zip(
        engine.encoded(passes[:to_encode]), of_passes[:to_encode], strict=True
    ):
        engine.backward((vectors * each).sum())
    return replace(value, statistics={**value.statistics, **statistics})

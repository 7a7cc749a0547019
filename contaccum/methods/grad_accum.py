"""Gradient accumulation: each query is compared only with the passages of its micro-batch."""

from contaccum.batch import MicroBatch
from contaccum.methods.bank import Bank
from contaccum.methods.loss import LossValue, row_weights
from contaccum.methods.objective import Loss
from contaccum.methods.step_engine import StepEngine


def grad_accum(
    engine: StepEngine, micro_batches: list[MicroBatch], bank: Bank, loss: Loss
) -> list[LossValue]:
    """Compute the losses and gradients of one optimizer step with gradient accumulation.

    Each text is encoded once.

    The logits matrix of a micro-batch of b pairs has b rows and b (1 + H) columns. H: number of
    hard negatives of a query.
    """
    values = []
    for batch, weight in zip(
        engine.micro_steps(micro_batches), row_weights(micro_batches), strict=True
    ):
        queries, passages = engine.encode(batch)  # (b, d), (b, 1 + H, d)
        value = loss(queries, passages, batch.ids).weighted(weight, weight)
        engine.backward(value.value / len(micro_batches))
        values.append(value.detach())
    return values

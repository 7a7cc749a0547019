"""Vanilla gradient accumulation: every micro-batch is compared with itself alone."""

from contaccum.batch import MicroBatch
from contaccum.methods.bank import Bank
from contaccum.methods.loss import LossValue
from contaccum.methods.step import Engine, Loss, row_weights


def grad_accum(engine: Engine, micro_batches: list[MicroBatch], bank: Bank, loss: Loss) -> list[LossValue]:
    """One pass; b rows, b (1 + H) columns."""
    values = []
    for batch, weight in zip(engine.micro_steps(micro_batches), row_weights(micro_batches), strict=True):
        queries, passages = engine.encode(batch)  # (b, d), (b, 1 + H, d)
        value = loss(queries, passages, batch.ids).weighted(weight)
        engine.backward(value.value / len(micro_batches))
        values.append(value.detach())
    return values

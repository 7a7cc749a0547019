"""The hybrid: GradCache over the step's own pairs, and the two banks of CONTACCUM over the steps before."""

from functools import partial

from contaccum.batch import MicroBatch
from contaccum.methods.bank import Bank
from contaccum.methods.loss import LossValue
from contaccum.methods.step import Engine, Loss, cache_gradients, replay, represent, whole_step


def cont_cache(engine: Engine, micro_batches: list[MicroBatch], bank: Bank, loss: Loss) -> list[LossValue]:
    """Two passes; N current rows and the bank's, N (1 + H) current columns and the bank's."""
    parts = represent(engine, micro_batches)
    value, cache = cache_gradients(parts, partial(loss, columns=bank, rows=bank))
    replay(engine, micro_batches, parts[-1], cache)
    bank.push(*whole_step(parts), value.previews)
    return [value.detach()]

"""GradCache: the whole step is compared with itself at the memory of one micro-batch, for a second forward pass.

Source: Gao et al. 2021 (arXiv 2101.06983).
"""

from contaccum.batch import MicroBatch
from contaccum.methods.bank import Bank
from contaccum.methods.loss import LossValue
from contaccum.methods.step import Engine, Loss, cache_gradients, replay, represent


def grad_cache(engine: Engine, micro_batches: list[MicroBatch], bank: Bank, loss: Loss) -> list[LossValue]:
    """Two passes; N rows, N (1 + H) columns. Equal to in_batch to rounding."""
    parts = represent(engine, micro_batches)
    value, cache = cache_gradients(parts, loss)
    replay(engine, micro_batches, parts[-1], cache)
    return [value]

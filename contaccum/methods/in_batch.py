"""In-batch negatives: the whole step is compared with itself, and its graph is held until the one backward pass.

Source: Karpukhin et al. 2020 (arXiv 2004.04906), section 3.2.
"""

from contaccum.batch import MicroBatch
from contaccum.methods.bank import Bank
from contaccum.methods.loss import LossValue
from contaccum.methods.step import Engine, Loss, whole_step


def in_batch(engine: Engine, micro_batches: list[MicroBatch], bank: Bank, loss: Loss) -> list[LossValue]:
    """One pass; N rows, N (1 + H) columns. Memory follows N."""
    parts = [(*engine.encode(batch), batch.ids) for batch in engine.micro_steps(micro_batches)]
    value = loss(*whole_step(parts))
    engine.backward(value.value)
    return [value.detach()]

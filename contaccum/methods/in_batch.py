"""In-batch negatives: one loss over the whole step.

The graph of the whole step is in memory at once.

Source: Karpukhin et al. 2020 (arXiv 2004.04906), section 3.2.
"""

from contaccum.batch import MicroBatch, step_ids
from contaccum.methods.bank import Bank
from contaccum.methods.loss import LossValue
from contaccum.methods.objective import Loss
from contaccum.methods.step_engine import StepEngine


def in_batch(
    engine: StepEngine, micro_batches: list[MicroBatch], bank: Bank, loss: Loss
) -> list[LossValue]:
    """Compute the loss and the gradients of one optimizer step with in-batch negatives.

    Each text is encoded once.

    The logits matrix of a step of N pairs has N rows and N (1 + H) columns. H: number of hard
    negatives of a query. The memory of the step grows with N.
    """
    texts = engine.texts(micro_batches)
    queries, passages = texts.gather(texts.passes, list(engine.encoded(texts.passes)))
    value = loss(queries, passages, step_ids(micro_batches))
    engine.backward(value.value)
    return [value.detach()]

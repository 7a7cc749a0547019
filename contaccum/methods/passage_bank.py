"""Pre-batch negatives: a bank of past passages adds columns, and nothing balances the two towers' gradients.

Source: Lee et al. 2021 (arXiv 2012.12624), "pre-batch negatives"; Kim et al. 2024 (arXiv 2406.12356), "without query bank".
"""

from contaccum.batch import MicroBatch
from contaccum.methods.bank import Bank
from contaccum.methods.loss import LossValue
from contaccum.methods.step import Engine, Loss, row_weights


def passage_bank(engine: Engine, micro_batches: list[MicroBatch], bank: Bank, loss: Loss) -> list[LossValue]:
    """One pass; b rows, b (1 + H) current columns and the bank's."""
    values = []
    for batch, weight in zip(engine.micro_steps(micro_batches), row_weights(micro_batches), strict=True):
        queries, passages = engine.encode(batch)  # (b, d), (b, 1 + H, d)
        value = loss(queries, passages, batch.ids, columns=bank).weighted(weight)
        engine.backward(value.value / len(micro_batches))
        bank.push(queries, passages, batch.ids)
        values.append(value.detach())
    return values

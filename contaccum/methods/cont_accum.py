"""CONTACCUM: gradient accumulation with two banks; past passages add columns, past queries add rows.

Source: Kim et al. 2024 (arXiv 2406.12356), eq. 5-9.
"""

from contaccum.batch import MicroBatch
from contaccum.methods.bank import Bank
from contaccum.methods.loss import LossValue
from contaccum.methods.step import Engine, Loss, row_weights


def cont_accum(engine: Engine, micro_batches: list[MicroBatch], bank: Bank, loss: Loss) -> list[LossValue]:
    """One pass; b current rows and the bank's, b (1 + H) current columns and the bank's."""
    values = []
    weights = row_weights(micro_batches, bank), row_weights(micro_batches)
    for batch, *own in zip(engine.micro_steps(micro_batches), *weights, strict=True):
        queries, passages = engine.encode(batch)  # (b, d), (b, 1 + H, d)
        value = loss(queries, passages, batch.ids, columns=bank, rows=bank).weighted(*own)
        engine.backward(value.value / len(micro_batches))
        bank.push(queries, passages, batch.ids, value.previews)
        values.append(value.detach())
    return values

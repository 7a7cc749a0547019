"""Gradient accumulation with a bank of past pairs.

The two methods are CONTACCUM and pre-batch negatives.

Source of CONTACCUM: Kim et al. 2024 (arXiv 2406.12356), eq. 5-9. Sources of pre-batch negatives:
Lee et al. 2021 (arXiv 2012.12624), and the ablation "without query bank" of Kim et al.
"""

from contaccum.batch import MicroBatch
from contaccum.methods.bank import Bank
from contaccum.methods.loss import LossValue, row_weights
from contaccum.methods.objective import Loss
from contaccum.methods.step_engine import StepEngine


def cont_accum(
    engine: StepEngine, micro_batches: list[MicroBatch], bank: Bank, loss: Loss
) -> list[LossValue]:
    """Compute the losses and gradients of a step with CONTACCUM. Each text is encoded once.

    The logits matrix of a micro-batch of b pairs has b current rows and all bank rows. Its columns
    are b (1 + H) current columns and all bank columns. H: number of hard negatives of a query.
    After the backward pass, the b pairs are pushed into the bank.
    """
    values = []
    weights = zip(row_weights(micro_batches, bank), row_weights(micro_batches), strict=True)
    for batch, (row_weight, pair_weight) in zip(
        engine.micro_steps(micro_batches), weights, strict=True
    ):
        queries, passages = engine.encode(batch)  # (b, d), (b, 1 + H, d)
        value = loss(queries, passages, batch.ids, bank).weighted(row_weight, pair_weight)
        engine.backward(value.value / len(micro_batches))
        bank.push(queries, passages, batch.ids, value.bank_logits)
        values.append(value.detach())
    return values


def passage_bank(
    engine: StepEngine, micro_batches: list[MicroBatch], bank: Bank, loss: Loss
) -> list[LossValue]:
    """Compute the losses and gradients of one optimizer step with pre-batch negatives.

    Each text is encoded once.

    This is CONTACCUM with a bank that stores only passages. So the logits matrix of a micro-batch
    of b pairs has b current rows and no bank rows. Its columns are b (1 + H) current columns and
    all bank columns.
    """
    assert bank.queries is None, "passage_bank needs a bank with columns_only"
    return cont_accum(engine, micro_batches, bank, loss)

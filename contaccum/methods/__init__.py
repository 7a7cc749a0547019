"""The six training methods: name -> function. All functions have the same signature."""

from collections.abc import Callable

from contaccum.batch import MicroBatch
from contaccum.methods.bank import Bank
from contaccum.methods.cont_accum import cont_accum, passage_bank
from contaccum.methods.grad_accum import grad_accum
from contaccum.methods.grad_cache import cont_cache, grad_cache
from contaccum.methods.in_batch import in_batch
from contaccum.methods.loss import LossValue
from contaccum.methods.objective import Loss
from contaccum.methods.step_engine import StepEngine

Method = Callable[[StepEngine, list[MicroBatch], Bank, Loss], list[LossValue]]
"""Function that computes the losses and gradients of one optimizer step.

The gradient of the step's mean loss is added to the gradients of the model. Returns one loss per
micro-batch, or one loss for the whole step. The returned losses have no graph.
"""

METHODS: dict[str, Method] = {
    "in_batch": in_batch,
    "grad_accum": grad_accum,
    "grad_cache": grad_cache,
    "passage_bank": passage_bank,
    "cont_accum": cont_accum,
    "cont_cache": cont_cache,
}

"""The six memory methods by name. One signature, one step; only the mathematics differs."""

from contaccum.methods.cont_accum import cont_accum
from contaccum.methods.cont_cache import cont_cache
from contaccum.methods.grad_accum import grad_accum
from contaccum.methods.grad_cache import grad_cache
from contaccum.methods.in_batch import in_batch
from contaccum.methods.passage_bank import passage_bank
from contaccum.methods.step import Method

METHODS: dict[str, Method] = {
    "in_batch": in_batch,
    "grad_accum": grad_accum,
    "grad_cache": grad_cache,
    "passage_bank": passage_bank,
    "cont_accum": cont_accum,
    "cont_cache": cont_cache,
}

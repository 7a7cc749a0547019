"""The equivalences of test_methods.py on a GPU, which may add numbers in another order.

Skipped without a GPU.
"""

import pytest
import torch
from helpers import largest_difference, micro_batches, run_steps, tiny_encoder

from contaccum.methods import METHODS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]

# largest relative difference of a gradient that rounding can cause
TOLERANCE = {
    "fp32": 1e-4,
    "bf16": 5e-2,
}
DEVICE = "auto"


def steps(count=3):
    return [micro_batches(4, 4, hard_negatives=1, seed=i) for i in range(count)]


@pytest.mark.parametrize("precision", TOLERANCE)
def test_grad_cache_equals_in_batch(precision):
    """With dropout, whose noise the second pass must repeat.

    The control is a method with fewer negatives.
    """
    options = {"device": DEVICE, "precision": precision, "dropout": 0.3}
    cached, _ = run_steps("grad_cache", steps(1), **options)
    assert (
        largest_difference(cached, run_steps("in_batch", steps(1), **options)[0])
        < TOLERANCE[precision]
    )
    assert (
        largest_difference(cached, run_steps("grad_accum", steps(1), **options)[0])
        > 2 * TOLERANCE[precision]
    )


@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize(
    ("banked", "plain"),
    [("passage_bank", "grad_accum"), ("cont_accum", "grad_accum"), ("cont_cache", "grad_cache")],
)
def test_a_bank_of_size_zero_is_the_method_without_a_bank(banked, plain, precision):
    options = {"device": DEVICE, "precision": precision}
    without, _ = run_steps(plain, steps(), **options)
    empty, _ = run_steps(banked, steps(), bank_size=0, **options)
    assert largest_difference(empty, without) < TOLERANCE[precision]
    full, _ = run_steps(
        banked, steps(), bank_size=16, push=16 if banked == "cont_cache" else 4, **options
    )
    assert largest_difference(full[1:], without[1:]) > 2 * TOLERANCE[precision]


def test_cont_accum_without_bank_queries_is_passage_bank():
    options = {"device": DEVICE, "bank_size": 16}
    passages_only, _ = run_steps("passage_bank", steps(), **options)
    found, _ = run_steps("cont_accum", steps(), columns_only=True, **options)
    assert largest_difference(found, passages_only) < TOLERANCE["fp32"]
    assert largest_difference(run_steps("cont_accum", steps(), **options)[0], passages_only) > 1e-3


@pytest.mark.parametrize("method", list(METHODS))
def test_gradients_equal_those_on_the_cpu(method):
    start = tiny_encoder()
    options = {"bank_size": 16, "push": 16 if method == "cont_cache" else 4, "encoder": start}
    on_cpu, losses = run_steps(method, steps(2), **options)
    found, found_losses = run_steps(method, steps(2), device=DEVICE, **options)
    on_gpu = [{name: gradient.cpu() for name, gradient in step.items()} for step in found]
    assert largest_difference(on_gpu, on_cpu) < 1e-3
    assert found_losses == pytest.approx(losses, rel=1e-4)

"""The switches that need a GPU, against the plain path on the same GPU."""

import copy

import pytest
import torch
from helpers import largest_difference, micro_batches, run_steps, tiny_encoder
from transformers.utils import is_flash_attn_2_available

from contaccum.config import OptimConfig
from contaccum.methods import METHODS
from contaccum.training.optimizer import make_optimizer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
BANK = {"bank_size": 16, "push": 12, "device": "auto"}


def steps():
    return [micro_batches(3, 4, 1, seed=i) for i in range(3)]


@pytest.mark.parametrize("method", [name for name in METHODS if name != "in_batch"])
def test_graphs_give_the_gradients_of_plain_kernels(method):
    plain, _ = run_steps(method, steps(), **BANK)
    found, _ = run_steps(method, steps(), **BANK, switch=lambda encoder: encoder.compile_backbones(graphs=True))
    for one, other in zip(found, plain, strict=True):
        for name in one.keys() - other.keys():
            assert not one.pop(name).any()
    assert largest_difference(found, plain) < 1e-3


def test_graphs_replay_their_dropout():
    def graphs(encoder):
        encoder.compile_backbones(graphs=True)

    cached, _ = run_steps("grad_cache", steps(), dropout=0.3, device="auto", switch=graphs)
    again, _ = run_steps("grad_cache", steps(), dropout=0.3, device="auto", switch=graphs)
    other, _ = run_steps("grad_cache", steps(), dropout=0.3, device="auto", switch=graphs, seed=1)
    assert largest_difference(cached, again) < 1e-3
    assert largest_difference(cached, other) > 1e-2


@pytest.mark.parametrize(("precision", "same"), [("fp32", 1e-4), ("bf16", 0.05)])
@pytest.mark.parametrize(
    "attention",
    [
        "auto",
        pytest.param(
            "flash_attention_2",
            marks=pytest.mark.skipif(not is_flash_attn_2_available(), reason="needs the package flash-attn"),
        ),
    ],
)
def test_unpadded_gradients_are_the_padded_ones(precision, same, attention):
    if attention == "flash_attention_2" and precision == "fp32":
        pytest.skip("flash-attn computes in half precision only")
    plain, _ = run_steps("cont_accum", steps(), precision=precision, **BANK)
    found, _ = run_steps(
        "cont_accum",
        steps(),
        precision=precision,
        **BANK,
        switch=lambda encoder: encoder.set_attention(attention, True),
    )
    assert largest_difference(found[:1], plain[:1]) < same


def test_eight_bit_adamw_stays_close_on_cuda():
    pytest.importorskip("bitsandbytes", reason="needs the extra bitsandbytes")
    start, ends = tiny_encoder().cuda().train(), []
    for name in ("adamw", "adamw_8bit"):
        encoder = copy.deepcopy(start)
        optimizer = make_optimizer(encoder, OptimConfig(name=name, learning_rate=1e-3))
        for batch in micro_batches(5, 4):
            queries, passages = encoder(batch.to(torch.device("cuda")))
            (queries * passages[:, 0]).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append(torch.cat([parameter.detach().flatten() for parameter in encoder.parameters()]))
    origin = torch.cat([parameter.detach().flatten() for parameter in start.parameters()])
    assert (ends[1] - ends[0]).abs().sum() < 0.2 * (ends[0] - origin).abs().sum()

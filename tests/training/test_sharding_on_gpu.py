"""Sharded weights on a GPU, with NCCL in one process, compared with unsharded weights on the same
GPU. Skipped without a GPU."""

import copy

import pytest
import torch
import torch.distributed as dist
from helpers import gradients, largest_difference, make_bank, micro_batches, tiny_encoder

from contaccum.methods import METHODS
from contaccum.methods.loss import InfoNCE
from contaccum.runtime import sharding
from contaccum.runtime.engine import Engine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]


@pytest.fixture
def nccl(tmp_path):
    """Process group of one process. One GPU cannot hold two processes of NCCL."""
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def steps(
    method, encoder, precision, sharded, offload=False
) -> tuple[list[dict[str, torch.Tensor]], list[float]]:
    """Return gradients and losses of two steps."""
    engine, loss = Engine(device="auto", precision=precision), InfoNCE(0.1)
    encoder = copy.deepcopy(encoder).train()
    if sharded:
        engine.shard(encoder, offload)
    else:
        encoder.to(engine.device)
    engine.prepare(encoder, torch.optim.AdamW(encoder.parameters(), lr=1e-3))
    bank = make_bank(16, encoder.dim, loss, push=12, device=engine.device, hard_negatives=1)
    found, losses = [], []
    for number in range(2):
        engine.begin_step(number)
        values = METHODS[method](engine, micro_batches(3, 4, 1, seed=number), bank, loss)
        losses.append(torch.stack([value.value for value in values]).mean().item())
        found.append({name: sharding.full(each).cpu() for name, each in gradients(encoder).items()})
        engine.update()
        bank.end_step()
    return found, losses


@pytest.mark.parametrize(("precision", "same"), [("fp32", 1e-4), ("bf16", 0.05)])
@pytest.mark.parametrize("method", ["grad_cache", "cont_accum"])
@pytest.mark.parametrize("offload", [False, True])
def test_sharded_gradients_equal_unsharded(method, precision, same, offload, nccl):
    encoder = tiny_encoder()
    whole, losses = steps(method, encoder, precision, sharded=False)
    found, sharded_losses = steps(method, encoder, precision, sharded=True, offload=offload)
    assert largest_difference(found[:1], whole[:1]) < same
    assert sharded_losses == pytest.approx(losses, rel=same)
    other, _ = steps(method, tiny_encoder(seed=1), precision, sharded=False)  # negative control
    assert largest_difference(other[:1], whole[:1]) > 2 * same

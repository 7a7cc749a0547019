"""Options that need a GPU, compared with the plain path on the same GPU."""

import copy

import pytest
import torch
from helpers import largest_difference, make_bank, micro_batches, run_steps, tiny_encoder
from test_unpadded import differences, load

from contaccum.config import OptimConfig
from contaccum.encoder.kernels import by_length, varlen
from contaccum.methods import METHODS
from contaccum.methods.loss import InfoNCE
from contaccum.runtime.engine import Engine
from contaccum.training.parts import make_optimizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


BANK = {"bank_size": 16, "push": 12, "device": "auto"}


def steps():
    return [micro_batches(3, 4, 1, seed=i) for i in range(3)]


@pytest.mark.parametrize(("precision", "same"), [("fp32", 1e-4), ("bf16", 0.05)])
def test_unpadded_gradients_equal_padded(precision, same):
    plain, _ = run_steps("cont_accum", steps(), precision=precision, **BANK)
    found, _ = run_steps(
        "cont_accum",
        steps(),
        precision=precision,
        **BANK,
        switch=lambda encoder: encoder.set_attention("auto", True),
    )
    assert largest_difference(found[:1], plain[:1]) < same


SWITCHES = {
    "eager": lambda encoder: None,
    "unpadded": lambda encoder: encoder.set_attention("auto", unpad=True),
}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("switch", SWITCHES)
def test_both_passes_of_grad_cache_give_the_same_embeddings(switch, precision):
    """With dropout 0.1: the second pass repeats the noise of the first one, and another step draws
    other noise."""
    encoder = tiny_encoder(0.1).cuda().train()
    SWITCHES[switch](encoder)
    engine = Engine(device="auto", precision=precision)
    engine.prepare(encoder, torch.optim.SGD(encoder.parameters(), lr=0.1))
    batches = micro_batches(3, 4, 1)

    def embeddings(step: int, graph: bool) -> torch.Tensor:
        engine.begin_step(step)
        found = []
        with torch.set_grad_enabled(graph):
            for vectors in engine.encoded(engine.texts(batches).passes):
                found.append(vectors.detach().clone())
                if graph:
                    engine.backward(vectors.sum())
        return torch.cat(found).float()

    for _ in range(3):  # compiled passes settle
        embeddings(0, graph=False), embeddings(0, graph=True)
    same = 1e-5 if precision == "fp32" else 0.02
    first, second, other = (
        embeddings(0, graph=False),
        embeddings(0, graph=True),
        embeddings(1, graph=True),
    )
    engine.close()
    assert (first - second).abs().max() < same
    assert (first - other).abs().max() > 2 * same


@pytest.mark.parametrize(
    ("dtype", "same", "window"),
    [(torch.float32, 2e-5, None), (torch.bfloat16, 0.02, None), (torch.bfloat16, 0.02, 3)],
)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("width", [12, 64])
def test_varlen_kernels_equal_attention_by_length(width, causal, dtype, same, window):
    torch.manual_seed(0)
    bounds = torch.tensor([0, 5, 14, 17], dtype=torch.int32, device="cuda")
    # two heads of the queries share one of the keys
    inputs = [
        torch.randn(1, heads, 17, width, dtype=dtype, device="cuda", requires_grad=True)
        for heads in (2, 1, 1)
    ]
    exact_inputs = [each.detach().double().requires_grad_() for each in inputs]
    runs = ((1, 5), (1, 9), (1, 3))
    output = varlen(inputs, 0.0, 0.3, bounds, 9, causal, window)
    exact = by_length(exact_inputs, 0.0, 0.3, runs, causal, window)
    other = by_length(exact_inputs, 0.0, 0.3, runs, not causal, window)

    def values(output, inputs):
        return [output, *torch.autograd.grad(output.double().square().sum(), inputs)]

    found, expected = values(output, inputs), values(exact, exact_inputs)
    # of the largest value: rounding to bfloat16 alone gives up to 0.01
    for one, two in zip(found, expected, strict=True):
        assert (one - two).abs().max() < same * two.abs().max()
    assert (output - other).abs().max() > 10 * same * exact.abs().max()
    noisy = [varlen(inputs, 0.5, 0.3, bounds, 9, causal, window) for _ in range(2)]
    assert (noisy[0] - noisy[1]).abs().max() > 0.05  # dropout


@pytest.mark.parametrize(("precision", "same"), [("fp32", 1e-4), ("bf16", 0.05)])
@pytest.mark.parametrize("case", ["qwen3", "mistral window", "modernbert window", "eurobert"])
def test_unpadded_families_equal_padded(case, precision, same, tmp_path):
    """With causal masks and windows."""
    padded = load(case, tmp_path).cuda().train()
    padded.set_dropout(0.0)
    unpadded = copy.deepcopy(padded)
    unpadded.set_attention("auto", unpad=True)
    with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
        assert max(differences(padded, unpadded)) < same


def test_a_step_waits_for_the_device_only_where_it_must():
    """One forward and backward pass of cont_accum without any synchronization."""
    encoder, loss = tiny_encoder().cuda().train(), InfoNCE(0.1)
    engine = Engine(device="auto", precision="bf16")
    engine.prepare(encoder, torch.optim.SGD(encoder.parameters(), lr=0.1))
    bank = make_bank(16, encoder.dim, loss, push=4, device=engine.device, hard_negatives=1)
    # the first step loads kernels
    METHODS["cont_accum"](engine, micro_batches(3, 4, 1), bank, loss)
    engine.drop_step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        METHODS["cont_accum"](engine, micro_batches(3, 4, 1, seed=1), bank, loss)
        with pytest.raises(RuntimeError):  # negative control
            bank.passages.sum().item()
    finally:
        torch.cuda.set_sync_debug_mode("default")
        engine.close()


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

"""Precision and speed settings: fp32 parts of a run, settings a CPU refuses, resumed runs."""

import copy
import shutil

import pytest
import torch
from helpers import (
    gradients,
    make_bank,
    micro_batches,
    tiny_encoder,
    train_config,
    weights,
    write_beir,
)
from torch.utils._python_dispatch import TorchDispatchMode

from contaccum.config import METHOD_SPECS
from contaccum.errors import InputError
from contaccum.methods import METHODS
from contaccum.methods.loss import InfoNCE
from contaccum.runtime.engine import Engine
from contaccum.training.log import read_log
from contaccum.training.loop import train


def two_steps(method, start, precision):
    """Return the gradients of a second step and the bank after it."""
    encoder = copy.deepcopy(start).train()
    engine = Engine(device="cpu", precision=precision)
    engine.prepare(encoder, torch.optim.SGD(encoder.parameters(), lr=0.1))
    loss = InfoNCE(0.1)
    bank = make_bank(
        16, encoder.dim, loss, push=12, hard_negatives=1, columns_only=method == "passage_bank"
    )
    for step in range(2):
        engine.step = step
        engine.update()
        values = METHODS[method](engine, micro_batches(3, 4, 1, seed=step), bank, loss)
        bank.end_step()
    assert values[0].value.dtype == torch.float32
    found = torch.cat([gradient.flatten() for gradient in gradients(encoder).values()])
    engine.close()
    return found, bank


@pytest.mark.parametrize("method", list(METHOD_SPECS))
def test_bf16_keeps_loss_bank_and_gradients_in_fp32(method):
    start = tiny_encoder()
    full, _ = two_steps(method, start, "fp32")
    half, bank = two_steps(method, start, "bf16")
    assert half.dtype == torch.float32
    stored = [bank.passages, bank.positive_logits]
    if bank.queries is not None:
        stored.append(bank.queries)
    assert {tensor.dtype for tensor in stored} == {torch.float32}
    cosine = torch.nn.functional.cosine_similarity(half, full, dim=0)
    assert cosine > 0.99
    assert not torch.equal(half, full)


def test_launcher_precision_does_not_change_a_run(monkeypatch):
    """accelerate launch sets its default precision in the environment; run.precision overrides
    it."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    engine = Engine(device="cpu")
    with engine.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
    engine.close()
    engine = Engine(device="cpu", precision="bf16")
    with engine.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
    engine.close()


def test_fp16_is_refused_on_cpu():
    with pytest.raises(
        InputError, match=r"run\.precision is fp16, but the device is cpu; use fp32 or bf16"
    ):
        Engine(device="cpu", precision="fp16")


def test_scaler_starts_new_after_a_run_without_one():
    """Resume an fp32 run in fp16, with PyTorch's scaler on a CPU."""
    engine = Engine(device="cpu")
    assert engine.scaler.state_dict() == {}
    engine.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    engine.load_scaler_state({})
    assert engine.scaler.state_dict()["scale"] == 8.0
    engine.load_scaler_state({**engine.scaler.state_dict(), "scale": 2.0})  # negative control
    assert engine.scaler.state_dict()["scale"] == 2.0


def test_tf32_changes_nothing_on_a_cpu_and_warns():
    with pytest.warns(UserWarning, match=r"run\.tf32 has no effect on cpu"):
        engine = Engine(device="cpu", tf32=True)
    assert torch.get_float32_matmul_precision() == "highest"
    engine.close()


def test_unpadded_run_equals_padded_run_and_resumes_byte_identical(tmp_path):
    data = write_beir(tmp_path / "data")
    passages = (data / "corpus.jsonl").read_text().splitlines()
    shorter = [line.replace("lives in ", "") if i % 2 else line for i, line in enumerate(passages)]
    (data / "corpus.jsonl").write_text("\n".join(shorter) + "\n")
    for name, unpad in (("padded", False), ("whole", True)):
        train(train_config(data, tmp_path / name, **{"model.unpad": unpad, "model.dropout": 0.0}))
    for one, other in zip(read_log(tmp_path / "padded"), read_log(tmp_path / "whole"), strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-4)
    # sums are taken in another order
    assert weights(tmp_path / "whole") != weights(tmp_path / "padded")
    broken = tmp_path / "broken"
    shutil.copytree(tmp_path / "whole", broken)
    for step in (4, 6):
        shutil.rmtree(broken / "checkpoints" / f"step-{step:08d}")
    train(train_config(data, broken, resume=True, **{"model.unpad": True, "model.dropout": 0.0}))
    assert weights(broken) == weights(tmp_path / "whole")


class Casts(TorchDispatchMode):
    """Counter of casts whose input is one of the tensors."""

    def __init__(self, tensors):
        super().__init__()
        self.pointers, self.count = {tensor.data_ptr() for tensor in tensors}, 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.count += "_to_copy" in operator.name() and args[0].data_ptr() in self.pointers
        return operator(*args, **(kwargs or {}))


class SeparateCasts(Engine):
    """Negative control: every pass casts the weights again."""

    def micro_steps(self, batches):
        for batch in batches:
            torch.manual_seed(0)
            yield batch

    def encoded(self, passes):
        for each in passes:
            yield self._encode_pass(each, self.step)


@pytest.mark.parametrize("method", ["grad_accum", "cont_accum", "in_batch", "grad_cache"])
def test_passes_of_a_step_share_the_casts_of_the_weights(method):
    start, found = tiny_encoder(), {}
    for kind in (Engine, SeparateCasts):
        for count in (1, 6):
            encoder, loss = copy.deepcopy(start).train(), InfoNCE(0.1)
            engine = kind(device="cpu", precision="bf16")
            engine.prepare(encoder, torch.optim.SGD(encoder.parameters(), lr=0.1))
            bank = make_bank(16, encoder.dim, loss, push=4)
            with Casts(encoder.parameters()) as casts:
                METHODS[method](engine, micro_batches(count, 4), bank, loss)
            vector = torch.cat([gradient.flatten() for gradient in gradients(encoder).values()])
            found[kind, count] = casts.count, vector
            engine.close()
    (once, _), (shared, ours) = found[Engine, 1], found[Engine, 6]
    (_, _), (separate, plain) = found[SeparateCasts, 1], found[SeparateCasts, 6]
    assert separate >= 3 * once
    # passes with a graph share casts only after a backward pass; layer norm casts inside its kernel
    assert once < shared <= separate * {"grad_cache": 0.7, "in_batch": 1.0}.get(method, 0.5)
    assert torch.equal(ours, plain)


def test_weight_decay_spares_parameters_without_gradient():
    encoder, engine = tiny_encoder().train(), Engine(device="cpu")
    encoder.unused = torch.nn.Parameter(torch.ones(3))
    engine.prepare(encoder, torch.optim.AdamW(encoder.parameters(), lr=0.1, weight_decay=0.5))
    before = copy.deepcopy(dict(encoder.named_parameters()))
    loss = InfoNCE(0.1)
    for step in range(2):
        METHODS["grad_accum"](
            engine, micro_batches(2, 4, seed=step), make_bank(0, encoder.dim, loss, push=1), loss
        )
        engine.update()
    engine.close()
    assert torch.equal(encoder.unused, torch.ones(3))
    changed = [
        name for name, value in encoder.named_parameters() if not torch.equal(value, before[name])
    ]
    assert len(changed) > len(before) / 2  # negative control: other parameters learn and decay

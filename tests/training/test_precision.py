"""Precision and speed settings: fp32 parts of a run, settings a CPU refuses, resumed runs."""

import copy
import shutil
from contextlib import contextmanager

import pytest
import torch
from helpers import (
    gradients,
    largest_difference,
    make_bank,
    micro_batches,
    run_steps,
    tiny_encoder,
    train_config,
    weights,
    write_beir,
)
from tiny_families import family_folder
from torch.utils._python_dispatch import TorchDispatchMode

from contaccum import DualEncoder
from contaccum.config import METHOD_SPECS, AdapterConfig
from contaccum.encoder.adapters import add_adapter
from contaccum.encoder.folders import Base
from contaccum.errors import InputError
from contaccum.methods import METHODS
from contaccum.methods.loss import InfoNCE
from contaccum.runtime import half_weights
from contaccum.runtime.engine import Engine
from contaccum.runtime.half_weights import HalfWeights, JoinedLayers
from contaccum.training.log import read_log
from contaccum.training.loop import train
from contaccum.training.parts import trained_parameters


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


def test_tf32_changes_nothing_on_a_cpu():
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


class Operations(TorchDispatchMode):
    """Counter of operations, except views and allocations, and of casts of some tensors."""

    def __init__(self, tensors):
        super().__init__()
        self.pointers = {tensor.data_ptr() for tensor in tensors}
        self.count = self.casts = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        name = operator.name()
        self.count += not (
            operator.is_view or any(part in name for part in ("empty", "detach", "unsafe_split"))
        )
        self.casts += "_to_copy" in name and args[0].data_ptr() in self.pointers
        return operator(*args, **(kwargs or {}))


class ByAutocast(Engine):
    """Engine in which autocast casts the weights in every pass, and autograd adds gradients."""

    def prepare(self, encoder, optimizer):
        super().prepare(encoder, optimizer)
        self.half_weights = None


class SummedInHalf(HalfWeights):
    """Negative control: the gradients of all passes are summed in half precision."""

    @contextmanager
    def used(self):
        with self._replaced(self.leaves[0]) if self.leaves else super().used():
            yield


def updates(engine, start, method, count=4, scaler=None, halves=HalfWeights):
    """Return the weights after three updates of ``count`` micro-batches, and the operations of the
    method in the last one."""
    encoder, loss = copy.deepcopy(start).train(), InfoNCE(0.1)
    engine.prepare(encoder, torch.optim.AdamW(trained_parameters(encoder).values(), lr=1e-3))
    if engine.half_weights is not None:
        engine.half_weights = halves(encoder, torch.bfloat16)
    engine.scaler = scaler or engine.scaler
    push = 4 if method in ("grad_accum", "passage_bank", "cont_accum") else 4 * count
    only = method == "passage_bank"
    bank = make_bank(push, encoder.dim, loss, push=push, hard_negatives=1, columns_only=only)
    for step in range(3):
        engine.begin_step(step)
        with Operations(encoder.parameters()) as operations:
            METHODS[method](engine, micro_batches(count, 4, 1, seed=step), bank, loss)
        engine.reduce_gradients()
        engine.gradient_norms()
        engine.update()
        bank.end_step()
    engine.close()
    return torch.cat([weight.flatten() for weight in encoder.parameters()]), operations


def with_adapters(encoder):
    for tower in encoder.towers:
        add_adapter(tower.backbone, Base("base", None, "none"), AdapterConfig(rank=2))
    return encoder


ENCODERS = {
    "tied, unpadded": lambda: tiny_encoder(0.1, tie=True),
    "untied": lambda: tiny_encoder(0.1),
    "checkpointing": lambda: tiny_encoder(0.1, tie=True),
    "adapters": lambda: with_adapters(tiny_encoder(0.1, tie=True)),
}


@pytest.mark.parametrize("method", list(METHOD_SPECS))
@pytest.mark.parametrize("case", ENCODERS)
def test_half_precision_weights_change_no_bit(case, method, monkeypatch):
    """If each layer is a product of its own."""
    monkeypatch.setattr(half_weights, "SAME_INPUT", ())
    start = ENCODERS[case]()
    start.set_attention("auto", unpad="unpadded" in case)
    if case == "checkpointing":
        start.gradient_checkpointing_enable()
    options = {"device": "cpu", "precision": "bf16"}
    found, ours = updates(Engine(**options), start, method)
    expected, plain = updates(ByAutocast(**options), start, method)
    assert torch.equal(found, expected)
    assert (ours.casts, plain.casts > 0) == (0, True)
    if METHOD_SPECS[method].single_micro_batch and case == "tied, unpadded":
        other, _ = updates(Engine(**options), start, method, halves=SummedInHalf)
        assert not torch.equal(other, expected)


def test_half_precision_weights_change_no_bit_with_partial_replay_and_a_loss_scaler(monkeypatch):
    monkeypatch.setattr(half_weights, "SAME_INPUT", ())
    found = []
    for kind, scale in ((Engine, 8.0), (ByAutocast, 8.0), (Engine, 2.0**125)):
        engine = kind(device="cpu", precision="bf16", replay_share=0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        found.append(updates(engine, tiny_encoder(), "grad_cache", scaler=scaler)[0])
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])  # the scaler skips steps whose gradients overflow


def test_a_process_that_replays_no_text_can_unscale_its_gradients():
    engine = Engine(device="cpu", replay_share=0.5)
    encoder = tiny_encoder()
    engine.prepare(encoder, torch.optim.SGD(encoder.parameters()))
    engine.scaler = torch.amp.GradScaler("cpu")
    engine.begin_step(0)
    engine.reduce_gradients()
    assert engine.gradient_norms() == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("family", "joined"),
    [
        ("bert", 2),
        ("distilbert", 2),
        ("mpnet", 2),
        ("qwen3", 4),
        ("modernbert", 0),
        ("mobilebert", 0),  # its values have another input than its queries
        ("longformer", 2),  # changes the output of a joined layer in place
    ],
)
def test_layers_with_the_same_input_are_one_product(family, joined, tmp_path, monkeypatch):
    """In float32, where rounding does not hide an error. Families have two layers; qwen3 also joins
    the two inputs of its gated units, and modernbert has joined layers of its own."""
    encoder = DualEncoder.load(
        family_folder(family, tmp_path), max_query_length=8, max_passage_length=16
    )
    steps, found = [micro_batches(3, 4, 1)], {}
    encoder.set_dropout(0.0)

    def prepare(engine, *given):
        plain_prepare(engine, *given)
        engine.half_weights = HalfWeights(engine.encoder, torch.float32)
        assert len(engine.half_weights.joined) == joined

    def wrong(self, place, rows):
        return plain_output(self, 0 if place == 0 else len(self.sizes) - place, rows)

    plain_prepare, plain_output = Engine.prepare, JoinedLayers.output
    found["separate"] = run_steps("in_batch", steps, encoder=encoder)[0]
    monkeypatch.setattr(Engine, "prepare", prepare)
    switches = {"joined": DualEncoder.train}
    if family != "mpnet":  # without gradient checkpointing in transformers
        switches["recomputed"] = DualEncoder.gradient_checkpointing_enable
    for name, switch in switches.items():
        found[name] = run_steps("in_batch", steps, encoder=encoder, switch=switch)[0]
        assert largest_difference(found["separate"], found[name]) < 2e-5
    if joined and family != "qwen3":  # its keys and values have another width than its queries
        monkeypatch.setattr(JoinedLayers, "output", wrong)
        found["wrong"] = run_steps("in_batch", steps, encoder=encoder)[0]
        assert largest_difference(found["separate"], found["wrong"]) > 1e-2


def test_joined_layers_with_other_inputs_are_computed_alone():
    torch.manual_seed(0)
    sizes, rows = [4, 2, 2], torch.randn(5, 3)
    layers = [torch.nn.Linear(3, size) for size in sizes]
    with torch.no_grad():
        weight, bias = map(torch.cat, zip(*(layer.parameters() for layer in layers), strict=True))
        product = JoinedLayers(sizes, weight, bias)
        for inputs in ([rows, rows + 1, rows], [rows, rows, rows], [rows + 2, rows, rows]):
            for place in (0, 2, 1):
                expected = layers[place](inputs[place])
                torch.testing.assert_close(product.output(place, inputs[place]), expected)
        with Operations([]) as operations:
            for place in (0, 1, 2):
                product.output(place, rows)
    assert operations.count == 1


def test_a_micro_batch_casts_and_adds_no_weight_alone():
    """Per micro-batch, autocast and autograd need two casts for each weight of a linear layer and
    an addition for each trained weight."""
    start = tiny_encoder(tie=True)
    trained = list(trained_parameters(start))
    linear = [name for name in trained if "LayerNorm" not in name and "embeddings" not in name]
    assert 0 < len(linear) < len(trained)
    more = []
    for kind in (ByAutocast, Engine):
        few, many = (
            updates(kind(device="cpu", precision="bf16"), start, "grad_accum", count)[1].count
            for count in (2, 6)
        )
        more.append((many - few) / 4)
    assert more[0] - more[1] >= 2 * len(linear) + len(trained) - 2


def test_encoder_has_its_own_weights_after_a_failed_pass():
    encoder, engine = tiny_encoder(tie=True).train(), Engine(device="cpu", precision="bf16")
    encoder.gradient_checkpointing_enable()  # else a backward pass needs no weights
    engine.prepare(encoder, torch.optim.AdamW(encoder.parameters()))
    before, loss = dict(encoder.named_parameters()), InfoNCE(0.1)
    bank = make_bank(0, encoder.dim, loss, push=1)
    layer = encoder.query_tower.backbone.encoder.layer[0]

    def fail(*_):
        inside.append(layer.output.dense.weight.dtype)
        raise RuntimeError("no memory")

    for add_hook in (layer.register_forward_hook, layer.register_full_backward_hook):
        inside: list[torch.dtype] = []
        hook = add_hook(fail)
        with pytest.raises(RuntimeError, match="no memory"):
            METHODS["grad_cache"](engine, micro_batches(3, 4), bank, loss)
        hook.remove()
        engine.drop_step()
        assert inside == [torch.bfloat16]
        for name, weight in encoder.named_parameters():
            assert weight is before[name]
            assert weight.grad is None
    METHODS["grad_cache"](engine, micro_batches(3, 4), bank, loss)
    assert gradients(encoder)
    engine.close()


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

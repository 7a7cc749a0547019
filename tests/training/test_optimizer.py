"""AdamW equals its formula, and the state of both forms survives checkpoints."""

import copy
import importlib.util
import re
import shutil

import pytest
import torch
from helpers import micro_batches, tiny_encoder, train_config, weights, write_beir

from contaccum.config import OptimConfig
from contaccum.errors import InputError, install_command
from contaccum.training.loop import train
from contaccum.training.parts import make_optimizer, trained_parameters
from contaccum.training.run_folder import newest_checkpoint

STEPS = 5


def trained(start, **settings) -> list[torch.Tensor]:
    """Return the weights after some optimizer steps."""
    encoder = copy.deepcopy(start).train()
    optimizer = make_optimizer(
        encoder, OptimConfig(**{"learning_rate": 1e-3, "weight_decay": 0.1, **settings})
    )
    for batch in micro_batches(STEPS, 4):
        queries, passages = encoder(batch)
        (queries * passages[:, 0]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in trained_parameters(encoder).values()]


def by_hand(
    start, beta: float = 0.999, eps: float = 1e-8, weight_decay: float = 0.1
) -> list[torch.Tensor]:
    """Compute AdamW by hand: Loshchilov and Hutter 2019 (arXiv 1711.05101), algorithm 2."""
    encoder = copy.deepcopy(start).train()
    parameters = list(trained_parameters(encoder).values())
    moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in parameters]
    for t, batch in enumerate(micro_batches(STEPS, 4), start=1):
        queries, passages = encoder(batch)
        gradients = torch.autograd.grad((queries * passages[:, 0]).sum(), parameters)
        for parameter, gradient, (first, second) in zip(
            parameters, gradients, moments, strict=True
        ):
            first.copy_(0.9 * first + 0.1 * gradient)
            second.copy_(beta * second + (1 - beta) * gradient**2)
            step = first / (1 - 0.9**t) / ((second / (1 - beta**t)).sqrt() + eps)
            decay = weight_decay if parameter.ndim > 1 else 0.0
            parameter.data.copy_(parameter * (1 - 1e-3 * decay) - 1e-3 * step)
    return [parameter.detach() for parameter in parameters]


def distance(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    """Return the sum of all absolute differences."""
    return float(sum((a - b).abs().sum() for a, b in zip(one, other, strict=True)))


def test_fused_adamw_equals_the_formula():
    start = tiny_encoder()
    origin = [parameter.detach() for parameter in trained_parameters(start).values()]
    found = trained(start)
    moved = distance(found, origin)
    assert distance(by_hand(start), found) < 1e-3 * moved
    assert distance(trained(start, adam_beta1=0.8), found) > 0.01 * moved


@pytest.mark.parametrize(
    ("settings", "formula"),
    [
        ({"adam_beta2": 0.9}, {"beta": 0.9}),
        ({"adam_eps": 1e-2}, {"eps": 1e-2}),
        ({"weight_decay": 20.0}, {"weight_decay": 20.0}),
    ],
)
def test_optimizer_settings_reach_the_formula(settings, formula):
    start = tiny_encoder()
    origin = [parameter.detach() for parameter in trained_parameters(start).values()]
    found = trained(start, **settings)
    moved = distance(found, origin)
    assert distance(by_hand(start, **formula), found) < 1e-3 * moved
    assert distance(by_hand(start), found) > 0.01 * moved


def test_8bit_adamw_is_close_to_32bit():
    start = tiny_encoder()
    origin = [parameter.detach() for parameter in trained_parameters(start).values()]
    plain, eight = trained(start), trained(start, name="adamw_8bit")
    moved = distance(plain, origin)
    assert 0 < distance(eight, plain) < 0.1 * moved


def eight_bit(data, run, **changes):
    # wide enough for weights of more than 4096 numbers, below which moments stay in 32 bits
    return train_config(
        data, run, **{"optim.name": "adamw_8bit", "model.tiny_width": 64, **changes}
    )


def test_8bit_run_resumes_byte_identical(tmp_path):
    data, whole, broken = write_beir(tmp_path / "data"), tmp_path / "whole", tmp_path / "broken"
    train(eight_bit(data, whole))
    state = newest_checkpoint(whole).folder / "optimizer.safetensors"
    assert b'"U8"' in state.read_bytes()
    shutil.copytree(whole, broken)
    shutil.rmtree(broken / "model")
    for step in (4, 6):
        shutil.rmtree(broken / "checkpoints" / f"step-{step:08d}")
    train(eight_bit(data, broken, resume=True))
    assert weights(broken) == weights(whole)
    assert (
        newest_checkpoint(broken).folder / "optimizer.safetensors"
    ).read_bytes() == state.read_bytes()
    train(train_config(data, tmp_path / "plain", **{"model.tiny_width": 64}))
    assert weights(tmp_path / "plain") != weights(whole)
    plain = newest_checkpoint(tmp_path / "plain").folder / "optimizer.safetensors"
    assert state.stat().st_size < 0.5 * plain.stat().st_size


def test_resume_with_another_optimizer_is_refused(tmp_path):
    data, run = write_beir(tmp_path / "data"), tmp_path / "run"
    train(train_config(data, run, **{"optim.max_steps": 2}))
    with pytest.raises(InputError, match=r"optim\.name was adamw and is adamw_8bit"):
        train(
            train_config(
                data, run, resume=True, **{"optim.max_steps": 2, "optim.name": "adamw_8bit"}
            )
        )


def test_8bit_adamw_without_bitsandbytes_is_refused(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "bitsandbytes" else find(name)
    )
    with pytest.raises(InputError, match=re.escape(install_command("bitsandbytes"))):
        make_optimizer(tiny_encoder(), OptimConfig(name="adamw_8bit"))

"""A step with NaN or infinity stops the run before it changes weights or bank."""

import math
from dataclasses import replace

import pytest
import torch
from helpers import train_config, weights

from contaccum.config import METHOD_SPECS
from contaccum.encoder import DualEncoder
from contaccum.errors import InputError
from contaccum.methods.loss import InfoNCE
from contaccum.runtime.engine import Engine
from contaccum.training.loop import Training, train
from contaccum.training.run_folder import newest_checkpoint


def spoil_embedding(
    patch, step: int, value: float = math.nan, side: int = 0, place: tuple[int, ...] = (0, 0)
) -> None:
    """Set one number of the embeddings of ``step`` to ``value``: in the second micro-batch, or in
    the first pass if the loss is that of the whole step.

    side: 0 for a query, 1 for a passage."""
    plain = DualEncoder.embed
    running = {"step": 0, "seen": 0, "spoiled": 0}

    def embed(self, tower, tokens):
        vectors = plain(self, tower, tokens).clone()
        if tower is (self.query_tower, self.passage_tower)[side]:
            running["seen"] += 1
            if running["step"] == step and running["seen"] == running["spoiled"]:
                vectors[place] = value
        return vectors

    take = Training.take_step

    def take_step(self, micro_batches):
        spec = self.config.spec
        running.update(
            step=self.done + 1, seen=0, spoiled=1 if spec.single_micro_batch or spec.two_pass else 2
        )
        return take(self, micro_batches)

    patch.setattr(DualEncoder, "embed", embed)
    patch.setattr(Training, "take_step", take_step)


def spoil_loss(patch, step: int) -> None:
    """Make only the loss infinite."""
    plain = InfoNCE.__call__
    running = {"step": 0}
    take = Training.take_step

    def take_step(self, micro_batches):
        running["step"] = self.done + 1
        return take(self, micro_batches)

    def call(self, *parts):
        value = plain(self, *parts)
        return (
            replace(value, contrast=value.contrast * math.inf) if running["step"] == step else value
        )

    patch.setattr(InfoNCE, "__call__", call)
    patch.setattr(Training, "take_step", take_step)


def spoil_gradient(patch, step: int) -> None:
    """Make only a gradient NaN."""
    plain = Engine.reduce_gradients

    def reduce(self):
        plain(self)
        if self.step == step - 1:
            self.parameters[0].grad.flatten()[0] = math.nan

    patch.setattr(Engine, "reduce_gradients", reduce)


@pytest.mark.parametrize("changes", [{}, {"run.save_steps": 1, "optim.max_steps": 2}], ids=str)
def test_weights_that_an_update_made_infinite_are_not_saved(changes, data, tmp_path):
    run = tmp_path / "run"
    exploding = {"optim.max_steps": 1, "optim.learning_rate": 1e38, **changes}
    with pytest.raises(InputError, match=r"step 1: a weight is NaN or inf.* at step 0\. Con"):
        train(train_config(data, run, **exploding))
    assert not (run / "model").exists()
    assert not list(run.glob("checkpoints/step*"))
    train(train_config(data, run, resume=True, allow_changes=True, **changes))  # as advised
    assert all(weight.isfinite().all() for weight in DualEncoder.load(run / "model").parameters())


SPOILERS = {"embedding": spoil_embedding, "loss": spoil_loss, "gradient": spoil_gradient}
SENTENCES = {
    "embedding": r"step 4 \(queries q\d+, q\d+, q\d+, q\d+.*\): an embedding contains NaN or "
    r"infinity",
    "loss": r"step 4, micro-batch 1 of 4 \(queries q\d+, .*\): the loss is inf, not a finite "
    r"number",
    "gradient": r"step 4 \(queries q\d+, .*, …\): the gradient norm is nan, not a finite number",
}


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        *(("embedding", method) for method in METHOD_SPECS),
        ("loss", "cont_accum"),
        ("gradient", "cont_accum"),
        ("gradient", "cont_cache"),
    ],
)
def test_nan_stops_the_run_and_names_examples_and_checkpoint(
    kind, method, data, tmp_path, monkeypatch
):
    """Step 3 is saved although it is not due; resumed without the fault, the run equals the
    uninterrupted one."""
    run, whole = tmp_path / "run", tmp_path / "whole"
    train(train_config(data, whole, method))
    with monkeypatch.context() as patch:
        SPOILERS[kind](patch, 4)
        with pytest.raises(InputError, match=SENTENCES[kind]) as error:
            train(train_config(data, run, method))
    said = str(error.value)
    assert (
        f"the last good state is {run / 'checkpoints' / 'step-00000003'}. Continue with --resume"
        in said
    )
    assert newest_checkpoint(run).state["step"] == 3
    assert not (run / "model").exists()
    train(train_config(data, run, method, resume=True))
    assert weights(run) == weights(whole)
    for name in ("bank.safetensors", "optimizer.safetensors"):
        saved = [(newest_checkpoint(folder).folder / name).read_bytes() for folder in (run, whole)]
        assert saved[0] == saved[1], name


@pytest.mark.parametrize(
    ("value", "side", "place"),
    [(math.nan, 1, (0, 0)), (math.inf, 0, (1, 3)), (-math.inf, 1, (5, 5))],
    ids=["NaN passage", "inf query", "-inf hard negative"],
)
def test_nan_in_any_embedding_is_detected(value, side, place, data, tmp_path, monkeypatch):
    spoil_embedding(monkeypatch, 2, value, side, place)
    with pytest.raises(
        InputError, match=r"step 2 \(queries .*\): an embedding contains NaN or infinity"
    ):
        train(
            train_config(data, tmp_path / "run", **{"data.hard_negatives": 1, "run.save_steps": 0})
        )
    assert newest_checkpoint(tmp_path / "run").state["step"] == 1


def test_nan_in_first_step_saves_no_checkpoint(data, tmp_path, monkeypatch):
    spoil_embedding(monkeypatch, 1)
    with pytest.raises(InputError, match="the run has no checkpoint yet"):
        train(train_config(data, tmp_path / "run"))
    assert newest_checkpoint(tmp_path / "run") is None


def bank_bytes(run) -> bytes:
    return (newest_checkpoint(run).folder / "bank.safetensors").read_bytes()


def test_without_rollback_the_saved_bank_differs(data, tmp_path, monkeypatch):
    """Negative control."""
    banks = []
    for name in ("back", "not_back"):
        with monkeypatch.context() as patch:
            spoil_gradient(patch, 4)
            if name == "not_back":
                patch.setattr("contaccum.methods.bank.Bank.rollback", lambda _: None)
            with pytest.raises(InputError, match="step 4"):
                train(train_config(data, tmp_path / name))
        banks.append(bank_bytes(tmp_path / name))
    assert banks[0] != banks[1]


def test_weights_that_are_not_finite_are_not_saved(data, tmp_path, monkeypatch):
    """Damaged weights do not replace the last good checkpoint."""
    take = Training.take_step

    def ruin(self, micro_batches):
        values = take(self, micro_batches)
        if self.done == 2:
            with torch.no_grad():
                self.engine.parameters[0].fill_(math.nan)
        return values

    monkeypatch.setattr(Training, "take_step", ruin)
    with pytest.raises(InputError, match=r"step 4 .*the last good state is .*step-00000002"):
        train(train_config(data, tmp_path / "run"))

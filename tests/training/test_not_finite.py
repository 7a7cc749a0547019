"""Steps with NaN or infinity stop or are skipped before they change weights or bank."""

import math

import pytest
import torch
from helpers import train_config, weights, write_beir

from contaccum.config import METHOD_SPECS, TrainConfig, validate
from contaccum.encoder import DualEncoder
from contaccum.errors import InputError
from contaccum.experiments.run_records import load_run_record
from contaccum.methods.loss import InfoNCE, LossValue
from contaccum.runtime.engine import Engine
from contaccum.training.log import read_log
from contaccum.training.loop import Training, train
from contaccum.training.run_folder import newest_checkpoint


@pytest.fixture
def data(tmp_path):
    return write_beir(tmp_path / "data")


def spoil_embedding(patch, step: int, value: float = math.nan, side: int = 0, place: tuple[int, ...] = (0, 0)) -> None:
    """Set one number of the embeddings of the second (or only) micro-batch of ``step`` to ``value``."""
    plain, calls = DualEncoder.forward, {"step": -1, "seen": 0}

    def forward(self, batch):
        out = [vectors.clone() for vectors in plain(self, batch)]
        calls["seen"] = 1 if calls["step"] != running["step"] else calls["seen"] + 1
        calls["step"] = running["step"]
        if running["step"] == step and calls["seen"] == running["spoiled"]:
            out[side][place] = value
        return tuple(out)

    running = {"step": 0, "spoiled": 0}
    take = Training.take_step

    def take_step(self, micro_batches):
        running.update(step=self.done + 1, spoiled=min(2, len(micro_batches)))
        return take(self, micro_batches)

    patch.setattr(DualEncoder, "forward", forward)
    patch.setattr(Training, "take_step", take_step)


def spoil_loss(patch, step: int) -> None:
    """Make only the loss infinite."""
    plain = InfoNCE.__call__
    running = {"step": 0}
    take = Training.take_step

    def take_step(self, micro_batches):
        running["step"] = self.done + 1
        return take(self, micro_batches)

    def call(self, *parts, **banks):
        value = plain(self, *parts, **banks)
        return LossValue(value.value * math.inf, *value[1:]) if running["step"] == step else value

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


SPOILERS = {"embedding": spoil_embedding, "loss": spoil_loss, "gradient": spoil_gradient}
SENTENCES = {
    "embedding": r"step 4 \(queries q\d+, q\d+, q\d+, q\d+\): an embedding contains NaN or infinity",
    "loss": r"step 4, micro-batch 1 of 4 \(queries q\d+, .*\): the loss is inf, not a finite number",
    "gradient": r"step 4 \(queries q\d+, .*, …\): the gradient norm is nan, not a finite number",
}


@pytest.mark.parametrize("kind", SPOILERS)
def test_nan_stops_the_run_and_names_examples_and_checkpoint(kind, data, tmp_path, monkeypatch):
    """Step 3 is saved although it is not due; resumed without the fault, the run equals the uninterrupted one."""
    run, whole = tmp_path / "run", tmp_path / "whole"
    train(train_config(data, whole))
    with monkeypatch.context() as patch:
        SPOILERS[kind](patch, 4)
        with pytest.raises(InputError, match=SENTENCES[kind]) as error:
            train(train_config(data, run))
    assert f"the last good state is {run / 'checkpoints' / 'step-00000003'}. To skip up to N" in str(error.value)
    assert newest_checkpoint(run).state["step"] == 3
    assert not (run / "model").exists()
    train(train_config(data, run, resume=True))
    assert weights(run) == weights(whole)


@pytest.mark.parametrize(
    ("value", "side", "place"),
    [(math.nan, 1, (0, 0, 0)), (math.inf, 0, (1, 3)), (-math.inf, 1, (2, 1, 5))],
    ids=["NaN passage", "inf query", "-inf hard negative"],
)
def test_nan_in_any_embedding_is_detected(value, side, place, data, tmp_path, monkeypatch):
    spoil_embedding(monkeypatch, 2, value, side, place)
    with pytest.raises(InputError, match=r"step 2 \(queries .*\): an embedding contains NaN or infinity"):
        train(train_config(data, tmp_path / "run", **{"data.hard_negatives": 1, "run.save_steps": 0}))
    assert newest_checkpoint(tmp_path / "run").state["step"] == 1


def test_nan_in_first_step_saves_no_checkpoint(data, tmp_path, monkeypatch):
    spoil_embedding(monkeypatch, 1)
    with pytest.raises(InputError, match="the run has no checkpoint yet"):
        train(train_config(data, tmp_path / "run"))
    assert newest_checkpoint(tmp_path / "run") is None


def bank_bytes(run) -> bytes:
    return (newest_checkpoint(run).folder / "bank.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        *(("embedding", method) for method in METHOD_SPECS),
        ("loss", "cont_accum"),
        ("gradient", "cont_accum"),
        ("gradient", "cont_cache"),
    ],
)
def test_skipped_step_changes_neither_weights_nor_bank(kind, method, data, tmp_path, monkeypatch):
    """Compare weights, moments and bank to a run whose fourth step is left out by hand."""
    changes = {"optim.max_steps": 6, "run.save_steps": 4, "run.keep_checkpoints": 9, "optim.schedule": "constant"}
    skipped, by_hand = tmp_path / "skipped", tmp_path / "by_hand"
    with monkeypatch.context() as patch:
        SPOILERS[kind](patch, 4)
        train(train_config(data, skipped, method, **changes, **{"run.on_nan": "skip:1"}))
    take = Training.take_step

    def leave_out(self, micro_batches):
        if self.done != 3:
            return take(self, micro_batches)
        self.bank.end_step()
        return {"step": 4, "loss": 0.0, "negatives": 0.0, "peak_memory": 0, "grad_norm_ratio": None}

    with monkeypatch.context() as patch:
        patch.setattr(Training, "take_step", leave_out)
        train(train_config(data, by_hand, method, **changes))
    assert weights(skipped) == weights(by_hand)
    for step in ("step-00000004", "step-00000006"):
        for name in ("bank.safetensors", "optimizer.safetensors"):
            assert (skipped / "checkpoints" / step / name).read_bytes() == (
                by_hand / "checkpoints" / step / name
            ).read_bytes(), (step, name)
    lines = [line for line in read_log(skipped) if "skips" in line]
    assert [(line["step"], line["skips"]) for line in lines] == [(4, 1)]
    assert lines[0]["skipped"].startswith("step 4")


def test_skipped_step_without_rollback_changes_the_bank(data, tmp_path, monkeypatch):
    """Negative control: without the rollback the bank differs."""
    changes = {"optim.max_steps": 4, "run.save_steps": 0, "run.on_nan": "skip:1"}
    banks = []
    for name in ("back", "not_back"):
        with monkeypatch.context() as patch:
            spoil_gradient(patch, 4)
            if name == "not_back":
                patch.setattr("contaccum.methods.bank.Bank.rollback", lambda _: None)
            train(train_config(data, tmp_path / name, **changes))
        banks.append(bank_bytes(tmp_path / name))
    assert banks[0] != banks[1]


def test_skip_limit_counts_steps_before_a_resume(data, tmp_path, monkeypatch):
    """Steps 2, 3 and 5 fail and two may be skipped; the count is saved in the checkpoint."""
    run = tmp_path / "run"
    for step in (2, 3, 5):
        spoil_gradient(monkeypatch, step)
    with pytest.raises(InputError, match="step 2 "):
        train(train_config(data, run))
    allowed = {"run.on_nan": "skip:2"}
    with pytest.raises(InputError, match=r"step 5 .*the last good state is .*step-00000004"):
        train(train_config(data, run, resume=True, **allowed))
    assert newest_checkpoint(run).state["skipped"] == 2
    with pytest.raises(InputError, match="step 5 "):
        train(train_config(data, run, resume=True, **allowed))
    train(train_config(data, run, resume=True, **{"run.on_nan": "skip:3"}))
    assert [(line["step"], line["skips"]) for line in read_log(run) if "skips" in line] == [(2, 1), (3, 2), (5, 3)]
    assert [line["step"] for line in read_log(run) if "loss" in line] == [1, 4, 6]


@pytest.mark.parametrize("log_steps", [1, 4])
def test_steps_before_a_skipped_last_step_are_in_the_report(log_steps, data, tmp_path, monkeypatch):
    run, changes = tmp_path / "run", {"data.dev": str(data), "run.log_steps": log_steps, "run.on_nan": "skip:1"}
    spoil_gradient(monkeypatch, 6)
    train(train_config(data, run, **changes))
    record = load_run_record(run)
    assert list(record.times) == ([1, 2, 3, 4, 5] if log_steps == 1 else [4, 5])
    assert record.evaluation_times == {6: record.train_seconds}


@pytest.mark.parametrize("on_nan", ["stop", "skip:1"])
def test_lower_skip_limit_on_resume_stops_the_run(on_nan, data, tmp_path, monkeypatch):
    """Two steps were skipped before the resume, which is more than the new limit."""
    run = tmp_path / "run"
    for step in (1, 2, 5):
        spoil_gradient(monkeypatch, step)
    with pytest.raises(InputError, match="step 5 "):
        train(train_config(data, run, **{"run.on_nan": "skip:2"}))
    with pytest.raises(InputError, match="step 5 "):
        train(train_config(data, run, resume=True, **{"run.on_nan": on_nan}))


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


@pytest.mark.parametrize("value", ["skip", "skip:0", "skip:-1", "skip:x", "go on", "stop:3", "skip:1.5", "skip:"])
def test_on_nan_accepts_stop_and_skip_n(value):
    config = TrainConfig(output_dir="run")
    config.data.train, config.run.on_nan = "data", value
    with pytest.raises(InputError, match=r"run\.on_nan is .*, expected stop, or skip:N with N at least 1"):
        validate(config)

"""Logged bank values equal hand-computed ones, and measuring them changes no weight."""

import math

import pytest
import torch
from helpers import open_train_set, train_config, weights

from contaccum.experiments.run_records import load_run_record
from contaccum.methods import METHODS
from contaccum.runtime.engine import Engine
from contaccum.training import parts
from contaccum.training.drift import Drift
from contaccum.training.log import read_log
from contaccum.training.loop import train
from contaccum.training.out_of_memory import MicroBatchSize

DROPOUT = {"model.dropout": 0.3, "run.drift_steps": 1}


@pytest.mark.parametrize(
    ("method", "share"),
    [("passage_bank", 1.0), ("cont_accum", 1.0), ("cont_cache", 1.0), ("cont_cache", 0.5)],
)
def test_drift_is_zero_only_for_unchanged_weights(method, share, data, tmp_path):
    """The dropout noise is replayed (partial replay has none), so the cosine is 1 to rounding if
    the weights do not change."""
    for rate, still in ((0.0, True), (1e-3, False)):
        run = tmp_path / f"{rate}"
        changes = {"optim.learning_rate": rate, "optim.max_steps": 4}
        changes |= {"replay.share": share, "model.dropout": 0.0} if share < 1 else {}
        train(train_config(data, run, method, **DROPOUT | changes))
        for line in read_log(run):
            found = [line["drift_passage_cosine"], line["drift_query_cosine"]]
            assert (found[1] is None) == (method == "passage_bank")
            for cosine in found[: 1 + (found[1] is not None)]:
                assert (abs(cosine - 1) < 1e-6) == still
    # the report takes such a log
    assert load_run_record(tmp_path / "0.001").steps[-1]["drift_passage_cosine"] < 1
    last = read_log(tmp_path / "0.001")[-1]["drift"]
    ages = [one["age"] for one in last]
    assert ages == [2, 1]  # 8 of 24 rows are of the step before
    if method == "cont_accum":  # older rows have drifted further
        assert last[0]["age"] > last[-1]["age"]
        assert last[0]["passage"] < last[-1]["passage"]


def test_drift_replays_the_dropout_noise(data, tmp_path):
    """Negative control: noise of another step gives other embeddings."""
    config = train_config(data, tmp_path / "run", **DROPOUT)
    engine = Engine(device="cpu")
    train_set = open_train_set(data)
    encoder = parts.build_encoder(config, train_set).train()
    encoder.set_dropout(0.3)
    engine.prepare(encoder, torch.optim.SGD(encoder.parameters(), lr=0.0))
    batches = parts.build_batches(config, engine, encoder, train_set).step(0)
    for two_pass in (False, True):
        first = engine.encode_again(batches, 1, 0, two_pass)[0]
        assert torch.equal(first, engine.encode_again(batches, 1, 0, two_pass)[0])
        assert not torch.allclose(first, engine.encode_again(batches, 1, 1, two_pass)[0], atol=1e-2)


@pytest.mark.parametrize("method", ["cont_accum", "cont_cache"])
def test_measuring_drift_changes_no_weight(method, data, tmp_path):
    """Over three epochs; the measurement reads past orders while later steps are prefetched."""
    for every in (0, 1):
        changes = {"run.drift_steps": every, "optim.max_steps": 8, "model.dropout": 0.3}
        train(train_config(data, tmp_path / f"{every}", method, **changes))
    assert weights(tmp_path / "0") == weights(tmp_path / "1")
    assert all("drift" not in line for line in read_log(tmp_path / "0"))
    assert all("drift" in line for line in read_log(tmp_path / "1"))


def test_bank_without_complete_micro_batch_has_no_drift(data, tmp_path):
    train(train_config(data, tmp_path / "run", "grad_accum", **DROPOUT, **{"optim.max_steps": 2}))
    train(
        train_config(
            data, tmp_path / "kept", **DROPOUT, **{"bank.keep": False, "optim.max_steps": 2}
        )
    )
    for run in ("run", "kept"):
        for line in read_log(tmp_path / run):
            assert "drift" not in line
            assert line["bank_age_mean"] is None


def test_bank_ages_equal_hand_computed_values(data, tmp_path):
    """With N = 16 and M = 24, the third step uses 16 rows of the second step and 8 of the first."""
    train(train_config(data, tmp_path / "run", **{"optim.max_steps": 4}))
    found = [(line["bank_age_mean"], line["bank_age_max"]) for line in read_log(tmp_path / "run")]
    assert found == [(None, None), (1, 1), (pytest.approx(4 / 3), 2), (pytest.approx(4 / 3), 2)]


@pytest.mark.parametrize(
    ("method", "changes", "weight"),
    [
        ("grad_accum", {}, 1 / 4), ("cont_accum", {}, 1 / 28), ("cont_cache", {}, 1 / 40),
        ("cont_accum", {"bank.row_weight": "current"}, 1 / 4),
    ],
)  # fmt: skip
def test_row_weights_equal_hand_computed_values(method, changes, weight, data, tmp_path):
    train(train_config(data, tmp_path / "run", method, **changes, **{"optim.max_steps": 3}))
    assert read_log(tmp_path / "run")[-1]["weight_per_row"] == pytest.approx(weight)


@pytest.mark.parametrize(
    "changes", [{}, {"loss.matryoshka_dims": [8, 16], "data.hard_negatives": 1}]
)
@pytest.mark.parametrize("method", ["cont_accum", "cont_cache"])
def test_logged_loss_is_the_mean_over_rows_for_both_row_weights(method, changes, data, tmp_path):
    """Without updates, both weights see the same embeddings, so the mean over all rows must be the
    same."""
    logs = {}
    for weight in ("all", "current"):
        frozen = {
            "optim.learning_rate": 1e-30,
            "bank.row_weight": weight,
            "optim.max_steps": 3,
            "optim.weight_decay": 0.0,
        }
        train(train_config(data, tmp_path / weight, method, **frozen, **changes))
        logs[weight] = read_log(tmp_path / weight)
    for found, expected in zip(logs["current"], logs["all"], strict=True):
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    pairs = 16 if method == "cont_cache" else 4
    first, *_, last = logs["current"]
    assert last["differentiated_loss"] == pytest.approx(
        last["loss"] * (pairs + 24) / pairs, rel=1e-4
    )
    assert not any("differentiated_loss" in line for line in logs["all"])
    assert first["loss"] < last["differentiated_loss"] / 2


def test_logged_clipped_norms_equal_gradient_norms(data, tmp_path):
    """The logged norms are those of the clipped gradients; gradients below the limit are not
    clipped."""
    config = train_config(
        data, tmp_path / "run", **{"optim.max_grad_norm": 0.05, "optim.max_steps": 3}
    )
    train(config)
    for line in read_log(tmp_path / "run"):
        assert line["grad_norm"] > 0.05
        clipped = math.hypot(line["query_grad_norm_clipped"], line["passage_grad_norm_clipped"])
        assert clipped == pytest.approx(0.05)
        ratio = line["passage_grad_norm_clipped"] / line["query_grad_norm_clipped"]
        assert ratio == pytest.approx(line["grad_norm_ratio"])
    engine, train_set = Engine(device="cpu"), open_train_set(data)
    encoder = parts.build_encoder(config, train_set).train()
    engine.prepare(encoder, torch.optim.SGD(encoder.parameters(), lr=0.0))
    loss = parts.build_loss(config, encoder)
    bank = parts.build_bank(config, engine, encoder, loss)
    METHODS["cont_accum"](
        engine, parts.build_batches(config, engine, encoder, train_set).step(0), bank, loss
    )
    before = engine.gradient_norms()
    scale = engine.clip(before[-1], 0.05)
    assert engine.gradient_norms() == pytest.approx([norm * scale for norm in before], rel=1e-4)
    train(
        train_config(
            data, tmp_path / "free", **{"optim.max_grad_norm": 100.0, "optim.max_steps": 1}
        )
    )
    line = read_log(tmp_path / "free")[0]
    assert line["query_grad_norm_clipped"] == line["query_grad_norm"]


def test_drift_measures_steps_from_the_oldest_to_the_newest(data, tmp_path, monkeypatch):
    """Of each step the last micro-batch, also if the bank has only a part of the oldest step."""
    config = train_config(data, tmp_path / "run", **{"bank.size": 40})
    engine, train_set = Engine(device="cpu"), open_train_set(data)
    encoder = parts.build_encoder(config, train_set).train()
    engine.prepare(encoder, torch.optim.SGD(encoder.parameters(), lr=0.0))
    batches, loss = (
        parts.build_batches(config, engine, encoder, train_set),
        parts.build_loss(config, encoder),
    )
    bank = parts.build_bank(config, engine, encoder, loss)
    drift = Drift(engine, bank, batches, MicroBatchSize([4], "pairs"))
    assert drift.measure() == {}
    for step in range(3):  # 48 rows through 40 places: the first 8 are gone
        engine.step = step
        METHODS["cont_accum"](engine, batches.step(step), bank, loss)
        engine.update()
        bank.end_step()
    measured, cosines = [], drift._cosines

    def seen(step, number, slots):
        measured.append((step, number))
        steps, positions = bank.step - bank.age[slots].cpu(), bank.index_in_step[slots]
        assert steps.tolist() == [step] * 4
        assert positions.tolist() == [12, 13, 14, 15]
        return cosines(step, number, slots)

    monkeypatch.setattr(drift, "_cosines", seen)
    assert drift.measure()["drift_passage_cosine"] == pytest.approx(1, abs=1e-6)
    assert measured == [(0, 3), (1, 3), (2, 3)]

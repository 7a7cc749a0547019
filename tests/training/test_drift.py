"""What the log says of the bank, against values by hand; measuring it changes nothing."""

import math

import pytest
import torch
from helpers import train_config, weights, write_beir

from contaccum.data.dataset import load_train_set
from contaccum.engine import Engine
from contaccum.methods import METHODS
from contaccum.study.runs import read_run
from contaccum.training import setup
from contaccum.training.drift import Drift
from contaccum.training.fit import MicroBatchSize
from contaccum.training.log import read_log
from contaccum.training.loop import train

DROPOUT = {"model.dropout": 0.3, "run.drift_steps": 1}


@pytest.fixture
def data(tmp_path):
    return write_beir(tmp_path / "data")


@pytest.mark.parametrize("method", ["passage_bank", "cont_accum", "cont_cache"])
def test_weights_that_stay_have_no_drift_and_weights_that_move_have(method, data, tmp_path):
    """Dropout is on: its noise is replayed, so the cosine of unmoved weights is 1 and not merely near it."""
    for rate, still in ((0.0, True), (1e-3, False)):
        run = tmp_path / f"{rate}"
        train(train_config(data, run, method, **DROPOUT, **{"optim.learning_rate": rate, "optim.max_steps": 4}))
        for line in read_log(run):
            found = [line["drift_passage_cosine"], line["drift_query_cosine"]]
            assert (found[1] is None) == (method == "passage_bank")
            for cosine in found[: 1 + (found[1] is not None)]:
                assert (abs(cosine - 1) < 1e-6) == still
    assert read_run(tmp_path / "0.001").steps[-1]["drift_passage_cosine"] < 1  # the report takes such a log
    last = read_log(tmp_path / "0.001")[-1]["drift"]
    ages = [one["age"] for one in last]
    assert ages == [2, 1, 1, 1]  # of 24 rows 8, two micro-batches, are of the step before
    if method == "cont_accum":  # what is older has drifted further
        assert last[0]["age"] > last[-1]["age"]
        assert last[0]["passage"] < last[-1]["passage"]


def test_other_noise_would_pass_for_drift(data, tmp_path):
    """Negative control of the replay."""
    config = train_config(data, tmp_path / "run", **DROPOUT)
    engine = Engine(device="cpu")
    train_set = load_train_set(data)
    encoder = setup.build_encoder(config, train_set).train()
    encoder.set_dropout(0.3)
    engine.prepare(encoder, torch.optim.SGD(encoder.parameters(), lr=0.0))
    batch = setup.build_batches(config, engine, encoder, train_set).step(0)[1]
    first = engine.encode_again(batch, 0, 1)[0]
    assert torch.equal(first, engine.encode_again(batch, 0, 1)[0])
    assert not torch.allclose(first, engine.encode_again(batch, 1, 1)[0], atol=1e-2)


@pytest.mark.parametrize("method", ["cont_accum", "cont_cache"])
def test_measuring_changes_no_weight(method, data, tmp_path):
    """Through three epochs, whose orders the measurement asks for while the next steps are made ready."""
    for every in (0, 1):
        changes = {"run.drift_steps": every, "optim.max_steps": 8, "model.dropout": 0.3}
        train(train_config(data, tmp_path / f"{every}", method, **changes))
    assert weights(tmp_path / "0") == weights(tmp_path / "1")
    assert all("drift" not in line for line in read_log(tmp_path / "0"))
    assert all("drift" in line for line in read_log(tmp_path / "1"))


def test_a_bank_without_a_whole_micro_batch_has_no_drift(data, tmp_path):
    train(train_config(data, tmp_path / "run", "grad_accum", **DROPOUT, **{"optim.max_steps": 2}))
    train(train_config(data, tmp_path / "kept", **DROPOUT, **{"bank.keep": False, "optim.max_steps": 2}))
    for run in ("run", "kept"):
        for line in read_log(tmp_path / run):
            assert "drift" not in line
            assert line["bank_age_mean"] is None


def test_ages_by_hand(data, tmp_path):
    """N = 16, M = 24: the third step meets the 16 rows of the second and 8 of the first."""
    train(train_config(data, tmp_path / "run", **{"optim.max_steps": 4}))
    found = [(line["bank_age_mean"], line["bank_age_max"]) for line in read_log(tmp_path / "run")]
    assert found == [(None, None), (1, 1), (pytest.approx(4 / 3), 2), (pytest.approx(4 / 3), 2)]
    changes = {"optim.max_steps": 4, "bank.visibility": "on_step"}
    train(train_config(data, tmp_path / "later", **changes))
    later = [(line["bank_age_mean"], line["bank_age_max"]) for line in read_log(tmp_path / "later")]
    assert later == found


@pytest.mark.parametrize(
    ("method", "changes", "weight"),
    [
        ("in_batch", {}, 1 / 16), ("grad_accum", {}, 1 / 4), ("grad_cache", {}, 1 / 16), ("passage_bank", {}, 1 / 4),
        ("cont_accum", {}, 1 / 28), ("cont_cache", {}, 1 / 40), ("cont_accum", {"bank.row_weight": "current"}, 1 / 4),
    ],
)  # fmt: skip
def test_row_weights_by_hand(method, changes, weight, data, tmp_path):
    train(train_config(data, tmp_path / "run", method, **changes, **{"optim.max_steps": 3}))
    assert read_log(tmp_path / "run")[-1]["row_weight"] == pytest.approx(weight)


def test_clipped_norms_are_the_gradients_own(data, tmp_path):
    """What is logged equals the norms of the gradients that the update takes, and nothing is clipped below the limit."""
    config = train_config(data, tmp_path / "run", **{"optim.max_grad_norm": 0.05, "optim.max_steps": 3})
    train(config)
    for line in read_log(tmp_path / "run"):
        assert line["grad_norm"] > 0.05
        clipped = math.hypot(line["query_grad_norm_clipped"], line["passage_grad_norm_clipped"])
        assert clipped == pytest.approx(0.05)
        ratio = line["passage_grad_norm_clipped"] / line["query_grad_norm_clipped"]
        assert ratio == pytest.approx(line["grad_norm_ratio"])
    engine, train_set = Engine(device="cpu"), load_train_set(data)
    encoder = setup.build_encoder(config, train_set).train()
    engine.prepare(encoder, torch.optim.SGD(encoder.parameters(), lr=0.0))
    loss = setup.build_loss(config, encoder)
    bank = setup.build_bank(config, engine, encoder, loss)
    METHODS["cont_accum"](engine, setup.build_batches(config, engine, encoder, train_set).step(0), bank, loss)
    before = engine.gradient_norms()
    scale = engine.clip(math.hypot(*before), 0.05)
    assert engine.gradient_norms() == pytest.approx([norm * scale for norm in before], rel=1e-4)
    train(train_config(data, tmp_path / "free", **{"optim.max_grad_norm": 100.0, "optim.max_steps": 1}))
    line = read_log(tmp_path / "free")[0]
    assert line["query_grad_norm_clipped"] == line["query_grad_norm"]


def test_the_sample_reaches_from_the_oldest_to_the_newest(data, tmp_path):
    config = train_config(data, tmp_path / "run", **{"bank.size": 40})
    engine, train_set = Engine(device="cpu"), load_train_set(data)
    encoder = setup.build_encoder(config, train_set).train()
    engine.prepare(encoder, torch.optim.SGD(encoder.parameters(), lr=0.0))
    batches, loss = setup.build_batches(config, engine, encoder, train_set), setup.build_loss(config, encoder)
    bank = setup.build_bank(config, engine, encoder, loss)
    drift = Drift(engine, bank, batches.twin(), MicroBatchSize([4], "pairs", grow=False))
    assert drift.measure() == {}
    for step in range(3):  # 48 rows through 40 places: the first 8 are gone
        engine.step = step
        METHODS["cont_accum"](engine, batches.step(step), bank, loss)
        engine.update()
        bank.end_step()
    assert [(step, number) for step, number, _ in drift._sample()] == [(0, 2), (1, 1), (2, 0), (2, 3)]

"""Budgets, successive halving, and settings files of `contaccum compare`."""

import statistics
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
from helpers import train_config, write_beir

from contaccum.config import METHOD_SPECS
from contaccum.errors import InputError
from contaccum.experiments.settings import Variant, read_settings
from contaccum.experiments.tuning import (
    Tuned,
    limited,
    parse_budget,
    rung_shares,
    step_price,
    survivors,
    tune,
    tuning_section,
)
from contaccum.runtime.files import read_json
from contaccum.training.log import read_log
from contaccum.training.loop import train

FULL = Fraction(1)


def steps(
    budget: str,
    method: str,
    n: int,
    share: float = 1.0,
    part: Fraction = FULL,
    seconds: float | None = None,
    **batch,
) -> int:
    """Return the number of steps that the budget allows, in micro-batches of 4 pairs. batch: other
    settings of the batch."""
    sizes = {
        "batch.global_batch_size": n,
        **{f"batch.{name}": value for name, value in batch.items()},
    }
    config = train_config(Path("d"), Path("o"), method, **sizes, **{"replay.share": share})
    price = step_price(config, parse_budget(budget), Path("d"), {}) if seconds is None else seconds
    limit = limited(config, parse_budget(budget), part, price)
    assert limit.optim.max_steps is not None
    return limit.optim.max_steps


@pytest.mark.parametrize(
    # 6144 / (64 * 3) = 32, 6144 / (64 * 4 - 4) = 24.4, 6144 / (64 * 2.5) = 38.4
    ("method", "expected"),
    [
        ("in_batch", {1.0: 32, 0.5: 32}), ("grad_accum", {1.0: 32, 0.5: 32}),
        ("passage_bank", {1.0: 32, 0.5: 32}), ("cont_accum", {1.0: 32, 0.5: 32}),
        ("grad_cache", {1.0: 24, 0.5: 38}), ("cont_cache", {1.0: 24, 0.5: 38}),
    ],
)  # fmt: skip
def test_budget_in_forward_passes_gives_the_steps_computed_by_hand(method, expected):
    assert {share: steps("6144f", method, 64, share) for share in expected} == expected


def test_other_units_give_the_steps_computed_by_hand():
    for method in METHOD_SPECS:
        assert steps("600s", method, 64, seconds=2.5) == 240
    assert steps("6144f", "grad_cache", 16) == 102  # 6144 / (16 * 4 - 4) = 102.4
    # 6144 / (16 * 4 - 8) = 109.7
    assert steps("6144f", "grad_cache", 16, micro_batch_size=8) == 109
    assert steps("6144f", "grad_cache", 64, part=Fraction(1, 3)) == 8
    # 1 + 3 * 0.4 is 2.2000000000000002 in floating point
    assert steps("110f", "grad_cache", 5, 0.4) == 10


def test_budget_that_pays_for_no_step_is_refused():
    with pytest.raises(
        InputError,
        match=r"one step of grad_cache costs 252 forward passes of a pair, but a run may cost at "
        r"most 227\.556",
    ):
        steps("6144f", "grad_cache", 64, part=Fraction(1, 27))


@pytest.mark.parametrize("text", ["", "f", "0f", "12", "12x", "-3s", "1e-3f"])
def test_wrong_budget_is_refused(text):
    with pytest.raises(InputError, match=r"^--budget is .*such as 200000f"):
        parse_budget(text)


def test_without_budget_a_rung_shortens_steps_or_epochs():
    config = train_config(Path("d"), Path("o"))
    assert limited(config, None, Fraction(1, 3)).optim.max_steps == 2
    config = replace(config, optim=replace(config.optim, max_steps=None, epochs=6.0))
    assert limited(config, None, Fraction(1, 3)).optim.epochs == 2.0
    assert limited(config, None, FULL) == config


@pytest.mark.parametrize("method", ["grad_cache", "cont_cache"])
@pytest.mark.parametrize("tokens", [40, 100_000])
def test_passes_of_micro_batches_by_tokens_are_measured(method, tokens, tmp_path):
    """They are those that training makes: a step of one micro-batch encodes its texts once."""
    sizes = {
        "batch.micro_batch_size": "auto",
        "batch.micro_batch_tokens": tokens,
        "batch.global_batch_size": 8,
        "optim.max_steps": 15,
    }
    config = train_config(write_beir(tmp_path / "data"), tmp_path / "run", method, **sizes)
    budget = parse_budget("100f")
    found = step_price(config, budget, tmp_path, {})
    train(config)
    made = statistics.mean(line["passes"] for line in read_log(tmp_path / "run"))
    assert found == pytest.approx(made, rel=0.02)
    assert (found == 8 * 3) == (tokens > 40)
    assert found < 8 * 4
    (file,) = tmp_path.glob("*.json")
    assert step_price(config, budget, tmp_path, {}) == found  # from the file
    assert list(read_json(file).values()) == [found]


def grid(count: int) -> Variant:
    return Variant(
        "one",
        "cont_accum",
        (),
        tuple((("optim.learning_rate", f"{n + 1}e-5"),) for n in range(count)),
    )


def halved(count: int, rungs: int | None = None, score=lambda rate, share: rate) -> Tuned:
    """Tune with scores computed from the learning rate and the share of the budget."""
    setting = grid(count)
    tuned = Tuned(setting, rung_shares(count, rungs))
    tune(
        [tuned],
        lambda runs: [
            score(float(dict(values)["optim.learning_rate"]), share) for _, values, share in runs
        ],
    )
    return tuned


def full_runs(tuned: Tuned) -> Fraction:
    """Cost of tuning. A run with the full budget costs 1."""
    return sum(
        (len(rung) * share for rung, share in zip(tuned.rungs, tuned.shares, strict=True)),
        Fraction(0),
    )


def test_halving_of_30_combinations_costs_at_most_8_full_runs():
    costs = {count: full_runs(halved(count)) for count in range(2, 31)}
    assert max(costs.values()) <= 8
    assert costs[30] == Fraction(30, 9) + Fraction(8, 3) + 2 == 8
    assert costs[12] == Fraction(12, 3) + 3
    assert full_runs(halved(30, rungs=1)) == 30  # negative control: without halving


def test_best_combination_survives_every_rung():
    tuned = halved(30)
    assert [len(rung) for rung in tuned.rungs] == [30, 8, 2]
    assert dict(tuned.chosen)["optim.learning_rate"] == "30e-5"
    # negative control: a score that turns round after the first rung keeps only what was best there
    turned = halved(
        30, score=lambda rate, share: rate if share < Fraction(1, 9) + Fraction(1, 100) else -rate
    )
    assert dict(turned.chosen)["optim.learning_rate"] == "23e-5"


def test_failed_combinations_are_no_candidates():
    tuned = halved(12, score=lambda rate, share: None if rate > 1e-4 else rate)
    assert dict(tuned.chosen)["optim.learning_rate"] == "10e-5"
    assert halved(12, score=lambda rate, share: None).chosen is None
    assert [survivors(count) for count in (1, 2, 3, 4, 8, 9, 30)] == [1, 2, 2, 2, 2, 3, 8]


def test_optimum_at_the_edge_of_a_range_is_marked():
    assert halved(3).edges() == ["optim.learning_rate"]
    # negative control: in the middle
    assert halved(3, score=lambda rate, share: -abs(rate - 2e-5)).edges() == []
    names = Variant("n", "grad_cache", (), tuple((("model.pooling", p),) for p in ("cls", "mean")))
    tuned = Tuned(names, rung_shares(2, None))
    tune([tuned], lambda runs: [1.0, 2.0])
    assert tuned.chosen == names.candidates[1]
    assert tuned.edges() == []  # not a number


def test_the_report_marks_the_chosen_combination():
    variant = Variant("a", "grad_cache", (), ((("model.pooling", "cls"),), (("seed", "1"),)))
    for scores, marks in (
        ([1.0, 0.0], ["chosen", ""]),
        ([0.0, 1.0], ["", "chosen"]),
        ([None, None], ["", ""]),
    ):
        tuned = Tuned(variant, rung_shares(2, None))
        tune([tuned], lambda runs, scores=scores: scores)
        rows = tuning_section([tuned], "ndcg@10").tables[0].rows
        assert [row[-1] for row in rows] == marks


def test_settings_file_gives_fixed_and_tried_values(tmp_path):
    file = tmp_path / "methods.yaml"
    file.write_text(
        "grad_cache:\n"
        "  tune: {batch.global_batch_size: [16, 32], optim.learning_rate: [1e-4]}\n"
        "replayed:\n"
        "  method: grad_cache\n"
        "  replay.share: 0.5\n"
        "cont_accum:\n"
        "  bank.age_decay: 1\n"
        "  tune: {bank.size: [16, 64], replay.share: [0.5, 1]}\n"
    )
    plain, replayed, listed = read_settings(
        str(file), {"replay.share": ["0.3", "0.7"], "model.dropout": ["0.0", "0.1"]}
    )
    rate = ("optim.learning_rate", "0.0001")
    assert plain.candidates == (
        (("batch.global_batch_size", "16"), rate), (("batch.global_batch_size", "32"), rate),
    )  # fmt: skip
    assert (replayed.method, replayed.fixed) == ("grad_cache", (("replay.share", "0.5"),))
    assert replayed.candidates == ((("model.dropout", "0.0"),), (("model.dropout", "0.1"),))
    # cont_accum does not read replay.share
    assert [dict(listed.changes(each)) for each in listed.candidates] == [
        {"method": "cont_accum", "bank.age_decay": "1", "bank.size": size} for size in ("16", "64")
    ]


def test_dates_in_a_settings_file_are_texts(tmp_path):
    file = tmp_path / "methods.yaml"
    file.write_text(
        "cont_accum: {model.query_prefix: 2026-11-25, tune: {model.passage_prefix: [2026-11-25]}}"
    )
    (row,) = read_settings(str(file), {})
    assert dict(row.changes(row.candidates[0])) == {
        "method": "cont_accum",
        "model.query_prefix": "2026-11-25",
        "model.passage_prefix": "2026-11-25",
    }


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a: {bank.size: 4}", "a: method is 'a'; choose from in_batch"),
        (
            "cont_accum: {bank.sise: 3}",
            "'bank.sise' is not a setting that changes the trained model",
        ),
        (
            "cont_accum: {tune: {bank.size: 3}}",
            "tune is {'bank.size': 3}; expected settings with lists of values",
        ),
        (
            "cont_accum: {bank.size: 8, tune: {bank.size: [8, 16]}}",
            "'bank.size' has a value and is tuned",
        ),
        (
            "{}",
            "has no entries; expected names with settings, such as: grad_cache: {replay.share: "
            "0.5}",
        ),
    ],
)
def test_wrong_settings_file_is_refused(tmp_path, text, sentence):
    file = tmp_path / "methods.yaml"
    file.write_text(text)
    with pytest.raises(InputError, match=str(file)) as error:
        read_settings(str(file), {})
    assert sentence in str(error.value)

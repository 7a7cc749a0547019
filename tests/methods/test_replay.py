"""Partial replay is an unbiased estimate of GradCache's gradient from a sample of the texts."""

import shutil
import statistics

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

from contaccum.batch import Tokens, token_batches
from contaccum.errors import InputError
from contaccum.methods import METHODS, replay
from contaccum.methods.loss import InfoNCE
from contaccum.methods.replay import (
    keep_probabilities,
    missing_gradient,
    sample_texts,
    systematic_sample,
)
from contaccum.runtime.engine import Engine
from contaccum.training.log import read_log
from contaccum.training.loop import train
from contaccum.training.run_folder import newest_checkpoint

SAME = 1e-5
DIFFERENT = 1e-3
DRAWS = 100
TWO_PASS = ["grad_cache", "cont_cache"]


def prepared(share: float, dropout: float = 0.0) -> Engine:
    encoder = tiny_encoder(dropout).train()
    engine = Engine(device="cpu", replay_share=share)
    engine.prepare(encoder, torch.optim.SGD(encoder.parameters(), lr=0.1))
    return engine


def gradient(
    engine: Engine, method: str, batches: list, number: int = 0
) -> dict[str, torch.Tensor]:
    """Gradients of all parameters with the sample of optimizer step ``number``; zeros for a tower
    that was not replayed."""
    loss = InfoNCE(0.1)
    hard = batches[0].ids.columns.shape[1] - 1
    engine.begin_step(number)
    METHODS[method](
        engine, batches, make_bank(16, engine.encoder.dim, loss, push=16, hard_negatives=hard), loss
    )
    engine.reduce_gradients()
    found = gradients(engine.encoder)
    engine.drop_step()
    return found


# probabilities and samples


def scale_by_bisection(norms: torch.Tensor, expected: float) -> torch.Tensor:
    low, high = 0.0, 1e6 / float(norms[norms > 0].min())
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (
            (middle, high) if (middle * norms).clamp(max=1).sum() < expected else (low, middle)
        )
    return (low * norms).clamp(max=1)


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.77, 1.0])
@pytest.mark.parametrize("spread", [0.0, 1.0, 4.0])
def test_probabilities_sum_to_the_share_and_are_proportional_up_to_one(share, spread):
    norms = (torch.randn(40, generator=torch.Generator().manual_seed(1)).double() * spread).exp()
    found = keep_probabilities(norms, share * 40)
    assert float(found.sum()) == pytest.approx(share * 40)
    assert float(found.max()) <= 1
    assert float(found.min()) > 0
    torch.testing.assert_close(found, scale_by_bisection(norms, share * 40), rtol=1e-6, atol=1e-9)


def test_no_other_probabilities_with_the_same_sum_add_less_variance():
    generator = torch.Generator().manual_seed(2)
    norms = torch.randn(12, generator=generator).double().exp()
    best = keep_probabilities(norms, 5)
    least = (norms.square() / best).sum()
    for _ in range(50):
        other = (best + 0.05 * torch.randn(12, generator=generator).double()).clamp(0.01, 1)
        other[other < 1] *= (5 - other[other >= 1].sum()) / other[other < 1].sum()
        assert (norms.square() / other).sum() > least or other.max() > 1


def test_texts_without_gradient_are_kept_only_if_too_few_have_one():
    norms = torch.tensor([0.0, 3.0, 0.0, 1.0, 0.0])
    assert keep_probabilities(norms, 2).tolist() == [0, 1, 0, 1, 0]
    assert keep_probabilities(norms, 1).tolist() == [0, 0.75, 0, 0.25, 0]
    assert keep_probabilities(norms, 3.5).tolist() == [0.5, 1, 0.5, 1, 0.5]
    assert keep_probabilities(torch.zeros(4), 2).tolist() == [0.5] * 4
    assert keep_probabilities(torch.zeros(4), 0.1).tolist() == [0.25] * 4  # at least one text
    weights, noise, signal = sample_texts(torch.zeros(4, 3), 0.5, 0.2)
    assert (int((weights > 0).sum()), noise, signal) == (2, 0, 0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_text_with_a_gradient_that_is_not_finite_is_always_kept(bad):
    cached = torch.ones(10, 4)
    cached[7, 2] = bad
    for offset in (0.0, 0.3, 0.99):
        weights, *_ = sample_texts(cached, 0.3, offset)
        assert float(weights[7]) == 1
        assert int((weights > 0).sum()) == 3


@pytest.mark.parametrize("expected", [1, 4, 7, 12])
def test_systematic_sample_keeps_an_exact_count_at_the_given_rates(expected):
    norms = torch.randn(12, generator=torch.Generator().manual_seed(3)).double().mul(1.5).exp()
    probabilities = keep_probabilities(norms, expected)
    counts = torch.zeros(12, dtype=torch.float64)
    for number in range(500):
        kept = systematic_sample(probabilities, (number + 0.5) / 500)
        assert len(kept) == len(kept.unique()) == expected
        counts[kept] += 1 / 500
    torch.testing.assert_close(counts, probabilities, atol=4e-3, rtol=0)


def test_systematic_sample_rounds_a_fractional_count_up_or_down():
    counts = [
        len(systematic_sample(torch.full((7,), 0.5).double(), offset / 10)) for offset in range(10)
    ]
    assert sorted(set(counts)) == [3, 4]
    assert sum(counts) == 35


def test_text_of_probability_zero_is_never_kept_at_the_end_of_the_line():
    """The sum of the probabilities is rounded, so the last point can be beyond the last
    interval."""
    gradients = torch.cat(
        [torch.rand(31, 4, generator=torch.Generator().manual_seed(0)) + 0.1, torch.zeros(1, 4)]
    )
    probabilities = keep_probabilities(gradients.norm(dim=1), 32 / 3)
    end = float(probabilities.sum())
    offset = (end + round(end, 6)) / 2 % 1
    weights, _, _ = sample_texts(gradients, 1 / 3, offset)
    assert end < offset + 10 < round(end, 6)
    assert weights[-1] == 0
    assert weights.isfinite().all()
    assert int(weights.count_nonzero()) == 11


def test_batches_keep_to_the_budget_with_little_padding():
    lengths = torch.randint(3, 40, (50,), generator=torch.Generator().manual_seed(4))
    batches = list(token_batches(lengths.tolist(), 120))
    assert sorted(index for chosen in batches for index in chosen) == list(range(50))
    assert all(len(chosen) * int(lengths[chosen].max()) <= 120 for chosen in batches)
    padded = sum(len(chosen) * int(lengths[chosen].max()) for chosen in batches)
    assert padded < 1.25 * int(lengths.sum()) < 50 * 39


@pytest.mark.parametrize("side", ["right", "left"])
def test_selected_texts_keep_their_tokens_and_lose_padding(side):
    rows = [[7, 8], [5, 6, 7, 8, 9], [4, 4, 4]]
    ids, mask = torch.zeros(3, 5, dtype=torch.long), torch.zeros(3, 5, dtype=torch.long)
    for number, row in enumerate(rows):
        place = slice(0, len(row)) if side == "right" else slice(5 - len(row), 5)
        ids[number, place], mask[number, place] = torch.tensor(row), 1
    found = Tokens(ids, mask).select(torch.tensor([2, 0]))
    expected = [[4, 4, 4], [7, 8, 0]] if side == "right" else [[4, 4, 4], [0, 7, 8]]
    assert found.input_ids.tolist() == expected
    assert found.attention_mask.sum(1).tolist() == [3, 2]


# the gradient


def deviations(method: str, share: float) -> dict[str, float]:
    """Distance of the mean of many draws from the exact gradient, for each parameter, in standard
    errors of that mean."""
    batches = micro_batches(2, 8, hard_negatives=1, passages=20)
    exact = gradient(prepared(1.0), method, batches)
    engine = prepared(share)
    largest = max(float(true.norm()) for true in exact.values())
    # others are zero but for rounding: attention does not depend on the bias of its keys
    names = [name for name, true in exact.items() if true.norm() > 1e-5 * largest]
    draws = [gradient(engine, method, batches, number) for number in range(DRAWS)]
    found = {}
    for name in names:
        values = torch.stack([draw[name].double().flatten() for draw in draws])
        error = (values.mean(0) - exact[name].flatten()).square().sum()
        found[name] = float((error / (values.var(0).sum() / DRAWS)).sqrt())
    return found


def without_balance(monkeypatch) -> None:
    """Replay without the correction whose bias the mean of many draws would show."""
    monkeypatch.setattr(replay, "missing_gradient", lambda gradients, weights: 0.0)


@pytest.mark.parametrize("method", TWO_PASS)
def test_mean_of_many_draws_equals_the_exact_gradient(method, monkeypatch):
    without_balance(monkeypatch)
    found = deviations(method, 0.4)
    assert len(found) > 20
    assert max(found.values()) < 3, found


def test_samples_without_weights_have_another_mean(monkeypatch):
    """Negative control: all kept texts have weight 1."""
    original = replay.sample_texts

    def unweighted(*given):
        weights, *rest = original(*given)
        return (weights > 0).float(), *rest

    without_balance(monkeypatch)
    monkeypatch.setattr(replay, "sample_texts", unweighted)
    assert statistics.median(deviations("grad_cache", 0.4).values()) > 5


@pytest.mark.parametrize("method", TWO_PASS)
def test_share_one_equals_the_method_without_replay_to_the_bit(method):
    data = [micro_batches(4, 4, 1, seed=i) for i in range(2)]
    plain, plain_loss = run_steps(method, data, dropout=0.2, bank_size=16, push=16)
    whole, whole_loss = run_steps(
        method, data, dropout=0.2, bank_size=16, push=16, replay_share=1.0
    )
    assert largest_difference(whole, plain) == 0
    assert whole_loss == plain_loss
    part, _ = run_steps(method, data, dropout=0.2, bank_size=16, push=16, replay_share=0.5)
    assert largest_difference(part, plain) > DIFFERENT


@pytest.mark.parametrize("method", TWO_PASS)
def test_replaying_every_text_gives_the_exact_gradient(method):
    """Compare the sampled second pass with all probabilities 1 (to rounding) with GradCache's
    second pass."""
    batches = micro_batches(4, 4, hard_negatives=1)
    exact, every = (gradient(prepared(share), method, batches) for share in (1.0, 1 - 1e-12))
    assert largest_difference([every], [exact]) < SAME
    assert largest_difference([gradient(prepared(0.9), method, batches)], [exact]) > DIFFERENT


def test_sample_depends_only_on_seed_and_step():
    batches = micro_batches(4, 4)
    engine = prepared(0.5)
    first, second = (gradient(engine, "grad_cache", batches, number) for number in (0, 1))
    torch.manual_seed(1234)
    assert largest_difference([gradient(engine, "grad_cache", batches, 0)], [first]) == 0
    assert largest_difference([second], [first]) > DIFFERENT
    engine.seed = 1
    assert largest_difference([gradient(engine, "grad_cache", batches, 0)], [first]) > DIFFERENT


def test_second_pass_encodes_the_share_within_one_micro_batch_of_tokens(monkeypatch):
    """Memory is at most grad_cache's: each graph has at most the padded tokens of one micro-batch,
    and the first pass has none.

    Tokens are counted instead of bytes, whose peak on a CPU depends on the allocator."""
    batches = micro_batches(4, 4, hard_negatives=2)
    budget = max(
        batch.queries.input_ids.numel() + batch.passages.input_ids.numel() for batch in batches
    )
    engine, calls = prepared(0.5), []
    original = Engine._encode_pass

    def recorded(self, each, step):
        if torch.is_grad_enabled():
            calls.append((each.side, *each.texts.input_ids.shape))
        return original(self, each, step)

    monkeypatch.setattr(Engine, "_encode_pass", recorded)
    loss = InfoNCE(0.1)
    (value,) = METHODS["grad_cache"](
        engine, batches, make_bank(0, engine.encoder.dim, loss, push=1), loss
    )
    assert [sum(texts for side, texts, _ in calls if side == each) for each in (0, 1)] == [8, 24]
    assert all(texts * length <= budget for _, texts, length in calls)
    assert value.statistics["replay_share"] == 0.5
    assert 0 < value.statistics["replay_variance"] < 1


def test_balanced_sample_keeps_the_sum_of_all_gradients():
    cached = torch.randn(20, 4, generator=torch.Generator().manual_seed(5))
    weights = sample_texts(cached, 0.4, 0.3)[0]
    weighted = cached * weights.float().unsqueeze(1)
    assert (weighted.sum(0) - cached.sum(0)).abs().max() > 0.1
    weighted[weights > 0] += missing_gradient(cached, weights)
    torch.testing.assert_close(weighted.sum(0), cached.sum(0))
    assert int((weighted.abs().sum(1) > 0).sum()) == 8


def test_balancing_lowers_the_error_of_the_gradient(monkeypatch):
    """Sum the squared errors of 30 samples against the exact gradient."""
    batches = micro_batches(2, 8, hard_negatives=1)
    exact = gradient(prepared(1.0), "grad_cache", batches)
    engine = prepared(0.4)

    def error() -> float:
        draws = [gradient(engine, "grad_cache", batches, number) for number in range(30)]
        return sum(
            float((draw[name] - exact[name]).square().sum()) for draw in draws for name in exact
        )

    balanced = error()
    without_balance(monkeypatch)
    assert balanced < error()


# training


@pytest.mark.parametrize("method", TWO_PASS)
def test_resumed_partial_replay_equals_uninterrupted_run_to_the_byte(method, tmp_path):
    data = write_beir(tmp_path / "data")
    changes = {"replay.share": 0.5, "run.save_steps": 2}
    train(train_config(data, tmp_path / "whole", method, **changes))
    train(train_config(data, tmp_path / "part", method, **changes))
    shutil.rmtree(tmp_path / "part" / "model")
    for folder in (tmp_path / "part" / "checkpoints").iterdir():
        if int(folder.name.removeprefix("step-")) > 2:
            shutil.rmtree(folder)
    broken = tmp_path / "part"
    assert newest_checkpoint(broken).state["step"] == 2
    train(train_config(data, broken, method, **changes, resume=True))
    assert weights(broken) == weights(tmp_path / "whole")
    lines = [line for line in read_log(tmp_path / "whole") if "loss" in line]
    assert all(
        line["replay_share"] == pytest.approx(0.5) and line["replay_variance"] > 0 for line in lines
    )


def test_partial_replay_trains_without_dropout(tmp_path):
    data = write_beir(tmp_path / "data")
    bert = str(family_folder("bert", tmp_path / "bert"))  # config.json has a dropout of 0.1
    found = []

    def record(training) -> None:
        found.append(training.encoder.has_dropout())

    for share in (1.0, 0.5):
        changes = {"model.name": bert, "optim.max_steps": 1, "replay.share": share}
        config = train_config(data, tmp_path / f"{share}", "grad_cache", **changes)
        train(config, after_step=record)
    assert found == [True, False]


@pytest.mark.parametrize("name", ["model.dropout", "model.attention_dropout", "lora.dropout"])
def test_partial_replay_with_dropout_is_refused(name, tmp_path):
    changes = {"replay.share": 0.5, name: 0.1}
    config = train_config(write_beir(tmp_path / "data"), tmp_path / "run", "grad_cache", **changes)
    with pytest.raises(InputError, match=f"{name} is 0.1, but partial replay .*; set {name} 0"):
        train(config)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("share", [0.0, -0.5, 1.5, float("nan")])
def test_share_outside_zero_to_one_is_refused(share, tmp_path):
    config = train_config(
        write_beir(tmp_path / "data"), tmp_path / "run", "grad_cache", **{"replay.share": share}
    )
    with pytest.raises(Exception, match=r"replay.share is .*, expected"):
        train(config)

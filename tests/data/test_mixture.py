"""Mixtures of data sets: shares, order, prefixes, resume, and refused configs."""

import json
import shutil
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from helpers import train_config, weights, write_beir
from processes import Job, run_jobs

from contaccum.config import DataConfig, MixtureConfig, to_yaml, validate
from contaccum.data.dataset import load_training
from contaccum.data.sampler import MixtureSampler, StepSampler, make_sampler
from contaccum.errors import InputError
from contaccum.runtime.engine import Engine
from contaccum.training import parts
from contaccum.training.log import read_log
from contaccum.training.loop import train

SIZES = (40, 13)


@pytest.fixture
def sets(tmp_path):
    """BEIR folder of 40 queries, and a file of 13 others with two positives each."""
    beir = write_beir(tmp_path / "beir", SIZES[0])
    rows = [
        {
            "query": f"which bird sings in {n}",
            "pos": [f"a lark sings in {n}", f"larks of {n}"],
            "neg": [f"an owl of {n}"],
        }
        for n in range(SIZES[1])
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [str(beir), str(tmp_path / "pairs.jsonl")]


def mixed(sets, weights=(None, None), **values) -> DataConfig:
    members = [
        MixtureConfig(path, weight=weight) for path, weight in zip(sets, weights, strict=True)
    ]
    return DataConfig(mixture=members, hard_negatives=1, **values)


def sampler_of(data: DataConfig, seed: int = 0, size: int = 10) -> tuple:
    found = load_training(data)
    return found, make_sampler(found, seed, size, data.hard_negatives, data.mixture_batches)


@pytest.mark.parametrize("batches", ["mixed", "one_set"])
@pytest.mark.parametrize(
    ("given", "share"), [((None, None), SIZES[0] / sum(SIZES)), ((1, 3), 0.25)]
)
def test_sets_are_drawn_by_weight_each_in_its_own_order(batches, given, share, sets):
    found, sampler = sampler_of(mixed(sets, given, mixture_batches=batches))
    steps = [sampler(step) for step in range(400)]
    drawn = [np.array([row < SIZES[0] for row in step.queries]) for step in steps]
    assert all(len(each) == 10 for each in drawn)
    pure = sum(each.all() or not each.any() for each in drawn)
    assert (pure == 400) == (batches == "one_set")
    draws = 400 if batches == "one_set" else 4000
    assert abs(np.mean(np.concatenate(drawn)) - share) < 5 * np.sqrt(share * (1 - share) / draws)
    for number, size in enumerate(SIZES):  # each pass over a set meets every query of it once
        own = [
            row
            for step in steps
            for row in sorted(step.queries)
            if (row < SIZES[0]) == (number == 0)
        ]
        order = Counter(own)
        assert max(order.values()) - min(order.values()) <= 1
        assert set(order) == set(range(number * SIZES[0], number * SIZES[0] + size))
    for step in steps[:50]:
        for query, passages in zip(step.queries, step.passages, strict=True):
            positives = set(found.positives.row(query).tolist())
            assert passages[0] in positives == set(found.relevant().row(query).tolist())
            assert passages[1] in set(found.negatives.row(query).tolist())
            both = {
                f"{found.passages[int(row)]['text']}".startswith(("a lark", "larks", "an owl"))
                for row in passages
            }
            assert both == {query >= SIZES[0]}


def test_a_past_step_does_not_draw_all_earlier_steps_again(sets, monkeypatch):
    _, sampler = sampler_of(mixed(sets))
    steps = [sampler(step) for step in range(301)]
    drawn, counts = [], MixtureSampler.counts
    monkeypatch.setattr(
        MixtureSampler, "counts", lambda own, step: drawn.append(step) or counts(own, step)
    )
    for step in (300, 281, 15, 16, 300):
        for one, other in zip(sampler(step), steps[step], strict=True):
            assert np.array_equal(one, other)
    assert len(drawn) < 5 * 20


def test_in_file_order_a_step_takes_the_next_examples_of_each_set(sets):
    found = load_training(mixed(sets))
    sampler = make_sampler(found, 0, 10, 1, order="file")
    steps = [sampler(step).queries for step in range(4)]
    for first, size in ((0, SIZES[0]), (SIZES[0], SIZES[1])):
        own = [np.sort(rows[(rows >= first) & (rows < first + size)]) for rows in steps]
        taken = np.concatenate(own)[:size]
        assert taken.tolist() == list(range(first, first + len(taken)))
    assert any((np.diff(rows[rows < SIZES[0]]) < 0).any() for rows in steps)


def test_a_sampler_can_be_read_by_two_threads(sets, monkeypatch):
    """The measurement of drift reads past steps while a thread prepares the next steps."""
    _, sampler = sampler_of(mixed(sets), size=sum(SIZES))
    expected, reads = [sampler(step).queries.tolist() for step in range(3)], []

    def interrupted(own, name, value):  # the other thread runs after this assignment
        object.__setattr__(own, name, value)
        if not reads:
            reads.append(None)
            reads.append(sampler(0).queries.tolist())

    sampler(0)
    monkeypatch.setattr(StepSampler, "__setattr__", interrupted)
    assert sampler(2).queries.tolist() == expected[2]
    assert reads[1] == expected[0]


def test_each_set_uses_its_prefixes(sets, tmp_path):
    data = mixed(sets)
    data.mixture[1] = replace(data.mixture[1], query_prefix="red ", passage_prefix="")
    config = train_config(
        tmp_path, tmp_path, **{"model.query_prefix": "lives ", "model.passage_prefix": "valley "}
    )
    config.data = data
    found = load_training(data)
    encoder = parts.build_encoder(config, found)
    batches = parts.build_batches(config, Engine(device="cpu"), encoder, found)
    tokenizer = encoder.query_tower.tokenizer
    seen = Counter()
    for micro in batches.step(0) + batches.step(1):
        texts = tokenizer.batch_decode(micro.queries.input_ids, skip_special_tokens=True)
        passages = tokenizer.batch_decode(micro.passages.input_ids, skip_special_tokens=True)
        for number, text in enumerate(texts):
            second = "bird" in text
            assert text.startswith("red which" if second else "lives where"), text
            assert passages[2 * number].startswith(("a lark", "larks") if second else "valley "), (
                passages
            )
            seen[second] += 1
    assert min(seen.values()) > 1
    assert batches._query_tokens.longest() == max(
        batches._query_tokens.lengths(np.arange(sum(SIZES)))
    )


@pytest.mark.parametrize(("prefix", "known"), [("lives ", {3}), ("", {1, 2})])
def test_a_set_without_a_prefix_shares_positives_by_the_prefix_of_the_model(
    prefix, known, sets, tmp_path
):
    rows = [
        {"query": f"which bird sings in {n}", "pos": [f"a wren of {n}"], "neg": [f"a crow of {n}"]}
        for n in range(SIZES[1])
    ]
    (tmp_path / "more.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = train_config(tmp_path, tmp_path, **{"model.query_prefix": "lives "})
    config.data = mixed([sets[1], str(tmp_path / "more.jsonl")])
    config.data.mixture[0] = replace(config.data.mixture[0], query_prefix=prefix)
    found = load_training(config.data)
    encoder = parts.build_encoder(config, found)
    batches = parts.build_batches(config, Engine(device="cpu"), encoder, found)
    positives = [(micro.ids.positives >= 0).sum(dim=1).tolist() for micro in batches.step(0)]
    assert {count for counts in positives for count in counts} == known


def test_a_mixture_resumes_byte_identical_and_one_set_equals_no_mixture(sets, tmp_path):
    def config(name: str, **values):
        made = train_config(tmp_path, tmp_path / name, **{"data.train": "", "optim.max_steps": 5})
        made.data = mixed(sets, **values)
        return made

    train(config("whole"))
    shutil.copytree(tmp_path / "whole", tmp_path / "broken")
    shutil.rmtree(tmp_path / "broken" / "model")
    for folder in (tmp_path / "broken" / "checkpoints").iterdir():
        if folder.name != "step-00000002":
            shutil.rmtree(folder)
    train(replace(config("broken"), resume=True))
    assert weights(tmp_path / "broken") == weights(tmp_path / "whole")
    train(config("other", mixture_batches="one_set"))
    assert weights(tmp_path / "other") != weights(tmp_path / "whole")
    one = config("one")
    one.data.mixture = one.data.mixture[:1]
    plain = config("plain")
    plain.data = DataConfig(train=sets[0], hard_negatives=1)
    for each in (one, plain):
        train(each)
    assert weights(tmp_path / "one") == weights(tmp_path / "plain")


@pytest.mark.acceptance
def test_two_processes_train_a_mixture_like_one(sets, tmp_path):
    jobs = {}
    for name, world, batches in (("one", 1, "mixed"), ("two", 2, "mixed"), ("other", 2, "one_set")):
        changes = {
            "data.train": "",
            "optim.max_steps": 4,
            "model.dropout": 0.0,
            "batch.micro_batch_size": 4 // world,
        }
        config = train_config(tmp_path, tmp_path / name, **changes)
        config.data = mixed(sets, (1.0, 2.0), mixture_batches=batches)
        (tmp_path / f"{name}.yaml").write_text(to_yaml(config))
        jobs[name] = Job(["train", "--config", str(tmp_path / f"{name}.yaml")], world)
    for outcome in run_jobs(jobs, tmp_path / "jobs").values():
        outcome.check()
    losses = {name: [line["loss"] for line in read_log(tmp_path / name)] for name in jobs}
    assert losses["two"] == pytest.approx(losses["one"], rel=1e-4)
    assert losses["other"] != pytest.approx(losses["one"], rel=1e-3)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            lambda data: setattr(data, "train", "x"),
            "data.train is 'x', but data.mixture is set too; use only one of them",
        ),
        (
            lambda data: setattr(data.mixture[0], "weight", 1.0),
            "some sets have a weight and some do not",
        ),
        # the current folder was read
        (lambda data: setattr(data.mixture[1], "train", ""), r"data.mixture\[1\].train is not set"),
    ],
)
def test_invalid_mixtures_are_refused(change, sentence, sets, tmp_path):
    config = train_config(tmp_path, tmp_path / "run")
    config.data = mixed(sets)
    change(config.data)
    with pytest.raises(InputError, match=sentence):
        validate(config)

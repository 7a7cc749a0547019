"""Order of the examples: as in the file, or similar queries in the same step."""

import json
import shutil

import numpy as np
import pytest
from helpers import train_config, weights, write_beir

from contaccum.config import DataConfig, MixtureConfig, validate
from contaccum.data.dataset import load_training
from contaccum.data.sampler import StepSampler, make_sampler, near_order, rounded
from contaccum.encoder import DualEncoder, EncoderSettings, tiny_tower
from contaccum.errors import InputError
from contaccum.training.log import read_log
from contaccum.training.loop import train

SIZE = 8


@pytest.fixture
def lines(tmp_path):
    """Examples in an order that no sorting gives."""
    numbers = np.random.default_rng(0).permutation(30)
    path = tmp_path / "examples.jsonl"
    path.write_text("".join(json.dumps({"query": f"query {n}", "pos": [f"passage {n}"]}) + "\n" for n in numbers))
    return path, [f"query {n}" for n in numbers]


def clusters(count: int, size: int, spread: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Vectors around ``count`` directions, shuffled, and the number of each one's direction."""
    random = np.random.default_rng(seed)
    labels = random.permutation(np.repeat(np.arange(count), size))
    vectors = np.eye(count, 2 * count)[labels] + spread * random.normal(size=(count * size, 2 * count))
    return vectors.astype(np.float16), labels


def similarity_in_steps(vectors: np.ndarray, order: np.ndarray, size: int) -> float:
    """Mean inner product of different examples in the same step."""
    groups = [vectors[order[start : start + size]].astype(float) for start in range(0, len(order) - size + 1, size)]
    return float(np.mean([(each @ each.T)[~np.eye(size, dtype=bool)].mean() for each in groups]))


def test_file_order_repeats_the_lines(lines):
    path, queries = lines
    train_set = load_training(DataConfig(train=str(path)))
    sampler = make_sampler(train_set, 3, SIZE, 0, order="file")
    names = [train_set.queries[int(row)]["text"] for step in range(8) for row in sampler(step).queries]
    assert names == (queries * 3)[: 8 * SIZE]
    shuffled = make_sampler(train_set, 3, SIZE, 0)
    assert [train_set.queries[int(row)]["text"] for row in shuffled(0).queries] != names[:SIZE]


@pytest.mark.parametrize(("count", "size", "spread"), [(16, SIZE, 0.02), (40, 10, 0.3)])
def test_near_steps_are_almost_as_similar_as_the_clusters(count, size, spread):
    """Random steps are the control."""
    vectors, labels = clusters(count, size, spread)
    order = near_order(rounded(vectors), np.random.default_rng(1), SIZE, 0)
    assert sorted(order) == list(range(len(vectors)))
    best = similarity_in_steps(vectors, np.argsort(labels, kind="stable"), SIZE)
    assert similarity_in_steps(vectors, order, SIZE) > 0.7 * best
    random = np.random.default_rng(2).permutation(len(vectors))
    assert similarity_in_steps(vectors, random, SIZE) < 0.1 * best


@pytest.mark.parametrize("rows", [5, 16, 30])
def test_near_epochs_hold_each_example_once_and_steps_do_not_shift(rows, lines):
    """Steps start where groups start, also in later epochs of a set whose size no step divides."""
    path, _ = lines
    path.write_text("".join(path.read_text().splitlines(True)[:rows]))
    train_set = load_training(DataConfig(train=str(path)))
    vectors, _ = clusters(rows, 1, 0.3)
    sampler = StepSampler(train_set, 1, SIZE, 0, order="near", vectors=vectors)
    stream = np.concatenate([sampler(step).queries for step in range(3 * rows)])
    epochs = stream[: len(stream) // rows * rows].reshape(-1, rows)
    assert all(sorted(epoch) == list(range(rows)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    again = StepSampler(train_set, 1, SIZE, 0, order="near", vectors=vectors)
    assert list(again(7).queries) == list(stream[7 * SIZE : 8 * SIZE])  # a step needs no earlier step
    other = StepSampler(train_set, 2, SIZE, 0, order="near", vectors=vectors)
    assert list(other(7).queries) != list(stream[7 * SIZE : 8 * SIZE])


def test_small_vectors_are_rounded_like_large_ones():
    vectors = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float16)
    expected = np.rint(vectors.astype(np.float64) * (1023 / np.abs(vectors).max().astype(np.float64)))
    assert np.array_equal(rounded(vectors * np.float16(2.0**-8)), expected)  # the scale is too large for float16
    assert np.abs(rounded(vectors) - expected).max() <= 1


def test_rounded_products_are_exact():
    """So that no machine rounds them in another way."""
    vectors = np.random.default_rng(0).normal(size=(500, 64)).astype(np.float16)
    whole = rounded(vectors)
    assert np.abs(whole).max() == 1023
    direction = whole.sum(0, dtype=np.int64)
    assert list(whole.astype(np.float64) @ direction.astype(np.float64)) == list(whole.astype(np.int64) @ direction)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"batch.order": "near"}, "batch.order is near, but model.name is tiny"),
        ({"batch.order": "near", "data.streaming": True}, "batch.order is near, but data.streaming is true"),
        (
            {"batch.order": "near", "model.name": "encoder", "data.train": "", "data.mixture": [MixtureConfig("data")]},
            "batch.order is near, but data.mixture is set, which chooses examples by weight, not by similarity; set batch.order",
        ),
        ({"batch.order": "file", "data.streaming": True}, "leave out batch.order and set data.shuffle_buffer to 1"),
    ],
)
def test_an_order_that_cannot_be_is_refused(changes, words, tmp_path):
    with pytest.raises(InputError, match=words):
        validate(train_config(tmp_path / "data", tmp_path / "run", **changes))


def test_a_run_with_near_steps_resumes_to_the_byte(tmp_path, monkeypatch):
    monkeypatch.setenv("CONTACCUM_CACHE", str(tmp_path / "cache"))
    data = write_beir(tmp_path / "data")
    texts = [json.loads(line)["text"] for line in (data / "corpus.jsonl").read_text().splitlines()]
    tower = tiny_tower(texts, "mean", layers=1, width=32, vocabulary=200, max_length=16, seed=0)
    DualEncoder(tower, tower, EncoderSettings(tie_towers=True, max_query_length=16, max_passage_length=16)).save(
        tmp_path / "encoder"
    )
    changes = {
        "model.name": str(tmp_path / "encoder" / "query_encoder"),
        "model.max_query_length": 16,
        "optim.max_steps": 4,
    }

    def run(name, **more):
        train(train_config(data, tmp_path / name, **changes, **more))
        return weights(tmp_path / name), [line["loss"] for line in read_log(tmp_path / name) if "loss" in line]

    near = run("near", **{"batch.order": "near", "run.save_steps": 2})
    broken = tmp_path / "broken"
    shutil.copytree(tmp_path / "near", broken)
    shutil.rmtree(broken / "model")
    shutil.rmtree(broken / "checkpoints" / "step-00000004")
    assert run("broken", **{"batch.order": "near", "run.save_steps": 2, "resume": True}) == near
    assert run("shuffled") != near

"""Order of the examples: shuffled, or as in the file."""

import json

import numpy as np
import pytest

from contaccum.config import DataConfig
from contaccum.data.dataset import load_training
from contaccum.data.sampler import make_sampler

SIZE = 8


@pytest.fixture
def lines(tmp_path):
    """Examples in an order that no sorting gives."""
    numbers = np.random.default_rng(0).permutation(30)
    path = tmp_path / "examples.jsonl"
    path.write_text(
        "".join(
            json.dumps({"query": f"query {n}", "pos": [f"passage {n}"]}) + "\n" for n in numbers
        )
    )
    return path, [f"query {n}" for n in numbers]


def test_file_order_repeats_the_lines(lines):
    path, queries = lines
    train_set = load_training(DataConfig(train=str(path)))
    sampler = make_sampler(train_set, 3, SIZE, 0, order="file")
    names = [
        train_set.queries[int(row)]["text"] for step in range(8) for row in sampler(step).queries
    ]
    assert names == (queries * 3)[: 8 * SIZE]
    shuffled = make_sampler(train_set, 3, SIZE, 0)
    assert [train_set.queries[int(row)]["text"] for row in shuffled(0).queries] != names[:SIZE]

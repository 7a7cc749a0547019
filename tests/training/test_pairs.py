"""Training on pairs in memory: tuples, dicts and a Dataset are the same data."""

import pandas
import pytest
from datasets import Dataset
from helpers import train_config, weights

from contaccum import train
from contaccum.data.dataset import open_dataset
from contaccum.data.pairs import pairs_file
from contaccum.errors import InputError

TUPLES = [(f"question {n}", f"answer number {n}", f"wrong {n}") for n in range(20)]
DICTS = [dict(zip(("anchor", "positive", "negative"), each, strict=True)) for each in TUPLES]


def test_tuples_dicts_and_a_dataset_are_the_same_file():
    path = pairs_file(TUPLES)
    assert path == pairs_file(DICTS) == pairs_file(Dataset.from_list(DICTS))
    assert path == pairs_file(pandas.DataFrame(DICTS))
    assert path == pairs_file(pandas.DataFrame(TUPLES))  # the columns are 0, 1 and 2
    assert path != pairs_file(TUPLES[1:])  # negative control
    some = pandas.DataFrame([{"query": "a", "pos": "b"}, {"query": "c", "pos": "d", "neg": "e"}])
    negatives = [each.negatives for each in open_dataset(pairs_file(some)).examples()]
    assert [[each.text for each in found] for found in negatives] == [[], ["e"]]
    example = next(iter(open_dataset(path).examples()))
    assert example.query.text == "question 0"
    assert [each.text for each in example.positives] == ["answer number 0"]
    assert [each.text for each in example.negatives] == ["wrong 0"]


@pytest.mark.parametrize(
    "pair",
    [
        {"positive": "answer", "Question": "question", "negative_1": "wrong", "negative_2": "bad"},
        {"neg": ["wrong", "bad"], "pos": ["answer"], "query": "question"},
        {"query_id": "a", "query": "question", "pos_id": ["b"], "pos": ["answer"],
         "neg_id": ["c", "d"], "neg": ["wrong", "bad"]},
        {"query": "question", "pos": "answer", "negative": ["wrong", "bad"]},
        {"query": "question", "pos": "answer", "neg": ["wrong", "bad"], "neg_source": "bm25"},
        {"query": "question", "pos": ["answer"], "neg": ["wrong", "bad"], "neg_ids": ["1", "2"]},
        {"first": "question", "second": "answer", "third": "wrong", "fourth": "bad"},
    ],
)  # fmt: skip
def test_names_of_fields_decide_and_else_their_order(pair):
    example = next(iter(open_dataset(pairs_file([pair])).examples()))
    assert example.query.text == "question"
    assert [each.text for each in example.positives] == ["answer"]
    assert [each.text for each in example.negatives] == ["wrong", "bad"]


def test_pairs_in_memory_train_the_model_of_their_file(tmp_path):
    changes = {"optim.max_steps": 2}
    train(train_config("", tmp_path / "memory", **changes), TUPLES)
    train(train_config(pairs_file(DICTS), tmp_path / "file", **changes))
    assert weights(tmp_path / "memory") == weights(tmp_path / "file")


@pytest.mark.parametrize(
    "bad",
    [
        ("alone",),
        (),
        ("query", 3 * [1]),
        (None, "text"),
        "some text",
        {"question": "a", "context": "b", "answer": "c"},
    ],
)
def test_other_values_are_refused_with_their_number(bad):
    with pytest.raises(InputError, match=r"pairs\[1\] is .*, expected a query, a positive and"):
        pairs_file([("a", "b"), bad])


def test_no_pairs_are_refused():
    with pytest.raises(InputError, match="pairs is empty, expected at least one query"):
        pairs_file([])

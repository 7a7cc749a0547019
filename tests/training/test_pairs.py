"""Training on pairs in memory: tuples, dicts and a Dataset are the same data."""

import json
import re
from pathlib import Path

import numpy
import pandas
import pytest
from datasets import Dataset
from helpers import train_config, weights

from contaccum import DualEncoder, train
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
    assert path == pairs_file(pandas.Series(TUPLES))
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
        {"query": "question", "pos": "answer", "neg": ["wrong"], "hard_negative": "bad"},
        {"query": "question", "pos": ["answer"], "negs": ["wrong"], "neg_2": "bad"},
        {"passage_text": "answer", "query": "question", "neg": ("wrong", "bad")},
        {"query_id": "a", "anchor": "question", "text": "answer", "neg": ["wrong", "bad"]},
        tuple(numpy.array(["question", "answer", "wrong", "bad"])),
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


def test_a_run_says_that_hard_negatives_are_not_used(tmp_path, capsys):
    some = [*TUPLES[:12], *(pair[:2] for pair in TUPLES[12:])]
    none = {"optim.max_steps": 1}
    used = {**none, "data.hard_negatives": 1, "data.fill_negatives": "none"}
    line = "the data has hard negatives for 12 of 20 queries; data.hard_negatives 1 would use them"
    for name, pairs, changes in (
        ("unused", some, none),
        ("used", some, used),
        ("without", [pair[:2] for pair in TUPLES], none),
    ):
        train(train_config("", tmp_path / name, **changes), pairs)
        assert (line in capsys.readouterr().err) == (name == "unused")


def test_hard_negatives_that_no_query_has_are_named(tmp_path, monkeypatch):
    """Also: the shell does not expand the ~ of a config in a program."""
    monkeypatch.setenv("HOME", str(tmp_path))
    none = {"optim.max_steps": 1, "data.hard_negatives": 2, "data.fill_negatives": "none"}
    with pytest.warns(UserWarning, match=r"no query has a hard negative, so data\.hard"):
        train(train_config("", "~/run", **none), [pair[:2] for pair in TUPLES])
    assert DualEncoder.load("~/run").settings == DualEncoder.load(tmp_path / "run").settings


FRAME = {"query": ["a", "b", "c"], "pos": ["p", "q", "r"], "neg": ["n", "m", "o"]}


@pytest.mark.parametrize("names", [("query", "pos", "neg"), ("one", "two", "three")])
@pytest.mark.parametrize("missing", [None, float("nan"), pandas.NA])
def test_a_missing_cell_moves_no_other_cell(names, missing):
    frame = pandas.DataFrame(FRAME).set_axis(names, axis=1)
    frame.loc[1, names[1]] = missing
    frame.loc[2, names[2]] = missing
    with pytest.warns(UserWarning, match="skipped 1 query without a positive"):
        examples = list(open_dataset(pairs_file(frame)).examples())
    texts = [
        (example.query.text, [each.text for each in (*example.positives, *example.negatives)])
        for example in examples
    ]
    assert texts == [("a", ["p", "n"]), ("c", ["r"])]
    frame.loc[2, names[0]] = missing
    with pytest.warns(UserWarning, match=r"skipped 1 pair without a query .*: pairs\[2\]\)"):
        file = pairs_file(frame)
    assert [example.query.text for example in open_dataset(file).examples()] == ["a"]


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        ({"query": "a", "pos": "b", "label": 0}, "field 'label' is not read, expected only query"),
        ({"query": "a", "pos": "b", "pos_score": [1.0]}, "field 'pos_score' is not read"),
        ({"query": "a", "pos": "b", "neg": "c", "neg_source": "bm25"}, "field 'neg_source' is not"),
        ({"qid": "1", "query": "a", "text": "b"}, "found the fields qid, query, text; expected"),
        ({"query": "a", "doc_id": "D1"}, "found the fields query, doc_id; expected one"),
        ({"positive": "a", "qid": "q1"}, "found the fields positive, qid; expected one"),
        ({"anchor": "a", "score": "0.3"}, "found the fields anchor, score; expected one"),
        ({"id": "1", "title": "a", "body": "b"}, "found the fields id, title, body; expected one"),
        ({"one": "a", "two": "b", "label": "0"}, "found the fields one, two, label; expected one"),
        ({"question": "a", "context": "b", "answer": "c"}, "found the fields question, context, a"),
        ({"query": "a", "pos": ["b"], "pos_id": ["1", "2"]}, "found 2 values in 'pos_id' but 1 t"),
        ({"query": "a", "pos": ["b", " "]}, r"\['pos'\]: has an empty or missing text"),
        (("a", "b", 0), r"\[2\]: found int; expected a text"),
        (("query", 3 * [1]), r"\[1\]: found int; expected a text"),
    ],
)
def test_doubtful_fields_and_values_are_refused(pair, message):
    with pytest.raises(InputError, match=rf"^pairs\[1\](: )?{message}"):
        pairs_file([("a", "b"), pair])


@pytest.mark.parametrize("pairs", ["file.jsonl", Path("x"), 3, {"train": TUPLES}])
def test_other_containers_are_refused(pairs):
    with pytest.raises(InputError, match=f"^pairs is {type(pairs).__name__} .*, expected a list"):
        pairs_file(pairs)


@pytest.mark.parametrize(
    ("record", "sentence"),
    [
        ({"hard_negative": ["n"]}, "field 'hard_negative' is not read, expected an object with q"),
        ({"neg": ["m"], "neg_2": "n"}, "field 'neg_2' is not read, expected an object with query"),
        ({"label": 0}, r"field 'label' is not read, so rows .*pos=pos&label=label\" makes these"),
        ({"score": 0.1}, "field 'score' is not read, so rows with a low score count as positive"),
        # files of other tools
        ({"label": 1}, None),
        ({"score": 12.5}, None),
        ({"neg": ["m"], "pos_scores": [1], "neg_scores": [0], "prompt": "x", "type": "y"}, None),
        ({"neg_source": "bm25", "negatives": []}, None),
    ],
)
def test_a_file_warns_of_unread_labels_and_negatives_once(record, sentence, tmp_path, recwarn):
    records = [{"query": f"q{n}", "pos": [f"p{n}"], **record} for n in range(3)]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in records))
    assert len(open_dataset(path).examples()) == 3
    found = [str(warning.message) for warning in recwarn]
    assert len(found) == (sentence is not None)
    assert all(re.match(f"{re.escape(str(path))}: {sentence}", each) for each in found)


def test_the_name_in_the_warning_of_a_label_makes_hard_negatives(tmp_path):
    path = tmp_path / "pairs.jsonl"
    records = [{"query": "a", "pos": [f"p{label}"], "label": label} for label in (0, 1)]
    path.write_text("".join(json.dumps(each) + "\n" for each in records))
    with pytest.warns(UserWarning, match="field 'label' is not read") as warned:
        (ignored,) = open_dataset(path).examples()
    (read,) = open_dataset(str(warned[0].message).split('"')[1], "train").examples()
    for example, negatives in ((ignored, []), (read, ["p0"])):
        assert [each.text for each in example.negatives] == negatives


@pytest.mark.parametrize(
    "bad",
    [
        ("alone",),
        (),
        None,
        {"a", "b"},
        "some text",
    ],
)
def test_other_values_are_refused_with_their_number(bad):
    with pytest.raises(InputError, match=r"pairs\[1\] is .*, expected a query, a positive and"):
        pairs_file([("a", "b"), bad])


def test_no_pairs_are_refused():
    with pytest.raises(InputError, match="pairs is empty, expected at least one query"):
        pairs_file([])
    with pytest.raises(InputError, match="pairs has 2 queries, none with a positive, expected at"):
        pairs_file([("a", None), ("b", " ")])
    with pytest.warns(UserWarning, match="skipped 2 pairs without a query"):
        pairs_file([("a", "b"), (None, "text"), (" ", "text")])
    with pytest.raises(InputError, match="pairs has no query, expected at least one"):
        pairs_file([(None, "text")])


def test_the_order_of_fields_is_that_of_the_first_dict():
    """Query and positive of a dict with another order were exchanged."""
    rows = [{"title": "a", "body": "b"}, {"body": "d", "title": "c"}]
    assert pairs_file(rows) == pairs_file([("a", "b"), ("c", "d")])


def test_columns_with_equal_names_are_refused():
    frame = pandas.DataFrame([["a", "b", "c", "d"]], columns=["query", "pos", "neg", "neg"])
    with pytest.raises(InputError, match=r"columns with equal names \(query, pos, neg, neg\)"):
        pairs_file(frame)


def test_pairs_do_not_replace_the_data_of_the_config(tmp_path):
    with pytest.raises(InputError, match=r"data\.train or data\.mixture is set, but pairs are giv"):
        train(train_config("somewhere", tmp_path), TUPLES)

"""A passage is its text and a query is its text; ids are labels."""

import csv
import json

import pytest
from helpers import (
    load_examples,
    open_retrieval_set,
    open_train_set,
    train_config,
)
from tiny_data import beir, context, dpr, lines, write

from contaccum.config import DataConfig
from contaccum.config.groups import MixtureConfig
from contaccum.data.commands import check, convert
from contaccum.data.dataset import load_training
from contaccum.data.identity import text_hash
from contaccum.errors import InputError
from contaccum.evaluation.metrics import evaluate_run
from contaccum.training.log import read_log
from contaccum.training.loop import train

SAME = [
    ("caf\u00e9 menu", "cafe\u0301 menu"),  # composed and decomposed
    ("one two", "one\u00a0two"),
]
DIFFERENT = [("US law", "us law"), ("one", "one.")]


@pytest.mark.parametrize(("one", "two"), SAME)
def test_equal_up_to_white_space_and_unicode_form(one, two):
    assert text_hash(one) == text_hash(two)


@pytest.mark.parametrize(("one", "two"), DIFFERENT)
def test_other_differences_count(one, two):
    assert text_hash(one) != text_hash(two)


def test_hashes_do_not_depend_on_the_process():
    assert text_hash("a text") == 2915218938260632105


def refusal(path, **policy) -> str:
    with pytest.raises(InputError) as caught:
        load_examples(path, **policy)
    return str(caught.value)


# queries

FRANCE = [
    {"query": "capital of France", "pos": ["Paris is the capital of France."]},
    {"query": "capital of France", "pos": ["France is governed from Paris."]},
]


def test_rows_of_one_query_are_one_query_with_all_positives(tmp_path):
    path = write(tmp_path / "t.jsonl", lines(*FRANCE))
    found = open_retrieval_set(path)
    assert list(found.queries.values()) == ["capital of France"]
    (query,) = found.queries
    assert len(found.qrels[query]) == 2
    perfect = {query: [(key, 1.0) for key in found.qrels[query]]}
    assert evaluate_run(found.qrels, perfect)["mean"]["ndcg@1"] == 1.0


def test_no_positive_of_the_same_query_is_a_negative(tmp_path):
    path = write(tmp_path / "t.jsonl", lines(*FRANCE))
    settings = {"batch.global_batch_size": 2, "batch.micro_batch_size": 2, "optim.max_steps": 1}
    with pytest.warns(UserWarning, match="no query has a negative"):
        train(train_config(path, tmp_path / "run", "in_batch", **settings))
    assert read_log(tmp_path / "run")[0]["negatives"] == 0
    other = [FRANCE[0], {**FRANCE[1], "query": "government of France"}]
    path = write(tmp_path / "other.jsonl", lines(*other))
    train(train_config(path, tmp_path / "control", "in_batch", **settings))
    assert read_log(tmp_path / "control")[0]["negatives"] == 1


def test_rows_with_the_same_query_id_are_grouped(tmp_path):
    rows = [{**row, "query_id": 7, "neg": [f"negative {n}"]} for n, row in enumerate(FRANCE)]
    table = load_examples(write(tmp_path / "t.jsonl", lines(*rows)))
    assert table.queries["id"][:] == ["7"]
    assert (table.positives.lengths.tolist(), table.negatives.lengths.tolist()) == ([2], [2])


def test_a_query_id_with_two_texts_is_no_id(tmp_path):
    rows = [{"query_id": "7", "query": f"query {n}", "pos": [f"passage {n}"]} for n in range(3)]
    path = write(tmp_path / "t.jsonl", lines(*rows))
    with pytest.warns(UserWarning, match="1 query id used for several texts"):
        table = load_examples(path)
    assert len(set(table.queries["id"][:])) == 3
    assert table.queries["text"][:] == ["query 0", "query 1", "query 2"]
    assert f"(the first: '7' in {path}:2); strict" in refusal(path, strict=True)


def test_queries_of_a_beir_folder_with_the_same_text_share_their_positives(tmp_path):
    folder = beir(tmp_path, "q0\tp0\t1\nq1\tp1\t1\nq2\tp2\t1\n")
    texts = {"q0": "fox", "q1": " fox ", "q2": "owl"}
    write(
        folder / "queries.jsonl",
        lines(*({"_id": key, "text": texts[key]} for key in sorted(texts))),
    )
    found = open_train_set(folder)
    assert found.queries["id"][:] == ["q0", "q2"]
    assert found.positives.lengths.tolist() == [2, 1]
    # evaluation keeps the ids of the qrels
    assert set(open_retrieval_set(folder, "train").queries) == {"q0", "q1", "q2"}


def test_sets_of_a_mixture_know_each_others_positives(tmp_path):
    files = [write(tmp_path / f"{n}.jsonl", lines(row)) for n, row in enumerate(FRANCE)]

    def relevant(*prefixes, model=""):
        members = [
            MixtureConfig(train=str(path), query_prefix=prefix)
            for path, prefix in zip(files, prefixes, strict=True)
        ]
        found = load_training(DataConfig(mixture=members))
        return found.relevant(model).lengths.tolist()

    assert relevant(None, None) == relevant("query: ", "query: ") == [2, 2]
    assert relevant("query: ", "question: ") == [1, 1]
    # a set without a prefix has the model's
    assert relevant("", None) == relevant("query: ", None, model="query: ") == [2, 2]
    assert relevant("", None, model="query: ") == relevant("query: ", None) == [1, 1]


# passages


def test_ids_that_name_two_texts_are_no_ids(tmp_path):
    records = [
        dpr(f"question {q}", [context(0, f"positive {q}")], [context(1, f"negative {q}")])
        for q in range(3)
    ]
    path = write(tmp_path / "t.json", json.dumps(records))
    with pytest.warns(UserWarning, match="2 passage ids used for several texts"):
        convert(path, tmp_path / "data", "beir")
    found = open_train_set(tmp_path / "data", hard_negatives=1)
    texts = found.passages["text"][:]
    positives = [texts[row] for row in found.positives.values]
    assert positives == ["positive 0", "positive 1", "positive 2"]
    assert [texts[row] for row in found.negatives.values.tolist()] == [
        f"negative {n}" for n in range(3)
    ]
    assert len(set(found.passages["id"][:])) == 6
    sentence = refusal(path, strict=True)
    assert "(the first: '0' in " in sentence
    assert "(record 2)); strict is set" in sentence


@pytest.mark.parametrize("missing", ["", None])
def test_an_empty_id_is_a_missing_id(tmp_path, missing):
    records = [
        dpr("one?", [{"title": "", "text": "first", "passage_id": missing}]),
        dpr("two?", [{"title": "", "text": "second", "passage_id": missing}], query_id=missing),
    ]
    table = load_examples(write(tmp_path / "t.json", json.dumps(records)))
    assert table.passages["text"][:] == ["first", "second"]
    assert len({*table.passages["id"][:]} - {""}) == 2
    rows = [{"query": "q", "query_id": missing, "pos": ["a", "b"], "pos_id": ["1", missing]}]
    table = load_examples(write(tmp_path / "t.jsonl", lines(*rows)))
    assert table.passages["id"][0] == "1"
    assert len(table.passages["id"][1]) == 24


COPIES = [
    ({"pos": ["Same text here."], "neg": ["Same\ntext  here."]}, {}),
    ({"pos": ["Same text here."], "neg": ["Same text here."]}, {"pos_id": ["1"], "neg_id": ["2"]}),
]


@pytest.mark.parametrize(("texts", "ids"), COPIES)
def test_a_hard_negative_with_the_text_of_a_positive_is_left_out(tmp_path, texts, ids):
    rows = [{"query": "q", **texts, **ids}, {"query": "other", "pos": ["b"], "neg": ["c"]}]
    path = write(tmp_path / "t.jsonl", lines(*rows))
    warning = "left out 1 hard negative with the text of a positive of the query"
    with pytest.warns(UserWarning, match=warning):
        check(path)
    with pytest.warns(UserWarning, match=warning):
        found = open_train_set(path, hard_negatives=1)
    assert found.negatives.lengths.tolist() == [0, 1]


def test_the_record_with_a_copied_negative_is_named_and_merged_records_are_counted(tmp_path):
    rows = [
        {"query": "q", "pos": ["b"], "neg": ["c"]},
        {"query": "other", "pos": ["c"]},
        {"query": " q", "pos": ["a"], "neg": ["c", "b"]},  # b is a positive in line 1
    ]
    path = write(tmp_path / "t.jsonl", lines(*rows))
    with pytest.warns(UserWarning, match=r"1 hard negative with .*\(the first: .*t\.jsonl:3\)"):
        found = check(path)
    assert (found["rows"], found["different queries"]) == (3, 2)
    with pytest.raises(InputError, match=r"t\.jsonl:3\); strict is set"):
        open_train_set(path, strict=True)
    found = check(write(tmp_path / "u.jsonl", lines(*rows[:2])))  # negative control
    assert (found["rows"], found["different queries"]) == (2, 2)


def test_a_judged_negative_with_the_text_of_a_positive_is_left_out(tmp_path):
    folder = beir(tmp_path, "q0\tp0\t1\nq0\tp1\t0\nq0\tp2\t0\n")
    passages = {"p0": ("T", "text"), "p1": ("", "T  text"), "p2": ("", "another")}
    records = [{"_id": key, "title": a, "text": b} for key, (a, b) in passages.items()]
    write(folder / "corpus.jsonl", lines(*records))
    with pytest.warns(UserWarning, match="1 hard negative with the text of a positive"):
        found = check(folder)["splits"]["train"]
    assert found["negatives with the text of a positive"] == 1
    with pytest.warns(UserWarning, match="1 hard negative with the text of a positive"):
        found = open_train_set(folder, hard_negatives=1)
    assert [found.passages["id"][row] for row in found.negatives.values.tolist()] == ["p2"]


def test_copies_in_a_corpus_are_masked_as_the_passage_itself(tmp_path):
    folder = beir(tmp_path, "q0\tp0\t1\nq1\tp1\t1\nq2\tp2\t1\n")
    texts = {"p0": "the fox", "p1": "the\tfox", "p2": "an owl"}
    write(
        folder / "corpus.jsonl",
        lines(*({"_id": key, "title": "", "text": text} for key, text in texts.items())),
    )
    settings = {"batch.global_batch_size": 3, "batch.micro_batch_size": 3, "optim.max_steps": 1}
    for method in ("in_batch", "grad_cache", "cont_accum"):
        train(train_config(folder, tmp_path / method, method, **settings))
        line = read_log(tmp_path / method)[0]
        # q0 and q1 have each other's passage as a copy of their own positive
        assert line["masked"] == pytest.approx(2 / 3), method


# formats


def test_five_formats_of_the_same_data_give_the_same_losses(tmp_path):
    rows = [
        {
            "query": f"where is animal {n % 9}",  # queries 0 to 2 occur twice
            "pos": [f"animal {n % 9} lives in valley {n}"],
            "neg": [f"animal {n % 9} never saw valley {n % 5}"],
        }
        for n in range(12)
    ]
    sources = {"jsonl": str(write(tmp_path / "data.jsonl", lines(*rows)))}
    for form in ("beir", "dpr", "tevatron"):
        convert(sources["jsonl"], tmp_path / form, form)
        sources[form] = str(tmp_path / form)
    (tmp_path / "table").mkdir()
    with (tmp_path / "table" / "train.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["question", "answer", "hard"])
        table.writerows((row["query"], row["pos"][0], row["neg"][0]) for row in rows)
    sources["table"] = f"hub:{tmp_path / 'table'}?query=question&pos=answer&neg=hard"
    losses = {}
    for name, source in sources.items():
        settings = {"data.hard_negatives": 1, "optim.max_steps": 3, "batch.order": "file"}
        train(train_config(source, tmp_path / "runs" / name, **settings))
        losses[name] = [line["loss"] for line in read_log(tmp_path / "runs" / name)]
    assert len(losses["jsonl"]) == 3
    for name, values in losses.items():
        assert values == losses["jsonl"], name

"""Calls from a notebook or a service: paths, numbers of NumPy, wrong arguments, and the state of
the program afterwards."""

import json
import warnings

import numpy as np
from helpers import tiny_encoder

from contaccum import (
    Retriever,
    encode,
    evaluate,
    evaluate_benchmark,
    evaluate_run_file,
    look,
    mine,
    search,
)
from contaccum.cli import main
from contaccum.data.dataset import open_dataset


def test_every_function_accepts_paths(data, tmp_path):
    tiny_encoder().save(model := tmp_path / "model")
    metrics = evaluate(model, data, "train", output=tmp_path / "metrics.json")
    saved = json.loads((tmp_path / "metrics.json").read_text())
    assert (saved["model"], saved["data"], saved["mean"]) == (
        str(model),
        str(data),
        metrics["mean"],
    )
    assert metrics == evaluate(str(model), str(data), "train")
    assert (
        evaluate_benchmark(model, str(data), "train", output=tmp_path / "all")["mean"]
        == metrics["mean"]
    )
    run = search(model, data, "train", output=tmp_path / "run.trec")
    assert look(model, data, "anything", k=1)
    assert set(run) == set(search(str(model), str(data), "train"))
    scored = evaluate_run_file(
        tmp_path / "run.trec", data / "qrels" / "train.tsv", tmp_path / "run.json"
    )
    assert scored["queries"] == len(run)
    corpus = open_dataset(data).corpus
    first, second = (
        Retriever.open(each, corpus).search({"q": "anything"}, 1) for each in (model, str(model))
    )
    assert first == second
    assert "vectors of 32 numbers" in encode(model, data, tmp_path / "vectors")
    assert mine(model, data, tmp_path / "mined.jsonl")["queries"] == len(run)


def test_k_may_be_a_number_of_numpy(data):
    dense = Retriever.open(tiny_encoder(), open_dataset(data).corpus)
    assert dense.search({"q": "a"}, np.int64(2)) == dense.search({"q": "a"}, 2)


def test_main_restores_how_python_shows_warnings(capsys):
    before = warnings.showwarning
    assert main(["report", "no/such/folder"]) == 2
    assert warnings.showwarning is before
    assert "no/such/folder" in capsys.readouterr().err

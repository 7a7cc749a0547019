"""Judgements whose passage is not in the corpus: positives that no search can find, as in
trec_eval."""

import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
from tiny_data import lines, write
from word_encoder import WordEncoder

from contaccum import evaluate, evaluate_benchmark, evaluate_run_file, search
from contaccum.cli import main
from contaccum.config import DataPolicy
from contaccum.data.commands import check
from contaccum.data.dataset import open_dataset
from contaccum.data.dev_set import write_dev_set
from contaccum.errors import InputError
from contaccum.runtime.files import read_json

pytestmark = pytest.mark.filterwarnings("always:.*judgements? of a passage")

JUDGEMENTS = "q1\td1\t1\nq1\td9\t1\nq2\td2\t1\n"
NDCG = (1 / (1 + 1 / np.log2(3)) + 1) / 2  # 0.8066


def folder(path: Path, judgements: str = JUDGEMENTS, splits: tuple[str, ...] = ("test",)) -> str:
    texts = {"d1": "apples are red", "d2": "seas are blue"}
    write(path / "corpus.jsonl", lines(*({"_id": k, "text": t} for k, t in texts.items())))
    queries = {"q1": "red apples", "q2": "blue seas"}
    write(path / "queries.jsonl", lines(*({"_id": k, "text": t} for k, t in queries.items())))
    for split in splits:
        write(path / "qrels" / f"{split}.tsv", "query-id\tcorpus-id\tscore\n" + judgements)
    return str(path)


def by_dev_set(data, path):
    write_dev_set(open_dataset(data).retrieval_set, path / "dev", 10, 10, seed=0)
    return evaluate("bm25", path / "dev", "dev")["mean"]


def by_run_file(data, path):
    search("bm25", data, output=path / "run.trec")
    return evaluate_run_file(path / "run.trec", Path(data) / "qrels" / "test.tsv")["mean"]


def by_benchmark(data, path):
    other = path / "other"
    shutil.copytree(data, other)
    return evaluate_benchmark("bm25", f"{data},{other}")["mean"]


WAYS = {
    "bm25": lambda data, path: evaluate("bm25", data)["mean"],
    "encoder": lambda data, path: evaluate(WordEncoder(), data)["mean"],
    "beir": lambda data, path: evaluate(WordEncoder(), data, evaluator="beir")["mean"],
    "run file": by_run_file,
    "loaded": lambda data, path: evaluate("bm25", open_dataset(data).retrieval_set)["mean"],
    "several": by_benchmark,
    "dev set of auto": by_dev_set,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("judgements", "ndcg", "recall"),
    [
        (JUDGEMENTS, NDCG, 0.75),
        ("q1\td9\t1\nq2\td2\t1\n", 0.5, 0.5),  # q1 has only an unknown positive
        ("q1\td1\t1\nq1\td9\t0\nq2\td2\t1\n", 1.0, 1.0),  # only an unknown negative
        # grade 2 for the unknown one: the ideal ranking has it first
        ("q1\td1\t1\nq1\td9\t2\nq2\td2\t1\n", (1 / (2 + 1 / np.log2(3)) + 1) / 2, 0.75),
    ],
)
def test_unknown_positives_count_in_the_ideal_ranking_and_in_recall(
    way, judgements, ndcg, recall, tmp_path
):
    mean = WAYS[way](folder(tmp_path / "d", judgements), tmp_path)
    assert mean["ndcg@10"] == pytest.approx(ndcg, abs=1e-5)  # beir rounds to five digits
    assert mean["recall@10"] == pytest.approx(recall, abs=1e-5)


@pytest.mark.parametrize("way", ["bm25", "encoder", "beir"])
def test_one_warning_gives_the_number(way, tmp_path):
    with pytest.warns(UserWarning, match="judgement of a passage") as said:
        WAYS[way](folder(tmp_path / "d"), tmp_path)
    (message,) = [str(each.message) for each in said if "judgement" in str(each.message)]
    assert "1 judgement of a passage that is not in the corpus" in message
    with warnings.catch_warnings():  # negative control
        warnings.filterwarnings("error", ".*judgements? of a passage")
        WAYS[way](folder(tmp_path / "whole", "q1\td1\t1\nq2\td2\t1\n"), tmp_path)


def test_judgements_of_another_corpus_are_refused(tmp_path):
    data = folder(tmp_path / "d", "q1\td1-0-512\t1\nq2\td2-0-512\t1\n")  # ids of parts of passages
    for call in ({"model": "bm25"}, {"model": WordEncoder(), "evaluator": "beir"}):
        with pytest.raises(InputError, match="none of the 2 judged passages, such as 'd1-0-512'"):
            evaluate(data=data, **call)


TRAIN = (
    "train --method in_batch --model.name tiny --model.tiny_width 32 --model.tiny_layers 1 "
    "--model.tiny_vocabulary 200 --batch.global_batch_size 2 --optim.max_steps 1 --run.device cpu"
)


def test_the_dev_evaluation_of_a_training_counts_them_too(tmp_path):
    data = folder(tmp_path / "train", "q1\td1\t1\nq2\td2\t1\n", ("train",))
    dev = folder(tmp_path / "dev", splits=("dev",))
    run = tmp_path / "run"
    options = f"--data.train {data} --data.dev {dev} --run.metric recall@100 --output_dir {run}"
    assert main([*TRAIN.split(), *options.split()]) == 0
    assert read_json(run / "dev_metrics.json")["mean"]["recall@100"] == 0.75


def test_training_refuses_them_and_drops_them_with_repair(tmp_path, capsys):
    data = folder(tmp_path / "d", splits=("train",))
    command = [*TRAIN.split(), "--data.train", data, "--output_dir", str(tmp_path / "run")]
    assert main(command) == 2
    said = capsys.readouterr().err
    assert "train.tsv: 1 judgement of a passage that is not in the corpus (first: 'd9'" in said
    assert "--data.repair true" in said
    assert not (tmp_path / "run").exists()
    assert main([*command, "--data.repair", "true"]) == 0
    assert "training drops these judgements" in capsys.readouterr().err
    examples = list(open_dataset(data, "train", DataPolicy(repair=True)).examples())
    assert [[p.id for p in example.positives] for example in examples] == [["d1"], ["d2"]]


def test_a_query_whose_positives_are_all_dropped_is_left_out_of_training(tmp_path):
    data = folder(tmp_path / "d", "q1\td9\t1\nq2\td2\t1\n", ("train",))
    with pytest.raises(InputError, match="1 judgement of a passage"):
        open_dataset(data, "train").train_set()
    with pytest.warns(UserWarning, match="training drops"):
        train_set = open_dataset(data, "train", DataPolicy(repair=True)).train_set()
    assert train_set.queries["id"][:] == ["q2"]


def test_data_check_counts_them(tmp_path):
    data = folder(tmp_path / "d", "q1\td1\t1\nq1\td8\t1\nq1\td9\t0\nq2\td2\t1\n")
    with pytest.warns(UserWarning, match=r"2 judgements of a passage .* \(first: 'd8'\)"):
        check(data)


def test_metrics_of_a_finished_set_are_printed_before_a_later_set_fails(tmp_path, capsys):
    first, second = folder(tmp_path / "first"), folder(tmp_path / "second", "q7\td1\t1\n")
    assert main(["evaluate", "--model", "bm25", "--data", f"{first},{second}"]) == 2
    said = capsys.readouterr().err
    assert f"{first}: ndcg@10 0.8066, recall@100 0.7500, mrr@10 1.0000" in said
    assert "unknown query id 'q7'" in said.splitlines()[-1]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nanobeir/scifacts", "no NanoBEIR set has this name"),
        ("dpr/nq-trains", "no DPR file has this name"),
        ("hub:a/b?query=x", "no such file"),
    ],
)
def test_a_misspelt_later_set_is_found_before_the_model_is_loaded(name, said, tmp_path, capsys):
    sets = f"{folder(tmp_path / 'first')},{name}"
    assert main(["evaluate", "--model", "no/such-model", "--data", sets]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "ndcg" not in error
    assert "no/such-model" not in error

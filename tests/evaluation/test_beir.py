"""Metrics against beir's own evaluation and against hand-computed values."""

import copy
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from beir.retrieval.evaluation import EvaluateRetrieval
from datasets import Dataset
from helpers import open_corpus, write_beir
from transformers import AutoModel, AutoTokenizer
from word_encoder import WordEncoder

from contaccum import DualEncoder, evaluate
from contaccum.cli import main
from contaccum.config import DataPolicy
from contaccum.config.commands import SearchConfig
from contaccum.data.retrieval_set import RetrievalSet
from contaccum.encoder import EncoderSettings, tiny_tower
from contaccum.errors import InputError
from contaccum.evaluation.metrics import CUTOFFS, evaluate_run
from contaccum.retrieval.retriever import Retriever
from contaccum.retrieval.runs import ranked
from contaccum.runtime.processes import Processes


def made_task(seed: int = 0, queries: int = 40, passages: int = 60):
    """Graded qrels and a run with many equal scores, some ids shared by queries and passages, runs
    of uneven depth."""
    random = np.random.default_rng(seed)
    ids = [f"{n}" for n in range(passages)]
    qrels, run = {}, {}
    for query in range(queries):
        judged = random.choice(passages, 6, replace=False)
        qrels[str(query)] = {
            ids[p]: int(grade) for p, grade in zip(judged, random.integers(-1, 4, 6), strict=True)
        }
        found = random.choice(passages, int(random.integers(1, passages)), replace=False)
        run[str(query)] = ranked(
            (ids[p], float(np.float32(random.integers(0, 12) / 7))) for p in found
        )
    return qrels, run


def beirs(qrels, run) -> dict[str, float]:
    results = {query: dict(hits) for query, hits in run.items()}
    # drops identical ids from ``results`` itself
    parts = EvaluateRetrieval.evaluate(qrels, results, list(CUTOFFS))
    values = {key.lower(): value for part in parts for key, value in part.items()}
    values |= {
        key.lower(): value
        for key, value in EvaluateRetrieval.evaluate_custom(qrels, results, CUTOFFS, "mrr").items()
    }
    return {
        key.replace("p@", "precision@") if key.startswith("p@") else key: value
        for key, value in values.items()
    }


@pytest.mark.parametrize("seed", range(5))
def test_means_are_beirs_with_ties_grades_and_identical_ids(seed):
    qrels, run = made_task(seed)
    assert any(query in dict(hits) for query, hits in run.items())
    ours = evaluate_run(qrels, run)
    theirs = beirs(qrels, run)
    assert ours["mean"].keys() == theirs.keys()
    assert ours["mean"] == pytest.approx(theirs, abs=6e-6)  # beir rounds to five digits
    assert ours["queries"] == 40


def test_keeping_identical_ids_changes_the_means():
    qrels, run = made_task()
    kept = evaluate_run(qrels, run, ignore_identical_ids=False)["mean"]
    assert kept != pytest.approx(beirs(qrels, run), abs=1e-4)


def test_evaluation_leaves_the_run_as_it_was():
    qrels, run = made_task()
    before = copy.deepcopy(run)
    evaluate_run(qrels, run)
    assert run == before


def test_a_query_without_results_counts_zero_where_beir_leaves_it_out():
    qrels, run = made_task()
    whole = evaluate_run(qrels, run)["mean"]
    lost = [
        query
        for query in qrels
        if whole and evaluate_run({query: qrels[query]}, run)["mean"]["ndcg@10"] > 0
    ][:3]
    values = [evaluate_run({query: qrels[query]}, run)["mean"]["ndcg@10"] for query in lost]
    short = {query: hits for query, hits in run.items() if query not in lost}
    with pytest.warns(UserWarning, match="no result for 3 of 40 judged queries"):
        ours = evaluate_run(qrels, short)
    assert ours["mean"]["ndcg@10"] == pytest.approx(whole["ndcg@10"] - sum(values) / 40)
    assert all(set(ours["per_query"][query].values()) == {0.0} for query in lost)
    assert beirs(qrels, short)["ndcg@10"] == pytest.approx(
        (whole["ndcg@10"] * 40 - sum(values)) / 37, abs=6e-6
    )


def test_an_empty_list_of_results_counts_zero_like_a_missing_one():
    qrels = {"q": {"a": 1}, "r": {"a": 1}}
    with pytest.warns(UserWarning, match="1 of 2"):
        missing = evaluate_run(qrels, {"q": [("a", 1.0)]})
    with pytest.warns(UserWarning, match="1 of 2"):
        empty = evaluate_run(qrels, {"q": [("a", 1.0)], "r": []})
    assert missing == empty
    assert missing["mean"]["ndcg@10"] == 0.5


def test_values_by_hand():
    metrics = evaluate_run(
        {"q": {"a": 2, "b": 1, "c": 0, "d": 1}},
        {"q": [("c", 3.0), ("a", 2.0), ("x", 1.5), ("b", 1.0)]},
    )
    values = metrics["per_query"]["q"]
    ideal = 2 + 1 / math.log2(3) + 1 / math.log2(4)
    assert values["ndcg@10"] == pytest.approx((2 / math.log2(3) + 1 / math.log2(5)) / ideal)
    assert values["ndcg@3"] == pytest.approx((2 / math.log2(3)) / ideal)
    assert values["map@10"] == pytest.approx((1 / 2 + 2 / 4) / 3)
    assert (values["recall@3"], values["recall@5"]) == pytest.approx((1 / 3, 2 / 3))
    assert (values["precision@1"], values["precision@5"]) == pytest.approx((0.0, 2 / 5))
    assert (values["mrr@1"], values["mrr@3"]) == (0.0, 0.5)


def test_a_run_cut_short_scores_as_the_longer_one_up_to_its_length():
    qrels, run = made_task()
    top = {query: hits[:10] for query, hits in run.items()}
    longer, shorter = (
        evaluate_run(qrels, each, ignore_identical_ids=False)["mean"] for each in (run, top)
    )
    same = [
        f"{name}@{cut}"
        for name in ("ndcg", "map", "recall", "precision", "mrr")
        for cut in (1, 3, 5, 10)
    ]
    assert [shorter[name] for name in same] == [longer[name] for name in same]
    assert shorter["recall@20"] != longer["recall@20"]


def test_a_run_of_other_queries_and_empty_qrels_are_refused():
    with pytest.raises(
        InputError, match="no query in common; for example, 'x' is only in the run, and 'q' only in"
    ):
        evaluate_run({"q": {"a": 1}}, {"x": [("a", 1.0)]})
    with pytest.raises(InputError, match="have no judged query"):
        evaluate_run({}, {"x": [("a", 1.0)]})


CORPUS = Dataset.from_dict(
    {
        "id": ["a", "b", "c"],
        "title": ["", "", ""],
        "text": ["red apples", "red apples and pears", "blue whales"],
    }
)
TASK = RetrievalSet(
    CORPUS, {"a": "red apples", "q": "whales of blue"}, {"a": {"b": 1}, "q": {"c": 1}}
)


def test_an_encoder_is_scored_with_a_query_never_its_own_answer(tmp_path):
    metrics = evaluate(WordEncoder(), TASK, k=1)  # passage a is the first answer to query a
    assert metrics["mean"] == {
        f"{name}@1": 1.0 for name in ("ndcg", "map", "recall", "precision", "mrr")
    }
    assert metrics["per_query"].keys() == {"a", "q"}
    again = evaluate(WordEncoder(), TASK, k=1, settings=SearchConfig(embeddings=tmp_path / "e"))
    assert again == metrics


def test_only_cuts_that_the_run_reaches_are_reported():
    assert "recall@20" in evaluate(WordEncoder(), TASK, k=20)["mean"]
    assert "recall@100" not in evaluate(WordEncoder(), TASK, k=20)["mean"]
    with pytest.raises(InputError, match="k is 0"):
        evaluate(WordEncoder(), TASK, k=0)


def test_own_id_is_dropped_before_the_cutoff():
    retriever = Retriever.open(WordEncoder(), CORPUS)
    hits = retriever.search({"a": "red apples"}, 3)["a"]
    assert hits[0][0] == "a"
    assert retriever.search({"a": "red apples"}, 2, ignore_identical_ids=True) == {"a": hits[1:]}


def test_a_relevance_level_above_all_grades_is_refused(tmp_path):
    with pytest.raises(InputError, match="relevance_level is 3, but the highest grade is 2"):
        evaluate_run({"q": {"p": 2}}, {"q": [("p", 1.0)]}, relevance_level=3)
    # before the encoder is loaded and the corpus encoded
    with pytest.raises(InputError, match="relevance_level is 2, but the highest grade is 1"):
        evaluate("./no-encoder", write_beir(tmp_path / "data"), "test", relevance_level=2)
    assert evaluate_run({"q": {"p": 2}}, {"q": [("p", 1.0)]}, relevance_level=2)["mean"]["mrr@10"]


@pytest.mark.filterwarnings("ignore:.*with the id of a positive")
@pytest.mark.parametrize(("query", "score"), [("q", 1.0), ("1", 0.0)])
def test_only_in_a_beir_folder_an_id_makes_a_passage_the_query_itself(query, score, tmp_path):
    """In a file of examples, ids are only labels."""
    texts, folder = {"1": "red apple pie", "2": "red", "3": "a blue whale"}, tmp_path / "folder"
    records = [
        {"query_id": query, "query": "red apple", "pos": [texts["1"]], "pos_id": ["1"]},
        {"query_id": "r", "query": "blue whale", "pos": [texts["3"]], "pos_id": ["3"]},
    ]
    file = tmp_path / "examples.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "qrels").mkdir(parents=True)
    (folder / "qrels" / "test.tsv").write_text(
        f"query-id\tcorpus-id\tscore\n{query}\t1\t1\nr\t3\t1\n"
    )
    for name, rows in (
        ("corpus", texts.items()),
        ("queries", [(record["query_id"], record["query"]) for record in records]),
    ):
        (folder / f"{name}.jsonl").write_text(
            "".join(json.dumps({"_id": key, "text": text}) + "\n" for key, text in rows)
        )
    for data, first in ((file, 1.0), (folder, score)):
        assert [
            values["ndcg@10"] for values in evaluate("bm25", str(data))["per_query"].values()
        ] == [first, 1.0]


def tiny_model(folder: Path, data: Path) -> Path:
    texts = [f"{row['title']} {row['text']}" for row in open_corpus(data)]
    tower = tiny_tower(texts, "mean", layers=1, width=32, vocabulary=200, max_length=64, seed=0)
    DualEncoder(
        tower, tower, EncoderSettings(max_query_length=32, max_passage_length=64, tie_towers=True)
    ).save(folder)
    return folder


def test_beir_and_our_evaluator_agree(tmp_path, capsys):
    """To the 5 digits that BEIR gives, by the command and its table; control: another encoder
    scores otherwise."""
    data = write_beir(tmp_path / "data")
    model = tiny_model(tmp_path / "model", data)
    tables = []
    for name in ("contaccum", "beir"):
        output = str(tmp_path / f"{name}.json")
        assert (
            main(
                [
                    "evaluate", "--model", str(model), "--data", str(data), "--split", "train",
                    "--evaluator", name, "--k", "20", "--output", output,
                ]
            )
            == 0
        )  # fmt: skip
        tables.append(capsys.readouterr().out)
    interval = re.compile("; ndcg@10 .* interval .*")  # BEIR gives no values of queries
    assert interval.search(tables[0])
    assert interval.sub("", tables[0]) == tables[1]
    ours, theirs = (
        json.loads((tmp_path / f"{name}.json").read_text()) for name in ("contaccum", "beir")
    )
    assert theirs["mean"] == {
        name: pytest.approx(value, abs=5.1e-6) for name, value in ours["mean"].items()
    }
    assert (theirs["evaluator"], theirs["queries"]) == ("beir", ours["queries"])
    other = evaluate(
        DualEncoder.load(model, max_query_length=5), str(data), "train", k=20, evaluator="beir"
    )
    assert other["mean"] != theirs["mean"]


@pytest.mark.filterwarnings("default")
def test_beir_refuses_what_it_cannot_run(tmp_path, capsys):
    data = write_beir(tmp_path / "data")
    model = tiny_model(tmp_path / "model", data)
    call = ["evaluate", "--data", str(data), "--evaluator", "beir"]
    assert main([*call, "--model", "bm25"]) == 2
    assert "--model bm25 has no vectors; this command needs an encoder" in capsys.readouterr().err
    assert main([*call, "--model", str(model), "--split", "absent"]) == 2
    assert "split 'absent' not found" in capsys.readouterr().err
    # control: an option that it can use
    assert main([*call, "--model", str(model), "--batch_tokens", "64"]) == 0


def test_beir_scores_the_queries_and_judgements_that_we_score(tmp_path):
    """A query without a positive is left out; BEIR skips a first line that is no header."""
    data = write_beir(tmp_path / "data")
    model, qrels = tiny_model(tmp_path / "model", data), data / "qrels" / "dev.tsv"
    head, *lines = qrels.read_text().splitlines()
    lines[3] = lines[3].replace("\t1", "\t0")
    qrels.write_text("\n".join([head, *lines]) + "\n")
    with pytest.warns(UserWarning, match="skipped 1 query without a positive"):
        ours, theirs = (
            evaluate(model, data, "dev", k=20, evaluator=name) for name in ("contaccum", "beir")
        )
    assert theirs["queries"] == ours["queries"] == 9
    assert theirs["mean"]["ndcg@10"] == pytest.approx(ours["mean"]["ndcg@10"], abs=5.1e-6)
    assert theirs["positives_hash"] == ours["positives_hash"]
    qrels.write_text("\n".join(lines[4:]) + "\n")
    with pytest.raises(InputError, match="BEIR reads other judgements of dev than contaccum"):
        evaluate(model, data, "dev", k=20, evaluator="beir")


@pytest.mark.parametrize(
    "options",
    [
        {"relevance_level": 2},
        {"policy": DataPolicy(repair=True)},
        {"policy": DataPolicy(strict=True)},
        {"settings": SearchConfig(embeddings="vectors")},
        {"group": Processes(0, 2)},
    ],
)
def test_options_that_beir_cannot_use_are_refused(options, tmp_path):
    with pytest.raises(InputError, match=r"evaluator beir .* supports only batch_tokens"):
        evaluate("no/model", "no/data", evaluator="beir", **options)


@pytest.mark.acceptance
def test_beir_and_our_evaluator_agree_on_scifact(shared_data, minilm, tmp_path):
    """Two layers of the encoder are enough, since both evaluators encode with them."""
    model = AutoModel.from_pretrained(minilm, num_hidden_layers=2)
    model.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(minilm).save_pretrained(tmp_path / "model")
    encoder = DualEncoder.load(tmp_path / "model", max_query_length=32, max_passage_length=32)
    data = str(shared_data / "scifact")
    ours, theirs = (
        evaluate(encoder, data, evaluator=name)["mean"] for name in ("contaccum", "beir")
    )
    assert ours["ndcg@10"] > 0.1
    assert theirs == {name: pytest.approx(value, abs=1.1e-5) for name, value in ours.items()}


def test_equal_scores_are_ranked_by_every_metric_as_in_trec_eval():
    """trec_eval ranks passages with equal scores by id, greatest first, whatever their order."""
    run = {"q": [("a", 0.5), ("b", 0.5), ("c", 0.1)]}
    for relevant, expected in (("b", 1.0), ("a", 0.5)):
        means = evaluate_run({"q": {relevant: 1}}, run)["mean"]
        assert means["mrr@10"] == means["map@10"] == expected
    # it compares single precision, in which these scores are equal
    close = evaluate_run({"q": {"a": 1}}, {"q": [("a", 1.0 + 1e-9), ("b", 1.0)]}, cutoffs=(1,))
    assert close["mean"]["mrr@1"] == 0
    assert list(close["first_passages"]["q"]) == ["b", "a"]


def test_a_set_whose_queries_all_have_the_id_of_their_passage_is_refused(tmp_path):
    """As in BEIR, nothing would be found, and a run would keep its first model."""
    folder = write_beir(tmp_path / "data", queries=4)
    for name in ("corpus", "queries"):
        text = (folder / f"{name}.jsonl").read_text()
        (folder / f"{name}.jsonl").write_text(text.replace('"p', '"').replace('"q', '"'))
    qrels = folder / "qrels" / "test.tsv"
    qrels.write_text("query-id\tcorpus-id\tscore\n0\t0\t1\n1\t1\t1\n")
    with pytest.raises(InputError, match="each query has the id of its only judged"):
        evaluate("bm25", folder)
    qrels.write_text(qrels.read_text() + "1\t2\t1\n")  # negative control
    with pytest.warns(UserWarning, match="2 queries with the id of a positive"):
        evaluate("bm25", folder)

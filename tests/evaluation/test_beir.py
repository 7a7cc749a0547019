"""Metrics against beir's own evaluation and against hand-computed values."""

import copy
import json
import math

import numpy as np
import pytest
from beir.retrieval.evaluation import EvaluateRetrieval
from datasets import Dataset
from word_encoder import WordEncoder

from contaccum import evaluate
from contaccum.data.convert import convert
from contaccum.data.tables import RetrievalSet
from contaccum.errors import InputError
from contaccum.evaluation.beir import CUTS, drop_own, evaluate_encoder, evaluate_run
from contaccum.options import SearchSettings
from contaccum.retrieval.runs import ranked


def made_task(seed: int = 0, queries: int = 40, passages: int = 60):
    """Graded qrels and a run with many equal scores, some ids shared by queries and passages, runs of uneven depth."""
    random = np.random.default_rng(seed)
    ids = [f"{n}" for n in range(passages)]
    qrels, run = {}, {}
    for query in range(queries):
        judged = random.choice(passages, 6, replace=False)
        qrels[str(query)] = {ids[p]: int(grade) for p, grade in zip(judged, random.integers(-1, 4, 6), strict=True)}
        found = random.choice(passages, int(random.integers(1, passages)), replace=False)
        run[str(query)] = ranked((ids[p], float(np.float32(random.integers(0, 12) / 7))) for p in found)
    return qrels, run


def beirs(qrels, run) -> dict[str, float]:
    results = {query: dict(hits) for query, hits in run.items()}
    parts = EvaluateRetrieval.evaluate(qrels, results, list(CUTS))  # drops identical ids from ``results`` itself
    values = {key.lower(): value for part in parts for key, value in part.items()}
    values |= {
        key.lower(): value for key, value in EvaluateRetrieval.evaluate_custom(qrels, results, CUTS, "mrr").items()
    }
    return {key.replace("p@", "precision@") if key.startswith("p@") else key: value for key, value in values.items()}


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
    lost = [query for query in qrels if whole and evaluate_run({query: qrels[query]}, run)["mean"]["ndcg@10"] > 0][:3]
    values = [evaluate_run({query: qrels[query]}, run)["mean"]["ndcg@10"] for query in lost]
    short = {query: hits for query, hits in run.items() if query not in lost}
    with pytest.warns(UserWarning, match="3 of 40 judged queries have no result"):
        ours = evaluate_run(qrels, short)
    assert ours["mean"]["ndcg@10"] == pytest.approx(whole["ndcg@10"] - sum(values) / 40)
    assert all(set(ours["per_query"][query].values()) == {0.0} for query in lost)
    assert beirs(qrels, short)["ndcg@10"] == pytest.approx((whole["ndcg@10"] * 40 - sum(values)) / 37, abs=6e-6)


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
        {"q": {"a": 2, "b": 1, "c": 0, "d": 1}}, {"q": [("c", 3.0), ("a", 2.0), ("x", 1.5), ("b", 1.0)]}
    )
    values = metrics["per_query"]["q"]
    ideal = 2 + 1 / math.log2(3) + 1 / math.log2(4)
    assert values["ndcg@10"] == pytest.approx((2 / math.log2(3) + 1 / math.log2(5)) / ideal)
    assert values["ndcg@3"] == pytest.approx((2 / math.log2(3)) / ideal)
    assert values["map@10"] == pytest.approx((1 / 2 + 2 / 4) / 3)
    assert (values["recall@3"], values["recall@5"]) == pytest.approx((1 / 3, 2 / 3))
    assert (values["precision@1"], values["precision@5"]) == pytest.approx((0.0, 2 / 5))
    assert (values["mrr@1"], values["mrr@3"]) == (0.0, 0.5)


def test_equal_scores_are_met_in_the_order_in_which_our_runs_list_them():
    hits = ranked([("a", 1.0), ("b", 1.0), ("c", 1.0)])
    assert [key for key, _ in hits] == ["c", "b", "a"]
    for place, (key, _) in enumerate(hits, 1):
        values = evaluate_run({"q": {key: 1}}, {"q": hits})["mean"]
        assert values["mrr@10"] == pytest.approx(1 / place)
        assert values["map@10"] == pytest.approx(1 / place)  # trec_eval's view of the same order


def test_a_run_cut_short_scores_as_the_longer_one_up_to_its_length():
    qrels, run = made_task()
    top = {query: hits[:10] for query, hits in run.items()}
    longer, shorter = (evaluate_run(qrels, each, ignore_identical_ids=False)["mean"] for each in (run, top))
    same = [f"{name}@{cut}" for name in ("ndcg", "map", "recall", "precision", "mrr") for cut in (1, 3, 5, 10)]
    assert [shorter[name] for name in same] == [longer[name] for name in same]
    assert shorter["recall@20"] != longer["recall@20"]


def test_a_run_of_other_queries_and_empty_qrels_are_refused():
    with pytest.raises(InputError, match="no query of the run is judged: it has 'x', the qrels have 'q'"):
        evaluate_run({"q": {"a": 1}}, {"x": [("a", 1.0)]})
    with pytest.raises(InputError, match="judge no query"):
        evaluate_run({}, {"x": [("a", 1.0)]})


CORPUS = Dataset.from_dict(
    {"id": ["a", "b", "c"], "title": ["", "", ""], "text": ["red apples", "red apples and pears", "blue whales"]}
)
TASK = RetrievalSet(CORPUS, {"a": "red apples", "q": "whales of blue"}, {"a": {"b": 1}, "q": {"c": 1}})


def test_an_encoder_is_scored_with_a_query_never_its_own_answer(tmp_path):
    metrics = evaluate_encoder(WordEncoder(), TASK, 1)  # passage a is the first answer to query a
    assert metrics["mean"] == {f"{name}@1": 1.0 for name in ("ndcg", "map", "recall", "precision", "mrr")}
    assert metrics["per_query"].keys() == {"a", "q"}
    again = evaluate_encoder(WordEncoder(), TASK, 1, SearchSettings(embeddings=tmp_path / "e", dtype="float16"))
    assert again == metrics


def test_only_cuts_that_the_run_reaches_are_reported():
    assert "recall@20" in evaluate_encoder(WordEncoder(), TASK, 20)["mean"]
    assert "recall@100" not in evaluate_encoder(WordEncoder(), TASK, 20)["mean"]
    with pytest.raises(InputError, match="k is 0"):
        evaluate_encoder(WordEncoder(), TASK, 0)


def test_own_id_is_dropped_before_the_cut():
    assert drop_own({"a": [("a", 3.0), ("b", 2.0), ("c", 1.0)]}, 2) == {"a": [("b", 2.0), ("c", 1.0)]}


@pytest.mark.parametrize(("given", "score"), [({}, 1.0), ({"query_id": 1}, 0.0)])
def test_only_an_id_that_the_data_gives_makes_a_passage_the_query_itself(given, score, tmp_path):
    records = [
        {**given, "query": "red apple", "pos": ["red apple pie"], "pos_id": [1], "neg": ["red"]},
        {"query": "blue whale", "pos": ["a blue whale"], "pos_id": [3]},
    ]
    file = tmp_path / "examples.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    convert(file, tmp_path / "folder", "beir", split="test")
    for data in (file, tmp_path / "folder"):
        assert [values["ndcg@10"] for values in evaluate("bm25", str(data))["per_query"].values()] == [score, 1.0]

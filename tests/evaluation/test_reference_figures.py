"""Figures of all-MiniLM-L6-v2 without training, measured outside the project, reproduced from its
checkpoint."""

import numpy as np
import pytest
from helpers import open_corpus, open_retrieval_set, search_vectors

from contaccum.config.commands import SearchConfig
from contaccum.encoder import DualEncoder
from contaccum.evaluation.answers import answer_accuracy
from contaccum.evaluation.evaluate import evaluate
from contaccum.evaluation.metrics import evaluate_run
from contaccum.formats.dpr import read_questions
from contaccum.retrieval.retriever import Retriever
from contaccum.retrieval.shards import Shard, ShardFolder

pytestmark = pytest.mark.acceptance

SCIFACT = {"ndcg@10": 0.6451, "recall@20": 0.8373, "recall@100": 0.9250, "mrr@100": 0.6110}


def test_scifact_to_one_thousandth_and_to_two_in_half_precision(shared_data, minilm, tmp_path):
    encoder = DualEncoder.load(minilm, max_query_length=64, max_passage_length=256)
    data = open_retrieval_set(shared_data / "scifact", "test")
    mean = evaluate(encoder, data, settings=SearchConfig(embeddings=str(tmp_path / "e")))["mean"]
    assert {key: mean[key] for key in SCIFACT} == pytest.approx(SCIFACT, abs=0.001)
    half = [
        Shard(shard.ids, shard.vectors.astype(np.float16)) for shard in ShardFolder(tmp_path / "e")
    ]
    run = search_vectors(
        list(data.queries), encoder.encode_queries(list(data.queries.values())), half, 101
    )
    mean = evaluate_run(data.qrels, {query: hits[:100] for query, hits in run.items()})["mean"]
    assert {key: mean[key] for key in SCIFACT} == pytest.approx(SCIFACT, abs=0.002)


def test_answer_accuracy_to_half_a_thousandth(shared_data, minilm):
    encoder = DualEncoder.load(minilm, max_query_length=64, max_passage_length=256)
    questions = list(read_questions(shared_data / "xquad-dpr" / "xquad-test.qa.csv"))
    corpus = open_corpus(shared_data / "xquad-dpr" / "psgs_w100.tsv")
    queries = {str(number): question.text for number, question in enumerate(questions)}
    run = Retriever.open(encoder, corpus).search(queries, 100)
    mean = answer_accuracy(questions, run, corpus)["mean"]
    assert mean == pytest.approx(
        {"top1": 0.8874, "top5": 0.9849, "top20": 0.9933, "top100": 0.9992}, abs=0.0005
    )

"""The figures of all-MiniLM-L6-v2 on MedQuAD; a file of its own, so that the encoding is shared by
the processes of the suite."""

import pytest
from datasets import Dataset
from helpers import judged_split, open_queries, read_corpus

from contaccum.encoder import DualEncoder
from contaccum.evaluation.metrics import evaluate_run
from contaccum.retrieval.retriever import Retriever
from contaccum.retrieval.runs import ranked

pytestmark = pytest.mark.acceptance

MEDQUAD = {"ndcg@10": 0.8322, "recall@20": 0.9441, "recall@100": 0.9763, "mrr@100": 0.8105}


@pytest.mark.filterwarnings("ignore:.*skipped .* with the id of a later one")
def test_medquad_to_one_thousandth(shared_data, minilm):
    """The figures count every line of the corpus as a passage: 34 ids stand again, each at the
    lowest of its scores.

    Read as BEIR's loader reads it (the last passage of an id stands), the same encoder has ndcg@10
    0.8350.
    """
    folder = shared_data / "medquad"
    encoder = DualEncoder.load(minilm, max_query_length=64, max_passage_length=128)
    qrels = judged_split(folder, "test", repair=True).qrels
    texts = open_queries(folder, repair=True)
    lines = list(read_corpus(folder / "corpus.jsonl"))
    columns = {
        "id": list(map(str, range(len(lines)))),
        "title": [p.title for p in lines],
        "text": [p.text for p in lines],
    }
    run = Retriever.open(encoder, Dataset.from_dict(columns)).search(
        {query: texts[query] for query in qrels}, 100
    )
    by_id = {
        q: ranked({lines[int(row)].id: score for row, score in hits}.items())
        for q, hits in run.items()
    }
    mean = evaluate_run(qrels, by_id)["mean"]
    assert {key: mean[key] for key in MEDQUAD} == pytest.approx(MEDQUAD, abs=0.001)

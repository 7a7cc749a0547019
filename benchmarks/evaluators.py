"""One trained model in four evaluators (ours, sentence-transformers, BEIR, MTEB); their ndcg@10 must be equal.

    python benchmarks/evaluators.py --model runs/mine/model --data scifact

MTEB runs its SciFact task on the given data, so nothing is downloaded; without the package mteb its
row is skipped.
"""

import argparse
import importlib.util
import json
import logging
from collections.abc import Callable
from pathlib import Path

from contaccum import evaluate
from contaccum.config.commands import DataPolicy
from contaccum.data.dataset import open_dataset
from contaccum.data.retrieval_set import RetrievalSet
from contaccum.encoder import DualEncoder


def ours(model: Path, judged: RetrievalSet, data: Path, split: str) -> float:
    return evaluate(DualEncoder.load(model), str(data), split, policy=DataPolicy(repair=True))[
        "mean"
    ]["ndcg@10"]


def sentence_transformers(model: Path, judged: RetrievalSet, data: Path, split: str) -> float:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator

    relevant = {
        query: {passage for passage, grade in grades.items() if grade}
        for query, grades in judged.qrels.items()
    }
    evaluator = InformationRetrievalEvaluator(
        judged.queries, passages(judged), relevant, batch_size=32
    )
    encoder = SentenceTransformer(str(model))
    return float(evaluator(encoder)[f"{encoder.similarity_fn_name}_ndcg@10"])


def beir(model: Path, judged: RetrievalSet, data: Path, split: str) -> float:
    from beir.datasets.data_loader import GenericDataLoader
    from beir.retrieval.evaluation import EvaluateRetrieval
    from beir.retrieval.models import SentenceBERT
    from beir.retrieval.search.dense import DenseRetrievalExactSearch

    corpus, asked, qrels = GenericDataLoader(str(data)).load(split=split)
    towers = SentenceBERT((str(model / "query_encoder"), str(model / "passage_encoder")))
    retriever = EvaluateRetrieval(
        DenseRetrievalExactSearch(towers, batch_size=32), score_function=_score(model)
    )
    ndcg, *_ = retriever.evaluate(qrels, retriever.retrieve(corpus, asked), [10])
    return ndcg["NDCG@10"]


def mteb(model: Path, judged: RetrievalSet, data: Path, split: str) -> float:
    import mteb
    from datasets import Dataset
    from sentence_transformers import SentenceTransformer

    task = mteb.get_task("SciFact")
    texts = [{"id": row["id"], "title": row["title"], "text": row["text"]} for row in judged.corpus]
    asked = [{"id": key, "text": text} for key, text in judged.queries.items()]
    found = {
        "corpus": Dataset.from_list(texts),
        "queries": Dataset.from_list(asked),
        "top_ranked": None,
    }
    task.dataset = {"default": {"test": {**found, "relevant_docs": judged.qrels}}}
    task.data_loaded = True
    results = mteb.evaluate(SentenceTransformer(str(model)), task, cache=None, co2_tracker=False)
    return results.task_results[0].scores["test"][0]["ndcg_at_10"]


def _score(model: Path) -> str:
    similarity = json.loads((model / "contaccum.json").read_text(encoding="utf-8"))["similarity"]
    return {"cosine": "cos_sim", "dot": "dot"}[similarity]


def passages(judged: RetrievalSet) -> dict[str, str]:
    return {row["id"]: f"{row['title']} {row['text']}".strip() for row in judged.corpus}


EVALUATORS: dict[str, Callable[[Path, RetrievalSet, Path, str], float]] = {
    "contaccum": ours, "sentence-transformers": sentence_transformers, "beir": beir, "mteb": mteb,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="folder that contaccum saved")
    parser.add_argument("--data", type=Path, required=True, help="BEIR folder")
    parser.add_argument("--split", default="test", help="which qrels of the folder")
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    judged = open_dataset(given.data, given.split, DataPolicy(repair=True)).retrieval_set
    for name, measure in EVALUATORS.items():
        if name == "mteb" and importlib.util.find_spec("mteb") is None:
            print("mteb                   not installed")
            continue
        print(f"{name:22s} {measure(given.model, judged, given.data, given.split):.5f}", flush=True)


if __name__ == "__main__":
    main()

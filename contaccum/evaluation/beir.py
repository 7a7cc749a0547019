"""Evaluate a retriever with the loader, the exact search and the metrics of the library BEIR."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from contaccum.config.commands import EncoderConfig
from contaccum.data.dataset import open_dataset
from contaccum.errors import InputError, library_errors, require
from contaccum.evaluation.metrics import Metrics, hash_of_positives
from contaccum.formats.records import Passage
from contaccum.retrieval.encode import Texts, load_encoder_of

if TYPE_CHECKING:
    from contaccum.encoder import DualEncoder

MEASURES = {"NDCG": "ndcg", "MAP": "map", "Recall": "recall", "P": "precision", "MRR": "mrr"}
"""Name of each measure in BEIR -> its name in contaccum."""


class BeirEncoder:
    """Adapter for BEIR: ``DenseRetrievalExactSearch(BeirEncoder(encoder))``.

    The script must use ``score_function="dot"``. ``batch_size`` is ignored, because
    ``batch_tokens`` limits the size of a batch.
    """

    def __init__(self, encoder: "DualEncoder", batch_tokens: int | None = None) -> None:
        self.encoder = encoder
        self.batch_tokens = batch_tokens

    def encode_queries(self, queries: list[str], batch_size: int = 0, **_: Any) -> torch.Tensor:
        """Encode n queries; return the vectors (n, d)."""
        return torch.from_numpy(self.encoder.encode_queries(list(queries), self.batch_tokens))

    def encode_corpus(
        self, corpus: Sequence[Mapping[str, str]], batch_size: int = 0, **_: Any
    ) -> torch.Tensor:
        """Encode n passages with title and text; return the vectors (n, d)."""
        contents = [Passage("", passage["title"], passage["text"]).content for passage in corpus]
        return torch.from_numpy(self.encoder.encode_passages(contents, self.batch_tokens))


def evaluate_with_beir(
    model: "EncoderConfig | DualEncoder | str | Path",
    data: str | Path,
    split: str,
    cutoffs: list[int],
    batch_tokens: int | None = None,
) -> Metrics:
    """Load, search and score with the library BEIR.

    It rounds mean metrics to 5 decimals and returns no values per query.
    """
    require("beir", "beir", "evaluator beir")
    from beir.datasets.data_loader import GenericDataLoader
    from beir.retrieval.evaluation import EvaluateRetrieval
    from beir.retrieval.search.dense import DenseRetrievalExactSearch

    dataset = open_dataset(data, split)
    judged = dataset.retrieval_set.qrels  # without the queries that have no positive
    fix = "; expected a BEIR folder with unpacked files"
    with library_errors(f"{dataset.path}: BEIR cannot load it", ValueError, KeyError, fix=fix):
        corpus, queries, qrels = GenericDataLoader(str(dataset.path)).load(split=split)
    qrels = {query: grades for query, grades in qrels.items() if query in judged}
    if hash_of_positives(qrels) != hash_of_positives(judged):
        raise InputError(
            f"{dataset.path}: BEIR reads other judgements of {split} than contaccum. It skips the "
            "first line of a qrels file; expected a header there"
        )
    queries = {query: queries[query] for query in qrels}
    for passage in corpus.values():  # BEIR's search fails on a passage without a title
        passage["title"] = passage["title"] or ""
    if isinstance(model, str | Path):
        model = EncoderConfig.of(model)
    model = load_encoder_of(model, "passage", lambda: Texts("passage", dataset.corpus))
    search = DenseRetrievalExactSearch(BeirEncoder(model, batch_tokens))
    scorer = EvaluateRetrieval(search, cutoffs, score_function="dot")
    results = scorer.retrieve(corpus, queries)
    mean = {}
    for values in (
        *scorer.evaluate(qrels, results, cutoffs),
        scorer.evaluate_custom(qrels, results, cutoffs, "mrr"),
    ):
        for name, value in values.items():
            measure, cutoff = name.split("@")
            mean[f"{MEASURES[measure]}@{cutoff}"] = value
    return {
        "mean": mean,
        "per_query": {},
        "queries": len(qrels),
        "positives_hash": hash_of_positives(qrels),
    }

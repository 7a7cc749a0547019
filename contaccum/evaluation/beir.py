"""Evaluate a retriever with the loader, the exact search and the metrics of the library BEIR."""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from contaccum.config.commands import EncoderConfig
from contaccum.data.dataset import open_dataset
from contaccum.errors import InputError, library_errors
from contaccum.evaluation.metrics import Metrics
from contaccum.formats.records import Passage

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
        """Encode n passages; return the vectors (n, d).

        A passage has the keys ``title`` and ``text``.
        """
        return torch.from_numpy(self.encoder.encode_passages(contents(corpus), self.batch_tokens))


def contents(corpus: Sequence[Mapping[str, str]]) -> list[str]:
    """Return title and text of each passage, joined."""
    return [
        Passage("", passage.get("title") or "", passage.get("text") or "").content
        for passage in corpus
    ]


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
    from beir.datasets.data_loader import GenericDataLoader
    from beir.retrieval.evaluation import EvaluateRetrieval
    from beir.retrieval.search.dense import DenseRetrievalExactSearch

    from contaccum.encoder.precision import SAMPLE, load_encoder

    folder = str(open_dataset(data, split).path)
    fix = "; expected a BEIR folder with unpacked files"
    with library_errors(f"{folder}: BEIR cannot load it", ValueError, KeyError, fix=fix):
        corpus, queries, qrels = GenericDataLoader(folder).load(split=split)
    for passage in corpus.values():  # BEIR's search fails on a passage without a title
        passage["title"] = passage["title"] or ""
    judged = [passage for grades in qrels.values() for passage in grades]
    unknown = sum(passage not in corpus for passage in judged)
    if unknown == len(judged):
        raise InputError(
            f"{folder}: none of the {len(judged)} judged passages, such as {judged[0]!r}, is in "
            "the corpus; give the corpus that was judged"
        )
    if unknown:
        warnings.warn(
            f"{folder}: {unknown} judgements name a passage that is not in the corpus; these "
            "passages count as not found",
            stacklevel=3,
        )
    if isinstance(model, str | Path):
        model = EncoderConfig.of(model)
    if isinstance(model, EncoderConfig):
        some = list(corpus.values())[:SAMPLE]
        model = load_encoder(model, "passage", lambda: contents(some))
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
    return {"mean": mean, "per_query": {}, "queries": len(qrels)}

"""The retrievers that are put beside each other: each with its vectors, what it finds, and its scores for the judged queries."""

import hashlib
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path, PurePath

from contaccum import api
from contaccum.data.tables import RetrievalSet
from contaccum.encoder import DualEncoder
from contaccum.errors import InputError
from contaccum.evaluation.beir import CUTS, cuts_within, drop_own, evaluate_run
from contaccum.files import cache_folder
from contaccum.options import ModelChoice, SearchSettings
from contaccum.retrieval.bm25 import BM25 as LexicalIndex
from contaccum.retrieval.encode import Texts
from contaccum.retrieval.runs import Run
from contaccum.retrieval.search import Hit, Searcher, with_texts
from contaccum.retrieval.shards import ShardFolder

_ONE_AT_A_TIME = threading.Lock()
"""A server answers in several threads, and a tokenizer serves one."""


@dataclass(frozen=True)
class Side:
    """One retriever over the data. The run of the judged queries and its scores are made when they are first asked for."""

    name: str
    finder: Searcher | LexicalIndex
    data: RetrievalSet
    k: int
    """Passages in the ranking of a judged query."""

    def ask(self, query: str, k: int) -> list[Hit]:
        """The k best passages for a query text, with their texts."""
        with _ONE_AT_A_TIME:
            return with_texts(self.data.corpus, self.finder.find({"query": query}, k)["query"])

    @cached_property
    def run(self) -> Run:
        """The rankings of the judged queries, a query's own id left out, as evaluation has them."""
        with _ONE_AT_A_TIME:
            return drop_own(self.finder.find(self.data.queries, self.k + 1), self.k)

    @cached_property
    def scores(self) -> dict[str, dict[str, float]]:
        """From query id to metric to value."""
        return evaluate_run(self.data.qrels, self.run, cuts=cuts_within(CUTS, self.k))["per_query"]

    def ranking(self, query_id: str, k: int) -> list[Hit]:
        """The k best passages for a judged query, with their texts."""
        return with_texts(self.data.corpus, self.run[query_id][:k])


def open_sides(
    models: Sequence[str],
    choice: ModelChoice,
    data: RetrievalSet,
    k: int,
    settings: SearchSettings,
    folders: Sequence[str],
) -> list[Side]:
    """Every model as a side, its corpus encoded where no folder of vectors has it.

    choice: how each is loaded; its own name means nothing. folders: vectors that `contaccum encode` wrote, each used for the
    model that made it; other vectors, and an approximate index, are kept in the cache. Raises InputError for a model that
    comes twice, and for a folder of vectors that none of the models made.
    """
    places = [str(Path(name).resolve()) if Path(name).exists() else name for name in models]
    if repeated := [name for name, place in zip(models, places, strict=True) if places.count(place) > 1]:
        raise InputError(f"--models names {repeated[0]} twice, expected every model once")
    source = Texts.of_corpus(data.corpus).fingerprint
    unused = {str(folder): ShardFolder(folder, source=source).job.encoder for folder in folders}
    sides = []
    for name, label in zip(models, labels(models), strict=True):
        print(f"contaccum: {label}: opening {name}", file=sys.stderr)
        own: ModelChoice | DualEncoder = replace(choice, model=name)
        kept = settings
        if name != api.BM25:
            own = api.load_encoder(replace(choice, model=name))
            made = own.fingerprint("passage")
            given = next((folder for folder, encoder in unused.items() if encoder == made), None)
            kept = where_kept(settings, made, source, given)
            unused.pop(given or "", None)
        sides.append(Side(label, api.open_finder(own, data.corpus, kept), data, k))
    if unused:
        raise InputError(
            f"{next(iter(unused))}: these vectors were made by none of the models {', '.join(models)}, or by one whose vectors "
            "stand in a folder named before"
        )
    return sides


def where_kept(settings: SearchSettings, encoder: str, source: str, given: str | None) -> SearchSettings:
    """The settings with the folder of an encoder's vectors, and that of its index where it is approximate.

    encoder, source: fingerprints. given: its vectors, where they are kept elsewhere than in the cache.
    """
    home = cache_folder() / "explore"
    vectors = given or str(home / _name(encoder, source, settings.dtype))
    if settings.factory == "Flat":
        return replace(settings, embeddings=vectors)
    index = home / _name(encoder, source, settings.dtype, settings.factory, str(settings.seed))
    return replace(settings, embeddings=vectors, index_dir=str(index))


def _name(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def labels(models: Sequence[str]) -> list[str]:
    """A short name for each: the last part of its path that is not ``model``, or the whole where two share it."""
    places = [Path(name).resolve() if Path(name).exists() else PurePath(name) for name in models]
    short = [
        next((part for part in reversed(place.parts) if part != "model"), name)
        for name, place in zip(models, places, strict=True)
    ]
    return [label if short.count(label) == 1 else name for label, name in zip(short, models, strict=True)]

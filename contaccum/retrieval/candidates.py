"""Passages that a search finds for the queries of a training set, with their scores and those of the queries' positives."""

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from contaccum.errors import InputError
from contaccum.options import SearchSettings
from contaccum.processes import ALONE, Processes
from contaccum.retrieval.bm25 import BM25
from contaccum.retrieval.encode import Encoder, Texts, encode_in_memory
from contaccum.retrieval.exact import exact_search, find_candidates, rescore
from contaccum.retrieval.index import Index
from contaccum.retrieval.runs import ranked
from contaccum.retrieval.search import (
    DEFAULTS,
    build_index,
    check_exact,
    check_group,
    index_settings,
    kept_index,
    passage_shards,
)
from contaccum.retrieval.shards import Followed, Shards

if TYPE_CHECKING:
    from datasets import Dataset


class Pool(NamedTuple):
    """The passages that may become negatives, and all positives; columns id, title, text."""

    corpus: "Dataset"
    more: "Dataset | None"
    """Positives that the corpus lacks: they are scored, and become nobody's negatives."""

    @property
    def all(self) -> "Dataset":
        """The corpus, and behind it what it lacks."""
        from datasets import concatenate_datasets

        return self.corpus if self.more is None else concatenate_datasets([self.corpus, self.more])


class Found(NamedTuple):
    """What a search gives for one query."""

    hits: list[tuple[str, float]]
    """Passages in a run's order."""
    positives: np.ndarray
    """Scores of the query's positives, (P,) float32."""


class Search(Protocol):
    """A way to find candidates; one that would find others has another ``fingerprint`` or other ``settings``."""

    fingerprint: str
    settings: dict[str, Any]
    """What the search was told that may change what it finds."""

    def find(self, queries: Sequence[str], positives: Sequence[Sequence[int]], k: int) -> Iterator[Found]:
        """For each query text its k best passages of the pool's corpus, and the scores of its positives, given as rows of the
        whole pool."""


class Lexical:
    """BM25."""

    fingerprint = "bm25"

    def __init__(self, pool: Pool) -> None:
        self.settings: dict[str, Any] = {}
        self._index = BM25(pool.all)
        self._rows = len(pool.corpus)

    def find(self, queries: Sequence[str], positives: Sequence[Sequence[int]], k: int) -> Iterator[Found]:
        for scores, rows in zip(self._index.scores(queries), positives, strict=True):
            yield Found(self._index.best(scores[: self._rows], k), scores[list(rows)])


class Dense:
    """Vectors of an encoder, searched exactly or, where the settings name a faiss index, approximately.

    Scores are always exact inner products, computed pair by pair: what an approximate index finds is scored anew, so
    that candidates and positives can be compared.
    """

    def __init__(
        self, encoder: Encoder, pool: Pool, settings: SearchSettings = DEFAULTS, group: Processes = ALONE
    ) -> None:
        check_group(settings, group)
        if group.world > 1 and settings.embeddings is None:
            raise InputError(
                f"{group.world} processes were started without embeddings, expected a folder in which they share the "
                "passages' vectors"
            )
        self.fingerprint = f"{encoder.fingerprint('query')} {encoder.fingerprint('passage')}"
        self._encoder, self._batch_tokens = encoder, settings.batch_tokens
        self._corpus = _shards(encoder, pool.corpus, settings, group)
        self._all = self._corpus
        if pool.more is not None:
            self._all = Followed(
                self._corpus, encode_in_memory(encoder, Texts.of_corpus(pool.more), settings.batch_tokens)
            )
        self.settings = index_settings(settings) | {"dtype": str(self._corpus[0].vectors.dtype)}
        self._index: Index | None = None
        if settings.factory == "Flat" and settings.index_dir is None:
            check_exact(settings.search_params)
            self._candidates = find_candidates(self._corpus, settings.backend, str(encoder.device))
        elif settings.index_dir is not None:
            self._index = kept_index(encoder, pool.corpus, settings, self._corpus)
        else:
            self._index = build_index(lambda: self._corpus, settings, str(encoder.device))

    def find(self, queries: Sequence[str], positives: Sequence[Sequence[int]], k: int) -> Iterator[Found]:
        asked = Texts.of_queries({str(number): text for number, text in enumerate(queries)})
        vectors = encode_in_memory(self._encoder, asked, self._batch_tokens).vectors  # (n, d)
        hits = self._hits(vectors, k)
        most = max(map(len, positives))
        rows = np.array([[*own, *[-1] * (most - len(own))] for own in positives])  # (n, most), -1 where there is none
        _, scores, _ = rescore(vectors, self._all, rows)
        for found, values, own in zip(hits, scores, positives, strict=True):
            yield Found(found, values[: len(own)])

    def _hits(self, vectors: np.ndarray, k: int) -> list[list[tuple[str, float]]]:
        if self._index is None:
            return exact_search(vectors, self._corpus, k, self._candidates)
        _, rows = self._index.search(vectors, k)
        ids, scores, _ = rescore(vectors, self._corpus, rows)
        return [
            ranked((name, float(score)) for name, score, row in zip(*found, strict=True) if row >= 0)
            for found in zip(ids, scores, rows, strict=True)
        ]


def _shards(encoder: Encoder, corpus: "Dataset", settings: SearchSettings, group: Processes) -> Shards:
    """Vectors of the whole corpus, which several processes have made together."""
    shards = passage_shards(encoder, corpus, settings, group)
    return shards if group.world == 1 else passage_shards(encoder, corpus, settings)


def pool_of(corpus: "Dataset", given: "Dataset | None", ids: Collection[str]) -> Pool:
    """The passages of a training set, or those of the corpus given beside it with the positives (``ids``) that it lacks."""
    if given is None:
        return Pool(corpus, None)
    from datasets import Dataset

    from contaccum.data.corpus import find_rows

    known = find_rows(given, ids)
    rows = find_rows(corpus, [key for key in ids if key not in known])
    # a table of its own: one that selects rows of another still shows all of them to those who read its columns
    return Pool(given, Dataset.from_dict(corpus[sorted(rows.values())], features=given.features) if rows else None)

"""BM25, the lexical baseline, giving a run like any other search."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import bm25s
import numpy as np
from tqdm.auto import tqdm

from contaccum.errors import InputError
from contaccum.retrieval.encode import Texts
from contaccum.retrieval.runs import Run, ranked

if TYPE_CHECKING:
    from datasets import Dataset


class BM25:
    """A corpus indexed for BM25: scores of all its passages for one query after another.

    Lucene's form of BM25 as bm25s computes it (k1 = 1.5, b = 0.75), English stop words removed, no stemming; a
    passage is its title and text. Memory holds the tokenised corpus. Source: Robertson et al. 1994; bm25s, arXiv
    2407.03618.
    """

    def __init__(self, corpus: "Dataset") -> None:
        self.ids, contents = Texts.of_corpus(corpus).read(0, len(corpus))
        tokens = bm25s.tokenize(contents, stopwords="en", show_progress=False)
        self._index = None
        if tokens.vocab:  # nothing but stop words, over which bm25s divides by zero
            self._index = bm25s.BM25()
            self._index.index(tokens, show_progress=False)

    def scores(self, queries: Sequence[str]) -> Iterator[np.ndarray]:
        """For each query text the scores of all passages, (n,) float32; 0 where no word is shared."""
        words = bm25s.tokenize(list(queries), stopwords="en", return_ids=False, show_progress=False)
        for terms in tqdm(words, desc="BM25", unit="query", disable=None, leave=False):
            if terms and self._index is not None:
                yield self._index.get_scores(terms)
            else:
                yield np.zeros(len(self.ids), dtype=np.float32)

    def best(self, scores: np.ndarray, k: int) -> list[tuple[str, float]]:
        """The best k passages by their scores (n,), in a run's order; those of score 0 are left out."""
        return _top(scores, self.ids, k)


def bm25_search(queries: Mapping[str, str], corpus: "Dataset", k: int = 100) -> Run:
    """The k passages of highest BM25 score for each query (id to text); those that share no word are left out."""
    if k < 1:
        raise InputError(f"k is {k}, expected at least 1")
    index = BM25(corpus)
    found = index.scores(list(queries.values()))
    return {query_id: index.best(scores, k) for query_id, scores in zip(queries, found, strict=True)}


def _top(scores: np.ndarray, ids: list[str], k: int) -> list[tuple[str, float]]:
    """The best k of all scores (n,), with every passage that ties with the k-th weighed before the cut."""
    k = min(k, len(scores))
    least = max(float(np.partition(scores, -k)[-k]), np.finfo(np.float32).tiny)
    return ranked(((ids[row], float(scores[row])) for row in np.flatnonzero(scores >= least)), k)

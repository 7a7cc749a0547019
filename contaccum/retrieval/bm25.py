"""BM25, the lexical baseline, giving a run like any other search."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import bm25s
import numpy as np
from tqdm.auto import tqdm

from contaccum.errors import InputError
from contaccum.retrieval.encode import Texts
from contaccum.retrieval.runs import Run, ranked

if TYPE_CHECKING:
    from datasets import Dataset


def bm25_search(queries: Mapping[str, str], corpus: "Dataset", k: int = 100) -> Run:
    """The k passages of highest BM25 score for each query (id to text); those that share no word are left out.

    Lucene's form of BM25 as bm25s computes it (k1 = 1.5, b = 0.75), English stop words removed, no stemming; a
    passage is its title and text. Memory holds the tokenised corpus. Source: Robertson et al. 1994; bm25s, arXiv
    2407.03618.
    """
    if k < 1:
        raise InputError(f"k is {k}, expected at least 1")
    ids, contents = Texts.of_corpus(corpus).read(0, len(corpus))
    tokens = bm25s.tokenize(contents, stopwords="en", show_progress=False)
    if not tokens.vocab:  # nothing but stop words, over which bm25s divides by zero
        return {query_id: [] for query_id in queries}
    index = bm25s.BM25()
    index.index(tokens, show_progress=False)
    words = bm25s.tokenize(list(queries.values()), stopwords="en", return_ids=False, show_progress=False)
    bar = tqdm(zip(queries, words, strict=True), desc="BM25", total=len(queries), unit="query", disable=None)
    return {query_id: _top(index.get_scores(terms), ids, k) if terms else [] for query_id, terms in bar}


def _top(scores: np.ndarray, ids: list[str], k: int) -> list[tuple[str, float]]:
    """The best k of all scores (n,), with every passage that ties with the k-th weighed before the cut."""
    k = min(k, len(scores))
    least = max(float(np.partition(scores, -k)[-k]), np.finfo(np.float32).tiny)
    return ranked(((ids[row], float(scores[row])) for row in np.flatnonzero(scores >= least)), k)

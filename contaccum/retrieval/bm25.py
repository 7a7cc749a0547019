"""BM25, the lexical baseline, giving a run like any other search."""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import bm25s
import numpy as np
from tqdm.auto import tqdm

from contaccum.errors import InputError
from contaccum.retrieval.encode import Texts
from contaccum.retrieval.runs import Run, ranked

if TYPE_CHECKING:
    from datasets import Dataset

WORDS = {"token_pattern": r"(?u)\b\w\w+\b", "stopwords": "en"}
"""How bm25s finds words: two letters or more, lower-cased; English stop words removed."""


class BM25:
    """A corpus indexed for BM25: scores of all its passages for one query after another.

    Lucene's form of BM25 as bm25s computes it (k1 = 1.5, b = 0.75), English stop words removed, no stemming; a
    passage is its title and text. Memory holds the tokenised corpus. Source: Robertson et al. 1994; bm25s, arXiv
    2407.03618.
    """

    def __init__(self, corpus: "Dataset") -> None:
        self.ids, contents = Texts.of_corpus(corpus).read(0, len(corpus))
        tokens = bm25s.tokenize(contents, show_progress=False, **WORDS)
        self._index = None
        if tokens.vocab:  # nothing but stop words, over which bm25s divides by zero
            self._index = bm25s.BM25()
            self._index.index(tokens, show_progress=False)

    def scores(self, queries: Sequence[str]) -> Iterator[np.ndarray]:
        """For each query text the scores of all passages, (n,) float32; 0 where no word is shared."""
        for terms in tqdm(words_of(queries), desc="BM25", unit="query", disable=None, leave=False):
            if terms and self._index is not None:
                yield self._index.get_scores(terms)
            else:
                yield np.zeros(len(self.ids), dtype=np.float32)

    def best(self, scores: np.ndarray, k: int) -> list[tuple[str, float]]:
        """The best k passages by their scores (n,), in a run's order; those of score 0 are left out."""
        return _top(scores, self.ids, k)

    def find(self, queries: Mapping[str, str], k: int = 100) -> Run:
        """The k passages of highest score for each query (id to text); those that share no word are left out."""
        if k < 1:
            raise InputError(f"k is {k}, expected at least 1")
        found = self.scores(list(queries.values()))
        return {query_id: self.best(scores, k) for query_id, scores in zip(queries, found, strict=True)}


def words_of(texts: Sequence[str]) -> list[list[str]]:
    """The words of each text that BM25 reads: lower-cased, stop words left out."""
    return bm25s.tokenize(list(texts), return_ids=False, show_progress=False, **WORDS)


def shared_words(query: str, text: str) -> list[tuple[int, int]]:
    """Where the words of a text stand that the query has too, as (first, behind the last) of its letters."""
    asked = set(words_of([query])[0])
    # a letter may become two in lower case
    ends = [0, *accumulate(len(letter.lower()) for letter in text)]
    found = (word.span() for word in re.finditer(WORDS["token_pattern"], text.lower()) if word[0] in asked)
    return [(bisect_right(ends, start) - 1, bisect_left(ends, stop)) for start, stop in found]


def _top(scores: np.ndarray, ids: list[str], k: int) -> list[tuple[str, float]]:
    """The best k of all scores (n,), with every passage that ties with the k-th weighed before the cut."""
    k = min(k, len(scores))
    least = max(float(np.partition(scores, -k)[-k]), np.finfo(np.float32).tiny)
    return ranked(((ids[row], float(scores[row])) for row in np.flatnonzero(scores >= least)), k)

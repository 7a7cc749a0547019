"""BM25 against the formula written out."""

import math
import re

import numpy as np
import pytest
from datasets import Dataset

from contaccum.errors import InputError
from contaccum.retrieval.retriever import BM25

TEXTS = {
    "a": ("", "cats chase mice, and cats sleep"),
    "b": ("Dogs", "dogs chase cats"),
    "c": ("", "mice eat cheese"),
    "d": ("", "the sun is far away from here"),
    "e": ("Dogs", "dogs chase cats"),  # as b
}
CORPUS = Dataset.from_dict(
    {
        "id": list(TEXTS),
        "title": [t for t, _ in TEXTS.values()],
        "text": [t for _, t in TEXTS.values()],
    }
)
WORDS = {
    key: re.findall(r"\b\w\w+\b", f"{title} {text}".lower()) for key, (title, text) in TEXTS.items()
}
STOP = {"and", "the", "is"}


def formula(query: str, key: str, k1: float = 1.5, b: float = 0.75) -> float:
    """Lucene's BM25: the sum over query words of idf * tf / (tf + k1 * (1 - b + b * length / mean
    length))."""
    documents = {
        name: [word for word in words if word not in STOP] for name, words in WORDS.items()
    }
    mean = np.mean([len(words) for words in documents.values()])
    score = 0.0
    for word in query.split():
        holding = sum(word in words for words in documents.values())
        idf = math.log(1 + (len(documents) - holding + 0.5) / (holding + 0.5))
        tf = documents[key].count(word)
        score += idf * tf / (tf + k1 * (1 - b + b * len(documents[key]) / mean)) if tf else 0.0
    return score


@pytest.mark.parametrize("query", ["cats", "cats mice", "dogs chase cheese"])
def test_scores_are_the_formulas_and_passages_without_a_word_are_left_out(query):
    run = BM25(CORPUS).search({"q": query})
    expected = {key: formula(query, key) for key in TEXTS}
    assert {key for key, _ in run["q"]} == {key for key, score in expected.items() if score > 0}
    for key, score in run["q"]:
        assert score == pytest.approx(expected[key], rel=1e-5)


def test_equal_passages_are_in_the_order_of_the_corpus_also_at_the_cut():
    assert [key for key, _ in BM25(CORPUS).search({"q": "dogs"}, 2)["q"]] == ["b", "e"]
    assert [key for key, _ in BM25(CORPUS).search({"q": "dogs"}, 1)["q"]] == ["b"]


def test_queries_without_a_known_word_find_nothing():
    run = BM25(CORPUS).search(
        {"unknown": "xylophone", "stop": "the is", "empty": "", "signs": "?!"}
    )
    assert run == {"unknown": [], "stop": [], "empty": [], "signs": []}


def test_a_corpus_of_stop_words_finds_nothing():
    corpus = Dataset.from_dict({"id": ["a"], "title": [""], "text": ["the"]})
    assert BM25(corpus).search({"q": "cats"}) == {"q": []}


def test_an_empty_corpus_finds_nothing():
    assert BM25(CORPUS.select([])).search({"q": "cats"}) == {"q": []}


def test_k_below_one_is_refused():
    with pytest.raises(InputError, match="k is 0"):
        BM25(CORPUS).search({"q": "cats"}, 0)


def test_one_index_answers_many_searches():
    index = BM25(CORPUS)
    for query in ("cats", "dogs chase cheese"):
        assert index.search({"q": query}, 3) == BM25(CORPUS).search({"q": query}, 3)

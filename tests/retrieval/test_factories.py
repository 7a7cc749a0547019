"""faiss index_factory strings: what works, and what is refused."""

import numpy as np
import pytest
from helpers import search_vectors as search

from contaccum.config.commands import SearchConfig
from contaccum.errors import InputError
from contaccum.retrieval.shards import Shard

VECTORS = np.random.default_rng(0).standard_normal((600, 16)).astype(np.float32)
SHARDS = [
    Shard([f"p{row:03d}" for row in range(at, at + 200)], VECTORS[at : at + 200])
    for at in range(0, 600, 200)
]
QUERIES = VECTORS[::60] + np.float32(0.01)
NAMES = [f"q{n}" for n in range(10)]


@pytest.mark.parametrize(
    ("factory", "shared"),
    [
        ("HNSW16", 0.9),
        ("SQ8", 0.9),
        ("Flat,RFlat", 1.0),
        ("L2norm,Flat", 0.5),  # ranks by cosine
        ("PCA8,Flat", 0.3),
    ],
)
def test_an_index_finds_what_exact_search_finds(factory, shared):
    right = search(NAMES, QUERIES, SHARDS, 10)
    found = search(NAMES, QUERIES, SHARDS, 10, factory=factory)
    common = [len({key for key, _ in found[q]} & {key for key, _ in right[q]}) / 10 for q in NAMES]
    assert np.mean(common) >= shared
    other = search(NAMES, -QUERIES, SHARDS, 10, factory=factory)
    assert (
        np.mean([len({k for k, _ in other[q]} & {k for k, _ in right[q]}) / 10 for q in NAMES])
        < 0.3
    )


@pytest.mark.parametrize("factory", ["HNSW8,PQ4", "HNSW16,PQ2"])
def test_an_index_that_sorts_by_distance_is_refused(factory):
    """Its scores are best when small, so that the worst passages would come first."""
    with pytest.raises(
        InputError, match="faiss ranks its results by distance, not by inner product"
    ):
        search(NAMES, QUERIES, SHARDS, 10, factory=factory)


def test_the_help_names_an_index_that_does_not_work():
    import inspect

    assert "LSH" in inspect.getsource(SearchConfig)

"""faiss index_factory strings: what works, and what is refused before it crashes the process."""

import numpy as np
import pytest

from contaccum.config.commands import SearchConfig
from contaccum.errors import InputError
from contaccum.retrieval.faiss_library import LONGEST
from contaccum.retrieval.index import Index, Origin
from contaccum.retrieval.retriever import search_vectors as search
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
        ("IDMap,Flat", 1.0),
        ("IDMap2,Flat", 1.0),
        ("IDMap,HNSW16", 0.9),
        ("NSG16", 0.9),  # cannot grow: all three shards are added at once
        ("NSG16,Flat", 0.9),
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


LONG = {
    "nested brackets": "(" * 50_000 + "Flat" + ")" * 50_000,
    "prefixes": "PCA8," * 20_000 + "Flat",
    "identity maps": "IDMap," * 17_000 + "Flat",
    "refinements": "Flat" + ",RFlat" * 17_000,
    "letters": "A" * 100_000,
    "one character too many": "A" * (LONGEST + 1),
}


@pytest.mark.parametrize("factory", LONG.values(), ids=LONG)
def test_a_long_string_is_refused_by_its_length(factory):
    with pytest.raises(
        InputError, match=rf"^factory: found {len(factory)} characters; expected .* 1 to 200"
    ):
        Index.build(SHARDS, Origin(factory))


@pytest.mark.parametrize("factory", ["", "Flat\0", "Flat\n", "Flät", "\ud800"])
def test_a_string_of_other_characters_is_refused(factory):
    with pytest.raises(InputError, match="ASCII characters"):
        Index.build(SHARDS, Origin(factory))


@pytest.mark.parametrize("params", ["nprobe=1," * 12_000, "nprobe=" + "9" * 300])
def test_long_search_parameters_are_refused(params):
    index = Index.build(SHARDS, Origin("IVF4,Flat"))
    with pytest.raises(
        InputError, match=rf"search_params: found {len(params)} characters; at most 200"
    ):
        index.set_search_params(params)


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

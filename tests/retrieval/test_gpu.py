"""faiss on GPUs, with what the same index says on the CPU as the reference.

Skipped where faiss sees no GPU.
"""

import numpy as np
import pytest

from contaccum.retrieval import faiss_library
from contaccum.retrieval.faiss_library import GPU_LIMIT, gpu_count, search_gpus
from contaccum.retrieval.index import Index, Origin
from contaccum.retrieval.shards import Shard

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(gpu_count() == 0, reason="faiss sees no GPU (faiss-cpu, or no CUDA device)"),
]


def made(rows: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, 32)).astype(np.float32)


QUERIES = made(20, seed=1)


def shards(dtype: str = "float32") -> list[Shard]:
    vectors = made(5000, seed=0).astype(dtype)
    return [
        Shard([f"p{n}" for n in range(at, at + 1000)], vectors[at : at + 1000])
        for at in range(0, 5000, 1000)
    ]


@pytest.mark.parametrize("factory", ["Flat", "IVF16,Flat", "IVF16,SQfp16", "IVF16,PQ8"])
def test_an_index_on_gpus_finds_what_it_finds_on_the_cpu(factory):
    """Every list is read, so that only rounding is left to differ; it is coarser in half precision
    and in PQ's tables."""
    index = Index.build(shards(), Origin(factory))
    index.set_search_params("nprobe=16" if "IVF" in factory else "")
    scores, rows = index.search(QUERIES, 50)
    right_scores, right = index.index.search(QUERIES, 50)
    assert index._gpu_copies(search_gpus()) is not index.index
    np.testing.assert_allclose(
        scores, right_scores, rtol=0, atol=2e-2 if "fp16" in factory or "PQ" in factory else 1e-4
    )
    shared = [len(set(a) & set(b)) / 50 for a, b in zip(rows, right, strict=True)]
    assert np.mean(shared) > 0.95


def test_search_params_reach_the_copies_on_the_gpus():
    index = Index.build(shards(), Origin("IVF16,Flat"))
    index.set_search_params("nprobe=1")
    few = index.search(QUERIES, 1000)[1]
    index.set_search_params("nprobe=16")
    assert (few == -1).any()
    assert not (index.search(QUERIES, 1000)[1] == -1).any()


def test_more_results_than_a_gpu_gives_come_from_the_cpu():
    index = Index.build(shards(), Origin("Flat"))
    rows = index.search(QUERIES, GPU_LIMIT + 1)[1]
    np.testing.assert_array_equal(rows, index.index.search(QUERIES, GPU_LIMIT + 1)[1])


@pytest.mark.skipif(gpu_count() < 2, reason="faiss sees fewer than two GPUs")
def test_several_gpus_hold_a_part_each():
    index = Index.build(shards(), Origin("Flat"))
    parts = faiss_library.load_faiss().downcast_index(index._gpu_copies(search_gpus()))
    assert (
        sorted(parts.at(n).ntotal for n in range(parts.count()))
        == [5000 // gpu_count()] * gpu_count()
    )

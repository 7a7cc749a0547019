"""Exact search by inner product, with the same result for every backend, device and shard size.

Float32 matrix products round differently for every block size, thread count and device, so equal vectors can get unequal scores.
Products therefore only select candidates: k + 32 passages for each query. The scores of the candidates are then computed in
float64 and rounded to float32.

One of the k best passages of a query may be missing from its candidates. If this cannot be excluded, the query is searched a
second time, and every passage that could reach the k-th best score is scored in float64.
"""

from collections.abc import Callable, Iterable, Iterator

import numpy as np
from tqdm.auto import tqdm

from contaccum.errors import InputError
from contaccum.retrieval.devices import FaissGpuCandidates, TopRows, TorchCandidates, torch_device
from contaccum.retrieval.faiss_library import load_faiss, may_use_gpu, row_blocks, search_gpus, top_of_block
from contaccum.retrieval.runs import ranked
from contaccum.retrieval.shards import Shard, Shards, count_rows

BACKENDS = ("auto", "faiss", "torch")
SLACK = 32  # number of candidates in addition to k
FEW = 16  # minimum number of rows that faiss returns for a query from one block, see ``_faiss_cpu_candidates``

_PAIRS = 1024  # number of query-passage pairs scored at a time; their float64 vectors fit into the CPU's cache
_CELLS = 2**20  # number of scores in one matrix product of the second search, to limit its memory

CandidateSearch = Callable[[np.ndarray, int], TopRows]
"""Function that returns k candidates for each of the query vectors (n, d)."""


def exact_search(
    queries: np.ndarray, k: int, shards: Shards, candidates: CandidateSearch
) -> list[list[tuple[str, float]]]:
    """Return the k passages with the largest inner products for each query, as (passage id, score), best first.

    queries: (n, d) float32. candidates: result of ``find_candidates`` for the same shards. Memory holds k + 32 candidates per
    query (about 50 bytes per candidate), the result, and one block of a shard. If faiss searches on GPUs, the GPUs hold the whole
    index.
    """
    rows = count_rows(shards)
    if not rows or not len(queries):
        return [[] for _ in queries]
    width = min(k + SLACK, rows)
    approximate, found = candidates(queries, width)
    ids, scores, bound = rescore(queries, shards, found)
    complete = (found >= 0).all(axis=1)  # faiss leaves out rows that it cannot rank, such as rows with NaN
    kth = np.partition(scores, max(0, width - k), axis=1)[:, max(0, width - k)]
    # the exact score of any other row is at most the lowest approximate candidate score plus the rounding error
    certain = complete & ((width == rows) | (kth > approximate.min(axis=1) + bound))
    results = [
        ranked(zip(ids[query], scores[query].tolist(), strict=True), k) if certain[query] else []
        for query in range(len(queries))
    ]
    at_least = np.where(complete, kth, -np.inf)
    settled = _search_again(queries[~certain], shards, k, at_least[~certain])
    for query, hits in zip(np.flatnonzero(~certain), settled, strict=True):
        results[query] = hits
    return results


def _search_again(queries: np.ndarray, shards: Shards, k: int, at_least: np.ndarray) -> list[list[tuple[str, float]]]:
    """Search a second time for queries whose candidates may be incomplete. Return the k best passages of each query.

    at_least: lower bound of the k-th best score of each query, (n,).
    """
    best: list[list[tuple[str, float]]] = [[] for _ in queries]
    if not best:
        return best
    exact, floor, rounding = queries.astype(np.float64), at_least.copy(), _rounding(queries)
    for shard in tqdm(shards, desc="ties", unit="shard", total=len(shards), disable=None, leave=False):
        names = np.array(shard.ids, dtype=object)
        for start, block in row_blocks(shard.vectors):
            here = names[start : start + len(block)]
            order: np.ndarray | None = None
            longest = np.sqrt(np.einsum("nd,nd->n", block, block, dtype=np.float64).max())
            for query, products in _products(queries, block):
                # "not <" instead of ">=", because a pair whose product is NaN must be scored too
                rows = np.flatnonzero(~(products < floor[query] - rounding[query] * longest))
                scores = _scores(exact[query], block, rows)
                if len(rows) > k:
                    if order is None:
                        order = np.argsort(np.argsort(here))  # position of each id in the sorted list of ids
                    top = np.lexsort((order[rows], scores))[-k:]
                    rows, scores = rows[top], scores[top]
                best[query] = ranked([*best[query], *zip(here[rows], scores.tolist(), strict=True)], k)
                if len(best[query]) == k:
                    floor[query] = max(floor[query], best[query][-1][1])
    return best


def _products(queries: np.ndarray, block: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yield, for each query, its position and its float32 products with all rows of a block, (rows,)."""
    step = max(1, _CELLS // len(block))
    for first in range(0, len(queries), step):
        with np.errstate(over="ignore", invalid="ignore"):
            products = queries[first : first + step] @ block.T  # (step, rows)
        yield from enumerate(products, first)


def _scores(query: np.ndarray, block: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return the exact scores of a float64 query (d,) and ``rows`` of a block, as in ``rescore``: (len(rows),) float32."""
    scores = np.empty(len(rows), dtype=np.float32)
    for first in range(0, len(rows), _PAIRS):
        vectors = block[rows[first : first + _PAIRS]].astype(np.float64)
        scores[first : first + _PAIRS] = _sums(np.tile(query, (len(vectors), 1)), vectors)
    return scores


def _sums(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    return np.einsum("nd,nd->n", one, other)  # the order of additions does not depend on n


def choose_backend(backend: str, device: str = "auto") -> str:
    """Return ``faiss`` or ``torch``. ``auto`` selects torch only if faiss is missing or cannot use the GPU."""
    if backend not in BACKENDS:
        raise InputError(f"backend is {backend!r}; expected one of {', '.join(BACKENDS)}")
    if backend == "torch":
        return backend
    try:
        load_faiss()
    except InputError:
        if backend == "faiss":
            raise
        return "torch"
    import torch

    only_torch = may_use_gpu(device) and torch.cuda.is_available() and not search_gpus(device)
    return "torch" if backend == "auto" and only_torch else "faiss"


def find_candidates(shards: Shards, backend: str = "auto", device: str = "auto") -> CandidateSearch:
    """Return a function that finds the candidates of queries in the shards.

    device: device of the encoder, such as ``cpu`` or ``cuda:1``. ``auto`` uses a GPU if there is one. If faiss searches on GPUs,
    the corpus is copied to the GPUs here.
    """
    if choose_backend(backend, device) == "torch":
        return TorchCandidates(shards, torch_device(device))
    if search_gpus(device) and count_rows(shards):
        return FaissGpuCandidates(shards, device)
    return lambda queries, k: _faiss_cpu_candidates(queries, shards, k)


def _faiss_cpu_candidates(queries: np.ndarray, shards: Shards, k: int) -> TopRows:
    """Find the k best rows of all shards with faiss on the CPU, block by block.

    A later block usually contains few of the k best rows, so faiss returns only a few rows of each block. If all of them are
    among the best rows of a query so far, this query is searched again for k rows of the block.
    """
    best = np.empty((len(queries), 0), dtype=np.float32), np.empty((len(queries), 0), dtype=np.int64)
    seen = 0
    for shard in tqdm(shards, desc="search", unit="shard", total=len(shards), disable=None, leave=False):
        for _, block in row_blocks(shard.vectors):
            most = min(k, len(block))
            few = min(most, FEW + 2 * k * len(block) // (seen + len(block)))
            scores, rows = top_of_block(queries, block, few)
            merged = _merge(best, (scores, rows + seen), k)
            if few < most and len(unsure := np.flatnonzero(scores.min(axis=1) >= merged[0].min(axis=1))):
                scores, rows = top_of_block(queries[unsure], block, most)
                merged[0][unsure], merged[1][unsure] = _merge(
                    (best[0][unsure], best[1][unsure]), (scores, rows + seen), k
                )
            best = merged
            seen += len(block)
    return best


def _merge(one: TopRows, other: TopRows, k: int) -> TopRows:
    scores, rows = (np.concatenate(pair, axis=1) for pair in zip(one, other, strict=True))
    if scores.shape[1] > k:
        best = np.argpartition(scores, -k, axis=1)[:, -k:]
        scores, rows = np.take_along_axis(scores, best, 1), np.take_along_axis(rows, best, 1)
    return scores, rows


def rescore(
    queries: np.ndarray, shards: Iterable[Shard], rows: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return ids and exact scores of candidates, both (n, k), and a rounding error for each query, (n,).

    rows: row numbers of the candidates, counted over all shards, (n, k). -1: no candidate; its id and score have no meaning.
    Scores are float64 sums rounded to float32, so a score depends only on its query and its passage. The rounding error is the
    maximum error of the float32 product of the query with a candidate.
    """
    ids = np.empty(rows.shape, dtype=object)
    scores = np.empty(rows.shape, dtype=np.float32)
    longest = np.zeros(len(queries))
    start, exact = 0, queries.astype(np.float64)
    for shard in shards:
        stop = start + len(shard.vectors)
        names = np.array(shard.ids, dtype=object)
        query, column = np.nonzero((rows >= start) & (rows < stop))
        for first in range(0, len(query), _PAIRS):
            q, p = query[first : first + _PAIRS], column[first : first + _PAIRS]
            local = rows[q, p] - start
            vectors = shard.vectors[local].astype(np.float64)  # (pairs, d)
            scores[q, p] = _sums(exact[q], vectors)
            np.maximum.at(longest, q, np.sqrt(_sums(vectors, vectors)))
            ids[q, p] = names[local]
        start = stop
    return ids, scores, _rounding(queries) * longest


def _rounding(queries: np.ndarray) -> np.ndarray:
    """Return the maximum error of each query's float32 product with a passage vector of length 1, (n,)."""
    # the error of a sum of d float32 products is about sqrt(d) units in the last place of |q||p|; four times that is safe
    return 4 * np.sqrt(queries.shape[1]) * 2.0**-24 * np.linalg.norm(queries, axis=1)

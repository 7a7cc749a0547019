"""Exact search: shards are streamed past the queries, the best candidates kept, and their scores computed anew.

A matrix product rounds differently with every block size, thread count and device, so passages with equal vectors may
get unequal scores, and the cut at k may fall anywhere inside a tie. Here the products only choose candidates. Their
scores are then computed in float64, pair by pair, and rounded to float32. A query whose candidates end too close to
its k-th score is searched once more, block by block: whatever may reach its k-th score is scored so, and the k best are
kept. The result is the same list for every backend, device and shard size.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from tqdm.auto import tqdm

from contaccum.errors import InputError
from contaccum.retrieval.index import (
    Index,
    has_faiss,
    load_faiss,
    may_use_gpu,
    row_blocks,
    search_gpus,
    top_of_block,
)
from contaccum.retrieval.runs import ranked
from contaccum.retrieval.shards import Shards, count_rows

if TYPE_CHECKING:
    import torch

BACKENDS = ("auto", "faiss", "torch")
SLACK = 32  # candidates beyond k
FEW = 16  # least rows that a query asks a block for

_PAIRS = 1024  # query-passage pairs scored at a time: few enough that both sides in float64 stay in the cache
_QUERIES = 1024  # queries whose scores against one block stand in memory at a time, in torch
_CELLS = 2**20  # scores of queries searched once more against one block that stand in memory at a time

Hits = tuple[np.ndarray, np.ndarray]
"""Approximate scores and row numbers of each query's candidates, both (n, number), in no order."""
Candidates = Callable[[np.ndarray, int], Hits]
"""From queries (n, d) and a number to hits."""
Top = Callable[[np.ndarray, np.ndarray, int], Hits]
"""From queries (n, d), a block (rows, d) and a number to hits in the block."""


def exact_search(queries: np.ndarray, shards: Shards, k: int, candidates: Candidates) -> list[list[tuple[str, float]]]:
    """The k best passages of each query by inner product, in a run's order; fewer when the corpus is smaller.

    queries (n, d) float32; candidates: what ``find_candidates`` gave for these shards. Memory holds k + 32 candidates a query at
    about 50 bytes each, the result, and one block of a shard, or with faiss on GPUs the whole index, divided over them. However
    many passages tie, it holds no more than that and a few arrays of as many numbers as a block has rows, or of 2**20.
    """
    rows = count_rows(shards)
    if not rows or not len(queries):
        return [[] for _ in queries]
    width = min(k + SLACK, rows)
    approximate, found = candidates(queries, width)
    ids, scores, bound = rescore(queries, shards, found)
    complete = (found >= 0).all(axis=1)  # faiss leaves out what its arithmetic cannot rank
    kth = np.partition(scores, max(0, width - k), axis=1)[:, max(0, width - k)]
    # whatever was not found scores at most the worst approximate score, give or take the rounding
    closed = complete & ((width == rows) | (kth > approximate.min(axis=1) + bound))
    results = [
        ranked(zip(ids[query], scores[query].tolist(), strict=True), k) if closed[query] else []
        for query in range(len(queries))
    ]
    at_least = np.where(complete, kth, -np.inf)
    for query, hits in zip(
        np.flatnonzero(~closed), _settle(queries[~closed], shards, k, at_least[~closed]), strict=True
    ):
        results[query] = hits
    return results


def _settle(queries: np.ndarray, shards: Shards, k: int, at_least: np.ndarray) -> list[list[tuple[str, float]]]:
    """As ``exact_search``, for queries with too many passages near the cut; at_least (n,): what their k-th scores reach."""
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
                # not "as great or greater": where a product overflows into no number, its pair is scored
                rows = np.flatnonzero(~(products < floor[query] - rounding[query] * longest))
                scores = _scores(exact[query], block, rows)
                if len(rows) > k:
                    if order is None:
                        order = np.argsort(np.argsort(here))  # numbers that compare as the ids do
                    top = np.lexsort((order[rows], scores))[-k:]
                    rows, scores = rows[top], scores[top]
                best[query] = ranked([*best[query], *zip(here[rows], scores.tolist(), strict=True)], k)
                if len(best[query]) == k:
                    floor[query] = max(floor[query], best[query][-1][1])
    return best


def _products(queries: np.ndarray, block: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Each query's number and its float32 products with a block's rows, of which ``_CELLS`` stand in memory at a time."""
    step = max(1, _CELLS // len(block))
    for first in range(0, len(queries), step):
        with np.errstate(over="ignore", invalid="ignore"):
            products = queries[first : first + step] @ block.T  # (step, rows)
        yield from enumerate(products, first)


def _scores(query: np.ndarray, block: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """The scores of one float64 query and some rows of a block, (rows,) float32, as ``rescore`` computes them."""
    scores = np.empty(len(rows), dtype=np.float32)
    for first in range(0, len(rows), _PAIRS):
        vectors = block[rows[first : first + _PAIRS]].astype(np.float64)
        scores[first : first + _PAIRS] = _sums(np.tile(query, (len(vectors), 1)), vectors)
    return scores


def _sums(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Inner product of each pair of rows, (n,), by one order of additions however many pairs there are."""
    return np.einsum("nd,nd->n", one, other)


def choose_backend(backend: str, device: str = "auto") -> str:
    """``faiss`` or ``torch``: by itself, torch where it has a GPU that faiss cannot use, or where there is no faiss."""
    if backend not in BACKENDS:
        raise InputError(f"backend is {backend!r}, expected one of {', '.join(BACKENDS)}")
    if backend == "faiss":
        load_faiss()
    if backend != "auto":
        return backend
    import torch

    gpu_for_torch = may_use_gpu(device) and torch.cuda.is_available() and not search_gpus(device)
    return "torch" if not has_faiss() or gpu_for_torch else "faiss"


def find_candidates(shards: Shards, backend: str = "auto", device: str = "auto") -> Candidates:
    """How the shards are searched before the scores are computed anew; on GPUs with faiss, the index is built here.

    device: where the encoder stands (``cpu``, ``cuda:1``), which the search follows; ``auto``: on a GPU where there is one.
    """
    if choose_backend(backend, device) == "torch":
        place = torch_device(device)
        return lambda queries, k: _stream(queries, shards, k, partial(_torch_top, device=place))
    if search_gpus(device) and count_rows(shards):
        index = Index.build(shards)
        index.device = device
        return index.search
    return lambda queries, k: _stream(queries, shards, k, top_of_block)


def _stream(queries: np.ndarray, shards: Shards, k: int, top: Top) -> Hits:
    """The k best rows of all shards: the best so far and the best of each block are merged, block after block.

    Later blocks hold few of them as a rule, and are asked for few; a query that may have more there asks for all k.
    """
    best = np.empty((len(queries), 0), dtype=np.float32), np.empty((len(queries), 0), dtype=np.int64)
    seen = 0
    for shard in tqdm(shards, desc="search", unit="shard", total=len(shards), disable=None, leave=False):
        for _, block in row_blocks(shard.vectors):
            most = min(k, len(block))
            few = min(most, FEW + 2 * k * len(block) // (seen + len(block)))
            scores, rows = top(queries, block, few)
            merged = _merge(best, (scores, rows + seen), k)
            if few < most and len(unsure := np.flatnonzero(scores.min(axis=1) >= merged[0].min(axis=1))):
                scores, rows = top(queries[unsure], block, most)
                merged[0][unsure], merged[1][unsure] = _merge(
                    (best[0][unsure], best[1][unsure]), (scores, rows + seen), k
                )
            best = merged
            seen += len(block)
    return best


def _merge(one: Hits, other: Hits, k: int) -> Hits:
    scores, rows = (np.concatenate(pair, axis=1) for pair in zip(one, other, strict=True))
    if scores.shape[1] > k:
        best = np.argpartition(scores, -k, axis=1)[:, -k:]
        scores, rows = np.take_along_axis(scores, best, 1), np.take_along_axis(rows, best, 1)
    return scores, rows


def torch_device(device: str) -> "torch.device":
    """Where torch searches: on the encoder's GPU, or with ``auto`` on this process's own, else on the CPU."""
    import torch

    if device == "auto":
        from contaccum.engine import encoding_device

        device = str(encoding_device(device))
    return torch.device(device if device.startswith("cuda") else "cpu")


def _torch_top(queries: np.ndarray, block: np.ndarray, k: int, device: "torch.device") -> Hits:
    """As top_of_block, by torch."""
    import torch

    # torch warns of memory that it may not write to, such as a mapped shard's
    passages = torch.from_numpy(block if block.flags.writeable else block.copy()).to(device)  # (rows, d)
    parts = []
    with torch.inference_mode(), _full_precision():
        for start in range(0, len(queries), _QUERIES):
            scores = torch.from_numpy(queries[start : start + _QUERIES]).to(device) @ passages.T  # (queries, rows)
            parts.append([part.cpu().numpy() for part in torch.topk(scores, k, dim=1)])
    return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])


@contextmanager
def _full_precision() -> Iterator[None]:
    """Products in true float32: training may have switched TF32 on, whose error is beyond the bound on rounding."""
    import torch

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def rescore(queries: np.ndarray, shards: Shards, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids and scores of the candidates, both (n, k), and per query a bound on the rounding of a float32 product, (n,).

    rows (n, k) holds row numbers over all shards. Scores are float64 sums rounded to float32; each depends on its own
    query and passage alone.
    """
    ids = np.empty(rows.shape, dtype=object)
    scores = np.empty(rows.shape, dtype=np.float32)
    longest = np.zeros(len(queries))
    start, exact = 0, queries.astype(np.float64)
    for shard in shards:
        stop = start + len(shard.vectors)
        names = np.array(shard.ids, dtype=object)
        query, place = np.nonzero((rows >= start) & (rows < stop))
        for first in range(0, len(query), _PAIRS):
            q, p = query[first : first + _PAIRS], place[first : first + _PAIRS]
            local = rows[q, p] - start
            vectors = shard.vectors[local].astype(np.float64)  # (pairs, d)
            scores[q, p] = _sums(exact[q], vectors)
            np.maximum.at(longest, q, np.sqrt(_sums(vectors, vectors)))
            ids[q, p] = names[local]
        start = stop
    return ids, scores, _rounding(queries) * longest


def _rounding(queries: np.ndarray) -> np.ndarray:
    """A bound on the error of each query's float32 product with a passage of length 1, (n,)."""
    # a sum of d float32 products errs by about sqrt(d) units in the last place of |q||p|; four times that is ample
    return 4 * np.sqrt(queries.shape[1]) * 2.0**-24 * np.linalg.norm(queries, axis=1)

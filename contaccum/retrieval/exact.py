"""Exact search: shards are streamed past the queries, the best candidates kept, and their scores computed anew.

A matrix product rounds differently with every block size, thread count and device, so passages with equal vectors may
get unequal scores, and the cut at k may fall anywhere inside a tie. Here the products only choose candidates. Their
scores are then computed in float64, pair by pair, and rounded to float32; a query whose candidates end too close to
its k-th score is asked again with twice as many. The result is the same list for every backend, device and shard
size.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from tqdm.auto import tqdm

from contaccum.errors import InputError
from contaccum.retrieval.index import Index, gpu_count, has_faiss, load_faiss, row_blocks, top_of_block
from contaccum.retrieval.runs import ranked
from contaccum.retrieval.shards import Shards, count_rows

BACKENDS = ("auto", "faiss", "torch")
SLACK = 32  # candidates beyond k

_PAIRS = 16_384  # query-passage pairs scored at a time
_QUERIES = 1024  # queries whose scores against one block stand in memory at a time, in torch

Candidates = Callable[[np.ndarray, int], tuple[np.ndarray, np.ndarray]]
"""From queries (n, d) and a number to approximate scores and rows, both (n, number), in no order."""


def exact_search(queries: np.ndarray, shards: Shards, k: int, backend: str = "auto") -> list[list[tuple[str, float]]]:
    """The k best passages of each query by inner product, in a run's order; fewer when the corpus is smaller.

    queries (n, d) float32. Memory holds one block of a shard, or with faiss on GPUs the whole index, divided over them.
    """
    results: list[list[tuple[str, float]]] = [[] for _ in queries]
    rows = count_rows(shards)
    if not rows:
        return results
    candidates = _candidates(shards, backend)
    todo, width = np.arange(len(queries)), min(k + SLACK, rows)
    while len(todo):
        approximate, found = candidates(queries[todo], width)
        ids, scores, bound = _rescore(queries[todo], shards, found)
        closed = np.ones(len(todo), dtype=bool)
        if width < rows:
            # whatever was not found scores at most the worst approximate score, give or take the rounding
            kth = np.partition(scores, width - k, axis=1)[:, width - k]
            closed = kth > approximate.min(axis=1) + bound
        for place in np.flatnonzero(closed):
            results[todo[place]] = ranked(zip(ids[place], map(float, scores[place]), strict=True), k)
        todo, width = todo[~closed], min(2 * width, rows)
    return results


def choose_backend(backend: str) -> str:
    """``faiss`` or ``torch``: by itself, torch where it has a GPU that faiss cannot use, or where there is no faiss."""
    if backend not in BACKENDS:
        raise InputError(f"backend is {backend!r}, expected one of {', '.join(BACKENDS)}")
    if backend == "faiss":
        load_faiss()
    if backend != "auto":
        return backend
    import torch

    return "torch" if not has_faiss() or (torch.cuda.is_available() and not gpu_count()) else "faiss"


def _candidates(shards: Shards, backend: str) -> Candidates:
    if choose_backend(backend) == "torch":
        return lambda queries, k: _stream(queries, shards, k, _torch_top)
    if gpu_count():
        return Index.build(shards).search
    return lambda queries, k: _stream(queries, shards, k, top_of_block)


def _stream(queries: np.ndarray, shards: Shards, k: int, top: Callable) -> tuple[np.ndarray, np.ndarray]:
    """The k best rows of all shards: the best so far and the best of each block are merged, block after block."""
    scores = np.empty((len(queries), 0), dtype=np.float32)
    rows = np.empty((len(queries), 0), dtype=np.int64)
    start = 0
    for shard in tqdm(shards, desc="search", unit="shard", total=len(shards), disable=None, leave=False):
        for first, block in row_blocks(shard.vectors):
            more, local = top(queries, block, min(k, len(block)))
            scores = np.concatenate([scores, more], axis=1)
            rows = np.concatenate([rows, local + (start + first)], axis=1)
            if scores.shape[1] > k:
                best = np.argpartition(scores, -k, axis=1)[:, -k:]
                scores, rows = np.take_along_axis(scores, best, 1), np.take_along_axis(rows, best, 1)
        start += len(shard.vectors)
    return scores, rows


def _torch_top(queries: np.ndarray, block: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """As top_of_block, by torch on its GPU, or on the CPU where there is none."""
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
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


def _rescore(queries: np.ndarray, shards: Shards, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids and scores of the candidates, both (n, k), and per query a bound on the rounding of a float32 product, (n,).

    rows (n, k) holds row numbers over all shards. Scores are float64 sums rounded to float32; each depends on its own
    query and passage alone.
    """
    ids = np.empty(rows.shape, dtype=object)
    scores = np.empty(rows.shape, dtype=np.float32)
    longest = np.zeros(len(queries))
    start = 0
    for shard in shards:
        stop = start + len(shard.vectors)
        query, place = np.nonzero((rows >= start) & (rows < stop))
        for first in range(0, len(query), _PAIRS):
            q, p = query[first : first + _PAIRS], place[first : first + _PAIRS]
            local = rows[q, p] - start
            vectors = shard.vectors[local].astype(np.float64)  # (pairs, d)
            scores[q, p] = np.einsum("nd,nd->n", queries[q].astype(np.float64), vectors)
            np.maximum.at(longest, q, np.linalg.norm(vectors, axis=1))
            ids[q, p] = [shard.ids[row] for row in local]
        start = stop
    # a sum of d float32 products errs by about sqrt(d) units in the last place of |q||p|; four times that is ample
    width = queries.shape[1]
    return ids, scores, 4 * np.sqrt(width) * 2.0**-24 * np.linalg.norm(queries, axis=1) * longest

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
FEW = 16  # least rows that a query asks a block for

_PAIRS = 1024  # query-passage pairs scored at a time: few enough that both sides in float64 stay in the cache
_QUERIES = 1024  # queries whose scores against one block stand in memory at a time, in torch

Hits = tuple[np.ndarray, np.ndarray]
"""Approximate scores and row numbers of each query's candidates, both (n, number), in no order."""
Candidates = Callable[[np.ndarray, int], Hits]
"""From queries (n, d) and a number to hits."""
Top = Callable[[np.ndarray, np.ndarray, int], Hits]
"""From queries (n, d), a block (rows, d) and a number to hits in the block."""


def exact_search(
    queries: np.ndarray, shards: Shards, k: int, backend: str = "auto", candidates: Candidates | None = None
) -> list[list[tuple[str, float]]]:
    """The k best passages of each query by inner product, in a run's order; fewer when the corpus is smaller.

    queries (n, d) float32. Memory holds one block of a shard, or with faiss on GPUs the whole index, divided over them.
    ``candidates``: what ``find_candidates`` gave for these shards, where they are searched more than once.
    """
    results: list[list[tuple[str, float]]] = [[] for _ in queries]
    rows = count_rows(shards)
    if not rows:
        return results
    candidates = candidates or find_candidates(shards, backend)
    todo, width = np.arange(len(queries)), min(k + SLACK, rows)
    while len(todo):
        approximate, found = candidates(queries[todo], width)
        ids, scores, bound = rescore(queries[todo], shards, found)
        closed = np.ones(len(todo), dtype=bool)
        if width < rows:
            # whatever was not found scores at most the worst approximate score, give or take the rounding
            kth = np.partition(scores, width - k, axis=1)[:, width - k]
            closed = kth > approximate.min(axis=1) + bound
        for place in np.flatnonzero(closed):
            results[todo[place]] = ranked(zip(ids[place], scores[place].tolist(), strict=True), k)
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


def find_candidates(shards: Shards, backend: str = "auto") -> Candidates:
    """How the shards are searched before the scores are computed anew; on GPUs with faiss, the index is built here."""
    if choose_backend(backend) == "torch":
        return lambda queries, k: _stream(queries, shards, k, _torch_top)
    if gpu_count():
        return Index.build(shards).search
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


def _torch_top(queries: np.ndarray, block: np.ndarray, k: int) -> Hits:
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
            scores[q, p] = np.einsum("nd,nd->n", exact[q], vectors)
            np.maximum.at(longest, q, np.sqrt(np.einsum("nd,nd->n", vectors, vectors)))
            ids[q, p] = names[local]
        start = stop
    # a sum of d float32 products errs by about sqrt(d) units in the last place of |q||p|; four times that is ample
    width = queries.shape[1]
    return ids, scores, 4 * np.sqrt(width) * 2.0**-24 * np.linalg.norm(queries, axis=1) * longest

"""Exact search by inner product, with the same result for every backend, device and shard size.

Float32 matrix products round differently for every block size, thread count and device, so equal vectors can get unequal scores.
Products therefore only select candidates: k + 32 passages for each query, with torch on the CPU or one GPU, or with faiss. The
final scores of the candidates are computed in float64 and rounded to float32.

One of the k best passages of a query may be missing from its candidates. If this cannot be excluded, the query is searched a
second time, and every passage that could reach the k-th best score is scored in float64.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm

from contaccum.errors import InputError
from contaccum.retrieval.faiss_library import (
    CandidateSearch,
    FaissGpuCandidates,
    TopRows,
    faiss_cpu_candidates,
    load_faiss,
    row_blocks,
    search_gpus,
)
from contaccum.retrieval.runs import ranked
from contaccum.retrieval.shards import Shard, Shards, count_rows
from contaccum.runtime.processes import encoding_device

BACKENDS = ("auto", "faiss", "torch")
SLACK = 32  # number of candidates in addition to k

_PAIRS = 1024  # number of query-passage pairs scored at a time; their float64 vectors fit into the CPU's cache
_CELLS = 2**20  # number of scores in one matrix product of the second search, to limit its memory
_QUERIES = 1024  # number of queries in one matrix product of torch, to limit its memory
_RESIDENT = 0.5  # maximum share of a GPU's free memory that the corpus may occupy between searches

Ranker = Callable[[np.ndarray, int], list[list[tuple[str, float]]]]
"""Function that returns the k best passages of each query vector (n, d), sorted as in a run."""


def exact_search(
    queries: np.ndarray, k: int, shards: Shards, candidates: CandidateSearch
) -> list[list[tuple[str, float]]]:
    """Return the k passages with the largest inner products for each query, as (passage id, score), best first.

    queries: (n, d) float32. candidates: function that finds candidate rows of ``shards``. Memory holds k + 32 candidates per
    query (about 50 bytes each), the result, and one block of a shard. If faiss searches on GPUs, they hold the whole index.
    """
    rows = count_rows(shards)
    if not rows or not len(queries):
        return [[] for _ in queries]
    width = min(k + SLACK, rows)
    approximate, found = candidates(queries, width)
    ids, scores, bound = rescore(queries, shards, found)
    complete = (found >= 0).all(axis=1)  # faiss leaves out rows that it cannot rank, such as rows with NaN
    kth = np.partition(scores, max(0, width - k), axis=1)[:, max(0, width - k)]
    # The exact score of any other row is at most the lowest approximate candidate score plus the rounding error. This
    # assumes vectors of similar length. A row whose vector is 10,000 times as long as all candidates may be missed.
    certain = complete & ((width == rows) | (kth > approximate.min(axis=1) + bound))
    at_least = np.where(complete, kth, -np.inf)
    searched_again = iter(_search_again(queries[~certain], shards, k, at_least[~certain]))
    return [
        ranked(zip(names, values.tolist(), strict=True), k) if sure else next(searched_again)
        for names, values, sure in zip(ids, scores, certain, strict=True)
    ]


def _search_again(queries: np.ndarray, shards: Shards, k: int, at_least: np.ndarray) -> list[list[tuple[str, float]]]:
    """Search a second time for queries whose candidates may be incomplete. Return the k best passages of each query.

    at_least: lower bound of the k-th best score of each query, (n,).
    """
    best: list[list[tuple[str, float]]] = [[] for _ in queries]
    if not best:
        return best
    exact, floor, rounding = queries.astype(np.float64), at_least.copy(), _rounding(queries)
    for ids, block, _ in row_blocks(tqdm(shards, desc="ties", unit="shard", disable=None, leave=False)):
        names = np.array(ids, dtype=object)
        order: np.ndarray | None = None
        longest = np.sqrt(np.einsum("nd,nd->n", block, block, dtype=np.float64).max())
        for query, products in _products(queries, block):
            # "not <" instead of ">=", because a pair whose product is NaN must be scored too
            rows = np.flatnonzero(~(products < floor[query] - rounding[query] * longest))
            scores = _scores(exact[query], block, rows)
            if len(rows) > k:
                if order is None:
                    order = np.argsort(np.argsort(names))  # position of each id in the sorted list of ids
                top = np.lexsort((order[rows], scores))[-k:]
                rows, scores = rows[top], scores[top]
            best[query] = ranked([*best[query], *zip(names[rows], scores.tolist(), strict=True)], k)
            if len(best[query]) == k:
                floor[query] = max(floor[query], best[query][-1][1])
    return best


def _products(queries: np.ndarray, block: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the position of each query, and its float32 inner products (rows,) with all rows of a block."""
    step = max(1, _CELLS // len(block))
    for first in range(0, len(queries), step):
        with np.errstate(over="ignore", invalid="ignore"):
            products = queries[first : first + step] @ block.T  # (step, rows)
        yield from enumerate(products, first)


def _scores(query: np.ndarray, block: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return the exact scores (n,), float32, of a float64 query and n rows of a block (see ``rescore``). rows: row numbers."""
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
    only_torch = torch.cuda.is_available() and torch_device(device).type == "cuda" and not search_gpus(device)
    return "torch" if backend == "auto" and only_torch else "faiss"


def exact_ranker(shards: Shards, backend: str = "auto", device: str = "auto") -> Ranker:
    """Return a function that searches the shards exactly.

    device: device of the encoder, such as ``cpu`` or ``cuda:1``. ``auto`` uses a GPU if there is one. If faiss searches on GPUs,
    the corpus is copied to the GPUs here.
    """
    candidates: CandidateSearch = TorchCandidates(shards, torch_device(device))
    if choose_backend(backend, device) == "faiss":
        if (gpus := search_gpus(device)) and count_rows(shards):
            candidates = FaissGpuCandidates(shards, gpus, torch_candidates=candidates)
        else:
            candidates = partial(faiss_cpu_candidates, shards)
    return partial(exact_search, shards=shards, candidates=candidates)


def torch_device(device: str) -> torch.device:
    """Return the device on which torch searches: a GPU if the encoder uses CUDA, else the CPU.

    device: device of the encoder. ``auto`` means the GPU of this process, or the CPU if there is no GPU.
    """
    if device == "auto":
        device = str(encoding_device(device))
    return torch.device(device if device.startswith("cuda") else "cpu")


class TorchCandidates:
    """Search for candidates with torch.

    The corpus is searched block by block. On a GPU, the next block is copied through pinned memory while the current block is
    searched. A corpus that fits into half of the GPU's free memory stays on the GPU for later calls.
    """

    def __init__(self, shards: Shards, device: torch.device) -> None:
        self._shards, self._device = shards, device
        self._blocks: list[torch.Tensor] = []

    def __call__(self, queries: np.ndarray, k: int) -> TopRows:
        """Return scores and row numbers of k candidates for each query vector. ``queries`` is (n, d) float32."""
        # training may have enabled TF32, whose rounding errors are larger than ``_rounding`` assumes
        precision = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        try:
            with torch.inference_mode(), torch.autocast(self._device.type, enabled=False):
                scores, rows = self._search(torch.from_numpy(queries).to(self._device), k)
        finally:
            torch.set_float32_matmul_precision(precision)
        return scores.cpu().numpy(), rows.cpu().numpy()

    def _search(self, queries: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        parts = queries.split(_QUERIES)
        best = [(part.new_empty(len(part), 0), part.new_empty((len(part), 0), dtype=torch.int64)) for part in parts]
        seen = 0
        for block in self._blocks or self._load():  # (rows, d)
            passages = block.float().T
            for number, part in enumerate(parts):
                scores, rows = torch.topk(part @ passages, min(k, len(block)), dim=1)
                scores, rows = torch.cat([best[number][0], scores], 1), torch.cat([best[number][1], rows + seen], 1)
                if scores.shape[1] > k:
                    scores, chosen = torch.topk(scores, k, dim=1)
                    rows = rows.gather(1, chosen)
                best[number] = scores, rows
            seen += len(block)
        return torch.cat([scores for scores, _ in best]), torch.cat([rows for _, rows in best])

    def _load(self) -> Iterator[torch.Tensor]:
        """Copy the corpus to the device and yield its blocks, in the dtype of the shards. Keep them if they fit on the GPU."""
        keep, blocks = self._fits(), []
        for block in self._on_cpu() if self._device.type == "cpu" else self._through_pinned_memory():
            if keep:
                blocks.append(block)
            yield block
        self._blocks = blocks

    def _fits(self) -> bool:
        if self._device.type != "cuda":
            return False
        torch.cuda.empty_cache()  # frees memory that the encoder no longer uses
        vectors = self._shards[0].vectors
        size = count_rows(self._shards) * vectors.shape[1] * vectors.itemsize
        return size <= _RESIDENT * torch.cuda.mem_get_info(self._device)[0]

    def _on_cpu(self) -> Iterator[torch.Tensor]:
        for _, block, _ in row_blocks(self._shards, None):
            # torch warns about read-only (memory-mapped) arrays, so they are copied
            yield torch.from_numpy(block if block.flags.writeable else block.copy())

    def _through_pinned_memory(self) -> Iterator[torch.Tensor]:
        """Copy the blocks to the GPU through two pinned buffers, used in turn, and yield the copies.

        Before a block is yielded, the copy of the next block starts.
        """
        cuda = self._device.type == "cuda"
        stream = torch.cuda.Stream(self._device) if cuda else None
        buffers: list[tuple[torch.Tensor, Any]] = []
        waiting: tuple[torch.Tensor, Any] | None = None
        for number, (_, block, _) in enumerate(row_blocks(self._shards, None)):
            if number < 2 or buffers[number % 2][0].numel() < block.size:
                if number >= 2:
                    _wait(buffers[number % 2][1])
                buffer = torch.empty(block.size, dtype=torch.from_numpy(block[:0].copy()).dtype, pin_memory=cuda)
                buffers[number % 2 : number % 2 + 1] = [(buffer, None)]  # append, or replace a smaller buffer
            buffer, copied = buffers[number % 2]
            _wait(copied)  # wait until the previous copy from this buffer to the GPU has finished
            host = buffer[: block.size].view(block.shape)
            host.numpy()[:] = block
            with torch.cuda.stream(stream):  # has no effect if stream is None
                target = torch.empty(block.shape, dtype=host.dtype, device=self._device)
                target.copy_(host, non_blocking=True)
                copied = stream.record_event() if stream else None
            buffers[number % 2] = buffer, copied
            if waiting is not None:
                yield _ready(*waiting)
            waiting = target, copied
        if waiting is not None:
            yield _ready(*waiting)


def _wait(copied: Any) -> None:
    if copied is not None:
        copied.synchronize()


def _ready(block: torch.Tensor, copied: Any) -> torch.Tensor:
    """Make the current CUDA stream wait until a block is copied, and return the block. The CPU does not wait."""
    if copied is not None:
        current = torch.cuda.current_stream(block.device)
        current.wait_event(copied)
        block.record_stream(current)
    return block


def rescore(
    queries: np.ndarray, shards: Iterable[Shard], rows: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return ids and exact scores of candidates, both (n, k), and an error bound for each query, (n,).

    rows: row numbers of the candidates, counted over all shards, (n, k). Where a row number is -1 (no candidate), id and score
    are undefined. Scores are float64 sums rounded to float32, so a score depends only on its query and its passage. The error
    bound limits the rounding error of the float32 inner products of the query and its candidates. It is for the search that found
    the candidates, not for the returned scores.
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
    """Return an error bound for each query, (n,): for float32 inner products of the query with vectors of L2 norm 1."""
    # the error of a sum of d float32 products is about sqrt(d) units in the last place of |q||p|; four times that is safe
    return 4 * np.sqrt(queries.shape[1]) * 2.0**-24 * np.linalg.norm(queries, axis=1)

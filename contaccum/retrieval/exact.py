"""Exact search by inner product: products of one block of passages, their top k, and a merge.

If the encoder is on a GPU, torch searches on this GPU. On the CPU, faiss or torch searches; by
default, both are timed on a part of the first block, and the faster one is used. Products are
float32, so another device, block size or library can round a score differently. Passages with equal
scores are in the order of the corpus.
"""

import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import numpy as np
import torch

from contaccum.retrieval.faiss_library import load_faiss
from contaccum.retrieval.shards import Shards, count_rows, row_blocks
from contaccum.runtime.processes import encoding_device
from contaccum.runtime.progress import progress_bar

QUERIES = 1024  # number of queries in one matrix product of torch, to limit its memory
RESIDENT = 0.5  # maximum share of a GPU's free memory that the corpus may occupy between searches
TIMED_ROWS = 4096  # number of rows of the first block that are searched to time each library
# Least number of queries and of rows of a search that is timed. With fewer queries torch was the
# faster one, and with fewer rows the timing would be a large part of the search.
TIMED_FROM = (256, 40 * TIMED_ROWS)
PAIRS = 16_384  # number of query-passage pairs that ``inner_products`` scores at a time


def best_first(scores: np.ndarray, rows: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Sort by score, highest first, and equal scores by row number.

    Return the first k scores and rows.

    scores, rows: (n, m). The result is (n, min(k, m)).
    """
    order = np.lexsort((rows, -scores), axis=1)[:, :k]
    return np.take_along_axis(scores, order, axis=1), np.take_along_axis(rows, order, axis=1)


class ExactIndex:
    """Vectors of a corpus, or of the part of it that belongs to this process, for exact search.

    Memory holds one block of a shard and the best k scores of each query. On a GPU, the corpus
    stays in memory for later searches if it fits into half of the free memory.
    """

    def __init__(
        self, shards: Shards, first_row: int = 0, *, backend: str = "auto", device: str = "auto"
    ) -> None:
        """first_row: row number of the first vector in the corpus.

        device: device of the encoder, such as ``cuda:1``. ``auto`` means the GPU of this process,
        or the CPU if there is no GPU. backend: ``faiss`` searches on the CPU. ``torch`` searches on
        the encoder's GPU, or on the CPU. ``auto`` is torch on a GPU. On the CPU it is the faster of
        the two, timed in the first large search, or torch if faiss is not installed.
        """
        self.shards = shards
        self.first_row = first_row
        if device == "auto":
            device = str(encoding_device(device))
        on_gpu = device.startswith("cuda") and backend != "faiss"
        self.device = torch.device(device if on_gpu else "cpu")
        if backend == "auto" and (on_gpu or find_spec("faiss") is None):
            backend = "torch"
        self.backend = backend
        self._resident: list[torch.Tensor] = []  # blocks of the corpus that stay on the GPU

    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return scores and rows of the k passages with the largest products, best first.

        queries: (n, d) float32. Scores are (n, m) float32 and row numbers (n, m) int64, where m is
        k, or the number of passages if that is smaller.
        """
        with (
            torch.inference_mode(),
            torch.autocast(self.device.type, enabled=False),
            _full_float32(),
        ):
            scores, rows = self._search(queries, min(k, count_rows(self.shards)))
        return scores.cpu().numpy(), rows.cpu().numpy()

    def _search(self, queries: np.ndarray, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        vectors = torch.from_numpy(queries).to(self.device)
        scores = vectors.new_empty((len(queries), 0))
        rows = scores.to(torch.int64)
        start = self.first_row
        fewest_queries, fewest_rows = TIMED_FROM
        large = len(queries) >= fewest_queries and count_rows(self.shards) >= fewest_rows
        for block in self._blocks():  # (block rows, d)
            if self.backend == "auto" and large:
                self.backend = _faster_backend(vectors, block, k)
            # a search that is too small to time uses torch
            block_scores, block_rows = _best_by_row(self.backend, vectors, block, k)
            scores = torch.cat([scores, block_scores], dim=1)
            rows = torch.cat([rows, block_rows + start], dim=1)
            # a stable sort keeps the passages of earlier blocks if scores are equal at the cutoff
            scores, order = torch.sort(scores, dim=1, descending=True, stable=True)
            scores, rows = scores[:, :k], rows.gather(1, order[:, :k])
            start += len(block)
        return scores, rows

    def _blocks(self) -> Iterator[torch.Tensor]:
        """Yield the blocks of the corpus on the device. On the CPU they are float32.

        On a GPU, the first call may keep the blocks there for later calls.
        """
        if self._resident:
            yield from self._resident
            return
        shards = progress_bar(len(self.shards), "searching", "shards", self.shards)
        keep = self._fits_on_gpu()
        resident = []
        # float16 takes half the time to copy to a GPU
        for block in row_blocks(shards, np.float32 if self.device.type == "cpu" else None):
            with warnings.catch_warnings():
                # torch warns about read-only arrays, such as memory-mapped ones; nothing writes
                warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
                vectors = torch.from_numpy(block).to(self.device)
            if keep:
                resident.append(vectors)
            yield vectors
        # only now: after an interrupted search, a part of the corpus would be missing
        self._resident = resident

    def _fits_on_gpu(self) -> bool:
        if self.device.type != "cuda" or not count_rows(self.shards):
            return False
        torch.cuda.empty_cache()  # frees memory that the encoder no longer uses
        vectors = self.shards[0].vectors
        size = count_rows(self.shards) * vectors.shape[1] * vectors.itemsize
        return size <= RESIDENT * torch.cuda.mem_get_info(self.device)[0]


@contextmanager
def _full_float32() -> Iterator[None]:
    """Compute float32 products in full: training may have enabled TF32, which has three digits."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)


def _faster_backend(queries: torch.Tensor, block: torch.Tensor, k: int) -> str:
    """Time both libraries on a part of a block, and return the name of the faster one.

    Which one is faster depends on the number of queries, so up to QUERIES of them are searched.
    """
    seconds = {"torch": float("inf"), "faiss": float("inf")}
    for _ in range(2):  # the first call of a library is slower
        for name in seconds:
            began = time.perf_counter()
            _best_rows(name, queries[:QUERIES], block[:TIMED_ROWS], k)
            seconds[name] = min(seconds[name], time.perf_counter() - began)
    fastest = min(seconds, key=seconds.__getitem__)
    times = ", ".join(f"{name} {value:.3g} s" for name, value in seconds.items())
    print(f"exact search with {fastest} (time for a part of the corpus: {times})", file=sys.stderr)
    return fastest


def _best_rows(
    backend: str, queries: torch.Tensor, block: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the k largest products of each query with the rows of a block, and the rows, (n, k).

    queries: (n, d). block: (m, d). If m < k, the result has m columns.
    """
    k = min(k, len(block))
    if backend == "faiss":
        faiss = load_faiss()
        scores, rows = faiss.knn(
            queries.numpy(), block.numpy(), k, metric=faiss.METRIC_INNER_PRODUCT
        )
        return torch.from_numpy(scores), torch.from_numpy(rows)
    passages = block.float().T  # (d, m)
    top = [torch.topk(part @ passages, k, dim=1) for part in queries.split(QUERIES)]
    return torch.cat([part.values for part in top]), torch.cat([part.indices for part in top])


def _best_by_row(
    backend: str, queries: torch.Tensor, block: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the best k scores and rows of a block for each query, in the order of the rows.

    So the caller's stable sort puts equal scores in this order.
    One more passage than k shows whether a score at the cutoff is a tie, which the libraries break
    in any order.
    """
    scores, rows = _best_rows(backend, queries, block, k + 1)
    if scores.shape[1] > k:
        tied = torch.nonzero(scores[:, k] == scores[:, k - 1])[:, 0]
        scores, rows = scores[:, :k].clone(), rows[:, :k].clone()
        for some in tied.split(64):
            products = torch.sort(
                queries[some] @ block.float().T, dim=1, descending=True, stable=True
            )
            scores[some], rows[some] = products.values[:, :k], products.indices[:, :k]
    rows, order = torch.sort(rows, dim=1)
    return scores.gather(1, order), rows


def inner_products(
    queries: np.ndarray, shards: Shards, rows: np.ndarray, first_row: int = 0
) -> np.ndarray:
    """Return the inner products of each query with its own list of passages, (n, k) float32.

    queries: (n, d) float32. rows: row numbers of the passages, (n, k). Where the shards have no
    such row, the result is -inf. first_row: row number of the first vector.
    """
    scores = np.full(rows.shape, -np.inf, dtype=np.float32)
    start = first_row
    for shard in shards:
        stop = start + len(shard.vectors)
        query, column = np.nonzero((rows >= start) & (rows < stop))
        for first in range(0, len(query), PAIRS):
            chunk = slice(first, first + PAIRS)
            local = rows[query[chunk], column[chunk]] - start
            vectors = shard.vectors[local].astype(np.float32)  # (pairs, d)
            scores[query[chunk], column[chunk]] = np.einsum(
                "nd,nd->n", queries[query[chunk]], vectors
            )
        start = stop
    return scores

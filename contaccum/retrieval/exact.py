"""Exact search by inner product: products of a block, their top k, merge with earlier blocks.

On the CPU, faiss computes the products and selects the top k; torch does it if faiss is not
installed. If the encoder is on a GPU, torch searches on this GPU. Products are float32, so another
device or block size can round a score differently. Passages with equal scores are in the order of
the corpus. If several passages tie for the k-th place, the library chooses among them; equal calls
choose alike.
"""

from collections.abc import Iterator

import numpy as np
import torch
from tqdm.auto import tqdm

from contaccum.errors import InputError
from contaccum.retrieval.faiss_library import load_faiss
from contaccum.retrieval.shards import Shards, count_rows, row_blocks
from contaccum.runtime.processes import encoding_device

BACKENDS = ("auto", "faiss", "torch")
QUERIES = 1024  # number of queries in one matrix product of torch, to limit its memory
RESIDENT = 0.5  # maximum share of a GPU's free memory that the corpus may occupy between searches
PAIRS = 16_384  # number of query-passage pairs that ``inner_products`` scores at a time


def best_first(scores: np.ndarray, rows: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Sort by score, highest first, and equal scores by row number.

    Return the first k scores and rows.

    scores, rows: (n, m). The result is (n, min(k, m)).
    """
    order = np.lexsort((rows, -scores), axis=1)[:, :k]
    return np.take_along_axis(scores, order, axis=1), np.take_along_axis(rows, order, axis=1)


def search_device(device: str) -> torch.device:
    """Return the device of a search: the GPU of the encoder if it uses CUDA, else the CPU.

    device: device of the encoder. ``auto`` means the GPU of this process, or the CPU if there is no
    GPU.
    """
    if device == "auto":
        device = str(encoding_device(device))
    return torch.device(device if device.startswith("cuda") else "cpu")


class ExactIndex:
    """Vectors of a corpus, or of the part of it that belongs to this process, for exact search.

    Memory holds one block of a shard and the best k scores of each query. On a GPU, the corpus
    stays in memory for later searches if it fits into half of the free memory.
    """

    def __init__(
        self, shards: Shards, first_row: int = 0, *, backend: str = "auto", device: str = "auto"
    ) -> None:
        """first_row: row number of the first vector in the corpus.

        device: device of the encoder, such as ``cuda:1``.

        backend: ``faiss`` searches on the CPU. ``torch`` searches on the device of the encoder.
        ``auto`` is torch on a GPU, and faiss on the CPU if it is installed. Raises InputError if
        the backend is unknown or not installed.
        """
        if backend not in BACKENDS:
            raise InputError(f"backend is {backend!r}; expected one of {', '.join(BACKENDS)}")
        self.shards = shards
        self.first_row = first_row
        self.device = search_device(device)
        if backend == "auto":
            backend = "torch"
            if self.device.type != "cuda":
                try:
                    load_faiss()
                    backend = "faiss"
                except InputError:  # not installed
                    pass
        elif backend == "faiss":
            load_faiss()
        if backend == "faiss":
            self.device = torch.device("cpu")
        self.backend = backend
        self._resident: list[torch.Tensor] = []  # blocks of the corpus that stay on the GPU

    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return scores and rows of the k passages with the largest products, best first.

        queries: (n, d) float32. Scores are (n, m) float32 and row numbers (n, m) int64, where m is
        k, or the number of passages if that is smaller.
        """
        k = min(k, count_rows(self.shards))
        vectors = torch.from_numpy(queries).to(self.device)
        scores = vectors.new_empty((len(queries), 0))
        rows = scores.to(torch.int64)
        start = self.first_row
        for block in self._blocks():  # (block rows, d)
            depth = min(k, len(block))
            if isinstance(block, np.ndarray):
                block_scores, block_rows = _top_with_faiss(queries, block, depth)  # (n, depth)
            else:
                block_scores, block_rows = _top_with_torch(vectors, block, depth)
            scores = torch.cat([scores, block_scores], dim=1)
            rows = torch.cat([rows, block_rows + start], dim=1)
            # a stable sort keeps the passages of earlier blocks if scores are equal at the cutoff
            scores, order = torch.sort(scores, dim=1, descending=True, stable=True)
            scores, rows = scores[:, :k], rows.gather(1, order[:, :k])
            start += len(block)
        # within a block, the library may have ordered equal scores in any way; best_first orders
        # them by row
        return best_first(scores.cpu().numpy(), rows.cpu().numpy(), k)

    def _blocks(self) -> Iterator[np.ndarray | torch.Tensor]:
        """Yield the blocks of the corpus: arrays for faiss, tensors on the device for torch.

        On a GPU, the first call may keep the blocks there for later calls.
        """
        if self._resident:
            yield from self._resident
            return
        shards = tqdm(self.shards, desc="search", unit="shard", disable=None, leave=False)
        if self.backend == "faiss":
            for block in row_blocks(shards, np.float32):
                yield block.vectors
            return
        keep = self._fits_on_gpu()
        resident = []
        for block in row_blocks(
            shards
        ):  # in the dtype of the shards: float16 takes half the time to copy
            # torch warns about read-only arrays, such as memory-mapped ones, so these are copied
            vectors = block.vectors if block.vectors.flags.writeable else block.vectors.copy()
            on_device = torch.from_numpy(vectors).to(self.device)
            if keep:
                resident.append(on_device)
            yield on_device
        self._resident = (
            resident  # only now: after an interrupted search, a part of the corpus would be missing
        )

    def _fits_on_gpu(self) -> bool:
        if self.device.type != "cuda" or not count_rows(self.shards):
            return False
        torch.cuda.empty_cache()  # frees memory that the encoder no longer uses
        vectors = self.shards[0].vectors
        size = count_rows(self.shards) * vectors.shape[1] * vectors.itemsize
        return size <= RESIDENT * torch.cuda.mem_get_info(self.device)[0]


def _top_with_faiss(
    queries: np.ndarray, block: np.ndarray, k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    faiss = load_faiss()
    scores, rows = faiss.knn(queries, block, k, metric=faiss.METRIC_INNER_PRODUCT)
    return torch.from_numpy(scores), torch.from_numpy(rows)


def _top_with_torch(
    queries: torch.Tensor, block: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    # training may have enabled TF32, which rounds products to about three digits
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.inference_mode(), torch.autocast(queries.device.type, enabled=False):
            passages = block.float().T  # (d, block rows)
            top = [torch.topk(part @ passages, k, dim=1) for part in queries.split(QUERIES)]
    finally:
        torch.set_float32_matmul_precision(precision)
    return torch.cat([part.values for part in top]), torch.cat([part.indices for part in top])


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

"""Find the candidates of the exact search, with torch on the CPU or one GPU, or with faiss on GPUs.

Float32 products round differently on each device. They therefore select a few more candidates than needed, and ``exact.py``
computes the scores of the candidates again in float64.
"""

import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from contaccum.retrieval.faiss_library import GPU_LIMIT, load_faiss, reason_of, row_blocks, search_gpus
from contaccum.retrieval.shards import Shards, count_rows

if TYPE_CHECKING:
    import torch

_QUERIES = 1024  # number of queries in one matrix product, to limit its memory
_RESIDENT = 0.5  # maximum share of a GPU's free memory that the corpus may occupy between searches

TopRows = tuple[np.ndarray, np.ndarray]
"""Candidates of n queries, in any order: approximate scores (n, k) and row numbers (n, k)."""


def torch_device(device: str) -> "torch.device":
    """Return the device on which torch searches: a GPU if the encoder uses CUDA, else the CPU.

    device: device of the encoder. ``auto`` means the GPU of this process, or the CPU if there is no GPU.
    """
    import torch

    if device == "auto":
        from contaccum.runtime.processes import encoding_device

        device = str(encoding_device(device))
    return torch.device(device if device.startswith("cuda") else "cpu")


class TorchCandidates:
    """Search for candidates with torch.

    The corpus is searched block by block. On a GPU, the next block is copied through pinned memory while the current block is
    searched. A corpus that fits into half of the GPU's free memory stays on the GPU for later calls.
    """

    def __init__(self, shards: Shards, device: "torch.device", *, resident: bool | None = None) -> None:
        """resident: whether the corpus stays on the device after a search. None: only on a GPU with enough free memory."""
        self._shards, self._device, self._resident = shards, device, resident
        self._blocks: list[torch.Tensor] = []

    def __call__(self, queries: np.ndarray, k: int) -> TopRows:
        """Return scores and row numbers of k candidates for each query vector. ``queries`` is (n, d) float32."""
        import torch

        # training may have enabled TF32, whose rounding errors are larger than ``exact.py`` assumes
        precision = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        try:
            with torch.inference_mode(), torch.autocast(self._device.type, enabled=False):
                scores, rows = self._search(torch.from_numpy(queries).to(self._device), k)
        finally:
            torch.set_float32_matmul_precision(precision)
        return scores.cpu().numpy(), rows.cpu().numpy()

    def _search(self, queries: "torch.Tensor", k: int) -> "tuple[torch.Tensor, torch.Tensor]":
        import torch

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

    def _load(self) -> "Iterator[torch.Tensor]":
        """Copy the corpus to the device and yield its blocks, in the dtype of the shards. If ``_fits()``, keep the blocks."""
        keep, blocks = self._fits(), []
        for block in self._on_cpu() if self._device.type == "cpu" else self._through_pinned_memory():
            if keep:
                blocks.append(block)
            yield block
        self._blocks = blocks

    def _fits(self) -> bool:
        if self._resident is not None or self._device.type != "cuda":
            return bool(self._resident)
        import torch

        torch.cuda.empty_cache()  # frees memory that the encoder no longer uses
        vectors = self._shards[0].vectors if len(self._shards) else np.empty((0, 0))
        size = count_rows(self._shards) * vectors.shape[1] * vectors.itemsize
        return size <= _RESIDENT * torch.cuda.mem_get_info(self._device)[0]

    def _numpy_blocks(self) -> Iterator[np.ndarray]:
        for shard in self._shards:
            yield from (block for _, block in row_blocks(shard.vectors, dtype=shard.vectors.dtype))

    def _on_cpu(self) -> "Iterator[torch.Tensor]":
        import torch

        for block in self._numpy_blocks():  # torch warns about read-only (memory-mapped) arrays, so they are copied
            yield torch.from_numpy(block if block.flags.writeable else block.copy())

    def _through_pinned_memory(self) -> "Iterator[torch.Tensor]":
        """Copy the blocks to the GPU through two pinned buffers, used in turn, and yield the copies.

        The copy of the next block starts before a block is yielded.
        """
        import torch

        cuda = self._device.type == "cuda"
        stream = torch.cuda.Stream(self._device) if cuda else None
        buffers: list[tuple[torch.Tensor, Any]] = []
        waiting: tuple[torch.Tensor, Any] | None = None
        for number, block in enumerate(self._numpy_blocks()):
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


def _ready(block: "torch.Tensor", copied: Any) -> "torch.Tensor":
    """Make the current CUDA stream wait until a block is copied, and return the block. The CPU does not wait."""
    import torch

    if copied is not None:
        current = torch.cuda.current_stream(block.device)
        current.wait_event(copied)
        block.record_stream(current)
    return block


class FaissGpuCandidates:
    """Search for candidates with faiss on GPUs, which together hold the whole corpus.

    If faiss fails (too little memory, for example) or k is larger than ``GPU_LIMIT``, torch searches instead.
    """

    def __init__(self, shards: Shards, device: str) -> None:
        """Copy the corpus to the GPUs that faiss may use. device: device of the encoder."""
        self._torch = TorchCandidates(shards, torch_device(device))
        try:
            self._index = flat_index_on_gpus(shards, search_gpus(device))
        except RuntimeError as error:
            self._fall_back_to_torch(error)

    def __call__(self, queries: np.ndarray, k: int) -> TopRows:
        """Return scores and row numbers of k candidates for each query vector. ``queries`` is (n, d) float32."""
        if self._index is not None and k <= GPU_LIMIT:
            try:
                return self._index.search(np.ascontiguousarray(queries), k)
            except RuntimeError as error:
                self._fall_back_to_torch(error)
        return self._torch(queries, k)

    def _fall_back_to_torch(self, error: RuntimeError) -> None:
        warnings.warn(f"faiss cannot search on the GPU ({reason_of(error)}); torch searches instead", stacklevel=3)
        self._index = None  # frees the memory of the GPUs for torch


def flat_index_on_gpus(shards: Shards, gpus: list[int]) -> Any:
    """Build an exact faiss index of the corpus, divided among the GPUs. Each GPU gets consecutive rows.

    Blocks are copied directly to the GPUs, without another copy of the corpus in CPU memory.
    """
    import torch

    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # faiss cannot use memory that torch has cached
    faiss, width, rows = load_faiss(), shards[0].vectors.shape[1], count_rows(shards)
    parts = []
    for gpu in gpus:
        config = faiss.GpuIndexFlatConfig()
        config.device = gpu
        parts.append(faiss.GpuIndexFlatIP(faiss.StandardGpuResources(), width, config))
    size, seen = -(-rows // len(gpus)), 0
    for shard in shards:
        for _, block in row_blocks(shard.vectors):
            while len(block):
                taken = block[: size - seen % size]
                parts[seen // size].add(taken)
                block, seen = block[len(taken) :], seen + len(taken)
    if len(parts) == 1:
        return parts[0]
    divided = faiss.IndexShards(width, True, True)  # search with threads; row numbers continue from GPU to GPU
    for part in parts:
        divided.add_shard(part)
    return divided

"""Import faiss, return its version, find candidates with it, and refuse index_factory strings that make it crash.

Only this file imports faiss.
"""

import re
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from contaccum.errors import InputError, in_one_line
from contaccum.retrieval.shards import Shard, Shards, count_rows
from contaccum.runtime.launch import local_place

TopRows = tuple[np.ndarray, np.ndarray]
"""Candidates of n queries, in any order: approximate scores (n, k) and row numbers (n, k)."""
CandidateSearch = Callable[[np.ndarray, int], TopRows]
"""Function that returns k candidates for each of the query vectors (n, d)."""

FEW = 16  # minimum number of rows that faiss returns for a query from one block, see ``faiss_cpu_candidates``
BLOCK = 32_768  # number of rows that are converted to float32 and passed to faiss at a time
GPU_LIMIT = 2048  # maximum number of results that faiss returns for a query on a GPU
LONGEST = 200  # maximum length of a factory string or of search parameters; faiss crashes on very long strings

_PREFIX = re.compile(r"^Error in .*? at \S+:\d+: (Error: )?('.*?' failed: )?")
"""Pattern for the start of a faiss error message: C++ function, file, line and failed condition."""
_TRIAL = "import sys, faiss; faiss.index_factory(int(sys.argv[1]), sys.argv[2], faiss.METRIC_INNER_PRODUCT)"
_TRIAL_SECONDS = 60


def load_faiss() -> ModuleType:
    """Import faiss. Raises InputError with the install command if faiss is missing."""
    try:
        import faiss  # works before and after the import of torch, although both libraries load an OpenMP runtime
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == "faiss"
        state = "is not installed" if missing else f"cannot be loaded ({error})"
        raise InputError(
            f'this search needs faiss, which {state}. Run: pip install "contaccum[cpu]" '
            '(or "contaccum[gpu]"), or use the exact search in torch (backend: torch).'
        ) from error
    return faiss


def describe_faiss() -> dict[str, Any]:
    """Return the version of faiss, its build options (such as AVX512 or GPU) and the number of GPUs that faiss sees."""
    faiss = load_faiss()
    options = faiss.get_compile_options().split()
    return {"version": faiss.__version__, "options": options, "gpus": faiss.get_num_gpus()}


def search_everywhere(queries: np.ndarray, passages: np.ndarray, k: int) -> dict[str, Any]:
    """Search exactly with faiss on the CPU and on each GPU.

    Returns a dictionary: ``cpu``, ``gpu 0``, ``gpu 1``, … -> scores and row numbers, both (n, k). For a GPU that fails, the
    value is the error message.
    """
    faiss = load_faiss()
    index = faiss.IndexFlatIP(passages.shape[1])
    index.add(passages)
    found: dict[str, Any] = {"cpu": index.search(queries, k)}
    for number in range(faiss.get_num_gpus()):
        try:
            copy = faiss.index_cpu_to_gpu(faiss.StandardGpuResources(), number, index)
            found[f"gpu {number}"] = copy.search(queries, k)
        except RuntimeError as error:
            found[f"gpu {number}"] = reason_of(error)
    return found


def gpu_count() -> int:
    """Return the number of GPUs that faiss can use. It is 0 if faiss is missing or built for CPUs only."""
    try:
        return load_faiss().get_num_gpus()
    except InputError:
        return 0


def search_gpus(device: str = "auto") -> list[int]:
    """Return the numbers of the GPUs that faiss may use.

    device: device of the encoder. For ``cpu`` the list is empty. With several processes, it has only the GPU of this process.
    """
    count = gpu_count() if device.startswith(("auto", "cuda")) else 0
    rank, world = local_place()
    return [rank % count] if count and world > 1 else list(range(count))


def top_of_block(queries: np.ndarray, block: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Find the k rows of a float32 block with the largest inner products for each of n queries.

    Returns scores and row numbers, both (n, k).
    """
    faiss = load_faiss()
    return faiss.knn(queries, block, k, metric=faiss.METRIC_INNER_PRODUCT)


def row_blocks(shards: Iterable[Shard], dtype: Any = np.float32) -> Iterator[Shard]:
    """Divide shards into blocks of at most ``BLOCK`` rows, with contiguous vectors. dtype: None keeps that of the shards."""
    for shard in shards:
        for start in range(0, len(shard.vectors), BLOCK):
            rows = slice(start, start + BLOCK)
            yield Shard(shard.ids[rows], np.ascontiguousarray(shard.vectors[rows], dtype=dtype))


def faiss_cpu_candidates(shards: Shards, queries: np.ndarray, k: int) -> TopRows:
    """Find the k best rows of all shards with faiss on the CPU, block by block.

    Later blocks usually contain few of the k best rows. From such a block, faiss first returns only a few rows for each query.
    If all of them are among the k best rows so far, the block may contain more, and faiss searches the block again for k rows.
    """
    best = np.empty((len(queries), 0), dtype=np.float32), np.empty((len(queries), 0), dtype=np.int64)
    seen = 0
    for _, block, _ in row_blocks(tqdm(shards, desc="search", unit="shard", disable=None, leave=False)):
        most = min(k, len(block))
        few = min(most, FEW + 2 * k * len(block) // (seen + len(block)))
        scores, rows = top_of_block(queries, block, few)
        merged = _merge(best, (scores, rows + seen), k)
        if few < most and len(unsure := np.flatnonzero(scores.min(axis=1) >= merged[0].min(axis=1))):
            scores, rows = top_of_block(queries[unsure], block, most)
            before = best[0][unsure], best[1][unsure]
            merged[0][unsure], merged[1][unsure] = _merge(before, (scores, rows + seen), k)
        best = merged
        seen += len(block)
    return best


def _merge(one: TopRows, other: TopRows, k: int) -> TopRows:
    scores, rows = (np.concatenate(pair, axis=1) for pair in zip(one, other, strict=True))
    if scores.shape[1] > k:
        best = np.argpartition(scores, -k, axis=1)[:, -k:]
        scores, rows = np.take_along_axis(scores, best, 1), np.take_along_axis(rows, best, 1)
    return scores, rows


class FaissGpuCandidates:
    """Search for candidates with faiss on GPUs, which together hold the whole corpus.

    If faiss fails (too little memory, for example), or if k is too large for faiss on a GPU, torch searches instead.
    """

    def __init__(self, shards: Shards, gpus: list[int], torch_candidates: CandidateSearch) -> None:
        """Copy the corpus to the GPUs with the numbers ``gpus``."""
        self._torch = torch_candidates
        try:
            self._index = flat_index_on_gpus(shards, gpus)
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

    torch.cuda.empty_cache()  # faiss cannot use memory that torch has cached
    faiss, width, rows = load_faiss(), shards[0].vectors.shape[1], count_rows(shards)
    parts = []
    for gpu in gpus:
        config = faiss.GpuIndexFlatConfig()
        config.device = gpu
        parts.append(faiss.GpuIndexFlatIP(faiss.StandardGpuResources(), width, config))
    size, seen = -(-rows // len(gpus)), 0
    for _, block, _ in row_blocks(shards):
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


def check_factory(factory: str, dimension: int) -> None:
    """Raise InputError if an index_factory string is not ASCII, is too long, or makes faiss crash or hang.

    A child process creates the index as a trial, so that a crash does not end this process.
    """
    if not re.fullmatch(rf"[ -~]{{1,{LONGEST}}}", factory):
        found = f"{len(factory)} characters" if len(factory) > LONGEST else repr(factory)
        raise InputError(
            f"factory: found {found}; expected a faiss index_factory string of 1 to {LONGEST} ASCII characters"
        )
    call = [sys.executable, "-c", _TRIAL, str(dimension), factory]
    try:
        code = subprocess.run(call, capture_output=True, timeout=_TRIAL_SECONDS, check=False).returncode
    except subprocess.TimeoutExpired as error:
        raise InputError(
            f"index {factory!r}: faiss takes more than {_TRIAL_SECONDS} s to create it; use another index"
        ) from error
    if code < 0:  # a positive code means a Python error, which faiss will raise in this process, too
        raise InputError(f"index {factory!r}: faiss crashes ({signal.Signals(-code).name}); use another index")


def reason_of(error: BaseException) -> str:
    """Return the message of a faiss error in one line, without C++ function, file and line number."""
    return _PREFIX.sub("", in_one_line(error))

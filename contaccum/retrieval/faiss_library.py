"""Import and describe faiss, and refuse strings that make faiss crash. Only this file imports faiss."""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np

from contaccum.errors import InputError
from contaccum.runtime.launch import local_place

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

    Returns a dictionary. Its keys are ``cpu``, ``gpu 0``, ``gpu 1``, … Each value is the pair of scores and row numbers, both
    (n, k), or an error message.
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

    device: device of the encoder. For ``cpu`` the list is empty. If there are several processes, each uses one GPU.
    """
    count = gpu_count() if may_use_gpu(device) else 0
    rank, world = local_place()
    return [rank % count] if count and world > 1 else list(range(count))


def may_use_gpu(device: str) -> bool:
    """Return whether a search may use GPUs if the encoder is on ``device``."""
    return device.startswith(("auto", "cuda"))


def top_of_block(queries: np.ndarray, block: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Find the k rows of a float32 block with the largest inner products for each of n queries.

    Returns scores and row numbers, both (n, k).
    """
    faiss = load_faiss()
    return faiss.knn(queries, block, k, metric=faiss.METRIC_INNER_PRODUCT)


def row_blocks(vectors: np.ndarray, *, dtype: Any = np.float32) -> Iterator[tuple[int, np.ndarray]]:
    """Divide a matrix into blocks of ``BLOCK`` rows. Yield the number of each block's first row, and the block as ``dtype``."""
    for start in range(0, len(vectors), BLOCK):
        yield start, np.ascontiguousarray(vectors[start : start + BLOCK], dtype=dtype)


def check_factory(factory: str, dimension: int) -> None:
    """Raise InputError if an index_factory string is not ASCII or too long, or makes faiss crash or hang in a child process."""
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


def reason_of(error: Exception) -> str:
    """Return the message of a faiss error as one line, without C++ function, file and line number."""
    return _PREFIX.sub("", " ".join(str(error).split()))

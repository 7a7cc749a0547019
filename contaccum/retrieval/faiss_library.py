"""Import faiss, and say what it supports on this machine. Only this file imports faiss."""

import re
from types import ModuleType
from typing import Any

import numpy as np

from contaccum.errors import InputError, in_one_line, install_command
from contaccum.runtime.launch import local_place

GPU_LIMIT = 2048  # maximum number of results that faiss returns for a query on a GPU
# maximum length of a factory string or of search parameters; faiss crashes on very long strings
LONGEST = 200

_PREFIX = re.compile(r"^Error in .*? at \S+:\d+: (Error: )?('.*?' failed: )?")
"""Pattern for the start of a faiss error message: C++ function, file, line and failed condition."""


def load_faiss() -> ModuleType:
    """Import faiss. Raises InputError with the install command if faiss is missing."""
    try:
        # works before and after the import of torch, although both libraries load an OpenMP runtime
        import faiss
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == "faiss"
        state = "is not installed" if missing else f"cannot be loaded ({error})"
        raise InputError(
            f"this search needs faiss, which {state}. Run: {install_command('cpu')} (with a GPU, "
            "the extra gpu), or use the exact search in torch (backend: torch)"
        ) from error
    return faiss


def has_faiss() -> bool:
    """Return whether faiss can be imported."""
    try:
        load_faiss()
    except InputError:
        return False
    return True


def describe_faiss() -> dict[str, Any]:
    """Return faiss's version, its build options (such as AVX512) and its number of GPUs."""
    faiss = load_faiss()
    options = faiss.get_compile_options().split()
    return {"version": faiss.__version__, "options": options, "gpus": faiss.get_num_gpus()}


def search_everywhere(queries: np.ndarray, passages: np.ndarray, k: int) -> dict[str, Any]:
    """Search exactly with faiss on the CPU and on each GPU.

    Returns a dictionary: ``cpu``, ``gpu 0``, ``gpu 1``, … -> scores and row numbers, both (n, k).
    For a GPU that fails, the value is the error message.
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
    """Return the number of GPUs that faiss can use.

    It is 0 if faiss is missing or built for CPUs only.
    """
    try:
        return load_faiss().get_num_gpus()
    except InputError:
        return 0


def search_gpus(device: str = "auto") -> list[int]:
    """Return the numbers of the GPUs that faiss may use.

    device: device of the encoder. For ``cpu`` the list is empty. With several processes, it has
    only the GPU of this process.
    """
    count = gpu_count() if device.startswith(("auto", "cuda")) else 0
    rank, world = local_place()
    return [rank % count] if count and world > 1 else list(range(count))


def reason_of(error: BaseException) -> str:
    """Return a faiss error in one line, without C++ function, file and line number."""
    return _PREFIX.sub("", in_one_line(error))

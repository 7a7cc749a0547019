"""Import faiss, return its version and its GPUs, and refuse index_factory strings that make it crash.

Only this file imports faiss.
"""

import re
import signal
import subprocess
import sys
from types import ModuleType
from typing import Any

import numpy as np

from contaccum.errors import InputError, in_one_line
from contaccum.runtime.launch import local_place

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

"""Import faiss, and say what it supports on this machine. Only this file imports faiss."""

import re
from types import ModuleType

import numpy as np

from contaccum.errors import InputError, in_one_line, install_command
from contaccum.runtime.launch import local_place

GPU_LIMIT = 2048  # maximum number of results that faiss returns for a query on a GPU

_PREFIX = re.compile(r"^Error in .*? at \S+:\d+: (Error: )?('.*?' failed: )?")
"""Pattern for the start of a faiss error message: C++ function, file, line and failed condition."""


def load_faiss() -> ModuleType:
    """Import faiss. Raises InputError with the install command if this fails."""
    try:
        # works before and after the import of torch, although both libraries load an OpenMP runtime
        import faiss
    except ImportError as error:
        raise InputError(
            f"faiss cannot be imported ({error}). Run: {install_command('cpu')} (with a GPU, the "
            "extra gpu), or use the exact search in torch (--backend torch)"
        ) from error
    return faiss


def try_faiss() -> str:
    """Search with faiss on the CPU and on each GPU. Return its version and its number of GPUs.

    Raises AssertionError if a score is wrong, and RuntimeError if faiss cannot use a GPU.
    """
    faiss = load_faiss()
    vectors = np.random.default_rng(0).standard_normal((1000, 64), dtype=np.float32)
    index = faiss.IndexFlatIP(64)
    index.add(vectors)
    indexes = [index]
    for number in range(faiss.get_num_gpus()):
        indexes.append(faiss.index_cpu_to_gpu(faiss.StandardGpuResources(), number, index))
    best = np.sort(vectors[:16] @ vectors.T, axis=1)[:, :-11:-1]  # (16, 10)
    for each in indexes:
        np.testing.assert_allclose(each.search(vectors[:16], 10)[0], best, atol=0.1)
    return f"{faiss.__version__}, {faiss.get_num_gpus()} GPUs"


def gpu_count() -> int:
    """Return the number of GPUs that faiss can use: 0 if faiss is built for CPUs only."""
    return load_faiss().get_num_gpus()


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

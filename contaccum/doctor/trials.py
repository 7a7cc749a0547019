"""What the doctor tries, each in a process of its own: a kernel that crashes or hangs takes nobody with it.

``python -m contaccum.doctor.trials NAME`` prints one JSON object as its last line. Nothing heavy is imported at the top, because
the order of the imports is one of the things tried.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

ROWS, QUERIES, WIDTH, K = 1000, 16, 64, 10


def vectors() -> tuple[np.ndarray, np.ndarray]:
    """Unit vectors, the same at every call: queries (16, 64) and passages (1000, 64), float32."""
    drawn = np.random.default_rng(0).standard_normal((QUERIES + ROWS, WIDTH))
    unit = (drawn / np.linalg.norm(drawn, axis=1, keepdims=True)).astype(np.float32)
    return unit[:QUERIES], unit[QUERIES:]


def difference(scores: np.ndarray, rows: np.ndarray) -> float:
    """Largest distance of a search's scores (n, k) from the best that numpy finds, and from those of the rows (n, k) it names."""
    queries, passages = vectors()
    exact = queries.astype(np.float64) @ passages.astype(np.float64).T
    best = -np.sort(-exact, axis=1)[:, :K]
    named = np.take_along_axis(exact, rows.astype(np.int64), axis=1)
    return float(max(np.abs(scores - best).max(), np.abs(scores - named).max()))


def torch_trial() -> dict[str, Any]:
    """PyTorch's version, and on every device the search as one product; on a GPU flash-attention too."""
    import torch

    queries, passages = (torch.from_numpy(part) for part in vectors())
    gpus = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    devices = ["cpu", *gpus, *(["mps"] if torch.backends.mps.is_available() else [])]
    found = []
    for device in devices:
        about: dict[str, Any] = {"device": device}
        try:
            if device.startswith("cuda"):
                about |= _gpu(device)
            top = (queries.to(device) @ passages.to(device).T).topk(K)
            about["difference"] = difference(top.values.cpu().numpy(), top.indices.cpu().numpy())
        except RuntimeError as error:
            about["error"] = _line(error)
        found.append(about)
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "threads": torch.get_num_threads(),
        "devices": found,
        "flash": _flash(gpus),
    }


def _gpu(device: str) -> dict[str, Any]:
    import torch

    free, total = torch.cuda.mem_get_info(device)
    major, minor = torch.cuda.get_device_capability(device)
    name = torch.cuda.get_device_name(device)
    return {"name": name, "capability": f"{major}.{minor}", "free": free, "total": total, "bf16": major >= 8}


def _flash(gpus: list[str]) -> dict[str, Any]:
    """flash-attn's version and, where there is a GPU, its distance from PyTorch's own attention; empty without the package."""
    try:
        import flash_attn  # type: ignore[import-not-found]
    except Exception as error:  # a build for another torch fails in many ways
        return {} if isinstance(error, ModuleNotFoundError) else {"error": _line(error)}
    about: dict[str, Any] = {"version": flash_attn.__version__}
    if gpus:
        import torch

        drawn = torch.randn(3, 2, 32, 4, 64, generator=torch.Generator().manual_seed(0)).half().to(gpus[0])
        plain = torch.nn.functional.scaled_dot_product_attention(*drawn.transpose(2, 3)).transpose(1, 2)
        try:
            about["difference"] = float((flash_attn.flash_attn_func(*drawn) - plain).abs().max())
        except RuntimeError as error:
            about["error"] = _line(error)
    return about


def faiss_trial() -> dict[str, Any]:
    """faiss's version and build, and its search on the CPU and on the GPUs that it sees."""
    from contaccum.retrieval.index import describe_faiss, search_everywhere

    queries, passages = vectors()
    results = search_everywhere(queries, passages, K)
    differences = {place: found if isinstance(found, str) else difference(*found) for place, found in results.items()}
    return {**describe_faiss(), "search": differences, "openmp": _openmp()}


def torch_then_faiss() -> dict[str, Any]:
    torch_trial()
    return faiss_trial()


def faiss_then_torch() -> dict[str, Any]:
    found = faiss_trial()
    torch_trial()
    return {**found, "openmp": _openmp()}


def _openmp() -> list[str]:
    """The OpenMP runtimes in this process (Linux; elsewhere none is seen)."""
    try:
        with open("/proc/self/maps", encoding="utf-8") as maps:
            names = {line.rsplit("/", 1)[-1].strip() for line in maps if "/" in line}
    except OSError:
        return []
    return sorted(name for name in names if name.startswith(("libgomp", "libiomp", "libomp")))


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


TRIALS: dict[str, Callable[[], dict[str, Any]]] = {
    "torch": torch_trial,
    "torch_then_faiss": torch_then_faiss,
    "faiss_then_torch": faiss_then_torch,
}

if __name__ == "__main__":
    print(json.dumps(TRIALS[sys.argv[1]]()))

"""Test torch, faiss and flash-attn in separate processes, so that a crash does not stop the doctor.

``python -m contaccum.doctor.trials NAME`` runs a trial and prints the result as JSON in the last line. NAME is torch,
torch_then_faiss or faiss_then_torch. Each trial imports its library itself, because the order of the imports is also tested.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

ROWS, QUERIES, WIDTH, K = 1000, 16, 64, 10


def vectors() -> tuple[np.ndarray, np.ndarray]:
    """Return query vectors (16, 64) and passage vectors (1000, 64), float32, of length 1. They are the same in every call."""
    drawn = np.random.default_rng(0).standard_normal((QUERIES + ROWS, WIDTH))
    unit = (drawn / np.linalg.norm(drawn, axis=1, keepdims=True)).astype(np.float32)
    return unit[:QUERIES], unit[QUERIES:]


def difference(scores: np.ndarray, rows: np.ndarray) -> float:
    """Return the maximum error of search scores. The search used the queries and passages that ``vectors`` returns.

    The error is the difference from exact scores, computed in float64. scores, rows: scores and row numbers of the K passages
    that the search found for each query, (16, K).
    """
    queries, passages = vectors()
    exact = queries.astype(np.float64) @ passages.astype(np.float64).T
    best = -np.sort(-exact, axis=1)[:, :K]
    returned = np.take_along_axis(exact, rows.astype(np.int64), axis=1)
    return float(max(np.abs(scores - best).max(), np.abs(scores - returned).max()))


def torch_trial() -> dict[str, Any]:
    """Test PyTorch. Return its version, the maximum error of a search on each device, and the result of testing flash-attn."""
    import torch

    queries, passages = (torch.from_numpy(part) for part in vectors())
    gpus = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    devices = ["cpu", *gpus, *(["mps"] if torch.backends.mps.is_available() else [])]
    found = []
    for device in devices:
        result: dict[str, Any] = {"device": device}
        try:
            result |= _gpu(device) if device in gpus else {}
            top = (queries.to(device) @ passages.to(device).T).topk(K)
            result["difference"] = difference(top.values.cpu().numpy(), top.indices.cpu().numpy())
        except RuntimeError as error:
            result["error"] = _line(error)
        found.append(result)
    about = {"version": torch.__version__, "cuda": torch.version.cuda, "threads": torch.get_num_threads()}
    return {**about, "devices": found, "flash": _flash(gpus)}


def _gpu(device: str) -> dict[str, Any]:
    import torch

    free, total = torch.cuda.mem_get_info(device)
    major, minor = torch.cuda.get_device_capability(device)
    name = torch.cuda.get_device_name(device)
    return {"name": name, "capability": f"{major}.{minor}", "free": free, "total": total, "bf16": major >= 8}


def _flash(gpus: list[str]) -> dict[str, Any]:
    """Return the version of flash-attn. If there is a GPU, also return the maximum difference from PyTorch's attention."""
    try:
        import flash_attn  # type: ignore[import-not-found]
    except Exception as error:  # flash-attn built for another version of torch may raise any error
        return {} if isinstance(error, ModuleNotFoundError) else {"error": _line(error)}
    about: dict[str, Any] = {"version": flash_attn.__version__}
    if gpus:
        import torch

        inputs = torch.randn(3, 2, 32, 4, 64, generator=torch.Generator().manual_seed(0)).half().to(gpus[0])
        expected = torch.nn.functional.scaled_dot_product_attention(*inputs.transpose(2, 3)).transpose(1, 2)
        try:
            about["difference"] = float((flash_attn.flash_attn_func(*inputs) - expected).abs().max())
        except RuntimeError as error:
            about["error"] = _line(error)
    return about


def faiss_trial() -> dict[str, Any]:
    """Test faiss. Return its version, its build options, and the maximum error of a search on the CPU and on each GPU."""
    from contaccum.retrieval.faiss_library import describe_faiss, search_everywhere

    queries, passages = vectors()
    results = search_everywhere(queries, passages, K)
    differences = {place: found if isinstance(found, str) else difference(*found) for place, found in results.items()}
    return {**describe_faiss(), "search": differences}


def _openmp() -> list[str]:
    """Return the file names of the OpenMP libraries that this process has loaded. On systems other than Linux, return []."""
    maps = Path("/proc/self/maps")
    files = {Path(line).name for line in maps.read_text("utf-8").splitlines()} if maps.exists() else set()
    return sorted(name for name in files if name.startswith(("libgomp", "libiomp", "libomp")))


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


if __name__ == "__main__":
    trials = {"torch": torch_trial, "faiss": faiss_trial}
    results = {name: trials[name]() for name in sys.argv[1].split("_then_")}
    print(json.dumps({**(results.get("faiss") or results["torch"]), "openmp": _openmp()}))

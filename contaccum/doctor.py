"""`contaccum doctor`: check the installation and suggest fixes.

faiss is tried in a child process: if it was built for another CPU, or if it and torch load two
OpenMP runtimes, faiss ends its process instead of raising an error.
"""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import psutil
import requests
from packaging.requirements import Requirement

from contaccum.errors import (
    Failed,
    InputError,
    in_one_line,
    install_command,
    printable,
    without_logins,
)
from contaccum.runtime.files import cache_folder

ROWS, QUERIES, WIDTH, K = 1000, 16, 64, 10  # size of the test searches
TOLERANCE = (
    1e-3  # maximum error of a score; TF32 causes smaller errors, a wrong kernel larger errors
)
FLASH_TOLERANCE = 1e-2  # maximum error of a value that flash-attn computes in half precision
FAISS_SECONDS = 180
NETWORK_SECONDS = 3
LOW_MEMORY, LOW_DISK = 4 * 2**30, 5 * 2**30  # bytes
CONTROL_GROUP = Path("/sys/fs/cgroup")
NO_OPTIONS = ("cpu", "gpu", "dev", "docs")  # extras that no option of a command needs


@dataclass(frozen=True)
class Diagnosis:
    """Result of one check of the installation."""

    state: Literal["ok", "note", "broken"]
    """note: the installation works with a limitation. broken: a command fails or gives wrong
    results."""
    subject: str  # checked part of the installation
    found: str  # text for the user
    advice: str = ""  # how to fix the problem; empty if there is no advice

    def __str__(self) -> str:
        line = f"{self.state:6s}  {self.subject:16s}  {self.found}"
        return f"{line}\n{'':26s}-> {self.advice}" if self.advice else line


def doctor(say: Callable[[str], None]) -> None:
    """Run all checks. Call ``say`` with the version of contaccum, a verdict, and each result.

    Raises Failed at the end if a check failed.
    """
    diagnoses = list(diagnose())
    broken = [diagnosis.subject for diagnosis in diagnoses if diagnosis.state == "broken"]
    notes = [diagnosis.subject for diagnosis in diagnoses if diagnosis.state == "note"]
    if broken:
        verdict = f"{len(broken)} of {len(diagnoses)} checks failed: {', '.join(broken)}"
    elif notes:
        verdict = f"training and search work, with limits: {', '.join(notes)}"
    else:
        verdict = "training and search work"
    say(f"contaccum {_version('contaccum') or '(not installed)'}: {verdict}\n")
    for diagnosis in diagnoses:
        say(printable(without_logins(str(diagnosis))))
    if broken:
        raise Failed(verdict)


def diagnose() -> Iterator[Diagnosis]:
    """Run all checks one by one, and yield the result of each check."""
    yield Diagnosis(
        "ok", "python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    )
    requirements = (metadata.requires("contaccum") or []) if _version("contaccum") else []
    yield packages(requirements)
    yield extras(requirements)
    try:
        import torch
    except Exception as error:  # a broken build may raise any error
        advice = "reinstall torch: https://pytorch.org/get-started/locally/"
        yield Diagnosis("broken", "torch", in_one_line(error), advice)
    else:
        gpus = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
        yield torch_build(gpus)
        for device in ["cpu", *gpus, *(["mps"] if torch.backends.mps.is_available() else [])]:
            yield torch_search(device)
        yield flash_attention(gpus)
    yield from faiss()
    yield threads()
    yield memory()
    yield from disks()
    yield network()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def packages(requirements: list[str]) -> Diagnosis:
    """Check whether installed packages meet requirements such as torch>=2.6, without extras."""
    if not requirements:
        found = "contaccum is not installed, so its requirements are unknown"
        return Diagnosis("note", "packages", found, "pip install -e .")
    shown, wrong = [], []
    for need in map(Requirement, requirements):
        if need.marker and not need.marker.evaluate({"extra": ""}):
            continue
        version = _version(need.name)
        if version is None or not need.specifier.contains(version, prereleases=True):
            wrong.append(f"{need} ({version or 'not installed'})")
        elif need.name in ("torch", "transformers", "datasets", "tokenizers", "numpy"):
            shown.append(f"{need.name} {version}")
    if wrong:
        command = "pip install " + " ".join(f"'{entry.split(' (')[0]}'" for entry in wrong)
        return Diagnosis(
            "broken", "packages", f"missing or wrong version: {', '.join(wrong)}", command
        )
    return Diagnosis("ok", "packages", ", ".join(shown))


def extras(requirements: list[str]) -> Diagnosis:
    """Check whether the packages of each extra that an option needs are installed."""
    needed: dict[str, list[str]] = {}
    for need in map(Requirement, requirements):
        for extra in re.findall(r"""extra == ["']([\w-]+)""", str(need.marker or "")):
            if extra not in NO_OPTIONS:
                needed.setdefault(extra, []).append(need.name)
    missing = [extra for extra, names in needed.items() if not all(map(_version, names))]
    if missing:
        advice = (
            f"{install_command(','.join(missing))} if you need the options that require these "
            "extras"
        )
        return Diagnosis("note", "extras", f"not installed: {', '.join(missing)}", advice)
    return Diagnosis("ok", "extras", ", ".join(needed))


def torch_build(gpus: list[str]) -> Diagnosis:
    """Check whether torch finds the GPUs of this machine. gpus: devices that torch found."""
    import torch

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    version = f"{torch.__version__} ({build})"
    if gpus or not Path("/dev/nvidia0").exists():
        return Diagnosis("ok", "torch", f"{version}, {torch.get_num_threads()} threads on the CPU")
    found = f"{version} finds no GPU, but /dev/nvidia0 exists"
    if torch.version.cuda and os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return Diagnosis("note", "torch", found, "unset CUDA_VISIBLE_DEVICES, which hides all GPUs")
    advice = (
        "install torch for the CUDA version that nvidia-smi shows: "
        "https://pytorch.org/get-started/locally/"
    )
    return Diagnosis("broken", "torch", found, advice)


def torch_search(device: str) -> Diagnosis:
    """Describe a device, and check that vector search with torch is correct on this device."""
    import torch

    name = device
    try:
        if device.startswith("cuda"):
            free, total = torch.cuda.mem_get_info(device)
            major, minor = torch.cuda.get_device_capability(device)
            bf16 = "bf16" if major >= 8 else "no bf16 (set run.precision to fp16)"
            name += (
                f", {torch.cuda.get_device_name(device)}, compute capability {major}.{minor}, "
                f"{bf16}"
            )
            name += f", {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
        queries, passages = (torch.from_numpy(vectors).to(device) for vectors in sample_vectors())
        top = (queries @ passages.T).topk(K)
        error = error_of_scores(top.values.cpu().numpy(), top.indices.cpu().numpy())
    except RuntimeError as failure:
        advice = "install a torch built for this device"
        return Diagnosis("broken", "device", f"{name}: {in_one_line(failure)}", advice)
    advice = "results on this device are wrong; try another version of torch or of the driver"
    return search_result("device", name, error, advice)


def search_result(subject: str, where: str, error: float, advice: str) -> Diagnosis:
    """Return the diagnosis of a test search. error: maximum error of its scores."""
    found = f"{where}, maximum error of scores {error:.0e}"
    if error <= TOLERANCE:  # false if the error is NaN
        return Diagnosis("ok", subject, found)
    return Diagnosis("broken", subject, f"{found}; expected at most {TOLERANCE:.0e}", advice)


def sample_vectors() -> tuple[Any, Any]:
    """Return query vectors (16, 64) and passage vectors (1000, 64), float32, of length 1.

    They are the same in every call.
    """
    import numpy as np

    drawn = np.random.default_rng(0).standard_normal((QUERIES + ROWS, WIDTH))
    unit = (drawn / np.linalg.norm(drawn, axis=1, keepdims=True)).astype(np.float32)
    return unit[:QUERIES], unit[QUERIES:]


def error_of_scores(scores: Any, rows: Any) -> float:
    """Return the maximum error of a search with ``sample_vectors``, compared with float64.

    scores, rows: scores and row numbers of the K passages found for each query, (16, K).
    """
    import numpy as np

    queries, passages = sample_vectors()
    exact = queries.astype(np.float64) @ passages.astype(np.float64).T  # (16, 1000)
    best = -np.sort(-exact, axis=1)[:, :K]
    returned = np.take_along_axis(exact, rows.astype(np.int64), axis=1)
    return float(max(np.abs(scores - best).max(), np.abs(scores - returned).max()))


def flash_attention(gpus: list[str]) -> Diagnosis:
    """Check whether `model.attention flash_attention_2` works, on the first GPU."""
    subject, advice = "flash-attention", "leave model.attention at auto"
    if find_spec("flash_attn") is None:
        return Diagnosis("ok", subject, "not installed; `model.attention auto` does not need it")
    try:
        import flash_attn  # type: ignore[import-not-found]
    except Exception as failure:  # built for another version of torch, it may raise any error
        return Diagnosis(
            "note", subject, in_one_line(failure), f"install flash-attn for this torch, or {advice}"
        )
    if not gpus:
        return Diagnosis(
            "note", subject, f"{flash_attn.__version__}, cannot run without a GPU", advice
        )
    import torch

    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(3, 2, 32, 4, 64, generator=generator).half().to(gpus[0])
    q, k, v = inputs.transpose(2, 3)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
    try:
        difference = float((flash_attn.flash_attn_func(*inputs) - expected).abs().max())
    except RuntimeError as failure:
        return Diagnosis(
            "note", subject, in_one_line(failure), f"install flash-attn for this GPU, or {advice}"
        )
    found = (
        f"{flash_attn.__version__}, maximum difference from PyTorch's attention {difference:.0e}"
    )
    if difference <= FLASH_TOLERANCE:
        return Diagnosis("ok", subject, found)
    return Diagnosis("note", subject, f"{found}; expected at most {FLASH_TOLERANCE:.0e}", advice)


def faiss() -> Iterator[Diagnosis]:
    """Check searches with faiss on the CPU and each GPU, in a child that imports torch first."""
    if find_spec("faiss") is None:
        advice = (
            f"{install_command('cpu')}, or, for a GPU, pip install faiss-gpu-cu12; exact search "
            "also works without faiss"
        )
        yield Diagnosis(
            "note",
            "faiss",
            "not installed; exact search uses torch, and --factory does not work",
            advice,
        )
        return
    command = [sys.executable, "-W", "ignore", "-m", "contaccum.doctor"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=FAISS_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        yield Diagnosis(
            "broken", "faiss", f"no answer in {FAISS_SECONDS} s", "search with --backend torch"
        )
        return
    if done.returncode:
        reason = f"exit code {done.returncode}"
        if done.returncode < 0:
            reason = f"crashed with signal {-done.returncode}"
        lines = done.stderr.split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "no message")
        advice = (
            "install torch and faiss both with pip or both with conda, so that they use the "
            "same OpenMP runtime"
        )
        yield Diagnosis("broken", "faiss", f"{reason}: {last[:300]}", advice)
        return
    about = json.loads(done.stdout.splitlines()[-1])  # a library may print lines before
    build = f"{about['version']}, {' '.join(about['options'])}, {about['gpus']} GPUs"
    for place, result in about["errors"].items():
        if isinstance(result, str):
            advice = (
                "this build does not support the GPU: install faiss-gpu-cu12, or search with "
                "--backend torch"
            )
            yield Diagnosis("broken", f"faiss {place}", f"{build}: {result}", advice)
        else:
            advice = "install another build, or search with --backend torch"
            yield search_result(f"faiss {place}", f"{build}: {ROWS:,} vectors", result, advice)


def try_faiss() -> dict[str, Any]:
    """Search with faiss, after importing torch.

    This function runs in the child process of ``faiss``.

    Returns version, build options and number of GPUs, and in ``errors`` the maximum error of the
    scores for the CPU and each GPU, or the error message of a GPU that failed.
    """
    import torch  # noqa: F401  # commands import torch before faiss, too

    from contaccum.retrieval.faiss_library import describe_faiss, search_everywhere

    queries, passages = sample_vectors()
    errors = {
        place: found if isinstance(found, str) else error_of_scores(*found)
        for place, found in search_everywhere(queries, passages, K).items()
    }
    return {**describe_faiss(), "errors": errors}


def threads() -> Diagnosis:
    """Report the number of cores and OMP_NUM_THREADS. Warn if KMP_DUPLICATE_LIB_OK is set."""
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):  # the cores that this process may use
        cores = len(os.sched_getaffinity(0))
    text = f"{cores} cores, OMP_NUM_THREADS {os.environ.get('OMP_NUM_THREADS', 'not set')}"
    if "KMP_DUPLICATE_LIB_OK" not in os.environ:
        return Diagnosis("ok", "threads", text)
    advice = (
        "unset this variable: with it, two OpenMP runtimes in one process can silently give "
        "wrong results"
    )
    return Diagnosis("note", "threads", f"{text}, KMP_DUPLICATE_LIB_OK is set", advice)


def memory() -> Diagnosis:
    """Report the free memory of the machine, or of the control group (container) if less.

    Cached content of files counts as free, because Linux drops it if a process needs the memory.
    """
    machine = psutil.virtual_memory()
    free, total, where = machine.available, machine.total, "machine"
    # errors if the machine has no control groups (version 2), or no memory limit
    with suppress(OSError, ValueError):
        limit = int((CONTROL_GROUP / "memory.max").read_text())
        used = int((CONTROL_GROUP / "memory.current").read_text())
        content = (CONTROL_GROUP / "memory.stat").read_text()
        cached = sum(map(int, re.findall(r"^(?:in)?active_file (\d+)$", content, re.MULTILINE)))
        if limit - used + cached < free:
            free, total, where = max(0, limit - used + cached), limit, "control group"
    text = f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free ({where})"
    advice = (
        "`contaccum plan` estimates what fits; a smaller batch.micro_batch_size needs less memory"
    )
    if free < LOW_MEMORY:
        return Diagnosis("note", "memory", text, advice)
    return Diagnosis("ok", "memory", text)


def disks() -> Iterator[Diagnosis]:
    """Check the folders that commands write to: current folder, caches and temporary folder."""
    yield _disk("this folder", Path.cwd(), "change to another folder, or give --output_dir")
    try:
        yield _disk("cache", cache_folder(), "set CONTACCUM_CACHE to a folder on another disk")
    except InputError as error:
        yield Diagnosis("broken", "cache", str(error))
    with suppress(ImportError):  # packages() reports a missing package
        from huggingface_hub import constants

        yield _disk(
            "hub cache", Path(constants.HF_HUB_CACHE), "set HF_HOME to a folder on another disk"
        )
    yield _disk("temporary", Path(tempfile.gettempdir()), "set TMPDIR to a folder on another disk")


def _disk(name: str, folder: Path, advice: str) -> Diagnosis:
    """Check whether a folder is writable and has free space.

    If the folder is missing, check its nearest existing parent.
    """
    existing = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    try:
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        return Diagnosis("broken", name, f"{folder} cannot be written ({error.strerror})", advice)
    free = shutil.disk_usage(existing).free
    text = f"{folder}, {free / 2**30:.1f} GiB free"
    return Diagnosis("note", name, text, advice) if free < LOW_DISK else Diagnosis("ok", name, text)


def network() -> Diagnosis:
    """Check whether the Hub answers.

    If not, return only a note, because local data and models work without the Hub.
    """
    try:
        from huggingface_hub import constants
    except ImportError as error:
        return Diagnosis("note", "network", f"not checked: {error}")
    endpoint = constants.ENDPOINT
    advice = "use local folders instead of Hub names, and set HF_HUB_OFFLINE=1 to avoid waiting"
    if constants.is_offline_mode():
        found = (
            "HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set; encoders and data sets are read "
            "from the cache only"
        )
        return Diagnosis("note", "network", found)
    try:
        status = requests.head(endpoint, timeout=NETWORK_SECONDS, allow_redirects=False).status_code
    except requests.RequestException as error:
        return Diagnosis(
            "note", "network", f"{endpoint} does not answer ({type(error).__name__})", advice
        )
    refused = Diagnosis("note", "network", f"{endpoint} answers {status}", advice)
    return refused if status >= 400 else Diagnosis("ok", "network", f"{endpoint} answers")


if __name__ == "__main__":
    print(json.dumps(try_faiss()))

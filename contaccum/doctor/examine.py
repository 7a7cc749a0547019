"""The doctor's findings: versions, devices, faiss, import order, memory, disk, caches, network. Imports no torch.

Trials run in processes of their own (``trials``), so what crashes there is a finding here.
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
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import psutil
import requests
from packaging.requirements import Requirement

from contaccum.errors import Failed
from contaccum.files import cache_folder

TOLERANCE = 1e-3
"""Largest error of a score between unit vectors; TF32 stays below it, a wrong kernel does not."""
FLASH_TOLERANCE = 1e-2
"""The same for attention in half precision."""
TRIAL_SECONDS = 180
NETWORK_SECONDS = 3
LITTLE_MEMORY, LITTLE_DISK = 4 * 2**30, 5 * 2**30
NO_OPTIONS = ("cpu", "gpu", "dev", "docs")
"""Extras that no option of a verb needs; faiss has findings of its own."""


@dataclass(frozen=True)
class Finding:
    """One thing looked at."""

    state: Literal["ok", "note", "broken"]
    """`broken`: something that a verb needs does not work. `note`: it works, and there is something to know."""
    subject: str
    found: str
    advice: str = ""
    """What to do; empty where nothing is."""


def doctor(say: Callable[[str], None]) -> None:
    """Say every finding, and below it what to do; Failed at the end where something is broken."""
    findings = []
    for finding in examine():
        say(render(finding))
        findings.append(finding)
    broken = [finding.subject for finding in findings if finding.state == "broken"]
    if broken:
        raise Failed(f"{len(broken)} of {len(findings)} findings are broken: {', '.join(broken)}")


def examine() -> Iterator[Finding]:
    """Every finding, in the order in which they are shown."""
    yield Finding("ok", "python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    yield packages(_requirements())
    yield extras(_requirements())
    found = run_trials(("torch", "torch_then_faiss", "faiss_then_torch"))
    yield from devices(found["torch"])
    yield flash_attention(found["torch"])
    yield from faiss(found["torch_then_faiss"], found["faiss_then_torch"])
    yield threads()
    yield memory()
    yield from disks()
    yield network()


def run_trials(names: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """What each trial printed; {"error": …} where it crashed, hung, or printed something else. They run side by side."""
    call = [sys.executable, "-W", "ignore", "-m", "contaccum.doctor.trials"]
    started = {
        name: subprocess.Popen([*call, name], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for name in names
    }
    return {name: _result(process) for name, process in started.items()}


def _result(process: "subprocess.Popen[str]") -> dict[str, Any]:
    try:
        out, err = process.communicate(timeout=TRIAL_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return {"error": f"no answer in {TRIAL_SECONDS} s"}
    if process.returncode == 0:
        return dict(json.loads(out.splitlines()[-1]))
    said = [line.strip() for line in err.splitlines() if line.strip()]
    how = f"signal {-process.returncode}" if process.returncode < 0 else f"exit code {process.returncode}"
    return {"error": f"{how}: {said[-1][:300] if said else 'nothing was said'}"}


def _requirements() -> list[str]:
    """What contaccum's own metadata asks for; nothing where it runs from a folder without being installed."""
    try:
        return metadata.requires("contaccum") or []
    except metadata.PackageNotFoundError:
        return []


def packages(requirements: list[str]) -> Finding:
    """The installed versions against requirements such as torch>=2.6; those of extras are left out."""
    if not requirements:
        return Finding(
            "note", "packages", "contaccum is not installed, its requirements are not known", "pip install -e ."
        )
    shown, wrong = [], []
    for need in map(Requirement, requirements):
        if need.marker and not need.marker.evaluate({"extra": ""}):
            continue
        try:
            version = metadata.version(need.name)
        except metadata.PackageNotFoundError:
            version = "missing"
        if version == "missing" or not need.specifier.contains(version, prereleases=True):
            wrong.append(f"{need} (found {version})")
        elif need.name in ("torch", "transformers", "accelerate", "datasets", "tokenizers", "numpy"):
            shown.append(f"{need.name} {version}")
    if wrong:
        command = "pip install " + " ".join(f"'{entry.split(' (')[0]}'" for entry in wrong)
        return Finding("broken", "packages", f"expected {', '.join(wrong)}", command)
    return Finding("ok", "packages", ", ".join(shown))


def extras(requirements: list[str]) -> Finding:
    """Packages that only some options need, by the extra that brings them; requirements as the installed metadata has them."""
    packages: dict[str, list[str]] = {}
    for need in map(Requirement, requirements):
        for extra in re.findall(r"""extra == ["']([\w-]+)""", str(need.marker or "")):
            packages.setdefault(extra, []).append(need.name)
    options = {extra: names for extra, names in packages.items() if extra not in NO_OPTIONS}
    missing = [extra for extra, names in options.items() if not all(map(_installed, names))]
    if missing:
        advice = f"pip install 'contaccum[{','.join(missing)}]' where their options are wanted"
        return Finding("note", "extras", f"not installed: {', '.join(missing)}", advice)
    return Finding("ok", "extras", ", ".join(options))


def _installed(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True


def devices(found: dict[str, Any]) -> Iterator[Finding]:
    """PyTorch's devices, each by the error of its own search; a GPU that PyTorch cannot use."""
    if "error" in found:
        yield Finding("broken", "torch", found["error"], "install torch anew: https://pytorch.org/get-started/locally/")
        return
    build = f"CUDA {found['cuda']}" if found["cuda"] else "no CUDA"
    seen = [about["device"] for about in found["devices"]]
    if seen == ["cpu"] and Path("/dev/nvidia0").exists():
        advice = "install torch for this driver's CUDA (nvidia-smi names it): https://pytorch.org/get-started/locally/"
        yield Finding("broken", "torch", f"{found['version']} ({build}) sees no GPU, /dev/nvidia0 exists", advice)
    else:
        yield Finding("ok", "torch", f"{found['version']} ({build}), {found['threads']} threads on a CPU")
    for about in found["devices"]:
        yield _device(about)


def _device(about: dict[str, Any]) -> Finding:
    name = about["device"] + (f", {about['name']}" if "name" in about else "")
    if "total" in about:
        bf16 = "bf16" if about["bf16"] else "no bf16 (run.precision fp16)"
        free = f"{about['free'] / 2**30:.1f} of {about['total'] / 2**30:.1f} GiB free"
        name += f", compute capability {about['capability']}, {bf16}, {free}"
    subject = "device"
    if "error" in about:
        return Finding("broken", subject, f"{name}: {about['error']}", "install a torch built for this device")
    if about["difference"] > TOLERANCE:
        found = f"{name}: scores are off by {about['difference']:.1e}, expected {TOLERANCE:.0e} at most"
        return Finding(
            "broken", subject, found, "try another version of torch or driver; results here cannot be trusted"
        )
    return Finding("ok", subject, f"{name}, scores within {about['difference']:.0e}")


def flash_attention(found: dict[str, Any]) -> Finding:
    """Whether `model.attention flash_attention_2` would work."""
    subject, about = "flash-attention", found.get("flash", {})
    if not about:
        return Finding("ok", subject, "not installed; `model.attention auto` does not need it")
    if "error" in about:
        advice = "install flash-attn for this torch, or leave model.attention at auto"
        return Finding("note", subject, about["error"], advice)
    if "difference" not in about:
        return Finding("note", subject, f"{about['version']} without a GPU", "leave model.attention at auto")
    if about["difference"] > FLASH_TOLERANCE:
        found_text = f"{about['version']} is off by {about['difference']:.1e}, expected {FLASH_TOLERANCE:.0e} at most"
        return Finding("note", subject, found_text, "leave model.attention at auto")
    return Finding("ok", subject, f"{about['version']}, within {about['difference']:.0e} of PyTorch's attention")


def faiss(torch_first: dict[str, Any], faiss_first: dict[str, Any]) -> Iterator[Finding]:
    """faiss's build, its searches, and both orders of import."""
    if find_spec("faiss") is None:
        advice = "pip install 'contaccum[cpu]', or on a GPU faiss-gpu-cu12; exact search works without it"
        yield Finding("note", "faiss", "not installed: exact search runs on torch, --factory does not work", advice)
        return
    about = torch_first if "error" not in torch_first else faiss_first
    if "error" not in about:
        build = f"{about['version']}, {' '.join(about['options'])}, {about['gpus']} GPUs"
        for place, result in about["search"].items():
            yield _search_of(build, place, result)
    wrong = {
        order: found["error"]
        for order, found in (("torch, then faiss", torch_first), ("faiss, then torch", faiss_first))
        if "error" in found
    }
    runtimes = ", ".join(sorted({name for found in (torch_first, faiss_first) for name in found.get("openmp", [])}))
    if wrong:
        said = "; ".join(f"{order}: {error}" for order, error in wrong.items())
        advice = "install both from one source (pip or conda, not mixed), so that their OpenMP runtimes agree"
        yield Finding("broken", "import order", f"{said}; OpenMP: {runtimes or 'unknown'}", advice)
    else:
        yield Finding("ok", "import order", f"torch and faiss work in either order; OpenMP: {runtimes or 'unknown'}")


def _search_of(build: str, place: str, result: float | str) -> Finding:
    subject = f"faiss {place}"
    if isinstance(result, str):
        advice = "its kernels do not fit this GPU: install faiss-gpu-cu12, or search with --backend torch"
        return Finding("broken", subject, f"{build}: {result}", advice)
    if result > TOLERANCE:
        found = f"{build}: 1,000 vectors, scores are off by {result:.1e}, expected {TOLERANCE:.0e} at most"
        return Finding("broken", subject, found, "install another build, or search with --backend torch")
    return Finding("ok", subject, f"{build}: 1,000 vectors searched, scores within {result:.0e}")


def threads() -> Finding:
    """What the environment says of threads, and the switch that hides a clash of OpenMP runtimes."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    text = f"{cores} cores, OMP_NUM_THREADS {os.environ.get('OMP_NUM_THREADS', 'not set')}"
    if "KMP_DUPLICATE_LIB_OK" in os.environ:
        advice = "unset it: with two OpenMP runtimes in a process results can be silently wrong"
        return Finding("note", "threads", f"{text}, KMP_DUPLICATE_LIB_OK is set", advice)
    return Finding("ok", "threads", text)


def memory() -> Finding:
    """Free memory, by the smaller of the machine's and the control group's."""
    machine = psutil.virtual_memory()
    free, total, where = machine.available, machine.total, "machine"
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        left = limit - int(Path("/sys/fs/cgroup/memory.current").read_text())
        if left < free:
            free, total, where = max(0, left), limit, "control group"
    except (OSError, ValueError):  # no version 2 groups, or "max"
        pass
    text = f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free ({where})"
    if free < LITTLE_MEMORY:
        advice = "`contaccum plan` says what fits; a smaller batch.micro_batch_size takes less"
        return Finding("note", "memory", text, advice)
    return Finding("ok", "memory", text)


def disks() -> Iterator[Finding]:
    """The folders that are written to: this one, the cache, the Hub's cache and the temporary one."""
    hub = (
        os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME") or Path.home() / ".cache/huggingface") / "hub"
    )
    places = {
        "this folder": (Path.cwd(), "change to another folder, or give --output_dir"),
        "cache": (cache_folder(), "set CONTACCUM_CACHE to a folder on another disk"),
        "hub cache": (Path(hub), "set HF_HOME to a folder on another disk"),
        "temporary": (Path(tempfile.gettempdir()), "set TMPDIR to a folder on another disk"),
    }
    for name, (folder, advice) in places.items():
        yield _disk(name, folder, advice)


def _disk(name: str, folder: Path, advice: str) -> Finding:
    """Room, and whether a file can be made in the folder or, where it is not there yet, in the one that it would be made in."""
    standing = next(place for place in (folder, *folder.parents) if place.exists())
    try:
        with tempfile.TemporaryFile(dir=standing):
            pass
    except OSError as error:
        return Finding("broken", name, f"{folder} cannot be written ({error.strerror})", advice)
    free = shutil.disk_usage(standing).free
    text = f"{folder}, {free / 2**30:.1f} GiB free"
    return Finding("note", name, text, advice) if free < LITTLE_DISK else Finding("ok", name, text)


def network() -> Finding:
    """Whether the Hub answers; never broken by itself, since all works on folders and files."""
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    advice = "give folders instead of names, and set HF_HUB_OFFLINE=1 so that nothing waits for an answer"
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "ON", "YES"):
        return Finding("note", "network", "HF_HUB_OFFLINE is set: encoders and sets come from the cache alone")
    try:
        answer = requests.head(endpoint, timeout=NETWORK_SECONDS, allow_redirects=False)
    except requests.RequestException as error:
        return Finding("note", "network", f"{endpoint} does not answer ({type(error).__name__})", advice)
    if answer.status_code >= 400:
        return Finding("note", "network", f"{endpoint} answers {answer.status_code}", advice)
    return Finding("ok", "network", f"{endpoint} answers")


def render(finding: Finding) -> str:
    line = f"{finding.state:6s}  {finding.subject:16s}  {finding.found}"
    return f"{line}\n{'':26s}-> {finding.advice}" if finding.advice else line

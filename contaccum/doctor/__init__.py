"""`contaccum doctor`: check the installation and suggest fixes.

torch, faiss and flash-attn are imported only in separate processes (trials.py). If a library crashes there, the doctor reports
the crash and continues.
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
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import psutil
import requests
from packaging.requirements import Requirement

from contaccum.errors import Failed, InputError, printable, without_logins
from contaccum.runtime.files import cache_folder

TOLERANCE = 1e-3  # maximum error of a search score; TF32 causes smaller errors, a wrong kernel larger errors
FLASH_TOLERANCE = 1e-2  # maximum error of a value that flash-attn computes in half precision
TRIAL_SECONDS, NETWORK_SECONDS = 180, 3
LOW_MEMORY, LOW_DISK = 4 * 2**30, 5 * 2**30
CONTROL_GROUP = Path("/sys/fs/cgroup")
NO_OPTIONS = ("cpu", "gpu", "dev", "docs")  # extras that no option of a command needs


@dataclass(frozen=True)
class Diagnosis:
    """Result of one check of the installation."""

    state: Literal["ok", "note", "broken"]  # note: the installation works with a limitation; broken: a command fails
    subject: str  # checked part of the installation
    found: str  # text for the user
    advice: str = ""  # how to fix the problem; empty if there is no advice


def doctor(say: Callable[[str], None]) -> None:
    """Run all checks, and call ``say`` with the text of each result. Raise Failed at the end if a check failed."""
    diagnoses = []
    for diagnosis in diagnose():
        say(printable(without_logins(render(diagnosis))))
        diagnoses.append(diagnosis)
    broken = [diagnosis.subject for diagnosis in diagnoses if diagnosis.state == "broken"]
    if broken:
        raise Failed(f"{len(broken)} of {len(diagnoses)} checks failed: {', '.join(broken)}")


def diagnose() -> Iterator[Diagnosis]:
    """Run all checks one by one, and yield the result of each check."""
    yield Diagnosis("ok", "python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    requirements = (metadata.requires("contaccum") or []) if _version("contaccum") else []
    yield packages(requirements)
    yield extras(requirements)
    found = run_trials(("torch", "torch_then_faiss", "faiss_then_torch"))
    yield from devices(found["torch"])
    yield flash_attention(found["torch"])
    yield from faiss(found["torch_then_faiss"], found["faiss_then_torch"])
    yield threads()
    yield memory()
    yield from disks()
    yield network()


def run_trials(names: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Run the tests ``names`` of trials.py in parallel processes. Return name -> result ({"error": reason} for a failed test)."""
    call = [sys.executable, "-W", "ignore", "-m", "contaccum.doctor.trials"]
    with ThreadPoolExecutor() as pool:
        return dict(zip(names, pool.map(lambda name: _result([*call, name]), names), strict=True))


def _result(call: list[str]) -> dict[str, Any]:
    try:
        done = subprocess.run(call, capture_output=True, text=True, timeout=TRIAL_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"no answer in {TRIAL_SECONDS} s"}
    if done.returncode == 0:
        try:
            return dict(json.loads(done.stdout.splitlines()[-1]))
        except (IndexError, TypeError, ValueError):  # a library ended the process, or printed a line after the result
            return {"error": "exit code 0: no result on stdout"}
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    how = f"signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
    return {"error": f"{how}: {lines[-1][:300] if lines else 'no output'}"}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def packages(requirements: list[str]) -> Diagnosis:
    """Check whether the installed packages meet requirements such as torch>=2.6. Requirements of extras are not checked."""
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
        elif need.name in ("torch", "transformers", "accelerate", "datasets", "tokenizers", "numpy"):
            shown.append(f"{need.name} {version}")
    if wrong:
        command = "pip install " + " ".join(f"'{entry.split(' (')[0]}'" for entry in wrong)
        return Diagnosis("broken", "packages", f"missing or wrong version: {', '.join(wrong)}", command)
    return Diagnosis("ok", "packages", ", ".join(shown))


def extras(requirements: list[str]) -> Diagnosis:
    """Check whether the packages of each extra are installed. Extras in NO_OPTIONS are not checked: no option needs them."""
    needed: dict[str, list[str]] = {}
    for need in map(Requirement, requirements):
        for extra in re.findall(r"""extra == ["']([\w-]+)""", str(need.marker or "")):
            if extra not in NO_OPTIONS:
                needed.setdefault(extra, []).append(need.name)
    missing = [extra for extra, names in needed.items() if not all(map(_version, names))]
    if missing:
        advice = f"pip install 'contaccum[{','.join(missing)}]' if you need the options that require these extras"
        return Diagnosis("note", "extras", f"not installed: {', '.join(missing)}", advice)
    return Diagnosis("ok", "extras", ", ".join(needed))


def devices(found: dict[str, Any]) -> Iterator[Diagnosis]:
    """Check that PyTorch finds the GPUs and that vector search is correct on each device. found: result of trials.torch_trial."""
    if "error" in found:
        yield Diagnosis("broken", "torch", found["error"], "reinstall torch: https://pytorch.org/get-started/locally/")
        return
    build = f"CUDA {found['cuda']}" if found["cuda"] else "no CUDA"
    seen = [about["device"] for about in found["devices"]]
    if seen == ["cpu"] and Path("/dev/nvidia0").exists():
        text = f"{found['version']} ({build}) finds no GPU, but /dev/nvidia0 exists"
        advice = "install torch for the CUDA version that nvidia-smi shows: https://pytorch.org/get-started/locally/"
        if found["cuda"] and os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
            yield Diagnosis("note", "torch", text, "unset CUDA_VISIBLE_DEVICES, which hides all GPUs")
        else:
            yield Diagnosis("broken", "torch", text, advice)
    else:
        yield Diagnosis("ok", "torch", f"{found['version']} ({build}), {found['threads']} threads on the CPU")
    for about in found["devices"]:
        yield _device(about)


def _device(about: dict[str, Any]) -> Diagnosis:
    name = about["device"]
    if "total" in about:
        bf16 = "bf16" if about["bf16"] else "no bf16 (set run.precision to fp16)"
        free = f"{about['free'] / 2**30:.1f} of {about['total'] / 2**30:.1f} GiB free"
        name += f", {about['name']}, compute capability {about['capability']}, {bf16}, {free}"
    if "error" in about:
        return Diagnosis("broken", "device", f"{name}: {about['error']}", "install a torch built for this device")
    advice = "results on this device are wrong; try another version of torch or of the driver"
    return _search("device", name, about["difference"], advice)


def _search(subject: str, where: str, error: float, advice: str) -> Diagnosis:
    text = f"{where}, maximum error of scores {error:.0e}"
    if error <= TOLERANCE:  # false if the error is NaN
        return Diagnosis("ok", subject, text)
    return Diagnosis("broken", subject, f"{text}; expected at most {TOLERANCE:.0e}", advice)


def flash_attention(found: dict[str, Any]) -> Diagnosis:
    """Check whether `model.attention flash_attention_2` works. found: result of trials.torch_trial."""
    subject, about, advice = "flash-attention", found.get("flash", {}), "leave model.attention at auto"
    if not about:
        return Diagnosis("ok", subject, "not installed; `model.attention auto` does not need it")
    if "error" in about:
        return Diagnosis("note", subject, about["error"], f"install flash-attn for this torch, or {advice}")
    if "difference" not in about:
        return Diagnosis("note", subject, f"{about['version']}, cannot run without a GPU", advice)
    text = f"{about['version']}, maximum difference from PyTorch's attention {about['difference']:.0e}"
    if about["difference"] <= FLASH_TOLERANCE:
        return Diagnosis("ok", subject, text)
    return Diagnosis("note", subject, f"{text}; expected at most {FLASH_TOLERANCE:.0e}", advice)


def faiss(torch_first: dict[str, Any], faiss_first: dict[str, Any]) -> Iterator[Diagnosis]:
    """Check searches with faiss, and both orders of importing torch and faiss.

    torch_first: result of the process that imported torch before faiss. faiss_first: result with the opposite order.
    """
    if find_spec("faiss") is None:
        advice = "pip install 'contaccum[cpu]', or, for a GPU, pip install faiss-gpu-cu12; exact search also works without faiss"
        yield Diagnosis("note", "faiss", "not installed; exact search uses torch, and --factory does not work", advice)
        return
    about = torch_first if "error" not in torch_first else faiss_first
    if "error" not in about:
        build = f"{about['version']}, {' '.join(about['options'])}, {about['gpus']} GPUs"
        for place, result in about["search"].items():
            if isinstance(result, str):
                advice = "this build does not support the GPU: install faiss-gpu-cu12, or search with --backend torch"
                yield Diagnosis("broken", f"faiss {place}", f"{build}: {result}", advice)
            else:
                advice = "install another build, or search with --backend torch"
                yield _search(f"faiss {place}", f"{build}: 1,000 vectors", result, advice)
    orders = {"torch, then faiss": torch_first, "faiss, then torch": faiss_first}
    wrong = [f"{order}: {found['error']}" for order, found in orders.items() if "error" in found]
    runtimes = sorted({name for found in orders.values() for name in found.get("openmp", [])}) or ["unknown"]
    openmp = f"OpenMP: {', '.join(runtimes)}"
    if wrong:
        advice = "install torch and faiss both with pip or both with conda, so that they use the same OpenMP runtime"
        yield Diagnosis("broken", "import order", f"{'; '.join(wrong)}; {openmp}", advice)
    else:
        yield Diagnosis("ok", "import order", f"torch and faiss can be imported in any order; {openmp}")


def threads() -> Diagnosis:
    """Report the number of cores and OMP_NUM_THREADS. Warn if KMP_DUPLICATE_LIB_OK is set: results can then be wrong."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    text = f"{cores} cores, OMP_NUM_THREADS {os.environ.get('OMP_NUM_THREADS', 'not set')}"
    if "KMP_DUPLICATE_LIB_OK" not in os.environ:
        return Diagnosis("ok", "threads", text)
    advice = "unset this variable: with it, two OpenMP runtimes in one process can silently give wrong results"
    return Diagnosis("note", "threads", f"{text}, KMP_DUPLICATE_LIB_OK is set", advice)


def memory() -> Diagnosis:
    """Report the free memory of the machine, or of the control group (container) if the group has less.

    Cached content of files counts as free, because Linux drops it if a process needs the memory.
    """
    machine = psutil.virtual_memory()
    sizes = [(machine.available, machine.total, "machine")]
    with suppress(OSError, ValueError):  # errors if the machine has no control groups (version 2), or no memory limit
        limit, used, stat = ((CONTROL_GROUP / f"memory.{name}").read_text() for name in ("max", "current", "stat"))
        cached = sum(map(int, re.findall(r"^(?:in)?active_file (\d+)$", stat, re.MULTILINE)))
        sizes.append((max(0, int(limit) - int(used) + cached), int(limit), "control group"))
    free, total, where = min(sizes)
    text = f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free ({where})"
    advice = "`contaccum plan` estimates what fits; a smaller batch.micro_batch_size needs less memory"
    return Diagnosis("note", "memory", text, advice) if free < LOW_MEMORY else Diagnosis("ok", "memory", text)


def disks() -> Iterator[Diagnosis]:
    """Check the folders that commands write to: the current folder, the cache, the Hub cache and the temporary folder."""
    yield _disk("this folder", Path.cwd(), "change to another folder, or give --output_dir")
    try:
        yield _disk("cache", cache_folder(), "set CONTACCUM_CACHE to a folder on another disk")
    except InputError as error:
        yield Diagnosis("broken", "cache", str(error))
    with suppress(ImportError):  # packages() reports a missing package
        from huggingface_hub import constants

        yield _disk("hub cache", Path(constants.HF_HUB_CACHE), "set HF_HOME to a folder on another disk")
    yield _disk("temporary", Path(tempfile.gettempdir()), "set TMPDIR to a folder on another disk")


def _disk(name: str, folder: Path, advice: str) -> Diagnosis:
    """Check whether a folder is writable and has free space. If the folder is missing, check its nearest existing parent."""
    existing = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    try:
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        return Diagnosis("broken", name, f"{folder} cannot be written ({error.strerror})", advice)
    free = shutil.disk_usage(existing).free
    text = f"{folder}, {free / 2**30:.1f} GiB free"
    return Diagnosis("note", name, text, advice) if free < LOW_DISK else Diagnosis("ok", name, text)


def network() -> Diagnosis:
    """Check whether the Hub answers. If not, return only a note, because local data and models work without the Hub."""
    try:
        from huggingface_hub import constants
    except ImportError as error:
        return Diagnosis("note", "network", f"not checked: {error}")
    endpoint = constants.ENDPOINT
    advice = "use local folders instead of Hub names, and set HF_HUB_OFFLINE=1 to avoid waiting"
    if constants.is_offline_mode():
        found = "HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set; encoders and data sets are read from the cache only"
        return Diagnosis("note", "network", found)
    try:
        status = requests.head(endpoint, timeout=NETWORK_SECONDS, allow_redirects=False).status_code
    except requests.RequestException as error:
        return Diagnosis("note", "network", f"{endpoint} does not answer ({type(error).__name__})", advice)
    refused = Diagnosis("note", "network", f"{endpoint} answers {status}", advice)
    return refused if status >= 400 else Diagnosis("ok", "network", f"{endpoint} answers")


def render(diagnosis: Diagnosis) -> str:
    """Return the text of a diagnosis: one line, and a second line if there is advice."""
    line = f"{diagnosis.state:6s}  {diagnosis.subject:16s}  {diagnosis.found}"
    return f"{line}\n{'':26s}-> {diagnosis.advice}" if diagnosis.advice else line

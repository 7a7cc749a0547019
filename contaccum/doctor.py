"""`contaccum doctor`: check the installation and suggest fixes.

faiss is tried in a child process: if it was built for another CPU, or if it and torch load two
OpenMP runtimes, faiss ends its process instead of raising an error.
"""

import os
import platform
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
from typing import Literal

from contaccum.errors import Failed, in_one_line, install_command, printable, without_logins
from contaccum.runtime.files import cache_folder

PACKAGES = ("torch", "transformers", "datasets", "tokenizers", "numpy")
TOLERANCE = 1e-3  # maximum error of a product; TF32 causes smaller errors, a wrong kernel larger
FAISS_SECONDS = 180
LOW_DISK = 5 * 2**30  # bytes


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
        line = f"{self.state:6s}  {self.subject:10s}  {self.found}"
        return f"{line}\n{'':20s}-> {self.advice}" if self.advice else line


def doctor(say: Callable[[str], None]) -> None:
    """Run all checks. Call ``say`` with the version of contaccum, a verdict, and each result.

    Raises Failed at the end if a check failed.
    """
    diagnoses = list(diagnose())
    broken = [diagnosis.subject for diagnosis in diagnoses if diagnosis.state == "broken"]
    notes = [diagnosis.subject for diagnosis in diagnoses if diagnosis.state == "note"]
    verdict = "training and search work"
    if broken:
        verdict = f"{len(broken)} of {len(diagnoses)} checks failed: {', '.join(broken)}"
    elif notes:
        verdict += f", with limits: {', '.join(notes)}"
    say(f"contaccum {_version('contaccum')}: {verdict}\n")
    for diagnosis in diagnoses:
        say(printable(without_logins(str(diagnosis))))
    if broken:
        raise Failed(verdict)


def diagnose() -> Iterator[Diagnosis]:
    """Run all checks one by one, and yield the result of each check."""
    versions = ", ".join(f"{name} {_version(name)}" for name in PACKAGES)
    yield Diagnosis("ok", "python", f"{platform.python_version()}, {versions}")
    yield from devices()
    yield faiss()
    yield folder("cache", cache_folder, "set CONTACCUM_CACHE to a folder on another disk")
    yield folder("hub cache", _hub_cache, "set HF_HOME to a folder on another disk")
    yield network()


def _version(package: str) -> str:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return "(not installed)"


def devices() -> Iterator[Diagnosis]:
    """Check whether torch finds the GPUs, and whether its products are right on each device."""
    try:
        import torch
    except Exception as error:  # a broken build may raise any error
        advice = "reinstall torch: https://pytorch.org/get-started/locally/"
        yield Diagnosis("broken", "torch", in_one_line(error), advice)
        return
    found = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    if Path("/dev/nvidia0").exists() and not found:
        if torch.version.cuda and os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
            advice = "unset CUDA_VISIBLE_DEVICES, which hides all GPUs"
            yield Diagnosis("note", "torch", "finds no GPU, but /dev/nvidia0 exists", advice)
        else:
            try:
                torch.zeros(1, device="cuda")
                reason = "torch finds no GPU"
            except Exception as error:  # names the reason, such as a driver that is too old
                reason = in_one_line(error)
            advice = (
                "install torch for the CUDA version that nvidia-smi shows: "
                "https://pytorch.org/get-started/locally/"
            )
            yield Diagnosis("broken", "torch", f"/dev/nvidia0 exists, but {reason}", advice)
    for device in ["cpu", *found, *(["mps"] if torch.backends.mps.is_available() else [])]:
        yield check_device(device)


def check_device(device: str) -> Diagnosis:
    """Describe a device, and compare a product on it with float64 on the CPU."""
    import torch

    name = device
    try:
        if device.startswith("cuda"):
            free, total = torch.cuda.mem_get_info(device)
            major, minor = torch.cuda.get_device_capability(device)
            bf16 = "bf16" if major >= 8 else "no bf16 (set run.precision to fp16)"
            name += (
                f", {torch.cuda.get_device_name(device)}, compute capability {major}.{minor}, "
                f"{bf16}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
            )
        vectors = torch.nn.functional.normalize(torch.randn(256, 64))
        product = (vectors.to(device) @ vectors.to(device).T).cpu()
        error = float((product - vectors.double() @ vectors.double().T).abs().max())
    except RuntimeError as failure:
        advice = "install a torch built for this device"
        return Diagnosis("broken", "device", f"{name}: {in_one_line(failure)}", advice)
    if error <= TOLERANCE:  # false if the error is NaN
        return Diagnosis("ok", "device", name)
    advice = "results on this device are wrong; try another version of torch or of the driver"
    return Diagnosis("broken", "device", f"{name}: a product has an error of {error:.0e}", advice)


def faiss() -> Diagnosis:
    """Check searches with faiss on the CPU and each GPU, in a child that imports torch first."""
    if find_spec("faiss") is None:
        found = "not installed; exact search uses torch, and --factory does not work"
        advice = f"{install_command('cpu')}, or, for a GPU, {install_command('gpu')}"
        return Diagnosis("note", "faiss", found, advice)
    script = "from contaccum.retrieval.faiss_library import try_faiss; print(try_faiss())"
    try:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", f"import torch; {script}"],
            capture_output=True,
            text=True,
            timeout=FAISS_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        found = f"no answer in {FAISS_SECONDS} s"
    else:
        if done.returncode == 0:
            return Diagnosis("ok", "faiss", done.stdout.splitlines()[-1])
        last = (done.stderr.strip() or "no message").splitlines()[-1][:300]
        found = f"its test ended with exit code {done.returncode}: {last}"
    advice = (
        "install torch and faiss both with pip or both with conda, so that they use the same "
        "OpenMP runtime, or search with --backend torch"
    )
    return Diagnosis("broken", "faiss", found, advice)


def _hub_cache() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def folder(subject: str, find: Callable[[], Path], advice: str) -> Diagnosis:
    """Check whether a folder is writable and has free space.

    If the folder is missing, check its nearest existing parent.
    """
    try:
        path = find()
        existing = next(parent for parent in (path, *path.parents) if os.path.exists(parent))
        tempfile.TemporaryFile(dir=existing).close()
        free = shutil.disk_usage(existing).free
    except Exception as error:  # no home folder, no permission, or huggingface_hub is broken
        return Diagnosis("broken", subject, f"cannot be written: {in_one_line(error)}", advice)
    text = f"{path}, {free / 2**30:.1f} GiB free"
    if free < LOW_DISK:
        return Diagnosis("note", subject, text, advice)
    return Diagnosis("ok", subject, text)


def network() -> Diagnosis:
    """Check whether the Hub answers.

    If not, return only a note, because local data and models work without the Hub.
    """
    from huggingface_hub import constants

    from contaccum.runtime.hub import why_offline

    if reason := why_offline():
        advice = "use local folders instead of Hub names, and set HF_HUB_OFFLINE=1 to avoid waiting"
        found = f"{reason}, so encoders and data sets are read from the cache only"
        return Diagnosis("note", "network", found, "" if constants.is_offline_mode() else advice)
    return Diagnosis("ok", "network", f"{constants.ENDPOINT} answers")

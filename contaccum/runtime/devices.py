"""Device and data type of a process, and its memory on the CPU."""

import contextlib
import ctypes
import re
import resource
from pathlib import Path

import torch

from contaccum.runtime.launch import local_place


def encoding_device(device: str) -> torch.device:
    """Return the device of this process. ``auto`` means the GPU for this process if there is one, else MPS, else the CPU."""
    if device == "auto" and torch.cuda.is_available():
        return torch.device("cuda", local_place()[0] % torch.cuda.device_count())
    if device == "auto" and torch.backends.mps.is_available():
        return torch.device("mps")
    return torch.device("cpu")


def torch_dtype(precision: str) -> torch.dtype:
    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]


def peak_resident() -> int:
    """Return the peak resident memory of this process in bytes. On Linux: the peak since ``Engine.reset_peak_memory``."""
    status = Path("/proc/self/status")  # on Linux, ru_maxrss also contains the peak of the parent
    if status.exists() and (found := re.search(r"^VmHWM:\s+(\d+)", status.read_text(), re.MULTILINE)):
        return int(found[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS


def return_freed_memory() -> None:
    """Give memory that this process has freed back to the operating system. Works only if the C library is glibc."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)

"""What a run was made with: versions and device, kept beside its figures."""

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from contaccum.engine import Engine
from contaccum.errors import InputError
from contaccum.files import read_json, write_json

ENVIRONMENT_FILE = "environment.json"
PACKAGES = ("contaccum", "torch", "transformers", "accelerate", "tokenizers", "numpy")


def environment(engine: Engine) -> dict[str, Any]:
    """Versions, device, processes and threads; no name of a machine or of a person."""
    device = engine.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {
        "python": platform.python_version(),
        **{package: metadata.version(package) for package in PACKAGES},
        "system": platform.system(),
        "device": f"{device.type} ({name})",
        "processes": engine.world,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def write_environment(run: Path, engine: Engine) -> None:
    write_json(run / ENVIRONMENT_FILE, environment(engine))


def read_environment(run: Path) -> dict[str, Any]:
    """What ``write_environment`` kept; empty where the run's folder has none."""
    if not (run / ENVIRONMENT_FILE).is_file():
        return {}
    found = read_json(run / ENVIRONMENT_FILE)
    if not isinstance(found, dict):
        raise InputError(f"{run / ENVIRONMENT_FILE}: holds no versions by name, expected what training writes")
    return found

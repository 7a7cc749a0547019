"""Checkpoints that hold a whole run, appear whole or not at all, and are believed only when every hash is right.

checkpoints/step-00000100/
    model/                the two encoder folders, as DualEncoder.save writes them
    optimizer.safetensors the optimizer's state (AdamW's moments), by parameter name
    bank.safetensors      rows, ids, kept log-sum-exps
    state.json            step, config, bank pointers, loss scaling, best dev metric
    manifest.json         size and SHA-256 of every other file; written last

Random state needs no file: order, choices and dropout are functions of (seed, step).
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from contaccum.encoder import DualEncoder
from contaccum.errors import InputError
from contaccum.files import read_json, remove_folder, sha256_of, whole_folder, write_json
from contaccum.methods.bank import Bank
from contaccum.training.optimizer import trained_parameters

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint, its hashes verified."""

    folder: Path
    state: dict[str, Any]

    @property
    def model(self) -> Path:
        return self.folder / "model"


def checkpoint_folder(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def save_checkpoint(
    run: Path, encoder: DualEncoder, optimizer: torch.optim.Optimizer, bank: Bank, state: dict[str, Any], keep: int
) -> None:
    """Write the checkpoint of ``state['step']``, then delete all but the ``keep`` newest."""
    target = checkpoint_folder(run, state["step"])
    with whole_folder(target) as folder:
        encoder.save(folder / "model")
        save_file(_optimizer_tensors(encoder, optimizer), folder / "optimizer.safetensors")
        tensors, numbers = bank.state()
        stateless = [name for name, p in trained_parameters(encoder).items() if not optimizer.state[p]]
        save_file(tensors, folder / "bank.safetensors")
        write_json(folder / "state.json", {**state, "bank": numbers, "without_gradient": stateless})
        write_json(
            folder / MANIFEST,
            {name: {"size": path.stat().st_size, "sha256": sha256_of(path)} for name, path in _files(folder).items()},
        )
    # what bears a later step was passed over as damaged when this run was resumed
    others = [folder for folder in all_checkpoints(run) if folder != target]
    later = [folder for folder in others if folder.name > target.name]
    for folder in [*later, *others[len(later) + keep - 1 :]]:
        remove_folder(folder)


def newest_checkpoint(run: Path) -> Checkpoint | None:
    """The newest complete checkpoint of a run, None where there is none; says on stderr which it passed over, and why."""
    for folder in all_checkpoints(run):
        fault = _fault(folder)
        if fault is None:
            return Checkpoint(folder, read_json(folder / "state.json"))
        print(f"{folder}: passed over, {fault}", file=sys.stderr)
    return None


def restore(checkpoint: Checkpoint, encoder: DualEncoder, optimizer: torch.optim.Optimizer, bank: Bank) -> None:
    """Bring optimizer and bank to the checkpoint's state; the encoder was loaded from ``checkpoint.model``."""
    tensors = load_file(checkpoint.folder / "optimizer.safetensors")
    for name, parameter in trained_parameters(encoder).items():
        if (
            name in checkpoint.state["without_gradient"]
        ):  # the encoder has parameters that its forward pass does not use
            continue
        kept = {key.rpartition(":")[2]: value for key, value in tensors.items() if key.rpartition(":")[0] == name}
        if not any(value.shape == parameter.shape for value in kept.values()):
            raise InputError(
                f"{checkpoint.folder}: holds no optimizer state for {name} {tuple(parameter.shape)}: another model's"
            )
        optimizer.state[parameter] = {
            key: value.to(parameter.device) if value.ndim or value.is_floating_point() else int(value)
            for key, value in kept.items()
        }
    bank.load_state(load_file(checkpoint.folder / "bank.safetensors"), checkpoint.state["bank"])


def _optimizer_tensors(encoder: DualEncoder, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    seen = set()  # of some optimizers, states share a constant table; a file of tensors cannot say so
    for name, parameter in trained_parameters(encoder).items():
        for key, value in optimizer.state[parameter].items():
            # a count of steps that is a plain number is stored as an integer without dimensions
            tensor = value.contiguous() if isinstance(value, torch.Tensor) else torch.tensor(value)
            found[f"{name}:{key}"] = tensor.clone() if tensor.data_ptr() in seen else tensor
            seen.add(tensor.data_ptr())
    return found


def all_checkpoints(run: Path) -> list[Path]:
    """The folders of a run's checkpoints, complete or not, newest first."""
    return sorted((run / "checkpoints").glob("step-*"), reverse=True)


def _files(folder: Path) -> dict[str, Path]:
    """Every file of a checkpoint but its manifest, by its path inside."""
    files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return {name: path for name, path in files.items() if name != MANIFEST}


def _fault(folder: Path) -> str | None:
    """What makes a checkpoint incomplete, or None."""
    try:
        return _fault_of_files(folder)
    except OSError as error:  # a bad sector, a file of another user
        return f"{error.filename or 'a file'} could not be read ({error.strerror or error})"


def _fault_of_files(folder: Path) -> str | None:
    if not (folder / MANIFEST).is_file():
        return f"it has no {MANIFEST}"
    try:
        manifest = read_json(folder / MANIFEST)
    except InputError as error:
        return str(error)
    if not isinstance(manifest, dict) or not all(isinstance(entry, dict) for entry in manifest.values()):
        return f"its {MANIFEST} is not a list of files with their sizes and hashes"
    files = _files(folder)
    for name, expected in manifest.items():
        path = files.pop(name, None)  # a name is compared, never followed
        if path is None:
            return f"{name} is missing"
        if path.stat().st_size != expected.get("size"):
            return f"{name} is {path.stat().st_size} bytes, expected {expected.get('size')}"
        if sha256_of(path) != expected.get("sha256"):
            return f"{name} is damaged: its SHA-256 is not the manifest's"
    return f"{next(iter(files))} is not in its {MANIFEST}" if files else None

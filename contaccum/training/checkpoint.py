"""Save and restore the checkpoints of a run. ``run_folder`` describes their files."""

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from contaccum.batch import MISSING
from contaccum.encoder import DualEncoder
from contaccum.errors import InputError
from contaccum.methods.bank import Bank
from contaccum.runtime import sharding
from contaccum.runtime.files import remove_folder, sha256_of, whole_folder, write_json
from contaccum.training.parts import trained_parameters
from contaccum.training.run_folder import (
    MANIFEST,
    STATE_VERSION,
    Checkpoint,
    all_checkpoints,
    files_in,
)

OPTIMIZER_FILE = "optimizer.safetensors"
OPTIMIZER_PARTS = "optimizer"  # folder with one file per process, if the weights are sharded


def save_checkpoint(
    run: Path,
    encoder: DualEncoder,
    optimizer: torch.optim.Optimizer,
    bank: Bank,
    state: dict[str, Any],
    keep: int,
) -> None:
    """Save the checkpoint of step ``state['step']``; delete all but the ``keep`` newest ones.

    state: values for state.json, without those of the bank. If the weights are sharded, all
    processes must call this function, and each writes its part of the optimizer state.
    """
    target = run / "checkpoints" / f"step-{state['step']:08d}"
    group = encoder.shard_group
    if group is not None and not group.is_main:
        _save_parts(encoder, optimizer, Path(group.from_main("")))
        return
    with whole_folder(target) as folder:
        if group is None:
            encoder.save(folder / "model")
            save_file(_optimizer_tensors(encoder, optimizer), folder / OPTIMIZER_FILE)
        else:
            _save_parts(encoder, optimizer, Path(group.from_main(str(folder))))
        tensors, numbers = bank.state()
        stateless = [
            name for name, p in trained_parameters(encoder).items() if not optimizer.state[p]
        ]
        save_file(tensors, folder / "bank.safetensors")
        state = {
            "format_version": STATE_VERSION,
            **state,
            "bank": numbers,
            "without_gradient": stateless,
        }
        write_json(folder / "state.json", state)
        hashes = {name: sha256_of(path) for name, path in files_in(folder).items()}
        write_json(folder / MANIFEST, hashes)
    # a resumed run continues at the newest undamaged checkpoint, so checkpoints of later steps are
    # damaged; delete them too
    kept = 0
    for folder in all_checkpoints(run):  # the newest first
        later = int(folder.name.removeprefix("step-")) > state["step"]
        if later or kept == keep:
            remove_folder(folder)
        else:
            kept += 1


def _save_parts(encoder: DualEncoder, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Save the sharded encoder and optimizer into ``folder``, process 0's temporary folder.

    All processes must call this.
    """
    encoder.save(folder / "model")
    sharding.save_parts(_optimizer_tensors(encoder, optimizer), folder / OPTIMIZER_PARTS)


def restore_optimizer(
    checkpoint: Checkpoint, encoder: DualEncoder, optimizer: torch.optim.Optimizer
) -> None:
    """Load the saved state into ``optimizer``.

    ``encoder`` must already have the weights of ``checkpoint``.
    """
    trained = trained_parameters(encoder)
    parts = checkpoint.folder / OPTIMIZER_PARTS
    if encoder.shard_group is not None or parts.is_dir():
        tensors = sharding.load_parts(trained, parts if parts.is_dir() else checkpoint.folder)
    else:
        tensors = load_file(checkpoint.folder / OPTIMIZER_FILE)
    named = {name.rpartition(":"): tensor for name, tensor in tensors.items()}
    for name, parameter in trained.items():
        if name in checkpoint.state["without_gradient"]:
            continue  # the forward pass does not use this parameter
        saved = {key: value for (owner, _, key), value in named.items() if owner == name}
        if not any(value.shape == parameter.shape for value in saved.values()):
            raise InputError(
                f"{checkpoint.folder}: no optimizer state for parameter {name} of shape "
                f"{tuple(parameter.shape)}, so the checkpoint is of another model. Resume with the "
                "model settings that the run started with."
            )
        for key, value in saved.items():
            is_count = value.ndim == 0 and not value.is_floating_point()  # see _optimizer_tensors
            optimizer.state[parameter][key] = int(value) if is_count else value.to(parameter.device)


def restore_bank(checkpoint: Checkpoint, bank: Bank) -> None:
    """Load the saved state into ``bank``."""
    bank.load_state(load_file(checkpoint.folder / "bank.safetensors"), checkpoint.state["bank"])


def lacks_negatives(checkpoint: Checkpoint) -> bool:
    """Return whether pairs in the saved bank lack hard negatives.

    The config may fill them now.
    """
    with safe_open(checkpoint.folder / "bank.safetensors", "pt") as file:
        return "column_ids" in file.keys() and bool(  # noqa: SIM118
            (file.get_tensor("column_ids") == MISSING).any()
        )


def _optimizer_tensors(
    encoder: DualEncoder, optimizer: torch.optim.Optimizer
) -> dict[str, torch.Tensor]:
    """Return the optimizer state under names of the form PARAMETER:KEY."""
    tensors: dict[str, torch.Tensor] = {}
    # the 8-bit optimizer has one table for all parameters, but safetensors refuses shared tensors
    seen = set()
    for name, parameter in trained_parameters(encoder).items():
        for key, value in optimizer.state[parameter].items():
            # some optimizers count steps in an int, which is saved as an integer tensor without
            # dimensions
            tensor = value.contiguous() if isinstance(value, torch.Tensor) else torch.tensor(value)
            address = sharding.local(tensor).data_ptr()
            tensors[f"{name}:{key}"] = tensor.clone() if address in seen else tensor
            seen.add(address)
    return tensors

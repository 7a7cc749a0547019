"""A job of test_sharding.py: two steps of every method, sharded if there are several processes;
gradients go to a file.

arguments: DATA OUTPUT MODEL [REFERENCE]. MODEL: tiny, or the folder of an encoder. Each step starts
from the weights that it had in REFERENCE, the output of one process.
"""

from pathlib import Path

import bitsandbytes  # noqa: F401  (once, before the processes are forked)
import peft  # noqa: F401
import torch
from gradient_worker import REPLAYED
from helpers import open_train_set, train_config
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor, distribute_tensor

from contaccum.config import METHOD_SPECS, validate
from contaccum.data.train_set import TrainSet
from contaccum.methods import METHODS
from contaccum.runtime.engine import Engine
from contaccum.runtime.sharding import full, local
from contaccum.training import parts

MEAN = "mean"
"""Marks gradients that FSDP averages, as it does by default: the control."""
OFFLOAD = "offload"
"""Marks gradients of weights that stay on the CPU."""
VARIANTS = {
    "": {},
    OFFLOAD: {},
    "checkpointing": {"model.gradient_checkpointing": True},
    "lora": {"lora.rank": 2},
}
VARIANTS["qlora"] = {"lora.rank": 2, "model.quantize": "4bit"}

NEED_A_FOLDER = ("lora", "qlora")
"""Variants of an encoder with a folder."""


def main(arguments: list[str]) -> None:
    data, output, model, *reference = arguments
    weights = load_file(reference[0]) if reference else {}
    train_set = open_train_set(data, "train", 1)
    runs = {name: (name, 1.0, "") for name in METHOD_SPECS}
    runs |= {name: (method, share, "") for name, (method, share) in REPLAYED.items()}
    runs |= {MEAN: ("grad_accum", 1.0, "")}
    runs |= {
        name: ("cont_cache", 1.0, name)
        for name in VARIANTS
        if name and (name not in NEED_A_FOLDER or model != "tiny")
    }
    found: dict[str, torch.Tensor] = {}
    for label, (method, share, variant) in runs.items():
        engine = Engine(device="cpu", replay_share=share)
        found |= two_steps(label, method, engine, train_set, model, weights, VARIANTS[variant])
    save_file(found, f"{output}.{engine.rank}.safetensors")


def two_steps(
    label: str,
    method: str,
    engine: Engine,
    train_set: TrainSet,
    model: str,
    weights: dict[str, torch.Tensor],
    variant: dict,
) -> dict[str, torch.Tensor]:
    found = {}
    changes = {
        "model.name": model,
        "model.tie_towers": model != "tiny",
        "run.precision": "fp32",
        "model.tiny_layers": 2,
        "data.hard_negatives": 1,
    }
    changes |= {"batch.micro_batch_size": 4 // engine.world, "bank.size": 24, **variant}
    config = train_config(Path("read already"), Path("unused"), method, **changes)
    validate(config, engine.world)
    encoder = parts.build_encoder(config, train_set)
    if engine.world > 1:
        engine.shard(encoder, offload=label == OFFLOAD)
        groups = [unit._get_fsdp_state()._fsdp_param_groups[0] for unit in encoder.units()]
        assert {isinstance(group.offload_policy, CPUOffloadPolicy) for group in groups} == {
            label == OFFLOAD
        }
    if label == MEAN and engine.world > 1:
        for unit in encoder.units():
            unit.set_gradient_divide_factor(float(engine.world))
    parts.apply_switches(encoder, config)
    encoder.train().set_dropout(0.0)
    batches = parts.build_batches(config, engine, encoder, train_set)
    loss = parts.build_loss(config, encoder)
    bank = parts.build_bank(config, engine, encoder, loss)
    optimizer = parts.make_optimizer(encoder, config.optim)
    engine.prepare(encoder, optimizer)
    for step in range(2):
        engine.begin_step(step)
        for name, parameter in encoder.named_parameters():
            start = weights.get(f"{label}/{step}/start/{name}")
            if start is not None:
                assign(parameter, start)
            else:
                found[f"{label}/{step}/start/{name}"] = full(parameter.detach()).clone()
        METHODS[method](engine, batches.step(step), bank, loss)
        engine.reduce_gradients()
        for name, parameter in encoder.named_parameters():
            if parameter.grad is not None:
                found[f"{label}/{step}/gradient/{name}"] = full(parameter.grad).clone()
        found[f"{label}/{step}/norms"] = torch.tensor(engine.gradient_norms())
        engine.clip(float(found[f"{label}/{step}/norms"][-1]), 1e-3)
        found[f"{label}/{step}/clipped"] = torch.tensor(engine.gradient_norms())
        engine.update()
        bank.end_step()
    return found


def assign(parameter: torch.nn.Parameter, value: torch.Tensor) -> None:
    if isinstance(parameter, DTensor):
        value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
    local(parameter.data).copy_(local(value))

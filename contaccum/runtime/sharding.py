"""Sharded encoders (torch's FSDP2): each process holds a part of weights and optimizer state.

A pass over a layer gathers the weights of this layer from all processes, uses them and frees them.
So all processes must run the same number of passes, and save and load together.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from contaccum.errors import InputError
from contaccum.runtime.processes import Processes


def shard(
    processes: Processes, modules: Iterable[nn.Module], dtype: torch.dtype, offload: bool = False
) -> None:
    """Divide the modules' parameters among all processes, and move each part to its device.

    modules: units that are gathered and freed as a whole. In the list, inner modules come before
    outer ones. All processes get the weights of process 0. dtype: data type of the gathered
    weights. The parts and their gradients stay in float32. offload: whether the parts and their
    gradients stay on the CPU.
    """
    if not hasattr(FSDPModule, "set_force_sum_reduction_for_comms"):
        raise InputError(
            f"run.sharding is fsdp, but torch is {torch.__version__}, which is too old for it. "
            "Upgrade torch."
        )
    mesh = init_device_mesh(processes.device.type, (processes.world,))
    # autocast casts the inputs of each operation; FSDP would also cast attention masks
    policy = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    # a process without a GPU has no pinned memory
    offload_policy = (
        CPUOffloadPolicy(pin_memory=processes.device.type == "cuda") if offload else OffloadPolicy()
    )
    for module in modules:
        # one module at a time, because the device may be too small for all; those of inner modules
        # are divided already
        parameters = [
            parameter for parameter in module.parameters() if not isinstance(parameter, DTensor)
        ]
        for parameter in parameters:
            parameter.data = parameter.data.to(processes.device)
            # scales of 4-bit weights are not divided
            scales = getattr(parameter, "quant_state", None)
            if scales is not None:
                scales.to(processes.device)
        processes.copy_from_main([parameter.data for parameter in parameters])
        unit = fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=True,
            mp_policy=policy,
            offload_policy=offload_policy,
        )
        # the loss needs the sum of the gradients, but FSDP computes their mean
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)  # gloo cannot sum and scale at once


class SeparateBackward:
    """Backward pass in parts: one part for each forward pass of a tower.

    FSDP divides a gradient among the processes only after autograd has summed it over all forward
    passes of a graph. So one backward pass through several forward passes would have the full
    gradients of all layers in memory at once.
    """

    def __init__(self) -> None:
        self.passes: list[tuple[list[Tensor], list[Tensor]]] = []

    def cut(self, *outputs: Tensor) -> list[Tensor]:
        """Return leaf tensors with the values of ``outputs``, the outputs of one forward pass.

        A backward pass stops at these leaves. The method ``run`` later continues the backward pass
        from their gradients.
        """
        leaves = [output.detach().requires_grad_() for output in outputs]
        self.passes.append((list(outputs), leaves))
        return leaves

    def run(self) -> None:
        """Continue the backward pass from the leaves of ``cut``, one forward pass at a time.

        All processes must call ``cut`` equally often.
        """
        while self.passes:
            outputs, leaves = self.passes.pop()
            torch.autograd.backward(outputs, [leaf.grad for leaf in leaves])


def is_sharded(module: nn.Module) -> bool:
    return isinstance(module, FSDPModule)


def local(tensor: Tensor) -> Tensor:
    """Return the part of a sharded tensor that this process holds.

    Other tensors are returned unchanged.
    """
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor from all processes. Other tensors are returned unchanged."""
    if not isinstance(tensor, DTensor):
        return tensor
    # an offloaded part is on the CPU
    on_device = tensor.detach().to(tensor.device_mesh.device_type)
    assert isinstance(on_device, DTensor)
    return on_device.full_tensor()


def save_parts(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Write sharded tensors to a folder.

    Each process writes one safetensors file with its parts.
    """
    writer = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True)
    dcp.save(dict(tensors), storage_writer=writer)


def load_parts(parameters: Mapping[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """Read the optimizer tensors of ``parameters`` from the safetensors files of a folder.

    Return name -> tensor.

    A name is PARAMETER:KEY, where KEY is the key of the tensor in the optimizer state of the
    parameter. A tensor with the shape of its parameter is sharded like the parameter, and each
    process reads only its part. The files may come from any number of processes, or from
    ``safetensors.torch.save_file``.
    """
    reader = dcp.HuggingFaceStorageReader(str(folder))
    tensors: dict[str, Tensor] = {}
    for name, saved in reader.read_metadata().state_dict_metadata.items():
        parameter = parameters.get(name.rpartition(":")[0])
        if parameter is not None and isinstance(saved, TensorStorageMetadata):
            dtype = saved.properties.dtype
            same = parameter.shape == saved.size
            tensors[name] = (
                torch.zeros_like(parameter, dtype=dtype)
                if same
                else torch.zeros(saved.size, dtype=dtype)
            )
    dcp.load(tensors, storage_reader=reader)
    return tensors

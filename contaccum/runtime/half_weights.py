"""Half-precision copies of the weights of linear layers, cast once per optimizer step.

autocast casts each weight in a forward pass and each gradient in a backward pass, and autograd adds
each gradient to that of the micro-batch before: three small operations per weight and micro-batch.
Here, a few operations cast all weights of a step, and a few operations cast and add all gradients
of a backward pass, with the same results. The copies of layers that have the same input are next to
each other in memory, so that one matrix product computes these layers.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# number of gradients that are cast and added at once, the most that one CUDA kernel takes
GROUP = 64
# names of the layers of a module that have the same input, in attention and in gated units
SAME_INPUT = (
    ("query", "key", "value"), ("q_proj", "k_proj", "v_proj"), ("q_lin", "k_lin", "v_lin"),
    ("q", "k", "v"), ("gate_proj", "up_proj"),
)  # fmt: skip


@dataclass(eq=False)
class Group:
    """Weights that one tensor replaces: one weight, or those of layers that one product computes.

    copy: their half-precision copy, whose memory is the same in all steps. None: the tensor has the
    memory of the weight.
    """

    weights: list[nn.Parameter]
    copy: Tensor | None

    def split(self, tensor: Tensor) -> Sequence[Tensor]:
        """Return the part of ``tensor`` that belongs to each weight."""
        return tensor.split([len(weight) for weight in self.weights])


Tensors = dict[Group, Tensor]


class HalfWeights:
    """Tensors that replace the weights of an encoder inside passes.

    Weights of linear layers are replaced by copies in half precision. Other trained weights are
    replaced by tensors with the same memory. Outside of passes, the encoder has its own weights.
    """

    def __init__(self, encoder: nn.Module, dtype: torch.dtype) -> None:
        """dtype: data type of the copies."""
        owners = owners_of_weights(encoder)
        half = copied_weights(encoder)
        self.groups: list[Group] = []

        def add_group(weights: list[nn.Parameter]) -> Group:
            copy = None
            if weights[0] in half:
                rows = sum(len(weight) for weight in weights)
                copy = weights[0].new_empty(rows, *weights[0].shape[1:], dtype=dtype)
            self.groups.append(Group(weights, copy))
            return self.groups[-1]

        # layers that one product computes, with the groups of their weights and of their biases
        self.joined: list[tuple[list[nn.Linear], Group, Group | None]] = []
        for module in encoder.modules():
            for names in SAME_INPUT:
                layers: list[Any] = [getattr(module, name, None) for name in names]
                if any(type(layer) is not nn.Linear for layer in layers):
                    continue
                weights = [layer.weight for layer in layers]
                kinds = {
                    (layer.in_features, layer.weight.requires_grad, layer.bias is None)
                    for layer in layers
                }
                alone = all(each in half and len(owners[each]) == 1 for each in weights)
                if alone and len(kinds) == 1:
                    group, biases = add_group(weights), None
                    if layers[0].bias is not None:
                        biases = add_group([layer.bias for layer in layers])
                    self.joined.append((layers, group, biases))
        in_joined = {weight for group in self.groups for weight in group.weights}
        of_weight = {
            weight: add_group([weight])
            for weight in owners
            if weight not in in_joined and (weight.requires_grad or weight in half)
        }
        # where the other weights are in their modules
        self.places = [
            (module._parameters, name, weight, of_weight[weight])
            for module in encoder.modules()
            for name, weight in module.named_parameters(recurse=False)
            if weight in of_weight
        ]
        self.values: Tensors = {}  # inside the passes of this step
        # the same values as leaves of a graph, for each pass with a graph that awaits its backward
        # pass; if passes shared them, their gradients would be summed in half precision
        self.leaves: list[Tensors] = []
        # repeats forward passes inside backward passes
        self.checkpointing = any(
            getattr(module, "gradient_checkpointing", False) for module in encoder.modules()
        )

    def drop(self) -> None:
        """Forget the values and the gradients of this step."""
        self.values, self.leaves = {}, []

    @contextmanager
    def used(self) -> Iterator[None]:
        """Replace the weights in a forward pass inside the ``with`` block."""
        if not self.values:
            self.values = self._values()
        tensors = self.values
        if torch.is_grad_enabled():
            tensors = {
                group: value.detach().requires_grad_(group.weights[0].requires_grad)
                for group, value in self.values.items()
            }
            self.leaves.append(tensors)
        with self._replaced(tensors):
            yield

    @torch.no_grad()
    def _values(self) -> Tensors:
        """Return the current values of the weights, in the precision that passes need."""
        sources: list[Tensor] = []
        targets: list[Tensor] = []
        values: Tensors = {}
        for group in self.groups:
            values[group] = group.weights[0].detach() if group.copy is None else group.copy
            if group.copy is not None:
                sources += group.weights
                targets += group.split(group.copy)
        if sources:
            torch._foreach_copy_(targets, sources)
        return values

    @contextmanager
    def _replaced(self, tensors: Tensors) -> Iterator[None]:
        try:
            for parameters, name, _, group in self.places:
                parameters[name] = tensors[group]  # type: ignore[assignment]
            for layers, weights, biases in self.joined:
                product = JoinedLayers(
                    [layer.out_features for layer in layers],
                    tensors[weights],
                    None if biases is None else tensors[biases],
                )
                for place, layer in enumerate(layers):
                    layer.forward = partial(product.output, place)  # type: ignore[method-assign]
            yield
        finally:
            for parameters, name, weight, _ in self.places:
                parameters[name] = weight
            for layers, _, _ in self.joined:
                for layer in layers:
                    vars(layer).pop("forward", None)  # restores the method of the class

    def backward(self, value: Tensor) -> None:
        """Add the gradients of ``value`` to those of the weights, in the precision of the weights.

        value: scalar that depends on all passes with a graph since the last call.
        """
        repeats = self._replaced(self.leaves[-1]) if self.checkpointing else nullcontext()
        with repeats:
            value.backward()
        while self.leaves:
            leaves = self.leaves.pop()  # autograd also adds the gradients of the last pass first
            received: list[tuple[nn.Parameter, Tensor]] = []
            for group, leaf in leaves.items():
                if leaf.grad is not None:
                    # not split if there is one weight, which may have no dimension
                    parts = group.split(leaf.grad) if len(group.weights) > 1 else [leaf.grad]
                    received += zip(group.weights, parts, strict=True)
            for start in range(0, len(received), GROUP):
                add_gradients(received[start : start + GROUP])


def owners_of_weights(encoder: nn.Module) -> dict[nn.Parameter, list[nn.Module]]:
    """Return the modules that each weight belongs to."""
    owners: dict[nn.Parameter, list[nn.Module]] = defaultdict(list)
    for module in encoder.modules():
        for weight in module.parameters(recurse=False):
            owners[weight].append(module)
    return owners


def copied_weights(encoder: nn.Module) -> set[nn.Parameter]:
    """Return the weights that get a copy in half precision: of linear layers only, in float32."""
    return {
        weight
        for weight, modules in owners_of_weights(encoder).items()
        if weight.dtype == torch.float32 and all(type(each) is nn.Linear for each in modules)
    }


class JoinedLayers:
    """Linear layers that one matrix product computes if they have the same input."""

    def __init__(self, sizes: list[int], weight: Tensor, bias: Tensor | None) -> None:
        """sizes: output widths. weight: (sum of sizes, inputs). bias: (sum of sizes,)."""
        self.sizes, self.weight, self.bias = sizes, weight, bias
        self.rows: Tensor | None = None  # input of the last product
        self.outputs: dict[int, Tensor] = {}  # outputs of the last product that are not used yet

    def output(self, place: int, rows: Tensor) -> Tensor:
        """Return the output of the layer at ``place``. The first layer computes all outputs."""
        if place == 0:
            self.rows = rows
            product = F.linear(rows, self.weight, self.bias)
            # autograd forbids to change the parts of ``split`` in place, as Longformer does
            outputs = torch.unsafe_split_with_sizes(product, self.sizes, -1)
            self.outputs = dict(enumerate(outputs))
        if rows is not self.rows or place not in self.outputs:
            bias = None if self.bias is None else self.bias.split(self.sizes)[place]
            return F.linear(rows, self.weight.split(self.sizes)[place], bias)
        found = self.outputs.pop(place)
        if not self.outputs:
            self.rows = None  # would keep the memory
        return found


@torch.no_grad()
def add_gradients(received: list[tuple[nn.Parameter, Tensor]]) -> None:
    """Add gradients to those of their weights, in the precision of the weights."""
    wide = [
        gradient if gradient.dtype == weight.dtype else torch.empty_like(weight)
        for weight, gradient in received
    ]
    cast = [(new, old) for new, (_, old) in zip(wide, received, strict=True) if new is not old]
    if cast:
        # on CUDA, a few kernels if all sources have one type and all targets another
        torch._foreach_copy_([new for new, _ in cast], [old for _, old in cast])
    later = []
    for (weight, _), gradient in zip(received, wide, strict=True):
        if weight.grad is None:
            weight.grad = gradient
        else:
            later.append((weight.grad, gradient))
    if later:
        torch._foreach_add_([total for total, _ in later], [gradient for _, gradient in later])

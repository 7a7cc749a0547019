"""Half-precision copies of the weights of linear layers, made once per optimizer step.

autocast casts each weight in a forward pass and each gradient in a backward pass, and autograd adds
each gradient to that of the micro-batch before: three small operations per weight and micro-batch.
Here, a few operations cast all weights of a step, and a few operations cast and add all gradients
of a backward pass. The results are the same, bit for bit.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

# number of gradients that are cast and added at once, the most that one CUDA kernel takes
GROUP = 64


class HalfWeights:
    """Tensors that replace the weights of an encoder inside passes.

    Weights of linear layers are replaced by copies in half precision. Other trained weights are
    replaced by tensors with the same memory. Outside of passes, the encoder has its own weights.
    """

    def __init__(self, encoder: nn.Module, dtype: torch.dtype) -> None:
        """dtype: data type of the copies."""
        places = [
            (module, name, weight)
            for module in encoder.modules()
            for name, weight in module.named_parameters(recurse=False)
        ]
        other = {weight for module, _, weight in places if type(module) is not nn.Linear}
        # data type of each weight inside a pass
        self.dtypes = {
            weight: dtype if weight not in other and weight.dtype == torch.float32 else weight.dtype
            for _, _, weight in places
        }
        self.places = [
            (module, name, weight)
            for module, name, weight in places
            if weight.requires_grad or self.dtypes[weight] != weight.dtype
        ]
        self.weights = list(dict.fromkeys(weight for _, _, weight in self.places))
        self.values: list[Tensor] = []  # of ``weights`` inside the passes of this step
        # the same values as leaves of a graph, for each pass with a graph that awaits its backward
        # pass; if passes shared them, their gradients would be summed in half precision
        self.leaves: list[list[Tensor]] = []

    def drop(self) -> None:
        """Forget the copies and the gradients of this step."""
        self.values, self.leaves = [], []

    @contextmanager
    def used(self) -> Iterator[None]:
        """Replace the weights in a forward pass inside the ``with`` block."""
        if not self.values:
            self.values = converted(self.weights, [self.dtypes[each] for each in self.weights])
        tensors = self.values
        if torch.is_grad_enabled():
            tensors = [
                value.detach().requires_grad_(weight.requires_grad)
                for value, weight in zip(self.values, self.weights, strict=True)
            ]
            self.leaves.append(tensors)
        with self._replaced(tensors):
            yield

    @contextmanager
    def _replaced(self, tensors: list[Tensor]) -> Iterator[None]:
        by_weight = dict(zip(self.weights, tensors, strict=True))
        try:
            for module, name, weight in self.places:
                module._parameters[name] = by_weight[weight]  # type: ignore[assignment]
            yield
        finally:
            for module, name, weight in self.places:
                module._parameters[name] = weight

    def backward(self, value: Tensor) -> None:
        """Add the gradients of ``value`` to those of the weights, in the precision of the weights.

        value: scalar that depends on all passes with a graph since the last call.
        """
        with self._replaced(self.leaves[-1]):  # gradient checkpointing repeats forward passes
            value.backward()
        while self.leaves:
            leaves = self.leaves.pop()  # autograd also adds the gradients of the last pass first
            for start in range(0, len(leaves), GROUP):
                add_gradients(self.weights[start : start + GROUP], leaves[start : start + GROUP])


@torch.no_grad()
def add_gradients(weights: Sequence[nn.Parameter], leaves: Sequence[Tensor]) -> None:
    """Move the gradient of each leaf, if it has one, to its weight, and add it there."""
    received = [
        (weight, leaf.grad)
        for weight, leaf in zip(weights, leaves, strict=True)
        if leaf.grad is not None
    ]
    gradients = converted([each for _, each in received], [weight.dtype for weight, _ in received])
    sums, terms = [], []
    for (weight, _), gradient in zip(received, gradients, strict=True):
        if weight.grad is None:
            weight.grad = gradient
        else:
            sums.append(weight.grad)
            terms.append(gradient)
    if sums:
        torch._foreach_add_(sums, terms)
    for leaf in leaves:
        leaf.grad = None


@torch.no_grad()
def converted(tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """Return the tensors with these data types, without a copy of those that have theirs."""
    found = [
        tensor.detach() if tensor.dtype == dtype else torch.empty_like(tensor, dtype=dtype)
        for tensor, dtype in zip(tensors, dtypes, strict=True)
    ]
    pairs = [
        (target, source)
        for target, source in zip(found, tensors, strict=True)
        if target.dtype != source.dtype
    ]
    if pairs:
        # on CUDA, a few kernels if all sources have one type and all targets another
        torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])
    return found

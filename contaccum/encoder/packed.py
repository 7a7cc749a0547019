"""Linear layers that run through oneDNN on a CPU, with weights packed once for many calls.

PyTorch's own path asks MKL, which serves AMD's processors worse and packs the weights anew in every call.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_ROWS = 1024  # oneDNN picks the layout of packed weights for about so many rows


def pack_linears(backbone: nn.Module) -> list[nn.Linear]:
    """Let the linear layers of a float32 backbone on a CPU run packed, in training and in evaluation; returns those changed.

    Weights and their names stay. A layer is packed anew when autograd knows of a change of its weights; of a fused optimizer's
    it does not, so ``weights_changed`` must follow each of its steps. Nothing is changed elsewhere than on a CPU, or under
    autocast.
    """
    layers = [module for module in backbone.modules() if type(module) is nn.Linear and _can_be_packed(module)]
    for layer in layers:
        layer.forward = _Packed(layer)  # type: ignore[method-assign, assignment]
    return layers


def weights_changed(backbone: nn.Module) -> None:
    """Let packed layers take their weights anew."""
    for module in backbone.modules():
        packed = vars(module).get("forward")
        if isinstance(packed, _Packed) and packed.layer.weight.requires_grad:  # a frozen base stays packed
            packed.version = -1


@contextmanager
def packed_linears(backbone: nn.Module) -> Iterator[None]:
    """As ``pack_linears``, inside the block alone."""
    layers = pack_linears(backbone)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward  # the class's own method shows again


def _can_be_packed(layer: nn.Linear) -> bool:
    weight = layer.weight
    return (
        "forward" not in vars(layer)  # packed already
        and weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and torch.backends.mkldnn.is_available()
        and not torch.is_autocast_enabled("cpu")
    )


class _Packed:
    """A layer's forward pass, with its weight (out, in) and the transpose of it packed when first used."""

    def __init__(self, layer: nn.Linear) -> None:
        self.layer = layer
        self.version = -1

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Packed":
        return _Packed(copy.deepcopy(self.layer, memo))  # packed weights cannot be copied, nor need they be

    def __call__(self, rows: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return _Product.apply(rows, self.layer.weight, self.layer.bias, self)
        return _product(rows, self.weight(), self.layer.bias)

    def weight(self) -> Any:
        return self._kept()[0]

    def transpose(self) -> Any:
        kept = self._kept()
        if kept[1] is None:  # only a backward pass needs it
            kept[1] = _pack(self.layer.weight.detach().T.contiguous())
        return kept[1]

    def _kept(self) -> list[Any]:
        if self.version != self.layer.weight._version:
            self.version, self.kept = self.layer.weight._version, [_pack(self.layer.weight.detach()), None]
        return self.kept


class _Product(torch.autograd.Function):
    """rows (..., in) times the weight's transpose, plus the bias; its gradients."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, packed: _Packed) -> Tensor:
        ctx.save_for_backward(rows, weight)  # the weight, so that autograd notices a change before the backward pass
        ctx.packed = packed
        return _product(rows, packed.weight(), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, _ = ctx.saved_tensors
        flat = gradient.reshape(-1, gradient.shape[-1])  # (n, out)
        needs_rows, needs_weight, needs_bias, _ = ctx.needs_input_grad
        return (
            _product(gradient, ctx.packed.transpose(), None) if needs_rows else None,
            flat.T @ rows.reshape(-1, rows.shape[-1]) if needs_weight else None,
            flat.sum(0) if needs_bias else None,
            None,
        )


def _pack(weight: Tensor) -> Any:
    return torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS)


def _product(rows: Tensor, packed: Any, bias: Tensor | None) -> Tensor:
    # the operator that torch.compile uses
    return torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")

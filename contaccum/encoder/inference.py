"""How an encoder runs when it only encodes: batches of a fixed number of tokens, and linear layers packed for the CPU."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

WINDOW = 4096  # texts that are sorted together: enough for little padding, few enough to be tokenised ahead
CPU_TOKENS = 1024  # for each thread: the widest layer's output, 6 MB at a width of 384, then stays in the cache
DEVICE_TOKENS = 16_384
PACK_FROM = 64  # texts: packing costs about as much as encoding a few of them
_PACK_ROWS = 1024  # oneDNN picks the layout of packed weights for about so many rows


def default_batch_tokens(device: torch.device) -> int:
    """Tokens in one forward pass where nothing else is asked for."""
    return min(CPU_TOKENS * torch.get_num_threads(), DEVICE_TOKENS) if device.type == "cpu" else DEVICE_TOKENS


def token_batches(lengths: Sequence[int], budget: int) -> Iterator[list[int]]:
    """Indices of texts that share a forward pass, longest first: little padding, and too large a budget fails at once.

    No batch holds more than ``budget`` tokens, padding counted, but a text longer than that is a batch of its own.
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    start = 0
    while start < len(order):
        size = max(1, budget // max(1, lengths[order[start]]))
        yield order[start : start + size]
        start += size


@contextmanager
def packed_linears(backbone: nn.Module) -> Iterator[None]:
    """Inside the block, the linear layers of a float32 backbone on a CPU run through oneDNN with weights packed once.

    PyTorch's own path asks MKL, which serves AMD's processors worse and packs the weights anew in every call. Elsewhere, and
    under autocast, nothing changes. The packed weights are a copy: a change of weights inside the block is not seen.
    """
    layers = [module for module in backbone.modules() if type(module) is nn.Linear and _can_be_packed(module)]
    for layer in layers:
        packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), _PACK_ROWS)
        layer.forward = partial(_packed_linear, weight=packed, bias=layer.bias)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward  # the class's own method shows again


def _can_be_packed(layer: nn.Linear) -> bool:
    weight = layer.weight
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and torch.backends.mkldnn.is_available()
        and not torch.is_autocast_enabled("cpu")
    )


def _packed_linear(rows: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(
        rows, weight, bias, "none", [], ""
    )  # the operator that torch.compile uses

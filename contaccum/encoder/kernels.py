"""Faster forward passes: attention without padding, and linear layers with packed weights on a CPU.

Without padding, the tokens of all texts form one sequence. Only attention needs to know where each
text begins, and which tokens of its text a token may attend to. On a CPU, attention is computed for
all texts of one length at a time. On CUDA, a variable-length kernel of PyTorch computes attention
for all texts in one call.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from contaccum.batch import Tokens

ATTENTION = "contaccum_unpadded"  # name under which ``attend`` is registered in transformers
# oneDNN chooses the layout of packed weights for inputs with this number of rows
PACKED_ROWS = 1024

# model types in which each token attends to all tokens of its text
FULL_ATTENTION = (
    "bert", "camembert", "distilbert", "electra", "eurobert", "roberta", "xlm-roberta",
)  # fmt: skip
# model types whose layers accept text bounds and token positions as arguments; tests cover all of
# them
UNPADDED_FAMILIES = (*FULL_ATTENTION, "llama", "mistral", "modernbert", "qwen2", "qwen3")
# model types in which the first position id is the id of the padding token + 1
PADDING_FIRST = (
    "roberta", "xlm-roberta", "camembert", "mpnet", "data2vec-text", "ibert", "longformer", "luke",
    "roberta-prelayernorm", "xlm-roberta-xl", "xmod",
)  # fmt: skip


@dataclass(frozen=True)
class UnpaddedTokens:
    """Tokens of n texts in one sequence without padding, the longest text first.

    T is the total number of tokens.
    """

    input_ids: Tensor  # (1, T)
    position_ids: Tensor  # (1, T), counted from the start of each text
    # (n + 1,) int32: the text at place i of the sequence has the tokens bounds[i] to
    # bounds[i + 1] - 1
    bounds: Tensor
    texts: Tensor  # (T,) number of the text of each token in the padded batch
    places: Tensor  # (n,) place of each text in the sequence
    # number of texts and length of each run of texts of the same length, in order
    runs: tuple[tuple[int, int], ...]

    @property
    def longest(self) -> int:
        """Number of tokens of the longest text."""
        return self.runs[0][1]


def first_position(config: Any) -> int:
    """Return the position id of the first token of each text. config: the model's configuration."""
    return config.pad_token_id + 1 if config.model_type in PADDING_FIRST else 0


def unpad(tokens: Tokens, first: int = 0) -> UnpaddedTokens:
    """Join n texts, padded on the right, into one sequence without padding.

    Texts are sorted by length, so that texts of equal length are next to each other. first:
    position id of the first token of each text. This function does not wait for the GPU if
    ``tokens`` has a CPU copy of the mask.
    """
    mask = tokens.host_mask if tokens.host_mask is not None else tokens.attention_mask.cpu()
    device, (n, length) = tokens.input_ids.device, mask.shape
    lengths, order = mask.sum(1).sort(descending=True, stable=True)  # (n,), (n,)
    run_lengths, counts = lengths.unique_consecutive(return_counts=True)
    runs = tuple(zip(counts.tolist(), run_lengths.tolist(), strict=True))
    total = sum(count * length for count, length in runs)
    bounds = F.pad(lengths.cumsum(0), (1, 0)).int().to(device, non_blocking=True)  # (n + 1,)
    places = order.argsort().to(device, non_blocking=True)  # (n,)
    order = order.to(device, non_blocking=True)
    # computed on the device: copying more than 64 KiB of memory that is not page-locked may block
    # (T,)
    of_token = torch.arange(n, device=device).repeat_interleave(bounds.diff(), output_size=total)
    positions = torch.arange(total, device=device) - bounds[of_token]
    texts = order[of_token]
    ids = tokens.input_ids.flatten()[texts * length + positions]
    return UnpaddedTokens(
        ids.unsqueeze(0),
        (positions + first).unsqueeze(0),
        bounds,
        texts,
        places,
        runs,
    )


def token_states(backbone: Any, row: UnpaddedTokens) -> Tensor:
    """Return the vectors of all tokens in the sequence, (T, d)."""
    # transformers passes these arguments to ``attend``
    bounds = {"cu_seq_lens_q": row.bounds, "cu_seq_lens_k": row.bounds}
    longest = {"max_length_q": row.longest, "max_length_k": row.longest}
    output = backbone(
        input_ids=row.input_ids, position_ids=row.position_ids, runs=row.runs, **bounds, **longest
    )
    return output.last_hidden_state.squeeze(0)


def pool_unpadded(states: Tensor, row: UnpaddedTokens, pooling: str) -> Tensor:
    """Combine the token vectors of each text, (T, d), into one vector per text, (n, d).

    pooling: cls, last or mean, as in ``tower.pool``.
    """
    if pooling == "mean":
        # sums over long texts can overflow in float16
        wide = torch.promote_types(states.dtype, torch.float32)
        total = torch.zeros(
            len(row.places), states.shape[-1], dtype=wide, device=states.device
        ).index_add(0, row.texts, states.to(wide))  # (n, d)
        lengths = row.bounds.diff()[row.places]
        return (total / lengths.clamp(min=1).unsqueeze(1)).to(states.dtype)
    assert pooling in ("cls", "last"), pooling
    starts, ends = row.bounds[:-1], row.bounds[1:]
    return states[starts[row.places] if pooling == "cls" else ends[row.places] - 1]


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **texts: Any,
) -> tuple[Tensor, None]:
    """Compute attention inside each text. transformers calls it with these argument names.

    query: vectors of all texts, (1, heads, T, width). key, value: the same, but several heads of
    the queries may share a head. is_causal: whether a token attends to no later token. None: as the
    module says. sliding_window: distance from which on tokens are hidden. None: no distance. texts:
    arguments from ``token_states``. Returns a (1, T, heads, width) tensor, and None instead of the
    attention weights.
    """
    assert attention_mask is None
    causal = bool(module.is_causal) if is_causal is None else is_causal
    bounds, longest = texts["cu_seq_lens_q"], texts["max_length_q"]
    # no two tokens of a text are so far apart
    window = None if sliding_window is None or sliding_window >= longest else sliding_window
    # position embeddings are float32 also under autocast, which ignores the kernels of ``varlen``
    dtype = autocast_dtype(query.device.type, value.dtype)
    inputs = (query.to(dtype), key.to(dtype), value.to(dtype))
    # the other kernel for CUDA ignores the window in its backward pass
    if query.is_cuda and (window is None or flash_supports(inputs[0])):
        output = varlen(inputs, dropout, scaling, bounds, longest, causal, window)
    else:
        output = by_length(inputs, dropout, scaling, texts["runs"], causal, window)
    return output.unsqueeze(0), None


Inputs = tuple[Tensor, Tensor, Tensor]


def by_length(
    inputs: Inputs,
    dropout: float,
    scaling: float | None,
    runs: Sequence[tuple[int, int]],
    causal: bool = False,
    window: int | None = None,
) -> Tensor:
    """Compute attention inside each text, in one call for all texts of the same length.

    Return (T, heads, width). T: total number of tokens. runs: as in ``UnpaddedTokens``. causal,
    window: as in ``visible``.
    """
    inputs = with_all_heads(inputs)
    parts = [inputs]
    if len(runs) > 1:  # splitting and joining a single run would copy it
        sizes = [count * length for count, length in runs]
        parts = list(zip(*(each.split(sizes, 2) for each in inputs), strict=True))
    outputs = []
    for (count, length), part in zip(runs, parts, strict=True):
        # (1, heads, count * length, width) to (count, heads, length, width)
        q, k, v = (each.squeeze(0).unflatten(1, (count, length)).transpose(0, 1) for each in part)
        own_dropout = dropout > 0 and q.device.type == "cpu"
        mask = None
        if (window is not None and window < length) or (causal and own_dropout):
            mask = visible(length, causal, window, q.device)
        output = (
            attention_with_dropout(q, k, v, dropout, scaling, mask)
            if own_dropout
            else F.scaled_dot_product_attention(
                q, k, v, mask, dropout, is_causal=causal and mask is None, scale=scaling
            )
        )
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs) if len(outputs) > 1 else outputs[0]


def with_all_heads(inputs: Inputs) -> Inputs:
    """Repeat the heads of keys and values that several heads of the queries share."""
    query, key, value = inputs
    shared = query.shape[1] // key.shape[1]
    if shared > 1:
        key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
    return query, key, value


def visible(length: int, causal: bool, window: int | None, device: torch.device) -> Tensor:
    """Return whether a token (row) attends to another token (column), (length, length) bool.

    causal: whether a token attends to no later token. window: distance from which on tokens are
    hidden. None: no distance.
    """
    mask = torch.ones(length, length, dtype=torch.bool, device=device)
    if window is not None:
        mask = mask.triu(1 - window).tril(window - 1)
    return mask.tril() if causal else mask


def attention_with_dropout(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout: float,
    scaling: float | None,
    mask: Tensor | None = None,
) -> Tensor:
    """Compute attention with dropout on a CPU, in about 0.7 of the time of PyTorch's own function.

    One random byte decides about each weight, so the probability is ``dropout`` rounded to a
    multiple of 1/256, at least 1/256. query, key, value: (..., length, width). mask: see
    ``visible``.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = query * scale @ key.transpose(-1, -2)  # (..., length, length)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    weights = scores.softmax(-1)
    dropped = min(max(round(256 * dropout), 1), 255)  # number of byte values that drop a weight
    return (weights * (random_bytes(weights.shape) >= dropped)) @ (value * (256 / (256 - dropped)))


def random_bytes(shape: torch.Size) -> Tensor:
    """Return random bytes on the CPU. Eight of them come from one number of the generator."""
    numbers = torch.empty(-(-shape.numel() // 8), dtype=torch.int64).random_(-(2**63), None)
    return numbers.view(torch.uint8)[: shape.numel()].view(shape)


def varlen(
    inputs: Inputs,
    dropout: float,
    scaling: float | None,
    bounds: Tensor,
    longest: int,
    causal: bool = False,
    window: int | None = None,
) -> Tensor:
    """Compute attention inside each text on CUDA, in one call for all texts.

    Return a tensor with shape (T, heads, width). causal, window: as in ``visible``. Only
    FlashAttention supports a window.

    This function calls the kernels of PyTorch directly, for two reasons. torch.nn.attention.varlen
    does not support dropout, and nested tensors need about 3 ms of CPU time in each layer.
    """
    width = inputs[0].shape[-1]
    scale = width**-0.5 if scaling is None else scaling
    flash = flash_supports(inputs[0])
    if not flash:
        inputs = with_all_heads(inputs)
    q, k, v = (each.squeeze(0).transpose(0, 1) for each in inputs)
    if width % 8:  # the kernels need widths that are multiples of 8
        q, k, v = (F.pad(each, (0, -width % 8)) for each in (q, k, v))
    texts = (bounds, bounds, longest, longest)
    if flash:
        before = None if window is None else window - 1
        output = torch.ops.aten._flash_attention_forward(
            q,
            k,
            v,
            *texts,
            dropout,
            causal,
            False,
            scale=scale,
            window_size_left=before,
            window_size_right=0 if causal and window is not None else before,
        )[0]
    else:
        assert window is None
        row = (each.unsqueeze(0) for each in (q, k, v))  # (1, T, heads, width)
        found = torch.ops.aten._efficient_attention_forward(
            *row, None, *texts, dropout, int(causal), True, scale=scale
        )
        output = found[0].squeeze(0)
    return output[..., :width]


def flash_supports(query: Tensor) -> bool:
    """Return whether FlashAttention supports the data type and GPU of ``query``."""
    return query.dtype != torch.float32 and (
        not query.is_cuda or torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


AttentionInterface.register(ATTENTION, attend)


def attention_mask(tokens: Tokens, backbone: Any) -> Tensor | None:
    """Return the attention mask to pass to a backbone, or None on a GPU if no text has padding.

    This function looks for padding in the CPU copy of the mask. transformers would look at the mask
    on the GPU and wait for it. If possible, the mask is converted to a bias here (see
    ``padding_bias``). transformers would convert it in every layer.
    """
    mask, host, config = tokens.attention_mask, tokens.host_mask, backbone.config
    if host is None or mask.device.type == "cpu":
        return mask
    if host.all():
        return None
    # other model types make their own masks
    ready = config._attn_implementation == "sdpa" and config.model_type in FULL_ATTENTION
    if not ready or getattr(config, "quantization_config", None) is not None:
        return mask
    return padding_bias(mask, autocast_dtype(mask.device.type, backbone.dtype))


def autocast_dtype(kind: str, otherwise: torch.dtype) -> torch.dtype:
    """Return the type of autocast on devices of the type ``kind``, or ``otherwise`` without it."""
    autocast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if autocast else otherwise


def padding_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values added to attention scores, (n, 1, 1, length).

    They are minus infinity for padding tokens and 0 for others.
    """
    hidden = (mask == 0)[:, None, None, :]
    return torch.zeros(hidden.shape, dtype=dtype, device=mask.device).masked_fill_(
        hidden, -torch.inf
    )


@contextmanager
def packed_linears(backbone: nn.Module) -> Iterator[None]:
    """Compute linear layers with oneDNN and packed weights inside the ``with`` block.

    This applies to float32 layers on a CPU without autocast. Other layers do not change. By default
    PyTorch uses MKL, which packs the weights in every call. On AMD processors, encoding with MKL
    takes 1.2 times as long. Inside the block, these layers compute no gradients, and their weights
    must not change.
    """
    usable = torch.backends.mkldnn.is_available() and not torch.is_autocast_enabled("cpu")
    layers = [module for module in backbone.modules() if usable and type(module) is nn.Linear]
    layers = [
        layer
        for layer in layers
        if (layer.weight.device.type, layer.weight.dtype) == ("cpu", torch.float32)
    ]
    try:
        for layer in layers:
            packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), PACKED_ROWS)
            layer.forward = partial(_packed_forward, packed, layer.bias)  # type: ignore[method-assign]
        yield
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)  # restores the method of the class


def _packed_forward(packed: Any, bias: Tensor | None, rows: Tensor) -> Tensor:
    # operator that torch.compile also uses
    return torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")

"""Encoder passes without padding: the tokens of all texts end to end in one row, and attention that stays within each text.

A padded batch computes on every padding token; here none is left. Only the attention needs to know where a text ends: linear
layers, normalisation and embeddings work token by token. On a CPU the texts are attended to one after another, elsewhere in
one call of PyTorch's variable-length kernels (FlashAttention or the memory-efficient one, both come with PyTorch). With
`flash_attention_2` the same bounds go to transformers' own variable-length path instead.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from contaccum.batch import Tokens

ATTENTION = "contaccum_unpadded"
"""The name under which transformers finds ``attend``."""

FAMILIES = ("bert", "camembert", "distilbert", "electra", "roberta", "xlm-roberta")
"""Model types whose layers take the bounds of texts and the positions of tokens from outside; each is tested."""

PADDING_FIRST = ("roberta", "xlm-roberta", "camembert", "mpnet")
"""Model types whose positions start behind the padding token's number."""


@dataclass(frozen=True)
class Packed:
    """The tokens of n texts without padding; T in all."""

    input_ids: Tensor  # (1, T)
    position_ids: Tensor  # (1, T), counted anew in each text
    kept: Tensor  # (T,) where each token stands in the padded batch, row after row
    bounds: Tensor  # (n + 1,) int32: text i is [bounds[i], bounds[i + 1])
    shortest: int
    longest: int


def first_position(config: Any) -> int:
    """The position number of a text's first token."""
    return config.pad_token_id + 1 if config.model_type in PADDING_FIRST else 0


def pack(tokens: Tokens, first: int = 0) -> Packed:
    """Leave out the padding of n texts. All sizes come from the host's copy of the mask, so no device is waited for."""
    mask = tokens.host_mask if tokens.host_mask is not None else tokens.attention_mask.cpu()
    device = tokens.input_ids.device
    lengths = mask.sum(1)  # (n,)
    bounds = F.pad(lengths.cumsum(0), (1, 0))  # (n + 1,)
    kept = mask.flatten().nonzero().squeeze(1).to(device, non_blocking=True)  # (T,)
    positions = torch.arange(int(bounds[-1])) - bounds[:-1].repeat_interleave(lengths) + first
    return Packed(
        tokens.input_ids.flatten()[kept].unsqueeze(0),
        positions.to(device, non_blocking=True).unsqueeze(0),
        kept,
        bounds.int().to(device, non_blocking=True),
        int(lengths.min()),
        int(lengths.max()),
    )


def token_states(backbone: Any, tokens: Tokens) -> Tensor:
    """The backbone's token vectors, (n, length, d), with zeros where the batch has padding; no padding is computed on."""
    packed = pack(tokens, first_position(backbone.config))
    output = backbone(
        input_ids=packed.input_ids,
        position_ids=packed.position_ids,
        # transformers' names for the bounds; its own FlashAttention path reads them too
        cu_seq_lens_q=packed.bounds,
        cu_seq_lens_k=packed.bounds,
        max_length_q=packed.longest,
        max_length_k=packed.longest,
        min_length=packed.shortest,
    )
    states = output.last_hidden_state.squeeze(0)  # (T, d)
    n, length = tokens.input_ids.shape
    return states.new_zeros(n * length, states.shape[-1]).index_copy(0, packed.kept, states).view(n, length, -1)


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **bounds: Any,
) -> tuple[Tensor, None]:
    """Attention within each text, in the form that transformers calls. query, key, value (1, heads, T, width) -> (1, T, heads,
    width)."""
    assert attention_mask is None
    how = by_text if query.device.type == "cpu" else jagged
    cut = (bounds["cu_seq_lens_q"], bounds["min_length"], bounds["max_length_q"])
    return how(query, key, value, dropout, scaling, *cut).unsqueeze(0), None


def by_text(
    query: Tensor, key: Tensor, value: Tensor, dropout: float, scaling: float | None, bounds: Tensor, *_: int
) -> Tensor:
    """One text after another; (T, heads, width)."""
    lengths = bounds.diff().tolist()
    texts = zip(*(tensor.split(lengths, 2) for tensor in (query, key, value)), strict=True)
    outputs = [F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, scale=scaling) for q, k, v in texts]
    return torch.cat(outputs, 2).squeeze(0).transpose(0, 1)


def jagged(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout: float,
    scaling: float | None,
    bounds: Tensor,
    least: int,
    most: int,
) -> Tensor:
    """All texts in one call; (T, heads, width)."""
    offsets = bounds.long()
    q, k, v = (
        torch.nested.nested_tensor_from_jagged(
            tensor.squeeze(0).transpose(0, 1).contiguous(), offsets, min_seqlen=least, max_seqlen=most
        ).transpose(1, 2)  # (n, heads, length of each text, width)
        for tensor in (query, key, value)
    )
    output = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, scale=scaling)
    return output.transpose(1, 2).values()


AttentionInterface.register(ATTENTION, attend)

"""One tower: backbone, tokenizer, pooling; how it is loaded, and how its attention is computed."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.utils import logging as transformers_logging

from contaccum.batch import Tokens
from contaccum.config import AdapterConfig
from contaccum.encoder.adapters import add_adapter, merge
from contaccum.encoder.dense import Dense
from contaccum.encoder.sources import Base
from contaccum.encoder.unpadded import FAMILIES, first_position, token_states
from contaccum.errors import InputError


def pool(states: Tensor, mask: Tensor, pooling: str) -> Tensor:
    """One vector per text from its token vectors.

    states (n, length, d); mask (n, length), 0 at padding, which may stand on either side. cls: the first token that is no
    padding; last: the last one; mean: the average over all of them. Returns (n, d).
    """
    if pooling == "mean":
        weights = mask.unsqueeze(-1).to(states.dtype)  # (n, length, 1)
        return (states * weights).sum(1) / weights.sum(1).clamp(min=1)
    first = mask.argmax(1)  # (n,)
    position = first if pooling == "cls" else first + mask.sum(1) - 1
    return states[torch.arange(len(states), device=states.device), position]


class Tower(nn.Module):
    """A backbone with its tokenizer: token ids in, one vector per text out."""

    def __init__(
        self, backbone: Any, tokenizer: Any, pooling: str, dense: Sequence[Dense] = (), base: Base | None = None
    ) -> None:
        """dense: layers that the pooled vector passes, in their order. base: what the backbone is besides its adapter."""
        super().__init__()
        self.backbone = backbone
        self.tokenizer = tokenizer
        self.pooling = pooling
        self.dense: Any = nn.ModuleList(dense)
        self.base = base
        self.unpad = False
        self.compiled: Callable[..., Any] | None = None
        self.bucket = 1  # compiled passes see lengths that are multiples of it
        # BERT's own pooler takes no part here; frozen, it is saved as it came and costs neither gradient nor optimizer state
        if getattr(backbone, "pooler", None) is not None:
            backbone.pooler.requires_grad_(False)
        if base is not None:
            self.dense.requires_grad_(False)

    def add_adapter(self, base: Base, config: AdapterConfig) -> None:
        """Freeze the tower and train an adapter beside it instead."""
        add_adapter(self.backbone, base, config)
        self.dense.requires_grad_(False)
        self.base = base

    @property
    def dim(self) -> int:
        """Width of the vectors."""
        return int(self.dense[-1].linear.out_features if len(self.dense) else self.backbone.config.hidden_size)

    def merge_adapter(self) -> None:
        """Add the adapter, where there is one, to the weights; the tower is then a plain one."""
        if self.base is not None:
            merge(self.backbone)
            self.base = None

    def forward(self, tokens: Tokens) -> Tensor:
        vectors = pool(self._states(tokens), tokens.attention_mask, self.pooling)
        for layer in self.dense:
            vectors = layer(vectors)
        return vectors  # (n, d)

    def _states(self, tokens: Tokens) -> Tensor:
        """Token vectors (n, length, d)."""
        if self.unpad:
            return token_states(self.backbone, tokens)
        ids, mask = tokens.input_ids, tokens.attention_mask
        if self.compiled is None or not self.training:  # evaluation runs seldom: it would not earn its own compilation
            return self.backbone(input_ids=ids, attention_mask=mask).last_hidden_state
        length = ids.shape[1]
        whole = -(-length // self.bucket) * self.bucket
        extra = min(whole, position_limit(self.backbone.config) or whole) - length
        ids = F.pad(ids, (0, extra), value=self.tokenizer.pad_token_id)
        return self.compiled(input_ids=ids, attention_mask=F.pad(mask, (0, extra))).last_hidden_state[:, :length]


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars and no remarks on unused pooler weights while a tower is loaded or saved."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(logging.ERROR)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


def position_limit(config: Any) -> int | None:
    """Most tokens of a text that the backbone has positions for; None where positions have no end."""
    limit = getattr(config, "max_position_embeddings", None)
    return None if limit is None else limit - first_position(config)


def check_length(config: Any, side: str, length: int) -> None:
    limit = position_limit(config)
    if limit is not None and not 2 < length <= limit:
        raise InputError(
            f"max_{side}_length is {length}, expected more than 2 and at most {limit}, the encoder's positions"
        )


def set_attention(backbone: Any, name: str) -> None:
    family = backbone.config.model_type
    try:
        with quiet_transformers():
            backbone.set_attn_implementation(name)
    except (ValueError, ImportError) as error:
        raise InputError(
            f"the {family} encoder cannot run attention {name} ({' '.join(str(error).split())})"
        ) from error
    if backbone.config._attn_implementation != name:  # some families ignore the call
        raise InputError(
            f"the {family} encoder does not let its attention be set to {name}, expected model.attention auto"
        )


def check_unpad(tower: Tower) -> None:
    family = tower.backbone.config.model_type
    if family not in FAMILIES:
        raise InputError(f"model.unpad is true for a {family} encoder, expected one of {', '.join(FAMILIES)}")
    if tower.tokenizer.padding_side != "right":
        raise InputError(
            "model.unpad is true with a tokenizer that pads on the left, expected one that pads on the right"
        )

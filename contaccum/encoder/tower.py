"""Tower of an encoder (backbone, tokenizer, pooling and Dense layers), and checks of attention settings."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.utils import is_flash_attn_2_available
from transformers.utils import logging as transformers_logging

from contaccum.batch import Tokens
from contaccum.encoder.folders import Base
from contaccum.encoder.kernels import UNPADDED_FAMILIES, attention_mask, first_position, token_states
from contaccum.errors import InputError, in_one_line

BUCKET = 8  # on a GPU, padded lengths are rounded up to a multiple of this, for fewer shapes and aligned masks


def pool(states: Tensor, mask: Tensor, pooling: str) -> Tensor:
    """Combine the token vectors of each text (n, length, d) into one vector per text (n, d).

    mask: (n, length), 0 for padding tokens, which are on the left or on the right, and 1 for other tokens.
    pooling: cls (use the first token), last (use the last token) or mean (average of all tokens).
    """
    if pooling == "mean":
        weights = mask.unsqueeze(-1).to(states.dtype)  # (n, length, 1)
        return (states * weights).sum(1) / weights.sum(1).clamp(min=1)
    first = mask.argmax(1)  # (n,)
    position = first if pooling == "cls" else first + mask.sum(1) - 1
    return states[torch.arange(len(states), device=states.device), position]


class Dense(nn.Module):
    """Linear layer and activation function that are applied after pooling. LaBSE and distiluse have such layers.

    inputs, outputs: number of dimensions of each vector before and after this layer.
    """

    def __init__(self, inputs: int, outputs: int, bias: bool, activation: nn.Module) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs, bias=bias)
        self.activation = activation

    def forward(self, vectors: Tensor) -> Tensor:
        return self.activation(self.linear(vectors))


class Tower(nn.Module):
    """Model that computes one vector for each tokenized text. A tower has a backbone, pooling and Dense layers."""

    def __init__(
        self, backbone: Any, tokenizer: Any, pooling: str, dense: Sequence[Dense] = (), base: Base | None = None
    ) -> None:
        """dense: layers after pooling. base: encoder that the LoRA adapter was added to; None if there is no adapter."""
        super().__init__()
        self.backbone, self.tokenizer, self.pooling, self.base = backbone, tokenizer, pooling, base
        self.dense: Any = nn.ModuleList(dense)
        limit = getattr(backbone.config, "max_position_embeddings", None)
        self.position_limit = None if limit is None else limit - first_position(backbone.config)
        """Maximum number of tokens of a text that the position embeddings allow. None: no limit."""
        self.vocabulary = word_embeddings(backbone)
        """Number of word embeddings, which is larger than every token id. None: the backbone has no table of word embeddings."""
        self.unpad = False
        self.compiled: Callable[..., Any] | None = None
        self.bucket = 1  # compiled forward passes pad texts to a multiple of this length
        # contaccum does not use BERT's pooler; freezing the pooler saves memory for gradients and optimizer state
        if getattr(backbone, "pooler", None) is not None:
            backbone.pooler.requires_grad_(False)
        if base is not None:
            self.dense.requires_grad_(False)

    @property
    def dim(self) -> int:
        """Number of dimensions of the vectors before truncation."""
        return int(self.dense[-1].linear.out_features if len(self.dense) else self.backbone.config.hidden_size)

    def units(self) -> list[nn.Module]:
        """Return the word embeddings and the layers of the backbone."""
        count = self.backbone.config.num_hidden_layers
        lists = [part for part in self.backbone.modules() if isinstance(part, nn.ModuleList) and len(part) == count]
        return [self.backbone.get_input_embeddings(), *(lists[0] if lists else ())]

    def forward(self, tokens: Tokens) -> Tensor:
        if tokens.input_ids.is_cuda:
            # since torch 2.11, Hopper GPUs would use cuDNN attention, which builds a plan for each new shape (up to 0.4 s)
            torch.backends.cuda.enable_cudnn_sdp(False)
        compiled = self.compiled if self.training else None  # evaluation is too short to pay for compiling
        if compiled is not None or tokens.input_ids.device.type != "cpu":
            tokens = self._rounded(tokens, compiled is not None)
        if self.unpad:
            states = token_states(self.backbone, tokens)
        elif compiled is not None:
            states = compiled(input_ids=tokens.input_ids, attention_mask=tokens.attention_mask).last_hidden_state
        else:
            on_cpu = tokens.input_ids.device.type == "cpu"
            mask = tokens.attention_mask if on_cpu else attention_mask(tokens, self.backbone)
            states = self.backbone(input_ids=tokens.input_ids, attention_mask=mask).last_hidden_state
        vectors = pool(states, tokens.attention_mask, self.pooling)
        for layer in self.dense:
            vectors = layer(vectors)
        return vectors  # (n, d)

    def _rounded(self, tokens: Tokens, compiled: bool) -> Tokens:
        """Round the padded length up. Each new length costs time, because GPUs and compiled passes prepare kernels for it."""
        host = tokens.host_mask
        padded = host is not None and not host.all()
        bucket = self.bucket if compiled else BUCKET if padded else 1
        length = tokens.input_ids.shape[1]
        rounded = -(-length // bucket) * bucket
        extra = (0, min(rounded, self.position_limit or rounded) - length)
        if self.unpad or not any(extra):
            return tokens
        ids = F.pad(tokens.input_ids, extra, value=self.tokenizer.pad_token_id)
        return Tokens(ids, F.pad(tokens.attention_mask, extra), None if host is None else F.pad(host, extra))


def word_embeddings(backbone: Any) -> int | None:
    """Return the number of word embeddings, or None if the backbone has no table of word embeddings."""
    try:
        weight = getattr(backbone.get_input_embeddings(), "weight", None)
    except NotImplementedError:  # for example CANINE, which has no vocabulary
        return None
    return None if weight is None else len(weight)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Hide progress bars and warnings of transformers inside the ``with`` block."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(logging.ERROR)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


def set_attention(backbone: Any, name: str) -> None:
    """Choose the implementation of attention in a backbone. Raise InputError if the model type does not support ``name``."""
    family, reason = backbone.config.model_type, ""
    try:
        with quiet_transformers():
            backbone.set_attn_implementation(name)
    except (ValueError, ImportError) as error:
        reason = f" ({in_one_line(error)})"
    if reason or backbone.config._attn_implementation != name:  # some model types ignore the call
        raise InputError(
            f"model.attention is {name}, but the model type {family} does not support it{reason}. Use auto."
        )


def check_flash_attention(device: torch.device) -> None:
    """Raise InputError if ``device`` is not a CUDA device or if the package flash-attn is not installed."""
    if device.type != "cuda" or not is_flash_attn_2_available():
        raise InputError(
            f"model.attention is flash_attention_2, but the device is {device.type} or the package flash-attn is missing (pip "
            "install flash-attn --no-build-isolation). Use auto, which includes FlashAttention in PyTorch."
        )


def check_unpad(tower: Tower) -> None:
    """Raise InputError if the model type or the tokenizer of a tower does not allow forward passes without padding."""
    family = tower.backbone.config.model_type
    if family not in UNPADDED_FAMILIES:
        supported = ", ".join(UNPADDED_FAMILIES)
        raise InputError(
            f"model.unpad is true, but the model type is {family}; expected {supported}. Set model.unpad to false."
        )
    if tower.tokenizer.padding_side != "right":
        raise InputError("model.unpad is true, but the tokenizer pads on the left. Set model.unpad to false.")

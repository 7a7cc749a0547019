"""Options of the encoder: how to load it, how to encode texts with it, and how to train it."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta

from contaccum.config.declare import NonNegativeInt, PositiveFloat, PositiveInt, Share, setting

if TYPE_CHECKING:
    from contaccum.config import TrainConfig


@dataclass(kw_only=True, init=False, eq=False, repr=False)
class EncodingConfig:
    """Settings that decide how texts become vectors.

    A setting that is not given comes from the folder of the encoder.
    """

    pooling: Literal["cls", "mean", "last"] | None = None
    """How to make one vector from the token vectors: first token (cls), average (mean), or last
    token (last). Default: as stored in the folder of the encoder, else as published for its family
    (such as E5 or BGE), else last for a decoder and mean for other encoders."""
    similarity: Literal["cosine", "dot"] | None = None
    """How to compare two vectors: inner product of unit vectors (cosine) or of raw vectors (dot).
    Default: as stored in the folder of the encoder, else as published for its family, else
    cosine."""
    max_query_length: PositiveInt | None = None
    """Maximum number of tokens of a query. Longer queries are truncated. Default: as stored in the
    folder of the encoder (in training at most 512), else 64."""
    max_passage_length: PositiveInt | None = None
    """Maximum number of tokens of a passage. Longer passages are truncated. Default: as stored in
    the folder of the encoder (in training at most 512), else 256."""
    query_prefix: str | None = None
    """Text that is put before every query. Default: as stored in the folder of the encoder, else as
    published for its family (such as E5 or BGE), else none."""
    passage_prefix: str | None = None
    """Text that is put before every passage. Default: as stored in the folder of the encoder, else
    as published for its family (such as E5 or BGE), else none."""
    trust_remote_code: bool = False
    """Run model code that comes with the checkpoint. Use this only for sources that you trust."""


ENCODER_SETTINGS = tuple(
    each.name for each in fields(EncodingConfig) if each.name != "trust_remote_code"
)
"""Names of the settings that the folder of an encoder stores. Values that the user gives override
the stored values."""


@dataclass(kw_only=True, init=False, eq=False, repr=False)
class ProcessConfig:
    """Device of a process, and maximum time that the process waits for other processes."""

    device: Literal["auto", "cpu"] = "auto"
    """Device to compute on. `auto` uses CUDA if it is available, else MPS, else the CPU."""
    timeout_minutes: PositiveFloat = setting(30.0, resume="free")
    """Maximum number of minutes that a process waits for the other processes. Then the process
    stops."""


@dataclass
class EncoderConfig(EncodingConfig, ProcessConfig):
    """Encoder, and settings that override those stored in its folder."""

    model: str = setting("", required=True, metavar="MODEL")
    """Encoder: the folder of a run, of a trained model or of another encoder; a name on the Hub;
    or, except in `encode`, `bm25` (search by words, without an encoder)."""
    truncate_dim: PositiveInt | None = None
    """Number of dimensions to keep of each vector. Use one of the `loss.matryoshka_dims` that the
    model was trained with. Default: as stored in the folder of the encoder, else all dimensions."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Precision of weights and arithmetic. `auto` is fp32 without CUDA. With CUDA, it is the first
    of fp16, bf16 and fp32 in which the vectors of 64 passages agree with those of fp32 (cosine of
    at least 0.9999). If vectors or an index exist already, `auto` is their precision."""

    @classmethod
    def of(cls, model: "EncoderConfig | str | Path") -> "EncoderConfig":
        """Return ``model`` if it is a config, else that of the encoder of this name or folder."""
        return model if isinstance(model, cls) else cls(os.fspath(model))  # type: ignore[arg-type]


@dataclass
class ModelConfig(EncodingConfig):
    """Query tower, passage tower, and how to compare their vectors."""

    name: str = setting("bert-base-uncased", resume="never", metavar="MODEL")
    """Encoder of both towers: a name on the Hub; the folder of a run, of a trained model or of
    another encoder; or `tiny`, a small BERT with random weights and a vocabulary learned from the
    training texts."""
    passage_name: str | None = setting(None, resume="never", metavar="MODEL")
    """Encoder of the passage tower. Its stored passage prefix is used. Default: the same as
    `model.name`."""
    tie_towers: bool | None = setting(None, resume="never")
    """Train one encoder for both queries and passages. False: one encoder for each, as in DPR and
    the CONTACCUM paper, which needs twice the memory for weights, gradients and optimizer state.
    Default: as in the folder of the encoder, else true; with `model.passage_name`, false."""
    temperature: PositiveFloat = 0.05
    """Number by which the loss divides similarities. Use about 0.05 with cosine. The published
    value with dot is 1."""
    dropout: Share | None = None
    """Dropout probability of both towers in training. Default: the value in config.json of the
    encoder."""
    attention_dropout: Share | None = None
    """Dropout probability of the attention weights in training. Without padding on a CPU, it is
    rounded to a multiple of 1/256. Default: `model.dropout`, else the value in config.json of the
    encoder."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass instead of storing them. This saves memory,
    but a step takes about 1.5 times as long."""
    attention: Literal["auto", "eager", "sdpa"] = "auto"
    """Implementation of attention in transformers. `auto` lets transformers choose. It is not used
    without padding (`model.unpad`)."""
    unpad: bool | Literal["auto"] = "auto"
    """Skip padding tokens. The texts of a micro-batch are concatenated, and attention stays within
    each text. This works with BERT, RoBERTa, XLM-RoBERTa, CamemBERT, DistilBERT, ELECTRA,
    EuroBERT, ModernBERT, Llama, Mistral, Qwen2 and Qwen3. `auto`
    means true with these encoders on CUDA or a CPU, unless `model.attention` is eager or sdpa. The
    dev set is encoded in the same way."""
    quantize: Literal["none", "4bit"] = setting("none", resume="never")
    """Quantize the frozen weights of the encoder. `4bit` is QLoRA. Needs `lora.rank` above 0 and
    the extra `bitsandbytes`."""
    tiny_layers: PositiveInt = setting(2, resume="never")
    """Number of layers of the `tiny` encoder."""
    tiny_width: Annotated[int, Meta(ge=32, multiple_of=32)] = setting(128, resume="never")
    """Hidden size of the `tiny` encoder. It must be a multiple of 32."""
    tiny_vocabulary: Annotated[int, Meta(ge=100)] = setting(4000, resume="never")
    """Maximum number of tokens in the vocabulary of the `tiny` encoder."""

    def conflicts(self, config: "TrainConfig", world: int) -> Iterator[str]:
        if self.quantize != "none" and not config.lora.rank:
            yield (
                f"model.quantize is {self.quantize}, but lora.rank is 0; set lora.rank, because "
                "only adapters can be trained"
            )


@dataclass
class AdapterConfig:
    """Low-rank adapters (LoRA).

    Only small matrices next to the linear layers are trained; the encoders stay frozen.

    Tied towers have one adapter. Two towers from the same encoder share the frozen weights, but
    each tower has its own adapter. Adapters need the extra `lora`.
    """

    rank: NonNegativeInt = setting(0, resume="never")
    """Rank (r) of the matrices of the adapters. 0: no adapters, all weights of the encoders are
    trained."""
    alpha: PositiveFloat | None = setting(None, resume="never")
    """Scale of the adapters. The output of an adapter is multiplied by alpha / rank. Default: twice
    the rank."""
    dropout: Share = setting(0.0, resume="never")
    """Dropout probability of the inputs of the adapters in training. The dropout of the encoders is
    `model.dropout`."""
    target_modules: list[str] = setting(factory=list, resume="never")
    """Names of the linear layers that get an adapter, such as q_proj and v_proj. Default: all
    linear layers."""

    def scale(self) -> float:
        """Return `lora.alpha`, or its default (twice the rank)."""
        return 2.0 * self.rank if self.alpha is None else self.alpha

    def conflicts(self, config: "TrainConfig", world: int) -> Iterator[str]:
        if self.rank and config.model.name == "tiny":
            yield (
                "lora.rank is above 0, but model.name is 'tiny'. Choose the folder or the Hub name "
                "of an encoder. An adapter is saved without its encoder, so the random weights of "
                "the encoder 'tiny' would be lost."
            )

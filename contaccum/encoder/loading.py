"""From a source to towers: backbones, the adapters beside them, tokenizers, Dense layers."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError

from contaccum.encoder.adapters import Adapters, base_of, check_base, load_adapter, load_backbone, sharing
from contaccum.encoder.dense import load_dense
from contaccum.encoder.sources import Source, decoder_only
from contaccum.encoder.tokenizer import append_eos, load_tokenizer
from contaccum.encoder.tower import Tower, quiet_transformers
from contaccum.errors import InputError


@dataclass(frozen=True)
class Loading:
    """How the towers of a pair are loaded."""

    pooling: str
    trust_remote_code: bool
    dtype: torch.dtype
    append_eos: bool | None
    adapters: Adapters | None
    merge: bool
    device: torch.device | str | None

    def towers(self, query: Source, passage: Source, tied: bool) -> tuple[Tower, Tower]:
        """Both towers, or one twice. What adapters stand beside is loaded once where both have the same."""
        if self.merge and query.base is None and passage.base is None:
            raise InputError(f"{query.name}: has no adapter, expected a model that was trained with lora.rank above 0")
        first = self._plain(query)
        second = None
        if not tied:
            if _backbone_of(query) != _backbone_of(passage):
                second = self._plain(passage)
            else:
                shared = (query.base is not None or self.adapters is not None) and not self.merge
                second = sharing(first) if shared else copy.deepcopy(first)
        query_tower = self._tower(query, first)
        return query_tower, query_tower if second is None else self._tower(passage, second)

    def _plain(self, source: Source) -> Any:
        quantize = self.adapters.quantize if self.adapters else "none"
        if self.adapters and source.base:
            raise InputError(
                f"{source.name} has an adapter already, expected an encoder without one (contaccum merge makes it one)"
            )
        backbone = load_plain(source, self.dtype, quantize, self.device, self.trust_remote_code)
        if not (self.merge and getattr(backbone, "is_quantized", False)):
            return backbone
        with quiet_transformers():
            return backbone.dequantize()

    def _tower(self, source: Source, backbone: Any) -> Tower:
        how = {"backbone": backbone, "with_eos": self.append_eos}
        tower = load_tower(source, self.pooling, self.trust_remote_code, self.dtype, **how)
        if self.adapters is not None:
            tower.add_adapter(base_of(source.name, source.subfolder, self.adapters.quantize), self.adapters.config)
        elif self.merge:
            tower.merge_adapter()
        return tower


def _backbone_of(source: Source) -> tuple[str, str, str]:
    """Where the weights of a source's backbone are, an adapter's base for its own, and in which bits."""
    return (source.base.place, "", source.base.quantize) if source.base else (source.name, source.subfolder, "none")


def load_plain(source: Source, dtype: torch.dtype, quantize: str, device: Any, trust_remote_code: bool) -> Any:
    """The backbone that a source names, or that its adapter stands beside, without the adapter."""
    name, subfolder = (source.base.place, "") if source.base else (source.name, source.subfolder)
    if source.base:
        quantize = source.base.quantize
        check_base(source.base, source.name)
    try:
        with quiet_transformers():
            backbone = load_backbone(
                name, dtype, quantize, device, subfolder=subfolder, trust_remote_code=trust_remote_code
            )
    except InputError:
        raise
    except (OSError, ValueError, SafetensorError) as error:
        raise _not_loaded(name, error) from error
    if backbone.config.is_encoder_decoder:
        raise InputError(f"{name}: a {backbone.config.model_type} with encoder and decoder, expected an encoder alone")
    if decoder_only(backbone.config.model_type):
        backbone.config.use_cache = False  # what a next token would need, which nobody asks for
    return backbone


def load_tower(
    source: Source,
    pooling: str,
    trust_remote_code: bool = False,
    dtype: torch.dtype = torch.float32,
    *,
    backbone: Any = None,
    with_eos: bool | None = None,
) -> Tower:
    """Backbone, adapter, tokenizer and Dense layers of an encoder; half-precision weights are widened to ``dtype``.

    backbone: what ``load_plain`` gave, else it is loaded here. with_eos: whether texts end with the end-of-text token; not given,
    those of a decoder-only encoder do whose folder does not say, when its last token counts.
    """
    if backbone is None:
        backbone = load_plain(source, dtype, "none", None, trust_remote_code)
    try:
        with quiet_transformers():
            if source.base:
                load_adapter(backbone, source.name, source.subfolder)
            tokenizer = load_tokenizer(source, trust_remote_code)
    except InputError:
        raise
    except (OSError, ValueError, SafetensorError) as error:
        raise _not_loaded(source.name, error) from error
    decoder = decoder_only(backbone.config.model_type)
    if decoder:  # what stands behind a text is not seen by it, and positions begin at its first token
        tokenizer.padding_side = "right"
    if with_eos or (with_eos is None and decoder and source.plain and pooling == "last"):
        append_eos(tokenizer, source.name)
    return Tower(
        backbone, tokenizer, pooling, [load_dense(source.name, path, dtype) for path in source.dense], source.base
    )


def _not_loaded(name: str, error: Exception) -> InputError:
    reason = " ".join(str(error).split())
    return InputError(f"{name}: no encoder could be loaded from this folder or hub name ({reason})")

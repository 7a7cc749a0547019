"""Load a tower (backbone, adapter, tokenizer, Dense layers), or create a tiny tower with random weights."""

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypedDict

import torch
from safetensors.torch import load_file
from torch import nn
from transformers.utils import cached_file

from contaccum.encoder import adapters as lora
from contaccum.encoder.adapters import WEIGHTS, Adapters
from contaccum.encoder.folders import ModelFile, Positive, TowerFiles
from contaccum.encoder.kernels import decoder_only
from contaccum.encoder.tokenizer import append_eos, check_vocabulary, load_tokenizer, wordpiece_tokenizer
from contaccum.encoder.tower import Dense, Tower, quiet_transformers, word_embeddings
from contaccum.errors import InputError, library_errors
from contaccum.runtime.hub import loading, optional_json


@dataclass(frozen=True)
class TowerLoader:
    """Loads towers. The fields are the options for loading."""

    pooling: str
    trust_remote_code: bool = False
    dtype: torch.dtype = torch.float32
    append_eos: bool | None = None
    """Whether texts end with the end-of-text token. None: only for plain decoder-only encoders with last-token pooling."""
    adapters: Adapters | None = None
    merge: bool = False
    device: torch.device | str | None = None

    def load_pair(self, query: TowerFiles, passage: TowerFiles, tied: bool) -> tuple[Tower, Tower]:
        """Load the query tower and the passage tower. If the towers are tied, both are the same object.

        If both towers have an adapter on the same base, the base is in memory only once.
        """
        if self.merge and query.base is None and passage.base is None:
            raise InputError(f"{query.name}: has no adapter to merge; choose a model trained with lora.rank above 0")
        first = self.backbone(query)
        if tied:
            return (self.tower(query, first),) * 2
        if _weights_of(query) != _weights_of(passage):
            second = self.backbone(passage)
        else:
            shared = (query.base is not None or self.adapters is not None) and not self.merge
            second = lora.clone_sharing_weights(first) if shared else copy.deepcopy(first)
        return self.tower(query, first), self.tower(passage, second)

    def backbone(self, files: TowerFiles) -> Any:
        """Load the backbone of a tower, without an adapter."""
        name, subfolder, quantize = _weights_of(files)
        if files.base:
            if self.adapters:
                raise InputError(
                    f"{files.name}: already has an adapter, but lora.rank above 0 adds a second one. Merge the first "
                    "one with contaccum merge, then train the result."
                )
            lora.check_base(files.base, files.name)
        elif self.adapters:
            quantize = self.adapters.quantize
        # check the file before transformers reads it
        optional_json(name, f"{subfolder}/config.json".lstrip("/"), ModelFile)
        remote = {"subfolder": subfolder, "trust_remote_code": self.trust_remote_code}
        with loading(name), quiet_transformers():
            backbone = lora.load_backbone(name, self.dtype, quantize, self.device, **remote)
            if self.merge and quantize != "none":
                backbone = backbone.dequantize()
        family = backbone.config.model_type
        if backbone.config.is_encoder_decoder:
            raise InputError(f"{name}: {family} is an encoder-decoder; expected an encoder or a decoder")
        if decoder_only(family):
            backbone.config.use_cache = False  # the key-value cache is for generating text, which an encoder never does
        return backbone

    def tower(self, files: TowerFiles, backbone: Any) -> Tower:
        """Load the adapter, the tokenizer and the Dense layers of a tower. Return the tower that they form with ``backbone``."""
        with loading(files.name), quiet_transformers():
            if files.base:
                lora.load_adapter(backbone, files.name, files.subfolder)
            tokenizer = load_tokenizer(files, self.trust_remote_code)
        check_vocabulary(tokenizer, word_embeddings(backbone))
        decoder = decoder_only(backbone.config.model_type)
        if decoder:  # no token attends to padding on the right, and positions start at the first token
            tokenizer.padding_side = "right"
        guessed = decoder and files.plain and self.pooling == "last"
        if guessed if self.append_eos is None else self.append_eos:
            append_eos(tokenizer, files.name)
        dense = [load_dense(files.name, path, self.dtype) for path in files.dense]
        base = None if self.merge else files.base
        if self.adapters is not None:
            base = lora.base_of(files.name, files.subfolder, self.adapters.quantize)
            lora.add_adapter(backbone, base, self.adapters.config)
        elif self.merge and files.base:
            lora.merge(backbone)
        return Tower(backbone, tokenizer, self.pooling, dense, base)


def _weights_of(files: TowerFiles) -> tuple[str, str, str]:
    return (files.base.name, "", files.base.quantize) if files.base else (files.name, files.subfolder, "none")


class DenseConfig(TypedDict, total=False):
    """Content of config.json of a Dense module, a format of sentence-transformers."""

    in_features: Positive
    out_features: Positive
    bias: bool
    activation_function: str
    use_residual: bool | None
    module_input_name: str


def load_dense(name: str, subfolder: str, dtype: torch.dtype) -> Dense:
    """Load a Dense module of a sentence-transformers model from ``subfolder`` of the model."""
    where = f"{name}/{subfolder}"
    config = optional_json(name, f"{subfolder}/config.json", DenseConfig) or {}
    if config.get("use_residual") or config.get("module_input_name", "sentence_embedding") != "sentence_embedding":
        raise InputError(
            f"{where}: use_residual is true or module_input_name is not sentence_embedding; such a Dense module is not supported"
        )
    path = cached_file(name, WEIGHTS, subfolder=subfolder, _raise_exceptions_for_missing_entries=False)
    if path is None:
        raise InputError(f"{where}: Dense module without {WEIGHTS}; weights must be in safetensors format")
    activation = config.get("activation_function", "torch.nn.modules.activation.Tanh")
    kind = getattr(nn, activation.rpartition(".")[2], None) if activation.startswith("torch.nn.") else None
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise InputError(f"{where}: activation_function is {activation!r}; expected the name of a torch.nn activation")
    with library_errors(f"{where}: the Dense module could not be loaded", Exception):
        layer = Dense(config["in_features"], config["out_features"], config.get("bias", True), kind())
        layer.load_state_dict(load_file(path))
    return layer.to(dtype)


def tiny_tower(
    texts: Iterable[str], pooling: str, *, layers: int, width: int, vocabulary: int, max_length: int, seed: int
) -> Tower:
    """Create a tower with a small BERT that has random weights. Its WordPiece vocabulary is learned from ``texts``.

    layers: number of layers. width: number of dimensions of the vectors. vocabulary: maximum number of word pieces.
    max_length: maximum number of tokens of a text. seed: seed of the random weights.
    """
    from transformers import BertConfig, BertModel

    tokenizer = wordpiece_tokenizer(texts, vocabulary)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        intermediate_size=4 * width,
        max_position_embeddings=max_length,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Tower(BertModel(config), tokenizer, pooling)

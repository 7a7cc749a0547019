"""Types of the JSON files in the folder of an encoder. The types have only the fields that contaccum uses."""

from typing import Annotated, Any, Literal, TypedDict

import msgspec

NO_LIMIT = 1_000_000  # maximum number of tokens or dimensions; a model_max_length of this or more means "no limit"
Positive = Annotated[int, msgspec.Meta(ge=1, le=NO_LIMIT)]
Prefix = Annotated[str, msgspec.Meta(max_length=100_000)]


class ModuleEntry(TypedDict):
    """One entry of modules.json, a file of sentence-transformers."""

    type: str
    path: str


class RouterConfig(TypedDict, total=False):
    """Content of router_config.json, a file of sentence-transformers."""

    types: dict[str, str]
    structure: dict[str, list[str]]
    parameters: dict[str, Any]


class PromptConfig(TypedDict, total=False):
    """Content of config_sentence_transformers.json: prompts, similarity, and number of dimensions after truncation."""

    prompts: dict[str, Prefix | None] | None
    similarity_fn_name: str | None
    truncate_dim: Positive | None


class ModelConfig(TypedDict, total=False):
    """Fields that contaccum uses from config.json, tokenizer_config.json and sentence_bert_config.json."""

    model_type: str
    num_hidden_layers: Annotated[int, msgspec.Meta(ge=0, le=100_000)] | None
    max_position_embeddings: int | None
    model_max_length: float | None
    do_lower_case: bool | None
    max_seq_length: Positive | None
    query_length: Positive | None
    document_length: Positive | None
    processing_kwargs: dict[str, Any] | None


class AdapterFile(TypedDict, total=False):
    """Content of adapter_config.json, a file of peft."""

    peft_type: str | None
    base_model_name_or_path: str | None
    r: Annotated[int, msgspec.Meta(ge=1, le=NO_LIMIT)]


class BaseFile(TypedDict, total=False):
    """Content of base.json: hash and quantization of the encoder that an adapter was trained on."""

    sha256: str | None
    quantize: Literal["none", "4bit", "8bit"]

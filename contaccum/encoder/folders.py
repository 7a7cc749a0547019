"""Read the settings of an encoder and find the files of its towers.

This module reads JSON files, but no weights.

An encoder can have one of three formats: a folder that DualEncoder.save wrote, a
sentence-transformers model, or a plain transformers encoder. A sentence-transformers model may have
a Router module.
"""

import os
import re
import warnings
from collections.abc import Container
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypedDict

import msgspec
from transformers.models.auto import modeling_auto

from contaccum.errors import InputError
from contaccum.runtime.checks import require_utf8
from contaccum.runtime.files import check_type, read_json, refuse_url
from contaccum.runtime.hub import is_hub_name, optional_json, unknown_offline, why_offline

SETTINGS_FILE = "contaccum.json"
WEIGHTS = "model.safetensors"
TOWERS = ("query_encoder", "passage_encoder")
POOLING_FLAGS = {
    "cls": "pooling_mode_cls_token",
    "mean": "pooling_mode_mean_tokens",
    "last": "pooling_mode_lasttoken",
}
POOLINGS = tuple(POOLING_FLAGS)
SIMILARITIES = ("cosine", "dot")
SIDES = {"query": ("query",), "document": ("document", "passage", "corpus")}
"""Names of prompts and routes in sentence-transformers models: for queries (``query``) and for
passages (``document``)."""
ADAPTER_FILE = "adapter_config.json"  # written by peft; contains the name of the base
BASE_FILE = "base.json"  # written by contaccum; contains the hash and the quantization of the base
# an encoder's folder has one of these
MODEL_FILES = (
    SETTINGS_FILE,
    "modules.json",
    "config.json",
    ADAPTER_FILE,
)

# files with the settings of a Transformer module; sentence-transformers reads the first one that
# exists
TRANSFORMER_FILES = tuple(
    f"sentence_{family}_config.json"
    for family in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
# options of a Transformer module that do not change the vector of a text, or that
# sentence-transformers sets itself
HARMLESS_OPTIONS = {
    "add_pooling_layer", "attn_implementation", "cache_dir", "chat_template",
    "clean_up_tokenization_spaces", "device_map", "dtype", "local_files_only", "low_cpu_mem_usage",
    "pad_to_multiple_of", "padding", "padding_side", "return_attention_mask", "return_dict",
    "return_tensors", "return_token_type_ids", "revision", "subfolder", "token", "torch_dtype",
    "trust_remote_code", "unpad_inputs", "use_cache", "use_fast", "use_flash_attn",
    "use_memory_efficient_attention",
}  # fmt: skip

# names of model families whose members have different settings
FAMILY_WORDS = re.compile(r"(?<![a-z0-9])(m?e5|bge|gte|nomic|m?contriever)(?![a-z0-9])")
# those whose members all need prefixes
NEEDS_PREFIX = re.compile(r"(?<![a-z0-9])(m?e5|nomic)(?![a-z0-9])")
# kinds of models in sentence-transformers that make no single dense vector of a text
OTHER_KINDS = {
    "CrossEncoder": "a cross-encoder, which scores a query and a passage together",
    "MultiVectorEncoder": "a ColBERT model, which makes one vector for each token",
    "SparseEncoder": "a sparse encoder (SPLADE), which makes one weight for each word",
}

# maximum number of tokens or dimensions; a model_max_length of this or more means "no limit"
NO_LIMIT = 1_000_000
Positive = Annotated[int, msgspec.Meta(ge=1, le=NO_LIMIT)]


@dataclass(frozen=True)
class EncoderSettings:
    """Settings of a DualEncoder, which are saved in contaccum.json."""

    pooling: str = "mean"
    similarity: str = "cosine"
    max_query_length: Positive = 64
    max_passage_length: Positive = 256
    query_prefix: str = ""
    passage_prefix: str = ""
    tie_towers: bool = False
    truncate_dim: Positive | None = None
    """Number of dimensions to keep of each vector, counted from the first. None: keep all
    dimensions."""
    prompts: dict[str, str] = field(default_factory=dict)
    """Other prompts of a sentence-transformers model by name, which a saved model has again."""
    default_prompt: str | None = None
    """Name of the prompt that sentence-transformers uses in plain ``encode``. None: the passage
    prefix."""


@dataclass(frozen=True)
class Base:
    """Encoder that an adapter was trained on."""

    name: str  # folder or Hub name
    # SHA-256 of the encoder's files; None if contaccum did not write the adapter
    sha256: str | None = None
    quantize: str = "none"  # none or 4bit


@dataclass(frozen=True)
class TowerFiles:
    """Folders with the files of one tower, and information for loading them."""

    name: str  # folder or Hub name
    subfolder: str = ""  # subfolder with the backbone and the tokenizer
    dense: tuple[str, ...] = ()  # folders of the Dense modules after pooling
    lower_case: bool = False  # whether to convert texts to lower case before the tokenizer
    base: Base | None = None  # encoder that the adapter was trained on; None without an adapter
    # whether this is a plain encoder, without settings for pooling and end-of-text tokens
    plain: bool = False


@dataclass(frozen=True)
class Module:
    """One module of a sentence-transformers model, as in modules.json."""

    type: str  # name of the class; in modules.json with its package
    path: str  # folder of the module inside the folder of the model


class EncoderFiles(NamedTuple):
    """Result of ``read_encoder``: the settings of an encoder, and the files of both towers."""

    settings: dict[str, Any]  # values for fields of EncoderSettings
    query: TowerFiles
    passage: TowerFiles
    # SHA-256 of each file with weights; keys are paths in the folder
    sha256: dict[str, str] | None = None


# Types of JSON files in the folder of an encoder. They have only the fields that contaccum uses.


class RouterConfig(TypedDict, total=False):
    """Content of router_config.json, a file of sentence-transformers."""

    types: dict[str, str]
    structure: dict[str, list[str]]
    parameters: dict[str, Any] | None


class PromptConfig(TypedDict, total=False):
    """Content of config_sentence_transformers.json: prompts, similarity, truncated width."""

    prompts: dict[str, str | None] | None
    default_prompt_name: str | None
    similarity_fn_name: str | None
    truncate_dim: Positive | None
    model_type: str | None


class ModelFile(TypedDict, total=False):
    """Fields that we use from config, tokenizer_config and TRANSFORMER_FILES."""

    model_type: str
    _name_or_path: str | None
    num_hidden_layers: int | None
    max_position_embeddings: int | None
    model_max_length: float | None
    add_eos_token: bool | None
    do_lower_case: bool | None
    max_seq_length: Positive | None
    query_length: Positive | None
    document_length: Positive | None
    transformer_task: str | None
    modality_config: dict[str, Any] | None
    processing_kwargs: dict[str, dict[str, Any]] | None
    processor_kwargs: dict[str, Any] | None
    tokenizer_args: dict[str, Any] | None
    config_kwargs: dict[str, Any] | None
    config_args: dict[str, Any] | None


class AdapterFile(TypedDict, total=False):
    """Content of adapter_config.json, a file of peft."""

    peft_type: str | None
    task_type: str | None
    base_model_name_or_path: str | None
    r: Positive


class BaseFile(TypedDict, total=False):
    """Content of base.json: hash and quantization of the encoder that an adapter was trained on."""

    sha256: str | None
    quantize: Literal["none", "4bit"]


def make_settings(values: dict[str, Any], source: str) -> EncoderSettings:
    """Check settings and return them. source: folder or Hub name, for error messages."""
    for key, allowed in (("pooling", POOLINGS), ("similarity", SIMILARITIES)):
        if key in values and values[key] not in allowed:
            raise InputError(
                f"{source}: {key} is {values[key]!r}; expected one of {', '.join(allowed)}"
            )
    known = {field.name for field in fields(EncoderSettings)}
    unknown = sorted(values.keys() - known)
    if unknown:
        raise InputError(
            f"{source}: {SETTINGS_FILE} or an argument has an unknown setting "
            f"({', '.join(unknown)}); known settings are {', '.join(sorted(known))}"
        )
    for key in ("query_prefix", "passage_prefix"):
        require_utf8(str(values.get(key)), f"{source}: {key}")
    return check_type(values, EncoderSettings, source)


def family_settings(name: str) -> dict[str, Any]:
    """Return the published settings of a model family, or an empty dictionary if unknown.

    name: folder or Hub name. The name of the model in it is compared with the patterns in
    families.json, and the first pattern that matches is used. The owner may be part of the name, as
    in intfloat_e5-base-v2.
    """
    for family in read_json(Path(__file__).with_name("families.json")):
        if re.fullmatch(rf"(.+(--|_))?({family['models']})", _model_name(name)):
            return family["settings"]
    return {}


def _model_name(name: str) -> str:
    """Return the last part of a folder or Hub name in lower case, without the layout of a cache.

    The Hub's cache has folders such as models--intfloat--e5-base-v2/snapshots/COMMIT; ModelScope's
    cache has ___ instead of a dot.
    """
    parts = [part for part in re.split(r"[/\\]", name.lower()) if part]
    if len(parts) > 2 and parts[-2] == "snapshots":
        parts = parts[:-2]
    return parts[-1].replace("___", ".") if parts else ""


def _published_settings(
    name: str, subfolder: str, base: Base | None, keys: tuple[str, ...], given: Container[str]
) -> dict[str, Any]:
    """Return those of the published settings of the model ``name`` that are in ``keys``.

    The model's own name decides, then that of an adapter's base, then the name that config.json
    keeps in a fine-tuned copy. Warn if the last one decides, and if a name contains that of a
    family, but the settings are not known. given: settings of the caller, which are left out.
    """
    config = optional_json(name, _join(subfolder, "config.json"), ModelFile) or {}
    original = config.get("_name_or_path") or ""
    undecided = [key for key in keys if key not in given]
    for known_as in (name, base.name if base else "", original):
        if published := family_settings(known_as):
            settings = {key: published[key] for key in undecided if key in published}
            if known_as is original and settings:
                used = ", ".join(f"{key} {value!r}" for key, value in settings.items())
                warnings.warn(
                    f"{name}: config.json says that this is a copy of {original}, so {used} are "
                    "used, as published for that model. If the copy was trained with other "
                    "settings, give these.",
                    stacklevel=2,
                )
            return settings
    words = FAMILY_WORDS if "pooling" in keys else NEEDS_PREFIX
    family = words.search(_model_name(name)) or words.search(_model_name(original))
    if family and undecided:
        warnings.warn(
            f"{name}: this seems to be a {family[0]} model, but its settings are not known, so "
            f"{', '.join(undecided)} have their defaults. Give the settings from the model's card.",
            stacklevel=2,
        )
    return {}


def model_folder(name: str | Path) -> str:
    """Return the folder of the trained model if ``name`` is the folder of a run.

    Otherwise return ``name``.

    Raises InputError if ``name`` is a file, a run without a trained model, or neither a folder nor
    a valid Hub name.
    """
    refuse_url(name)
    text = os.path.expanduser(name)
    if os.path.isfile(os.path.join(text, "model", SETTINGS_FILE)):
        return os.path.join(text, "model")
    files = os.listdir(text) if os.path.isdir(text) else ()
    if "config.yaml" in files and not any(file in files for file in MODEL_FILES):
        raise InputError(
            f"{text}: this run has no model/ yet, because its training is not finished. Resume "
            "the training with contaccum train --resume, or use a folder in checkpoints/."
        )
    if not os.path.isdir(text) and (os.path.exists(text) or not is_hub_name(text)):
        raise InputError(
            f"{text}: no such folder; expected the folder of a model or of a run, or a Hub name "
            "(owner/name)"
        )
    return text


def run_of(model: str | Path) -> Path:
    """Return the folder of the run to which a model belongs, if it belongs to a run.

    A run has its models in model/ and in checkpoints/step-N/model/.
    """
    folder = Path(model_folder(model)).absolute()
    in_checkpoint = folder.parent.parent.name == "checkpoints"
    return folder.parents[2] if in_checkpoint else folder.parent


def read_encoder(name: str, given: Container[str] = ()) -> EncoderFiles:
    """Read the settings of an encoder and find the files of both towers.

    name: folder or Hub name of a saved DualEncoder, a sentence-transformers model or a plain
    transformers encoder. given: names of the settings that the caller chose; contaccum does not
    warn about these. Raises InputError if the encoder has modules that contaccum does not support.
    """
    saved = optional_json(name, SETTINGS_FILE, dict[str, Any], version=1)
    if saved is not None:
        saved.pop("format_version", None)
        hashes = check_type(saved.pop("sha256", {}), dict[str, str], f"{name}: sha256")
        folders = ("", "") if saved.get("tie_towers") else TOWERS
        query, passage = (_tower_files(name, _modules(name, folder)) for folder in folders)
        return EncoderFiles({"tie_towers": False, **saved}, query, passage, hashes)
    if optional_json(name, "modules.json", list[Module]) is None:
        if "pooling" not in given and unknown_offline(name, "modules.json"):
            warnings.warn(
                f"{name}: the cache of the Hub does not have modules.json, and {why_offline()}. If "
                "the model has this file, its pooling, similarity and prefixes are unknown; load "
                "it once with a connection",
                stacklevel=2,
            )
        base = _base(name, "")
        if base and optional_json(base.name, "modules.json", list[Module]) is not None:
            return _adapter_on_sentence_transformers(name, base, given)
        keys = ("pooling", "similarity", "query_prefix", "passage_prefix")
        settings = _published_settings(name, "", base, keys, given)
        config = optional_json(base.name if base else name, "config.json", ModelFile) or {}
        if decoder_only(config.get("model_type", "")):
            settings = {"pooling": "last", **settings}
        plain = TowerFiles(name, base=base, plain=True)
        return EncoderFiles(settings, plain, plain)
    return _read_sentence_transformers(name, given)


def _adapter_on_sentence_transformers(name: str, base: Base, given: Container[str]) -> EncoderFiles:
    """Return the settings of the base, and the files of an adapter that states no settings."""
    files = read_encoder(base.name, given)
    bare = TowerFiles(base.name, lower_case=files.query.lower_case)
    if (files.query, files.passage) != (bare, bare):
        raise InputError(
            f"{name}: the base of the adapter, {base.name}, has Dense modules, two encoders, an "
            "adapter or an encoder in a subfolder; expected a base with one encoder and pooling "
            "only"
        )
    tower = replace(bare, name=name, base=base)
    return EncoderFiles(files.settings, tower, tower)


def _read_sentence_transformers(name: str, given: Container[str]) -> EncoderFiles:
    about = optional_json(name, "config_sentence_transformers.json", PromptConfig) or {}
    kind = about.get("model_type") or "SentenceTransformer"
    if str(about.get("similarity_fn_name")).lower() == "maxsim":  # a model of PyLate
        kind = "MultiVectorEncoder"
    if kind != "SentenceTransformer":
        raise InputError(
            f"{name}: is {OTHER_KINDS.get(kind, kind)}; expected an encoder that makes one dense "
            "vector for each text"
        )
    query, query_files = _read_side(name, "query", about)
    passage, passage_files = _read_side(name, "document", about)
    for key in ("pooling", "similarity"):
        if query[key] != passage[key]:
            raise InputError(
                f"{name}: {key} is {query[key]} for queries and {passage[key]} for passages; they "
                "must be equal"
            )
    settings = {**query, **passage, "tie_towers": query_files == passage_files}
    prefixes = _prompts(about)
    if not any(prefixes.values()):
        prefixes = _published_settings(
            name, query_files.subfolder, query_files.base, tuple(prefixes), given
        )
    settings |= prefixes
    prefix = settings.get("passage_prefix", "")
    settings["prompts"] = {
        key: text
        for key, text in (about.get("prompts") or {}).items()
        if text is not None and key not in SIDES
    }
    default = about.get("default_prompt_name")
    # the passage prefix is the default anyway, also if it changes later
    if default not in SIDES["document"] or settings["prompts"].get(default, prefix) != prefix:
        settings["default_prompt"] = default
    if about.get("truncate_dim") is not None:
        settings["truncate_dim"] = about["truncate_dim"]
    return EncoderFiles(settings, query_files, passage_files)


def _prompts(about: dict[str, Any]) -> dict[str, str]:
    """Return the query prefix and the passage prefix of a sentence-transformers model.

    The query prefix is the first non-empty prompt for queries. The passage prefix is the first
    non-empty prompt for passages. about: config_sentence_transformers.json.
    """
    prompts = about.get("prompts") or {}
    prefixes = {}
    for side, setting in (("query", "query_prefix"), ("document", "passage_prefix")):
        found = [prompts[key] for key in SIDES[side] if prompts.get(key)]
        prefixes[setting] = found[0] if found else ""
    return prefixes


def _modules(name: str, subfolder: str = "") -> list[Module]:
    """Return the modules that modules.json lists.

    Without this file, the folder is one plain encoder.
    """
    listed = optional_json(name, _join(subfolder, "modules.json"), list[Module]) or [Module("", "")]
    return [
        Module(_class_name(name, module.type), _join(subfolder, module.path)) for module in listed
    ]


def _class_name(name: str, kind: str) -> str:
    """Return the class of a module without its package. kind: its name in modules.json."""
    if kind and not kind.startswith("sentence_transformers."):
        raise InputError(
            f"{name}: has a module of the class {kind}, which can compute other vectors than a "
            "module of sentence-transformers; expected classes of sentence_transformers only"
        )
    return kind.rpartition(".")[2]


def _join(folder: str, path: str) -> str:
    return f"{folder}/{path}".strip("/")


def _routed(name: str, router: Module, side: str) -> list[Module]:
    """Return the modules of a Router for ``side`` (query or document)."""
    file = _join(router.path, "router_config.json")
    config = optional_json(name, file, RouterConfig) or {}
    structure, types = config.get("structure", {}), config.get("types", {})
    route = next((route for route in SIDES[side] if route in structure), None)
    if route is None:
        raise InputError(
            f"{name}/{file}: found the routes {', '.join(structure) or 'none'}, but no route for "
            f"{side}"
        )
    default = (config.get("parameters") or {}).get("default_route")
    if side == "document" and default not in (None, route):
        warnings.warn(
            f"{name}/{file}: default_route is {default}, which a saved model does not keep: there, "
            "plain encode of sentence-transformers uses the encoder of passages",
            stacklevel=2,
        )
    return [
        Module(_class_name(name, types.get(path, "")), _join(router.path, path))
        for path in structure[route]
    ]


def _read_side(name: str, side: str, about: dict[str, Any]) -> tuple[dict[str, Any], TowerFiles]:
    modules = _modules(name)
    if modules[0].type == "Router":
        modules = [*_routed(name, modules[0], side), *modules[1:]]
    # the first module is a model itself: adapters are saved in this format
    if modules and modules[0].type == "SentenceTransformer":
        modules = [*_modules(name, modules[0].path), *modules[1:]]
    kinds = [module.type for module in modules]
    normalized = "Normalize" in kinds
    dense = ["Dense"] * kinds.count("Dense")
    if kinds != ["Transformer", "Pooling", *dense, *["Normalize"] * normalized]:
        raise InputError(
            f"{name}: modules are {', '.join(kinds)}; expected Transformer, Pooling, any number of "
            "Dense, and at most one Normalize"
        )
    files = _tower_files(name, modules)
    # in sentence-transformers the default similarity is cosine, even without a Normalize module
    named = str(about.get("similarity_fn_name") or "cosine")
    similarity = named.replace("dot_score", "dot").replace("cos_sim", "cosine")
    if similarity == "dot" and normalized:
        if about.get("truncate_dim"):
            raise InputError(
                f"{name}: truncate_dim is {about['truncate_dim']}, but similarity_fn_name is "
                f"{about['similarity_fn_name']}. Truncated vectors lose the L2 norm of 1. Set "
                "similarity_fn_name to cosine in config_sentence_transformers.json."
            )
        similarity = "cosine"  # inner products of unit vectors
    pooling = optional_json(name, _join(modules[1].path, "config.json"), dict[str, Any]) or {}
    if pooling.get("include_prompt") is False and any((about.get("prompts") or {}).values()):
        raise InputError(
            f"{name}: pooling excludes the prompt (include_prompt is false); contaccum supports "
            "only pooling over all tokens"
        )
    settings: dict[str, Any] = {"pooling": _pooling(pooling, name), "similarity": similarity}
    length = _max_length(name, files.subfolder, side)
    if length is not None:
        settings["max_query_length" if side == "query" else "max_passage_length"] = length
    return settings, files


def _tower_files(name: str, modules: list[Module]) -> TowerFiles:
    folder = modules[0].path
    file, config = _transformer_config(name, folder)
    _refuse_options(name, folder, file, config)
    # a folder with this entry is encoded with the chat template, also without a prompt
    if "message" in (config.get("modality_config") or {}):
        raise InputError(
            f"{name}/{file}: modality_config has message, so sentence-transformers puts each text "
            "into the chat template of the tokenizer, which contaccum does not support; expected "
            "only text"
        )
    task = config.get("transformer_task") or "feature-extraction"
    if task != "feature-extraction":
        raise InputError(f"{name}/{file}: transformer_task is {task}; expected feature-extraction")
    return TowerFiles(
        name,
        subfolder=folder,
        dense=tuple(module.path for module in modules if module.type == "Dense"),
        lower_case=bool(config.get("do_lower_case")),
        base=_base(name, folder),
    )


def _transformer_config(name: str, subfolder: str) -> tuple[str, ModelFile]:
    """Return the name and the content of the file with the settings of a Transformer module."""
    for each in TRANSFORMER_FILES:
        if config := optional_json(name, _join(subfolder, each), ModelFile):
            return _join(subfolder, each), config
    return _join(subfolder, TRANSFORMER_FILES[0]), {}


def _refuse_options(name: str, subfolder: str, file: str, config: ModelFile) -> None:
    """Raise InputError if a Transformer module has an option that could change vectors.

    file, config: see ``_transformer_config``.
    """
    called = config.get("processing_kwargs") or {}
    of_tokenizer = config.get("processor_kwargs") or config.get("tokenizer_args")
    of_model = config.get("config_kwargs") or config.get("config_args")
    defaults = [("add_special_tokens", True), ("truncation", True), ("truncation", "longest_first")]
    for options, supported, stored in (
        (called.get("text"), "max_length", None),
        (called.get("common"), "", None),
        (of_tokenizer, "model_max_length", "tokenizer_config.json"),
        (of_model, "", "config.json"),
    ):
        if not options:
            continue
        same: Container[Any] = defaults  # options that the model has anyway
        if stored is not None:
            content = optional_json(name, _join(subfolder, stored), dict[str, Any]) or {}
            same = content.items()
        for key, value in options.items():
            known = value is None or key == supported or key in HARMLESS_OPTIONS
            if not known and (key, value) not in same:
                raise InputError(
                    f"{name}/{file}: has the option {key} {value!r}, which can change vectors and "
                    "is not supported; expected a folder without it"
                )


def _base(name: str, subfolder: str) -> Base | None:
    """Return the encoder that the adapter in a folder was trained on.

    Return None if the folder has a full encoder.
    """
    adapter = optional_json(name, _join(subfolder, ADAPTER_FILE), AdapterFile)
    model = optional_json(name, _join(subfolder, "config.json"), ModelFile)
    if adapter is None or model is not None:
        return None
    task, kind = adapter.get("task_type") or "", adapter.get("peft_type", "LORA")
    if task.endswith(("_CLS", "QUESTION_ANS")) or kind != "LORA":
        raise InputError(
            f"{name}: {ADAPTER_FILE} has task_type {task or 'null'} and peft_type {kind}; expected "
            "a LORA adapter of an encoder, not of a classifier such as a cross-encoder"
        )
    base = adapter.get("base_model_name_or_path")
    try:
        base = model_folder(base or "")
    except InputError as error:
        raise InputError(f"{name}: the base of the adapter cannot be loaded: {error}") from error
    saved = optional_json(name, _join(subfolder, BASE_FILE), BaseFile) or {}
    return Base(base, saved.get("sha256"), saved.get("quantize", "none"))


def decoder_only(family: str) -> bool:
    """Return whether transformers has a causal language model of this type, but no masked one."""
    causal, masked = (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    )
    return family in causal and family not in masked


def _max_length(name: str, subfolder: str, side: str) -> int | None:
    """Return the maximum number of tokens of a text, or None if the files do not state one.

    Uses the same files as sentence-transformers. side: ``query`` or ``document``.
    """
    _, config = _transformer_config(name, subfolder)
    of_tokenizer = config.get("processor_kwargs") or config.get("tokenizer_args") or {}
    stated = (
        ((config.get("processing_kwargs") or {}).get("text") or {}).get("max_length")
        or config.get(f"{side}_length")
        or of_tokenizer.get("model_max_length")
        or config.get("max_seq_length")
    )
    if stated:
        return check_type(stated, Positive, f"{name}: maximum length of a {side}")
    tokenizer = optional_json(name, _join(subfolder, "tokenizer_config.json"), ModelFile) or {}
    model = optional_json(name, _join(subfolder, "config.json"), ModelFile) or {}
    limits = [tokenizer.get("model_max_length"), model.get("max_position_embeddings")]
    return min(
        (int(limit) for limit in limits if limit is not None and 0 < limit < NO_LIMIT), default=None
    )


def _pooling(config: dict[str, Any], name: str) -> str:
    """Return cls, mean or last. config: 1_Pooling/config.json of a sentence-transformers model."""
    # newer files have the name of the mode, older files have a flag for each mode
    mode = config.get("pooling_mode")
    chosen = [
        pooling
        for pooling, flag in POOLING_FLAGS.items()
        if config.get(flag) or mode in (pooling, f"{pooling}token")
    ]
    flags = [
        key for key, value in config.items() if key.startswith("pooling_mode_") and value is True
    ]
    if len(chosen) != 1 or len(flags) > 1:
        raise InputError(
            f"{name}: the pooling configuration {config} is not supported; expected exactly one of "
            f"{', '.join(POOLINGS)}"
        )
    return chosen[0]

"""What a folder or hub name says of an encoder: settings, and where each tower's parts lie. Reads; loads no weights.

Three forms: what DualEncoder.save writes; any sentence-transformers model, its two sides alike or routed apart by a Router (Asym
in older versions); a plain encoder, whose family is known by name or not.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from transformers.models.auto import modeling_auto
from transformers.utils import cached_file

from contaccum.encoder.families import family_settings
from contaccum.encoder.settings import SETTINGS_FILE, TOWERS
from contaccum.errors import InputError
from contaccum.files import read_json

SIDES = {"query": ("query",), "document": ("document", "passage", "corpus")}
"""sentence-transformers' names of the two sides, under which it keeps prompts and routes."""
ADAPTER_FILE = "adapter_config.json"
"""peft's file beside an adapter; it names the base."""
BASE_FILE = "base.json"
"""Ours beside it: what the base was when the adapter was trained."""
NO_LIMIT = 1_000_000
"""A tokenizer's length from here on stands for none."""


@dataclass(frozen=True)
class Base:
    """The encoder that an adapter was trained beside."""

    place: str
    """Folder or hub name."""
    sha256: str | None = None
    """Hash of its files; None where an adapter of another program does not say."""
    quantize: str = "none"
    """The bits that it was held in: none (all), 4bit or 8bit."""


@dataclass(frozen=True)
class Source:
    """Where one tower's parts lie, and what its tokenizer is to do."""

    name: str
    """Folder or hub name."""
    subfolder: str = ""
    """Where the backbone and the tokenizer lie in it."""
    dense: tuple[str, ...] = ()
    """Subfolders of the Dense modules behind the pooling."""
    lower_case: bool = False
    """Whether texts are to be lower-cased, whatever the tokenizer does by itself."""
    base: Base | None = None
    """Where the backbone's own weights are, when nothing but an adapter lies here."""
    plain: bool = False
    """Whether the folder says nothing of pooling and of how texts end."""


class Part(NamedTuple):
    """One module of a sentence-transformers model."""

    kind: str  # the last part of its class's name
    path: str  # its folder, seen from the model's


class Encoder(NamedTuple):
    """What was found."""

    settings: dict[str, Any]  # fields of EncoderSettings, those that are known
    query: Source
    passage: Source


def read_encoder(name: str) -> Encoder:
    """Read any of the three forms; InputError where modules do what a tower of ours does not."""
    ours = optional_json(name, SETTINGS_FILE)
    if ours is not None:
        if not isinstance(ours, dict):
            raise InputError(f"{name}: {SETTINGS_FILE} holds {type(ours).__name__}, expected an encoder's settings")
        first, second = (_source_of(name, _parts(name, tower)) for tower in TOWERS)
        return Encoder({"tie_towers": False, **ours}, first, first if ours.get("tie_towers") else second)
    if optional_json(name, "modules.json") is None:
        plain = Source(name, base=_base(name, ""), plain=True)
        by_kind = {"pooling": "last"} if _decoder_only(plain) else {}
        return Encoder(by_kind | family_settings(name), plain, plain)
    about = optional_json(name, "config_sentence_transformers.json") or {}
    query, query_source = _read_side(name, "query", about)
    passage, passage_source = _read_side(name, "document", about)
    for key in ("pooling", "similarity"):
        if query.get(key) != passage.get(key):
            raise InputError(
                f"{name}: {key} is {query.get(key)} for queries and {passage.get(key)} for passages, expected one for both"
            )
    settings = {**passage, "tie_towers": query_source == passage_source}
    settings |= {"max_query_length": query["max_length"], "max_passage_length": passage["max_length"]}
    settings |= {"truncate_dim": about.get("truncate_dim")}
    settings = {key: value for key, value in settings.items() if key != "max_length" and value is not None}
    return Encoder(settings | _prefixes(name, about), query_source, passage_source)


def _prefixes(name: str, about: dict[str, Any]) -> dict[str, str]:
    prompts = about.get("prompts") or {}
    first = {
        side: next((prompts[key] for key in keys if prompts.get(key)), "") for side, keys in SIDES.items()
    }  # the first that is not empty
    if not any(first.values()):
        return {key: value for key, value in family_settings(name).items() if key.endswith("_prefix")}
    return {"query_prefix": first["query"], "passage_prefix": first["document"]}


def _parts(name: str, subfolder: str = "") -> list[Part]:
    """The modules that modules.json in a folder of the model lists, in their order."""
    listed = optional_json(name, _join(subfolder, "modules.json"))
    return [Part(_kind(each["type"]), _join(subfolder, each["path"])) for each in listed or [{"type": "", "path": ""}]]


def _kind(type_name: str) -> str:
    return type_name.rpartition(".")[2]


def _join(folder: str, path: str) -> str:
    return f"{folder}/{path}".strip("/")


def _routed(name: str, router: Part, side: str) -> list[Part]:
    """The modules of one side of a Router, the route's default where the side has none of its own."""
    files = [_join(router.path, file) for file in ("router_config.json", "config.json")]
    config = next(filter(None, (optional_json(name, file) for file in files)), None)
    if config is None:
        raise InputError(f"{name}: modules.json names a {router.kind}, expected its {files[0]}")
    mapped = config["parameters"].get("route_mappings") or {}
    asked = [(task, modality) for task in (*SIDES[side], None) for modality in ("text", None)]
    routes = [mapped[str(key)] for key in asked if str(key) in mapped]
    routes += [key for key in (*SIDES[side], "text") if key in config["structure"]]
    if not routes:
        raise InputError(
            f"{name}: its {router.kind} has the routes {', '.join(config['structure'])}, expected one for {side}"
        )
    return [Part(_kind(config["types"][key]), _join(router.path, key)) for key in config["structure"][routes[0]]]


def _read_side(name: str, side: str, about: dict[str, Any]) -> tuple[dict[str, Any], Source]:
    """Pooling, similarity and length of one side, and where its parts lie."""
    parts = _parts(name)
    if parts[0].kind in ("Router", "Asym"):
        parts = [*_routed(name, parts[0], side), *parts[1:]]
    if parts[0].kind == "SentenceTransformer":  # a model as a module of another one, as routes lead to adapters
        parts = [*_parts(name, parts[0].path), *parts[1:]]
    kinds = [part.kind for part in parts]
    if kinds != ["Transformer", "Pooling", *["Dense"] * kinds.count("Dense"), *["Normalize"] * ("Normalize" in kinds)]:
        raise InputError(
            f"{name}: its modules are {', '.join(kinds)}, expected Transformer, Pooling, any Dense, and Normalize or none"
        )
    source = _source_of(name, parts)
    # their own default where a model neither normalises nor says otherwise
    dot = about.get("similarity_fn_name") in ("dot", "dot_score")
    if dot and "Normalize" in kinds and about.get("truncate_dim"):
        raise InputError(
            f"{name}: truncate_dim is {about['truncate_dim']}, which cuts unit vectors to compare them by dot product, expected "
            "whole vectors or cosine"
        )
    dot = dot and "Normalize" not in kinds
    pooling = optional_json(name, _join(parts[1].path, "config.json")) or {}
    if pooling.get("include_prompt") is False and any(_prefixes(name, about).values()):
        raise InputError(f"{name}: its pooling leaves the prompt out, expected one over all tokens")
    return {
        "pooling": _pooling_of(pooling, name),
        "similarity": "dot" if dot else "cosine",
        "max_length": _length(name, source.subfolder, side),
    }, source


def _source_of(name: str, parts: list[Part]) -> Source:
    dense = tuple(part.path for part in parts if part.kind == "Dense")
    said = optional_json(name, _join(parts[0].path, "sentence_bert_config.json")) or {}
    return Source(name, parts[0].path, dense, bool(said.get("do_lower_case")), _base(name, parts[0].path))


def _base(name: str, subfolder: str) -> Base | None:
    """The base of the adapter in a folder; None where a whole encoder lies there."""
    adapter = optional_json(name, _join(subfolder, ADAPTER_FILE))
    if adapter is None or optional_json(name, _join(subfolder, "config.json")) is not None:
        return None
    place = adapter.get("base_model_name_or_path")
    if not place:
        raise InputError(
            f"{name}: its {ADAPTER_FILE} has no base_model_name_or_path, expected the encoder it belongs to"
        )
    said = optional_json(name, _join(subfolder, BASE_FILE)) or {}
    return Base(place, said.get("sha256"), said.get("quantize", "none"))


def _decoder_only(source: Source) -> bool:
    config = optional_json(source.base.place if source.base else source.name, "config.json") or {}
    return decoder_only(config.get("model_type", ""))


def decoder_only(family: str) -> bool:
    """Whether a model type is a decoder's without an encoder: one that writes texts, and fills in no masks."""
    mapped = (modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES)
    return family in mapped[0] and family not in mapped[1]


def _length(name: str, subfolder: str, side: str) -> int | None:
    """Most tokens of a text, as sentence-transformers decides it; None where nothing but the positions limit it."""
    said = optional_json(name, _join(subfolder, "sentence_bert_config.json")) or {}
    asked = (said.get("processing_kwargs") or {}).get("text", {}).get("max_length") or said.get(f"{side}_length")
    if asked or said.get("max_seq_length"):
        return asked or said["max_seq_length"]
    length = (optional_json(name, _join(subfolder, "tokenizer_config.json")) or {}).get("model_max_length")
    limit = (optional_json(name, _join(subfolder, "config.json")) or {}).get("max_position_embeddings")
    known = [int(value) for value in (length, limit) if value is not None and 0 < value < NO_LIMIT]
    return min(known, default=None)


def _pooling_of(config: dict[str, Any], name: str) -> str:
    modes = {"cls": "pooling_mode_cls_token", "mean": "pooling_mode_mean_tokens", "last": "pooling_mode_lasttoken"}
    mode = config.get("pooling_mode")  # the newer form names the mode; the older has a flag for each
    chosen = [ours for ours, flag in modes.items() if config.get(flag) or mode in (ours, f"{ours}token")]
    flags = [key for key, value in config.items() if key.startswith("pooling_mode_") and value is True]
    if len(chosen) != 1 or len(flags) > 1:
        raise InputError(f"{name}: its pooling configuration is {config}, expected exactly one of {', '.join(modes)}")
    return chosen[0]


def optional_json(name: str, file: str) -> Any:
    """A JSON file of an encoder folder or hub repository, or None where it has none."""
    try:
        path = cached_file(
            name, file, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
        )
    except OSError:  # no such folder or repository: load_tower says so with the reason
        return None
    return None if path is None else read_json(path)

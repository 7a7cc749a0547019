"""The form of an encoder's folder: what sentence-transformers and we write beside the weights, read and written."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.utils import cached_file

from contaccum.encoder.tower import Tower, quiet_transformers
from contaccum.errors import InputError
from contaccum.files import read_json, write_json

SETTINGS_FILE = "contaccum.json"


TOWERS = ("query_encoder", "passage_encoder")


POOLINGS = ("cls", "mean", "last")


SIMILARITIES = ("cosine", "dot")


@dataclass(frozen=True)
class EncoderSettings:
    """What turns token vectors into scores, besides the weights."""

    pooling: str = "mean"
    similarity: str = "cosine"
    max_query_length: int = 64
    max_passage_length: int = 256
    query_prefix: str = ""
    passage_prefix: str = ""
    tie_towers: bool = False


def make_settings(values: dict[str, Any], source: str) -> EncoderSettings:
    """EncoderSettings from a mapping, or InputError naming ``source`` and the value that is not allowed."""
    for key, allowed in (("pooling", POOLINGS), ("similarity", SIMILARITIES)):
        if key in values and values[key] not in allowed:
            raise InputError(f"{source}: {key} is {values[key]!r}, expected one of {', '.join(allowed)}")
    try:
        return EncoderSettings(**values)
    except TypeError as error:
        raise InputError(f"{source}: {SETTINGS_FILE} holds a setting that is not known ({error})") from error


def sentence_transformers_settings(name: str) -> dict[str, Any]:
    """Pooling, similarity, length and prompts of a sentence-transformers folder or hub name; empty for any other encoder."""
    modules = _optional_json(name, "modules.json")
    if modules is None:
        return {}
    about = _optional_json(name, "config_sentence_transformers.json") or {}
    # their own default where a model neither normalises nor says otherwise
    settings: dict[str, Any] = {
        "similarity": "dot" if about.get("similarity_fn_name") in ("dot", "dot_score") else "cosine"
    }
    for module in modules:
        kind = module["type"].rsplit(".", 1)[-1]
        if kind == "Pooling":
            settings["pooling"] = _pooling_of(_optional_json(name, f"{module['path']}/config.json") or {}, name)
        elif kind == "Normalize":
            settings["similarity"] = "cosine"
        elif kind != "Transformer":
            raise InputError(
                f"{name}: modules.json names a {kind} module, expected Transformer, Pooling and Normalize only"
            )
    length = (_optional_json(name, "sentence_bert_config.json") or {}).get("max_seq_length")
    if length:
        settings |= {"max_query_length": length, "max_passage_length": length}
    prompts = about.get("prompts") or {}
    passage_prompts = [prompts[key] for key in ("document", "passage", "corpus") if prompts.get(key)]
    return settings | {"query_prefix": prompts.get("query") or "", "passage_prefix": (passage_prompts or [""])[0]}


def _pooling_of(config: dict[str, Any], name: str) -> str:
    modes = {"cls": "pooling_mode_cls_token", "mean": "pooling_mode_mean_tokens", "last": "pooling_mode_lasttoken"}
    mode = config.get("pooling_mode")  # the newer form names the mode; the older has a flag for each
    chosen = [ours for ours, flag in modes.items() if config.get(flag) or mode in (ours, f"{ours}token")]
    if len(chosen) != 1:
        raise InputError(f"{name}: its pooling configuration is {config}, expected exactly one of {', '.join(modes)}")
    return chosen[0]


def _optional_json(name: str, file: str) -> Any:
    """A JSON file of an encoder folder or hub repository, or None where it has none."""
    try:
        path = cached_file(
            name, file, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
        )
    except OSError:  # no such folder or repository: load_tower says so with the reason
        return None
    return None if path is None else read_json(path)


def save_tower(tower: Tower, settings: EncoderSettings, folder: Path) -> None:
    """One tower as transformers and sentence-transformers read it; ``encode`` there puts this tower's own prefix first."""
    tower.tokenizer.backend_tokenizer.no_truncation()  # a call leaves its own truncation behind, which would be saved too
    tower.tokenizer.backend_tokenizer.no_padding()
    with quiet_transformers():
        tower.backbone.save_pretrained(folder)
        tower.tokenizer.save_pretrained(folder)
    side = "query" if folder.name == TOWERS[0] else "document"
    length = settings.max_query_length if side == "query" else settings.max_passage_length
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling")]
    if settings.similarity == "cosine":
        kinds.append(("2_Normalize", "Normalize"))
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(kinds)
    ]
    write_json(folder / "modules.json", modules)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": length, "do_lower_case": False})
    prompts = {"query": settings.query_prefix, "document": settings.passage_prefix}
    write_json(
        folder / "config_sentence_transformers.json",
        {"prompts": prompts, "default_prompt_name": side, "similarity_fn_name": settings.similarity},
    )
    pooling = {
        "word_embedding_dimension": tower.backbone.config.hidden_size,
        "pooling_mode_cls_token": settings.pooling == "cls",
        "pooling_mode_mean_tokens": settings.pooling == "mean",
        "pooling_mode_lasttoken": settings.pooling == "last",
        "include_prompt": True,
    }
    write_json(folder / "1_Pooling" / "config.json", pooling)
    if settings.similarity == "cosine":
        write_json(folder / "2_Normalize" / "config.json", {})

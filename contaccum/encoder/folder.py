"""The form of a saved encoder: two folders with weights, and what transformers, sentence-transformers and we read beside them.

model/
    query_encoder/      weights, tokenizer, 1_Pooling/ ...: a whole encoder for transformers and sentence-transformers; of one
                        trained with LoRA the adapter in place of the weights, and the name and hash of its base
    passage_encoder/    the same; tied towers are one file of weights under two names where the file system has hard links
    modules.json        one sentence-transformers model whose Router leads queries and documents to the two folders
    router_config.json
    config_sentence_transformers.json
    contaccum.json      our own settings of the pair
"""

import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from contaccum.encoder.adapters import save_base
from contaccum.encoder.settings import SETTINGS_FILE, TOWERS, EncoderSettings
from contaccum.encoder.tower import Tower, quiet_transformers
from contaccum.files import write_json

KIND = "sentence_transformers.models."
"""Where modules.json says that classes lie: the path that old and new versions of sentence-transformers understand."""
WHOLE = "sentence_transformers.SentenceTransformer"
"""A model as a module of another one."""


def save_encoder(query_tower: Tower, passage_tower: Tower, settings: EncoderSettings, folder: Path) -> None:
    """Fill an empty folder with both towers, and with what makes one sentence-transformers model of them."""
    query, passage = (folder / name for name in TOWERS)
    _save_tower(query_tower, query)
    if passage_tower is query_tower:
        shutil.copytree(query, passage, copy_function=_link)
    else:
        _save_tower(passage_tower, passage)
    lengths = {"query": settings.max_query_length, "document": settings.max_passage_length}
    shared = passage_tower is query_tower and len(set(lengths.values())) > 1
    for path, tower, side in ((query, query_tower, "query"), (passage, passage_tower, "document")):
        # one module that serves both sides cuts each at its own length; older versions do not know these two
        by_side = {f"{name}_length": length for name, length in lengths.items()} if shared else {}
        write_json(
            path / "sentence_bert_config.json", {"max_seq_length": lengths[side], "do_lower_case": False} | by_side
        )
        parts = _parts(tower, settings)
        write_json(path / "modules.json", [_module(index, *part) for index, part in enumerate(parts.items())])
        _write_prompts(path, settings, side)
    # without a side named, texts are passages: a tower that serves both sides is the folder with their length
    routes = {"query": (TOWERS[passage_tower is query_tower], query_tower), "document": (TOWERS[1], passage_tower)}
    _write_router(routes, settings, folder)
    write_json(folder / SETTINGS_FILE, asdict(settings))


def _write_router(routes: dict[str, tuple[str, Tower]], settings: EncoderSettings, folder: Path) -> None:
    """What joins the towers' folders, which lie beside it, into one sentence-transformers model."""
    parts = {side: _routed(name, tower, settings) for side, (name, tower) in routes.items()}
    router = {
        "types": {path: kind for found in parts.values() for path, kind in found.items()},
        "structure": {side: list(found) for side, found in parts.items()},
        "parameters": {"default_route": "document", "allow_empty_key": True},
    }
    write_json(folder / "router_config.json", router)
    write_json(folder / "modules.json", [_module(0, "", "Router")])
    _write_prompts(folder, settings, "document")


def _routed(name: str, tower: Tower, settings: EncoderSettings) -> dict[str, str]:
    """The modules of one route: their folders within the model's, and their classes with the path to them.

    A tower that is an adapter is one module, a whole model by itself, which is loaded from its own folder: transformers would
    look for the base of an adapter in a subfolder under the subfolder's name.
    """
    if tower.base is not None:
        return {name: WHOLE}
    return {f"{name}/{path}".rstrip("/"): KIND + kind for path, kind in _parts(tower, settings).items()}


def _parts(tower: Tower, settings: EncoderSettings) -> dict[str, str]:
    """A tower's sentence-transformers modules: their folders within the tower's, and their classes."""
    kinds = ["Transformer", "Pooling", *["Dense"] * len(tower.dense)]
    if settings.similarity == "cosine":
        kinds.append("Normalize")
    return {f"{index}_{kind}" if index else "": kind for index, kind in enumerate(kinds)}


def _module(index: int, path: str, kind: str) -> dict[str, Any]:
    return {"idx": index, "name": str(index), "path": path, "type": KIND + kind}


def _write_prompts(folder: Path, settings: EncoderSettings, side: str) -> None:
    """Prompts by side; ``encode``, which is told no side, puts that of ``side`` first."""
    prompts = {"query": settings.query_prefix, "document": settings.passage_prefix}
    write_json(
        folder / "config_sentence_transformers.json",
        {
            "prompts": prompts,
            "default_prompt_name": side if prompts[side] else None,
            "similarity_fn_name": settings.similarity,
            **({} if settings.truncate_dim is None else {"truncate_dim": settings.truncate_dim}),
        },
    )


def _save_tower(tower: Tower, folder: Path) -> None:
    """Weights, tokenizer, and the configuration of each module behind them."""
    tower.tokenizer.backend_tokenizer.no_truncation()  # a call leaves its own truncation behind, which would be saved too
    tower.tokenizer.backend_tokenizer.no_padding()
    with quiet_transformers():
        tower.backbone.save_pretrained(folder)  # of a backbone with an adapter, the adapter
        tower.tokenizer.save_pretrained(folder)
    if tower.base is not None:
        save_base(tower.base, folder)
    pooling = {
        "word_embedding_dimension": tower.backbone.config.hidden_size,
        "pooling_mode_cls_token": tower.pooling == "cls",
        "pooling_mode_mean_tokens": tower.pooling == "mean",
        "pooling_mode_lasttoken": tower.pooling == "last",
        "include_prompt": True,
    }
    write_json(folder / "1_Pooling" / "config.json", pooling)
    for index, dense in enumerate(tower.dense, start=2):
        dense.save(folder / f"{index}_Dense")


def _link(source: str, target: str) -> None:
    """A second name for a file of weights, which nobody writes in place; else, and where links cannot be had, a copy."""
    if source.endswith(".safetensors"):
        try:
            os.link(source, target)
        except OSError:
            shutil.copyfile(source, target)
    else:
        shutil.copyfile(source, target)

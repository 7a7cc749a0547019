"""Save an encoder as folders that transformers, sentence-transformers and contaccum load.

One encoder for queries and passages (tied towers) is one model of sentence-transformers:

    config.json, model.safetensors, tokenizer.json, ...
                        after training with LoRA: the adapter and base.json instead of the weights
    modules.json, 1_Pooling/, sentence_bert_config.json, config_sentence_transformers.json
    contaccum.json      EncoderSettings, and the SHA-256 of each file with weights

Two encoders are two such models without contaccum.json, and a Router that points to them:

    query_encoder/
    passage_encoder/
    modules.json, router_config.json, config_sentence_transformers.json
    contaccum.json
    README.txt          which calls of sentence-transformers use which encoder
"""

import os
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from contaccum.encoder.adapters import save_base
from contaccum.encoder.backbone import quiet_transformers
from contaccum.encoder.folders import POOLING_FLAGS, SETTINGS_FILE, TOWERS, WEIGHTS, EncoderSettings
from contaccum.encoder.tower import Tower
from contaccum.errors import InputError
from contaccum.runtime.files import sha256_of, write_json, write_text
from contaccum.runtime.sharding import full, is_sharded

# package of the module classes; old and new versions accept this name
MODULES = "sentence_transformers.models."
TWO_TOWERS = """\
This model has two encoders. In sentence-transformers, encode queries with model.encode_query and
passages with model.encode_document; plain model.encode uses the encoder of passages.
"""


def save_encoder(
    query_tower: Tower, passage_tower: Tower, settings: EncoderSettings, folder: Path
) -> None:
    """Write the encoders, and the files about the whole model, into an empty folder."""
    if settings.tie_towers:
        # SentenceTransformer.encode treats texts as passages
        _save_tower(query_tower, folder, settings, "document")
    else:
        query_name, passage_name = TOWERS
        _save_tower(query_tower, folder / query_name, settings, "query")
        _save_tower(passage_tower, folder / passage_name, settings, "document")
        query_route = _routed(query_name, query_tower, settings)
        passage_route = _routed(passage_name, passage_tower, settings)
        router = {
            "types": {**query_route, **passage_route},
            "structure": {"query": list(query_route), "document": list(passage_route)},
            "parameters": {"default_route": "document", "allow_empty_key": True},
        }
        write_json(folder / "router_config.json", router)
        _write_model(folder, {"": "Router"}, settings, "document")
        write_text(folder / "README.txt", TWO_TOWERS)
    hashes = {
        path.relative_to(folder).as_posix(): sha256_of(path)
        for path in sorted(folder.rglob("*.safetensors"))
    }
    write_json(folder / SETTINGS_FILE, {**asdict(settings), "sha256": hashes})


def _routed(name: str, tower: Tower, settings: EncoderSettings) -> dict[str, str]:
    """Return path -> class of the modules of a Router's route. name: folder of the tower."""
    if tower.base is not None:
        # sentence-transformers loads the base of an adapter only in a nested model
        return {name: "sentence_transformers.SentenceTransformer"}
    return {
        f"{name}/{path}".rstrip("/"): MODULES + kind
        for path, kind in _modules(tower, settings).items()
    }


def _modules(tower: Tower, settings: EncoderSettings) -> dict[str, str]:
    """Return path -> class of the modules of a tower, such as 1_Pooling -> Pooling."""
    modules = {"": "Transformer", "1_Pooling": "Pooling"}
    for _ in tower.dense:
        modules[f"{len(modules)}_Dense"] = "Dense"
    if settings.similarity == "cosine":
        modules[f"{len(modules)}_Normalize"] = "Normalize"
    return modules


def _write_model(
    folder: Path, modules: dict[str, str], settings: EncoderSettings, side: str
) -> None:
    """Write the modules and prompts of a sentence-transformers model.

    Default prompt: that of ``side`` (query or document), unless the settings name another one for
    the model. The prompt for queries is never that of two encoders, because plain ``encode`` uses
    the encoder of passages.
    """
    rows: list[dict[str, Any]] = []
    for path, kind in modules.items():
        rows.append(
            {"idx": len(rows), "name": str(len(rows)), "path": path, "type": MODULES + kind}
        )
    write_json(folder / "modules.json", rows)
    prefixes = {"query": settings.query_prefix, "document": settings.passage_prefix}
    prompts = {**settings.prompts, **prefixes}
    default = side if prefixes[side] else None
    usable = settings.tie_towers or settings.default_prompt != "query"
    if side == "document" and settings.default_prompt in prompts and usable:
        default = settings.default_prompt
    config: dict[str, Any] = {
        "prompts": prompts,
        "default_prompt_name": default,
        "similarity_fn_name": settings.similarity,
    }
    if settings.truncate_dim is not None:
        config["truncate_dim"] = settings.truncate_dim
    write_json(folder / "config_sentence_transformers.json", config)


def _save_tower(tower: Tower, folder: Path, settings: EncoderSettings, side: str) -> None:
    """Write a tower as a model of sentence-transformers. side: see ``_write_model``."""
    # one length, also for tied towers: sentence-transformers before version 6 cannot load a folder
    # that gives queries a length of their own
    length = settings.max_query_length if side == "query" else settings.max_passage_length
    limits = {"max_seq_length": length, "do_lower_case": False}
    write_json(folder / "sentence_bert_config.json", limits)
    _write_model(folder, _modules(tower, settings), settings, side)
    # do not save the truncation and padding of earlier calls
    tower.tokenizer.backend_tokenizer.no_truncation()
    tower.tokenizer.backend_tokenizer.no_padding()
    with quiet_transformers():
        save_backbone(tower, folder)
        try:
            tower.tokenizer.save_pretrained(folder)
        except Exception as error:  # tokenizers raises no other class, such as for a full disk
            if number := re.search(r"\(os error (\d+)\)", str(error)):
                raise OSError(int(number[1]), str(error)) from error
            raise
    if tower.base is not None:
        save_base(tower.base, folder)
    flags = {flag: tower.pooling == pooling for pooling, flag in POOLING_FLAGS.items()}
    pooling = {"word_embedding_dimension": tower.width, **flags, "include_prompt": True}
    write_json(folder / "1_Pooling" / "config.json", pooling)
    for index, dense in enumerate(tower.dense, start=2):
        linear, kind = dense.linear, type(dense.activation)
        config = {
            "in_features": linear.in_features,
            "out_features": linear.out_features,
            "bias": linear.bias is not None,
            "activation_function": f"{kind.__module__}.{kind.__qualname__}",
        }
        write_json(folder / f"{index}_Dense" / "config.json", config)
        weights = {name: full(tensor).contiguous() for name, tensor in dense.state_dict().items()}
        save_file(weights, folder / f"{index}_Dense" / WEIGHTS)


def save_backbone(tower: Tower, folder: Path | None) -> None:
    """Save the weights and the configuration of a backbone.

    If it has an adapter, save only the adapter.

    If the weights are sharded, all processes must call this function together. folder: None in a
    process that writes nothing.
    """
    backbone = tower.backbone
    if not is_sharded(tower):
        backbone.save_pretrained(folder)
        return
    tensors = backbone.state_dict()
    if tower.base is not None:
        tensors = {name: each for name, each in backbone.named_parameters() if each.requires_grad}
    weights = {}
    for name, tensor in tensors.items():
        gathered = full(tensor.detach())
        if folder is not None:
            weights[name] = gathered.cpu()
    if folder is not None:
        # transformers would replace the given weights
        quantizer = vars(backbone).pop("hf_quantizer", None)
        backbone.save_pretrained(folder, state_dict=weights)
        backbone.hf_quantizer = quantizer


def send_weights(towers: list[Tower]) -> None:
    """Send the sharded weights of this process to ``save_encoder`` in process 0."""
    for tower in towers:
        save_backbone(tower, None)
        for tensor in tower.dense.state_dict().values():
            full(tensor)


def check_hashes(name: str, hashes: dict[str, str] | None) -> None:
    """Raise InputError if a file with weights is missing or has changed since the model was saved.

    Only a local folder is checked. hashes: SHA-256 of each file, by path in the folder. None:
    nothing is checked.
    """
    if not os.path.isdir(name):
        return
    for file, expected in (hashes or {}).items():
        path = os.path.join(name, file)
        if not os.path.isfile(path) or sha256_of(path) != expected:
            raise InputError(
                f"{path}: the file is missing or has changed since the model was saved. Copy the "
                f"model again; if you changed the weights, delete sha256 from {SETTINGS_FILE}."
            )

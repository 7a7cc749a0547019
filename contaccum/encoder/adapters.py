"""LoRA adapters for an encoder with frozen weights. The frozen encoder is called the base.

LoRA is described by Hu et al. 2021, arXiv 2106.09685. The base may be quantized (QLoRA, arXiv
2305.14314).

The folder of an adapter contains three special files. adapter_model.safetensors has the weights of
the adapter. adapter_config.json has the name of the base. base.json has the hash and the
quantization of the base.
"""

import copy
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from contaccum.config import AdapterConfig
from contaccum.encoder.backbone import POOLER, refuse_incomplete
from contaccum.encoder.folders import ADAPTER_FILE, BASE_FILE, WEIGHTS, Base
from contaccum.errors import InputError, in_one_line, require
from contaccum.runtime.files import read_json, sha256_of, write_json
from contaccum.runtime.hub import optional_file, optional_json

ADAPTER_WEIGHTS = "adapter_model.safetensors"
ALL_LINEAR = "all-linear"  # peft's name for all linear layers of a backbone


class WeightIndex(TypedDict):
    """Content of model.safetensors.index.json: the file of each weight, if there are several."""

    weight_map: dict[str, str]


@dataclass(frozen=True)
class Adapters:
    """Options for adding new LoRA adapters to an encoder."""

    config: AdapterConfig
    quantize: str = "none"  # quantization of the base: none or 4bit


def clone_sharing_weights(backbone: Any) -> Any:
    """Clone a backbone.

    The clone and the original use the same memory for their parameters and buffers.
    """
    shared = [*backbone.parameters(), *backbone.buffers()]
    for module in backbone.modules():  # layers of bitsandbytes
        if getattr(module, "quant_state", None) is not None:
            shared.append(module.quant_state)  # scales of 4-bit weights
    # deepcopy does not copy objects that are already in its memo
    return copy.deepcopy(backbone, {id(value): value for value in shared})


def add_adapter(backbone: Any, base: Base, config: AdapterConfig) -> None:
    """Freeze the weights of a backbone and add a new LoRA adapter to the backbone.

    Before training, the adapter does not change the vectors. The initial weights of the adapter
    come from the global random generator of torch. base: description of the backbone, which is
    saved with the adapter. Raises InputError if ``config.target_modules`` match no layer.
    """
    require("peft", "lora", "lora.rank above 0")
    from peft import LoraConfig

    wanted = config.target_modules or ALL_LINEAR
    settings = LoraConfig(
        r=config.rank,
        lora_alpha=config.scale(),  # type: ignore[arg-type]  # peft takes any number
        lora_dropout=config.dropout,
        target_modules=wanted,
        exclude_modules=POOLER
        if wanted == ALL_LINEAR and getattr(backbone, "pooler", None) is not None
        else None,
    )
    try:
        backbone.add_adapter(settings)
    except ValueError as error:
        raise InputError(f"lora.target_modules: {in_one_line(error)}") from error
    # peft ignores a name that matches nothing if another one matches; the names of experts, which
    # it replaced by those of weights, are no longer in its settings
    modules = [f".{name}" for name, _ in backbone.named_modules()]
    for name in sorted(settings.target_modules or ()):
        if not any(module.endswith(f".{name}") for module in modules):
            raise InputError(
                f"lora.target_modules: found no module {name!r} in the encoder; expected the last "
                "part of the name of a linear layer, such as query or q_proj"
            )
    settings.base_model_name_or_path = base.name
    _adapter_to_float32(backbone)


def load_adapter(backbone: Any, folder: str, subfolder: str) -> None:
    """Add the adapter in ``subfolder`` of ``folder`` (local or on the Hub) to ``backbone``.

    The adapter stays trainable.
    """
    require("peft", "lora", f"{folder}: adapter")
    # transformers would unpickle adapter_model.bin instead
    if optional_file(folder, os.path.join(subfolder, ADAPTER_WEIGHTS)) is None:
        where = f"{folder}/{subfolder}".rstrip("/")
        raise InputError(
            f"{where}: {ADAPTER_WEIGHTS} is missing; pickled adapter weights (.bin) are never "
            "loaded"
        )
    if os.path.isdir(folder):  # transformers below 5.23 ignores the subfolder of a local folder
        folder, subfolder = os.path.join(folder, subfolder), ""
    conversions = getattr(backbone, "_weight_conversions", None)
    info = backbone.load_adapter(
        folder,
        adapter_kwargs={"subfolder": subfolder},
        is_trainable=True,
        ignore_mismatched_sizes=True,
    )
    if any("lora_magnitude_vector" in key for key in info.missing_keys):
        raise InputError(
            f"{folder}: adapter: transformers cannot load its DoRA weights. Merge it with "
            "merge_and_unload of peft, and use the result."
        )
    refuse_incomplete(f"{folder}: adapter", info.missing_keys, info.mismatched_keys)
    # otherwise saving applies the conversions of the adapter to the base
    backbone._weight_conversions = conversions
    _adapter_to_float32(backbone)


def _adapter_to_float32(backbone: Any) -> None:
    """Convert the weights of the adapter to float32 if the base is quantized.

    Otherwise change nothing.
    """
    if getattr(backbone, "is_quantized", False):
        for parameter in backbone.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()


def merge(backbone: Any) -> None:
    """Add the weights of the adapter to those of the base, and remove the adapter's layers."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    while True:
        # the wrappers contain fully trained modules and tokens, and may contain LoRA layers: merge
        # the outermost one first
        wrapped = [
            (name, module)
            for name, module in backbone.named_modules()
            if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper)
        ]
        if not wrapped:
            break
        name, layer = wrapped[0]
        # some layers of adapters have it too: those on the experts of one module are nested
        if hasattr(layer, "unload_and_optionally_merge_module"):
            merged = layer.unload_and_optionally_merge_module(
                merge=True, safe_merge=True, adapter_names=None
            )
        else:
            layer.merge(safe_merge=True)
            merged = layer.get_base_layer()
        parent, _, child = name.rpartition(".")
        setattr(backbone.get_submodule(parent), child, merged)
    del backbone.peft_config
    backbone._hf_peft_config_loaded = False
    backbone.requires_grad_(True)


def save_base(base: Base, folder: Path) -> None:
    """Write base.json into an adapter's folder, and the base's name into adapter_config.json.

    The lists of strings in adapter_config.json are also sorted, so that equal adapters have equal
    files.
    """
    config = read_json(folder / ADAPTER_FILE, dict[str, Any])
    config["base_model_name_or_path"] = base.name
    for key, value in config.items():
        if isinstance(value, list) and all(isinstance(name, str) for name in value):
            config[key] = sorted(value)
    write_json(folder / ADAPTER_FILE, config)
    write_json(folder / BASE_FILE, {"sha256": base.sha256, "quantize": base.quantize})


def base_of(name: str, subfolder: str, quantize: str) -> Base:
    """Return the name, the hash and the quantization of an encoder that gets a new adapter.

    name: folder or Hub name of the encoder. A folder name becomes an absolute path. quantize: none
    or 4bit. Raises InputError for a subfolder of a Hub repository.
    """
    folder = Path(name) / subfolder
    if folder.is_dir():
        name = str(folder.resolve())
    elif subfolder:
        raise InputError(
            f"{name}: the base of an adapter cannot be a subfolder ({subfolder}) of a Hub "
            "repository. Download the encoder and give its local folder."
        )
    return Base(name, hash_of(name), quantize)


def check_base(base: Base, name: str) -> None:
    """Raise InputError if ``base`` changed after the training of the adapter ``name``."""
    if base.sha256 is None:  # peft wrote the adapter
        return
    found = hash_of(base.name)
    if found != base.sha256:
        raise InputError(
            f"{name}: base {base.name} has SHA-256 {found}; the adapter was trained on a base with "
            f"SHA-256 {base.sha256}. Restore the original base."
        )


def hash_of(name: str) -> str:
    """Return one SHA-256 over config.json and all weight files of the encoder ``name``."""
    index = optional_json(name, f"{WEIGHTS}.index.json", WeightIndex)
    files = sorted(set(index["weight_map"].values())) if index else [WEIGHTS]
    digest = hashlib.sha256()
    for file in ("config.json", *files):
        path = optional_file(name, file)
        if path is None:
            raise InputError(
                f"{name}: {file} is missing; expected config.json and all safetensors weights of "
                "the base"
            )
        digest.update(f"{file} {sha256_of(path)}\n".encode())
    return digest.hexdigest()

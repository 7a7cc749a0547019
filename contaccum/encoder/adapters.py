"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv 2106.09685) on a frozen base, in 4 or 8 bits if wanted (QLoRA, Dettmers et al.
2023, arXiv 2305.14314). peft makes the layers, transformers loads and saves them, bitsandbytes holds few bits.

A folder with an adapter has adapter_config.json, which names the base, adapter_model.safetensors, and BASE_FILE of ours, which
says what the base was: the hash of its files, and the bits that it was held in.
"""

import copy
import hashlib
import importlib.util
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModel, BitsAndBytesConfig
from transformers.utils import cached_file

from contaccum.config import AdapterConfig
from contaccum.encoder.sources import ADAPTER_FILE, BASE_FILE, Base, optional_json
from contaccum.errors import InputError
from contaccum.files import read_json, sha256_of, write_json

WEIGHTS = "model.safetensors"
ALL_LINEAR = "all-linear"
"""peft's word for every linear layer of a backbone."""
POOLER = r"(.*\.)?pooler\..*"
"""Layers that take no part in a forward pass of ours."""

# it remarks on kernels that it could fetch, and at every layer in 8 bits on how activations are multiplied
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


@dataclass(frozen=True)
class Adapters:
    """Adapters that are to be trained."""

    config: AdapterConfig
    quantize: str = "none"
    """The bits that their base is held in: none (all), 4bit or 8bit."""


def require(package: str, extra: str, what: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise InputError(f"{what} needs an extra: pip install 'contaccum[{extra}]'")


def load_backbone(
    name: str, dtype: torch.dtype, quantize: str = "none", device: torch.device | str | None = None, **where: Any
) -> Any:
    """A backbone without adapter. One in few bits is made on ``device``, which it cannot leave; others are on the CPU."""
    if quantize == "none":
        return AutoModel.from_pretrained(name, dtype=dtype, use_safetensors=True, **where)
    require("bitsandbytes", "bitsandbytes", f"an encoder in {quantize}")
    nf4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": dtype}
    bits = BitsAndBytesConfig(load_in_8bit=True) if quantize == "8bit" else BitsAndBytesConfig(load_in_4bit=True, **nf4)
    place = {"": str(torch.device(device or "cpu"))}
    backbone = AutoModel.from_pretrained(
        name, dtype=dtype, use_safetensors=True, quantization_config=bits, device_map=place, **where
    )
    vars(backbone).pop("hf_device_map", None)  # one on the CPU alone would be saved as if it lay on several devices
    for part in backbone.modules():
        if hasattr(part, "support_avx512bf16_for_cpu"):
            part.support_avx512bf16_for_cpu = False  # the first evaluation would repack the weights, for training too
        elif hasattr(part, "init_8bit_state"):
            part.init_8bit_state()  # else the first of two layers with the same weights would take their scales away
    return backbone


def sharing(backbone: Any) -> Any:
    """A second backbone whose parameters and buffers are those of the first, in the same memory."""
    shared = [*backbone.parameters(), *backbone.buffers()]
    for part in backbone.modules():  # what bitsandbytes keeps beside the weights: scales of 4 bits, both of 8 bits
        shared += [getattr(part, "quant_state", None)]
        shared += [getattr(getattr(part, "state", None), name, None) for name in ("CB", "SCB")]
    return copy.deepcopy(backbone, {id(each): each for each in shared if each is not None})


def add_adapter(backbone: Any, base: Base, config: AdapterConfig) -> None:
    """Freeze the backbone and put an adapter beside its linear layers, which changes no vector until it is trained.

    Its first weights come from torch's random numbers. Raises InputError where no layer has such a name.
    """
    require("peft", "lora", "lora.rank above 0")
    from peft import LoraConfig

    wanted = config.target_modules or ALL_LINEAR
    settings = LoraConfig(
        r=config.rank,
        lora_alpha=config.scale(),  # type: ignore[arg-type]  # peft takes any number
        lora_dropout=config.dropout,
        target_modules=wanted,
        exclude_modules=POOLER if wanted == ALL_LINEAR and getattr(backbone, "pooler", None) is not None else None,
    )
    try:
        backbone.add_adapter(settings)
    except ValueError as error:
        linear = {name.rpartition(".")[2] for name, part in backbone.named_modules() if isinstance(part, nn.Linear)}
        reason = f"expected names of its linear layers, such as {', '.join(sorted(linear)[:8])}"
        raise InputError(f"lora.target_modules {wanted} cannot be had of {base.place}: {reason}") from error
    settings.base_model_name_or_path = base.place
    _widen(backbone)


def load_adapter(backbone: Any, folder: str, subfolder: str) -> None:
    """Put the adapter of a folder, or of a hub name's subfolder, beside the layers of its base; it can be trained further."""
    require("peft", "lora", f"the adapter in {folder}")
    own_names = getattr(backbone, "_weight_conversions", None)
    backbone.load_adapter(folder, adapter_kwargs={"subfolder": subfolder}, is_trainable=True)
    backbone._weight_conversions = own_names  # the adapter's would be given to the base's weights when they are saved
    _widen(backbone)


def _widen(backbone: Any) -> None:
    """Adapters in float32 beside a base of fewer bits; of a base in half precision they keep its own, to encode with."""
    if getattr(backbone, "is_quantized", False):
        for parameter in backbone.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()


def merge(backbone: Any) -> Any:
    """Add the adapter to the weights beside it and drop it; the backbone is then a plain one."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [(name, part) for name, part in backbone.named_modules() if isinstance(part, BaseTunerLayer)]
    for name, layer in layers:
        layer.merge(safe_merge=True)
        parent, _, child = name.rpartition(".")
        setattr(backbone.get_submodule(parent), child, layer.get_base_layer())
    del backbone.peft_config
    backbone._hf_peft_config_loaded = False
    return backbone.requires_grad_(True)


def save_base(base: Base, folder: Path) -> None:
    """Beside an adapter that transformers saved: what its base is. Lists stand in one order, which in peft's file they do not."""
    config = read_json(folder / ADAPTER_FILE)
    ordered = {key: sorted(value) if _names(value) else value for key, value in config.items()}
    write_json(folder / ADAPTER_FILE, {**ordered, "base_model_name_or_path": base.place})
    write_json(folder / BASE_FILE, {"sha256": base.sha256, "quantize": base.quantize})


def _names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def base_of(name: str, subfolder: str, quantize: str) -> Base:
    """The encoder of a folder or hub name as the base of a new adapter; a folder by its whole path."""
    folder = Path(name) / subfolder
    if folder.is_dir():
        place = str(folder.resolve())
    elif subfolder:
        raise InputError(
            f"{name}: its encoder is in {subfolder}, expected a local folder, since an adapter names one place"
        )
    else:
        place = name
    return Base(place, hash_of(place), quantize)


def check_base(base: Base, name: str) -> None:
    """Refuse a base with other files than the adapter in ``name`` was trained beside."""
    found = hash_of(base.place) if base.sha256 else None
    if found != base.sha256:
        raise InputError(
            f"{name}: the base {base.place} has SHA-256 {found}, expected {base.sha256}, beside which the adapter was trained"
        )


def hash_of(place: str) -> str:
    """Hash of the configuration and the weights of an encoder."""
    index = optional_json(place, f"{WEIGHTS}.index.json")
    files = sorted(set(index["weight_map"].values())) if index else [WEIGHTS]
    digest = hashlib.sha256()
    for name in ("config.json", *files):
        path = cached_file(place, name, _raise_exceptions_for_missing_entries=False)
        if path is None:
            raise InputError(f"{place}: has no {name}, expected an encoder with weights in safetensors")
        digest.update(f"{name} {sha256_of(path)}\n".encode())
    return digest.hexdigest()


def own_dropouts(module: nn.Module) -> list[nn.Dropout]:
    """The dropout layers of a backbone itself, without those of an adapter."""
    return [
        part
        for name, part in module.named_modules()
        if isinstance(part, nn.Dropout) and not re.search(r"(^|\.)lora_dropout\.", name)
    ]


def few_bits(module: nn.Module) -> Iterator[Any]:
    """The layers that hold their weights in 4 bits and widen them to multiply."""
    return (part for part in module.modules() if hasattr(part, "compute_dtype"))

"""Settings as mappings, names and YAML, and sizes as words. Imports no torch."""

import re
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields
from typing import Any

import yaml

from contaccum.config.settings import MixtureConfig, TrainConfig
from contaccum.errors import InputError

BYTES = {"GiB": 2**30, "MiB": 2**20, "GB": 10**9, "MB": 10**6}


def parse_bytes(text: str, name: str = "run.memory_budget") -> int:
    """A number of bytes written like 11GB, 10.5 GiB or 512MB; GB and MB are decimal, GiB and MiB binary. Errors name ``name``."""
    found = re.fullmatch(rf"(\d+(?:\.\d+)?) ?({'|'.join(BYTES)})", text.strip())
    if not found or not float(found[1]):
        raise InputError(f"{name} is {text!r}, expected a number above 0 with one of {', '.join(BYTES)}, such as 11GB")
    return int(float(found[1]) * BYTES[found[2]])


def value_at(config: Any, name: str) -> Any:
    """The setting called ``group.field``."""
    for part in name.split("."):
        config = getattr(config, part)
    return config


def from_mapping(values: Mapping[str, Any]) -> TrainConfig:
    """The config of nested mappings, as ``asdict`` gives them."""
    groups = {f.name: f.default_factory for f in fields(TrainConfig) if f.default_factory is not MISSING}
    config = TrainConfig(**{k: groups[k](**v) if k in groups else v for k, v in values.items()})
    config.data.mixture = [MixtureConfig(**each) for each in values.get("data", {}).get("mixture", [])]
    return config


def to_yaml(config: TrainConfig) -> str:
    """The complete config, every field, as YAML."""
    return yaml.safe_dump(asdict(config), sort_keys=False, allow_unicode=True)

"""What turns token vectors into scores, besides the weights, and the names under which it is kept."""

from dataclasses import dataclass
from typing import Any

from contaccum.errors import InputError

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
    truncate_dim: int | None = None
    """How many of a vector's first numbers are kept; None: all."""


def make_settings(values: dict[str, Any], source: str) -> EncoderSettings:
    """EncoderSettings from a mapping, or InputError naming ``source`` and the value that is not allowed."""
    for key, allowed in (("pooling", POOLINGS), ("similarity", SIMILARITIES)):
        if key in values and values[key] not in allowed:
            raise InputError(f"{source}: {key} is {values[key]!r}, expected one of {', '.join(allowed)}")
    width = values.get("truncate_dim")
    if width is not None and (not isinstance(width, int) or width < 1):
        raise InputError(f"{source}: truncate_dim is {width!r}, expected a whole number of at least 1")
    try:
        return EncoderSettings(**values)
    except TypeError as error:
        raise InputError(f"{source}: {SETTINGS_FILE} holds a setting that is not known ({error})") from error

"""DualEncoder and its two towers: loading, encoding and saving."""

from pathlib import Path

from contaccum.encoder.adapters import Adapters
from contaccum.encoder.dual import DualEncoder
from contaccum.encoder.folders import (
    SETTINGS_FILE,
    TOWERS,
    EncoderSettings,
    make_settings,
    model_folder,
)
from contaccum.encoder.precision import load_encoder
from contaccum.encoder.tokenizer import wordpiece_tokenizer
from contaccum.encoder.tower import Tower, pool, tiny_tower
from contaccum.errors import InputError

__all__ = [
    "SETTINGS_FILE",
    "TOWERS",
    "Adapters",
    "DualEncoder",
    "EncoderSettings",
    "Tower",
    "load_encoder",
    "make_settings",
    "merge",
    "model_folder",
    "pool",
    "tiny_tower",
    "wordpiece_tokenizer",
]


def merge(model: str, output: str, trust_remote_code: bool = False) -> str:
    """Merge the LoRA adapters of a model into its weights, and save it in a new folder.

    model: folder or Hub name. A 4-bit base is converted to float32 first. The saved model
    computes the same vectors, except for rounding errors. Returns ``output``.
    """
    if Path(output).exists():
        raise InputError(f"{output}: exists already; choose a new folder")
    DualEncoder.load(model, trust_remote_code=trust_remote_code, merge=True).save(output)
    return output

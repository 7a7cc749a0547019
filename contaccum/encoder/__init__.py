"""DualEncoder and its two towers: loading, encoding and saving."""

from contaccum.encoder.adapters import Adapters
from contaccum.encoder.dual import DualEncoder
from contaccum.encoder.folders import (
    SETTINGS_FILE,
    TOWERS,
    EncoderSettings,
    make_settings,
    model_folder,
    run_of,
)
from contaccum.encoder.merging import merge
from contaccum.encoder.precision import load_encoder
from contaccum.encoder.tokenizer import wordpiece_tokenizer
from contaccum.encoder.tower import Tower, pool, tiny_tower

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
    "run_of",
    "tiny_tower",
    "wordpiece_tokenizer",
]

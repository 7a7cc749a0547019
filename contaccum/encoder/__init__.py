"""DualEncoder and its two towers: loading, encoding and saving."""

from pathlib import Path

import torch

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


def merge(
    model: str,
    output: str,
    trust_remote_code: bool = False,
    start: str | None = None,
    share: float = 0.75,
) -> str:
    """Merge the LoRA adapters of a model, or a model and its start, and save it in a new folder.

    model: folder or Hub name. A 4-bit base is converted to float32 first. Without ``start``, the
    saved model computes the same vectors, except for rounding errors. start: encoder that training
    started from. Each weight becomes share * that of ``model`` + (1 - share) * that of ``start``,
    so that the model keeps more of what ``start`` can do on other data. Returns ``output``.

    Sources: Wortsman et al. 2022 (arXiv 2109.01903), eq. 1; for embedding models, Xiao et al. 2023
    (arXiv 2311.13534). Raises InputError if the two encoders have different weights.
    """
    if Path(output).exists():
        raise InputError(f"{output}: exists already; choose a new folder")
    encoder = DualEncoder.load(model, trust_remote_code=trust_remote_code, merge=start is None)
    if start is not None:
        _average(
            encoder, DualEncoder.load(start, trust_remote_code=trust_remote_code), share, start
        )
    encoder.save(output)
    return output


@torch.no_grad()
def _average(encoder: DualEncoder, other: DualEncoder, share: float, name: str) -> None:
    """Move the weights of ``encoder`` towards those of ``other``. name: of ``other``."""
    if encoder.adapted:
        raise InputError("the model has an adapter; merge it first, without --start")
    others = dict(other.named_parameters(remove_duplicate=False))
    for key, weight in encoder.named_parameters():  # tied towers appear only once
        if key not in others or others[key].shape != weight.shape:
            raise InputError(
                f"{name}: has no weight {key} of shape {tuple(weight.shape)}; expected the encoder "
                "that training started from"
            )
        weight.lerp_(others[key].to(weight), 1 - share)

"""Merge LoRA adapters into the weights of a model, or a trained model with its start."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from contaccum.config.load import read_config_file
from contaccum.encoder.dual import DualEncoder
from contaccum.encoder.folders import run_of
from contaccum.errors import InputError

USUAL_SHARE = 0.75  # of the trained model in the average with its start


@torch.no_grad()
def merge(
    model: str,
    output: str,
    trust_remote_code: bool = False,
    start: str | None = None,
    share: float | None = None,
) -> str:
    """Merge the LoRA adapters of a model, or a model and its start, and save it in a new folder.

    model: a run, another folder or a Hub name. A 4-bit base is converted to float32 first. Without
    ``start``, the saved model computes the same vectors, except for rounding errors. start: encoder
    that training started from; if the run has ``model.passage_name``, that of its query tower. Each
    weight becomes share * that of ``model`` + (1 - share) * that of ``start``, so that the model
    keeps more of what ``start`` can do on other data. share: default USUAL_SHARE. Returns
    ``output``.

    Sources: Wortsman et al. 2022 (arXiv 2109.01903), eq. 1; for embedding models, Xiao et al. 2023
    (arXiv 2311.13534). Raises InputError if the two encoders have different layers.
    """
    if Path(output).exists():
        raise InputError(f"{output}: exists already; choose a new folder")
    if share is not None and start is None:
        raise InputError(f"--share {share:g} has no effect without --start; leave it out")
    share = USUAL_SHARE if share is None else share
    if not 0 <= share <= 1:
        raise InputError(f"share is {share:g}, expected a number from 0 to 1")
    encoder = DualEncoder.load(model, trust_remote_code=trust_remote_code, merge=start is None)
    if start is not None:
        if encoder.adapted:
            raise InputError(f"{model}: has an adapter; merge it first, without --start")
        other = DualEncoder.load(
            start, passage_name=_start_of_passages(model), trust_remote_code=trust_remote_code
        )
        if encoder.settings.tie_towers and not other.settings.tie_towers:
            raise InputError(
                f"{start}: has two encoders, but {model} has one; expected the encoder that "
                "training started from"
            )
        # a start with one encoder has the weights of both towers too, under two names
        weights, others = (
            dict(each.named_parameters(remove_duplicate=False)) for each in (encoder, other)
        )
        if {key: weight.shape for key, weight in weights.items()} != {
            key: weight.shape for key, weight in others.items()
        }:
            raise InputError(
                f"{start}: has other layers than {model}; expected the encoder that training "
                "started from"
            )
        for key, weight in encoder.named_parameters():  # tied towers appear only once
            weight.lerp_(others[key].to(weight), 1 - share)
    encoder.save(output)
    return output


def _start_of_passages(model: str) -> Any:
    """Return the encoder from which the run of ``model`` started its passage tower.

    Return None if that is the one of its query tower.
    """
    file = run_of(model) / "config.yaml"
    if file.is_file():
        with suppress(InputError):  # the file of another program
            if setting := read_config_file(str(file)).get("model.passage_name"):
                return setting.value
    return None

"""AdamW and its learning rate as a function of the step."""

import importlib.util
import math

import torch

from contaccum.config import OptimConfig
from contaccum.encoder import DualEncoder
from contaccum.errors import InputError


def trained_parameters(encoder: DualEncoder) -> dict[str, torch.nn.Parameter]:
    """Parameters that training moves, by name; those of tied towers once."""
    return {name: parameter for name, parameter in encoder.named_parameters() if parameter.requires_grad}


def make_optimizer(encoder: DualEncoder, config: OptimConfig) -> torch.optim.Optimizer:
    """AdamW; no decay on biases and normalisation, which are the parameters of one dimension.

    ``adamw_8bit`` holds both moments of weights above 4096 numbers in 8 bits each, in blocks of 256 with a scale of their own
    (Dettmers et al. 2022, arXiv 2110.02861). Raises InputError where its package is not installed.
    """
    parameters = list(trained_parameters(encoder).values())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    betas = (config.adam_beta1, config.adam_beta2)
    if config.name == "adamw":
        return torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas, eps=config.adam_eps, fused=config.fused)
    if importlib.util.find_spec("bitsandbytes") is None:
        raise InputError(f"optim.name is {config.name}, which needs an extra: pip install 'contaccum[bitsandbytes]'")
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(groups, lr=config.learning_rate, betas=betas, eps=config.adam_eps)


def warmup_steps(config: OptimConfig, total: int) -> int:
    """Steps over which the learning rate rises, given as steps or as a share of all."""
    if config.warmup_ratio is not None:
        return math.ceil(config.warmup_ratio * total)
    return config.warmup_steps or 0


def learning_rate_factor(step: int, total: int, warmup: int, schedule: str) -> float:
    """Share of the highest learning rate at optimizer step ``step`` (from 0) of ``total``.

    It rises linearly over ``warmup`` steps, then falls to 0 at ``total`` linearly or along half a cosine, or stays.
    """
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, total - warmup)
    return {"linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2, "constant": 1.0}[schedule]


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate

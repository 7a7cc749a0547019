"""The rules between settings, and their ranges. Imports no torch."""

import math
import warnings
from collections.abc import Iterator
from dataclasses import fields
from typing import Any, get_args

from contaccum.config.mapping import parse_bytes, value_at
from contaccum.config.settings import (
    GROUPS,
    METRIC_CUTS,
    METRIC_MEASURES,
    AdapterConfig,
    BatchConfig,
    DataConfig,
    LossConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    TrainConfig,
)
from contaccum.config.traits import TRAITS
from contaccum.errors import InputError


def validate(config: TrainConfig, world: int = 1) -> None:
    """Check every rule between settings, or raise InputError naming the setting; warn of settings without effect."""
    _check_names(config)
    _check_ranges(config)
    measure, _, cut = config.run.metric.partition("@")
    if measure not in METRIC_MEASURES or cut not in map(str, METRIC_CUTS):
        expected = f"{', '.join(METRIC_MEASURES)} at {', '.join(map(str, METRIC_CUTS))}, such as ndcg@10"
        raise InputError(f"run.metric is {config.run.metric!r}, expected one of {expected}")
    _check_streaming(config)
    _check_batch(config, world)
    _check_bank(config, world)
    _check_encoder(config)
    _check_loss(config)
    _check_adapters(config)
    if config.run.memory_budget is not None:
        parse_bytes(config.run.memory_budget)
    if config.optim.warmup_steps is not None and config.optim.warmup_ratio is not None:
        raise InputError("optim.warmup_steps and optim.warmup_ratio are both given, expected one of them")
    config.skips()
    for sentence in _without_effect(config):
        warnings.warn(sentence, stacklevel=2)


def check_total(config: TrainConfig, total: int) -> None:
    """Warn of settings that have no effect in a run of ``total`` steps, which only the data may tell."""
    if config.bank_size() and config.bank.warmup_steps >= total:
        warnings.warn(
            f"bank.warmup_steps is {config.bank.warmup_steps} in a run of {total} steps: the bank is never used",
            stacklevel=2,
        )


AT_LEAST: dict[str, float] = {
    "lora.rank": 0,
    "model.tiny_layers": 1,
    "model.tiny_width": 32,
    "model.tiny_vocabulary": 100,
    "data.hard_negatives": 0,
    "data.max_bad_records": 0,
    "data.shuffle_buffer": 1,
    "batch.global_batch_size": 1,
    "batch.micro_batch_size": 1,
    "batch.micro_batch_tokens": 1,
    "bank.size": 0,
    "bank.warmup_steps": 0,
    "bank.age_decay": 0,
    "optim.learning_rate": 0,
    "optim.reference_batch_size": 1,
    "optim.max_steps": 1,
    "optim.warmup_steps": 0,
    "optim.weight_decay": 0,
    "run.save_steps": 0,
    "run.keep_checkpoints": 1,
    "run.eval_steps": 0,
    "run.eval_batch_tokens": 1,
    "run.bank_check_steps": 0,
    "run.log_steps": 1,
    "run.drift_steps": 0,
}
ABOVE_ZERO = (
    "model.temperature", "loss.distillation_weight", "loss.teacher_temperature", "optim.epochs", "optim.max_grad_norm",
    "optim.adam_eps", "run.timeout_minutes",
)  # fmt: skip


MAX_SEED = 2**64 - 1  # torch keeps a seed in eight bytes


def _check_ranges(config: TrainConfig) -> None:
    if not 0 <= config.seed <= MAX_SEED:
        raise InputError(f"seed is {config.seed}, expected a whole number from 0 to {MAX_SEED}")
    _check_given(config)
    for group in GROUPS:
        _check_given(getattr(config, group), f"{group}.")
    for name, least in AT_LEAST.items():
        value = value_at(config, name)
        if value is not None and not value >= least:
            raise InputError(f"{name} is {value}, expected at least {least:g}")
    for name in ABOVE_ZERO:
        if not value_at(config, name) > 0:
            raise InputError(f"{name} is {value_at(config, name)}, expected more than 0")
    for name in ("optim.adam_beta1", "optim.adam_beta2"):
        if not 0 <= value_at(config, name) < 1:
            raise InputError(f"{name} is {value_at(config, name)}, expected at least 0 and less than 1")
    for name in ("optim.warmup_ratio", "model.dropout", "lora.dropout"):
        value = value_at(config, name)
        if value is not None and not 0 <= value <= 1:
            raise InputError(f"{name} is {value}, expected a share between 0 and 1")
    if config.lora.alpha is not None and not config.lora.alpha > 0:
        raise InputError(f"lora.alpha is {config.lora.alpha}, expected more than 0")
    if config.model.tiny_width % 32:
        raise InputError(f"model.tiny_width is {config.model.tiny_width}, expected a multiple of 32")


def _check_given(values: Any, prefix: str = "") -> None:
    """Refuse a null that stands where a value must, which jsonargparse lets pass, and a number without bound."""
    for each in fields(values):
        value = getattr(values, each.name)
        if value is None and type(None) not in get_args(each.type):
            raise InputError(f"{prefix}{each.name} is null, expected a value")
        if isinstance(value, float) and not math.isfinite(value):
            raise InputError(f"{prefix}{each.name} is {value}, expected a finite number")


def _check_names(config: TrainConfig) -> None:
    if config.method not in TRAITS:
        raise InputError(f"method is {config.method!r}, expected one of {', '.join(TRAITS)}")
    _check_mixture(config)
    needed = {"output_dir": config.output_dir} | ({} if config.data.mixture else {"data.train": config.data.train})
    for name, value in needed.items():
        if not value:
            raise InputError(f"{name} is not set, expected a path")
    if config.model.tie_towers and config.model.passage_name:
        raise InputError(
            f"model.passage_name is {config.model.passage_name!r} with model.tie_towers, expected one or the other"
        )


def _check_mixture(config: TrainConfig) -> None:
    sets = config.data.mixture
    if sets and config.data.train:
        raise InputError(f"data.train is {config.data.train!r} with data.mixture, expected one or the other")
    for number, each in enumerate(sets):
        _check_given(each, f"data.mixture[{number}].")
        if not each.train:
            raise InputError(f"data.mixture[{number}].train is not set, expected a path")
        if each.weight is not None and not each.weight > 0:
            raise InputError(f"data.mixture[{number}].weight is {each.weight}, expected more than 0")
    if len({each.weight is None for each in sets}) > 1:
        raise InputError("data.mixture has sets with a weight and sets without, expected one or the other")


def _check_streaming(config: TrainConfig) -> None:
    if not config.data.streaming:
        return
    if config.optim.max_steps is None:
        raise InputError("data.streaming without optim.max_steps, expected it: nobody knows how long an epoch is")
    if config.data.mixture:
        raise InputError("data.streaming is true with data.mixture, expected one or the other: one set is streamed")


def _check_batch(config: TrainConfig, world: int) -> None:
    n, b = config.batch.global_batch_size, config.micro_batch_size(world)
    if config.traits.whole:
        for name, default in (("micro_batch_tokens", None), ("on_out_of_memory", "shrink")):
            if getattr(config.batch, name) not in (default, "stop"):
                warnings.warn(f"batch.{name} has no effect with {config.method}: its step is not cut", stacklevel=3)
    if config.micro_batch_tokens is not None:
        if n % world:
            raise InputError(f"batch.global_batch_size {n} is not divisible by {world} processes")
        if b != BatchConfig.micro_batch_size:
            warnings.warn("batch.micro_batch_size has no effect with batch.micro_batch_tokens", stacklevel=3)
    elif n % (b * world):
        raise InputError(
            f"batch.global_batch_size {n} is not divisible by batch.micro_batch_size {b} x {world} processes = {b * world}"
        )


def _check_bank(config: TrainConfig, world: int) -> None:
    size, bank = config.bank_size(), config.bank
    if size == 0:
        return
    push = config.batch.global_batch_size if bank.visibility == "on_step" else config.bank_push(world)
    if size < push:
        may = "may " if config.micro_batch_tokens is not None else ""
        raise InputError(
            f"bank.size is {size} rows, but {push} rows {may}enter at once ({config.method}, bank.visibility "
            f"{bank.visibility}), expected at least as many, or 0"
        )
    if bank.visibility == "on_step" and config.traits.pushes_whole_step:
        warnings.warn(
            f"bank.visibility has no effect with {config.method}: it stores each step whole, after its loss",
            stacklevel=3,
        )
    if not bank.keep and (bank.visibility == "on_step" or config.traits.pushes_whole_step):
        warnings.warn(
            "bank.keep false empties the bank before any of its rows is used: it has no effect here", stacklevel=3
        )
    if bank.age_decay and not bank.keep:
        warnings.warn("bank.age_decay has no effect with bank.keep false: no row grows older than 0", stacklevel=3)
    if not bank.hard_negatives and not config.data.hard_negatives:
        warnings.warn("bank.hard_negatives has no effect with data.hard_negatives 0", stacklevel=3)
    if config.traits.bank == "pairs" and not bank.queries and bank.row_weight != "all":
        warnings.warn("bank.row_weight has no effect without bank.queries", stacklevel=3)


def _check_encoder(config: TrainConfig) -> None:
    if config.model.attention == "flash_attention_2" and config.run.precision == "fp32":
        raise InputError("model.attention is flash_attention_2 with run.precision fp32, expected bf16 or fp16")
    if config.model.unpad and config.run.compile != "off":
        raise InputError(
            f"run.compile is {config.run.compile} with model.unpad, expected one or the other: unpadded passes have new "
            "sizes at every step"
        )
    if config.model.pack_linears and config.run.compile != "off":
        raise InputError(
            f"run.compile is {config.run.compile} with model.pack_linears, expected one or the other: compiled passes have "
            "products of their own"
        )


def _check_loss(config: TrainConfig) -> None:
    loss = config.loss
    widths, weights = loss.matryoshka_dims, loss.matryoshka_weights
    if any(width < 1 for width in widths) or len(set(widths)) < len(widths):
        raise InputError(f"loss.matryoshka_dims is {widths}, expected different numbers of at least 1")
    if weights and len(weights) != len(widths):
        raise InputError(
            f"loss.matryoshka_weights has {len(weights)} numbers, expected one for each of the {len(widths)} of "
            "loss.matryoshka_dims"
        )
    if not all(0 < weight < math.inf for weight in weights):
        raise InputError(f"loss.matryoshka_weights is {weights}, expected finite numbers above 0")
    if config.distils and not config.data.hard_negatives:
        raise InputError(
            f"loss.distillation is {loss.distillation} with data.hard_negatives 0, expected at least 1: a teacher's scores are "
            "compared within a query's own passages"
        )


def _check_adapters(config: TrainConfig) -> None:
    if config.model.quantize != "none" and not config.lora.rank:
        raise InputError(
            f"model.quantize is {config.model.quantize} with lora.rank 0, expected adapters: few bits cannot be trained"
        )
    if config.lora.rank and config.model.name == "tiny":
        raise InputError(
            "lora.rank is above 0 with model.name tiny, expected an encoder's folder or hub name: an adapter is saved without "
            "its base, and tiny's random weights lie nowhere"
        )
    if config.model.quantize != "none" and config.run.compile != "off":
        raise InputError(
            f"run.compile is {config.run.compile} with model.quantize {config.model.quantize}, expected one or the other"
        )


def _without_effect(config: TrainConfig) -> Iterator[str]:
    """A sentence for each setting that was changed and changes nothing, bank settings aside."""
    model, optim, run = config.model, config.optim, config.run
    if config.allow_changes and not config.resume:
        yield "allow_changes has no effect without resume"
    if config.data.mixture and config.data.split != DataConfig.split:
        yield "data.split has no effect with data.mixture, whose sets have splits of their own"
    if config.data.mixture_batches != DataConfig.mixture_batches and not config.data.mixture:
        yield "data.mixture_batches has no effect without data.mixture"
    if config.data.shuffle_buffer != DataConfig.shuffle_buffer and not config.data.streaming:
        yield "data.shuffle_buffer has no effect without data.streaming"
    if config.data.repair and config.data.streaming and not config.data.dev:
        yield "data.repair has no effect with data.streaming, which reads examples"
    if run.eval_steps and not config.data.dev:
        yield "run.eval_steps has no effect without data.dev"
    if run.metric != RunConfig.metric and not config.data.dev:
        yield "run.metric has no effect without data.dev"
    for name in ("distillation_weight", "teacher_temperature"):
        if not config.distils and getattr(config.loss, name) != getattr(LossConfig, name):
            yield f"loss.{name} has no effect with loss.distillation none"
    if optim.lr_scaling == "none" and optim.reference_batch_size != OptimConfig.reference_batch_size:
        yield "optim.reference_batch_size has no effect with optim.lr_scaling none"
    if optim.max_steps is not None and optim.epochs != OptimConfig.epochs:
        yield "optim.epochs has no effect with optim.max_steps, which goes before it"
    if not optim.fused and optim.name != "adamw":
        yield f"optim.fused has no effect with optim.name {optim.name}"
    if model.name == "tiny" and model.passage_name:
        yield "model.passage_name has no effect with model.name tiny"
    for name in ("alpha", "dropout", "target_modules"):
        if not config.lora.rank and getattr(config.lora, name) != getattr(AdapterConfig(), name):
            yield f"lora.{name} has no effect with lora.rank 0"
    for name in ("tiny_layers", "tiny_width", "tiny_vocabulary"):
        if model.name != "tiny" and getattr(model, name) != getattr(ModelConfig, name):
            yield f"model.{name} has no effect with model.name {model.name}"
    if model.pack_linears and run.precision != "fp32":
        yield f"model.pack_linears has no effect with run.precision {run.precision}"
    if model.pack_linears and model.quantize != "none":
        yield f"model.pack_linears has no effect on the layers that model.quantize {model.quantize} holds in few bits"
    if model.name == "tiny" and model.append_eos is not None:
        yield "model.append_eos has no effect with model.name tiny"
    if model.unpad and model.attention in ("eager", "sdpa"):
        yield f"model.attention {model.attention} has no effect with model.unpad, which has its own"

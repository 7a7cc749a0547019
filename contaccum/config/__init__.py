"""Settings of all commands. A setting is declared once: type, default, help text, unit, range, and methods that use it.

This module declares the config of a training run, checks it, and writes it as YAML. No module of this package imports torch.
"""

import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from functools import cache
from typing import Any

import yaml

from contaccum.config.declare import (
    METHOD_SPECS,
    MethodName,
    MethodSpec,
    SettingSpec,
    check_values,
    leaves,
    parse_bytes,
    setting,
    spec_of,
    unused_options,
)
from contaccum.config.encoder import ENCODER_SETTINGS, AdapterConfig, EncoderConfig, ModelConfig
from contaccum.config.groups import (
    BankConfig,
    BatchConfig,
    DataConfig,
    DataPolicy,
    LossConfig,
    MixtureConfig,
    OptimConfig,
    ReplayConfig,
)
from contaccum.config.run import METRIC_CUTS, METRIC_MEASURES, RunConfig
from contaccum.config.spellings import is_ignored, refuse_removed, unknown, without_removed
from contaccum.errors import InputError

__all__ = [
    "ENCODER_SETTINGS", "GROUPS", "METHOD_SPECS", "METRIC_CUTS", "METRIC_MEASURES", "AdapterConfig", "BankConfig",
    "BatchConfig", "DataConfig", "DataPolicy", "EncoderConfig", "LossConfig", "MethodName", "MethodSpec", "MixtureConfig",
    "ModelConfig", "OptimConfig", "ReplayConfig", "RunConfig", "TrainConfig", "affects", "check_total", "from_mapping",
    "parse_bytes", "settings_with", "to_yaml", "train_settings", "validate",
]  # fmt: skip


@dataclass
class TrainConfig:
    """Every setting of a training run."""

    method: MethodName = "cont_accum"
    """Training method."""
    seed: int = setting(0, at_least=0, at_most=2**64 - 1)
    """Random seed of the initial weights, the order of the examples, the choice of positives and negatives, and dropout."""
    output_dir: str = setting("", resume="free")
    """Folder of the run. The folder must be new or empty, unless `resume` is given."""
    resume: bool = setting(False, flag=True, resume="free")
    """Continue the run in `output_dir` from its newest checkpoint."""
    allow_changes: bool = setting(False, resume="free", needs="resume")
    """Only with `resume`: continue although settings, data, tokenizer, encoder or the number of processes changed. The changes
    are printed. Some settings can never change: `lora`, `optim.name`, and every setting that decides which weights are stored."""
    model: ModelConfig = field(default_factory=ModelConfig)
    lora: AdapterConfig = field(default_factory=AdapterConfig)
    data: DataConfig = field(default_factory=DataConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    bank: BankConfig = field(default_factory=BankConfig)
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    run: RunConfig = field(default_factory=RunConfig)

    @property
    def spec(self) -> MethodSpec:
        return METHOD_SPECS[self.method]

    def micro_batch_size(self, world: int) -> int:
        """Return the number of pairs that each of ``world`` processes encodes in one forward pass."""
        return self.batch.global_batch_size // world if self.spec.whole else self.batch.micro_batch_size

    @property
    def replay_share(self) -> float:
        """Share of the texts that are encoded with gradients: `replay.share` with a two-pass method, 1 with a one-pass method."""
        return self.replay.share if self.spec.two_pass else 1.0

    @property
    def distils(self) -> bool:
        """Whether the model learns from the scores of a teacher."""
        return self.loss.distillation != "none"

    @property
    def bank_rows(self) -> int:
        """Value of `bank.size`, or its default (`batch.global_batch_size`), even if the method has no bank."""
        return self.batch.global_batch_size if self.bank.size is None else self.bank.size

    def bank_size(self) -> int:
        """Return the number of rows in the bank. It is 0 for a method without a bank."""
        return 0 if self.spec.bank == "none" else self.bank_rows

    @property
    def micro_batch_tokens(self) -> int | None:
        """Maximum number of tokens in one forward pass, including padding. None if micro-batches are measured in pairs."""
        return None if self.spec.whole else self.batch.micro_batch_tokens

    def bank_push(self, world: int) -> int:
        """Return the maximum number of rows that can enter the bank at once, with ``world`` processes."""
        if self.spec.pushes_whole_step or self.micro_batch_tokens is not None:
            return self.batch.global_batch_size
        return self.micro_batch_size(world) * world

    def usual_push(self, world: int, longest: int) -> int:
        """Return the usual number of rows that one push adds to the bank, with ``world`` processes.

        longest: number of tokens of the longest pair, used only with `batch.micro_batch_tokens`.
        """
        if self.spec.pushes_whole_step or self.micro_batch_tokens is None:
            return self.bank_push(world)
        return min(self.batch.global_batch_size, max(1, self.micro_batch_tokens // longest) * world)

    def learning_rate(self) -> float:
        """Return the peak learning rate, after scaling it to the global batch size."""
        ratio = self.batch.global_batch_size / self.optim.reference_batch_size
        return self.optim.learning_rate * {"none": 1.0, "linear": ratio, "sqrt": ratio**0.5}[self.optim.lr_scaling]


GROUPS: dict[str, Any] = {each.name: each.type for each in fields(TrainConfig) if is_dataclass(each.type)}
"""Name of each option group -> its dataclass."""


@cache
def train_settings() -> dict[str, SettingSpec]:
    """Return the metadata of every setting. The keys are the names of the settings, such as ``bank.size``."""
    return {name: spec_of(declared) for name, _, declared in leaves(TrainConfig())}


def settings_with(**wanted: Any) -> tuple[str, ...]:
    """Return the names of all settings whose metadata have the given values, such as ``resume="free"``."""
    return tuple(
        name for name, spec in train_settings().items() if all(getattr(spec, k) == v for k, v in wanted.items())
    )


def affects(name: str, method: str | None) -> bool:
    """Return whether the setting ``name`` can change the model that the training method ``method`` trains.

    If ``method`` is None, return whether the setting can change the encoder before training. For the settings `seed` and
    `method`, always return False, because the callers handle these two separately.
    """
    spec = train_settings()[name]
    if spec.resume == "free" or name in ("seed", "method"):
        return False
    return name.startswith("model.") and not spec.training_only if method is None else spec.reads(method)


def validate(config: TrainConfig, world: int = 1, warn: bool = True) -> None:
    """Check a config and raise InputError for the first invalid value or invalid combination of values.

    world: number of processes. warn: whether to warn about settings that have no effect.
    """
    check_values(config)
    for group in ("", *GROUPS):
        part = getattr(config, group) if group else config
        for key in sorted(vars(part).keys() - {each.name for each in fields(part)}):
            name, value = f"{group}.{key}".lstrip("."), getattr(part, key)
            if not is_ignored(name, value):
                refuse_removed("", name, value)
                raise InputError(f"{name}: no such setting{unknown(name, str(value), train_settings())}")
    if not config.output_dir:
        raise InputError("output_dir is not set, expected a path")
    for group in GROUPS:
        broken = getattr(getattr(config, group), "broken", None)  # not every group has rules
        for sentence in broken(config, world) if broken else ():
            raise InputError(sentence)
    for sentence in unused_options([config], "") if warn else ():
        if config.bank_size() or not sentence.startswith("bank."):
            warnings.warn(sentence, stacklevel=2)
    if warn and config.bank_size() and config.spec.pushes_whole_step and not config.bank.keep:
        warnings.warn(
            "With bank.keep=false, the bank is emptied before its rows are used, so the bank has no effect.",
            stacklevel=2,
        )
    of_cont_cache = replace(config.bank, size=None) != BankConfig()
    if warn and config.method == "grad_cache" and config.replay_share < 1 and of_cont_cache:
        # a ready-made config of cont_cache with another method: --config demo --method grad_cache
        warnings.warn(
            f"replay.share is {config.replay.share}, so the second pass of grad_cache encodes only a sample of the texts. "
            "For GradCache without sampling, set replay.share to 1.",
            stacklevel=2,
        )


def check_total(config: TrainConfig, total: int) -> None:
    """Warn if a run of ``total`` steps ends before the bank is used."""
    if config.bank_size() and config.bank.warmup_steps >= total:
        warnings.warn(
            f"bank.warmup_steps is {config.bank.warmup_steps} in a run of {total} steps: the bank is never used",
            stacklevel=2,
        )


def from_mapping(values: Mapping[str, Any]) -> TrainConfig:
    """Build a config from nested mappings, the inverse of ``asdict``.

    Raises InputError for removed settings and removed values. But a removed setting with its old default is ignored (see
    ``spellings.REMOVED``).
    """
    values = without_removed(values, "")
    given: dict[str, Any] = {name: GROUPS[name](**value) if name in GROUPS else value for name, value in values.items()}
    config = TrainConfig(**given)
    config.data.mixture = [MixtureConfig(**each) for each in values.get("data", {}).get("mixture", [])]
    return config


def to_yaml(config: TrainConfig) -> str:
    """Return the complete config as YAML. In each group, the settings inherited from a base dataclass come last."""
    values = asdict(config)
    for name, kind in GROUPS.items():
        values[name] = {key: values[name][key] for key in dict.fromkeys([*kind.__annotations__, *values[name]])}
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)

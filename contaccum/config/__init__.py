"""Settings of all commands.

A setting is declared once: field, type with its range, default, and help text below.

This module declares the config of a training run, checks it, and writes it as YAML. No module of
this package imports torch.
"""

import warnings
from collections.abc import Iterator
from dataclasses import Field, asdict, dataclass, field
from functools import cache

import yaml

from contaccum.config.declare import (
    METHOD_SPECS,
    MethodName,
    MethodSpec,
    NonNegativeInt,
    ResumeRule,
    parse_bytes,
    setting,
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
from contaccum.config.load import (
    Dumper,
    check_values,
    flat,
    from_mapping,
    load,
    settings_of,
    with_changes,
)
from contaccum.config.run import CUTOFFS, METRIC_CUTS, METRIC_MEASURES, RunConfig
from contaccum.errors import InputError

__all__ = [
    "CUTOFFS", "ENCODER_SETTINGS", "METHOD_SPECS", "METRIC_CUTS", "METRIC_MEASURES",
    "AdapterConfig", "BankConfig", "BatchConfig", "DataConfig", "DataPolicy", "EncoderConfig",
    "LossConfig", "MethodName", "MethodSpec", "MixtureConfig", "ModelConfig", "OptimConfig",
    "ReplayConfig", "RunConfig", "TrainConfig", "affects", "check_values", "from_mapping",
    "load", "parse_bytes", "settings_with", "to_yaml", "train_settings", "validate",
    "with_changes",
]  # fmt: skip


@dataclass
class TrainConfig:
    """Every setting of a training run."""

    method: MethodName = "grad_cache"
    """Training method."""
    seed: NonNegativeInt = 0
    """Random seed of the initial weights, the order of the examples, the choice of positives and
    negatives, and dropout."""
    output_dir: str = setting("", resume="free", metavar="DIR")
    """Folder of the run: new or empty, or the folder of a run to continue. `train` continues a run
    only with `resume`; `compare` and `auto` always do."""
    resume: bool = setting(False, flag=True, resume="free")
    """Continue the run in `output_dir` from its newest checkpoint."""
    allow_changes: bool = setting(False, resume="free")
    """Only with `resume`: continue although settings, data, tokenizer, encoder or the number of
    processes changed. The changes are printed. Some settings can never change: `lora`,
    `optim.name`, and every setting that decides which weights are stored or how texts are
    encoded. A saved bank also needs the same `bank.size`, `data.hard_negatives` and kind of bank
    (`method`), unless the data changed: then the bank starts empty."""
    model: ModelConfig = field(default_factory=ModelConfig)
    lora: AdapterConfig = field(default_factory=AdapterConfig)
    data: DataConfig = field(default_factory=DataConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    bank: BankConfig = field(default_factory=BankConfig)
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    run: RunConfig = field(default_factory=RunConfig)

    @classmethod
    def from_config(cls, *files: str) -> "TrainConfig":
        """Read a config from YAML files or from ready-made configs, such as ``finetune``.

        A later file overrides an earlier one. Raises InputError as the command line does.
        """
        return load([cls], files)[0]

    @property
    def spec(self) -> MethodSpec:
        return METHOD_SPECS[self.method]

    def micro_batch_size(self, world: int) -> int:
        """Return the pairs that each of ``world`` processes encodes in one forward pass.

        Without a number in the config: the largest number up to 8 that divides a process's pairs.
        """
        pairs = self.batch.global_batch_size // world
        if self.spec.single_micro_batch:
            return pairs
        if self.batch.micro_batch_size == "auto":
            return next((size for size in range(8, 0, -1) if pairs % size == 0), 1)
        return self.batch.micro_batch_size

    @property
    def micro_batch_tokens(self) -> int | None:
        """Maximum number of tokens in one forward pass.

        None: micro-batches are measured in pairs.
        """
        return None if self.spec.single_micro_batch else self.batch.micro_batch_tokens

    @property
    def micro_batches_by_memory(self) -> bool:
        """Whether the memory may decide the micro-batch size: gradients do not depend on it."""
        batch = self.batch
        chosen = batch.micro_batch_size != "auto" or batch.micro_batch_tokens is not None
        return self.spec.two_pass and not chosen

    @property
    def replay_share(self) -> float:
        """Share of the texts encoded with gradients: `replay.share`, or 1 with one pass."""
        return self.replay.share if self.spec.two_pass else 1.0

    @property
    def distils(self) -> bool:
        """Whether the model learns from the scores of a teacher."""
        return self.loss.distillation != "none"

    @property
    def bank_rows(self) -> int:
        """Value of `bank.size` or its default (one step's pairs), even without a bank."""
        return self.batch.global_batch_size if self.bank.size is None else self.bank.size

    def bank_size(self) -> int:
        """Return the number of rows in the bank. It is 0 for a method without a bank."""
        return 0 if self.spec.bank == "none" else self.bank_rows

    def bank_push(self, world: int) -> int:
        """Return the most rows that can enter the bank at once, with ``world`` processes."""
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

    def conflicts(self, world: int) -> Iterator[str]:
        """Yield a sentence for each combination of settings that ``world`` processes cannot use."""
        if not self.output_dir:
            yield "output_dir is not set, expected a path"
        groups = (
            self.model, self.lora, self.data, self.batch, self.bank, self.replay, self.loss,
            self.run,
        )  # fmt: skip
        for group in groups:
            yield from group.conflicts(self, world)

    def unused(self) -> Iterator[str]:
        """Yield a sentence for each setting that was changed but has no effect."""
        by_score = self.loss.guide is not None or self.loss.false_negative_margin is not None
        # condition, beginning of the settings' names, and reason
        rules: tuple[tuple[bool, str, str], ...] = (
            (self.model.name == "tiny", "model.passage_name", "with model.name tiny"),
            (self.model.name != "tiny", "model.tiny_", "without model.name tiny"),
            (self.lora.rank == 0, "lora.", "with lora.rank 0"),
            (not self.data.hard_negatives, "data.fill_negatives", "with data.hard_negatives 0"),
            (not self.data.mixture, "data.mixture_batches", "without data.mixture"),
            (self.data.dev is None, "data.dev_", "without data.dev"),
            (self.data.dev is None, "run.eval_steps", "without data.dev"),
            (self.data.dev is None or self.run.eval_steps == 0, "run.early_stopping",
             "without data.dev and run.eval_steps"),
            (not self.spec.two_pass, "replay.share", f"with method {self.method}"),
            (not self.distils, "loss.distillation_", "without loss.distillation"),
            (not self.distils, "loss.teacher_", "without loss.distillation"),
            (not by_score, "loss.margin_strategy",
             "without loss.false_negative_margin or loss.guide"),
            (self.run.sharding != "fsdp", "run.cpu_offload", "without run.sharding fsdp"),
        )  # fmt: skip
        mine, usual = flat(asdict(self)), flat(asdict(TrainConfig()))
        changed = [name for name in mine if mine[name] != usual[name]]
        for applies, start, reason in rules:
            for name in changed:
                if applies and name.startswith(start):
                    yield f"{name} has no effect {reason}"


@cache
def train_settings() -> dict[str, Field]:
    """Return every setting of a training run: name, such as ``bank.size`` -> dataclass field."""
    return settings_of(TrainConfig)


def settings_with(resume: ResumeRule) -> tuple[str, ...]:
    """Return the names of the settings with a rule for resumed runs (see ``declare.setting``)."""
    return tuple(
        name
        for name, declared in train_settings().items()
        if declared.metadata.get("resume", "ask") == resume
    )


def affects(name: str, method: str | None) -> bool:
    """Return whether the setting ``name`` can change the model that ``method`` trains.

    If ``method`` is None, return whether the setting can change the encoder before training. For
    the settings `seed` and `method`, always return False, because the callers handle these
    separately.
    """
    if name in ("seed", "method") or name in settings_with("free"):
        return False
    if method is None:
        only_training = (
            "model.temperature",
            "model.dropout",
            "model.attention_dropout",
            "model.gradient_checkpointing",
        )
        return name.startswith("model.") and name not in only_training
    spec = METHOD_SPECS[method]
    if name == "bank.row_weight":  # a bank without queries has no rows
        return spec.bank == "pairs"
    if name.startswith("bank."):
        return spec.bank != "none"
    if name.startswith("replay."):
        return spec.two_pass
    if name in ("batch.micro_batch_size", "batch.micro_batch_tokens"):
        return not spec.single_micro_batch
    return True


def validate(config: TrainConfig, world: int = 1, warn: bool = True) -> None:
    """Check a config and raise InputError for the first invalid value or combination of values.

    world: number of processes. warn: whether to warn about settings that have no effect.
    """
    check_values(config)
    for sentence in config.conflicts(world):
        raise InputError(sentence)
    for sentence in config.unused() if warn else ():
        warnings.warn(sentence, stacklevel=2)


def to_yaml(config: TrainConfig) -> str:
    """Return the complete config as YAML."""
    return yaml.dump(asdict(config), Dumper=Dumper, sort_keys=False, allow_unicode=True)

"""Option group `run` of the training config, and checks of its values."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from contaccum.config.declare import (
    NonNegativeInt,
    PositiveInt,
    Steps,
    parse_bytes,
    setting,
)
from contaccum.config.encoder import ProcessConfig
from contaccum.errors import InputError

if TYPE_CHECKING:
    from contaccum.config import TrainConfig

METRIC_MEASURES = ("ndcg", "map", "recall", "precision", "mrr")
METRIC_CUTS = (1, 3, 5, 10, 20, 100)
CUTOFFS = (*METRIC_CUTS, 1000)
"""Cutoffs of the metrics that ``contaccum evaluate`` computes."""


def check_metric(setting: str, metric: str, cutoffs: Sequence[int]) -> None:
    """Raise InputError unless ``metric`` is a measure and one of ``cutoffs``, such as ndcg@10."""
    measure, _, cutoff = metric.partition("@")
    if measure not in METRIC_MEASURES or cutoff not in map(str, cutoffs):
        raise InputError(
            f"{setting} is {metric!r}, expected MEASURE@K, such as ndcg@10 (MEASURE: "
            f"{', '.join(METRIC_MEASURES)}; K: {', '.join(map(str, cutoffs))})"
        )


@dataclass
class RunConfig(ProcessConfig):
    """Device, precision, checkpoints, evaluation and logging."""

    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Autocast precision of the encoders. Weights and loss stay in fp32. `auto` means bf16 on a
    GPU that supports it, else fp32."""
    tf32: bool = False
    """Multiply fp32 matrices in TF32 on CUDA, also in the loss. This is faster, but the mantissa
    has 10 bits instead of 23."""
    sharding: Literal["none", "fsdp"] = "none"
    """How W processes hold the weights. `none`: each process holds all of them. `fsdp`: each
    process holds 1/W of all weights, gradients and optimizer states (torch's FSDP2), and gathers
    one layer at a time; an out-of-memory error ends the run."""
    cpu_offload: bool = False
    """With `run.sharding fsdp`: keep each process's shard of the weights, gradients and optimizer
    state in CPU memory, and update the weights there. This saves GPU memory but is slower."""
    memory_budget: str | None = setting(None, resume="free")
    """Maximum memory of torch on each GPU, such as 11GB or 10GiB. CUDA needs a few hundred MB in
    addition. Default: no limit."""
    save_steps: Steps = setting(0.25, resume="free")
    """Number of steps between two checkpoints. Below 1: share of the run's steps. A checkpoint is
    also written 10 minutes after the last one. 0: no checkpoints, except after a signal or an
    error."""
    keep_checkpoints: PositiveInt | None = setting(None, resume="free")
    """Number of newest checkpoints to keep, also after the run, which then ends with a checkpoint.
    Default: 2 during the run. After its last step only the model is kept."""
    eval_steps: Steps = 0.25
    """Number of steps between two evaluations on `data.dev`. Below 1: share of the run's steps. The
    model is also evaluated before training and after the last step; an evaluation shortly before
    the last step is left out. 0: only the last step is evaluated."""
    early_stopping: NonNegativeInt = 0
    """Number of evaluations in a row without a better score on `data.dev` that end the run. 0: the
    run never ends early."""
    metric: str = "ndcg@10"
    """Metric on `data.dev` that decides which model is kept."""
    eval_batch_tokens: PositiveInt | None = setting(None, resume="free")
    """Maximum number of tokens in one forward pass of an evaluation, including padding. Default:
    16384, or 1024 per thread on a CPU."""
    drift_steps: NonNegativeInt = setting(10, resume="free")
    """Number of steps between two measurements of drift. Drift is measured as the cosine of banked
    vectors and new vectors of the same texts. 0: never. The trained model does not depend on this
    setting."""
    trackers: list[str] = setting(factory=list, resume="free")
    """Additional experiment trackers: `tensorboard` (needs the extra `tensorboard`) and `wandb`
    (needs the package wandb)."""

    def conflicts(self, config: "TrainConfig", world: int) -> Iterator[str]:
        check_metric("run.metric", self.metric, METRIC_CUTS)
        if self.memory_budget is not None:
            parse_bytes(self.memory_budget)
        if self.sharding == "fsdp":
            if world == 1:
                yield (
                    "run.sharding is fsdp, but there is only one process; start several processes "
                    "with torchrun, or set run.sharding to none"
                )
            needs = "but run.sharding is fsdp, which needs"
            if self.precision == "fp16":
                yield f"run.precision is fp16, {needs} fp32 or bf16; change one of them"
            if config.optim.name != "adamw":
                yield f"optim.name is {config.optim.name}, {needs} adamw; change one of them"

"""Experiment trackers that get the numbers of log.jsonl: TensorBoard, and Weights & Biases."""

import importlib.util
import os
from pathlib import Path
from typing import Any

from contaccum.errors import InputError


class TensorBoard:
    """Tracker that writes event files into the folder ``tensorboard`` of the run."""

    def __init__(self, run: Path, config: dict[str, Any], resumed_at: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # without the steps that a killed run took after its last checkpoint
        first = resumed_at + 1 if resumed_at else 0
        self.writer = SummaryWriter(str(run / "tensorboard"), purge_step=first)
        self.writer.add_text("config", str(config))

    def log(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class WeightsAndBiases:
    """Tracker that sends the numbers to wandb.

    Its local files are in the folder of the run, unless $WANDB_DIR is set. A resumed run is a new
    one there, so ``resumed_at`` is not used.
    """

    def __init__(self, run: Path, config: dict[str, Any], resumed_at: int) -> None:
        import wandb

        self.run = wandb.init(
            project="contaccum", config=config, dir=os.environ.get("WANDB_DIR", str(run))
        )

    def log(self, values: dict[str, float], step: int) -> None:
        self.run.log(values, step=step)

    def close(self) -> None:
        self.run.finish()


Tracker = TensorBoard | WeightsAndBiases
TRACKERS: dict[str, type[Tracker]] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}
"""Name in ``run.trackers``, which is also the name of the package -> tracker."""


def check_trackers(names: list[str]) -> None:
    """Raise InputError if a tracker is unknown or its package is not installed."""
    for name in names:
        if name not in TRACKERS:
            raise InputError(
                f"run.trackers is {names}; {name!r} is unknown, expected some of "
                f"{', '.join(TRACKERS)}"
            )
        if importlib.util.find_spec(name) is None:
            raise InputError(
                f"run.trackers is {names}, but package {name} is missing. Run pip install {name}."
            )

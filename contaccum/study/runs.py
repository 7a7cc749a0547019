"""The runs of a study as read from their folders, and the groups that differ in nothing but the seed."""

import json
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from contaccum.config import TRAITS, TrainConfig
from contaccum.errors import InputError
from contaccum.evaluation.significance import Scores
from contaccum.evaluation.stored import read_metrics
from contaccum.study.checked import check_log, check_settings
from contaccum.training.environment import read_environment
from contaccum.training.log import read_log
from contaccum.training.setup import CONFIG_FILE, MAY_CHANGE, flat, read_config

METRICS_FILE = "metrics.json"
TUNED_FILE = "tuned.json"
"""What dev says of a finished run that is not scored on the test data."""


@dataclass(frozen=True)
class Run:
    """One run's folder; a baseline without training has metrics alone."""

    folder: Path
    config: dict[str, Any]
    """Settings by name, group.field; empty for a baseline."""
    steps: list[dict[str, Any]]
    """The log's lines of optimizer steps."""
    evaluations: list[dict[str, Any]]
    """The log's lines of evaluations on dev."""
    metrics: dict[str, Any] | None
    environment: dict[str, Any]

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def method(self) -> str | None:
        return self.config.get("method")

    @property
    def seed(self) -> int:
        return self.config.get("seed", 0)

    @cached_property
    def times(self) -> dict[int, float]:
        """Seconds of training up to each logged step: a line stands for the steps since the line before it. Evaluations,
        checkpoints and measurements of drift are not in them."""
        total, before, found = 0.0, 0, {}
        for line in self.steps:
            total += line["seconds"] * (line["step"] - before)
            before = line["step"]
            found[before] = total
        return found

    @property
    def train_seconds(self) -> float | None:
        return max(self.times.values(), default=None)

    @property
    def waited(self) -> float | None:
        """Share of the steps' time, all but the first, that was spent waiting for data."""
        steady = self.steps[1:] or self.steps
        return sum(line["waited"] for line in steady) / sum(line["seconds"] for line in steady) if steady else None

    @property
    def peak_memory(self) -> int | None:
        """Most bytes held in the run: allocated on a GPU, resident on a CPU."""
        return max((line["peak_memory"] for line in self.steps), default=None)

    def score(self, metric: str) -> float | None:
        """The mean of a metric on the test data; InputError where the file has no such metric."""
        if self.metrics is None:
            return None
        mean = self.metrics["mean"]
        if metric not in mean:
            file = self.folder if self.folder.is_file() else self.folder / METRICS_FILE
            raise InputError(f"{file}: has no metric {metric!r}, expected one of {', '.join(mean)}")
        return mean[metric]

    def median(self, name: str) -> float | None:
        """Of a figure over the steps, the first one left out, which also pays for what is done once."""
        values = [line[name] for line in self.steps[1:] or self.steps if line.get(name) is not None]
        return statistics.median(values) if values else None

    def curve(self, name: str) -> dict[int, float]:
        """A figure of the log by step."""
        return {line["step"]: line[name] for line in self.steps if line.get(name) is not None}


def read_run(folder: str | Path) -> Run:
    """A run's folder, or a metrics file alone; InputError where it holds neither settings nor metrics."""
    path = Path(folder)
    if path.is_file():
        return Run(path, {}, [], [], read_metrics(path), {})
    if not (path / METRICS_FILE).is_file() and not (path / CONFIG_FILE).is_file():
        raise InputError(f"{path}: holds neither {CONFIG_FILE} nor {METRICS_FILE}, expected the folder of a run")
    metrics = read_metrics(path / METRICS_FILE) if (path / METRICS_FILE).is_file() else None
    if not (path / CONFIG_FILE).is_file():
        return Run(path, {}, [], [], metrics, {})
    settings, lines = flat(read_config(path)), read_log(path)
    check_settings(path / CONFIG_FILE, settings)
    check_log(path, lines)
    steps, evaluations = ([line for line in lines if kind in line] for kind in ("loss", "dev"))
    return Run(path, settings, steps, evaluations, metrics, read_environment(path))


def matters(name: str, method: str | None) -> bool:
    """Whether a setting can change what a method does; None stands for the encoder without training."""
    group = name.partition(".")[0]
    if name in MAY_CHANGE or name in ("seed", "method"):
        return False
    if method is None:
        return group == "model" and name not in UNTRAINED
    if TRAITS[method].bank == "none" and group == "bank":
        return False
    return not (TRAITS[method].whole and name in ("batch.micro_batch_size", "batch.micro_batch_tokens"))


UNTRAINED = ("model.temperature", "model.dropout", "model.gradient_checkpointing")
"""Settings of the model that do nothing before training."""
NAMES = tuple(flat(asdict(TrainConfig())))


@dataclass
class Group:
    """Runs that differ in the seed alone; they stand for one setting."""

    label: str
    runs: list[Run] = field(default_factory=list)

    @property
    def method(self) -> str | None:
        return self.runs[0].method

    def setting(self, name: str) -> Any:
        return self.runs[0].config.get(name)

    def scores(self, metric: str) -> list[float]:
        """The metric of each run that was scored."""
        return [score for run in self.runs if (score := run.score(metric)) is not None]

    def per_query(self) -> dict[int, Scores]:
        """Seed to the values of every query."""
        return {run.seed: run.metrics["per_query"] for run in self.runs if run.metrics and run.metrics.get("per_query")}

    def mean(self, name: str) -> float | None:
        """Mean over runs of a property of theirs, such as ``train_seconds``."""
        values = [value for run in self.runs if (value := getattr(run, name)) is not None]
        return statistics.mean(values) if values else None

    def median(self, name: str) -> float | None:
        values = [value for run in self.runs if (value := run.median(name)) is not None]
        return statistics.median(values) if values else None


def varied(runs: Iterable[Run]) -> list[str]:
    """Settings, other than method and seed, that are not the same in all trained runs that read them."""
    trained = [run for run in runs if run.method]
    return [
        name
        for name in NAMES
        if len({json.dumps(run.config.get(name)) for run in trained if matters(name, run.method)}) > 1
    ]


def group_runs(runs: list[Run]) -> list[Group]:
    """Runs by setting, in the order of their first runs. A run whose setting and seed were there before stands for itself."""
    names = varied(runs)
    groups: dict[str, Group] = {}
    for run in runs:
        own = [name for name in names if matters(name, run.method)] if run.method else []
        parts = [f"{name.partition('.')[2]}={run.config.get(name)}" for name in own]
        label = " ".join([run.method, *parts]) if run.method else run.name
        group = groups.get(label)
        if group is not None and run.seed in {other.seed for other in group.runs}:
            label = f"{label} ({run.folder})"
        groups.setdefault(label, Group(label)).runs.append(run)
    return list(groups.values())


def spread(values: list[float]) -> tuple[float | None, float | None]:
    """Mean, and standard deviation (of a sample) where there are two values or more."""
    if not values:
        return None, None
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else None

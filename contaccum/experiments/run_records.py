"""Read runs for reports, group those that differ only in the seed, and test differences."""

import json
import os
import re
import statistics
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import numpy as np

from contaccum.config import METHOD_SPECS, affects, train_settings
from contaccum.errors import InputError
from contaccum.evaluation.metrics import read_metrics
from contaccum.evaluation.significance import Comparison, QueryScores, compare, holm
from contaccum.runtime.files import read_json
from contaccum.training.log import read_environment, read_log
from contaccum.training.run_folder import CONFIG_FILE, flat, read_config

MISSING = "-"  # empty cell of a table
METRICS_FILE = "metrics.json"
TUNED_FILE = "tuned.json"  # contains a DevScore as JSON
SEED_SUFFIX = re.compile(r"[-_. ]?(seed|s)?[-_=]?\d+$")
"""Seed at the end of a run's name, such as -seed1."""


class DevScore(TypedDict):
    """Dev metric of a finished tuning run: name and value of the metric."""

    metric: str
    score: float


@dataclass(frozen=True)
class RunRecord:
    """Content of the folder of a training run. A baseline without training has only ``metrics``."""

    folder: Path
    config: dict[str, Any]  # name of a setting (group.field) -> value; empty for a baseline
    steps: list[dict[str, Any]]  # lines of the log about optimizer steps
    evaluations: list[dict[str, Any]]  # lines of the log about evaluations on dev
    metrics: dict[str, Any] | None
    environment: dict[str, Any]

    @property
    def name(self) -> str:
        path = Path(os.path.abspath(self.folder))  # Path(".").name is empty
        return path.parent.name if path.name == METRICS_FILE else path.name

    @property
    def method(self) -> str | None:
        return self.config.get("method")

    @property
    def seed(self) -> int:
        return self.config.get("seed", 0)

    def _totals(self, name: str) -> list[float]:
        """Return the total seconds of each log line.

        name: seconds or waited, whose logged values are means over steps.
        """
        totals = []
        last = 0
        for line in self.steps:  # a line covers the steps since the previous line
            totals.append(line[name] * (line["step"] - last))
            last = line["step"]
        return totals

    @cached_property
    def times(self) -> dict[int, float]:
        """Logged step -> seconds of training up to this step.

        The time of evaluations, checkpoints and drift measurements is not counted.
        """
        steps = [line["step"] for line in self.steps]
        return dict(zip(steps, accumulate(self._totals("seconds")), strict=True))

    @cached_property
    def evaluation_times(self) -> dict[int, float]:
        """Step of an evaluation on dev -> seconds of training up to it, interpolated."""
        last = max(self.times, default=0)
        steps = [line["step"] for line in self.evaluations if line["step"] <= last]
        seconds = np.interp(steps, [0, *self.times], [0.0, *self.times.values()])
        return dict(zip(steps, seconds.tolist(), strict=True))

    @property
    def train_seconds(self) -> float | None:
        return max(self.times.values(), default=None)

    @property
    def waited(self) -> float | None:
        """Share of the training time in which training waits for data.

        The first line of the log is not counted.
        """
        waited, seconds = self._totals("waited"), self._totals("seconds")
        return sum(waited[1:] or waited) / sum(seconds[1:] or seconds) if seconds else None

    @property
    def peak_memory(self) -> int | None:
        """Peak memory in bytes: allocated on a GPU, or resident on a CPU."""
        return max((line["peak_memory"] for line in self.steps), default=None)

    @property
    def peak_mib(self) -> float | None:
        return None if self.peak_memory is None else self.peak_memory / 2**20

    @property
    def per_query(self) -> QueryScores:
        """Metrics of each test query. Empty if the run was not evaluated on the test data."""
        return (self.metrics or {}).get("per_query") or {}

    def score(self, metric: str) -> float | None:
        """Return the mean of a metric over the test queries.

        Return None if the run was not evaluated.

        Raises InputError if the metrics file does not contain the metric.
        """
        if self.metrics is None:
            return None
        mean = self.metrics["mean"]
        if metric not in mean:
            file = self.folder if self.folder.is_file() else self.folder / METRICS_FILE
            raise InputError(f"{file}: no metric {metric!r}; expected one of {', '.join(mean)}")
        return mean[metric]

    def median(self, name: str) -> float | None:
        """Return the median of the logged value ``name`` over the steps.

        The first step is not counted, because it is slower.
        """
        values = [line[name] for line in self.steps[1:] or self.steps if line.get(name) is not None]
        return statistics.median(values) if values else None

    def curve(self, name: str) -> dict[int, float]:
        """Return the logged value ``name`` of each logged step: step -> value."""
        return {line["step"]: line[name] for line in self.steps if line.get(name) is not None}


def dev_score(run: Path) -> float | None:
    """Return the dev metric of the tuning run in the folder ``run``.

    Return None if the run is not finished.
    """
    file = run / TUNED_FILE
    return read_json(file, DevScore)["score"] if file.is_file() else None


def load_run_record(folder: str | Path) -> RunRecord:
    """Read the folder of a run, or a metrics file.

    Raise InputError if there are neither settings nor metrics.
    """
    path = Path(folder)
    metrics_file = path if path.is_file() else path / METRICS_FILE
    metrics = read_metrics(metrics_file) if metrics_file.is_file() else None
    if not (path / CONFIG_FILE).is_file():
        if metrics is None:
            raise InputError(
                f"{path}: no {CONFIG_FILE} and no {METRICS_FILE}; this is not the folder of a run"
            )
        return RunRecord(path, {}, [], [], metrics, {})
    config = flat(read_config(path))
    if config.get("method") not in METHOD_SPECS:
        raise InputError(
            f"{path / CONFIG_FILE}: method is {config.get('method')!r}; expected one of "
            f"{', '.join(METHOD_SPECS)}"
        )
    lines = read_log(path)
    steps = [line for line in lines if "loss" in line]
    evaluations = [line for line in lines if "dev" in line]
    return RunRecord(path, config, steps, evaluations, metrics, read_environment(path))


def for_order(score: float | None) -> float:
    """Return a sort key: the score, or a number below all scores for a run without a score."""
    return float("-inf") if score is None else score


def best_first(groups: Iterable["RunGroup"], metric: str) -> list["RunGroup"]:
    """Sort groups by the metric, best first. Groups without the metric come last."""
    return sorted(groups, key=lambda group: for_order(group.score(metric)[0]), reverse=True)


def mean_std(values: Iterable[float | None]) -> tuple[float | None, float | None]:
    """Return the mean and the sample standard deviation of the values that are not None.

    Without values, the mean is None; with fewer than two, the standard deviation is None.
    """
    known = [value for value in values if value is not None]
    mean = statistics.mean(known) if known else None
    return mean, statistics.stdev(known) if len(known) > 1 else None


@dataclass
class RunGroup:
    """Runs that differ only in the seed."""

    label: str
    settings: str = MISSING  # method, and the settings that differ between the runs of the report
    runs: list[RunRecord] = field(default_factory=list)

    @property
    def method(self) -> str | None:
        return self.runs[0].method

    def setting(self, name: str) -> Any:
        return self.runs[0].config.get(name)

    def scores(self, metric: str) -> list[float]:
        return [score for run in self.runs if (score := run.score(metric)) is not None]

    def score(self, metric: str) -> tuple[float | None, float | None]:
        """Return the mean and the standard deviation of the metric over the runs."""
        return mean_std(self.scores(metric))

    def per_query(self) -> dict[int | None, QueryScores]:
        """Return the metrics of every run: seed (None for a baseline) -> query id -> metrics."""
        return {
            run.seed if run.method else None: run.per_query for run in self.runs if run.per_query
        }

    def mean(self, name: str) -> float | None:
        """Return the mean of an attribute of RunRecord, such as ``train_seconds``, over runs."""
        return mean_std(getattr(run, name) for run in self.runs)[0]

    def median(self, name: str) -> float | None:
        """Take the median of the logged value ``name`` in each run.

        Return the median of these medians, None without values.
        """
        values = [value for run in self.runs if (value := run.median(name)) is not None]
        return statistics.median(values) if values else None


def varied(runs: Iterable[RunRecord]) -> list[str]:
    """Return the names of the settings that differ between trained runs.

    Method and seed are left out, and so are settings that the methods of the runs do not read.
    """
    trained = [run for run in runs if run.method]
    return [
        name
        for name in train_settings()
        if len({json.dumps(run.config.get(name)) for run in trained if affects(name, run.method)})
        > 1
    ]


def group_runs(runs: list[RunRecord], labels: Mapping[Path, str] | None = None) -> list[RunGroup]:
    """Group runs that differ only in the seed.

    A second run with the same seed starts a new group. A baseline starts its own.

    labels: folder of a run -> label of the run's group. Default: the names of the runs' folders,
    without the seed at their end.
    """
    names = varied(runs)
    groups: dict[tuple[str | None, str, int], RunGroup] = {}
    for run in runs:
        used = [name for name in names if affects(name, run.method)] if run.method else []
        values = [
            f"{name.partition('.')[2]}={value}"
            for name in used
            if (value := run.config.get(name)) is not None  # None: not set
        ]
        settings = " ".join([run.method, *values]) if run.method else MISSING
        given = (labels or {}).get(run.folder)
        # a number for each further group of the same settings
        number = 0
        while other := groups.get((given, settings, number)):
            if run.method and run.seed not in {each.seed for each in other.runs}:
                break
            number += 1
        group = groups.setdefault((given, settings, number), RunGroup(given or "", settings))
        group.runs.append(run)
    used_labels: set[str] = set()
    for group in groups.values():
        label = group.label or group.runs[0].name
        if not group.label and len(group.runs) > 1:
            bases = {SEED_SUFFIX.sub("", run.name) for run in group.runs} - {""}
            label = bases.pop() if len(bases) == 1 else f"{label} and {len(group.runs) - 1} more"
        group.label = f"{label} ({group.runs[0].folder})" if label in used_labels else label
        used_labels.add(group.label)
    return list(groups.values())


def by_global_batch(groups: Iterable[RunGroup]) -> dict[int | None, list[RunGroup]]:
    """Return the groups of each global batch size: size -> groups. Baselines have the size None."""
    found: dict[int | None, list[RunGroup]] = defaultdict(list)
    for group in groups:
        found[group.setting("batch.global_batch_size")].append(group)
    return dict(sorted(found.items(), key=lambda item: (item[0] is None, item[0] or 0)))


class Difference(NamedTuple):
    """Comparison of a group with a reference group. The p values are corrected by Holm's method."""

    group: RunGroup
    reference: RunGroup
    found: Comparison
    p_permutation: float
    p_t: float
    p_both: float | None  # over queries and seeds; None with fewer than two common seeds


def differences(
    groups: list[RunGroup], metric: str, reference: Collection[Path], equal_batch: bool = True
) -> list[Difference]:
    """Test each group against its reference group.

    reference: folders of the reference runs. A reference group contains at least one of them.
    equal_batch: if True, a group of training runs is compared only with a baseline, or with a group
    that has the same global batch size. If several reference groups are possible, the one with the
    best metric is used.
    """
    pairs, baselines = [], [group for group in groups if group.method is None]
    for size, members in by_global_batch(groups).items() if equal_batch else [(None, groups)]:
        known = groups if size is None else [*members, *baselines]
        chosen = [
            one
            for one in known
            if any(run.folder in reference for run in one.runs) and one.scores(metric)
        ]
        best = max(chosen, key=lambda group: group.score(metric)[0] or 0.0, default=None)
        if best is not None and best.per_query():
            pairs += [
                (group, best)
                for group in members
                if group.label != best.label and group.per_query()
            ]
    found = [compare(group.per_query(), other.per_query(), metric) for group, other in pairs]
    # Holm's method corrects each of the three kinds of test on its own
    p_permutation = holm([one.p_permutation for one in found])
    p_t = holm([one.p_t for one in found])
    p_both = iter(holm([one.p_both for one in found if one.p_both is not None]))
    tested = []
    for i, ((group, other), one) in enumerate(zip(pairs, found, strict=True)):
        corrected = None if one.p_both is None else next(p_both)
        tested.append(Difference(group, other, one, p_permutation[i], p_t[i], corrected))
    return tested

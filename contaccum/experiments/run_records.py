"""Read runs for reports, group those that differ only in the seed, and test differences."""

import json
import os
import re
import statistics
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from contaccum.config import affects, train_settings
from contaccum.config.load import flat
from contaccum.errors import InputError
from contaccum.evaluation.metrics import read_metrics
from contaccum.evaluation.significance import Comparison, QueryScores, compare, holm
from contaccum.runtime.files import read_json
from contaccum.training.log import read_environment, read_log
from contaccum.training.run_folder import (
    CONFIG_FILE,
    FINISHED_FILE,
    METRICS_FILE,
    read_config,
)

MISSING = "-"  # empty cell of a table
TUNED_FILE = "tuned.json"  # dev metric of a finished tuning run
TESTED_ON = {
    "per_query": "on different test queries",
    "test_content": (
        "on different test data: the query ids are the same, but texts or judgements differ"
    ),
    "positives_hash": "with different judgements",
    "own_ids": "with and without the passages that have the id of their query",
    "relevance_level": "with different relevance levels",
    "factory": "with different indexes",
    "search_params": "with different settings of the index",
}
"""Keys of a file of metrics that must be equal in compared runs, and what is wrong otherwise."""
SEED_SUFFIX = re.compile(r"[-_. ]?(seed|s)?[-_=]?\d+$")
"""Seed at the end of a run's name, such as -seed1."""


@dataclass(frozen=True)
class RunRecord:
    """Content of the folder of a training run. A baseline without training has only ``metrics``."""

    folder: Path
    config: dict[str, Any]  # name of a setting (group.field) -> value; empty for a baseline
    steps: list[dict[str, Any]]  # lines of the log about optimizer steps
    evaluations: list[dict[str, Any]]  # lines of the log about evaluations on dev
    metrics: dict[str, Any] | None
    environment: dict[str, Any]
    finished: bool = True  # False: the run was stopped; True if that is not known
    data: str | None = None  # hash of the training data of an ended run without checkpoints

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

    @property
    def train_seconds(self) -> float | None:
        """Seconds of all logged steps, without evaluations, checkpoints and drift measurements."""
        return sum(line["seconds"] for line in self.steps) if self.steps else None

    @property
    def peak_mib(self) -> float | None:
        """Peak memory in MiB: allocated on a GPU, or resident on a CPU."""
        return max((line["peak_memory"] / 2**20 for line in self.steps), default=None)

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
        """Return a logged value or a metric on dev by step. name: such as loss or ndcg@10."""
        values = {}
        for line in (*self.steps, *self.evaluations):
            value = line.get("dev", line).get(name)
            if value is not None:
                values[line["step"]] = value
        return values


def dev_score(run: Path) -> float | None:
    """Return the dev metric of the tuning run in the folder ``run``.

    Return None if the run is not finished.
    """
    file = run / TUNED_FILE
    return read_json(file)["score"] if file.is_file() else None


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
    lines = read_log(path)
    steps = [line for line in lines if "loss" in line]
    evaluations = [line for line in lines if "dev" in line]
    # a run that keeps no checkpoints ends with this file
    file = path / FINISHED_FILE
    finished = file.is_file() or config.get("run.keep_checkpoints") is not None
    data = read_json(file).get("identity", {}).get("data") if file.is_file() else None
    return RunRecord(
        path, config, steps, evaluations, metrics, read_environment(path), finished, data
    )


def ordered_groups(groups: Iterable["RunGroup"], metric: str) -> list["RunGroup"]:
    """Sort groups by the metric, best first. Groups without the metric come last."""

    def score(group: RunGroup) -> float:
        mean, _ = group.mean_and_sd(metric)
        return float("-inf") if mean is None else mean

    return sorted(groups, key=score, reverse=True)


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

    def mean_and_sd(self, metric: str) -> tuple[float | None, float | None]:
        """Return the mean and the standard deviation of the metric over the runs."""
        return mean_std(run.score(metric) for run in self.runs)

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


def warn_of_different_tests(runs: Iterable[RunRecord]) -> None:
    """Warn if two runs were evaluated on different queries or data, or in different ways."""
    for key, what in TESTED_ON.items():
        first: dict[str, Path] = {}  # value as text -> folder of the first run with it
        for run in runs:
            value = (run.metrics or {}).get(key)
            if key == "per_query":
                value = sorted(run.per_query) or None
            if value is not None:
                first.setdefault(str(value), run.folder)
        if len(first) > 1:
            one, other, *_ = first.values()
            warnings.warn(
                f"{one} and {other} were evaluated {what}. Evaluate both again to compare only the "
                "models.",
                stacklevel=3,
            )
            return


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

    labels: folder of a run -> label of its group, whose runs differ only in the seed and in
    settings that follow from the machine. Default: the name of the run's folder, in a group of
    several runs without the seed at its end.
    """
    labels = labels or {}
    names = varied(runs)
    # settings that were chosen anew for each seed, such as ``batch.micro_batch_tokens``
    by_label = {
        label: varied(run for run in runs if labels.get(run.folder) == label)
        for label in set(labels.values())
    }
    groups: list[RunGroup] = []
    for run in runs:
        label = labels.get(run.folder) or SEED_SUFFIX.sub("", run.name) or run.name
        settings = MISSING
        if run.method:
            chosen = by_label.get(label, []) if run.folder in labels else []
            used = [name for name in names if affects(name, run.method) and name not in chosen]
            values = [
                f"{name.partition('.')[2]}={value}"
                for name in used
                if (value := run.config.get(name)) is not None  # None: not set
            ]
            settings = " ".join([run.method, *values])
        for group in groups:
            same = group.label == label and group.settings == settings
            if same and run.method and run.seed not in {other.seed for other in group.runs}:
                group.runs.append(run)
                break
        else:
            groups.append(RunGroup(label, settings, [run]))
    for group in groups:
        if len(group.runs) == 1 and group.runs[0].folder not in labels:
            group.label = group.runs[0].name
    uses = Counter(group.label for group in groups)
    for group in groups:
        if uses[group.label] > 1:
            group.label += f" ({group.runs[0].folder})"
    return groups


class Difference(NamedTuple):
    """Comparison of a group with a reference group."""

    group: RunGroup
    reference: RunGroup
    found: Comparison  # its p values are not corrected
    p: float
    """P value over queries and seeds. If one of the two has a single run: over queries. This and
    ``p_queries`` are corrected by Holm's method for the number of comparisons."""
    p_queries: float  # p value over queries


def differences(
    groups: list[RunGroup], metric: str, reference: Collection[Path]
) -> list[Difference]:
    """Test each group against the reference group.

    reference: folders of runs. Of the groups with one of these runs, the reference is that with
    the best metric. Groups without metrics of each query are left out.
    """
    evaluated = [group for group in groups if group.per_query()]
    candidates = [
        group for group in evaluated if any(run.folder in reference for run in group.runs)
    ]
    if not candidates:
        return []
    best = ordered_groups(candidates, metric)[0]
    tested = [group for group in evaluated if group is not best]
    found = [compare(group.per_query(), best.per_query(), metric) for group in tested]
    p = holm([one.p for one in found])
    p_queries = holm([one.p_permutation for one in found])
    return [
        Difference(group, best, found[number], p[number], p_queries[number])
        for number, group in enumerate(tested)
    ]

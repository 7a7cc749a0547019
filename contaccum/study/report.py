"""Runs side by side: one row each, from what their folders hold."""

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contaccum.config import TRAITS
from contaccum.errors import InputError
from contaccum.files import read_json
from contaccum.training.log import read_log
from contaccum.training.setup import CONFIG_FILE, read_config

METRICS_FILE = "metrics.json"
MISSING = "-"
COLUMNS = (
    "run",
    "method",
    "N",
    "B",
    "bank",
    "metric",
    "s/step",
    "pairs/s",
    "peak MiB",
    "wait %",
    "grad ratio",
    "negatives",
)


@dataclass(frozen=True)
class RunSummary:
    """What a row shows; figures of a step are medians over the run, its first step left out."""

    name: str
    method: str | None = None
    global_batch_size: int | None = None
    micro_batch_size: int | str | None = None
    """Pairs in one forward pass, or its budget of tokens; the whole step's pairs where the method takes it at once."""
    bank_size: int | None = None
    metric: float | None = None
    seconds: float | None = None
    """Of one optimizer step, data and logging included."""
    pairs_per_second: float | None = None
    peak_memory: float | None = None
    """Most bytes held in the run: allocated on a GPU, resident on a CPU."""
    waited: float | None = None
    """Share of the steps' time, all but the first, that was spent waiting for data."""
    grad_norm_ratio: float | None = None
    """Passage tower over query tower."""
    negatives: float | None = None
    """That a query meets."""


def summarise(folder: str | Path, metric: str) -> RunSummary:
    """The row of a run's folder; one with metrics.json alone (a baseline without training) has a name and a metric."""
    run = Path(folder)
    if not (run / METRICS_FILE).is_file() and not (run / CONFIG_FILE).is_file():
        raise InputError(f"{run}: holds neither {CONFIG_FILE} nor {METRICS_FILE}, expected the folder of a run")
    score = _metric(run, metric)
    if not (run / CONFIG_FILE).is_file():
        return RunSummary(run.name, metric=score)
    config = read_config(run)
    batch = config["batch"]
    steps = [line for line in read_log(run) if "loss" in line]
    steady = steps[1:] or steps
    return RunSummary(
        run.name,
        config["method"],
        batch["global_batch_size"],
        _micro_batch(batch, TRAITS[config["method"]].whole),
        max((line["bank_fill"] for line in steps), default=None),
        score,
        _median(steady, "seconds"),
        _median(steady, "pairs_per_second"),
        max((line["peak_memory"] for line in steps), default=None),
        sum(line["waited"] for line in steady) / sum(line["seconds"] for line in steady) if steady else None,
        _median(steady, "grad_norm_ratio"),
        _median(steady, "negatives"),
    )


def _micro_batch(batch: dict[str, Any], whole: bool) -> int | str:
    if whole:
        return batch["global_batch_size"]
    tokens = batch["micro_batch_tokens"]
    return batch["micro_batch_size"] if tokens is None else f"{tokens} tokens"


def _metric(run: Path, metric: str) -> float | None:
    if not (run / METRICS_FILE).is_file():
        return None
    mean = read_json(run / METRICS_FILE)["mean"]
    if metric not in mean:
        raise InputError(f"{run / METRICS_FILE}: has no metric {metric!r}, expected one of {', '.join(mean)}")
    return mean[metric]


def _median(lines: list[dict[str, Any]], name: str) -> float | None:
    values = [line[name] for line in lines if line[name] is not None]
    return statistics.median(values) if values else None


def render_table(rows: list[RunSummary], metric: str) -> str:
    """The rows as a Markdown table."""
    heads = [metric if column == "metric" else column for column in COLUMNS]
    body = [[_cell(value) for value in _values(row)] for row in rows]
    widths = [max(map(len, column)) for column in zip(heads, *body, strict=True)]
    lines = [heads, ["-" * width for width in widths], *body]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    )


def _values(row: RunSummary) -> list[Any]:
    peak = row.peak_memory / 2**20 if row.peak_memory is not None else None
    return [
        row.name, row.method, row.global_batch_size, row.micro_batch_size, row.bank_size,
        None if row.metric is None else f"{row.metric:.4f}", None if row.seconds is None else f"{row.seconds:.3f}",
        row.pairs_per_second, None if peak is None else f"{peak:.0f}",
        None if row.waited is None else f"{100 * row.waited:.1f}",
        None if row.grad_norm_ratio is None else f"{row.grad_norm_ratio:.2f}", row.negatives,
    ]  # fmt: skip


def _cell(value: Any) -> str:
    if value is None:
        return MISSING
    return f"{value:.1f}" if isinstance(value, float) else str(value)

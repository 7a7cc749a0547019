"""What fits into a memory budget, for every method, predicted from a few measured micro-steps; and what a corpus costs.

Peak memory of a step is nearly linear in the micro-batch and in the bank: everything else (weights, gradients, moments of the
optimizer, libraries) stays as it is. So three micro-batch sizes and two bank sizes are run for real, over the longest pairs
of the data, and straight lines are laid through them. The error that is stated is the line's through the smaller sizes at the
largest one that was measured, which took no part in it.
"""

import json
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from contaccum.config import TRAITS, TrainConfig, parse_bytes, validate
from contaccum.errors import InputError
from contaccum.files import write_json
from contaccum.study.corpus_costs import render_corpus
from contaccum.study.measure import Measurement, Peak
from contaccum.study.units import duration, gigabytes

BANK_STEP = 64_000_000
"""Bytes of vectors by which the second measured bank is larger than the first: enough to stand out of the noise."""


@dataclass(frozen=True)
class Fit:
    """Peak memory as a straight line: bytes = fixed + per_pair * micro_batch_size + per_bank_row * rows."""

    fixed: float
    per_pair: float
    per_bank_row: float
    error: float
    """Largest measured size: predicted by a line through the others, over measured, less 1."""

    def peak(self, micro_batch_size: int, bank_size: int) -> float:
        return self.fixed + self.per_pair * micro_batch_size + self.per_bank_row * bank_size


@dataclass(frozen=True)
class MethodPlan:
    """What a method can do within the budget, in bytes, seconds and pairs of one process."""

    method: str
    micro_batch_size: int | None
    """The largest divisor of the global batch that fits; None where not even 1 does."""
    peak: float
    """Bytes at that size (at 1 where nothing fits), with the config's bank."""
    error: float
    largest_bank: int | None
    """Rows that fit beside the config's own micro-batch; None for a method without a bank."""
    step: float
    """Seconds of an optimizer step with that micro-batch."""
    epoch: float
    """Seconds of one pass over the training queries."""


def run_plan(
    config: TrainConfig, memory: str, methods: list[str] | None, corpus_size: int | None, output: str | None
) -> str:
    """Measure, predict, and return the tables; ``output``: a JSON file for the same."""
    budget = parse_bytes(memory, "--memory")
    unknown = set(methods or []) - set(TRAITS)
    if unknown:
        raise InputError(f"--methods names {', '.join(sorted(unknown))}, expected some of {', '.join(TRAITS)}")
    if corpus_size is not None and corpus_size < 1:
        raise InputError(f"--corpus_size is {corpus_size}, expected at least 1")
    config = replace(config, output_dir=config.output_dir or "not written to")
    plans = []
    for method in methods or list(TRAITS):
        chosen = replace(config, method=method)  # type: ignore[arg-type]
        validate(chosen)
        print(f"measuring {method}", file=sys.stderr)
        measured = run_measurement(chosen, sizes_to_measure(chosen), banks_to_measure(chosen))
        plans.append(make_plan(chosen, budget, fit(measured.peaks), measured))
    if output is not None:
        write_json(output, {"memory": budget, "methods": [asdict(each) for each in plans]})
    text = render(plans, config, budget)
    return text if corpus_size is None else f"{text}\n\n{render_corpus(corpus_size, measured)}"


def sizes_to_measure(config: TrainConfig) -> list[int]:
    """Three micro-batch sizes up to the config's, or up to the least that lets three differ."""
    largest = max(4, config.micro_batch_size(1) if not config.traits.whole else 4 * config.batch.micro_batch_size)
    return [largest // 4, largest // 2, largest]


def banks_to_measure(config: TrainConfig) -> list[int]:
    rows = config.bank_size()
    return [rows, rows + BANK_STEP // (2 * 4 * 384)] if rows else [0]


def run_measurement(config: TrainConfig, sizes: list[int], banks: list[int]) -> Measurement:
    """Let a process of its own take the steps; InputError with its sentence where it cannot."""
    request = json.dumps({"config": asdict(config), "sizes": sizes, "bank_sizes": banks})
    command = [sys.executable, "-m", "contaccum.study.measure"]
    done = subprocess.run(command, input=request, stdout=subprocess.PIPE, text=True, encoding="utf-8", check=False)
    if done.returncode == InputError.exit_code and done.stdout:
        raise InputError(json.loads(done.stdout)["error"])
    if done.returncode:
        raise InputError(
            f"{config.method}: the measuring process ended with exit code {done.returncode}, expected 0 (its own message "
            "stands above; -9 means that the system ran out of memory)"
        )
    answer = json.loads(done.stdout)
    return Measurement(**{**answer, "peaks": [Peak(**peak) for peak in answer["peaks"]]})


def fit(peaks: list[Peak]) -> Fit:
    """Straight lines through the measured peaks by least squares, and the error at the largest micro-batch."""
    first_bank = peaks[0].bank_size
    at_first = [peak for peak in peaks if peak.bank_size == first_bank]
    per_row = 0.0
    for peak in peaks:
        if peak.bank_size != first_bank:
            per_row = max(0.0, (peak.bytes - at_first[-1].bytes) / (peak.bank_size - first_bank))
    x = np.array([peak.micro_batch_size for peak in at_first], dtype=float)
    y = np.array([peak.bytes for peak in at_first], dtype=float)
    slope, base = np.polyfit(x, y, 1)
    error = 0.0
    if len(at_first) > 2:
        held_slope, held_base = np.polyfit(x[:-1], y[:-1], 1)
        error = (held_base + held_slope * x[-1]) / y[-1] - 1
    return Fit(base - per_row * first_bank, max(0.0, slope), per_row, error)


def make_plan(config: TrainConfig, budget: int, line: Fit, measured: Measurement) -> MethodPlan:
    """The largest micro-batch and bank whose predicted peak stays within the budget, and the time they would take."""
    n, rows = config.batch.global_batch_size, config.bank_size()
    sizes = [n] if config.traits.whole else [size for size in range(1, n + 1) if n % size == 0]
    fitting = [size for size in sizes if line.peak(size, rows) <= budget]
    size = max(fitting, default=None)
    own = min(config.micro_batch_size(1), n)
    bank = None
    if rows and line.per_bank_row > 0:
        bank = max(0, int((budget - line.peak(own, 0)) / line.per_bank_row))
    # a pair's share of a micro-step is taken as constant: larger micro-batches are at most faster
    per_pair = measured.per_micro_step / measured.timed_size
    step = per_pair * n + measured.per_update
    return MethodPlan(
        config.method, size, line.peak(size or sizes[0], rows), line.error, bank, step, step * measured.pairs / n
    )


def render(plans: list[MethodPlan], config: TrainConfig, budget: int) -> str:
    """The plans as a Markdown table."""
    heads = ["method", "largest B", "peak", "error", "s/step", "epoch", "largest bank"]
    rows = [[*map(_cell, _values(each))] for each in plans]
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    lines = [heads, ["-" * width for width in widths], *rows]
    table = "\n".join("| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in lines)
    n, b, m = config.batch.global_batch_size, config.batch.micro_batch_size, config.bank_rows
    return (
        f"{table}\nbudget {gigabytes(budget)} for one process; N = {n}; peak and times at the largest B with a bank of {m} rows; "
        f"largest bank beside B = {b}"
    )


def _values(each: MethodPlan) -> list[Any]:
    return [
        each.method, each.micro_batch_size or "none", gigabytes(each.peak), f"{each.error:+.1%}", f"{each.step:.3g}",
        duration(each.epoch), each.largest_bank,
    ]  # fmt: skip


def _cell(value: Any) -> str:
    return "-" if value is None else str(value)

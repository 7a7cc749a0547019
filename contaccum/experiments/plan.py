"""``contaccum plan``: predict the largest micro-batch and bank that fit, and the time of a step.

Each method is measured in a new process (measure.py). The process takes steps with micro-batches of
growing size and predicts the largest size that fits. It measures the memory of this size and
predicts the largest size again (sizes.py). The reported error is the relative difference between
the last measured memory and the memory predicted for the same size.
"""

import sys
import time
from dataclasses import asdict, replace

from contaccum.config import METHOD_SPECS, TrainConfig, validate
from contaccum.config.experiments import PlanConfig
from contaccum.experiments.measure import Measurement, measure_method, memory_budget
from contaccum.experiments.page import Table, text
from contaccum.experiments.settings import read_names
from contaccum.runtime.files import write_json
from contaccum.runtime.units import duration, gigabytes
from contaccum.training.automatic import choices

# three or more sizes of a micro-batch, up to three times of a step, and two or more sizes of a bank
MEASUREMENTS = "5 to 12"


def run_plan(options: PlanConfig, config: TrainConfig) -> str:
    """Return the table of the plan as text.

    With ``options.output``, also write the measurements to this JSON file.
    """
    budget = memory_budget(options.memory, config.run.device)
    methods: list[str] = [config.method]
    if options.methods == "all":
        methods = list(METHOD_SPECS)
    elif options.methods:
        methods = read_names("--methods", options.methods, METHOD_SPECS)
    config = replace(config, output_dir=config.output_dir or "not written to")
    measured: dict[str, Measurement] = {}
    began = time.monotonic()
    print(
        f"measuring {len(methods)} method{'s' * (len(methods) > 1)} within {gigabytes(budget)}: "
        f"{MEASUREMENTS} measurements each",
        file=sys.stderr,
    )
    for number, method in enumerate(methods, start=1):
        varied = replace(config, method=method)  # type: ignore[arg-type]
        # other methods may not read all settings of the config
        validate(varied, warn=method == config.method)
        print(f"[{number}/{len(methods)}] {method}", file=sys.stderr)
        measured[method] = measure_method(varied, budget)
        left = (time.monotonic() - began) / number * (len(methods) - number)
        if left:
            print(f"about {duration(left)} left", file=sys.stderr)
    if options.output is not None:
        n = config.batch.global_batch_size
        rows = [
            {"method": name, **asdict(found), "epoch": found.epoch(n)}
            for name, found in measured.items()
        ]
        write_json(options.output, {"memory": budget, "methods": rows})
    return render(measured, config, budget)


def render(measured: dict[str, Measurement], config: TrainConfig, budget: int) -> str:
    """Return a Markdown table with one row per method, and notes on the numbers."""
    n, b, m = config.batch.global_batch_size, config.micro_batch_size(1), config.bank_rows
    rows = [
        [
            method, text(found.micro_batch_size or "none"), gigabytes(found.peak),
            f"{found.error:+.1%}", f"{found.step:.3g}", duration(found.epoch(n)),
            text(found.largest_bank),
        ]
        for method, found in measured.items()
    ]  # fmt: skip
    table = Table(["method", "largest B", "peak", "error", "s/step", "epoch", "largest bank"], rows)
    lines = [
        table.markdown(),
        f"The memory budget is {gigabytes(budget)} for one process; N = {n}. Peak, s/step and "
        f"epoch belong to the largest B, with a bank of {m} rows. Largest bank: the maximum number "
        f"of rows that fit with batch.micro_batch_size (B = {b}).",
    ]
    lines += [f"{method} trains in {found.settings}." for method, found in measured.items()]
    chosen = [
        line
        for method in measured
        for line in choices(replace(config, method=method))  # type: ignore[arg-type]
    ]
    lines += [f"auto on this machine: {line}" for line in dict.fromkeys(chosen)]
    context = max(found.context for found in measured.values())
    if context >= budget:
        used = (
            f"CUDA and other programs on this GPU use {gigabytes(context)}, so no size fits into "
            "the budget"
        )
        lines.append(f"{used}. End the other programs, or raise --memory.")
    elif context:
        lines.append(
            f"The peak is the memory that PyTorch reserves, plus {gigabytes(context)} for CUDA and "
            "other programs on this GPU. For the same limit in training, set run.memory_budget to "
            f"{(budget - context) // 10**6}MB. The environment variable "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True reduces fragmentation; set it for "
            "both the plan and training."
        )
    return "\n".join(lines)

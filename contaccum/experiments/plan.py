"""``contaccum plan``: the largest micro-batch that fits in memory, and the time of a step."""

import sys
import time
from dataclasses import asdict, replace

from contaccum.config import METHOD_SPECS, TrainConfig, validate
from contaccum.config.experiments import PlanConfig
from contaccum.experiments.measure import Measurement, measure_method, memory_budget
from contaccum.experiments.page import MISSING, Table, number, text
from contaccum.experiments.settings import read_names
from contaccum.runtime.checks import refuse_other_file
from contaccum.runtime.files import write_json
from contaccum.runtime.launch import require_one_process
from contaccum.runtime.units import duration, gigabytes
from contaccum.training.automatic import choices


def run_plan(options: PlanConfig, config: TrainConfig) -> str:
    """Return the table of the plan as text.

    With ``options.output``, also write the measurements to this JSON file.
    """
    require_one_process("plan")
    refuse_other_file(options.output, "plan")
    budget = memory_budget(options.memory, config.run.device)
    methods: list[str] = [config.method]
    if options.methods == "all":
        methods = list(METHOD_SPECS)
    elif options.methods:
        methods = read_names("--methods", options.methods, METHOD_SPECS)
    config = replace(config, output_dir=config.output_dir or "not written to")
    configs = {method: replace(config, method=method) for method in methods}  # type: ignore[arg-type]
    for method, varied in configs.items():
        # other methods may not read all settings of the config
        validate(varied, warn=method == config.method)
    measured: dict[str, Measurement] = {}
    began = time.monotonic()
    print(
        f"measuring {len(methods)} method{'s' * (len(methods) > 1)} within {gigabytes(budget)}: "
        "3 or more sizes of a micro-batch each, and a step",
        file=sys.stderr,
    )
    for done, (method, varied) in enumerate(configs.items(), start=1):
        print(f"[{done}/{len(methods)}] {method}", file=sys.stderr)
        measured[method] = measure_method(varied, budget)
        left = (time.monotonic() - began) / done * (len(methods) - done)
        if left:
            print(f"about {duration(left)} left", file=sys.stderr)
    if options.output is not None:
        rows = [{"method": method, **asdict(found)} for method, found in measured.items()]
        write_json(options.output, {"memory": budget, "methods": rows})
    return render(measured, config, budget)


def render(measured: dict[str, Measurement], config: TrainConfig, budget: int) -> str:
    """Return a Markdown table with one row per method, and notes on the numbers."""
    n = config.batch.global_batch_size
    first, *_ = measured.values()
    rows = [
        [
            method,
            text(found.micro_batch_size or "none"),
            MISSING if found.peak is None else gigabytes(found.peak),
            number(found.step, ".3g"),
            MISSING if found.step is None else duration(found.step * found.pairs / n),
        ]
        for method, found in measured.items()
    ]
    banked = any(METHOD_SPECS[method].bank != "none" for method in measured)
    bank = f", with a bank of {config.bank_rows} rows" if banked else ""
    lines = [
        Table(["method", "largest B", "peak", "s/step", "epoch"], rows).markdown(),
        f"The memory budget is {gigabytes(budget)} for one process; N = {n}. Peak, s/step and "
        f"epoch belong to the largest B{bank}. Queries have at most {first.query_length} tokens, "
        f"passages {first.passage_length}.",
    ]
    chosen = [
        line
        for method in measured
        for line in choices(replace(config, method=method))  # type: ignore[arg-type]
    ]
    lines += [f"auto on this machine: {line}" for line in dict.fromkeys(chosen)]
    context = max(found.context for found in measured.values())
    if context and context >= budget:
        lines.append(
            f"CUDA and other programs on this GPU use {gigabytes(context)}, so no size fits into "
            "the budget. End the other programs, or raise --memory."
        )
    elif nothing := [method for method, found in measured.items() if found.peak is None]:
        lines.append(
            f"{', '.join(nothing)}: no size fits. Lower model.max_passage_length or "
            "data.hard_negatives, or set model.gradient_checkpointing, lora.rank or optim.name "
            "adamw_8bit."
        )
        if "in_batch" in nothing:
            lines.append("grad_cache has the same gradients as in_batch, and needs less memory.")
    if 0 < context < budget:
        lines.append(
            f"The peak is the memory that PyTorch reserves, plus {gigabytes(context)} for CUDA and "
            "other programs on this GPU. For the same limit in training, set run.memory_budget to "
            f"{(budget - context) // 10**6}MB. The environment variable "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True reduces fragmentation; set it for "
            "both the plan and training."
        )
    return "\n".join(lines)

"""``contaccum plan``: predict the largest micro-batch and bank, the time of a step, and the cost of encoding a corpus.

Each method is measured in a new process. The process takes steps with micro-batches of growing size and predicts the largest size
that fits. It measures the memory of this size and predicts the largest size again. The reported error is the relative difference
between the last measured memory and the memory predicted for the same size.
"""

import json
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from contaccum.config import METHOD_SPECS, TrainConfig, parse_bytes, validate
from contaccum.config.experiments import PlanConfig
from contaccum.errors import InputError
from contaccum.experiments.page import Table, duration, gigabytes, text
from contaccum.experiments.settings import read_names
from contaccum.runtime.files import write_json

PQ_BYTES = 64  # number of bytes of a product-quantized vector
LORA_RANK = 16  # rank that ``plan_sharding`` uses if ``lora.rank`` is 0
LINKS = 32  # parameter M of HNSW: number of links per node; twice as many at the lowest level


@dataclass(frozen=True)
class FittingSize:
    """Largest micro-batch size within the memory budget."""

    size: int | None  # largest divisor of the global batch size that fits; None if no divisor fits
    peak: float  # peak memory in bytes with this size (if None, with the smallest size)
    error: float  # relative error of the last memory prediction that was checked by a measurement
    measured: int  # largest size whose peak memory was measured


@dataclass(frozen=True)
class Measurement:
    """Measurements of one method in one process: peak memory, speeds, and the largest sizes that fit into the memory budget."""

    micro_batch_size: int | None  # largest divisor of the global batch size that fits; None if no divisor fits
    peak: float  # peak memory in bytes with this size (if None, with the smallest size) and the configured bank
    error: float  # relative error of the last memory prediction that was checked by a measurement
    largest_bank: int | None  # maximum number of rows with the configured micro-batch size; None without a bank
    context: int  # bytes on the GPU outside PyTorch's allocator; ``peak`` includes them
    step: float  # seconds of an optimizer step
    passages_per_second: float  # number of training passages that are encoded per second
    seconds_per_comparison: float  # seconds of one inner product inside a large matrix product
    dim: int
    pairs: int  # number of training queries

    def epoch(self, global_batch_size: int) -> float:
        """Return the seconds of one pass over the training queries."""
        return self.step * self.pairs / global_batch_size


def run_plan(options: PlanConfig, config: TrainConfig) -> str:
    """Return the tables of the plan as text. With ``options.output``, also write the measurements to this JSON file."""
    budget, processes = parse_bytes(options.memory, "--memory"), options.processes
    chosen = read_names("--methods", options.methods or "", METHOD_SPECS) or list(METHOD_SPECS)
    config = replace(config, output_dir=config.output_dir or "not written to")
    measured, sharded = {}, []
    for method in chosen:
        varied = replace(config, method=method)  # type: ignore[arg-type]
        validate(varied, warn=method == config.method)  # other methods may not read all settings of the config
        if processes is not None:
            sharded += plan_sharding(varied, budget, processes)
        print(f"measuring {method}", file=sys.stderr)
        measured[method] = run_measurement(varied, budget)
    n = config.batch.global_batch_size
    if options.output is not None:
        rows = [{"method": name, **asdict(found), "epoch": found.epoch(n)} for name, found in measured.items()]
        plans = [each._asdict() for each in sharded]
        write_json(options.output, {"memory": budget, "methods": rows, "sharding": plans})
    tables = [render(measured, config, budget)]
    if processes is not None:
        tables.append(render_sharding(sharded, budget, processes))
    if options.corpus_size is not None:
        tables.append(render_corpus(options.corpus_size, measured[chosen[-1]]))
    return "\n\n".join(tables)


def run_measurement(config: TrainConfig, budget: int) -> Measurement:
    """Measure the method of ``config`` in a new process: memory, times, and the sizes that fit into ``budget`` bytes."""
    return Measurement(**ask(config, "measure", budget=budget))


def fitting_size(config: TrainConfig, budget: int) -> FittingSize:
    """Find, in a new process, the largest micro-batch that fits into ``budget`` bytes with the method of ``config``."""
    return FittingSize(**ask(config, "fitting_size", budget=budget))


def ask(config: TrainConfig, function: str, **arguments: Any) -> Any:
    """Call a function of measure.py by its name in a new process, and return its result. Raise InputError if the call fails."""
    command = [sys.executable, "-m", "contaccum.experiments.measure"]
    text = json.dumps({"config": asdict(config), "function": function, "arguments": arguments})
    done = subprocess.run(command, input=text, stdout=subprocess.PIPE, text=True, encoding="utf-8", check=False)
    if done.returncode == InputError.exit_code and done.stdout:
        raise InputError(json.loads(done.stdout)["error"])
    if done.returncode:
        raise InputError(
            f"{config.method}: the process that measures a step failed with exit code {done.returncode}; its message is above. "
            "Exit code -9 usually means that the machine ran out of memory."
        )
    return json.loads(done.stdout)


def render(measured: dict[str, Measurement], config: TrainConfig, budget: int) -> str:
    """Return a Markdown table with one row per method, and notes on the numbers."""
    n, b, m = config.batch.global_batch_size, config.batch.micro_batch_size, config.bank_rows
    rows = [
        [
            method, text(found.micro_batch_size or "none"), gigabytes(found.peak), f"{found.error:+.1%}",
            f"{found.step:.3g}", duration(found.epoch(n)), text(found.largest_bank),
        ]
        for method, found in measured.items()
    ]  # fmt: skip
    table = Table(["method", "largest B", "peak", "error", "s/step", "epoch", "largest bank"], rows)
    lines = [
        table.markdown(),
        f"The memory budget is {gigabytes(budget)} for one process; N = {n}. Peak, s/step and epoch belong to the largest B, "
        f"with a bank of {m} rows. Largest bank: the maximum number of rows that fit with batch.micro_batch_size (B = {b}).",
    ]
    context = max(found.context for found in measured.values())
    if context >= budget:
        used = f"CUDA and other programs on this GPU use {gigabytes(context)}, so no size fits into the budget"
        lines.append(f"{used}. End the other programs, or raise --memory.")
    elif context:
        lines.append(
            f"The peak is the memory that PyTorch reserves, plus {gigabytes(context)} for CUDA and other programs on this GPU. "
            f"For the same limit in training, set run.memory_budget to {(budget - context) // 10**6}MB. The environment variable "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True reduces fragmentation; set it for both the plan and training."
        )
    return "\n".join(lines)


class ShardingPlan(NamedTuple):
    """Largest micro-batch of a process for one combination of method, trained weights and ``run.sharding``."""

    method: str
    weights: str  # trained weights: ``all`` or, for example, ``LoRA of rank 16``
    sharding: str  # value of run.sharding
    micro_batch_size: int | None  # None if no size fits
    peak: float  # peak memory in bytes; if no size fits, with the smallest size
    problem: str = ""  # why the combination was not measured


def plan_sharding(config: TrainConfig, budget: int, processes: int) -> list[ShardingPlan]:
    """Plan training of all weights and of LoRA, each without sharding and with fsdp. Raise InputError if fsdp is impossible."""
    validate(replace(config, run=replace(config.run, sharding="fsdp")), processes, warn=False)
    rank = config.lora.rank or LORA_RANK
    variants = {} if config.lora.rank else {"all": config}
    if config.model.name != "tiny":
        variants[f"LoRA of rank {rank}"] = replace(config, lora=replace(config.lora, rank=rank))
    plans = []
    for weights, varied in variants.items():
        print(f"measuring {config.method} for {processes} processes, weights to train: {weights}", file=sys.stderr)
        try:
            found = ask(varied, "sharded_sizes", budget=budget, processes=processes)
        except InputError as error:  # another variant may fit
            plans.append(ShardingPlan(config.method, weights, "none", None, 0.0, str(error)))
            continue
        sizes = {kind: FittingSize(**each) for kind, each in found.items()}
        plans += [ShardingPlan(config.method, weights, kind, each.size, each.peak) for kind, each in sizes.items()]
    return plans


def render_sharding(plans: list[ShardingPlan], budget: int, processes: int) -> str:
    """Return a Markdown table with one row for each measured plan. Notes below it name the plans that were not measured."""
    measured = [each for each in plans if not each.problem]
    rows = [
        [each.method, each.weights, each.sharding, text(each.micro_batch_size or "none"), gigabytes(each.peak)]
        for each in measured
    ]
    table = Table(["method", "trained weights", "run.sharding", "largest B", "peak"], rows)
    lines = [
        table.markdown(),
        f"The memory budget is {gigabytes(budget)} for each of W = {processes} processes. Memory was measured in one process "
        "without sharding. The peak with fsdp is computed from this measurement: a process then keeps only 1/W of the weights, "
        "gradients and optimizer state, and for a short time the full weights and gradients of a few layers.",
    ]
    lines += [
        f"{each.method}, trained weights {each.weights}: not measured. {each.problem}" for each in plans if each.problem
    ]
    return "\n".join(lines)


class IndexCost(NamedTuple):
    """Memory and search cost of one type of faiss index."""

    factory: str  # name of the index type for faiss.index_factory
    bytes: int  # size of the index in memory and on disk
    share: float | None  # share of the passages that are compared with a query; None if this depends on the data


def lists_for(rows: int) -> int:
    """Return the number of inverted lists that the faiss wiki recommends: the largest power of two up to 4 sqrt(rows)."""
    return 2 ** max(0, int(np.log2(4 * rows**0.5)))


def index_costs(rows: int, dim: int, probes: int = 64) -> list[IndexCost]:
    """Return the cost of each kind of index.

    rows, dim: number and width of the float32 vectors. probes: number of lists that IVF searches for a query.

    IVF stores the vectors, a 64-bit id per vector and a centroid per list. IVF with PQ stores a code of PQ_BYTES bytes instead of
    each vector, and 256 centroids for each byte of the code. HNSW stores the vectors. For each vector it adds 2 M + M/(M-1)
    links of 4 bytes (M is LINKS), and 12 bytes for link position and level. Source: faiss wiki, "Faiss indexes".
    """
    lists = lists_for(rows)
    centroids = lists * dim * 4
    share = min(1.0, (lists + probes * rows / lists) / rows)
    links = 4 * (2 * LINKS + LINKS / (LINKS - 1)) + 12
    pq = IndexCost(f"IVF{lists},PQ{PQ_BYTES}", (PQ_BYTES + 8) * rows + centroids + 256 * dim * 4, share)
    return [
        IndexCost("Flat", 4 * dim * rows, 1.0),
        IndexCost(f"IVF{lists},Flat", (4 * dim + 8) * rows + centroids, share),
        *([] if dim % PQ_BYTES else [pq]),  # faiss needs codes that divide the vector
        IndexCost(f"HNSW{LINKS}", int((4 * dim + links) * rows), None),
    ]


def render_corpus(rows: int, measured: Measurement, queries: int = 1000) -> str:
    """Return a text with the time to encode ``rows`` passages, the sizes of shards and indexes, and the times of a search."""
    rate, dim = measured.passages_per_second, measured.dim
    exact = measured.seconds_per_comparison * rows * queries
    lines = [
        [cost.factory, gigabytes(cost.bytes), "-" if cost.share is None else duration(exact * cost.share)]
        for cost in index_costs(rows, dim)
    ]
    table = Table(["index", "memory", f"search of {queries} queries"], lines)
    return (
        f"{rows} passages, vectors of {dim} numbers, on this device:\n"
        f"encode {duration(rows / rate)} at the measured {rate:.1f} passages per second; W devices need 1/W of this time\n"
        f"shards {gigabytes(4 * dim * rows)} on disk as float32, {gigabytes(2 * dim * rows)} as float16\n\n"
        f"{table.markdown()}\n"
        "The search times assume the speed of a large matrix product. Flat reaches this speed; IVF needs at least the time shown."
    )

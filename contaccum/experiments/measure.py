"""Measure the memory and the time of training steps of one method, in a new process.

``measure_method``, ``measure_micro_batch`` and ``measure_step`` start ``python -m
contaccum.experiments.measure``. This process reads a config as JSON from stdin, takes training
steps, and writes the answer as JSON to stdout. Each method needs a process of its own, because
memory that one method freed would change the measurements of the next.
"""

import contextlib
import json
import math
import statistics
import subprocess
import sys
import time
import warnings
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
import psutil
import torch

from contaccum.config import TrainConfig, from_mapping, parse_bytes
from contaccum.data.dataset import load_training
from contaccum.data.train_set import TrainSet, subset
from contaccum.errors import InputError
from contaccum.experiments.sizes import (
    FittingSize,
    largest_bank,
    largest_micro_batch,
    quick_micro_batch,
)
from contaccum.methods import METHODS
from contaccum.methods.bank import Bank
from contaccum.runtime.engine import Engine
from contaccum.runtime.prefetch import prefetch
from contaccum.runtime.processes import encoding_device
from contaccum.runtime.units import duration, gigabytes
from contaccum.training import automatic, parts
from contaccum.training.log import mean_losses
from contaccum.training.out_of_memory import out_of_memory

PEAK_STEPS = 4  # steps whose peak memory is measured; on a CPU, the peak grows until the third step
# micro-batches of a measured step; the second one also needs memory for the gradients of the first
MICRO_BATCHES = 2
TIMED_MICRO_BATCHES = (
    8  # maximum number of micro-batches in a timed step; the time of more is extrapolated
)
REPEATS = 3  # number of timed repetitions, of which the median is used
USABLE = 0.8  # share of a machine's free memory that a measurement may use


@dataclass(frozen=True)
class Measurement:
    """Peak memory and time of a step of one method, and the largest sizes that fit in memory."""

    # largest divisor of the global batch size that fits; None if no divisor fits
    micro_batch_size: int | None
    # peak memory in bytes with this size (if None, with the smallest size) and the configured bank
    peak: float
    error: float  # relative error of the last memory prediction that was checked by a measurement
    # maximum number of rows with the configured micro-batch size; None without a bank
    largest_bank: int | None
    context: int  # bytes on the GPU outside PyTorch's allocator; ``peak`` includes them
    step: float  # seconds of an optimizer step
    pairs: int  # number of training queries
    settings: str  # precision, padding and size of micro-batches that training would use

    def epoch(self, global_batch_size: int) -> float:
        """Return the seconds of one pass over the training queries."""
        return self.step * self.pairs / global_batch_size


def measure_method(config: TrainConfig, budget: int) -> Measurement:
    """Measure the time of a step, and the largest sizes that fit into ``budget`` bytes."""
    return Measurement(**_in_new_process("method", config, budget))


def measure_micro_batch(config: TrainConfig, budget: int, most: int | None = None) -> FittingSize:
    """Find the largest micro-batch that fits into ``budget`` bytes.

    most: search only up to this size, from two small sizes (``quick_micro_batch``).
    """
    return FittingSize(**_in_new_process("micro-batch", config, budget, most or 0))


def measure_step(config: TrainConfig) -> float:
    """Return the median seconds of an optimizer step with ``config``."""
    return float(_in_new_process("step", config))


def _in_new_process(
    what: Literal["method", "micro-batch", "step"],
    config: TrainConfig,
    budget: int = 0,
    most: int = 0,
) -> Any:
    command = [sys.executable, "-m", "contaccum.experiments.measure", what, str(budget), str(most)]
    done = subprocess.run(
        command,
        input=json.dumps(asdict(config)),
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        start_new_session=True,  # after Ctrl-C, only this process prints a message
    )
    if done.returncode == InputError.exit_code and done.stdout:
        raise InputError(json.loads(done.stdout)["error"])
    if done.returncode:
        raise InputError(
            f"{config.method}: the process that measures a step failed with exit code "
            f"{done.returncode}; its message is above. Exit code -9 usually means that the machine "
            "ran out of memory."
        )
    return json.loads(done.stdout)


def memory_budget(text: str | None, device: str) -> int:
    """Return the bytes of ``--memory``.

    None: the free memory of the GPU that ``device`` (`run.device`) means, or USABLE of the free
    main memory.
    """
    if text is not None:
        return parse_bytes(text, "--memory")
    found = encoding_device(device)
    if found.type == "cuda":
        return torch.cuda.mem_get_info(found)[0]
    return int(USABLE * psutil.virtual_memory().available)


class Probe:
    """Encoder, engine and data to measure training steps of different sizes in this process."""

    def __init__(self, config: TrainConfig) -> None:
        config = automatic.choose_precision(config)
        train_set = load_training(config.data, config.distils)
        self.pairs, self.passages = len(train_set.queries), len(train_set.passages)
        n = config.batch.global_batch_size
        self.longest = subset(train_set, _longest(train_set, most=4 * n))
        random = np.random.default_rng(config.seed)
        self.random_pairs = subset(train_set, random.permutation(self.pairs)[: max(512, 4 * n)])
        self.engine = Engine(
            device=config.run.device,
            seed=config.seed,
            precision=config.run.precision,
            tf32=config.run.tf32,
            replay_share=config.replay_share,
        )
        self.encoder = parts.build_encoder(config, train_set, self.engine.device)
        parts.apply_switches(self.encoder, config)
        self.engine.prepare(self.encoder, parts.make_optimizer(self.encoder, config.optim))
        self.config = automatic.choose(config, self.engine, self.encoder)
        self.loss = parts.build_loss(config, self.encoder)

    def peak(self, size: int, bank_size: int, budget: float = math.inf) -> float | None:
        """Return the peak memory in bytes of a few steps with the longest texts and a full bank.

        size: pairs per micro-batch. On a GPU, the result is the memory that PyTorch reserves (with
        fragmentation) plus the memory that CUDA itself and other processes use. Out of memory:
        infinity if the GPU has ``budget`` bytes, else None.
        """
        device = self.engine.device
        began = time.perf_counter()
        try:
            bank = self._full_bank(size, bank_size)
            # otherwise a step could use memory that another size freed, and its peak would be too
            # low
            self.engine.free_memory()
            self.engine.reset_peak_memory()
            self._steps(self._sized(size, bank_size), self.longest, bank, PEAK_STEPS)
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            self.engine.drop_step()
            return (
                math.inf
                if device.type == "cuda" and budget <= torch.cuda.mem_get_info(device)[1]
                else None
            )
        peak: float = self.engine.peak_memory()
        if device.type == "cuda":
            peak = torch.cuda.max_memory_reserved(device) + self.context()
        took = duration(time.perf_counter() - began)
        bank_text = f", bank of {bank_size}" if bank_size else ""
        print(
            f"  {self.config.method}, micro-batch of {size}{bank_text}: {gigabytes(peak)} ({took})",
            file=sys.stderr,
            flush=True,
        )
        return peak

    def context(self) -> int:
        """Return the bytes on the GPU that CUDA itself and other processes use."""
        if self.engine.device.type != "cuda":
            return 0
        free, total = torch.cuda.mem_get_info(self.engine.device)
        return total - free - torch.cuda.memory_reserved(self.engine.device)

    def usable(self) -> float:
        """Return the bytes that a measurement may use.

        On a GPU: infinity, because running out does no harm.
        """
        free = psutil.virtual_memory().available + psutil.Process().memory_info().rss
        return math.inf if self.engine.device.type == "cuda" else USABLE * free

    def step_seconds(self, size: int) -> float:
        """Return the seconds of a step with random pairs in micro-batches of ``size`` pairs."""
        n = self.config.batch.global_batch_size
        if self.config.spec.whole:
            return self._median(size, 1) * n / size
        count = n // size
        timed = min(count, TIMED_MICRO_BATCHES)
        long = self._median(size, timed)
        return (
            long
            if timed == count
            else long + (long - self._median(size, 1)) / (timed - 1) * (count - timed)
        )

    def _median(self, size: int, micro_batches: int) -> float:
        return self.seconds_per_step(self._sized(size, self.config.bank_size(), micro_batches))

    def seconds_per_step(self, config: TrainConfig) -> float:
        """Return the median seconds of a step with ``config``, random pairs and a full bank."""
        bank = self._full_bank(config.micro_batch_size(1), config.bank_size())
        steps = self._steps(config, self.random_pairs, bank, REPEATS, warm_up=True)
        seconds = statistics.median(steps)
        print(
            f"  {config.method}, step of {config.batch.global_batch_size}: {duration(seconds)}",
            file=sys.stderr,
            flush=True,
        )
        return seconds

    def _sized(self, size: int, bank_size: int, micro_batches: int = MICRO_BATCHES) -> TrainConfig:
        count = (
            1
            if self.config.spec.whole
            else min(micro_batches, max(1, self.config.batch.global_batch_size // size))
        )
        batch = replace(
            self.config.batch,
            global_batch_size=size * count,
            micro_batch_size=size,
            micro_batch_tokens=None,
        )
        return replace(self.config, batch=batch, bank=replace(self.config.bank, size=bank_size))

    def _full_bank(self, size: int, bank_size: int) -> Bank:
        """Return a bank that is full of random rows."""
        bank = parts.build_bank(self._sized(size, bank_size), self.engine, self.encoder, self.loss)
        for each in (bank, *bank.truncated):
            tensors, numbers = each.state()
            for name in ("queries", "passages"):
                if name in tensors:
                    tensors[name].normal_()
                    tensors[name] /= tensors[name].norm(dim=-1, keepdim=True)
            ids = tensors["column_ids"]
            ids.copy_(torch.arange(ids.numel(), device=ids.device).view_as(ids) % self.passages)
            tensors["positives"].copy_(ids[:, :1].expand_as(tensors["positives"]))
            if each.sums is not None:
                tensors["sums"].zero_()
                if self.engine.device.type == "cpu":
                    # The push into slot 0 opens a block (methods/logsumexp.py). This is rare, and
                    # would distort the few steps that are timed. On a GPU it is included, because
                    # it needs memory.
                    numbers["pointer"] = each.push_rows % each.size
            each.load_state(
                tensors, {**numbers, "stored": each.size, "step": self.config.bank.warmup_steps}
            )
        return bank

    def _steps(
        self,
        config: TrainConfig,
        train_set: TrainSet,
        bank: Bank,
        count: int,
        warm_up: bool = False,
    ) -> list[float]:
        """Take ``count`` optimizer steps and return the seconds of each step.

        warm_up: first take untimed steps: 1 step on a CPU, ``count`` steps on a GPU, where new
        tensor shapes are slow.
        """
        batches = parts.build_batches(config, self.engine, self.encoder, train_set)
        first = (count if self.engine.device.type == "cuda" else 1) if warm_up else 0
        self.encoder.train()
        taken: list[float] = []
        with contextlib.closing(
            prefetch(batches.step(step) for step in (*range(first), *range(count)))
        ) as prepared:
            for _ in range(first + count):
                start = time.perf_counter()
                micro_batches = next(prepared)
                self.engine.begin_step(len(taken))
                losses = METHODS[config.method](self.engine, micro_batches, bank, self.loss)
                mean_losses(losses, micro_batches, len(taken) + 1)
                query_norm, passage_norm = self.engine.gradient_norms()
                self.engine.clip(query_norm + passage_norm, config.optim.max_grad_norm)
                self.engine.update()
                bank.end_step()
                if self.engine.device.type == "cuda":
                    torch.cuda.synchronize(self.engine.device)
                taken.append(time.perf_counter() - start)
        return taken[first:]


def _longest(train_set: TrainSet, most: int, searched: int = 100_000) -> np.ndarray:
    """Return at most ``most`` indices of long pairs: long queries and long positives alternate.

    A micro-batch is padded to its longest query and to its longest passage, which seldom belong to
    the same pair. Only the first ``searched`` pairs are considered. Lengths are numbers of
    characters.
    """
    queries = [len(text) for text in train_set.queries[:searched]["text"]]
    ends = train_set.positives.offsets[: len(queries) + 1]
    rows, place = np.unique(train_set.positives.values[: ends[-1]], return_inverse=True)
    read = train_set.passages[rows]  # not the whole corpus, which may have millions of passages
    characters = np.array(
        [len(title) + len(text) for title, text in zip(read["title"], read["text"], strict=True)]
    )
    positives = np.maximum.reduceat(characters[place], ends[:-1])
    in_turn = np.stack([np.argsort(queries)[::-1], np.argsort(positives)[::-1]], axis=1).ravel()
    _, first = np.unique(in_turn, return_index=True)
    return in_turn[np.sort(first)[:most]]


def measure(probe: Probe, budget: float) -> Measurement:
    """Measure the configured method.

    Two sizes are searched within ``budget`` bytes: the largest micro-batch with the configured
    bank, and the largest bank with the configured micro-batch size. Raises InputError if memory
    runs out even for small micro-batches.
    """
    config, n = probe.config, probe.config.batch.global_batch_size
    found = largest_micro_batch(probe, budget)
    smallest = n if config.spec.whole else 1
    step = probe.step_seconds(min(found.size or smallest, found.measured))
    rows = config.bank_size()
    bank = largest_bank(probe, rows, min(config.micro_batch_size(1), n), budget) if rows else None
    return Measurement(
        micro_batch_size=found.size,
        peak=found.peak,
        error=found.error,
        largest_bank=bank,
        context=probe.context(),
        step=step,
        pairs=probe.pairs,
        settings=automatic.description(config),
    )


def main(what: str, budget: int, most: int) -> int:
    """Measure the config on stdin, and write the result or an error message to stdout.

    Returns the exit code. what: ``method``, ``micro-batch`` or ``step``, see the functions above.
    budget: bytes. most: largest micro-batch size, 0 for any.
    """
    warnings.simplefilter("ignore")  # training itself prints these warnings
    try:
        with contextlib.redirect_stdout(sys.stderr):  # stdout carries only the answer
            probe = Probe(from_mapping(json.load(sys.stdin)))
            if what == "method":
                answer: Any = asdict(measure(probe, budget))
            elif what == "micro-batch":
                found = quick_micro_batch(probe, most, budget) if most else None
                answer = asdict(found or largest_micro_batch(probe, budget))
            else:
                answer = probe.seconds_per_step(probe.config)
    except InputError as error:
        print(json.dumps({"error": str(error)}))
        return error.exit_code
    except OSError as error:  # a full or read-only disk
        name = error.filename or "a file"
        print(
            json.dumps({"error": f"{name}: cannot be read or written ({error.strerror or error})"})
        )
        return InputError.exit_code
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))

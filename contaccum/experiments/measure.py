"""Measure training steps of one method in a new process: peak memory, time and passes.

``measure_method`` and ``measure_cost`` start ``python -m contaccum.experiments.measure``. This
process reads a config as JSON from stdin, takes training steps, and writes the answer as JSON to
stdout. Each method needs a process of its own, because memory that one method freed would change
the measurements of the next.
"""

import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
import psutil
import torch

from contaccum.config import TrainConfig, from_mapping, parse_bytes
from contaccum.data.dataset import load_training
from contaccum.data.train_set import TrainSet, subset
from contaccum.errors import InputError
from contaccum.methods import METHODS
from contaccum.methods.bank import Bank
from contaccum.methods.grad_cache import kept_passes
from contaccum.runtime.engine import Engine
from contaccum.runtime.prefetch import prefetch
from contaccum.runtime.processes import encoding_device
from contaccum.runtime.units import counted, duration, gigabytes
from contaccum.training import automatic, parts
from contaccum.training.log import mean_losses
from contaccum.training.out_of_memory import out_of_memory

PEAK_STEPS = 4  # steps whose peak memory is measured; on a CPU, the peak grows until the third step
# micro-batches of a measured step; the second one also needs memory for the gradients of the first
MICRO_BATCHES = 2
TIMED_MICRO_BATCHES = 8  # most micro-batches of a timed step; the time of more is extrapolated
PARTITIONS = 16  # number of steps whose passes are counted
REPEATS = 3  # number of timed steps, of which the median is used
USABLE = 0.8  # share of a machine's free memory that a measurement may use
Unit = Literal["seconds", "passes"]
LONGEST_OF = 100_000  # number of training pairs among which the longest are looked for


@dataclass(frozen=True)
class Measurement:
    """Largest micro-batch of a method that fits in memory, and the time of a step with it."""

    micro_batch_size: int | None  # divisor of the global batch size; None if no divisor fits
    peak: float | None  # peak memory in bytes with this size
    step: float | None  # seconds of an optimizer step with this size
    context: int  # bytes on the GPU outside PyTorch's allocator; ``peak`` includes them
    pairs: int  # number of training queries
    query_length: int  # maximum number of tokens of a query
    passage_length: int


def measure_method(config: TrainConfig, budget: int) -> Measurement:
    """Find the largest micro-batch that fits into ``budget`` bytes, and time a step with it.

    Raises InputError if the config or the data is wrong, or the process was killed.
    """
    return Measurement(**_in_new_process(config, budget=budget))


def measure_cost(config: TrainConfig, unit: Unit, environment: Mapping[str, str]) -> float:
    """Return the median seconds of an optimizer step, or its mean forward passes of a pair.

    environment: more variables of the process that measures.
    """
    return float(_in_new_process(config, environment, unit=unit)["cost"])


def _in_new_process(
    config: TrainConfig, environment: Mapping[str, str] | None = None, **job: Any
) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "contaccum.experiments.measure"],
        input=json.dumps({"config": asdict(config), **job}),
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        env={**os.environ, **(environment or {})},
        start_new_session=True,  # after Ctrl-C, only this process prints a message
    )
    answer: dict[str, Any] = json.loads(done.stdout or "{}")
    if done.returncode:
        raise InputError(
            answer.get("error")
            or f"{config.method}: the process that measures a step failed with exit code "
            f"{done.returncode}; its message is above. Exit code -9 usually means that the machine "
            "ran out of memory."
        )
    return answer


def main() -> int:
    """Measure the config on stdin, and write the result or an error message to stdout."""
    warnings.simplefilter("ignore")  # training itself prints these warnings
    job = json.load(sys.stdin)
    try:
        with contextlib.redirect_stdout(sys.stderr):  # stdout carries only the answer
            probe = Probe(from_mapping(TrainConfig, job["config"]))
            if "budget" in job:
                answer = asdict(probe.measure(job["budget"]))
            elif job["unit"] == "passes":
                answer = {"cost": probe.step_passes()}
            else:
                answer = {"cost": probe.step_seconds(probe.config)}
    except (InputError, OSError) as error:  # OSError: a full or read-only disk
        print(json.dumps({"error": str(error)}))
        return InputError.exit_code
    print(json.dumps(answer))
    return 0


def memory_budget(text: str | None, device: str) -> int:
    """Return the bytes of ``--memory``.

    None: the free memory of the GPU that ``device`` (`run.device`) means, or USABLE of the free
    main memory. On a CPU, this is also the maximum, because the measurements need the memory.
    """
    found = encoding_device(device)
    if found.type == "cuda":
        return parse_bytes(text, "--memory") if text else torch.cuda.mem_get_info(found)[0]
    free = int(USABLE * psutil.virtual_memory().available)
    return min(parse_bytes(text, "--memory"), free) if text else free


class Probe:
    """Encoder, engine and data to measure training steps of different sizes in this process."""

    def __init__(self, config: TrainConfig) -> None:
        config = automatic.choose_before_loading(config)
        train_set = load_training(config.data, config.distils)
        self.pairs, self.passages = len(train_set.queries), len(train_set.passages)
        n = config.batch.global_batch_size
        needed = 0  # passages, for random negatives
        if config.data.hard_negatives:
            most = int(train_set.positives.lengths.max())
            needed = min(self.passages, config.data.hard_negatives + most)

        def pairs_of(queries: np.ndarray) -> TrainSet:
            found = subset(train_set, queries)
            return found if len(found.passages) >= needed else subset(train_set, queries, needed)

        self.longest = pairs_of(_longest(train_set, most=4 * n))
        random = np.random.default_rng(config.seed)
        self.random_pairs = pairs_of(random.permutation(self.pairs)[: max(512, 4 * n)])
        self.engine = Engine(
            device=config.run.device,
            seed=config.seed,
            precision=config.run.precision,
            tf32=config.run.tf32,
            replay_share=config.replay_share,
        )
        self.encoder = parts.build_encoder(config, train_set, self.engine.device)
        parts.apply_switches(self.encoder, config)
        self.config = automatic.choose(config, self.engine, self.encoder)
        self.engine.prepare(self.encoder, parts.make_optimizer(self.encoder, config.optim))
        self.loss = parts.build_loss(config, self.encoder)

    def measure(self, budget: float) -> Measurement:
        """Measure the configured method. budget: bytes."""
        n = self.config.batch.global_batch_size
        size, peak = self.largest_micro_batch(budget)
        step = None
        if size is not None:
            timed = self.sized(size, TIMED_MICRO_BATCHES)
            step = self.step_seconds(timed) * n / timed.batch.global_batch_size
        settings = self.encoder.settings
        lengths = settings.max_query_length, settings.max_passage_length
        return Measurement(size, peak, step, self.context(), self.pairs, *lengths)

    def largest_micro_batch(self, budget: float) -> tuple[int | None, float | None]:
        """Return the largest micro-batch that fits into ``budget`` bytes, and its peak memory.

        Two small sizes are measured. A line through their peaks predicts the largest size that
        fits. It is measured too, and the size is predicted again with this measurement. If no size
        fits, both are None.
        """
        n, whole = self.config.batch.global_batch_size, self.config.spec.single_micro_batch
        most = min(n, self.config.bank_size() or n)  # the pairs of a push must fit into the bank
        sizes = [n] if whole else [size for size in range(1, most + 1) if n % size == 0]
        # two sizes, so that a line goes through their peaks
        small = sorted({max(1, n // 8), min(n, max(2, n // 4))} if whole else {1, min(2, most)})
        peaks: dict[int, float] = {}
        for size in small:
            began = time.perf_counter()
            peaks[size] = self.peak(size)
        if peaks[small[0]] == math.inf:
            raise InputError(
                f"{self.config.method}: a micro-batch of {counted(small[0], 'pair')} does not fit "
                "into the memory of this device. Lower model.max_passage_length."
            )
        # a larger micro-batch takes less time per pair
        longest = duration((time.perf_counter() - began) * sizes[-1] / small[-1])
        print(
            f"  a micro-batch of {counted(sizes[-1], 'pair')} takes at most {longest}",
            file=sys.stderr,
        )
        while True:
            fits = max((size for size in peaks if peaks[size] <= budget), default=0)
            too_large = min((size for size in peaks if peaks[size] > budget), default=n + 1)
            untried = [
                size
                for size in sizes
                if fits < size < too_large and predicted_peak(peaks, size) <= budget
            ]
            if not untried:
                found = [size for size in sizes if peaks.get(size, math.inf) <= budget]
                return (found[-1], peaks[found[-1]]) if found else (None, None)
            peaks[untried[-1]] = self.peak(untried[-1])

    def peak(self, size: int) -> float:
        """Return the peak memory in bytes of a few steps with the longest texts and a full bank.

        size: pairs per micro-batch. On a GPU, the result is the memory that PyTorch reserves (with
        fragmentation) plus the memory that CUDA itself and other processes use. Infinity if memory
        runs out.
        """
        began = time.perf_counter()
        try:
            config = self.sized(size, MICRO_BATCHES)
            bank = self.full_bank(config)
            # otherwise a step could use memory that another size freed, and its peak would be too
            # low
            self.engine.free_memory()
            self.engine.reset_peak_memory()
            self.take_steps(config, self.longest, bank, PEAK_STEPS)
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            self.engine.drop_step()
            return math.inf
        peak: float = self.engine.peak_memory()
        if self.engine.device.type == "cuda":
            peak = torch.cuda.max_memory_reserved(self.engine.device) + self.context()
        took = duration(time.perf_counter() - began)
        print(
            f"  {self.config.method}, micro-batch of {size}: {gigabytes(peak)} ({took})",
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

    def step_seconds(self, config: TrainConfig) -> float:
        """Return the median seconds of a step with ``config``, random pairs and a full bank."""
        bank = self.full_bank(config)
        # On a GPU, new tensor shapes are slow.
        untimed = REPEATS if self.engine.device.type == "cuda" else 1
        taken = self.take_steps(config, self.random_pairs, bank, untimed + REPEATS)
        seconds = statistics.median(taken[untimed:])
        print(
            f"  {config.method}, step of {config.batch.global_batch_size}: {duration(seconds)}",
            file=sys.stderr,
            flush=True,
        )
        return seconds

    def step_passes(self) -> float:
        """Return the mean forward passes of a pair in a step of grad_cache or cont_cache.

        Nothing is encoded: the lengths of the texts decide which passes keep their graph.
        """
        batches = parts.build_batches(self.config, self.engine, self.encoder, self.random_pairs)
        shares = []  # of the tokens that are encoded once
        for step in range(PARTITIONS):
            texts = self.engine.texts(batches.step(step))
            tokens = [each.texts.count(padded=False) for each in texts.passes]
            kept = kept_passes(self.engine, texts)
            shares.append(sum(tokens[len(tokens) - kept :]) / sum(tokens))
        return self.config.batch.global_batch_size * (4 - statistics.mean(shares))

    def sized(self, size: int, micro_batches: int) -> TrainConfig:
        """Return the config with at most ``micro_batches`` micro-batches of ``size`` pairs."""
        bank, batch = self.config.bank, self.config.batch
        count = max(1, min(micro_batches, batch.global_batch_size // size))
        if self.config.spec.single_micro_batch:
            count = 1
        batch = replace(
            batch,
            global_batch_size=size * count,
            micro_batch_size=size,
            micro_batch_tokens=None,
        )
        # the default size of the bank depends on the global batch size
        return replace(self.config, batch=batch, bank=replace(bank, size=self.config.bank_size()))

    def full_bank(self, config: TrainConfig) -> Bank:
        """Return a bank that is full of random rows."""
        bank = parts.build_bank(config, self.engine, self.encoder, self.loss)
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

    def take_steps(
        self, config: TrainConfig, train_set: TrainSet, bank: Bank, count: int
    ) -> list[float]:
        """Take ``count`` optimizer steps and return the seconds of each step."""
        batches = parts.build_batches(config, self.engine, self.encoder, train_set)
        self.encoder.train()
        taken: list[float] = []
        with contextlib.closing(prefetch(map(batches.step, range(count)))) as prepared:
            for step in range(count):
                start = time.perf_counter()
                micro_batches = next(prepared)
                self.engine.begin_step(step)
                losses = METHODS[config.method](self.engine, micro_batches, bank, self.loss)
                mean_losses(losses, micro_batches, step + 1)
                *_, norm = self.engine.gradient_norms()
                self.engine.clip(norm, config.optim.max_grad_norm)
                self.engine.update()
                bank.end_step()
                if self.engine.device.type == "cuda":
                    torch.cuda.synchronize(self.engine.device)
                taken.append(time.perf_counter() - start)
        return taken


def predicted_peak(peaks: dict[int, float], size: int) -> float:
    """Predict the peak memory at ``size`` by a line through the nearest two measured sizes.

    peaks: size -> measured peak memory.
    """
    known = [other for other in peaks if peaks[other] < math.inf]
    if len(known) < 2:
        return math.inf
    left, right = sorted(sorted(known, key=lambda other: abs(other - size))[:2])
    slope = max(0.0, (peaks[right] - peaks[left]) / (right - left))
    return peaks[right] + slope * (size - right)


def _longest(train_set: TrainSet, most: int) -> np.ndarray:
    """Return at most ``most`` indices of long pairs: long queries and long positives alternate.

    A micro-batch is padded to its longest query and to its longest passage, which seldom belong to
    the same pair. Only the first LONGEST_OF pairs are considered. Lengths are numbers of
    characters.
    """
    queries = [len(text) for text in train_set.queries[:LONGEST_OF]["text"]]
    ends = train_set.positives.offsets[: len(queries) + 1]
    rows, place = np.unique(train_set.positives.values[: ends[-1]], return_inverse=True)
    read = train_set.passages[rows]  # not the whole corpus, which may have millions of passages
    characters = np.array(
        [len(title) + len(text) for title, text in zip(read["title"], read["text"], strict=True)]
    )
    positives = np.maximum.reduceat(characters[place], ends[:-1])
    in_turn = np.stack([np.argsort(queries)[::-1], np.argsort(positives)[::-1]], axis=1).ravel()
    return np.array(list(dict.fromkeys(in_turn.tolist()))[:most])


if __name__ == "__main__":
    sys.exit(main())

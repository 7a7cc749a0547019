"""Measure one method: its largest micro-batch and bank within a memory budget, its peak memory, and the time of a step.

``python -m contaccum.experiments.measure`` reads a request as JSON from stdin and writes the answer as JSON to stdout. plan.py
starts a new process for each method, because memory that one method freed would change the measurements of the next.
"""

import contextlib
import json
import math
import statistics
import sys
import time
import timeit
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any

import numpy as np
import psutil
import torch

from contaccum.config import TrainConfig, from_mapping
from contaccum.data.dataset import load_training
from contaccum.data.train_set import TrainSet, subset
from contaccum.errors import InputError
from contaccum.experiments.plan import FittingSize, Measurement
from contaccum.methods import METHODS
from contaccum.methods.bank import Bank
from contaccum.runtime.engine import Engine
from contaccum.runtime.prefetch import prefetch
from contaccum.runtime.sharding import saved_bytes
from contaccum.training import parts
from contaccum.training.log import mean_losses
from contaccum.training.out_of_memory import out_of_memory

PEAK_STEPS = 4  # steps whose peak memory is measured; on a CPU, the peak grows until the third step
MICRO_BATCHES = 2  # micro-batches of a measured step; the second one also needs memory for the gradients of the first
TIMED_MICRO_BATCHES = 8  # maximum number of micro-batches in a timed step; the time of more is extrapolated
SAMPLE = 256  # number of passages that are encoded to measure the speed of encoding
REPEATS = 3  # number of timed repetitions, of which the median is used
BANK_BYTES = 64_000_000
"""Size difference of the first two measured banks, in bytes. Measurement noise would hide a smaller difference."""
MOST_ROWS = 262_144  # maximum number of rows of a measured bank; the memory of larger banks is predicted
USABLE = 0.8  # share of a machine's free memory that a measurement may use
CORRECTIONS = 4  # maximum number of predictions to check by a measurement


class Probe:
    """Encoder, engine and data, to measure the memory and time of training steps of different sizes."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        train_set = load_training(config.data, config.distils)
        self.pairs, self.passages, n = len(train_set.queries), len(train_set.passages), config.batch.global_batch_size
        self.longest = subset(train_set, _longest(train_set, most=4 * n))
        random = np.random.default_rng(config.seed)
        self.random_pairs = subset(train_set, random.permutation(self.pairs)[: max(512, 4 * n)])
        run = {name: getattr(config.run, name) for name in ("device", "precision", "tf32")}
        self.engine = Engine(seed=config.seed, replay_share=config.replay_share, **run)
        self.encoder = parts.build_encoder(config, train_set, self.engine.device)
        parts.apply_switches(self.encoder, config)
        self.engine.prepare(self.encoder, parts.make_optimizer(self.encoder, config.optim))
        self.loss = parts.build_loss(config, self.encoder)

    def peak(self, size: int, bank_size: int, budget: float = math.inf) -> float | None:
        """Return the peak memory in bytes of a few steps with the longest texts and a full bank.

        size: pairs per micro-batch. On a GPU, the result is the memory that PyTorch reserves (with fragmentation) plus the
        memory that CUDA itself and other processes use. Out of memory: infinity if the GPU has ``budget`` bytes, else None.
        """
        device = self.engine.device
        try:
            bank = self._full_bank(size, bank_size)
            self.engine.free_memory()  # otherwise a step could use memory that another size freed, and its peak would be too low
            self.engine.reset_peak_memory()
            self._steps(self._sized(size, bank_size), self.longest, bank, PEAK_STEPS)
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            self.engine.drop_step()
            return math.inf if device.type == "cuda" and budget <= torch.cuda.mem_get_info(device)[1] else None
        if device.type == "cuda":
            return torch.cuda.max_memory_reserved(device) + self.context()
        return self.engine.peak_memory()

    def context(self) -> int:
        """Return the bytes on the GPU that CUDA itself and other processes use. PyTorch's allocator does not count them."""
        if self.engine.device.type != "cuda":
            return 0
        free, total = torch.cuda.mem_get_info(self.engine.device)
        return total - free - torch.cuda.memory_reserved(self.engine.device)

    def usable(self) -> float:
        """Return the bytes that a measurement may use: infinity on a GPU, where an out-of-memory error does no harm."""
        free = psutil.virtual_memory().available + psutil.Process().memory_info().rss
        return math.inf if self.engine.device.type == "cuda" else USABLE * free

    def step_seconds(self, size: int) -> float:
        """Return the seconds of an optimizer step with random pairs. The step has micro-batches of ``size`` pairs."""
        n = self.config.batch.global_batch_size
        if self.config.spec.whole:
            return self._median(size, 1) * n / size
        count = n // size
        timed = min(count, TIMED_MICRO_BATCHES)
        long = self._median(size, timed)
        return long if timed == count else long + (long - self._median(size, 1)) / (timed - 1) * (count - timed)

    def _median(self, size: int, micro_batches: int) -> float:
        return self.seconds_per_step(self._sized(size, self.config.bank_size(), micro_batches))

    def seconds_per_step(self, config: TrainConfig | None = None) -> float:
        """Return the median seconds of an optimizer step with ``config`` (None: self.config), random pairs and a full bank."""
        config = config or self.config
        bank = self._full_bank(config.batch.micro_batch_size, config.bank_size())
        return statistics.median(self._steps(config, self.random_pairs, bank, REPEATS, warm_up=True))

    def passages_per_second(self) -> float:
        passages = self.random_pairs.passages[:SAMPLE]
        texts = [f"{title} {text}".strip() for title, text in zip(passages["title"], passages["text"], strict=True)]
        self.encoder.encode_passages(texts[:8])  # the first call is slower
        return len(texts) / timeit.timeit(lambda: self.encoder.encode_passages(texts), number=1)

    def seconds_per_comparison(self, queries: int = 256, passages: int = 16_384) -> float:
        left, right = (torch.randn(rows, self.encoder.dim, device=self.engine.device) for rows in (queries, passages))
        taken = timeit.repeat(lambda: (left @ right.T).amax().item(), number=1, repeat=1 + REPEATS)  # item() syncs
        return statistics.median(taken[1:]) / (queries * passages)

    def _sized(self, size: int, bank_size: int, micro_batches: int = MICRO_BATCHES) -> TrainConfig:
        count = 1 if self.config.spec.whole else min(micro_batches, max(1, self.config.batch.global_batch_size // size))
        pairs: dict[str, Any] = {"global_batch_size": size * count, "micro_batch_size": size}
        batch = replace(self.config.batch, micro_batch_tokens=None, **pairs)
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
            if each.sums is not None and self.engine.device.type != "cpu":
                # Opening blocks (methods/logsumexp.py) needs much memory on a GPU. Start at the last slot, so that the first push
                # opens a block at each level.
                numbers["open"] = [(each.size - 1) // width % each.sums.fan for width in each.sums.widths[:-1]]
            each.load_state(tensors, {**numbers, "stored": each.size, "step": self.config.bank.warmup_steps})
        return bank

    def _steps(
        self, config: TrainConfig, train_set: TrainSet, bank: Bank, count: int, warm_up: bool = False
    ) -> list[float]:
        """Take ``count`` optimizer steps and return the seconds of each step.

        warm_up: first take untimed steps: 1 step on a CPU, ``count`` steps on a GPU, where new tensor shapes are slow.
        """
        batches = parts.build_batches(config, self.engine, self.encoder, train_set)
        first = (count if self.engine.device.type == "cuda" else 1) if warm_up else 0
        self.encoder.train()
        taken: list[float] = []
        with contextlib.closing(prefetch(batches.step(step) for step in (*range(first), *range(count)))) as prepared:
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
    """Return at most ``most`` indices of long pairs. Pairs with a long query and pairs with a long positive alternate.

    A micro-batch is padded to its longest query and to its longest passage, which seldom belong to the same pair. Only the first
    ``searched`` pairs are considered. Lengths are numbers of characters.
    """
    queries = [len(text) for text in train_set.queries[:searched]["text"]]
    ends = train_set.positives.offsets[: len(queries) + 1]
    rows, place = np.unique(train_set.positives.values[: ends[-1]], return_inverse=True)
    read = train_set.passages[rows]  # not the whole corpus, which may have millions of passages
    characters = np.array([len(title) + len(text) for title, text in zip(read["title"], read["text"], strict=True)])
    positives = np.maximum.reduceat(characters[place], ends[:-1])
    in_turn = np.stack([np.argsort(queries)[::-1], np.argsort(positives)[::-1]], axis=1).ravel()
    _, first = np.unique(in_turn, return_index=True)
    return in_turn[np.sort(first)[:most]]


def predict(peaks: dict[int, float], size: int) -> float:
    """Predict the peak memory at ``size`` by linear interpolation or extrapolation.

    peaks: size -> measured peak memory, at least two entries.
    """
    sizes = sorted(peaks)
    left, right = next((pair for pair in pairwise(sizes) if size <= pair[1]), tuple(sizes[-2:]))
    slope = max(0.0, (peaks[right] - peaks[left]) / (right - left))
    return peaks[right] + slope * (size - right)


def largest(
    peaks: dict[int, float], choices: Sequence[int], budget: float, measure: Callable[[int], float | None]
) -> tuple[int | None, float]:
    """Return the largest size in ``choices`` that fits into ``budget`` bytes (None: no size fits), and a relative error.

    The largest size is predicted and its memory is measured. Then the size is predicted again with this measurement. The error
    is the relative difference between the last measured memory and the memory predicted for this size. peaks: size -> measured
    peak memory in bytes; new measurements are added. measure: function that returns the peak memory of a size. If it returns
    None because the device cannot measure the size, the prediction is used. If it returns infinity, the size does not fit.
    """
    error = 0.0
    for _ in range(CORRECTIONS):
        best = max((size for size in choices if predict(peaks, size) <= budget), default=None)
        if best is None or best in peaks or (found := measure(best)) is None:
            return best, error
        if found == math.inf:
            measured = max((size for size in peaks if size < best), default=0)
            choices = [size for size in choices if 2 * size <= best + measured]
            continue
        error = predict(peaks, best) / found - 1
        peaks[best] = found
    return max((size for size in choices if predict(peaks, size) <= budget), default=None), error


def fitting_size(probe: Probe, budget: float, processes: int = 1) -> FittingSize:
    """Find the largest micro-batch size whose peak memory is at most ``budget`` bytes.

    Three small sizes are measured first, and smaller ones if memory runs out. Raises InputError if at most one size can be
    measured. processes: number of processes that share the global batch.
    """
    config = probe.config
    rows, n = config.bank_size(), config.batch.global_batch_size // processes
    first = max(4, 4 * config.batch.micro_batch_size if config.spec.whole else config.micro_batch_size(1))
    # measure from small to large: memory that the process keeps from a smaller size does not change the peak of a larger one
    sizes = [first // 4, first // 2, first]
    peaks = {size: peak for size in sizes if (peak := probe.peak(size, rows)) is not None}
    while len(peaks) < 2 and sizes[0] > 1:
        sizes.insert(0, sizes[0] // 2)
        peaks |= {} if (peak := probe.peak(sizes[0], rows)) is None else {sizes[0]: peak}
    if len(peaks) < 2:
        raise InputError(
            f"{config.method}: at most one of the micro-batch sizes {', '.join(map(str, sizes))} fits into the memory of this "
            "device, but at least two sizes must be measured to predict the memory. Lower model.max_passage_length."
        )
    high = max(peaks)
    line = {size: peak for size, peak in peaks.items() if size < high}
    error = predict(line, high) / peaks[high] - 1 if len(line) > 1 else 0.0

    def at_size(size: int) -> float | None:
        return probe.peak(size, rows, budget) if predict(peaks, size) <= probe.usable() else None

    choices = [n] if config.spec.whole else [size for size in range(1, n + 1) if n % size == 0]
    best, corrected = largest(peaks, choices, budget, at_size)
    needed = predict(peaks, best) if best else max(budget, predict(peaks, choices[0]))
    return FittingSize(best, needed, corrected or error, max(peaks))


def sharded_sizes(probe: Probe, budget: float, processes: int) -> dict[str, FittingSize]:
    """Return the largest micro-batch of a process for both values of ``run.sharding``: ``none`` and ``fsdp``.

    The memory that fsdp saves is computed, not measured.
    """
    half = probe.config.run.precision == "bf16"
    saved = saved_bytes(probe.encoder.units(), processes, torch.bfloat16 if half else torch.float32)
    found = {"none": fitting_size(probe, budget, processes)}
    sharded = fitting_size(probe, budget + saved, processes)
    return found | {"fsdp": replace(sharded, peak=sharded.peak - saved)}


def measure(probe: Probe, budget: float) -> Measurement:
    """Measure the memory and the speed of the configured method.

    Two sizes are searched within ``budget`` bytes: the largest micro-batch with the configured bank, and the largest bank with
    the configured micro-batch size. Raises InputError if memory runs out for small micro-batches.
    """
    config = probe.config
    rows, n = config.bank_size(), config.batch.global_batch_size
    found, smallest = fitting_size(probe, budget), n if config.spec.whole else 1
    step = probe.step_seconds(min(found.size or smallest, found.measured))
    bank = largest_bank(probe, rows, min(config.micro_batch_size(1), n), budget) if rows else None
    speeds = probe.passages_per_second(), probe.seconds_per_comparison()
    memory = found.size, found.peak, found.error, bank, probe.context()
    return Measurement(*memory, step, *speeds, probe.encoder.dim, probe.pairs)


def largest_bank(probe: Probe, rows: int, size: int, budget: float) -> int:
    """Return the number of rows of the largest bank within ``budget`` bytes, with micro-batches of ``size`` pairs.

    The search starts with a bank of ``rows`` rows. The memory of banks that do not fit into this device is predicted. Returns 0
    if no bank fits, or if the memory of a row cannot be measured.
    """
    more = rows + BANK_BYTES // (8 * probe.encoder.dim)
    banks = {each: peak for each in (rows, more) if (peak := probe.peak(size, each)) is not None}
    if len(banks) < 2 or predict(banks, 2 * more) <= banks[more]:  # the memory of a row cannot be measured
        return 0

    def at_rows(each: int) -> float | None:
        return probe.peak(size, each, budget) if each <= MOST_ROWS and predict(banks, each) <= probe.usable() else None

    found = at_rows(MOST_ROWS) if predict(banks, MOST_ROWS) < budget else None
    banks |= {MOST_ROWS: found} if found is not None and found < math.inf else {}
    high = max(banks)
    per_row = (banks[high] - banks[rows]) / (high - rows)  # the last two sizes may have equal peaks
    estimate = max(1, int(high + (budget - banks[high]) / per_row))
    unit, end = max(1, estimate // 256), MOST_ROWS if found == math.inf else 2 * estimate
    return largest(banks, range(unit, end, unit), budget, at_rows)[0] or 0


_FUNCTIONS = measure, fitting_size, sharded_sizes, Probe.seconds_per_step
REQUESTS: dict[str, Callable[..., Any]] = {each.__name__: each for each in _FUNCTIONS}


def main() -> int:
    """Read a request from stdin, call the requested function, and write its result to stdout. Return the exit code.

    The request contains ``config``, ``function`` (a name such as ``measure``, see REQUESTS) and ``arguments``. After an error,
    the answer is the error message.
    """
    request = json.load(sys.stdin)
    warnings.simplefilter("ignore")  # training itself prints these warnings
    try:
        with contextlib.redirect_stdout(sys.stderr):  # stdout carries only the answer
            probe = Probe(from_mapping(request["config"]))
            answer = REQUESTS[request["function"]](probe, **request["arguments"])
    except InputError as error:
        print(json.dumps({"error": str(error)}))
        return error.exit_code
    except OSError as error:  # a full or read-only disk
        name = error.filename or "a file"
        print(json.dumps({"error": f"{name}: cannot be read or written ({error.strerror or error})"}))
        return InputError.exit_code
    print(json.dumps(answer, default=asdict))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Real micro-steps of one method in a process of its own: peak memory at several sizes, and what a step takes.

``python -m contaccum.study.measure`` reads a request as JSON on stdin and answers with JSON on stdout; study/plan.py starts it.
A process a method, because a CPU's allocator gives little back, and what one method has reserved must not count for the next.
"""

import contextlib
import json
import statistics
import sys
import time
import warnings
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F

from contaccum.config import TrainConfig, from_mapping
from contaccum.data.dataset import TrainSet, load_training, narrowed
from contaccum.engine import Engine, out_of_memory
from contaccum.errors import InputError
from contaccum.methods import METHODS
from contaccum.methods.bank import Bank
from contaccum.training import setup
from contaccum.training.optimizer import make_optimizer

MICRO_BATCHES = 2
"""In a measured step: the second of them meets everything that the first has left in memory."""
SAMPLE = 256
"""Passages that are encoded to learn how fast that goes."""
REPEATS = 3


@dataclass(frozen=True)
class Peak:
    """Most memory held in two steps over the longest pairs of the data."""

    micro_batch_size: int
    bank_size: int
    bytes: int


@dataclass(frozen=True)
class Measurement:
    """What one process learned of one method."""

    peaks: list[Peak]
    """By micro-batch size, then by bank size; ends before the first size that did not fit."""
    per_micro_step: float
    """Seconds of one micro-batch of ordinary pairs, at ``timed_size``."""
    per_update: float
    """Seconds of a step that no micro-batch takes: clipping, optimizer."""
    timed_size: int
    passages_per_second: float
    """Encoded, of the training passages."""
    seconds_per_comparison: float
    """Of one query with one passage, many at a time."""
    dim: int
    pairs: int
    """Training queries, which make an epoch."""


class Probe:
    """A run's parts, ready to take steps of any size."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        everything = load_training(config.data, config.distils)
        self.pairs = len(everything.queries)
        self.longest = narrowed(everything, _longest(everything, most=4 * config.batch.global_batch_size))
        random = np.random.default_rng(config.seed)
        self.ordinary = narrowed(everything, random.permutation(self.pairs)[: max(64, MICRO_BATCHES * SAMPLE)])
        self.engine = Engine(device=config.run.device, precision=config.run.precision, seed=config.seed)
        self.encoder = setup.build_encoder(config, everything, self.engine.device)
        setup.apply_switches(self.encoder, config)
        self.optimizer = make_optimizer(self.encoder, config.optim)
        self.engine.prepare(self.encoder, self.optimizer)
        self.loss = setup.build_loss(config, self.encoder)

    def peak(self, size: int, bank_size: int) -> Peak:
        """Most memory held while two steps of micro-batches of ``size`` of the longest pairs meet a full bank."""
        self.engine.reset_peak_memory()
        bank = self._full_bank(size, bank_size)
        self._steps(self._sized(size, bank_size), self.longest, bank, 2)
        return Peak(size, bank_size, self.engine.peak_memory())

    def seconds(self, size: int, micro_batches: int) -> float:
        """Median time of a step of ordinary pairs, a first one left out."""
        config = self._sized(size, self.config.bank_size(), micro_batches)
        bank = self._full_bank(size, config.bank_size())
        return statistics.median(self._steps(config, self.ordinary, bank, 1 + REPEATS)[1:])

    def passages_per_second(self) -> float:
        passages = self.ordinary.passages[:SAMPLE]
        texts = [f"{title} {text}".strip() for title, text in zip(passages["title"], passages["text"], strict=True)]
        self.encoder.encode_passages(texts[:8])  # what is made at the first call does not count
        start = time.perf_counter()
        self.encoder.encode_passages(texts)
        return len(texts) / (time.perf_counter() - start)

    def seconds_per_comparison(self, queries: int = 256, passages: int = 16_384) -> float:
        """Time of one inner product within a large matrix product, float32."""
        left, right = (torch.randn(rows, self.encoder.dim, device=self.engine.device) for rows in (queries, passages))
        taken = []
        for _ in range(1 + REPEATS):
            start = time.perf_counter()
            (left @ right.T).amax().item()  # waits for the device
            taken.append(time.perf_counter() - start)
        return statistics.median(taken[1:]) / (queries * passages)

    def _sized(self, size: int, bank_size: int, micro_batches: int = MICRO_BATCHES) -> TrainConfig:
        pairs = size if self.config.traits.whole else size * micro_batches
        batch = replace(self.config.batch, global_batch_size=pairs, micro_batch_size=size, micro_batch_tokens=None)
        return replace(self.config, batch=batch, bank=replace(self.config.bank, size=bank_size))

    def _full_bank(self, size: int, bank_size: int) -> Bank:
        """A bank all of whose rows are in use; their values do not matter for memory and time."""
        bank = setup.build_bank(self._sized(size, bank_size), self.engine, self.encoder, self.loss)
        for each in (bank, *bank.narrower):
            tensors, numbers = each.state()
            for name in ("queries", "passages"):
                if name in tensors:
                    tensors[name] = F.normalize(torch.randn_like(tensors[name]), dim=-1)
            if "sums" in tensors:
                tensors["sums"] = torch.zeros_like(tensors["sums"])
            each.load_state(tensors, {**numbers, "stored": bank.size, "step": self.config.bank.warmup_steps})
        return bank

    def _steps(self, config: TrainConfig, train_set: TrainSet, bank: Bank, count: int) -> list[float]:
        batches = setup.build_batches(config, self.engine, self.encoder, train_set)
        self.encoder.train()
        taken = []
        for step in range(count):
            start = time.perf_counter()
            self.engine.begin_step(step)
            METHODS[config.method](self.engine, batches.step(step), bank, self.loss)
            query_norm, passage_norm = self.engine.gradient_norms()  # waits for the device
            self.engine.clip(query_norm + passage_norm, config.optim.max_grad_norm)
            self.engine.update()
            bank.end_step()
            taken.append(time.perf_counter() - start)
        return taken


def _longest(train_set: TrainSet, most: int, looked_at: int = 100_000) -> np.ndarray:
    """The queries whose own text and longest positive have the most letters, of the first ``looked_at``."""
    queries = train_set.queries[:looked_at]["text"]
    titles, texts = train_set.passages["title"], train_set.passages["text"]
    letters = np.array([len(title) + len(text) for title, text in zip(titles, texts, strict=True)])
    weight = [len(text) + letters[train_set.positives.row(number)].max() for number, text in enumerate(queries)]
    return np.argsort(weight)[::-1][:most].copy()


def measure(config: TrainConfig, sizes: list[int], bank_sizes: list[int]) -> Measurement:
    """Peaks at every micro-batch size with the first bank size, then at the last of them with the other bank sizes.

    Raises InputError where not even two sizes fit into the device.
    """
    probe = Probe(config)
    wanted = [(size, bank_sizes[0]) for size in sizes] + [(sizes[-1], rows) for rows in bank_sizes[1:]]
    peaks: list[Peak] = []
    for (
        size,
        rows,
    ) in wanted:  # growing, so that what an allocator keeps of a smaller one is no part of a larger one's peak
        try:
            peaks.append(probe.peak(size, rows))
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            break
    if len(peaks) < min(2, len(sizes)):
        raise InputError(
            f"{config.method}: micro-batches of {sizes[0]} and {sizes[-1]} pairs do not fit into this device"
        )
    timed = peaks[min(len(peaks), len(sizes)) - 1].micro_batch_size
    if config.traits.whole:  # a step is one micro-batch: its time grows with the pairs in it
        smaller = peaks[0].micro_batch_size
        short, long = probe.seconds(smaller, 1), probe.seconds(timed, 1)
        per_micro_step = max(0.0, long - short) / max(1, timed - smaller) * timed
        per_update = max(0.0, long - per_micro_step)
    else:
        one, three = probe.seconds(timed, 1), probe.seconds(timed, 3)
        per_micro_step = max(0.0, three - one) / 2
        per_update = max(0.0, one - per_micro_step)
    return Measurement(
        peaks,
        per_micro_step,
        per_update,
        timed,
        probe.passages_per_second(),
        probe.seconds_per_comparison(),
        probe.encoder.dim,
        probe.pairs,
    )


def main() -> int:
    """Answer one request; the user's fault is told in the answer, with exit code 2."""
    request = json.load(sys.stdin)
    warnings.simplefilter("ignore")  # what a run would warn of is that run's to say
    try:
        with contextlib.redirect_stdout(sys.stderr):  # stdout is the answer's alone
            found = measure(from_mapping(request["config"]), request["sizes"], request["bank_sizes"])
    except InputError as error:
        print(json.dumps({"error": str(error)}))
        return error.exit_code
    print(json.dumps(asdict(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

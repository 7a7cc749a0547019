"""``contaccum verify``: check on your model, data and device that equivalent methods give equal gradients.

Each check computes the same gradients, log-sum-exps or trained weights in two ways and reports the largest difference. A step has
MICRO_BATCHES micro-batches of at most PAIRS pairs. Steps are small because ``in_batch`` needs the memory of a whole step at once.

``python -m contaccum.experiments.verify CONFIG.json`` computes the gradients of one method, in one process or under torchrun. It
writes a safetensors file. In this config, ``output_dir`` is the path of the file, not a folder.
"""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from math import inf, isfinite
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from contaccum.config import TrainConfig, from_mapping, validate
from contaccum.data.dataset import load_training
from contaccum.errors import Failed
from contaccum.experiments.page import Table, number
from contaccum.methods import METHODS
from contaccum.methods.bank import Bank
from contaccum.runtime.engine import Engine
from contaccum.runtime.files import read_json, sha256_of, write_json
from contaccum.runtime.launch import require_one_process
from contaccum.training import parts
from contaccum.training.loop import train
from contaccum.training.parts import trained_parameters

STEPS = 3
MICRO_BATCHES = 4
PAIRS = 4
BANK_ROWS = 40
"""Number of rows of the bank, chosen so that a push of a whole step can wrap around the end of the ring buffer."""
TOLERANCE = {"fp32": 1e-4, "bf16": 5e-2, "fp16": 5e-2}  # precision -> largest difference that rounding can cause
WITHOUT_BANK = {"passage_bank": "grad_accum", "cont_accum": "grad_accum", "cont_cache": "grad_cache"}
"""Method with a bank -> method that gives equal gradients if ``bank.size`` is 0."""
Gradients = dict[str, Tensor]  # name of a parameter -> gradient


@dataclass(frozen=True)
class Equivalence:
    """Result of one check. The check computes the same values in two ways and compares them."""

    name: str
    difference: float | None  # largest difference between the values; None if the check cannot run here
    tolerance: float
    note: str

    @property
    def holds(self) -> bool:
        return self.difference is None or self.difference <= self.tolerance

    @property
    def verdict(self) -> str:
        return "not checked" if self.difference is None else "holds" if self.holds else "FAILS"


def verify(config: TrainConfig, say: Callable[[str], None]) -> None:
    """Run all checks and print the table of results with ``say``. Raise Failed if a check finds too large a difference."""
    require_one_process("verify")
    results: list[Equivalence] = []
    with tempfile.TemporaryDirectory(prefix="contaccum-verify-") as folder:
        small = replace(small_config(config), output_dir=str(Path(folder) / "run"))
        validate(small)
        with _engine(small) as engine:
            bench = Bench(small, engine)
            results += [*_equal_methods(bench), _cached_logsumexp(bench)]
        results += [_resume(small, Path(folder)), _processes(small, Path(folder))]
    rows = [[one.name, number(one.difference, ".1e"), f"{one.tolerance:.0e}", one.verdict, one.note] for one in results]
    say(Table(["equivalence", "largest difference", "tolerance", "verdict", "how"], rows).markdown())
    broken = [one.name for one in results if not one.holds]
    if broken:
        raise Failed(f"{len(broken)} of {len(results)} equivalences do not hold: {'; '.join(broken)}")


def small_config(config: TrainConfig) -> TrainConfig:
    """Return the config with few steps, few pairs per step, a small bank, two checkpoints, no evaluation and no trackers."""
    pairs = min(PAIRS, config.batch.micro_batch_size)
    pairs += pairs % 2 if pairs < PAIRS else 0  # even, because two processes share a micro-batch
    sizes: dict[str, Any] = {"micro_batch_size": pairs, "global_batch_size": pairs * MICRO_BATCHES}
    batch = replace(config.batch, micro_batch_tokens=None, **sizes)
    bank = replace(config.bank, size=BANK_ROWS * pairs // PAIRS, warmup_steps=0)
    optim = replace(config.optim, max_steps=2 * STEPS, warmup_steps=None, warmup_ratio=None)
    run = replace(config.run, save_steps=STEPS, keep_checkpoints=2, eval_steps=0, drift_steps=0, trackers=[])
    data, output = replace(config.data, dev=None), config.output_dir or "verify"
    return replace(config, batch=batch, bank=bank, optim=optim, run=run, data=data, output_dir=output, resume=False)


def _engine(config: TrainConfig) -> "closing[Engine]":
    return closing(Engine(device=config.run.device, precision=config.run.precision, seed=config.seed))


class Bench:
    """Model and data of the user, to compute the gradients of different methods.

    All methods start from the same weights and train on the same micro-batches.
    """

    def __init__(self, config: TrainConfig, engine: Engine) -> None:
        self.config, self.engine = config, engine
        train_set = load_training(config.data, config.distils)
        self.encoder = parts.build_encoder(config, train_set, engine.device)
        if config.model.dropout is not None:
            self.encoder.set_dropout(config.model.dropout)
        self.encoder.train()
        batches = parts.build_batches(config, engine, self.encoder, train_set)
        rules = parts.build_rules(config, engine, train_set)
        self.loss = parts.build_loss(config, self.encoder, rules)
        self.steps = [batches.step(step) for step in range(STEPS)]
        self.weights = {name: p.detach().clone() for name, p in trained_parameters(self.encoder).items()}

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.config.run.precision]

    def bank(self, method: str, size: int) -> Bank:
        config = replace(self.config, method=method, bank=replace(self.config.bank, size=size))  # type: ignore[arg-type]
        return parts.build_bank(config, self.engine, self.encoder, self.loss)

    def gradients(self, method: str, bank: Bank, steps: int = STEPS) -> list[Gradients]:
        """Train with plain gradient descent (SGD). Return the gradients of each step."""
        self.encoder.load_state_dict(self.weights, strict=False)
        rate = self.config.learning_rate()
        self.engine.prepare(self.encoder, torch.optim.SGD(self.encoder.parameters(), lr=rate))
        found = []
        for step in range(steps):
            self.engine.step = step
            METHODS[method](self.engine, self.steps[step], bank, self.loss)
            self.engine.reduce_gradients()
            self.engine.gradient_norms()  # also removes the loss scaling of fp16
            named = self.encoder.named_parameters()
            found.append({name: p.grad.detach().clone() for name, p in named if p.grad is not None})
            self.engine.update()
            bank.end_step()
        return found


def largest_difference(one: list[Gradients], other: list[Gradients]) -> float:
    """Return the relative difference of two lists of gradients: the maximum over steps of max |one - other| / max |one|.

    In each step, both maxima are over all elements of all parameters. The result is infinite if a gradient is NaN or infinite, if
    all gradients of ``one`` are 0 in a step, or if ``one`` and ``other`` have different parameters.
    """
    largest = 0.0
    for left, right in zip(one, other, strict=True):
        if left.keys() != right.keys():
            return inf
        scale = _maximum(float(gradient.abs().max()) for gradient in left.values())
        difference = _maximum(float((left[name] - right[name]).abs().max()) for name in left)
        if not 0 < scale < inf:
            return inf
        largest = max(largest, difference / scale)
    return largest


def _maximum(values: Iterable[float]) -> float:
    """Return the maximum, or infinity if a value is NaN or infinite. ``max`` would ignore a NaN that is not the first value."""
    found = list(values)
    return max(found) if all(map(isfinite, found)) else inf


def _equal_methods(bench: Bench) -> Iterator[Equivalence]:
    batch = bench.config.batch
    pair = [bench.gradients(method, bench.bank(method, 0), steps=1) for method in ("grad_cache", "in_batch")]
    note = f"N = {batch.global_batch_size}, B = {batch.micro_batch_size}, gradients of one step, dropout as configured"
    yield Equivalence("grad_cache = in_batch", largest_difference(*pair), bench.tolerance, note)
    # On a CPU, the same operations give equal bits. A GPU may add numbers in a different order.
    tolerance = 0.0 if bench.engine.device.type == "cpu" else bench.tolerance
    note = f"gradients of {STEPS} steps, dropout as configured"
    for banked, plain in WITHOUT_BANK.items():
        pair = [bench.gradients(method, bench.bank(banked, 0)) for method in (banked, plain)]
        yield Equivalence(f"{banked} with bank.size 0 = {plain}", largest_difference(*pair), tolerance, note)


def _cached_logsumexp(bench: Bench) -> Equivalence:
    bank = bench.bank("cont_accum", bench.config.bank_rows)
    name, tolerance = "incremental log-sum-exp = log-sum-exp of the full matrix", 1e-5
    if not bank.options.keep:
        return Equivalence(name, None, tolerance, "needs bank.keep true")
    bench.gradients("cont_accum", bank)
    difference = _maximum(_logsumexp_difference(each, bench.config) for each in (bank, *bank.truncated))
    pushed = STEPS * bench.config.batch.global_batch_size
    note = f"relative difference in float64; bank of {bank.size} rows, {pushed} rows pushed"
    return Equivalence(name, difference, tolerance, note)


def _logsumexp_difference(bank: Bank, config: TrainConfig) -> float:
    assert bank.queries is not None
    columns, ids = bank.passages.flatten(0, 1).double(), bank.column_ids.flatten()
    similarities = bank.queries.double() @ columns.T  # (M, M (1 + H))
    rows, width = torch.arange(bank.size), bank.column_ids.shape[1]
    logits = similarities / config.model.temperature
    logits[rows, rows * width] = similarities[rows, rows * width] / config.model.temperature
    every = slice(0, bank.size)
    if bank.similarity.rules:
        bank.similarity.rules.leave_out(logits, bank.rule_rows(every), ids, (every, every))
    steps_apart = (bank.written_step.unsqueeze(1) - bank.written_step).abs().repeat_interleave(width, 1)
    logits -= (steps_apart * bank.options.age_decay).to(logits)
    if config.loss.mask_false_negatives:
        hidden = (bank.positives.unsqueeze(2) == ids).any(1)  # (M, M (1 + H))
        hidden[rows, rows * width] = False  # a row's own positive stays visible
        logits = logits.masked_fill(hidden.to(logits.device), -torch.inf)
    plain = logits.logsumexp(1)
    return float(((bank.logsumexp().double() - plain).abs() / plain.abs().clamp(min=1.0)).max())


def _resume(config: TrainConfig, folder: Path) -> Equivalence:
    whole, broken = folder / "whole", folder / "broken"
    train(replace(config, output_dir=str(whole)))
    shutil.copytree(whole, broken)
    shutil.rmtree(broken / "model")
    for later in sorted((broken / "checkpoints").iterdir())[1:]:
        shutil.rmtree(later)
    train(replace(config, output_dir=str(broken), resume=True))
    saved = [(file, broken / file.relative_to(whole)) for file in sorted((whole / "model").rglob("*.safetensors"))]
    same = all(sha256_of(one) == sha256_of(two) for one, two in saved)
    difference = _maximum(
        float((tensor.double() - resumed[name].double()).abs().max())
        for one, two in saved
        for resumed in [load_file(two)]
        for name, tensor in load_file(one).items()
    )
    cpu = config.run.device == "cpu" or not torch.cuda.is_available()
    note = (
        f"{config.method}, weights after {2 * STEPS} steps; one run was interrupted after {STEPS}; the weight files are "
        f"{'identical' if same else 'different'}"
    )
    return Equivalence("resumed = uninterrupted", difference, 0.0 if cpu else TOLERANCE[config.run.precision], note)


def _processes(config: TrainConfig, folder: Path) -> Equivalence:
    name = "two processes = one"
    nccl = config.run.device == "auto" and torch.cuda.device_count() > 1
    # with one GPU, both processes use the CPU, which has no fp16
    precision = "fp32" if config.run.precision == "fp16" and not nccl else config.run.precision
    tolerance = TOLERANCE[precision]
    if config.batch.micro_batch_size % 2:
        return Equivalence(name, None, tolerance, "needs an even batch.micro_batch_size")
    run = replace(config.run, device="auto" if nccl else "cpu", precision=precision)
    model, lora = replace(config.model, dropout=0.0), replace(config.lora, dropout=0.0)
    found = []
    for world in (1, 2):
        batch = replace(config.batch, micro_batch_tokens=None, micro_batch_size=config.batch.micro_batch_size // world)
        job, output = folder / f"processes-{world}.json", folder / f"processes-{world}.safetensors"
        changed = replace(config, batch=batch, run=run, model=model, lora=lora, output_dir=str(output))
        write_json(job, asdict(changed))
        try:
            found.append(_launch(world, job, output))
        except Failed as error:
            return Equivalence(name, inf, tolerance, str(error))
    kind = "nccl" if nccl else "gloo on the CPU" if precision == config.run.precision else "gloo on the CPU in fp32"
    note = (
        f"{config.method}, gradients of {STEPS} steps, {kind}, without dropout, because its noise depends on the number of "
        "processes"
    )
    return Equivalence(name, largest_difference(*found), tolerance, note)


def _launch(world: int, job: Path, output: Path) -> list[Gradients]:
    """Start ``world`` processes and return their gradients. Raise Failed with the last error message if they fail."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(world)] if world > 1 else []
    call = [sys.executable, *launcher, "-m", "contaccum.experiments.verify", str(job)]
    done = subprocess.run(call, capture_output=True, text=True, check=False)
    if done.returncode or not output.is_file():
        lines = done.stderr.strip().splitlines() or ["no output"]
        raise Failed(([line for line in lines if "Error" in line] or lines)[-1].strip())
    found: list[Gradients] = [{} for _ in range(STEPS)]
    for name, tensor in load_file(output).items():
        found[int(name.partition("/")[0])][name.partition("/")[2]] = tensor
    return found


def main(file: str) -> None:
    config = from_mapping(read_json(file, dict[str, Any]))
    with _engine(config) as engine:
        bench = Bench(config, engine)
        steps = bench.gradients(config.method, bench.bank(config.method, config.bank_rows))
        if engine.is_main:
            named = {f"{step}/{name}": gradient for step, one in enumerate(steps) for name, gradient in one.items()}
            save_file({name: gradient.cpu().contiguous() for name, gradient in named.items()}, config.output_dir)
        engine.barrier()


if __name__ == "__main__":
    main(sys.argv[1])

"""``contaccum verify``: the equivalences that the methods promise, held on the user's own model, data and device.

Each check runs the same steps in two ways that must agree and gives the largest difference found. Gradients are compared by
their largest absolute difference over the largest gradient of the step. The steps are small (STEPS of MICRO_BATCHES times at
most PAIRS pairs), so that ``in_batch``, which holds a whole step, fits where the config's own step would not.
"""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from contaccum.batch import MicroBatch
from contaccum.config import TrainConfig, validate
from contaccum.data.dataset import TrainSet, load_training
from contaccum.encoder import DualEncoder
from contaccum.engine import Engine
from contaccum.errors import Failed
from contaccum.files import sha256_of, write_json
from contaccum.methods import METHODS
from contaccum.methods.bank import Bank
from contaccum.study.pool import one_process
from contaccum.study.tables import Table
from contaccum.training import setup
from contaccum.training.loop import train
from contaccum.training.optimizer import trained_parameters

STEPS = 3
MICRO_BATCHES = 4
PAIRS = 4
BANK_ROWS = 40
"""No multiple of what is pushed at once, and less than all steps push: the ring wraps in the middle of a push."""
TOLERANCE = {"fp32": 1e-4, "bf16": 5e-2, "fp16": 5e-2}
"""Largest difference that rounding may make, by precision of the encoders."""
TWINS = {"passage_bank": "grad_accum", "cont_accum": "grad_accum", "cont_cache": "grad_cache"}
Gradients = dict[str, Tensor]


@dataclass(frozen=True)
class Finding:
    """One equivalence, held against the model."""

    name: str
    difference: float | None
    """The largest one found; None where the check could not be made here."""
    tolerance: float
    note: str

    @property
    def holds(self) -> bool:
        return self.difference is None or self.difference <= self.tolerance

    @property
    def verdict(self) -> str:
        return "not checked" if self.difference is None else "holds" if self.holds else "FAILS"


def verify(config: TrainConfig, say: Callable[[str], None]) -> None:
    """Make every check and say the table; raises Failed where an equivalence does not hold."""
    one_process("verify")
    small = small_config(config)
    findings = []
    with tempfile.TemporaryDirectory(prefix="contaccum-verify-") as folder:
        small = replace(small, output_dir=str(Path(folder) / "run"))
        validate(small)
        with _engine(small) as engine:
            bench = Bench(small, engine)
            findings += [_grad_cache(bench), *_twins(bench), _kept_sums(bench)]
        findings += [_resume(small, Path(folder)), _processes(small, Path(folder))]
    say(render(findings))
    broken = [finding.name for finding in findings if not finding.holds]
    if broken:
        raise Failed(f"{len(broken)} of {len(findings)} equivalences do not hold: {'; '.join(broken)}")


def render(findings: list[Finding]) -> str:
    rows = [
        [f.name, "-" if f.difference is None else f"{f.difference:.1e}", f"{f.tolerance:.0e}", f.verdict, f.note]
        for f in findings
    ]
    return Table(["equivalence", "largest difference", "tolerance", "verdict", "how"], rows).markdown()


def small_config(config: TrainConfig) -> TrainConfig:
    """The config with steps that fit, a bank that wraps, and no checkpoint, evaluation or tracker of its own."""
    pairs = min(PAIRS, config.batch.micro_batch_size)
    pairs += pairs % 2 if pairs < PAIRS else 0  # two processes share a micro-batch
    batch = replace(
        config.batch, micro_batch_tokens=None, micro_batch_size=pairs, global_batch_size=pairs * MICRO_BATCHES
    )
    bank = replace(config.bank, size=BANK_ROWS * pairs // PAIRS, warmup_steps=0)
    optim = replace(config.optim, max_steps=2 * STEPS, warmup_steps=None, warmup_ratio=None)
    run = replace(config.run, save_steps=STEPS, keep_checkpoints=2, eval_steps=0, drift_steps=0, trackers=[])
    data = replace(config.data, dev=None)
    output = config.output_dir or "verify"
    return replace(config, batch=batch, bank=bank, optim=optim, run=run, data=data, output_dir=output, resume=False)


@contextmanager
def _engine(config: TrainConfig) -> Iterator[Engine]:
    engine = Engine(device=config.run.device, precision=config.run.precision, seed=config.seed)
    try:
        yield engine
    finally:
        engine.close()


class Bench:
    """The user's model and data, and any method's gradients on the same steps from the same weights."""

    def __init__(self, config: TrainConfig, engine: Engine) -> None:
        self.config, self.engine = config, engine
        self.train_set: TrainSet = load_training(config.data, config.distils)
        self.encoder: DualEncoder = setup.build_encoder(config, self.train_set, engine.device)
        if config.model.dropout is not None:
            self.encoder.set_dropout(config.model.dropout)
        self.encoder.train()
        batches = setup.build_batches(config, engine, self.encoder, self.train_set)
        self.steps: list[list[MicroBatch]] = [batches.step(step) for step in range(STEPS)]
        self.weights = {name: p.detach().clone() for name, p in trained_parameters(self.encoder).items()}

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.config.run.precision]

    def bank(self, method: str, size: int) -> Bank:
        config = replace(self.config, method=method, bank=replace(self.config.bank, size=size))  # type: ignore[arg-type]
        return setup.build_bank(config, self.engine, self.encoder, setup.build_loss(config, self.encoder))

    def gradients(self, method: str, bank: Bank, steps: int = STEPS) -> list[Gradients]:
        """Of every parameter at each step, by plain gradient descent from the first weights."""
        self.encoder.load_state_dict(self.weights, strict=False)
        rate = self.config.learning_rate()
        self.engine.prepare(self.encoder, torch.optim.SGD(self.encoder.parameters(), lr=rate))
        loss, found = setup.build_loss(self.config, self.encoder), []
        for number in range(steps):
            self.engine.step = number
            METHODS[method](self.engine, self.steps[number], bank, loss)
            self.engine.reduce_gradients()
            self.engine.gradient_norms()  # takes fp16's loss scaling out
            named = self.encoder.named_parameters()
            found.append({name: p.grad.detach().clone() for name, p in named if p.grad is not None})
            self.engine.update()
            bank.end_step()
        return found


def largest_difference(one: list[Gradients], other: list[Gradients]) -> float:
    """Largest difference over all steps, relative to the largest gradient of its step; infinite where names or numbers fail."""
    largest = 0.0
    for left, right in zip(one, other, strict=True):
        if left.keys() != right.keys():
            return float("inf")
        scale = max(float(gradient.abs().max()) for gradient in left.values())
        apart = max(float((left[name] - right[name]).abs().max()) for name in left)
        if not apart <= float("inf") or not scale > 0:  # NaN, or nothing to compare
            return float("inf")
        largest = max(largest, apart / scale)
    return largest


def _grad_cache(bench: Bench) -> Finding:
    pairs = [bench.gradients(method, bench.bank(method, 0), steps=1) for method in ("grad_cache", "in_batch")]
    batch = bench.config.batch
    note = f"N = {batch.global_batch_size}, B = {batch.micro_batch_size}, gradients of one step, dropout as configured"
    return Finding("grad_cache = in_batch", largest_difference(*pairs), bench.tolerance, note)


def _twins(bench: Bench) -> list[Finding]:
    found = []
    for banked, plain in TWINS.items():
        pair = [bench.gradients(method, bench.bank(banked, 0)) for method in (banked, plain)]
        # the same operations in the same order: on a CPU to the bit, elsewhere kernels may add in another order
        tolerance = 0.0 if bench.engine.device.type == "cpu" else bench.tolerance
        note = f"gradients of {STEPS} steps, dropout as configured"
        found.append(Finding(f"{banked} with bank.size 0 = {plain}", largest_difference(*pair), tolerance, note))
    return found


def _kept_sums(bench: Bench) -> Finding:
    """The bank's kept log-sum-exps after its ring has wrapped, against the full matrix in float64."""
    bank = bench.bank("cont_accum", bench.config.bank_rows)
    name, tolerance = "incremental log-sum-exp = full matrix", 1e-5
    if bank.queries is None or not bank.keep:
        return Finding(name, None, tolerance, "needs bank.queries and bank.keep")
    bench.gradients("cont_accum", bank)
    apart = max(_sums_apart(each, bench.config) for each in (bank, *bank.narrower))
    note = f"{bank.size} rows after {STEPS * bench.config.batch.global_batch_size} pushed, in float64, relative"
    return Finding(name, apart, tolerance, note)


def _sums_apart(bank: Bank, config: TrainConfig) -> float:
    assert bank.queries is not None
    columns, ids = bank.passages.flatten(0, 1).double(), bank.column_ids.flatten()
    logits = bank.queries.double() @ columns.T / config.model.temperature  # (M, M (1 + H))
    steps_apart = (bank.born.unsqueeze(1) - bank.born).abs().repeat_interleave(bank.column_ids.shape[1], 1)
    logits -= (steps_apart * bank.age_decay).to(logits)
    if config.loss.mask_false_negatives:
        hidden = (bank.positives.unsqueeze(2) == ids).any(1)  # (M, M (1 + H))
        rows = torch.arange(bank.size)
        hidden[rows, rows * bank.column_ids.shape[1]] = False  # a row's own positive stays
        logits = logits.masked_fill(hidden.to(logits.device), -torch.inf)
    plain = logits.logsumexp(1)
    apart = (bank.logsumexp().double() - plain).abs() / plain.abs().clamp(min=1.0)
    return float(apart.max())


def _resume(config: TrainConfig, folder: Path) -> Finding:
    """A run broken off at its first checkpoint and resumed, against one that was not."""
    whole, broken = folder / "whole", folder / "broken"
    train(replace(config, output_dir=str(whole)))
    shutil.copytree(whole, broken)
    shutil.rmtree(broken / "model")
    for later in sorted((broken / "checkpoints").iterdir())[1:]:
        shutil.rmtree(later)
    train(replace(config, output_dir=str(broken), resume=True))
    one, two = _weights(whole), _weights(broken)
    apart = max(float((one[name] - two[name]).abs().max()) for name in one)
    same = all(sha256_of(whole / name) == sha256_of(broken / name) for name in _weight_files(whole))
    cpu = config.run.device == "cpu" or not torch.cuda.is_available()
    note = f"{config.method}, weights after {2 * STEPS} steps, broken off after {STEPS}, {'same' if same else 'other'} bytes"
    return Finding("resumed = unbroken", apart, 0.0 if cpu else TOLERANCE[config.run.precision], note)


def _weight_files(run: Path) -> list[str]:
    return sorted(str(path.relative_to(run)) for path in (run / "model").rglob("*.safetensors"))


def _weights(run: Path) -> dict[str, Tensor]:
    return {
        f"{file}/{name}": tensor.double()
        for file in _weight_files(run)
        for name, tensor in load_file(run / file).items()
    }


def _processes(config: TrainConfig, folder: Path) -> Finding:
    """The method's gradients in two processes with half the pairs each, against one process."""
    name, tolerance = "two processes = one", TOLERANCE[config.run.precision]
    if config.batch.micro_batch_size % 2:
        return Finding(name, None, tolerance, "needs an even batch.micro_batch_size")
    nccl = config.run.device == "auto" and torch.cuda.device_count() > 1
    found = []
    for world in (1, 2):
        half = replace(config.batch, micro_batch_tokens=None, micro_batch_size=config.batch.micro_batch_size // world)
        run = replace(config.run, device="auto" if nccl else "cpu", precision=config.run.precision)
        model, lora = replace(config.model, dropout=0.0), replace(config.lora, dropout=0.0)
        job, output = folder / f"processes-{world}.json", folder / f"processes-{world}.safetensors"
        write_json(
            job, {**asdict(replace(config, batch=half, run=run, model=model, lora=lora)), "output_dir": str(output)}
        )
        found.append(_launch(world, job, output))
    kind = "nccl" if nccl else "gloo on the CPU"
    note = f"{config.method}, gradients of {STEPS} steps, {kind}, dropout 0: a process's noise is its own"
    if isinstance(found[0], str) or isinstance(found[1], str):
        return Finding(name, float("inf"), tolerance, next(one for one in found if isinstance(one, str)))
    return Finding(name, largest_difference(*found), tolerance, note)  # type: ignore[arg-type]


def _launch(world: int, job: Path, output: Path) -> list[Gradients] | str:
    """Gradients by step from the processes, or the last line that they said."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(world)] if world > 1 else []
    call = [sys.executable, *launcher, "-m", "contaccum.study.gradients", str(job)]
    done = subprocess.run(call, capture_output=True, text=True, check=False)
    if done.returncode or not output.is_file():
        errors = [line for line in done.stderr.strip().splitlines() if "Error" in line]
        return (errors or done.stderr.strip().splitlines() or ["no word"])[-1].strip()
    tensors = load_file(output)
    return [
        {name.partition("/")[2]: tensor for name, tensor in tensors.items() if name.startswith(f"{step}/")}
        for step in range(STEPS)
    ]

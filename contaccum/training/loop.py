"""The training loop: batches, method, clip, update, log, evaluate, save. No method's name appears here."""

import math
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from contaccum.batch import MicroBatch
from contaccum.config import METRIC_CUTS, TrainConfig, check_total, parse_bytes, to_yaml, validate
from contaccum.data.stream import StreamSet, open_training
from contaccum.data.tables import RetrievalSet, load_retrieval_set
from contaccum.engine import Engine, SharedEncoder, out_of_memory
from contaccum.errors import InputError, Interrupted, NotFiniteError
from contaccum.evaluation.beir import evaluate_encoder
from contaccum.files import write_json
from contaccum.launch import process_place
from contaccum.methods import METHODS
from contaccum.methods.loss import LossValue
from contaccum.prefetch import Prefetch
from contaccum.retrieval.search import SearchSettings
from contaccum.training import setup
from contaccum.training.checkpoint import Checkpoint, all_checkpoints, newest_checkpoint, restore, save_checkpoint
from contaccum.training.drift import Drift
from contaccum.training.environment import write_environment
from contaccum.training.fit import shrink, try_step
from contaccum.training.log import RunLog
from contaccum.training.optimizer import learning_rate_factor, make_optimizer, set_learning_rate, warmup_steps
from contaccum.training.signals import StopSignals

_ALL_OUT_OF_MEMORY = (
    "memory ran out outside a step's passes (weights, the bank, the optimizer or an evaluation), where smaller micro-batches do "
    "not help, expected it to fit; a new run with optim.name adamw_8bit, lora.rank, model.tie_towers or a smaller model takes "
    "less, and an evaluation does with a smaller run.eval_batch_tokens, with which --resume goes on"
)
DEV_METRICS_FILE = "dev_metrics.json"
DEV_DEPTH = max(METRIC_CUTS)
"""Passages retrieved per dev query."""


def train(config: TrainConfig) -> Path:
    """Train as ``config`` says and return the folder of the trained model, ``output_dir/model``.

    Raises InputError for what the user can mend, Interrupted after a signal (a checkpoint is then on disk).
    """
    validate(config, process_place()[1])
    with StopSignals() as signals, setup.claimed_folder(config):
        engine = Engine(
            device=config.run.device,
            precision=config.run.precision,
            tf32=config.run.tf32,
            seed=config.seed,
            trackers=config.run.trackers,
            tracker_dir=config.output_dir,
            timeout_minutes=config.run.timeout_minutes,
        )
        try:
            if config.run.memory_budget is not None:
                engine.limit_memory(parse_bytes(config.run.memory_budget))
            training = Training(config, engine)
            with signals.deferred():
                folder = training.run(signals)
        except BaseException as error:
            # of several, none leaves the others, who then fail too, before its own error is on record
            if engine.world == 1:
                engine.close()
            if out_of_memory(error):
                raise InputError(_ALL_OUT_OF_MEMORY) from error
            raise
        engine.close()
        return folder


class Training:
    """One run, from its first or its last saved step to its end."""

    def __init__(self, config: TrainConfig, engine: Engine) -> None:
        self.config, self.engine = config, engine
        self.folder = Path(config.output_dir)
        checkpoint = newest_checkpoint(self.folder) if config.resume else None
        if checkpoint:
            setup.refuse_other_checkpoint(config)
        with engine.main_first():
            train_set = open_training(config.data, config.distils)
            self.dev = self._load_dev()
        self._require_same(
            checkpoint=str(checkpoint and checkpoint.state["step"]), config=to_yaml(config), data=train_set.fingerprint
        )
        read_otherwise: list[str] = []
        if checkpoint:
            self.encoder, read_otherwise = setup.saved_encoder(config, checkpoint.model, engine.device)
        else:
            self.encoder = setup.build_encoder(config, train_set, engine.device)
        setup.apply_switches(self.encoder, config)
        self.batches = setup.build_batches(config, engine, self.encoder, train_set)
        self.size = setup.build_size(config, engine, self.batches)
        self.loss = setup.build_loss(config, self.encoder)
        self.bank = setup.build_bank(config, engine, self.encoder, self.loss)
        self.drift = Drift(engine, self.bank, self.batches.twin(), self.size)
        self.examples = None if isinstance(train_set, StreamSet) else len(train_set.queries)
        epochs = config.optim.epochs * (self.examples or 0) / config.batch.global_batch_size
        self.total = config.optim.max_steps or max(1, math.ceil(epochs))
        check_total(config, self.total)
        self.identity = setup.identity(config.model, engine, self.encoder, train_set)
        optimizer = make_optimizer(self.encoder, config.optim)
        self.done = 0
        self.best: dict[str, Any] = {}
        self.evaluated = 0  # the step of the last evaluation
        self.skipped = 0  # steps dropped because a number was not finite
        if checkpoint:
            self._resume(checkpoint, optimizer, read_otherwise)
        engine.prepare(self.encoder, optimizer)
        if engine.is_main:
            setup.write_config(config)
            write_environment(self.folder, engine)
        self.log = RunLog(engine, self.folder, self.total, self.done)
        engine.start_trackers({"method": config.method, "seed": config.seed})

    def _load_dev(self) -> RetrievalSet | None:
        data = self.config.data
        if not data.dev:
            return None
        return load_retrieval_set(data.dev, data.dev_split, data.strict, data.repair, data.max_bad_records)

    def _require_same(self, **values: str) -> None:
        """Refuse to start when the machines of a launch see different files."""
        for name, value in values.items():
            if others := self.engine.differing(value):
                raise InputError(
                    f"processes {', '.join(map(str, others))} of {self.engine.world} find another {name} than process 0, "
                    "expected the same data and the same output_dir on every machine"
                )

    def _resume(self, checkpoint: Checkpoint, optimizer: torch.optim.Optimizer, read_otherwise: list[str]) -> None:
        """Go on from a checkpoint; read_otherwise: settings by which its encoder's vectors are no longer those of its bank."""
        state = checkpoint.state
        changes = setup.identity_differences(state["identity"], self.identity)
        setup.refuse_changes(f"{checkpoint.folder} was written otherwise", changes, self.config.allow_changes)
        restore(checkpoint, self.encoder, optimizer, self.bank)
        if read_otherwise and self.bank.stored:
            self.bank.empty()
            warnings.warn(f"the bank begins empty: its vectors had another {', '.join(read_otherwise)}", stacklevel=2)
        self.engine.load_scaler_state(state["scaler"])
        self.size.load_state(state["micro_batch"])
        self.done, self.best, self.evaluated = state["step"], state["best"], state["evaluated"]
        self.skipped = state["skipped"]
        if self.dev and self.best and any(self.best.get(name) != value for name, value in self._measure().items()):
            self.best, self.evaluated = {}, 0  # an evaluation that is due at this step is made again
            warnings.warn(
                "the best evaluation so far was of another metric or dev set and no longer counts", stacklevel=2
            )
        if self.engine.is_main:
            print(f"resuming at step {self.done} from {checkpoint.folder}", file=sys.stderr)

    def run(self, signals: StopSignals) -> Path:
        try:
            if self.done and self._evaluation_due() and self.evaluated < self.done:
                self.evaluate()  # the evaluation of the checkpoint's own step broke off
                self.save()
            self.engine.reset_peak_memory()
            while self.done < self.total:
                self._steps_of_one_size(signals)
            self._finish()
        finally:
            self.log.close()
        return self.folder / "model"

    def _steps_of_one_size(self, signals: StopSignals) -> None:
        """Optimizer steps until the last, or until micro-batches of another size are to be made."""
        size = self.size.now
        with Prefetch(self.batches.step(step, size) for step in range(self.done, self.total)) as prepared:
            while self.done < self.total and self.size.now == size:
                began, waited = time.perf_counter(), prepared.waited
                micro_batches = next(prepared)
                try:
                    values = self.take_step(micro_batches)
                except NotFiniteError as error:
                    self.skip_step(error)
                else:
                    if values is None:
                        self.log.say(shrink(self.size, self.config, self.done, self._last_good))
                        continue
                    values["seconds"] = time.perf_counter() - began
                    values["waited"] = prepared.waited - waited
                    values["pairs_per_second"] = self.config.batch.global_batch_size / values["seconds"]
                    self.done += 1
                    if self._due(self.config.run.drift_steps):
                        values |= self.drift.measure()
                    self.log.step(values, self._due(self.config.run.log_steps))
                if self.size.grow_again(self.done):
                    self.log.say(f"step {self.done}: going on with {self.size}, to see whether they fit now")
                self.after_step(signals)

    def take_step(self, micro_batches: list[MicroBatch]) -> dict[str, Any] | None:
        """One optimizer step; returns what the log says of it, or None where memory ran out and nothing was changed."""
        engine, config = self.engine, self.config
        self.encoder.train()
        bank_fill, ages = self.bank.fill, self.bank.ages()
        engine.begin_step(self.done)
        losses = try_step(engine, METHODS[config.method], micro_batches, self.bank, self.loss)
        if losses is None:
            return None
        if spoiled := engine.not_finite():
            raise NotFiniteError(
                f"step {self.done + 1} ({_named(spoiled)}): an embedding is NaN or infinite, expected finite numbers"
            )
        means = self._finite_means(losses, micro_batches)
        engine.reduce_gradients()
        query_norm, passage_norm = engine.gradient_norms()
        tied = self.encoder.settings.tie_towers
        norm = query_norm if tied else math.hypot(query_norm, passage_norm)
        finite = math.isfinite(norm)
        if not finite and config.run.precision != "fp16":  # fp16 gradients may overflow: the scaler skips the step
            names = [name for batch in micro_batches for name in batch.query_ids]
            raise NotFiniteError(
                f"step {self.done + 1} ({_named(names)}): the gradient's norm is {norm}, expected a finite number"
            )
        rate = config.learning_rate() * learning_rate_factor(
            self.done, self.total, warmup_steps(config.optim, self.total), config.optim.schedule
        )
        set_learning_rate(engine.optimizer, rate)
        scale = engine.clip(norm, config.optim.max_grad_norm)
        engine.update()
        # a scale below 1 overflows nothing: the scaler would halve it without end, and take no step
        if not finite and engine.loss_scale() < 1:
            raise NotFiniteError(
                f"step {self.done + 1}: the gradient's norm is {norm} although the loss is scaled by {engine.loss_scale():g}, "
                "expected a finite number"
            )
        self.bank.end_step()
        return {
            "step": self.done + 1,
            "epoch": (self.done + 1) * config.batch.global_batch_size / self.examples if self.examples else None,
            **means,
            "learning_rate": rate if finite else 0.0,
            "grad_norm": norm if finite else None,
            "query_grad_norm": query_norm if finite and not tied else None,
            "passage_grad_norm": passage_norm if finite and not tied else None,
            "grad_norm_ratio": passage_norm / query_norm if finite and not tied and query_norm else None,
            "query_grad_norm_clipped": query_norm * scale if finite and not tied else None,
            "passage_grad_norm_clipped": passage_norm * scale if finite and not tied else None,
            "bank_fill": bank_fill,
            "bank_age_mean": ages.double().mean().item() if len(ages) else None,
            "bank_age_max": ages.max().item() if len(ages) else None,
            "micro_batches": len(micro_batches),
            "peak_memory": engine.peak_memory(),
        }

    def _finite_means(self, losses: list[LossValue], micro_batches: list[MicroBatch]) -> dict[str, float]:
        """What the step's losses say, each a mean over them; InputError where a loss is no finite number."""
        table = torch.stack([torch.stack([number.float() for number in _numbers(value)]) for value in losses]).tolist()
        for number, (loss, *_) in enumerate(table):
            if not math.isfinite(loss):
                blamed = micro_batches if len(table) == 1 else [micro_batches[number]]
                queries = [name for batch in blamed for name in batch.query_ids]
                raise NotFiniteError(
                    f"step {self.done + 1}, micro-batch {number + 1} of {len(table)} ({_named(queries)}): "
                    f"the loss is {loss}, expected a finite number"
                )
        pairs = [len(batch.ids.columns) for batch in micro_batches] if len(table) > 1 else [1]
        shares = [number / sum(pairs) for number in pairs]
        # the losses carry their shares already
        loss, negatives, masked, row_weight, *distilled = zip(*table, strict=True)
        return {
            "loss": sum(loss) / len(table),
            **({"distillation": sum(distilled[0]) / len(table)} if distilled else {}),
            "negatives": sum(share * number for share, number in zip(shares, negatives, strict=True)),
            "masked": sum(masked),
            "row_weight": sum(share * number for share, number in zip(shares, row_weight, strict=True)),
        }

    def skip_step(self, error: NotFiniteError) -> None:
        """Take back a step whose numbers are not finite; go on as if it had brought nothing where that is allowed, else raise."""
        self.engine.drop_step()
        self.bank.rollback()
        if self.skipped == self.config.skips():
            advice = (
                "--resume --run.on_nan skip:N goes on without such steps, a lower optim.learning_rate may have none"
            )
            raise InputError(f"{error}; {self._last_good()}; {advice}") from error
        self.bank.end_step()
        self.done += 1
        self.skipped += 1
        self.log.skipped(self.done, str(error), self.skipped)

    def _last_good(self) -> str:
        """Where the last good state is, which is saved first unless it was already."""
        if self.done and all(bool(torch.isfinite(parameter).all()) for parameter in self.encoder.parameters()):
            self.save()
        return self._newest_saved()

    def _newest_saved(self) -> str:
        saved = [path.name for path in all_checkpoints(self.folder)]
        if not saved:
            return "no checkpoint was written before"
        return f"the last good state is {self.folder / 'checkpoints' / saved[0]}"

    def after_step(self, signals: StopSignals) -> None:
        """Evaluate and save where it is time, and leave when a signal came."""
        last = self.done == self.total
        if self._evaluation_due():
            try:
                self.evaluate()
            except Exception:
                self.save()  # a resumed run evaluates this step first
                raise
        stop = self.engine.largest(signals.received)
        save = bool(last or stop or self._due(self.config.run.save_steps))
        if self.config.run.bank_check_steps and (save or self._due(self.config.run.bank_check_steps)):
            self._require_same_bank()
        if save:
            self.save()
        if stop and not last:
            raise Interrupted(stop, f"stopped after step {self.done}; continue with --resume")

    def _require_same_bank(self) -> None:
        if self.engine.world > 1 and (others := self.engine.differing(self.bank.fingerprint())):
            raise RuntimeError(
                f"step {self.done}: processes {', '.join(map(str, others))} of {self.engine.world} hold another bank than "
                f"process 0, expected the same on all; {self._newest_saved()}"
            )

    def _due(self, every: int) -> bool:
        return every > 0 and self.done % every == 0

    def _evaluation_due(self) -> bool:
        return self.dev is not None and (self.done == self.total or self._due(self.config.run.eval_steps))

    def evaluate(self) -> None:
        """Retrieve the dev set with the model as it stands; the best one so far is kept in ``model/``."""
        assert self.dev is not None
        name = self.config.run.metric
        settings = SearchSettings(batch_tokens=self.config.run.eval_batch_tokens)
        with self.engine.unmeasured():
            metrics = evaluate_encoder(SharedEncoder(self.engine), self.dev, DEV_DEPTH, settings)
        score = metrics["mean"][name]
        self.log.evaluation(self.done, metrics["mean"])
        self.evaluated = self.done
        better = not self.best or score > self.best["score"]
        self.log.say(f"step {self.done}: dev {name} {score:.4f}{' (best so far)' if better else ''}")
        if better:
            self.best = {"step": self.done, "score": score, **self._measure()}
            if self.engine.is_main:
                self.encoder.save(self.folder / "model")
                write_json(self.folder / DEV_METRICS_FILE, metrics)

    def _measure(self) -> dict[str, str]:
        """What the scores of two evaluations must share to be compared."""
        assert self.dev is not None
        return {"metric": self.config.run.metric, "dev": self.dev.fingerprint()}

    def save(self) -> None:
        """Write a checkpoint; every process waits for it."""
        if self.engine.is_main:
            state = {
                "step": self.done,
                "best": self.best,
                "evaluated": self.evaluated,
                "identity": self.identity,
                "skipped": self.skipped,
                "scaler": self.engine.scaler_state(),
                "micro_batch": self.size.state(),
            }
            save_checkpoint(
                self.folder,
                self.encoder,
                self.engine.optimizer.optimizer,
                self.bank,
                state,
                self.config.run.keep_checkpoints,
            )
        self.engine.barrier()

    def _finish(self) -> None:
        if self.dev is None and self.engine.is_main:
            self.encoder.save(self.folder / "model")
        self.engine.barrier()


def _numbers(value: LossValue) -> list[torch.Tensor]:
    """What the log is told of a loss; of its teacher's part, where it has one, last."""
    return [value.value, *(number for number in value[1:] if isinstance(number, torch.Tensor))]


def _named(queries: list[str]) -> str:
    """The first few of these queries, for a message."""
    return f"queries {', '.join(queries[:8])}{', …' if len(queries) > 8 else ''}"

"""Training loop, the same for every method: optimizer steps, log, evaluation and checkpoints."""

import math
import sys
import time
import warnings
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, NoReturn

import torch

from contaccum.batch import MicroBatch
from contaccum.config import METRIC_CUTS, TrainConfig, check_total, parse_bytes, to_yaml, validate
from contaccum.config.commands import SearchConfig
from contaccum.config.load import CONFIG_VERSION
from contaccum.data.dataset import load_training, open_dataset
from contaccum.data.retrieval_set import RetrievalSet
from contaccum.encoder import SETTINGS_FILE
from contaccum.errors import InputError, Interrupted, NotFiniteError
from contaccum.evaluation.evaluate import evaluate
from contaccum.methods import METHODS
from contaccum.methods.loss import LossValue
from contaccum.runtime.engine import Engine
from contaccum.runtime.files import write_json, write_text
from contaccum.runtime.launch import StopSignals, process_place, refuse_launcher_options
from contaccum.runtime.prefetch import prefetch
from contaccum.runtime.processes import training_defaults
from contaccum.training import parts, run_folder
from contaccum.training.checkpoint import restore, save_checkpoint
from contaccum.training.log import Drift, RunLog, mean_losses, named_queries, write_environment
from contaccum.training.out_of_memory import advice, build_size, out_of_memory, shrink
from contaccum.training.run_folder import newest_checkpoint

DEV_DEPTH = max(METRIC_CUTS)  # number of passages to retrieve for each dev query
ENGINE_SETTINGS = ("device", "precision", "tf32", "trackers", "timeout_minutes")


def train(config: TrainConfig) -> Path:
    """Train a model with the settings ``config``. Return the folder of the trained model, ``output_dir/model``.

    Raises InputError for errors that the user can fix. In training, Ctrl-C or SIGTERM saves a checkpoint and raises Interrupted.
    """
    validate(config, process_place()[1])
    refuse_launcher_options(config.run.precision)
    parts.check_guide(config)
    with training_defaults(), StopSignals() as signals, run_folder.claimed_folder(config):
        settings = {name: getattr(config.run, name) for name in ENGINE_SETTINGS}
        settings |= {"replay_share": config.replay_share}
        engine = Engine(seed=config.seed, tracker_dir=config.output_dir, **settings)
        try:
            if config.run.memory_budget is not None:
                engine.limit_memory(parse_bytes(config.run.memory_budget))
            training = Training(config, engine)
            with signals.deferred():
                training.run(signals)
        except BaseException as error:
            # with several processes, do not close the group: the others could fail before this process reports its error
            if engine.world == 1:
                with suppress(Exception):  # a tracker that could not start cannot end
                    engine.close()
            if sentence := advice(error, engine.world):
                raise InputError(sentence) from error
            raise
        engine.close()
        return training.folder / "model"


class Training:
    """One training run. It starts at the newest checkpoint if ``resume`` is set and a checkpoint exists, else at step 0."""

    unlogged = (0, 0.0, 0.0)  # since the last logged step: steps, their seconds, and seconds of waiting for data

    def __init__(self, config: TrainConfig, engine: Engine) -> None:
        self.config, self.engine = config, engine
        self.folder = Path(config.output_dir)
        checkpoint = newest_checkpoint(self.folder) if config.resume else None
        if checkpoint:
            run_folder.refuse_other_checkpoint(config)
        with engine.main_first():
            train_set = load_training(config.data, config.distils)
            dev = config.data.dev and open_dataset(config.data.dev, config.data.dev_split, config.data.policy)
            self.dev: RetrievalSet | None = dev.retrieval_set if dev else None
        step = str(checkpoint and checkpoint.state["step"])
        for name, value in {"checkpoint": step, "config": to_yaml(config), "data": train_set.fingerprint}.items():
            if others := engine.differing(value):
                advised = "Every machine needs the same config, data and output_dir."
                raise InputError(f"{name} is not the same in all processes ({others}). {advised}")
        sharded = config.run.sharding == "fsdp"
        device = torch.device("cpu") if sharded else engine.device  # a device may be too small for all weights
        if checkpoint:
            self.encoder, changed = parts.saved_encoder(config, checkpoint.folder / "model", device)
        else:
            self.encoder, changed = parts.build_encoder(config, train_set, device), []
        if sharded:
            engine.shard(self.encoder, config.run.cpu_offload)
        parts.apply_switches(self.encoder, config)
        self.batches = parts.build_batches(config, engine, self.encoder, train_set)
        self.micro_batch_size = build_size(config, engine, self.batches)
        self.loss = parts.build_loss(config, self.encoder, parts.build_rules(config, engine, train_set))
        self.bank = parts.build_bank(config, engine, self.encoder, self.loss)
        self.drift = Drift(engine, self.bank, self.batches.clone(), self.micro_batch_size)
        self.examples = len(train_set.queries)
        epochs = config.optim.epochs * self.examples / config.batch.global_batch_size
        self.total = config.optim.max_steps or max(1, math.ceil(epochs))
        check_total(config, self.total)
        self.identity = run_folder.run_identity(config, engine, self.encoder, train_set, self.dev)
        optimizer = parts.make_optimizer(self.encoder, config.optim)
        self.done = 0  # number of finished steps
        self.best: dict[str, Any] = {}
        self.evaluated = 0  # step of the last evaluation
        if checkpoint:
            self._resume(checkpoint, optimizer, changed)
        engine.prepare(self.encoder, optimizer)
        if engine.is_main:
            write_text(self.folder / run_folder.CONFIG_FILE, f"format_version: {CONFIG_VERSION}\n{to_yaml(config)}")
            if self.done < self.total or not checkpoint:
                write_environment(self.folder, engine, resumed=bool(checkpoint))
        self.log = RunLog(engine, self.folder, self.total, self.done)
        engine.start_trackers({"method": config.method, "seed": config.seed})

    def _resume(self, checkpoint: run_folder.Checkpoint, optimizer: torch.optim.Optimizer, changed: list[str]) -> None:
        """Continue from a checkpoint.

        changed: encoder settings that differ from the checkpoint. If one of them or the data changed, the bank starts empty.
        """
        state = checkpoint.state
        where = f"{checkpoint.folder}: the conditions of training changed"
        changes = run_folder.identity_differences(state["identity"], self.identity)
        run_folder.refuse_changes(where, changes, self.config.allow_changes)
        restore(checkpoint, self.encoder, optimizer, self.bank)
        if state["identity"]["data"] != self.identity["data"]:
            changed = [*changed, "data"]  # the bank contains row numbers of the old data
        if changed and self.bank.stored:
            self.bank.empty()
            warnings.warn(f"the bank starts empty, because settings changed: {', '.join(changed)}", stacklevel=2)
        self.engine.load_scaler_state(state["scaler"])
        self.micro_batch_size.load_state(state["micro_batch"])
        self.done, self.best, self.evaluated = state["step"], state["best"], state["evaluated"]
        if self.dev and self.best:
            same_dev = self.best["dev"] == self.dev.fingerprint()
            saved = self.engine.from_main(str((self.folder / "model" / SETTINGS_FILE).is_file()))
            if saved == "False" or not same_dev or self.best["metric"] != self.config.run.metric:
                self.best, self.evaluated = {}, 0  # evaluate this step again if an evaluation is due
                why = "the metric or the dev set changed" if saved == "True" else "its model was deleted"
                warnings.warn(f"the best score so far is ignored: {why}", stacklevel=2)
        if self.engine.is_main:
            print(f"resuming at step {self.done} from {checkpoint.folder}", file=sys.stderr)

    def run(self, signals: StopSignals) -> None:
        """Take all remaining optimizer steps. Log, evaluate and save at the steps that the config sets."""
        with closing(self.log):
            if self.done and self._evaluation_due() and self.evaluated < self.done:
                self.evaluate()  # the evaluation of this step failed, or its score cannot be compared any more
                self.save()
            self.engine.free_memory()  # memory that was used to read and tokenize the data
            self.engine.reset_peak_memory()
            while self.done < self.total:
                size = self.micro_batch_size.now  # changes only if memory runs out
                batches = (self._step_batches(step, size) for step in range(self.done, self.total))
                with closing(prefetch(batches)) as prepared:
                    while self.done < self.total and self.micro_batch_size.now == size:
                        start = time.perf_counter()
                        micro_batches = next(prepared)
                        waited = time.perf_counter() - start
                        try:
                            values = self.take_step(micro_batches)
                        except NotFiniteError as error:
                            self._stop_at_nan(error)
                        if values is None:
                            self.log.say(shrink(self.micro_batch_size, self.config, self.done, self._save_if_good))
                            continue  # repeat the step with smaller micro-batches
                        self._finish_step(values, time.perf_counter() - start, waited)
                        self.after_step(signals)
            if self.dev is None:
                self._save_model()
            self.engine.barrier()

    def _step_batches(self, step: int, size: int) -> list[MicroBatch]:
        batches, on_gpu = self.batches.step(step, size), self.engine.device.type == "cuda"
        return [batch.pinned() for batch in batches] if on_gpu else batches

    def take_step(self, micro_batches: list[MicroBatch]) -> dict[str, Any] | None:
        """Take one optimizer step and return the values to log. If memory runs out, undo the step and return None."""
        engine, method = self.engine, METHODS[self.config.method]
        self.encoder.train()
        bank_fill, ages = self.bank.fill, self.bank.ages()
        engine.begin_step(self.done)
        losses: list[LossValue] = []
        failed = False
        try:
            losses = method(engine, micro_batches, self.bank, self.loss)
        except Exception as error:
            if not out_of_memory(error) or engine.world > 1:  # other processes wait for this one
                raise
            failed = True
        # the traceback keeps the failed pass's tensors alive until the except block ends, so free memory only here
        if failed:
            engine.drop_step()
            engine.free_memory()
            self.bank.rollback()
            return None
        if ids := engine.not_finite():
            raise NotFiniteError(f"step {self.done + 1} ({named_queries(ids)}): an embedding contains NaN or infinity")
        means = mean_losses(losses, micro_batches, self.done + 1)
        engine.reduce_gradients()
        norms = self._update(micro_batches)
        self.bank.end_step()
        return {
            "step": self.done + 1,
            "epoch": (self.done + 1) * self.config.batch.global_batch_size / self.examples,
            **means,
            **norms,
            "bank_fill": bank_fill,
            "bank_age_mean": ages.double().mean().item() if len(ages) else None,
            "bank_age_max": ages.max().item() if len(ages) else None,
            "micro_batches": len(micro_batches),
            "peak_memory": engine.peak_memory(),
        }

    def _update(self, micro_batches: list[MicroBatch]) -> dict[str, float | None]:
        engine, optim = self.engine, self.config.optim
        query_norm, passage_norm = engine.gradient_norms()
        tied = self.encoder.settings.tie_towers
        norm = query_norm if tied else math.hypot(query_norm, passage_norm)
        finite = math.isfinite(norm)
        if not finite and self.config.run.precision != "fp16":  # in fp16, the loss scaler skips such a step
            queries = named_queries([name for batch in micro_batches for name in batch.query_ids])
            raise NotFiniteError(f"step {self.done + 1} ({queries}): the gradient norm is {norm}, not a finite number")
        warmup = parts.warmup_steps(optim, self.total)
        rate = self.config.learning_rate() * parts.learning_rate_factor(self.done, self.total, warmup, optim.schedule)
        parts.set_learning_rate(engine.optimizer, rate)
        scale = engine.clip(norm, optim.max_grad_norm)
        engine.update()
        # a loss scale below 1 cannot cause an overflow, and the scaler would halve it forever without taking a step
        if not finite and engine.scaler.get_scale() < 1:
            raise NotFiniteError(
                f"step {self.done + 1}: the gradient norm is {norm}, not a finite number. The loss scale "
                f"{engine.scaler.get_scale():g} is not the cause, because it is below 1"
            )
        norms = {
            "query_grad_norm": query_norm,
            "passage_grad_norm": passage_norm,
            "grad_norm_ratio": passage_norm / query_norm if query_norm else None,
            "query_grad_norm_clipped": query_norm * scale,
            "passage_grad_norm_clipped": passage_norm * scale,
        }
        norms = norms if finite and not tied else dict.fromkeys(norms)
        return {"learning_rate": rate if finite else 0.0, "grad_norm": norm if finite else None, **norms}

    def _finish_step(self, values: dict[str, Any], seconds: float, waited: float) -> None:
        """Count the step as done and log its values. waited: seconds that the step waited for data."""
        # masks by score may leave a step without negatives
        by_score = self.config.loss.guide is not None or self.config.loss.false_negative_margin is not None
        if self.done == 0 and values["negatives"] == 0 and not by_score and self.engine.is_main:
            warnings.warn(
                "step 1: no query has a negative, so nothing is learned. Use more training queries, or a batch.micro_batch_size "
                "above 1.",
                stacklevel=2,
            )
        count, all_seconds, all_waited = self.unlogged
        self.unlogged = count, seconds, waited = count + 1, all_seconds + seconds, all_waited + waited
        speed = self.config.batch.global_batch_size * count / seconds
        values |= {"seconds": seconds / count, "waited": waited / count, "pairs_per_second": speed}
        self.done += 1
        if self._due(self.config.run.drift_steps):
            values |= self.drift.measure()
        if write := self._due(self.config.run.log_steps) or self.done == self.total:
            self.unlogged = (0, 0.0, 0.0)
        self.log.step(values, write)

    def _stop_at_nan(self, error: NotFiniteError) -> NoReturn:
        """Undo a step with NaN or infinity, save the state before it, and raise InputError."""
        self.engine.drop_step()
        self.bank.rollback()
        raise InputError(
            f"{error}; {self._save_if_good()}. Continue with --resume --allow_changes true and a lower "
            "optim.learning_rate."
        ) from error

    def _save_if_good(self) -> str:
        """Save a checkpoint if all weights are finite. Return a text about the newest checkpoint, for an error message."""
        if self.done and self.engine.finite_weights():
            self.save()
        return run_folder.last_good_state(self.folder)

    def after_step(self, signals: StopSignals) -> None:
        """Evaluate the model and save a checkpoint, if they are due. After a signal, save and raise Interrupted."""
        engine, run, last = self.engine, self.config.run, self.done == self.total
        if engine.is_main:
            run_folder.require_lock(self.folder)
        if self._evaluation_due():
            try:
                self.evaluate()
            except Exception:
                self.save()  # a resumed run first evaluates this step again
                raise
        stop = engine.largest(signals.received)
        save = bool(last or stop or self._due(run.save_steps))
        check = engine.world > 1 and run.bank_check_steps and (save or self._due(run.bank_check_steps))
        if check and (others := engine.differing(self.bank.fingerprint())):
            good = run_folder.last_good_state(self.folder)
            raise RuntimeError(f"step {self.done}: the bank is not the same in all processes ({others}); {good}")
        if save:
            self.save()
        if stop and not last:
            raise Interrupted(stop, f"stopped after step {self.done}; continue with --resume")

    def _due(self, every: int) -> bool:
        return every > 0 and self.done % every == 0

    def _evaluation_due(self) -> bool:
        return self.dev is not None and (self.done >= self.total or self._due(self.config.run.eval_steps))

    def evaluate(self) -> None:
        """Evaluate the current model on the dev set. If its score is the best of the run so far, save the model to ``model/``."""
        assert self.dev is not None
        name = self.config.run.metric
        settings = SearchConfig(batch_tokens=self.config.run.eval_batch_tokens)
        with self.engine.unmeasured(), self.engine.accelerator.autocast():
            metrics = evaluate(self.encoder, self.dev, k=DEV_DEPTH, settings=settings, group=self.engine)
        score = metrics["mean"][name]
        better = not self.best or score > self.best["score"]
        if better:
            self._save_model()
            if self.engine.is_main:
                write_json(self.folder / run_folder.DEV_METRICS_FILE, metrics)
            self.best = {"step": self.done, "score": score, "metric": name, "dev": self.dev.fingerprint()}
        self.log.evaluation(self.done, metrics["mean"])
        self.evaluated = self.done  # not earlier: if saving the model fails, a resumed run evaluates this step again
        self.log.say(f"step {self.done}: dev {name} {score:.4f}{' (best so far)' if better else ''}")

    def _save_model(self) -> None:
        if self.engine.is_main or self.engine.sharded:
            self.encoder.save(self.folder / "model")

    def save(self) -> None:
        """Save a checkpoint in the main process; with sharding, in all processes. All processes wait until it is complete."""
        if self.engine.is_main or self.engine.sharded:
            counted = {name: getattr(self, name) for name in ("best", "evaluated", "identity")}
            state = counted | {"scaler": self.engine.scaler.state_dict(), "micro_batch": self.micro_batch_size.state()}
            optimizer, keep = self.engine.optimizer.optimizer, self.config.run.keep_checkpoints
            save_checkpoint(self.folder, self.encoder, optimizer, self.bank, {"step": self.done, **state}, keep)
        self.engine.barrier()

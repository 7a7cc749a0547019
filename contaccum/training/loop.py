"""Training loop, the same for every method: optimizer steps, log, evaluation and checkpoints."""

import itertools
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from contaccum.batch import MicroBatch
from contaccum.config import TrainConfig, parse_bytes, to_yaml, validate
from contaccum.config.load import CONFIG_VERSION
from contaccum.data.dataset import load_training, open_dataset, require_other_dev
from contaccum.data.pairs import pairs_file
from contaccum.data.train_set import TrainSet
from contaccum.encoder import SETTINGS_FILE
from contaccum.errors import InputError, Interrupted, NotFiniteError
from contaccum.evaluation.metrics import Metrics
from contaccum.methods import METHODS
from contaccum.methods.loss import LossValue
from contaccum.runtime.engine import Engine
from contaccum.runtime.files import sha256_of, write_json, write_text
from contaccum.runtime.launch import StopSignals, is_main, process_place, refuse_ignored_launch
from contaccum.runtime.prefetch import prefetch
from contaccum.runtime.processes import training_defaults
from contaccum.training import automatic, messages, parts, run_folder
from contaccum.training.checkpoint import (
    lacks_negatives,
    restore_bank,
    restore_optimizer,
    save_checkpoint,
)
from contaccum.training.dev_evaluator import DevEvaluator
from contaccum.training.drift import Drift
from contaccum.training.log import RunLog, mean_losses, named_queries, write_environment
from contaccum.training.out_of_memory import advice, build_size, out_of_memory, shrink
from contaccum.training.run_folder import newest_checkpoint
from contaccum.training.trackers import check_trackers

SAVE_SECONDS = 600.0  # maximum time between two checkpoints
BANK_CHECK_STEPS = 100  # steps between two checks that the banks of all processes are equal


def train(
    config: TrainConfig,
    pairs: Iterable[Any] | None = None,
    after_step: "Callable[[Training], None] | None" = None,
) -> Path:
    """Train a model with the settings ``config``.

    Return the folder of the trained model, ``output_dir/model``.

    pairs: training data in memory instead of ``data.train``: tuples, dicts, a
    ``datasets.Dataset`` or a DataFrame of query, positive and hard negatives (see ``pairs_file``).
    after_step: function that is called after each optimizer step. It may change the number of
    steps with ``Training.set_total``, for example to end at a given time; of several processes,
    all of which need the function, the largest number counts.

    Raises InputError for errors that the user can fix. In training, Ctrl-C or SIGTERM saves a
    checkpoint and raises Interrupted.
    """
    if pairs is not None:
        if config.data.train or config.data.mixture:
            raise InputError(
                "data.train or data.mixture is set, but pairs are given too; use only one of them"
            )
        config = replace(config, data=replace(config.data, train=str(pairs_file(pairs))))
    config = replace(config, output_dir=os.path.expanduser(config.output_dir))
    config = automatic.choose_before_loading(automatic.with_recorded_choices(config))
    run = config.run
    validate(config, process_place()[1])
    refuse_ignored_launch(run.precision)
    check_trackers(run.trackers)
    parts.check_guide(config)
    with training_defaults(), StopSignals() as signals, run_folder.claimed_folder(config):
        finished = run_folder.finished_identity(config)
        if finished is not None:
            train_set, dev = load_data(config)
            now = run_folder.run_identity(config, process_place()[1], train_set, dev.dev_set)
            run_folder.refuse_changed_end(config, finished, now)
            if is_main():
                print("this run has ended; nothing is trained", file=sys.stderr)
            return Path(config.output_dir) / "model"
        engine = Engine(
            device=run.device,
            precision=run.precision,
            tf32=run.tf32,
            seed=config.seed,
            replay_share=config.replay_share,
            timeout_minutes=run.timeout_minutes,
        )
        try:
            if run.memory_budget is not None:
                engine.limit_memory(parse_bytes(run.memory_budget))
            training = Training(config, engine, signals, after_step)
            with signals.deferred(), closing(training.log):
                training.run()
        except BaseException as error:
            # with several processes, do not close the group: the others could fail before this
            # process reports its error
            if engine.world == 1:
                engine.close()
            if sentence := advice(error, engine.world):
                raise InputError(sentence) from error
            raise
        engine.close()
        return training.folder / "model"


def load_data(config: TrainConfig) -> tuple[TrainSet, DevEvaluator]:
    """Load the training set and the dev set. Both are in the cache after the first call."""
    data = config.data
    require_other_dev(data)
    train_set = load_training(data, config.distils)
    dev_set = None
    if data.dev:
        dev_set = open_dataset(data.dev, data.dev_split, data.policy).retrieval_set
    return train_set, DevEvaluator(dev_set, data.dev_passages, config.run)


class Training:
    """One training run.

    It starts at the newest checkpoint if ``resume`` is set and a checkpoint exists, else at step 0.
    """

    def __init__(
        self,
        config: TrainConfig,
        engine: Engine,
        signals: StopSignals,
        after_step: "Callable[[Training], None] | None" = None,
    ) -> None:
        self.engine, self.signals, self.after_step = engine, signals, after_step
        self.folder = Path(config.output_dir)
        checkpoint = newest_checkpoint(self.folder) if config.resume else None

        # data
        with engine.main_first():  # process 0 fills the cache, and the others read it
            train_set, self.dev = load_data(config)
        compared = {
            "checkpoint": str(checkpoint.state["step"]) if checkpoint else "",
            "config": to_yaml(config),
            "data": train_set.fingerprint,
        }
        for name, value in compared.items():
            if others := engine.differing(value):
                raise InputError(
                    f"{name} is not the same in all processes ({others}). Every machine needs the "
                    "same config, data and output_dir."
                )

        # encoder
        sharded = config.run.sharding == "fsdp"
        # a device may be too small for all weights
        device = torch.device("cpu") if sharded else engine.device
        if checkpoint:
            self.encoder = parts.load_encoder(config, checkpoint.folder / "model", device)
        else:
            self.encoder = parts.build_encoder(config, train_set, device)
        if sharded:
            engine.shard(self.encoder, config.run.cpu_offload)
        parts.apply_switches(self.encoder, config)
        config = automatic.choose(config, engine, self.encoder)
        self.config = config
        optimizer = parts.make_optimizer(self.encoder, config.optim)

        # batches, loss and bank
        self.batches = parts.build_batches(config, engine, self.encoder, train_set)
        self.micro_batch_size = build_size(config, engine, self.batches)
        missing = checkpoint is not None and lacks_negatives(checkpoint)
        rules = parts.build_rules(config, engine, train_set, missing)
        self.loss = parts.build_loss(config, self.encoder, rules)
        self.bank = parts.build_bank(config, engine, self.encoder, self.loss)
        self.drift = Drift(
            engine, self.bank, self.batches, self.micro_batch_size, config.spec.two_pass
        )

        # number of steps
        self.examples = len(train_set.queries)
        self.total = run_folder.total_steps(config, self.examples)

        # state of the run
        self.identity = run_folder.run_identity(config, engine.world, train_set, self.dev.dev_set)
        self.done = 0  # number of finished steps
        self.saved = time.monotonic()  # time of the last checkpoint
        self.saved_step = 0  # step of the last checkpoint
        # work of the current step for the progress lines, in forward passes of a token: expected,
        # and done so far
        self.step_work = 0.0
        self.work_done = 0
        self.step_tokens = 0
        engine.before_pass = self.before_pass
        if checkpoint:
            self.resume(checkpoint, optimizer)
        engine.prepare(self.encoder, optimizer)
        if engine.is_main:
            write_text(
                self.folder / run_folder.CONFIG_FILE,
                # a run that starts from this file is another one, and does not resume
                f"format_version: {CONFIG_VERSION}\n"
                f"{to_yaml(replace(config, resume=False, allow_changes=False))}",
            )
            if self.done < self.total or not checkpoint:
                write_environment(self.folder, engine)
        self.log = RunLog(engine.is_main, config, self.total, self.done, self.evaluates_again())
        settings = self.encoder.settings
        truncated = self.batches.share_of_length(settings.max_passage_length)
        for line in messages.first_lines(
            config, train_set, self.dev.dev_set, settings, truncated, self.total, self.done
        ):
            self.log.say(line)

    def resume(self, checkpoint: run_folder.Checkpoint, optimizer: torch.optim.Optimizer) -> None:
        """Continue from a checkpoint. If the data changed, the bank starts empty."""
        config, state = self.config, checkpoint.state
        run_folder.refuse_other_identity(
            checkpoint.folder, state["identity"], self.identity, config.allow_changes
        )
        restore_optimizer(checkpoint, self.encoder, optimizer)
        self.engine.load_scaler_state(state["scaler"])
        self.done = self.saved_step = state["step"]
        size = self.micro_batch_size
        size.load_state(state["micro_batch"], self.done)
        if size.level and self.engine.is_main:
            print(
                f"continuing with {size} instead of {size.sizes[0]}, because memory ran out before",
                file=sys.stderr,
            )
        model = self._model_hash() if self.dev.dev_set and state["best"] else ""
        if why := self.dev.load_state(state, model):
            warnings.warn(f"the best score so far is ignored: {why}", stacklevel=2)

        same_data = state["identity"]["data"] == self.identity["data"]
        if same_data and (self.bank.size or state["bank"]["size"]):
            restore_bank(checkpoint, self.bank)
        else:  # there is no bank, or the saved one contains row numbers of other data
            for bank in (self.bank, *self.bank.truncated):
                bank.step = self.done
            if self.bank.size and state["bank"]["stored"]:
                warnings.warn("the bank starts empty, because the data changed", stacklevel=2)

        if self.engine.is_main:
            print(f"resuming at step {self.done} from {checkpoint.folder}", file=sys.stderr)

    def run(self) -> None:
        """Take all remaining optimizer steps.

        Log, evaluate and save at the steps that the config sets.
        """
        config, engine, bank = self.config, self.engine, self.bank
        if self.done == 0 and self.dev.dev_set and config.run.eval_steps:
            self.evaluate_before_training()
        elif self.evaluates_again():
            self.evaluate()
            self.save()
        engine.free_memory()  # memory that was used to read and tokenize the data
        engine.reset_peak_memory()
        prepared = self.prefetch_steps()
        try:
            while self.done < self.total and not self.dev.stops_early():
                # take one step: forward and backward passes, and the update of the weights
                start = time.perf_counter()
                micro_batches = next(prepared)
                got_data = time.perf_counter()
                try:
                    values = self.take_step(micro_batches)
                except NotFiniteError as error:
                    self.undo_step()
                    raise InputError(
                        f"{error}; {self.save_good_state()}. Continue with --resume "
                        "--allow_changes true and a lower optim.learning_rate."
                    ) from error
                if values is None:  # out of memory: repeat the step with smaller micro-batches
                    prepared.close()
                    self.log.say(
                        shrink(self.micro_batch_size, config, self.done, self.save_good_state)
                    )
                    prepared = self.prefetch_steps()
                    continue
                self.done += 1
                seconds = time.perf_counter() - start
                if self.after_step is not None:
                    self.after_step(self)
                    self.set_total(engine.largest(self.total))  # clocks of processes differ

                # log
                values["seconds"] = seconds
                values["waited"] = got_data - start  # for data
                values["pairs_per_second"] = config.batch.global_batch_size / seconds
                if self.done_every(config.run.drift_steps):
                    values |= self.drift.measure()
                self.log.step(values, self.dev.evaluations_left(self.total))

                # evaluate
                if self.dev.due(self.done, self.total):
                    try:
                        self.evaluate()
                    except Exception:
                        if engine.world == 1:  # other processes wait for this one
                            self.save()  # a resumed run first evaluates this step again
                        raise

                # save, and stop after a signal to any process
                last = self.done == self.total or self.dev.stops_early()
                stop = engine.largest(self.signals.received)
                save = self.checkpoint_due(last) or stop > 0
                check_bank = engine.world > 1 and (save or self.done_every(BANK_CHECK_STEPS))
                if check_bank and (others := engine.differing(bank.fingerprint())):
                    good = run_folder.last_good_state(self.folder)
                    raise RuntimeError(
                        f"step {self.done}: the bank is not the same in all processes ({others}); "
                        f"{good}"
                    )
                if save:
                    self.save()
                if stop and not last:
                    raise self.interrupted(stop)
        finally:
            prepared.close()
        self.finish()

    def evaluates_again(self) -> bool:
        """Return whether a resumed run first evaluates the model that it starts with.

        The evaluation failed, its score cannot be compared any more, or its model is lost.
        """
        return self.dev.due(self.done, self.total) and self.dev.evaluated < self.done

    def finish(self) -> None:
        """End a run: its model is saved, and checkpoints that nobody asked for are deleted."""
        start, best = self.dev.start, self.dev.best
        if self.dev.dev_set is None:
            self._save_model()
        elif start and best["score"] <= start["score"]:
            self.log.say(
                f"training did not help: dev {self.dev.label} is {start['score']:.4f} before "
                f"training and {best['score']:.4f} at best after it. Try a lower "
                "optim.learning_rate, or keep the model that you started from."
            )
        self.engine.barrier()
        if self.engine.is_main and self.config.run.keep_checkpoints is None:
            run_folder.finish(self.folder, self.total, self.examples, self.identity, self.done)

    def prefetch_steps(self) -> Generator[list[MicroBatch], None, None]:
        """Yield the micro-batches of each remaining step.

        A background thread prepares the next steps.
        """
        size = self.micro_batch_size.now
        # ``after_step`` may raise the number of steps
        steps = itertools.count(self.done) if self.after_step else range(self.done, self.total)
        return prefetch(self.batches.step(step, size) for step in steps)

    def set_total(self, total: int) -> None:
        """Change the number of steps. The learning rate then falls to 0 at the new end."""
        self.total = max(self.done, total)
        if self.engine.is_main:
            self.log.total = self.log.bar.total = self.total

    def take_step(self, micro_batches: list[MicroBatch]) -> dict[str, Any] | None:
        """Take one optimizer step and return the values to log.

        None if memory ran out and the step was undone.

        Raises NotFiniteError before the weights change if an embedding, a loss or a gradient is NaN
        or infinite.
        """
        config, engine, bank = self.config, self.engine, self.bank
        step = self.done + 1
        bank_fill = bank.fill  # before this step's pairs
        ages = bank.ages()
        sum_and_max_age = torch.stack([ages.sum(), ages.max()]) if len(ages) else None

        losses = self.compute_gradients(micro_batches)
        if losses is None:
            return None
        means = self.check_losses(losses, micro_batches)

        # gradients: sum them over the processes, measure and clip them, and update the weights
        engine.reduce_gradients()
        query_norm, passage_norm, norm = engine.gradient_norms()
        age_mean, age_max = None, None
        if sum_and_max_age is not None:  # read before the update: it waits for the device
            age_sum, age_max = sum_and_max_age.tolist()
            age_mean = age_sum / len(ages)
        finite = math.isfinite(norm)
        # in fp16, the loss scaler skips such a step
        if not finite and config.run.precision != "fp16":
            queries = named_queries([name for batch in micro_batches for name in batch.query_ids])
            raise NotFiniteError(
                f"step {step} ({queries}): the gradient norm is {norm}, not a finite number"
            )
        rate, scale = self.update_weights(norm)
        bank.end_step()

        norms: dict[str, float | None] = {
            "query_grad_norm": query_norm,
            "passage_grad_norm": passage_norm,
            "grad_norm_ratio": passage_norm / query_norm if query_norm else None,
            "query_grad_norm_clipped": query_norm * scale,
            "passage_grad_norm_clipped": passage_norm * scale,
        }
        if self.encoder.settings.tie_towers or not finite:
            norms = dict.fromkeys(norms)
        return {
            "step": step,
            "epoch": step * config.batch.global_batch_size / self.examples,
            **means,
            "learning_rate": rate if finite else 0.0,
            "grad_norm": norm if finite else None,
            **norms,
            "bank_fill": bank_fill,
            "bank_age_mean": age_mean,
            "bank_age_max": age_max,
            "micro_batches": len(micro_batches),
            "passes": self.work_done / self.step_tokens * config.batch.global_batch_size,
            "peak_memory": engine.peak_memory(),
        }

    def check_losses(
        self, losses: list[LossValue], micro_batches: list[MicroBatch]
    ) -> dict[str, Any]:
        """Return the mean losses of the step, to log.

        Raises NotFiniteError if an embedding or a loss is NaN or infinite. Warns if the first step
        has no negatives.
        """
        config, step = self.config, self.done + 1
        if ids := self.engine.not_finite():
            others = "" if self.engine.world == 1 else ", or those of other processes"
            raise NotFiniteError(
                f"step {step} ({named_queries(ids)}{others}): an embedding contains NaN or infinity"
            )
        means = mean_losses(losses, micro_batches, step)
        # masks by score may leave a step without negatives
        by_score = config.loss.guide is not None or config.loss.false_negative_margin is not None
        if step == 1 and means["negatives"] == 0 and not by_score and self.engine.is_main:
            warnings.warn(
                "step 1: no query has a negative, so nothing is learned. Use more training "
                "queries, or a batch.micro_batch_size above 1.",
                stacklevel=2,
            )
        return means

    def update_weights(self, norm: float) -> tuple[float, float]:
        """Clip the gradients, whose joint norm is ``norm``, and update the weights with them.

        Returns the learning rate and the factor of clipping. Raises NotFiniteError if the norm is
        not finite and a lower loss scale of fp16 cannot help.
        """
        engine, optim = self.engine, self.config.optim
        scale = engine.clip(norm, optim.max_grad_norm)
        warmup = parts.step_count(optim.warmup_steps, self.total)
        factor = parts.learning_rate_factor(self.done, self.total, warmup, optim.schedule)
        rate = optim.learning_rate * factor
        parts.set_learning_rate(engine.optimizer, rate)
        engine.update()
        # a loss scale below 1 cannot cause an overflow, and the scaler would halve it forever
        # without taking a step
        if not math.isfinite(norm) and engine.scaler.get_scale() < 1:
            raise NotFiniteError(
                f"step {self.done + 1}: the gradient norm is {norm}, not a finite number. The loss "
                f"scale {engine.scaler.get_scale():g} is not the cause, because it is below 1"
            )
        return rate, scale

    def compute_gradients(self, micro_batches: list[MicroBatch]) -> list[LossValue] | None:
        """Make the forward and backward passes of a step: its loss, or one for each micro-batch.

        If memory runs out, undo the step and return None. After a signal, undo the step, save the
        one before it, and raise Interrupted.
        """
        config, engine = self.config, self.engine
        pairs = [len(batch.query_ids) for batch in micro_batches]
        self.step_tokens = sum(batch.tokens for batch in micro_batches)
        # the last micro-batch of a two-pass method keeps its graph
        price = config.spec.cost(sum(pairs), pairs[-1], config.replay_share)
        self.step_work = self.step_tokens * price
        self.work_done = 0
        if not self.encoder.training:  # after an evaluation; the call visits all modules
            self.encoder.train()
        engine.begin_step(self.done)
        try:
            return METHODS[config.method](engine, micro_batches, self.bank, self.loss)
        except Interrupted:  # by before_pass
            self.undo_step()
            if self.done > self.saved_step:
                self.save()
            raise
        except Exception as error:
            if not out_of_memory(error) or engine.world > 1:  # other processes wait for this one
                raise
        # the traceback keeps the failed pass's tensors alive until the except block ends, so free
        # memory only here
        self.undo_step()
        engine.free_memory()
        return None

    def undo_step(self) -> None:
        """Forget the gradients of the current step, and restore the bank as it was before it."""
        self.engine.drop_step()
        self.bank.rollback()

    def before_pass(self, tokens: int, graph: bool) -> None:
        """Stop a long step after a signal, and let the log print how much of it is done.

        Several processes finish the step, because the others would wait for this one. tokens:
        tokens of the next pass. graph: whether a backward pass follows, which costs as much as 2
        forward passes.
        """
        if self.signals.received and self.engine.world == 1:
            raise self.interrupted(self.signals.received)
        done = self.done + self.work_done / self.step_work
        self.log.inside_step(done, self.dev.evaluations_left(self.total))
        self.work_done += tokens * (3 if graph else 1)

    def interrupted(self, number: int) -> Interrupted:
        return Interrupted(number, f"stopped after step {self.done}; continue with --resume")

    def done_every(self, steps: float) -> bool:
        """Return whether something is due that happens every ``steps`` steps.

        steps: number of steps, or below 1 a share of the run. 0: never.
        """
        return steps > 0 and self.done % parts.step_count(steps, self.total) == 0

    def checkpoint_due(self, last: bool) -> bool:
        """Return whether to save a checkpoint after this step, the same in all processes.

        last: whether it is the last step. Its model is saved anyway.
        """
        run = self.config.run
        if last:
            return run.keep_checkpoints is not None
        if run.save_steps == 0:
            return False
        late = time.monotonic() - self.saved > SAVE_SECONDS
        return self.engine.largest(int(late)) > 0 or self.done_every(run.save_steps)

    def save_good_state(self) -> str:
        """Save a checkpoint if all weights are finite.

        Return a text about the newest checkpoint, for an error message.
        """
        if self.done and self.engine.finite_weights():
            self.save()
        return run_folder.last_good_state(self.folder)

    def _require_finite_weights(self) -> None:
        """Raise InputError if a weight is NaN or infinite, for example after the last update."""
        if not self.engine.finite_weights():
            raise InputError(
                f"step {self.done}: a weight is NaN or infinite; "
                f"{run_folder.last_good_state(self.folder)}. Continue with --resume "
                "--allow_changes true and a lower optim.learning_rate."
            )

    def evaluate_before_training(self) -> None:
        """Evaluate the model that training starts from, so that one can see what training does."""
        metrics, seconds = self._dev_metrics()
        score = metrics["mean"][self.config.run.metric]
        self.dev.set_start(score)
        self.log.evaluation(0, metrics["mean"], self.config.run.metric, seconds)
        self.log.say(f"before training: dev {self.dev.label} {score:.4f}")

    def evaluate(self) -> None:
        """Evaluate the current model on the dev set.

        If its score is the best of the run so far, save the model to ``model/``.
        """
        metrics, seconds = self._dev_metrics()
        score = metrics["mean"][self.config.run.metric]
        better = self.dev.is_best(score)
        if better:
            self._save_model()
            if self.engine.is_main:
                write_json(
                    self.folder / run_folder.DEV_METRICS_FILE,
                    {"step": self.done, "label": self.dev.label, **metrics},
                )
        self.log.evaluation(self.done, metrics["mean"], self.config.run.metric, seconds)
        # not earlier: if saving the model fails, a resumed run evaluates this step again
        self.dev.add(self.done, score, self._model_hash())
        self.log.say(
            f"step {self.done}: dev {self.dev.label} {score:.4f}"
            f"{' (best so far)' if better else ''}"
        )
        if self.dev.stops_early():
            self.log.say(
                f"stopping after step {self.done} of {self.total}: {self.dev.worse} evaluations "
                "without a better dev score"
            )

    def _dev_metrics(self) -> tuple[Metrics, float]:
        """Return the metrics of the current model on the dev set, and the seconds it took."""
        if not self.log.bar_shown:
            self.log.say(f"step {self.done}: evaluating on {self.dev.sizes()}")
        return self.dev.metrics(self.encoder, self.engine, last=self.done >= self.total)

    def _model_hash(self) -> str:
        """Return a hash of the saved model, or an empty text if there is none."""
        file = self.folder / "model" / SETTINGS_FILE  # has the hashes of the weights
        found = sha256_of(file) if self.engine.is_main and file.is_file() else ""
        return self.engine.from_main(found)

    def _save_model(self) -> None:
        """Save the model, and move away what belongs to an older one: metrics and model card."""
        self._require_finite_weights()
        file = self.folder / "model" / SETTINGS_FILE  # has the hashes of the weights
        before = file.read_bytes() if self.engine.is_main and file.is_file() else None
        moved = {}
        if self.engine.is_main:
            metrics = (run_folder.DEV_METRICS_FILE, run_folder.METRICS_FILE)
            for path in (*map(self.folder.joinpath, metrics), file.with_name(run_folder.CARD)):
                if path.is_file():
                    moved[path] = self.folder / f"{path.stem}.old{path.suffix}"
        # before the model changes: after a kill, no model has another's metrics
        for path, old in moved.items():
            path.replace(old)
        if self.engine.is_main or self.engine.sharded:
            self.encoder.save(file.parent)
        for path, old in moved.items():
            if file.read_bytes() == before:
                old.replace(path)
            elif path.name == run_folder.DEV_METRICS_FILE:
                old.unlink()  # ``evaluate`` writes those of the new model
            else:
                self.log.say(f"{path}: is now {old}, because the model is a new one")

    def save(self) -> None:
        """Save a checkpoint in the main process; with sharding, in all processes.

        All processes wait until it is complete.
        """
        self._require_finite_weights()
        engine = self.engine
        if engine.is_main or engine.sharded:
            state = {
                "step": self.done,
                "identity": self.identity,
                **self.dev.state(),
                "scaler": engine.scaler.state_dict(),
                "micro_batch": self.micro_batch_size.state(),
            }
            keep = self.config.run.keep_checkpoints or 2
            save_checkpoint(self.folder, self.encoder, engine.optimizer, self.bank, state, keep)
        self.saved = time.monotonic()
        self.saved_step = self.done
        engine.barrier()

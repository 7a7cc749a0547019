"""``contaccum auto``: tune, train, evaluate and recommend within a time and a memory limit.

Content of ``output_dir``:

- ``auto.json``: settings, measurements and decisions
- ``data/``: small dev set. Without dev data, its queries are training queries, and ``data/train``
  has the other training queries.
- ``dev/``: metrics of the untrained model on the small dev set
- ``measure/``: training runs of a few steps, whose time is measured
- ``tune/``: short training runs, from which the settings are chosen
- ``train/``: final training run; ``train/model`` is the trained model
- ``untrained/`` and ``bm25/``: metrics of the two baselines on the test data
- ``report.html``: report

A second call continues with the first unfinished stage.
"""

import statistics
import sys
import time
import warnings
from dataclasses import asdict, replace
from functools import cached_property
from math import gcd
from pathlib import Path

from contaccum.config import TrainConfig, parse_bytes, validate
from contaccum.config.experiments import AutoConfig
from contaccum.data.dataset import open_dataset
from contaccum.data.retrieval_set import splits_of
from contaccum.errors import InputError, Interrupted
from contaccum.evaluation.metrics import read_metrics
from contaccum.evaluation.significance import Comparison, compare
from contaccum.experiments.auto_state import (
    EVALUATIONS,
    FEWEST_STEPS,
    STATE_FILE,
    TUNING,
    State,
    parse_time,
)
from contaccum.experiments.compare import Configure
from contaccum.experiments.dev_set import hold_out, write_dev_set
from contaccum.experiments.jobs import data_hashes, delete_weights, refuse_changed, run_job
from contaccum.experiments.measure import measure_micro_batch
from contaccum.experiments.page import duration, gigabytes
from contaccum.experiments.run_records import METRICS_FILE, TUNED_FILE, dev_score
from contaccum.experiments.settings import Values, Variant, named
from contaccum.experiments.study_report import StudyResult, write_report
from contaccum.experiments.tuning import Tuned, rung_shares, tune
from contaccum.runtime.engine import Engine
from contaccum.runtime.files import remove_folder
from contaccum.runtime.launch import StopSignals, require_one_process
from contaccum.runtime.locks import LOCK_FILE, waiting_lock
from contaccum.training.log import read_log
from contaccum.training.run_folder import flat

BANK = {"bank.age_decay": "1.0", "bank.row_weight": "current"}
RECIPES: tuple[dict[str, str], ...] = (
    {"method": "cont_accum", **BANK},
    {"method": "cont_cache", "replay.share": "0.5", **BANK},
    {"method": "grad_cache"},
)
"""Methods to try, each with its settings."""
BATCHES = (16, 64, 256)
"""Global batch sizes to try. The bank size is always 4 times the global batch size."""
RATES = (1.0, 2.0, 0.5)
"""Learning rates to try, as multiples of ``optim.learning_rate``."""
CHOSEN = (
    "method", "batch.global_batch_size", "batch.micro_batch_size", "batch.micro_batch_tokens",
    "bank.size", "bank.age_decay", "bank.row_weight", "replay.share", "optim.epochs",
    "optim.max_steps", "optim.warmup_steps", "optim.warmup_ratio", "run.eval_steps",
    "run.save_steps", "run.drift_steps",
)  # fmt: skip
"""Settings that ``contaccum auto`` sets itself."""
SAFETY = 0.94  # the final run is planned for this share of the remaining time
MOST_EPOCHS = 20  # maximum number of epochs of a run
DEV_QUERIES, DEV_PASSAGES = 300, 2000  # maximum size of the small dev set


def run_auto(configure: Configure, options: AutoConfig) -> str:
    """Run the unfinished stages and return the verdict.

    With ``dry_run``, only measure and return the plan.

    Raises InputError for wrong settings or data. Raises Interrupted after a signal.
    """
    auto = Auto(configure, options)
    with waiting_lock(auto.output / LOCK_FILE, after=1.0), StopSignals():
        auto.state = State.read(auto.state.file, auto.state.settings)
        try:
            return auto.run()
        except Interrupted as signal:
            raise Interrupted(
                signal.exit_code - 128, "stopped; run the same command again to continue"
            ) from signal
        finally:
            auto.state.save()


class Auto:
    """Stages of one ``contaccum auto`` call."""

    def __init__(self, configure: Configure, options: AutoConfig) -> None:
        require_one_process("auto")
        self.configure, self.options = configure, options
        base = configure({})
        if not base.output_dir:
            raise InputError("output_dir is not set; it must be the folder for the results")
        if base.data.mixture:
            raise InputError(
                "contaccum auto does not support data.mixture; set data.train to one data set"
            )
        values = flat(asdict(base))
        defaults = flat(asdict(TrainConfig()))
        ignored = [name for name in CHOSEN if values[name] != defaults[name]]
        if ignored:
            warnings.warn(
                "contaccum auto chooses these settings and ignores your values: "
                f"{', '.join(ignored)}",
                stacklevel=2,
            )
        self.base = base
        self.output = Path(base.output_dir)
        self.data = base.data
        self.total = parse_time(options.time)
        self.memory = parse_bytes(options.memory, "--memory")
        settings = {**asdict(base), "auto": {**asdict(options), "dry_run": False}}
        self.state = State(settings, file=self.output / STATE_FILE)
        self.source = open_dataset(base.data.train, base.data.split, base.data.policy)
        splits = splits_of(self.source.path) if self.source.path.is_dir() else []
        dev = base.data.dev or (base.data.train if base.data.dev_split in splits else None)
        self.dev_source = (dev, base.data.dev_split) if dev else None
        if dev is None and base.distils:
            raise InputError(
                f"loss.distillation is {base.loss.distillation}, so data.dev must be set. Without "
                "data.dev, contaccum auto splits the training data into training and dev queries, "
                "and the split loses the teacher scores."
            )
        test = options.test or (base.data.train if options.test_split in splits else None)
        self.test_source = (test, options.test_split) if test else None
        self.dev = {"data": str(self.output / "data" / "dev"), "split": "dev"}
        self.test = {"data": test, "split": options.test_split} if test else self.dev

    def run(self) -> str:
        hashes = data_hashes("run", replace(self.base, data=replace(self.data, dev=None)))
        for name, source in (("dev_content", self.dev_source), ("test_content", self.test_source)):
            if source:
                hashes[name] = open_dataset(*source, self.data.policy).retrieval_set.fingerprint()
        refuse_changed(self.output, self.state.content, hashes, self.base)
        self.state.content = hashes
        self._divide()
        self._measure()
        candidates, budget = self.state.tuning_plan(self._candidates(), self.total)
        self._check_time(len(candidates) > 1)
        if self.options.dry_run:
            return self._plan_text(candidates, budget)
        for kind in ("untrained", "bm25"):
            self._evaluate(kind, kind, self.test)
        self._tune(candidates, budget)
        self._train()
        return self._verdict()

    def config(self, folder: str, changes: dict[str, str]) -> TrainConfig:
        """Return the config of a run in ``folder`` with ``changes``.

        It has the small dev set and micro-batches that fit in memory.
        """
        pairs = int(changes.get("batch.global_batch_size", 1))
        if size := self.state.sizes.get(changes.get("method", "")):
            changes = {**changes, "batch.micro_batch_size": str(gcd(size, pairs))}
        config = replace(self.configure(changes), resume=True)
        data = replace(config.data, dev=self.dev["data"], dev_split="dev")
        if (part := self.output / "data" / "train").is_dir():
            data = replace(data, train=str(part), split="train")
        # --memory limits the number of pairs
        batch = replace(config.batch, micro_batch_tokens=None)
        return replace(config, data=data, batch=batch, output_dir=str(self.output / folder))

    def _divide(self) -> None:
        """Write a small dev set.

        It is a sample of the dev data or, if there is none, of the training queries, which are then
        not trained on.
        """
        folder = self.output / "data"
        if (folder / "dev").is_dir():
            return
        seed = self.base.seed
        if self.dev_source is None:
            hold_out(self.source, folder, DEV_QUERIES, DEV_PASSAGES, seed, self.data.hard_negatives)
        else:
            dev = open_dataset(*self.dev_source, self.data.policy).retrieval_set
            write_dev_set(dev, folder / "dev", DEV_QUERIES, DEV_PASSAGES, seed)

    def _evaluate(self, kind: str, folder: str, data: dict[str, str]) -> None:
        """Evaluate a baseline and save the duration, unless an earlier call did both.

        kind: ``untrained`` or ``bm25``.
        """
        if folder not in self.state.seconds or not (self.output / folder / METRICS_FILE).is_file():
            began = time.monotonic()
            run_job(kind, self.config(folder, {}), data)
            self.state.seconds.setdefault(folder, time.monotonic() - began)
            self.state.save()

    def _measure(self) -> None:
        """Measure the time of a dev evaluation.

        For each method, measure the largest micro-batch and the time per pair.
        """
        seconds = self.state.seconds
        self._evaluate("untrained", "dev", self.dev)
        for recipe in RECIPES:
            method = recipe["method"]
            if method in seconds:
                continue
            config = self.config("dev", {**recipe, **self._batch(BATCHES[1])})
            validate(config)
            print(f"measuring {method}", file=sys.stderr)
            # on a GPU, memory that this process keeps of earlier runs would count as that of other
            # programs
            Engine.free_memory()
            found = measure_micro_batch(config, self.memory)
            if found.size is None:
                raise InputError(
                    f"--memory is {self.options.memory}, but {method} needs "
                    f"{gigabytes(found.peak)} even with one pair at a time. Lower "
                    "model.max_passage_length, set lora.rank, or raise --memory."
                )
            self.state.sizes[method] = found.size
            seconds[method] = self._trial(recipe)
            self.state.save()

    def _trial(self, recipe: dict[str, str]) -> float:
        """Train for a few steps and return the median seconds per pair.

        recipe: a method with its settings.

        The global batch size is the smallest one that tuning tries, because small batches take the
        most time per pair. Time outside the steps, such as loading, is also measured;
        ``state.seconds["run"]`` is its maximum over all trials.
        """
        name = f"measure/{recipe['method']}"
        folder = self.output / name
        if folder.is_dir():
            remove_folder(folder)
        config = self._run_config(
            name, {**recipe, **self._batch(BATCHES[0])}, FEWEST_STEPS, evaluations=0
        )
        began = time.monotonic()
        run_job("run", config, None)
        steps = [line["seconds"] for line in read_log(folder) if "loss" in line]
        outside = time.monotonic() - began - sum(steps)
        self.state.seconds["run"] = max(outside, self.state.seconds.get("run", 0.0))
        delete_weights(folder)
        # the first steps are slower
        return statistics.median(steps[len(steps) // 2 :]) / BATCHES[0]

    def _batch(self, pairs: int) -> dict[str, str]:
        return {"batch.global_batch_size": str(pairs), "bank.size": str(4 * pairs)}

    def _candidates(self) -> list[Values]:
        """Return the combinations of settings to tune, the most promising first."""
        batches = [pairs for pairs in BATCHES if pairs * FEWEST_STEPS <= self._queries] or [
            BATCHES[0]
        ]
        rate = self.base.optim.learning_rate
        return [
            tuple(
                {**recipe, **self._batch(pairs), "optim.learning_rate": repr(rate * factor)}.items()
            )
            for factor in RATES
            for pairs in batches
            for recipe in RECIPES
        ]

    @cached_property
    def _queries(self) -> int:
        """Number of training queries."""
        data = self.config("dev", {}).data
        return len(open_dataset(data.train, data.split, data.policy).examples())

    def _most_steps(self, values: Values) -> int:
        return max(1, MOST_EPOCHS * self._queries // int(dict(values)["batch.global_batch_size"]))

    def _check_time(self, tuning: bool) -> None:
        """Raise InputError if the measurements left no time to train. tuning: whether to tune."""
        if self.state.tuning or self.state.steps:
            return
        left = self.state.seconds_left(self.total) - (TUNING * self.total if tuning else 0)
        if left <= 0:
            raise InputError(
                f"--time is {self.options.time}, but it leaves no time to train: the measurements "
                f"took {duration(self.state.elapsed)}, and the evaluations need "
                f"{duration(self.state.evaluation_seconds)}. Use a longer time and another folder."
            )

    def _tune(self, candidates: list[Values], budget: float) -> None:
        """Choose the candidate with the best dev metric by successive halving."""
        if self.state.chosen:
            return
        tuned = Tuned(
            Variant("auto", "cont_accum", (), tuple(candidates)), rung_shares(len(candidates), None)
        )
        if len(candidates) > 1:
            tune(
                [tuned],
                lambda runs: [
                    self._dev_score(values, float(share) * budget) for _, values, share in runs
                ],
            )
        best = candidates[0]
        for scores in tuned.rungs:
            if scores:  # the last rung with a successful run decides
                best = max(scores, key=scores.__getitem__)
        self.state.chosen = dict(best)
        self.state.save()

    def _dev_score(self, values: Values, seconds: float) -> float | None:
        """Train for ``seconds`` and return the dev metric.

        Return None if training fails, for example at a high learning rate, or if the tuning time is
        used up.
        """
        steps = max(
            1, min(self._most_steps(values), int(seconds / self.state.step_seconds(values)))
        )
        config = self._run_config(
            f"tune/{named('run', values)}-{steps}", dict(values), steps, evaluations=0
        )
        folder = Path(config.output_dir)
        if not (folder / TUNED_FILE).is_file():
            if self.state.tuning >= TUNING * self.total:  # steps took longer than measured
                return None
            print(f"tuning: {described(values)}, {steps} steps", file=sys.stderr)
            began = time.monotonic()
            try:
                run_job("run", config, None)
            except InputError as error:
                print(f"{folder.name}: {error}", file=sys.stderr)
                return None
            finally:
                self.state.tuning += time.monotonic() - began
                self.state.save()
            delete_weights(folder)
        return dev_score(folder)

    def _run_config(
        self, folder: str, changes: dict[str, str], steps: int, evaluations: int
    ) -> TrainConfig:
        config = self.config(folder, changes)
        # every step is timed
        run = replace(config.run, eval_steps=0, save_steps=0, drift_steps=0, log_steps=1)
        if evaluations:
            every, save = max(1, -(-steps // evaluations)), max(1, steps // 10)
            run = replace(run, eval_steps=every, save_steps=save, log_steps=config.run.log_steps)
        optim = replace(config.optim, max_steps=steps, warmup_steps=None, warmup_ratio=0.1)
        return replace(config, run=run, optim=optim)

    def _train(self) -> None:
        """Train with the chosen settings for the remaining time, and evaluate the model."""
        values = tuple(self.state.chosen.items())
        if not self.state.steps:
            steps = int(SAFETY * self.state.seconds_left(self.total) / self._measured_step(values))
            self.state.steps = max(1, min(self._most_steps(values), steps))
            self.state.save()
        config = self._run_config("train", dict(values), self.state.steps, EVALUATIONS)
        if not (self.output / "train" / METRICS_FILE).is_file():
            print(f"training for {self.state.steps} steps: {described(values)}", file=sys.stderr)
            run_job("run", config, self.test)

    def _measured_step(self, values: Values) -> float:
        """Return the mean seconds of a step in the tuning runs with ``values``.

        Without such runs, estimate it.
        """
        runs = (self.output / "tune").glob(f"{named('run', values)}-*")
        logged = [line["seconds"] for run in runs for line in read_log(run) if "loss" in line]
        return statistics.mean(logged) if logged else self.state.step_seconds(values)

    def _verdict(self) -> str:
        """Write the report.

        Return a text with the verdict, the metrics, and the paths of model and report.
        """
        metric = self.base.run.metric
        folders = [self.output / name for name in ("bm25", "untrained", "train")]
        scores = {folder.name: read_metrics(folder / METRICS_FILE) for folder in folders}
        found = compare(
            {0: scores["train"]["per_query"]}, {0: scores["untrained"]["per_query"]}, metric
        )
        page = write_report(self.output, folders, StudyResult(metric, {self.output / "untrained"}))
        means = ", ".join(f"{name} {each['mean'][metric]:.4f}" for name, each in scores.items())
        on = (
            "the dev queries, also used to choose the settings"
            if self.test is self.dev
            else "the test queries"
        )
        return (
            f"{verdict(found, metric)}\n{metric} on {on}: {means}\n"
            f"model: {self.output / 'train' / 'model'}\nreport: {page}\n"
            f"time: {duration(self.state.elapsed)} of {duration(self.total)}"
        )

    def _plan_text(self, candidates: list[Values], budget: float) -> str:
        sizes = ", ".join(f"{method} {size}" for method, size in self.state.sizes.items())
        left = self.total - self.state.elapsed
        tuning = "none, because the time is too short"
        if budget:
            left -= TUNING * self.total
            tuning = (
                f"{len(candidates)} combinations, {duration(TUNING * self.total)}; longest run "
                f"{duration(budget)}"
            )
        return (
            f"micro-batch that fits into {self.options.memory}: {sizes}\n"
            f"tuning: {tuning}\n"
            f"final training and evaluation: {duration(left)}\n"
            f"one dev evaluation: {duration(self.state.seconds['dev'])}"
        )


def described(values: Values) -> str:
    """Return settings as text, such as: grad_cache, N = 64, learning rate 0.001."""
    settings = dict(values)
    n = settings["batch.global_batch_size"]
    return f"{settings['method']}, N = {n}, learning rate {settings['optim.learning_rate']}"


def verdict(found: Comparison, metric: str) -> str:
    """Return a text that says whether to use the trained model.

    found: trained model compared with the untrained model.
    """
    interval = f"{metric} {found.difference:+.3f} [{found.low:+.3f}, {found.high:+.3f}]"
    if found.low > 0:
        advice = "the trained model is better; use it"
    elif found.high < 0:
        advice = "the trained model is worse; do not use it"
    else:
        advice = "no significant difference"
    return f"{interval} against the untrained model: {advice}"

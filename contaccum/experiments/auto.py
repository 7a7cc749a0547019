"""``contaccum auto``: tune, train and evaluate within a time limit.

At the end, say whether to use the model.

Content of ``output_dir``:

- ``auto.json``: settings, measurements and decisions
- ``data/``: small dev set. Without dev data, its queries are training queries, and ``data/train``
  has the other training queries.
- ``dev/``: metrics of the untrained model on the small dev set
- ``tune/``: short training runs, from which the settings are chosen. The model of the best one is
  kept if the final run does not reach its dev score.
- ``train/``: final training run; ``train/model`` is the trained model
- ``untrained/`` and ``bm25/``: metrics of the two baselines on the test data
- ``report.html``: report

The first stage encodes a sample of texts and predicts the time of all other stages, so a time limit
that is too short is refused early. Each stage that ends replaces its prediction. A second call
continues with the first unfinished stage.
"""

import random
import shutil
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
from datasets import Dataset

from contaccum.config import DataConfig, TrainConfig, validate, with_changes
from contaccum.config.experiments import AutoConfig
from contaccum.config.load import flat
from contaccum.data.dataset import load_training, open_dataset, require_other_dev
from contaccum.data.dev_set import hold_out, write_dev_set
from contaccum.data.retrieval_set import splits_of
from contaccum.errors import InputError, Interrupted
from contaccum.evaluation.metrics import read_metrics
from contaccum.experiments.auto_state import (
    DEV_SHARE,
    FEWEST_STEPS,
    LEAST_TRAINING,
    STATE_FILE,
    TUNING,
    State,
    parse_time,
)
from contaccum.experiments.compare import require_unseen
from contaccum.experiments.jobs import JobKind, contents_of, delete_weights, run_job
from contaccum.experiments.page import require_matplotlib
from contaccum.experiments.report import SIGNIFICANT, write_page
from contaccum.experiments.run_records import (
    TUNED_FILE,
    Difference,
    dev_score,
    differences,
    group_runs,
    load_run_record,
    warn_of_different_tests,
)
from contaccum.experiments.settings import Values, Variant, named
from contaccum.experiments.tuning import Tuned, rung_shares, tune
from contaccum.formats.records import Passage
from contaccum.runtime.engine import Engine
from contaccum.runtime.files import created_folder
from contaccum.runtime.launch import StopSignals, require_one_process
from contaccum.runtime.locks import LOCK_FILE, waiting_lock
from contaccum.runtime.processes import encoding_device
from contaccum.runtime.units import duration
from contaccum.training.log import read_log
from contaccum.training.loop import Training
from contaccum.training.parts import build_encoder
from contaccum.training.run_folder import (
    DEV_METRICS_FILE,
    METRICS_FILE,
    read_finished,
    require_empty,
)

BANK = {"bank.age_decay": "1.0", "bank.row_weight": "current"}
WITHOUT_DROPOUT = {"model.dropout": "0", "model.attention_dropout": "0", "lora.dropout": "0"}
RECIPES: tuple[dict[str, str], ...] = (
    {"method": "grad_cache", "replay.share": "1"},
    {"method": "cont_cache", "replay.share": "0.5", **WITHOUT_DROPOUT, **BANK},
    {"method": "cont_accum", **BANK},
)
"""Methods to try, each with its settings. Without time to choose, the first one is used: it is also
the method of ``train`` and of the config ``finetune``."""
BATCHES = (16, 64, 128)
"""Global batch sizes to try."""
LEAST_BANK = 64
"""Bank size of a smaller global batch. A larger one has a bank of its own size."""
RATES = (1.0, 2.0, 0.5)
"""Learning rates to try, as multiples of ``optim.learning_rate``."""
CHOSEN = (
    "method", "batch.global_batch_size", "batch.micro_batch_size", "batch.micro_batch_tokens",
    "bank.size", "bank.age_decay", "bank.row_weight", "replay.share", "optim.epochs",
    "optim.max_steps", "optim.warmup_steps", "run.eval_steps",
    "run.save_steps", "run.drift_steps",
)  # fmt: skip
"""Settings that ``contaccum auto`` sets itself."""
MOST_EPOCHS = 20  # maximum number of epochs of a run
# tokens of the passages in a micro-batch of cont_accum; on a CPU, larger ones are not faster
BATCH_TOKENS = {"cpu": 2048, "cuda": 8192}
DEV_PASSAGES = (200, 2000)  # least and greatest number of passages in the small dev set
DEV_QUERIES = (50, 300)
REPORT_SECONDS = 60.0
SAMPLE = 1024  # maximum number of texts that are encoded to predict the time of encoding
SAMPLE_SHARE = 0.03  # share of the time limit that encoding a sample may take
# Factors of the predictions, measured with all-MiniLM-L6-v2 on two CPU cores. They only have to
# serve until the stage was measured.
TRAINING_PASS = 1.5  # one forward pass in training / encoding: dropout, and padding to random texts
BM25_SHARE = 0.05  # BM25 / evaluation of the untrained model


def run_auto(base: TrainConfig, options: AutoConfig, began: float | None = None) -> str:
    """Run the unfinished stages and return the verdict.

    began: start of the call by ``time.monotonic``. Default: now.

    Raises InputError for wrong settings or data. Raises Interrupted after a signal.
    """
    auto = Auto(base, options, time.monotonic() if began is None else began)
    with (
        created_folder(auto.output),
        waiting_lock(auto.output / LOCK_FILE, after=1.0),
        StopSignals(),
    ):
        if not auto.state.file.is_file():
            require_empty(auto.output, STATE_FILE)
        auto.state.settings |= auto.contents()
        auto.state = State.read(auto.state.file, auto.state.settings, auto.began)
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

    def __init__(self, base: TrainConfig, options: AutoConfig, began: float) -> None:
        require_one_process("auto")
        require_matplotlib()
        self.base, self.options, self.began = base, options, began
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
                f"contaccum auto chooses {', '.join(ignored)} itself, so values from a config file "
                "or options have no effect",
                stacklevel=2,
            )
        if dropped := [name for name in WITHOUT_DROPOUT if values[name]]:
            warnings.warn(
                f"partial replay trains without dropout, so {', '.join(dropped)} has no effect on "
                "the runs with it",
                stacklevel=2,
            )
        validate(base, warn=False)  # each run warns about its settings without effect
        self.output = Path(base.output_dir)
        self.data = base.data
        self.total = parse_time(options.time)
        # a second call may have another time limit
        settings = {**asdict(base), "auto": {**asdict(options), "time": ""}}
        self.state = State(settings, file=self.output / STATE_FILE, began=began)
        self.source = open_dataset(base.data.train, base.data.split, base.data.policy)
        splits = splits_of(self.source.path) if self.source.path.is_dir() else []
        # without such a split, other queries are used, but not if its name was only mistyped
        for name, data, split, usual in (
            ("data.dev_split", base.data.dev, base.data.dev_split, DataConfig.dev_split),
            ("test_split", options.test, options.test_split, AutoConfig.test_split),
        ):
            if data is None and split not in {*splits, usual}:
                raise InputError(
                    f"{name} is {split}, but {base.data.train} has no such split; available: "
                    f"{', '.join(splits) or 'none'}"
                )
        dev = base.data.dev or (base.data.train if base.data.dev_split in splits else None)
        require_other_dev(replace(base.data, dev=dev))
        self.dev_source = (dev, base.data.dev_split) if dev else None
        sources = [self.source]
        if dev:
            sources.append(open_dataset(dev, base.data.dev_split, base.data.policy))
        # a set by name may have empty passages, and then the copies in ``data`` have them too
        self.repair = any(source.policy.repair for source in sources)
        if dev is None and base.distils:
            raise InputError(
                f"loss.distillation is {base.loss.distillation}, so data.dev must be set. Without "
                "data.dev, contaccum auto splits the training data into training and dev queries, "
                "and the split loses the teacher scores."
            )
        test = options.test or (base.data.train if options.test_split in splits else None)
        if test:
            require_unseen(test, options.test_split, replace(base.data, dev=dev))
        self.dev = {"data": str(self.output / "data" / "dev"), "split": "dev"}
        self.test = {"data": test, "split": options.test_split} if test else self.dev

    def run(self) -> str:
        if not self.state.steps:
            self._predict()
            self._check_time()
        self._divide()
        self._evaluate("untrained", "dev", self.dev)
        if self.state.best is None:
            metrics = read_metrics(self.output / "dev" / METRICS_FILE)
            self.state.best = metrics["mean"][self.base.run.metric]
        if self.test is self.dev:  # evaluated already
            self.state.seconds["untrained"] = self.state.seconds["dev"]
            (self.output / "untrained").mkdir(exist_ok=True)
            shutil.copy(self.output / "dev" / METRICS_FILE, self.output / "untrained")
        else:
            self._evaluate("untrained", "untrained", self.test)
        self._evaluate("bm25", "bm25", self.test)
        self._tune()
        self._train()
        self._keep_better_trial()
        return self._verdict()

    def contents(self) -> dict[str, str]:
        """Return hashes of the training, dev and test data, and of encoders in local folders."""
        data = replace(self.data, dev=None)
        if self.dev_source:
            data = replace(data, dev=self.dev_source[0])
        test = None if self.test is self.dev else self.test
        return contents_of("run", replace(self.base, data=data), test)

    def say(self, text: str) -> None:
        """Print a line with the time and the best dev score so far, and save the state."""
        best = ""
        if self.state.best is not None:
            best = f"; best dev {self.base.run.metric} {self.state.best:.4f}"
        spent = f"{duration(self.state.elapsed)} of {duration(self.total)} used"
        print(f"[{spent}{best}] {text}", file=sys.stderr, flush=True)
        self.state.save()

    def config(self, folder: str, changes: dict[str, str]) -> TrainConfig:
        """Return the config of a run in ``folder`` with ``changes``.

        It has the small dev set.
        """
        # the number of steps changes with the time that is left
        config = replace(with_changes(self.base, changes), resume=True, allow_changes=True)
        data = replace(config.data, dev=self.dev["data"], dev_split="dev", repair=self.repair)
        if (part := self.output / "data" / "train").is_dir():
            data = replace(data, train=str(part), split="train")
        # cont_accum gets its negatives from the micro-batch; training chooses the others' size
        size: int | Literal["auto"] = "auto"
        if config.method == "cont_accum":
            tokens = BATCH_TOKENS.get(encoding_device(config.run.device).type, BATCH_TOKENS["cpu"])
            passages = 1 + data.hard_negatives
            pairs = tokens // (passages * self.state.passage_length)
            size = next(size for size in (64, 32, 16, 8) if size <= max(8, pairs))
            size = min(size, config.batch.global_batch_size)
        batch = replace(config.batch, micro_batch_size=size, micro_batch_tokens=None)
        return replace(config, data=data, batch=batch, output_dir=str(self.output / folder))

    def _predict(self) -> None:
        """Encode a sample of texts, predict every stage's time, and size the dev set by it."""
        state = self.state
        began = time.monotonic()  # without the imports, which later stages do not repeat
        train_set = load_training(self.data, self.base.distils)
        judged = None
        if self.test is not self.dev:
            test = open_dataset(self.test["data"], self.test["split"], self.data.policy)
            judged = test.retrieval_set
        reading = time.monotonic() - began
        self.say("encoding a sample of texts to predict the time of each stage")
        loading = time.monotonic()
        encoder = build_encoder(self.base, train_set, encoding_device(self.base.run.device))
        load = time.monotonic() - loading
        state.passage_length = encoder.settings.max_passage_length
        limit = SAMPLE_SHARE * self.total
        query = encoding_seconds(encoder.encode_queries, train_set.queries["text"][:SAMPLE], limit)
        passage = encoding_seconds(encoder.encode_passages, sample(train_set.passages), limit)
        test_passage = passage
        if judged and self.test["data"] != self.data.train:
            test_passage = encoding_seconds(encoder.encode_passages, sample(judged.corpus), limit)
        del encoder
        Engine.free_memory()

        if not state.dev_passages:
            affordable = int(DEV_SHARE / 4 * self.total / passage)
            least, most = DEV_PASSAGES
            state.dev_passages = min(max(affordable, least), most)
        dev = load + (state.dev_passages + self._dev_queries) * passage
        untrained = dev
        if judged:
            untrained = load + len(judged.corpus) * test_passage + len(judged.queries) * query
        forward = TRAINING_PASS * (query + (1 + self.data.hard_negatives) * passage)
        state.predicted = {
            "start": time.monotonic() - self.began,
            "dev": dev,
            "untrained": untrained,
            "bm25": BM25_SHARE * untrained,
            "run": reading + dev,
            "pass": forward,
            "report": max(5.0, reading),
        }

    @property
    def _dev_queries(self) -> int:
        """Maximum number of queries in the small dev set: one for 4 passages, from 50 to 300."""
        least, most = DEV_QUERIES
        return min(max(self.state.dev_passages // 4, least), most)

    def _check_time(self) -> None:
        """Raise InputError if the time limit leaves no time to train."""
        state = self.state
        # after the first stages, a short training is better than none
        if state.enough(self.total, share=0.0 if state.seconds else LEAST_TRAINING):
            return
        evaluation = duration(state.expected("untrained"))
        whose = "the dev queries" if self.test is self.dev else "the test queries"
        raise InputError(
            f"--time is {self.options.time}, which leaves no time to train on this machine: "
            f"everything else takes about {duration(state.other_seconds(self.total))} (one "
            f"evaluation on {whose} takes about {evaluation}, and two are needed, of the untrained "
            f"and of the trained model). Use --time {state.sufficient_time() / 60:.0f}m with the "
            "same folder, which keeps the measurements, or --test with a smaller data set."
        )

    def _divide(self) -> None:
        """Write a small dev set.

        It is a sample of the dev data or, if there is none, of the training queries, which are then
        not trained on.
        """
        folder = self.output / "data"
        if (folder / "dev").is_dir():
            return
        queries, passages, seed = self._dev_queries, self.state.dev_passages, self.base.seed
        if self.dev_source is None:
            hold_out(self.source, folder, queries, passages, seed, self.data.hard_negatives)
        else:
            dev = open_dataset(*self.dev_source, self.data.policy).retrieval_set
            write_dev_set(dev, folder / "dev", queries, passages, seed)

    def _evaluate(self, kind: JobKind, stage: str, data: dict[str, str]) -> None:
        """Evaluate a baseline and save the duration, unless an earlier call did both."""
        if stage in self.state.seconds and (self.output / stage / METRICS_FILE).is_file():
            return
        whose = "dev" if data is self.dev else "test"
        which = "BM25" if kind == "bm25" else "the untrained model"
        expected = duration(self.state.expected(stage))
        self.say(f"evaluating {which} on the {whose} queries, which takes about {expected}")
        began = time.monotonic()
        run_job(kind, self.config(stage, {}), data)
        self.state.seconds[stage] = time.monotonic() - began
        self.state.save()
        if not self.state.steps:
            self._check_time()

    def _candidates(self) -> list[Values]:
        """Return the combinations of settings to choose from, the most promising first."""
        batches = [pairs for pairs in BATCHES if pairs * FEWEST_STEPS <= self._queries] or [
            BATCHES[0]
        ]
        rate = self.base.optim.learning_rate
        return [
            tuple({**recipe, **_batch(pairs), "optim.learning_rate": repr(rate * factor)}.items())
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

    def _tune(self) -> None:
        """Choose the candidate with the best dev metric by successive halving."""
        if self.state.chosen:
            return
        candidates = self._plan_tuning()
        plan = f"none, because the time is too short; {described(candidates[0])}"
        if len(candidates) > 1:
            plan = (
                f"comparing {len(candidates)} combinations of method, N and learning rate in at "
                f"most {duration(TUNING * self.total)}, with runs of at most "
                f"{duration(self.state.budget * self.state.expected('pass'))}"
            )
        self.say(f"tuning: {plan}")
        # the method is not used, because each candidate has its own
        variant = Variant("auto", "grad_cache", (), tuple(candidates))
        tuned = Tuned(variant, rung_shares(len(candidates), None))
        if len(candidates) > 1:
            tune(
                [tuned],
                lambda runs: [self._dev_score(values, float(share)) for _, values, share in runs],
            )
        best = candidates[0]
        for scores in tuned.rungs:
            known = {values: score for values, score in scores.items() if score is not None}
            if known:  # the last rung with a successful run decides
                best = max(known, key=known.__getitem__)
        self.state.chosen = dict(best)
        self.state.save()

    def _plan_tuning(self) -> list[Values]:
        """Return the candidates to try.

        The first call measures a pass in a short run and saves the plan, so that all runs of a rung
        cost the same number of passes, also after a restart.
        """
        state, candidates = self.state, self._candidates()
        if not state.candidates:
            tried, seconds = state.tuning_plan(candidates, self.total)
            measuring = state.expected("run") + FEWEST_STEPS * state.step_seconds(candidates[0])
            # the prediction may be too high
            if seconds or measuring <= TUNING / 2 * self.total:
                self._run_trial("tune/measure", candidates[0], FEWEST_STEPS)
                steps = [line for line in read_log(self.output / "tune/measure") if "loss" in line]
                if steps:  # candidates[0] is grad_cache, and costs 4N - B passes
                    pairs = int(dict(candidates[0])["batch.global_batch_size"])
                    made = statistics.mean(line["passes"] for line in steps)
                    state.micro_batch = 4 * pairs - made
                tried, seconds = state.tuning_plan(candidates, self.total)
            state.candidates, state.budget = len(tried), seconds / state.expected("pass")
            state.save()
        return candidates[: state.candidates]

    def _dev_score(self, values: Values, share: float) -> float | None:
        """Train for a share of the full budget and return the dev metric, see ``_run_trial``."""
        state = self.state
        planned = int(share * state.budget / state.passes(values))
        steps = max(FEWEST_STEPS, min(self._most_steps(values), planned))
        return self._run_trial(f"tune/{named('run', values)}-{steps}", values, steps)

    def _run_trial(self, name: str, values: Values, steps: int) -> float | None:
        """Train for ``steps`` steps, measure a pass, and return the dev metric.

        Return None if training fails, for example at a high learning rate, or if the tuning time is
        used up.
        """
        state = self.state
        seconds = steps * state.step_seconds(values)
        config = self._run_config(name, values, steps, 0)
        folder = Path(config.output_dir)
        if not (folder / TUNED_FILE).is_file():
            if state.tuning >= TUNING * self.total:  # runs took longer than planned
                return None
            self.say(
                f"tuning: trying {described(values)} for {steps} steps, which take about "
                f"{duration(seconds)}"
            )
            continued = folder.is_dir()
            began = time.monotonic()
            pace = Pace(began + state.expected("run") + 1.25 * seconds, steps)
            try:
                run_job("run", config, None, after_step=pace)
            except InputError as error:
                print(f"{folder.name}: {error}", file=sys.stderr)
                return None
            finally:
                state.tuning += time.monotonic() - began
                logged = [line for line in read_log(folder) if "loss" in line]
                if logged:
                    seconds = sum(line["seconds"] for line in logged)
                    state.seconds["pass"] = seconds / sum(line["passes"] for line in logged)
                # the time outside the steps is only known of a whole run in one call
                if logged and not continued and (folder / TUNED_FILE).is_file():
                    outside = time.monotonic() - began - seconds
                    state.seconds["run"] = max(outside, state.seconds.get("run", 0.0))
                state.save()
            self._keep_best_trial()
            if len(logged) < steps:
                self.say(
                    f"tuning: {described(values)} ended after {len(logged)} of {steps} steps, "
                    "because this machine is slower than expected"
                )
        score = dev_score(folder)
        if score is not None:
            state.best = score if state.best is None else max(state.best, score)
        return score

    def _keep_best_trial(self) -> None:
        """Delete the weights of all tuning runs but the one with the best dev score."""
        for worse in sorted(self._kept_trials(), key=self._score_of)[:-1]:
            delete_weights(worse)

    def _kept_trials(self) -> list[Path]:
        return [model.parent for model in (self.output / "tune").glob("*/model")]

    def _score_of(self, run: Path) -> float:
        """Return the dev score of the model of a finished run."""
        return read_metrics(run / DEV_METRICS_FILE)["mean"][self.base.run.metric]

    def _run_config(self, folder: str, values: Values, steps: int, evaluations: int) -> TrainConfig:
        config = self.config(folder, dict(values))
        # every step is timed
        run = replace(config.run, eval_steps=0, save_steps=0, drift_steps=0)
        if evaluations:
            every = -(-steps // (evaluations - 1)) if evaluations > 1 else 0
            run = replace(run, eval_steps=every, save_steps=-(-steps // 4))
        optim = replace(config.optim, max_steps=steps, warmup_steps=0.1)
        return replace(config, run=run, optim=optim)

    def _train(self) -> None:
        """Train with the chosen settings for the remaining time, and evaluate the model."""
        state, values = self.state, tuple(self.state.chosen.items())
        if (self.output / "train" / METRICS_FILE).is_file():
            return
        most, left = self._most_steps(values), state.training_seconds(self.total)
        if not state.steps or not (self.output / "train").is_dir():
            state.steps = max(1, min(most, int(left / state.step_seconds(values))))
        # training ended, perhaps after fewer steps than it began with, and the test was stopped
        ended = read_finished(self.output / "train")
        state.steps = ended.total if ended else state.steps
        evaluations = state.evaluations(self.total)
        evaluating = evaluations * state.expected("dev")
        config = self._run_config("train", values, state.steps, evaluations)
        steps = min(left, state.steps * state.step_seconds(values))
        self.say(
            f"training: {described(values)}, {state.steps} steps, which take about "
            f"{duration(steps + evaluating)} with dev evaluations; the test then takes about "
            f"{duration(state.after_training())}"
        )

        def report(training: Training) -> None:
            state.steps = training.total
            state.best = max(state.best or 0.0, training.dev.best.get("score", 0.0))
            self.say(f"training: step {training.done} of {training.total}")

        start = state.expected("run") - state.expected("dev")  # loading and saving
        pace = Pace(
            end=time.monotonic() + start + left + evaluating + state.after_training(),
            most=most,
            evaluation=state.expected("dev"),
            eval_steps=int(config.run.eval_steps),
            after=state.after_training(),
            report=report,
        )
        run_job("run", config, self.test, after_step=pace)

    def _keep_better_trial(self) -> None:
        """Delete the weights of the tuning run that was kept if the final run is as good on dev."""
        for trial in self._kept_trials():
            if self._score_of(trial) <= self._score_of(self.output / "train"):
                delete_weights(trial)

    def _verdict(self) -> str:
        """Write the report.

        Return a text with the verdict, the metrics, and the paths of model and report.
        """
        metric = self.base.run.metric
        runs = [load_run_record(self.output / name) for name in ("bm25", "untrained", "train")]
        warn_of_different_tests(runs)
        groups = group_runs(runs)
        found = differences(groups, metric, {self.output / "untrained"})
        page = self.output / "report.html"
        write_page(page, "Report", groups, metric, found)
        means = ", ".join(f"{run.name} {run.score(metric):.4f}" for run in runs)
        # the trained model against the untrained one and against BM25
        untrained, bm25 = (
            next(one for one in tested if one.group.method)
            for tested in (found, differences(groups, metric, {self.output / "bm25"}))
        )
        on = "the test queries"
        if self.test is self.dev:
            on = "the dev queries, also used to choose the settings"
        final = self._score_of(self.output / "train")
        better = "".join(
            f"{trial / 'model'}, from tuning, has a better dev {metric} than the final model "
            f"({self._score_of(trial):.4f} and {final:.4f})\n"
            for trial in self._kept_trials()
        )
        return (
            f"{verdict(untrained, bm25, metric)}\n{metric} on {on}: {means}\n{better}"
            f"model: {self.output / 'train' / 'model'}\nreport: {page}\n"
            f"time: {duration(self.state.elapsed)} of {duration(self.total)}"
        )


@dataclass
class Pace:
    """Function after each training step that ends a run in time.

    It changes the number of steps. The learning rate falls to 0 at the new end.
    """

    end: float  # by time.monotonic
    most: int  # maximum number of steps
    evaluation: float = 0.0  # expected seconds of a dev evaluation
    eval_steps: int = 0  # steps between dev evaluations; 0: only after the last step
    after: float = 0.0  # expected seconds from the last dev evaluation to the end
    slower: float = 1.0  # seconds of the last dev evaluation / expected seconds
    # called once a minute
    report: Callable[[Training], None] | None = None
    steps: list[float] = field(default_factory=list)  # seconds of each step so far
    last: float | None = None  # end of the last step
    reported: float = field(default_factory=time.monotonic)

    def __call__(self, training: Training) -> None:
        now = time.monotonic()
        if self.last is not None:
            self.steps.append(now - self.last)
        self.last = now
        planned = training.total
        if len(self.steps) >= 2:
            # a median, because some steps include an evaluation or a checkpoint
            step = statistics.median(self.steps[-20:])
            if self.evaluation and training.dev.evaluated == training.done - 1:
                # the dev evaluation before this step shows whether the machine is slower now
                self.slower = max(1.0, (self.steps[-1] - step) / self.evaluation)
            total = self._affordable(training.done, now, step)
            # a small change is not worth a jump of the learning rate, except near the end
            large = abs(total - planned) > 0.05 * planned
            if large or total < planned <= training.done + 20:
                training.set_total(total)
        elif now >= self.end - self.after:
            training.set_total(training.done)
        if self.report and now - self.reported > REPORT_SECONDS:
            self.reported = now
            self.report(training)

    def _affordable(self, done: int, now: float, step: float) -> int:
        """Return the largest total number of steps that ends in time, with its evaluations.

        done: number of finished steps. step: seconds of a step.
        """
        left = self.end - now - self.slower * (self.evaluation + self.after)
        total = min(self.most, done + max(0, int(left / step)))
        every = self.eval_steps
        while every and total > done:
            # those before the last one, perhaps after this step; none is made less than half an
            # interval before the end
            others = max(0, int(total / every - 0.5) - (done - 1) // every)
            if (total - done) * step + self.slower * others * self.evaluation <= left:
                break
            total -= 1
        return total


def sample(passages: Dataset) -> list[str]:
    """Return the contents of SAMPLE passages in random order, or of all if there are fewer."""
    count = min(SAMPLE, len(passages))
    rows = random.Random(0).sample(range(len(passages)), count)
    return [passage.content for passage in Passage.of_columns(passages.select(rows)[:])]


def encoding_seconds(
    encode: Callable[[list[str]], np.ndarray], texts: list[str], limit: float
) -> float:
    """Return the seconds to encode one of the texts, measured on 64 or more of them.

    A larger sample follows until one takes a second. The next sample is left out if it may take
    longer than ``limit`` seconds.
    """
    encode(texts[:1])  # the first call is slower, because it loads libraries
    count = 4
    while True:
        began = time.perf_counter()
        encode(texts[:count])
        seconds = time.perf_counter() - began
        enough = count >= 64 and seconds >= 1
        if enough or count >= len(texts) or 4 * seconds > limit:
            return seconds / min(count, len(texts))
        count *= 4


def _batch(pairs: int) -> dict[str, str]:
    return {"batch.global_batch_size": str(pairs), "bank.size": str(max(pairs, LEAST_BANK))}


def described(values: Values) -> str:
    """Return settings as text, such as: grad_cache, N = 64, learning rate 0.001."""
    settings = dict(values)
    n = settings["batch.global_batch_size"]
    return f"{settings['method']}, N = {n}, learning rate {settings['optim.learning_rate']}"


def verdict(untrained: Difference, bm25: Difference, metric: str) -> str:
    """Say whether to use the trained model.

    untrained, bm25: comparisons of the trained model with the untrained one and with BM25, with
    the p values of the report.
    """
    if worse(untrained):
        advice = "the trained model is worse; do not use it"
    elif not better(untrained):
        advice = "no significant difference"
    elif better(bm25):
        advice = "the trained model is better; use it"
    elif worse(bm25):
        advice = f"better than before training, but BM25 is better ({interval(bm25, metric)})"
    else:
        advice = (
            "better than before training, but no significant difference from BM25 "
            f"({interval(bm25, metric)})"
        )
    return f"{interval(untrained, metric)} against the untrained model: {advice}"


def better(tested: Difference) -> bool:
    return tested.found.low > 0 and tested.p < SIGNIFICANT


def worse(tested: Difference) -> bool:
    return tested.found.high < 0 and tested.p < SIGNIFICANT


def interval(tested: Difference, metric: str) -> str:
    """Return the difference of two models and its interval as text."""
    found = tested.found
    return f"{metric} {found.difference:+.3f} [{found.low:+.3f}, {found.high:+.3f}]"

"""``contaccum compare``: train and evaluate methods, settings and seeds on the same data."""

import os
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

from contaccum.config import METHOD_SPECS, TrainConfig, check_values, validate
from contaccum.config.experiments import CompareConfig
from contaccum.data.dataset import load_training, open_dataset
from contaccum.errors import Failed, InputError
from contaccum.evaluation.metrics import read_metrics
from contaccum.experiments.jobs import (
    ENCODERS,
    Outcome,
    RunJob,
    baseline_identity,
    content_of,
    data_hashes,
    delete_weights,
    device_slots,
    run_jobs,
)  # fmt: skip
from contaccum.experiments.page import require_matplotlib
from contaccum.experiments.run_records import METRICS_FILE, TUNED_FILE, dev_score
from contaccum.experiments.settings import (
    Values,
    Variant,
    combinations,
    named,
    read_names,
    read_settings,
    read_values,
    variants,
)  # fmt: skip
from contaccum.experiments.study_report import StudyResult, write_report
from contaccum.experiments.tuning import (
    Tuned,
    limited,
    measured_step,
    parse_budget,
    rung_shares,
    tune,
)
from contaccum.runtime.files import read_json, write_json
from contaccum.runtime.launch import StopSignals, require_one_process
from contaccum.runtime.locks import LOCK_FILE, waiting_lock
from contaccum.training.automatic import recorded
from contaccum.training.run_folder import CONFIG_FILE, config_differences, flat, read_config

BASELINES = ("bm25", "untrained")
FULL = Fraction(1)
Configure = Callable[[Mapping[str, str]], TrainConfig]
"""Function that returns the config with changed settings. Its argument maps names of settings to
values as text."""


@dataclass(frozen=True)
class PlannedRun:
    """Training run or baseline that the comparison needs."""

    name: str
    kind: str  # ``run``, or one of BASELINES
    config: TrainConfig

    @property
    def folder(self) -> Path:
        return Path(self.config.output_dir)


def compare(configure: Configure, options: CompareConfig) -> Path:
    """Train and evaluate all runs that are not finished.

    Write the report and return the path of report.html.

    Raises InputError before the first run starts if a setting, the data or the content of a folder
    is wrong. Raises Interrupted after a signal. Raises Failed at the end if a run failed; the
    report then shows the other runs.
    """
    study = Study(configure, options)
    study.check()
    study.output.mkdir(parents=True, exist_ok=True)
    with waiting_lock(study.output / LOCK_FILE, after=1.0), study.signals:
        return study.run()


class Study:
    """Comparison of methods and settings. It plans, checks and starts the runs."""

    def __init__(self, configure: Configure, options: CompareConfig) -> None:
        self.configure, self.options, self.signals = configure, options, StopSignals()
        self._parsed = cache(lambda changes: configure(dict(changes)))  # parsing takes 0.1 seconds
        self.base = configure({})
        if not self.base.output_dir:
            raise InputError("output_dir: not set; it must name the folder of the comparison")
        self.output = Path(self.base.output_dir)
        self.seeds = [self.base.seed + number for number in range(options.seeds)]
        self.budget = None if options.budget is None else parse_budget(options.budget)
        tuned = read_values("--tune", options.tune)
        varied = read_values("--vary", options.vary)
        if both := varied.keys() & tuned.keys():
            raise InputError(
                f"{min(both)}: set by both --vary and --tune; use only one of these options"
            )
        if options.settings is None:
            methods = read_names("--methods", options.methods, METHOD_SPECS) or [self.base.method]
            self.variants = variants(methods, varied, tuned)
        elif options.methods or options.vary:
            raise InputError(
                "--settings: cannot be used with --methods or --vary; write methods and values "
                "into the file"
            )
        else:
            self.variants = read_settings(options.settings, tuned)
        self._valid_candidates()
        baselines = "" if options.baselines == "none" else options.baselines
        self.baselines = self._planned_baselines(
            read_names("--baselines", baselines, BASELINES), varied
        )
        known = [name for one in self.variants for name in (one.label, one.method)]
        known += [one.name for one in self.baselines]
        self.against = options.against or ("grad_cache" if "grad_cache" in known else known[0])
        if self.against not in known:
            raise InputError(
                f"--against is {self.against!r}; choose from {', '.join(dict.fromkeys(known))}"
            )
        self.test = {"data": options.test or self.base.data.train, "split": options.test_split}
        self.failed: list[Outcome] = []
        # hashes of the data and encoders of each kind of run
        self.hashes: dict[tuple[Any, ...], dict[str, str]] = {}

    def _valid_candidates(self) -> None:
        """Remove invalid combinations of tuned values.

        Prepare the tuning of each variant that has several combinations.
        """
        self.tuned, fixed = [], []
        for variant in self.variants:
            invalid: dict[str, str] = {}
            valid = []
            for candidate in variant.candidates:
                name = named(variant.label, candidate)
                try:
                    config = replace(self._config(variant, candidate), output_dir=str(self.output))
                    check_values(config)
                except InputError as error:
                    raise InputError(f"{name}: {error}") from None
                try:
                    validate(config)
                except InputError as error:
                    if len(variant.candidates) == 1:
                        raise InputError(f"{name}: {error}") from None
                    invalid[name] = str(error)
                else:
                    valid.append(candidate)
            if not valid:
                raise InputError(
                    f"{variant.label}: no combination of the tuned values is valid. For example, "
                    f"{': '.join(invalid.popitem())}"
                )
            left = replace(variant, candidates=tuple(valid))
            fixed.append(left)
            if len(variant.candidates) > 1:
                self.tuned.append(
                    Tuned(left, rung_shares(len(valid), self.options.rungs), invalid=invalid)
                )
        self.variants = fixed
        several_lengths = self.budget is not None or any(
            len(each.shares) > 1 for each in self.tuned
        )
        if self.base.optim.warmup_steps >= 1 and several_lengths:
            steps = self.base.optim.warmup_steps
            raise InputError(
                f"optim.warmup_steps is {steps}, but --budget and --tune change the number of "
                "steps. Use a share of the steps, such as 0.1."
            )

    def check(self) -> None:
        """Raise InputError if settings or data are wrong, or a run's folder has other results."""
        require_one_process("compare")
        require_matplotlib()
        by_settings: dict[str, str] = {}
        for variant in self.variants:
            for (
                candidate
            ) in variant.candidates:  # compare the configs, because 1e-3 and 0.001 are equal values
                name = named(variant.label, candidate)
                same = by_settings.setdefault(repr(self._config(variant, candidate)), name)
                if same != name:
                    raise InputError(f"{name} and {same} have equal settings; remove one of them")
        self._check_data()
        if (
            self.budget is None or self.budget.unit != "s"
        ):  # with seconds, the time of a step must be measured first
            self._check_folders()

    def _check_folders(self) -> None:
        planned: dict[Path, PlannedRun] = {}
        for run in [*self._every_run(), *self.baselines]:
            if (other := planned.setdefault(run.folder, run)) != run:
                changes = "; ".join(config_differences(asdict(other.config), asdict(run.config)))
                raise InputError(
                    f"{run.folder}: two runs would use this folder: {run.name} and {other.name} "
                    f"({changes or 'equal settings'}). Its name has no groups of settings, and all "
                    "characters except letters, digits and ._=+- become underscores. Choose "
                    "labels and values whose folders differ, or write two entries with different "
                    "labels."
                )
            self._check_folder(run)

    def _every_run(self) -> Iterable[PlannedRun]:
        """Yield all training runs that may be needed. Tuning later chooses from these runs."""
        for variant in self.variants:
            for candidate in variant.candidates:
                yield from (self._planned_run(variant, candidate, seed) for seed in self.seeds)
        yield from self._tuning_runs()

    def _tuning_runs(self) -> Iterable[PlannedRun]:
        for each in self.tuned:
            for candidate in each.variant.candidates:
                yield from (
                    self._planned_run(each.variant, candidate, self.seeds[0], share)
                    for share in each.shares
                )

    def _check_data(self) -> None:
        """Raise InputError if data cannot be read, or if tuning would use the test data.

        Warn if training uses the test data.
        """
        data, (test, split) = self.base.data, self.test.values()
        if not test:
            raise InputError(
                "--test is not set. With data.mixture, --test must name the test data."
            )
        test_queries = _queries(test, split)
        if Path(test).is_file() and self.options.test is None:
            raise InputError(
                f"{test}: data.train is a file without a split {split!r}. Name the test data with "
                "--test."
            )
        if self.tuned and not data.dev:
            raise InputError("data.dev: not set; tuning needs dev data")
        if self.tuned and _queries(data.dev or "", data.dev_split) == test_queries:
            raise InputError(
                f"data.dev is the test data ({test} {split}); tuning needs other queries"
            )
        if _queries(data.train, data.split) == test_queries:
            warnings.warn(f"the test data is the training data ({test} {split})", stacklevel=2)
        self.test_content = open_dataset(test, split, data.policy).retrieval_set.fingerprint()
        if data.dev:
            _ = open_dataset(data.dev, data.dev_split, data.policy).retrieval_set
        load_training(data, self.base.distils)

    def _config(self, variant: Variant, candidate: Values) -> TrainConfig:
        return self._parsed(tuple(variant.changes(candidate).items()))

    def _planned_run(
        self, variant: Variant, candidate: Values, seed: int, share: Fraction = FULL
    ) -> PlannedRun:
        config = self._config(variant, candidate)
        seconds = (
            measured_step(config, self.output)
            if self.budget is not None and self.budget.unit == "s"
            else None
        )
        config = replace(limited(config, self.budget, share, seconds), seed=seed)
        name = f"{named(variant.label, candidate)}-seed{seed}"
        if share == 1:
            return self._planned(name, "run", config)
        return self._planned(
            f"{name}-{share.numerator}of{share.denominator}", "run", config, "tuning"
        )

    def _planned_baselines(
        self, kinds: list[str], varied: Mapping[str, list[str]]
    ) -> list[PlannedRun]:
        """Plan the evaluations of the baselines ``kinds``.

        BM25 has one evaluation. The untrained encoder has one for each combination of the varied
        settings that affect it.
        """
        return [
            self._planned(named(kind, values), kind, self.configure(dict(values)))
            for kind in kinds
            for values in (combinations(varied, None) if kind == "untrained" else [()])
        ]

    def _planned(
        self, name: str, kind: str, config: TrainConfig, parent: str = "runs"
    ) -> PlannedRun:
        """Plan a run.

        In the name of its folder, characters other than letters, digits and ``._=+-`` become
        underscores.
        """
        folder = self.output / parent / re.sub(r"[^A-Za-z0-9._=+-]", "_", name)
        return PlannedRun(name, kind, replace(config, output_dir=str(folder), resume=True))

    def _check_folder(self, run: PlannedRun) -> None:
        """Raise InputError if a run's folder contains other settings, or metrics on other data."""
        if (run.folder / CONFIG_FILE).is_file():
            config = asdict(recorded(run.config))
            changes = "; ".join(config_differences(read_config(run.folder), config))
            if changes:
                raise InputError(
                    f"{run.folder}: this run was made with other settings: {changes}. Use the same "
                    "settings, or another output_dir."
                )
        metrics = run.folder / METRICS_FILE
        if metrics.is_file():
            found = read_metrics(metrics)
            for name, value in {**self.test, **baseline_identity(run.kind, run.config)}.items():
                if found.get(name) != value:
                    raise InputError(
                        f"{metrics}: was computed with {name} {found.get(name)}, but this call has "
                        f"{value}. Use another output_dir."
                    )
        settings = flat(asdict(run.config))
        key = run.kind, repr(run.config.data), run.config.distils, *map(settings.get, ENCODERS)
        if key not in self.hashes:
            self.hashes[key] = {
                "test_content": self.test_content,
                **data_hashes(run.kind, run.config),
            }
        for file in (metrics, run.folder / TUNED_FILE):
            if not file.is_file():
                continue
            found = read_json(file)
            for name, now in self.hashes[key].items():
                if (
                    name == "test_content" and file.name == TUNED_FILE
                ):  # tuning does not use the test data
                    continue
                if found.get(name) != now:
                    again = "this file" if name == "test_content" else "the run's folder"
                    raise InputError(
                        f"{file}: {content_of(name, run.config)} changed after this result was "
                        f"computed. Undo the change, or delete {again} and repeat the command."
                    )

    def run(self) -> Path:
        """Train and evaluate all runs that are not finished.

        Write the report and return the path of report.html.
        """
        # again: another call may have filled the folders before this call got the lock
        self._check_folders()
        tune(self.tuned, self._train_candidates)
        chosen = {each.variant.label: each.chosen for each in self.tuned}
        rows = {
            variant.label: [self._planned_run(variant, candidate, seed) for seed in self.seeds]
            for variant in self.variants
            if (candidate := chosen.get(variant.label, variant.candidates[0])) is not None
        }
        self._delete_losers({run.folder for runs in rows.values() for run in runs})
        runs = [run for row in rows.values() for run in row] + self.baselines
        self.failed += self._run_missing(runs, METRICS_FILE, self.test)
        reference = [one.label for one in self.variants if one.label == self.against]
        reference = reference or [one.label for one in self.variants if one.method == self.against]
        compared = {run.folder for label in reference for run in rows.get(label, ())}
        compared |= {run.folder for run in self.baselines if run.name == self.against}
        result = StudyResult(
            metric=self.base.run.metric,
            reference=compared,
            budget=self.budget,
            tuned=self.tuned,
            failed=[f"{one.job.name}: {one.last_line}" for one in self.failed],
            labels={run.folder: label for label, row in rows.items() for run in row},
        )
        page = write_report(
            self.output,
            [run.folder for run in runs if (run.folder / METRICS_FILE).is_file()],
            result,
        )
        if self.failed:
            first = self.failed[0]
            raise Failed(
                f"{len(self.failed)} runs failed. The first is {first.job.name} (exit code "
                f"{first.exit_code}, {first.job.log}): "
                f"{first.last_line.removeprefix('contaccum: ')}. {page} shows the other runs"
            )
        return page

    def _train_candidates(
        self, candidates: list[tuple[Variant, Values, Fraction]]
    ) -> list[float | None]:
        """Train each candidate with the first seed and its share of the budget.

        Return the dev metrics; None: failed run.
        """
        runs = [
            self._planned_run(variant, values, self.seeds[0], share)
            for variant, values, share in candidates
        ]
        failed = {one.job.name: one for one in self._run_missing(runs, TUNED_FILE, None)}
        scores = [dev_score(run.folder) for run in runs]
        # a failed run is reported only if all runs of its variant failed
        alive = {
            variant.label
            for (variant, *_), score in zip(candidates, scores, strict=True)
            if score is not None
        }
        for run, (variant, *_) in zip(runs, candidates, strict=True):
            if run.name in failed and variant.label not in alive:
                self.failed.append(failed[run.name])
        return scores

    def _delete_losers(self, chosen: set[Path]) -> None:
        for run in self._tuning_runs():
            if run.folder not in chosen and (run.folder / TUNED_FILE).is_file():
                delete_weights(run.folder)

    def _run_missing(
        self, runs: list[PlannedRun], result: str, test: dict[str, str] | None
    ) -> list[Outcome]:
        """Run each run whose folder does not contain the file ``result``.

        Return the outcomes of failed runs.
        """
        jobs = []
        for run in runs:
            if not (run.folder / result).is_file():
                file = self.output / "jobs" / f"{run.folder.name}.json"
                # runs/ contains tuning runs with the full budget; keep their weights, to evaluate
                # the chosen one on the test data
                keep = self.options.keep_weights if test else run.folder.parent.name == "runs"
                write_json(
                    file,
                    {
                        "kind": run.kind,
                        "config": asdict(run.config),
                        "test": test,
                        "keep_weights": keep,
                    },
                )
                jobs.append(RunJob(run.name, file))
        slots = device_slots(self.base.run.device, self.options.parallel)
        with self.signals.deferred():
            return run_jobs(jobs, slots, self.signals)


def _queries(data: str, split: str) -> tuple[str, str]:
    """Return the real path and the split, which identify the queries of a data set.

    For a file, the split is an empty string.
    """
    return os.path.realpath(data), "" if Path(data).is_file() else split

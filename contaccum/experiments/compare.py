"""``contaccum compare``: train and evaluate methods, settings and seeds on the same data."""

import itertools
import re
import warnings
from collections.abc import Iterable
from dataclasses import asdict, replace
from fractions import Fraction
from pathlib import Path

from contaccum.catalog import source_of
from contaccum.config import (
    METHOD_SPECS,
    DataConfig,
    TrainConfig,
    affects,
    validate,
    with_changes,
)
from contaccum.config.experiments import CompareConfig
from contaccum.config.load import flat
from contaccum.data.dataset import is_trained_on, require_other_dev
from contaccum.errors import Failed, InputError
from contaccum.experiments.jobs import (
    Job,
    JobKind,
    contents_of,
    delete_weights,
    device_slots,
    run_jobs,
)
from contaccum.experiments.page import require_matplotlib
from contaccum.experiments.report import console_table, results, write_page
from contaccum.experiments.run_records import (
    dev_score,
    differences,
    group_runs,
    load_run_record,
    warn_of_different_tests,
)
from contaccum.experiments.settings import (
    Values,
    Variant,
    named,
    read_names,
    read_settings,
    read_values,
    variants,
)
from contaccum.experiments.tuning import (
    Tuned,
    limited,
    parse_budget,
    rung_shares,
    step_price,
    tune,
    tuning_section,
)
from contaccum.runtime.files import created_folder, write_json
from contaccum.runtime.launch import StopSignals, require_one_process
from contaccum.runtime.locks import LOCK_FILE, waiting_lock
from contaccum.runtime.units import counted

BASELINES: tuple[JobKind, ...] = ("bm25", "untrained")
FULL = Fraction(1)
# settings that change the cost of a forward pass of a pair
COST_OF_A_PASS = (
    "data.fill_negatives", "data.hard_negatives", "data.mixture", "data.train", "loss.guide",
    "lora.rank", "lora.target_modules", "model.gradient_checkpointing", "model.name",
    "model.passage_name", "model.quantize", "model.max_query_length", "model.max_passage_length",
    "model.tiny_layers", "model.tiny_width", "optim.name", "run.precision",
)  # fmt: skip


def compare(base: TrainConfig, options: CompareConfig) -> str:
    """Train and evaluate all runs that are not finished.

    Write the report. Return the table of the results and the path of report.html.

    Raises InputError before the first run starts if a setting, the data or the content of a folder
    is wrong. Raises Interrupted after a signal. Raises Failed at the end if a run failed; the
    report then shows the other runs.
    """
    require_one_process("compare")
    require_matplotlib()
    study = Study(base, options)
    with (
        created_folder(study.output),
        waiting_lock(study.output / LOCK_FILE, after=1.0),
        StopSignals() as signals,
    ):
        return study.run(signals)


class Study:
    """Comparison of methods and settings. It plans, checks and starts the runs."""

    def __init__(self, base: TrainConfig, options: CompareConfig) -> None:
        self.options, self.base = options, base
        if not self.base.output_dir:
            raise InputError("output_dir: not set; it must name the folder of the comparison")
        self.output = Path(self.base.output_dir)
        self.seeds = [self.base.seed + number for number in range(options.seeds)]
        self.budget = None if options.budget is None else parse_budget(options.budget)
        self.slots = device_slots(self.base.run.device, options.parallel)
        tuned = read_values("--tune", options.tune)
        varied = read_values("--vary", options.vary)
        if both := varied.keys() & tuned.keys():
            raise InputError(
                f"{min(both)}: set by both --vary and --tune; use only one of these options"
            )
        if options.settings is None:
            methods = read_names("--methods", options.methods, METHOD_SPECS) or [self.base.method]
            wanted = variants(methods, varied, tuned)
        elif options.methods or options.vary:
            raise InputError(
                "--settings: cannot be used with --methods or --vary; write methods and values "
                "into the file"
            )
        else:
            wanted = read_settings(options.settings, tuned)
        self.variants = [self._without_invalid(variant) for variant in wanted]
        self.tuned = [
            Tuned(variant, rung_shares(len(variant.candidates), options.rungs))
            for variant in self.variants
            if len(variant.candidates) > 1
        ]
        if options.rungs and not self.tuned:
            raise InputError(
                f"--rungs {options.rungs} has no effect without several values to tune"
            )
        # the configs of all runs
        self.configs: list[TrainConfig] = []
        for variant in self.variants:
            for candidate in variant.candidates:
                config = self.config(variant.changes(candidate))
                if config in self.configs:
                    raise InputError(
                        f"{named(variant.label, candidate)}: another run has the same settings; "
                        "leave one of the two out"
                    )
                self.configs.append(config)
        self._check_steps()
        if self.budget and not self.budget.in_seconds:
            self._warn_of_unequal_passes()
        self._warn_of_other_dropout()
        # BM25 has one evaluation, the untrained encoder one for all values that affect it
        baselines = "" if options.baselines == "none" else options.baselines
        names = read_names("--baselines", baselines, BASELINES)
        of_the_encoder = dict.fromkeys(
            tuple((name, value) for name, value in variant.fixed if affects(name, None))
            for variant in self.variants
        )
        self.baselines: list[tuple[JobKind, Values]] = [("bm25", ())] if "bm25" in names else []
        if "untrained" in names:
            self.baselines += [("untrained", values) for values in of_the_encoder]
        known = [name for variant in self.variants for name in (variant.label, variant.method)]
        known += [named(*baseline) for baseline in self.baselines]
        self.against = options.against or ("grad_cache" if "grad_cache" in known else known[0])
        if self.against not in known:
            raise InputError(
                f"--against is {self.against!r}; choose from {', '.join(dict.fromkeys(known))}"
            )
        self.test = self._test_data()
        # data and encoders of a job -> their hashes
        self.contents: dict[str, dict[str, str]] = {}

    def config(self, changes: Values) -> TrainConfig:
        """Return the config of a run."""
        base, values = self.base, dict(changes)
        # with --methods, what a file says for another method was dropped, and the rest is for all
        if self.options.methods and "method" in values:
            base = replace(base, method=values.pop("method"))  # type: ignore[arg-type]
        return with_changes(base, values)

    def _check_steps(self) -> None:
        """Refuse settings of the number of steps that a budget or tuning overrides."""
        if self.budget:
            # all candidates of a variant have values of the same settings
            changes = [variant.changes(variant.candidates[0]) for variant in self.variants]
            names = dict(itertools.chain(*changes)).keys()
            if given := names & {"optim.max_steps", "optim.epochs"}:
                raise InputError(
                    f"--budget sets the number of steps, so {min(given)} has no effect on a run; "
                    "leave out one of the two"
                )
            if (steps := self.base.optim.max_steps) is not None:
                warnings.warn(
                    f"--budget sets the number of steps, so optim.max_steps {steps} has no effect",
                    stacklevel=3,
                )
        rungs = any(len(each.shares) > 1 for each in self.tuned)
        for name in ("optim.warmup_steps", "run.eval_steps"):
            most = max(flat(asdict(config))[name] for config in self.configs)
            if most >= 1 and (self.budget or rungs):
                raise InputError(
                    f"{name} is {most}, but --budget and --tune change the number of steps. Use a "
                    "share of the steps, such as 0.1."
                )

    def _warn_of_unequal_passes(self) -> None:
        """Warn if a forward pass of a pair costs more in some runs than in others."""
        runs = [flat(asdict(config)) for config in self.configs]
        values = {name: {repr(run[name]) for run in runs} for name in COST_OF_A_PASS}
        if differ := [name for name in COST_OF_A_PASS if len(values[name]) > 1]:
            warnings.warn(
                f"--budget {self.options.budget} counts forward passes of a pair, which do not "
                f"cost the same if {', '.join(differ)} differs between the runs; a budget in "
                "seconds is fair",
                stacklevel=3,
            )

    def _warn_of_other_dropout(self) -> None:
        """Warn if only some of the runs train without dropout because of partial replay."""
        others = [config for config in self.configs if config.replay_share == 1]
        if len(others) < len(self.configs) and any(each.model.dropout != 0 for each in others):
            warnings.warn(
                "partial replay trains without dropout, and other runs with it; set model.dropout "
                "0 to compare only the methods",
                stacklevel=3,
            )

    def _without_invalid(self, variant: Variant) -> Variant:
        """Leave out the combinations of tuned values that cannot be trained."""
        valid, problems = [], []
        for candidate in variant.candidates:
            try:
                config = self.config(variant.changes(candidate))
                validate(replace(config, output_dir=str(self.output)))
                valid.append(candidate)
            except InputError as error:
                problems.append(f"{named(variant.label, candidate)}: {error}")
        if not valid:
            raise InputError(problems[0])
        for problem in problems:
            warnings.warn(f"{problem}. This combination is left out", stacklevel=2)
        return replace(variant, candidates=tuple(valid))

    def _test_data(self) -> dict[str, str]:
        """Return the data and the split of the test data.

        Raise InputError if it is the training data or the dev data.
        """
        test, split = self.options.test or self.base.data.train, self.options.test_split
        if not test:
            raise InputError(
                "--test is not set. With data.mixture, --test must name the test data."
            )
        if self.tuned and not self.base.data.dev:
            raise InputError("data.dev: not set; tuning needs dev data")
        for config in self.configs:
            require_unseen(test, split, config.data)
        return {"data": test, "split": split}

    def run(self, signals: StopSignals) -> str:
        """Train and evaluate all runs that are not finished, and write the report."""
        finals = {
            (variant.label, candidate): [
                self._plan_run(variant, candidate, seed, FULL, self.test) for seed in self.seeds
            ]
            for variant in self.variants
            for candidate in variant.candidates
        }
        trials = {
            (each.variant.label, candidate, share): self._plan_run(
                each.variant, candidate, self.seeds[0], share, None
            )
            for each in self.tuned
            for candidate in each.variant.candidates
            for share in each.shares
        }
        baselines = [
            self._job(
                named(kind, values), kind, self.config(values), self.test, self.output / "runs"
            )
            for kind, values in self.baselines
        ]
        self._check_folders([*itertools.chain(*finals.values()), *trials.values(), *baselines])
        warned: set[str] = set()

        def train(candidates: list[tuple[Variant, Values, Fraction]]) -> list[float | None]:
            jobs = [trials[variant.label, values, share] for variant, values, share in candidates]
            with signals.deferred():
                run_jobs(jobs, self.slots, signals, warned)
            return [dev_score(job.folder) for job in jobs]

        tune(self.tuned, train)
        chosen = {each.variant.label: each.chosen for each in self.tuned}
        rows: dict[str, list[Job]] = {}  # label of a variant -> its runs
        failed: dict[str, str] = {}
        for variant in self.variants:
            candidate = chosen.get(variant.label, variant.candidates[0])
            if candidate is None:
                failed[variant.label] = "all runs of the last round of tuning failed"
            else:
                rows[variant.label] = finals[variant.label, candidate]
        labels = {job.folder: label for label, row in rows.items() for job in row}
        for job in trials.values():
            if job.folder not in labels and job.done:
                delete_weights(job.folder)
        jobs = [*itertools.chain(*rows.values()), *baselines]
        with signals.deferred():
            failed |= run_jobs(jobs, self.slots, signals, warned)
        if not self.options.keep_weights:  # those of earlier calls and of chosen trials, too
            for job in jobs:
                if job.done:
                    delete_weights(job.folder)

        problems = [f"{name}: {problem}" for name, problem in failed.items()]
        failure = ""
        if failed:
            failure = (
                f"{counted(len(failed), 'run')} failed. The first is {problems[0]} (logs: "
                f"{self.output / 'jobs'})"
            )
        runs = [load_run_record(job.folder) for job in jobs if job.done]
        if not runs:
            raise Failed(failure)
        warn_of_different_tests(runs)
        groups = group_runs(runs, labels)
        metric = self.base.run.metric
        found = differences(groups, metric, self._reference(rows, baselines))
        tuning = [tuning_section(self.tuned, metric)] if self.tuned else []
        page = self.output / "report.html"
        write_page(page, "Comparison", groups, metric, found, tuning, problems)
        write_json(
            self.output / "compare.json",
            {
                "metric": metric,
                "budget": self.options.budget,
                "results": results(groups, metric, found),
                "chosen": {label: values and dict(values) for label, values in chosen.items()},
                "failed": problems,
            },
        )
        if failed:
            raise Failed(f"{failure}. {page} shows the other runs")
        return f"{console_table(groups, metric, found)}\n\n{page}"

    def _check_folders(self, jobs: Iterable[Job]) -> None:
        """Raise InputError if two runs have the same folder, or if a folder has another result."""
        planned: dict[Path, Job] = {}
        for job in jobs:
            other = planned.setdefault(job.folder, job)
            if other.name != job.name or other.config != job.config:
                raise InputError(
                    f"{job.folder}: two runs would use this folder, {other.name} and {job.name}. "
                    "Its name has no groups of settings, and all characters except letters, "
                    "digits and ._=+- become underscores. Choose labels and values whose folders "
                    "differ."
                )
            job.refuse_changes()

    def _reference(self, rows: dict[str, list[Job]], baselines: list[Job]) -> set[Path]:
        """Return the folders of the runs that ``--against`` names by a label or by a method."""
        labels = [variant.label for variant in self.variants if variant.label == self.against]
        labels = labels or [one.label for one in self.variants if one.method == self.against]
        folders = {job.folder for label in labels for job in rows.get(label, ())}
        return folders | {job.folder for job in baselines if job.name == self.against}

    def _plan_run(
        self,
        variant: Variant,
        candidate: Values,
        seed: int,
        share: Fraction,
        test: dict[str, str] | None,
    ) -> Job:
        """Plan a run. share: share of the full budget. test: None for a run of tuning."""
        config = self.config(variant.changes(candidate))
        price = 0.0
        if self.budget:
            price = step_price(config, self.budget, self.output, self.slots[0])
        config = replace(limited(config, self.budget, share, price), seed=seed)
        name = f"{named(variant.label, candidate)}-seed{seed}"
        if share < 1:
            name += f"-{share.numerator}of{share.denominator}"
            return self._job(name, "run", config, test, self.output / "tuning", keep=False)
        # keep the weights of tuning runs with the full budget, to evaluate the chosen one
        keep = test is None or self.options.keep_weights
        return self._job(name, "run", config, test, self.output / "runs", keep)

    def _job(
        self,
        name: str,
        kind: JobKind,
        config: TrainConfig,
        test: dict[str, str] | None,
        parent: Path,
        keep: bool = True,
    ) -> Job:
        folder = parent / re.sub(r"[^A-Za-z0-9._=+-]", "_", name)
        config = replace(config, output_dir=str(folder), resume=True)
        key = repr((kind, test, config.data, config.distils, config.model, config.loss.guide))
        if key not in self.contents:
            self.contents[key] = contents_of(kind, config, test)
        return Job(name, kind, config, self.contents[key], test, keep)


def require_unseen(test: str, split: str, data: DataConfig) -> None:
    """Raise InputError if the test data is the training data or the dev data.

    The dev data, which must not be the training data either, chooses settings when tuning, and
    always the model that a run keeps.
    """
    require_other_dev(data)
    if is_trained_on(data, test, split):
        raise InputError(
            f"the test data is the training data ({test} {split}); name other data with --test"
        )
    if data.dev and source_of(data.dev, data.dev_split) == source_of(test, split):
        raise InputError(
            f"data.dev is the test data ({test} {split}), but a run keeps its best model on "
            "data.dev. Name other queries with data.dev or --test, or leave data.dev out."
        )

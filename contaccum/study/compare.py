"""``contaccum compare``: methods, varied settings and seeds, trained, scored on the same test data, and weighed."""

import fcntl
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from contaccum.data.stream import open_training
from contaccum.data.tables import load_retrieval_set
from contaccum.errors import Failed, InputError
from contaccum.evaluation.stored import read_metrics
from contaccum.files import write_json
from contaccum.options import StudyOptions
from contaccum.study import grid
from contaccum.study.checked import read_score
from contaccum.study.grid import RATE, Configure, Planned, Setting
from contaccum.study.plots import need_matplotlib
from contaccum.study.pool import Job, Outcome, Place, one_process, places, run_jobs
from contaccum.study.report import Tuned, write_report
from contaccum.study.runs import METRICS_FILE, TUNED_FILE
from contaccum.training.setup import CONFIG_FILE, config_differences, read_config
from contaccum.training.signals import StopSignals


def compare(configure: Configure, options: StudyOptions) -> Path:
    """Run what is missing and write the report; returns its HTML page.

    Raises InputError before anything runs where a setting, the data or a folder's contents do not fit, Interrupted after a
    signal, Failed at the end when runs broke off (the report then shows the others).
    """
    study = Study(configure, options)
    study.check()
    study.output.mkdir(parents=True, exist_ok=True)
    with _alone(study.output) as lock, StopSignals() as signals:
        return study.run(signals, lock)


class Study:
    """One comparison."""

    def __init__(self, configure: Configure, options: StudyOptions) -> None:
        self.configure, self.options = configure, options
        self.base = configure({})
        if not self.base.output_dir:
            raise InputError("output_dir is not set, expected the folder of the comparison")
        self.output = Path(self.base.output_dir)
        if options.seeds < 1 or (options.parallel is not None and options.parallel < 1):
            raise InputError(f"--seeds is {options.seeds} and --parallel {options.parallel}, expected at least 1")
        self.seeds = [self.base.seed + number for number in range(options.seeds)]
        self.methods = grid.read_methods(options.methods, self.base.method)
        varied = grid.read_varied(options.vary)
        self.rates = grid.comma_list(options.tune_learning_rate)
        if self.rates and RATE in varied:
            raise InputError(f"{RATE} is varied and tuned, expected one of --vary and --tune_learning_rate")
        self.settings = grid.settings(self.methods, varied)
        self.baselines = grid.planned_baselines(grid.read_baselines(options.baselines), varied, configure, self.output)
        against = options.against or ("grad_cache" if "grad_cache" in self.methods else self.methods[0])
        if against not in self.methods:
            raise InputError(f"--against is {against!r}, expected one of {', '.join(self.methods)}")
        self.against = against
        self.test = {"data": options.test or self.base.data.train, "split": options.test_split}
        self.failed: list[Outcome] = []

    # before anything runs

    def check(self) -> None:
        """Refuse what could not run to its end, and folders that hold something else."""
        one_process("compare")
        need_matplotlib()
        planned = [
            run
            for setting in self.settings
            for rated in ([setting.with_rate(rate) for rate in self.rates] or [setting])
            for run in self._runs(rated)
        ]
        grid.refuse_same(planned)
        self._check_data()
        names: dict[Path, str] = {}
        for run in [*planned, *self.baselines]:
            if names.setdefault(run.folder, run.name) != run.name:
                raise InputError(f"{run.name} and {names[run.folder]} would share {run.folder}, expected other values")
            self._refuse_other(run)

    def _check_data(self) -> None:
        """All data can be read, and the test data is neither what is tuned by nor, without a warning, what is trained on."""
        data, test = self.base.data, (self.test["data"], self.test["split"])
        if not test[0]:
            raise InputError("data.mixture has no test data of its own, expected --test DATA")
        tested = _queries(*test)
        if Path(test[0]).is_file() and self.options.test is None:
            raise InputError(f"{test[0]} is a file of examples, which has no split {test[1]!r}; expected --test DATA")
        if self.rates and not data.dev:
            raise InputError("--tune_learning_rate chooses by data.dev, which is not set")
        if self.rates and _queries(data.dev or "", data.dev_split) == tested:
            raise InputError(f"data.dev is the test data ({' '.join(test)}), expected other queries to tune by")
        if _queries(data.train, data.split) == tested:
            warnings.warn(f"the test data is the training data ({' '.join(test)})", stacklevel=2)
        how = data.strict, data.repair, data.max_bad_records
        load_retrieval_set(test[0], test[1], *how)
        if data.dev:
            load_retrieval_set(data.dev, data.dev_split, *how)
        open_training(data, self.base.distils)

    def _runs(self, setting: Setting) -> list[Planned]:
        return [grid.planned_run(setting, seed, self.configure, self.output) for seed in self.seeds]

    def _refuse_other(self, run: Planned) -> None:
        """A folder that holds a run or a score of something else than what is asked."""
        if (run.folder / CONFIG_FILE).is_file():
            changes = config_differences(read_config(run.folder), asdict(run.config))
            if changes:
                raise InputError(
                    f"{run.folder} holds a run with other settings, expected the same or another output_dir: "
                    f"{'; '.join(changes)}"
                )
        if (run.folder / METRICS_FILE).is_file():
            found = read_metrics(run.folder / METRICS_FILE)
            for name, value in {**self.test, **grid.identity(run.kind, run.config)}.items():
                if found.get(name) != value:
                    raise InputError(
                        f"{run.folder / METRICS_FILE} was made with {name} {found.get(name)}, expected {value} or another "
                        "output_dir"
                    )

    # the runs

    def run(self, signals: StopSignals, lock: int) -> Path:
        room = places(self.base.run.device, self.options.parallel)
        tuned = self._tune(room, signals, lock) if self.rates else []
        chosen = {one.setting: one.rate for one in tuned}
        settings = [
            setting.with_rate(chosen[setting.name]) if self.rates else setting
            for setting in self.settings
            if not self.rates or setting.name in chosen
        ]
        runs = [*(run for setting in settings for run in self._runs(setting)), *self.baselines]
        missing = [run for run in runs if not (run.folder / METRICS_FILE).is_file()]
        self.failed += self._do(missing, self.test, room, signals, lock)
        done = [run.folder for run in runs if (run.folder / METRICS_FILE).is_file()]
        page = write_report(
            self.output,
            done,
            self.base.run.metric,
            self.against,
            tuned,
            [f"{o.job.name}: {o.last}" for o in self.failed],
        )
        if self.failed:
            first = self.failed[0]
            raise Failed(
                f"{len(self.failed)} runs broke off, first {first.job.name} (exit code {first.code}, {first.job.log}): "
                f"{first.last.removeprefix('contaccum: ')}; {page} shows the others"
            )
        return page

    def _tune(self, room: list[Place], signals: StopSignals, lock: int) -> list[Tuned]:
        """Train each setting at each rate with the first seed; the best on dev is chosen, of equal ones the lowest rate."""
        trials = {
            setting: {
                rate: grid.planned_run(setting.with_rate(rate), self.seeds[0], self.configure, self.output)
                for rate in sorted(self.rates, key=float)
            }
            for setting in self.settings
        }
        missing = [run for runs in trials.values() for run in runs.values() if not (run.folder / TUNED_FILE).is_file()]
        failed = self._do(missing, None, room, signals, lock)
        found = []
        for setting, runs in trials.items():
            scores = {
                rate: read_score(run.folder / TUNED_FILE)
                for rate, run in runs.items()
                if (run.folder / TUNED_FILE).is_file()
            }
            if scores:  # a rate under which training broke off is passed over
                found.append(Tuned(setting.name, scores, max(scores, key=lambda rate: scores[rate])))
            else:
                self.failed += [one for one in failed if one.job.name in {run.name for run in runs.values()}]
        return found

    def _do(
        self, runs: list[Planned], test: dict[str, str] | None, room: list[Place], signals: StopSignals, lock: int
    ) -> list[Outcome]:
        """Run these; returns the outcomes of those that broke off."""
        jobs = []
        for run in runs:
            file = self.output / "jobs" / f"{run.folder.name}.json"
            write_json(file, {"kind": run.kind, "config": asdict(run.config), "test": test})
            jobs.append(Job(run.name, file))
        ended = 0

        def report(outcome: Outcome) -> None:
            nonlocal ended
            ended += 1
            said = "done" if outcome.code == 0 else f"exit code {outcome.code}, {outcome.last}"
            print(f"[{ended}/{len(jobs)}] {outcome.job.name}: {said} ({outcome.seconds:.0f} s)", file=sys.stderr)

        with signals.deferred():
            return run_jobs(jobs, room, signals, report, lock)


def _queries(data: str, split: str) -> tuple[str, str]:
    """What tells the queries of one data set and split from others; a file of examples has no splits."""
    return os.path.realpath(data), "" if Path(data).is_file() else split


@contextmanager
def _alone(output: Path) -> Iterator[int]:
    """Wait until no process of another comparison, or of one that was killed, works in the folder; gives the lock's number."""
    lock = os.open(output / ".lock", os.O_CREAT | os.O_RDWR)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(
                f"{output}: waiting for another comparison, or for the processes of one that was killed",
                file=sys.stderr,
            )
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock
    finally:
        os.close(lock)

"""Runs side by side: a table for the terminal, and the report of a study as a page, Markdown, CSV and PNG."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from contaccum.config import TRAITS
from contaccum.errors import InputError
from contaccum.files import whole_file, write_text
from contaccum.study import plots, tables
from contaccum.study.page import Section, html, markdown
from contaccum.study.runs import Group, Run, group_runs, read_run
from contaccum.study.tables import Choose, Difference, Table, figure, text

COLUMNS = (
    "run", "method", "N", "B", "bank", "metric", "s/step", "pairs/s", "peak MiB", "wait %", "grad ratio", "negatives",
)  # fmt: skip
PLOTS = "plots"


class Tuned(NamedTuple):
    """What the choice of a learning rate saw."""

    setting: str
    scores: dict[str, float]
    """Rate to the metric on dev."""
    rate: str


def runs_table(runs: Sequence[Run], metric: str) -> Table:
    """A row a run; figures of a step are medians over the run, its first step left out."""
    return Table([metric if column == "metric" else column for column in COLUMNS], [_row(run, metric) for run in runs])


def _micro_batch(run: Run) -> int | str | None:
    """Pairs in one forward pass, or its budget of tokens; the whole step's pairs where the method takes it at once."""
    if run.method is not None and TRAITS[run.method].whole:
        return run.config.get("batch.global_batch_size")
    tokens = run.config.get("batch.micro_batch_tokens")
    return run.config.get("batch.micro_batch_size") if tokens is None else f"{tokens} tokens"


def _row(run: Run, metric: str) -> list[str]:
    """One with metrics alone (a baseline without training) has a name and a metric."""
    peak = run.peak_memory
    return [
        run.name,
        text(run.method),
        text(run.config.get("batch.global_batch_size")),
        text(_micro_batch(run)),
        text(max((line["bank_fill"] for line in run.steps), default=None)),
        figure(run.score(metric)),
        figure(run.median("seconds"), ".3f"),
        figure(run.median("pairs_per_second"), ".1f"),
        figure(None if peak is None else peak / 2**20, ".0f"),
        figure(None if run.waited is None else 100 * run.waited, ".1f"),
        figure(run.median("grad_norm_ratio"), ".2f"),
        figure(run.median("negatives"), ".1f"),
    ]


def reference_run(runs: Sequence[Run], folder: str) -> Choose:
    """The group of the run in ``folder`` stands for every N."""
    named = [run for run in runs if run.folder.resolve() == Path(folder).resolve()]
    if not named:
        raise InputError(
            f"--against is {folder}, expected one of the runs: {', '.join(str(run.folder) for run in runs)}"
        )
    if not (named[0].metrics or {}).get("per_query"):
        raise InputError(f"{folder}: has no metrics of every query to test against")
    groups = group_runs(list(runs))
    label = next(group.label for group in groups if named[0] in group.runs)
    return lambda _: next(group for group in groups if group.label == label)


def console_report(folders: Sequence[str], metric: str, against: str | None, page: str | None) -> str:
    """``contaccum report``: the table, the tests against a run where one is named, and the page where a file is."""
    runs = [read_run(folder) for folder in folders]
    choose = reference_run(runs, against) if against else None
    parts = [runs_table(runs, metric).markdown()]
    if choose:
        parts.append(tables.tests(tables.differences(group_runs(runs), metric, choose)).markdown())
    if page:
        groups = group_runs(runs)
        found = tables.differences(groups, metric, choose) if choose else []
        sections = _sections(runs, groups, metric, found)
        write_text(page, html("Report", sections, plots.draw_all(groups, metric), plots.legend(groups)))
    return "\n\n".join(parts)


def write_report(
    output: Path, folders: Sequence[Path], metric: str, against: str, tuned: Sequence[Tuned], broken: Sequence[str]
) -> Path:
    """The report of a comparison into its folder: report.html, report.md, runs.csv, tests.csv and plots/; returns the page."""
    runs = [read_run(folder) for folder in folders]
    groups = group_runs(runs)
    found = tables.differences(groups, metric, tables.best_of_method(against, metric))
    sections = _sections(runs, groups, metric, found, tuned, broken)
    drawn = plots.draw_all(groups, metric)
    for plot in drawn:
        with whole_file(output / PLOTS / f"{plot.name}.png") as file:
            file.write(plot.png)
    write_text(output / "runs.csv", _csv(runs_csv(runs)))
    write_text(output / "tests.csv", _csv(tables.tests(found)))
    write_text(output / "report.md", markdown("Comparison", sections, drawn, PLOTS))
    page = output / "report.html"
    write_text(page, html("Comparison", sections, drawn, plots.legend(groups)))
    return page


def _sections(
    runs: list[Run],
    groups: list[Group],
    metric: str,
    found: list[Difference],
    tuned: Sequence[Tuned] = (),
    broken: Sequence[str] = (),
) -> list[Section]:
    sections = [_first(groups, metric, found, broken)]
    trained = [group for group in groups if group.method]
    sections += [
        Section(f"At equal N = {size}", (), [tables.quality(members, metric)])
        for size, members in tables.by_step_size(trained).items()
        if len(tables.by_step_size(trained)) > 1
    ]
    if trained:
        sections += [_memory(groups, metric), _time(groups, metric)]
    if tuned:
        sections.append(_tuning(tuned, metric))
    if settings := tables.settings_table(groups):
        sections.append(Section("Settings that differ", (), [settings]))
    sections.append(Section("Runs", (), [runs_table(runs, metric)], ("Figures of a step are medians over the run.",)))
    if made := tables.environments(runs):
        sections.append(Section("Environment", (), [made]))
    return sections


def _first(groups: list[Group], metric: str, found: list[Difference], broken: Sequence[str]) -> Section:
    notes = [f"{metric} on the test data, mean and standard deviation (sd) over seeds."]
    if broken:
        notes.append("Broken off, and not in the tables: " + "; ".join(broken))
    sizes = {group.setting("batch.global_batch_size") for group in groups if group.method}
    title = f"Quality at equal N = {sizes.pop()}" if len(sizes) == 1 else "Quality"
    if not found:
        return Section(title, notes, [tables.quality(groups, metric)])
    queries = ", ".join(dict.fromkeys(str(one.found.queries) for one in found))
    return Section(
        title, notes, [tables.quality(groups, metric), tables.tests(found)],
        (
            f"Differences are taken query by query ({queries} queries) between means over seeds. The permutation test (sign "
            "flips) and Student's paired t-test ask whether a difference would hold on other queries, for these trained models; "
            "the last column counts the seeds as drawn at random too (min F', Clark 1973) and needs two seeds or more. All p "
            f"values are two-sided and corrected by Holm for this report's comparisons ({len(found)}), each kind of test for "
            "itself. Effect d is the mean difference over the standard deviation of the differences. Of a reference method "
            "with several settings the best one is taken, which favours the reference.",
        ),
    )  # fmt: skip


def _memory(groups: list[Group], metric: str) -> Section:
    note = (
        f"Settings whose peaks lie within {tables.SAME_MEMORY:.0%} of the smallest among them count as equal. The peak is the "
        "most memory allocated on a GPU, or the most that the process held on a CPU, where it counts libraries and data too."
    )
    return Section("At equal peak memory", (), [tables.equal_memory(groups, metric)], (note,))


def _time(groups: list[Group], metric: str) -> Section:
    how = (
        "Seconds of training are the sum of the log's seconds per step; evaluations, checkpoints and measuring drift are not "
        "among them."
    )
    view = tables.equal_time(groups, metric)
    if view is None:
        missing = f"Nothing to show: no run was evaluated on dev (data.dev, run.eval_steps). {how}"
        return Section("At equal training time", (), (), (missing,))
    seconds, table = view
    note = (
        f"Each run's last evaluation on dev within the first {seconds:.1f} s, the time of the quickest setting. {how}"
    )
    return Section("At equal training time", (), [table], (note,))


def _tuning(tuned: Sequence[Tuned], metric: str) -> Section:
    rates = list(tuned[0].scores) + [rate for one in tuned[1:] for rate in one.scores]
    heads = list(dict.fromkeys(rates))
    rows = [[one.setting, *(figure(one.scores.get(rate)) for rate in heads), one.rate] for one in tuned]
    note = (
        f"{metric} on dev at each learning rate, with the first seed alone. The best was taken for all seeds; the test data had "
        "no part in the choice. A rate without a figure broke off."
    )
    return Section("Learning rate", (), [Table(["setting", *heads, "chosen"], rows)], (note,))


def runs_csv(runs: Sequence[Run]) -> Table:
    """Every run with its settings, figures and all means of its metrics, for other tools."""
    measures = list(dict.fromkeys(name for run in runs for name in (run.metrics or {}).get("mean", {})))
    settings = list(dict.fromkeys(name for run in runs for name in run.config))
    figures = ("train_seconds", "peak_memory")
    medians = ("seconds", "grad_norm_ratio", "negatives", "drift_query_cosine", "drift_passage_cosine")
    rows = [
        [
            run.name,
            *(str((run.metrics or {}).get("mean", {}).get(name, "")) for name in measures),
            *(_plain(getattr(run, name)) for name in figures),
            *(_plain(run.median(name)) for name in medians),
            *(_plain(run.config.get(name)) for name in settings),
        ]
        for run in runs
    ]
    return Table(["run", *measures, *figures, *medians, *settings], rows)


def _plain(value: object) -> str:
    return "" if value is None else str(value)


def _csv(table: Table) -> str:
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows([table.heads, *table.rows])
    return file.getvalue()

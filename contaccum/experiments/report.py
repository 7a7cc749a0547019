"""Make reports on training runs: tables for the console, sections for HTML and Markdown."""

import warnings
from collections.abc import Sequence
from pathlib import Path

from contaccum.config import METHOD_SPECS
from contaccum.errors import InputError
from contaccum.experiments.changed_queries import changed_queries
from contaccum.experiments.page import MISSING, Section, Table, draw_all, html, legend, number, text
from contaccum.experiments.run_records import (
    Difference,
    RunGroup,
    RunRecord,
    best_first,
    by_global_batch,
    differences,
    for_order,
    group_runs,
    load_run_record,
    varied,
)  # fmt: skip
from contaccum.runtime.files import write_text

WIDE_ONLY = ("N", "B", "bank", "pairs/s", "wait %", "effect d", "p t")
"""Columns that the console shows only with --wide."""
SIGNIFICANT = 0.05  # largest p value of a significant difference


def console_report(
    folders: Sequence[str],
    metric: str,
    against: str | None,
    page: str | None,
    wide: bool = False,
    width: int | None = None,
) -> str:
    """Return the table of runs as text.

    If ``page`` is given, also write the report to this HTML file.

    Warn if the runs were evaluated on different test queries.

    against: folder of the reference run of the significance tests. None: no tests. wide: True to
    show all columns. width: maximum length of a line.
    """
    runs = [load_run_record(folder) for folder in folders]
    tested = {frozenset(run.per_query): run for run in runs if run.per_query}
    if len(tested) > 1:
        first, second, *_ = (
            f"{run.folder} has {len(run.per_query)} queries" for run in tested.values()
        )
        warnings.warn(
            f"the runs were evaluated on different test queries ({first}, {second}); their metrics "
            "cannot be compared",
            stacklevel=2,
        )
    groups, found = group_runs(runs), []
    if against:
        by_size = [group for members in by_global_batch(groups).values() for group in members]
        found = differences(by_size, metric, [_reference_folder(runs, against)], equal_batch=False)
    table = runs_table(groups, metric)
    parts = [(table if wide else table.without(WIDE_ONLY)).markdown(width)]
    if against:
        tests = tests_table(found)
        parts.append((tests if wide else tests.without(WIDE_ONLY)).markdown(width))
    if page:
        sections = sections_of(runs, groups, metric, found)
        changed = changed_queries(groups, found, metric)
        write_text(
            page, html("Report", sections, draw_all(groups, metric), legend(groups), changed)
        )
    return "\n\n".join(parts)


def _reference_folder(runs: Sequence[RunRecord], folder: str) -> Path:
    """Return the folder of the reference run.

    Raise InputError if ``folder`` is no run of the report, or was not evaluated.
    """
    named = next((run for run in runs if run.folder.resolve() == Path(folder).resolve()), None)
    if named is None:
        known = ", ".join(str(run.folder) for run in runs)
        raise InputError(f"--against is {folder}; it must be one of the runs {known}")
    if not named.per_query:
        raise InputError(
            f"{folder}: has no metrics per query; evaluate the run on the test data first"
        )
    return named.folder


def sections_of(
    runs: list[RunRecord],
    groups: list[RunGroup],
    metric: str,
    found: list[Difference],
    failed: Sequence[str] = (),
) -> list[Section]:
    """Return the sections of a report.

    found: significance tests. failed: messages of failed runs.
    """
    sections = [
        Section("Result", verdict(groups, metric, found)),
        _quality_section(groups, metric, found, failed),
    ]
    settings = settings_table([group for group in groups if group.method])
    if settings.rows:
        sections.append(Section("Settings that differ", (), [settings]))
    footnote = (
        "s/step, pairs/s, grad ratio and negatives are medians over the steps of a run, without "
        "the first step. On a GPU, the peak is the allocated memory. On a CPU, it is the resident "
        "memory of the process, which includes libraries and data."
    )
    sections.append(Section("Runs", (), [runs_table(groups, metric)], (footnote,)))
    if any(run.environment for run in runs):
        sections.append(Section("Environment", (), [environments(runs)]))
    return sections


def verdict(groups: list[RunGroup], metric: str, found: list[Difference]) -> list[str]:
    """Return the result in words: the best group, and those that differ from their reference."""
    scored = [group for group in best_first(groups, metric) if group.scores(metric)]
    if not scored:
        return [f"No run has {metric} on the test data."]
    words = [f"{scored[0].label} has the highest {metric}: {number(scored[0].score(metric)[0])}."]
    if not found:
        return (
            [f"{words[0]} No significance test was run, so this may be due to chance."]
            if len(scored) > 1
            else words
        )
    # one sentence for each reference and kind of test
    sentences: dict[tuple[str, str], dict[str, list[str]]] = {}
    for one in found:
        over = "queries" if one.p_both is None else "queries and seeds"
        p = one.p_permutation if one.p_both is None else one.p_both
        kind = "better" if one.found.difference > 0 else "worse"
        if p >= SIGNIFICANT:
            kind = "not significantly different"
        empty: dict[str, list[str]] = {"better": [], "worse": [], "not significantly different": []}
        sentences.setdefault((one.reference.label, over), empty)[kind].append(one.group.label)
    for (reference, over), kinds in sentences.items():
        parts = "; ".join(
            f"{kind}: {', '.join(labels)}" for kind, labels in kinds.items() if labels
        )
        words.append(
            f"Compared with {reference} over {over} (corrected p below {SIGNIFICANT}): {parts}."
        )
    return words


def _quality_section(
    groups: list[RunGroup], metric: str, found: list[Difference], failed: Sequence[str]
) -> Section:
    notes = [f"{metric} on the test data: mean and standard deviation (sd) over seeds."]
    if failed:
        notes.append("Failed runs, not in the tables: " + "; ".join(failed))
    sizes = {group.setting("batch.global_batch_size") for group in groups if group.method}
    title = f"Quality at equal N = {sizes.pop()}" if len(sizes) == 1 else "Quality"
    if not found:
        return Section(title, notes, [quality(groups, metric)])
    queries = ", ".join(dict.fromkeys(str(one.found.queries) for one in found))
    footnote = (
        f"A difference in {metric} is a mean over seeds and {queries} queries. The permutation "
        "test (sign flips) and Student's paired t-test check whether the difference of these "
        "trained models generalizes to other queries. The test in the last column (min F', Clark "
        "1973) checks whether it generalizes to other queries and other seeds; it needs at least "
        "two seeds. All p values are two-sided. Holm's method corrects each type of test for the "
        f"{len(found)} comparisons of this report. Effect d is the mean difference divided by the "
        "standard deviation of the differences. If the reference method has several settings, its "
        "best setting is the reference."
    )
    return Section(title, notes, [quality(groups, metric), tests_table(found)], (footnote,))


def quality(groups: list[RunGroup], metric: str) -> Table:
    """Return a table with the metric and the training cost of each group.

    The group with the best metric comes first.
    """
    rows = [
        [
            group.label,
            group.settings,
            *map(number, group.score(metric)),
            str(len(group.scores(metric))) if group.method else MISSING,
            number(group.mean("train_seconds"), ".1f"),
            number(group.mean("peak_mib"), ".0f"),
            number(group.median("grad_norm_ratio"), ".2f"),
            number(group.median("negatives"), ".1f"),
        ]
        for group in best_first(groups, metric)
    ]
    return Table(
        [
            "run", "settings", metric, "sd", "seeds", "train s", "peak MiB", "grad ratio",
            "negatives",
        ],
        rows,
    )  # fmt: skip


def tests_table(found: list[Difference]) -> Table:
    """Return a table of tests: difference, 95 % interval, effect size and corrected p."""
    heads = [
        "run", "against", "difference", "95 % interval", "effect d", "better / worse",
        "p permutation", "p t", "p seeds and queries",
    ]  # fmt: skip
    rows = [
        [
            test.group.label,
            test.reference.label,
            f"{test.found.difference:+.4f}",
            f"{test.found.low:+.4f} to {test.found.high:+.4f}",
            f"{test.found.effect:+.2f}",
            f"{test.found.wins} / {test.found.losses}",
            p_value(test.p_permutation),
            p_value(test.p_t),
            p_value(test.p_both),
        ]
        for test in found
    ]
    return Table(heads, rows)


def p_value(p: float | None) -> str:
    return "< 0.0001" if p is not None and p < 0.0001 else number(p)


def settings_table(trained: list[RunGroup]) -> Table:
    """Return a table of the settings that differ between the trained groups.

    Each group has a column.
    """
    names = ["method", *varied(run for group in trained for run in group.runs)]
    rows = [[name, *(text(group.setting(name)) for group in trained)] for name in names]
    return Table(
        ["setting", *(group.label for group in trained)],
        [row for row in rows if len(set(row[1:])) > 1],
    )


def runs_table(groups: Sequence[RunGroup], metric: str) -> Table:
    """Return a table with one row per run.

    The run with the best metric comes first, runs without the metric last.

    The columns s/step, pairs/s, grad ratio and negatives are medians over the steps of a run,
    without the first step.
    """
    heads = [
        "run",
        "settings",
        "N",
        "B",
        "bank",
        metric,
        "s/step",
        "pairs/s",
        "peak MiB",
        "wait %",
        "grad ratio",
    ]
    rows = [
        [
            run.name,
            group.settings,
            text(run.config.get("batch.global_batch_size")),
            text(_micro_batch(run)),
            text(max((line["bank_fill"] for line in run.steps), default=None)),
            number(run.score(metric)),
            number(run.median("seconds"), ".3f"),
            number(run.median("pairs_per_second"), ".1f"),
            number(run.peak_mib, ".0f"),
            number(None if run.waited is None else 100 * run.waited, ".1f"),
            number(run.median("grad_norm_ratio"), ".2f"),
            number(run.median("negatives"), ".1f"),
        ]
        for group, run in sorted(
            ((group, run) for group in groups for run in group.runs),
            key=lambda pair: for_order(pair[1].score(metric)),
            reverse=True,
        )
    ]
    return Table([*heads, "negatives"], rows)


def _micro_batch(run: RunRecord) -> int | str | None:
    if run.method is not None and METHOD_SPECS[run.method].whole:
        return run.config.get("batch.global_batch_size")
    tokens = run.config.get("batch.micro_batch_tokens")
    return run.config.get("batch.micro_batch_size") if tokens is None else f"{tokens} tokens"


def runs_csv(runs: Sequence[RunRecord]) -> Table:
    """Return a table with the metrics, logged values and settings of each run.

    The numbers are not rounded.
    """
    means = [(run.metrics or {}).get("mean", {}) for run in runs]
    metrics = list(dict.fromkeys(name for mean in means for name in mean))
    settings = list(dict.fromkeys(name for run in runs for name in run.config))
    totals = ("train_seconds", "peak_memory")
    medians = (
        "seconds",
        "grad_norm_ratio",
        "negatives",
        "drift_query_cosine",
        "drift_passage_cosine",
    )
    rows = []
    for run, mean in zip(runs, means, strict=True):
        values = [
            *map(mean.get, metrics),
            *(getattr(run, name) for name in totals),
            *map(run.median, medians),
        ]
        values += map(run.config.get, settings)
        rows.append([run.name, *("" if value is None else str(value) for value in values)])
    return Table(["run", *metrics, *totals, *medians, *settings], rows)


def environments(runs: list[RunRecord]) -> Table:
    """Return a table of the software versions and devices of the runs.

    If the runs differ, a cell lists all values.
    """
    known = [run.environment for run in runs if run.environment]
    names = list(dict.fromkeys(name for found in known for name in found))
    return Table(
        ["", ""],
        [[n, ", ".join(dict.fromkeys(str(found.get(n)) for found in known))] for n in names],
    )

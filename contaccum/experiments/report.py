"""Reports on training runs: the table in the terminal, the HTML page, and compare.json."""

import shutil
import statistics
import warnings
from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import Any

from contaccum.errors import InputError
from contaccum.experiments.changed_queries import changed_queries
from contaccum.experiments.page import Section, Table, draw_all, html, legend, number, text
from contaccum.experiments.run_records import (
    MISSING,
    Difference,
    RunGroup,
    differences,
    group_runs,
    load_run_record,
    ordered_groups,
    warn_of_different_tests,
)
from contaccum.runtime.checks import refuse_other_file
from contaccum.runtime.files import write_text
from contaccum.runtime.units import counted
from contaccum.training.run_folder import METRICS_FILE

SIGNIFICANT = 0.05  # largest p value of a significant difference
ABOUT_P = (
    "p: probability of such a difference by chance, corrected for the number of comparisons; "
    f"significant below {SIGNIFICANT}"
)


def about_seeds(found: Sequence[Difference]) -> str:
    """Say whether the tests are over seeds, too, and which rows have fewer seeds in them."""
    single = [one.group.label for one in found if one.found.both is None]
    if not single:
        about = "The interval and p are over queries and seeds"
    elif len(single) == len(found):
        about = "The interval and p are over queries only, because there are too few seeds"
    else:
        about = (
            "The interval and p are over queries and seeds, but over queries only where there are "
            f"too few seeds: {', '.join(single)}"
        )
    fewer = [
        f"{one.group.label} ({one.found.pairs} seeds)"
        for one in found
        if 1 < one.found.pairs < max(len(one.group.per_query()), len(one.reference.per_query()))
    ]
    if fewer:
        about += f". Where one side has more seeds, only those of both count: {', '.join(fewer)}"
    return about


def console_report(
    folders: Sequence[str],
    metric: str,
    against: str | None = None,
    page: str | None = None,
) -> str:
    """Return a table of runs as text, the best first.

    If ``page`` is given, also write the report to this HTML file, and end the text with its name.

    Warn if the runs were evaluated on different test data.

    against: folder of the reference run of the significance tests. None: no tests.
    """
    refuse_other_file(page, "page")
    runs = [load_run_record(folder) for folder in folders]
    warn_of_different_tests(runs)
    groups, found = group_runs(runs), []
    scored = any(run.metrics for run in runs)
    for group in groups:
        warn_of_group(group, scored)
    if against is not None:
        reference = [run for run in runs if run.folder.resolve() == Path(against).resolve()]
        if not reference:
            known = ", ".join(str(run.folder) for run in runs)
            raise InputError(f"--against is {against}; it must be one of the runs {known}")
        if not reference[0].per_query:
            raise InputError(
                f"{against}: has no metrics per query; evaluate the run on the test data first"
            )
        found = differences(groups, metric, {reference[0].folder})
    if page is not None:
        write_page(page, "Report", groups, metric, found)
    table = console_table(groups, metric, found)
    return f"{table}\n\n{page}" if page else table


def warn_of_group(group: RunGroup, scored: bool) -> None:
    """Warn of stopped runs, of runs without metrics, and of seeds with other training data.

    scored: whether the report has a run with metrics.
    """
    if len({run.data for run in group.runs} - {None}) > 1:
        warnings.warn(
            f"{group.label}: its runs were trained on different data, although the path is the "
            "same; train them again on the same data",
            stacklevel=3,
        )
    for run in group.runs:
        if not run.finished:
            last = max((line["step"] for line in run.steps), default=0)
            warnings.warn(
                f"{run.folder}: the run did not end; its last logged step is {last}. Continue it "
                "with --resume, or leave it out of the comparison.",
                stacklevel=3,
            )
        if not run.metrics and scored:
            warnings.warn(
                f"{run.folder}: has no {METRICS_FILE}, so it has no score here; evaluate it",
                stacklevel=3,
            )


def console_table(groups: Sequence[RunGroup], metric: str, found: Sequence[Difference]) -> str:
    """Return the main columns of the results as text, after two lines about p if it is a column.

    A line has at most 120 characters, or fewer in a narrow terminal.
    """
    heads = ["run", "settings", metric, "train s", "peak MiB", "negatives", "grad ratio"]
    if found:
        heads = [
            "run", metric, f"minus {found[0].reference.label}", "95 % interval", "p", "train s",
            "peak MiB",
        ]  # fmt: skip
    width = min(120, shutil.get_terminal_size((120, 24)).columns)
    table = results_table(groups, metric, found).only(heads).markdown(width)
    return f"{ABOUT_P}\n{about_seeds(found)}\n{table}" if found else table


def write_page(
    file: str | Path,
    title: str,
    groups: Sequence[RunGroup],
    metric: str,
    found: Sequence[Difference],
    tuning: Sequence[Section] = (),
    failed: Sequence[str] = (),
) -> None:
    """Write the report to an HTML file.

    found: significance tests. tuning: section about tuning. failed: messages of failed runs.
    """
    result = [verdict(groups, metric, found)]
    if failed:
        result.append(f"Failed runs, not in the tables: {'; '.join(failed)}")
    known = [run.environment for group in groups for run in group.runs if run.environment]
    used = dict.fromkeys(f"{one.get('device')} with torch {one.get('torch')}" for one in known)
    footnote = (
        "s/step and pairs/s are medians over the steps of a run, without the first step. Devices: "
        f"{', '.join(used) or MISSING}."
    )
    sections = [
        Section("Result", notes=result),
        results_section(groups, metric, found),
        Section("Runs", [runs_table(groups, metric)], [footnote]),
        *tuning,
    ]
    changed = changed_queries(groups, found, metric)
    plots = draw_all(groups, metric)
    write_text(file, html(title, sections, plots, legend(groups), changed))


def verdict(groups: Sequence[RunGroup], metric: str, found: Sequence[Difference]) -> str:
    """Return the result in words: the best group, and those that differ from the reference."""
    best = ordered_groups(groups, metric)[0]
    mean, _ = best.mean_and_sd(metric)
    if mean is None:
        return f"No run has {metric} on the test data."
    words = f"{best.label} has the highest {metric}: {number(mean)}."
    if not found:
        return f"{words} No significance test was run, so this may be due to chance."
    kinds: dict[str, list[str]] = {"better": [], "worse": [], "not significantly different": []}
    for one in found:
        kind = "better" if one.found.difference > 0 else "worse"
        kinds[kind if one.p < SIGNIFICANT else "not significantly different"].append(
            one.group.label
        )
    parts = "; ".join(f"{kind}: {', '.join(labels)}" for kind, labels in kinds.items() if labels)
    return f"{words} Compared with {found[0].reference.label} (p below {SIGNIFICANT}): {parts}."


def results_section(
    groups: Sequence[RunGroup], metric: str, found: Sequence[Difference]
) -> Section:
    footnotes = [
        f"{metric} is the mean over seeds on the test data, sd its standard deviation. A forward "
        "pass is that of one pair; a backward pass counts as 2. Negatives and grad ratio are "
        "medians over the steps of a run, without the first step. On a GPU, the peak is the "
        "allocated memory. On a CPU, it is the resident memory of the process, which includes "
        "libraries and data."
    ]
    if found:
        footnotes.append(
            "The difference is a mean over seeds and "
            f"{counted(found[0].found.queries, 'query')}. p queries (a permutation test with sign "
            "flips) asks whether the difference of these trained models holds for other queries. "
            f"{about_seeds(found)}. Over both means min F' (Clark 1973), but at least the p of a "
            "t-test over the seeds and, with up to 13 queries, at least p queries. "
            f"Both p are two-sided, and corrected by Holm's method for the {len(found)} "
            "comparisons of this report; the interval is not corrected. If the reference method "
            "has several settings, its best setting is the reference."
        )
    table = results_table(groups, metric, found)
    return Section("Quality", [table.only(table.heads)], footnotes)


def results_table(groups: Sequence[RunGroup], metric: str, found: Sequence[Difference]) -> Table:
    """Return a table of the metric, the tests and the training cost of each group, best first."""
    reference = found[0].reference.label if found else MISSING
    rows = []
    for row in results(groups, metric, found):
        interval, better_worse = MISSING, MISSING
        if "difference" in row:
            interval = f"{number(row['low'], '+.4f')} to {number(row['high'], '+.4f')}"
            better_worse = f"{row['better']} / {row['worse']}"
        rows.append(
            {
                "run": row["run"],
                "settings": row["settings"],
                metric: number(row["mean"]),
                "sd": number(row["sd"]),
                "seeds": text(len(row["seeds"]) or None),
                f"minus {reference}": number(row.get("difference"), "+.4f"),
                "95 % interval": interval,
                "better / worse": better_worse,
                "p": p_value(row.get("p")),
                "p queries": p_value(row.get("p_queries")),
                "N": text(row.get("N")),
                "steps": text(row.get("steps")),
                "pairs": text(row.get("pairs")),
                "forward passes": text(row.get("forward_passes")),
                "train s": number(row["train_seconds"], ".0f"),
                "peak MiB": number(row["peak_mib"], ".0f"),
                "negatives": number(row["negatives"], ".1f"),
                "grad ratio": number(row["grad_norm_ratio"], ".2f"),
            }
        )
    return Table(list(rows[0]), [list(row.values()) for row in rows])


def p_value(p: float | None) -> str:
    return "< 0.0001" if p is not None and p < 0.0001 else number(p)


def cost_of(group: RunGroup) -> dict[str, int]:
    """Return N of the group, and the steps, pairs and forward passes of a run (mean over seeds).

    Forward passes are counted per pair: a pass over n pairs counts as n. A backward pass counts as
    2 forward passes. Return {} for a baseline.
    """
    if group.method is None:
        return {}
    size = group.setting("batch.global_batch_size")
    steps = statistics.mean(
        max((line["step"] for line in run.steps), default=0) for run in group.runs
    )
    of_a_step = [line["passes"] for run in group.runs for line in run.steps]
    return {
        "N": size,
        "steps": round(steps),
        "pairs": round(steps * size),
        "forward_passes": round(steps * statistics.mean(of_a_step or [0])),
    }


def runs_table(groups: Sequence[RunGroup], metric: str) -> Table:
    """Return a table with one row per run. s/step and pairs/s: see ``RunRecord.median``."""
    rows = [
        [
            run.name,
            text(run.config.get("seed")),
            number(run.score(metric)),
            number(run.median("seconds"), ".3f"),
            number(run.median("pairs_per_second"), ".1f"),
            number(run.train_seconds, ".1f"),
            number(run.peak_mib, ".0f"),
        ]
        for group in ordered_groups(groups, metric)
        for run in group.runs
    ]
    return Table(["run", "seed", metric, "s/step", "pairs/s", "train s", "peak MiB"], rows)


def results(
    groups: Sequence[RunGroup], metric: str, found: Sequence[Difference]
) -> list[dict[str, Any]]:
    """Return the metric, the tests and the training cost of each group, best first.

    The numbers are not rounded.
    """
    tests = {one.group.label: one for one in found}
    rows = []
    for group in ordered_groups(groups, metric):
        mean, deviation = group.mean_and_sd(metric)
        row: dict[str, Any] = {
            "run": group.label,
            "settings": group.settings,
            "seeds": [run.seed for run in group.runs if run.method and run.metrics],
            "mean": mean,
            "sd": deviation,
            **cost_of(group),
            "train_seconds": group.mean("train_seconds"),
            "peak_mib": group.mean("peak_mib"),
            "negatives": group.median("negatives"),
            "grad_norm_ratio": group.median("grad_norm_ratio"),
        }
        if test := tests.get(group.label):
            one = test.found
            low, high = one.both or (one.low, one.high)
            row |= {
                "against": test.reference.label,
                "difference": one.difference,
                # the interval over a single query is infinite, which JSON cannot say
                "low": low if isfinite(low) else None,
                "high": high if isfinite(high) else None,
                "over": "queries and seeds" if one.both else "queries",
                "compared_seeds": one.pairs,
                "better": one.wins,
                "worse": one.losses,
                "p": test.p,
                "p_uncorrected": one.p,
                "p_queries": test.p_queries,
            }
        rows.append(row)
    return rows

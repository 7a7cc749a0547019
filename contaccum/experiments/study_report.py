"""Write the report of ``contaccum compare``.

Besides the tables of report.py, the report shows tuning and budget.
"""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

from contaccum.config import METHOD_SPECS
from contaccum.experiments.changed_queries import changed_queries
from contaccum.experiments.page import (
    MISSING,
    Section,
    Table,
    draw_all,
    html,
    legend,
    number,
)
from contaccum.experiments.report import p_value, runs_csv, sections_of
from contaccum.experiments.run_records import (
    Difference,
    RunGroup,
    best_first,
    differences,
    for_order,
    group_runs,
    load_run_record,
)
from contaccum.experiments.tuning import Budget, Tuned
from contaccum.runtime.files import read_json, write_json, write_text


class StudyResult(NamedTuple):
    """Data for the report of a comparison.

    The folders of the runs are a separate argument of ``write_report``.
    """

    metric: str
    reference: set[Path]  # folders of the reference runs of the significance tests
    budget: Budget | None = None
    tuned: Sequence[Tuned] = ()
    failed: Sequence[str] = ()
    labels: Mapping[Path, str] = {}  # folder of a run -> its label in tables

    @property
    def equal_batch(self) -> bool:
        """Whether the significance tests compare only runs with equal global batch sizes."""
        return self.budget is None and "batch.global_batch_size" not in _tuned_names(self.tuned)


def write_report(output: Path, folders: Sequence[Path], result: StudyResult) -> Path:
    """Write the report to the folder ``output`` and return the path of report.html.

    The other files are compare.json and runs.csv. folders: folders of the runs.
    """
    runs, metric = [load_run_record(folder) for folder in folders], result.metric
    groups = group_runs(runs, result.labels)
    found = differences(groups, metric, result.reference, result.equal_batch)
    sections = sections_of(runs, groups, metric, found, result.failed)
    if result.budget is not None:
        sections.insert(1, _budget_section(groups, metric, found, result.budget))
    if result.tuned:
        sections.append(tuning_section(result.tuned, metric))
    write_json(output / "compare.json", as_json(groups, found, result))
    table = runs_csv(runs)
    lines = io.StringIO()
    csv.writer(lines, lineterminator="\n").writerows([table.heads, *table.rows])
    write_text(output / "runs.csv", lines.getvalue())
    changed = changed_queries(groups, found, metric)
    page = output / "report.html"
    plots = draw_all(groups, metric)
    write_text(page, html("Comparison", sections, plots, legend(groups), changed))
    return page


def _budget_section(
    groups: list[RunGroup], metric: str, found: list[Difference], budget: Budget
) -> Section:
    title = "At equal training time" if budget.unit == "s" else "At equal budget"
    note = (
        f"Each run has as many steps as the budget of {budget} allows. The unit of cost is one "
        "forward pass of one pair; a backward pass costs 2. A pair costs 3 with one-pass methods. "
        "With grad_cache and cont_cache, it costs 1 + 3 * replay.share with partial replay, else "
        "4 - B / N, because the last micro-batch is encoded once."
    )
    if found:
        note += " The p values are those of the significance tests in the Quality section."
    return Section(title, (note,), [equal_budget(groups, metric, found)])


def equal_budget(groups: list[RunGroup], metric: str, found: list[Difference]) -> Table:
    """Return a table of each group's steps, cost, metric and difference from the reference."""
    tests = {one.group.label: one for one in found}
    rows = []
    for group in best_first(groups, metric):
        score, deviation = group.score(metric)
        row = [group.label]
        if group.method is None:
            row += [MISSING] * 6
        else:
            cost = cost_of(group)
            row += [str(cost[name]) for name in ("N", "steps", "pairs", "forward_passes")]
            row += [number(group.mean("train_seconds"), ".1f"), str(len(group.scores(metric)))]
        row += [number(score), number(deviation)]
        if test := tests.get(group.label):
            interval = f"{test.found.low:+.4f} to {test.found.high:+.4f}"
            row += [f"{test.found.difference:+.4f}", interval]
            row += [p_value(test.p_both), p_value(test.p_permutation)]
        else:
            row += [MISSING] * 4
        rows.append(row)
    return Table(
        [
            "run", "N", "steps", "pairs", "forward passes", "train s", "seeds", metric, "sd",
            "difference", "95 % interval", "p seeds and queries", "p permutation",
        ],
        rows,
    )  # fmt: skip


def cost_of(group: RunGroup) -> dict[str, int]:
    """Return N of the group, and the steps, pairs and forward passes of one run.

    Forward passes are counted per pair: a pass over n pairs counts as n. A backward pass counts as
    2 forward passes.
    """
    size, share = group.setting("batch.global_batch_size"), group.setting("replay.share")
    steps = group.setting("optim.max_steps") or max(
        (line["step"] for line in group.runs[0].steps), default=0
    )
    by_tokens = group.setting("batch.micro_batch_tokens") is not None
    micro_batch_size = None if by_tokens else group.setting("batch.micro_batch_size")
    price = METHOD_SPECS[str(group.method)].cost(size, micro_batch_size, share)
    return {
        "N": size,
        "steps": steps,
        "pairs": steps * size,
        "forward_passes": round(steps * size * price),
    }


def as_json(groups: list[RunGroup], found: list[Difference], result: StudyResult) -> dict[str, Any]:
    """Return the content of compare.json: results, tests and tuning. The numbers are not rounded.

    JSON has no infinity, so the ends of the confidence interval are None if there is only one
    query.
    """
    tests = {one.group.label: one for one in found}
    rows = []
    for group in groups:
        mean, deviation = group.score(result.metric)
        row: dict[str, Any] = {"setting": group.label, "mean": mean, "sd": deviation}
        if group.method is not None:
            row |= {
                "seeds": [run.seed for run in group.runs],
                "runs": [run.name for run in group.runs],
            }
            row |= cost_of(group) | {
                name: group.mean(name) for name in ("train_seconds", "peak_mib")
            }
        if one := tests.get(group.label):
            holm = {"p_permutation": one.p_permutation, "p_t": one.p_t, "p_both": one.p_both}
            values = {
                name: value if isfinite(value or 0.0) else None
                for name, value in asdict(one.found).items()
            }
            row["test"] = {"against": one.reference.label, **values, "holm": holm}
        rows.append(row)
    budget = (
        None
        if result.budget is None
        else {"amount": float(result.budget.amount), "unit": result.budget.unit}
    )
    tuned = [each.as_json(result.metric) for each in result.tuned]
    return {
        "metric": result.metric,
        "budget": budget,
        "results": rows,
        "tuned": tuned,
        "failed": list(result.failed),
    }


def summary(output: Path, width: int | None = None) -> str:
    """Return the results of a comparison as a table for the console, the best first.

    p is that of the test over seeds and queries, or over queries if there is only one seed. width:
    maximum length of a line.
    """
    found = read_json(output / "compare.json")
    rows, against = [], MISSING
    for result in sorted(found["results"], key=lambda row: for_order(row["mean"]), reverse=True):
        row = [result["setting"], number(result["mean"]), MISSING, MISSING, MISSING]
        if test := result.get("test"):
            against = test["against"]
            p = test["holm"]["p_both"] or test["holm"]["p_permutation"]
            row[2] = f"{test['difference']:+.4f}"
            if test["low"] is not None:
                row[3] = f"{test['low']:+.4f} to {test['high']:+.4f}"
            row[4] = "< 0.001" if p < 0.001 else number(p, ".3f")
        peak = number(result.get("peak_mib"), ".0f")
        rows.append([*row, number(result.get("train_seconds"), ".0f"), peak])
    heads = ["run", found["metric"], f"minus {against}", "95 % interval", "p"]
    return Table([*heads, "train s", "peak MiB"], rows).markdown(width)


def tuning_section(tuned: Sequence[Tuned], metric: str) -> Section:
    """Return a section: the chosen values, and the dev metric of each combination by rung."""
    names = _tuned_names(tuned)
    shares = sorted({share for each in tuned for share in each.shares})
    choices = []
    tried = []
    for each in tuned:
        values = ", ".join(f"{name}={value}" for name, value in each.chosen or ()) or MISSING
        chosen = "all runs failed" if each.chosen is None else values
        count, cost = str(len(each.variant.candidates)), number(float(each.full_runs), ".2f")
        edges = ", ".join(each.edges()) or MISSING
        choices.append([each.variant.label, count, cost, chosen, edges])
        rungs = dict(zip(each.shares, each.rungs, strict=True))
        for candidate in each.variant.candidates:
            scores = [number(rungs.get(share, {}).get(candidate)) for share in shares]
            row = [each.variant.label, *(dict(candidate).get(name, MISSING) for name in names)]
            tried.append([*row, *scores, "chosen" if candidate == each.chosen else ""])
    heads = [f"{share} of the budget" if share < 1 else "full budget" for share in shares]
    notes = [
        f"The numbers are {metric} on dev with the first seed. All seeds use the chosen values; "
        "the test data are not used to choose. The best quarter of a column's combinations (at "
        "least two) are trained again from the start, with more steps. The next column shows "
        "them. Each run completes its own learning rate schedule. A combination without a number "
        "was not trained, or its run failed.",
        "A setting at the edge has the lowest or highest value that was tried: a wider range may "
        "be better.",
    ]
    if invalid := [f"{name}: {why}" for each in tuned for name, why in each.invalid.items()]:
        notes.append("Combinations that cannot be trained: " + "; ".join(invalid))
    columns = ["setting", "combinations", "cost (1 = one full run)", "chosen", "at the edge"]
    tables = [Table(columns, choices), Table(["setting", *names, *heads, ""], tried)]
    return Section("Tuning", (), tables, notes)


def _tuned_names(tuned: Sequence[Tuned]) -> list[str]:
    return list(
        dict.fromkeys(
            name for each in tuned for values in each.variant.candidates for name, _ in values
        )
    )

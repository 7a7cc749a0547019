"""What a report says in rows and columns: quality with its tests, and the views at equal memory and at equal time."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from contaccum.evaluation.significance import Comparison, compare, holm
from contaccum.study.runs import Group, Run, spread, varied

MISSING = "-"
SAME_MEMORY = 0.05
"""Groups whose peaks lie within this share of the smallest among them count as equal in memory."""


class Table(NamedTuple):
    """Cells as they are shown; the first column names the row."""

    heads: Sequence[str]
    rows: list[list[str]]

    def markdown(self) -> str:
        widths = [max(map(len, column)) for column in zip(self.heads, *self.rows, strict=True)]
        lines = [self.heads, ["-" * width for width in widths], *self.rows]
        padded = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines]
        return "\n".join("| " + " | ".join(cells) + " |" for cells in padded)


def figure(value: float | None, form: str = ".4f") -> str:
    return MISSING if value is None else format(value, form)


def text(value: Any) -> str:
    if value is None:
        return MISSING
    return f"{value:.1f}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class Difference:
    """A group less its reference, with the p values that Holm's correction of the report's whole family gives."""

    group: Group
    reference: Group
    found: Comparison
    permutation: float
    t: float
    both: float | None


Choose = Callable[[list[Group]], Group | None]
"""The reference among groups of equal N."""


def best_of_method(method: str, metric: str) -> Choose:
    """The method's best setting by the metric itself, which favours the reference."""

    def choose(groups: list[Group]) -> Group | None:
        scored = [group for group in groups if group.method == method and group.scores(metric)]
        return max(scored, key=lambda group: spread(group.scores(metric))[0] or 0.0, default=None)

    return choose


def by_step_size(groups: Iterable[Group]) -> dict[int | None, list[Group]]:
    """Groups by N, baselines under None."""
    found: dict[int | None, list[Group]] = {}
    for group in groups:
        found.setdefault(group.setting("batch.global_batch_size"), []).append(group)
    return dict(sorted(found.items(), key=lambda item: (item[0] is None, item[0] or 0)))


def differences(groups: list[Group], metric: str, choose: Choose) -> list[Difference]:
    """Every group with values per query against the reference of its N, a baseline against the reference of all; one family."""
    pairs = []
    for size, members in by_step_size(groups).items():
        reference = choose(groups if size is None else members)
        if reference is not None and reference.per_query():
            others = [group for group in members if group.label != reference.label and group.per_query()]
            pairs += [(group, reference) for group in others]
    found = [compare(group.per_query(), reference.per_query(), metric) for group, reference in pairs]
    permutation, t = holm([one.p_permutation for one in found]), holm([one.p_t for one in found])
    both = iter(holm([one.p_both for one in found if one.p_both is not None]))
    corrected = [None if one.p_both is None else next(both) for one in found]
    return [
        Difference(*pair, one, permutation[i], t[i], corrected[i])
        for i, (pair, one) in enumerate(zip(pairs, found, strict=True))
    ]


def quality(groups: list[Group], metric: str) -> Table:
    """Mean and spread of the metric, best first."""
    rows = []
    for group in sorted(groups, key=lambda group: -(spread(group.scores(metric))[0] or 0.0)):
        mean, deviation = spread(group.scores(metric))
        rows.append(
            [
                group.label,
                figure(mean),
                figure(deviation),
                str(len(group.scores(metric))) if group.method else MISSING,
                figure(group.mean("train_seconds"), ".1f"),
                figure(_mebibytes(group), ".0f"),
                figure(group.median("grad_norm_ratio"), ".2f"),
                figure(group.median("negatives"), ".1f"),
            ]
        )
    return Table(["setting", metric, "sd", "seeds", "train s", "peak MiB", "grad ratio", "negatives"], rows)


def tests(found: list[Difference]) -> Table:
    """Differences from the reference with interval, effect size and corrected p values."""
    rows = [
        [
            one.group.label,
            one.reference.label,
            f"{one.found.difference:+.4f}",
            f"{one.found.low:+.4f} to {one.found.high:+.4f}",
            f"{one.found.effect:+.2f}",
            f"{one.found.wins} / {one.found.losses}",
            _p(one.permutation),
            _p(one.t),
            MISSING if one.both is None else _p(one.both),
        ]
        for one in found
    ]
    heads = ["setting", "against", "difference", "95 % interval", "effect d", "better / worse queries"]
    return Table([*heads, "p permutation", "p t", "p seeds and queries"], rows)


def _p(value: float) -> str:
    return "< 0.0001" if value < 0.0001 else f"{value:.4f}"


def _mebibytes(group: Group) -> float | None:
    peak = group.mean("peak_memory")
    return None if peak is None else peak / 2**20


def equal_memory(groups: list[Group], metric: str) -> Table:
    """Trained groups in classes of equal peak memory, from the smallest class up, best first within a class."""
    left = sorted(
        (group for group in groups if _mebibytes(group) is not None), key=lambda group: _mebibytes(group) or 0
    )
    rows = []
    while left:
        least = _mebibytes(left[0]) or 0.0
        members = [group for group in left if (_mebibytes(group) or 0.0) <= least * (1 + SAME_MEMORY)]
        left = left[len(members) :]
        for group in sorted(members, key=lambda group: -(spread(group.scores(metric))[0] or 0.0)):
            mean, deviation = spread(group.scores(metric))
            reach = f"{least:.0f} to {least * (1 + SAME_MEMORY):.0f}"
            size = text(group.setting("batch.global_batch_size"))
            rows.append([reach, group.label, size, figure(_mebibytes(group), ".0f"), figure(mean), figure(deviation)])
    return Table(["MiB", "setting", "N", "peak MiB", metric, "sd"], rows)


def score_at(run: Run, seconds: float, metric: str) -> tuple[int, float] | None:
    """Step and dev metric of a run's last evaluation not later than after so many seconds of training."""
    early = [line for line in run.evaluations if run.times.get(line["step"], float("inf")) <= seconds]
    return (early[-1]["step"], early[-1]["dev"][metric]) if early and metric in early[-1]["dev"] else None


def equal_time(groups: list[Group], metric: str) -> tuple[float, Table] | None:
    """What each trained group had reached on dev when the quickest of them ended; None without evaluations on dev."""
    trained = [group for group in groups if any(run.evaluations for run in group.runs)]
    times = [seconds for group in trained if (seconds := group.mean("train_seconds")) is not None]
    if not times:
        return None
    rows = []
    for group in trained:
        reached = [found for run in group.runs if (found := score_at(run, min(times), metric))]
        mean, deviation = spread([score for _, score in reached])
        steps = spread([float(step) for step, _ in reached])[0]
        whole = figure(group.mean("train_seconds"), ".1f")
        rows.append([group.label, figure(mean), figure(deviation), str(len(reached)), figure(steps, ".0f"), whole])
    rows.sort(key=lambda row: row[1], reverse=True)
    return min(times), Table(["setting", f"dev {metric}", "sd", "seeds", "steps", "train s in all"], rows)


def settings_table(groups: list[Group]) -> Table | None:
    """Settings that differ between trained groups, a column a group; None where nothing does."""
    trained = [group for group in groups if group.method]
    names = ["method", *varied(run for group in trained for run in group.runs)]
    rows = [[name, *(text(group.setting(name)) for group in trained)] for name in names]
    rows = [row for row in rows if len(set(row[1:])) > 1]
    return Table(["setting", *(group.label for group in trained)], rows) if rows else None


def environments(runs: list[Run]) -> Table | None:
    """What the runs were made with; a name with several values shows them all."""
    known = [run.environment for run in runs if run.environment]
    if not known:
        return None
    names = list(dict.fromkeys(name for found in known for name in found))
    return Table(["", ""], [[n, ", ".join(dict.fromkeys(str(found.get(n)) for found in known))] for n in names])

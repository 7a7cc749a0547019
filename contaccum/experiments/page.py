"""Tables in Markdown, plots, and the HTML page of a report.

The page loads no other file. Only this file imports matplotlib.
"""

import base64
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jinja2 import Environment

from contaccum.errors import printable, require
from contaccum.experiments.changed_queries import ChangedQueries
from contaccum.experiments.run_records import MISSING, RunGroup, mean_std

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TEMPLATE = Path(__file__).with_name("report.html")
INK = "#767f89"  # color of text and axes, readable in the light and the dark theme of the page
SHORTEST = 10  # columns of a table are not made narrower than this
COLORS = ("#2f86d1", "#d9682b", "#2a9d72", "#c16fa5", "#c99a1b", "#58a9c9", "#8b7bd8", "#98753f")
MAX_POINTS = 300  # points per curve; in longer logs, neighboring steps are averaged
STYLE = {
    "font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
    "grid.alpha": 0.25, "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": INK,
    "xtick.color": INK, "ytick.color": INK,
    "grid.color": INK, "legend.frameon": False, "svg.fonttype": "none", "lines.linewidth": 1.8,
}  # fmt: skip


class Table(NamedTuple):
    """Table of formatted cells. The first cell of each row is the name of the row."""

    heads: Sequence[str]
    rows: list[list[str]]

    def only(self, heads: Sequence[str]) -> "Table":
        """Return the table with these columns, without those in which every cell is missing."""
        columns = [
            n
            for n, head in enumerate(self.heads)
            if head in heads and any(row[n] != MISSING for row in self.rows)
        ]
        return Table(
            [self.heads[n] for n in columns], [[row[n] for n in columns] for row in self.rows]
        )

    def markdown(self, width: int | None = None) -> str:
        """Return the table as Markdown.

        Line breaks, control characters and vertical bars in cells are escaped. width: maximum
        length of a line; the longest cells are shortened in the middle.
        """
        escapes = str.maketrans({"|": "\\|", "\n": "\\n"})
        rows = [
            [printable(cell).translate(escapes) for cell in row] for row in (self.heads, *self.rows)
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        while width and sum(widths) + 3 * len(widths) + 1 > width and max(widths) > SHORTEST:
            widths[widths.index(max(widths))] -= 1
        rows = [[shortened(*cell) for cell in zip(row, widths, strict=True)] for row in rows]
        lines = [rows[0], ["-" * width for width in widths], *rows[1:]]
        padded = [
            [cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines
        ]
        return "\n".join("| " + " | ".join(cells) + " |" for cells in padded)


def shortened(cell: str, width: int) -> str:
    """Return a cell with at most ``width`` characters: the start and the end of a longer one."""
    if len(cell) <= width:
        return cell
    return f"{cell[: width // 2]}…{cell[len(cell) - (width - 1) // 2 :]}"


def number(value: float | None, form: str = ".4f") -> str:
    return MISSING if value is None else format(value, form)


def text(value: Any) -> str:
    return MISSING if value is None else str(value)


class Plot(NamedTuple):
    """Plot for an HTML page."""

    name: str
    caption: str
    image: str  # SVG in base64


class Section(NamedTuple):
    """Section of a report: heading, tables, and notes, such as how the numbers are computed."""

    title: str
    tables: Sequence[Table] = ()
    notes: Sequence[str] = ()


def html(
    title: str,
    sections: Sequence[Section],
    plots: Sequence[Plot],
    legend: Mapping[str, str],
    changed: ChangedQueries,
) -> str:
    """Return a report as an HTML page that loads no other file.

    legend: label of each group -> its color.
    """
    environment = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    page = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    return page.render(title=title, sections=sections, plots=plots, legend=legend, changed=changed)


def require_matplotlib() -> None:
    """Raise InputError if matplotlib is missing."""
    require("matplotlib", "study", "plots of a report")


def legend(groups: Sequence[RunGroup]) -> dict[str, str]:
    """Return the color of each group: label -> color."""
    return {group.label: COLORS[i % len(COLORS)] for i, group in enumerate(groups)}


def draw_all(groups: Sequence[RunGroup], metric: str) -> list[Plot]:
    """Draw every plot for which the runs have data."""
    require_matplotlib()
    import matplotlib
    from matplotlib.figure import Figure

    # name, axes, caption, and the cost or the logged values with their line styles
    drawn: tuple[tuple[str, str, str, str, str | dict[str, str]], ...] = (
        (
            "metric-time", "training seconds", metric,
            f"{metric} on the test data against training seconds; bars are standard deviations "
            "over seeds, horizontal lines are baselines without training",
            "train_seconds",
        ),
        (
            "metric-memory", "peak memory, MiB", metric,
            f"{metric} on the test data against peak memory",
            "peak_mib",
        ),
        (
            "dev", "step", f"dev {metric}",
            f"{metric} on dev during training, mean and range over seeds",
            {metric: "-"},
        ),
        (
            "loss", "step", "loss",
            "Loss over steps, mean and range over seeds; methods use different numbers of "
            "negatives, so do not compare the levels of their losses",
            {"loss": "-"},
        ),
        (
            "grad-ratio", "step", "passage / query",
            "Gradient norm of the passage tower divided by that of the query tower; 1 means equal "
            "norms",
            {"grad_norm_ratio": "-"},
        ),
        (
            "bank-drift", "step", "cosine",
            "Cosine between stored embeddings and embeddings from the current weights, mean over a "
            "sample of the bank (solid line: queries, dashed line: passages)",
            {"drift_query_cosine": "-", "drift_passage_cosine": "--"},
        ),
    )  # fmt: skip
    plots = []
    for name, xlabel, ylabel, caption, values in drawn:
        style: Any = {**STYLE, "svg.hashsalt": name}
        with matplotlib.rc_context(style):
            figure = Figure(figsize=(5.6, 3.6), layout="constrained")
            axes = figure.add_subplot()
            if isinstance(values, dict):
                _draw_curves(axes, groups, values)
            else:
                _draw_cost(axes, groups, metric, values)
            if axes.has_data():
                axes.set_xlabel(xlabel)
                axes.set_ylabel(ylabel)
                file = io.BytesIO()
                figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
                image = base64.b64encode(file.getvalue()).decode()
                plots.append(Plot(name, caption, image))
    return plots


def curves(group: RunGroup, name: str) -> np.ndarray:
    """Return the curve of the logged value ``name``, with at most MAX_POINTS points.

    The array (4, points) contains the steps, and the mean, minimum and maximum value over the runs
    of the group.
    """
    runs = [run.curve(name) for run in group.runs]
    steps = sorted(set().union(*runs))
    width = max(1, -(-len(steps) // MAX_POINTS))
    points = []
    for block in np.array_split(steps, range(width, len(steps), width)):
        means = [np.mean(values) for run in runs if (values := [run[s] for s in block if s in run])]
        if means:
            points.append((block.mean(), np.mean(means), min(means), max(means)))
    return np.array(points).reshape(-1, 4).T


def _draw_curves(axes: "Axes", groups: Sequence[RunGroup], names: dict[str, str]) -> None:
    """Plot logged values over steps. names: name of a logged value -> line style."""
    colors = legend(groups)
    for group in groups:
        color = colors[group.label]
        for name, style in names.items():
            steps, mean, low, high = curves(group, name)
            if len(steps):
                marker = "" if len(steps) > 1 else "o"
                axes.plot(steps, mean, marker=marker, color=color, linestyle=style)
                axes.fill_between(steps, low, high, color=color, alpha=0.15, linewidth=0)
    axes.locator_params(axis="x", integer=True)


def _draw_cost(axes: "Axes", groups: Sequence[RunGroup], metric: str, cost: str) -> None:
    """Plot the metric against a cost: a point for each group, a line for a group without cost.

    cost: attribute of RunRecord, such as ``train_seconds``.
    """
    colors = legend(groups)
    for group in groups:
        score, deviation = group.mean_and_sd(metric)
        x, x_deviation = mean_std(getattr(run, cost) for run in group.runs)
        if x is not None and score is not None:
            color = colors[group.label]
            axes.errorbar(x, score, deviation, x_deviation, fmt="o", color=color, capsize=3)
    for group in groups if axes.has_data() else ():
        score, _ = group.mean_and_sd(metric)
        if score is not None and group.mean(cost) is None:
            axes.axhline(score, color=colors[group.label], linewidth=1.2, linestyle=":")

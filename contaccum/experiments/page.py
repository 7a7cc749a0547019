"""Make tables, plots and reports.

A report is Markdown or one self-contained HTML page. Only this file imports matplotlib.
"""

import io
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jinja2 import Environment

from contaccum.config import METHOD_SPECS
from contaccum.errors import InputError, install_command, printable
from contaccum.experiments.changed_queries import ChangedQueries
from contaccum.experiments.run_records import AGES, MISSING, RunGroup, mean_std

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TEMPLATE = Path(__file__).with_name("report.html")
INK = "#0a0b0c"
"""Color of text and axes in a plot. The HTML page replaces this color by the text color of the
light or dark theme."""
SHORTEST = 10  # columns of a table are not made narrower than this
COLORS = ("#2f86d1", "#d9682b", "#2a9d72", "#c16fa5", "#c99a1b", "#58a9c9", "#8b7bd8", "#98753f")
DASHES = ("-", "--", ":", "-.")
MAX_POINTS = (
    300  # maximum number of points per curve; in longer logs, neighboring steps are averaged
)
STYLE = {
    "font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
    "grid.alpha": 0.25, "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": INK,
    "xtick.color": INK, "ytick.color": INK,
    "grid.color": INK, "legend.frameon": False, "svg.fonttype": "none", "lines.linewidth": 1.8,
    "text.parse_math": False,  # a dollar sign in the name of a run does not start a formula
}  # fmt: skip
Looks = dict[str, dict[str, str]]  # label of a group -> its color and line style


class Table(NamedTuple):
    """Table of formatted cells. The first cell of each row is the name of the row."""

    heads: Sequence[str]
    rows: list[list[str]]

    def without(self, heads: Collection[str]) -> "Table":
        """Return the table without the columns that have these headings."""
        shown = [column for column, head in enumerate(self.heads) if head not in heads]
        return Table([self.heads[n] for n in shown], [[row[n] for n in shown] for row in self.rows])

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
    """Plot in two formats, SVG and PNG."""

    name: str
    caption: str
    svg: str  # an <svg> element for an HTML page
    png: bytes


class Section(NamedTuple):
    """Section of a report: heading, notes, tables and footnotes."""

    title: str
    notes: Sequence[str] = ()
    tables: Sequence[Table] = ()
    footnotes: Sequence[str] = ()  # explain how the numbers are computed


def html(
    title: str,
    sections: Sequence[Section],
    plots: Sequence[Plot],
    legend: Sequence[tuple[str, str]],
    changed: ChangedQueries,
) -> str:
    """Return a report as an HTML page that loads no other file.

    ``legend`` contains the label and color of each group.
    """
    environment = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    page = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    return page.render(title=title, sections=sections, plots=plots, legend=legend, changed=changed)


def markdown(title: str, sections: Sequence[Section], plots: Sequence[Plot], folder: str) -> str:
    """Return a report as Markdown. It shows the plots as PNG files in ``folder``."""
    parts = [f"# {title}", *map(_markdown_section, sections)]
    if plots:
        figures = [
            f"![{plot.caption}]({folder}/{plot.name}.png)\n\n{plot.caption}." for plot in plots
        ]
        parts.insert(3, "\n\n".join(["## Figures", *figures]))
    return "\n\n".join(parts) + "\n"


def _markdown_section(section: Section) -> str:
    tables = [table.markdown() for table in section.tables]
    return "\n\n".join([f"## {section.title}", *section.notes, *tables, *section.footnotes])


def require_matplotlib() -> None:
    """Raise InputError if matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        raise InputError(
            f"matplotlib: not installed, but plots need it. Run: {install_command('study')}"
        )


def draw_all(groups: list[RunGroup], metric: str) -> list[Plot]:
    """Draw every plot for which the runs have data. FIGURES lists the plots."""
    require_matplotlib()
    import matplotlib
    from matplotlib.figure import Figure

    looks = {
        label: {"color": color, "linestyle": DASHES[i // len(COLORS) % len(DASHES)]}
        for i, (label, color) in enumerate(legend(groups))
    }
    plots = []
    with matplotlib.rc_context(STYLE):  # type: ignore[arg-type]
        for name, (caption, xlabel, ylabel, draw) in FIGURES.items():
            figure = Figure(figsize=(5.6, 3.6), layout="constrained")
            axes = figure.add_subplot()
            draw(axes, groups, looks, metric)
            if axes.has_data():
                for axis in (one for one in (axes.xaxis, axes.yaxis) if one.get_scale() == "log"):
                    # the usual labels are formulas, which STYLE switches off
                    axis.set_major_formatter("{x:g}")
                    axis.set_minor_formatter("")
                axes.set_xlabel(xlabel)
                axes.set_ylabel(ylabel.format(metric=metric))
                plots.append(_save(figure, axes, name, caption.format(metric=metric)))
    return plots


def legend(groups: list[RunGroup]) -> list[tuple[str, str]]:
    """Return the label and the color of each group."""
    return [(group.label, COLORS[i % len(COLORS)]) for i, group in enumerate(groups)]


def _save(figure: "Figure", axes: "Axes", name: str, caption: str) -> Plot:
    import matplotlib

    svg, png = io.StringIO(), io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(svg, format="svg", transparent=True, metadata={"Date": None})
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", fontsize=8, ncols=2)
    figure.savefig(png, format="png", dpi=150, facecolor="white")
    return Plot(name, caption, _inline(svg.getvalue(), name), png.getvalue())


def _inline(svg: str, name: str) -> str:
    """Change an SVG file to an <svg> element for an HTML page.

    It gets unique ids, the text color of the page, and no fixed size.
    """
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r'\1 role="img"', svg)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'(href="|url\()#', rf"\g<1>#{name}-", svg)
    return svg.replace(INK, "currentColor")


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
        means = [
            statistics.mean(values)
            for run in runs
            if (values := [run[s] for s in block if s in run])
        ]
        if means:
            points.append((block.mean(), statistics.mean(means), min(means), max(means)))
    return np.array(points).reshape(-1, 4).T


Draw = Callable[["Axes", list[RunGroup], Looks, str], None]


def _over_steps(*names: str, log: bool = False, level: float | None = None) -> Draw:
    """Return a function that plots logged values over steps.

    log: log-scale y axis. level: height of a horizontal line.
    """

    def draw(axes: "Axes", groups: list[RunGroup], looks: Looks, _: str) -> None:
        for group in groups:
            for name, dash in zip(names, DASHES, strict=False):
                steps, mean, low, high = curves(group, name)
                if not len(steps):
                    continue
                look = looks[group.label] | ({"linestyle": dash} if len(names) > 1 else {})
                look |= {"label": group.label} if name == names[0] else {}
                marker = "" if len(steps) > 1 else "o"
                axes.plot(steps, mean, marker=marker, **look)  # type: ignore[arg-type]
                if len(group.runs) > 1:
                    axes.fill_between(
                        steps, low, high, color=look["color"], alpha=0.15, linewidth=0
                    )
        if log:
            axes.set_yscale("log")
        if level is not None and axes.has_data():
            axes.axhline(level, color=INK, linewidth=0.8, alpha=0.6)
        axes.locator_params(axis="x", integer=True)

    return draw


def _metric_over(
    name: str, axes: "Axes", groups: list[RunGroup], looks: Looks, metric: str
) -> None:
    for group in groups:
        score, deviation = group.score(metric)
        x, x_deviation = mean_std(getattr(run, name) for run in group.runs)
        if x is not None and score is not None:
            color = looks[group.label]["color"]
            axes.errorbar(
                x, score, deviation, x_deviation, fmt="o", color=color, capsize=3, label=group.label
            )
    if axes.has_data():
        _levels(axes, [group for group in groups if group.mean(name) is None], looks, metric)


def _levels(axes: "Axes", groups: list[RunGroup], looks: Looks, metric: str) -> None:
    for group in groups:
        score, _ = group.score(metric)
        if score is not None:
            axes.axhline(
                score,
                color=looks[group.label]["color"],
                linewidth=1.2,
                linestyle=":",
                label=group.label,
            )


def _dev_over_time(axes: "Axes", groups: list[RunGroup], looks: Looks, metric: str) -> None:
    for group in groups:
        for number, run in enumerate(group.runs):
            lines = [line for line in run.evaluations if line["step"] in run.evaluation_times]
            if len(lines) > 1:
                times = [run.evaluation_times[line["step"]] for line in lines]
                label = None if number else group.label
                scores = [line["dev"].get(metric) for line in lines]
                look: dict[str, Any] = {"alpha": 0.8, "marker": ".", **looks[group.label]}
                axes.plot(times, scores, label=label, **look)


def _metric_over_bank(axes: "Axes", groups: list[RunGroup], looks: Looks, metric: str) -> None:
    """Plot the metric over the bank size if a method ran with several sizes.

    A method without a bank is a horizontal line.
    """
    lines: dict[str, list[RunGroup]] = defaultdict(list)
    for group in filter(bank_size, groups):
        if group.scores(metric):
            name = group.label if "size=" in group.label else group.settings
            lines[re.sub(r"[ -]size=\w+", "", name)].append(group)
    if not any(len({bank_size(group) for group in members}) > 1 for members in lines.values()):
        return
    for label, members in lines.items():
        members.sort(key=bank_size)
        scores, deviations = zip(*(group.score(metric) for group in members), strict=True)
        sizes, errors = (
            [bank_size(group) for group in members],
            [deviation or 0.0 for deviation in deviations],
        )
        color = looks[members[0].label]["color"]
        axes.errorbar(sizes, scores, errors, marker="o", color=color, capsize=3, label=label)
    _levels(axes, [group for group in groups if not bank_size(group)], looks, metric)
    axes.set_xscale("log", base=2)


def bank_size(group: RunGroup) -> int:
    """Return the number of rows of the bank. Return 0 for a method without a bank."""
    if group.method is None or METHOD_SPECS[group.method].bank == "none":
        return 0
    size = group.setting("bank.size")
    return group.setting("batch.global_batch_size") if size is None else size


def _bank_age(axes: "Axes", groups: list[RunGroup], looks: Looks, metric: str) -> None:
    """Plot the age of the bank's rows.

    If this age never changes, the report has a sentence instead (``constant_age``).
    """
    if len({age for group in groups for name in AGES for age in curves(group, name)[1:].flat}) > 1:
        _over_steps(*AGES)(axes, groups, looks, metric)


def _drift_by_age(axes: "Axes", groups: list[RunGroup], looks: Looks, _: str) -> None:
    for group in groups:
        cosines: dict[int, list[float]] = defaultdict(list)
        for one in (
            one for run in group.runs for line in run.steps for one in line.get("drift", [])
        ):
            cosines[one["age"]].append(one["passage"])
        if cosines:
            means = [statistics.mean(cosines[age]) for age in sorted(cosines)]
            look: dict[str, Any] = {"marker": ".", **looks[group.label]}
            axes.plot(sorted(cosines), means, label=group.label, **look)
    axes.locator_params(axis="x", integer=True)


FIGURES: dict[str, tuple[str, str, str, Draw]] = {
    "metric-time": (
        "{metric} on the test data against training seconds; bars are standard deviations over "
        "seeds, horizontal lines are baselines without training",
        "training seconds", "{metric}", partial(_metric_over, "train_seconds"),
    ),
    "dev-time": (
        "{metric} on dev during training, one line per seed",
        "training seconds", "dev {metric}", _dev_over_time,
    ),
    "metric-memory": (
        "{metric} on the test data against peak memory",
        "peak memory, MiB", "{metric}", partial(_metric_over, "peak_mib"),
    ),
    "metric-bank": (
        "{metric} on the test data against the bank size",
        "bank size M, rows", "{metric}", _metric_over_bank,
    ),
    "loss": (
        "Loss over steps, mean and range over seeds; methods use different numbers of negatives, "
        "so do not compare the levels of their losses",
        "step", "loss", _over_steps("loss"),
    ),
    "grad-ratio": (
        "Gradient norm of the passage tower divided by that of the query tower; 1 means equal "
        "norms",
        "step", "passage / query", _over_steps("grad_norm_ratio", log=True, level=1.0),
    ),
    "grad-norms": (
        "Gradient norms before clipping (solid line: query tower, dashed line: passage tower)",
        "step", "L2 norm", _over_steps("query_grad_norm", "passage_grad_norm", log=True),
    ),
    "bank-age": (
        "Age of the bank's rows at the start of a step (solid line: mean age, dashed line: age of "
        "the oldest row)",
        "step", "optimizer steps", _bank_age,
    ),
    "bank-drift": (
        "Cosine between stored embeddings and embeddings from the current weights, mean over a "
        "sample of the bank (solid line: queries, dashed line: passages)",
        "step", "cosine", _over_steps("drift_query_cosine", "drift_passage_cosine"),
    ),
    "drift-age": (
        "Cosine between stored and current passage embeddings by age of the row, mean over the run",
        "age of the row, optimizer steps", "cosine of stored and current embeddings", _drift_by_age,
    ),
}  # fmt: skip

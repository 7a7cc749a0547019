"""The figures of a report; the only file that imports matplotlib."""

import io
import re
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from contaccum.config import TRAITS
from contaccum.errors import InputError
from contaccum.study.runs import Group, spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HINT = "pip install 'contaccum[study]'"
INK = "#0a0b0c"
"""Text and axes; in the page it becomes the text's own colour, light or dark."""
COLOURS = ("#2f86d1", "#d9682b", "#2a9d72", "#c16fa5", "#c99a1b", "#58a9c9", "#8b7bd8", "#98753f")
DASHES = ("-", "--", ":", "-.")
MOST_POINTS = 300
"""Points of a curve; longer logs are averaged over neighbouring steps."""
STYLE = {
    "font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25,
    "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": INK, "xtick.color": INK, "ytick.color": INK,
    "grid.color": INK, "legend.frameon": False, "svg.fonttype": "none", "lines.linewidth": 1.8,
}  # fmt: skip


@dataclass(frozen=True)
class Plot:
    """One figure in both forms."""

    name: str
    caption: str
    svg: str
    """An <svg> element without size, ids of its own, and no address to load anything from."""
    png: bytes


@contextmanager
def _matplotlib() -> Iterator[type["Figure"]]:
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError(f"plots need matplotlib, which is not installed: {HINT}") from error
    with matplotlib.rc_context(STYLE):  # type: ignore[arg-type]
        yield Figure


def need_matplotlib() -> None:
    """InputError that names the extra where matplotlib is not installed."""
    with _matplotlib():
        pass


def draw_all(groups: list[Group], metric: str) -> list[Plot]:
    """Every figure that the runs have data for."""
    looks = {
        group.label: (COLOURS[i % len(COLOURS)], DASHES[i // len(COLOURS) % len(DASHES)])
        for i, group in enumerate(groups)
    }
    found = []
    with _matplotlib() as figure_class:
        for name, (caption, draw) in FIGURES.items():
            figure = figure_class(figsize=(5.6, 3.6), layout="constrained")
            axes = figure.add_subplot()
            if draw(axes, groups, looks, metric):
                found.append(_plot(figure, axes, name, caption.format(metric=metric)))
    return found


def legend(groups: list[Group]) -> list[tuple[str, str]]:
    """Label and colour of each group, as the figures have them."""
    return [(group.label, COLOURS[i % len(COLOURS)]) for i, group in enumerate(groups)]


def _plot(figure: "Figure", axes: "Axes", name: str, caption: str) -> Plot:
    import matplotlib

    svg = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(svg, format="svg", transparent=True, metadata={"Date": None})
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", fontsize=8, ncols=2)
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=150, facecolor="white")
    return Plot(name, caption, _inline(svg.getvalue(), name, caption), png.getvalue())


def _inline(svg: str, name: str, caption: str) -> str:
    """An SVG file's element for a page: ids that no other figure has, the text's colour, and a title for those who listen."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r'\1 role="img"', svg)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'(href="|url\()#', rf"\g<1>#{name}-", svg)
    return svg.replace(INK, "currentColor")


def curves(group: Group, name: str) -> tuple[list[float], list[float], list[float], list[float]]:
    """Steps, and mean, lowest and highest over the seeds, thinned to MOST_POINTS by averaging neighbours."""
    of_runs = [run.curve(name) for run in group.runs]
    steps = sorted(set().union(*of_runs))
    width = -(-len(steps) // MOST_POINTS) or 1
    columns: tuple[list[float], ...] = ([], [], [], [])
    for start in range(0, len(steps), width):
        block = steps[start : start + width]
        means = [statistics.mean(values) for run in of_runs if (values := [run[s] for s in block if s in run])]
        for column, value in zip(
            columns, (statistics.mean(block), statistics.mean(means), min(means), max(means)), strict=True
        ):
            column.append(value)
    return columns  # type: ignore[return-value]


Looks = dict[str, tuple[str, str]]
Draw = Callable[["Axes", list[Group], Looks, str], bool]


def _over_steps(*names: str, log: bool = False, level: float | None = None, label: str) -> Draw:
    """Figures of the log over steps; a second name is drawn dashed, in the same colour."""

    def draw(axes: "Axes", groups: list[Group], looks: Looks, metric: str) -> bool:
        drawn = False
        for group in groups:
            for number, name in enumerate(names):
                steps, mean, low, high = curves(group, name)
                if not steps:
                    continue
                colour, dash = looks[group.label]
                style = dash if len(names) == 1 else DASHES[number]
                axes.plot(
                    steps,
                    mean,
                    style,
                    color=colour,
                    label=None if number else group.label,
                    marker="" if len(steps) > 1 else "o",
                )
                if len(group.runs) > 1:
                    axes.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)
                drawn = True
        if log:
            axes.set_yscale("log")
        if level is not None and drawn:
            axes.axhline(level, color=INK, linewidth=0.8, alpha=0.6)
        axes.locator_params(axis="x", integer=True)
        axes.set_xlabel("step")
        axes.set_ylabel(label)
        return drawn

    return draw


def _point(axes: "Axes", group: Group, x: float, xs: list[float], metric: str, look: tuple[str, str]) -> None:
    mean, deviation = spread(group.scores(metric))
    axes.errorbar(
        [x], [mean or 0.0], xerr=None if len(xs) < 2 else statistics.stdev(xs), yerr=deviation, fmt="o", color=look[0],
        capsize=3, label=group.label,
    )  # fmt: skip


def _against(prop: str, scale: float, label: str) -> Draw:
    """The test metric against a property of the runs, mean and standard deviation of both."""

    def draw(axes: "Axes", groups: list[Group], looks: Looks, metric: str) -> bool:
        drawn = False
        for group in groups:
            xs = [value / scale for run in group.runs if (value := getattr(run, prop)) is not None]
            if group.scores(metric) and xs:
                _point(axes, group, statistics.mean(xs), xs, metric, looks[group.label])
                drawn = True
            elif group.scores(metric):
                _level(axes, group, metric, looks)
        axes.set_xlabel(label)
        axes.set_ylabel(metric)
        return drawn

    return draw


def _level(axes: "Axes", group: Group, metric: str, looks: Looks) -> None:
    colour, _ = looks[group.label]
    axes.axhline(spread(group.scores(metric))[0] or 0.0, color=colour, linewidth=1.2, linestyle=":", label=group.label)


def _dev_over_time(axes: "Axes", groups: list[Group], looks: Looks, metric: str) -> bool:
    drawn = False
    for group in groups:
        for number, run in enumerate(group.runs):
            points = [
                (run.times[line["step"]], line["dev"].get(metric))
                for line in run.evaluations
                if line["step"] in run.times
            ]
            if len(points) > 1:
                colour, dash = looks[group.label]
                xs, ys = zip(*points, strict=True)
                axes.plot(xs, ys, dash, color=colour, alpha=0.8, marker=".", label=None if number else group.label)
                drawn = True
    axes.set_xlabel("seconds of training")
    axes.set_ylabel(f"dev {metric}")
    return drawn


def _against_bank(axes: "Axes", groups: list[Group], looks: Looks, metric: str) -> bool:
    """Only where the bank size was varied; methods without a bank are level lines."""
    sizes: dict[str, list[tuple[int, Group]]] = {}
    for group in groups:
        size = bank_size(group)
        if group.scores(metric) and size:
            sizes.setdefault(re.sub(r" size=\d+", "", group.label), []).append((size, group))
    if not any(len({size for size, _ in members}) > 1 for members in sizes.values()):
        return False
    for label, members in sizes.items():
        members.sort(key=lambda pair: pair[0])
        stats = [spread(group.scores(metric)) for _, group in members]
        colour = looks[members[0][1].label][0]
        errors = [deviation or 0.0 for _, deviation in stats]
        axes.errorbar(
            [size for size, _ in members],
            [mean or 0.0 for mean, _ in stats],
            errors,
            marker="o",
            color=colour,
            capsize=3,
            label=label,
        )
    for group in groups:
        if group.scores(metric) and not bank_size(group):
            _level(axes, group, metric, looks)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("bank size M, rows")
    axes.set_ylabel(metric)
    return True


def bank_size(group: Group) -> int:
    """Rows in the bank of a group's runs; 0 without a bank."""
    if group.method is None or TRAITS[group.method].bank == "none":
        return 0
    size = group.setting("bank.size")
    return group.setting("batch.global_batch_size") if size is None else size


def _drift_by_age(axes: "Axes", groups: list[Group], looks: Looks, metric: str) -> bool:
    drawn = False
    for group in groups:
        ages: dict[int, list[float]] = {}
        for line in (line for run in group.runs for line in run.steps):
            for one in line.get("drift", []):
                ages.setdefault(one["age"], []).append(one["passage"])
        if ages:
            colour, dash = looks[group.label]
            axes.plot(
                sorted(ages),
                [statistics.mean(ages[age]) for age in sorted(ages)],
                dash,
                color=colour,
                marker=".",
                label=group.label,
            )
            drawn = True
    axes.locator_params(axis="x", integer=True)
    axes.set_xlabel("age of the row, optimizer steps")
    axes.set_ylabel("cosine, stored and now")
    return drawn


FIGURES: dict[str, tuple[str, Draw]] = {
    "metric-time": (
        "{metric} on the test data against seconds of training; bars are standard deviations over seeds, level lines have no "
        "training",
        _against("train_seconds", 1, "seconds of training"),
    ),
    "dev-time": ("{metric} on dev as training goes on, a line a seed", _dev_over_time),
    "metric-memory": (
        "{metric} on the test data against peak memory",
        _against("peak_memory", 2**20, "peak memory, MiB"),
    ),
    "metric-bank": ("{metric} on the test data against the bank size", _against_bank),
    "loss": (
        "Loss over steps, mean and range over seeds; methods differ in the number of negatives, so the levels of their losses "
        "do not compare",
        _over_steps("loss", label="loss"),
    ),
    "grad-ratio": (
        "Gradient norm of the passage tower over the query tower's; 1 is balance",
        _over_steps("grad_norm_ratio", log=True, level=1.0, label="passage / query"),
    ),
    "grad-norms": (
        "Gradient norms before clipping: query tower solid, passage tower dashed",
        _over_steps("query_grad_norm", "passage_grad_norm", log=True, label="L2 norm"),
    ),
    "bank-age": (
        "Age of the bank's rows at the start of a step: mean solid, oldest dashed",
        _over_steps("bank_age_mean", "bank_age_max", label="optimizer steps"),
    ),
    "bank-drift": (
        "Cosine between stored vectors and those that the encoders give now, over a sample of the bank: queries solid, "
        "passages dashed",
        _over_steps("drift_query_cosine", "drift_passage_cosine", label="cosine"),
    ),
    "drift-age": ("The same for passages by the age of the row, mean over the run", _drift_by_age),
}

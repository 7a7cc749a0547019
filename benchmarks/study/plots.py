"""The plots of docs/results/small_encoder.md, made from the packed runs.

    python benchmarks/study/plots.py docs/results/study.jsonl.gz docs/results

study_time.svg: quality against training time on one CPU core. The time of a run is its number of
updates times the measured seconds of an update (``SECONDS``). Bars are standard deviations over
seeds. study_drift.svg: what a bank adds to quality, against how fast the vectors of passages
change. Bars are 95 % intervals over queries. study_norms.svg: the gradient norm of the passage
tower divided by that of the query tower, and drift, during the training of an encoder that was
never trained for retrieval.
"""

import argparse
import statistics
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from tables import METRIC, SETS, SIZE, Studies, by_rate, chosen_on_dev, drift_per_step, read_pack

from contaccum.evaluation.significance import compare
from contaccum.experiments.page import COLORS, INK, STYLE

BUDGETS = ("4096f", "6144f", "7168f", "24576f")
SECONDS = {
    "medquad": {"replay": 0.435, "cont_accum": 0.538, "grad_cache": 0.614},
    "scifact": {"replay": 0.445, "cont_accum": 0.588, "grad_cache": 0.650},
    "xquad": {"replay": 0.569, "cont_accum": 0.720, "grad_cache": 0.828},
}
"""Measured seconds of an update of 16 pairs on one CPU core, as docs/results/study_tables.md gives
them."""
LABELS = {
    "replay": "cont_cache with partial replay, bank of 64",
    "cont_accum": "cont_accum with age decay, bank of 64",
    "grad_cache": "grad_cache",
}

BANKS = {
    "bank 64": "M = 64",
    "bank 256": "M = 256",
    "bank 1024": "M = 1,024",
    "bank 1024 row_weight=current": "M = 1,024, row_weight current",
}


MASKED = "masked-49152f"
LOW_RATE = 2e-5
MASKED_BANKS = {
    "no bank": "no bank",
    "grad_cache": "grad_cache",
    "bank 64": "M = 64",
    "bank 1024": "M = 1,024",
    "bank 1024 age_decay=1 row_weight=current": "M = 1,024, age decay",
    "passage bank 1024": "passages only, M = 1,024",
}
SMOOTH = 32  # updates of which the median is drawn


def points(studies: Studies, name: str) -> dict[str, list[tuple[float, float, float]]]:
    """Return (seconds, mean score, standard deviation over seeds) of every budget, by method, in
    the order of time."""
    found: dict[str, list[tuple[float, float, float]]] = {method: [] for method in LABELS}
    for budget in BUDGETS:
        for setting, group in chosen_on_dev(studies.get(f"{name}-{budget}", [])).items():
            method = next((method for method in LABELS if method in setting), None)
            mean, deviation = group.mean_and_sd(METRIC)
            if method is not None and mean is not None and deviation is not None:
                pairs = group.setting("optim.max_steps") * group.setting(SIZE)
                found[method].append((pairs / 16 * SECONDS[name][method], mean, deviation))
    return {method: sorted(of_method) for method, of_method in found.items()}


def draw_time(studies: Studies) -> Figure:
    """Draw quality against training time, one panel for each set."""
    figure = Figure(figsize=(9.0, 3.4), layout="constrained")
    for axes, (name, title) in zip(figure.subplots(1, len(SETS)), SETS.items(), strict=True):
        for method, color, marker in zip(LABELS, COLORS, "os^", strict=False):
            seconds, scores, deviations = zip(*points(studies, name)[method], strict=True)
            axes.errorbar(
                seconds,
                scores,
                deviations,
                color=color,
                marker=marker,
                capsize=3,
                label=LABELS[method],
            )
        axes.set_title(title)
        axes.set_xscale("log")
        axes.set_xticks([50, 100, 200] if axes.get_xlim()[1] > 150 else [50, 70, 100], minor=False)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter("")
        axes.set_xlabel("seconds of training")
    figure.axes[0].set_ylabel(METRIC)
    figure.legend(
        *figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=9
    )
    return figure


def draw_drift(studies: Studies) -> Figure:
    """Draw the difference between training with and without a bank, one line for each kind of
    bank."""
    figure = Figure(figsize=(5.6, 3.4), layout="constrained")
    axes = figure.add_subplot()
    found = by_rate(studies["medquad-49152f"]).values()
    for setting, color, marker in zip(BANKS, COLORS, "os^D", strict=False):
        drifts = [drift_per_step(of_rate[setting]) for of_rate in found]
        compared = [
            compare(of_rate[setting].per_query(), of_rate["no bank"].per_query(), METRIC)
            for of_rate in found
        ]
        means = [one.difference for one in compared]
        bars = [
            [one.difference - one.low for one in compared],
            [one.high - one.difference for one in compared],
        ]
        axes.errorbar(
            drifts, means, bars, color=color, marker=marker, capsize=3, label=BANKS[setting]
        )
    axes.axhline(0, color=INK, linewidth=0.8, alpha=0.6)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("drift per step (1 - cosine, by age)")
    axes.set_ylabel(f"{METRIC} less that without a bank")
    axes.legend(fontsize=9)
    return figure


def draw_norms(studies: Studies) -> Figure:
    """Draw the ratio of the gradient norms and the drift per step of training, one line for each
    kind of bank."""
    figure = Figure(figsize=(9.0, 3.6), layout="constrained")
    ratios, drifts = figure.subplots(1, 2)
    found = by_rate(studies[MASKED])[LOW_RATE]
    for setting, color in zip(MASKED_BANKS, COLORS, strict=False):
        steps = found[setting].runs[0].steps
        parts = [steps[first : first + SMOOTH] for first in range(0, len(steps), SMOOTH)]
        ratios.plot(
            [part[len(part) // 2]["step"] for part in parts],
            [statistics.median(step["grad_norm_ratio"] for step in part) for part in parts],
            color=color,
            label=MASKED_BANKS[setting],
        )
        measured = [(step["step"], step["drift"][0]) for step in steps if step["drift"]]
        drifts.plot(
            [step for step, _ in measured],
            [(1 - oldest["passage"]) / oldest["age"] for _, oldest in measured],
            color=color,
        )
    for axes in (ratios, drifts):
        axes.set_yscale("log")
        axes.set_xlabel("update")
    ratios.yaxis.set_major_formatter("{x:g}")
    ratios.set_ylabel("gradient norm, passages ÷ queries")
    drifts.set_ylabel("drift per step (1 - cosine, by age)")
    figure.legend(
        *ratios.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=9
    )
    return figure


PLOTS = {"study_time": draw_time, "study_drift": draw_drift, "study_norms": draw_norms}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pack", type=Path)
    parser.add_argument("folder", type=Path, help="folder to write the SVG files to")
    chosen = parser.parse_args()
    studies = read_pack(chosen.pack)
    for name, draw in PLOTS.items():
        with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}):  # type: ignore[arg-type]
            draw(studies).savefig(chosen.folder / f"{name}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()

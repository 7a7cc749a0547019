"""Tables of the study with whole encoders, from docs/results/whole.jsonl.gz.

    python benchmarks/study/whole.py

The file has one run per line: settings, seed, updates, and ndcg@10 of every query of each set, in
the order of sorted query ids. Rows are compared at equal CPU seconds of training. N and the
learning rate of a row are the ones with the highest mean dev score over three seeds. Each table
gives the mean over seeds, the difference from grad_cache with the 95 % interval over queries, and p
over seeds and queries.
"""

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from contaccum.evaluation.significance import compare, holm

DATA = Path(__file__).resolve().parents[2] / "docs/results/whole.jsonl.gz"
SETS = {"api": "API docs", "medquad": "MedQuAD"}
OTHER = {"api": "medquad", "medquad": "api"}
LONG = 900  # CPU seconds of the runs that are compared
Choice = tuple[int, float]
"""N and learning rate."""


def read_runs() -> list[dict[str, Any]]:
    with gzip.open(DATA, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def choice_of(run: dict[str, Any]) -> Choice:
    settings = run["settings"]
    return settings["batch.global_batch_size"], settings["optim.learning_rate"]


def scores(runs: list[dict[str, Any]], name: str) -> dict[int, dict[str, dict[str, float]]]:
    """Return seed -> query -> values of the runs that were evaluated on a set and split."""
    return {
        run["seed"]: {
            str(number): {"ndcg@10": value}
            for number, value in enumerate(run["scores"][name]["per_query"])
        }
        for run in runs
        if name in run["scores"]
    }


def mean(runs: list[dict[str, Any]], name: str) -> float:
    """Return the mean score of the runs that were evaluated on a set and split."""
    return float(np.mean([run["scores"][name]["ndcg@10"] for run in runs if name in run["scores"]]))


def chosen(runs: list[dict[str, Any]], data: str) -> dict[str, tuple[Choice, list[dict]]]:
    """Return row -> (N and rate, runs of LONG CPU seconds) with the best mean dev score."""
    by_row: dict[str, dict[Choice, list[dict]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        if run["set"] == data and run.get("budget_cpu_s") == LONG:
            by_row[run["row"]][choice_of(run)].append(run)
    best = {}
    for row, choices in by_row.items():
        tested = {
            choice: [run for run in found if f"{data}/test" in run["scores"]]
            for choice, found in choices.items()
        }
        whole = {choice: found for choice, found in tested.items() if len(found) >= 3}
        if not whole:
            continue

        def dev(choice: Choice, whole: dict[Choice, list[dict]] = whole) -> float:
            first = [run for run in whole[choice] if run["seed"] < 3]
            return mean(first, f"{data}-dev400/dev")

        choice = max(whole, key=dev)
        best[row] = choice, whole[choice]
    return best


def table_of(data: str, runs: list[dict[str, Any]]) -> list[list[str]]:
    """Return the rows of a table, best test score first."""
    best, test = chosen(runs, data), f"{data}/test"
    untrained = [run for run in runs if run["row"] == "untrained" and run["set"] == data]
    base = scores(best["grad_cache"][1], test)
    lines = []
    for row, ((size, rate), found) in sorted(
        best.items(), key=lambda item: -mean(item[1][1], test)
    ):
        cells = [row, str(size), f"{rate:g}", str(len(found))]
        cells += [f"{mean(found, f'{data}-dev400/dev'):.4f}", f"{mean(found, test):.4f}"]
        if row == "grad_cache":
            cells += ["", ""]
        else:
            result = compare(scores(found, test), base, "ndcg@10")
            cells.append(f"{result.difference:+.4f} ({result.low:+.4f} to {result.high:+.4f})")
            cells.append(f"{result.p_both:.3f}" if result.p_both is not None else "")
        cells += [f"{mean(found, f'{other}/test'):.4f}" if f"{other}/test" in found[0]["scores"]
                  else "" for other in ("scifact", OTHER[data])]  # fmt: skip
        lines.append(cells)
    first = untrained[0]["scores"]
    lines.append(
        ["untrained", "", "", "", f"{first[f'{data}-dev400/dev']['ndcg@10']:.4f}",
         f"{first[test]['ndcg@10']:.4f}", "", "",
         *(f"{first[f'{other}/test']['ndcg@10']:.4f}" for other in ("scifact", OTHER[data]))]
    )  # fmt: skip
    return lines


def main() -> None:
    runs = [run for run in read_runs() if "scores" in run]
    hypothesis = {}
    for data, title in SETS.items():
        heads = [
            "row", "N", "rate", "seeds", "dev", "test", "against grad_cache",
            "p", "SciFact", SETS[OTHER[data]],
        ]  # fmt: skip
        lines = table_of(data, runs)
        print(f"### {title}\n")
        for cells in (heads, ["---"] * len(heads), *lines):
            print("| " + " | ".join(cells) + " |")
        print()
        best, test = chosen(runs, data), f"{data}/test"
        hypothesis[data] = compare(
            scores(best["replay_bank"][1], test), scores(best["grad_cache"][1], test), "ndcg@10"
        )
    corrected = holm(
        [1.0 if found.p_both is None else found.p_both for found in hypothesis.values()]
    )
    for (data, found), p in zip(hypothesis.items(), corrected, strict=True):
        print(
            f"{SETS[data]}: replay with a bank minus grad_cache {found.difference:+.4f} "
            f"({found.low:+.4f} to {found.high:+.4f}), p {p:.4f} after Holm's correction"
        )


if __name__ == "__main__":
    main()

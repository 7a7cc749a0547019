"""Tables of the study with whole encoders, from docs/results/whole.jsonl.gz.

    python benchmarks/study/whole.py

The file has one run per line: settings, seed, updates, and ndcg@10 of every query of each set, in
the order of sorted query ids; the line ``documents`` has the document of each of these queries.
Rows are compared at equal CPU seconds of training. N and the learning rate of a row are the ones
with the highest mean dev score over three seeds. Each table gives the mean over seeds, the
difference from grad_cache with the 95 % interval over queries, and p over seeds and queries. Below
them are the main hypothesis with Holm's correction and with queries grouped by document, means over
both sets, and pairs of single settings.
"""

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from contaccum.evaluation.significance import compare, compared_runs, holm, over_both

DATA = Path(__file__).resolve().parents[2] / "docs/results/whole.jsonl.gz"
SETS = {"api": "API docs", "medquad": "MedQuAD"}
OTHER = {"api": "medquad", "medquad": "api"}
LONG = 900  # CPU seconds of the runs that are compared
Choice = tuple[int, float]
"""N and learning rate."""
Setting = tuple[str, str, int, float, int]
"""Set, row, N, learning rate and CPU seconds."""
GRAD_CACHE: Setting = ("medquad", "grad_cache", 64, 5e-5, 900)
GRAD_CACHE_128: Setting = ("medquad", "grad_cache", 128, 5e-5, 900)
GRAD_CACHE_LONG: Setting = ("medquad", "grad_cache", 64, 5e-5, 3600)
GRAD_CACHE_API: Setting = ("api", "grad_cache", 64, 1e-4, 900)
REPLAY_BANK: Setting = ("medquad", "replay_bank", 128, 1e-4, 900)
REPLAY_BANK_API: Setting = ("api", "replay_bank", 128, 1e-4, 900)
MORE = "grad_cache, 1.25 times the updates"
PAIRS: list[tuple[Setting, Setting]] = [
    (REPLAY_BANK, GRAD_CACHE_128),
    (REPLAY_BANK, ("medquad", MORE, 64, 5e-5, 900)),
    (REPLAY_BANK, ("medquad", MORE, 128, 5e-5, 900)),
    (("medquad", "replay_bank", 128, 5e-5, 900), GRAD_CACHE_128),
    (("medquad", "replay", 128, 5e-5, 900), GRAD_CACHE_128),
    (("medquad", "replay_bank", 64, 5e-5, 900), GRAD_CACHE),
    (GRAD_CACHE_128, GRAD_CACHE),
    (("medquad", "replay_bank", 128, 1e-4, 3600), GRAD_CACHE_LONG),
    (REPLAY_BANK, GRAD_CACHE_LONG),
    (GRAD_CACHE_LONG, GRAD_CACHE),
    (REPLAY_BANK_API, GRAD_CACHE_API),
]
POOLED: dict[str, list[tuple[Setting, Setting]]] = {
    "replay with a bank, as chosen": [
        (REPLAY_BANK, GRAD_CACHE),
        (("api", "replay_bank", 64, 2e-4, 900), GRAD_CACHE_API),
    ],
    "replay with a bank, N = 128, 1e-4": [
        (REPLAY_BANK, GRAD_CACHE),
        (REPLAY_BANK_API, GRAD_CACHE_API),
    ],
    "the same, against N = 128 on MedQuAD": [
        (REPLAY_BANK, GRAD_CACHE_128),
        (REPLAY_BANK_API, GRAD_CACHE_API),
    ],
    "replay without a bank": [
        (("medquad", "replay", 128, 1e-4, 900), GRAD_CACHE),
        (("api", "replay", 32, 5e-5, 900), GRAD_CACHE_API),
    ],
    "cont_accum with age decay": [
        (("medquad", "cont_accum_aged", 64, 5e-5, 900), GRAD_CACHE),
        (("api", "cont_accum_aged", 16, 5e-5, 900), GRAD_CACHE_API),
    ],
}


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
        # a comma is before what was changed after the choice, such as the share of the weights
        if run["set"] == data and run.get("budget_cpu_s") == LONG and "," not in run["row"]:
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


def runs_of(setting: Setting, runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    data, row, size, rate, seconds = setting
    return [
        run
        for run in runs
        if (run["set"], run["row"], run.get("budget_cpu_s")) == (data, row, seconds)
        and choice_of(run) == (size, rate)
    ]


def differences(ours: list[dict[str, Any]], theirs: list[dict[str, Any]], name: str) -> np.ndarray:
    """Return the differences on a set and split, (seeds that both have, queries)."""
    one, two = (
        {run["seed"]: np.array(run["scores"][name]["per_query"]) for run in found
         if name in run["scores"]}
        for found in (ours, theirs)
    )  # fmt: skip
    runs, others = compared_runs(one, two)
    return np.array(runs) - np.array(others)


def by_document(by_seed: np.ndarray, documents: list[str]) -> tuple[float, float]:
    """Return the 95 % interval of a mean over queries whose documents are random.

    Queries of one document are not independent. by_seed: (seeds, queries). documents: of each
    query. Source: Cameron and Miller 2015, "A practitioner's guide to cluster-robust inference".
    """
    values = by_seed.mean(0)
    _, numbers = np.unique(documents, return_inverse=True)
    count = int(numbers.max()) + 1
    sums = np.bincount(numbers, weights=values - values.mean())
    error = (count / (count - 1) * float((sums**2).sum())) ** 0.5 / len(values)
    half = float(stats.t.ppf(0.975, count - 1)) * error
    return float(values.mean()) - half, float(values.mean()) + half


def over_sets(by_set: list[np.ndarray]) -> tuple[float, float, float]:
    """Return the mean over sets of equal weight, half of its 95 % interval, and p.

    Both are over seeds and queries, as in ``over_both``. by_set: (seeds, queries) of each set.
    """
    mean = float(np.mean([each.mean() for each in by_set]))
    # variances of the mean, and their degrees of freedom
    queries = [(each.mean(0).var(ddof=1) / each.shape[1], each.shape[1] - 1) for each in by_set]
    seeds = [(each.mean(1).var(ddof=1) / each.shape[0], each.shape[0] - 1) for each in by_set]
    half, p = 0.0, 0.0
    for parts in (queries + seeds, seeds):
        total = sum(variance for variance, _ in parts)
        freedom = total**2 / sum(variance**2 / degrees for variance, degrees in parts)
        error = (total / len(by_set) ** 2) ** 0.5
        half = max(half, float(stats.t.ppf(0.975, freedom)) * error)
        p = max(p, 2 * float(stats.t.sf(abs(mean) / error, freedom)))
    return mean, half, p


def table_of(data: str, runs: list[dict[str, Any]]) -> list[list[str]]:
    """Return the rows of a table, best test score first."""
    best, test = chosen(runs, data), f"{data}/test"
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
    for row in ("untrained", "bm25"):
        found = [run for run in runs if (run["row"], run["set"]) == (row, data)]
        names = (f"{data}-dev400/dev", test, "scifact/test", f"{OTHER[data]}/test")
        dev, own, *others = (f"{mean(found, name):.4f}" for name in names)
        lines.append([row, "", "", "", dev, own, "", "", *others])
    return lines


def main() -> None:
    lines = read_runs()
    documents = next(line["documents"] for line in lines if line["row"] == "documents")
    runs = [line for line in lines if "scores" in line]
    hypothesis = {}
    for data, title in SETS.items():
        heads = [
            "row", "N", "rate", "seeds", "dev", "test", "against grad_cache",
            "p", "SciFact", SETS[OTHER[data]],
        ]  # fmt: skip
        print(f"### {title}\n")
        for cells in (heads, ["---"] * len(heads), *table_of(data, runs)):
            print("| " + " | ".join(cells) + " |")
        print()
        best, test = chosen(runs, data), f"{data}/test"
        hypothesis[data] = differences(best["replay_bank"][1], best["grad_cache"][1], test)
    corrected = holm([over_both(found).p for found in hypothesis.values()])
    print("### Replay with a bank minus grad_cache\n")
    for (data, found), p in zip(hypothesis.items(), corrected, strict=True):
        low, high = by_document(found, documents[f"{data}/test"])
        print(
            f"{SETS[data]}: {found.mean():+.4f}, p {p:.4f} after Holm's correction; queries "
            f"grouped by document {low:+.4f} to {high:+.4f}"
        )

    print("\n### Means over both sets, 95 % interval and p over seeds and queries\n")
    for name, pairs in POOLED.items():
        by_set = [
            differences(runs_of(one, runs), runs_of(two, runs), f"{one[0]}/test")
            for one, two in pairs
        ]
        mean_, half, p = over_sets(by_set)
        print(f"| {name} | {mean_:+.4f} ({mean_ - half:+.4f} to {mean_ + half:+.4f}) | {p:.3f} |")
        # the difference between the sets is that of a mean with one sign turned, times 2
        mean_, half, p = over_sets([by_set[0], -by_set[1]])
        print(f"    MedQuAD minus API docs {2 * mean_:+.4f}, p {p:.4f}")

    print("\n### SciFact, mean after both trainings, N = 128 and 1e-4, minus grad_cache\n")
    after = [(REPLAY_BANK, GRAD_CACHE), (REPLAY_BANK_API, GRAD_CACHE_API)]
    by_seed = np.mean(
        [differences(runs_of(one, runs), runs_of(two, runs), "scifact/test") for one, two in after],
        axis=0,
    )
    error = stats.sem(by_seed.mean(0)) * stats.t.ppf(0.975, by_seed.shape[1] - 1)
    print(f"{by_seed.mean():+.4f} ± {error:.4f} over queries, p {over_both(by_seed).p:.3f}")

    print("\n### Pairs of settings, 95 % interval over queries, and by document\n")
    for one, two in PAIRS:
        test = f"{one[0]}/test"
        ours, theirs = runs_of(one, runs), runs_of(two, runs)
        if not theirs:
            continue
        result = compare(scores(ours, test), scores(theirs, test), "ndcg@10")
        low, high = by_document(differences(ours, theirs, test), documents[test])
        p = f"{result.p_both:.3f}" if result.p_both is not None else "-"
        print(
            f"{one} - {two}: {result.difference:+.4f} ({result.low:+.4f} to {result.high:+.4f}; "
            f"by document {low:+.4f} to {high:+.4f}), p {p}, {result.pairs} seeds"
        )


if __name__ == "__main__":
    main()

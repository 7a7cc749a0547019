"""Compute the metrics of a run with pytrec_eval, as BEIR does. Read and write files of metrics."""

import warnings
from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import pytrec_eval

from contaccum.errors import InputError
from contaccum.runtime.files import read_json, write_json

if TYPE_CHECKING:
    from contaccum.retrieval.runs import Run

CUTOFFS = (1, 3, 5, 10, 20, 100, 1000)
SHOWN = ("ndcg@10", "recall@100", "mrr@10", "map@100")
MEASURES = {"ndcg": "ndcg_cut", "map": "map_cut", "recall": "recall", "precision": "P"}
"""Name of each measure in contaccum -> its name in trec_eval."""
FIRST_PASSAGES = 5  # number of passages of each ranking that files of metrics list, for reports


class _Means(TypedDict):
    mean: dict[str, float]  # metric (such as ndcg@10) -> mean over all queries


class Metrics(_Means, total=False):
    """Metrics of one TREC run (the rankings of all queries). The file metrics.json also names data set, split and model."""

    per_query: dict[str, dict[str, float]]  # query id -> metric -> value
    queries: int  # number of queries
    first_passages: dict[str, dict[str, int]]
    """Query id -> id of each of the first passages found, best first -> grade (0: not relevant, or not judged)."""


def evaluate_run(
    qrels: Mapping[str, Mapping[str, int]],
    run: "Run",
    *,
    cutoffs: Sequence[int] = CUTOFFS,
    ignore_identical_ids: bool = True,
    relevance_level: int = 1,
) -> Metrics:
    """Compute ndcg, map, recall, precision and mrr at every cutoff, for each query of ``qrels`` and as means over these queries.

    A query of ``qrels`` without passages in the run scores 0 in every metric, and a warning gives the number of these
    queries. Queries of the run that are not in ``qrels`` are ignored.

    qrels: query id -> passage id -> grade.
    ignore_identical_ids: before scoring, remove a passage that has the same id as the query, as BEIR does.
    relevance_level: lowest relevant grade in map, recall, precision and mrr. TREC Deep Learning uses 2. ndcg uses all grades.

    mrr uses the order of passages in the run, as BEIR does. The other metrics sort the passages as trec_eval does: by float32
    score, highest first, and equal scores by id, greatest first. Raises InputError if ``qrels`` is empty, or if ``run`` and
    ``qrels`` have no query in common.
    """
    if relevance_level < 1:
        raise InputError(f"relevance_level is {relevance_level}; expected at least 1")
    if not qrels:
        raise InputError("the qrels have no judged query; expected at least one")
    judged = {
        key: [hit for hit in run[key] if not ignore_identical_ids or hit[0] != key] for key in qrels if key in run
    }
    if run and not judged:
        raise InputError(
            f"run and qrels have no query in common; for example, {next(iter(run))!r} is only in the run, and "
            f"{next(iter(qrels))!r} only in the qrels"
        )
    if missing := sum(not judged.get(query_id) for query_id in qrels):
        warnings.warn(f"{missing} of {len(qrels)} judged queries have no result; their metrics are 0", stacklevel=2)
    names = {f"{measure}.{','.join(map(str, cutoffs))}" for measure in MEASURES.values()}
    evaluator = pytrec_eval.RelevanceEvaluator(
        {query_id: dict(grades) for query_id, grades in qrels.items()}, names, relevance_level=relevance_level
    )
    scores = evaluator.evaluate({query_id: dict(hits) for query_id, hits in judged.items()})
    per_query = {
        query_id: {
            f"{name}@{cutoff}": scores.get(query_id, {}).get(f"{measure}_{cutoff}", 0.0)
            for name, measure in MEASURES.items()
            for cutoff in cutoffs
        }
        | _reciprocal_ranks(grades, judged.get(query_id, []), cutoffs, relevance_level)
        for query_id, grades in qrels.items()
    }
    metrics = metrics_of(per_query)
    metrics["first_passages"] = {
        query_id: {passage_id: grades.get(passage_id, 0) for passage_id, _ in judged.get(query_id, [])[:FIRST_PASSAGES]}
        for query_id, grades in qrels.items()
    }
    return metrics


def _reciprocal_ranks(
    grades: Mapping[str, int], hits: list[tuple[str, float]], cutoffs: Sequence[int], least: int
) -> dict[str, float]:
    """Return mrr at each cutoff: 1 / rank of the first relevant passage, or 0 if no passage up to the cutoff is relevant."""
    rank = next((rank for rank, (passage_id, _) in enumerate(hits, 1) if grades.get(passage_id, 0) >= least), None)
    return {f"mrr@{cutoff}": 1 / rank if rank is not None and rank <= cutoff else 0.0 for cutoff in cutoffs}


def metrics_of(per_query: dict[str, dict[str, float]]) -> Metrics:
    """Compute the means over queries. Return the means, the values of every query and the number of queries."""
    names = next(iter(per_query.values()))
    mean = {name: sum(values[name] for values in per_query.values()) / len(per_query) for name in names}
    return {"mean": mean, "per_query": per_query, "queries": len(per_query)}


def cutoffs_within(cutoffs: Sequence[int], k: int) -> list[int]:
    """Return the cutoffs that are not larger than k. Raise InputError if k is below 1."""
    if k < 1:
        raise InputError(f"k is {k}; expected at least 1")
    return [cutoff for cutoff in cutoffs if cutoff <= k]


def save_metrics(metrics: Metrics, output: str | Path | None, about: Mapping[str, Any]) -> Metrics:
    """Write metrics to the file ``output``, and return the metrics. If ``output`` is None, write nothing.

    about: names of model, data set and split, to be written with the metrics.
    """
    if output is not None:
        write_json(output, {**{name: value for name, value in about.items() if value is not None}, **metrics})
    return metrics


def read_metrics(path: Path) -> dict[str, Any]:
    """Read a file of metrics. Raise InputError if a mean or the value of a query is not a finite number."""
    found: Metrics = read_json(path, Metrics)
    for where, values in {"mean": found["mean"], **found.get("per_query", {})}.items():
        if not all(map(isfinite, values.values())):
            raise InputError(f"{path}: {where}: a value is NaN or infinite; expected finite numbers")
    return {**read_json(path), **found}


def render_metrics(metrics: Metrics) -> str:
    """Return the means as text: a table with a row for each measure and a column for each cutoff."""
    mean = metrics["mean"]
    if not all("@" in name for name in mean):
        return "\n".join(f"{name:8s} {value:.4f}" for name, value in mean.items())
    measures = list(dict.fromkeys(name.split("@")[0] for name in mean))
    cutoffs = list(dict.fromkeys(name.split("@")[1] for name in mean))
    header = " " * 10 + "".join(f"{'@' + cutoff:>9s}" for cutoff in cutoffs)
    rows = [f"{measure:10s}" + "".join(f"{mean[f'{measure}@{c}']:9.4f}" for c in cutoffs) for measure in measures]
    return "\n".join([header, *rows, f"{metrics['queries']} queries"])


def render_benchmark(result: Mapping[str, Any]) -> str:
    """Return the benchmark table as text. The last rows show the means over the other rows."""
    names = [name for name in SHOWN if name in result["mean"]]
    means = [("mean", result["mean"]), ("without msmarco", result.get("mean_without_msmarco"))]
    rows = [*result["rows"].items(), *means]
    width = max(len(row) for row, _ in rows)
    lines = [f"{'':{width}s}" + "".join(f"{name:>12s}" for name in names) + f"{'queries':>9s}"]
    for row, values in rows:
        if values:
            queries = f"{values['queries']:9d}" if "queries" in values else ""
            lines.append(f"{row:{width}s}" + "".join(f"{values[name]:12.4f}" for name in names) + queries)
    return "\n".join(lines)

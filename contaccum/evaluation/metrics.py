"""Compute the metrics of a run with pytrec_eval, as BEIR does. Read and write files of metrics."""

import hashlib
import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
import pytrec_eval

from contaccum.config import CUTOFFS
from contaccum.errors import InputError
from contaccum.runtime.files import check_type, read_json, write_json
from contaccum.runtime.units import counted

if TYPE_CHECKING:
    from contaccum.retrieval.runs import Run

SHOWN = ("ndcg@10", "recall@100", "mrr@10", "map@100")
MEASURES = {"ndcg": "ndcg_cut", "map": "map_cut", "recall": "recall", "precision": "P"}
"""Name of each measure in contaccum -> its name in trec_eval."""
FIRST_PASSAGES = 5  # number of passages of each ranking that files of metrics list, for reports


class _Means(TypedDict):
    mean: dict[str, float]  # metric (such as ndcg@10) -> mean over all queries


class Metrics(_Means, total=False):
    """Metrics of one TREC run (the rankings of all queries).

    The file metrics.json also has the names of data set, split and model, ``relevance_level``, the
    type of the index, and ``test_content``, a hash of queries, qrels and corpus.
    """

    per_query: dict[str, dict[str, float]]  # query id -> metric -> value
    queries: int  # number of queries
    first_passages: dict[str, dict[str, int]]
    """Query id -> id of each of the first passages found, best first -> grade (0: not relevant, or
    not judged)."""
    positives_hash: str  # see ``hash_of_positives``
    own_ids: bool  # whether passages with the id of their query count, and there are some
    precision: str | None  # of the encoder; None: there is none


def hash_of_positives(qrels: Mapping[str, Mapping[str, int]]) -> str:
    """Return the SHA-256 of all (query, passage, grade) with a grade above 0, in any order."""
    positives = sorted(
        (query, passage, grade)
        for query, grades in qrels.items()
        for passage, grade in grades.items()
        if grade > 0
    )
    return hashlib.sha256(json.dumps(positives).encode()).hexdigest()


def check_relevance(qrels: Mapping[str, Mapping[str, int]], relevance_level: int) -> None:
    """Raise InputError if no passage in ``qrels`` has the grade ``relevance_level`` or a higher."""
    if relevance_level < 1:
        raise InputError(f"relevance_level is {relevance_level}; expected at least 1")
    if not qrels:
        raise InputError("the qrels have no judged query; expected at least one")
    highest = max((grade for grades in qrels.values() for grade in grades.values()), default=0)
    if relevance_level > highest:
        raise InputError(
            f"relevance_level is {relevance_level}, but the highest grade is {highest}; no passage "
            "would be relevant"
        )


def evaluate_run(
    qrels: Mapping[str, Mapping[str, int]],
    run: "Run",
    *,
    cutoffs: Sequence[int] = CUTOFFS,
    ignore_identical_ids: bool = True,
    relevance_level: int = 1,
) -> Metrics:
    """Compute ndcg, map, recall, precision and mrr at each cutoff, per query and as means.

    A passage is relevant if its grade is at least ``relevance_level``. R is the number of relevant
    passages of the query, rel_r is 1 if the passage at rank r is relevant, else 0. A passage
    without a judgement has grade 0.

    - ndcg@k: DCG@k / (DCG@k of the best possible ranking), where DCG@k is the sum of grade_r /
      log2(r + 1) over r = 1 to k. Source: Järvelin and Kekäläinen 2002, with the linear gain of
      trec_eval.
    - map@k: mean of precision@r over all relevant passages, (1 / R) times the sum of rel_r *
      precision@r over r = 1 to k.
    - recall@k: number of relevant passages up to rank k, divided by R.
    - precision@k: number of relevant passages up to rank k, divided by k.
    - mrr@k: 1 / rank of the first relevant passage, or 0 if its rank is above k. Source: Voorhees
      1999 (TREC-8 QA).

    Every metric ranks the passages as trec_eval does: by score, highest first, and equal scores by
    id, greatest first.

    Args:
        qrels: query id -> passage id -> grade. The means are over these queries. A query without
            passages in the run scores 0 in every metric, and a warning gives the number of these
            queries.
        run: query id -> (passage id, score). Queries that are not in ``qrels`` are ignored.
        cutoffs: values of k.
        ignore_identical_ids: remove a passage that has the same id as the query before scoring, as
            BEIR does.
        relevance_level: lowest relevant grade in map, recall, precision and mrr. TREC Deep Learning
            uses 2. ndcg uses all grades.

    Raises InputError if ``qrels`` is empty or has no grade of ``relevance_level``, or if ``run``
    and ``qrels`` have no query in common.
    """
    # imports `datasets`, which a report does not need
    from contaccum.retrieval.runs import ranked

    check_relevance(qrels, relevance_level)
    judged_run = {}
    for query_id in qrels:
        if query_id in run:
            hits = run[query_id]
            # trec_eval compares scores in single precision
            with np.errstate(over="ignore"):
                judged_run[query_id] = ranked(
                    (passage, float(np.float32(score)))
                    for passage, score in hits
                    if not ignore_identical_ids or passage != query_id
                )
    if run and not judged_run:
        raise InputError(
            f"run and qrels have no query in common; for example, {next(iter(run))!r} is only in "
            f"the run, and {next(iter(qrels))!r} only in the qrels"
        )
    if missing := sum(not judged_run.get(query_id) for query_id in qrels):
        warnings.warn(
            f"no result for {missing} of {counted(len(qrels), 'judged query')}; without a "
            "result, the metrics of a query are 0",
            stacklevel=2,
        )
    names = {f"{measure}.{','.join(map(str, cutoffs))}" for measure in MEASURES.values()}
    evaluator = pytrec_eval.RelevanceEvaluator(
        {query_id: dict(grades) for query_id, grades in qrels.items()},
        {*names, "recip_rank"},
        relevance_level=relevance_level,
    )
    scores = evaluator.evaluate({query_id: dict(hits) for query_id, hits in judged_run.items()})
    per_query: dict[str, dict[str, float]] = {}
    first_passages: dict[str, dict[str, int]] = {}
    for query_id, grades in qrels.items():
        found = scores.get(query_id, {})
        values = {}
        for name, measure in MEASURES.items():
            for cutoff in cutoffs:
                values[f"{name}@{cutoff}"] = found.get(f"{measure}_{cutoff}", 0.0)
        reciprocal = found.get("recip_rank", 0.0)
        for cutoff in cutoffs:
            values[f"mrr@{cutoff}"] = reciprocal if reciprocal >= 1 / cutoff else 0.0
        per_query[query_id] = values
        first = judged_run.get(query_id, [])[:FIRST_PASSAGES]
        first_passages[query_id] = {
            passage_id: grades.get(passage_id, 0) for passage_id, _ in first
        }
    metrics = metrics_of(per_query)
    metrics["first_passages"] = first_passages
    metrics["positives_hash"] = hash_of_positives(qrels)
    return metrics


def metrics_of(per_query: dict[str, dict[str, float]]) -> Metrics:
    """Compute the means over queries.

    Return the means, the values of every query and the number of queries.
    """
    mean = average(list(per_query.values()))
    return {"mean": mean, "per_query": per_query, "queries": len(per_query)}


def average(values: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each metric. values: metric -> value, with equal keys."""
    return {name: sum(each[name] for each in values) / len(values) for name in values[0]}


def save_metrics(metrics: Metrics, output: str | Path | None, about: Mapping[str, Any]) -> Metrics:
    """Write metrics to the file ``output``, and return the metrics.

    If ``output`` is None, write nothing.

    about: names of model, data set and split, to be written with the metrics.
    """
    if output is not None:
        write_json(
            output,
            {**{name: value for name, value in about.items() if value is not None}, **metrics},
        )
    return metrics


def read_metrics(path: Path) -> dict[str, Any]:
    """Read a file of metrics. Raise InputError if it has no metrics."""
    content: dict[str, Any] = read_json(path)
    check_type(content, Metrics, str(path))
    return content


def render_metrics(metrics: Metrics, metric: str = "ndcg@10") -> str:
    """Return the means as text: a table with a row for each measure and a column for each cutoff.

    The last line has the number of queries and, if ``metric`` was computed, its 95 % confidence
    interval over queries.
    """
    mean = metrics["mean"]
    if not all("@" in name for name in mean):  # answer accuracy: top1, top5, ...
        return "\n".join(f"{name:8s} {value:.4f}" for name, value in mean.items())
    last_line = counted(metrics["queries"], "query")
    if metric in mean and metrics["per_query"]:  # BEIR gives no values of queries
        # imports scipy.stats, which takes a second and training does not need
        from contaccum.evaluation.significance import mean_interval

        low, high = mean_interval([values[metric] for values in metrics["per_query"].values()])
        last_line += f"; {metric} {mean[metric]:.4f}, 95 % interval {low:.4f} to {high:.4f}"
    measures = list(dict.fromkeys(name.split("@")[0] for name in mean))
    cutoffs = list(dict.fromkeys(name.split("@")[1] for name in mean))
    header = " " * 10 + "".join(f"{'@' + cutoff:>9s}" for cutoff in cutoffs)
    rows = []
    for measure in measures:
        rows.append(
            f"{measure:10s}" + "".join(f"{mean[f'{measure}@{cutoff}']:9.4f}" for cutoff in cutoffs)
        )
    return "\n".join([header, *rows, last_line])


def shown_metrics(mean: Mapping[str, float], metric: str = "ndcg@10") -> list[str]:
    """Return the metrics to show of those in ``mean``: ``metric``, if it is another one, and SHOWN.

    If a cutoff of SHOWN was not computed, the next smaller one is shown.
    """
    names = [metric] if metric in mean else []
    for name in SHOWN:
        measure, most = name.split("@")
        cutoffs = [int(each.split("@")[1]) for each in mean if each.startswith(f"{measure}@")]
        usable = [cutoff for cutoff in cutoffs if cutoff <= int(most)]
        names += [f"{measure}@{max(usable)}"] if usable else []
    return list(dict.fromkeys(names))


def render_benchmark(result: Mapping[str, Any], metric: str = "ndcg@10") -> str:
    """Return the benchmark table as text. The last rows show the means over the other rows."""
    names = shown_metrics(result["mean"], metric)
    rows = {**result["rows"], "mean": result["mean"]}
    if "mean_without_msmarco" in result:
        rows["without msmarco"] = result["mean_without_msmarco"]
    width = max(map(len, rows))
    lines = [f"{'':{width}s}" + "".join(f"{name:>12s}" for name in names) + f"{'queries':>9s}"]
    for row, values in rows.items():
        queries = f"{values['queries']:9d}" if "queries" in values else ""
        lines.append(
            f"{row:{width}s}" + "".join(f"{values[name]:12.4f}" for name in names) + queries
        )
    return "\n".join(lines)

"""Compute the metrics of a TREC run file from qrels, without PyTorch."""

import warnings
from pathlib import Path
from typing import Any

from contaccum.config import CUTOFFS
from contaccum.config.commands import DataPolicy
from contaccum.data.dataset import DEFAULT_POLICY, open_dataset
from contaccum.evaluation.metrics import Metrics, evaluate_run, save_metrics
from contaccum.retrieval.runs import read_run
from contaccum.runtime.checks import refuse_other_file
from contaccum.runtime.units import counted


def evaluate_run_file(
    run: str | Path,
    qrels: str | Path,
    output: str | Path | None = None,
    relevance_level: int = 1,
    policy: DataPolicy = DEFAULT_POLICY,
    ignore_identical_ids: bool = False,
) -> Metrics:
    """Compute the metrics of a TREC run file. qrels: file of relevance judgements.

    Unlike in ``evaluate``, a passage with the id of its query counts, as in trec_eval, and a
    warning gives the number of such queries. ignore_identical_ids: leave such passages out.

    Cutoffs up to 10 are always used. A larger cutoff is used if the run has at least that many
    passages for at least one query. If another query has fewer passages than the cutoff, the
    missing passages count as not relevant, as in trec_eval. Queries without a relevant passage in
    ``qrels`` are left out with a warning; if ``policy`` is strict, such a query is an error.
    output: file to write the metrics to.
    """
    refuse_other_file(output, "metrics")
    hits = read_run(run)
    depth = max(10, *map(len, hits.values()))
    cutoffs = [cutoff for cutoff in CUTOFFS if cutoff <= depth]
    judgements = open_dataset(qrels, policy=policy).qrels
    own = [key for key in judgements if any(passage == key for passage, _ in hits.get(key, ()))]
    if own and not ignore_identical_ids:
        warnings.warn(
            f"{run}: {counted(len(own), 'query')} found the passage with the id of the query "
            f"(first: {own[0]!r}), which counts as in trec_eval; search and evaluate --data leave "
            "it out, as BEIR does, and so does --ignore_identical_ids true",
            stacklevel=2,
        )
    metrics = evaluate_run(
        judgements,
        hits,
        cutoffs=cutoffs,
        relevance_level=relevance_level,
        ignore_identical_ids=ignore_identical_ids,
    )
    metrics["own_ids"] = bool(own) and not ignore_identical_ids
    return save_metrics(metrics, output, about_run_file(run, qrels, relevance_level))


def about_run_file(run: str | Path, qrels: str | Path, relevance_level: int) -> dict[str, Any]:
    """Return what a file of the metrics of a run file says about their origin."""
    return {"run": run, "data": qrels, "relevance_level": relevance_level}

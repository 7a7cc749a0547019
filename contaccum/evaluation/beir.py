"""BEIR's metrics for a run or an encoder, computed by pytrec_eval, the package that BEIR itself uses."""

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypedDict

import pytrec_eval

from contaccum.errors import InputError
from contaccum.options import SearchSettings
from contaccum.processes import ALONE, Processes
from contaccum.retrieval.encode import Encoder
from contaccum.retrieval.runs import Run
from contaccum.retrieval.search import DEFAULTS, retrieve

if TYPE_CHECKING:
    from contaccum.data.tables import RetrievalSet

CUTS = (1, 3, 5, 10, 20, 100, 1000)
MEASURES = {"ndcg": "ndcg_cut", "map": "map_cut", "recall": "recall", "precision": "P"}
"""Our names and trec_eval's."""


class Scores(TypedDict):
    """The values of every query and their means."""

    mean: dict[str, float]
    per_query: dict[str, dict[str, float]]
    queries: int


class Metrics(Scores, total=False):
    """What ``metrics.json`` holds of an evaluation; whoever writes it adds data, split and model where known."""

    left_out: dict[str, int]
    """Bad records that were left out of the data, by file; absent where there were none."""


def evaluate_run(
    qrels: Mapping[str, Mapping[str, int]],
    run: Run,
    *,
    cuts: Sequence[int] = CUTS,
    ignore_identical_ids: bool = True,
    relevance_level: int = 1,
) -> Metrics:
    """ndcg, map, recall, precision and mrr at every cut, per query and averaged over all queries of ``qrels``.

    A query without any result counts 0 in every mean, with one warning that counts them; queries of the run that are
    not judged are left out. A passage whose id is the query's own is dropped first, as BEIR does, unless told
    otherwise. Grades from ``relevance_level`` on are relevant for map, recall, precision and mrr (TREC's deep learning tracks
    take 2 for passages); ndcg takes the grades as they are. mrr is BEIR's: over the run's own order. The others are
    trec_eval's, which orders a run by score (as float32), ties by id, greatest first: the order that our runs have.
    Raises InputError when nothing was judged, or run and qrels share no query.
    """
    if relevance_level < 1:
        raise InputError(f"relevance_level is {relevance_level}, expected at least 1")
    if not qrels:
        raise InputError("the qrels judge no query, expected at least one")
    judged: Run = {
        query_id: [hit for hit in run[query_id] if not (ignore_identical_ids and hit[0] == query_id)]
        for query_id in qrels
        if query_id in run
    }
    if run and not judged:
        raise InputError(
            f"no query of the run is judged: it has {next(iter(run))!r}, the qrels have {next(iter(qrels))!r}"
        )
    if missing := sum(not judged.get(query_id) for query_id in qrels):
        warnings.warn(
            f"{missing} of {len(qrels)} judged queries have no result and count 0 in every mean", stacklevel=2
        )
    names = {f"{measure}.{','.join(map(str, cuts))}" for measure in MEASURES.values()}
    evaluator = pytrec_eval.RelevanceEvaluator(
        {query_id: dict(grades) for query_id, grades in qrels.items()}, names, relevance_level=relevance_level
    )
    scores = evaluator.evaluate({query_id: dict(hits) for query_id, hits in judged.items()})
    per_query = {
        query_id: {
            f"{name}@{cut}": scores.get(query_id, {}).get(f"{measure}_{cut}", 0.0)
            for name, measure in MEASURES.items()
            for cut in cuts
        }
        | _reciprocal_ranks(grades, judged.get(query_id, []), cuts, relevance_level)
        for query_id, grades in qrels.items()
    }
    return metrics_of(per_query)


def _reciprocal_ranks(
    grades: Mapping[str, int], hits: list[tuple[str, float]], cuts: Sequence[int], least: int
) -> dict[str, float]:
    """1 / rank of the first relevant passage, 0 where it stands behind the cut."""
    rank = next((rank for rank, (passage_id, _) in enumerate(hits, 1) if grades.get(passage_id, 0) >= least), None)
    return {f"mrr@{cut}": 1 / rank if rank is not None and rank <= cut else 0.0 for cut in cuts}


def metrics_of(per_query: dict[str, dict[str, float]]) -> Metrics:
    """The values of every query with their means."""
    names = next(iter(per_query.values()))
    mean = {name: sum(values[name] for values in per_query.values()) / len(per_query) for name in names}
    return {"mean": mean, "per_query": per_query, "queries": len(per_query)}


def retrieve_others(
    encoder: Encoder,
    data: "RetrievalSet",
    k: int = 100,
    settings: SearchSettings = DEFAULTS,
    group: Processes = ALONE,
) -> Run:
    """The k best passages for each query of a set, its own id left out: what BEIR's exact search returns.

    ``group`` as in ``retrieve``.
    """
    # one more than asked for: it may be the query itself
    return drop_own(retrieve(encoder, data.queries, data.corpus, k + 1, settings, group), k)


def drop_own(run: Run, k: int) -> Run:
    """Each query's first k passages, its own id left out."""
    return {query_id: [hit for hit in hits if hit[0] != query_id][:k] for query_id, hits in run.items()}


def evaluate_encoder(
    encoder: Encoder, data: "RetrievalSet", k: int = 100, settings: SearchSettings = DEFAULTS
) -> Metrics:
    """Encode, search and score a retrieval set, at the cuts that a run of k passages can answer."""
    cuts = cuts_within(CUTS, k)
    return noting(data.left_out, evaluate_run(data.qrels, retrieve_others(encoder, data, k, settings), cuts=cuts))


def noting(left_out: dict[str, int], metrics: Metrics) -> Metrics:
    """The metrics, with what was left out of their data."""
    return {**metrics, "left_out": left_out} if left_out else metrics


def cuts_within(cuts: Sequence[int], k: int) -> list[int]:
    """The cuts that a run of k passages can answer."""
    if k < 1:
        raise InputError(f"k is {k}, expected at least 1")
    return [cut for cut in cuts if cut <= k]

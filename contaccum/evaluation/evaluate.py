"""Evaluate a retriever on a data set."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contaccum.config import CUTOFFS
from contaccum.config.commands import DataPolicy, EncoderConfig, Evaluator, SearchConfig
from contaccum.config.declare import PositiveInt
from contaccum.config.load import converted
from contaccum.data.dataset import DEFAULT_POLICY, open_dataset
from contaccum.data.retrieval_set import RetrievalSet
from contaccum.errors import InputError
from contaccum.evaluation.beir import evaluate_with_beir
from contaccum.evaluation.metrics import Metrics, check_relevance, evaluate_run, save_metrics
from contaccum.retrieval.retriever import DEFAULTS, Retriever, index_settings
from contaccum.runtime.checks import refuse_other_file
from contaccum.runtime.processes import ALONE, Processes

if TYPE_CHECKING:
    from contaccum.encoder import DualEncoder


def evaluate(
    model: "EncoderConfig | DualEncoder | str | Path",
    data: str | Path | RetrievalSet,
    split: str = "test",
    *,
    k: int = 100,
    relevance_level: int = 1,
    settings: SearchConfig = DEFAULTS,
    policy: DataPolicy = DEFAULT_POLICY,
    output: str | Path | None = None,
    group: Processes = ALONE,
    evaluator: Evaluator = "contaccum",
) -> Metrics:
    """Search passages for the queries of a data set, and compute the metrics of the results.

    model: an encoder, the name or config of an encoder, or ``bm25``. data: name or path of a data
    set (BEIR folder or file of training examples), or a loaded data set. k: number of passages per
    query; metrics at cutoffs above k are not computed. relevance_level: see ``evaluate_run``.
    output: file for the metrics (the means, and the values of every query). group, policy: see
    ``contaccum.search``. evaluator: ``beir`` uses the loader, the exact search and the metrics of
    the library BEIR instead of ours. Raises InputError for an option that ``beir`` does not
    support.
    """
    converted(Evaluator, evaluator, "evaluator")
    k = converted(PositiveInt, k, "k")
    cutoffs = [cutoff for cutoff in CUTOFFS if cutoff <= k]
    name = model if isinstance(model, str | Path) else getattr(model, "model", None)
    refuse_other_file(output, "metrics")
    about: dict[str, Any] = {"model": name}
    if not isinstance(data, RetrievalSet):
        about |= {"data": data, "split": split}

    if evaluator == "beir":
        supported = replace(DEFAULTS, batch_tokens=settings.batch_tokens)
        changed = settings != supported or policy != DEFAULT_POLICY or relevance_level != 1
        if changed or group.world > 1 or isinstance(data, RetrievalSet):
            raise InputError(
                "evaluator beir reads the data itself, needs one process, and of the options for "
                "search and data supports only batch_tokens. Leave the others out, or use "
                "evaluator contaccum."
            )
        metrics = evaluate_with_beir(model, data, split, cutoffs, settings.batch_tokens)
        return save_metrics(metrics, output, {**about, "evaluator": "beir"})

    if isinstance(data, RetrievalSet):
        retrieval_set = data
    else:
        with group.main_first():
            retrieval_set = open_dataset(data, split, policy).retrieval_set
    check_relevance(retrieval_set.qrels, relevance_level)  # before the search
    own = retrieval_set.skips_own_id
    retriever = Retriever.open(model, retrieval_set.corpus, settings, group)  # encodes the corpus
    about |= {
        "test_content": retrieval_set.fingerprint(),
        "relevance_level": relevance_level,
    }
    if retriever.precision:  # bm25 has neither vectors nor an index
        about |= index_settings(settings)
    run = retriever.search(retrieval_set.queries, k, ignore_identical_ids=own)
    metrics = evaluate_run(
        retrieval_set.qrels,
        run,
        cutoffs=cutoffs,
        relevance_level=relevance_level,
        ignore_identical_ids=False,  # the search has left them out
    )
    metrics |= {"own_ids": False, "precision": retriever.precision}
    return save_metrics(metrics, output if group.is_main else None, about)

"""Evaluate a retriever on a data set or a benchmark, or compute the metrics of a run file from relevance judgements."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from urllib.parse import quote

import torch

from contaccum.catalog import HUB_PREFIX, NANO, fetch
from contaccum.catalog.download import FORUMS, MD5
from contaccum.catalog.hub_sets import HubName
from contaccum.config.commands import DataPolicy, EncoderConfig, SearchConfig
from contaccum.data.dataset import DEFAULT_POLICY, open_dataset
from contaccum.data.retrieval_set import RetrievalSet
from contaccum.errors import InputError, library_errors
from contaccum.evaluation.metrics import CUTOFFS, Metrics, cutoffs_within, evaluate_run, read_metrics, save_metrics
from contaccum.formats.records import Passage
from contaccum.retrieval.retriever import BM25_NAME, DEFAULTS, Retriever, index_settings
from contaccum.retrieval.runs import read_run
from contaccum.retrieval.shards import saved_dtype
from contaccum.runtime.checks import refuse_input_as_output
from contaccum.runtime.files import sha256_of, write_json
from contaccum.runtime.processes import ALONE, Processes

if TYPE_CHECKING:
    from contaccum.encoder import DualEncoder

BEIR = {
    "msmarco": "dev", "trec-covid": "test", "nfcorpus": "test", "nq": "test", "hotpotqa": "test", "fiqa": "test",
    "arguana": "test", "webis-touche2020": "test", "cqadupstack": "test", "quora": "test", "dbpedia-entity": "test",
    "scidocs": "test", "fever": "test", "climate-fever": "test", "scifact": "test",
}  # fmt: skip
"""The 15 public data sets of BEIR: name of the data set -> split that papers report."""
FAMILIES = {"beir": BEIR, "nanobeir": {f"nanobeir/{name}": "test" for name in NANO}}


def evaluate(
    choice: "EncoderConfig | DualEncoder | str | Path",
    data: str | Path | RetrievalSet,
    split: str = "test",
    *,
    k: int = 100,
    settings: SearchConfig = DEFAULTS,
    strict: bool = False,
    repair: bool = False,
    relevance_level: int = 1,
    output: str | Path | None = None,
    group: Processes = ALONE,
    policy: DataPolicy | None = None,
    evaluator: Literal["contaccum", "beir"] = "contaccum",
) -> Metrics:
    """Search passages for the queries of a data set, and compute the metrics of the results.

    choice: an encoder, the name or config of an encoder, or ``bm25``. data: name or path of a data set (BEIR folder or file of
    training examples), or a loaded data set. k: number of passages per query; metrics at cutoffs above k are not computed.
    relevance_level: see ``evaluate_run``. output: file for the metrics (the means, and the values of every query). group,
    policy: see ``contaccum.search``. strict, repair: used only if ``policy`` is None. evaluator: ``beir`` uses
    the loader, the exact search and the metrics of the library BEIR instead of ours. Raises InputError for an option that
    ``beir`` does not support.
    """
    cutoffs = cutoffs_within(CUTOFFS, k)
    if evaluator not in ("contaccum", "beir"):
        raise InputError(f"evaluator is {evaluator!r}; expected contaccum or beir")
    model = choice if isinstance(choice, str | Path) else getattr(choice, "model", None)
    about = {"model": model}
    refuse_input_as_output(output, data, model, settings.embeddings, settings.index_dir)
    policy = policy or DataPolicy(strict=strict, repair=repair)
    if evaluator == "beir":
        _refuse_unused(data, settings, policy, relevance_level)
    if isinstance(data, RetrievalSet):
        judged = data
    else:
        about |= {"data": data, "split": split}
        if evaluator == "beir":
            metrics = _evaluate_with_beir(choice, data, split, cutoffs, settings.batch_tokens, group)
            return save_metrics(metrics, output, about | {"evaluator": "beir"})
        with group.main_first():
            judged = open_dataset(data, split, policy).retrieval_set
    retriever = Retriever.open(choice, judged.corpus, settings, group)
    run = retriever.search(judged.queries, k, ignore_identical_ids=True)
    metrics = evaluate_run(judged.qrels, run, cutoffs=cutoffs, relevance_level=relevance_level)
    return save_metrics(metrics, output, about)


class BeirEncoder:
    """Adapter to use a ``DualEncoder`` in scripts for BEIR: ``DenseRetrievalExactSearch(BeirEncoder(encoder))``.

    The script must use ``score_function="dot"``. ``batch_size`` is ignored, because ``batch_tokens`` limits the size of a batch.
    """

    def __init__(self, encoder: "DualEncoder", batch_tokens: int | None = None) -> None:
        self.encoder, self.batch_tokens = encoder, batch_tokens

    def encode_queries(self, queries: list[str], batch_size: int = 0, **_: Any) -> torch.Tensor:
        """Encode n queries; return the vectors (n, d)."""
        return torch.from_numpy(self.encoder.encode_queries(list(queries), self.batch_tokens))

    def encode_corpus(self, corpus: Sequence[Mapping[str, str]], batch_size: int = 0, **_: Any) -> torch.Tensor:
        """Encode n passages; return the vectors (n, d). A passage has the keys ``title`` and ``text``."""
        texts = [Passage("", each.get("title") or "", each.get("text") or "").content for each in corpus]
        return torch.from_numpy(self.encoder.encode_passages(texts, self.batch_tokens))


def _refuse_unused(data: object, settings: SearchConfig, policy: DataPolicy, relevance_level: int) -> None:
    """Raise InputError for an option that would have no effect with ``evaluator="beir"``."""
    if isinstance(data, RetrievalSet):
        raise InputError(
            "data is a loaded data set; the beir evaluator needs the name or the folder of a BEIR data set"
        )
    usable = replace(DEFAULTS, batch_tokens=settings.batch_tokens)
    usual = {"relevance_level": 1, **asdict(DEFAULT_POLICY), **asdict(usable)}
    for name, value in {"relevance_level": relevance_level, **asdict(policy), **asdict(settings)}.items():
        if value != usual[name]:
            fix = "Leave the option out, or use evaluator contaccum."
            raise InputError(f"{name} is {value!r}; evaluator beir supports only {usual[name]!r}. {fix}")


def _evaluate_with_beir(
    choice: "EncoderConfig | DualEncoder | str | Path",
    data: str | Path,
    split: str,
    cutoffs: list[int],
    batch_tokens: int | None,
    group: Processes,
) -> Metrics:
    """Load, search and score with the library BEIR. It rounds mean metrics to 5 decimals and returns no values per query."""
    if group.world > 1:
        raise InputError(f"--evaluator beir needs one process, but {group.world} were started; start one")
    from beir.datasets.data_loader import GenericDataLoader
    from beir.retrieval.evaluation import EvaluateRetrieval
    from beir.retrieval.search.dense import DenseRetrievalExactSearch

    from contaccum.encoder import load_encoder

    choice = EncoderConfig.of(choice) if isinstance(choice, str | Path) else choice
    encoder = load_encoder(choice) if isinstance(choice, EncoderConfig) else choice
    folder = str(open_dataset(data, split).path)
    fix = "; expected a BEIR folder with unpacked files"
    with library_errors(f"{folder}: BEIR cannot load it", ValueError, KeyError, fix=fix):
        corpus, queries, qrels = GenericDataLoader(folder).load(split=split)
    if len(queries) < 2:
        raise InputError(f"{folder}: the split {split} has {len(queries)} query; --evaluator beir needs at least 2")
    search = DenseRetrievalExactSearch(BeirEncoder(encoder, batch_tokens))
    scorer = EvaluateRetrieval(search, cutoffs, score_function="dot")
    results = scorer.retrieve(corpus, queries)
    found = [*scorer.evaluate(qrels, results, cutoffs), scorer.evaluate_custom(qrels, results, cutoffs, "mrr")]
    names = {"NDCG": "ndcg", "MAP": "map", "Recall": "recall", "P": "precision", "MRR": "mrr"}
    means = {name.partition("@"): value for each in found for name, value in each.items()}
    return {
        "mean": {f"{names[measure]}@{cutoff}": value for (measure, _, cutoff), value in means.items()},
        "per_query": {},
        "queries": len(qrels),
    }


def evaluate_run_file(
    run: str | Path,
    qrels: str | Path,
    output: str | Path | None = None,
    relevance_level: int = 1,
    policy: DataPolicy = DEFAULT_POLICY,
) -> Metrics:
    """Compute the metrics of a TREC run file. qrels: file of relevance judgements.

    Cutoffs up to 10 are always used. A larger cutoff is used if the run has at least that many passages for at least one query.
    If another query has fewer passages than the cutoff, the missing passages count as not relevant, as in trec_eval. Queries
    without a relevant passage in ``qrels`` are left out with a warning; if ``policy`` is strict, such a query is an error.
    output: file to write the metrics to.
    """
    refuse_input_as_output(output, run, qrels)
    hits = read_run(run)
    cutoffs = cutoffs_within(CUTOFFS, max(10, *map(len, hits.values())))
    judged = open_dataset(qrels, policy=policy)
    metrics = evaluate_run(judged.qrels, hits, cutoffs=cutoffs, relevance_level=relevance_level)
    return save_metrics(metrics, output, {"run": run, "data": qrels})


class BenchmarkSet(NamedTuple):
    """One data set of a benchmark."""

    data: str  # name or path of the data set
    split: str
    row: str
    """Name of the row in the table. The 12 forums of cqadupstack share one row, which shows their mean."""


def is_benchmark(data: str) -> bool:
    """Return whether ``data`` names more than one data set."""
    return len(benchmark_sets(data, "test")) > 1


def benchmark_sets(data: str, split: str) -> list[BenchmarkSet]:
    """Return the data sets that ``data`` names: ``beir``, ``nanobeir``, or names and folders separated by commas."""
    if os.path.exists(data):
        return [BenchmarkSet(data, split, data)]
    named: dict[str, str] = {}
    for each in _names(data):
        named |= FAMILIES.get(each, {each: split})
    found = []
    for name, own in named.items():
        row = Path(name).name if os.path.isdir(name) else name
        inner = [f"{name}/{forum}" for forum in FORUMS] if name == "cqadupstack" and len(named) > 1 else [name]
        found += [BenchmarkSet(each, own, row) for each in inner]
    # two folders with the same name would share a row; then each row gets the full path of its data set
    sources = {(each.row, each.data.partition("/")[0] if each.row == "cqadupstack" else each.data) for each in found}
    if len({row for row, _ in sources}) < len(sources):
        return [each._replace(row=each.data) for each in found]
    return found


def _names(data: str) -> list[str]:
    """Split ``data`` at commas between names. Keep a comma between columns, as in ``hub:owner/name?query=q&pos=p&neg=a,b``.

    Spaces around a name and empty names are ignored, as in ``scifact, nfcorpus,``.
    """
    names: list[str] = []
    for each in filter(None, map(str.strip, data.split(","))):
        is_set = each in MD5 or each in FAMILIES or ":" in each or "/" in each
        if names and names[-1].startswith(HUB_PREFIX) and "?" in names[-1] and not is_set:
            names[-1] += f",{each}"
        else:
            names.append(each)
    return names


def _sets_with_files(data: str, split: str, output: str | Path | None, policy: DataPolicy) -> dict[str, Any]:
    """Return a map from a unique name for files and folders to a BenchmarkSet and its metrics file, or None.

    Raises InputError if a local data set without such a file, or its split, does not exist.
    """
    sets, found = benchmark_sets(data, split), {}
    names = [each.data.strip("/").replace("/", "-") for each in sets]
    for name, each in zip(names, sets, strict=True):
        unique = quote(each.data, safe="") if names.count(name) > 1 else name  # for example a/b and a-b
        file = Path(output) / f"{unique}.json" if output is not None else None
        if file is None or not file.is_file():
            open_dataset(each.data, each.split, policy).check()
        found[unique] = each, file
    return found


def evaluate_benchmark(
    choice: EncoderConfig | str | Path,
    data: str | Path,
    split: str = "test",
    *,
    k: int = 100,
    settings: SearchConfig = DEFAULTS,
    policy: DataPolicy = DEFAULT_POLICY,
    relevance_level: int = 1,
    output: str | Path | None = None,
    group: Processes = ALONE,
    evaluator: Literal["contaccum", "beir"] = "contaccum",
) -> dict[str, Any]:
    """Evaluate a retriever on several data sets; return the content of benchmark.json.

    data: ``beir``, ``nanobeir``, or names separated by commas. output: folder for one file of metrics per data set, and for
    benchmark.json. A data set whose file exists is not evaluated again. Raises InputError if that file has other settings.
    Each data set gets its own folder in ``settings.embeddings`` and ``settings.index_dir``. Other arguments: see ``evaluate``.
    """
    choice = EncoderConfig.of(choice)
    if output is not None and os.fspath(output).lower().endswith(".json"):
        raise InputError(f"--output is {output}; give a folder, because several data sets are written to several files")
    from contaccum.encoder import load_encoder

    encoder = load_encoder(choice) if choice.model != BM25_NAME else None
    measures: dict[str, Any] = {"k": k, "relevance_level": relevance_level}
    fingerprint = f"{encoder.fingerprint('query')} {encoder.fingerprint('passage')}" if encoder else BM25_NAME
    # everything that changes the metrics; a finished file must have the same values
    shared = {"model": choice.model, "encoder": fingerprint, **measures, **asdict(policy)}
    shared |= index_settings(settings) if encoder else {}
    shared |= {"evaluator": evaluator} if evaluator != "contaccum" else {}
    arguments = {**measures, "policy": policy, "group": group, "evaluator": evaluator}
    with group.main_first():
        sets = _sets_with_files(os.fspath(data), split, output, policy)
    finished: dict[str, list[Metrics]] = {}
    for name, (each, file) in sets.items():
        saved, index_dir = (value and str(Path(value) / name) for value in (settings.embeddings, settings.index_dir))
        own_settings = replace(settings, embeddings=saved, index_dir=index_dir)
        scored_with = {**shared, "data_sha256": data_digest(each)}
        scored_with |= {"dtype": (saved_dtype(saved) or settings.dtype) if saved else "float32"} if encoder else {}
        scored_with |= {"data": each.data, "split": each.split}
        metrics = _finished(file, {**scored_with, "evaluator": evaluator})
        if metrics is None:
            metrics = evaluate(encoder or choice, each.data, each.split, settings=own_settings, **arguments)
            if file is not None and group.is_main:
                write_json(file, {**scored_with, **metrics})
        finished.setdefault(each.row, []).append(metrics)
    result = {**shared, **benchmark_means(finished)}
    if output is not None and group.is_main:
        write_json(Path(output) / "benchmark.json", result)
    return result


def data_digest(part: BenchmarkSet) -> str | None:
    """Return a SHA-256 of a local file or BEIR folder. Return None for a published data set, which does not change."""
    path = Path(part.data)
    if part.data.startswith(HUB_PREFIX) and os.path.isdir(HubName.of(part.data).repository):
        path = fetch(part.data, part.split)  # the folder in the place of the Hub can change
    if not os.path.exists(path):
        return None
    names = ("corpus.jsonl", "queries.jsonl", "collection.tsv", "queries.tsv", f"qrels/{part.split}.tsv")
    files = [path / f"{name}{end}" for name in names for end in ("", ".gz")] if path.is_dir() else [path]
    digests = [[file.name, sha256_of(file)] for file in files if file.is_file()]
    return hashlib.sha256(json.dumps(digests).encode()).hexdigest()


def benchmark_means(finished: Mapping[str, list[Metrics]]) -> dict[str, Any]:
    """Compute the rows of the benchmark table, and two means over the rows: one with MS MARCO and one without.

    finished: row -> metrics of its data sets. A row of several data sets (cqadupstack) shows the means over them.
    """
    names = list(next(iter(finished.values()))[0]["mean"])
    rows: dict[str, dict[str, float]] = {
        row: {name: sum(each["mean"][name] for each in scored) / len(scored) for name in names}
        | {"queries": sum(each["queries"] for each in scored)}
        for row, scored in finished.items()
    }
    result: dict[str, Any] = {"rows": rows}
    for title, left_out in (("mean", None), ("mean_without_msmarco", "msmarco")):
        chosen = [row for key, row in rows.items() if key != left_out]
        if left_out is None or 0 < len(chosen) < len(rows):
            result[title] = {name: sum(row[name] for row in chosen) / len(chosen) for name in names}
    return result


def _finished(file: Path | None, scored_with: Mapping[str, Any]) -> Any:
    """Return the metrics that an earlier call wrote to ``file``. Return None if ``file`` is None or does not exist.

    scored_with: name -> value, for all settings that change the metrics. Raises InputError if ``file`` has another value.
    """
    if file is None or not file.is_file():
        return None
    metrics = {"evaluator": "contaccum", **read_metrics(file)}  # only files of other evaluators name their evaluator
    if changed := [name for name, value in scored_with.items() if metrics.get(name) != value]:
        raise InputError(
            f"{file}: was scored with {changed[0]} {metrics.get(changed[0])!r}; this call has {scored_with[changed[0]]!r}. "
            "Use another --output."
        )
    if not isinstance(metrics.get("queries"), int):
        raise InputError(
            f"{file}: the number of queries is missing; expected a file from `contaccum evaluate --output`"
        )
    return metrics

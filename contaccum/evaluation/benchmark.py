"""Evaluate a retriever on several data sets, such as BEIR, and make a table of the metrics."""

import hashlib
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from contaccum.catalog import NANO
from contaccum.catalog.download import FORUMS
from contaccum.config.commands import DataPolicy, EncoderConfig, Evaluator, SearchConfig
from contaccum.data.dataset import DEFAULT_POLICY, open_dataset
from contaccum.errors import InputError
from contaccum.evaluation.evaluate import evaluate
from contaccum.evaluation.metrics import Metrics, average, read_metrics, shown_metrics
from contaccum.retrieval.encode import Texts, load_encoder_of
from contaccum.retrieval.retriever import BM25_NAME, DEFAULTS, index_settings
from contaccum.retrieval.shards import require_origin
from contaccum.runtime.files import write_json
from contaccum.runtime.processes import ALONE, Processes

BEIR = {
    "msmarco": "dev", "trec-covid": "test", "nfcorpus": "test", "nq": "test", "hotpotqa": "test",
    "fiqa": "test", "arguana": "test", "webis-touche2020": "test", "cqadupstack": "test",
    "quora": "test", "dbpedia-entity": "test", "scidocs": "test", "fever": "test",
    "climate-fever": "test", "scifact": "test",
}  # fmt: skip
"""The 15 public data sets of BEIR: name of the data set -> split that papers report."""
FAMILIES = {"beir": BEIR, "nanobeir": {f"nanobeir/{name}": "test" for name in NANO}}


class BenchmarkSet(NamedTuple):
    """One data set of a benchmark."""

    data: str  # name or path of the data set
    split: str
    row: str
    """Name of the row in the table. The 12 forums of cqadupstack share one row, which shows their
    mean."""


def benchmark_sets(data: str, split: str) -> list[BenchmarkSet]:
    """Return the data sets that ``data`` names.

    data: ``beir``, ``nanobeir``, or names and folders separated by commas. A folder comes before a
    public data set or benchmark of its name. Spaces around a name and empty names are ignored, as
    in ``scifact, nfcorpus,``. A name with columns, such as
    ``hub:owner/name?query=q&pos=p&neg=a,b``, stands alone, because its commas separate columns.
    """
    if os.path.exists(data) or "?" in data:
        return [BenchmarkSet(data, split, data)]
    splits: dict[str, str] = {}  # name of a data set -> its split
    for name in filter(None, map(str.strip, data.split(","))):
        family = None if os.path.exists(name) else FAMILIES.get(name)
        splits |= family or {name: split}
    sets = []
    for name, name_split in splits.items():
        if name == "cqadupstack" and not os.path.exists(name):
            sets += [BenchmarkSet(f"{name}/{forum}", name_split, name) for forum in FORUMS]
        else:
            sets.append(BenchmarkSet(name, name_split, name))
    if not sets:
        raise InputError(f"data is {data!r}, expected the name or the folder of a data set")
    return sets


def evaluate_benchmark(
    model: EncoderConfig | str | Path,
    data: str | Path,
    split: str = "test",
    *,
    k: int = 100,
    relevance_level: int = 1,
    settings: SearchConfig = DEFAULTS,
    policy: DataPolicy = DEFAULT_POLICY,
    output: str | Path | None = None,
    group: Processes = ALONE,
    evaluator: Evaluator = "contaccum",
) -> dict[str, Any]:
    """Evaluate a retriever on several data sets; return the content of benchmark.json.

    data: ``beir``, ``nanobeir``, or names separated by commas. The means of each finished data set
    are printed to stderr. output: folder for one file of metrics per data set (``/`` in its name
    becomes ``%2F``), and for benchmark.json. A data set whose file exists is not evaluated
    again. Raises InputError if that file has other settings. Each data set gets its own folder in
    ``settings.embeddings`` and ``settings.index_dir``. Other arguments: see ``evaluate``.
    """
    model = EncoderConfig.of(model)
    sets = benchmark_sets(os.fspath(data), split)
    if output is not None and os.path.isfile(output):
        raise InputError(f"{output}: is a file; several data sets need the name of a folder")
    # a wrong name or split is found before the model is loaded and the first set is evaluated
    with group.main_first():
        for benchmark_set in sets:
            open_dataset(benchmark_set.data, benchmark_set.split, policy).check()

    # everything that changes the metrics; a finished file must have the same values
    shared: dict[str, Any] = {"model": model.model, "k": k, "relevance_level": relevance_level}
    shared |= {**asdict(policy), "evaluator": evaluator}
    encoder = None
    if model.model != BM25_NAME:
        first = sets[0]
        name = file_name(first.data)
        encoder = load_encoder_of(
            model,
            "passage",
            lambda: Texts(
                "passage", open_dataset(first.data, first.split, policy).retrieval_set.corpus
            ),
            settings.index_dir and Path(settings.index_dir) / name,
            settings.embeddings and Path(settings.embeddings) / name,
        )
        shared["encoder"] = " ".join(
            encoder.fingerprint(kind, settings.batch_tokens) for kind in ("query", "passage")
        )
        shared |= index_settings(settings)
    rows: dict[str, list[Metrics]] = {}
    for benchmark_set in sets:
        name = file_name(benchmark_set.data)
        embeddings = settings.embeddings and str(Path(settings.embeddings) / name)
        index_dir = settings.index_dir and str(Path(settings.index_dir) / name)
        with group.main_first():
            content = open_dataset(benchmark_set.data, benchmark_set.split, policy).retrieval_set
        scored_with = {
            **shared,
            "data": benchmark_set.data,
            "split": benchmark_set.split,
            "test_content": content.fingerprint(),
        }
        file = Path(output) / f"{name}.json" if output is not None else None
        metrics: Any
        if file is not None and file.is_file():
            metrics = read_metrics(file)
            require_origin(file, metrics, scored_with)
        else:
            metrics = evaluate(
                encoder or model,
                content if evaluator == "contaccum" else benchmark_set.data,
                benchmark_set.split,
                k=k,
                relevance_level=relevance_level,
                settings=replace(settings, embeddings=embeddings, index_dir=index_dir),
                policy=policy,
                group=group,
                evaluator=evaluator,
            )
            if file is not None and group.is_main:
                write_json(file, {**scored_with, **metrics})
        if group.is_main:  # the table comes last, and a later set may fail
            mean = metrics["mean"]
            means = [f"{name} {mean[name]:.4f}" for name in shown_metrics(mean)]
            print(f"{benchmark_set.data}: {', '.join(means)}", file=sys.stderr, flush=True)
        rows.setdefault(benchmark_set.row, []).append(metrics)
    result = {**shared, **benchmark_means(rows)}
    if output is not None and group.is_main:
        write_json(Path(output) / "benchmark.json", result)
    return result


def file_name(data: str) -> str:
    """Return a file name for a data set that no other data set has: a/b and a-b differ."""
    name = quote(data, safe="")
    if len(name) > 200:  # file systems allow 255 bytes
        name = f"{name[:160]}{hashlib.sha256(data.encode()).hexdigest()[:32]}"
    # benchmark.json is the table, and a folder cannot be named . or ..
    return f"{name}%" if name in ("benchmark", ".", "..") else name


def benchmark_means(evaluated: Mapping[str, list[Metrics]]) -> dict[str, Any]:
    """Compute the rows of the benchmark table, and the mean with and without MS MARCO.

    evaluated: row -> metrics of its data sets. A row of several data sets (cqadupstack) shows the
    means over them.
    """
    rows: dict[str, dict[str, float]] = {}
    for row, sets in evaluated.items():
        rows[row] = average([metrics["mean"] for metrics in sets])
    result: dict[str, Any] = {"rows": rows, "mean": average(list(rows.values()))}
    others = [values for row, values in rows.items() if row != "msmarco"]
    if 0 < len(others) < len(rows):
        result["mean_without_msmarco"] = average(others)
    for row, sets in evaluated.items():
        rows[row]["queries"] = sum(metrics["queries"] for metrics in sets)
    return result

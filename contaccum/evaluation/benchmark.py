"""Evaluate a retriever on several data sets, such as BEIR, and make a table of the metrics."""

import hashlib
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from contaccum.catalog import HUB_PREFIX, NANO, fetch
from contaccum.catalog.download import FORUMS
from contaccum.catalog.hub_sets import HubName
from contaccum.config.commands import DataPolicy, EncoderConfig, SearchConfig
from contaccum.data.dataset import DEFAULT_POLICY, open_dataset
from contaccum.errors import InputError
from contaccum.evaluation.evaluate import Evaluator, evaluate
from contaccum.evaluation.metrics import SHOWN, Metrics, read_metrics
from contaccum.formats.readers import beir_file
from contaccum.retrieval.encode import Texts, load_encoder_of
from contaccum.retrieval.retriever import BM25_NAME, DEFAULTS, index_settings
from contaccum.retrieval.shards import saved_dtype
from contaccum.runtime.files import sha256_of, write_json
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

    data: ``beir``, ``nanobeir``, or names and folders separated by commas. Spaces around a name and
    empty names are ignored, as in ``scifact, nfcorpus,``. A name with columns, such as
    ``hub:owner/name?query=q&pos=p&neg=a,b``, stands alone, because its commas separate columns.
    """
    if os.path.exists(data) or "?" in data:
        return [BenchmarkSet(data, split, data)]
    splits: dict[str, str] = {}  # name of a data set -> its split
    for name in filter(None, map(str.strip, data.split(","))):
        splits |= FAMILIES.get(name, {name: split})
    sets = []
    for name, name_split in splits.items():
        if name == "cqadupstack" and len(splits) > 1:
            sets += [BenchmarkSet(f"{name}/{forum}", name_split, name) for forum in FORUMS]
        else:
            sets.append(BenchmarkSet(name, name_split, name))
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
    names = [file_name(benchmark_set.data) for benchmark_set in sets]
    files = [Path(output) / f"{name}.json" if output is not None else None for name in names]
    # a wrong name or split is found before the model is loaded and the first set is evaluated
    with group.main_first():
        for benchmark_set, file in zip(sets, files, strict=True):
            if file is None or not file.is_file():
                open_dataset(benchmark_set.data, benchmark_set.split, policy).check()

    # everything that changes the metrics; a finished file must have the same values
    shared: dict[str, Any] = {
        "model": model.model,
        "encoder": BM25_NAME,
        "k": k,
        "relevance_level": relevance_level,
    }
    shared |= {**asdict(policy), "evaluator": evaluator}
    encoder = None
    if model.model != BM25_NAME:
        first = sets[0]
        encoder = load_encoder_of(
            model,
            "passage",
            lambda: Texts.of_corpus(
                open_dataset(first.data, first.split, policy).retrieval_set.corpus
            ),
            settings.index_dir and Path(settings.index_dir) / names[0],
            settings.embeddings and Path(settings.embeddings) / names[0],
        )
        shared["encoder"] = f"{encoder.fingerprint('query')} {encoder.fingerprint('passage')}"
        shared |= index_settings(settings)
    rows: dict[str, list[Metrics]] = {}
    for benchmark_set, name, file in zip(sets, names, files, strict=True):
        set_settings = settings
        dtype = "float32"
        if settings.embeddings is not None:
            set_settings = replace(set_settings, embeddings=str(Path(settings.embeddings) / name))
            dtype = saved_dtype(str(set_settings.embeddings)) or settings.dtype
        if settings.index_dir is not None:
            set_settings = replace(set_settings, index_dir=str(Path(settings.index_dir) / name))
        scored_with = {**shared, "data": benchmark_set.data, "split": benchmark_set.split}
        scored_with["data_sha256"] = data_digest(benchmark_set)
        if encoder is not None:
            scored_with["dtype"] = dtype
        if file is not None and file.is_file():
            metrics = _read_finished(file, scored_with)
        else:
            metrics = evaluate(
                encoder or model,
                benchmark_set.data,
                benchmark_set.split,
                k=k,
                relevance_level=relevance_level,
                settings=set_settings,
                policy=policy,
                group=group,
                evaluator=evaluator,
            )
            if file is not None and group.is_main:
                write_json(file, {**scored_with, **metrics})
        if group.is_main:  # the table comes last, and a later set may fail
            means = [
                f"{name} {metrics['mean'][name]:.4f}" for name in SHOWN if name in metrics["mean"]
            ]
            print(f"{benchmark_set.data}: {', '.join(means)}", file=sys.stderr, flush=True)
        rows.setdefault(benchmark_set.row, []).append(metrics)
    result = {**shared, **benchmark_means(rows)}
    if output is not None and group.is_main:
        write_json(Path(output) / "benchmark.json", result)
    return result


def file_name(data: str) -> str:
    """Return a file name for a data set that no other data set has: a/b and a-b differ."""
    name = quote(data, safe="")
    # benchmark.json is the table, and a folder cannot be named . or ..
    return f"{name}%" if name in ("benchmark", ".", "..") else name


def data_digest(benchmark_set: BenchmarkSet) -> str | None:
    """Return a SHA-256 of a local file or BEIR folder.

    Return None for a published data set, which does not change.
    """
    path = Path(benchmark_set.data)
    if benchmark_set.data.startswith(HUB_PREFIX) and os.path.isdir(
        HubName.of(benchmark_set.data).repository
    ):
        # a folder in place of a Hub data set can change
        path = fetch(benchmark_set.data, benchmark_set.split)
    if not os.path.exists(path):
        return None
    files = [path]
    if path.is_dir():
        names = ("corpus.jsonl", "queries.jsonl", f"qrels/{benchmark_set.split}.tsv")
        files = [beir_file(path, name) for name in names]
    digests = [sha256_of(file) for file in files]
    return hashlib.sha256(" ".join(digests).encode()).hexdigest()


def benchmark_means(evaluated: Mapping[str, list[Metrics]]) -> dict[str, Any]:
    """Compute the rows of the benchmark table, and the mean with and without MS MARCO.

    evaluated: row -> metrics of its data sets. A row of several data sets (cqadupstack) shows the
    means over them.
    """
    names = list(next(iter(evaluated.values()))[0]["mean"])
    rows: dict[str, dict[str, float]] = {}
    for row, sets in evaluated.items():
        rows[row] = {
            name: sum(metrics["mean"][name] for metrics in sets) / len(sets) for name in names
        }
        rows[row]["queries"] = sum(metrics["queries"] for metrics in sets)
    result: dict[str, Any] = {"rows": rows}
    result["mean"] = {
        name: sum(values[name] for values in rows.values()) / len(rows) for name in names
    }
    others = [values for row, values in rows.items() if row != "msmarco"]
    if 0 < len(others) < len(rows):
        result["mean_without_msmarco"] = {
            name: sum(values[name] for values in others) / len(others) for name in names
        }
    return result


def _read_finished(file: Path, scored_with: Mapping[str, Any]) -> Any:
    """Return the metrics that an earlier call wrote to ``file``.

    scored_with: name -> value, for all settings that change the metrics. Raises InputError if
    ``file`` has another value.
    """
    metrics = read_metrics(file)
    for name, value in scored_with.items():
        if metrics.get(name) != value:
            raise InputError(
                f"{file}: was scored with {name} {metrics.get(name)!r}; this call has {value!r}. "
                "Use another --output."
            )
    return metrics

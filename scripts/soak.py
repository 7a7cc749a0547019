"""Train a tiny model for many updates in a new process, and watch its memory and open files from outside (Linux).

usage: python scripts/soak.py [--updates 20000] [--folder DIR]
The bank is overwritten once every 20 updates. Prints a Markdown table; exit code 1 if resident memory grows by more than 16 MiB
between the warm-up (the first tenth) and the end, or if more files are open at the end than after the warm-up.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from kill_campaign import write_corpus

GROWTH = 16 * 2**20
"""Bytes that resident memory may grow by: what the allocator's fragments and the log's buffers take."""
SAMPLES = 20
ROWS = 4
"""Pairs in one update (N)."""


def settings(data: Path, output: Path, updates: int) -> dict:
    return {
        "method": "cont_accum",
        "output_dir": str(output),
        "model": {"name": "tiny", "tiny_width": 32, "tiny_layers": 1, "tiny_vocabulary": 200, "max_passage_length": 8},
        "data": {"train": str(data)},
        "batch": {"global_batch_size": ROWS, "micro_batch_size": ROWS // 2},
        "bank": {"size": 20 * ROWS},
        "optim": {"max_steps": updates},
        "run": {"device": "cpu", "save_steps": max(1, updates // SAMPLES)},
    }  # fmt: skip


def resident(pid: int) -> int:
    """Return the resident bytes of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def handles(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def steps_taken(log: Path) -> int:
    """Return the last step of a log from its last lines."""
    if not log.exists():
        return 0
    with open(log, "rb") as file:
        file.seek(max(0, log.stat().st_size - 4000))
        lines = file.read().split(b"\n")[:-1]
    return json.loads(lines[-1]).get("step", 0) if lines and lines[-1].startswith(b"{") else 0


def watch(process: subprocess.Popen, log: Path, updates: int) -> list[tuple[int, int, int]]:
    """Return (step, resident memory, open files) at every share of the updates; fewest open files per share."""
    found, due, fewest = [], updates // SAMPLES, sys.maxsize
    while process.poll() is None:
        step = steps_taken(log)
        try:
            if step:
                fewest = min(fewest, handles(process.pid))
            if step >= due:
                found.append((step, resident(process.pid), fewest))
                due, fewest = due + updates // SAMPLES, sys.maxsize
        except FileNotFoundError:  # it ended between the two looks
            break
        time.sleep(0.02)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=20_000, help="optimizer steps; the bank wraps once every 20")
    parser.add_argument("--folder", type=Path, help="where to work; a temporary folder when not given")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="soak-"))
    os.environ["CONTACCUM_CACHE"] = str(folder / "cache")
    write_corpus(folder / "data")
    (folder / "config.yaml").write_text(json.dumps(settings(folder / "data", folder / "run", options.updates)))
    call = [sys.executable, "-m", "contaccum", "train", "--config", str(folder / "config.yaml")]
    began = time.monotonic()
    process = subprocess.Popen(call, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    found = watch(process, folder / "run" / "log.jsonl", options.updates)
    if process.returncode:
        raise SystemExit(f"the run ended with exit code {process.returncode}")
    warm = [sample for sample in found if sample[0] >= options.updates / 10]
    if len(warm) < SAMPLES // 2:
        raise SystemExit(
            f"{len(warm)} samples were taken behind the warm-up, expected at least {SAMPLES // 2}: give more --updates"
        )
    print("| update | bank overwritten | resident MiB | open files |\n|---|---|---|---|")
    for step, memory, files in found:
        print(f"| {step} | {step // 20} | {memory / 2**20:.1f} | {files} |")
    growth, more = warm[-1][1] - warm[0][1], warm[-1][2] - warm[0][2]
    print(f"\nAfter the warm-up: memory {growth / 2**20:+.1f} MiB (bound {GROWTH / 2**20:g}), open files {more:+d}; "
          f"{time.monotonic() - began:.0f} s")  # fmt: skip
    return int(growth > GROWTH or more > 0)


if __name__ == "__main__":
    sys.exit(main())

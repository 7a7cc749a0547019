"""Compare the processor time of two checkouts of contaccum: training steps, encoding, exact search, whole commands.

    python benchmarks/two_checkouts.py OLD NEW [--rounds 7] [--parts PARTS] [--output OUT.json] [--quick]

OLD and NEW are folders that contain the package ``contaccum``. In each round, both checkouts do the same work at the
same time, in two processes that share one core. So both have the same clock rate, the same caches and the same other
programs next to them, and the ratio of their processor times means something on a machine that is not idle. The time of
a training step is the difference between a long and a short run in one process, so imports and preparation do not
count. The commands --help, data check and mine (BM25) are measured as a whole. The table gives medians and the ratio
new / old within a round: its median with a 95 % interval (order statistics), the smallest, and the largest.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from scipy.stats import binom

METHODS = ("in_batch", "grad_accum", "grad_cache", "passage_bank", "cont_accum", "cont_cache")
TRAINING = """--model.name tiny --model.tiny_layers 2 --model.tiny_width 128 --model.dropout 0 --batch.global_batch_size 64
--batch.micro_batch_size 16 --run.save_steps 0 --run.log_steps 1 --run.device cpu"""
TRAIN = """
import contextlib, os, sys, time
from contaccum.cli import main
folder, steps, *options = sys.argv[1:]
taken = []
for name, count in (("warm-up", 2), ("short", 2), ("long", 2 + int(steps))):
    start = time.process_time()
    with contextlib.redirect_stdout(sys.stderr):
        code = main(["train", *options, "--optim.max_steps", str(count), "--output_dir", os.path.join(folder, name)])
    taken.append(time.process_time() - start)
    assert code == 0
print((taken[2] - taken[1]) / int(steps))
"""
ENCODE = """
import json, sys, time
from contaccum import DualEncoder
encoder, texts = DualEncoder.load(sys.argv[1]), json.load(open(sys.argv[2]))
encoder.encode_passages(texts[:100])
start = time.process_time()
encoder.encode_passages(texts)
print(time.process_time() - start)
"""
SEARCH = """
import sys, time
from contaccum import DualEncoder, search
try:
    from contaccum.config.commands import SearchConfig
except ImportError:  # its old name
    from contaccum.options import SearchSettings as SearchConfig
encoder, settings = DualEncoder.load(sys.argv[1]), SearchConfig(embeddings=sys.argv[3])
search(encoder, sys.argv[2], "test", 100, settings)  # encodes the corpus
start = time.process_time()
for _ in range(int(sys.argv[4])):
    search(encoder, sys.argv[2], "test", 100, settings)
print((time.process_time() - start) / int(sys.argv[4]))
"""
COMMAND = """
import resource, subprocess, sys
subprocess.run([sys.executable, "-m", "contaccum", *sys.argv[1:]], stdout=subprocess.DEVNULL, check=True)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(used.ru_utime + used.ru_stime)
"""


class Checkout:
    """One version of the package, run in processes of its own on one core."""

    def __init__(self, path: str, work: Path) -> None:
        self.path, self.work = Path(path).resolve(), work
        self.environment = {**os.environ, "CONTACCUM_CACHE": str(work / "cache"), "PYTHONPATH": str(self.path)}
        self.environment["OMP_NUM_THREADS"] = "1"
        work.mkdir()
        found = self.result(self.start("import contaccum; print(contaccum.__file__)"))
        if not found.startswith(str(self.path)):
            sys.exit(f"{self.path}: Python imports {found}; expected the package contaccum in this folder")

    def start(self, script: str, *arguments: object) -> subprocess.Popen[str]:
        """Start a script. FOLDER in its arguments becomes a new folder of this checkout."""
        folder = tempfile.mkdtemp(dir=self.work)
        call = [sys.executable, "-c", script, *(str(one).replace("FOLDER", folder) for one in arguments)]
        core = min(os.sched_getaffinity(0))
        return subprocess.Popen(
            call, cwd=self.work, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            preexec_fn=lambda: os.sched_setaffinity(0, [core]),
        )  # fmt: skip

    def result(self, process: subprocess.Popen[str]) -> str:
        """Wait for a script and return the last line that it printed."""
        output, errors = process.communicate()
        if process.returncode:
            sys.exit(f"{self.path}: exit code {process.returncode}:\n{errors[-2000:]}")
        return output.strip().splitlines()[-1]


def write_data(folder: Path, passages: int, queries: int) -> Path:
    """Write a BEIR folder of short random texts."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefgh", k=4)) for _ in range(500)]
    (folder / "qrels").mkdir(parents=True)
    for name, first, count in (("corpus", "p", passages), ("queries", "q", queries)):
        rows = ({"_id": f"{first}{i}", "title": "", "text": " ".join(draw.choices(words, k=6))} for i in range(count))
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    judged = "".join(f"q{i}\tp{i}\t1\n" for i in range(queries))
    for split in ("train", "test"):
        (folder / "qrels" / f"{split}.tsv").write_text("query-id\tcorpus-id\tscore\n" + judged)
    return folder


def cases(parts: list[str], work: Path, old: Checkout, quick: bool) -> dict[str, list[Any]]:
    """Return the measurements by name: a script that prints seconds of processor time, and its arguments."""
    data = write_data(work / "train", 1000, 500)
    options = [*TRAINING.split(), "--data.train", data]
    found: dict[str, list[Any]] = {}
    if "train" in parts:
        steps = 2 if quick else 40
        found |= {f"step {name}": [TRAIN, "FOLDER", steps, *options, "--method", name] for name in METHODS}
    if {"encode", "search"} & set(parts):
        old.result(old.start(TRAIN, work, 1, *options, "--method", "grad_accum"))
        model = work / "long" / "model"
    if "encode" in parts:
        texts, count = work / "texts.json", 100 if quick else 2000
        texts.write_text(json.dumps([f"the passage of number {number} and its text" for number in range(count)]))
        found[f"encode {count} texts"] = [ENCODE, model, texts]
    if "search" in parts:
        rows, queries, calls = (1000, 20, 1) if quick else (100_000, 200, 20)
        corpus = write_data(work / "search", rows, queries)
        found[f"search {rows} x 128, {queries} queries"] = [SEARCH, model, corpus, "vectors", calls]
    if "startup" in parts:
        found["contaccum --help"] = [COMMAND, "--help"]
    if "data" in parts:
        rows = 1000 if quick else 20_000
        folder = write_data(work / "data", rows, rows // 10)
        found[f"data check, {rows} passages"] = [COMMAND, "data", "check", folder]
        mine = ["mine", "--model", "bm25", "--data", folder, "--output", "FOLDER/mined.jsonl"]
        found[f"mine with BM25, {rows} passages"] = [COMMAND, *mine]
    return found


def interval(ratios: list[float]) -> tuple[float, float]:
    """Return a 95 % confidence interval of the median from order statistics, or all ratios if there are too few."""
    ordered, count = sorted(ratios), len(ratios)
    below = max(0, int(binom.ppf(0.025, count, 0.5)) - 1)
    return ordered[below], ordered[count - 1 - below]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs=2, metavar="CHECKOUT", help="OLD and NEW")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--parts", default="train,encode,search,startup,data", help="comma-separated")
    parser.add_argument("--output", type=Path, help="JSON file for all figures")
    parser.add_argument("--quick", action="store_true", help="smallest sizes: a smoke test, no result")
    chosen = parser.parse_args()
    seconds: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder).resolve()
        pairs = zip(("old", "new"), chosen.checkouts, strict=True)
        checkouts = {which: Checkout(path, work / which) for which, path in pairs}
        measured = cases(chosen.parts.split(","), work, checkouts["old"], chosen.quick)
        for number in range(chosen.rounds):
            for name, (script, *arguments) in measured.items():
                order = ("old", "new") if number % 2 else ("new", "old")
                processes = {which: checkouts[which].start(script, *arguments) for which in order}
                for which, process in processes.items():
                    taken = float(checkouts[which].result(process))
                    seconds.setdefault(name, {"old": [], "new": []})[which].append(taken)
            print(f"round {number + 1} of {chosen.rounds}", file=sys.stderr)
    print("| measured | old, s | new, s | new / old | 95 % | from | to |\n|---|---|---|---|---|---|---|")
    for name, both in seconds.items():
        old, new = map(statistics.median, both.values())
        ratios = [after / before for before, after in zip(*both.values(), strict=True)]
        low, high = interval(ratios)
        spread = f"{statistics.median(ratios):.3f} | {low:.3f} to {high:.3f} | {min(ratios):.3f} | {max(ratios):.3f}"
        print(f"| {name} | {old:.4f} | {new:.4f} | {spread} |")
    if chosen.output:
        chosen.output.write_text(json.dumps({"load": os.getloadavg()[0], "seconds": seconds}, indent=2) + "\n")


if __name__ == "__main__":
    main()

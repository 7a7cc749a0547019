"""Time two checkouts of contaccum against each other in one interleaved run: training steps, encoding, exact search, start-up.

    python benchmarks/two_checkouts.py OLD NEW [--rounds 7] [--parts train,encode,search,startup] [--output OUT.json] [--quick]

OLD and NEW are folders that contain the package ``contaccum``. Every measurement runs in a new process that imports one of
them and uses only the command line and public library calls. Each round measures both checkouts, in alternating order. The
table gives medians and the ratio new / old within a round (median, smallest, largest). Run it on an idle machine.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from timeit import timeit

METHODS = ("in_batch", "grad_accum", "grad_cache", "passage_bank", "cont_accum", "cont_cache")
TRAINING = """--model.name tiny --model.tiny_layers 2 --model.tiny_width 128 --model.dropout 0 --batch.global_batch_size 64
--batch.micro_batch_size 16 --run.save_steps 0 --run.log_steps 1 --run.device cpu"""
ENCODE = """
import json, sys, time
from contaccum import DualEncoder
encoder, texts = DualEncoder.load(sys.argv[1]), json.load(open(sys.argv[2]))
encoder.encode_passages(texts[:100])
start = time.perf_counter()
encoder.encode_passages(texts)
print(time.perf_counter() - start)
"""
SEARCH = """
import sys, time
from contaccum import DualEncoder, search
try:
    from contaccum.config.commands import SearchConfig
except ImportError:  # its old name
    from contaccum.options import SearchSettings as SearchConfig
encoder, settings = DualEncoder.load(sys.argv[1]), SearchConfig(embeddings=sys.argv[3])
seconds = []
for _ in range(4):
    start = time.perf_counter()
    search(encoder, sys.argv[2], "test", 100, settings)
    seconds.append(time.perf_counter() - start)
print(sorted(seconds[1:])[1])
"""


class Checkout:
    """One version of the package, run in processes of its own."""

    def __init__(self, path: str, work: Path) -> None:
        self.path, self.work = Path(path).resolve(), work
        self.environment = {**os.environ, "CONTACCUM_CACHE": str(work / "cache"), "PYTHONPATH": str(self.path)}
        work.mkdir()
        found = self.python("-c", "import contaccum; print(contaccum.__file__)").strip()
        if not found.startswith(str(self.path)):
            sys.exit(f"{self.path}: Python imports {found}; expected the package contaccum in this folder")

    def python(self, *arguments: object) -> str:
        call = [sys.executable, *map(str, arguments)]
        done = subprocess.run(call, cwd=self.work, env=self.environment, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{self.path}: {' '.join(call)[:300]} exited with code {done.returncode}:\n{done.stderr[-2000:]}")
        return done.stdout

    def train(self, method: str, data: Path, steps: int) -> Path:
        run = Path(tempfile.mkdtemp(dir=self.work)) / method
        own = ["--optim.max_steps", steps, "--data.train", data, "--output_dir", run]
        self.python("-m", "contaccum", "train", "--method", method, *TRAINING.split(), *own)
        return run

    def step(self, method: str, data: Path, steps: int) -> float:
        """Return the median seconds of an optimizer step, without the first two."""
        lines = map(json.loads, (self.train(method, data, steps) / "log.jsonl").read_text().splitlines())
        return statistics.median([line["seconds"] for line in lines if "loss" in line][2:])


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


def cases(parts: list[str], work: Path, old: Checkout, quick: bool) -> dict[str, Callable[[Checkout], float]]:
    """Return the measurements by name; each takes a checkout and returns seconds."""
    data = write_data(work / "train", 1000, 500)
    found: dict[str, Callable[[Checkout], float]] = {}
    if "train" in parts:
        found |= {
            f"step {name}": lambda checkout, name=name: checkout.step(name, data, 4 if quick else 14)
            for name in METHODS
        }
    if {"encode", "search"} & set(parts):
        model = old.train("grad_accum", data, 3) / "model"
    if "encode" in parts:
        texts, count = work / "texts.json", 100 if quick else 2000
        texts.write_text(json.dumps([f"the passage of number {number} and its text" for number in range(count)]))
        found[f"encode {count} texts"] = lambda checkout: float(checkout.python("-c", ENCODE, model, texts))
    if "search" in parts:
        rows, queries = (1000, 20) if quick else (100_000, 200)
        corpus = write_data(work / "search", rows, queries)
        name = f"search {rows} x 128, {queries} queries"
        found[name] = lambda one: float(one.python("-c", SEARCH, model, corpus, one.work / "vectors").splitlines()[-1])
    if "startup" in parts:
        found["contaccum --help"] = lambda one: timeit(lambda: one.python("-m", "contaccum", "--help"), number=1)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs=2, metavar="CHECKOUT", help="OLD and NEW")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--parts", default="train,encode,search,startup", help="comma-separated")
    parser.add_argument("--output", type=Path, help="JSON file for all figures")
    parser.add_argument("--quick", action="store_true", help="smallest sizes: a smoke test, no result")
    chosen = parser.parse_args()
    seconds: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder).resolve()
        pairs = zip(("old", "new"), chosen.checkouts, strict=True)
        checkouts = {which: Checkout(path, work / which) for which, path in pairs}
        measured = cases(chosen.parts.split(","), work, checkouts["old"], chosen.quick)
        for number in range(-1, chosen.rounds):  # round -1 fills the caches and is not counted
            for name, measure in measured.items():
                for which in ("old", "new") if number % 2 else ("new", "old"):
                    taken = measure(checkouts[which])
                    if number >= 0:
                        seconds.setdefault(name, {"old": [], "new": []})[which].append(taken)
            print(f"round {number + 1} of {chosen.rounds}", file=sys.stderr)
    print("| measured | old, s | new, s | new / old | from | to |\n|---|---|---|---|---|---|")
    for name, both in seconds.items():
        old, new = map(statistics.median, both.values())
        ratios = [after / before for before, after in zip(*both.values(), strict=True)]
        spread = f"{statistics.median(ratios):.3f} | {min(ratios):.3f} | {max(ratios):.3f}"
        print(f"| {name} | {old:.4f} | {new:.4f} | {spread} |")
    if chosen.output:
        chosen.output.write_text(json.dumps({"load": os.getloadavg()[0], "seconds": seconds}, indent=2) + "\n")


if __name__ == "__main__":
    main()

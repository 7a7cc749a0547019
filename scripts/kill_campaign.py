"""Kill real runs at random moments (SIGKILL), restart them, and compare their results with an
uninterrupted run.

usage: python scripts/kill_campaign.py --seed 0 [--train 50] [--encode 20] [--compare 10] [--folder
DIR] Prints a Markdown table; exit code 1 if a run ends with other bytes or a finished shard is
encoded again.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import cycle
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil

import contaccum.evaluation.evaluate
import contaccum.experiments.compare
import contaccum.training.loop
from contaccum.cli import main as main_of_contaccum

METHODS = ("in_batch", "grad_accum", "grad_cache", "passage_bank", "cont_accum", "cont_cache")
TINY = {
    "model": {"name": "tiny", "tiny_width": 32, "tiny_layers": 1, "tiny_vocabulary": 300},
    "data": {"hard_negatives": 1},
    "batch": {"global_batch_size": 16, "micro_batch_size": 4},
    "bank": {"size": 48},
    "optim": {"max_steps": 40, "learning_rate": 0.001},
    "run": {"device": "cpu", "save_steps": 4},
}
SET_UP_OVER = 0.8
"""Share of the kills that come after the set-up, which is most of so short a run's life."""

WITH_CHILDREN = 0.5
"""Share of the kills that also hit the runs of a comparison; the others leave them to find out that
they are alone."""


@dataclass(frozen=True)
class Command:
    """One command of the campaign."""

    call: Callable[[Path, str], list[str]]
    """Output folder and variant -> arguments; given again, the same call continues a broken
    run.
    """
    variants: tuple[str, ...]
    results: tuple[str, ...]
    """Patterns of the files, below the output folder, whose bytes must be those of the unbroken
    run."""


def commands(data: Path, model: Path, config: Path) -> dict[str, Command]:
    def train(output: Path, method: str) -> list[str]:
        return [
            "train", "--config", str(config), "--method", method, "--output_dir", str(output),
            "--resume",
        ]  # fmt: skip

    def encode(output: Path, kind: str) -> list[str]:
        source = [
            "--model", str(model), "--input", str(data), "--kind", kind, "--output", str(output),
        ]  # fmt: skip
        return ["encode", *source, "--shard_size", "20", "--batch_tokens", "64"]

    def compare(output: Path, methods: str) -> list[str]:
        return [
            "compare", "--config", str(config), "--methods", methods, "--seeds", "1",
            "--baselines", "bm25", "--output_dir", str(output),
        ]  # fmt: skip

    return {
        "train": Command(train, METHODS, ("model/**/*",)),
        "encode": Command(encode, ("passage",), ("*",)),
        "compare": Command(
            compare, ("grad_accum,cont_accum",), ("runs/*/model/**/*", "runs/*/metrics.json")
        ),
    }


def contaccum(arguments: list[str]) -> BaseProcess:
    """Start a call in a new process and session.

    It is forked from this process, which has imported the libraries already; importing them takes
    longer than such a short run.
    """
    process = get_context("fork").Process(target=run_command, args=(arguments,))
    process.start()
    return process


def run_command(arguments: list[str]) -> None:
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    sys.exit(main_of_contaccum(arguments))


def finish(arguments: list[str]) -> float:
    """Run a call to its end and return its seconds."""
    began = time.monotonic()
    process = contaccum(arguments)
    process.join()
    if process.exitcode:
        raise SystemExit(f"exit code {process.exitcode}: contaccum {' '.join(arguments)}")
    return time.monotonic() - began


def checksums(output: Path, patterns: tuple[str, ...]) -> dict[str, str]:
    files = sorted(path for pattern in patterns for path in output.glob(pattern) if path.is_file())
    return {
        str(path.relative_to(output)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


def finished_shards(output: Path) -> dict[str, int]:
    """Return when each finished shard was written, in ns."""
    return {
        path.name: path.with_suffix("").with_suffix(".npy").stat().st_mtime_ns
        for path in output.glob("*.shard.json")
    }


def moment(output: Path) -> str:
    """Return the stage in which a run was killed, from its files."""
    if any(path.name.endswith((".part", ".old", ".gone")) for path in output.rglob(".*")):
        return "while writing"
    return "at work" if at_work(output) else "in set-up"


def at_work(output: Path) -> bool:
    """Return whether a run has logged its first step or written its first shard."""
    logs = [*output.glob("log.jsonl"), *output.glob("runs/*/log.jsonl")]
    return any(b'"step"' in log.read_bytes() for log in logs) or (output / "00000.npy").exists()


def kill_once(
    command: Command, output: Path, variant: str, longest: float, draw: random.Random
) -> str:
    """Start a call and kill it at a random moment before its end; return the moment."""
    while True:
        shutil.rmtree(output, ignore_errors=True)
        began = time.monotonic()
        process = contaccum(command.call(output, variant))
        if draw.random() < SET_UP_OVER:
            while process.is_alive() and not at_work(output):
                time.sleep(0.005)
        process.join(draw.uniform(0, max(0.1, longest - (time.monotonic() - began))))
        if process.is_alive():
            kill(process, draw.random() < WITH_CHILDREN)
            return moment(output)
        # it was faster than the unbroken run: draw again


def kill(process: BaseProcess, with_children: bool) -> None:
    """Send SIGKILL to a call, or also to the processes that it started, which have their own
    sessions."""
    children = psutil.Process(process.pid).children(recursive=True) if with_children else []
    os.killpg(process.pid, signal.SIGKILL)
    for child in children:
        with suppress(psutil.NoSuchProcess):
            child.kill()
    process.join()


def campaign(command: Command, kills: int, folder: Path, draw: random.Random) -> dict[str, object]:
    """Kill and continue ``kills`` times, over the variants in turn."""
    expected, longest = {}, {}
    for variant in command.variants[:kills]:
        whole = folder / f"whole-{variant}"
        longest[variant] = finish(command.call(whole, variant))
        expected[variant] = checksums(whole, command.results)
        assert expected[variant], f"no {command.results} in {whole}"
    equal, lost, moments = 0, 0, Counter()
    for number, variant in zip(range(kills), cycle(command.variants), strict=False):
        output = folder / f"killed-{variant}"
        moments[kill_once(command, output, variant, longest[variant], draw)] += 1
        before = finished_shards(output)
        finish(command.call(output, variant))
        same = checksums(output, command.results) == expected[variant]
        lost += sum(
            finished_shards(output).get(name) != written for name, written in before.items()
        )
        equal += same
        print(
            f"{number + 1}/{kills} {variant}: {'equal' if same else 'DIFFERS'}",
            file=sys.stderr,
            flush=True,
        )
    return {"kills": kills, "equal": equal, "lost": lost, "moments": moments}


def write_corpus(folder: Path, passages: int = 400) -> None:
    """Write a small BEIR folder for training and encoding."""
    draw = random.Random(0)
    words = [
        f"{first}{second}"
        for first in ("ba", "ko", "ri", "lu", "se")
        for second in ("mo", "ta", "ne", "li")
    ]
    texts = [" ".join(draw.choices(words, k=30)) for _ in range(passages)]
    (folder / "qrels").mkdir(parents=True)
    corpus = [{"_id": f"p{number}", "title": "", "text": text} for number, text in enumerate(texts)]
    queries = [
        {"_id": f"q{number}", "text": " ".join(text.split()[:6])}
        for number, text in enumerate(texts)
    ]
    for name, rows in (("corpus", corpus), ("queries", queries)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = "".join(f"q{number}\tp{number}\t1\n" for number in range(passages))
    for split in ("train", "test"):
        (folder / "qrels" / f"{split}.tsv").write_text("query-id\tcorpus-id\tscore\n" + lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0, help="draws the moments")
    for name, kills in (("train", 50), ("encode", 20), ("compare", 10)):
        parser.add_argument(f"--{name}", type=int, default=kills, help=f"kills of {name}")
    parser.add_argument(
        "--folder", type=Path, help="where to work; a temporary folder when not given"
    )
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="kills-"))
    os.environ["CONTACCUM_CACHE"] = str(folder / "cache")
    data, config = folder / "data", folder / "config.yaml"
    write_corpus(data)
    config.write_text(json.dumps({**TINY, "data": {**TINY["data"], "train": str(data)}}))
    table = commands(data, folder / "model" / "model", config)
    finish(table["train"].call(folder / "model", "grad_accum"))
    draw, right = random.Random(options.seed), True
    print(
        "| command | kills | in set-up | at work | while writing | equal to the unbroken run | "
        "finished shards made again |"
    )
    print("|---|---|---|---|---|---|---|")
    for name, command in table.items():
        if kills := getattr(options, name):
            found = campaign(command, kills, folder / name, draw)
            parts = " | ".join(
                str(found["moments"][part]) for part in ("in set-up", "at work", "while writing")
            )
            print(
                f"| {name} | {kills} | {parts} | {found['equal']} | {found['lost']} |", flush=True
            )
            right = right and found["equal"] == kills and not found["lost"]
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())

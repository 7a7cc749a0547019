"""Micro-batches cut by tokens against micro-batches of B pairs: time, peak memory and padding, on texts of real lengths.

    python benchmarks/micro_batch_tokens.py --data MEDQUAD [--model DIR] [--json OUT]

All ways take the same steps of the same pairs, in turn, in one process; the budget is B x (max_query_length +
max_passage_length), what B pairs of full length need. Times are ratios of two updates of one step, the optimizer's left out. Peak
memory is what tensors hold at most during the first step, beyond weights.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from common import PeakMemory, make_parser, model_folder, positions, publish, ratio, summary, table

from contaccum.batch import MicroBatch
from contaccum.config import TrainConfig
from contaccum.data.dataset import load_train_set
from contaccum.encoder import DualEncoder
from contaccum.encoder.packed import packed_linears
from contaccum.engine import Engine
from contaccum.methods import METHODS
from contaccum.training import setup

PAIRS, TOKENS = "pairs", "tokens"
WAYS = {
    PAIRS: (PAIRS, False, False),
    "pairs, unpadded": (PAIRS, True, False),
    TOKENS: (TOKENS, False, False),
    "tokens, unpadded": (TOKENS, True, False),
    "tokens, unpadded, packed": (TOKENS, True, True),
}
"""Name -> how a step is cut, ``model.unpad``, ``model.pack_linears`` (which does nothing on a GPU)."""


@contextmanager
def switched(encoder: DualEncoder, unpad: bool, pack: bool) -> Iterator[None]:
    with ExitStack() as stack:
        encoder.set_attention("auto" if unpad else "sdpa", unpad)
        for tower in encoder.towers if pack else ():
            stack.enter_context(packed_linears(tower.backbone))
        yield


def measure(args: Any, folder: str, method: str) -> list[dict[str, Any]]:
    """One row a way: ``args.steps`` steps, after one of each way that is not counted."""
    config = TrainConfig(method=method)
    config.model.name, most = folder, positions(folder)
    config.model.max_query_length = min(config.model.max_query_length or most, most)
    config.model.max_passage_length = min(args.max_passage_length, most)
    config.batch.global_batch_size, config.batch.micro_batch_size = args.global_batch_size, args.pairs
    train_set = load_train_set(args.data, repair=True)
    engine = Engine(device=args.device, precision=args.precision)
    encoder = setup.build_encoder(config, train_set).to(engine.device).train()
    cuts = {PAIRS: setup.build_batches(config, engine, encoder, train_set)}
    longest = encoder.settings.max_query_length + encoder.settings.max_passage_length
    config.batch.micro_batch_tokens = args.pairs * longest
    cuts[TOKENS] = setup.build_batches(config, engine, encoder, train_set)
    loss = setup.build_loss(config, encoder)
    bank = setup.build_bank(config, engine, encoder, loss)
    engine.prepare(encoder, torch.optim.SGD(encoder.parameters(), lr=0.0))

    def update(way: str, step: int) -> float:
        cut, unpad, pack = WAYS[way]
        batches = cuts[cut].step(step)
        with switched(encoder, unpad, pack):
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
        for way, (cut, _, _) in WAYS.items()
    ]  # fmt: skip


def tokens(cut: list[MicroBatch], count: Callable[[torch.Tensor], int]) -> int:
    return sum(count(batch.queries.attention_mask) + count(batch.passages.attention_mask) for batch in cut)


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
    parser.add_argument("--max_passage_length", type=int, default=256, help="longest passage, in tokens")
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
            f"{row['ratio']['median']:.3f} ({row['ratio']['min']:.3f} to {row['ratio']['max']:.3f})",
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
        f"N = {args.global_batch_size}, B = {args.pairs}, passages of at most {args.max_passage_length} tokens, "
        f"{args.precision}, {args.steps} steps; median (smallest to largest) over steps. Target: tokens ÷ pairs at most 0.70."
    )
    publish(args, "Micro-batches by tokens and by pairs", [intro, table(heads, lines)], {"rows": rows})


if __name__ == "__main__":
    main()

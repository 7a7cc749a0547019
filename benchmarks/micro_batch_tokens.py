"""Micro-batches by token budget against micro-batches of B pairs: time of an update, peak memory, padding.

    python benchmarks/micro_batch_tokens.py --data MEDQUAD --model MODEL --json OUT.json

Both cuts take the same steps of the same pairs, in turn, in one process; the budget is B x (max_query_length +
max_passage_length), what B pairs of full length need. The time is the median over steps of the ratio of two updates of one
step; the memory is what torch holds at its peak in the step's forward and backward passes beyond weights and gradients.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from contaccum.batch import MicroBatch
from contaccum.config import TrainConfig
from contaccum.data.dataset import load_train_set
from contaccum.engine import Engine
from contaccum.methods import METHODS
from contaccum.training import setup


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="BEIR folder")
    parser.add_argument("--model", required=True, help="encoder folder or hub name")
    parser.add_argument("--methods", default="grad_accum,grad_cache,cont_accum")
    parser.add_argument("--pairs", type=int, default=8, help="pairs in a micro-batch (B)")
    parser.add_argument("--global_batch_size", type=int, default=128)
    parser.add_argument("--max_passage_length", type=int, default=256)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--device", default="auto", choices=["auto", "cpu"])
    parser.add_argument("--json", required=True, help="file for the figures")
    given = parser.parse_args()
    rows = [measure(given, method) for method in given.methods.split(",")]
    about = {**vars(given), "torch": torch.__version__, "threads": torch.get_num_threads()}
    Path(given.json).write_text(json.dumps({"settings": about, "rows": rows}, indent=2) + "\n", encoding="utf-8")
    for row in rows:
        print(json.dumps(row))


def measure(given: argparse.Namespace, method: str) -> dict[str, float | str]:
    """Both cuts of ``given.steps`` steps, after one step of each that is not counted."""
    config = TrainConfig(method=method)
    config.model.name, config.model.max_passage_length = given.model, given.max_passage_length
    config.batch.global_batch_size, config.batch.micro_batch_size = given.global_batch_size, given.pairs
    train_set = load_train_set(given.data, repair=True)
    engine = Engine(device=given.device)
    encoder = setup.build_encoder(config.model, train_set, 0).to(engine.device).train()
    by_pairs = setup.build_batches(config, engine, encoder, train_set)
    config.batch.micro_batch_tokens = given.pairs * (
        encoder.settings.max_query_length + encoder.settings.max_passage_length
    )
    by_tokens = setup.build_batches(config, engine, encoder, train_set)
    loss = setup.build_loss(config)
    bank = setup.build_bank(config, engine, encoder, loss)
    engine.prepare(encoder, torch.optim.SGD(encoder.parameters(), lr=0.0))

    def update(batches: list[MicroBatch]) -> float:
        began = time.perf_counter()
        METHODS[method](engine, batches, bank, loss)
        if engine.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    ratios, pairs, tokens = [], [], []
    for step in range(given.steps + 1):
        cuts = by_pairs.step(step), by_tokens.step(step)
        turns = [(cuts[0], pairs), (cuts[1], tokens)]
        for cut, found in turns if step % 2 else reversed(turns):
            found.append({"seconds": update(cut), "padded": padded(cut), "real": real(cut), "K": len(cut)})
        ratios.append(tokens[-1]["seconds"] / pairs[-1]["seconds"])
    peaks = [peak(engine, lambda cut=cut: update(cut)) for cut in (by_pairs.step(0), by_tokens.step(0))]
    sums = [{name: sum(line[name] for line in found[1:]) for name in found[0]} for found in (pairs, tokens)]
    return {
        "method": method,
        "time_ratio": round(statistics.median(ratios[1:]), 4),
        "time_ratios": ", ".join(f"{ratio:.3f}" for ratio in ratios[1:]),
        "peak_memory_ratio": round(peaks[1] / peaks[0], 4),
        "padded_tokens_ratio": round(sums[1]["padded"] / sums[0]["padded"], 4),
        "padding_share_by_pairs": round(1 - sums[0]["real"] / sums[0]["padded"], 4),
        "padding_share_by_tokens": round(1 - sums[1]["real"] / sums[1]["padded"], 4),
        "micro_batches_by_pairs": sums[0]["K"] / given.steps,
        "micro_batches_by_tokens": sums[1]["K"] / given.steps,
    }


def padded(cut: list[MicroBatch]) -> int:
    return sum(batch.queries.input_ids.numel() + batch.passages.input_ids.numel() for batch in cut)


def real(cut: list[MicroBatch]) -> int:
    return sum(int(batch.queries.attention_mask.sum() + batch.passages.attention_mask.sum()) for batch in cut)


def peak(engine: Engine, run: Callable[[], object]) -> int:
    """Most bytes that torch holds during ``run`` beyond what it held before."""
    if engine.device.type == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    held = most = 0
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


if __name__ == "__main__":
    main()

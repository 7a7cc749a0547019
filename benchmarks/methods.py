"""Update time and peak memory of the six methods at equal N and B, over bank sizes.

    python benchmarks/methods.py [--model DIR] [--json OUT] [--quick]

Both towers share one encoder; random queries have 16 tokens, passages 128, or a data set gives
texts of varied lengths. Times are those of whole updates (all micro-batches and the optimizer
step), with methods and bank sizes interleaved. A bank opens a block of its cached log-sum-exps
every few pushes and a large block every few hundred (contaccum/methods/logsumexp.py). Medians miss
both, so the cost of openings is measured separately, and "with openings" spreads it over the pushes
between them. Peak memory counts the tensors of an update beyond encoder and optimizer. MFU is the
share of a large matrix product's speed at which the update computes its tokens, padding not
counted: one forward and one backward pass over all pairs, also for the methods that encode twice.
--kernels adds the kernels of one update (on a CPU, the operators) by torch.profiler, and the MFU
that they would have if the GPU never waited for the host.
"""

import argparse
import time

import torch
from common import (
    PeakMemory,
    Trainee,
    about_texts,
    add_real_texts,
    fill,
    interleaved,
    make_parser,
    model_folder,
    product_speed,
    publish,
    ratio,
    settle,
    summary,
    table,
    texts_of_training,
)

from contaccum.batch import RowIds
from contaccum.methods.bank import Bank
from contaccum.methods.loss import InfoNCE

BANKLESS = ("grad_accum", "grad_cache", "in_batch")
BANKED = ("passage_bank", "cont_accum", "cont_cache")


def openings(bank: Bank, push: int) -> float:
    """Return the seconds that opening blocks adds to one push on average."""
    if bank.sums is None:
        return 0.0
    loss = InfoNCE(bank.similarity.temperature)
    width, seconds = bank.sums.width, {}
    for slot in (0, push):
        fill(bank, slot % bank.size)
        ids = RowIds(torch.arange(push).unsqueeze(1), torch.arange(push).unsqueeze(1))
        vectors = torch.nn.functional.normalize(torch.randn(push, bank.passages.shape[-1]), dim=-1)
        vectors = vectors.to(bank.passages.device)
        rows = (vectors, vectors.unsqueeze(1), ids)
        computed = loss(*rows, bank).bank_logits
        settle()  # otherwise the push is charged for the loss too
        began = time.perf_counter()
        bank.push(*rows, computed)
        settle()
        seconds[slot] = time.perf_counter() - began
    return max(0.0, seconds[0] - seconds[push]) * push / width  # slot 0 opens a block


def peak(trainee: Trainee, method: str, size: int) -> int:
    """Return the peak bytes of one update, bank and cached sums included, encoder and optimizer
    excluded."""
    with PeakMemory(trainee.engine.device) as memory:
        trainee.update(method, trainee.bank(method, size))
    return memory.bytes


def kernels(trainee: Trainee, method: str, size: int) -> list[dict[str, object]]:
    """Return the name, the number and the seconds of each kernel of one update, slowest first."""
    cuda = trainee.engine.device.type == "cuda"
    activity = torch.profiler.ProfilerActivity
    bank = trainee.bank(method, size)
    with torch.profiler.profile(activities=[activity.CUDA if cuda else activity.CPU]) as profiler:
        trainee.update(method, bank)
        settle()
    found = [
        {
            "name": event.key,
            "count": event.count,
            "seconds": (event.self_device_time_total if cuda else event.self_cpu_time_total) / 1e6,
        }
        for event in profiler.key_averages()
    ]
    return sorted((each for each in found if each["seconds"]), key=lambda each: -each["seconds"])


def arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[128, 1024, 4096, 16_384, 131_072],
        help="bank sizes, in rows",
    )  # fmt: skip
    parser.add_argument("--pairs", type=int, default=128, help="pairs in an update (N)")
    parser.add_argument("--micro", type=int, default=8, help="pairs in a micro-batch (B)")
    parser.add_argument(
        "--tokens", type=int,
        help="most tokens in a micro-batch, packed without padding (model.unpad); instead of B",
    )  # fmt: skip
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--kernels", type=int, default=0, help="slowest kernels to list for each method"
    )
    add_real_texts(parser)
    args = parser.parse_args()
    if args.quick:
        args.sizes, args.pairs, args.micro, args.repeats = [16], 8, 4, 2
    return args


def main() -> None:
    args = arguments()
    folder = model_folder(args.model)
    trainee = Trainee(
        folder,
        args.device,
        args.precision,
        args.pairs,
        args.micro,
        unpad=args.tokens is not None,
        **texts_of_training(args),
    )
    if args.tokens is not None:
        trainee.micro_batches = trainee.cut_by_tokens(args.tokens)
    cut = (
        f"B = {args.micro}"
        if args.tokens is None
        else f"micro-batches of at most {args.tokens:,} tokens, without padding"
    )
    operations, speed = trainee.operations(), product_speed(trainee.engine.device, args.precision)
    banks = {(name, 0): trainee.bank(name, 0) for name in BANKLESS}
    banks |= {
        (name, size): trainee.bank(name, size)
        for name in BANKED
        for size in args.sizes
        if size >= args.pairs
    }
    cases = {
        f"{name} {size}": lambda n=name, b=bank: trainee.update(n, b)
        for (name, size), bank in banks.items()
    }
    seconds = interleaved(cases, args.repeats)
    results = []
    for (name, size), bank in banks.items():
        key, push = f"{name} {size}", args.pairs if name == "cont_cache" else args.micro
        extra = openings(bank, push) * args.pairs / push
        against = ratio(seconds, key, "grad_accum 0")
        base = summary(seconds["grad_accum 0"])["median"]
        bank_bytes = sum(t.nbytes for t in (bank.passages, bank.queries) if t is not None)
        results.append({
            "method": name, "bank": size, "seconds": summary(seconds[key]), "ratio": against,
            "with_openings": against["median"] + extra / base,
            "peak_bytes": peak(trainee, name, size), "bank_bytes": bank_bytes,
            "mfu": operations / summary(seconds[key])["median"] / speed,
        })  # fmt: skip
    plain = results[0]["peak_bytes"]
    rows = []
    for r in results:
        over, bank_bytes = r["peak_bytes"] - plain, r["bank_bytes"]
        r["peak_over_bank"] = over / bank_bytes if bank_bytes else None
        s = r["seconds"]
        rows.append([
            f"`{r['method']}`", r["bank"], f"{s['median']:.3f} ({s['min']:.3f} to {s['max']:.3f})",
            f"{r['ratio']['median']:.3f} ({r['ratio']['min']:.3f} to "
            f"{r['ratio']['max']:.3f})", f"{r['with_openings']:.3f}",
            f"{r['mfu']:.1%}",
            f"{r['peak_bytes'] / 2**20:.1f}", f"{bank_bytes / 2**20:.1f}",
            f"{over / bank_bytes:.2f}" if bank_bytes else "",
        ])  # fmt: skip
    heads = [
        "method", "M", "seconds per "
                       "update", "÷ `grad_accum`", "with openings", "MFU", "peak MiB", "bank MiB",
        "peak over grad_accum ÷ bank",
    ]  # fmt: skip
    intro = (
        f"{about_texts(args)}; N = {args.pairs}, {cut}, {args.precision}, "
        f"{args.repeats} rounds, interleaved; median (smallest to largest). "
        "Targets: `cont_accum` ÷ `grad_accum` at most 1.03 at M = 1,024, 1.05 at 16,384, 1.15 at "
        "131,072; "
        '`grad_cache` ÷ `grad_accum` at most 1.36; peak beyond `grad_accum`\'s ("over") at most '
        "1.15 of the bank's vectors."
    )
    last = f"A large matrix product in {args.precision}: {speed / 1e12:.3g} TFLOP/s."
    figures = {"rows": results, "operations": operations, "product_speed": speed}
    parts = [intro, table(heads, rows), last]
    if args.kernels:
        found = {key: kernels(trainee, *key) for key in banks}
        sums = {key: sum(each["seconds"] for each in row) for key, row in found.items()}
        totals = [
            [f"`{name}`", size, sums[name, size] * 1e3, sum(each["count"] for each in row),
             f"{operations / sums[name, size] / speed:.1%}"]
            for (name, size), row in found.items()
        ]  # fmt: skip
        slowest = [
            [f"`{name}`", size, each["seconds"] * 1e3, each["count"], f"`{each['name'][:90]}`"]
            for (name, size), row in found.items()
            for each in row[: args.kernels]
        ]
        parts += [
            table(["method", "M", "ms in kernels", "kernels", "MFU without waits"], totals),
            table(["method", "M", "ms", "number", "kernel"], slowest),
        ]
        figures["kernels"] = [
            {"method": name, "bank": size, "kernels": row} for (name, size), row in found.items()
        ]
    publish(args, "Six methods: time of an update and peak memory", parts, figures)


if __name__ == "__main__":
    main()

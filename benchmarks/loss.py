"""Loss only: four blocks with cached log-sum-exps against the full matrix under autograd; time and
memory over M.

    python benchmarks/loss.py [--json OUT] [--quick]

A case is the work of a micro-batch outside the encoder: loss, gradients for queries and passages,
and the push into the bank. The full matrix has (B + M) rows and (B + M) columns under autograd, as
if the banks were concatenated. Cases are interleaved. The full matrix is skipped where it needs
more memory than --full_gib.
"""

import argparse
import statistics

import torch
from common import (
    TEMPERATURE,
    PeakMemory,
    exponent,
    fill,
    interleaved,
    make_parser,
    publish,
    ratio,
    summary,
    table,
)
from torch.nn.functional import cross_entropy, normalize

from contaccum.batch import RowIds
from contaccum.methods.bank import Bank
from contaccum.methods.loss import InfoNCE
from contaccum.runtime.engine import Engine


class Case:
    """A full bank and the embeddings of one micro-batch."""

    def __init__(self, size: int, dim: int, pairs: int, device: torch.device) -> None:
        torch.manual_seed(0)
        self.loss = InfoNCE(TEMPERATURE)
        self.bank = fill(Bank(size, dim, self.loss.similarity, push=pairs, device=device))
        self.queries = normalize(torch.randn(pairs, dim, device=device), dim=-1).requires_grad_()
        self.passages = normalize(
            torch.randn(pairs, 1, dim, device=device), dim=-1
        ).requires_grad_()
        ids = torch.arange(pairs).unsqueeze(1)
        self.ids = RowIds(ids, ids)

    def incremental(self) -> None:
        found = self.loss(self.queries, self.passages, self.ids, self.bank)
        torch.autograd.grad(found.value, (self.queries, self.passages))
        self.bank.push(self.queries, self.passages, self.ids, found.bank_logits)

    def full(self) -> None:
        rows = torch.cat([self.queries, self.bank.queries])
        columns = torch.cat([self.passages.flatten(0, 1), self.bank.passages.flatten(0, 1)])
        logits = rows @ columns.T / TEMPERATURE  # (B + M, B + M)
        value = cross_entropy(logits, torch.arange(len(rows), device=rows.device))
        torch.autograd.grad(value, (self.queries, self.passages))


def peak(case: Case, kind: str) -> int:
    """Return the peak bytes of one call, cached log-sum-exps included, the bank's embeddings
    excluded."""
    with PeakMemory(case.queries.device) as memory:
        getattr(case, kind)()
    return memory.bytes + (case.bank.sums.table.nbytes if kind == "incremental" else 0)


def arguments() -> argparse.Namespace:
    parser = make_parser(__doc__, model=False)
    parser.add_argument(
        "--sizes",
        type=int,
        nargs="+",
        default=[1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072],
    )
    parser.add_argument("--dim", type=int, default=384, help="width of the vectors (d)")
    parser.add_argument("--micro", type=int, default=8, help="pairs in a micro-batch (B)")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument(
        "--full_gib", type=float, default=6.0, help="most memory that the full matrix may take"
    )
    args = parser.parse_args()
    if args.quick:
        args.sizes, args.dim, args.repeats = [64, 128], 32, 2
    return args


def main() -> None:
    args = arguments()
    device = Engine(device=args.device).device
    results = []
    for size in args.sizes:
        case = Case(size, args.dim, args.micro, device)
        kinds = {"incremental": case.incremental}
        if (
            4 * 4 * (size + args.micro) ** 2 < args.full_gib * 2**30
        ):  # logits, their scaled copy, softmax, gradient
            kinds["full"] = case.full
        seconds = interleaved(kinds, args.repeats)
        memory = {kind: peak(case, kind) for kind in kinds}
        result = {
            "bank": size,
            "bytes": memory,
            "seconds": {kind: summary(times) for kind, times in seconds.items()},
        }
        result["mean"] = statistics.mean(seconds["incremental"])
        if "full" in kinds:
            result["time_ratio"] = ratio(seconds, "full", "incremental")
            result["memory_ratio"] = memory["full"] / memory["incremental"]
        results.append(result)
    rows = []
    for r in results:
        time, memory, both = r["seconds"], r["bytes"], "time_ratio" in r
        rows.append([
            f"{r['bank']:,}",
            *(f"{1e3 * s['median']:.2f} ({1e3 * s['min']:.2f} to "
              f"{1e3 * s['max']:.2f})" for s in time.values()),
            *([] if both else ["-"]),
            f"{r['time_ratio']['median']:.0f}" if both else "-",
            *(f"{number / 2**20:.1f}" for number in memory.values()),
            *([] if both else ["-"]),
            f"{r['memory_ratio']:.0f}" if both else "-",
        ])  # fmt: skip
    growth = exponent(args.sizes, [r["seconds"]["incremental"]["median"] for r in results])
    heads = [
        "M", "incremental, ms", "full, ms", "full ÷ incremental", "incremental, MiB", "full, MiB",
        "full ÷ incremental",
    ]  # fmt: skip
    intro = (
        f"B = {args.micro}, d = {args.dim}, {args.repeats} rounds, interleaved; median (smallest "
        "to largest). Memory is beyond the vectors of the bank, the kept log-sum-exps included. "
        "Targets at M = 16,384: at least 50 in time, 20 in memory."
    )
    last = f"The incremental loss's time grows as M to the power {growth:.2f} over these sizes."
    publish(
        args,
        "The loss alone",
        [intro, table(heads, rows), last],
        {"rows": results, "exponent": growth},
    )


if __name__ == "__main__":
    main()

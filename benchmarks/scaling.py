"""Growth of the update time with N, with M, and with the number of processes.

    python benchmarks/scaling.py [--model DIR] [--json OUT] [--quick]

N and M vary over two decades in one process; the exponent is the slope of log time over log size, by least squares. Processes
share one update of N pairs over gloo (NCCL on GPUs), N / W pairs each. Texts are random, as in methods.py.
"""

import argparse
import json
import subprocess
import sys

from common import Trainee, exponent, interleaved, make_parser, model_folder, publish, summary, table

METHODS = ("grad_accum", "grad_cache", "cont_accum")


def in_processes(request: dict) -> None:
    """Run updates shared by W processes as one of them; the first one prints the seconds."""
    trainee = Trainee(request["model"], request["device"], "fp32", request["pairs"], request["micro"])
    banks = {name: trainee.bank(name, request["size"]) for name in METHODS}
    cases = {name: lambda n=name, b=bank: trainee.update(n, b) for name, bank in banks.items()}
    seconds = interleaved(cases, request["repeats"])
    if trainee.engine.rank == 0:
        print(json.dumps(seconds))
    trainee.engine.close()


def with_processes(count: int, request: dict) -> dict[str, list[float]]:
    runner = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(count)]
    call = [sys.executable, *runner, sys.argv[0], "--worker", json.dumps(request)]
    done = subprocess.run(call, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr[-3000:])
    return json.loads(done.stdout.splitlines()[-1])


def arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--pairs", type=int, nargs="+", default=[8, 32, 128, 800], help="pairs in an update (N)")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1024, 4096, 16_384, 131_072], help="bank sizes (M)")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--micro", type=int, default=8, help="pairs in a micro-batch (B)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--worker", help=argparse.SUPPRESS)  # what one of several processes is to measure, as JSON
    args = parser.parse_args()
    if args.quick:
        args.pairs, args.sizes, args.micro, args.repeats = [4, 8], [16, 32], 4, 2
    return args


def main() -> None:
    args = arguments()
    if args.worker:
        in_processes(json.loads(args.worker))
        return
    folder = model_folder(args.model)
    results = []
    for pairs in args.pairs:
        trainee = Trainee(folder, args.device, args.precision, pairs, args.micro)
        banks = {name: trainee.bank(name, max(args.sizes[0], pairs)) for name in METHODS}
        cases = {name: lambda n=name, b=bank, t=trainee: t.update(n, b) for name, bank in banks.items()}
        for name, times in interleaved(cases, args.repeats).items():
            results.append({"by": "N", "size": pairs, "method": name, "seconds": summary(times)})
    trainee = Trainee(folder, args.device, args.precision, args.micro, args.micro)
    banks = {size: trainee.bank("cont_accum", size) for size in args.sizes}
    cases = {str(size): lambda b=bank: trainee.update("cont_accum", b) for size, bank in banks.items()}
    for size, times in interleaved(cases, args.repeats).items():
        results.append({"by": "M", "size": int(size), "method": "cont_accum", "seconds": summary(times)})
    shared = {
        "model": folder,
        "device": args.device,
        "micro": args.micro,
        "size": args.sizes[0],
        "repeats": args.repeats,
    }
    pairs = max(args.micro * max(args.processes), args.pairs[1])
    for count in args.processes:
        for name, times in with_processes(count, {**shared, "pairs": pairs}).items():
            results.append({"by": "processes", "size": count, "method": name, "seconds": summary(times)})
    growth = {}
    for by, name in dict.fromkeys((r["by"], r["method"]) for r in results):
        chosen = [r for r in results if (r["by"], r["method"]) == (by, name)]
        growth[f"{by}, {name}"] = exponent([r["size"] for r in chosen], [r["seconds"]["median"] for r in chosen])
    rows = [
        [r["by"], f"`{r['method']}`", r["size"], *(f"{r['seconds'][name]:.3f}" for name in ("median", "min", "max"))]
        for r in results
    ]
    powers = [[*name.split(", "), f"{power:.2f}"] for name, power in growth.items()]
    intro = (
        f"B = {args.micro}; seconds per update, {args.repeats} rounds. By N: bank of {args.sizes[0]:,} rows or N if more. By M: "
        f"N = {args.micro}, so that all but one micro-batch's encoding is the bank's. By processes: N = {pairs}, shared."
    )
    tables = [
        table(["by", "method", "size", "median", "min", "max"], rows),
        table(["by", "method", "exponent"], powers),
    ]
    publish(args, "How an update's time grows", [intro, *tables], {"rows": results, "exponents": growth})


if __name__ == "__main__":
    main()

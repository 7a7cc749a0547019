"""All-reduce of gradients: messages of at most 25 MiB, against three other ways.

    python benchmarks/gradient_messages.py [--processes 2] [--json OUT] [--quick]

Gloo processes on this machine sum the gradients of two BERT towers; the ways are interleaved. Give each process its own core.
"""

import argparse
import json
import subprocess
import sys

import torch
import torch.distributed as dist
from common import interleaved, make_parser, publish, summary, table
from torch import Tensor
from transformers import BertConfig, BertModel

from contaccum.runtime.processes import joined

TOWERS = {"6 layers, 384 wide": (6, 384), "4 layers, 768 wide": (4, 768)}


def gradients(layers: int, width: int, vocabulary: int) -> list[Tensor]:
    """Return random tensors with the shapes of two towers' parameters."""
    config = BertConfig(
        vocab_size=vocabulary, num_hidden_layers=layers, hidden_size=width, num_attention_heads=width // 32,
        intermediate_size=4 * width,
    )  # fmt: skip
    with torch.device("meta"):
        shapes = [parameter.shape for parameter in BertModel(config, add_pooling_layer=False).parameters()]
    return [torch.ones(shape) for shape in 2 * shapes]


def one_by_one(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        dist.all_reduce(tensor)


def together(tensors: list[Tensor]) -> None:
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat)
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


def coalesced(tensors: list[Tensor]) -> None:
    dist.all_reduce_coalesced(tensors)  # deprecated


def in_processes(request: dict) -> None:
    """Run as one of the processes; the first one prints the seconds."""
    torch.set_num_threads(1)
    tensors = gradients(*request["tower"])
    with joined(30) as group:
        ways = {
            "this way": group.sum,
            "tensor by tensor": one_by_one,
            "`all_reduce_coalesced`": coalesced,
            "one buffer": together,
        }
        seconds = interleaved({name: lambda way=way: way(tensors) for name, way in ways.items()}, request["repeats"])
        if group.rank == 0:
            size = sum(tensor.nbytes for tensor in tensors) / 2**20
            print(json.dumps({"tensors": len(tensors), "mib": size, "seconds": seconds}))


def main() -> None:
    parser = make_parser(__doc__, model=False)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--worker", help=argparse.SUPPRESS)  # what one of several processes is to measure, as JSON
    args = parser.parse_args()
    if args.worker:
        in_processes(json.loads(args.worker))
        return
    towers = {"1 layer, 32 wide": (1, 32)} if args.quick else TOWERS
    rows, figures = [], []
    for name, tower in towers.items():
        request = {"tower": [*tower, 200 if args.quick else 30_522], "repeats": 2 if args.quick else args.repeats}
        runner = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(args.processes)]
        call = [sys.executable, *runner, sys.argv[0], "--worker", json.dumps(request)]
        done = subprocess.run(call, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(done.stderr[-3000:])
        found = json.loads(done.stdout.splitlines()[-1])
        seconds = {way: summary(values) for way, values in found["seconds"].items()}
        about = f"{name}: {found['tensors']} tensors, {found['mib']:.0f} MiB"
        rows.append([about, *(f"{times['median']:.3f}" for times in seconds.values())])
        figures.append({**found, "towers": name, "seconds": seconds})
    heads = ["gradients of two towers", *(f"{way}, s" for way in figures[0]["seconds"])]
    publish(args, f"Sum of gradients, {args.processes} gloo processes", [table(heads, rows)], {"rows": figures})


if __name__ == "__main__":
    main()

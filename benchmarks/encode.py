"""Encoding a corpus with contaccum and with SentenceTransformer.encode: time, peak memory, and
equality of the vectors.

    python benchmarks/encode.py --data BEIR_DIR [--model DIR] [--json OUT] [--quick]

Same folder, texts and length limit, float32, interleaved in one process; both sort by length in
their own way. sentence-transformers uses batches of --batch_size texts, contaccum its default
number of tokens, which on a CPU is at most as large. Peak memory is that of a new process minus its
memory with model and texts loaded.
"""

import json

import numpy as np
from common import (
    add_worker,
    in_fresh_process,
    interleaved,
    make_parser,
    model_folder,
    publish,
    ratio,
    summary,
    table,
)
from sentence_transformers import SentenceTransformer

from contaccum.config.commands import DataPolicy
from contaccum.data.dataset import open_dataset
from contaccum.encoder import DualEncoder
from contaccum.retrieval.encode import Texts
from contaccum.runtime.processes import encoding_device, peak_resident

OURS, PEER = "contaccum", "sentence-transformers"


def texts_of(data: str, count: int | None) -> list[str]:
    """Return all passages of a folder, or ``count`` of them at equal distances."""
    corpus = Texts("passage", open_dataset(data, policy=DataPolicy(repair=True)).corpus)
    if count is None or count >= corpus.rows:
        return corpus.read(0, corpus.rows)[1]
    return [
        corpus.read(place, place + 1)[1][0]
        for place in map(int, np.linspace(0, corpus.rows - 1, count))
    ]


class Cases:
    """Both encoders over the same texts, with their last unit vectors."""

    def __init__(self, args: dict) -> None:
        self.texts = texts_of(args["data"], args["texts"])
        self.batch_size, self.batch_tokens = args["batch_size"], args["batch_tokens"]
        device, length = encoding_device(args["device"]), args["max_length"]
        self.vectors: dict[str, np.ndarray] = {}
        if OURS in args["kinds"]:
            settings = {"max_passage_length": length, "similarity": "cosine", "passage_prefix": ""}
            self.ours = DualEncoder.load(args["model"], device=device, **settings)
        if PEER in args["kinds"]:
            self.peer = SentenceTransformer(args["model"], device=str(device))
            self.peer.max_seq_length = length

    def run(self, kind: str) -> None:
        if kind == OURS:
            self.vectors[kind] = self.ours.encode_passages(self.texts, self.batch_tokens)
        else:
            options = {"normalize_embeddings": True, "show_progress_bar": False, "prompt": ""}
            self.vectors[kind] = self.peer.encode(self.texts, batch_size=self.batch_size, **options)


def peak(request: dict) -> None:
    cases = Cases(request)
    before = peak_resident()
    cases.run(request["kinds"][0])
    print(json.dumps({"bytes": peak_resident() - before}))


def main() -> None:
    parser = make_parser(__doc__)
    add_worker(parser)
    parser.add_argument("--data", help="BEIR folder whose corpus is encoded; required")
    parser.add_argument(
        "--texts", type=int, help="so many passages, at even distances; all when not given"
    )
    parser.add_argument("--max_length", type=int, default=256, help="tokens of a passage")
    parser.add_argument(
        "--batch_size", type=int, default=32, help="texts in a batch of sentence-transformers"
    )
    parser.add_argument(
        "--batch_tokens",
        type=int,
        help="tokens in a batch of contaccum; its default when not given",
    )
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    if args.worker:
        peak(json.loads(args.worker))
        return
    if args.data is None:
        parser.error("--data is required")
    if args.precision != "fp32":
        parser.error("--precision: this comparison is made in fp32")
    if args.quick:
        args.texts, args.repeats = 40, 2
    names = ("data", "texts", "max_length", "batch_size", "batch_tokens", "device")
    request = {name: getattr(args, name) for name in names} | {"model": model_folder(args.model)}
    kinds = [PEER, OURS]
    memory = {kind: in_fresh_process({**request, "kinds": [kind]})["bytes"] for kind in kinds}
    cases = Cases({**request, "kinds": kinds})
    seconds = interleaved({kind: lambda kind=kind: cases.run(kind) for kind in kinds}, args.repeats)
    cosine = float((cases.vectors[OURS] * cases.vectors[PEER]).sum(axis=1).min())
    share = ratio(seconds, OURS, PEER)
    count = len(cases.texts)
    rows = [
        [
            kind,
            "{median:.2f} ({min:.2f} to {max:.2f})".format(**summary(seconds[kind])),
            count / summary(seconds[kind])["median"],
            f"{memory[kind] / 2**20:.0f}",
        ]
        for kind in kinds
    ]
    intro = (
        f"{count:,} passages of {args.data}, at most {args.max_length} tokens, fp32, "
        f"{args.repeats} rounds, interleaved; median (smallest to largest)."
    )
    last = (
        f"contaccum ÷ sentence-transformers: {share['median']:.3f} of the time ({share['min']:.3f} "
        f"to {share['max']:.3f}), smallest cosine between the two {cosine:.7f}."
    )
    heads = ["encoder", "seconds", "passages a second", "peak memory, MiB"]
    figures = {
        "seconds": seconds,
        "ratio": share,
        "cosine": cosine,
        "bytes": memory,
        "passages": count,
    }
    publish(args, "Encoding a corpus", [intro, table(heads, rows), last], figures)


if __name__ == "__main__":
    main()

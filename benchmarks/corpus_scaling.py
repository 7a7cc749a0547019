"""Growth of opening, encoding and searching with the corpus: random passages, two decades of size, exponents by least squares.

    python benchmarks/corpus_scaling.py [--sizes N ...] [--json OUT] [--quick]

Each size runs in a new process: it writes the corpus file and reads it into a table; a second process opens the table, encodes
the passages with a two-layer encoder of random weights into shards, and searches them exactly. Time proportional to the corpus
has exponent 1; constant memory has exponent 0.
"""

import json
import os
import random
import tempfile
import time
from pathlib import Path

from common import exponent, make_parser, publish, table
from fresh import add_worker, in_fresh_process

from contaccum.data.dataset import open_dataset
from contaccum.encoder import DualEncoder, EncoderSettings, tiny_tower
from contaccum.retrieval.encode import Texts, encode_texts
from contaccum.retrieval.retriever import search_vectors
from contaccum.retrieval.shards import ShardFolder
from contaccum.runtime.processes import peak_resident

WORDS = [f"{first}{second}{third}" for first in "bdgklm" for second in "aeiou" for third in ("ra", "sel", "tin", "nok")]


def write_corpus(path: Path, rows: int, words: int) -> None:
    draw = random.Random(rows)
    with path.open("w", encoding="utf-8") as file:
        for row in range(rows):
            file.write(
                json.dumps({"_id": f"p{row}", "title": "", "text": " ".join(draw.choices(WORDS, k=words))}) + "\n"
            )


def build(request: dict) -> dict:
    path = Path(request["folder"]) / "corpus.jsonl"
    write_corpus(path, request["rows"], request["words"])
    before, began = peak_resident(), time.perf_counter()
    open_dataset(path).corpus  # noqa: B018
    return {"build_seconds": time.perf_counter() - began, "build_bytes": peak_resident() - before}


def use(request: dict) -> dict:
    folder = Path(request["folder"])
    before, began = peak_resident(), time.perf_counter()
    corpus = open_dataset(folder / "corpus.jsonl").corpus
    opened, held = time.perf_counter() - began, peak_resident() - before
    tower = tiny_tower([" ".join(WORDS)], "mean", seed=0, layers=2, width=64, vocabulary=500, max_length=64)
    encoder = DualEncoder(tower, tower, EncoderSettings(max_passage_length=64, tie_towers=True)).eval()
    encoder.encode_passages(WORDS)
    began = time.perf_counter()
    encode_texts(encoder, Texts.of_corpus(corpus), folder / "shards", shard_size=10_000)
    encoded = time.perf_counter() - began
    queries = encoder.encode_queries(
        [" ".join(random.Random(n).choices(WORDS, k=8)) for n in range(request["queries"])]
    )
    shards = ShardFolder(folder / "shards")
    names = [str(number) for number in range(len(queries))]
    search_vectors(names[:1], queries[:1], shards, 10)  # hashes are checked at the first reading
    before, began = peak_resident(), time.perf_counter()
    search_vectors(names, queries, shards, 100)
    searched = time.perf_counter() - began
    return {"open_seconds": opened, "open_bytes": held, "encode_seconds": encoded, "search_seconds": searched}


def main() -> None:
    parser = make_parser(__doc__, model=False)
    add_worker(parser)
    parser.add_argument("--sizes", type=int, nargs="+", default=[10_000, 31_623, 100_000, 316_228, 1_000_000])
    parser.add_argument("--words", type=int, default=40, help="words of a passage")
    parser.add_argument("--queries", type=int, default=200)
    args = parser.parse_args()
    if args.worker:
        request = json.loads(args.worker)
        print(json.dumps(build(request) if request["part"] == "build" else use(request)))
        return
    if args.quick:
        args.sizes = [300, 3000]
    results = []
    for rows in args.sizes:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["CONTACCUM_CACHE"] = f"{folder}/cache"
            request = {"folder": folder, "rows": rows, "words": args.words, "queries": args.queries}
            parts = [in_fresh_process({**request, "part": part}) for part in ("build", "use")]
            results.append({"rows": rows, **parts[0], **parts[1]})
    measures = {
        "build_seconds": "table, s",
        "build_bytes": "table, MiB",
        "open_seconds": "opening, s",
        "open_bytes": "opening, MiB",
        "encode_seconds": "encoding, s",
        "search_seconds": "search, s",
    }
    scale = {name: 2**20 if name.endswith("bytes") else 1 for name in measures}
    growth = {name: exponent(args.sizes, [max(r[name], 1e-9) for r in results]) for name in measures}
    lines = [[f"{r['rows']:,}", *(f"{r[name] / scale[name]:.3f}" for name in measures)] for r in results]
    lines.append(["exponent", *(f"{growth[name]:.2f}" for name in measures)])
    intro = (
        f"Passages of {args.words} words, {args.queries} queries, the best 100; an encoder of two layers, 64 wide. Memory is "
        "what the process held at most, beyond what it held before."
    )
    heads = ["passages", *measures.values()]
    publish(args, "Growth with the corpus", [intro, table(heads, lines)], {"rows": results, "exponents": growth})


if __name__ == "__main__":
    main()

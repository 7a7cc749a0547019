"""Exact search against raw faiss and BEIR's two searchers: time, peak memory, and equality of the
results.

    python benchmarks/search.py [--rows N] [--json OUT] [--quick]

Without faiss, only torch's searchers run. contaccum chooses between faiss and torch itself. All
searchers use the same random unit vectors, saved once as contaccum's shards. contaccum streams the
shards from their files; the others load all vectors. Only the search is timed, not building indexes
or loading vectors. BEIR's searchers get precomputed vectors. Peak memory is that of a new process
that loads and searches, minus its memory before.
"""

import argparse
import json
import logging
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from beir.retrieval.search.dense import DenseRetrievalExactSearch
from common import (
    add_worker,
    in_fresh_process,
    interleaved,
    make_parser,
    publish,
    ratio,
    summary,
    table,
)

from contaccum.retrieval.exact import ExactIndex
from contaccum.retrieval.shards import EncodingJob, Shard, ShardFolder, write_manifest, write_shard
from contaccum.runtime.processes import peak_resident

QUERIES = 10**9  # number of the first query
OURS, PRODUCT, RAW, EXACT, FLAT = (
    "contaccum",
    "torch product",
    "faiss IndexFlatIP",
    "BEIR exact",
    "BEIR faiss",
)
KINDS = [RAW, PRODUCT, OURS, EXACT, FLAT] if find_spec("faiss") else [PRODUCT, OURS, EXACT]


def made(start: int, stop: int, dim: int) -> np.ndarray:
    """Return random unit vectors of the rows from start to stop, equal at every call."""
    vectors = np.random.default_rng([start, stop]).standard_normal(
        (stop - start, dim), dtype=np.float32
    )
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def write_shards(folder: Path, rows: int, dim: int, shard: int) -> None:
    job = EncodingJob("passage", "made", "made", rows, shard, "float32")
    for number in range(job.count):
        start, stop = job.span(number)
        write_shard(
            folder,
            number,
            job,
            Shard([f"{row:09d}" for row in range(start, stop)], made(start, stop, dim)),
        )
    write_manifest(folder, job)


class Precomputed:
    """Model for BEIR with precomputed vectors; the corpus keeps its order because all texts have
    one length."""

    def __init__(self, queries: np.ndarray, vectors: np.ndarray) -> None:
        self.queries, self.vectors = queries, vectors

    def encode_queries(
        self, queries: list[str], convert_to_tensor: bool = False, **_: object
    ) -> object:
        return torch.from_numpy(self.queries) if convert_to_tensor else self.queries

    def encode_corpus(
        self, corpus: list[dict], convert_to_tensor: bool = False, **_: object
    ) -> object:
        start = int(corpus[0]["text"])
        vectors = self.vectors[start : start + len(corpus)]
        return torch.from_numpy(vectors) if convert_to_tensor else vectors


def flat_search(model: Precomputed) -> Any:
    """Return BEIR's faiss search with the two methods that BEIR 2.2 forgets to define."""
    from beir.retrieval.search.dense import FlatIPFaissSearch

    return type("FlatSearch", (FlatIPFaissSearch,), {"encode": None, "search_from_files": None})(
        model
    )


def prepare(
    kind: str, folder: Path, queries: np.ndarray, k: int, device: str
) -> Callable[[], dict[str, dict[str, float]]]:
    """Load or build what a searcher needs; return its search, query -> passage -> score."""
    names = [f"q{number}" for number in range(len(queries))]
    shards = ShardFolder(folder)
    ids = [passage for shard in shards for passage in shard.ids]

    def named(scores: np.ndarray, rows: np.ndarray) -> dict[str, dict[str, float]]:
        return {
            name: {ids[row]: float(score) for row, score in zip(found, values, strict=True)}
            for name, found, values in zip(names, rows, scores, strict=True)
        }

    if kind == OURS:
        return lambda: named(*ExactIndex(shards, device=device).search(queries, k))
    if kind == RAW:
        import faiss

        index = faiss.IndexFlatIP(shards.dimension)
        for shard in shards:
            index.add(np.ascontiguousarray(shard.vectors))
        return lambda: named(*index.search(queries, k))
    vectors = np.empty((shards.job.rows, shards.dimension), dtype=np.float32)
    for number, shard in enumerate(shards):
        vectors[slice(*shards.job.span(number))] = shard.vectors
    if kind == PRODUCT:
        passages, asked = torch.from_numpy(vectors).T, torch.from_numpy(queries)

        def product() -> dict[str, dict[str, float]]:
            top = [torch.topk(part @ passages, k) for part in asked.split(128)]
            scores = torch.cat([part.values for part in top]).numpy()
            return named(scores, torch.cat([part.indices for part in top]).numpy())

        return product
    corpus = {passage: {"title": "", "text": passage} for passage in ids}
    texts = dict.fromkeys(names, "")
    model = Precomputed(queries, vectors)
    searcher = (
        DenseRetrievalExactSearch(model, show_progress_bar=False)
        if kind == EXACT
        else flat_search(model)
    )
    if kind == FLAT:
        searcher.index(corpus, "dot")
    return lambda: searcher.search(corpus, texts, k, "dot")


def peak(request: dict) -> None:
    queries = made(QUERIES, QUERIES + request["queries"], request["dim"])
    before = peak_resident()
    prepare(request["kind"], Path(request["folder"]), queries, request["k"], request["device"])()
    print(json.dumps({"bytes": peak_resident() - before}))


def agreement(
    found: dict[str, dict[str, float]], right: dict[str, dict[str, float]]
) -> dict[str, float]:
    """Return the share of correct passages found and the largest difference of their scores."""
    shared = [found[query].keys() & hits.keys() for query, hits in right.items()]
    wide = max(
        abs(found[query][p] - right[query][p])
        for query, both in zip(right, shared, strict=True)
        for p in both
    )
    return {"share": sum(map(len, shared)) / sum(map(len, right.values())), "difference": wide}


def arguments() -> argparse.Namespace:
    parser = make_parser(__doc__, model=False)
    add_worker(parser)
    parser.add_argument("--rows", type=int, default=1_000_000, help="vectors in the corpus")
    parser.add_argument("--dim", type=int, default=384, help="width of the vectors")
    parser.add_argument("--queries", type=int, default=1000)
    parser.add_argument("--k", type=int, default=100, help="passages for each query")
    parser.add_argument("--shard_size", type=int, default=50_000, help="vectors in a shard")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    if args.quick:
        args.rows, args.queries, args.shard_size, args.repeats = 5000, 20, 1000, 2
    return args


def main() -> None:
    args = arguments()
    logging.disable(logging.INFO)
    if args.worker:
        peak(json.loads(args.worker))
        return
    queries = made(QUERIES, QUERIES + args.queries, args.dim)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "shards"
        write_shards(folder, args.rows, args.dim, args.shard_size)
        # fresh processes search for few queries: what is measured is the corpus, not the results
        few = {
            "folder": str(folder),
            "queries": 20,
            "dim": args.dim,
            "k": args.k,
            "device": args.device,
        }
        memory = {kind: in_fresh_process({**few, "kind": kind})["bytes"] for kind in KINDS}
        ways = {kind: prepare(kind, folder, queries, args.k, args.device) for kind in KINDS}
        right = ways[KINDS[-1] if RAW not in KINDS else RAW]()
        found = {kind: agreement(ways[kind](), right) for kind in KINDS}
        seconds = interleaved(ways, args.repeats, warmup=0)
    shares = {kind: ratio(seconds, OURS, kind) for kind in KINDS if kind != OURS}
    rows = [
        [
            kind,
            "{median:.2f} ({min:.2f} to {max:.2f})".format(**summary(seconds[kind])),
            "{median:.2f} ({min:.2f} to {max:.2f})".format(**shares[kind])
            if kind in shares
            else "1",
            f"{memory[kind] / 2**20:.0f}",
            f"{found[kind]['share']:.5f}",
            f"{found[kind]['difference']:.1e}",
        ]
        for kind in KINDS
    ]
    bound = (args.rows + args.shard_size) * args.dim * 4
    intro = (
        f"{args.queries:,} queries, the best {args.k} of {args.rows:,} x {args.dim} made vectors, "
        f"shards of {args.shard_size:,}, {args.repeats} rounds, interleaved; median (smallest to "
        "largest)."
    )
    last = (
        f"Targets for contaccum: at most the time of the faster of faiss and a torch product, and "
        f"{bound / 2**20:.0f} MiB "
        "(index and one shard)."
    )
    heads = [
        "searcher",
        "seconds",
        "contaccum ÷ it",
        "peak memory, MiB",
        "passages found",
        "largest difference of scores",
    ]
    figures = {
        "seconds": seconds,
        "ratios": shares,
        "bytes": memory,
        "bound": bound,
        "agreement": found,
    }
    publish(args, "Exact search", [intro, table(heads, rows), last], figures)


if __name__ == "__main__":
    main()

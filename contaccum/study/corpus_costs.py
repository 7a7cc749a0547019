"""What a corpus of n passages costs: time to encode, disk for the shards, memory and search time by kind of index."""

from dataclasses import dataclass

from contaccum.study.measure import Measurement
from contaccum.study.units import duration, gigabytes

PQ_BYTES = 64
"""Bytes of a product-quantised vector in the table."""
LINKS = 32
"""HNSW's M: 2 M links at the ground level, M at each level above, which 1 in M nodes reaches."""


@dataclass(frozen=True)
class IndexCost:
    """One kind of index, named by its faiss factory string."""

    factory: str
    bytes: int
    """In memory, and on disk when it is saved."""
    share: float | None
    """Of the passages that one query is compared with; None for a graph, where it depends on the data."""


def lists_for(rows: int) -> int:
    """Inverted lists for ``rows`` vectors: near 4 times the square root, a power of two (faiss's own advice)."""
    lists = 1
    while 2 * lists <= 4 * rows**0.5:
        lists *= 2
    return lists


def index_costs(rows: int, dim: int, probes: int = 64) -> list[IndexCost]:
    """Sizes by formula, for float32 vectors of ``dim`` numbers and 64-bit ids.

    Flat holds the vectors. IVF adds an id a vector and the lists' centroids; with PQ a vector is its code, and each of the
    PQ_BYTES sub-spaces holds 256 centroids, together 256 * dim numbers. HNSW adds 2 M links of 4 bytes a vector, M/(M-1) more
    for the levels above, and an offset and a level of 12 bytes. Source: faiss wiki, "Faiss indexes".
    """
    lists = lists_for(rows)
    centroids = lists * dim * 4
    share = min(1.0, (lists + probes * rows / lists) / rows)
    links = 4 * (2 * LINKS + LINKS / (LINKS - 1)) + 12
    return [
        IndexCost("Flat", 4 * dim * rows, 1.0),
        IndexCost(f"IVF{lists},Flat", (4 * dim + 8) * rows + centroids, share),
        IndexCost(f"IVF{lists},PQ{PQ_BYTES}", (PQ_BYTES + 8) * rows + centroids + 256 * dim * 4, share),
        IndexCost(f"HNSW{LINKS}", int((4 * dim + links) * rows), None),
    ]


def render_corpus(rows: int, measured: Measurement, queries: int = 1000) -> str:
    """The costs as text: what was measured here, carried to ``rows`` passages by multiplication."""
    rate, dim = measured.passages_per_second, measured.dim
    lines = [
        f"{rows} passages of {dim} numbers, on this device:",
        f"encode {duration(rows / rate)} at {rate:.1f} passages a second (measured); W devices take a W-th",
        f"shards {gigabytes(4 * dim * rows)} on disk as float32, {gigabytes(2 * dim * rows)} as float16",
        "",
        f"| index | memory | search of {queries} queries |",
        "| --- | --- | --- |",
    ]
    whole = measured.seconds_per_comparison * rows * queries
    for cost in index_costs(rows, dim):
        time = "-" if cost.share is None else duration(whole * cost.share)
        lines.append(f"| {cost.factory} | {gigabytes(cost.bytes)} | {time} |")
    lines.append(
        "search: comparisons at the speed of a large matrix product, which only Flat reaches: a lower bound for IVF"
    )
    return "\n".join(lines)

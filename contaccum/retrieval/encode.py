"""Texts to embeddings: in memory, or as shards on disk that survive a kill and can be made by several processes."""

import hashlib
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from tqdm.auto import tqdm

from contaccum.data.records import Passage
from contaccum.errors import InputError
from contaccum.files import sweep
from contaccum.lock import folder_lock
from contaccum.retrieval.shards import (
    DTYPES,
    Job,
    Shard,
    ShardFolder,
    check_folder,
    damage,
    read_entry,
    refuse_infinite,
    write_manifest,
    write_shard,
)

if TYPE_CHECKING:
    from datasets import Dataset

CHUNK = 16_384  # texts in one call of the encoder: it sorts and tokenises them in windows, the next ahead of time
SAMPLE = 32  # texts of the corpus that are encoded to tell how long the whole of it takes
WORTH = 50  # samples that a set must hold to be planned: the sample then costs 2 % at most
LONG = 60.0  # seconds from which on a plan is printed


class Encoder(Protocol):
    """What encoding and searching need of a model; DualEncoder is one."""

    @property
    def dim(self) -> int: ...
    @property
    def device(self) -> object:
        """Where it encodes, as torch names it (``cpu``, ``cuda:0``); the search stays there too."""
        ...

    def encode_queries(self, texts: list[str], batch_tokens: int | None = ...) -> np.ndarray: ...
    def encode_passages(self, texts: list[str], batch_tokens: int | None = ...) -> np.ndarray: ...
    def fingerprint(self, kind: str) -> str: ...


@dataclass(frozen=True)
class Texts:
    """Ids and texts of a set, read in slices, so that a memory-mapped corpus is never loaded whole."""

    kind: str
    """``query`` or ``passage``."""
    rows: int
    read: Callable[[int, int], tuple[list[str], list[str]]]
    """From first row and the row behind the last to ids and texts."""

    @classmethod
    def of_corpus(cls, corpus: "Dataset") -> "Texts":
        """Passages of a table with the columns id, title and text; the text is title and text joined, as everywhere."""

        def read(start: int, stop: int) -> tuple[list[str], list[str]]:
            rows = corpus[start:stop]
            passages = map(Passage, rows["id"], rows["title"], rows["text"])
            return list(rows["id"]), [passage.content for passage in passages]

        return cls("passage", len(corpus), read)

    @classmethod
    def of_queries(cls, queries: Mapping[str, str]) -> "Texts":
        """Queries by id, in the mapping's order."""
        ids, texts = list(queries), list(queries.values())
        return cls("query", len(ids), lambda start, stop: (ids[start:stop], texts[start:stop]))

    @cached_property
    def fingerprint(self) -> str:
        """Hash of all ids and texts in order: the same data gives the same hash, wherever its files lie."""
        digest = hashlib.sha256()
        for start in range(0, self.rows, CHUNK):
            for row in zip(*self.read(start, min(self.rows, start + CHUNK)), strict=True):
                for value in row:
                    data = value.encode("utf-8")
                    digest.update(b"%d:" % len(data))
                    digest.update(data)
        return digest.hexdigest()


def encode_shard(encoder: Encoder, texts: Texts, start: int, stop: int, batch_tokens: int | None, bar: tqdm) -> Shard:
    """Ids and float32 vectors of the rows from start to stop; ``bar`` counts the texts.

    Raises InputError naming the first text whose vector holds NaN or infinity.
    """
    encode = _encode_of(encoder, texts)
    ids: list[str] = []
    vectors = np.empty((stop - start, encoder.dim), dtype=np.float32)
    for first in range(start, stop, CHUNK):
        last = min(stop, first + CHUNK)
        more, content = texts.read(first, last)
        ids += more
        made = vectors[first - start : last - start]
        made[:] = encode(content, batch_tokens=batch_tokens)
        refuse_infinite(texts.kind, more, made)
        bar.update(last - first)
    return Shard(ids, vectors)


def _encode_of(encoder: Encoder, texts: Texts) -> Callable[..., np.ndarray]:
    return encoder.encode_queries if texts.kind == "query" else encoder.encode_passages


def encode_in_memory(encoder: Encoder, texts: Texts, batch_tokens: int | None = None) -> Shard:
    """The whole set as one float32 shard, for sets that fit: rows times dimension times 4 bytes."""
    announce(encoder, texts, texts.rows, batch_tokens)
    with tqdm(total=texts.rows, desc=f"encode {texts.kind}", unit="text", disable=None, leave=False) as bar:
        return encode_shard(encoder, texts, 0, texts.rows, batch_tokens, bar)


def encode_own(encoder: Encoder, texts: Texts, batch_tokens: int | None, rank: int, world: int) -> list[Shard]:
    """As ``encode_in_memory``, the part of process ``rank`` of ``world``: every W-th call of the encoder, each a shard.

    So each vector is made in the company in which one process makes it, and comes out the same to the bit.
    """
    starts = range(rank * CHUNK, texts.rows, world * CHUNK)
    spans = [(start, min(texts.rows, start + CHUNK)) for start in starts]
    total = sum(stop - start for start, stop in spans)
    with tqdm(total=total, desc=f"encode {texts.kind}", unit="text", disable=None, leave=False) as bar:
        return [encode_shard(encoder, texts, start, stop, batch_tokens, bar) for start, stop in spans]


def encode_texts(
    encoder: Encoder,
    texts: Texts,
    output_dir: str | Path,
    *,
    dtype: str = "float32",
    shard_size: int = 50_000,
    batch_tokens: int | None = None,
    rank: int = 0,
    world: int = 1,
) -> bool:
    """Encode a set into shards; True when the whole set is finished, by this process or with the others' shards.

    Process ``rank`` of ``world`` makes the shards rank, rank + world, … ; whichever finds all finished writes the
    manifest. A finished shard that is whole is never made again, whatever number of processes made it; one that is
    damaged is made again with a warning. A shard is written while the next one is encoded, so memory holds two.
    Raises InputError when the folder holds anything else, or embeddings of other texts, another encoder or another
    form, and when an embedding is not finite.
    """
    if dtype not in DTYPES:
        raise InputError(f"dtype is {dtype!r}, expected {' or '.join(DTYPES)}")
    if shard_size < 1:
        raise InputError(f"shard_size is {shard_size}, expected at least 1")
    assert 0 <= rank < world
    folder = Path(output_dir)
    job = Job(texts.kind, encoder.fingerprint(texts.kind), texts.fingerprint, texts.rows, shard_size, dtype)
    check_folder(folder, job)
    # one lock a launch: the shards of its other processes are theirs alone
    with folder_lock(folder) if rank == 0 else nullcontext():
        if world == 1:  # the others of a launch may be writing already
            sweep(folder)
        return _encode_own(encoder, texts, folder, job, batch_tokens, range(rank, job.count, world))


def _encode_own(encoder: Encoder, texts: Texts, folder: Path, job: Job, batch_tokens: int | None, own: range) -> bool:
    missing = [number for number in own if not _is_whole(folder, number, job)]
    rows = sum(stop - start for start, stop in map(job.span, missing))
    announce(encoder, texts, rows, batch_tokens, job.dtype)
    with tqdm(total=rows, unit="text", disable=None) as bar, _written_beside() as write:
        for number in missing:
            start, stop = job.span(number)
            write(folder, number, job, encode_shard(encoder, texts, start, stop, batch_tokens, bar))
    return write_manifest(folder, job)


@contextmanager
def _written_beside() -> Iterator[Callable[[Path, int, Job, Shard], None]]:
    """``write_shard`` in a thread, one shard at a time; its error is raised by the next call, or when the block ends well."""
    last: Future[None] | None = None
    with ThreadPoolExecutor(1, "write") as pool:

        def write(*shard: Any) -> None:
            nonlocal last
            if last is not None:
                last.result()
            last = pool.submit(write_shard, *shard)

        yield write
        if last is not None:
            last.result()


@dataclass(frozen=True)
class Plan:
    """What encoding a set is expected to take, from a sample of its own texts."""

    rows: int
    rate: float
    """Texts a second, measured on the sample."""
    bytes: int
    """Of the vectors, in memory or on disk."""

    @property
    def seconds(self) -> float:
        return self.rows / self.rate

    def __str__(self) -> str:
        hours, minutes = divmod(round(self.seconds / 60), 60)
        return (
            f"{self.rows:,} texts at {self.rate:,.4g} a second: about {hours} h {minutes:02d} min, "
            f"{self.bytes / 1e6:,.0f} MB of vectors"
        )


def make_plan(rows: int, dim: int, dtype: str, sampled: int, seconds: float) -> Plan:
    """From the time that a sample took to the time and bytes of ``rows`` texts with ``dim`` numbers of ``dtype`` each."""
    return Plan(rows, sampled / seconds, rows * dim * np.dtype(dtype).itemsize)


def announce(encoder: Encoder, texts: Texts, rows: int, batch_tokens: int | None, dtype: str = "float32") -> None:
    """Print to stderr what encoding ``rows`` texts of a set will take, where that is more than a minute.

    The sample stands at even distances in the whole set, since a corpus is often sorted. Of several processes the first speaks,
    for its own part.
    """
    if rows < WORTH * SAMPLE:
        return
    places = np.linspace(0, texts.rows - 1, SAMPLE, dtype=int)
    sample = [texts.read(place, place + 1)[1][0] for place in map(int, places)]
    encode = _encode_of(encoder, texts)
    encode(sample[:1], batch_tokens=batch_tokens)  # what is loaded at the first call is not counted
    start = time.perf_counter()
    encode(sample, batch_tokens=batch_tokens)
    plan = make_plan(rows, encoder.dim, dtype, SAMPLE, time.perf_counter() - start)
    if plan.seconds > LONG and int(os.environ.get("RANK", 0)) == 0:
        print(f"contaccum: {plan}", file=sys.stderr)


def _is_whole(folder: Path, number: int, job: Job) -> bool:
    entry = read_entry(folder, number, job)
    if entry is None:
        return False
    fault = damage(folder, number, entry)
    if fault:
        warnings.warn(f"{fault}; shard {number} is encoded again", stacklevel=3)
    return fault is None


def open_embeddings(encoder: Encoder, texts: Texts, folder: str | Path) -> ShardFolder:
    """The finished shards of a folder, refused when they were made by another encoder or from other texts."""
    return ShardFolder(folder, encoder.fingerprint(texts.kind), texts.fingerprint)

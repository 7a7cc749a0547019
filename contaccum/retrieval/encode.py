"""Encode texts into vectors, in memory or as shards on disk.

The shards of a training set are in the cache folder.

Several processes can encode the shards of one folder together. A restart encodes only the missing
shards.
"""

import hashlib
import os
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from datasets import Dataset

from contaccum.config.commands import DataPolicy, EncoderConfig, SearchConfig
from contaccum.data.dataset import DEFAULT_POLICY, open_dataset
from contaccum.data.train_set import TrainSet
from contaccum.formats.records import Passage
from contaccum.retrieval.shards import (
    MANIFEST,
    EncodingJob,
    Shard,
    ShardFolder,
    Shards,
    check_folder,
    damage,
    read_record,
    refuse_infinite,
    saved_precision,
    started_options,
    write_manifest,
    write_shard,
)
from contaccum.runtime.checks import refuse_input_as_output
from contaccum.runtime.files import cache_folder, remove_folder, sweep
from contaccum.runtime.launch import is_main
from contaccum.runtime.locks import folder_lock, waiting_lock
from contaccum.runtime.processes import ALONE, Processes, joined
from contaccum.runtime.progress import Progress
from contaccum.runtime.units import duration, gigabytes

if TYPE_CHECKING:
    from contaccum.encoder import DualEncoder

# number of texts in one call of the encoder; a multiple of the texts that it sorts by length
# together
CHUNK = 16_384
SAMPLE = 32  # number of texts that are encoded to estimate the time for all texts
# minimum number of texts for an estimate, so that the sample takes at most 2 % of the time
ESTIMATE_FROM = 50 * SAMPLE
CACHE_BYTES = 4 * 10**9  # maximum size of all vectors of corpora in the cache
ESTIMATE_SECONDS = 60.0  # an estimate is printed only if it is longer than this


@dataclass(frozen=True)
class Texts:
    """Ids and texts of a corpus or of queries, read in slices to save memory."""

    kind: str
    """``query`` or ``passage``."""
    rows: int
    read: Callable[[int, int], tuple[list[str], list[str]]]
    """Function that returns the ids and the texts of the rows ``start`` to ``stop`` - 1."""

    @classmethod
    def of_corpus(cls, corpus: Dataset) -> "Texts":
        """Make Texts from a corpus with the columns id, title and text.

        The title and the text of a passage are joined.
        """

        def read(start: int, stop: int) -> tuple[list[str], list[str]]:
            rows = corpus[start:stop]
            return rows["id"], [passage.content for passage in Passage.of_columns(rows)]

        return cls("passage", len(corpus), read)

    @classmethod
    def of_queries(cls, queries: Mapping[str, str]) -> "Texts":
        """Make Texts from queries (id -> text), in the same order."""
        ids = list(queries)
        texts = list(queries.values())
        return cls("query", len(ids), lambda start, stop: (ids[start:stop], texts[start:stop]))

    @property
    def unit(self) -> str:
        return "queries" if self.kind == "query" else "passages"

    def encode_method(self, encoder: "DualEncoder") -> Callable[..., np.ndarray]:
        """Return the method of ``encoder`` that encodes texts of this kind."""
        return encoder.encode_queries if self.kind == "query" else encoder.encode_passages

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of all ids and texts in their order."""
        digest = hashlib.sha256()
        for start in range(0, self.rows, CHUNK):
            for row in zip(*self.read(start, min(self.rows, start + CHUNK)), strict=True):
                for value in row:
                    data = value.encode("utf-8")
                    digest.update(b"%d:" % len(data))
                    digest.update(data)
        return digest.hexdigest()


def load_encoder_of(
    choice: EncoderConfig, kind: str, texts: Callable[[], Texts], *folders: str | Path | None
) -> "DualEncoder":
    """Load an encoder, in a precision that fits texts, or vectors that exist already.

    kind: ``query`` or ``passage``. texts: the texts of this kind to encode. folders: folders with
    vectors or an index of these texts. With the precision ``auto``, the encoder has the precision
    of the first folder that has one; otherwise, the first texts choose (see ``load_encoder``).
    """
    from contaccum.encoder.precision import SAMPLE, load_encoder

    if choice.precision == "auto":
        for folder in folders:
            if folder and (saved := saved_precision(folder)):
                choice = replace(choice, precision=saved)  # type: ignore[arg-type]
                if saved != "fp32" and is_main():
                    print(f"contaccum: encoding in {saved}, as in {folder}", file=sys.stderr)
                break

    def sample() -> list[str]:
        found = texts()
        return found.read(0, min(found.rows, SAMPLE))[1]

    return load_encoder(choice, kind, sample)


def encode_shard(
    encoder: "DualEncoder",
    texts: Texts,
    start: int,
    stop: int,
    batch_tokens: int | None,
    progress: Progress,
    keep_texts: bool = False,
) -> Shard:
    """Encode the rows ``start`` to ``stop`` - 1. Return a shard with their ids and float32 vectors.

    progress: counts the texts. keep_texts: also put the texts into the shard. Raises InputError
    with the id of the first text whose vector contains NaN or infinity.
    """
    ids: list[str] = []
    kept: list[str] = []
    encode = texts.encode_method(encoder)
    vectors = np.empty((stop - start, encoder.dim), dtype=np.float32)
    for first in range(start, stop, CHUNK):
        last = min(stop, first + CHUNK)
        chunk_ids, content = texts.read(first, last)
        ids += chunk_ids
        kept += content if keep_texts else []
        chunk = vectors[first - start : last - start]
        chunk[:] = encode(content, batch_tokens, progress.update)
        refuse_infinite(texts.kind, chunk_ids, chunk)
    return Shard(ids, vectors, kept if keep_texts else None)


def encode_in_memory(
    encoder: "DualEncoder",
    texts: Texts,
    batch_tokens: int | None = None,
    start: int = 0,
    stop: int | None = None,
) -> Shard:
    """Encode the rows ``start`` to ``stop`` - 1, or all rows, into one float32 shard in memory.

    The vectors take rows * dimension * 4 bytes.
    """
    stop = texts.rows if stop is None else stop
    with encoder.in_lockstep(texts.kind):
        print_estimate(encoder, texts, stop - start, batch_tokens)
        with Progress(stop - start, "encoding", texts.unit) as progress:
            return encode_shard(encoder, texts, start, stop, batch_tokens, progress)


def passage_vectors(
    encoder: "DualEncoder", corpus: Dataset, settings: SearchConfig, group: Processes = ALONE
) -> tuple[Shards, int]:
    """Return the vectors of the corpus, from a folder or in memory, and the first row number.

    If ``settings.embeddings`` names a folder, missing shards are encoded first, and the vectors are
    read from the folder. Otherwise one process uses the cache (see ``cached_vectors``), and several
    processes encode the corpus in memory. Each of W processes gets one of W parts of consecutive
    rows.
    """
    texts = Texts.of_corpus(corpus)
    if settings.embeddings is None:
        if settings.cache and group.world == 1:
            size = texts.rows * encoder.dim * 4
            if size <= CACHE_BYTES:
                return cached_vectors(encoder, texts, size, settings.batch_tokens), 0
            print(
                f"contaccum: {gigabytes(size)} of vectors are above the limit of the cache, "
                f"{gigabytes(CACHE_BYTES)}; use --embeddings to keep them for other commands",
                file=sys.stderr,
            )
        start, stop = (texts.rows * rank // group.world for rank in (group.rank, group.rank + 1))
        return [encode_in_memory(encoder, texts, settings.batch_tokens, start, stop)], start
    # a folder is used with any shard size and dtype, so a finished job is not compared with the
    # settings
    finished = (Path(settings.embeddings) / MANIFEST).is_file()
    options = {"dtype": settings.dtype, **started_options(settings.embeddings)}
    group.barrier()  # no process may write the manifest before all have looked for it
    if not finished:
        encode_texts(
            encoder,
            texts,
            settings.embeddings,
            group,
            batch_tokens=settings.batch_tokens,
            **options,
        )
        group.barrier()
    fingerprint = encoder.fingerprint(texts.kind)
    folder = ShardFolder(
        settings.embeddings, fingerprint, texts.fingerprint, rank=group.rank, world=group.world
    )
    return folder, folder.first_row


def cached_vectors(
    encoder: "DualEncoder", texts: Texts, size: int, batch_tokens: int | None
) -> Shards:
    """Return float32 vectors of the texts from the cache. If they are not there, encode the texts.

    Commands with the same encoder and the same texts share them. size: bytes of the vectors. If the
    cache of vectors is full, those that were not used for the longest time are deleted.
    """
    fingerprint = encoder.fingerprint(texts.kind)
    name = hashlib.sha256(f"{fingerprint} {texts.fingerprint}".encode()).hexdigest()[:32]
    folder = cache_folder() / "corpus_vectors" / name
    locks = cache_folder() / "locks"
    with waiting_lock(locks / f"{name}.lock"):
        if not (folder / MANIFEST).is_file():
            # make room: delete the corpora that were not used for the longest time
            corpora = sorted(folder.parent.glob("*"), key=lambda corpus: corpus.stat().st_mtime)
            sizes = [sum(file.stat().st_size for file in corpus.glob("*")) for corpus in corpora]
            total = sum(sizes) + size
            for corpus, corpus_size in zip(corpora, sizes, strict=True):
                in_use = (locks / f"{corpus.name}.lock").exists()
                if total > CACHE_BYTES and not in_use:
                    remove_folder(corpus)
                    total -= corpus_size
            print(
                f"contaccum: encoding {texts.rows:,} passages; other commands will find the "
                f"vectors in the cache ({size / 1e6:,.0f} MB, limit {CACHE_BYTES / 1e6:,.0f} MB)",
                file=sys.stderr,
            )
        encode_texts(encoder, texts, folder, batch_tokens=batch_tokens)  # only what is missing
        os.utime(folder)
        return list(ShardFolder(folder, fingerprint, texts.fingerprint))


def encode_texts(
    encoder: "DualEncoder",
    texts: Texts,
    output_dir: str | Path,
    group: Processes = ALONE,
    *,
    dtype: str = "float32",
    shard_size: int = 50_000,
    batch_tokens: int | None = None,
    format: str = "npy",
    text: bool = False,
) -> bool:
    """Encode texts into shards in ``output_dir``.

    Return True if the shards of all processes are finished, else False.

    group: processes that share the work; each of W processes encodes every W-th shard. format:
    ``npy`` or ``parquet``. text: whether Parquet files also contain the texts. The process that
    finishes last writes the manifest. Finished shards are reused. Damaged shards are encoded again
    with a warning. Each shard is written while the next shard is encoded, so memory holds two
    shards.

    Raises InputError if a vector is not finite, or if the folder contains other files or the
    embeddings of a different job (texts, encoder, dtype, shard size or format).
    """
    folder = Path(output_dir)
    job = EncodingJob(
        kind=texts.kind,
        encoder=encoder.fingerprint(texts.kind),
        source=texts.fingerprint,
        rows=texts.rows,
        shard_size=shard_size,
        dtype=dtype,
        format=format,
        text=text and format == "parquet",
    )
    check_folder(folder, job)
    # process 0 holds the lock for all processes of the launch; each process writes different shards
    with folder_lock(folder) if group.is_main else nullcontext():
        if (
            group.world == 1
        ):  # not with several processes, because another process may already write here
            sweep(folder)
        missing = []
        for number in range(group.rank, job.count, group.world):
            record = read_record(folder, number, job)
            fault = damage(folder, record) if record else None
            if fault:
                warnings.warn(f"{fault}; shard {number} is encoded again", stacklevel=2)
            if record is None or fault or record.dimension != encoder.dim:
                missing.append(number)
        rows = sum(stop - start for start, stop in map(job.span, missing))
        print_estimate(encoder, texts, rows, batch_tokens, job.dtype)
        with (
            Progress(rows, "encoding", texts.unit) as progress,
            ThreadPoolExecutor(1, "write") as writer,
        ):
            written: Future[None] | None = None
            for number in missing:
                shard = encode_shard(
                    encoder, texts, *job.span(number), batch_tokens, progress, job.text
                )
                if written is not None:
                    written.result()  # raises the error of the thread
                written = writer.submit(write_shard, folder, number, job, shard)
            if written is not None:
                written.result()
        return write_manifest(folder, job)


def make_estimate(
    rows: int, dim: int, dtype: str, sampled: int, seconds: float
) -> tuple[float, str]:
    """Return the estimated seconds to encode ``rows`` texts, and a sentence with this estimate.

    sampled: number of texts in the sample. seconds: time to encode this sample.
    """
    rate, megabytes = sampled / seconds, rows * dim * np.dtype(dtype).itemsize / 1e6
    time_needed = f"about {duration(rows / rate)}, {megabytes:,.0f} MB of vectors"
    return rows / rate, f"{rows:,} texts at {rate:,.4g} a second: {time_needed}"


def print_estimate(
    encoder: "DualEncoder",
    texts: Texts,
    rows: int,
    batch_tokens: int | None,
    dtype: str = "float32",
) -> None:
    """Estimate the time to encode ``rows`` texts, and print it if it exceeds a minute.

    The time is measured on a sample of texts. The sample is spread evenly over all texts, because
    corpora are often sorted. For fewer than ``ESTIMATE_FROM`` texts nothing is estimated. If there
    are several processes, only process 0 prints.
    """
    if rows < ESTIMATE_FROM:
        return
    sample = [
        texts.read(number, number + 1)[1][0]
        for number in map(int, np.linspace(0, texts.rows - 1, SAMPLE, dtype=int))
    ]
    encode = texts.encode_method(encoder)
    encode(sample[:1], batch_tokens)  # the first call is slower, because it loads libraries
    start = time.perf_counter()
    encode(sample, batch_tokens)
    seconds, estimate = make_estimate(rows, encoder.dim, dtype, SAMPLE, time.perf_counter() - start)
    if seconds > ESTIMATE_SECONDS and int(os.environ.get("RANK", 0)) == 0:
        print(f"contaccum: {estimate}", file=sys.stderr)


class StoredVectors:
    """Memory-mapped vectors of n texts, float16."""

    def __init__(self, folder: ShardFolder, name: str) -> None:
        self.name = name  # hash of the texts and the encoder
        self.shards = [shard.vectors for shard in folder]
        self._shard_size, self._dim = folder.job.shard_size, folder.dimension

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the vectors of the texts at the positions ``rows``.

        (k,) int64 -> (k, d) float16, both on the CPU.
        """
        shard_of, row_of = np.divmod(rows.numpy(), self._shard_size)
        found = np.empty((len(rows), self._dim), dtype=np.float16)
        for shard in np.unique(shard_of).tolist():
            chosen = shard_of == shard
            found[chosen] = self.shards[shard][row_of[chosen]]
        return torch.from_numpy(found)


def training_vectors(
    encoder: "DualEncoder",
    train_set: TrainSet,
    kind: str,
    group: Processes = ALONE,
    batch_tokens: int | None = None,
) -> StoredVectors:
    """Return the float16 vectors of a training set's queries or passages, in its order.

    kind: ``query`` or ``passage``. The vectors are cached under a hash of the texts and the
    encoder. Shards missing in the cache are encoded first; each of W processes encodes every W-th
    shard. All processes must call this function. Raises InputError if a vector is not finite in
    float16.
    """
    queries = train_set.queries

    def read(start: int, stop: int) -> tuple[list[str], list[str]]:
        rows = queries[start:stop]
        return rows["id"], rows["text"]

    texts = (
        Texts.of_corpus(train_set.passages)
        if kind == "passage"
        else Texts(kind, len(queries), read)
    )
    key = f"{encoder.fingerprint(kind)} {texts.fingerprint}"
    name = hashlib.sha256(key.encode()).hexdigest()[:32]
    folder = cache_folder() / f"{kind}_vectors" / name
    # if another run encodes the same texts, process 0 waits for it
    with (
        waiting_lock(cache_folder() / "locks" / f"{name}.lock") if group.is_main else nullcontext()
    ):
        group.barrier()
        encode_texts(encoder, texts, folder, group, dtype="float16", batch_tokens=batch_tokens)
        group.barrier()
    return StoredVectors(ShardFolder(folder, encoder.fingerprint(kind), texts.fingerprint), name)


def encode(
    model: EncoderConfig | str | Path,
    source: str | Path,
    output: str | Path,
    *,
    kind: str = "passage",
    dtype: str = "float32",
    shard_size: int = 50_000,
    batch_tokens: int | None = None,
    format: str = "npy",
    text: bool = False,
    policy: DataPolicy = DEFAULT_POLICY,
) -> str:
    """Encode a corpus or queries into shards in the folder ``output``.

    Return a sentence that describes the result, with the precision of the vectors.

    source: data set, as a path or a name. kind: ``passage`` or ``query``. dtype, shard_size,
    batch_tokens, format, text: see ``encode_texts``. Processes started by torchrun divide the
    shards among themselves. A second call encodes only the missing shards.
    """
    model = EncoderConfig.of(model)
    refuse_input_as_output(output, source, model.model, folder=True)
    # after this block, the processes do not wait for each other
    with joined(model.timeout_minutes) as group, group.main_first():
        dataset = open_dataset(source, policy=policy)
        texts = (
            Texts.of_corpus(dataset.corpus)
            if kind == "passage"
            else Texts.of_queries(dataset.queries)
        )
    encoder = load_encoder_of(model, kind, lambda: texts, output)
    finished = encode_texts(
        encoder,
        texts,
        output,
        group,
        dtype=dtype,
        shard_size=shard_size,
        batch_tokens=batch_tokens,
        format=format,
        text=text,
    )
    if finished:
        return (
            f"{output}: {texts.rows} {kind} vectors of {encoder.dim} numbers, encoded in "
            f"{encoder.precision}"
        )
    return (
        f"{output}: process {group.rank} of {group.world} has finished its shards; other "
        "processes are still encoding"
    )

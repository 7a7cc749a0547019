"""Encode texts into vectors, in memory or as shards on disk.

The shards of a training set are in the cache folder.

Several processes can encode the shards of one folder together. A restart encodes only the missing
shards.
"""

import hashlib
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from datasets import Dataset

from contaccum.config.commands import DataPolicy, EncoderConfig, SearchConfig, TextKind
from contaccum.config.load import converted
from contaccum.data.dataset import DEFAULT_POLICY, open_dataset
from contaccum.data.train_set import TrainSet
from contaccum.errors import InputError
from contaccum.formats.records import Passage
from contaccum.retrieval.shards import (
    MANIFEST,
    EncodingJob,
    Shard,
    ShardFolder,
    Shards,
    damage,
    finished_shards,
    refuse_infinite,
    saved_precision,
    started_format,
    write_manifest,
    write_shard,
)
from contaccum.runtime.files import cache_folder, remove_folder
from contaccum.runtime.launch import is_main
from contaccum.runtime.locks import folder_lock, lock_if_free, waiting_lock
from contaccum.runtime.processes import ALONE, Processes, joined
from contaccum.runtime.progress import progress_bar
from contaccum.runtime.units import counted, gigabytes

if TYPE_CHECKING:
    from contaccum.encoder import DualEncoder

# number of texts in one call of the encoder; a multiple of the texts that it sorts by length
# together
CHUNK = 16_384
CACHE_BYTES = 4 * 10**9  # maximum size of all vectors in the cache


@dataclass(frozen=True)
class Texts:
    """Ids and texts of a corpus or of queries, read in slices to save memory."""

    kind: str  # query or passage
    table: Dataset  # columns id and text; passages also have a title

    @classmethod
    def of_queries(cls, queries: Mapping[str, str]) -> "Texts":
        """Make Texts from queries (id -> text), in the same order."""
        columns = {"id": list(queries), "text": list(queries.values())}
        return cls("query", Dataset.from_dict(columns))

    def read(self, start: int, stop: int) -> tuple[list[str], list[str]]:
        """Return the ids and the texts of the rows ``start`` to ``stop`` - 1.

        The title and the text of a passage are joined. Texts are stripped, as in training.
        """
        rows = self.table[start:stop]
        if self.kind == "query":
            return rows["id"], [text.strip() for text in rows["text"]]
        return rows["id"], [passage.content for passage in Passage.of_columns(rows)]

    @property
    def rows(self) -> int:
        return len(self.table)

    @property
    def unit(self) -> str:
        return "queries" if self.kind == "query" else "passages"

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
    choice: "EncoderConfig | DualEncoder",
    kind: str,
    texts: Callable[[], Texts],
    *folders: str | Path | None,
) -> "DualEncoder":
    """Load an encoder, in a precision that fits texts, or vectors that exist already.

    An encoder that is loaded already is returned.

    kind: ``query`` or ``passage``. texts: the texts of this kind to encode. folders: folders with
    vectors or an index of these texts. With the precision ``auto``, the encoder has the precision
    of the first folder that has one; otherwise, the first texts choose (see ``load_encoder``).
    """
    from contaccum.encoder.precision import SAMPLE, load_encoder

    if not isinstance(choice, EncoderConfig):
        if not hasattr(choice, "encode_queries"):
            raise InputError(
                f"model is a {type(choice).__name__}, expected a DualEncoder, or the folder or the "
                "name of an encoder"
            )
        return choice
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
    progress: Callable[[int], object],
    keep_texts: bool = False,
) -> Shard:
    """Encode the rows ``start`` to ``stop`` - 1. Return a shard with their ids and float32 vectors.

    progress: called with the number of texts. keep_texts: also put the texts into the shard.
    """
    ids: list[str] = []
    kept: list[str] = []
    encode = encoder.encode_queries if texts.kind == "query" else encoder.encode_passages
    vectors = np.empty((stop - start, encoder.dim), dtype=np.float32)
    for first in range(start, stop, CHUNK):
        last = min(stop, first + CHUNK)
        chunk_ids, content = texts.read(first, last)
        ids += chunk_ids
        kept += content if keep_texts else []
        vectors[first - start : last - start] = encode(content, batch_tokens, progress)
    return Shard(ids, vectors, kept if keep_texts else None)


def encode_in_memory(
    encoder: "DualEncoder",
    texts: Texts,
    batch_tokens: int | None = None,
    start: int = 0,
    stop: int | None = None,
) -> Shard:
    """Encode the rows ``start`` to ``stop`` - 1, or all rows, into one float32 shard in memory.

    The vectors take rows * dimension * 4 bytes. Raises InputError with the id of the first text
    whose vector contains NaN or infinity.
    """
    stop = texts.rows if stop is None else stop
    with (
        encoder.in_lockstep(texts.kind),
        progress_bar(stop - start, "encoding", texts.unit) as bar,
    ):
        shard = encode_shard(encoder, texts, start, stop, batch_tokens, bar.update)
    refuse_infinite(texts.kind, shard.ids, shard.vectors)
    return shard


def passage_vectors(
    encoder: "DualEncoder", corpus: Dataset, settings: SearchConfig, group: Processes = ALONE
) -> tuple[Shards, int]:
    """Return the vectors of the corpus, from a folder or in memory, and the first row number.

    If ``settings.embeddings`` names a folder, missing shards are encoded first, and the vectors are
    read from the folder. Otherwise one process uses the cache (see ``cached_vectors``), and several
    processes encode the corpus in memory. Each of W processes gets one of W parts of consecutive
    rows.
    """
    texts = Texts("passage", corpus)
    if settings.embeddings is not None:
        fingerprint = encoder.fingerprint(texts.kind, settings.batch_tokens)
        # a folder is used, and continued, with any shard size, dtype and format
        if not (Path(settings.embeddings) / MANIFEST).is_file():
            encode_texts(
                encoder,
                texts,
                settings.embeddings,
                group,
                batch_tokens=settings.batch_tokens,
                fingerprint=fingerprint,
                **started_format(settings.embeddings),
            )
        group.barrier()
        folder = ShardFolder(
            settings.embeddings, fingerprint, texts.fingerprint, rank=group.rank, world=group.world
        )
        return folder, folder.first_row
    if settings.cache and group.world == 1:
        size = texts.rows * encoder.dim * 4
        if size <= CACHE_BYTES:
            return cached_vectors(encoder, texts, batch_tokens=settings.batch_tokens)[1], 0
        print(
            f"contaccum: {gigabytes(size)} of vectors are above the limit of the cache, "
            f"{gigabytes(CACHE_BYTES)}; use --embeddings to keep them for other commands",
            file=sys.stderr,
        )
    start, stop = (texts.rows * rank // group.world for rank in (group.rank, group.rank + 1))
    return [encode_in_memory(encoder, texts, settings.batch_tokens, start, stop)], start


def cached_vectors(
    encoder: "DualEncoder",
    texts: Texts,
    group: Processes = ALONE,
    *,
    dtype: str = "float32",
    batch_tokens: int | None = None,
) -> tuple[str, list[Shard]]:
    """Return the name of the texts' folder in the cache, and the vectors.

    Commands with the same encoder and the same texts share them; missing vectors are encoded. If
    the cache is full, the vectors that were not used for the longest time are deleted. All
    processes of ``group`` must call this function; each of W processes encodes every W-th shard.
    Raises InputError if a vector is not finite.
    """
    fingerprint = encoder.fingerprint(texts.kind, batch_tokens)
    key = f"{fingerprint} {texts.fingerprint} {texts.kind} {dtype}"
    if (products := torch.get_float32_matmul_precision()) != "highest":
        key += f" {products}"  # such as TF32 in training
    name = hashlib.sha256(key.encode()).hexdigest()[:32]
    folder = cache_folder() / "vectors" / name
    locks = cache_folder() / "locks"
    # if another command encodes the same texts, process 0 waits for it
    with waiting_lock(locks / f"{name}.lock") if group.is_main else nullcontext():
        if group.is_main and not (folder / MANIFEST).is_file():
            size = texts.rows * encoder.dim * np.dtype(dtype).itemsize
            print(
                f"contaccum: encoding {texts.rows:,} {texts.unit}; other commands will find the "
                f"vectors in the cache ({size / 1e6:,.2f} MB, limit {CACHE_BYTES / 1e6:,.0f} MB)",
                file=sys.stderr,
            )
            make_room(size, folder)
        group.barrier()
        encode_texts(
            encoder,
            texts,
            folder,
            group,
            dtype=dtype,
            batch_tokens=batch_tokens,
            fingerprint=fingerprint,
        )
        group.barrier()
        os.utime(folder)
        return name, list(ShardFolder(folder))


def make_room(size: int, folder: Path) -> None:
    """Delete vectors in the cache until ``size`` bytes more fit: the longest unused first.

    folder: where the new vectors go. Vectors that another command is encoding are kept.
    """
    locks = cache_folder() / "locks"
    with waiting_lock(locks / "vectors.lock"):
        others = []  # time of the last use, size and folder
        for other in folder.parent.glob("*"):
            with suppress(FileNotFoundError):  # another program has just deleted a file
                bytes_of = sum(file.stat().st_size for file in other.glob("*"))
                if other != folder:
                    others.append((other.stat().st_mtime, bytes_of, other))
        total = size + sum(bytes_of for _, bytes_of, _ in others)
        for _, bytes_of, other in sorted(others):
            if total <= CACHE_BYTES:
                return
            with lock_if_free(locks / f"{other.name}.lock") as free:
                if free:
                    with suppress(FileNotFoundError):
                        remove_folder(other)
                    total -= bytes_of


def encode_texts(
    encoder: "DualEncoder",
    texts: Texts,
    output_dir: str | Path,
    group: Processes = ALONE,
    *,
    dtype: str = "float32",
    shard_size: int | None = None,
    batch_tokens: int | None = None,
    format: str = "npy",
    text: bool = False,
    fingerprint: str | None = None,
) -> bool:
    """Encode texts into shards in ``output_dir``.

    Return True if the shards of all processes are finished, else False.

    group: processes that share the work; each of W processes encodes every W-th shard. shard_size:
    None: that of the finished shards, else CHUNK. format: ``npy`` or ``parquet``. text: whether
    Parquet files also contain the texts. fingerprint: that of the encoder, if the caller has it,
    because hashing the weights may take seconds. The process that finishes last writes the
    manifest. Finished shards are reused. Damaged shards are encoded again with a warning. Memory
    holds one shard.

    Raises InputError if a vector is not finite, or if the folder has the embeddings of a different
    job (texts, encoder, dtype, shard size or format).
    """
    folder = Path(output_dir)
    if shard_size is None:
        shard_size = started_format(folder).get("shard_size", CHUNK)
    job = EncodingJob(
        kind=texts.kind,
        encoder=fingerprint or encoder.fingerprint(texts.kind, batch_tokens),
        source=texts.fingerprint,
        rows=texts.rows,
        shard_size=shard_size,
        dtype=dtype,
        format=format,
        text=text,
    )
    finished = finished_shards(folder, job)
    # process 0 holds the lock for all processes of the launch; each process writes different shards
    with folder_lock(folder) if group.is_main else nullcontext():
        missing = []
        for number in range(group.rank, job.count, group.world):
            fault = damage(folder, finished[number]) if number in finished else None
            if fault:
                warnings.warn(f"{fault}; shard {number} is encoded again", stacklevel=2)
            if fault or number not in finished:
                missing.append(number)
        rows = sum(stop - start for start, stop in map(job.span, missing))
        with progress_bar(rows, "encoding", texts.unit) as bar:
            for number in missing:
                start, stop = job.span(number)
                shard = encode_shard(
                    encoder, texts, start, stop, batch_tokens, bar.update, job.text
                )
                write_shard(folder, number, job, shard)
        return write_manifest(folder, job)


class StoredVectors:
    """Memory-mapped vectors of n texts, float16."""

    def __init__(self, name: str, shards: list[Shard]) -> None:
        self.name = name  # hash of the texts and the encoder
        self.shards = [shard.vectors for shard in shards]

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the vectors of the texts at the positions ``rows``.

        (k,) int64 -> (k, d) float16, both on the CPU.
        """
        shard_size, dimension = self.shards[0].shape
        shard_of, row_of = np.divmod(rows.numpy(), shard_size)
        found = np.empty((len(rows), dimension), dtype=np.float16)
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

    kind: ``query`` or ``passage``. See ``cached_vectors``.
    """
    texts = Texts(kind, train_set.passages if kind == "passage" else train_set.queries)
    return StoredVectors(
        *cached_vectors(encoder, texts, group, dtype="float16", batch_tokens=batch_tokens)
    )


def encode(
    model: "EncoderConfig | DualEncoder | str | Path",
    source: str | Path,
    output: str | Path,
    *,
    kind: str | None = None,
    dtype: str = "float32",
    shard_size: int | None = None,
    batch_tokens: int | None = None,
    format: str = "npy",
    text: bool = False,
    policy: DataPolicy = DEFAULT_POLICY,
) -> str:
    """Encode a corpus or queries into shards in the folder ``output``.

    Return a sentence that describes the result, with the precision of the vectors.

    model: an encoder, or the name or config of one. source: data set, as a path or a name. kind:
    ``passage`` or ``query``. None: ``query`` for a file of queries, else ``passage``. dtype,
    shard_size, batch_tokens, format, text: see ``encode_texts``. Processes started by torchrun
    divide the shards among themselves. A second call encodes only the missing shards. Raises
    InputError if ``text`` is given without the format ``parquet``.
    """
    if text and format != "parquet":
        raise InputError(
            f"text needs format parquet, but format is {format}; npy shards have no texts"
        )
    converted(TextKind | None, kind, "kind")
    if isinstance(model, str | Path):
        model = EncoderConfig.of(model)
    for each in (source, getattr(model, "model", "")):
        if os.path.exists(each) and os.path.exists(output) and os.path.samefile(each, output):
            raise InputError(f"{output}: is an input of this call; choose another output")
    timeout = getattr(model, "timeout_minutes", EncoderConfig.timeout_minutes)
    # after this block, the processes do not wait for each other
    with joined(timeout) as group, group.main_first():
        dataset = open_dataset(source, policy=policy)
        if kind is None:
            kind = "query" if dataset.kind == "queries" else "passage"
        if kind == "passage":
            texts = Texts(kind, dataset.corpus)
        else:
            texts = Texts.of_queries(dataset.queries)
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
            f"{output}: {counted(texts.rows, f'{kind} vector')} of {encoder.dim} numbers, encoded "
            f"in {encoder.precision}"
        )
    return (
        f"{output}: process {group.rank} of {group.world} has finished its shards; other "
        "processes are still encoding"
    )

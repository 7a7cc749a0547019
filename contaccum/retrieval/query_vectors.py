"""Encode all training queries and passages once, and store the vectors in the cache as float16 shards."""

import hashlib
from contextlib import nullcontext
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from contaccum.data.train_set import TrainSet
from contaccum.retrieval.encode import Texts, encode_texts
from contaccum.retrieval.shards import ShardFolder
from contaccum.runtime.files import cache_folder
from contaccum.runtime.locks import waiting_lock
from contaccum.runtime.processes import ALONE, Processes

if TYPE_CHECKING:
    from contaccum.encoder import DualEncoder


class StoredVectors:
    """Memory-mapped vectors of n texts, float16."""

    def __init__(self, folder: ShardFolder, name: str) -> None:
        self.name = name  # hash of the texts and the encoder
        self.shards = [shard.vectors for shard in folder]
        self._ends = np.cumsum([len(vectors) for vectors in self.shards])
        self._dim = folder.dimension

    def __call__(self, rows: Tensor) -> Tensor:
        """Return the vectors of the texts at the positions ``rows``: (k,) int64 -> (k, d) float16, both on the CPU."""
        numbers = rows.numpy()
        found = np.empty((len(numbers), self._dim), dtype=np.float16)
        shard_of = np.searchsorted(self._ends, numbers, side="right")
        for shard in np.unique(shard_of).tolist():
            chosen, vectors = shard_of == shard, self.shards[shard]
            found[chosen] = vectors[numbers[chosen] - (self._ends[shard] - len(vectors))]
        return torch.from_numpy(found)


def query_vectors(
    encoder: "DualEncoder", train_set: TrainSet, group: Processes = ALONE, batch_tokens: int | None = None
) -> StoredVectors:
    """Return the vectors of the n queries of a training set, in their order. See ``_stored_vectors``."""
    queries = train_set.queries

    def read(start: int, stop: int) -> tuple[list[str], list[str]]:
        rows = queries[start:stop]
        return rows["id"], rows["text"]

    return _stored_vectors(encoder, Texts("query", len(queries), read), group, batch_tokens)


def passage_vectors(
    encoder: "DualEncoder", train_set: TrainSet, group: Processes = ALONE, batch_tokens: int | None = None
) -> StoredVectors:
    """Return the vectors of the n passages of a training set, in their order. See ``_stored_vectors``."""
    return _stored_vectors(encoder, Texts.of_corpus(train_set.passages), group, batch_tokens)


def _stored_vectors(encoder: "DualEncoder", texts: Texts, group: Processes, batch_tokens: int | None) -> StoredVectors:
    """Return the vectors of texts, in their order.

    The key of the cache is a hash of the texts and the encoder. Missing shards are encoded first; each of W processes encodes
    every W-th shard. All processes must call this function. Raises InputError if a vector is not finite in float16.
    """
    key = f"{encoder.fingerprint(texts.kind)} {texts.fingerprint}"
    name = hashlib.sha256(key.encode()).hexdigest()[:32]
    folder, first = cache_folder() / f"{texts.kind}_vectors" / name, group.rank == 0
    # if another run encodes the same texts, process 0 waits for it
    with waiting_lock(cache_folder() / "locks" / f"{name}.lock") if first else nullcontext():
        group.barrier()
        encode_texts(
            encoder, texts, folder, dtype="float16", batch_tokens=batch_tokens, rank=group.rank, world=group.world
        )
        group.barrier()
    return StoredVectors(ShardFolder(folder, encoder.fingerprint(texts.kind), texts.fingerprint), name)

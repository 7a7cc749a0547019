"""Build, save, load and search faiss indexes, on the CPU or on GPUs."""

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from contaccum.errors import InputError, library_errors
from contaccum.retrieval.exact import best_first
from contaccum.retrieval.faiss_library import GPU_LIMIT, load_faiss, reason_of, search_gpus
from contaccum.retrieval.shards import (
    MANIFEST,
    Shards,
    count_rows,
    require_origin,
    row_blocks,
)
from contaccum.runtime.files import (
    read_json,
    refuse_other_files,
    sha256_of,
    whole_folder,
    write_json,
)
from contaccum.runtime.progress import progress_bar
from contaccum.runtime.units import counted

VERSION = 1
INDEX_FILE = "index.faiss"
SEED = 0  # of the random sample of vectors that an index is trained on


@dataclass(frozen=True)
class Origin:
    """Origin of an index: factory string, and fingerprints of the encoder and the texts."""

    factory: str  # string for faiss.index_factory, such as HNSW32
    encoder: str = ""  # DualEncoder.fingerprint of the passage encoder; empty if it is unknown
    source: str = ""  # fingerprint of the ids and texts of the passages; empty if it is unknown


@dataclass(frozen=True)
class _Manifest:
    origin: Origin
    sha256: str  # SHA-256 of the index file


class Index:
    """A faiss index for inner products. Its rows have the numbers of the passages in the corpus."""

    def __init__(self, index: Any, origin: Origin, device: str = "auto") -> None:
        """index: the index of faiss. device: device of the encoder; ``cpu`` uses no GPU."""
        self.index = index
        self.origin = origin
        self.device = device
        self._on_gpus: Any = None

    def __len__(self) -> int:
        return int(self.index.ntotal)

    @classmethod
    def build(cls, shards: Shards, origin: Origin, device: str = "auto") -> "Index":
        """Build an index from shards.

        Memory holds the index, one block and, for training, a sample of rows. An index that needs
        training, such as IVF or PQ, is trained on a random sample, which is always the same. Graphs
        (HNSW, NSG) are built with one thread. This is slow for more than a million rows, but
        several threads would build a different graph each time. Raises InputError if the factory
        string is invalid, or if there are too few passages to train on.
        """
        faiss = load_faiss()
        factory = origin.factory
        rows = count_rows(shards)
        if not rows:
            raise InputError(f"index {factory!r}: there are no passages; expected at least one")
        if re.search(r"(HNSW|NSG)0(\D|$)", factory):  # faiss would end the process
            raise InputError(f"index {factory!r}: has no links; use another index, such as HNSW32")
        dimension = shards[0].vectors.shape[1]
        problem = f"index {factory!r}: faiss cannot build it for {counted(rows, 'passage')}"
        with library_errors(problem, RuntimeError, MemoryError, reason=reason_of):
            index = faiss.index_factory(dimension, factory, faiss.METRIC_INNER_PRODUCT)
            if not index.is_trained:
                index.train(_sample(shards, rows, training_rows(faiss, index)))
            is_graph = "HNSW" in factory or "NSG" in factory
            bar = progress_bar(rows, "adding to the index", "vectors")
            with bar, _one_thread(faiss) if is_graph else nullcontext():
                for vectors in row_blocks(shards, np.float32):
                    index.add(vectors)
                    bar.update(len(vectors))
            queries = np.ascontiguousarray(shards[0].vectors[:8], dtype=np.float32)
            scores, found = index.search(queries, min(10, rows))
        # some indexes, such as HNSW8,PQ4, sort by distance: the worst passages would come first
        scores = np.where(found >= 0, scores, -np.inf)
        if (scores[:, :-1] < scores[:, 1:]).any():
            raise InputError(
                f"index {factory!r}: faiss ranks its results by distance, not by inner product; "
                "use another index, such as HNSW32"
            )
        return cls(index, origin, device)

    @classmethod
    def load_or_build(
        cls, folder: str | Path, origin: Origin, shards: Callable[[], Shards], device: str = "auto"
    ) -> "Index":
        """Load the index in ``folder``, or build one from ``shards`` and save it there.

        Raises InputError if the folder has files but no index, or an index with another origin.
        """
        if (Path(folder) / MANIFEST).is_file():
            return cls.load(folder, origin, device)
        refuse_other_files(Path(folder), "an index", INDEX_FILE, MANIFEST)  # before the build
        index = cls.build(shards(), origin, device)
        index.save(folder)
        return index

    def set_search_params(self, params: str) -> None:
        """Set search parameters of faiss, such as ``nprobe=16,efSearch=128``.

        Raises InputError if a parameter is unknown.
        """
        if not params:
            return
        problem = (
            f"search_params {params!r}: faiss cannot use them with index {self.origin.factory!r}"
        )
        with library_errors(problem, RuntimeError, reason=reason_of):
            load_faiss().ParameterSpace().set_index_parameters(self.index, params)
        self._on_gpus = None  # the copies on the GPUs have the previous values

    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return scores, (n, m) float32, and row numbers, (n, m) int64, best first.

        m is k, or ``len(self)`` if that is smaller.

        If the search finds fewer than m rows for a query, the row numbers after the last found row
        are -1.
        """
        queries = np.ascontiguousarray(queries, dtype=np.float32)
        count = min(k, len(self))
        gpus = search_gpus(self.device) if k <= GPU_LIMIT else []
        if gpus and self._on_gpus is not self.index:
            try:
                self._on_gpus = self._on_gpus or self._gpu_copies(gpus)
                scores, rows = self._on_gpus.search(queries, count)
                return best_first(scores, rows, k)
            except RuntimeError as error:  # such as too little memory, or no GPU version (HNSW)
                self._on_gpus = self.index
                warnings.warn(
                    f"index {self.origin.factory!r}: faiss cannot search it on the GPU "
                    f"({reason_of(error)}); the CPU searches instead",
                    stacklevel=3,
                )
        problem = f"index {self.origin.factory!r}: faiss refused the search"
        with library_errors(problem, RuntimeError, reason=reason_of):  # such as for nprobe=0
            scores, rows = self.index.search(queries, count)
        return best_first(scores, rows, k)

    def _gpu_copies(self, gpus: list[int]) -> Any:
        """Return the index divided among the GPUs."""
        faiss = load_faiss()
        torch.cuda.empty_cache()  # faiss cannot use memory that torch has cached
        options = faiss.GpuMultipleClonerOptions()
        options.shard = True
        return faiss.index_cpu_to_gpus_list(self.index, options, gpus)

    def save(self, folder: str | Path) -> None:
        """Write the index and a manifest with its hash.

        The folder appears only when it is complete. Raises InputError if it has other files.
        """
        refuse_other_files(Path(folder), "an index", INDEX_FILE, MANIFEST)
        with whole_folder(folder) as part:
            load_faiss().write_index(self.index, str(part / INDEX_FILE))
            manifest = _Manifest(self.origin, sha256_of(part / INDEX_FILE))
            write_json(part / MANIFEST, {"format_version": VERSION, **asdict(manifest)})

    @classmethod
    def load(
        cls, folder: str | Path, expected: Origin | None = None, device: str = "auto"
    ) -> "Index":
        """Read a saved index. The hash of the index file is checked before faiss reads the file.

        Raises InputError if a file is missing or damaged, if the manifest is invalid, or if
        ``expected`` is given and the index has another origin.
        """
        path = Path(folder) / MANIFEST
        manifest = read_json(path, _Manifest, version=VERSION)
        if expected is not None:
            require_origin(path, asdict(manifest.origin), asdict(expected))
        file = Path(folder) / INDEX_FILE
        if not file.is_file() or sha256_of(file) != manifest.sha256:
            raise InputError(
                f"{file}: missing or damaged (its SHA-256 is not the one in {path}). Delete the "
                "folder to build the index again."
            )
        return cls(load_faiss().read_index(str(file)), manifest.origin, device)


def training_rows(faiss: ModuleType, index: Any) -> int:
    """Return the rows to train an index on: 64 for each list, but at least 20,000.

    The minimum is enough for a product quantizer, which needs 9,984 rows.
    """
    try:
        lists = faiss.extract_index_ivf(index).nlist
    except RuntimeError:  # this index has no inverted lists
        lists = 0
    return max(20_000, 64 * lists)


def _sample(shards: Shards, rows: int, wanted: int) -> np.ndarray:
    chosen = np.sort(np.random.default_rng(SEED).choice(rows, min(rows, wanted), replace=False))
    vectors = []
    start = 0
    for shard in shards:
        stop = start + len(shard.vectors)
        local = chosen[(chosen >= start) & (chosen < stop)] - start
        vectors.append(shard.vectors[local].astype(np.float32))
        start = stop
    return np.concatenate(vectors)


@contextmanager
def _one_thread(faiss: ModuleType) -> Iterator[None]:
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)

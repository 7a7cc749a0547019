"""Build, save, load and search faiss indexes, on the CPU or on GPUs."""

import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm

from contaccum.errors import InputError, library_errors
from contaccum.retrieval.exact import best_first
from contaccum.retrieval.faiss_library import (
    GPU_LIMIT,
    LONGEST,
    load_faiss,
    reason_of,
    search_gpus,
)
from contaccum.retrieval.shards import MANIFEST, Shards, count_rows, row_blocks
from contaccum.runtime.files import (
    read_json,
    require_name,
    sha256_of,
    sweep,
    whole_folder,
    write_json,
)
from contaccum.runtime.locks import waiting_lock

FORMAT = "contaccum-index"
VERSION = 1

INDEX_FILE = "index.faiss"


@dataclass(frozen=True)
class Origin:
    """Origin of an index: settings, and fingerprints of the encoder and the texts."""

    factory: str  # string for faiss.index_factory, such as HNSW32
    seed: int = 0  # seed of the random sample of vectors that the index was trained on
    encoder: str = ""  # DualEncoder.fingerprint of the passage encoder; empty if it is unknown
    source: str = ""  # fingerprint of the ids and texts of the passages; empty if it is unknown


@dataclass(frozen=True)
class _Manifest:
    format: str
    origin: Origin
    dimension: int
    rows: int
    sha256: str  # SHA-256 of the index file

    def __post_init__(self) -> None:
        """Raise ValueError if this is not the manifest of an index."""
        if self.format != FORMAT:
            raise ValueError(
                f"found format {self.format!r}; expected {FORMAT!r} in the manifest of an index"
            )


class Index:
    """A faiss index for inner products. Its rows have the numbers of the passages in the corpus."""

    def __init__(self, index: Any, origin: Origin) -> None:
        self.index = index
        self.origin = origin
        self.device = "auto"
        """Device of the encoder. With ``cpu``, the search uses no GPU."""
        self._on_gpus: Any = None

    @property
    def dimension(self) -> int:
        return int(self.index.d)

    def __len__(self) -> int:
        return int(self.index.ntotal)

    @classmethod
    def build(cls, shards: Shards, origin: Origin | None = None) -> "Index":
        """Build an index from shards.

        Memory holds the index, one block and, for training, a sample of rows. An index that needs
        training, such as IVF or PQ, is trained on a random sample with the seed ``origin.seed``.
        Graphs (HNSW, NSG) are built with one thread. This is slow for more than a million rows, but
        several threads would build a different graph each time. Raises InputError if the factory
        string is invalid, or if there are too few passages to train on.
        """
        faiss = load_faiss()
        origin = origin or Origin("Flat")
        factory, seed = origin.factory, origin.seed
        rows = count_rows(shards)
        if rows == 0:
            raise InputError("no passages to index: the corpus is empty")
        dimension = shards[0].vectors.shape[1]
        if not re.fullmatch(rf"[ -~]{{1,{LONGEST}}}", factory):
            found = f"{len(factory)} characters" if len(factory) > LONGEST else repr(factory)
            raise InputError(
                f"factory: found {found}; expected a faiss index_factory string of 1 to {LONGEST} "
                "ASCII characters"
            )
        problem = f"index {factory!r}: faiss cannot build it for {rows} passages"
        with library_errors(problem, RuntimeError, MemoryError, reason=reason_of):
            index = faiss.index_factory(dimension, factory, faiss.METRIC_INNER_PRODUCT)
            if not index.is_trained:
                index.train(_sample(shards, rows, training_rows(faiss, index), seed))
            blocks: Iterable[np.ndarray] = (
                block.vectors for block in row_blocks(shards, np.float32)
            )
            if "NSG" in factory:  # an NSG index cannot grow, so it gets all rows at once
                blocks = [np.concatenate(list(blocks))]
            is_graph = "HNSW" in factory or "NSG" in factory
            bar = tqdm(total=rows, desc="index", unit="row", disable=None)
            with bar, _one_thread(faiss) if is_graph else nullcontext():
                for vectors in blocks:
                    if "IDMap" in factory:  # an IDMap index needs ids; it gets the row numbers
                        index.add_with_ids(
                            vectors, np.arange(index.ntotal, index.ntotal + len(vectors))
                        )
                    else:
                        index.add(vectors)
                    bar.update(len(vectors))
            _check_scores(index, factory, shards[0].vectors[:8])
        return cls(index, origin)

    @classmethod
    def load_or_build(
        cls, folder: str | Path | None, origin: Origin, shards: Callable[[], Shards]
    ) -> "Index":
        """Load the index in ``folder``.

        If the folder has no index, build one from ``shards`` and save it there.

        If ``folder`` is None, the index is built but not saved. Raises InputError if the folder
        contains other files, or an index with a different origin.
        """
        if folder is None:
            return cls.build(shards(), origin)
        folder = Path(folder)
        if (folder / MANIFEST).is_file():
            return cls.load(folder, origin)
        with waiting_lock(
            require_name(folder).with_name(f".{folder.name}.lock"),
            f", which builds the index {folder}",
        ):
            sweep(folder.parent, folder.name)  # removes files of killed calls
            if (folder / MANIFEST).is_file():  # another process has built the index meanwhile
                return cls.load(folder, origin)
            _check_target(folder)  # check before the slow build
            index = cls.build(shards(), origin)
            index.save(folder)
        return index

    def set_search_params(self, params: str) -> None:
        """Set search parameters of faiss, such as ``nprobe=16,efSearch=128``.

        Raises InputError if a parameter is unknown, or so small that the index would find nothing.
        """
        if not params:
            return
        if len(params) > LONGEST:
            raise InputError(
                f"search_params: found {len(params)} characters; at most {LONGEST} are allowed"
            )
        for name, value in re.findall(r"(\w+)=([-+.\w]+)", params):
            least = 1 if name.endswith(("nprobe", "efSearch")) else 0
            try:
                number = float(value)
            except ValueError:
                number = float("nan")
            if not number >= least:  # faiss accepts a smaller value, but then finds nothing
                raise InputError(
                    f"search_params {params!r}: {name} is {value}; expected a number of at least "
                    f"{least}"
                )
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
        gpus = search_gpus(self.device) if k <= GPU_LIMIT else []
        index = self._gpu_copies(gpus) if gpus else self.index
        try:
            scores, rows = index.search(queries, min(k, len(self)))
        except RuntimeError as error:
            if index is self.index:
                raise InputError(
                    f"index {self.origin.factory!r}: faiss refused the search ({reason_of(error)})"
                ) from error
            self._fall_back_to_cpu(error)
            return self.search(queries, k)
        return best_first(scores, rows, k)

    def _gpu_copies(self, gpus: list[int]) -> Any:
        """Return the index divided among the GPUs.

        Return the CPU index if faiss has no GPU version of it (such as HNSW).
        """
        if self._on_gpus is None:
            faiss = load_faiss()
            torch.cuda.empty_cache()  # faiss cannot use memory that torch has cached
            options = faiss.GpuMultipleClonerOptions()
            options.shard = True
            try:
                self._on_gpus = faiss.index_cpu_to_gpus_list(self.index, options, gpus)
            except RuntimeError as error:
                self._fall_back_to_cpu(error)
        return self._on_gpus

    def _fall_back_to_cpu(self, error: RuntimeError) -> None:
        """Warn about an error on the GPUs, such as too little memory, and search on the CPU."""
        factory = self.origin.factory
        warnings.warn(
            f"index {factory!r}: faiss cannot search it on the GPU ({reason_of(error)}); the CPU "
            "searches instead",
            stacklevel=4,
        )
        self._on_gpus = self.index

    def save(self, folder: str | Path) -> None:
        """Write the index and a manifest with its hash.

        The folder appears only when it is complete.
        """
        _check_target(Path(folder))
        with whole_folder(folder) as part:
            load_faiss().write_index(self.index, str(part / INDEX_FILE))
            manifest = {
                "format": FORMAT,
                "format_version": VERSION,
                "origin": asdict(self.origin),
                "dimension": self.dimension,
                "rows": len(self),
                "sha256": sha256_of(part / INDEX_FILE),
            }
            write_json(part / MANIFEST, manifest)

    @classmethod
    def load(cls, folder: str | Path, expected: Origin | None = None) -> "Index":
        """Read a saved index. The hash of the index file is checked before faiss reads the file.

        Raises InputError if a file is missing or damaged, if the manifest is invalid, or if
        ``expected`` is given and the index has another origin.
        """
        path = Path(folder) / MANIFEST
        manifest = read_json(path, _Manifest, version=VERSION)
        for name, value in asdict(expected).items() if expected else ():
            if (found := getattr(manifest.origin, name)) != value:
                raise InputError(
                    f"{path}: this index belongs to different vectors or settings ({name} "
                    f"{found!r}, but now {value!r}). Choose another folder, or delete this one."
                )
        file = Path(folder) / INDEX_FILE
        if not file.is_file() or sha256_of(file) != manifest.sha256:
            raise InputError(
                f"{file}: missing or damaged (its SHA-256 is not the one in {path}). Delete the "
                "folder to build the index again."
            )
        with library_errors(
            f"{file}: faiss cannot read it as an index", RuntimeError, reason=reason_of
        ):
            index = load_faiss().read_index(str(file))
        if (index.d, index.ntotal) != (manifest.dimension, manifest.rows):
            raise InputError(
                f"{folder}: the index has {index.ntotal} vectors of dimension {index.d}, but "
                f"{path} has {manifest.rows} vectors of dimension {manifest.dimension}. Delete the "
                "folder to build the index again."
            )
        return cls(index, manifest.origin)


def _check_target(folder: Path) -> None:
    """Raise InputError unless the folder is missing, empty, or has the manifest of an index."""
    if (folder / MANIFEST).is_file():
        read_json(folder / MANIFEST, _Manifest)
    elif folder.is_file():
        raise InputError(f"{folder}: is a file; expected a folder for an index")
    elif folder.is_dir() and any(path.name != ".DS_Store" for path in folder.iterdir()):
        raise InputError(
            f"{folder}: contains files that do not belong to an index; choose an empty folder or "
            "the folder of an index"
        )


def _check_scores(index: Any, factory: str, queries: np.ndarray) -> None:
    """Raise InputError if the index sorts by distance instead of inner product."""
    scores, rows = index.search(
        np.ascontiguousarray(queries, dtype=np.float32), min(10, index.ntotal)
    )
    found = np.where(rows >= 0, scores, -np.inf)
    if (found[:, :-1] < found[:, 1:]).any():
        raise InputError(
            f"index {factory!r}: faiss ranks its results by distance, not by inner product; use "
            "another index, such as HNSW32"
        )


def training_rows(faiss: ModuleType, index: Any) -> int:
    """Return the rows to train an index on: 64 for each list, but at least 20,000.

    The minimum is enough for a product quantizer, which needs 9,984 rows.
    """
    try:
        lists = faiss.extract_index_ivf(index).nlist
    except RuntimeError:  # this index has no inverted lists
        lists = 0
    return max(20_000, 64 * lists)


def _sample(shards: Shards, rows: int, wanted: int, seed: int) -> np.ndarray:
    chosen = np.sort(np.random.default_rng(seed).choice(rows, min(rows, wanted), replace=False))
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

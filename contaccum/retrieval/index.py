"""FAISS indexes: built shard by shard, saved, loaded, searched on the CPU or all GPUs. Only this file imports faiss."""

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from contaccum.errors import InputError
from contaccum.files import read_json, sha256_of, whole_folder, write_json, write_text
from contaccum.retrieval.shards import Shards, count_rows

FORMAT = "contaccum-index"
VERSION = 1
BLOCK = 32_768  # rows converted to float32 and handed to faiss at a time
GPU_LIMIT = 2048  # the most results that faiss returns for a query on a GPU

_FILES = {"index": "index.faiss", "ids": "ids.json"}


def has_faiss() -> bool:
    """Whether faiss can be imported."""
    try:
        load_faiss()
    except InputError:
        return False
    return True


def load_faiss() -> ModuleType:
    """The faiss module, or InputError naming what to install."""
    try:
        # torch and faiss bring an OpenMP runtime each; either may be loaded first (a test imports them both ways)
        import faiss
    except ImportError as error:
        raise InputError(
            'this search needs faiss, which is not installed: pip install "contaccum[cpu]" '
            '(or "contaccum[gpu]"), or use the exact torch backend (backend: torch)'
        ) from error
    return faiss


def gpu_count() -> int:
    """Number of GPUs that faiss can use: 0 without faiss, and with faiss-cpu."""
    return load_faiss().get_num_gpus() if has_faiss() else 0


def top_of_block(queries: np.ndarray, block: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Scores and row numbers, both (n, k), of the best rows of one float32 block by inner product, without an index."""
    faiss = load_faiss()
    return faiss.knn(queries, block, k, metric=faiss.METRIC_INNER_PRODUCT)


def row_blocks(vectors: np.ndarray, size: int = BLOCK) -> Iterator[tuple[int, np.ndarray]]:
    """(first row, contiguous float32 rows) of a matrix, block by block."""
    for start in range(0, len(vectors), size):
        yield start, np.ascontiguousarray(vectors[start : start + size], dtype=np.float32)


class Index:
    """An inner-product index of any kind that faiss's index_factory can name, with the ids of its rows.

    ``encoder`` is the fingerprint of the encoder whose passages it holds, "" where unknown.
    """

    def __init__(self, index: Any, ids: list[str], factory: str, encoder: str = "") -> None:
        self.index = index
        self.ids = ids
        self.factory = factory
        self.encoder = encoder
        self._on_gpus: Any = None

    @property
    def dimension(self) -> int:
        return int(self.index.d)

    def __len__(self) -> int:
        return len(self.ids)

    @classmethod
    def build(
        cls, shards: Shards, factory: str = "Flat", *, seed: int = 0, encoder: str = "", reproducible: bool = True
    ) -> "Index":
        """Add shard after shard; memory holds the index, one block of a shard and, while training, a sample.

        What has to be trained (IVF, PQ, …) is trained on rows drawn with ``seed``. Threads that add to a graph (HNSW,
        NSG) race, and no two builds are alike; ``reproducible`` adds with one thread, which is slow beyond a million
        rows. Raises InputError when faiss cannot read the factory string or the corpus is too small to train on.
        """
        faiss = load_faiss()
        rows = count_rows(shards)
        if rows == 0:
            raise InputError("there are no passages to index, expected at least one")
        try:
            index = faiss.index_factory(shards[0].vectors.shape[1], factory, faiss.METRIC_INNER_PRODUCT)
            if not index.is_trained:
                index.train(_sample(shards, rows, training_rows(faiss, index), seed))
            ids: list[str] = []
            single = reproducible and ("HNSW" in factory or "NSG" in factory)
            with (
                _threads(faiss, 1 if single else None),
                tqdm(total=rows, desc="index", unit="row", disable=None) as bar,
            ):
                for shard in shards:
                    for _, block in row_blocks(shard.vectors):
                        index.add(block)
                        bar.update(len(block))
                    ids += shard.ids
        except RuntimeError as error:
            raise InputError(f"index {factory!r} over {rows} passages: faiss refused it ({_reason(error)})") from error
        return cls(index, ids, factory, encoder)

    def set_search_params(self, params: str) -> None:
        """Set what trades speed for recall, such as ``nprobe=16`` or ``efSearch=128``; several are joined by commas."""
        faiss = load_faiss()
        try:
            faiss.ParameterSpace().set_index_parameters(self.index, params)
        except RuntimeError as error:
            raise InputError(
                f"search_params {params!r} do not fit index {self.factory!r} ({_reason(error)})"
            ) from error
        self._on_gpus = None  # the copies hold the older values

    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Scores (n, k) float32 and row numbers (n, k) int64, best first; -1 where the index finds fewer than k."""
        if queries.shape[1] != self.dimension:
            raise InputError(
                f"the queries have dimension {queries.shape[1]} and the index {self.dimension}, expected the same"
            )
        queries = np.ascontiguousarray(queries, dtype=np.float32)
        index = self._gpu_copies() if k <= GPU_LIMIT and gpu_count() else self.index
        return index.search(queries, min(k, len(self)))

    def _gpu_copies(self) -> Any:
        """The index divided over all GPUs, or itself where faiss has no GPU form of it (HNSW and others)."""
        if self._on_gpus is None:
            faiss = load_faiss()
            options = faiss.GpuMultipleClonerOptions()
            options.shard = True
            try:
                self._on_gpus = faiss.index_cpu_to_all_gpus(self.index, options)
            except RuntimeError as error:
                warnings.warn(f"index {self.factory!r} is searched on the CPU ({_reason(error)})", stacklevel=3)
                self._on_gpus = self.index
        return self._on_gpus

    def save(self, folder: str | Path) -> None:
        """Write the index, its ids and a manifest with their hashes; the folder appears whole or not at all."""
        if Path(folder).exists() and not (Path(folder) / "manifest.json").is_file() and any(Path(folder).iterdir()):
            raise InputError(f"{folder}: already holds something else, expected an empty folder or an older index")
        with whole_folder(folder) as part:
            load_faiss().write_index(self.index, str(part / _FILES["index"]))
            write_text(part / _FILES["ids"], json.dumps(self.ids, ensure_ascii=False))
            manifest = {
                "format": FORMAT,
                "version": VERSION,
                "factory": self.factory,
                "dimension": self.dimension,
                "rows": len(self),
                "encoder": self.encoder,
                "sha256": {name: sha256_of(part / file) for name, file in _FILES.items()},
            }
            write_json(part / "manifest.json", manifest)

    @classmethod
    def load(cls, folder: str | Path) -> "Index":
        """Read a saved index; faiss sees its file only when the hash is the manifest's.

        Raises InputError when the manifest is missing or foreign, or a file is missing or damaged.
        """
        path = Path(folder) / "manifest.json"
        manifest = read_json(path)
        if not isinstance(manifest, dict) or (manifest.get("format"), manifest.get("version")) != (FORMAT, VERSION):
            raise InputError(f"{path}: not the manifest of an index, expected format {FORMAT}, version {VERSION}")
        hashes = manifest.get("sha256")
        for name, file in _FILES.items():
            found = Path(folder) / file
            if not isinstance(hashes, dict) or not found.is_file() or sha256_of(found) != hashes.get(name):
                raise InputError(
                    f"{found}: missing or damaged, its SHA-256 is not the one in {path}; build the index again"
                )
        index = _read(Path(folder) / _FILES["index"])
        ids = read_json(Path(folder) / _FILES["ids"])
        if (index.d, index.ntotal, len(ids)) != (manifest.get("dimension"), manifest.get("rows"), manifest.get("rows")):
            raise InputError(
                f"{folder}: the index has {index.ntotal} rows of {index.d} and {len(ids)} ids, "
                f"expected {manifest.get('rows')} rows of {manifest.get('dimension')} as in {path}"
            )
        return cls(index, ids, str(manifest.get("factory")), str(manifest.get("encoder")))


def _read(path: Path) -> Any:
    try:
        return load_faiss().read_index(str(path))
    except RuntimeError as error:
        raise InputError(f"{path}: faiss cannot read it as an index ({_reason(error)})") from error


def _reason(error: RuntimeError) -> str:
    """faiss's own words, without the C++ place in front of them."""
    text = " ".join(str(error).split())
    return text.rsplit("Error: ", 1)[-1].rsplit(" failed: ", 1)[-1]


def training_rows(faiss: ModuleType, index: Any) -> int:
    """Rows to train on: 64 for each inverted list, and twice what a product quantizer needs (39 for 256 centroids)."""
    try:
        lists = faiss.extract_index_ivf(index).nlist
    except RuntimeError:  # no inverted lists inside
        lists = 0
    return max(20_000, 64 * lists)


def _sample(shards: Shards, rows: int, wanted: int, seed: int) -> np.ndarray:
    """Rows drawn evenly without replacement, float32, read shard by shard in the corpus's order."""
    chosen = np.sort(np.random.default_rng(seed).choice(rows, min(rows, wanted), replace=False))
    parts, start = [], 0
    for shard in shards:
        stop = start + len(shard.vectors)
        local = chosen[np.searchsorted(chosen, start) : np.searchsorted(chosen, stop)] - start
        parts.append(shard.vectors[local].astype(np.float32))
        start = stop
    return np.concatenate(parts)


@contextmanager
def _threads(faiss: ModuleType, count: int | None) -> Iterator[None]:
    """Let faiss use ``count`` threads inside the block; None leaves it as it is."""
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(count or before)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)

"""FAISS indexes: built shard by shard, saved, loaded, searched on the CPU or on GPUs. Only this file imports faiss."""

import json
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from contaccum.errors import InputError
from contaccum.files import read_json, sha256_of, whole_folder, write_json, write_text
from contaccum.launch import local_place
from contaccum.retrieval.shards import MANIFEST, Shards, count_rows

FORMAT = "contaccum-index"
VERSION = 1
BLOCK = 32_768  # rows converted to float32 and handed to faiss at a time
GPU_LIMIT = 2048  # the most results that faiss returns for a query on a GPU

_FILES = {"index": "index.faiss", "ids": "ids.json"}
_PLACE = re.compile(r"^Error in .*? at \S+:\d+: (Error: )?('.*?' failed: )?")
"""What faiss puts in front of its words: function, file and line, and the condition in C++ that did not hold."""
_AT_LEAST_ONE = ("nprobe", "efSearch")  # with 0 an index looks nowhere


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
        missing = isinstance(error, ModuleNotFoundError) and error.name == "faiss"
        state = "is not installed" if missing else f"cannot be loaded ({error})"
        raise InputError(
            f'this search needs faiss, which {state}: pip install "contaccum[cpu]" '
            '(or "contaccum[gpu]"), or use the exact torch backend (backend: torch)'
        ) from error
    return faiss


def describe_faiss() -> dict[str, Any]:
    """Version, build options (such as AVX512, GPU) and number of GPUs of faiss."""
    faiss = load_faiss()
    options = faiss.get_compile_options().split()
    return {"version": faiss.__version__, "options": options, "gpus": faiss.get_num_gpus()}


def search_everywhere(
    queries: np.ndarray, passages: np.ndarray, k: int
) -> dict[str, tuple[np.ndarray, np.ndarray] | str]:
    """Scores and row numbers, both (n, k), of an exact search on the "cpu" and, where faiss sees any, on each "gpu N"; what
    faiss said instead where it failed."""
    faiss = load_faiss()
    index = faiss.IndexFlatIP(passages.shape[1])
    index.add(passages)
    found: dict[str, tuple[np.ndarray, np.ndarray] | str] = {"cpu": index.search(queries, k)}
    for number in range(faiss.get_num_gpus()):
        try:
            moved = faiss.index_cpu_to_gpu(faiss.StandardGpuResources(), number, index)
            found[f"gpu {number}"] = moved.search(queries, k)
        except RuntimeError as error:
            found[f"gpu {number}"] = _reason(error)
    return found


def gpu_count() -> int:
    """Number of GPUs that faiss can use: 0 without faiss, and with faiss-cpu."""
    return load_faiss().get_num_gpus() if has_faiss() else 0


def search_gpus(device: str = "auto") -> list[int]:
    """Numbers of the GPUs that a search may use: none where the encoder stands on the CPU (``device`` is torch's name of its
    place), this process's own where several run on this machine, else all that faiss sees."""
    count = gpu_count() if may_use_gpu(device) else 0
    rank, world = local_place()
    return [rank % count] if count and world > 1 else list(range(count))


def may_use_gpu(device: str) -> bool:
    """Whether a search beside an encoder on ``device`` goes to CUDA devices; ``auto``: there is no encoder to go by."""
    return device == "auto" or device.startswith("cuda")


def top_of_block(queries: np.ndarray, block: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Scores and row numbers, both (n, k), of the best rows of one float32 block by inner product, without an index."""
    faiss = load_faiss()
    return faiss.knn(queries, block, k, metric=faiss.METRIC_INNER_PRODUCT)


def row_blocks(vectors: np.ndarray, size: int = BLOCK) -> Iterator[tuple[int, np.ndarray]]:
    """(first row, contiguous float32 rows) of a matrix, block by block."""
    for start in range(0, len(vectors), size):
        yield start, np.ascontiguousarray(vectors[start : start + size], dtype=np.float32)


@dataclass(frozen=True)
class Origin:
    """What an index was made from; indexes of one origin hold the same vectors in the same form."""

    factory: str = "Flat"
    seed: int = 0
    """Drew the rows that the index was trained on."""
    encoder: str = ""
    """Fingerprint of the encoder's passage side, "" where unknown."""
    source: str = ""
    """Fingerprint of the ids and texts, "" where unknown."""


class Index:
    """An inner-product index of any kind that faiss's index_factory can name, with the ids of its rows."""

    def __init__(self, index: Any, ids: list[str], origin: Origin) -> None:
        self.index = index
        self.ids = ids
        self.origin = origin
        self.device = "auto"
        """Where it may be searched, as for ``search_gpus``."""
        self._on_gpus: Any = None

    @property
    def dimension(self) -> int:
        return int(self.index.d)

    def __len__(self) -> int:
        return len(self.ids)

    @classmethod
    def build(cls, shards: Shards, origin: Origin | None = None, *, reproducible: bool = True) -> "Index":
        """Add shard after shard; memory holds the index, one block of a shard and, while training, a sample.

        What has to be trained (IVF, PQ, …) is trained on rows drawn with the origin's seed. Threads that add to a graph (HNSW,
        NSG) race, and no two builds are alike; ``reproducible`` adds with one thread, which is slow beyond a million
        rows. Raises InputError when faiss cannot read the factory string or the corpus is too small to train on.
        """
        faiss = load_faiss()
        origin = origin or Origin()
        factory, seed = origin.factory, origin.seed
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
        return cls(index, ids, origin)

    @classmethod
    def kept(cls, folder: str | Path, origin: Origin, shards: Callable[[], Shards]) -> "Index":
        """The index that ``folder`` keeps; where there is none yet, one is built from the shards and kept there.

        Raises InputError when the folder holds anything else, or an index of another origin.
        """
        folder = Path(folder)
        if (folder / MANIFEST).is_file():
            return cls.load(folder, origin)
        _check_target(folder)  # before the work, not after it
        index = cls.build(shards(), origin)
        index.save(folder)
        return index

    def set_search_params(self, params: str) -> None:
        """Set what trades speed for recall, such as ``nprobe=16`` or ``efSearch=128``; commas join several, "" is none.

        Raises InputError where the index has no such parameter, or its value could find nothing.
        """
        if not params:
            return
        faiss = load_faiss()
        for name, value in re.findall(r"(\w+)=([-+.\w]+)", params):
            least = int(name.endswith(_AT_LEAST_ONE))
            if not _number(value) >= least:  # faiss takes it, and finds nothing
                raise InputError(f"search_params {params!r}: {name} is {value}, expected a number of at least {least}")
        try:
            faiss.ParameterSpace().set_index_parameters(self.index, params)
        except RuntimeError as error:
            raise InputError(
                f"search_params {params!r} do not fit index {self.origin.factory!r} ({_reason(error)})"
            ) from error
        self._on_gpus = None  # the copies hold the older values

    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Scores (n, k) float32 and row numbers (n, k) int64, best first; -1 where the index finds fewer than k."""
        if queries.shape[1] != self.dimension:
            raise InputError(
                f"the queries have dimension {queries.shape[1]} and the index {self.dimension}, expected the same"
            )
        queries = np.ascontiguousarray(queries, dtype=np.float32)
        gpus = search_gpus(self.device) if k <= GPU_LIMIT else []
        index = self._gpu_copies(gpus) if gpus else self.index
        try:
            return index.search(queries, min(k, len(self)))
        except RuntimeError as error:
            if index is self.index:
                raise InputError(
                    f"index {self.origin.factory!r}: faiss refused the search ({_reason(error)})"
                ) from error
            self._leave_gpus(error)
        return self.search(queries, k)

    def _gpu_copies(self, gpus: list[int]) -> Any:
        """The index divided over the GPUs, or itself where faiss has no GPU form of it (HNSW and others)."""
        if self._on_gpus is None:
            faiss = load_faiss()
            options = faiss.GpuMultipleClonerOptions()
            options.shard = True
            try:
                self._on_gpus = faiss.index_cpu_to_gpus_list(self.index, options, gpus)
            except RuntimeError as error:
                self._leave_gpus(error)
        return self._on_gpus

    def _leave_gpus(self, error: RuntimeError) -> None:
        """Search on the CPU from here on: the GPUs have no form of the index, a narrower range of parameters, or no memory."""
        warnings.warn(f"index {self.origin.factory!r} is searched on the CPU ({_reason(error)})", stacklevel=4)
        self._on_gpus = self.index

    def save(self, folder: str | Path) -> None:
        """Write the index, its ids and a manifest with their hashes; the folder appears whole or not at all."""
        _check_target(Path(folder))
        with whole_folder(folder) as part:
            load_faiss().write_index(self.index, str(part / _FILES["index"]))
            write_text(part / _FILES["ids"], json.dumps(self.ids, ensure_ascii=False))
            manifest = {
                "format": FORMAT,
                "version": VERSION,
                "origin": asdict(self.origin),
                "dimension": self.dimension,
                "rows": len(self),
                "sha256": {name: sha256_of(part / file) for name, file in _FILES.items()},
            }
            write_json(part / MANIFEST, manifest)

    @classmethod
    def load(cls, folder: str | Path, expected: Origin | None = None) -> "Index":
        """Read a saved index; faiss sees its file only when the hash is the manifest's.

        Raises InputError when the manifest is missing or foreign or names another origin than the one expected, or a
        file is missing or damaged.
        """
        path = Path(folder) / MANIFEST
        manifest = _manifest(path)
        if manifest is None:
            raise InputError(f"{path}: not the manifest of an index, expected format {FORMAT}, version {VERSION}")
        origin = _origin_of(manifest.get("origin"), path, expected)
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
        return cls(index, ids, origin)


def _check_target(folder: Path) -> None:
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir()) and not _is_index(folder)):
        raise InputError(f"{folder}: already holds something else, expected an empty folder or an older index")


def _is_index(folder: Path) -> bool:
    return (folder / MANIFEST).is_file() and _manifest(folder / MANIFEST) is not None


def _manifest(path: Path) -> dict[str, Any] | None:
    found = read_json(path)
    ours = isinstance(found, dict) and (found.get("format"), found.get("version")) == (FORMAT, VERSION)
    return found if ours else None


def _origin_of(found: Any, path: Path, expected: Origin | None) -> Origin:
    types = {name: type(value) for name, value in asdict(Origin()).items()}
    if not isinstance(found, dict) or {name: type(value) for name, value in found.items()} != types:
        raise InputError(f"{path}: its origin is {found!r}, expected the fields {', '.join(types)}")
    for name, value in asdict(expected).items() if expected else ():
        if found[name] != value:
            raise InputError(
                f"{path}: this index belongs to other vectors or settings ({name} {found[name]!r}, expected {value!r}); "
                "give another folder, or delete this one"
            )
    return Origin(**found)


def _read(path: Path) -> Any:
    try:
        return load_faiss().read_index(str(path))
    except RuntimeError as error:
        raise InputError(f"{path}: faiss cannot read it as an index ({_reason(error)})") from error


def _reason(error: RuntimeError) -> str:
    """faiss's own words, without the C++ place in front of them."""
    return _PLACE.sub("", " ".join(str(error).split()))


def _number(text: str) -> float:
    """The number that a text says; NaN where it says none."""
    try:
        return float(text)
    except ValueError:
        return float("nan")


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

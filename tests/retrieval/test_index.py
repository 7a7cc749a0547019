"""Saved indexes, damaged ones, faiss that is missing or meets torch, and memory while an index is
built."""

import subprocess
import sys
import types
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import search_vectors as search

from contaccum.config.commands import SearchConfig
from contaccum.errors import InputError
from contaccum.retrieval import exact, faiss_library
from contaccum.retrieval import index as index_module
from contaccum.retrieval import shards as shards_module
from contaccum.retrieval.index import Index, Origin
from contaccum.retrieval.shards import Shard
from contaccum.runtime.files import read_json, write_json


def shards(rows: int = 200, dim: int = 16) -> list[Shard]:
    vectors = np.random.default_rng(0).standard_normal((rows, dim)).astype(np.float32)
    ids = [f"p {n} é" for n in range(rows)]
    return [Shard(ids[at : at + 70], vectors[at : at + 70]) for at in range(0, rows, 70)]


QUERIES = np.random.default_rng(1).standard_normal((5, 16)).astype(np.float32)
NAMES = [f"q{n}" for n in range(5)]
FLAT = Origin("Flat")


def search_index(index: Index) -> dict[str, list[tuple[str, float]]]:
    scores, rows = index.search(QUERIES, 10)
    ids = [passage_id for shard in shards() for passage_id in shard.ids]
    return {
        name: [(ids[row], float(score)) for row, score in zip(rows[n], scores[n], strict=True)]
        for n, name in enumerate(NAMES)
    }


@pytest.mark.parametrize("factory", ["Flat", "IVF8,Flat"])
def test_a_saved_index_answers_as_before(tmp_path, factory):
    built = Index.build(shards(), Origin(factory, encoder="abc"))
    built.save(tmp_path / "index")
    loaded = Index.load(tmp_path / "index")
    assert (loaded.origin, len(loaded)) == (Origin(factory, encoder="abc"), 200)
    assert search_index(loaded) == search_index(built)


def test_the_number_of_threads_is_as_before_once_a_graph_is_built():
    faiss = index_module.load_faiss()
    before = faiss.omp_get_max_threads()
    Index.build(shards(), Origin("HNSW8"))
    assert faiss.omp_get_max_threads() == before


@pytest.mark.parametrize("fault", ["flipped", "gone"])
def test_a_damaged_index_is_refused_before_faiss_reads_it(tmp_path, fault, monkeypatch):
    Index.build(shards(), FLAT).save(tmp_path / "index")
    path = tmp_path / "index" / "index.faiss"
    data = path.read_bytes()
    path.unlink()
    if fault == "flipped":
        path.write_bytes(data[:9] + bytes([data[9] ^ 1]) + data[10:])
    monkeypatch.setattr(
        index_module, "load_faiss", lambda: pytest.fail("faiss was asked to read a damaged index")
    )
    with pytest.raises(InputError, match=r"index\.faiss"):
        Index.load(tmp_path / "index")


def test_a_manifest_that_is_missing_foreign_or_untrue_is_refused(tmp_path):
    folder = tmp_path / "index"
    with pytest.raises(InputError, match=r"manifest\.json"):
        Index.load(folder)
    Index.build(shards(), FLAT).save(folder)
    manifest = read_json(folder / "manifest.json")
    write_json(folder / "manifest.json", manifest | {"format_version": 9})
    with pytest.raises(InputError, match="has format_version 9"):
        Index.load(folder)
    write_json(folder / "manifest.json", manifest | {"sha256": ""})
    with pytest.raises(InputError, match=r"index\.faiss"):
        Index.load(folder)


def test_an_index_replaces_an_older_one(tmp_path):
    Index.build(shards(), FLAT).save(tmp_path / "index")
    Index.build(shards(90), FLAT).save(tmp_path / "index")
    assert len(Index.load(tmp_path / "index")) == 90


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("factory", "rows", "sentence"),
    [
        ("HNSW0", 200, "has no links"),  # ends the process in faiss
        ("IVF0,Flat", 200, "faiss cannot build it"),
        ("HNSW8", 0, "there are no passages"),
    ],
)
def test_an_index_that_cannot_be_is_refused(factory, rows, sentence):
    vectors = np.random.default_rng(0).standard_normal((rows, 16), dtype=np.float32)
    given = [Shard([str(row) for row in range(rows)], vectors)] if rows else []
    with pytest.raises(InputError, match=f"index '{factory}': {sentence}"):
        Index.build(given, Origin(factory))


WITHOUT_FAISS = """
import sys
sys.modules["faiss"] = None  # import faiss now fails as if it were not installed
import numpy as np
from contaccum.errors import InputError
from contaccum.retrieval.exact import ExactIndex
from contaccum.retrieval.index import Index, Origin
from contaccum.retrieval.shards import Shard
vectors = np.eye(4, dtype=np.float32)
shards = [Shard(list("abcd"), vectors)]
print(ExactIndex(shards).search(vectors[2:3], 1))
for call in (
    lambda: ExactIndex(shards, backend="faiss").search(vectors, 1),
    lambda: Index.build(shards, Origin("HNSW8")),
):
    try:
        call()
    except InputError as error:
        print(error)
"""


def test_without_faiss_exact_search_goes_on_in_torch_and_the_rest_names_the_extra():
    done = run_python(WITHOUT_FAISS)
    lines = done.stdout.splitlines()
    assert lines[0] == "(array([[1.]], dtype=float32), array([[2]]))", done.stderr
    assert len(lines) == 3
    assert all("[cpu]'" in line for line in lines[1:])


BOTH = """
import {first}, {second}
import numpy as np, faiss, torch
rows = np.random.default_rng(0).standard_normal((3000, 64)).astype(np.float32)
for _ in range(3):
    scores, found = faiss.knn(rows, rows, 1, metric=faiss.METRIC_L2)
    product = torch.from_numpy(rows) @ torch.from_numpy(rows).T
    assert (found[:, 0] == range(3000)).all() and torch.isfinite(product).all()
print("both")
"""


@pytest.mark.parametrize(("first", "second"), [("torch", "faiss"), ("faiss", "torch")])
def test_torch_and_faiss_work_in_one_process_in_either_order(first, second):
    done = run_python(BOTH.format(first=first, second=second))
    assert (done.returncode, done.stdout.strip()) == (0, "both"), done.stderr


@pytest.fixture
def gpu_calls(monkeypatch) -> list[tuple[bool, list[int]]]:
    """Replace the GPU classes of faiss, which only a GPU build has, by those of the CPU."""
    faiss = index_module.load_faiss()
    calls: list[tuple[bool, list[int]]] = []

    def copies(index, options, gpus):
        calls.append((options.shard, gpus))
        return index

    monkeypatch.setattr(faiss_library, "gpu_count", lambda: 2)
    monkeypatch.setattr(faiss, "GpuMultipleClonerOptions", types.SimpleNamespace, raising=False)
    monkeypatch.setattr(faiss, "index_cpu_to_gpus_list", copies)
    return calls


def test_with_gpus_the_index_is_divided_over_them_once(gpu_calls):
    built = Index.build(shards(), FLAT)
    found = [built.search(QUERIES, 5)[1] for _ in range(2)]
    assert gpu_calls == [(True, [0, 1])]
    np.testing.assert_array_equal(found[0], found[1])


@pytest.mark.parametrize(
    ("device", "launched", "gpus"),
    [
        ("auto", {}, [0, 1]),
        ("cpu", {}, []),
        ("auto", {"RANK": "5", "WORLD_SIZE": "6", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, [1]),
        (
            "cuda:0",
            {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
            [0, 1],
        ),  # one a machine
    ],
)
def test_a_search_takes_its_process_own_gpu_all_when_alone_and_none_beside_the_cpu(
    gpu_calls, device, launched, gpus, monkeypatch
):
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    assert faiss_library.search_gpus(device) == gpus
    search(NAMES, QUERIES, shards(), 5, factory="IVF8,Flat", device=device)
    assert gpu_calls == ([(True, gpus)] if gpus else [])


def test_torch_stays_off_a_gpu_beside_an_encoder_on_the_cpu(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name, value in {
        "RANK": 3,
        "WORLD_SIZE": 4,
        "LOCAL_RANK": 3,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": 29500,
    }.items():
        monkeypatch.setenv(name, str(value))
    indexes = {
        device: exact.ExactIndex(shards(), device=device)
        for device in ("cpu", "mps", "cuda:0", "auto")
    }
    places = {device: (index.backend, str(index.device)) for device, index in indexes.items()}
    gpus = {"cuda:0": ("torch", "cuda:0"), "auto": ("torch", "cuda:1")}
    assert places == {"cpu": ("auto", "cpu"), "mps": ("auto", "cpu"), **gpus}
    assert str(exact.ExactIndex(shards(), backend="faiss", device="cuda:0").device) == "cpu"
    assert search(NAMES, QUERIES, shards(), 5, backend="torch", device="cpu").keys() == set(NAMES)


def test_a_search_that_a_gpu_refuses_goes_on_on_the_cpu_with_a_warning(gpu_calls, monkeypatch):
    faiss = index_module.load_faiss()
    untrained = faiss.index_factory(16, "SQ8")  # refuses every search, in every version of faiss
    monkeypatch.setattr(faiss, "index_cpu_to_gpus_list", lambda *_: untrained)
    built = Index.build(shards(), Origin("IVF8,Flat"))
    with pytest.warns(
        UserWarning, match=r"'IVF8,Flat': faiss cannot search it .*'is_trained' failed"
    ):
        found = built.search(QUERIES, 5)
    np.testing.assert_array_equal(found[1], built.index.search(QUERIES, 5)[1])
    # without asking the GPU, or warning, again
    np.testing.assert_array_equal(found[1], built.search(QUERIES, 5)[1])


def test_more_results_than_a_gpu_can_give_are_searched_on_the_cpu(gpu_calls):
    Index.build(shards(), FLAT).search(QUERIES, index_module.GPU_LIMIT + 1)
    assert gpu_calls == []


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_blocks_that_stay_on_the_device_are_searched_as_the_shards_are(monkeypatch, dtype):
    """As on a GPU, on the CPU: the second search reads no shard."""
    monkeypatch.setattr(shards_module, "BLOCK", 64)
    monkeypatch.setattr(exact, "QUERIES", 3)
    cut = [Shard(shard.ids, shard.vectors.astype(dtype)) for shard in shards()]
    index = exact.ExactIndex(cut, backend="torch", device="cpu")
    first = index.search(QUERIES, 30)
    assert not index._resident
    monkeypatch.setattr(index, "_fits_on_gpu", lambda: True)
    found = [index.search(QUERIES, 30), None]
    assert len(index._resident) == 5  # of shards with 70, 70 and 60 rows
    monkeypatch.setattr(exact, "row_blocks", lambda *_: pytest.fail("the shards are read again"))
    found[1] = index.search(QUERIES, 30)
    for scores, rows in found:
        np.testing.assert_array_equal(scores, first[0])
        np.testing.assert_array_equal(rows, first[1])


def test_an_interrupted_search_leaves_no_part_of_the_corpus_on_the_device(monkeypatch):
    index = exact.ExactIndex(shards(), backend="torch", device="cpu")
    monkeypatch.setattr(index, "_fits_on_gpu", lambda: True)
    blocks = index._blocks()
    next(blocks)
    blocks.close()
    assert index._resident == []
    assert index.search(QUERIES, 200)[1].shape == (5, 200)


def test_a_corpus_stays_on_the_gpu_only_if_half_of_the_free_memory_holds_it(monkeypatch):
    cut = shards(rows=100, dim=16)  # 6400 bytes
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    for free, stays in ((12_800, True), (12_799, False)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, 10**12))
        assert exact.ExactIndex(cut, device="cuda:0")._fits_on_gpu() == stays
    assert not exact.ExactIndex(cut, device="cpu")._fits_on_gpu()


PEAK = """
import resource, sys
import numpy as np
from contaccum.retrieval.exact import ExactIndex
from contaccum.retrieval.shards import Shard
import faiss, torch

class Made:  # 12 shards of 15 MB, each made when asked for
    def __len__(self): return 12
    def __getitem__(self, n):
        vectors = np.random.default_rng(n).standard_normal((10_000, 384), dtype=np.float32)
        return Shard([str(n * 10_000 + row) for row in range(10_000)], vectors)
    def __iter__(self): return (self[n] for n in range(12))

queries = np.ones((8, 384), dtype=np.float32)
ExactIndex([Made()[0]], backend=sys.argv[1]).search(queries[:1], 10)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
ExactIndex(Made(), backend=sys.argv[1]).search(queries, 10)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


@pytest.mark.parametrize("backend", ["faiss", "torch"])
def test_exact_search_holds_a_few_shards_and_not_the_corpus(backend):
    done = subprocess.run(
        [sys.executable, "-c", PEAK, backend], capture_output=True, text=True, check=True
    )
    assert float(done.stdout) < 90  # MB, of a corpus of 176


KEPT = Origin("IVF8,Flat", "encoder", "source")


@pytest.mark.parametrize(
    ("index", "vectors"), [("a", "a"), ("a", "a/b"), ("a/b", "a"), ("a", "c/../a")]
)
def test_an_index_does_not_replace_the_folder_of_its_vectors(index, vectors, tmp_path):
    folders = {"index_dir": str(tmp_path / index), "embeddings": str(tmp_path / vectors)}
    settings = SearchConfig(factory="HNSW8", **folders)
    with pytest.raises(InputError, match="writing the index would delete the vectors"):
        settings.check()
    replace(settings, embeddings=str(tmp_path / "ab")).check()  # control: a sibling


def test_a_kept_index_of_another_origin_is_refused_before_its_file_is_read(tmp_path, monkeypatch):
    Index.load_or_build(tmp_path / "index", KEPT, shards)
    monkeypatch.setattr(index_module, "load_faiss", lambda: pytest.fail("faiss was asked for"))
    with pytest.raises(InputError, match="was made from other texts"):
        Index.load_or_build(tmp_path / "index", replace(KEPT, source="other"), shards)


def test_a_folder_of_something_else_is_refused_before_the_index_is_built(tmp_path):
    for folder, name in (("photos", "cat.jpg"), ("other", "index.faiss"), ("other", "index.pkl")):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / name).write_bytes(b"theirs")  # index.*: as other libraries name theirs
        with pytest.raises(InputError, match="contains files that do not belong to an index"):
            Index.load_or_build(tmp_path / folder, KEPT, lambda: pytest.fail("the index was built"))
        assert (tmp_path / folder / name).read_bytes() == b"theirs"
        with pytest.raises(InputError, match="contains files that do not belong to an index"):
            Index.build(shards(), KEPT).save(tmp_path / folder)  # files put there during the build
        assert (tmp_path / folder / name).read_bytes() == b"theirs"
    (tmp_path / "vectors").mkdir()
    write_json(tmp_path / "vectors" / "manifest.json", {"job": {}})
    with pytest.raises(InputError, match="Object missing required field `origin`"):
        Index.load_or_build(tmp_path / "vectors", KEPT, lambda: pytest.fail("it was built"))

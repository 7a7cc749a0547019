"""Files made to do harm: each is refused in one sentence, and the canary that it would let out
never appears.

A hung reader would be ended by an alarm, a runaway one by the limit on the process; neither is a
measure of speed.
"""

import hashlib
import io
import json
import os
import pickle
import signal
import struct
from importlib.util import find_spec
from pathlib import Path

import datasets
import huggingface_hub
import numpy as np
import pytest
from helpers import train_config, write_beir

from contaccum import DualEncoder, train
from contaccum.catalog import fetch
from contaccum.catalog.pinned import tasks
from contaccum.cli import main
from contaccum.config import to_yaml
from contaccum.data.commands import convert
from contaccum.errors import InputError
from contaccum.retrieval.index import Index
from contaccum.retrieval.shards import EncodingJob, Shard, ShardFolder, write_manifest, write_shard
from contaccum.runtime.files import _temporary_path, write_json, write_text
from contaccum.training.run_folder import newest_checkpoint

SECONDS = 30
"""What ends a test that hangs."""


class Bomb:
    """Unpickled, it makes the file that its argument names."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.fixture(autouse=True)
def canary(tmp_path, monkeypatch):
    """A path at which nothing may stand when the test ends, and an alarm."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    path = tmp_path / "canary"
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.alarm(SECONDS)
    yield path
    signal.alarm(0)
    assert not path.exists()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    os.environ["CONTACCUM_CACHE"] = str(folder / "cache")
    data = write_beir(folder / "data")
    train(train_config(data, folder / "run"))
    return folder


def refused(capsys, *arguments: object) -> str:
    """The sentence with which a call is refused."""
    code = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    assert (code, out) == (2, ""), err
    assert len(err.splitlines()) == 1, err
    return err


def test_the_bomb_goes_off_where_pickle_is_let_in(tmp_path):
    """Negative control."""
    pickle.loads(pickle.dumps(Bomb(tmp_path / "other")))
    assert (tmp_path / "other").is_dir()


# embeddings and indexes


def write_shards(folder: Path, data: bytes) -> None:
    """A folder of embeddings whose manifest has the hashes of its files. data: content of the file
    of vectors."""
    folder.mkdir()
    content = {"vectors": data, "ids": b'["p"]'}
    files = {"vectors": "00000.npy", "ids": "00000.ids.json"}
    for kind, name in files.items():
        (folder / name).write_bytes(content[kind])
    entry = {
        **files, "rows": 1, "dimension": 2,
        "bytes": {kind: len(part) for kind, part in content.items()},
        "sha256": {kind: hashlib.sha256(part).hexdigest() for kind, part in content.items()},
    }  # fmt: skip
    job = {
        "kind": "passage",
        "encoder": "e",
        "source": "s",
        "rows": 1,
        "shard_size": 1,
        "dtype": "float32",
    }
    manifest = {
        "format": "contaccum-embeddings",
        "version": 1,
        "job": job,
        "dimension": 2,
        "shards": [entry],
    }
    write_json(folder / "manifest.json", manifest)


def npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=True)
    return buffer.getvalue()


def npy_header(text: str) -> bytes:
    line = text.encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\0" + struct.pack("<H", len(line)) + line + bytes(8)


SOUND_VECTORS = npy(np.zeros((1, 2), dtype=np.float32))


@pytest.mark.parametrize(
    "data",
    [
        lambda canary: npy(np.array([[Bomb(canary), Bomb(canary)]], dtype=object)),
        lambda canary: npy_header("{'descr': "),
        lambda canary: npy_header(
            f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({10**30}, 2), }}"
        ),
        lambda canary: b"",
    ],
    ids=["pickled", "half a header", "huge shape", "empty"],
)
def test_hostile_vectors_are_refused(data, tmp_path, canary):
    write_shards(tmp_path / "sound", SOUND_VECTORS)  # negative control
    assert ShardFolder(tmp_path / "sound")[0].ids == ["p"]
    write_shards(tmp_path / "evil", data(canary))
    with pytest.raises(InputError, match=r"00000\.npy: contains no array of numbers"):
        ShardFolder(tmp_path / "evil")[0]


def test_parquet_vectors_with_a_hostile_dimension_are_refused(tmp_path):
    job = EncodingJob("passage", "e", "s", 1, 1, "float32", "parquet")
    write_shard(tmp_path, 0, job, Shard(["p"], np.zeros((1, 2), dtype=np.float32)))
    write_manifest(tmp_path, job)
    text = (tmp_path / "manifest.json").read_text()
    (tmp_path / "manifest.json").write_text(text.replace('"dimension": 2', f'"dimension": {2**31}'))
    with pytest.raises(InputError, match=r"00000\.parquet: not a Parquet file"):
        ShardFolder(tmp_path)[0]


def test_a_manifest_names_no_file_outside_its_folder(tmp_path):
    write_shards(tmp_path / "shards", SOUND_VECTORS)
    (tmp_path / "00000.npy").write_bytes(SOUND_VECTORS)
    manifest = json.loads((tmp_path / "shards" / "manifest.json").read_text())
    manifest["shards"][0]["vectors"] = "../00000.npy"
    write_json(tmp_path / "shards" / "manifest.json", manifest)
    with pytest.raises(InputError, match=r"shards\[0\] is \.\./00000\.npy"):
        ShardFolder(tmp_path / "shards")


@pytest.mark.parametrize("text", ["[" * 200_000, "9" * 10_000, "\ud800", "null", '{"shards": 1}'])
def test_a_hostile_manifest_is_refused(text, tmp_path):
    for name in ("shards", "index", "run/checkpoints/step-00000001"):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_bytes(text.encode("utf-8", errors="surrogatepass"))
    with pytest.raises(InputError, match=r"manifest\.json"):
        ShardFolder(tmp_path / "shards")
    with pytest.raises(InputError, match=r"manifest\.json"):
        Index.load(tmp_path / "index")
    assert newest_checkpoint(tmp_path / "run") is None


@pytest.mark.parametrize(
    ("start", "stop", "damage"),
    [
        (0, 4, b"XXXX"),
        (4, 8, struct.pack("<i", 2**31 - 1)),
        (8, 16, struct.pack("<q", 2**60)),
        (150, None, b""),
    ],
    ids=["kind", "width", "rows", "cut"],
)
def test_a_hostile_index_is_refused_with_the_right_hash_too(start, stop, damage, tmp_path):
    vectors = np.eye(8, dtype=np.float32)
    Index.build([Shard([f"p{n}" for n in range(8)], vectors)]).save(tmp_path / "index")
    path = tmp_path / "index" / "index.faiss"
    data = bytearray(path.read_bytes())
    data[start:stop] = damage
    path.write_bytes(data)
    with pytest.raises(InputError, match=r"index\.faiss"):  # the hash is checked first
        Index.load(tmp_path / "index")
    manifest = json.loads((tmp_path / "index" / "manifest.json").read_text())
    manifest["sha256"] = hashlib.sha256(data).hexdigest()
    write_json(tmp_path / "index" / "manifest.json", manifest)
    with pytest.raises(InputError, match="index"):
        Index.load(tmp_path / "index")


# models, data and settings with code


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_code_that_comes_with_a_model_is_not_run(file, trained, tmp_path, canary, capsys):
    folder = tmp_path / "model"
    encoder = DualEncoder.load(trained / "run" / "model")
    encoder.query_tower.backbone.save_pretrained(folder)
    encoder.query_tower.tokenizer.save_pretrained(folder)
    (folder / "evil.py").write_text(f"import os\nos.mkdir({str(canary)!r})\nclass Evil: pass\n")
    about = json.loads((folder / file).read_text())
    own = {
        "AutoConfig": "evil.Evil",
        "AutoModel": "evil.Evil",
        "AutoTokenizer": ["evil.Evil", "evil.Evil"],
    }
    about |= {"auto_map": own, "model_type": "evil", "tokenizer_class": "Evil"}
    (folder / file).write_text(json.dumps(about))
    main(["evaluate", "--model", str(folder), "--data", str(trained / "data")])
    assert "Traceback" not in capsys.readouterr().err


# paths


@pytest.mark.parametrize("form", ["beir", "dpr", "jsonl", "tevatron"])
@pytest.mark.parametrize("key", ["../../canary", "{canary}", "nul\0", "x" * 5000])
def test_ids_are_never_paths(form, key, tmp_path, canary):
    key = key.format(canary=canary)
    (tmp_path / "deep").mkdir()
    record = {
        "query_id": key,
        "query": "x",
        "pos": ["a"],
        "pos_id": [key],
        "neg": ["b"],
        "neg_id": [key + "2"],
    }
    (tmp_path / "source.jsonl").write_text(json.dumps(record) + "\n")
    if (form, key) == ("beir", "nul\0"):
        with pytest.raises(InputError, match="NUL"):
            convert(tmp_path / "source.jsonl", tmp_path / "deep" / "out", form)
    else:
        convert(tmp_path / "source.jsonl", tmp_path / "deep" / "out", form)
    assert {path.name for path in tmp_path.iterdir()} <= {"source.jsonl", "deep", "cache"}
    assert {path.name for path in (tmp_path / "deep").iterdir()} <= {"out"}


CLIMBING = ["../canary", "{canary}", "a/canary", "..", "", "nul\0", "\ud800"]


@pytest.fixture
def scifact(tmp_path, monkeypatch):
    """Copy of mteb/SciFact's repository in the Hub's cache, to be filled."""
    for constants in (huggingface_hub.constants, datasets.config):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    repository, commit = tasks()["scifact"].repository
    folder = tmp_path / "hub" / f"datasets--{repository.replace('/', '--')}" / "snapshots" / commit
    folder.mkdir(parents=True)
    return folder


@pytest.mark.parametrize("split", ["test", *CLIMBING])
def test_the_splits_of_a_repository_are_never_paths(split, tmp_path, canary, scifact):
    files = {name: {"_id": name[0], "text": "x"} for name in ("corpus", "queries")}
    files["default"] = {"query-id": "q", "corpus-id": "c"}
    configurations = []
    for name, row in files.items():
        (scifact / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
        data_files = [{"split": split.format(canary=canary), "path": f"{name}.jsonl"}]
        configurations.append({"config_name": name, "data_files": data_files})
    # JSON is YAML
    (scifact / "README.md").write_text(f"---\n{json.dumps({'configs': configurations})}\n---\n")
    if split == "test":  # negative control
        assert (fetch("mteb/SciFact") / "qrels" / "test.tsv").read_text().endswith("q\tc\t1\n")
    else:
        with pytest.raises(InputError, match=r"mteb/SciFact: .*split"):
            fetch("mteb/SciFact")
    assert not list(tmp_path.rglob("*canary*"))


def test_aliases_in_a_repositorys_readme_are_not_expanded(scifact):
    bomb = [
        "a0: &a0 [x]",
        *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)),
    ]
    data_files = "[{split: test, path: {a: *a11}}]"
    names = "".join(
        f"- config_name: {name}\n  data_files: {data_files}\n"
        for name in ("corpus", "queries", "default")
    )
    (scifact / "README.md").write_text("---\n" + "\n".join(bomb) + f"\nconfigs:\n{names}---\n")
    with pytest.raises(
        InputError, match=r"README\.md: its metadata has \d+ values; at most \d+ are allowed"
    ):
        fetch("mteb/SciFact")


def test_a_link_with_the_name_of_a_temporary_file_is_not_followed(tmp_path):
    """In a shared folder, such as /tmp, anybody can create one before the output is written."""
    (tmp_path / "ours").write_text("kept")
    _temporary_path(tmp_path / "output", "part").symlink_to(tmp_path / "ours")
    write_text(tmp_path / "output", "new")
    assert (tmp_path / "ours").read_text() == "kept"
    assert (tmp_path / "output").read_text() == "new"
    assert not (tmp_path / "output").is_symlink()


# secrets


def test_no_token_is_written_anywhere(tmp_path, capsys, monkeypatch):
    secret = "hf_AnAuthTokenThatNobodyMaySee"
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY"):
        monkeypatch.setenv(name, secret)
    trackers = {"run.trackers": ["tensorboard"]} if find_spec("tensorboard") else {}
    config = train_config(write_beir(tmp_path / "data"), tmp_path / "run", **trackers)
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert main(["train", "--config", "config.yaml"]) == 0
    assert (
        main(["evaluate", "--model", "run/model", "--data", "data", "--output", "run/metrics.json"])
        == 0
    )
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 20
    assert not [path for path in files if secret.encode() in path.read_bytes()]
    assert secret not in "".join(capsys.readouterr())

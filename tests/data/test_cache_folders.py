"""Folders of the cache of another version, and what a killed conversion leaves."""

import json
import os
import subprocess
import warnings
from pathlib import Path

import pytest
from datasets import Dataset
from helpers import open_corpus, open_train_set, write_beir
from processes import python

from contaccum.cli import main
from contaccum.data.train_set import TrainSet
from contaccum.runtime.files import _temporary_path, is_leftover


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CONTACCUM_CACHE", str(tmp_path / "cache"))
    write_beir(tmp_path / "d")
    rows = [{"query": f"query {i}", "pos": [f"good {i}"], "neg": [f"bad {i}"]} for i in range(6)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def opened(tmp_path: Path, kind: str) -> Path:
    """Fill the cache, and return the new folder."""
    reread(tmp_path, kind)
    (folder,) = (tmp_path / "cache" / kind).iterdir()
    return folder


def reread(tmp_path: Path, kind: str) -> Dataset | TrainSet:
    return (
        open_corpus(tmp_path / "d")
        if kind == "corpus"
        else open_train_set(tmp_path / "pairs.jsonl", hard_negatives=1)
    )


@pytest.mark.parametrize("kind", ["corpus", "examples"])
def test_tables_of_another_version_are_built_again_in_silence(kind, tmp_path, monkeypatch):
    folder = opened(tmp_path, kind)
    monkeypatch.setattr("contaccum.data.tables.READER_VERSION", 1_000_000)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reread(tmp_path, kind)
    assert len(list(folder.parent.iterdir())) == 2


@pytest.mark.parametrize("kind", ["corpus", "examples"])
@pytest.mark.parametrize("damage", ["gone", "cut", "sizes"])
def test_tables_without_a_file_are_built_again(damage, kind, tmp_path):
    """Scratch disks delete old files, but not folders."""
    folder = opened(tmp_path, kind)
    file = folder / "passages.arrow"
    content = file.read_bytes()
    if damage == "gone":
        file.unlink()
    elif damage == "sizes":
        (folder / ".sizes.json").write_text("")
    else:
        file.write_bytes(content[: len(content) // 2])
    reread(tmp_path, kind)
    assert file.read_bytes() == content


def test_a_file_of_equal_size_and_modification_time_is_read_again(tmp_path):
    """As rsync -t, tar and cp -p write it."""
    path = tmp_path / "pairs.jsonl"
    before, status = open_train_set(path).passages["text"][:], path.stat()
    path.write_text(path.read_text().replace("good", "fine"))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (status.st_size, status.st_mtime_ns)
    after = open_train_set(path).passages["text"][:]
    assert after == [text.replace("good", "fine") for text in before]
    assert after != before


KILLED = """
import os, signal, sys
from contaccum.runtime import files, locks
from contaccum.data import commands
calls = 0
def deadly(function):
    def call(*given, **named):
        global calls
        calls += 1
        if calls == int(sys.argv[1]):
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*given, **named)
    return call
for name in ("replace", "rename", "fsync", "unlink", "rmdir"):
    setattr(os, name, deadly(getattr(os, name)))
commands.convert(*sys.argv[2:], split="test")
"""


@pytest.mark.parametrize(("to", "call"), [("jsonl", 2), ("beir", 1), ("beir", 5)])
def test_the_next_conversion_removes_what_a_killed_one_left(to, call, tmp_path):
    target = tmp_path / "out" / "set"
    source = tmp_path / "d" if to == "jsonl" else tmp_path / "pairs.jsonl"
    # the cache is warm: every call below is one of the conversion
    assert main(["data", "check", str(source)]) == 0
    target.parent.mkdir()
    killed = subprocess.run(
        [python(), "-c", KILLED, str(call), source, target, to], check=False, capture_output=True
    )
    assert killed.returncode == -9, killed.stderr
    names = [path.name for path in target.parent.iterdir()]
    assert names in ([target.name], [name for name in names if is_leftover(name)]), names
    again = main(["data", "convert", str(source), str(target), "--to", to, "--split", "test"])
    assert again == (2 if names == [target.name] else 0)
    assert [path.name for path in target.parent.iterdir()] == [target.name]


def test_only_the_files_of_dead_processes_are_removed(tmp_path):
    """Negative control: another process, and another machine, may still write."""
    name = _temporary_path(tmp_path / "out.jsonl", "part").name
    living = tmp_path / name.replace(f"-{os.getpid()}.", f"-{os.getppid()}.")
    elsewhere = tmp_path / name.replace(name.split(".")[3].split("-")[0], "0" * 8)
    dead = tmp_path / name.replace(f"-{os.getpid()}.", "-999999999.")
    for path in (living, elsewhere, dead):
        path.write_text("")
    assert (
        main(
            [
                "data", "convert", str(tmp_path / "pairs.jsonl"), str(tmp_path / "out.jsonl"),
                "--to", "dpr",
            ]
        )
        == 0
    )  # fmt: skip
    assert [path.exists() for path in (living, elsewhere, dead)] == [True, True, False]

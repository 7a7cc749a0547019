"""Folders of the cache: damaged, older and newer ones; and what a killed conversion leaves."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from datasets import Dataset
from forked import python
from helpers import tiny_encoder, write_beir
from opened import open_corpus, open_train_set

from contaccum.cli import main
from contaccum.data.tables import TokenTable, build_token_table
from contaccum.data.train_set import TrainSet
from contaccum.errors import InputError
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
        open_corpus(tmp_path / "d") if kind == "corpus" else open_train_set(tmp_path / "pairs.jsonl", hard_negatives=1)
    )


def rows(read: Dataset | TrainSet) -> list[object]:
    """Return the passages of a corpus, or each example's query with its texts."""
    if isinstance(read, Dataset):
        return list(read)
    passages, lists = read.passages["text"], (read.positives, read.negatives)
    return [
        (query, [[passages[row] for row in part.row(number)] for part in lists])
        for number, query in enumerate(read.queries["text"])
    ]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0" * 9)


@pytest.mark.parametrize("damage", [cut, lengthen, Path.unlink, lambda path: path.write_bytes(b"")])
@pytest.mark.parametrize(
    ("kind", "file"),
    [
        ("corpus", "passages.arrow"),
        ("examples", "queries.arrow"),
        ("examples", "positives_values.npy"),
        ("examples", "passages.arrow"),
    ],
)
def test_a_damaged_table_is_refused_with_the_way_out(kind, file, damage, tmp_path):
    folder = opened(tmp_path, kind)
    damage(folder / file)
    with pytest.raises(
        InputError, match=rf"{file}: has \d+ bytes instead of \d+. Delete .*{folder.name} and run the command again"
    ):
        reread(tmp_path, kind)
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    reread(tmp_path, kind)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda about: about | {"format_version": 2}, "has format_version 2, but this version of contaccum reads 1"),
        (lambda about: about | {"format_version": "1"}, "has format_version '1'"),
        (lambda about: about | {"bad": "0"}, "bad: found str; int is expected"),
        (
            lambda about: {name: about[name] for name in about if name != "fingerprint"},
            "the field 'fingerprint' is missing",
        ),
        (lambda about: about | {"bytes": [1]}, "bytes: found array; object is expected"),
        (lambda about: [about], "found array; object is expected"),
    ],
)
@pytest.mark.parametrize("kind", ["corpus", "examples"])
def test_a_newer_or_mutated_about_file_is_refused(kind, change, sentence, tmp_path):
    about = opened(tmp_path, kind) / "about.json"
    content = json.loads(about.read_text())
    assert content["format_version"] == 1
    about.write_text(json.dumps(change(content)))
    with pytest.raises(InputError) as caught:
        reread(tmp_path, kind)
    assert str(about) in str(caught.value)
    assert sentence in str(caught.value)


@pytest.mark.parametrize("kind", ["corpus", "examples"])
def test_an_older_about_file_without_later_keys_is_read(kind, tmp_path):
    about = opened(tmp_path, kind) / "about.json"
    written = rows(reread(tmp_path, kind))
    content = json.loads(about.read_text())
    about.write_text(
        json.dumps({name: content[name] for name in content if name not in ("format_version", "bytes", "scored")})
    )
    older = about.read_bytes()
    assert rows(reread(tmp_path, kind)) == written
    assert about.read_bytes() == older  # read, and not written anew
    assert len(written) == (40 if kind == "corpus" else 6)


def test_token_tables_that_were_cut_are_refused(tmp_path):
    import numpy as np

    np.save(tmp_path / "tokens.npy", np.arange(9, dtype="<i4"))
    np.save(tmp_path / "offsets.npy", np.array([0, 4, 9]))
    assert len(TokenTable(tmp_path)) == 2
    np.save(tmp_path / "offsets.npy", np.array([0, 4, 8]))
    with pytest.raises(InputError, match="do not match"):
        TokenTable(tmp_path)
    for name in ("tokens.npy", "offsets.npy"):
        cut(tmp_path / name)
        with pytest.raises(InputError, match=f"{name}: cannot be read"):
            TokenTable(tmp_path)
        np.save(tmp_path / name, np.arange(9, dtype="<i4"))


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


def without_hashes(path: Path) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), "sha256": None}))


DAMAGES = [(file, damage) for file in ("tokens.npy", "offsets.npy") for damage in (flip_bit, cut, Path.unlink)]


@pytest.mark.parametrize(("file", "damage"), [*DAMAGES, ("about.json", without_hashes)])
def test_damaged_token_tables_are_made_again(file, damage, tmp_path):
    tokenizer = tiny_encoder().query_tower.tokenizer
    texts = Dataset.from_dict({"text": [f"word {number}" for number in range(9)]})

    def rows() -> list[list[int]]:
        table = build_token_table(texts, ["text"], tokenizer, max_length=8, fingerprint="x")
        return [row.tolist() for row in table.rows(range(9))]

    sound = rows()
    (folder,) = (tmp_path / "cache" / "tokens").iterdir()
    stamp = (folder / file).stat().st_mtime_ns
    assert rows() == sound
    assert (folder / file).stat().st_mtime_ns == stamp  # negative control: a sound table is used again
    damage(folder / file)
    with pytest.warns(UserWarning, match="the token ids are damaged; the texts are tokenized again"):
        assert rows() == sound
    (folder / "about.json").unlink()
    assert rows() == sound  # as written by earlier versions


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


@pytest.mark.parametrize(("to", "call"), [*(("jsonl", n) for n in (1, 2, 3)), *(("beir", n) for n in (1, 3, 5, 6))])
def test_the_next_conversion_removes_what_a_killed_one_left(to, call, tmp_path):
    target = tmp_path / "out" / "set"
    source = tmp_path / "d" if to == "jsonl" else tmp_path / "pairs.jsonl"
    assert main(["data", "check", str(source)]) == 0  # the cache is warm: every call below is one of the conversion
    target.parent.mkdir()
    killed = subprocess.run([python(), "-c", KILLED, str(call), source, target, to], check=False, capture_output=True)
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
    assert main(["data", "convert", str(tmp_path / "pairs.jsonl"), str(tmp_path / "out.jsonl"), "--to", "dpr"]) == 0
    assert [path.exists() for path in (living, elsewhere, dead)] == [True, True, False]

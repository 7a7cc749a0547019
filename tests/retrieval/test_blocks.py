"""Blocks of unfinished mining: damaged and foreign ones are mined again, whole ones are kept, kills leave no files behind."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
from helpers import write_beir
from opened import open_examples
from word_encoder import WordEncoder

from contaccum.config.commands import EncoderConfig, MineConfig
from contaccum.errors import InputError
from contaccum.retrieval import mine as mine_module
from contaccum.retrieval.encode import Texts, encode_texts
from contaccum.retrieval.index import Index, Origin
from contaccum.retrieval.mine import Mining, Statistics, mine, write_mined
from contaccum.retrieval.negatives import MiningQueries
from contaccum.retrieval.retriever import BM25
from contaccum.retrieval.shards import Shard
from contaccum.runtime.files import is_leftover, read_json, write_json

SETTINGS = MineConfig(num_negatives=2, block_size=10)


@pytest.fixture
def mining(tmp_path):
    """A job of four blocks."""
    queries = MiningQueries(open_examples(write_beir(tmp_path / "data")))
    return Mining(queries, BM25(queries.corpus), SETTINGS)


@pytest.fixture
def unfinished(mining, tmp_path, monkeypatch):
    """The folder of a call that stopped after its last block, and the bytes that it would have written."""
    write_mined(mining, tmp_path / "whole.jsonl", {})
    with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
        patch.setattr(mine_module, "framed", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        write_mined(mining, tmp_path / "mined.jsonl", {})
    return tmp_path / "mined.jsonl.mining", (tmp_path / "whole.jsonl").read_bytes()


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def edit(folder: Path, **change) -> None:
    record = json.loads((folder / "00001.json").read_text())
    write_json(folder / "00001.json", record | change)


def reseal(folder: Path, **change) -> None:
    """Change a record and its hash together."""
    found = read_json(folder / "00001.json", Statistics)
    vars(found).update(change)
    found.sha256 = found.own_hash()
    write_json(folder / "00001.json", vars(found))


DAMAGE = {
    "lines cut": lambda f: os.truncate(f / "00001.lines", 200),
    "lines cut at the end of a line": lambda f: (f / "00001.lines").write_bytes(
        b"".join((f / "00001.lines").read_bytes().splitlines(True)[:-1])
    ),
    "lines flipped": lambda f: flip(f / "00001.lines", 25),
    "lines emptied": lambda f: os.truncate(f / "00001.lines", 0),
    "lines gone": lambda f: (f / "00001.lines").unlink(),
    "lines of another block": lambda f: shutil.copy(f / "00002.lines", f / "00001.lines"),
    "lines are a folder": lambda f: (
        (f / "00001.lines").unlink(),
        (f / "00001.lines").mkdir(),
        (f / "00001.lines").rmdir(),
    ),
    "statistics cut": lambda f: os.truncate(f / "00001.json", 60),
    "statistics emptied": lambda f: os.truncate(f / "00001.json", 0),
    "statistics of another block": lambda f: shutil.copy(f / "00002.json", f / "00001.json"),
    "both of another block": lambda f: [shutil.copy(f / f"00002.{e}", f / f"00001.{e}") for e in ("json", "lines")],
    "a number changed": lambda f: edit(f, short=7),
    "a score changed": lambda f: edit(f, positives=[0.0] * 10),
    "a string for a number": lambda f: edit(f, short="7"),
    "a field deleted": lambda f: write_json(
        f / "00001.json", {"short": 0, "removed": {}, "positives": [], "negatives": []}
    ),
    "a foreign job with a right hash": lambda f: reseal(f, job="0" * 64),
    "another number with a right hash": lambda f: reseal(f, block=2),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_or_foreign_block_is_mined_again(unfinished, mining, tmp_path, damage):
    folder, expected = unfinished
    damage(folder)
    with pytest.warns(UserWarning, match=r"00001\.json: block 1 is damaged or belongs to a different job"):
        report = write_mined(mining, tmp_path / "mined.jsonl", {})
    assert (tmp_path / "mined.jsonl").read_bytes() == expected
    assert report == json.loads((tmp_path / "whole.about.json").read_text())


def test_whole_blocks_are_not_mined_again(unfinished, mining, tmp_path, monkeypatch, recwarn):
    """Negative control; a block that no job has is not read."""
    folder, expected = unfinished
    (folder / "00009.lines").write_bytes(b"foreign\n")
    (folder / "00009.json").write_text("{}")
    monkeypatch.setattr(Mining, "block", lambda *_: pytest.fail("a finished block is mined again"))
    write_mined(mining, tmp_path / "mined.jsonl", {})
    assert (tmp_path / "mined.jsonl").read_bytes() == expected
    assert not [each for each in recwarn if "block" in str(each.message)]


@pytest.mark.parametrize("content", ["", "{", "[]", '"job"', "null"])
def test_a_damaged_job_file_is_written_again(unfinished, mining, tmp_path, content):
    folder, expected = unfinished
    (folder / "job.json").write_text(content)
    write_mined(mining, tmp_path / "mined.jsonl", {})
    assert (tmp_path / "mined.jsonl").read_bytes() == expected


@pytest.mark.parametrize("file", ["corpus.jsonl", "queries.jsonl"])
def test_a_text_that_changed_between_two_calls_is_noticed(unfinished, mining, tmp_path, file):
    path = tmp_path / "data" / file
    lines = path.read_text().splitlines(True)
    path.write_text("".join([*lines[:3], lines[3].replace("bear", "boar").replace("fox", "dog"), *lines[4:]]))
    assert path.read_text() != "".join(lines)
    queries = MiningQueries(open_examples(tmp_path / "data"))
    with pytest.raises(InputError, match=r"unfinished mining job that differs in (queries|passages)"):
        write_mined(Mining(queries, BM25(queries.corpus), SETTINGS), tmp_path / "mined.jsonl", {})


def killed_at(call: Callable[[Path], object], folder: Path, moment: int) -> None:
    """Make a call, and kill this process at the ``moment``-th rename, fsync or unlink."""
    left = moment

    def counted(function):
        def spoiled(*given, **named):
            nonlocal left
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*given, **named)

        return spoiled

    for name in ("replace", "fsync", "unlink"):
        setattr(os, name, counted(getattr(os, name)))
    call(folder)


def leftovers(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if is_leftover(path.name)] if folder.is_dir() else []


def assert_survives_kills(
    call: Callable[[Path], object], folder: Path, first: int, result: Callable[[Path], object]
) -> None:
    """Kill a call at every third moment; the next call must leave no unfinished file, and the result of a call that ended."""
    call(folder / "whole")
    expected, left_behind = result(folder / "whole"), 0
    for moment in range(first, 1000, 3):
        broken = folder / str(moment)
        process = get_context("fork").Process(target=killed_at, args=(call, broken, moment))
        process.start()
        process.join()
        left_behind += bool(leftovers(broken))
        with suppress(InputError):  # if the killed call had written the output
            call(broken)
        assert leftovers(broken) == []
        assert result(broken) == expected
        if process.exitcode == 0:
            break
    assert moment > 5
    assert left_behind > 1


def files(folder: Path) -> dict[str, bytes]:
    """Contents by name, without lock files: the next call that needs the lock takes it over from the dead process."""
    found = [path for path in folder.rglob("*") if path.is_file() and not path.name.endswith(".lock")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


@pytest.mark.parametrize("first", [0, 1, 2])
def test_the_call_after_a_killed_mining_leaves_no_unfinished_file(tmp_path, first):
    data = write_beir(tmp_path / "data")

    def call(folder: Path) -> None:
        mine(EncoderConfig("bm25"), str(data), str(folder / "mined.jsonl"), mining=SETTINGS)

    assert_survives_kills(call, tmp_path, first, lambda folder: (folder / "mined.jsonl").read_bytes())


@pytest.mark.parametrize("first", [0, 1, 2])
def test_the_call_after_a_killed_encoding_leaves_no_unfinished_file(tmp_path, first):
    texts = Texts.of_queries({f"q{n}": f"word{n}" for n in range(20)})
    assert_survives_kills(
        lambda folder: encode_texts(WordEncoder(), texts, folder / "e", shard_size=10), tmp_path, first, files
    )


@pytest.mark.parametrize("first", [0, 1, 2])
def test_the_call_after_a_killed_index_leaves_no_unfinished_file(tmp_path, first):
    vectors = np.random.default_rng(0).standard_normal((50, 8)).astype(np.float32)
    shards, origin = [Shard([str(n) for n in range(50)], vectors)], Origin("SQ8")
    assert_survives_kills(
        lambda folder: Index.load_or_build(folder / "i", origin, lambda: shards), tmp_path, first, files
    )

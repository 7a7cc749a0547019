"""Killed calls of mine, encode and search: the next call leaves no unfinished file, and the result
of a call that ended."""

import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
from helpers import write_beir
from word_encoder import WordEncoder

from contaccum.config.commands import EncoderConfig, MineConfig
from contaccum.errors import InputError
from contaccum.retrieval.encode import Texts, encode_texts
from contaccum.retrieval.index import Index, Origin
from contaccum.retrieval.mine import mine
from contaccum.retrieval.shards import Shard
from contaccum.runtime.files import is_leftover


def killed_at(call: Callable[[Path], object], folder: Path, moment: int) -> None:
    """Make a call, and kill this process at the ``moment``-th rename, fsync or unlink."""
    left, fsync = moment, os.fsync

    def count(event: str, *_: object) -> None:
        nonlocal left
        if event in ("os.rename", "os.remove", "fsync"):
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def counted_fsync(descriptor: int) -> None:
        count("fsync")
        fsync(descriptor)

    # A replaced os.unlink would not see the calls of pathlib, which keeps its own in Python 3.10.
    sys.addaudithook(count)
    os.fsync = counted_fsync  # has no audit event
    call(folder)


def leftovers(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if is_leftover(path.name)] if folder.is_dir() else []


def assert_survives_kills(
    call: Callable[[Path], object], folder: Path, first: int, result: Callable[[Path], object]
) -> None:
    """Kill a call at every third moment; the next call must leave no unfinished file, and the
    result of a call that ended."""
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
    """Contents by name, without lock files: the next call that needs the lock takes it over from
    the dead process."""
    found = [
        path for path in folder.rglob("*") if path.is_file() and not path.name.endswith(".lock")
    ]
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def mined(folder: Path) -> None:
    data = folder.parent / "data"
    mine(EncoderConfig("bm25"), data, folder / "mined.jsonl", mining=MineConfig(num_negatives=2))


def encoded(folder: Path) -> None:
    texts = Texts.of_queries({f"q{n}": f"word{n}" for n in range(20)})
    encode_texts(WordEncoder(), texts, folder / "e", shard_size=10)


def indexed(folder: Path) -> None:
    vectors = np.random.default_rng(0).standard_normal((50, 8)).astype(np.float32)
    shards = [Shard([str(n) for n in range(50)], vectors)]
    Index.load_or_build(folder / "i", Origin("SQ8"), lambda: shards)


@pytest.mark.parametrize("first", [0, 1, 2])
@pytest.mark.parametrize(
    ("call", "result"),
    [
        (mined, lambda folder: (folder / "mined.jsonl").read_bytes()),
        (encoded, files),
        (indexed, files),
    ],
)
def test_the_call_after_a_killed_one_leaves_no_unfinished_file(tmp_path, call, result, first):
    write_beir(tmp_path / "data")
    assert_survives_kills(call, tmp_path, first, result)

"""Paths whose names are not UTF-8 work, or are refused in one sentence."""

import json
import os
from pathlib import Path

import pytest
from helpers import write_beir

from contaccum.cli import main

NAMES = [b"caf\xe9", b"\xff\xfe", b"a\xc3(b", "naïve 🦊 name".encode()]
ROWS = [{"query": f"query {i}", "pos": [f"good {i}"], "neg": [f"bad {i}"]} for i in range(6)]


@pytest.fixture(params=NAMES, ids=ascii)
def folder(request, tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("CONTACCUM_CACHE", str(tmp_path / "cache"))
    path = tmp_path / os.fsdecode(request.param)
    write_beir(path)
    (path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def test_data_in_such_a_folder_is_read_and_written(folder, capfdbinary):
    assert main(["data", "check", str(folder)]) == 0
    assert main(["data", "check", str(folder / "pairs.jsonl")]) == 0
    for to in ("jsonl", "beir"):
        target = folder / os.fsdecode(b"out \xe9 " + to.encode())
        assert main(["data", "convert", str(folder / "pairs.jsonl"), str(target), "--to", to]) == 0
        assert target.exists()
    assert (
        main(
            [
                "evaluate",
                "--model",
                "bm25",
                "--data",
                str(folder),
                "--output",
                str(folder / "metrics.json"),
            ]
        )
        == 0
    )
    run = folder / os.fsdecode(b"run\xe9.trec")
    assert (
        main(
            [
                "search",
                "--model",
                "bm25",
                "--data",
                str(folder),
                "--split",
                "test",
                "--output",
                str(run),
            ]
        )
        == 0
    )
    assert run.exists()
    mine = [
        "mine",
        "--model",
        "bm25",
        "--data",
        str(folder / "pairs.jsonl"),
        "--output",
        str(folder / "mined.jsonl"),
    ]
    assert main(mine) == 0


def test_bad_records_in_such_a_folder_are_listed(folder, capfdbinary):
    with open(folder / "pairs.jsonl", "a") as file:
        file.write("no JSON\nnor this\n")
    assert main(["data", "check", str(folder / "pairs.jsonl")]) == 2
    assert len(capfdbinary.readouterr().err.splitlines()) == 3


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_a_cache_of_such_a_name_works_or_is_refused_in_one_sentence(
    name, tmp_path, monkeypatch, capfdbinary
):
    write_beir(tmp_path / "d")
    cache = tmp_path / os.fsdecode(name)
    monkeypatch.setenv("CONTACCUM_CACHE", str(cache))
    code = main(["data", "check", str(tmp_path / "d")])
    lines = capfdbinary.readouterr().err.splitlines()
    try:
        name.decode()
    except UnicodeDecodeError:
        assert code == 2
        assert len(lines) == 1
        assert b"CONTACCUM_CACHE" in lines[0]
        assert b"must be valid UTF-8" in lines[0]
        assert not cache.exists()
    else:
        assert code == 0

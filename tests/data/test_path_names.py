"""Paths with unusual names work, or are refused in one sentence."""

import json
import os
from pathlib import Path

import pytest
from helpers import write_beir

from contaccum.cli import main

NAMES = [b"caf\xe9", "é\u2028'\"$(x)%s{}".encode()]
ROWS = [{"query": f"query {i}", "pos": [f"good {i}"], "neg": [f"bad {i}"]} for i in range(6)]


@pytest.fixture(params=NAMES, ids=ascii)
def folder(request, tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("CONTACCUM_CACHE", str(tmp_path / "cache"))
    path = tmp_path / os.fsdecode(request.param)
    write_beir(path)
    (path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def test_data_in_such_a_folder_is_read_and_written(folder, capfdbinary):
    pairs, out = folder / "pairs.jsonl", folder / os.fsdecode(b"out \xe9")
    out.mkdir()
    bm25 = ["--model", "bm25", "--data"]
    for call in (
        ["data", "check", folder],
        ["data", "check", pairs],
        ["data", "convert", pairs, out / "again.jsonl", "--to", "jsonl"],
        ["data", "convert", pairs, out / "beir", "--to", "beir"],
        ["evaluate", *bm25, folder, "--output", out / "metrics.json"],
        ["search", *bm25, folder, "--split", "test", "--output", out / "run.trec"],
        ["mine", *bm25, pairs, "--output", out / "mined.jsonl"],
    ):
        assert main([str(word) for word in call]) == 0, call
    assert {"again.jsonl", "beir", "metrics.json", "run.trec", "mined.jsonl"} <= {
        path.name for path in out.iterdir()
    }


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_a_cache_of_such_a_name_works_or_is_refused_in_one_sentence(
    name, tmp_path, monkeypatch, capfdbinary
):
    write_beir(tmp_path / "d")
    cache = tmp_path / os.fsdecode(name)
    monkeypatch.setenv("CONTACCUM_CACHE", str(cache))
    code = main(["data", "check", str(tmp_path / "d")])
    said = capfdbinary.readouterr().err
    if name == NAMES[0]:
        assert (code, said.count(b"\n"), cache.exists()) == (2, 1, False)
        assert b"CONTACCUM_CACHE" in said
        assert b"must be valid UTF-8" in said
    else:
        assert code == 0

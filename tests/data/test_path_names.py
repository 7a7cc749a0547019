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

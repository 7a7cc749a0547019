"""Fingerprints of data notice every edit."""

from pathlib import Path

import pytest
from helpers import open_retrieval_set, write_beir


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CONTACCUM_CACHE", str(tmp_path / "cache"))


def edit_line(path: Path, before: str, after: str) -> None:
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after, 1))


@pytest.mark.parametrize(
    ("file", "before", "after"),
    [
        ("corpus.jsonl", '"text": "', '"text": "other '),
        ("corpus.jsonl", '"title": "', '"title": "other '),
        ("queries.jsonl", '"text": "', '"text": "other '),
        ("qrels/test.tsv", "\t1\n", "\t2\n"),
    ],
)
def test_an_edit_of_passages_queries_or_judgements_is_noticed(file, before, after, tmp_path):
    data = write_beir(tmp_path / "d")
    old = open_retrieval_set(data).fingerprint()
    assert open_retrieval_set(data).fingerprint() == old
    edit_line(data / file, before, after)
    assert open_retrieval_set(data).fingerprint() != old

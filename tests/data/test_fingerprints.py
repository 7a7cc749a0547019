"""Fingerprints of data notice every edit between a killed call and the next call, and still match those of older checkpoints."""

import json
import os
from pathlib import Path

import pytest
from helpers import train_config, write_beir
from opened import open_retrieval_set

from contaccum import train
from contaccum.config import DataConfig, TrainConfig
from contaccum.data.retrieval_set import same_content
from contaccum.data.stream import open_stream
from contaccum.errors import InputError
from contaccum.training.run_folder import identity_differences, newest_checkpoint


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CONTACCUM_CACHE", str(tmp_path / "cache"))


def stream(path: Path, lines: int = 15_000) -> Path:
    rows = (
        {"query_id": f"q{i}", "query": f"query {i}", "pos": [f"good {i} " + "word " * 20], "neg": []}
        for i in range(lines)
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def fingerprint(path: Path) -> str:
    return open_stream(DataConfig(train=str(path), streaming=True)).fingerprint


def replace_middle(content: bytes) -> bytes:
    middle = len(content) // 2
    at = content.index(b"good", middle)
    return content[:at] + b"evil" + content[at + 4 :]


def swap_lines(content: bytes) -> bytes:
    lines = content.splitlines(keepends=True)
    middle = len(lines) // 2
    lines[middle], lines[middle + 1] = lines[middle + 1], lines[middle]
    return b"".join(lines)


def flip_bit(content: bytes) -> bytes:
    at = content.index(b"word", len(content) // 2)
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


@pytest.mark.parametrize("edit", [replace_middle, swap_lines, flip_bit])
def test_an_edit_in_the_middle_of_a_stream_is_noticed(edit, tmp_path):
    path = stream(tmp_path / "pairs.jsonl")
    assert path.stat().st_size > 2 << 20  # the hash of older checkpoints covers 1 MB at each end
    before, status = fingerprint(path), path.stat()
    content = path.read_bytes()
    path.write_bytes(edit(content))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    after = fingerprint(path)
    assert path.stat().st_size == status.st_size
    assert not same_content(before, after)
    assert before.partition("-")[0] == after.partition("-")[0]  # negative control: the older hash misses the edit
    path.write_bytes(content)
    assert same_content(before, fingerprint(path))


def test_the_fingerprint_of_an_older_checkpoint_still_matches(tmp_path):
    now = fingerprint(stream(tmp_path / "pairs.jsonl", 50))
    older = now.partition("-")[0]
    assert same_content(older, now)
    assert not same_content(older[:-1], now)
    assert not same_content(now, older)
    sound = {"data": now, "encoder": []}
    assert identity_differences({"data": older, "encoder": []}, sound, TrainConfig()) == []
    assert len(identity_differences({"data": older[::-1], "encoder": []}, sound, TrainConfig())) == 1


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
    new = open_retrieval_set(data).fingerprint()
    assert not same_content(old, new)
    assert same_content(new.partition("-")[0], new)


def test_an_edited_stream_is_refused_when_training_resumes(tmp_path):
    path = stream(tmp_path / "pairs.jsonl")
    changes = {"data.train": str(path), "data.streaming": True, "data.dev": None, "optim.max_steps": 2}
    train(train_config(tmp_path, tmp_path / "run", **changes))
    path.write_bytes(replace_middle(path.read_bytes()))
    config = train_config(tmp_path, tmp_path / "run", **changes)
    config.resume = True
    with pytest.raises(InputError, match="data was"):
        train(config)
    found = newest_checkpoint(tmp_path / "run")
    assert found is not None
    assert found.state["step"] == 2

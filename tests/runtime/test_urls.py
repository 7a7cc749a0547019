"""Paths with a URL scheme are refused in one sentence by every command, as input and as output;
nothing is created."""

from pathlib import Path

import pytest
from helpers import write_beir
from tiny_families import family_folder

from contaccum.cli import main
from contaccum.errors import InputError
from contaccum.runtime.files import write_text

CALLS = [
    "train --data.train {url} --output_dir out --model.name tiny",
    "train --data.train data --output_dir {url} --model.name tiny --model.max_query_length 8 "
    "--model.max_passage_length 8",
    "train --data.train data --data.dev {url} --output_dir out --model.name tiny",
    "train --data.train data --output_dir out --model.name {url}",
    "evaluate --model {url} --data data",
    "evaluate --model model --data {url}",
    "evaluate --model bm25 --data {url}",
    "evaluate --model bm25 --data data --output {url}",
    "evaluate --run {url} --qrels data/qrels/test.tsv",
    "search --model bm25 --data data --output {url}",
    "search --model bm25 --data {url} --query x",
    "mine --model bm25 --data data --output {url}",
    "mine --model bm25 --data {url} --output out",
    "encode --model {url} --input data/corpus.jsonl --output out",
    "encode --model model --input {url} --output out",
    "encode --model model --input data/corpus.jsonl --output {url} --max_query_length 8 "
    "--max_passage_length 8",
    "merge {url} out",
    "push {url} somebody/name --dry_run",
    "data check {url}",
    "data convert {url} out --to jsonl",
    "data convert data {url} --to jsonl",
    "data demo {url}",
]


@pytest.mark.parametrize("call", CALLS)
def test_addresses_are_refused(call, tmp_path, monkeypatch, capsys):
    url = "s3://bucket/some/folder"
    monkeypatch.chdir(tmp_path)
    write_beir(Path("data"))
    family_folder("bert", Path("model"))
    before = sorted(Path().rglob("*"))
    capsys.readouterr()  # drops the progress of making the model
    code, said = main(call.format(url=url).split()), capsys.readouterr().err
    assert code == 2, said
    assert (
        f"an address with the scheme {url.partition(':')[0]} is not a local path. Mount the storage"
        in said
    ), said
    assert said.count("\n") == 1
    left = [path for path in Path().rglob("*") if path not in before and "cache" not in path.parts]
    assert [path for path in left if not path.name.startswith("cache")] == []


@pytest.mark.parametrize("name", ["hub:owner/name", "C:/Users/x", "folder/s3:/x", "s3"])
def test_other_names_with_colons_are_paths(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_text(name, "text")
    assert [path.read_text() for path in tmp_path.rglob("*") if path.is_file()] == ["text"]


@pytest.mark.parametrize("name", ["GS://b", "file:///x", "https://h/x", "dbfs:/x"])
def test_schemes(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="is not a local path"):
        write_text(Path(name) / "file", "text")
    assert not list(tmp_path.iterdir())

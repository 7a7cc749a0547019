"""A gzip file that unpacks without end stops at the limit, in every format and command that reads it."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import write_beir

from contaccum.cli import main
from contaccum.formats import records
from contaccum.formats.readers import _size
from contaccum.formats.records import MAX_RATIO, numbered_lines, unpacked_limit

PASSAGE = json.dumps({"_id": "p", "text": "word " * 40}) + "\n"
EXAMPLE = json.dumps({"query": "q", "pos": ["word " * 40], "neg": []}) + "\n"
DPR = json.dumps({"question": "q", "positive_ctxs": [{"title": "", "text": "word " * 40}], "hard_negative_ctxs": []})


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CONTACCUM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(records, "MIN_UNPACKED", 100_000)  # 500 MB would take seconds for each case


def bomb(path: str, line: str, copies: int = 40_000) -> None:
    Path(path).parent.mkdir(exist_ok=True)
    Path(path).write_bytes(gzip.compress(("[" * path.startswith("dpr") + line * copies).encode()))


CASES = {
    "passages": ("data check corpus.jsonl.gz --max_bad_records 99999", "corpus.jsonl.gz", PASSAGE),
    "examples": ("data check pairs.jsonl.gz", "pairs.jsonl.gz", EXAMPLE),
    "blank lines": ("data check pairs.jsonl.gz", "pairs.jsonl.gz", "\n" * 40),
    "spaces": ("data check pairs.jsonl.gz", "pairs.jsonl.gz", " " * 400),
    "a DPR list": ("data check dpr.json.gz", "dpr.json.gz", f"{DPR},\n"),
    "a DPR corpus": ("data check psgs.tsv.gz --max_bad_records 99999", "psgs.tsv.gz", "1\tword word word\ttitle\n"),
    "questions": ("data check qa.csv.gz", "qa.csv.gz", "who was it?\t['she']\n"),
    "converted examples": ("data convert pairs.jsonl.gz out --to dpr", "pairs.jsonl.gz", EXAMPLE),
    "judgements": ("evaluate --run run.trec --qrels qrels.tsv.gz", "qrels.tsv.gz", "q0\tp0\t1\n"),
    "a CSV file of a Hub set": ("data check hub:set?query=query&pos=pos", "set/train.csv.gz", "query,pos\n"),
    "a searched corpus": ('search --model bm25 --data d --query "word"', "d/corpus.jsonl.gz", PASSAGE),
}


@pytest.mark.parametrize("case", CASES)
def test_a_file_that_unpacks_without_end_is_refused(case, capsys):
    call, path, line = CASES[case]
    bomb(path, line)
    Path("run.trec").write_text("q0 Q0 p0 1 1.0 x\n")
    assert main(call.replace('"', "").split()) == 2
    sentence = capsys.readouterr().err.splitlines()[-1]
    limit = 100_000 + MAX_RATIO * Path(path).stat().st_size
    assert f"{path}: unpacks to more than {limit} bytes, which is the limit. Raise --max_unpacked" in sentence
    assert not Path("out").exists()


def test_the_limit_can_be_raised_and_lowered(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(records, "MIN_UNPACKED", 2_000_000)
    bomb("qa.csv.gz", "who was it?\t['she']\n", copies=300_000)
    assert main(["data", "check", "qa.csv.gz"]) == 2
    assert main(["data", "check", "qa.csv.gz", "--max_unpacked", "0.01"]) == 0
    assert main(["data", "check", "qa.csv.gz", "--max_unpacked", "0.0001"]) == 2
    assert "unpacks to more than 100000 bytes" in capsys.readouterr().err
    data = write_beir(tmp_path / "e")
    corpus = (data / "corpus.jsonl").read_bytes()
    (data / "corpus.jsonl.gz").write_bytes(gzip.compress(corpus))
    (data / "corpus.jsonl").unlink()
    assert main(["train", "--config", "none.yaml", "--data.max_unpacked", "-1"]) == 2
    assert main(["evaluate", "--model", "bm25", "--data", str(data), "--max_unpacked", "0.000001"]) == 2
    assert f"unpacks to more than {1000} bytes" in capsys.readouterr().err
    assert main(["evaluate", "--model", "bm25", "--data", str(data)]) == 0


@pytest.mark.parametrize("ending", ["parquet", "jsonl.gz"])
def test_the_limit_of_a_hub_set_can_be_raised(ending, capsys, tmp_path):
    """A Parquet file stores equal texts once: here, 600 kB in 3 kB."""
    path, rows = tmp_path / "set" / f"train.{ending}", {"query": ["q" * 300] * 1000, "pos": ["q" * 300] * 1000}
    path.parent.mkdir()
    if ending == "parquet":
        pq.write_table(pa.table(rows), path)
    else:
        path.write_bytes(gzip.compress((json.dumps({"query": "q" * 300, "pos": ["q" * 300]}) + "\n").encode() * 1000))
    call = ["data", "check", "hub:set::train?query=query&pos=pos"]
    assert main([*call, "--max_unpacked", "0.0002"]) == 2
    assert f"train.{ending}: unpacks to more than 200000 bytes" in capsys.readouterr().err
    assert not list((tmp_path / "cache").rglob("examples.jsonl"))
    benchmark = ["evaluate", "--model", "bm25", "--data", f"{call[2]},./e", "--max_unpacked", "0.001"]
    write_beir(tmp_path / "e")
    assert main(benchmark) == 0  # reads the set before it evaluates it
    assert main([*call, "--max_unpacked", "0.001"]) == 0


def test_numbers_count_eight_bytes():
    """A column of vectors is not converted to text, which took ten times as long as to read it."""
    row = {"query": "four", "vector": [0.1] * 100, "pos": ["three", "six"], "nested": [{"text": "ab"}], "none": None}
    assert _size(row) == 4 + 800 + (5 + 3) + 2 + 8


def test_a_plain_csv_file_has_no_limit(tmp_path):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.csv").write_text("query,pos\n" + "query,pos\n" * 1000)
    assert main(["data", "check", "hub:set?query=query&pos=pos", "--max_unpacked", "0.000001"]) == 0


def test_text_that_compresses_well_is_read(tmp_path):
    """Negative control: the default leaves ten times more room than text needs."""
    path = tmp_path / "text.gz"
    lines = [f"line {number}: {number * 7919 % 10007} words of an ordinary text" for number in range(20_000)]
    path.write_bytes(gzip.compress("\n".join(lines).encode(), 9))
    ratio = len("\n".join(lines)) / path.stat().st_size
    assert 3 < ratio < MAX_RATIO / 2
    assert [line for _, line in numbered_lines(path)] == lines
    assert unpacked_limit(path.stat().st_size) > len("\n".join(lines))

"""Options of search, evaluate and mine that change nothing beside others are named; those that
change something are not."""

import pytest
from helpers import write_beir

from contaccum import search
from contaccum.cli import main
from contaccum.config.commands import EncoderConfig
from contaccum.retrieval.runs import write_run

BM25 = ["--model", "bm25"]
SCORED = ["evaluate", "--run", "run.trec", "--qrels", "data/qrels/test.tsv"]
SEARCHED = ["evaluate", *BM25, "--data", "data"]
ANSWERED = ["evaluate", *BM25, "--questions", "questions.csv", "--passages", "data"]
WRITTEN = ["search", *BM25, "--data", "data", "--output", "out.trec"]
LOOKED = ["search", *BM25, "--data", "data", "--query", "red fox"]
MINED = ["mine", *BM25, "--data", "data", "--output", "mined.jsonl"]
CASES = [
    (SCORED, ["--k", "5"], "k with --run"),
    (SCORED, ["--split", "dev"], "split with --run"),
    (SCORED, BM25, "model with --run"),
    (SCORED, ["--repair"], "repair with --run"),
    (SCORED, ["--factory", "SQ8"], "factory with --run"),
    (SCORED, ["--metric", "mrr@10"], None),
    (SCORED, ["--match", "regex"], "match without --questions"),
    (SCORED, ["--metric", "mrr@10", "--against", "run.trec"], None),
    (SCORED, ["--relevance_level", "2", "--strict", "--timeout_minutes", "5"], None),
    (SEARCHED, ["--metric", "mrr@10"], None),
    (ANSWERED, ["--metric", "mrr@10"], "metric with --questions"),
    (SEARCHED, ["--factory", "SQ8"], "factory with --model bm25"),
    (SEARCHED, ["--embeddings", "vectors"], "embeddings with --model bm25"),
    (SEARCHED, ["--pooling", "cls"], "pooling with --model bm25"),
    (
        SEARCHED,
        ["--k", "5", "--split", "dev", "--relevance_level", "1", "--strict", "--repair"],
        None,
    ),
    (WRITTEN, ["--query_prefix", "query: "], "query_prefix with --model bm25"),
    (WRITTEN, ["--k", "5", "--split", "dev"], None),
    (LOOKED, ["--split", "dev"], None),  # a data set of the Hub can have a corpus for each split
    (MINED, ["--factory", "SQ8"], "factory with --model bm25"),
    (
        MINED,
        ["--cross_encoder_batch_size", "8"],
        "cross_encoder_batch_size without --cross_encoder",
    ),
    (
        MINED,
        ["--seed", "1", "--sampling_strategy", "random", "--num_negatives", "2", "--split", "dev"],
        None,
    ),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("effect")
    data = write_beir(folder / "data", 12)
    (folder / "questions.csv").write_text("why\t['fox']\n")
    write_run(folder / "run.trec", search(EncoderConfig("bm25"), str(data)))
    return folder


@pytest.mark.filterwarnings("always:.*has no effect")
@pytest.mark.parametrize(("call", "options", "named"), CASES)
def test_an_option_without_effect_is_named(call, options, named, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    (folder / "mined.jsonl").unlink(missing_ok=True)
    assert main([*call, *options]) == 0
    name, _, beside = (named or "").partition(" ")
    expected = f"contaccum: warning: --{name} has no effect {beside}\n" if named else ""
    assert (
        "".join(line for line in capsys.readouterr().err.splitlines(True) if "no effect" in line)
        == expected
    )


@pytest.mark.filterwarnings("always:.*has no effect")
def test_questions_are_answered_without_splits_and_grades(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    call = [
        "evaluate", "--model", "absent/model", "--questions", "absent.tsv", "--passages", "data",
    ]  # fmt: skip
    assert main([*call, "--split", "dev", "--strict", "--match", "regex", "--k", "5"]) == 2
    assert [line for line in capsys.readouterr().err.splitlines() if "no effect" in line] == [
        "contaccum: warning: --split has no effect with --questions",
        "contaccum: warning: --strict has no effect with --questions",
    ]


@pytest.mark.parametrize(
    ("value", "expected"),
    [("-1", "-1, expected more than 0"), ("1.0e+999", "inf, expected a finite number")],
)
def test_a_time_that_cannot_be_waited_is_refused(value, expected, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    assert main([*SEARCHED, f"--timeout_minutes={value}"]) == 2
    assert capsys.readouterr().err == f"contaccum: --timeout_minutes is {expected}\n"

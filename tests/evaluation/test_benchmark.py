"""Several sets in one table, grades that count, and two run files tested against each other."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import pytrec_eval
from helpers import write_beir
from scipy import stats
from word_encoder import WordEncoder

from contaccum import evaluate, evaluate_benchmark, evaluate_run_file, search
from contaccum.catalog.download import FORUMS
from contaccum.cli import main
from contaccum.config.commands import EncoderConfig, SearchConfig
from contaccum.errors import InputError
from contaccum.evaluation.benchmark import BEIR, benchmark_sets, file_name
from contaccum.evaluation.metrics import evaluate_run
from contaccum.experiments.report import console_report
from contaccum.retrieval.runs import read_run, write_run
from contaccum.runtime.files import cache_folder, read_json


def harder(folder: Path, queries: int) -> Path:
    """A set on which BM25 errs: the first passages, more or fewer of them, have lost their
    texts."""
    write_beir(folder, queries)
    rows = [json.loads(line) for line in (folder / "corpus.jsonl").read_text().splitlines()]
    for row in rows[: 1 + queries % 7]:
        row |= {"title": "", "text": "a page without words"}
    (folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_several_folders_are_rows_and_their_mean(tmp_path, capsys):
    folders = [
        str(harder(tmp_path / name, size))
        for name, size in (("one", 20), ("two", 25), ("three", 30))
    ]
    call = [
        "evaluate", "--model", "bm25", "--data", ",".join(folders),
        "--output", str(tmp_path / "out"),
    ]  # fmt: skip
    assert main(call) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["ndcg@10", "recall@100", "mrr@10", "map@100", "queries"]
    alone = [evaluate("bm25", folder)["mean"]["ndcg@10"] for folder in folders]
    assert len(set(alone)) > 1
    assert [(line[0], line[1]) for line in lines[1:4]] == [
        (name, f"{score:.4f}") for name, score in zip(folders, alone, strict=True)
    ]
    assert lines[4][:2] == ["mean", f"{np.mean(alone):.4f}"]
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*%2F*.json")}
    assert len(files) == 3
    marked = min(files)  # what is finished is not scored again: a mark in it stays
    marked.write_text(marked.read_text().replace('"queries": 10', '"queries": 1010'))
    files[marked] = marked.stat().st_mtime_ns
    assert main(call) == 0
    again = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert sorted(str(int(line[-1]) % 1000) for line in again[1:4]) == sorted(
        line[-1] for line in lines[1:4]
    )
    assert again != lines
    assert {path: path.stat().st_mtime_ns for path in files} == files
    for change, said in (
        (["--k", "50"], "k 100, but now 50"),
        (["--strict"], "strict False, but now True"),
    ):
        assert main([*call, *change]) == 2
        assert f"other data or settings ({said}). Choose another folder" in capsys.readouterr().err
    qrels = Path(folders[0]) / "qrels" / "test.tsv"
    qrels.write_text(qrels.read_text().replace("q0\tp0\t1", "q0\tp1\t1"))
    assert main(call) == 2
    assert "other data or settings (test_content" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "header"),
    [
        (["--k", "5"], ["ndcg@5", "recall@5", "mrr@5", "map@5"]),
        (["--metric", "recall@20"], ["recall@20", "ndcg@10", "recall@100", "mrr@10", "map@100"]),
    ],
)
def test_a_table_shows_the_metric_and_small_cutoffs(options, header, tmp_path, capsys):
    folders = [str(harder(tmp_path / name, size)) for name, size in (("a", 20), ("b", 25))]
    assert main(["evaluate", "--model", "bm25", "--data", ",".join(folders), *options]) == 0
    out, err = capsys.readouterr()
    lines = [line.split() for line in out.splitlines()]
    assert lines[0] == [*header, "queries"]
    expected = evaluate("bm25", folders[0], k=5 if "--k" in options else 100)["mean"]
    assert lines[1][1:-1] == [f"{expected[name]:.4f}" for name in header]
    assert f"{folders[0]}: ndcg@" in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"evaluator": "BEIR"}, "evaluator is 'BEIR', expected {contaccum,beir}"),
        ({"k": 0}, "k is 0, expected"),
    ],
)
def test_wrong_options_of_evaluate_are_refused(options, message, tmp_path):
    with pytest.raises(InputError, match=re.escape(message)):
        evaluate("bm25", harder(tmp_path / "d", 20), **options)


def test_a_long_name_of_a_data_set_has_a_short_file_name():
    names = {file_name("hub:" + 60 * "検" + end) for end in "ab"}
    assert len(names) == 2
    assert max(map(len, names)) <= 200


def test_sets_whose_names_differ_only_in_a_slash_have_their_own_files(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    harder(tmp_path / "a" / "b", 20)
    harder(tmp_path / "a-b", 25)
    call = ["evaluate", "--model", "bm25", "--data", "a/b,a-b,a/b/", "--output", "out"]
    assert main(call) == 0
    table = capsys.readouterr().out
    assert [float(line.split()[1]) for line in table.splitlines()[1:4]] == [
        pytest.approx(evaluate("bm25", folder)["mean"]["ndcg@10"], abs=5e-5)
        for folder in ("a/b", "a-b", "a/b")
    ]
    assert main(call) == 0
    assert capsys.readouterr().out == table


def test_what_changes_a_search_is_another_benchmark(tmp_path, monkeypatch):
    """And what changes none is not: bm25 has no index, and vectors in memory have one form."""
    folders = [str(write_beir(tmp_path / name, 15)) for name in ("one", "two")]
    monkeypatch.setattr("contaccum.encoder.precision.load_encoder", lambda *_: WordEncoder())

    def benchmark(model="tiny", **settings) -> dict:
        output = str(tmp_path / model)
        return evaluate_benchmark(
            EncoderConfig(model),
            ",".join(folders),
            settings=SearchConfig(**settings),
            output=output,
        )

    index = {"factory": "IVF2,Flat", "search_params": "nprobe=1"}
    found = benchmark(**index)
    assert benchmark(**index, embeddings=str(tmp_path / "vectors")) == found
    for name, value, said in (
        ("factory", "Flat", "factory 'IVF2,Flat', but now 'Flat'"),
        ("search_params", "nprobe=2", "search_params 'nprobe=1', but now 'nprobe=2'"),
    ):
        change = {"factory": value} if name == "factory" else {**index, name: value}
        with pytest.raises(InputError, match=f"data or settings .{said}"):
            benchmark(**change)
    assert benchmark("bm25") == benchmark("bm25", **index)


def test_beir_is_fifteen_sets_of_which_one_has_twelve_forums(capsys):
    for number, name in enumerate(BEIR):
        for inner in [f"{name}/{forum}" for forum in FORUMS] if name == "cqadupstack" else [name]:
            harder(cache_folder() / "beir" / inner, 10 + number)
    folder = cache_folder() / "beir" / "msmarco"
    (folder / "qrels" / "test.tsv").unlink()  # its dev split is what is quoted
    assert (
        main(
            [
                "evaluate", "--model", "bm25", "--data", "beir",
                "--output", str(cache_folder() / "out"),
            ]
        )
        == 0
    )  # fmt: skip
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in lines[1:16]] == list(BEIR)
    assert lines[9][-1] == str(12 * 10)
    table = read_json(cache_folder() / "out" / "benchmark.json")
    scores = {name: row["ndcg@10"] for name, row in table["rows"].items()}
    assert len(set(scores.values())) > 3
    assert table["mean"]["ndcg@10"] == pytest.approx(np.mean(list(scores.values())))
    others = [score for name, score in scores.items() if name != "msmarco"]
    assert table["mean_without_msmarco"]["ndcg@10"] == pytest.approx(np.mean(others))
    assert lines[16][0] == "mean"
    assert lines[17][:3] == ["without", "msmarco", f"{np.mean(others):.4f}"]
    forums = [evaluate("bm25", f"cqadupstack/{forum}")["mean"]["ndcg@10"] for forum in FORUMS[:2]]
    assert scores["cqadupstack"] == pytest.approx(np.mean(forums))


def test_nanobeir_and_lists_are_taken_apart(tmp_path, monkeypatch):
    assert [part.data for part in benchmark_sets("nanobeir", "test")][::12] == [
        "nanobeir/arguana",
        "nanobeir/webis-touche2020",
    ]
    assert len(benchmark_sets("beir,nanobeir", "test")) == 14 + 12 + 13
    assert benchmark_sets(" scifact, nfcorpus,", "test") == benchmark_sets(
        "scifact,nfcorpus", "test"
    )
    assert [part.split for part in benchmark_sets("scifact,fiqa", "dev")] == ["dev", "dev"]
    monkeypatch.chdir(tmp_path)
    for folder in ("a/data", "b/data"):
        (tmp_path / folder).mkdir(parents=True)
    assert [part.row for part in benchmark_sets("a/data,b/data", "test")] == ["a/data", "b/data"]
    assert len(benchmark_sets("cqadupstack", "test")) == 12
    (tmp_path / "beir").mkdir()  # a folder comes before a benchmark of its name
    assert [part.data for part in benchmark_sets("beir,a/data", "test")] == ["beir", "a/data"]
    (tmp_path / "with,comma").mkdir()
    assert len(benchmark_sets("with,comma", "test")) == 1
    mapped = "hub:o/n?query=q&pos=p&neg=a,b"  # a and b are columns
    assert [part.data for part in benchmark_sets(mapped, "test")] == [mapped]


def test_a_relevance_level_cuts_all_measures_but_ndcg():
    random = np.random.default_rng(0)
    qrels = {
        f"q{n}": {f"p{p}": int(grade) for p, grade in enumerate(random.integers(0, 4, 30))}
        for n in range(20)
    }
    run = {
        query: sorted(((p, float(random.random())) for p in grades), key=lambda hit: -hit[1])
        for query, grades in qrels.items()
    }
    found = evaluate_run(qrels, run, cutoffs=[1, 10], relevance_level=2)
    binary = {
        query: {p: int(grade >= 2) for p, grade in grades.items()}
        for query, grades in qrels.items()
    }
    cut, graded = (
        evaluate_run(binary, run, cutoffs=[1, 10]),
        evaluate_run(qrels, run, cutoffs=[1, 10]),
    )
    for name, value in found["mean"].items():
        assert value == pytest.approx((graded if name.startswith("ndcg") else cut)["mean"][name])
        assert graded["mean"][name] != pytest.approx(cut["mean"][name])
    with pytest.raises(InputError, match="relevance_level is 0; expected at least 1"):
        evaluate_run(qrels, run, relevance_level=0)


def test_a_run_file_is_scored_as_by_trec_eval(tmp_path):
    """A passage with the id of its query counts, unlike in BEIR, which a warning says."""
    (tmp_path / "qrels").write_text("1 0 1 1\n1 0 3 2\n2 0 1 1\n")
    lines = [
        "1 Q0 1 1 0.9 x",
        "1 Q0 2 2 0.8 x",
        "1 Q0 3 3 0.7 x",
        "2 Q0 2 1 0.9 x",
        "2 Q0 1 2 0.8 x",
    ]
    (tmp_path / "run").write_text("\n".join(lines) + "\n")
    with pytest.warns(UserWarning, match=r"run: 2 queries found the passage .* \(first: '1'\)"):
        ours = evaluate_run_file(tmp_path / "run", tmp_path / "qrels")["per_query"]
    with open(tmp_path / "qrels") as qrels, open(tmp_path / "run") as run:
        judge = pytrec_eval.RelevanceEvaluator(
            pytrec_eval.parse_qrel(qrels), {"recip_rank", "ndcg"}
        )
        theirs = judge.evaluate(pytrec_eval.parse_run(run))
    assert [ours[query]["mrr@10"] for query in "12"] == [1, 0.5]
    for query in "12":
        assert ours[query]["mrr@10"] == theirs[query]["recip_rank"]
        assert ours[query]["ndcg@10"] == pytest.approx(theirs[query]["ndcg"])
    call = ["evaluate", "--run", str(tmp_path / "run"), "--qrels", str(tmp_path / "qrels")]
    output = tmp_path / "metrics.json"
    assert main([*call, "--ignore_identical_ids", "true", "--output", str(output)]) == 0
    # without it, passage 3 is second for query 1, and passage 1 is first for query 2
    left_out = read_json(output)
    assert [left_out["per_query"][query]["mrr@10"] for query in "12"] == [0.5, 1]
    both = tmp_path / "both.json"
    with pytest.warns(UserWarning, match="run: 2 queries found the passage"):
        evaluate_run_file(tmp_path / "run", tmp_path / "qrels", both)
    with pytest.warns(UserWarning, match="with and without the passages that have the id of their"):
        console_report([str(both), str(output)], "mrr@10")


def test_two_run_files_are_tested_query_by_query(tmp_path, capsys):
    data = harder(tmp_path / "data", 40)
    one, two = tmp_path / "one.trec", tmp_path / "two.trec"
    run = search(EncoderConfig("bm25"), str(data), "train", k=10)
    write_run(one, run)
    write_run(
        two,
        {
            query: [(key, 1 / rank) for rank, (key, _) in enumerate(hits[1:] + hits[:1], 1)]
            for query, hits in run.items()
        },
    )
    qrels = str(data / "qrels" / "train.tsv")
    call = ["evaluate", "--run", str(one), "--qrels", qrels]
    assert main([*call, "--against", str(two), "--metric", "mrr@10"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    values = [evaluate_run_file(str(path), qrels)["per_query"] for path in (one, two)]
    pairs = [[each[query]["mrr@10"] for query in sorted(run)] for each in values]
    difference = np.mean(np.subtract(*pairs))
    assert last.startswith(f"mrr@10 {difference:+.4f} against {two}")
    assert stats.ttest_rel(*pairs).pvalue < 0.0001
    assert "< 0.0001 by t-test" in last
    assert int(re.search(r"of (\d+) queries", last)[1]) == 40
    assert read_run(one).keys() == run.keys()
    short = tmp_path / "short.trec"
    write_run(short, {query: hits[:3] for query, hits in run.items()})
    # three passages answer ndcg@10: nothing relevant stands behind them
    assert main([*call, "--against", str(short)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"ndcg@10 +0.0000 against {short}")
    found = evaluate_run_file(str(short), qrels)["mean"]
    assert {int(name.split("@")[1]) for name in found} == {1, 3, 5, 10}
    assert (found["ndcg@10"], found["recall@10"]) == (found["ndcg@3"], found["recall@3"])
    assert main(["evaluate", "--model", "bm25", "--data", str(data), "--against", str(two)]) == 2
    assert "--against" in capsys.readouterr().err
    assert main([*call, "--metric", "ndcg@20"]) == 2
    assert (
        "one.trec: has too few passages per query for --metric ndcg@20" in capsys.readouterr().err
    )
    wrong = tmp_path / "wrong.trec"  # ranks as scores
    lines = [line.split() for line in one.read_text().splitlines()]
    wrong.write_text("".join(f"{' '.join([*cells[:4], cells[3], 'x'])}\n" for cells in lines))
    with pytest.warns(UserWarning, match=r"wrong\.trec: most scores rise with the ranks"):
        assert read_run(wrong).keys() == run.keys()
    deep = tmp_path / "deep.trec"
    others = [(f"x{number}", -float(number)) for number in range(100, 120)]
    write_run(deep, {query: [*hits, *others] for query, hits in run.items()})
    call[2] = str(deep)
    assert main([*call, "--against", str(short), "--metric", "ndcg@20"]) == 2
    assert "short.trec: has too few passages" in capsys.readouterr().err
    call[2] = str(one)
    alone, tested = tmp_path / "alone.json", tmp_path / "tested.json"
    for invalid in (["--metric", "foo"], ["--against", str(tmp_path / "absent.trec")]):
        assert main([*call, "--against", str(two), *invalid, "--output", str(tested)]) == 2
        assert not tested.exists()
    assert (
        main([*call, "--output", str(alone)])
        == main([*call, "--against", str(two), "--output", str(tested)])
        == 0
    )
    assert alone.read_bytes() == tested.read_bytes()


@pytest.mark.filterwarnings("always:.*without a positive")
def test_data_and_a_run_file_leave_out_the_same_queries(tmp_path, capsys):
    """Those without a positive: what is not relevant at all says nothing about a ranking."""
    data = harder(tmp_path / "data", 20)
    qrels, trec = data / "qrels" / "test.tsv", tmp_path / "run.trec"
    with qrels.open("a") as file:
        file.write("q10\tp10\t0\nq11\tp11\t-1\n")
    searched = ["--model", "bm25", "--data", str(data)]
    assert main(["search", *searched, "--output", str(trec), "--k", "10"]) == 0
    run = read_run(trec) | {"q10": [("p10", 1.0)]}
    write_run(trec, run)
    capsys.readouterr()
    found = []
    for call in ([*searched, "--k", "10"], ["--run", str(trec), "--qrels", str(qrels)]):
        assert main(["evaluate", *call]) == 0
        out, err = capsys.readouterr()
        assert "skipped 2 queries without a positive" in err
        found.append(out)
        assert main(["evaluate", *call, "--strict"]) == 2
        assert (
            "skipped 2 queries without a positive (the first: 'q10'); strict is set"
            in capsys.readouterr().err
        )
    assert found[0] == found[1]
    assert found[0].splitlines()[-1].startswith("10 queries; ndcg@10 ")

"""Statistics of small data sets, against hand counts."""

import json
import warnings

import pytest
from tiny_data import beir, context, dpr, lines, write, write_gzip

from contaccum import evaluate
from contaccum.data.commands import IN_TRAIN, check, render
from contaccum.errors import InputError


def test_check_reports_statistics_of_a_beir_folder(tmp_path):
    beir(tmp_path, "q0\tp0\t1\nq0\tp0\t1\nq0\tp1\t2\nq1\tp1\t0\n")
    with pytest.warns(UserWarning, match="1 query "):
        found = check(tmp_path)
    assert (found["passages"], found["queries"], found["queries without a judgement"]) == (6, 3, 1)
    assert found["words per passage"] == {"min": 2, "median": 2.0, "mean": 2.0, "max": 2}
    split = found["splits"]["train"]
    assert split["queries"] == 2
    assert split["judgements by grade"] == {"0": 1, "1": 1, "2": 1}
    assert split["queries without a positive"] == 1
    assert split["positives per query"] == {"min": 0, "median": 1.0, "mean": 1.0, "max": 2}
    assert "6" in render(found)


def test_check_reads_only_the_chosen_split(tmp_path):
    beir(tmp_path, split="test")
    beir(tmp_path, "q0\tpX\t1\nq0\tp1\t1\n")
    found = check(tmp_path, "test")
    assert list(found["splits"]) == ["test"]
    assert "queries without a judgement" not in found  # those of other splits would count
    with pytest.warns(UserWarning, match="'pX'"):
        check(tmp_path)


def test_check_refuses_a_split_without_a_passage_of_the_corpus(tmp_path):
    beir(tmp_path, "q0\tpX\t1\nq1\tpY\t1\n")
    with pytest.raises(InputError, match="none of the 2 judged passages, such as 'pX'"):
        check(tmp_path)


def test_hidden_files_are_no_splits(tmp_path):
    beir(tmp_path)
    # macOS writes such a file to disks of other systems
    write(tmp_path / "qrels" / "._train.tsv", "\0\5\26\7")
    assert list(check(tmp_path)["splits"]) == ["train"]


def test_check_counts_queries_in_several_splits(tmp_path):
    """Queries with the same text are the same: q1 and q2."""
    beir(tmp_path, "q0\tp0\t1\nq1\tp0\t1\n", "train")
    beir(tmp_path, "q2\tp1\t1\n", "test")
    assert check(tmp_path)["queries in several splits"] == 0
    texts = ["a", "b", "b"]
    write(
        tmp_path / "queries.jsonl",
        lines(*({"_id": f"q{n}", "text": t} for n, t in enumerate(texts))),
    )
    assert check(tmp_path)["queries in several splits"] == 1


def test_check_lists_the_first_errors_only(tmp_path):
    corpus = lines(*({"_id": f"p{n}", "text": ""} for n in range(250)))
    with pytest.raises(InputError) as refused:
        check(write(tmp_path / "corpus.jsonl", corpus))
    found = str(refused.value).splitlines()
    assert found[0].endswith("250 errors; the first 100:")
    assert len(found) == 101
    assert found[-1].startswith(f"  {tmp_path / 'corpus.jsonl'}:100: ")


def test_check_counts_test_queries_with_an_answer_of_training(tmp_path):
    """Passages with the same text are the same; p9 is not in the corpus."""
    folder = beir(tmp_path, "q0\tp0\t1\nq0\tp1\t1\nq1\tp2\t0\nq1\tp3\t1\n", queries=6)
    texts = ["a", "b", "c", "d", "b", "e"]
    write(
        folder / "corpus.jsonl", lines(*({"_id": f"p{n}", "text": t} for n, t in enumerate(texts)))
    )
    # q2 and q3 have an answer of q0, one of them by its text; p2 is no positive in train
    qrels = "q2\tp0\t1\nq2\tp5\t1\nq3\tp4\t1\nq4\tp2\t1\nq5\tp9\t1\nq5\tp5\t1\nq5\tp0\t0\n"
    beir_qrels = "query-id\tcorpus-id\tscore\n" + qrels
    write(folder / "qrels" / "test.tsv", beir_qrels)
    with pytest.warns(UserWarning, match="'p9'"):
        splits = check(folder)["splits"]
    assert splits["test"][IN_TRAIN] == 2
    assert IN_TRAIN not in splits["train"]


def test_queries_with_the_id_of_a_positive_are_counted(tmp_path):
    """Two tables of a database often number their rows from 1.

    In a BEIR folder, a search leaves out the passage with the id of the query.
    """
    for name, ids in (("same", "x\tx"), ("other", "x\ty")):
        write(tmp_path / name / "corpus.jsonl", lines(*({"_id": key, "text": key} for key in "xy")))
        write(
            tmp_path / name / "queries.jsonl", lines(*({"_id": key, "text": key} for key in "xz"))
        )
        judged = f"{ids}\t1\nx\tx\t{int(name == 'same')}\nz\ty\t1\n"
        write(tmp_path / name / "qrels" / "test.tsv", judged)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            check(tmp_path / name)
            evaluate("bm25", str(tmp_path / name))
        assert len(
            [each for each in caught if "with the id of a positive" in str(each.message)]
        ) == (2 if name == "same" else 0)


def test_check_reports_statistics_of_examples(tmp_path):
    records = [
        dpr("one two?", [context(1), context(2)], [context(3)], [context(4)]),
        dpr(
            "three?",
            [{"title": "", "text": "text 1", "passage_id": 5}, {"text": "text 1", "passage_id": 6}],
        ),
    ]
    found = check(write(tmp_path / "t.json", json.dumps(records)))
    assert (found["kind"], found["rows"]) == ("dpr", 2)
    # "text 1" occurs twice
    assert (found["different queries"], found["different passages"]) == (2, 5)
    assert found["passages without a title"] == 1
    assert found["words per query"] == {"min": 1, "median": 1.5, "mean": 1.5, "max": 2}
    assert found["positives per query"]["mean"] == 1.5
    assert found["hard negatives per query"] == {"min": 0, "median": 0.5, "mean": 0.5, "max": 1}
    assert found["other negatives per query"]["max"] == 1


def test_the_file_name_decides_between_corpus_and_queries(tmp_path):
    bare, titled = {"_id": 1, "text": "a b"}, {"_id": 2, "title": "T", "text": "c"}
    for name in ("corpus.jsonl", "corpus.jsonl.gz"):
        made = write_gzip if name.endswith(".gz") else write
        assert check(made(tmp_path / name, lines(bare)))["passages"] == 1
    assert check(write(tmp_path / "other.jsonl", lines(bare, titled)))["passages"] == 2
    assert check(write(tmp_path / "queries.jsonl", lines(titled, bare)))["queries"] == 2
    assert check(write(tmp_path / "other.jsonl", lines(bare)))["passages"] == 1


def test_check_counts_and_validates_teacher_scores(tmp_path):
    scored = {"query": "a", "pos": ["x"], "neg": ["y"], "pos_scores": [2], "neg_scores": [1]}
    records = [
        scored,
        {"query": "b", "pos": [], "neg": ["y"], "neg_scores": [1]},
        {"query": "c", "pos": ["x"], "neg": []},
    ]
    path = write(tmp_path / "t.jsonl", lines(*records))
    with pytest.warns(UserWarning, match="skipped 1 query without a positive"):
        found = check(path)
    assert (found["rows"], found["examples with a teacher's scores"]) == (3, 1)
    assert "examples with a teacher's scores" in render(found)
    plain = check(write(tmp_path / "plain.jsonl", lines(records[2])))
    assert "examples with a teacher's scores" not in plain
    # with too few scores, the example has none; with too many, it is invalid
    some = write(tmp_path / "some.jsonl", lines(scored, {**scored, "query": "b", "neg_scores": []}))
    assert check(some)["examples with a teacher's scores"] == 1
    wrong = write(tmp_path / "wrong.jsonl", lines(scored, {**scored, "neg_scores": [1, 2]}))
    with pytest.raises(InputError, match=":2: found 2 values in 'neg_scores' but 1 text in 'neg'"):
        check(wrong)

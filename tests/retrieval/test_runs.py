"""TREC run files: what is written can be read, in the same order; what cannot be carried is
refused."""

import shutil

import numpy as np
import pytest
from helpers import write_beir
from hypothesis import given
from hypothesis import strategies as st
from tiny_data import beir, lines, write

from contaccum import search
from contaccum.errors import InputError
from contaccum.retrieval.runs import ranked, read_run, write_run

scores = st.floats(allow_nan=False, allow_infinity=False, width=32)
names = st.text(st.characters(categories=["L", "N", "P"]), min_size=1, max_size=6)


@given(
    st.dictionaries(
        names, st.dictionaries(names, scores, min_size=1, max_size=8), min_size=1, max_size=4
    )
)
def test_a_run_read_back_is_the_run_written(tmp_path_factory, results):
    run = {query: ranked(hits.items()) for query, hits in results.items()}
    path = tmp_path_factory.mktemp("run") / "run.trec"
    write_run(path, run)
    assert read_run(path) == run


def test_lines_have_trecs_six_columns(tmp_path):
    write_run(tmp_path / "r", {"q1": [("d2", 1.5), ("d1", np.float32(0.1))]})
    score = float(np.float32(0.1))
    assert (tmp_path / "r").read_text() == (
        f"q1 Q0 d2 1 1.5 contaccum\nq1 Q0 d1 2 {score!r} contaccum\n"
    )


def test_equal_scores_stand_by_id_greatest_first_in_utf8_order():
    pairs = [("b", 1.0), ("é", 1.0), ("a", 2.0), ("c", 1.0), ("z", 1.0), ("😀", 1.0), ("ﬀ", 1.0)]
    assert [key for key, _ in ranked(pairs)] == ["a", "😀", "ﬀ", "é", "z", "c", "b"]
    by_bytes = sorted((key for key, score in pairs if score == 1.0), key=str.encode, reverse=True)
    assert [key for key, _ in ranked(pairs)][1:] == by_bytes


def test_the_score_decides_and_not_the_rank_column_or_the_lines_order(tmp_path):
    path = tmp_path / "run"
    path.write_text("q Q0 low 1 0.1 x\nq\tQ0\thigh\t9\t0.9\tx\r\n\nq Q0 middle 0 5e-1 x\n")
    assert read_run(path) == {"q": [("high", 0.9), ("middle", 0.5), ("low", 0.1)]}


@pytest.mark.parametrize(
    "run",
    [
        {"q 1": [("d", 1.0)]},
        {"q": [("a\u2028b", 1.0)]},
    ],
)
def test_ids_with_white_space_are_refused_and_no_file_is_left(tmp_path, run):
    with pytest.raises(InputError, match="white space"):
        write_run(tmp_path / "run", run)
    assert list(tmp_path.iterdir()) == []
    # before anything is encoded: there is no encoder in this folder
    beir(tmp_path / "data")
    corpus = lines(*({"_id": f"p {n}", "text": f"text {n}"} for n in range(6)))
    write(tmp_path / "data" / "corpus.jsonl", corpus)
    write(tmp_path / "data" / "qrels" / "train.tsv", "q0\tp 0\t1\n")
    with pytest.raises(InputError, match="id 'p 0' is empty or contains white space"):
        search(tmp_path / "none", tmp_path / "data", "train", output=tmp_path / "run")


def test_a_judged_query_without_a_positive_is_searched_for(tmp_path):
    folder = write_beir(tmp_path / "data")
    with (folder / "qrels" / "test.tsv").open("a") as file:
        file.write("q39\tp1\t0\n")
    assert len(search("bm25", folder, k=1)) == 11


def test_all_queries_of_a_folder_without_qrels_are_searched_for(tmp_path):
    folder = write_beir(tmp_path / "data")
    shutil.rmtree(folder / "qrels")
    run = search("bm25", folder, k=1, output=tmp_path / "run.trec")
    assert len(run) == 40
    assert all(hits[0][0] == f"p{key[1:]}" for key, hits in run.items())

"""MS MARCO's raw files: collection.tsv and queries.tsv, without a header and without quoting."""

import gzip
from pathlib import Path

import pytest
from helpers import open_corpus, open_queries, open_retrieval_set

from contaccum.cli import main
from contaccum.data.commands import check
from contaccum.errors import InputError
from contaccum.formats.readers import kind_of_data

PASSAGES = {
    "0": 'The "Manhattan Project", a fox\'s den',
    "7067032": '"quoted whole"',
    "12": "a lazy dog, who sleeps",
    "5": "zwölf 🦊 fox",
}
QUERIES = {"121352": "define fox", "634306": 'dog\'s "sleep" time?'}


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CONTACCUM_CACHE", str(tmp_path / "cache"))
    Path("d/qrels").mkdir(parents=True)
    for folder in (".", "d"):
        (Path(folder) / "collection.tsv").write_text(lines(PASSAGES))
        (Path(folder) / "queries.tsv").write_text(lines(QUERIES))
    # the form of qrels.dev.small.tsv
    Path("d/qrels/dev.tsv").write_text("121352 0 5 1\n634306 0 12 1\n")


def lines(texts: dict[str, str]) -> str:
    return "".join(f"{key}\t{text}\n" for key, text in texts.items())


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("collection.tsv", lines(PASSAGES), "corpus"),
        ("queries.tsv", lines(QUERIES), "queries"),
        ("msmarco-test2019-queries.tsv", lines(QUERIES), "queries"),
        ("psgs.tsv", "id\ttext\ttitle\n1\tx\ty\n", "corpus"),
        ("qa.csv", 'who\t"[""a""]"\n', "questions"),
        ("queries.csv", "who was it?\t['a']\n", "questions"),
    ],
)
def test_tables_of_two_columns_are_told_apart(name, content, kind, tmp_path):
    path = tmp_path / "other" / name
    path.parent.mkdir()
    path.write_bytes(gzip.compress(content.encode()) if name.endswith(".gz") else content.encode())
    assert kind_of_data(path) == kind
    assert check(path)["kind"] == kind


@pytest.mark.parametrize("header", ["id\ttext\n", "pid\tpassage\n"])
def test_a_header_is_no_passage(header):
    Path("collection.tsv").write_text(header + lines(PASSAGES))
    Path("queries.tsv").write_text("qid\tquery\n" + lines(QUERIES))
    assert open_corpus("collection.tsv")["id"][:] == list(PASSAGES)
    assert open_queries("queries.tsv") == QUERIES


def test_texts_are_read_as_they_are():
    corpus = open_corpus("collection.tsv")
    assert dict(zip(corpus["id"], corpus["text"], strict=True)) == PASSAGES
    assert set(corpus["title"]) == {""}
    assert open_queries("queries.tsv") == QUERIES


def test_a_folder_of_raw_files_is_a_data_set(capsys):
    judged = open_retrieval_set("d", "dev")
    assert judged.queries == QUERIES
    assert judged.qrels == {"121352": {"5": 1}, "634306": {"12": 1}}
    assert main(["evaluate", "--model", "bm25", "--data", "d", "--split", "dev"]) == 0
    assert (
        main(
            [
                "search", "--model", "bm25", "--data", "collection.tsv", "--query", "a lazy dog",
                "--k", "1",
            ]
        )
        == 0
    )  # fmt: skip
    assert "sleeps" in capsys.readouterr().out
    assert main(["data", "convert", "d", "pairs.jsonl", "--to", "jsonl", "--split", "dev"]) == 0
    assert (
        main(
            [
                "mine", "--model", "bm25", "--data", "pairs.jsonl", "--corpus", "collection.tsv",
                "--output", "mined.jsonl",
            ]
        )
        == 0
    )  # fmt: skip


def test_a_csv_of_other_columns_is_answered_with_the_way_to_read_it(tmp_path):
    path = tmp_path / "faq.csv"
    path.write_text("question,answer\nwhere is it,it is here\n")
    with pytest.raises(InputError, match=r'found 1 column .* give "hub:NAME\?query=COLUMN'):
        check(path)

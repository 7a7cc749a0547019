"""Every reader against the written data (csv and json modules as reference), and every refusal."""

import json

import pytest
from helpers import read_corpus, read_examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_data import context, dpr, lines, write, write_gzip

from contaccum.errors import InputError
from contaccum.formats.json_records import json_records
from contaccum.formats.readers import read_qrels
from contaccum.formats.records import Passage, content_id


def refusal(read, path) -> str:
    """Return the error message of a reader that refuses a file."""
    with pytest.raises(InputError) as caught:
        list(read(path))
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert str(path) in sentence
    return sentence


# BEIR


def test_lines_end_only_at_newlines(tmp_path):
    odd = "one\u2028two\u0085three\x0bfour"
    raw = json.dumps({"_id": "a", "title": "", "text": odd.replace("\x0b", "")}, ensure_ascii=False)
    path = write(tmp_path / "c.jsonl", "\ufeff" + raw + "\r\n\r\n" + raw.replace('"a"', '"b"'))
    assert [(passage.id, passage.text) for passage in read_corpus(path)] == [
        ("a", odd.replace("\x0b", "")),
        ("b", odd.replace("\x0b", "")),
    ]


def test_qrels_are_read_with_and_without_header_and_in_trec_format(tmp_path):
    expected = [("q 1", "p", 2), ("q2", "p", 0)]
    for number, text in enumerate(
        ["query-id\tcorpus-id\tscore\nq 1\tp\t2\nq2\tp\t0\n", "q 1\tp\t2\r\nq2\tp\t0\r\n"]
    ):
        assert [row[1:] for row in read_qrels(write(tmp_path / f"{number}.tsv", text))] == expected
    for key in ("query", "qid", "query-id"):  # an id, where a grade stands behind it
        assert [
            row[1:] for row in read_qrels(write(tmp_path / "h.tsv", f"{key}\tp\t1\nq2\tp\t0\n"))
        ] == [
            (key, "p", 1),
            ("q2", "p", 0),
        ]
    trec = write(tmp_path / "trec.qrels", "q1 0 p  2\nq2 0 p -1\n")
    assert list(read_qrels(trec)) == [((trec, 1, 0), "q1", "p", 2), ((trec, 2, 0), "q2", "p", -1)]


# DPR


def test_dpr_corpus_reads_a_passage_longer_than_the_csv_modules_limit(tmp_path):
    text = "word " * 40_000  # 200,000 characters; the csv module stops at 131,072
    rows = [Passage("1", "T", text.strip()), Passage("2", "", "x")]
    content = "".join(f"{key}\t{text}\t{title}\n" for key, title, text in rows)
    assert list(read_corpus(write(tmp_path / "psgs.tsv", content))) == rows


def test_two_stray_quotes_do_not_hide_the_rows_between_them(tmp_path):
    rows = [f"{n}\t{'word ' * 200}\tT\n" for n in range(2, 402)]
    path = write(tmp_path / "psgs.tsv", '1\t"open\tT\n' + "".join(rows) + '402\tend"\tT\n')
    assert "psgs.tsv:1: field larger than field limit (131072)" in refusal(read_corpus, path)
    few = write(tmp_path / "few.tsv", '1\t"open\tT\n2\tmiddle\tT\n3\tend"\tT\n4\tlast\tT\n')
    assert "few.tsv:1: a cell in quotes contains a line break and a tab" in refusal(
        read_corpus, few
    )
    control = write(tmp_path / "lines.tsv", '1\tone\tT\n2\t"two\nlines"\tT\n')
    assert [passage.text for passage in read_corpus(control)] == ["one", "two\nlines"]


@pytest.mark.parametrize("blank", ["", " \n\r\n"])
def test_a_dpr_header_is_skipped_also_after_blank_lines(tmp_path, blank):
    path = write(tmp_path / "psgs.tsv", f"{blank}id\ttext\ttitle\n1\tx\ty\nid\ttext\ttitle\n")
    assert list(read_corpus(path)) == [Passage("1", "y", "x"), Passage("id", "title", "text")]


def test_dpr_examples_are_read_from_a_list_and_from_lines(tmp_path):
    records = [
        dpr("one?", [context("7")], [context(8)], [{"title": "T", "text": "further"}]),
        dpr("two?", [], [], [], query_id="Q"),
        dpr("three?", [{"title": "T", "text": "t", "psg_id": 9}]),
    ]
    for name, text in (
        ("a.json", json.dumps(records, indent=1)),
        ("b.json", json.dumps(records)),
        ("c", lines(*records)),
    ):
        first, second, third = read_examples(write(tmp_path / name, text))
        assert first.query == (f"unnamed-query-{content_id('', 'one?')}", "one?")
        assert first.positives == [Passage("7", "title 7", "text 7")]
        assert first.negatives == [Passage("8", "title 8", "text 8")]
        assert first.others == [Passage(content_id("T", "further"), "T", "further")]
        assert second.query == ("Q", "two?")
        assert not second.positives
        assert third.positives[0].id == "9"
    assert [
        example.query for example in read_examples(write_gzip(tmp_path / "d", json.dumps(records)))
    ][2][1] == "three?"


VALUES = st.dictionaries(
    st.text(max_size=5),
    st.recursive(
        st.text()
        | st.booleans()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.integers(),
        st.lists,
        max_leaves=5,
    ),
)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(VALUES, max_size=6), st.integers(1, 40), st.sampled_from([None, 1]))
def test_json_list_equals_json_loads_for_any_window_size(
    tmp_path, monkeypatch, records, window, indent
):
    monkeypatch.setattr("contaccum.formats.json_records.CHUNK", window)
    path = write(tmp_path / "t.json", json.dumps(records, indent=indent, ensure_ascii=True))
    found = [record for _, record in json_records(path, dict, "things")]
    assert json.dumps(found) == json.dumps(records)


# JSONL and Tevatron


def test_jsonl_of_query_pos_neg_is_read(tmp_path):
    records = [
        {"query": "one", "pos": ["a", "b"], "neg": ["c"], "pos_scores": [1, 2]},
        {"query": "two", "pos": "a"},
        {"query_id": "Q", "query": "three", "pos": ["a"], "pos_id": ["A"], "neg": []},
    ]
    first, second, third = read_examples(write(tmp_path / "t.jsonl", lines(*records)))
    assert first.query == (f"unnamed-query-{content_id('', 'one')}", "one")
    assert [passage.text for passage in first.positives] == ["a", "b"]
    assert second.positives == [Passage(content_id("", "a"), "", "a")] == list(first.positives[:1])
    assert third.query.id == "Q"
    assert third.positives == [Passage("A", "", "a")]


def test_tevatron_examples_are_read(tmp_path):
    record = {
        "query_id": 5,
        "query": "one",
        "positive_passages": [{"docid": "d1", "title": "T", "text": "a"}],
        "negative_passages": [{"docid": "d2", "text": "b"}],
    }
    (example,) = read_examples(write_gzip(tmp_path / "t.jsonl.gz", lines(record)))
    assert example.query == ("5", "one")
    assert example.positives == [Passage("d1", "T", "a")]
    assert example.negatives == [Passage("d2", "", "b")]
    bad = {**record, "negative_passages": [{"docid": "d2"}]}
    sentence = refusal(read_examples, write(tmp_path / "t.jsonl", lines(bad)))
    assert "negative_passages" in sentence


# telling formats apart

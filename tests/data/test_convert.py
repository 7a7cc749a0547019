"""Round trips between the formats, with what each can hold, and its refusals."""

import itertools
import json

import pytest
from tiny_data import beir, context, dpr, lines, write

from contaccum.data.convert import convert
from contaccum.data.corpus import load_corpus
from contaccum.data.formats import numbered_examples, read_examples
from contaccum.data.tables import load_retrieval_set
from contaccum.errors import InputError

FORMS = ("beir", "dpr", "jsonl", "tevatron")


def meaning(path, split="train"):
    """Query texts, positives and hard negatives by id with their contents, whatever the format."""
    if path.is_dir():
        found = load_retrieval_set(path, split)
        contents = {row["id"]: f"{row['title']} {row['text']}".strip() for row in found.corpus}
        return {
            (key, found.queries[key]): (
                {row: contents[row] for row, grade in grades.items() if grade > 0},
                {row: contents[row] for row, grade in grades.items() if grade <= 0},
            )
            for key, grades in found.qrels.items()
        }
    return {
        example.query: tuple({row.id: row.content for row in rows} for rows in (example.positives, example.negatives))
        for example in read_examples(path)
    }


@pytest.mark.parametrize(("first", "second"), list(itertools.permutations(FORMS, 2)))
def test_there_and_back_means_the_same(tmp_path, first, second):
    source = beir(tmp_path / "source")
    convert(source, tmp_path / "a", first)
    convert(tmp_path / "a", tmp_path / "b", second)
    convert(tmp_path / "b", tmp_path / "c", first)
    expected = meaning(source)
    assert len(expected) == 3
    assert meaning(tmp_path / "a") == meaning(tmp_path / "b") == meaning(tmp_path / "c") == expected


@pytest.mark.parametrize("form", FORMS)
def test_a_format_to_itself_is_byte_equal_the_second_time(tmp_path, form):
    convert(beir(tmp_path / "source"), tmp_path / "a", form)
    convert(tmp_path / "a", tmp_path / "b", form)
    files = [path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*")] if form == "beir" else ["."]
    for name in files:
        if (tmp_path / "a" / name).is_file():
            assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_titles_survive_where_there_is_a_place_for_them(tmp_path):
    for form in ("dpr", "tevatron"):
        convert(beir(tmp_path / "source"), tmp_path / form, form)
        assert next(read_examples(tmp_path / form)).positives == [("p0", "title 0", "text 0")]


def test_dpr_json_is_what_json_reads_and_keeps_other_negatives(tmp_path):
    records = [dpr("one?", [context(1)], [context(2)], [context(3)])]
    convert(write(tmp_path / "s.json", json.dumps(records)), tmp_path / "t.json", "dpr")
    (record,) = json.loads((tmp_path / "t.json").read_text())
    assert {name: [row["passage_id"] for row in record[name]] for name in record if name.endswith("ctxs")} == {
        "positive_ctxs": ["1"],
        "hard_negative_ctxs": ["2"],
        "negative_ctxs": ["3"],
    }
    convert(tmp_path / "t.json", tmp_path / "b", "beir")
    assert load_corpus(tmp_path / "b")["id"][:] == ["1", "2", "3"]


def test_a_beir_folder_keeps_its_whole_corpus_and_the_split_its_name(tmp_path):
    convert(beir(tmp_path / "s", split="dev"), tmp_path / "t", "beir", split="dev")
    assert len(load_corpus(tmp_path / "t")) == 6
    assert meaning(tmp_path / "t", "dev") == meaning(tmp_path / "s", "dev")


def test_queries_without_a_positive_are_left_out(tmp_path):
    source = write(tmp_path / "s.jsonl", lines({"query": "a", "pos": []}, {"query": "b", "pos": ["x"]}))
    with pytest.warns(UserWarning, match="1 queries"):
        convert(source, tmp_path / "t", "dpr")
    assert [example.query.text for example in read_examples(tmp_path / "t")] == ["b"]


def test_a_target_that_holds_something_is_refused(tmp_path):
    source = beir(tmp_path / "s")
    file = write(tmp_path / "file", "mine")
    for form in FORMS:
        with pytest.raises(InputError, match="exists already"):
            convert(source, file, form)
    with pytest.raises(InputError, match="exists already"):
        convert(source, source, "beir")
    assert file.read_text() == "mine"
    (tmp_path / "empty").mkdir()
    convert(source, tmp_path / "empty", "beir")
    assert meaning(tmp_path / "empty") == meaning(source)


def test_bad_input_leaves_nothing_behind(tmp_path):
    source = write(tmp_path / "s.jsonl", lines({"query_id": "a\tb", "query": "x", "pos": ["y"]}))
    with pytest.raises(InputError, match=r"'a\\tb'"):
        convert(source, tmp_path / "t", "beir")
    with pytest.raises(InputError, match="'csv'"):
        convert(source, tmp_path / "t", "csv")
    assert {path.name for path in tmp_path.iterdir()} == {"s.jsonl", "cache"}


def scored_lines(folder):
    """A query with scores, one whose repeated passage has two, one without; 0.1 is no number of four bytes."""
    records = [
        {"query_id": "a", "query": "a", "pos": ["x"], "neg": ["y", "z"], "pos_scores": [7], "neg_scores": [0.1, -3e10]},
        {"query_id": "b", "query": "b", "pos": ["x", "x"], "neg": [], "pos_scores": [1.5, 9]},
        {"query_id": "c", "query": "c", "pos": ["z"], "neg": ["x"]},
    ]
    return write(folder / "scored.jsonl", lines(*records))


def scores_of(path):
    return {example.query.id: example.scores for _, example in numbered_examples(path, scores=True)}


def test_the_scores_of_a_teacher_stay_with_their_passages(tmp_path):
    source = scored_lines(tmp_path)
    expected = {"a": ([7], [0.1, -3e10]), "b": ([1.5], []), "c": None}
    assert scores_of(source) != expected  # the repeated passage
    for form, then in (("jsonl", "tevatron"), ("tevatron", "jsonl")):
        convert(source, tmp_path / form, form)
        convert(tmp_path / form, tmp_path / f"{form}-{then}", then)
        assert scores_of(tmp_path / form) == scores_of(tmp_path / f"{form}-{then}") == expected
    assert b'"neg_scores": [0.1, -30000000000.0]' in (tmp_path / "jsonl").read_bytes()


@pytest.mark.parametrize("form", ["beir", "dpr"])
def test_scores_without_a_place_are_lost_with_one_warning(form, tmp_path):
    source = scored_lines(tmp_path)
    with pytest.warns(
        UserWarning, match=f"scored.jsonl: a teacher's scores are lost, for which {form} has no place"
    ) as said:
        convert(source, tmp_path / "t", form)
    assert len(said) == 1
    assert form == "beir" or b"score" not in (tmp_path / "t").read_bytes()
    assert meaning(tmp_path / "t") == meaning(source)


def test_a_score_that_is_none_is_refused_before_anything_is_written(tmp_path):
    source = write(tmp_path / "s.jsonl", lines({"query": "a", "pos": ["x"], "pos_scores": ["high"]}))
    with pytest.raises(InputError, match=r"line 1, pos_scores\[0\]: found a string, expected a score"):
        convert(source, tmp_path / "t", "tevatron")
    assert not (tmp_path / "t").exists()

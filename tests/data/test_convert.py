"""Round trips between the formats, and refused conversions."""

import itertools
import json
import re

import pytest
from helpers import open_corpus, open_retrieval_set, read_examples
from tiny_data import beir, context, dpr, lines, write

from contaccum.config import DataPolicy
from contaccum.data.commands import convert
from contaccum.data.dataset import open_dataset
from contaccum.errors import InputError
from contaccum.evaluation.evaluate import evaluate
from contaccum.formats.readers import numbered_examples

FORMS = ("beir", "dpr", "jsonl", "tevatron")


def meaning(path, split="train"):
    """Query texts, and contents of positives and hard negatives by id, in any format."""
    if path.is_dir():
        found = open_retrieval_set(path, split)
        contents = {row["id"]: f"{row['title']} {row['text']}".strip() for row in found.corpus}
        return {
            (key, found.queries[key]): (
                {row: contents[row] for row, grade in grades.items() if grade > 0},
                {row: contents[row] for row, grade in grades.items() if grade <= 0},
            )
            for key, grades in found.qrels.items()
        }
    return {
        example.query: tuple(
            {row.id: row.content for row in rows} for rows in (example.positives, example.negatives)
        )
        for example in read_examples(path)
    }


@pytest.mark.parametrize(("first", "second"), list(itertools.permutations(FORMS, 2)))
def test_conversion_round_trip_keeps_the_content(tmp_path, first, second):
    source = beir(tmp_path / "source")
    convert(source, tmp_path / "a", first)
    convert(tmp_path / "a", tmp_path / "b", second)
    convert(tmp_path / "b", tmp_path / "c", first)
    expected = meaning(source)
    assert len(expected) == 3
    assert meaning(tmp_path / "a") == meaning(tmp_path / "b") == meaning(tmp_path / "c") == expected


def test_titles_are_kept_in_formats_with_a_title_field(tmp_path):
    for form in ("dpr", "tevatron"):
        convert(beir(tmp_path / "source"), tmp_path / form, form)
        assert next(read_examples(tmp_path / form)).positives == [("p0", "title 0", "text 0")]


def test_dpr_output_is_json_and_keeps_other_negatives(tmp_path):
    records = [dpr("one?", [context(1)], [context(2)], [context(3)])]
    convert(write(tmp_path / "s.json", json.dumps(records)), tmp_path / "t.json", "dpr")
    (record,) = json.loads((tmp_path / "t.json").read_text())
    assert {
        name: [row["passage_id"] for row in record[name]]
        for name in record
        if name.endswith("ctxs")
    } == {
        "positive_ctxs": ["1"],
        "hard_negative_ctxs": ["2"],
        "negative_ctxs": ["3"],
    }
    convert(tmp_path / "t.json", tmp_path / "b", "beir")
    assert open_corpus(tmp_path / "b")["id"][:] == ["1", "2", "3"]


def test_beir_to_beir_keeps_the_whole_corpus_and_split_name(tmp_path):
    convert(beir(tmp_path / "s", split="dev"), tmp_path / "t", "beir", split="dev")
    assert len(open_corpus(tmp_path / "t")) == 6
    assert meaning(tmp_path / "t", "dev") == meaning(tmp_path / "s", "dev")


def test_beir_to_beir_keeps_the_other_splits(tmp_path):
    """Also when train is divided: q3 is only in test, q2 in both."""
    source = beir(tmp_path / "s", queries=5)  # nothing judges q4
    beir(source, "q2\tp0\t2\nq3\tp1\t1\nq3\tp2\t0\n", "test", queries=5)
    hidden = write(source / "qrels" / "hidden.tsv", "q1\tp3\t0\nq9\tp1\t0\n")  # without positives
    said = convert(source, tmp_path / "copy", "beir")
    assert said.splitlines()[-2:] == [
        "hidden: 2 queries, 2 judgements", "test: 2 queries, 3 judgements"
    ]  # fmt: skip
    copied = tmp_path / "copy" / "qrels" / "hidden.tsv"
    assert copied.read_text() == "query-id\tcorpus-id\tscore\n" + hidden.read_text()
    convert(source, tmp_path / "divided", "beir", splits="0.7,0.3,0")
    expected = open_retrieval_set(source, "test")
    for folder in (tmp_path / "copy", tmp_path / "divided"):
        found = open_retrieval_set(folder, "test")
        assert (found.queries, found.qrels) == (expected.queries, expected.qrels)
        assert open_dataset(folder).queries.keys() == {f"q{number}" for number in range(5)}
    parts = [meaning(tmp_path / "divided", split) for split in ("train", "dev")]
    assert all(parts)
    assert parts[0] | parts[1] == meaning(source)
    with pytest.raises(InputError, match=r"makes a split test, but .* has one; use a share of 0"):
        convert(source, tmp_path / "other", "beir", splits="0.5,0,0.5")
    assert not (tmp_path / "other").exists()


def test_a_copy_of_a_beir_folder_has_its_grades(tmp_path):
    """Also of a negative with the text of a positive, which training leaves out."""
    graded = "q0\tp0\t3.0\nq0\tp1\t1\nq0\tp2\t0\nq0\tp3\t-1\nq1\tp1\t2\nq1\tp5\t0\n"
    source = beir(tmp_path / "s", graded)
    with (source / "corpus.jsonl").open("a") as corpus:
        corpus.write(lines({"_id": "copy", "title": "title 0", "text": "text 0"}))
    with (source / "qrels" / "train.tsv").open("a") as qrels:
        qrels.write("q0\tcopy\t0\n")
    with pytest.warns(UserWarning, match="left out 1 hard negative"):
        said = convert(source, tmp_path / "t", "beir", splits="0.5,0,0.5")
    expected = open_retrieval_set(source, "train").qrels
    found = [open_retrieval_set(tmp_path / "t", split).qrels for split in ("train", "test")]
    assert found[0] | found[1] == expected
    assert sorted(line[-12:] for line in said.splitlines()[1:]) == ["2 judgements", "5 judgements"]


def test_files_with_equal_ids_of_queries_and_passages_become_beir_folders(tmp_path):
    """A search in a BEIR folder leaves out the passage with the id of the query."""
    records = [
        {"query_id": n, "query": f"word{n}", "pos": [f"word{n} here"], "pos_id": [n]}
        for n in range(10)
    ]
    source = write(tmp_path / "pairs.jsonl", lines(*records))
    convert(source, tmp_path / "beir", "beir", splits="0.5,0,0.5")
    for split in ("train", "test"):
        assert evaluate("bm25", tmp_path / "beir", split=split)["mean"]["ndcg@1"] == 1.0
    # the ids stay in other formats, and in a copy of a BEIR folder
    convert(source, tmp_path / "copy.jsonl", "jsonl")
    assert list(scores_of(tmp_path / "copy.jsonl")) == [str(n) for n in range(10)]
    folder = beir(tmp_path / "arguana", "p0\tp1\t1\n")
    write(folder / "queries.jsonl", lines({"_id": "p0", "text": "word"}))
    convert(folder, tmp_path / "copy", "beir")
    assert judged(tmp_path / "copy", "train") == ["p0"]


def judged(folder, split):
    return list(open_retrieval_set(folder, split).qrels)


def test_splits_divide_the_queries_by_their_text(tmp_path):
    """40 queries with 20 different texts; the order of the file does not matter."""
    records = [{"_id": f"q{number:02}", "text": f"text {number // 2}"} for number in range(40)]
    folders = []
    for name, queries in (("a", records), ("b", records[::-1])):
        source = beir(tmp_path / name, "".join(f"{r['_id']}\tp0\t1\n" for r in queries))
        write(source / "queries.jsonl", lines(*queries))
        folders.append(tmp_path / f"{name}-divided")
        convert(source, folders[-1], "beir", splits="0.6,0.1,0.3")
    found = [judged(folders[0], split) for split in ("train", "dev", "test")]
    assert [len(names) for names in found] == [24, 4, 12]
    assert sorted(itertools.chain(*found)) == [record["_id"] for record in records]
    for names in found:  # q00 and q01 have one text, and so on
        assert len({int(name[1:]) // 2 for name in names}) == len(names) / 2
    for split, names in zip(("train", "dev", "test"), found, strict=True):
        assert sorted(judged(folders[1], split)) == sorted(names)
    convert(tmp_path / "a", tmp_path / "other", "beir", splits="0.6,0.1,0.3", seed=1)
    assert judged(tmp_path / "other", "train") != found[0]  # negative control
    assert len(open_corpus(tmp_path / "other")) == 6  # the whole corpus


def test_conversion_says_what_was_written(tmp_path):
    source = beir(tmp_path / "s")  # 6 passages; 3 queries with a positive and a hard negative
    write(source / "qrels" / "train.tsv", "q0\tp0\t1\nq0\tp1\t1\nq1\tp1\t1\nq1\tp2\t0\nq2\tp2\t0\n")
    with pytest.warns(UserWarning, match="skipped 1 query without a positive"):
        said = convert(source, tmp_path / "beir", "beir")
    assert said == f"{tmp_path / 'beir'}: 6 passages\ntrain: 2 queries, 4 judgements"
    path = tmp_path / "beir"
    divided = convert(path, tmp_path / "divided", "beir", splits="0.5,0,0.5").splitlines()
    assert sorted(divided[1:]) == [f"{split}: 1 query, 2 judgements" for split in ("test", "train")]
    said = convert(path, tmp_path / "j.jsonl", "jsonl")
    assert said.endswith("j.jsonl: 2 queries with 3 positives and 1 hard negative")


def test_a_split_with_a_share_of_zero_is_not_written(tmp_path):
    convert(beir(tmp_path / "s"), tmp_path / "t", "beir", splits="0.7,0.3,0")
    assert {path.name for path in (tmp_path / "t" / "qrels").iterdir()} == {"train.tsv", "dev.tsv"}


@pytest.mark.parametrize(
    ("splits", "form", "said"),
    [
        ("0.8,0.1", "beir", "--splits 0.8,0.1: expected the shares of train, dev and test"),
        ("nan,0.5,0.5", "beir", "three numbers that add up to 1"),
        ("0.8,0.1,0.1", "jsonl", "was given with --to jsonl; it needs --to beir"),
        ("0.9,0.1,0", "beir", "has 3 different queries, too few for a split dev"),
    ],
)  # fmt: skip
def test_splits_that_cannot_be_made_are_refused(tmp_path, splits, form, said):
    with pytest.raises(InputError, match=re.escape(said)):
        convert(beir(tmp_path / "s"), tmp_path / "t", form, splits=splits)
    assert not (tmp_path / "t").exists()


def test_a_seed_without_splits_is_refused(tmp_path):
    with pytest.raises(InputError, match="--seed 5 has no effect without --splits"):
        convert(beir(tmp_path / "s"), tmp_path / "t", "beir", seed=5)


def scored_lines(folder):
    """Queries with scores, with two scores of one passage, and without; 0.1 is not exact in
    float32."""
    records = [
        {
            "query_id": "a",
            "query": "a",
            "pos": ["x"],
            "neg": ["y", "z"],
            "pos_scores": [7],
            "neg_scores": [0.1, -3e10],
        },
        {"query_id": "b", "query": "b", "pos": ["x", "x"], "neg": [], "pos_scores": [1.5, 9]},
        {"query_id": "c", "query": "c", "pos": ["z"], "neg": ["x"]},
    ]
    return write(folder / "scored.jsonl", lines(*records))


def scores_of(path):
    return {example.query.id: example.scores for _, example in numbered_examples(path)}


def test_teacher_scores_stay_with_their_passages(tmp_path):
    source = scored_lines(tmp_path)
    expected = {"a": ([7], [0.1, -3e10]), "b": ([1.5], []), "c": None}
    assert scores_of(source) != expected  # the repeated passage
    for form, then in (("jsonl", "tevatron"), ("tevatron", "jsonl")):
        convert(source, tmp_path / form, form)
        convert(tmp_path / form, tmp_path / f"{form}-{then}", then)
        assert scores_of(tmp_path / form) == scores_of(tmp_path / f"{form}-{then}") == expected
    assert b'"neg_scores":[0.1,-30000000000.0]' in (tmp_path / "jsonl").read_bytes()


def test_scores_of_a_query_that_has_only_some_give_a_warning(tmp_path):
    rows = [
        {"query": "a", "pos": ["x"], "neg": ["y"], "pos_scores": [1], "neg_scores": [0]},
        {"query": "a", "pos": ["z"]},
        {"query": "b", "pos": ["x"], "neg": ["y"], "pos_scores": [1], "neg_scores": [0]},
        {"query": "c", "pos": ["x"]},
    ]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.warns(UserWarning, match="teacher scores of 1 query are dropped, because some"):
        convert(tmp_path / "d.jsonl", tmp_path / "new.jsonl", "tevatron")


def test_dropped_answers_give_a_warning(tmp_path):
    record = {
        "question": "how long",
        "answers": ["two days"],
        "positive_ctxs": [{"title": "", "text": "It takes two days."}],
    }
    (tmp_path / "d.json").write_text(json.dumps([record]))
    with pytest.warns(UserWarning, match=r"d\.json: answers of questions are dropped"):
        convert(tmp_path / "d.json", tmp_path / "new.json", "dpr")


@pytest.mark.parametrize("form", ["beir", "dpr"])
def test_dropped_teacher_scores_give_one_warning(form, tmp_path):
    source = scored_lines(tmp_path)
    with pytest.warns(
        UserWarning,
        match=f"scored.jsonl: teacher scores are dropped, because {form} has no field for them",
    ) as said:
        convert(source, tmp_path / "t", form)
    assert len(said) == 1
    assert form == "beir" or b"score" not in (tmp_path / "t").read_bytes()
    assert meaning(tmp_path / "t") == meaning(source)


@pytest.mark.parametrize("form", [form for form in FORMS if form != "beir"])
def test_passages_without_a_text_are_left_out_of_files(form, tmp_path):
    """Training refuses them; a passage with only a title is one."""
    source = beir(tmp_path / "source")
    with (source / "corpus.jsonl").open("a") as file:
        file.write('{"_id": "none", "title": " ", "text": ""}\n')
        file.write('{"_id": "titled", "title": "only a title", "text": ""}\n')
    with (source / "queries.jsonl").open("a") as file:
        file.write('{"_id": "unanswered", "text": "is there nothing?"}\n')
        file.write('{"_id": "answered", "text": "is there a title?"}\n')
    with (source / "qrels" / "train.tsv").open("a") as file:
        file.write("unanswered\tnone\t1\nanswered\ttitled\t1\nanswered\tnone\t1\n")
    expected = meaning(beir(tmp_path / "other"))
    policy = DataPolicy(repair=True)
    target = tmp_path / "target"
    with pytest.warns(UserWarning, match="left out 2 judgements of .* and 1 query without another"):
        said = convert(source, target, form, policy=policy)
    assert "4 queries" in said
    assert meaning(target) == expected | {
        ("answered", "is there a title?"): ({"titled": "only a title"}, {})
    }

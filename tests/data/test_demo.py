"""Demo set: its copies equal the generator's output, and word overlap does not solve it."""

import filecmp
import re
from pathlib import Path

import numpy as np
import pytest
from demo_words import KINDS
from helpers import open_retrieval_set
from make_demo import demo_files

from contaccum.data.commands import write_demo
from contaccum.errors import InputError

DEMO = Path(__file__).resolve().parents[2] / "data" / "demo"
FILES = ["corpus.jsonl", "queries.jsonl", "qrels/train.tsv", "qrels/dev.tsv", "qrels/test.tsv"]


def test_generator_and_package_data_agree(tmp_path):
    write_demo(tmp_path / "demo")
    assert {name: (tmp_path / "demo" / name).read_text("utf-8") for name in FILES} == demo_files()


def test_package_data_equal_the_committed_folder(tmp_path):
    write_demo(tmp_path / "again")
    assert filecmp.cmpfiles(DEMO, tmp_path / "again", FILES, shallow=False) == (FILES, [], [])
    assert sum((DEMO / name).stat().st_size for name in FILES) < 3_000_000


def test_demo_refuses_an_existing_folder(tmp_path):
    with pytest.raises(InputError, match="already exists"):
        write_demo(tmp_path)


def test_splits_have_their_sizes_and_share_no_question():
    sets = {split: open_retrieval_set(DEMO, split) for split in ("train", "dev", "test")}
    assert {split: len(found.queries) for split, found in sets.items()} == {
        "train": 4000,
        "dev": 200,
        "test": 300,
    }
    texts = [text for found in sets.values() for text in found.queries.values()]
    assert len(set(texts)) == len(texts) == 4500
    assert len(sets["test"].corpus) == 3000
    words = [len(text.split()) for text in sets["test"].corpus["text"]]
    assert 25 <= np.mean(words) <= 40


def test_questions_never_name_what_they_ask_for():
    found = open_retrieval_set(DEMO, "test")
    names = {name.lower() for name in found.corpus["title"]}
    assert len(names) == 3000
    assert not any(names & set(re.findall(r"\w+", text.lower())) for text in found.queries.values())


def test_every_question_fits_its_passage_and_no_other():
    """Parse questions and passages into attribute values, independently of the generator."""
    found = open_retrieval_set(DEMO, "test")
    values = [
        {
            (k, letter, n): wordings
            for letter, attribute in kind.attributes.items()
            for n, wordings in enumerate(attribute.values)
        }
        for k, kind in enumerate(KINDS)
    ]
    passages = {}
    for key, text in zip(found.corpus["id"], found.corpus["text"], strict=True):
        k = int(key[1:]) // 1000
        passages[key] = {
            value
            for value, words in values[k].items()
            if re.search(rf"\b{re.escape(words[0])}\b", text)
        }
        assert len(passages[key]) == 6
    for query, text in found.queries.items():
        k = next(
            k for k, kind in enumerate(KINDS) if any(f" {noun} " in text for noun in kind.nouns)
        )
        clauses = {
            (k, letter, n)
            for letter, attribute in KINDS[k].attributes.items()
            for n, wordings in enumerate(attribute.values)
            for wording in wordings
            if re.search(rf"\b{re.escape(attribute.question.format(wording))}(,| and |\.|\?)", text)
        }
        assert len(clauses) == 3
        assert [key for key, own in passages.items() if clauses <= own] == list(found.qrels[query])


def test_word_overlap_alone_does_not_solve_it():
    bm25s = pytest.importorskip("bm25s")
    found = open_retrieval_set(DEMO, "test")
    contents = [f"{row['title']} {row['text']}" for row in found.corpus]
    index = bm25s.BM25()
    index.index(bm25s.tokenize(contents, stopwords="en", show_progress=False), show_progress=False)
    questions = bm25s.tokenize(list(found.queries.values()), stopwords="en", show_progress=False)
    ranked, _ = index.retrieve(questions, k=10, show_progress=False)
    gains = [
        1 / np.log2(2 + place)
        for row, grades in zip(ranked.tolist(), found.qrels.values(), strict=True)
        for place, number in enumerate(row)
        if f"p{number}" in grades
    ]
    # ndcg@10 of one relevant passage a query is the mean of these
    assert 0.15 < sum(gains) / len(found.queries) < 0.35

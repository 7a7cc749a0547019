"""The pages over real searches with an encoder of words, and what is opened and kept for a set of models."""

from pathlib import Path
from shutil import copytree
from types import SimpleNamespace

import pytest
from datasets import Dataset
from helpers import train_config, write_beir
from opened import open_searchable_set
from word_encoder import WordEncoder

from contaccum import train
from contaccum.cli import main
from contaccum.config.commands import EncoderConfig, ExploreConfig, SearchConfig
from contaccum.data.retrieval_set import RetrievalSet
from contaccum.errors import InputError
from contaccum.explore.app import build, explore
from contaccum.explore.explorer import QUERIES_PER_PAGE, Explorer, System, labels, open_systems
from contaccum.retrieval.retriever import BM25, Retriever

CORPUS = Dataset.from_dict(
    {
        "id": ["a", "b", "c", "d", "q2"],
        "title": ["", "Rivers", "", "Planets", ""],
        "text": [
            "red apples grow on trees",
            "the Rhine flows north",
            "green pears",
            "Saturn has rings",
            "where do pears",
        ],
    }
)
DATA = RetrievalSet(
    CORPUS,
    {"q1": "which planets have rings", "q2": "where do pears grow"},
    {"q1": {"d": 2, "a": 0}, "q2": {"c": 1, "b": 1}},
)


@pytest.fixture(scope="module")
def explorer():
    pair = [System("words", Retriever.open(WordEncoder(), CORPUS), DATA, 4), System("bm25", BM25(CORPUS), DATA, 4)]
    return Explorer(pair, DATA, "test")


def ids(page: str) -> list[str]:
    """The passages of a page's rankings, in order."""
    return [part.split('"')[0] for part in page.split('data-id="')[1:]]


def test_an_answer_marks_judged_passages_and_words(explorer):
    page = explorer.answer("Which planets have  rings", "words", "bm25", 3)
    words, bm25 = page.split("<section")[1:]
    assert ids(words)[0] == ids(bm25)[0] == "d"
    assert len(ids(words)) == 3
    assert len(ids(bm25)) == 1  # the others share no word
    assert '<li class="hit relevant" data-id="d">' in page
    assert "<mark>Planets</mark>" in page
    assert "Saturn has <mark>rings</mark>" in page
    assert "1 of 1 relevant passages are among these 3" in words
    other = explorer.answer("rings of Saturn", "words", "words", 3)
    assert other.count("<section") == 1
    assert "relevant" not in other
    assert "no passage was found" in explorer.answer("xylophone", "bm25", None, 3)
    assert "Type a query" in explorer.answer("  ", "words", "bm25", 3)


def test_the_list_and_the_page_of_a_query(explorer):
    values = {side.name: {query: side.scores[query]["recall@3"] for query in DATA.queries} for side in explorer.systems}
    assert values["bm25"] == {"q1": 1.0, "q2": 0.5}  # its own id is left out of q2's results
    listed = explorer.lost("bm25", None, "recall@3", 1)
    assert listed.index('data-query="q2"') < listed.index('data-query="q1"')
    assert "queries 1 to 2 of 2" in listed
    page = explorer.show_query("q2", "bm25", "words", "recall@3", 2)
    assert "recall@3 0.5000" in page
    assert "q2" not in ids(page)
    assert [word.split("<")[0] for word in page.split('data-column="bm25">')[1:]] == [
        "&gt; 4",
        "2",
    ]  # b; c, behind a, which has the rarer word "grow"
    assert [word.split("<")[0] for word in page.split('data-column="grade">')[1:]] == ["1", "1"]
    with pytest.raises(InputError, match="query 'q9' is not in the split test"):
        explorer.show_query("q9", "bm25", None, "recall@3", 2)


def test_the_list_has_pages():
    queries = {f"q{n:03d}": "pears" for n in range(QUERIES_PER_PAGE + 5)}
    data = RetrievalSet(CORPUS, queries, {query: {"c": 1} for query in queries})
    many = Explorer([System("bm25", BM25(CORPUS), data, 4)], data, "test")
    assert many.list_pages == 2
    second = many.lost("bm25", None, "ndcg@3", 2)
    assert second.count("<button") == 5
    assert f"queries {QUERIES_PER_PAGE + 1} to {QUERIES_PER_PAGE + 5} of {QUERIES_PER_PAGE + 5}" in second


def test_labels_are_short_and_different():
    assert labels(["runs/one/model", "owner/name", "bm25"]) == ["one", "name", "bm25"]
    assert labels(["a/x/model", "b/x"]) == ["a/x/model", "b/x"]
    assert labels(["..", "bm25"]) == [Path("..").resolve().name, "bm25"]


@pytest.fixture
def trained(tmp_path):
    data = write_beir(tmp_path / "data")
    model = train(train_config(data, tmp_path / "run", **{"optim.max_steps": 2}))
    return SimpleNamespace(data=data, model=str(model), read=open_searchable_set(data))


def test_vectors_are_made_once_and_kept(trained, tmp_path, capsys, monkeypatch):
    models, choice = [trained.model, "bm25"], EncoderConfig("")
    first = open_systems(models, choice, trained.read, 10, SearchConfig(), [])
    found = first[0].ask("red fox", 3)
    with monkeypatch.context() as patch:  # a second start may encode no passage
        patch.setattr("contaccum.encoder.DualEncoder.encode_passages", None)
        again = open_systems(models, choice, trained.read, 10, SearchConfig(), [])
    assert again[0].ask("red fox", 3) == found

    vectors = str(tmp_path / "vectors")
    monkeypatch.setenv("CONTACCUM_CACHE", str(tmp_path / "other-cache"))
    assert main(["encode", "--model", trained.model, "--input", str(trained.data), "--output", vectors]) == 0
    copytree(vectors, tmp_path / "again")
    given = open_systems(models, choice, trained.read, 10, SearchConfig(), [vectors])
    assert given[0].ask("red fox", 3) == found
    assert not (tmp_path / "other-cache" / "explore").exists()
    with pytest.raises(InputError, match=r"none of the models \(bm25\) made these embeddings"):
        open_systems(["bm25"], choice, trained.read, 10, SearchConfig(), [vectors])
    with pytest.raises(InputError, match="another folder in --embeddings has embeddings of the same model"):
        open_systems([trained.model], choice, trained.read, 10, SearchConfig(), [vectors, str(tmp_path / "again")])
    for one, other in (("bm25", "bm25"), (trained.model, trained.model + "/")):
        with pytest.raises(InputError, match=f"{one} is listed twice"):
            open_systems([one, other], choice, trained.read, 10, SearchConfig(), [])
    every_list = SearchConfig(factory="IVF2,Flat", search_params="nprobe=2")
    index = open_systems([trained.model], choice, trained.read, 10, every_list, [vectors])
    assert index[0].ask("red fox", 3)[0].score == pytest.approx(found[0].score, abs=1e-5)
    assert len(list((tmp_path / "other-cache" / "explore").iterdir())) == 1


def test_an_index_of_float16_vectors_is_not_used_for_float32(trained, tmp_path):
    half, choice = str(tmp_path / "half"), EncoderConfig("")
    call = ["encode", "--model", trained.model, "--input", str(trained.data), "--output", half, "--dtype", "float16"]
    assert main(call) == 0
    every_list = SearchConfig(factory="IVF2,Flat", search_params="nprobe=2")
    exact, _, index = (
        open_systems([trained.model], choice, trained.read, 10, settings, folders)[0].ask("red fox", 3)
        for settings, folders in ((SearchConfig(), []), (every_list, [half]), (every_list, []))
    )
    assert [hit.score for hit in index] == pytest.approx([hit.score for hit in exact], abs=2e-7)


def test_data_without_judgements_is_a_corpus_alone(tmp_path):
    data = write_beir(tmp_path / "data")
    assert len(open_searchable_set(data, "dev").queries) == 10
    with pytest.raises(InputError, match="split 'best' not found; available: dev, test, train"):
        open_searchable_set(data, "best")
    assert open_searchable_set(data / "corpus.jsonl").queries == {}
    for file in (data / "qrels").iterdir():
        file.unlink()
    assert open_searchable_set(data).queries == {}
    assert len(open_searchable_set(data).corpus) == 40


def test_what_cannot_be_served_is_refused_before_anything_is_loaded():
    for change, words in (
        ({"port": 70_000}, "cannot listen"),
        ({"host": "256.1.1.1"}, "cannot listen"),
    ):
        options = ExploreConfig(models=("absent",), data="absent", **change)
        with pytest.raises(InputError, match=words):
            explore(options, EncoderConfig(""), SearchConfig())


def test_without_gradio_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "gradio", None)
    with pytest.raises(InputError, match=r'pip install "contaccum\[explore\]"'):
        explore(ExploreConfig(models=("bm25",), data="x"), EncoderConfig(""), SearchConfig())


@pytest.mark.acceptance
def test_a_page_is_built_for_one_model_and_for_data_without_judgements(explorer):
    """What it does in a browser is in test_browser.py."""
    pytest.importorskip("gradio", reason="needs gradio (extra explore)")
    bare = RetrievalSet(CORPUS, {}, {})
    for one in (
        explorer,
        Explorer(explorer.systems[:1], DATA, "test"),
        Explorer([System("bm25", BM25(CORPUS), bare, 4)], bare, ""),
    ):
        shown = {block.elem_id for block in build(one).blocks.values() if getattr(block, "visible", True)}
        assert ("lost" in shown) == bool(one.data.queries)
        assert ("right" in shown) == (len(one.systems) > 1)

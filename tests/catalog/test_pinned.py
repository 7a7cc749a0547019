"""MTEB's and MIRACL's sets by name, from a local server with the Hub's addresses; no network."""

import json
import random
from pathlib import Path

import huggingface_hub
import pytest
from helpers import open_retrieval_set, open_train_set
from hub_server import HubServer, Parts, card, plug
from tiny_data import lines, write, write_gzip

from contaccum import evaluate
from contaccum.catalog import fetch
from contaccum.catalog.pinned import CORPUS, JUDGED, Repository, tasks
from contaccum.config import DataConfig
from contaccum.data.commands import check
from contaccum.data.dataset import load_training
from contaccum.errors import InputError
from contaccum.runtime.cache import SIZES

SCIFACT = tasks()["scifact"].repository


@pytest.fixture
def hub(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_mine")
    server = HubServer(tmp_path / "served")
    server.connect(monkeypatch)
    yield server
    server.close()


def copy(repository: Repository) -> Path:
    """Copy a repository to the Hub's cache, as ``hf download`` does."""
    return Path(
        huggingface_hub.snapshot_download(
            repository.name, repo_type="dataset", revision=repository.commit
        )
    )


def left(folder: Path) -> list[str]:
    """Return the files of a folder, without the list of their sizes."""
    return sorted(
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and path.name != SIZES
    )


def scifact(hub: HubServer, corpus: str = "c.jsonl") -> Path:
    root = hub.folder / SCIFACT.name
    card(root, {
        "default": {"test": ("test.jsonl", QRELS)},
        "corpus": {"c": (corpus, CORPUS_ROWS)},
        "queries": {"q": ("q.jsonl", QUERIES)},
    })  # fmt: skip
    return root


def test_files_are_downloaded_once_at_the_pinned_commit_with_the_token(hub, monkeypatch):
    write(scifact(hub) / "other.jsonl", "not needed")
    folder = fetch("mteb/SciFact")
    assert sorted(hub.asked) == ["README.md", "c.jsonl", "q.jsonl", "test.jsonl"]
    assert (hub.commits, hub.tokens) == ({SCIFACT.commit}, {"Bearer hf_mine"})
    monkeypatch.setenv("CONTACCUM_CACHE", str(hub.folder.parent / "other"))
    assert (fetch("mteb/SciFact") / "corpus.jsonl").read_bytes() == (
        folder / "corpus.jsonl"
    ).read_bytes()
    assert len(hub.asked) == 4


def test_a_broken_download_is_continued(hub, monkeypatch):
    root = scifact(hub, "c.jsonl.gz")
    text = random.Random(0).randbytes(4000).hex()
    write_gzip(
        root / "c.jsonl.gz", lines({"_id": "p0", "text": text}, {"_id": "p1", "text": "an owl"})
    )
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 16)
    hub.cut["c.jsonl.gz"] = 400
    assert (
        json.loads((fetch("mteb/SciFact") / "corpus.jsonl").read_text().splitlines()[0])["text"]
        == text
    )
    assert "c.jsonl.gz@400" in hub.asked


def test_a_listed_path_outside_the_folder_is_refused(hub, tmp_path):
    miracl("yo", hub.folder / JUDGED.name, hub.folder / CORPUS.name, ("dev",))
    evil = "miracl-corpus-v1.0-yo/docs-2/../../../../../../evil.jsonl.gz"
    hub.extra = [{"type": "file", "path": evil, "size": 1, "oid": "0" * 40}]
    with pytest.raises(InputError, match="miracl/miracl-corpus: cannot be downloaded from the Hub"):
        fetch("miracl/yo")
    assert not list(tmp_path.rglob("evil*"))


def test_a_complete_copy_in_the_hubs_cache_needs_no_network(hub, monkeypatch):
    scifact(hub, "c-00000-of-00001.parquet")
    copy(SCIFACT)
    plug(monkeypatch, False)
    assert open_retrieval_set("mteb/SciFact", "test").qrels == {"q0": {"p0": 2}, "q1": {"p1": 1}}


@pytest.mark.parametrize("partial", [False, True])
def test_without_a_network_a_missing_or_partial_copy_is_refused_in_one_sentence(
    partial, hub, monkeypatch, tmp_path
):
    root = scifact(hub)
    if partial:
        (copy(SCIFACT) / "c.jsonl").unlink()
    plug(monkeypatch, False)
    with pytest.raises(InputError, match=r"mteb/.*cannot be (down)?loaded") as caught:
        fetch("mteb/SciFact")
    assert f"hf download --repo-type dataset {SCIFACT.name} --revision {SCIFACT.commit}" in str(
        caught.value
    )
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "cache" / "mteb").exists()
    assert root.is_dir()


def miracl(language: str, judged: Path, corpus: Path, splits: tuple[str, ...]) -> None:
    """A language in MIRACL's own files: two passages in each of two parts, and for each split one
    query."""
    root = f"miracl-v1.0-{language}"
    for number, split in enumerate(splits):
        write(
            judged / root / "topics" / f"topics.{root}-{split}.tsv",
            f'{split}\twhich "fox" {number}\n',
        )
        qrels = f"{split} Q0 {number}#0 1\n{split} Q0 {number}#1 0\n"
        write(judged / root / "qrels" / f"qrels.{root}-{split}.tsv", qrels)
    write(judged / root / "topics" / f"topics.{root}-test-b.tsv", "t\tnever judged\n")
    for part in (0, 1):
        rows = [
            {"docid": f"{part}#{n}", "title": f"T{part}", "text": f"fox {part} {n}"} for n in (0, 1)
        ]
        write_gzip(
            corpus / f"miracl-corpus-v1.0-{language}" / f"docs-{part}.jsonl.gz", lines(*rows)
        )


def test_a_miracl_language_is_a_beir_folder_of_its_judged_splits(hub, monkeypatch):
    miracl("sw", hub.folder / JUDGED.name, hub.folder / CORPUS.name, ("train", "dev"))
    miracl("yo", hub.folder / JUDGED.name, hub.folder / CORPUS.name, ("dev",))
    found = open_retrieval_set("miracl/sw", "dev")
    assert hub.commits == {JUDGED.commit, CORPUS.commit}
    assert not any("yo" in path or "test-b" in path for path in hub.asked)
    assert (found.queries, found.qrels) == ({"dev": 'which "fox" 1'}, {"dev": {"1#0": 1, "1#1": 0}})
    assert [found.corpus["id"][:], found.corpus[0]["title"]] == [["0#0", "0#1", "1#0", "1#1"], "T0"]
    train = open_train_set("miracl/sw", hard_negatives=1)
    assert (train.queries["text"][:], train.passages["text"][:]) == (
        ['which "fox" 0'],
        ["fox 0 0", "fox 0 1"],
    )
    plug(monkeypatch, False)  # a prepared set needs no Hub
    assert fetch("miracl/sw", "dev") == fetch("miracl/sw", "train")
    assert evaluate("bm25", "miracl/sw", split="dev")["mean"]["recall@100"] == 1.0
    with pytest.raises(InputError, match="split 'test' not found; available: dev, train"):
        open_retrieval_set("miracl/sw", "test")
    with pytest.raises(
        InputError,
        match=r"miracl/miracl: cannot be downloaded.*hf download --repo-type dataset miracl/miracl",
    ):
        open_train_set("miracl/yo")
    plug(monkeypatch, True)
    with pytest.raises(InputError, match="split 'train' not found; available: dev"):
        open_train_set("miracl/yo")


QRELS = {"query-id": ["q0", "q1"], "corpus-id": ["p0", "p1"], "score": [2.0, 1.0]}
CORPUS_ROWS = {"_id": ["p0", "p1"], "title": ["T", ""], "text": ["a fox", "an owl"]}
QUERIES = {"_id": ["q0", "q1"], "text": ["which fox", "which owl"]}


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz", "-00000-of-00001.parquet"])
def test_an_mteb_task_is_a_beir_folder_of_all_its_splits(ending, hub, monkeypatch):
    one = {key: values[:1] for key, values in QRELS.items()}
    card(hub.folder / "mteb" / "nfcorpus", {
        "default": {"train": (f"qrels/train{ending}", one), "test": (f"qrels/test{ending}", QRELS)},
        "corpus": {"corpus": (f"corpus{ending}", CORPUS_ROWS)},
        "queries": {"queries": (f"queries{ending}", QUERIES)},
        "top_ranked": {"test": (f"top_ranked{ending}", {"query-id": ["q0"]})},
    })  # fmt: skip
    found = open_retrieval_set("mteb/NFCorpus", "test")
    assert found.qrels == {"q0": {"p0": 2}, "q1": {"p1": 1}}
    assert found.corpus[0] == {"id": "p0", "title": "T", "text": "a fox"}
    assert hub.commits == {tasks()["nfcorpus"].repository.commit}
    assert not any("top_ranked" in path for path in hub.asked)
    plug(monkeypatch, False)
    assert open_train_set("mteb/nfcorpus", "train").queries["text"][:] == ["which fox"]
    assert check("mteb/NFCorpus", split="test")["queries"] == 2
    assert evaluate("bm25", "mteb/NFCorpus")["mean"]["ndcg@10"] == 1.0


def test_a_subset_is_fetched_alone_and_splits_with_a_corpus_each_are_kept_apart(hub):
    corpora = {split: {"id": ["p0"], "text": [f"{split} fox"]} for split in ("dev", "test")}
    parts: Parts = {}
    for language in ("ar", "de"):
        rows = {
            "corpus": corpora,
            "queries": {
                split: {"id": ["q0"], "text": [f"{split} {language}?"]} for split in ("dev", "test")
            },
            "qrels": {
                split: {"query-id": ["q0"], "corpus-id": ["p0"], "score": [1]}
                for split in ("dev", "test")
            },
        }
        for part, splits in rows.items():
            name = f"{language}-{part}"
            parts[name] = {
                split: (f"{name}/{split}-00000-of-00001.parquet", found)
                for split, found in splits.items()
            }
    card(hub.folder / "mteb" / "MultiLongDocRetrieval", parts)
    for split in ("dev", "test"):
        found = open_retrieval_set("mteb/MultiLongDocRetrieval/de", split)
        assert (found.corpus["text"][:], found.queries) == (
            [f"{split} fox"],
            {"q0": f"{split} de?"},
        )
        assert not any(path.startswith("ar-") for path in hub.asked)
        assert any("/test" in path for path in hub.asked) == (split == "test")
    with pytest.raises(InputError, match="split 'train' not found; available: dev, test"):
        fetch("mteb/MultiLongDocRetrieval/de", "train")


def test_queries_of_several_splits_over_one_corpus_are_written_once(hub):
    qrels = {"query-id": ["q0"], "corpus-id": ["p0"], "score": [1]}
    queries = {"train": QUERIES, "test": {key: values[:1] for key, values in QUERIES.items()}}
    card(
        hub.folder / "mteb" / "scifact",
        {
            "qrels": {split: (f"qrels/{split}.jsonl", qrels) for split in ("train", "dev", "test")},
            "corpus": {"corpus": ("corpus.jsonl", CORPUS_ROWS)},
            "queries": {
                split: (f"queries/{split}.jsonl", columns) for split, columns in queries.items()
            },
        },
    )
    folder = fetch("mteb/SciFact", "train")
    # dev has no queries
    assert left(folder) == [
        "corpus.jsonl",
        "qrels/test.tsv",
        "qrels/train.tsv",
        "queries.jsonl",
    ]
    assert [
        json.loads(line)["_id"] for line in (folder / "queries.jsonl").read_text().splitlines()
    ] == ["q0", "q1"]


def test_a_query_id_with_different_texts_in_two_splits_is_refused(hub):
    qrels = {"query-id": ["q0"], "corpus-id": ["p0"], "score": [1]}
    queries = {split: {"_id": ["q0"], "text": [f"{split}?"]} for split in ("train", "test")}
    parts = {
        "qrels": {split: (f"qrels/{split}.jsonl", qrels) for split in queries},
        "corpus": {"corpus": ("corpus.jsonl", CORPUS_ROWS)},
        "queries": {split: (f"queries/{split}.jsonl", rows) for split, rows in queries.items()},
    }
    card(hub.folder / "mteb" / "scifact", parts)
    with pytest.raises(InputError, match="'q0' has different texts in two splits, so only one"):
        fetch("mteb/SciFact", "train")
    folder = fetch("hub:mteb/scifact::test", "train")
    assert json.loads((folder / "queries.jsonl").read_text())["text"] == "test?"


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("NFCorpsu", "no MTEB retrieval task has this name; similar names are NFCorpus"),
        ("NFCorpus/de", "mteb/NFCorpus/de: not a data set; expected mteb/NFCorpus$"),
        ("MIRACLRetrieval", "expected mteb/MIRACLRetrieval/ and one of ar, bn, de, en"),
    ],
)  # fmt: skip
def test_names_that_are_no_task_or_subset(name, sentence, hub):
    with pytest.raises(InputError, match=sentence):
        fetch(f"mteb/{name}")
    assert not hub.commits


def test_every_task_in_the_list_has_a_repository_and_a_commit():
    assert len(tasks()) > 300
    for task in tasks().values():
        assert task.repository.name.count("/") == 1
        assert set(task.repository.commit) <= set("0123456789abcdef")
    assert tasks()["miraclretrieval"].subsets[:3] == ("ar", "bn", "de")


def judging(*passages: str) -> dict[str, list]:
    return {
        "query-id": ["q0"] * len(passages),
        "corpus-id": [*passages],
        "score": [1] * len(passages),
    }


@pytest.mark.parametrize(
    ("more", "passage", "query"),
    [
        ((), "of qrels", "of queries"),  # control: with nothing to choose from
        (("default",), "of default", "of queries"),
        (("query",), "of qrels", "of query"),
        (("default", "query"), "of default", "of query"),
    ],
)
def test_configurations_are_chosen_as_mteb_chooses_them(more, passage, query, hub, monkeypatch):
    """As its loader (mteb 2.26.24) is written: default before qrels, and a configuration query
    before queries."""
    names = ("qrels", "default", "queries", "query")
    rows = {
        **{name: judging(f"of {name}") for name in names[:2]},
        **{name: {"_id": ["q0"], "text": [f"of {name}"]} for name in names[2:]},
        "corpus": {"_id": [f"of {name}" for name in names[:2]], "text": ["a fox", "an owl"]},
    }
    root = hub.folder / "mteb" / "scifact"
    card(
        root,
        {
            name: {"test": (f"{name}.jsonl", rows[name])}
            for name in ("qrels", "queries", "corpus", *more)
        },
    )
    for name in ("mteb/SciFact", f"hub:{root}"):
        found = open_retrieval_set(name, "test")
        assert (found.qrels, found.queries) == ({"q0": {passage: 1}}, {"q0": query})


@pytest.mark.parametrize("ending", [".jsonl.gz", "-00000-of-00001.parquet"])
def test_examples_of_the_hub_are_read(ending, hub):
    rows = {"query": ["2020-01-01", "b"], "positive": ["2021-01-01", "x"]}
    card(hub.folder / "owner" / "set", {"default": {"train": (f"train{ending}", rows)}})
    name = f"hub:owner/set@{'c' * 40}?query=query&pos=positive"
    found = load_training(DataConfig(train=name))
    assert sorted(text for text in found.texts() if text) == ["2020-01-01", "2021-01-01", "b", "x"]
    assert hub.commits == {"c" * 40}


def one(file: str, **columns: object) -> dict[str, tuple[str, dict[str, list]]]:
    """A split of one row."""
    return {
        "test": (file, {name.replace("_id_", "-id"): [value] for name, value in columns.items()})
    }


def graded(score: object) -> Parts:
    return {"default": one("test.jsonl", query_id_="q0", corpus_id_="p0", score=score)}


GRADE = "must be an integer from -99999 to 99999"
BROKEN: list[tuple[Parts, str]] = [
    (graded(None), rf"test.jsonl:1: the grade is 'None'; it {GRADE}"),
    ({"default": one("test-00000-of-00001.parquet", query_id_="q0", corpus_id_="p0", score=0.7)},
     rf"test-00000-of-00001.parquet, row 1: the grade is '0.7'; it {GRADE}"),
    ({"default": one("test.jsonl", query_id_=None, corpus_id_="p0")},
     ":1: Expected `int . str`, got `null` - at `..query-id`"),
    ({"queries": one("q.jsonl", id=1.5, text="x")},
     "q.jsonl:1: Expected `int . str`, got `float` - at `.._id`"),
    (
        {"queries": {split: (f"{split}.jsonl", QUERIES) for split in ("dev", "train")}},
        "no split has both queries and judgements. Splits with only queries: dev, train. Splits "
        "with only judgements: test.",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("parts", "sentence"), BROKEN)
def test_a_repository_in_another_layout_is_refused_in_one_sentence(parts, sentence, hub, tmp_path):
    if "not found" not in sentence:
        sound = {
            "corpus": ("c.jsonl", CORPUS_ROWS),
            "queries": ("q.jsonl", QUERIES),
            "default": ("test.jsonl", QRELS),
        }
        parts = {**{name: {"test": file} for name, file in sound.items()}, **parts}
    card(hub.folder / "mteb" / "scifact", parts)
    with pytest.raises(InputError, match=sentence) as caught:
        fetch("mteb/SciFact")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "cache" / "mteb").exists()


@pytest.mark.parametrize(
    ("file", "damage", "sentence"),
    [
        ("c.jsonl", lambda content: content[:-5], r":2: not usable JSON .*; the record must"),
        ("c-00000-of-00001.parquet", lambda content: content[:-5],
         r"cannot be read \(.*Parquet magic bytes not found"),
        ("c.tsv", lambda content: b"", "is empty; the first line must have the names"),
    ],
)  # fmt: skip
def test_a_damaged_file_is_named_and_nothing_is_kept(file, damage, sentence, hub, tmp_path):
    root = hub.folder / "mteb" / "scifact"
    card(root, {
        "default": {"test": ("test.jsonl", QRELS)},
        "corpus": {"c": (file, CORPUS_ROWS)},
        "queries": {"q": ("q.jsonl", QUERIES)},
    })  # fmt: skip
    (root / file).write_bytes(damage((root / file).read_bytes()))
    with pytest.raises(InputError, match=f"{file}(:|,)? ?{sentence}") as caught:
        fetch("mteb/SciFact")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "cache" / "mteb").exists()

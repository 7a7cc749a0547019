"""MTEB's and MIRACL's sets by name, from a Hub on this machine in the layout of the real one; no network."""

import datetime
import gzip
import json
import random
from pathlib import Path

import datasets
import huggingface_hub
import pytest
from datasets import Dataset, load_dataset
from disks import small_disk
from hub_server import HubServer, git_name
from tiny_data import lines, write, write_gzip

from contaccum.api import evaluate
from contaccum.data import mteb, transfer
from contaccum.data.check import check
from contaccum.data.dataset import load_train_set
from contaccum.data.hub import placed, write_retrieval_rows
from contaccum.data.miracl import CORPUS, JUDGED, KNOWN, SURPRISE
from contaccum.data.mteb import tasks
from contaccum.data.repositories import Repository
from contaccum.data.sources import resolve
from contaccum.data.tables import load_retrieval_set
from contaccum.errors import InputError
from contaccum.files import whole_folder

SOME = Repository("owner/name", "c0ffee")


@pytest.fixture
def hub(tmp_path, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("HF_TOKEN", "hf_mine")
    server = HubServer(tmp_path / "served")
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.url)
    address = f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", address)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)  # this Hub is on the machine itself
    yield server
    server.close()


def unplug(monkeypatch) -> None:
    """From here on whatever asks a Hub is refused, without a packet sent."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def left(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_files_are_fetched_once_by_their_patterns_and_tried_by_the_hubs_checksums(hub, monkeypatch):
    root = hub.folder / "owner" / "name"
    small, large = write(root / "a" / "x.tsv", "q\tp\n"), write_gzip(root / "b" / "y.jsonl.gz", "text")
    write(root / "b" / "z.jsonl", "not asked for")
    found = SOME.open().fetch("b/*.gz", "a/x.tsv")
    assert [path.read_bytes() for path in found] == [large.read_bytes(), small.read_bytes()]
    assert (hub.asked, hub.commits, hub.tokens) == (["b/y.jsonl.gz", "a/x.tsv"], {"c0ffee"}, {"Bearer hf_mine"})
    manifest = json.loads((SOME.folder / ".manifest.json").read_text())
    assert (manifest["repository"], manifest["revision"]) == ("owner/name", "c0ffee")
    assert manifest["files"]["a/x.tsv"] == f"git:{git_name(b'q	p' + bytes([10]))}"
    assert len(manifest["files"]["b/y.jsonl.gz"]) == len("sha256:") + 64
    SOME.open().fetch("b/*.gz", "a/*")
    assert len(hub.asked) == 2
    found[0].write_bytes(b"spoiled")
    SOME.open().fetch("b/*.gz")
    assert (found[0].read_bytes(), len(hub.asked)) == (large.read_bytes(), 3)
    small.write_text("only asked for offline")
    found[1].unlink()
    unplug(monkeypatch)
    with pytest.raises(InputError, match=r"x.tsv: not there as the Hub lists it, and HF_HUB_OFFLINE is set"):
        SOME.open().fetch("a/x.tsv")
    assert len(hub.asked) == 3
    with pytest.raises(InputError, match=r"owner/name: holds no file c/\*, expected those of commit c0ffee"):
        SOME.open().fetch("a/*", "c/*")


@pytest.mark.parametrize("path", ["a/x.tsv", "b/y.jsonl.gz"])
def test_a_file_that_is_not_the_listed_one_is_refused_and_not_kept(path, hub):
    for each in ("a/x.tsv", "b/y.jsonl.gz"):
        write(hub.folder / "owner" / "name" / each, "right")
    hub.other[path] = b"wrong"
    with pytest.raises(
        InputError, match=rf"{path}: the file's checksum is (git|sha256):\w+, expected (git|sha256):\w+"
    ):
        SOME.open().fetch(path)
    assert left(SOME.folder) == [".manifest.json"]
    hub.other.clear()
    assert SOME.open().fetch(path)[0].read_text() == "right"


def test_a_broken_download_is_continued_by_the_next_call(hub, monkeypatch):
    monkeypatch.setattr(transfer, "CHUNK", 16)
    content = random.Random(0).randbytes(800)
    write(hub.folder / "owner" / "name" / "x.gz", content)
    hub.cut["x.gz"] = 400
    with pytest.raises(InputError, match=r"x.gz: not in .*could not be fetched .*put the file at"):
        SOME.open().fetch("x.gz")
    kept = (SOME.folder / ".x.gz.part").stat().st_size
    assert 0 < kept <= 400
    assert SOME.open().fetch("x.gz")[0].read_bytes() == content
    assert hub.asked == ["x.gz", f"x.gz@{kept}"]
    assert left(SOME.folder) == [".manifest.json", "x.gz"]


def test_another_commit_is_listed_anew(hub):
    file = write(hub.folder / "owner" / "name" / "x.tsv", "old")
    SOME.open().fetch("x.tsv")
    file.write_text("new")
    assert SOME.open().fetch("x.tsv")[0].read_text() == "old"
    assert Repository("owner/name", "decaf").open().fetch("x.tsv")[0].read_text() == "new"


def test_a_list_that_climbs_out_of_the_folder_is_refused(hub, tmp_path):
    write(hub.folder / "owner" / "name" / "x.tsv", "x")
    hub.extra = [{"type": "file", "path": "a/../../../../evil", "size": 1, "oid": "0" * 40}]
    with pytest.raises(InputError, match=r"'a/../../../../evil' would land outside"):
        SOME.open().fetch("*")
    assert not list(tmp_path.rglob("evil"))


GIT = "git:" + git_name(b"x")


@pytest.mark.parametrize(
    "damaged",
    [
        "no JSON", "[]", '{"revision": "c0ffee"}',
        *(json.dumps({"revision": "c0ffee", "files": files}) for files in (
            [], {}, {"x.tsv": None}, {"x.tsv": 5}, {"x.tsv": "git:short"},
            *({"x.tsv": GIT, path: GIT} for path in ("../../../evil", "/evil", "a//evil", "./evil", "e\0vil")),
        )),
    ],
)  # fmt: skip
def test_a_damaged_manifest_is_listed_anew(damaged, hub, tmp_path):
    write(hub.folder / "owner" / "name" / "x.tsv", "x")
    write(SOME.folder / ".manifest.json", damaged)
    assert [path.name for path in SOME.open().fetch("*")] == ["x.tsv"]
    assert json.loads((SOME.folder / ".manifest.json").read_text())["files"] == {"x.tsv": GIT}
    assert not list(tmp_path.rglob("*evil*"))


def test_without_a_hub_files_put_there_by_hand_are_taken_with_a_warning(hub, monkeypatch):
    with pytest.raises(
        InputError, match=r"owner/name: not in .*could not be asked.*put the files of its commit c0ffee"
    ):
        SOME.open().fetch("x.tsv")
    unplug(monkeypatch)
    write(SOME.folder / "x.tsv", "by hand")
    with pytest.warns(UserWarning, match="taken as it is, the Hub could not be asked for checksums"):
        assert SOME.open().fetch("x.tsv")[0].read_text() == "by hand"
    with pytest.warns(UserWarning, match="as it is"), pytest.raises(InputError, match=r"name: holds no file y.tsv"):
        SOME.open().fetch("y.tsv")


def miracl(language: str, judged: Path, corpus: Path, splits: tuple[str, ...]) -> None:
    """A language in MIRACL's own files: two passages in each of two parts, and for each split one query."""
    root = f"miracl-v1.0-{language}"
    for number, split in enumerate(splits):
        write(judged / root / "topics" / f"topics.{root}-{split}.tsv", f'{split}\twhich "fox" {number}\n')
        qrels = f"{split} Q0 {number}#0 1\n{split} Q0 {number}#1 0\n"
        write(judged / root / "qrels" / f"qrels.{root}-{split}.tsv", qrels)
    write(judged / root / "topics" / f"topics.{root}-test-b.tsv", "t\tnever judged\n")
    for part in (0, 1):
        rows = [{"docid": f"{part}#{n}", "title": f"T{part}", "text": f"fox {part} {n}"} for n in (0, 1)]
        write_gzip(corpus / f"miracl-corpus-v1.0-{language}" / f"docs-{part}.jsonl.gz", lines(*rows))


def test_a_language_of_miracl_is_a_beir_folder_of_its_judged_splits(hub, monkeypatch):
    miracl("sw", hub.folder / JUDGED.name, hub.folder / CORPUS.name, ("train", "dev"))
    miracl("yo", hub.folder / JUDGED.name, hub.folder / CORPUS.name, ("dev",))
    found = load_retrieval_set("miracl/sw", "dev")
    assert hub.commits == {JUDGED.revision, CORPUS.revision}
    assert (found.queries, found.qrels) == ({"dev": 'which "fox" 1'}, {"dev": {"1#0": 1, "1#1": 0}})
    assert [found.corpus["id"][:], found.corpus[0]["title"]] == [["0#0", "0#1", "1#0", "1#1"], "T0"]
    train = load_train_set("miracl/sw", hard_negatives=1)
    assert (train.queries["text"][:], train.passages["text"][:]) == (['which "fox" 0'], ["fox 0 0", "fox 0 1"])
    unplug(monkeypatch)  # what is built needs no Hub
    assert resolve("miracl/sw", "dev") == resolve("miracl/sw", "train")
    assert evaluate("bm25", "miracl/sw", split="dev")["mean"]["recall@100"] == 1.0
    with pytest.raises(InputError, match="holds no split 'test', found dev, train"):
        load_retrieval_set("miracl/sw", "test")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(InputError, match="holds no split 'train', found dev"):
        load_train_set("miracl/yo")


def test_miracl_has_eighteen_languages_and_no_others(hub):
    assert len(set(KNOWN + SURPRISE)) == 18
    with pytest.raises(
        InputError, match="miracl/xx: no language of MIRACL's, expected miracl/ and one of ar, bn, de, en, "
    ):
        resolve("miracl/xx")
    assert not hub.commits


def test_miracl_is_read_from_a_copy_without_a_network(monkeypatch):
    unplug(monkeypatch)
    miracl("de", JUDGED.folder, CORPUS.folder, ("dev",))
    part = CORPUS.folder / "miracl-corpus-v1.0-de" / "docs-0.jsonl.gz"
    away = part.rename(part.with_name("away"))
    with (
        pytest.warns(UserWarning, match="as it is"),
        pytest.raises(InputError, match=r"docs-0.jsonl.gz, expected all parts"),
    ):
        resolve("miracl/de")
    away.rename(part)
    with pytest.warns(UserWarning, match="taken as it is"):
        assert load_retrieval_set("miracl/de", "dev").qrels == {"dev": {"0#0": 1, "0#1": 0}}


@pytest.mark.parametrize(
    ("file", "content", "sentence"),
    [
        ("topics/topics.miracl-v1.0-de-dev.tsv", "no tab\n", "line 1: found 'no tab', expected a query's id, a tab"),
        ("qrels/qrels.miracl-v1.0-de-dev.tsv", "q Q0 p x\n", "line 1: the grade is 'x'"),
    ],
)
def test_a_broken_line_of_miracl_is_named_and_nothing_is_kept(file, content, sentence, monkeypatch, tmp_path):
    unplug(monkeypatch)
    miracl("de", JUDGED.folder, CORPUS.folder, ("dev",))
    write(JUDGED.folder / "miracl-v1.0-de" / file, content)
    with pytest.warns(UserWarning, match="as it is"), pytest.raises(InputError, match=sentence) as caught:
        resolve("miracl/de")
    assert str(caught.value).startswith(str(JUDGED.folder))
    assert not (tmp_path / "cache" / "miracl").exists()


Parts = dict[str, dict[str, tuple[str, dict[str, list]]]]
"""By configuration and split the path of a file and its columns."""


def card(root: Path, parts: Parts) -> None:
    """A repository of the Hub: files in the form that their names end in, and a README that names them."""
    head = ["---", "configs:"]
    for name, splits in parts.items():
        head += [f"- config_name: {name}", "  data_files:"]
        for split, (path, columns) in splits.items():
            head += [f"  - split: {split}", f"    path: {path.replace('-00000-of-00001', '-*')}"]
            rows = Dataset.from_dict(columns)
            if path.endswith(".parquet"):
                (root / path).parent.mkdir(parents=True, exist_ok=True)
                rows.to_parquet(root / path)
            else:
                text = lines(*rows).encode()
                write(root / path, gzip.compress(text) if path.endswith(".gz") else text)
    write(root / "README.md", "\n".join([*head, "---", "# A card", ""]))


QRELS = {"query-id": ["q0", "q1"], "corpus-id": ["p0", "p1"], "score": [2.0, 1.0]}
CORPUS_ROWS = {"_id": ["p0", "p1"], "title": ["T", ""], "text": ["a fox", "an owl"]}
QUERIES = {"_id": ["q0", "q1"], "text": ["which fox", "which owl"]}


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz", "-00000-of-00001.parquet"])
def test_a_task_of_mteb_is_a_beir_folder_of_all_its_splits(ending, hub, monkeypatch):
    one = {key: values[:1] for key, values in QRELS.items()}
    card(hub.folder / "mteb" / "nfcorpus", {
        "default": {"train": (f"qrels/train{ending}", one), "test": (f"qrels/test{ending}", QRELS)},
        "corpus": {"corpus": (f"corpus{ending}", CORPUS_ROWS)},
        "queries": {"queries": (f"queries{ending}", QUERIES)},
        "top_ranked": {"test": (f"top_ranked{ending}", {"query-id": ["q0"]})},
    })  # fmt: skip
    found = load_retrieval_set("mteb/NFCorpus", "test")
    assert found.qrels == {"q0": {"p0": 2}, "q1": {"p1": 1}}
    assert found.corpus[0] == {"id": "p0", "title": "T", "text": "a fox"}
    assert hub.commits == {tasks()["nfcorpus"].repository.revision}
    assert not any("top_ranked" in path for path in hub.asked)
    unplug(monkeypatch)
    assert load_train_set("mteb/nfcorpus", "train").queries["text"][:] == ["which fox"]
    assert check("mteb/NFCorpus", split="test")["queries"] == 2
    assert evaluate("bm25", "mteb/NFCorpus")["mean"]["ndcg@10"] == 1.0


def test_a_subset_is_fetched_alone_and_splits_with_a_corpus_each_are_kept_apart(hub):
    corpora = {split: {"id": ["p0"], "text": [f"{split} fox"]} for split in ("dev", "test")}
    parts: Parts = {}
    for language in ("ar", "de"):
        rows = {
            "corpus": corpora,
            "queries": {split: {"id": ["q0"], "text": [f"{split} {language}?"]} for split in ("dev", "test")},
            "qrels": {split: {"query-id": ["q0"], "corpus-id": ["p0"], "score": [1]} for split in ("dev", "test")},
        }
        for part, splits in rows.items():
            name = f"{language}-{part}"
            parts[name] = {split: (f"{name}/{split}-00000-of-00001.parquet", found) for split, found in splits.items()}
    card(hub.folder / "mteb" / "MultiLongDocRetrieval", parts)
    for split in ("dev", "test"):
        found = load_retrieval_set("mteb/MultiLongDocRetrieval/de", split)
        assert (found.corpus["text"][:], found.queries) == ([f"{split} fox"], {"q0": f"{split} de?"})
        assert not any(path.startswith("ar-") for path in hub.asked)
        assert any("/test" in path for path in hub.asked) == (split == "test")
    with pytest.raises(InputError, match="holds no split 'train', found dev, test"):
        resolve("mteb/MultiLongDocRetrieval/de", "train")


def test_queries_of_several_splits_over_one_corpus_are_written_once(hub):
    qrels = {"query-id": ["q0"], "corpus-id": ["p0"], "score": [1]}
    queries = {"train": QUERIES, "test": {key: values[:1] for key, values in QUERIES.items()}}
    card(hub.folder / "mteb" / "scifact", {
        "qrels": {split: (f"qrels/{split}.jsonl", qrels) for split in ("train", "dev", "test")},
        "corpus": {"corpus": ("corpus.jsonl", CORPUS_ROWS)},
        "queries": {split: (f"queries/{split}.jsonl", columns) for split, columns in queries.items()},
    })  # fmt: skip
    folder, repair = resolve("mteb/SciFact", "train")
    assert repair
    assert left(folder) == ["corpus.jsonl", "qrels/test.tsv", "qrels/train.tsv", "queries.jsonl"]  # dev has no queries
    assert [json.loads(line)["_id"] for line in (folder / "queries.jsonl").read_text().splitlines()] == ["q0", "q1"]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            "NFCorpsu",
            "no retrieval task of MTEB's that can be fetched has that name, expected mteb/ and one, such as NFCorpus",
        ),
        ("zzzzzz", "has that name, expected mteb/ and one$"),
        ("NFCorpus/de", "mteb/NFCorpus/de: not one data set, expected mteb/NFCorpus$"),
        ("MIRACLRetrieval", "expected mteb/MIRACLRetrieval/ and one of ar, bn, de, en"),
    ],
)
def test_names_that_are_no_task_or_subset(name, sentence, hub):
    with pytest.raises(InputError, match=sentence):
        resolve(f"mteb/{name}")
    assert not hub.commits


def test_every_task_in_the_list_has_a_repository_and_a_commit():
    assert len(tasks()) > 300
    for task in tasks().values():
        assert task.repository.name.count("/") == 1
        assert set(task.repository.revision) <= set("0123456789abcdef")
    assert tasks()["miraclretrieval"].subsets[:3] == ("ar", "bn", "de")


def judging(*passages: str) -> dict[str, list]:
    return {"query-id": ["q0"] * len(passages), "corpus-id": [*passages], "score": [1] * len(passages)}


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
    """As its loader (mteb 2.26.24) is written: default before qrels, and a configuration query before queries."""
    names = ("qrels", "default", "queries", "query")
    rows = {
        **{name: judging(f"of {name}") for name in names[:2]},
        **{name: {"_id": ["q0"], "text": [f"of {name}"]} for name in names[2:]},
        "corpus": {"_id": [f"of {name}" for name in names[:2]], "text": ["a fox", "an owl"]},
    }
    root = hub.folder / "mteb" / "scifact"
    card(root, {name: {"test": (f"{name}.jsonl", rows[name])} for name in ("qrels", "queries", "corpus", *more)})
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", hub.folder / "cache")
    for name in ("mteb/SciFact", f"hub:{root}"):
        found = load_retrieval_set(name, "test")
        assert (found.qrels, found.queries) == ({"q0": {passage: 1}}, {"q0": query})


def test_a_subset_has_its_own_judgements_and_the_queries_of_the_only_query(hub):
    parts: Parts = {name: {"test": (f"{name}.jsonl", judging(name))} for name in ("de-qrels", "de-default", "default")}
    parts["de-corpus"] = {"test": ("corpus.jsonl", {"_id": ["de-qrels", "x"], "text": ["a fox", "an owl"]})}
    for name in ("de-queries", "query"):
        parts[name] = {"test": (f"{name}.jsonl", {"_id": ["q0"], "text": [name]})}
    card(hub.folder / "mteb" / "MultiLongDocRetrieval", parts)
    found = load_retrieval_set("mteb/MultiLongDocRetrieval/de", "test")
    assert (found.qrels, found.queries) == ({"q0": {"de-qrels": 1}}, {"q0": "query"})


def test_texts_that_look_like_dates_stay_as_they_are(hub):
    root = hub.folder / "mteb" / "scifact"
    card(root, {
        "default": {"test": ("test.jsonl", judging("2020-01-01"))},
        "corpus": {"c": ("c.jsonl", {"_id": ["2020-01-01"], "text": ["1999-12-31"]})},
        "queries": {"q": ("q.json", QUERIES)},
    })  # fmt: skip
    found = load_retrieval_set("mteb/SciFact", "test")
    assert found.qrels == {"q0": {"2020-01-01": 1}}
    assert found.corpus[0] == {"id": "2020-01-01", "title": "", "text": "1999-12-31"}
    other = load_dataset("json", data_files=str(root / "c.jsonl"), split="train", streaming=True)  # negative control
    assert next(iter(other))["_id"] == datetime.datetime(2020, 1, 1)


def one(file: str, **columns: object) -> dict[str, tuple[str, dict[str, list]]]:
    """A split of one row."""
    return {"test": (file, {name.replace("_id_", "-id"): [value] for name, value in columns.items()})}


def graded(score: object) -> Parts:
    return {"default": one("test.jsonl", query_id_="q0", corpus_id_="p0", score=score)}


GRADE = "expected a whole number from -99999 to 99999"
BROKEN: list[tuple[Parts, str]] = [
    (graded(None), rf"test.jsonl, line 1: the grade is 'null', {GRADE}"),
    (graded(0.7), rf"test.jsonl, line 1: the grade is '0.7', {GRADE}"),
    (graded("x"), rf"test.jsonl, line 1: the grade is 'x', {GRADE}"),
    (graded([1]), rf"test.jsonl, line 1: the grade is '\[1\]', {GRADE}"),
    (
        {"default": one("test-00000-of-00001.parquet", query_id_="q0", corpus_id_="p0", score=0.7)},
        rf"test-00000-of-00001.parquet, row 1: the grade is '0.7', {GRADE}",
    ),
    (
        {"default": one("test.jsonl", query_id_=None, corpus_id_="p0")},
        "line 1: field 'query-id' is null, expected an id",
    ),
    ({"default": one("test.jsonl", query_id_="q0")}, "line 1: field 'corpus-id' is missing"),
    (
        {"queries": one("q.jsonl", _id=None, text="x")},
        "mteb/SciFact: .*q.jsonl, line 1: field '_id' is null, expected an id",
    ),
    ({"queries": one("q.jsonl", id=1.5, text="x")}, "q.jsonl, line 1: field 'id' is the number 1.5, expected an id"),
    (
        {"queries": one("q-00000-of-00001.parquet", _id=b"q", text="x")},
        "row 1: field '_id' is of the kind bytes, expected",
    ),
    (
        {"queries": {split: (f"{split}.jsonl", QUERIES) for split in ("dev", "train")}},
        "mteb/SciFact: holds queries of dev, train and judgements of test, expected a split with both",
    ),
    ({"corpus": {"c": ("c.jsonl", CORPUS_ROWS)}}, "names no configuration 'queries', found corpus"),
    ({"corpus": {"c": ("c.bin", CORPUS_ROWS)}}, "c.bin: ends in none of .parquet, .jsonl"),
    (
        {"corpus": {"c": ("c.jsonl", {"_id": ["p0"]})}},
        r"mteb/SciFact: .*/c.jsonl, line 1: field 'text' is missing \(found '_id'\), expected a string",
    ),
    (
        {"corpus": {"c": ("c.jsonl", {"_id": ["p0"], "text": [["x"]]})}},
        "c.jsonl, line 1: field 'text' is a list, expected a string",
    ),
]


@pytest.mark.parametrize(("parts", "sentence"), BROKEN)
def test_a_repository_in_another_layout_is_refused_in_one_sentence(parts, sentence, hub, tmp_path):
    if "no configuration" not in sentence:
        sound = {"corpus": ("c.jsonl", CORPUS_ROWS), "queries": ("q.jsonl", QUERIES), "default": ("test.jsonl", QRELS)}
        parts = {**{name: {"test": file} for name, file in sound.items()}, **parts}
    card(hub.folder / "mteb" / "scifact", parts)
    with pytest.raises(InputError, match=sentence) as caught:
        resolve("mteb/SciFact")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "cache" / "mteb").exists()


def spoiled(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes(byte ^ 255 for byte in content[middle : middle + 20]) + content[middle + 20 :]


@pytest.mark.parametrize(
    ("file", "damage", "sentence"),
    [
        ("c.jsonl.gz", lambda content: content[: len(content) // 2], "the gzip stream is damaged or cut short"),
        ("c.jsonl.gz", spoiled, "the gzip stream is damaged or cut short"),
        ("c.jsonl", lambda content: content[:-5], r"line 2: not JSON \(.*\), expected a row"),
        ("c.jsonl", lambda content: b"null\n", "line 1: found null, expected a row"),
        ("c-00000-of-00001.parquet", lambda content: content[:-5], r"could not be read behind row 0 \(.*\), expected a table"),
        ("c.csv.gz", lambda content: gzip.compress(b"_id,text\np,x\n")[:-4], r"could not be read behind row [01] \(.*end"),
        ("c.csv.gz", lambda content: b"_id,text", r"could not be read behind row 0 \(Not a gzipped file"),
        ("c.tsv", lambda content: b"", r"could not be read behind row 0 \(No columns"),
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
    with pytest.raises(InputError, match=f"mteb/SciFact: .*{file}[:,] {sentence}") as caught:
        resolve("mteb/SciFact")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "cache" / "mteb").exists()


def test_rows_of_a_set_of_the_hub_are_named_by_their_configuration(hub, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", hub.folder / "cache")
    card(hub.folder / "set", {
        "qrels": {"test": ("test.jsonl", QRELS)},
        "corpus": {"c": ("c.jsonl", CORPUS_ROWS)},
        "queries": {"q": ("q.jsonl", {"_id": ["q0", None], "text": ["x", "y"]})},
    })  # fmt: skip
    with pytest.raises(InputError, match=r"^hub:.*/set: queries, row 2: field '_id' is null, expected an id \("):
        resolve(f"hub:{hub.folder / 'set'}")


def test_a_full_disk_is_told_as_one(tmp_path):
    rows = [{"_id": "p", "query-id": "q", "corpus-id": "p", "text": "x" * (1 << 17)}]
    with (
        small_disk(tmp_path / "disk", 1 << 16) as disk,
        pytest.raises(InputError, match=r"set: could not be written \(No space left on device\)"),
        whole_folder(disk / "set") as part,
    ):
        write_retrieval_rows(
            part, "name", *(placed(Path("rows"), rows) for _ in range(2)), {"test": placed(Path("rows"), rows)}
        )


HEAD = "configs:\n- config_name: {}\n  data_files:"


@pytest.mark.parametrize(
    ("head", "sentence"),
    [
        ("license: mit", r"names no configurations with data_files \('configs'\)"),
        ("configs: [a: b: c", r"names no configurations with data_files \(while parsing a flow sequence"),
        ("- a", "names no configurations with data_files"),
        ("configs: 5", "names no configurations with data_files"),
        ("[" * 3000, "names no configurations with data_files"),
        (HEAD.format("[corpus]") + " x.jsonl", "names no configurations with data_files"),
        *((HEAD.format("corpus") + each, "entry 1 in the data_files of configuration 'corpus' is no split") for each in (
            " []", " {}", "", " 5", " [5]", " [[x]]", " {test: []}", " {test: {a: b}}", "\n  - split: test",
            "\n  - path: x.jsonl", "\n  - split: [a]\n    path: x.jsonl",
        )),
        (HEAD.format("corpus") + "\n" + "  - split: a\n    path: x.jsonl\n" * 2, "entry 2 in the data_files"),
    ],
)  # fmt: skip
def test_a_card_in_another_layout_is_refused(head, sentence, hub):
    rest = "- config_name: queries\n  data_files: x.jsonl\n- config_name: default\n  data_files: x.jsonl\n"
    whole = f"{head}\n{rest if head.startswith('configs:' + chr(10)) else ''}"
    write(hub.folder / "mteb" / "scifact" / "README.md", f"---\n{whole}---\n")
    with pytest.raises(InputError, match=rf"README.md: {sentence}") as caught:
        mteb.mteb_folder("SciFact", "test")
    assert "\n" not in str(caught.value)

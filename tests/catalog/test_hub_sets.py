"""Data sets by name, with a folder in the place of the Hub: ``datasets`` loads both the same
way."""

import json
from datetime import datetime

import datasets
import huggingface_hub
import pytest
from datasets import Dataset
from helpers import open_retrieval_set, open_train_set
from hub_server import card
from tiny_data import lines, write, write_gzip

from contaccum import catalog, evaluate, look
from contaccum.catalog import fetch
from contaccum.config import DataConfig
from contaccum.data.commands import check, convert
from contaccum.data.dataset import load_training
from contaccum.errors import InputError
from contaccum.formats.records import content_id


@pytest.fixture
def name(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hub-cache")
    write(tmp_path / "set" / "train.jsonl", lines({"query": "a", "pos": ["x"], "neg": ["y"]}))
    write(tmp_path / "set" / "test.jsonl", lines({"query": "b", "pos": ["z"], "neg": ["y"]}))
    return f"hub:{tmp_path / 'set'}"


def test_every_door_opens_a_set_by_name(name, tmp_path):
    assert open_train_set(name, hard_negatives=1).passages["text"][:] == ["x", "y"]
    assert open_retrieval_set(name, "test").queries == {f"unnamed-query-{content_id('', 'b')}": "b"}
    for _ in range(2):
        with pytest.warns(UserWarning, match=r"only the split train is read, not test; .*::test"):
            found = check(name)
        assert (found["rows"], found["path"]) == (1, name)
    assert check(name, "test")["rows"] == 1  # the user chose it
    with pytest.warns(UserWarning, match="only the split train is read, not test"):
        convert(name, tmp_path / "beir", "beir")
    convert(name, tmp_path / "out", "dpr", split="test")
    assert open_train_set(tmp_path / "out").queries["text"][:] == ["b"]


def test_a_table_without_the_split_is_answered_with_a_name_that_has_one(tmp_path, name):
    """A search uses the split test, and a folder of CSV files has only train."""
    write(tmp_path / "faq" / "faq.csv", "question,answer\nwhat barks?,a dog\nwhat purrs?,a cat\n")
    faq = f"hub:{tmp_path / 'faq'}?query=question&pos=answer"
    with pytest.raises(InputError, match=r"available: train\. Name the split .*::train\?query"):
        look("bm25", faq, "dog")
    named = faq.replace("?", "::train?")
    assert [passage.text for passage in look("bm25", named, "dog")] == ["a dog"]


@pytest.mark.parametrize(
    ("files", "unread"),
    [
        (["faq.csv", "faq.jsonl"], "faq.csv|faq.jsonl"),
        (["FAQ.CSV", "more.csv"], "FAQ.CSV"),
        (["faq.csv", "faq_test.csv"], "faq.csv"),
        (["data/train.csv", "faq.csv"], "faq.csv"),
        (["data/train.csv", "data/train.jsonl"], "data/train.csv|data/train.jsonl"),
        (["train.csv", "extra/more.csv"], "extra/more.csv"),
        (["train.csv", "run/log.jsonl", ".cache/more.csv"], None),
        (["faq.csv", "more.csv", "README.md", ".hidden.csv", "dataset_info.json"], None),
        (["train.csv", "test.csv"], None),
    ],
)
def test_a_data_file_in_no_split_is_refused(files, unread, tmp_path, name):
    for file in files:
        csv = file.lower().endswith(".csv")
        row = "question,answer\na,b\n" if csv else lines({"question": "a", "answer": "b"})
        write(tmp_path / "faq" / file, row)
    table = f"hub:{tmp_path / 'faq'}?query=question&pos=answer"
    if unread is None:
        fetch(table, "train")
        return
    with pytest.raises(InputError, match=rf"/faq/({unread}) would not be read, only"):
        fetch(table, "train")
    # a README may choose the files
    readme = "---\nconfigs:\n- config_name: default\n  data_files: FILE\n---\n"
    write(tmp_path / "faq" / "README.md", readme.replace("FILE", files[-1]))
    fetch(table, "train")


def test_a_parquet_file_whose_name_is_a_pattern_is_read_itself(tmp_path):
    """``datasets`` took x1.parquet instead."""
    for name, answer in (("x[1]", "right"), ("x1", "wrong")):
        rows = Dataset.from_dict({"question": ["a"], "answer": [answer]})
        rows.to_parquet(str(tmp_path / f"{name}.parquet"))
    file = fetch(f"hub:{tmp_path / 'x[1].parquet'}?query=question&pos=answer", "train")
    assert "right" in file.read_text()


def test_two_columns_with_the_same_name_are_refused(tmp_path):
    write(tmp_path / "faq.csv", "question,answer,answer,,\na,b,c,,\n")
    table = f"hub:{tmp_path / 'faq.csv'}?query=question&pos=answer"
    with pytest.raises(InputError, match=r"faq\.csv:1: found several columns named 'answer'"):
        fetch(table)
    write(tmp_path / "faq.csv", "question,answer,,\na,b,,\n")
    assert open_train_set(table).passages["text"][:] == ["b"]


def test_a_changed_set_is_written_anew(name, tmp_path):
    before = fetch(name, "train")
    assert fetch(name, "train") == before
    write(tmp_path / "set" / "train.jsonl", lines({"query": "changed", "pos": ["x"], "neg": ["y"]}))
    assert open_train_set(name).queries["text"][:] == ["changed"]


@pytest.fixture
def triplets(tmp_path, name):
    """Columns as sentence-transformers has them, in Parquet."""
    rows = {
        "anchor": ["a", "b", "c"],
        "positive": ["x", "y", "z"],
        "negative_1": ["n", "", "m"],
        "negative_2": ["o", None, "m"],
        "list": [["x", "y"], ["y"], []],
        "number": [1, 2, 3],
        "real": [0.5, 0.5, 0.5],
        "truth": [True, False, True],
    }
    (tmp_path / "triplets").mkdir()
    Dataset.from_dict(rows).to_parquet(tmp_path / "triplets" / "train.parquet")
    return f"hub:{tmp_path / 'triplets'}"


def test_an_error_in_a_table_names_the_table_and_the_row(tmp_path):
    (tmp_path / "faq.csv").write_text("question,answer,label\nwhere,here,1\nwho,there,x\n")
    name = f"hub:{tmp_path}?query=question&pos=answer&label=label"
    with pytest.raises(InputError) as caught:
        open_train_set(name)
    assert str(caught.value).startswith(f"{tmp_path / 'faq.csv'}:3: column 'label' has 'x'")


def test_columns_of_other_names_are_mapped(triplets):
    found = open_train_set(
        f"{triplets}?query=anchor&pos=positive&neg=negative_1,negative_2", hard_negatives=1
    )
    assert found.queries["text"][:] == ["a", "b", "c"]
    texts = found.passages["text"][:]
    assert [[texts[row] for row in found.positives.row(n)] for n in range(3)] == [
        ["x"],
        ["y"],
        ["z"],
    ]
    assert [[texts[row] for row in found.negatives.row(n)] for n in range(3)] == [
        ["n", "o"],
        [],
        ["m"],
    ]
    with pytest.warns(UserWarning, match="skipped 1 query without a positive"):
        lists = open_retrieval_set(
            f"{triplets}::train?query=anchor&pos=list&query_id=number", "no such split"
        )
    assert {key: len(grades) for key, grades in lists.qrels.items()} == {"1": 2, "2": 1}


@pytest.mark.parametrize(
    ("mapping", "sentence"),
    [
        ("?query=anchor&pos=absent",
         "row 1: column 'absent' not found; available: 'anchor', 'positive'"),
        (
            "?query=anchor&answer=positive",
            "found 'answer=positive'; expected FIELD=COLUMN, where FIELD is one of query, pos, neg",
        ),
        ("?query=anchor&pos=positive&query=list", "found 'query=list'; expected FIELD=COLUMN"),
        ("?query=anchor&pos=positive&label=a,b", "found 'label=a,b'; expected FIELD=COLUMN"),
        ("?query=anchor&pos=positive&title=list&neg=negative_1", "leave out title or neg"),
        ("?query=anchor&pos=list&title=positive",
         "found 1 value for title but 2 texts for pos; each text needs one"),
        ("::dev?query=anchor&pos=positive", "split 'dev' not found; available: train"),
    ],
)  # fmt: skip
def test_a_mapping_that_cannot_be_is_refused_in_one_sentence(mapping, sentence, triplets):
    with pytest.raises(InputError) as caught:
        open_train_set(triplets + mapping)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_all_invalid_rows_of_a_table_are_listed(triplets):
    with pytest.raises(InputError) as caught:
        check(f"{triplets}?query=anchor&pos=real")
    count, line = str(caught.value).split("\n  ")  # one line for equal sentences
    assert count.endswith("pos=real: 3 errors")
    sentence = "column 'real' has a float; expected a text or a list of texts"
    assert line.partition(", row ")[2].startswith(f"1: {sentence} (and 2 more, the last at ")
    assert line.endswith(", row 3)")


def test_ids_and_titles_of_a_table_are_kept(tmp_path):
    cells = ["what barks?;d7;Dogs;A dog barks.", "what purrs?;c3;;A cat purrs.", "what swims?;;;"]
    write(tmp_path / "faq.csv", "\n".join(["q;key;name;body", *cells]) + "\n")
    table = f"hub:{tmp_path / 'faq.csv'}?query=q&pos=body&pos_id=key&title=name"
    with pytest.warns(UserWarning, match="skipped 1 query without a positive"):
        found = open_train_set(table).passages[:]
    assert found == {
        "id": ["d7", "c3"], "title": ["Dogs", ""], "text": ["A dog barks.", "A cat purrs."]
    }  # fmt: skip


def test_columns_that_no_reader_asks_for_may_hold_anything(name, tmp_path):
    when = datetime(2026, 1, 2)
    passages = [
        [{"docid": "1", "text": "x", "seen": when}],
        [{"docid": "2", "text": "y", "seen": when}],
    ]
    rows = {
        "query": ["a", "b"],
        "positive_passages": passages,
        "seen": [when, when],
        "picture": [b"\x00", b"\xff"],
    }
    (tmp_path / "dated").mkdir()
    Dataset.from_dict({**rows, "query_id": ["q", "r"]}).to_parquet(
        tmp_path / "dated" / "train.parquet"
    )
    found = load_training(DataConfig(train=f"hub:{tmp_path / 'dated'}"))
    assert sorted(found.texts()) == ["", "", "a", "b", "x", "y"]
    (tmp_path / "bad").mkdir()
    Dataset.from_dict({**rows, "query_id": [when, when]}).to_parquet(
        tmp_path / "bad" / "train.parquet"
    )
    with pytest.raises(
        InputError, match=r"bad, row 1: Expected .*, got `datetime` - at `.\.query_id`"
    ):
        load_training(DataConfig(train=f"hub:{tmp_path / 'bad'}")).texts()


def test_nanobeir_and_mteb_sets_are_beir_folders(tmp_path, name, monkeypatch):
    corpus = {"_id": ["p0", "p1"], "text": ["a fox", "an owl"]}
    queries = {"_id": ["q0", "q1"], "text": ["which fox", "which owl"]}
    judged = {"query-id": ["q0", "q1"], "corpus-id": ["p0", "p1"]}
    nano, mteb = tmp_path / "nano", tmp_path / "mteb"
    card(nano, {
        "corpus": {"NanoSciFact": ("c-00000-of-00001.parquet", corpus)},
        "queries": {"NanoSciFact": ("q-00000-of-00001.parquet", queries)},
        "qrels": {"NanoSciFact": ("j-00000-of-00001.parquet", judged)},
    })  # fmt: skip
    card(mteb, {
        "corpus": {"corpus": ("c-00000-of-00001.parquet", corpus | {"title": ["T", ""]})},
        "queries": {"queries": ("q-00000-of-00001.parquet", queries)},
        "default": {"test": ("j-00000-of-00001.parquet", judged | {"score": [2, 1]})},
    })  # fmt: skip
    monkeypatch.setattr(catalog, "NANO_REPOSITORY", f"hub:{nano}")
    for text, grade, title in (("nanobeir/scifact", 1, ""), (f"hub:{mteb}", 2, "T")):
        found = open_retrieval_set(text, "test")
        assert found.qrels == {"q0": {"p0": grade}, "q1": {"p1": 1}}
        assert found.queries == {"q0": "which fox", "q1": "which owl"}
        assert found.corpus[0] == {"id": "p0", "title": title, "text": "a fox"}
    assert evaluate("bm25", "nanobeir/scifact")["mean"]["ndcg@10"] == 1.0
    assert open_train_set(f"hub:{mteb}", "test").queries["text"][:] == ["which fox", "which owl"]
    with pytest.raises(
        InputError, match="nanobeir/scifakt: no NanoBEIR set has this name; expected nanobeir/ and"
    ):
        open_retrieval_set("nanobeir/scifakt")


def test_an_unknown_split_or_set_is_refused_in_one_sentence(name, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    for path, split in ((name, "dev"), ("hub:nobody/nothing", "train")):
        with pytest.raises(InputError) as caught:
            open_train_set(path, split)
        assert path in str(caught.value)
        assert "\n" not in str(caught.value)


DATED = [
    {"query_id": f"2020-01-0{day}", "query": f"2021-02-0{day}", "pos": [f"2022-03-0{day}"]}
    for day in (1, 2)
]


def test_texts_like_dates_stay_strings(tmp_path):
    folder = tmp_path / "dated"
    write_gzip(folder / "train.jsonl.gz", lines(*DATED))
    found = load_training(DataConfig(train=f"hub:{folder}"))
    assert sorted(text for text in found.texts() if text) == sorted(
        text for record in DATED for text in (record["query"], *record["pos"])
    )
    assert [query["id"] for query in open_train_set(f"hub:{folder}").queries] == [
        "2020-01-01",
        "2020-01-02",
    ]


@pytest.mark.parametrize("form", ["csv.gz", "tsv"])
def test_cells_of_a_table_are_texts_and_not_numbers_or_missing_values(form, tmp_path):
    rows = [("007", "NA", "1.50"), ("008", "null", "010"), ("009", 'a "b"', "2")]
    table = "i,q,p\n" + "".join(
        ",".join('"' + cell.replace('"', '""') + '"' for cell in cells) + "\n" for cells in rows
    )
    table = table.replace(",", "\t") if form == "tsv" else table
    (write_gzip if form.endswith("gz") else write)(tmp_path / "set" / f"train.{form}", table)
    name = f"hub:{tmp_path / 'set'}?query=q&pos=p&query_id=i"
    found = load_training(DataConfig(train=name))
    assert sorted(text for text in found.texts() if text) == sorted(
        cell for cells in rows for cell in cells[1:]
    )
    assert [query["id"] for query in open_train_set(name).queries] == ["007", "008", "009"]


def test_a_table_whose_rows_have_more_cells_than_names_is_refused(tmp_path):
    write(tmp_path / "set" / "train.csv", "q,p\nhow, when,because\nwho,she\n")
    data = DataConfig(train=f"hub:{tmp_path / 'set'}?query=q&pos=p")
    with pytest.raises(
        InputError,
        match=r"train\.csv:2: found 3 cells, but the header has 2; a cell that contains the separ",
    ):
        load_training(data).texts()


def test_ids_of_judgements_in_a_table_keep_their_zeros(tmp_path):
    folder = tmp_path / "set"
    parts = {"corpus": "corpus.jsonl", "queries": "queries.jsonl", "default": "qrels/test.tsv"}
    configs = [
        {"config_name": name, "data_files": [{"split": "test", "path": file}]}
        for name, file in parts.items()
    ]
    write(folder / "README.md", f"---\nconfigs: {json.dumps(configs)}\n---\n")
    write(folder / "corpus.jsonl", lines({"_id": "012", "text": "a word"}))
    write(folder / "queries.jsonl", lines({"_id": "01", "text": "which word?"}))
    write(folder / "qrels" / "test.tsv", "query-id\tcorpus-id\tscore\n01\t012\t1.0\n")
    assert open_retrieval_set(f"hub:{folder}", "test").qrels == {"01": {"012": 1}}

"""Encoding into shards: what is written, what is made again, what is refused."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset
from helpers import tiny_encoder
from word_encoder import WordEncoder

from contaccum import DualEncoder
from contaccum.config.commands import SearchConfig
from contaccum.errors import InputError
from contaccum.retrieval.encode import (
    Texts,
    encode,
    encode_in_memory,
    encode_texts,
    passage_vectors,
)
from contaccum.retrieval.shards import ShardFolder, saved_precision
from contaccum.runtime.files import read_json, sha256_of, write_json
from contaccum.runtime.processes import Processes

ROWS = 25


def corpus(rows: int = ROWS) -> Dataset:
    return Dataset.from_dict(
        {
            "id": [f"p{n}" for n in range(rows)],
            "title": [f"title {n}" if n % 2 else "" for n in range(rows)],
            "text": [f"text number {n}" for n in range(rows)],
        }
    )


def passages(rows: int = ROWS) -> Texts:
    return Texts("passage", corpus(rows))


def bytes_of(folder: Path) -> dict[str, str]:
    return {path.name: sha256_of(path) for path in sorted(folder.iterdir())}


def all_rows(folder: ShardFolder) -> tuple[list[str], np.ndarray]:
    return [key for shard in folder for key in shard.ids], np.concatenate(
        [shard.vectors for shard in folder]
    )


def test_shards_hold_every_passage_in_order_with_title_and_text(tmp_path):
    assert encode_texts(WordEncoder(), passages(), tmp_path / "e", shard_size=10)
    ids, vectors = all_rows(ShardFolder(tmp_path / "e"))
    texts = [f"title {n} text number {n}" if n % 2 else f"text number {n}" for n in range(ROWS)]
    assert ids == [f"p{n}" for n in range(ROWS)]
    np.testing.assert_array_equal(vectors, WordEncoder().encode_passages(texts))
    assert [len(shard.ids) for shard in ShardFolder(tmp_path / "e")] == [10, 10, 5]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_parquet_holds_what_npy_holds(tmp_path, dtype):
    form = {"shard_size": 10, "dtype": dtype}
    encode_texts(WordEncoder(), passages(), tmp_path / "npy", **form)
    encode_texts(WordEncoder(), passages(), tmp_path / "e", **form, format="parquet", text=True)
    (ids, vectors), (own_ids, own) = (
        all_rows(ShardFolder(tmp_path / name)) for name in ("npy", "e")
    )
    assert own_ids == ids
    assert own.dtype == dtype
    np.testing.assert_array_equal(own, vectors)
    table = pq.read_table([tmp_path / "e" / f"0000{number}.parquet" for number in range(3)])
    assert [field.name for field in table.schema] == ["id", "text", "embedding"]
    assert table.schema.field("embedding").type == pa.list_(pa.from_numpy_dtype(dtype), 48)
    assert table["id"].to_pylist() == ids
    assert table["text"].to_pylist() == passages().read(0, ROWS)[1]
    np.testing.assert_array_equal(np.stack(table["embedding"].to_pylist()).astype(dtype), vectors)


def test_parquet_without_texts_is_another_job_and_finished_shards_are_kept(tmp_path):
    form = {"shard_size": 10, "format": "parquet"}
    encode_texts(WordEncoder(), passages(), tmp_path / "e", **form)
    before = bytes_of(tmp_path / "e")
    assert pq.read_table(tmp_path / "e" / "00000.parquet").column_names == ["id", "embedding"]
    for name in ("00001.shard.json", "manifest.json"):
        (tmp_path / "e" / name).unlink()
    encoder = WordEncoder()
    assert encode_texts(encoder, passages(), tmp_path / "e", **form)
    assert encoder.seen == 10
    assert bytes_of(tmp_path / "e") == before
    with pytest.raises(InputError, match="text False, but now True"):
        encode_texts(WordEncoder(), passages(), tmp_path / "e", **form, text=True)


def test_half_precision_is_float32_rounded_once(tmp_path):
    encode_texts(WordEncoder(), passages(), tmp_path / "e", dtype="float16")
    _, vectors = all_rows(ShardFolder(tmp_path / "e"))
    assert vectors.dtype == np.float16
    np.testing.assert_array_equal(
        vectors, encode_in_memory(WordEncoder(), passages()).vectors.astype(np.float16)
    )


def test_another_number_of_processes_makes_only_what_is_missing(tmp_path):
    # shards 1, 3 and 5: 12 rows
    encode_texts(WordEncoder(), passages(), tmp_path / "e", Processes(1, 2), shard_size=4)
    encoder = WordEncoder()
    assert encode_texts(encoder, passages(), tmp_path / "e", shard_size=4)
    assert encoder.seen == ROWS - 12


def test_a_folder_is_continued_with_the_size_of_its_shards(tmp_path):
    encode_texts(WordEncoder(), passages(), tmp_path / "e", Processes(1, 2), shard_size=4)
    encoder = WordEncoder()
    assert encode_texts(encoder, passages(), tmp_path / "e")
    assert encoder.seen == ROWS - 12
    assert ShardFolder(tmp_path / "e").job.shard_size == 4


def test_a_finished_folder_costs_no_encoding(tmp_path):
    encode_texts(WordEncoder(), passages(), tmp_path / "e", shard_size=4)
    before, encoder = bytes_of(tmp_path / "e"), WordEncoder()
    assert encode_texts(encoder, passages(), tmp_path / "e", shard_size=4)
    assert encoder.seen == 0
    assert bytes_of(tmp_path / "e") == before


SLOW = """
import sys
from test_encode import WordEncoder, encode_texts, passages
encode_texts(WordEncoder(pause=0.05), passages(), sys.argv[1], shard_size=2)
"""


def test_killed_and_resumed_gives_the_files_of_an_unbroken_run(tmp_path):
    encode_texts(WordEncoder(), passages(), tmp_path / "whole", shard_size=2)
    broken = tmp_path / "broken"
    tests = Path(__file__).parent
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tests), str(tests.parent), str(tests.parent.parent)]),
    }
    process = subprocess.Popen([sys.executable, "-c", SLOW, str(broken)], env=environment)
    while not (broken / "00002.shard.json").exists() and process.poll() is None:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    finished = [read_json(path)["shard"]["rows"] for path in broken.glob("*.shard.json")]
    assert 3 <= len(finished) < 13
    with pytest.raises(InputError, match=r"only \d+ finished shards?\."):
        ShardFolder(broken)
    encoder = WordEncoder()
    assert encode_texts(encoder, passages(), broken, shard_size=2)
    assert encoder.seen == ROWS - sum(finished)
    assert bytes_of(broken) == bytes_of(tmp_path / "whole")


@pytest.mark.parametrize("name", ["00001.npy", "00001.ids.json", "00001.parquet"])
@pytest.mark.parametrize("fault", ["flipped", "gone"])
def test_a_damaged_shard_is_refused_by_the_reader_and_made_again_by_the_writer(
    tmp_path, name, fault
):
    folder, form = (
        tmp_path / "e",
        {"shard_size": 10, "format": "parquet" if name.endswith("parquet") else "npy"},
    )
    encode_texts(WordEncoder(), passages(), folder, **form)
    before = bytes_of(folder)
    data = (folder / name).read_bytes()
    if fault == "gone":
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(data[:-3] + bytes([data[-3] ^ 1]) + data[-2:])
    shards = ShardFolder(folder)
    assert len(shards[0].ids) == 10  # the others can be read
    with pytest.raises(InputError, match=name):
        shards[1]
    encoder = WordEncoder()
    with pytest.warns(UserWarning, match=rf"{name}.*shard 1 is encoded again"):
        encode_texts(encoder, passages(), folder, **form)
    assert encoder.seen == 10
    assert bytes_of(folder) == before


def test_a_search_continues_an_unfinished_folder_in_its_own_format(tmp_path):
    encode_texts(
        WordEncoder(), passages(), tmp_path / "e", shard_size=10, dtype="float16", format="parquet"
    )
    before = bytes_of(tmp_path / "e")
    for name in ("manifest.json", "00001.shard.json"):
        (tmp_path / "e" / name).unlink()
    settings = SearchConfig(embeddings=str(tmp_path / "e"))
    encoder = WordEncoder()
    shards, _ = passage_vectors(encoder, corpus(), settings)
    assert encoder.seen == 10
    assert [len(shard.ids) for shard in shards] == [10, 10, 5]
    assert bytes_of(tmp_path / "e") == before


def test_each_file_is_hashed_once_in_a_process(tmp_path, monkeypatch):
    read = []

    def counted_hash(path):
        read.append(path)
        return sha256_of(path)

    encode_texts(WordEncoder(), passages(), tmp_path / "e", shard_size=10)
    monkeypatch.setattr("contaccum.retrieval.shards.sha256_of", counted_hash)
    for _ in range(2):
        encode_texts(WordEncoder(), passages(), tmp_path / "e", shard_size=10)
        assert len(all_rows(ShardFolder(tmp_path / "e"))[0]) == ROWS
    assert len(read) == len(set(read)) == 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "passages"}, "kind is 'passages', expected {passage,query}; did you mean passag"),
        ({"shard_size": -1}, "shard_size is -1, expected `int` >= 1"),
    ],
)
def test_wrong_options_of_encode_are_refused(options, message, tmp_path):
    (tmp_path / "corpus.jsonl").write_text('{"_id": "a", "text": "b"}\n')
    with pytest.raises(InputError, match=re.escape(message)):
        encode(WordEncoder(), tmp_path / "corpus.jsonl", tmp_path / "e", **options)
    assert not (tmp_path / "e" / "manifest.json").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"encoder": WordEncoder(name="other")},
            "encoder 'words-48-passage', but now 'other-48-passage'",
        ),
        ({"texts": passages(24)}, "texts"),
        ({"dtype": "float16"}, "dtype 'float32', but now 'float16'"),
    ],
)
def test_a_folder_of_another_job_is_refused_and_left_as_it_is(tmp_path, change, words):
    settings = {"encoder": WordEncoder(), "texts": passages(), "shard_size": 10, "dtype": "float32"}
    encode_texts(output_dir=tmp_path / "e", **settings)
    before = bytes_of(tmp_path / "e")
    with pytest.raises(InputError, match=words):
        encode_texts(output_dir=tmp_path / "e", **settings | change)
    assert bytes_of(tmp_path / "e") == before


def test_the_manifest_of_something_else_is_not_replaced(tmp_path):
    """Of an index, or of a web app."""
    for content in ({"format_version": 1, "origin": {"encoder": "e"}}, {"name": "my web app"}):
        write_json(tmp_path / "manifest.json", content)
        with pytest.raises(InputError, match=r"manifest\.json: "):
            encode_texts(WordEncoder(), passages(), tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]
        assert json.loads((tmp_path / "manifest.json").read_text()) == content


def test_vectors_of_another_program_are_not_passed_over(tmp_path):
    np.save(tmp_path / "mine.npy", np.zeros((ROWS, 48)))
    with pytest.raises(InputError, match=r"mine\.npy: is not a shard of contaccum"):
        encode_texts(WordEncoder(), passages(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.npy"]


def test_a_copy_of_a_record_is_named(tmp_path):
    encode_texts(WordEncoder(), passages(), tmp_path)
    shutil.copy(tmp_path / "00000.shard.json", tmp_path / "00000 (copy).shard.json")
    with pytest.raises(InputError, match=r"00000 \(copy\)\.shard\.json: expected a number"):
        encode_texts(WordEncoder(), passages(), tmp_path)


@pytest.mark.parametrize(
    ("content", "precision"),
    [
        ({"job": {"encoder": "bf16 1 2"}}, "bf16"),
        ({"origin": {"encoder": "fp32 1 2"}}, "fp32"),
        ({"job": {"encoder": "other"}}, None),
        ({"job": {"encoder": 5}}, None),
        ({"origin": "https://example.org"}, None),
        ([], None),
    ],
)
def test_the_precision_of_saved_vectors_is_read_from_any_manifest(content, precision, tmp_path):
    write_json(tmp_path / "manifest.json", content)
    assert saved_precision(tmp_path) == precision


def test_reader_refuses_another_encoder_and_other_data(tmp_path):
    encode_texts(WordEncoder(), passages(), tmp_path / "e")
    encoder, source = WordEncoder().fingerprint("passage"), passages().fingerprint
    assert len(ShardFolder(tmp_path / "e", encoder, source)) == 1
    with pytest.raises(InputError, match=r"other data or settings \(encoder "):
        ShardFolder(tmp_path / "e", WordEncoder(name="other").fingerprint("passage"), source)
    with pytest.raises(InputError, match=r"was made from other texts"):
        ShardFolder(tmp_path / "e", encoder, passages(24).fingerprint)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda m: m.update(format_version=2), "has format_version 2"),
        (lambda m: m["job"].update(dtype="object"), "dtype is 'object'"),
    ],
)
def test_a_foreign_or_edited_manifest_is_refused(tmp_path, edit, words):
    encode_texts(WordEncoder(), passages(), tmp_path / "e", shard_size=10)
    manifest = read_json(tmp_path / "e" / "manifest.json")
    edit(manifest)
    write_json(tmp_path / "e" / "manifest.json", manifest)
    with pytest.raises(InputError, match=words):
        ShardFolder(tmp_path / "e")


def test_a_missing_folder_or_manifest_is_named(tmp_path):
    with pytest.raises(InputError, match=r"no manifest\.json, only 0 finished"):
        ShardFolder(tmp_path / "nowhere")


class BrokenEncoder(WordEncoder):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def encode_passages(self, texts, *rest):
        vectors = super().encode_passages(texts, *rest)
        vectors[7, 3] = self.value
        return vectors


@pytest.mark.parametrize(("value", "dtype"), [(np.nan, "float32"), (70_000.0, "float16")])
def test_an_embedding_that_is_not_finite_is_refused_by_its_id(tmp_path, value, dtype):
    with pytest.raises(InputError, match="'p7'"):
        encode_texts(BrokenEncoder(value), passages(), tmp_path / "e", dtype=dtype)
    assert not list(tmp_path.rglob("*.npy"))
    assert encode_texts(BrokenEncoder(70_000.0), passages(), tmp_path / "e", dtype="float32")


def test_a_disk_that_cannot_be_written_stops_the_encoding(tmp_path):
    encode_texts(WordEncoder(), passages(), tmp_path / "e", Processes(1, 5), shard_size=5)
    (tmp_path / "e" / "00002.npy").mkdir()  # where the third shard should stand
    encoder = WordEncoder()
    with pytest.raises(InputError, match=r"00002\.npy: cannot be written"):
        encode_texts(encoder, passages(), tmp_path / "e", shard_size=5)
    # the shards before it are kept: the first one, and the second one of the first call
    assert encoder.seen == 10
    finished = sorted(path.name for path in (tmp_path / "e").glob("*.shard.json"))
    assert finished == ["00000.shard.json", "00001.shard.json"]


def test_texts_are_stripped_as_in_training():
    """Some tokenizers make other tokens of a text with a space before it."""
    queries = Texts.of_queries({"q": " a fox\n", "r": "the sea"})
    assert queries.read(0, 2) == (["q", "r"], ["a fox", "the sea"])
    passages = Dataset.from_dict({"id": ["p"], "title": [" A"], "text": ["fox\n"]})
    assert Texts("passage", passages).read(0, 1) == (["p"], ["A fox"])


def test_source_fingerprint_knows_where_one_text_ends_and_the_next_begins():
    first = Texts.of_queries({"a": "bc"}).fingerprint
    assert first == Texts.of_queries({"a": "bc"}).fingerprint
    assert (
        len(
            {
                first,
                Texts.of_queries({"ab": "c"}).fingerprint,
                Texts.of_queries({"a": "cb"}).fingerprint,
            }
        )
        == 3
    )


@pytest.mark.parametrize(("kind", "is_query"), [(None, True), ("query", True), ("passage", False)])
def test_a_file_of_queries_is_encoded_as_queries_unless_told_otherwise(kind, is_query, tmp_path):
    tiny_encoder().save(tmp_path / "model")
    (tmp_path / "queries.jsonl").write_text('{"_id": "q", "text": "red fox"}\n')
    given = {} if kind is None else {"kind": kind}
    said = encode(tmp_path / "model", tmp_path / "queries.jsonl", tmp_path / "e", **given)
    assert f"1 {'query' if is_query else 'passage'} vector" in said
    encoder = DualEncoder.load(tmp_path / "model")
    as_query, as_passage = encoder.encode_query(["red fox"]), encoder.encode_document(["red fox"])
    assert not np.allclose(as_query, as_passage)
    _, vectors = all_rows(ShardFolder(tmp_path / "e"))
    np.testing.assert_array_equal(vectors, as_query if is_query else as_passage)
    loaded = encode(encoder, tmp_path / "queries.jsonl", tmp_path / "loaded", **given)
    assert loaded.removeprefix(str(tmp_path / "loaded")) == said.removeprefix(str(tmp_path / "e"))
    np.testing.assert_array_equal(all_rows(ShardFolder(tmp_path / "loaded"))[1], vectors)


def test_the_queries_of_training_examples_are_encoded(tmp_path):
    file = tmp_path / "train.jsonl"
    file.write_text('{"query": "red fox", "pos": ["a dog"], "neg": []}\n')
    encoder = tiny_encoder()
    encode(encoder, file, tmp_path / "e", kind="query")
    _, vectors = all_rows(ShardFolder(tmp_path / "e"))
    np.testing.assert_array_equal(vectors, encoder.encode_queries(["red fox"]))


def test_an_index_error_in_a_shard_is_not_the_end_of_the_corpus(tmp_path, monkeypatch):
    encode_texts(WordEncoder(), passages(), tmp_path / "e", shard_size=10)
    monkeypatch.setattr("contaccum.retrieval.shards.damage", lambda *_: [][0])
    with pytest.raises(IndexError):
        list(ShardFolder(tmp_path / "e"))

"""Vectors in the cache: a corpus is encoded once by all commands, and the size is limited."""

import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from filelock import SoftFileLock
from helpers import train_config, write_beir
from word_encoder import WordEncoder

from contaccum import DualEncoder, evaluate, look, mine, train
from contaccum.config.commands import MineConfig, SearchConfig
from contaccum.data.dataset import open_dataset
from contaccum.retrieval import encode
from contaccum.retrieval.encode import Texts, cached_vectors, passage_vectors
from contaccum.runtime.files import cache_folder, remove_folder


@pytest.fixture
def encoded(monkeypatch, tmp_path):
    """Count the texts that each method of the encoder gets; use an empty cache."""
    monkeypatch.setenv("CONTACCUM_CACHE", str(tmp_path / "cache"))
    counts = Counter()
    for name in ("encode_queries", "encode_passages"):
        original = getattr(DualEncoder, name)

        def counted(self, texts, *arguments, _original=original, _name=name, **options):
            counts[_name] += len(texts)
            return _original(self, texts, *arguments, **options)

        monkeypatch.setattr(DualEncoder, name, counted)
    return counts


@pytest.mark.parametrize("cache", [True, False])
def test_a_corpus_is_encoded_once_by_train_evaluate_search_and_mine(cache, encoded, tmp_path):
    data = write_beir(tmp_path / "data")
    passages = len(open_dataset(data, "test").retrieval_set.corpus)
    changes = {"data.dev": str(data), "run.eval_steps": 0, "run.precision": "fp32"}
    model = train(train_config(data, tmp_path / "run", **changes))
    assert encoded["encode_passages"] == passages  # the evaluation of the last step
    settings = SearchConfig(cache=cache)
    scores = evaluate(str(model), str(data), settings=settings)["mean"]
    for query in ("red fox", "owl", "where"):
        look(str(model), str(data), query, settings=settings)
    mining = MineConfig(num_negatives=1)
    mine(str(model), str(data), tmp_path / "mined.jsonl", mining=mining, settings=settings)
    # without the cache: once more in evaluate, in each search, and in mine
    assert encoded["encode_passages"] == (1 if cache else 6) * passages
    assert evaluate(str(model), str(data), settings=SearchConfig(cache=False))["mean"] == scores


def test_the_oldest_vectors_are_deleted_when_the_cache_is_full(
    encoded, tmp_path, monkeypatch, capsys
):
    model = train(train_config(write_beir(tmp_path / "data"), tmp_path / "run"))
    encoder = DualEncoder.load(model)

    def vectors(word: str) -> int:
        before = encoded["encode_passages"]
        columns = {"id": [str(n) for n in range(8)], "title": [""] * 8, "text": [word] * 8}
        _, (shard,) = cached_vectors(encoder, Texts("passage", Dataset.from_dict(columns)))
        assert shard.vectors.tolist() == encoder.encode_passages([word] * 8).tolist()
        return encoded["encode_passages"] - before - 8

    assert [vectors(word) for word in ("a", "b", "a")] == [8, 8, 0]
    assert "in the cache (0.00 MB, limit 4,000 MB)" in capsys.readouterr().err
    folders = list((cache_folder() / "vectors").iterdir())
    size = sum(file.stat().st_size for folder in folders for file in folder.iterdir())
    monkeypatch.setattr(encode, "CACHE_BYTES", size)
    assert vectors("c") == 8  # deletes b, because a was used after it
    assert vectors("a") == 0
    assert vectors("b") == 8


def test_vectors_made_with_tf32_have_their_own_place(encoded):
    texts = Texts.of_queries({"1": "red fox"})
    names = [cached_vectors(WordEncoder(), texts)[0]]
    torch.set_float32_matmul_precision("high")  # as in training with run.tf32
    try:
        names.append(cached_vectors(WordEncoder(), texts)[0])
    finally:
        torch.set_float32_matmul_precision("highest")
    names.append(cached_vectors(WordEncoder(), texts)[0])
    assert names[0] != names[1]
    assert names[0] == names[2]


def test_a_full_cache_keeps_its_limit_after_a_kill_and_beside_other_programs(tmp_path, monkeypatch):
    """The lock of a killed command does not protect its vectors, but that of a running one does."""
    monkeypatch.setenv("CONTACCUM_CACHE", str(tmp_path / "cache"))
    vectors, locks = cache_folder() / "vectors", cache_folder() / "locks"

    def texts(word: str) -> Texts:
        return Texts.of_queries({str(n): f"{word} {n}" for n in range(40)})

    names = [cached_vectors(WordEncoder(), texts(word))[0] for word in ("a", "b", "c", "d")]
    monkeypatch.setattr(encode, "CACHE_BYTES", 1)
    dead, running = (str(locks / f"{name}.lock") for name in names[:2])
    program = f"lock = SoftFileLock({dead!r}); lock.acquire(); os._exit(0)"
    subprocess.run(
        [sys.executable, "-c", f"import os; from filelock import SoftFileLock; {program}"],
        check=True,
    )
    assert Path(dead).exists()

    def removed_twice(folder: Path) -> None:
        assert (locks / "vectors.lock").exists()  # one command at a time
        if folder.name == names[2]:
            shutil.rmtree(vectors / names[3])  # by another program
        remove_folder(folder)

    monkeypatch.setattr(encode, "remove_folder", removed_twice)
    with SoftFileLock(running):
        (new, _) = cached_vectors(WordEncoder(), texts("e"))
    assert {folder.name for folder in vectors.iterdir()} == {names[1], new}
    assert not Path(dead).exists()


@pytest.mark.parametrize("in_folder", [True, False])
def test_the_weights_are_hashed_once(in_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("CONTACCUM_CACHE", str(tmp_path / "cache"))
    hashed = []

    class Watched(WordEncoder):
        def fingerprint(self, kind, batch_tokens=None):
            hashed.append(kind)
            return super().fingerprint(kind, batch_tokens)

    corpus = Dataset.from_dict({"id": ["p"], "title": [""], "text": ["an owl"]})
    settings = SearchConfig(embeddings=str(tmp_path / "e") if in_folder else None)
    for _ in range(2):  # encode, then read
        passage_vectors(Watched(), corpus, settings)
        assert hashed == ["passage"]
        hashed.clear()

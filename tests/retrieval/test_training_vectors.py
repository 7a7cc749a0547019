"""Vectors of training queries and passages: encoded once, in the order of the training set."""

import numpy as np
import pytest
import torch
from helpers import open_train_set, write_beir
from word_encoder import WordEncoder

from contaccum.retrieval import encode
from contaccum.retrieval.encode import training_vectors


@pytest.fixture
def train_set(tmp_path, monkeypatch):
    monkeypatch.setenv("CONTACCUM_CACHE", str(tmp_path / "cache"))
    plain = encode.encode_texts
    monkeypatch.setattr(
        encode, "encode_texts", lambda *given, **more: plain(*given, **more, shard_size=7)
    )
    return open_train_set(write_beir(tmp_path / "data"), hard_negatives=1)


def test_vectors_are_those_of_the_encoder_and_are_encoded_once(train_set):
    encoder = WordEncoder()
    vectors = training_vectors(encoder, train_set, "query")
    assert encoder.seen == sum(map(len, vectors.shards)) == 40
    wanted = WordEncoder().encode_queries(train_set.queries["text"]).astype(np.float16)
    assert np.array_equal(np.concatenate(vectors.shards), wanted)
    again = WordEncoder()
    assert np.array_equal(
        np.concatenate(training_vectors(again, train_set, "query").shards), wanted
    )
    assert again.seen == 0
    other = WordEncoder(name="other")
    training_vectors(other, train_set, "query")
    assert other.seen == 40  # another encoder has other vectors


def test_rows_of_the_vectors_are_read_from_the_disk(train_set):
    """Any rows, in any order, from all shards. The shards are mapped into memory."""
    encoder = WordEncoder()
    vectors = training_vectors(encoder, train_set, "passage")
    assert encoder.seen == len(train_set.passages) > 2 * 7
    assert all(isinstance(shard, np.memmap) for shard in vectors.shards)
    texts = [
        f"{title} {text}"
        for title, text in zip(
            *(train_set.passages[name] for name in ("title", "text")), strict=True
        )
    ]
    wanted = WordEncoder().encode_passages(texts).astype(np.float16)
    rows = torch.tensor([20, 0, 6, 7, 20, 13])
    assert np.array_equal(vectors(rows).numpy(), wanted[rows])
    again = WordEncoder()
    assert training_vectors(again, train_set, "passage").name == vectors.name
    assert again.seen == 0

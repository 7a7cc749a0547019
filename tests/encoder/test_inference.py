"""Fast encoding: token budgets, windows, packed linear layers; each compared with the plain way."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from contaccum.batch import token_batches
from contaccum.encoder import DualEncoder, EncoderSettings, dual, tiny_tower, tokenizer
from contaccum.encoder.kernels import packed_linears

WORDS = ["red", "green", "blue", "fish", "bird", "tree", "river", "stone", "cloud", "light"]
RANDOM = np.random.default_rng(0)
TEXTS = [" ".join(RANDOM.choice(WORDS, RANDOM.integers(0, 12))) for _ in range(90)]


def words_encoder() -> DualEncoder:
    tower = tiny_tower(TEXTS, "mean", seed=0, layers=1, width=32, vocabulary=150, max_length=24)
    return DualEncoder(
        tower, tower, EncoderSettings(max_passage_length=16, tie_towers=True, max_query_length=16)
    ).eval()


@given(st.lists(st.integers(1, 40), max_size=60), st.integers(1, 100))
def test_batches_cover_all_texts_within_the_budget(lengths, budget):
    batches = list(token_batches(lengths, budget))
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        longest = max(lengths[index] for index in batch)
        assert len(batch) == 1 or longest * len(batch) <= budget
    firsts = [lengths[batch[0]] for batch in batches]
    assert firsts == sorted(firsts, reverse=True)


def one_by_one(encoder, texts: list[str]) -> np.ndarray:
    """Encode one text at a time with transformers: mean pooling, unit vectors."""
    rows = []
    tower = encoder.passage_tower
    for text in texts:
        tokens = tower.tokenizer(text, return_tensors="pt", truncation=True, max_length=16)
        with torch.no_grad():
            state = tower.backbone(**tokens).last_hidden_state[0].mean(0)
        rows.append((state / state.norm()).numpy())
    return np.stack(rows)


@pytest.mark.parametrize("count", [1, 63, 64, 90])  # layers are packed from 64 texts on
def test_fast_encoding_equals_text_by_text(count, monkeypatch):
    monkeypatch.setattr(tokenizer, "WINDOW", 25)
    encoder = words_encoder()
    vectors = encoder.encode_passages(TEXTS[:count], batch_tokens=48)
    right = one_by_one(encoder, TEXTS[:count])
    np.testing.assert_allclose(vectors, right, atol=2e-6)
    if count > 1:
        assert np.abs(vectors - right[::-1]).max() > 0.01  # another order would be seen


def test_encoding_uses_changed_weights():
    encoder = words_encoder()
    before = encoder.encode_passages(TEXTS)
    with torch.no_grad():
        for parameter in encoder.passage_tower.backbone.encoder.parameters():
            parameter.mul_(1.5)
    after = encoder.encode_passages(TEXTS)
    assert np.abs(after - before).max() > 0.01
    np.testing.assert_allclose(after, one_by_one(encoder, TEXTS), atol=2e-6)


def test_linears_are_not_packed_in_half_precision_or_autocast():
    half = words_encoder().to(torch.bfloat16)
    with packed_linears(half):
        assert not any("forward" in vars(module) for module in half.modules())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert words_encoder().encode_passages(TEXTS).shape == (90, 32)


def test_vectors_are_read_after_their_copy_has_finished():
    """On a GPU the copy ends later; without the wait the old content of the memory would be
    stored."""
    copied_to = torch.zeros(2, 3)
    event = SimpleNamespace(synchronize=lambda: copied_to.fill_(7.0))
    vectors = np.zeros((4, 3), dtype=np.float32)
    dual._store(vectors, np.array([3, 1]), copied_to, None)
    assert not vectors.any()
    dual._store(vectors, np.array([3, 1]), copied_to, event)
    assert vectors[:, 0].tolist() == [0.0, 7.0, 0.0, 7.0]

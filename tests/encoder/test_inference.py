"""Encoding fast: batches by tokens, texts tokenised ahead in windows, packed linear layers; each against the plain way."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from contaccum.encoder import DualEncoder, EncoderSettings, packed
from contaccum.encoder import dual as encoder_module
from contaccum.encoder.inference import token_batches
from contaccum.encoder.packed import packed_linears
from contaccum.encoder.tiny import tiny_tower

WORDS = ["red", "green", "blue", "fish", "bird", "tree", "river", "stone", "cloud", "light"]
RANDOM = np.random.default_rng(0)
TEXTS = [" ".join(RANDOM.choice(WORDS, RANDOM.integers(0, 12))) for _ in range(90)]


def words_encoder() -> DualEncoder:
    tower = tiny_tower(TEXTS, "mean", seed=0, layers=1, width=32, vocabulary=150, max_length=24)
    return DualEncoder(
        tower, tower, EncoderSettings(max_passage_length=16, tie_towers=True, max_query_length=16)
    ).eval()


@given(st.lists(st.integers(1, 40), max_size=60), st.integers(1, 100))
def test_every_text_is_in_one_batch_and_no_batch_exceeds_the_budget(lengths, budget):
    batches = list(token_batches(lengths, budget))
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        longest = max(lengths[index] for index in batch)
        assert len(batch) == 1 or longest * len(batch) <= budget
    firsts = [lengths[batch[0]] for batch in batches]
    assert firsts == sorted(firsts, reverse=True)


def test_a_batch_is_as_full_as_the_budget_allows():
    assert list(token_batches([5, 9, 3, 5], 10)) == [[1], [0, 3], [2]]
    assert list(token_batches([5, 9, 3, 5], 27)) == [[1, 0, 3], [2]]


def one_by_one(encoder, texts: list[str]) -> np.ndarray:
    """The slow way: a text at a time through transformers, the mean of its token vectors, made a unit vector."""
    rows = []
    tower = encoder.passage_tower
    for text in texts:
        tokens = tower.tokenizer(text, return_tensors="pt", truncation=True, max_length=16)
        with torch.no_grad():
            state = tower.backbone(**tokens).last_hidden_state[0].mean(0)
        rows.append((state / state.norm()).numpy())
    return np.stack(rows)


@pytest.mark.parametrize("count", [1, 63, 64, 90])  # layers are packed from 64 texts on
def test_fast_encoding_is_the_slow_way_text_by_text(count, monkeypatch):
    monkeypatch.setattr(encoder_module, "WINDOW", 25)
    encoder = words_encoder()
    vectors = encoder.encode_passages(TEXTS[:count], batch_tokens=48)
    right = one_by_one(encoder, TEXTS[:count])
    np.testing.assert_allclose(vectors, right, atol=2e-6)
    if count > 1:
        assert np.abs(vectors - right[::-1]).max() > 0.01  # another order would be seen


def test_packed_layers_compute_what_the_plain_ones_do_and_are_plain_again_afterwards():
    encoder = words_encoder()
    backbone = encoder.passage_tower.backbone
    layer = next(module for module in backbone.modules() if isinstance(module, nn.Linear))
    rows = torch.randn(3, 7, layer.in_features)
    with torch.inference_mode():
        plain = layer(rows)
        with packed_linears(backbone):
            assert isinstance(vars(layer)["forward"], packed._Packed)
            fast = layer(rows)
            with packed_linears(backbone):  # a block inside another changes nothing, nor does its end
                assert torch.equal(layer(rows), fast)
            assert "forward" in vars(layer)
    assert "forward" not in vars(layer)
    torch.testing.assert_close(fast, plain, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("way", ["in place", "optimizer", "loaded", "copied"])
def test_changed_weights_are_packed_anew(way):
    backbone = words_encoder().passage_tower.backbone
    layer = next(module for module in backbone.modules() if isinstance(module, nn.Linear))
    packed.pack_linears(backbone)
    rows = torch.randn(3, 7, layer.in_features)
    before = layer(rows)
    before.sum().backward()
    if way == "in place":
        with torch.no_grad():
            layer.weight.mul_(2)
    elif way == "optimizer":
        torch.optim.AdamW([layer.weight], lr=0.1, fused=True).step()
        packed.weights_changed(backbone)
    elif way == "loaded":
        backbone.load_state_dict({name: 2 * value for name, value in backbone.state_dict().items()})
    else:
        layer = copy.deepcopy(layer)
        layer.requires_grad_(False).weight.mul_(2)
    right = rows @ layer.weight.T + layer.bias
    torch.testing.assert_close(layer(rows), right, atol=1e-5, rtol=1e-5)
    assert (right - before).abs().max() > 0.01


def test_a_second_encoding_sees_weights_that_changed_in_between():
    encoder = words_encoder()
    before = encoder.encode_passages(TEXTS)
    with torch.no_grad():
        for parameter in encoder.passage_tower.backbone.encoder.parameters():
            parameter.mul_(1.5)
    after = encoder.encode_passages(TEXTS)
    assert np.abs(after - before).max() > 0.01
    np.testing.assert_allclose(after, one_by_one(encoder, TEXTS), atol=2e-6)


def test_layers_stay_plain_in_half_precision_and_under_autocast():
    half = words_encoder().to(torch.bfloat16)
    with packed_linears(half):
        assert not any("forward" in vars(module) for module in half.modules())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert words_encoder().encode_passages(TEXTS).shape == (90, 32)

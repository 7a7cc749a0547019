"""DualEncoder: pooling, folders for transformers and sentence-transformers, refusals."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pandas
import pytest
import torch
from sentence_transformers import SentenceTransformer
from tiny_families import TEXTS, family_folder
from transformers import (
    AutoConfig,
    AutoModel,
    DPRConfig,
    DPRQuestionEncoder,
)

from contaccum.batch import Tokens
from contaccum.encoder import (
    DualEncoder,
    EncoderSettings,
    Tower,
    pool,
    tiny_tower,
)
from contaccum.encoder.folders import NO_LIMIT
from contaccum.errors import InputError


def words_encoder(pooling="mean", similarity="cosine", tie=False, **settings) -> DualEncoder:
    texts = TEXTS * 3
    size = {"layers": 1, "width": 32, "vocabulary": 150, "max_length": 24}
    query = tiny_tower(texts, pooling, seed=0, **size)
    passage = query if tie else tiny_tower(texts, pooling, seed=1, **size)
    chosen = {"max_query_length": 8, "max_passage_length": 12, **settings}
    made = EncoderSettings(pooling=pooling, similarity=similarity, tie_towers=tie, **chosen)
    return DualEncoder(query, passage, made).eval()


def test_a_disk_that_is_full_when_the_tokenizer_is_written_is_one_sentence(tmp_path, monkeypatch):
    encoder = words_encoder(tie=True)

    def full(*_, **__):
        raise Exception("No space left on device (os error 28)")  # as tokenizers does

    monkeypatch.setattr(encoder.query_tower.tokenizer, "save_pretrained", full)
    with pytest.raises(InputError, match=r"model: cannot be written \(No space left on device"):
        encoder.save(tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_pooling_ignores_padding_on_either_side():
    states = torch.arange(12.0).view(2, 3, 2)
    right = torch.tensor([[1, 1, 0], [1, 1, 1]])
    left = torch.tensor([[0, 1, 1], [1, 1, 1]])
    assert pool(states, right, "mean").tolist() == [[1, 2], [8, 9]]
    assert pool(states, right, "cls").tolist() == [[0, 1], [6, 7]]
    assert pool(states, right, "last").tolist() == [[2, 3], [10, 11]]
    assert pool(states, left, "mean").tolist() == [[3, 4], [8, 9]]
    assert pool(states, left, "cls").tolist() == [[2, 3], [6, 7]]
    assert pool(states, left, "last").tolist() == [[4, 5], [10, 11]]


@pytest.mark.parametrize(
    ("family", "limit"),
    [
        ("bert", 40),
        ("roberta", 38),
        ("xlnet", NO_LIMIT),
    ],
)
def test_texts_are_as_long_as_the_position_embeddings_allow(family, limit):
    size = (
        {"d_head": 16}
        if family == "xlnet"
        else {"max_position_embeddings": 40, "intermediate_size": 64}
    )
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 50,
        "pad_token_id": 1,
    }
    tower = Tower(
        AutoModel.from_config(AutoConfig.for_model(family, **sizes, **size)).eval(), None, "mean"
    )
    assert tower.position_limit == limit
    for length in (min(limit, 50), min(limit, 50) + 1):
        tokens = Tokens(torch.full((1, length), 7), torch.ones(1, length, dtype=torch.long))
        if length <= limit:
            assert tower(tokens).isfinite().all()
        else:
            with pytest.raises((IndexError, RuntimeError)):
                tower(tokens)


@pytest.mark.parametrize("family", ["bert", "qwen3"])
def test_a_text_has_room_for_special_tokens_and_one_more(family, tmp_path):
    folder = family_folder(family, tmp_path / "model")
    least = {"bert": 3, "qwen3": 2}[family]  # Qwen3 has only an end-of-text token
    found = DualEncoder.load(folder, max_query_length=least, max_passage_length=9).encode_queries(
        ["a red fox", "a sea"]
    )
    # both texts are truncated to their first word
    np.testing.assert_allclose(found[0], found[1], atol=1e-6)
    with pytest.raises(
        InputError, match=f"max_query_length is {least - 1}; expected {least} (to|or more)"
    ):
        DualEncoder.load(folder, max_query_length=least - 1, max_passage_length=9)


def test_a_plain_encoder_with_few_positions_loads_with_its_maximum(tmp_path):
    settings = DualEncoder.load(family_folder("bert", tmp_path / "model", positions=40)).settings
    assert (settings.max_query_length, settings.max_passage_length) == (40, 40)


def test_mean_of_a_long_text_does_not_overflow_in_float16():
    states = torch.full((1, 8192, 2), 10.0, dtype=torch.float16)
    assert pool(states, torch.ones(1, 8192, dtype=torch.long), "mean").tolist() == [[10, 10]]


@pytest.mark.parametrize("tie", [True, False])
def test_loaded_encoder_equals_saved(tie, tmp_path):
    encoder = words_encoder(tie=tie, query_prefix="the ")
    encoder.save(tmp_path / "model")
    loaded = DualEncoder.load(tmp_path / "model")
    assert loaded.settings == encoder.settings
    assert (loaded.query_tower is loaded.passage_tower) == tie
    np.testing.assert_array_equal(loaded.encode_queries(TEXTS), encoder.encode_queries(TEXTS))
    np.testing.assert_array_equal(loaded.encode_passages(TEXTS), encoder.encode_passages(TEXTS))
    for kind in ("query", "passage"):
        assert loaded.fingerprint(kind) == encoder.fingerprint(kind)
    assert (loaded.fingerprint("query") == loaded.fingerprint("passage")) is False


def test_truncation_on_the_left_changes_the_fingerprint():
    encoder = words_encoder(max_query_length=4)
    vectors, fingerprint = encoder.encode_queries(TEXTS), encoder.fingerprint("query")
    encoder.query_tower.tokenizer.truncation_side = "left"
    assert np.abs(encoder.encode_queries(TEXTS) - vectors).max() > 0.01
    assert encoder.fingerprint("query") != fingerprint


@pytest.mark.parametrize(
    ("family", "setting", "value"),
    [
        ("bert", "num_attention_heads", 8),
        ("bert", "hidden_act", "relu"),
        ("qwen3", "rope_parameters", {"rope_theta": 10.0, "rope_type": "default"}),
    ],
)
def test_a_setting_of_the_backbone_that_changes_vectors_changes_the_fingerprint(
    family, setting, value, tmp_path
):
    folder = family_folder(family, tmp_path / "model")
    before = DualEncoder.load(folder)
    config = json.loads((folder / "config.json").read_text())
    vectors = before.encode_passages(TEXTS)
    for changes, same in (({setting: value}, False), ({"architectures": ["Other"]}, True)):
        (folder / "config.json").write_text(json.dumps({**config, **changes}))
        after = DualEncoder.load(folder)
        assert np.array_equal(after.encode_passages(TEXTS), vectors) == same
        assert (after.fingerprint("passage") == before.fingerprint("passage")) == same


def test_a_saved_encoder_replaces_an_older_one_and_nothing_else(tmp_path):
    for prefix in ("the ", "sea "):
        words_encoder(query_prefix=prefix).save(tmp_path / "model")
    assert DualEncoder.load(tmp_path / "model").settings.query_prefix == "sea "
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"cat")
    with pytest.raises(InputError, match="contains files that do not belong to a saved model"):
        words_encoder().save(tmp_path / "photos")
    assert (tmp_path / "photos" / "cat.jpg").read_bytes() == b"cat"


def test_sentence_transformers_settings_are_loaded(minilm):
    texts = ["Where do owls live?", "Owls live in old barns. " * 40]
    ours = DualEncoder.load(minilm)
    assert (ours.settings.pooling, ours.settings.similarity, ours.settings.max_passage_length) == (
        "mean",
        "cosine",
        256,
    )
    np.testing.assert_allclose(
        ours.encode_passages(texts), SentenceTransformer(str(minilm)).encode(texts), atol=1e-6
    )
    cut = DualEncoder.load(minilm, max_passage_length=8)
    assert np.abs(cut.encode_passages(texts) - ours.encode_passages(texts)).max() > 0.01


def test_untied_towers_of_a_plain_folder_start_equal(tmp_path):
    words_encoder().save(tmp_path / "model")
    plain = tmp_path / "model" / "query_encoder"
    (plain / "modules.json").unlink()
    sizes = {"max_query_length": 8, "max_passage_length": 8}
    untied = DualEncoder.load(plain, tie_towers=False, pooling="cls", **sizes)
    assert untied.query_tower is not untied.passage_tower
    np.testing.assert_array_equal(untied.encode_queries(TEXTS), untied.encode_passages(TEXTS))
    assert DualEncoder.load(plain, **sizes).settings.pooling == "mean"
    mixed = DualEncoder.load(plain, passage_name=tmp_path / "model" / "passage_encoder", **sizes)
    assert np.abs(mixed.encode_queries(TEXTS) - mixed.encode_passages(TEXTS)).max() > 0.01


def test_an_encoder_of_dpr_is_refused(tmp_path):
    sizes = {"vocab_size": 50, "num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2}
    DPRQuestionEncoder(DPRConfig(**sizes)).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="the model type dpr has no token vectors"):
        DualEncoder.load(tmp_path)


def test_one_text_instead_of_a_list_is_refused():
    encoder = words_encoder()
    for side, encode in (("query", encoder.encode_queries), ("passage", encoder.encode_passages)):
        table = pandas.DataFrame({"id": ["1"], "text": ["the red fox"]})
        for wrong in ("the red fox", {"q1": "the red fox"}, table):
            with pytest.raises(InputError, match=f"found a {type(wrong).__name__}; expected a li"):
                encode(wrong)
        with pytest.raises(InputError, match=f"{side} 1: found float; expected a text"):
            encode(["the red fox", float("nan")])
    assert encoder.encode_queries(["the red fox"]).shape == (1, 32)  # control


def test_threads_can_encode_at_the_same_time():
    encoder = words_encoder(tie=True, max_query_length=4, max_passage_length=8)
    texts = ["the red fox sees the owl"] * 70  # enough texts for packed layers
    sides = [encoder.encode_queries, encoder.encode_passages] * 40
    expected = [encode(texts) for encode in sides[:2]]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda encode: encode(texts), sides))
    finally:
        sys.setswitchinterval(before)
    for number, vectors in enumerate(found):
        np.testing.assert_array_equal(vectors, expected[number % 2])
    assert np.abs(expected[0] - expected[1]).max() > 0.01  # control: the lengths matter


def test_passage_encoder_keeps_its_settings_for_passages(tmp_path):
    words_encoder(passage_prefix="query: ").save(tmp_path / "query")
    passage = words_encoder(passage_prefix="the ", max_passage_length=6)
    passage.save(tmp_path / "passage")
    for name in (tmp_path / "passage", tmp_path / "passage" / "passage_encoder"):
        mixed = DualEncoder.load(tmp_path / "query", passage_name=name)
        np.testing.assert_array_equal(mixed.encode_passages(TEXTS), passage.encode_passages(TEXTS))
        assert mixed.settings.max_query_length == 8
    other = DualEncoder.load(
        tmp_path / "query", passage_name=tmp_path / "passage", passage_prefix="a "
    )
    assert other.settings.passage_prefix == "a "
    # an encoder without these settings has the defaults, not the values of the query encoder
    plain = tmp_path / "passage" / "passage_encoder"
    for file in ("modules.json", "tokenizer_config.json"):
        (plain / file).unlink()
    mixed = DualEncoder.load(tmp_path / "query", passage_name=plain)
    assert mixed.settings.passage_prefix == ""
    assert mixed.settings.max_passage_length == 24  # all positions


@pytest.mark.parametrize(("key", "value"), [("similarity", "dot")])
def test_passage_encoder_with_another_pooling_or_similarity_is_refused(key, value, tmp_path):
    words_encoder().save(tmp_path / "query")
    words_encoder(**{key: value}).save(tmp_path / "passage")
    names = {"name": tmp_path / "query", "passage_name": tmp_path / "passage"}
    with pytest.raises(
        InputError,
        match=f"passage: {key} is .* for queries and {value} for passages; .*--model.{key}",
    ):
        DualEncoder.load(**names)
    assert getattr(DualEncoder.load(**names, **{key: value}).settings, key) == value


def test_half_precision_weights_load_as_float32(tmp_path):
    encoder = words_encoder()
    encoder.half().save(tmp_path / "half")
    assert DualEncoder.load(tmp_path / "half").query_tower.backbone.dtype == torch.float32
    assert (
        DualEncoder.load(tmp_path / "half", dtype=torch.bfloat16).query_tower.backbone.dtype
        == torch.bfloat16
    )


def test_wrong_folders_and_settings_are_refused(tmp_path):
    words_encoder().save(tmp_path / "narrow")
    with pytest.raises(InputError, match="no such folder"):
        DualEncoder.load(tmp_path / "absent")
    with pytest.raises(InputError, match="max_passage_length is 25; expected 3 to 24"):
        DualEncoder.load(tmp_path / "narrow", max_passage_length=25)
    other = tiny_tower(TEXTS, "mean", layers=1, width=64, vocabulary=100, max_length=24, seed=0)
    wide = DualEncoder(other, other, EncoderSettings(max_query_length=8, max_passage_length=8))
    wide.save(tmp_path / "wide")
    with pytest.raises(InputError, match="query tower has width 32, passage tower 64"):
        DualEncoder.load(
            tmp_path / "narrow" / "query_encoder",
            passage_name=tmp_path / "wide", max_query_length=8, max_passage_length=8,
        )  # fmt: skip
    with pytest.raises(InputError, match="but the towers are tied"):
        DualEncoder.load(tmp_path / "narrow", passage_name=tmp_path / "wide", tie_towers=True)


@pytest.mark.parametrize(
    ("said", "similarity"),
    [
        ({"similarity_fn_name": "cosine"}, "cosine"),
        ({"similarity_fn_name": "dot"}, "dot"),
    ],
)
def test_named_similarity_applies_without_normalize_module(said, similarity, tmp_path):
    words_encoder(similarity="dot").save(tmp_path / "model")
    folder = tmp_path / "model" / "query_encoder"
    (folder / "config_sentence_transformers.json").write_text(json.dumps(said))
    loaded = DualEncoder.load(folder)
    assert loaded.settings.similarity == similarity
    scores = SentenceTransformer(str(folder), device="cpu").similarity(
        *2 * [torch.from_numpy(loaded.encode_queries(TEXTS))]
    )
    vectors = loaded.encode_queries(TEXTS)
    np.testing.assert_allclose(scores.numpy(), vectors @ vectors.T, atol=1e-5)

"""Decoder-only encoders: last-token pooling, end-of-text tokens, padding on the right."""

import json

import numpy as np
import pytest
from tiny_families import DECODERS, SIZES, TEXTS, family_folder
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import GPTNeoXConfig, GPTNeoXModel

from contaccum import DualEncoder
from contaccum.batch import Tokens
from contaccum.encoder.tokenizer import append_eos

SIZE = {"max_query_length": 8, "max_passage_length": 12}


@pytest.fixture(params=DECODERS)
def folder(request, tmp_path):
    return family_folder(request.param, tmp_path / "plain")


def end_of(encoder: DualEncoder, text: str = "the red fox", **how) -> str:
    tokenizer = encoder.query_tower.tokenizer
    return tokenizer.convert_ids_to_tokens(tokenizer(text, **how)["input_ids"])[-1]


def test_plain_decoders_default_to_last_token_and_eos(folder, tmp_path):
    encoder = DualEncoder.load(folder, **SIZE)
    assert encoder.settings.pooling == "last"
    assert end_of(encoder) == "[SEP]"
    assert (
        end_of(encoder, "a blue whale swims in the deep sea", truncation=True, max_length=5)
        == "[SEP]"
    )
    assert encoder.query_tower.tokenizer.padding_side == "right"
    assert not encoder.query_tower.backbone.config.use_cache
    encoder.save(tmp_path / "saved")
    again = DualEncoder.load(tmp_path / "saved")
    assert end_of(again) == "[SEP]"
    np.testing.assert_array_equal(again.encode_queries(TEXTS), encoder.encode_queries(TEXTS))


def test_end_token_is_saved_if_the_tokenizer_class_rebuilds_its_post_processor(tmp_path):
    folder, words = tmp_path / "plain", Tokenizer(models.BPE())
    GPTNeoXModel(
        GPTNeoXConfig(**SIZES, vocab_size=300, max_position_embeddings=40)
    ).save_pretrained(folder)
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=290, special_tokens=["[SEP]"], show_progress=False)
    )
    words.save(str(folder / "tokenizer.json"))
    names = {"eos_token": "[SEP]", "pad_token": "[SEP]", "bos_token": "[SEP]", "unk_token": "[SEP]"}
    about = {"tokenizer_class": "GPTNeoXTokenizer", **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    encoder = DualEncoder.load(folder, **SIZE)
    encoder.save(tmp_path / "saved")
    again = DualEncoder.load(tmp_path / "saved")
    assert end_of(encoder) == end_of(again) == "[SEP]"
    np.testing.assert_array_equal(again.encode_queries(TEXTS), encoder.encode_queries(TEXTS))
    # as in the original class
    assert again.query_tower.tokenizer.model_input_names == [
        "input_ids",
        "attention_mask",
    ]


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_a_text_without_tokens_has_a_vector_of_its_own(pooling, tmp_path):
    """The tokenizer has no end-of-text token, so nothing is appended."""
    folder = family_folder("qwen3", tmp_path / "plain")
    config = folder / "tokenizer_config.json"
    config.write_text(config.read_text().replace('"eos_token": "[SEP]",', ""))
    encoder = DualEncoder.load(folder, pooling=pooling, **SIZE)
    assert encoder.query_tower.tokenizer.eos_token is None
    assert encoder.query_tower.tokenizer("")["input_ids"] == []
    alone = encoder.encode_queries([""])
    np.testing.assert_allclose(encoder.encode_queries(["the red fox", ""])[1:], alone, atol=1e-6)
    assert np.isfinite(alone).all()


def test_only_plain_decoders_with_last_token_pooling_get_an_eos(folder):
    assert end_of(DualEncoder.load(folder, pooling="mean", **SIZE)) != "[SEP]"
    DualEncoder.load(folder, pooling="mean", **SIZE).save(folder.parent / "mean")
    assert end_of(DualEncoder.load(folder.parent / "mean", pooling="last")) != "[SEP]"
    DualEncoder.load(folder, **SIZE).save(folder.parent / "last")
    again = DualEncoder.load(folder.parent / "last")
    ids = again.query_tower.tokenizer("the red fox")["input_ids"]
    assert ids.count(again.query_tower.tokenizer.eos_token_id) == 1


@pytest.mark.parametrize("before", ["nothing", "both"])
def test_eos_follows_every_post_processor(before, tmp_path):
    tokenizer = DualEncoder.load(
        family_folder("qwen3", tmp_path / "plain"), pooling="mean", **SIZE
    ).query_tower.tokenizer
    bytes_, first = (
        processors.ByteLevel(),
        processors.TemplateProcessing(single="[CLS] $A", special_tokens=[("[CLS]", 2)]),
    )
    if before == "both":
        tokenizer.backend_tokenizer.post_processor = processors.Sequence([bytes_, first])
    plain = tokenizer("the red fox")["input_ids"]
    append_eos(tokenizer)
    append_eos(tokenizer)  # once is enough
    assert tokenizer("the red fox")["input_ids"] == [*plain, 3]
    assert tokenizer("the red fox", truncation=True, max_length=3)["input_ids"] == [*plain[:2], 3]
    assert plain[0] == 2 or before == "nothing"


def test_bidirectional_families_get_no_second_end_token(tmp_path):
    encoder = DualEncoder.load(family_folder("bert", tmp_path / "bert"), **SIZE)
    assert encoder.settings.pooling == "mean"
    tokenizer = encoder.query_tower.tokenizer
    append_eos(tokenizer)
    # it ends texts by itself
    assert tokenizer("fox")["input_ids"].count(tokenizer.sep_token_id) == 1


def test_padding_side_does_not_change_vectors(folder):
    encoder = DualEncoder.load(folder, **SIZE)
    tower = encoder.query_tower
    texts = [text for text in TEXTS if text]
    alone = np.concatenate([encoder.encode_queries([text]) for text in texts])
    for side in ("right", "left"):
        tower.tokenizer.padding_side = side
        padded = tower.tokenizer(
            texts, padding=True, truncation=True, max_length=8, return_tensors="pt"
        )
        tokens = Tokens(padded["input_ids"], padded["attention_mask"])
        np.testing.assert_allclose(encoder.embed(tower, tokens).detach().numpy(), alone, atol=1e-6)
        blind = Tokens(
            tokens.input_ids, tokens.attention_mask.new_ones(tokens.attention_mask.shape)
        )
        # the control
        assert np.abs(encoder.embed(tower, blind).detach().numpy() - alone).max() > 1e-2

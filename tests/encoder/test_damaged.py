"""Damaged encoder folders are refused in one sentence instead of giving wrong vectors."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_families import family_folder

from contaccum import DualEncoder
from contaccum.config import AdapterConfig
from contaccum.encoder import Adapters
from contaccum.errors import InputError

SIZE = {"max_query_length": 8, "max_passage_length": 8}
TEXTS = ["the red fox", "owl"]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """Folder with a plain encoder, a saved model, a saved adapter, and two sentence-transformers
    models."""
    root = tmp_path_factory.mktemp("models")
    family_folder("bert", root / "plain")
    DualEncoder.load(root / "plain", **SIZE).save(root / "saved")
    DualEncoder.load(root / "plain", adapters=Adapters(AdapterConfig(rank=2)), **SIZE).save(
        root / "adapter"
    )
    shutil.copytree(root / "saved" / "query_encoder", root / "st")
    shutil.copytree(root / "saved", root / "router")
    (root / "router" / "contaccum.json").unlink()
    return root


def values(**changes):
    """Change values of a JSON file."""
    return lambda content: json.dumps({**json.loads(content), **changes}).encode()


def without(key: str):
    return lambda content: json.dumps(
        {k: v for k, v in json.loads(content).items() if k != key}
    ).encode()


def weights(change):
    """Change the tensors of a safetensors file."""

    def rewrite(path: Path) -> None:
        tensors = change(load_file(path))
        path.unlink()  # tied towers share the file
        save_file(tensors, path, {"format": "pt"})

    return rewrite


def vocabulary(step: int):
    """Add ``step`` to the ids of all words after the five special tokens."""

    def change(content: bytes) -> bytes:
        tokenizer = json.loads(content)
        words = tokenizer["model"]["vocab"]
        for word, number in words.items():
            words[word] = number + step * (number > 4)
        return json.dumps(tokenizer).encode()

    return change


def template(content: bytes) -> bytes:
    tokenizer = json.loads(content)
    tokenizer["post_processor"]["special_tokens"]["[SEP]"]["ids"] = [10_003]
    return json.dumps(tokenizer).encode()


def flip(content: bytes) -> bytes:
    changed = bytearray(content)
    changed[-5] ^= 0x10
    return bytes(changed)


NO_LAYER = weights(
    lambda tensors: {name: tensor for name, tensor in tensors.items() if "layer.0." not in name}
)
EMPTY = weights(lambda tensors: {})
NARROW = weights(
    lambda tensors: {**tensors, "embeddings.word_embeddings.weight": torch.zeros(5, 5)}
)
SMALL = weights(lambda tensors: {name: torch.zeros(1, 1) for name in tensors})
ROUTER = "router/router_config.json"
ADAPTER = "adapter/query_encoder/adapter_config.json"
DAMAGES = [
    # JSON that cannot be read, or of another type
    ("plain/config.json", lambda content: content[: len(content) // 2], "config.json"),
    ("plain/config.json", lambda content: b"[3]", "config.json"),
    ("saved/contaccum.json", lambda content: b"<html>404</html>", "contaccum.json"),
    ("saved/query_encoder/modules.json", lambda content: b'{"a": "\xe9"}', "modules.json"),
    ("st/modules.json", lambda content: b"[" * 50_000, "modules.json"),
    ("st/modules.json", lambda content: b'[{"type": 1, "path": ""}]', "modules.json"),
    ("plain/config.json", "pipe", "config.json"),
    # settings that would change vectors
    ("saved/contaccum.json", values(format_version=99), "has format_version 99"),
    ("saved/contaccum.json", values(colour="red"), "unknown setting (colour)"),
    ("saved/contaccum.json", values(pooling=None), "pooling is None; expected one of"),
    ("saved/contaccum.json", values(max_query_length="64"),
     "Expected `int`, got `str` - at `$.max_query_length`"),
    ("saved/contaccum.json", values(query_prefix=7),
     "Expected `str`, got `int` - at `$.query_prefix`"),
    ("saved/contaccum.json", values(truncate_dim=0), "truncate_dim"),
    ("st/1_Pooling/config.json", values(pooling_mode_mean_tokens=False),
     "expected exactly one of cls, mean, last"),
    ("st/sentence_bert_config.json", values(max_seq_length="12"), "max_seq_length"),
    ("st/config_sentence_transformers.json", values(prompts={"query": 5}), "prompts"),
    (ROUTER, values(structure={}), "no route for query"),
    (ROUTER, values(types={}), "modules are"),
    (ROUTER, values(parameters={"route_mappings": {"(None, None)": "x"}}), "modules are"),
    # weights that do not match the configuration, or have changed
    ("plain/model.safetensors", NO_LAYER, "16 tensors are missing (encoder.layer.0"),
    ("plain/model.safetensors", EMPTY, "tensors are missing"),
    ("plain/model.safetensors", NARROW,
     "1 tensors have the wrong shape (embeddings.word_embeddings.weight)"),
    ("plain/config.json", values(num_hidden_layers=1),
     "belong to layers that the configuration does not have"),
    ("plain/config.json", values(model_type="gpt2"), "are missing"),
    ("saved/query_encoder/model.safetensors", NO_LAYER, "16 tensors are missing (encoder.layer.0"),
    ("saved/query_encoder/model.safetensors", flip,
     "the file is missing or has changed since the model was saved"),
    ("saved/passage_encoder/model.safetensors", flip,
     "the file is missing or has changed since the model was saved"),
    ("adapter/query_encoder/adapter_model.safetensors", NO_LAYER, "tensors are missing"),
    ("adapter/query_encoder/adapter_model.safetensors", SMALL,
     "adapter: 24 tensors have the wrong shape"),
    ("adapter/query_encoder/adapter_model.safetensors", flip,
     "has changed since the model was saved"),
    ("adapter/query_encoder/adapter_model.safetensors", "pickled",
     "pickled adapter weights (.bin) are never loaded"),
    (ADAPTER, values(peft_type="IA3"), "peft_type IA3; expected LORA"),
    (ADAPTER, values(base_model_name_or_path="/no/base"), "no such folder"),
    ("adapter/query_encoder/base.json", values(quantize="2bit"), "quantize"),
    # tokenizers of another encoder
    ("plain/tokenizer.json", vocabulary(10_000), "but the encoder has"),
    ("plain/tokenizer.json", vocabulary(2**31), "but the encoder has"),
    ("plain/tokenizer.json", template, "token id 10003 (no token), but the encoder has"),
    ("plain/tokenizer_config.json", without("pad_token"), "neither a padding token nor"),
    ("plain/tokenizer_config.json", values(pad_token="[PAX]"), "('[PAX]'), but the encoder"),
    # the error of transformers is enough
    ("plain/config.json", values(hidden_size="wide"),
     "no encoder could be loaded from this folder"),
    ("plain/config.json", values(model_type="no-such-model"),
     "no encoder could be loaded from this folder"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("file", "damage", "sentence"),
    DAMAGES,
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_damaged_encoders_are_refused_in_one_sentence(file, damage, sentence, models, tmp_path):
    name, _, inner = file.partition("/")
    folder = Path(shutil.copytree(models / name, tmp_path / name))
    path = folder / inner
    if damage == "pipe":
        path.unlink()
        os.mkfifo(path)
    elif damage == "pickled":
        path.unlink()
        path.with_name("adapter_model.bin").write_bytes(b"not even a pickle")
    elif path.suffix == ".safetensors" and damage is not flip:
        damage(path)
    else:
        content = damage(path.read_bytes())
        path.unlink()  # the towers share files
        path.write_bytes(content)
    with pytest.raises(InputError) as error:
        DualEncoder.load(folder, **(SIZE if name == "plain" else {})).encode_queries(TEXTS)
    assert sentence in str(error.value)
    assert str(folder) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["plain", "saved", "adapter", "st", "router"])
def test_undamaged_copies_load(name, models, tmp_path):
    """Negative control."""
    folder = Path(shutil.copytree(models / name, tmp_path / name))
    assert np.isfinite(DualEncoder.load(folder, **SIZE).encode_queries(TEXTS)).all()


def test_weights_of_another_architecture_are_refused(models, tmp_path):
    folder = Path(shutil.copytree(models / "plain", tmp_path / "plain"))
    other = family_folder("distilbert", tmp_path / "distilbert")
    shutil.copyfile(other / "model.safetensors", folder / "model.safetensors")
    with pytest.raises(InputError, match="tensors are missing"):
        DualEncoder.load(folder, **SIZE)


def test_a_missing_pooler_is_accepted(models, tmp_path):
    folder = Path(shutil.copytree(models / "plain", tmp_path / "plain"))
    drop = weights(
        lambda tensors: {name: tensor for name, tensor in tensors.items() if "pooler" not in name}
    )
    drop(folder / "model.safetensors")
    assert DualEncoder.load(folder, **SIZE).dim == 32


def test_flipped_bit_in_the_weights_of_a_separate_passage_encoder_is_refused(models, tmp_path):
    other = Path(shutil.copytree(models / "saved", tmp_path / "saved"))
    assert DualEncoder.load(models / "plain", passage_name=other, **SIZE).dim == 32  # control
    file = other / "passage_encoder" / "model.safetensors"
    file.write_bytes(flip(file.read_bytes()))
    with pytest.raises(
        InputError, match=r"saved/passage_encoder/.*changed since the model was saved"
    ):
        DualEncoder.load(models / "plain", passage_name=other, **SIZE)


def test_models_without_hashes_load(models, tmp_path):
    """Weights that a user changed on purpose."""
    folder = Path(shutil.copytree(models / "saved", tmp_path / "saved"))
    settings = json.loads((folder / "contaccum.json").read_text())
    assert set(settings.pop("sha256")) == {
        f"{tower}_encoder/model.safetensors" for tower in ("query", "passage")
    }
    (folder / "contaccum.json").write_text(json.dumps(settings))
    file = folder / "query_encoder" / "model.safetensors"
    file.write_bytes(flip(file.read_bytes()))
    assert DualEncoder.load(folder).dim == 32


def test_a_decoder_without_padding_token_pads_with_its_end_of_text_token(tmp_path):
    folder = family_folder("llama", tmp_path / "plain")
    config = folder / "tokenizer_config.json"
    config.write_bytes(without("pad_token")(config.read_bytes()))
    encoder = DualEncoder.load(folder, **SIZE)
    assert encoder.query_tower.tokenizer.pad_token == "[SEP]"
    assert np.isfinite(encoder.encode_queries(TEXTS)).all()


def test_a_slow_tokenizer_is_refused(tmp_path):
    folder = family_folder("roberta", tmp_path / "plain")
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.txt").write_text("fox 1\nowl 1\n")
    (folder / "bpe.codes").write_text("#version: 0.2\n")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PhobertTokenizer"}')
    with pytest.raises(InputError, match="has no fast tokenizer"):
        DualEncoder.load(folder, **SIZE)


def test_an_added_token_without_embedding_is_refused_only_in_a_text(models, tmp_path):
    """As in the tokenizer of EmbeddingGemma, whose token for images has no word embedding."""
    folder = Path(shutil.copytree(models / "plain", tmp_path / "plain"))
    before = DualEncoder.load(folder, **SIZE)
    tokenizer = before.query_tower.tokenizer
    expected = before.encode_queries(TEXTS)
    tokenizer.add_tokens(["<image>"])
    tokenizer.save_pretrained(folder)
    encoder = DualEncoder.load(folder, **SIZE)
    np.testing.assert_array_equal(encoder.encode_queries(TEXTS), expected)
    rows = encoder.query_tower.vocabulary
    with pytest.raises(
        InputError,
        match=rf"token id {rows} \('<image>'\), but the encoder has {rows} word embeddings",
    ):
        encoder.encode_queries(["the red fox", "an <image> of an owl"])

"""Encoder folders whose weights do not match their configuration are refused, not filled with random weights."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_families import family_folder

from contaccum import DualEncoder
from contaccum.config import AdapterConfig
from contaccum.encoder import Adapters
from contaccum.errors import InputError

SIZE = {"max_query_length": 8, "max_passage_length": 12}
CHANGES = {
    "layer": (
        lambda w: {k: v for k, v in w.items() if "layer.0." not in k},
        r"16 tensors are missing \(encoder\.layer\.0",
    ),
    "empty": (lambda w: {}, "tensors are missing"),
    "shape": (
        lambda w: {**w, "embeddings.word_embeddings.weight": torch.zeros(5, 5)},
        r"1 tensors have the wrong shape \(embeddings\.word_embeddings\.weight\)",
    ),
}


def rewrite(file: Path, change) -> None:
    weights = change(load_file(file))
    file.unlink()  # tied towers share the file
    save_file(weights, file, {"format": "pt"})


@pytest.mark.parametrize("damage", CHANGES)
@pytest.mark.parametrize("saved", [False, True])
def test_incomplete_weights_are_refused(saved, damage, tmp_path):
    folder = family_folder("bert", tmp_path / "bert")
    change, message = CHANGES[damage]
    if saved:
        DualEncoder.load(folder, **SIZE).save(tmp_path / "ours")
        folder = tmp_path / "ours"
    rewrite(folder / "query_encoder" / "model.safetensors" if saved else folder / "model.safetensors", change)
    with pytest.raises(InputError, match=message) as error:
        DualEncoder.load(folder)
    assert "\n" not in str(error.value)


def test_weights_of_another_architecture_are_refused(tmp_path):
    folder, other = family_folder("bert", tmp_path / "bert"), family_folder("distilbert", tmp_path / "distilbert")
    shutil.copyfile(other / "model.safetensors", folder / "model.safetensors")
    with pytest.raises(InputError, match="tensors are missing"):
        DualEncoder.load(folder, **SIZE)


def test_a_missing_pooler_is_accepted(tmp_path):
    folder = family_folder("bert", tmp_path / "bert")
    rewrite(folder / "model.safetensors", lambda w: {k: v for k, v in w.items() if "pooler" not in k})
    assert DualEncoder.load(folder, **SIZE).dim == 32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: {}, "adapter: .* tensors are missing"),
        (lambda w: {k: v for k, v in w.items() if "layer.0." not in k}, "adapter: .* tensors are missing"),
        (lambda w: {k: torch.zeros(1, 1) for k in w}, "adapter: .* tensors have the wrong shape"),
    ],
)
def test_incomplete_adapters_are_refused(change, message, tmp_path):
    base = family_folder("bert", tmp_path / "bert")
    DualEncoder.load(base, adapters=Adapters(AdapterConfig(rank=2)), **SIZE).save(tmp_path / "ours")
    rewrite(tmp_path / "ours" / "query_encoder" / "adapter_model.safetensors", change)
    with pytest.raises(InputError, match=message):
        DualEncoder.load(tmp_path / "ours")


def test_adapters_other_than_lora_are_refused(tmp_path):
    base = family_folder("bert", tmp_path / "bert")
    DualEncoder.load(base, adapters=Adapters(AdapterConfig(rank=2)), **SIZE).save(tmp_path / "ours")
    file = tmp_path / "ours" / "query_encoder" / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "peft_type": "IA3"}))
    with pytest.raises(InputError, match="peft_type IA3; expected LORA"):
        DualEncoder.load(tmp_path / "ours")


def test_a_pickled_adapter_is_refused_and_not_read(tmp_path):
    base = family_folder("bert", tmp_path / "bert")
    DualEncoder.load(base, adapters=Adapters(AdapterConfig(rank=2)), **SIZE).save(tmp_path / "ours")
    folder = tmp_path / "ours" / "query_encoder"
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_model.bin").write_bytes(b"not even a pickle")
    with pytest.raises(
        InputError, match=r"query_encoder: adapter_model\.safetensors is missing; pickled adapter weights"
    ) as error:
        DualEncoder.load(tmp_path / "ours")
    assert error.value.exit_code == 2
    assert "\n" not in str(error.value)


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-5] ^= 0x10
    file.unlink()  # tied towers share the file
    file.write_bytes(data)


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("adapter", [False, True])
def test_flipped_bit_in_the_weights_is_refused(adapter, tie, tmp_path):
    base = family_folder("bert", tmp_path / "bert")
    adapters = Adapters(AdapterConfig(rank=2)) if adapter else None
    DualEncoder.load(base, adapters=adapters, tie_towers=tie, **SIZE).save(tmp_path / "ours")
    assert DualEncoder.load(tmp_path / "ours").dim == 32
    for tower in ("query_encoder", "passage_encoder"):
        shutil.copytree(tmp_path / "ours", tmp_path / tower)
        flip(tmp_path / tower / tower / ("adapter_model.safetensors" if adapter else "model.safetensors"))
        with pytest.raises(
            InputError, match=f"{tower}/.*safetensors: the file is missing or has changed since the model was saved"
        ):
            DualEncoder.load(tmp_path / tower)


def test_flipped_bit_in_the_weights_of_a_separate_passage_encoder_is_refused(tmp_path):
    base = family_folder("bert", tmp_path / "bert")
    DualEncoder.load(base, **SIZE).save(tmp_path / "ours")
    assert DualEncoder.load(base, passage_name=tmp_path / "ours", **SIZE).dim == 32  # control
    flip(tmp_path / "ours" / "passage_encoder" / "model.safetensors")
    with pytest.raises(InputError, match=r"ours/passage_encoder/.*changed since the model was saved"):
        DualEncoder.load(base, passage_name=tmp_path / "ours", **SIZE)


def test_models_without_hashes_load(tmp_path):
    """Models that were saved by earlier versions, and weights that a user changed on purpose."""
    DualEncoder.load(family_folder("bert", tmp_path / "bert"), **SIZE).save(tmp_path / "ours")
    file = tmp_path / "ours" / "contaccum.json"
    settings = json.loads(file.read_text())
    assert set(settings.pop("sha256")) == {f"{tower}_encoder/model.safetensors" for tower in ("query", "passage")}
    file.write_text(json.dumps(settings))
    flip(tmp_path / "ours" / "query_encoder" / "model.safetensors")
    assert DualEncoder.load(tmp_path / "ours").dim == 32

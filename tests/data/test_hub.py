"""Data sets by name, with a folder in the place of the Hub: ``datasets`` loads both the same way."""

import datasets
import huggingface_hub
import pytest
from tiny_data import lines, write

from contaccum.data.check import check
from contaccum.data.convert import convert
from contaccum.data.dataset import load_train_set
from contaccum.data.hub import local_path
from contaccum.data.tables import load_retrieval_set
from contaccum.errors import InputError


@pytest.fixture
def name(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hub-cache")
    write(tmp_path / "set" / "train.jsonl", lines({"query": "a", "pos": ["x"], "neg": ["y"]}))
    write(tmp_path / "set" / "test.jsonl", lines({"query": "b", "pos": ["z"], "neg": ["y"]}))
    return f"hub:{tmp_path / 'set'}"


def test_every_door_opens_a_set_by_name(name, tmp_path):
    assert load_train_set(name, hard_negatives=1).passages["text"][:] == ["x", "y"]
    assert load_retrieval_set(name, "test").queries == {"1": "b"}
    assert check(name)["examples"] == 1
    assert check(name)["path"] == name
    convert(name, tmp_path / "out", "dpr", split="test")
    assert load_train_set(tmp_path / "out").queries["text"][:] == ["b"]


def test_a_changed_set_is_written_anew(name, tmp_path):
    before = local_path(name, "train")
    assert local_path(name, "train") == before
    write(tmp_path / "set" / "train.jsonl", lines({"query": "changed", "pos": ["x"], "neg": ["y"]}))
    assert load_train_set(name).queries["text"][:] == ["changed"]


def test_a_path_that_is_no_name_stays_as_it_is(tmp_path):
    assert local_path(tmp_path, "train") == tmp_path


def test_an_unknown_split_or_set_is_refused_in_one_sentence(name, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    for path, split in ((name, "dev"), ("hub:nobody/nothing", "train")):
        with pytest.raises(InputError) as caught:
            load_train_set(path, split)
        assert path in str(caught.value)
        assert "\n" not in str(caught.value)

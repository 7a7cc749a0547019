"""JSON files of encoder folders: damaged, of the wrong type, too large, or a pipe or device instead of a file."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from tiny_families import family_folder

from contaccum import DualEncoder
from contaccum.config import AdapterConfig
from contaccum.encoder import Adapters
from contaccum.errors import InputError

SIZE = {"max_query_length": 8, "max_passage_length": 12}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """Folder with a plain encoder, our model, an adapter and a sentence-transformers model."""
    root = tmp_path_factory.mktemp("models")
    family_folder("bert", root / "plain")
    DualEncoder.load(root / "plain", **SIZE).save(root / "ours")
    DualEncoder.load(root / "plain", adapters=Adapters(AdapterConfig(rank=2)), **SIZE).save(root / "adapter")
    shutil.copytree(root / "ours" / "query_encoder", root / "st")
    shutil.copytree(root / "ours", root / "router")
    (root / "router" / "contaccum.json").unlink()
    return root


FILES = [
    "plain/config.json",
    "plain/tokenizer_config.json",
    "ours/contaccum.json",
    "ours/query_encoder/modules.json",
    "ours/query_encoder/config.json",
    "ours/query_encoder/sentence_bert_config.json",
    "ours/query_encoder/tokenizer_config.json",
    "adapter/query_encoder/adapter_config.json",
    "adapter/query_encoder/base.json",
    "st/modules.json",
    "st/sentence_bert_config.json",
    "st/config_sentence_transformers.json",
    "st/1_Pooling/config.json",
    "router/router_config.json",
    "router/modules.json",
]
DAMAGE = {
    "cut": lambda text: text[: len(text) // 2],
    "list": lambda text: "[3]",
    "text": lambda text: '"some text"',
    "deep": lambda text: "[" * 50_000,
    "digits": lambda text: '{"r": ' + "9" * 5000 + "}",
    "latin-1": lambda text: b'{"a": "\xe9"}',
    "html": lambda text: "<html>404</html>",
}


def refused(folder: Path) -> str:
    """Return the sentence with which a folder is refused."""
    with pytest.raises(InputError) as error:
        DualEncoder.load(folder, **(SIZE if folder.name == "plain" else {}))
    sentence = str(error.value)
    assert "\n" not in sentence
    assert str(folder) in sentence
    return sentence


def copied(models: Path, file: str, tmp_path: Path) -> tuple[Path, Path]:
    """Copy the model of a file; return the folder of the model and the path of the file."""
    name, _, inner = file.partition("/")
    shutil.copytree(models / name, tmp_path / name)
    path = tmp_path / name / inner
    content = path.read_bytes()
    path.unlink()  # towers share files
    path.write_bytes(content)
    return tmp_path / name, path


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("file", FILES)
def test_damaged_json_is_named_in_one_sentence(file, damage, models, tmp_path):
    folder, path = copied(models, file, tmp_path)
    changed = DAMAGE[damage](path.read_text())
    path.write_bytes(changed if isinstance(changed, bytes) else changed.encode())
    assert path.name in refused(folder)


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "loop", "large"])
@pytest.mark.parametrize("file", FILES)
def test_only_regular_files_of_limited_size_are_read(file, kind, models, tmp_path, monkeypatch):
    folder, path = copied(models, file, tmp_path)
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "large":
        monkeypatch.setattr("contaccum.runtime.hub.MAX_BYTES", 1 << 16)
        path.write_text("{" + " " * (1 << 16) + "}")
    else:
        path.symlink_to("/dev/zero" if kind == "device" else path)
    sentence = refused(folder)
    assert path.name in sentence
    assert kind != "large" or "may have at most 65536" in sentence


@pytest.mark.parametrize(
    ("file", "changes", "words"),
    [
        ("ours/contaccum.json", {"max_query_length": "64"}, "max_query_length: found str; int is expected"),
        ("ours/contaccum.json", {"max_query_length": 0}, "max_query_length"),
        ("ours/contaccum.json", {"max_passage_length": 10**12}, "max_passage_length"),
        ("ours/contaccum.json", {"tie_towers": "yes"}, "tie_towers"),
        ("ours/contaccum.json", {"query_prefix": 7}, "query_prefix: found int; str is expected"),
        ("ours/contaccum.json", {"truncate_dim": 0}, "truncate_dim"),
        ("ours/contaccum.json", {"truncate_dim": 1.5}, "truncate_dim"),
        ("ours/contaccum.json", {"pooling": None}, "pooling is None; expected one of"),
        ("ours/contaccum.json", {"colour": "red"}, "unknown setting (colour)"),
        ("ours/contaccum.json", {"format_version": 99}, "has format_version 99"),
        ("plain/config.json", {"model_type": 5}, "model_type: found int; str is expected"),
        ("plain/config.json", {"num_hidden_layers": -1}, "num_hidden_layers"),
        ("plain/config.json", {"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ("plain/config.json", {"num_hidden_layers": "two"}, "num_hidden_layers"),
        ("plain/config.json", {"num_hidden_layers": 1}, "belong to layers that the configuration does not have"),
        ("plain/config.json", {"num_hidden_layers": 0}, "belong to layers that the configuration does not have"),
        ("plain/config.json", {"max_position_embeddings": []}, "max_position_embeddings"),
        ("plain/config.json", {"hidden_size": "wide"}, "no encoder could be loaded from this folder"),
        ("plain/config.json", {"num_attention_heads": 0}, "no encoder could be loaded from this folder"),
        ("plain/config.json", {"vocab_size": None}, "no encoder could be loaded from this folder"),
        ("plain/config.json", {"hidden_act": "nothing"}, "no encoder could be loaded from this folder"),
        ("plain/config.json", {"model_type": "no-such-model"}, "no encoder could be loaded from this folder"),
        ("plain/config.json", {"model_type": "gpt2"}, "are missing"),
        ("plain/tokenizer_config.json", {"model_max_length": "long"}, "model_max_length"),
        ("plain/tokenizer_config.json", {"tokenizer_class": 5}, "no encoder could be loaded from this folder"),
        ("adapter/query_encoder/adapter_config.json", {"r": -2}, "no encoder could be loaded|r: "),
        ("adapter/query_encoder/adapter_config.json", {"r": "two"}, "r: found str; int is expected"),
        ("adapter/query_encoder/adapter_config.json", {"peft_type": "IA3"}, "peft_type IA3"),
        ("adapter/query_encoder/adapter_config.json", {"base_model_name_or_path": 5}, "base_model_name_or_path"),
        ("adapter/query_encoder/adapter_config.json", {"base_model_name_or_path": "/no/base"}, "no such folder"),
        ("adapter/query_encoder/base.json", {"quantize": "2bit"}, "quantize"),
        ("adapter/query_encoder/base.json", {"sha256": 5}, "sha256: found int; str"),
        ("st/sentence_bert_config.json", {"max_seq_length": "12"}, "max_seq_length"),
        ("st/sentence_bert_config.json", {"do_lower_case": "no"}, "do_lower_case"),
        ("st/sentence_bert_config.json", {"processing_kwargs": {"text": {"max_length": "x"}}}, "maximum length"),
        ("st/config_sentence_transformers.json", {"prompts": {"query": 5}}, "prompts"),
        ("st/config_sentence_transformers.json", {"prompts": "ask: "}, "prompts"),
        ("st/config_sentence_transformers.json", {"truncate_dim": "8"}, "truncate_dim"),
        ("st/1_Pooling/config.json", {"pooling_mode_mean_tokens": False}, "expected exactly one of cls, mean, last"),
        ("router/router_config.json", {"structure": {"query": "text"}}, "structure"),
        ("router/router_config.json", {"structure": {}}, "no route for query"),
        ("router/router_config.json", {"types": {}}, "modules are"),
        ("router/router_config.json", {"parameters": {"route_mappings": 5}}, "found int"),
        ("router/router_config.json", {"parameters": {"route_mappings": {"(None, None)": "x"}}}, "modules are"),
    ],
)
def test_wrong_values_are_named(file, changes, words, models, tmp_path):
    folder, path = copied(models, file, tmp_path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    sentence = refused(folder)
    assert any(each in sentence for each in words.split("|")), sentence


@pytest.mark.parametrize("file", ["ours/query_encoder/modules.json", "st/modules.json", "router/modules.json"])
@pytest.mark.parametrize("content", ["[]", "[{}]", '[{"type": 1, "path": ""}]', '[{"type": "a.B"}]', '["Transformer"]'])
def test_wrong_modules_are_refused(file, content, models, tmp_path):
    folder, path = copied(models, file, tmp_path)
    path.write_text(content)
    if content == "[]" and file.startswith("ours"):  # a plain backbone without modules
        vectors = [DualEncoder.load(each).encode_queries(["a red fox"]) for each in (folder, models / "ours")]
        np.testing.assert_array_equal(*vectors)
    else:
        refused(folder)


def test_undamaged_copies_load(models, tmp_path):
    """Negative control: the same copies without damage are accepted."""
    for name in ("plain", "ours", "adapter", "st", "router"):
        folder, path = copied(models, next(file for file in FILES if file.startswith(name)), tmp_path)
        path.write_text(
            json.dumps({**json.loads(path.read_text())}) if path.name != "modules.json" else path.read_text()
        )
        assert DualEncoder.load(folder, max_query_length=8, max_passage_length=8).dim == 32

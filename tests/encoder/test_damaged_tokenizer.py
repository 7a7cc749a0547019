"""Damaged tokenizers: a token id without a word embedding, or no padding token. Commands refuse them in one sentence."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from helpers import write_beir, write_scored_lines
from tiny_families import family_folder

from contaccum import DualEncoder
from contaccum.cli import main
from contaccum.errors import InputError

SIZE = {"max_query_length": 16, "max_passage_length": 16}
LIMITS = ["--model.max_query_length", "16", "--model.max_passage_length", "16"]
SIZES = ["--batch.global_batch_size", "4", "--batch.micro_batch_size", "4"]
SHORT = [*LIMITS, *SIZES, "--optim.max_steps", "1", "--run.device", "cpu"]


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """Folder with a data set and a plain encoder for its texts."""
    root = tmp_path_factory.mktemp("world")
    write_beir(root / "data")
    write_scored_lines(root / "data").rename(root / "lines.jsonl")
    corpus = (json.loads(line) for line in (root / "data" / "corpus.jsonl").read_text().splitlines())
    family_folder("bert", root / "plain", [f"{each['title']} {each['text']}" for each in corpus], positions=300)
    return root


def vocabulary(number: int):
    def change(tokenizer: dict) -> None:
        words = tokenizer["model"]["vocab"]
        for word, old in words.items():
            words[word] = old + number * (old > 4)  # the first five are special tokens

    return change


def template(tokenizer: dict) -> None:
    tokenizer["post_processor"]["special_tokens"]["[SEP]"]["ids"] = [10_003]


COMMANDS = ["evaluate", "train"]
DAMAGE = {
    "an id in the vocabulary": ("tokenizer.json", vocabulary(10_000), "but the encoder has"),
    "an id of more than 31 bits": ("tokenizer.json", vocabulary(2**31), "but the encoder has"),
    "an id in the template": ("tokenizer.json", template, "token id 10003 (no token), but the encoder has"),
    "no padding token": ("tokenizer_config.json", lambda about: about.pop("pad_token"), "neither a padding token nor"),
    "a null padding token": ("tokenizer_config.json", lambda about: about.update(pad_token=None), "neither a padding token nor"),
    "a new padding token": ("tokenizer_config.json", lambda about: about.update(pad_token="[PAX]"), "('[PAX]'), but the encoder"),
}  # fmt: skip


def damaged(world: Path, tmp_path: Path, damage: str) -> tuple[Path, str]:
    file, change, words = DAMAGE[damage]
    folder = Path(shutil.copytree(world / "plain", tmp_path / "plain"))
    content = json.loads((folder / file).read_text())
    change(content)
    (folder / file).write_text(json.dumps(content))
    return folder, words


def call(command: str, model: Path, world: Path, tmp_path: Path) -> list[str]:
    if command == "evaluate":
        return ["evaluate", "--model", str(model), "--data", str(world / "data"), "--split", "train", "--device", "cpu"]
    source = ["--data.train", str(world / "data"), "--model.name", str(model)]
    return [
        "train",
        *source,
        *SHORT,
        "--output_dir",
        str(tmp_path / "run"),
    ]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("damage", DAMAGE)
def test_commands_refuse_a_damaged_tokenizer(damage, command, world, tmp_path, capsys):
    folder, words = damaged(world, tmp_path, damage)
    assert main(call(command, folder, world, tmp_path)) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    (sentence,) = [line for line in error.splitlines() if words in line]
    assert sentence.startswith(f"contaccum: {folder}")


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_accept_the_tokenizer_without_damage(command, world, tmp_path, capsys):
    assert main(call(command, world / "plain", world, tmp_path)) == 0, capsys.readouterr().err


def test_a_decoder_without_padding_token_pads_with_its_end_of_text_token(tmp_path):
    folder = family_folder("llama", tmp_path / "plain")
    about = json.loads((folder / "tokenizer_config.json").read_text())
    del about["pad_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    encoder = DualEncoder.load(folder, **SIZE)
    assert encoder.query_tower.tokenizer.pad_token == "[SEP]"
    assert np.isfinite(encoder.encode_queries(["the red fox", "owl"])).all()


def test_a_slow_tokenizer_is_refused(tmp_path):
    folder = family_folder("roberta", tmp_path / "plain")
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.txt").write_text("fox 1\nowl 1\n")
    (folder / "bpe.codes").write_text("#version: 0.2\n")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PhobertTokenizer"}')
    with pytest.raises(InputError, match="has no fast tokenizer"):
        DualEncoder.load(folder, **SIZE)


def test_an_added_token_without_embedding_is_refused_only_in_a_text(tmp_path):
    """As in the tokenizer of EmbeddingGemma, whose token for images has no word embedding."""
    folder = family_folder("bert", tmp_path / "plain")
    expected = DualEncoder.load(folder, **SIZE).encode_queries(["the red fox", "owl"])
    tokenizer = DualEncoder.load(folder, **SIZE).query_tower.tokenizer
    tokenizer.add_tokens(["<image>"])
    tokenizer.save_pretrained(folder)
    encoder = DualEncoder.load(folder, **SIZE)
    np.testing.assert_array_equal(encoder.encode_queries(["the red fox", "owl"]), expected)
    rows = encoder.query_tower.vocabulary
    with pytest.raises(InputError, match=rf"token id {rows} \('<image>'\), but the encoder has {rows} word embeddings"):
        encoder.encode_queries(["the red fox", "an <image> of an owl"])

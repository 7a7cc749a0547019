"""Names of models: folders of runs and models, Hub names, and names that cannot be a model."""

import json
from pathlib import Path

import numpy as np
import pytest
from helpers import train_config, write_beir
from tiny_families import family_folder

from contaccum import DualEncoder, train
from contaccum.encoder import model_folder
from contaccum.errors import InputError


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, Path]:
    """Data set and training run."""
    folder = tmp_path_factory.mktemp("run")
    data = write_beir(folder / "data")
    train(train_config(data, folder / "run", **{"optim.max_steps": 2}))
    return data, folder / "run"


def test_a_run_is_loaded_as_its_model(trained, tmp_path):
    _, run = trained
    vectors = [
        DualEncoder.load(name).encode_queries(["wide valley"])
        for name in (run, run / "model", f"{run}/")
    ]
    np.testing.assert_array_equal(vectors[0], vectors[1])
    np.testing.assert_array_equal(vectors[0], vectors[2])
    other = DualEncoder.load(run, query_prefix="other ").encode_queries(["wide valley"])
    assert not np.array_equal(vectors[0], other)
    two = DualEncoder.load(
        family_folder("bert", tmp_path / "bert"), max_query_length=8, max_passage_length=8
    )
    two.save(tmp_path / "model")  # a folder named model is not a run
    assert model_folder(tmp_path / "model") == str(tmp_path / "model")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "runs/no/such",
            "no such folder; expected the folder of a model or of a run, or a Hub name",
        ),
        ("~/runs/x", "no such folder"),
        ("x" * 400, "no such folder"),
        ("", "no such folder"),
        ("file", "no such folder"),
        ("run", "this run has no model/ yet, because its training is not finished"),
        (
            "s3://bucket/model",
            "an address with the scheme s3 is not a local path. Mount the storage",
        ),
    ],
)
def test_names_that_are_no_model_are_refused(name, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("{}")
    Path("run").mkdir()
    Path("run", "config.yaml").write_text("method: in_batch\n")
    with pytest.raises(InputError) as error:
        DualEncoder.load(name)
    assert words in str(error.value)
    assert "Repo id" not in str(error.value)
    assert "\n" not in str(error.value)


def test_hub_names_are_not_changed():
    for name in ("bert-base-uncased", "BAAI/bge-m3", "owner/name.v1_2-x"):
        assert model_folder(name) == name


def test_an_unfinished_run_with_a_plain_model_beside_its_config_is_a_model(tmp_path):
    folder = family_folder("bert", tmp_path / "bert")
    (folder / "config.yaml").write_text(json.dumps({"a": 1}))
    assert model_folder(folder) == str(folder)

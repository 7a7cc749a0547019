"""The average of a trained model and the encoder that its training started from."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import tiny_encoder
from tiny_data import write
from tiny_families import family_folder

from contaccum import DualEncoder
from contaccum.cli import main
from contaccum.config import AdapterConfig
from contaccum.encoder import Adapters, merge
from contaccum.errors import InputError

TEXTS = ["a fox", "the sea"]


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("share", [0.0, 0.75, 1.0])
def test_each_weight_is_the_average_of_two(tie, share, tmp_path):
    models = [tiny_encoder(tie=tie, seed=seed) for seed in (0, 1)]
    for model, name in zip(models, ("trained", "start"), strict=True):
        model.save(tmp_path / name)
    names = [str(tmp_path / name) for name in ("trained", "merged", "start")]
    assert main(["merge", *names[:2], "--start", names[2], "--share", str(share)]) == 0
    merged = DualEncoder.load(names[1])
    trained, start = (dict(model.named_parameters()) for model in models)
    for name, weight in merged.named_parameters():
        # BERT's pooler is not saved
        if "pooler" not in name:
            expected = share * trained[name].double() + (1 - share) * start[name].double()
            torch.testing.assert_close(weight.double(), expected, rtol=1e-6, atol=1e-8)
    assert merged.settings == DualEncoder.load(names[0]).settings
    # negative control: another share gives other vectors
    other = DualEncoder.load(merge(names[0], str(tmp_path / "other"), start=names[2], share=0.4))
    assert np.abs(other.encode_queries(TEXTS) - merged.encode_queries(TEXTS)).max() > 1e-4


@pytest.mark.parametrize("layers", [1, 3])
def test_a_start_with_other_layers_is_refused(layers, tmp_path):
    """Also one that has all layers of the model, and more."""
    names = [str(tmp_path / name) for name in ("trained", "merged", "start")]
    family_folder("bert", tmp_path / "trained", num_hidden_layers=2)
    family_folder("bert", tmp_path / "start", num_hidden_layers=layers)
    with pytest.raises(InputError, match=r"start: has other layers than .*trained; expected the"):
        merge(*names[:2], start=names[2])
    assert not Path(names[1]).exists()


@pytest.mark.parametrize("tie", [True, False])
def test_two_encoders_are_no_start_of_one(tie, tmp_path):
    names = [str(tmp_path / name) for name in ("trained", "merged", "start")]
    tiny_encoder(tie=tie).save(names[0])
    tiny_encoder(tie=not tie, seed=1).save(names[2])
    if tie:
        with pytest.raises(InputError, match=r"start: has two encoders, but .*trained has one; ex"):
            merge(*names[:2], start=names[2])
    else:  # control: training can start two encoders from one
        merge(*names[:2], start=names[2])


def test_towers_that_started_from_two_encoders_are_averaged_each_with_its_own(tmp_path):
    """A model that did not train is the average of itself and its start, with every share."""
    folders = [family_folder("bert", tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    names = {"model.name": str(folders[0]), "model.passage_name": str(folders[1])}
    run = tmp_path / "run"
    DualEncoder.load(folders[0], passage_name=folders[1]).save(run / "model")
    merged = []
    for content in (names, {"model.name": str(folders[0])}):  # the second is the negative control
        write(run / "config.yaml", json.dumps(content))
        folder = merge(
            str(run), str(tmp_path / f"merged{len(merged)}"), start=str(folders[0]), share=0.5
        )
        merged.append(DualEncoder.load(folder).encode_passages(TEXTS))
    expected = DualEncoder.load(folders[1]).encode_passages(TEXTS)
    apart = [np.abs(vectors - expected).max() for vectors in merged]
    assert apart[0] < 1e-6
    assert apart[1] > 1e-3


def test_the_checkpoint_of_a_run_is_averaged_as_its_model(tmp_path):
    folders = [family_folder("bert", tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    run = tmp_path / "run"
    model = run / "checkpoints" / "step-00000001" / "model"
    DualEncoder.load(folders[0], passage_name=folders[1]).save(model)
    write(run / "config.yaml", json.dumps({"model.passage_name": str(folders[1])}))
    # not the run of this model
    write(tmp_path / "config.yaml", json.dumps({"model.passage_name": "another"}))
    merged = merge(str(model.parent), str(tmp_path / "merged"), start=str(folders[0]), share=0.5)
    expected = DualEncoder.load(folders[1]).encode_passages(TEXTS)
    assert np.abs(DualEncoder.load(merged).encode_passages(TEXTS) - expected).max() < 1e-6
    with pytest.raises(InputError, match="share is 7, expected a number from 0 to 1"):
        merge(str(model), str(tmp_path / "other"), start=str(folders[0]), share=7)


def test_a_model_with_an_adapter_is_refused(tmp_path):
    pytest.importorskip("peft")
    family_folder("bert", tmp_path / "start")
    adapters = Adapters(AdapterConfig(rank=2))
    DualEncoder.load(tmp_path / "start", adapters=adapters).save(tmp_path / "trained")
    with pytest.raises(InputError, match=r"--share 0\.5 has no effect without --start"):
        merge(str(tmp_path / "trained"), str(tmp_path / "merged"), share=0.5)
    with pytest.raises(InputError, match="trained: has an adapter; merge it first"):
        merge(str(tmp_path / "trained"), str(tmp_path / "merged"), start=str(tmp_path / "start"))

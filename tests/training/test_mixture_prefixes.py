"""Prefixes of a mixture: the shared prefix is saved with the model; different prefixes are named in
a warning."""

import json
import warnings

import pytest
from helpers import train_config, write_beir

from contaccum import DualEncoder, train
from contaccum.config.groups import MixtureConfig


@pytest.mark.parametrize(
    ("of_sets", "of_model", "saved", "warned"),
    [
        (["ask: ", "ask: "], None, "ask: ", None),
        (["ask: "], None, "ask: ", None),
        ([None, None], None, "", None),
        (["", ""], None, "", None),
        (["ask: ", "find: "], None, "", "'ask: ', 'find: '"),
        (["ask: ", None], None, "", "'', 'ask: '"),
        (["ask: ", "find: "], "find: ", "find: ", None),
        (["ask: ", "find: "], "other: ", "other: ", "'ask: ', 'find: '"),
        (["ask: ", None], "find: ", "find: ", None),
        (["ask: ", "ask: "], "ask: ", "ask: ", None),
        (["ask: ", "ask: "], "other: ", "other: ", "'ask: '"),
    ],
)
@pytest.mark.parametrize("side", ["query", "passage"])
def test_model_has_the_prefix_of_its_mixture(of_sets, of_model, saved, warned, side, tmp_path):
    data, name = write_beir(tmp_path / "data"), f"{side}_prefix"
    mixture = [MixtureConfig(train=str(data), **{name: prefix}) for prefix in of_sets]
    changes = {
        "data.train": "",
        "data.mixture": mixture,
        "optim.max_steps": 1,
        f"model.{name}": of_model,
    }
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(train_config(data, tmp_path / "run", **changes))
    assert json.loads((tmp_path / "run" / "model" / "contaccum.json").read_text())[name] == saved
    assert getattr(DualEncoder.load(tmp_path / "run").settings, name) == saved
    said = [
        str(each.message)
        for each in caught
        if "data.mixture: training uses these values of" in str(each.message)
    ]
    assert len(said) == (warned is not None), said
    if warned:
        assert f"{name}: {warned}, but the model is saved with {saved!r}" in said[0]

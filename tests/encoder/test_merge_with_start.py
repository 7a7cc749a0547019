"""The average of a trained model and the encoder that its training started from."""

import numpy as np
import pytest
import torch
from helpers import tiny_encoder
from tiny_families import family_folder

from contaccum import DualEncoder
from contaccum.cli import main
from contaccum.encoder import merge
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


def test_another_kind_of_encoder_is_refused(tmp_path):
    tiny_encoder(tie=True).save(tmp_path / "trained")
    start = family_folder("distilbert", tmp_path / "start")
    with pytest.raises(InputError, match="start: has no weight query_tower"):
        merge(str(tmp_path / "trained"), str(tmp_path / "merged"), start=str(start))
    assert not (tmp_path / "merged").exists()

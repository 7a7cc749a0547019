"""Random combinations of settings: a run that is resumed from any checkpoint equals the
uninterrupted run, byte for byte.

Each setting is tested alone elsewhere. Here, settings meet that no other test combines.
"""

import random
import shutil
from dataclasses import replace

import pytest
from helpers import train_config, weights, write_scored_lines, write_uneven_beir

from contaccum.config import METHOD_SPECS, TrainConfig, validate
from contaccum.errors import InputError
from contaccum.training.log import read_log
from contaccum.training.loop import train

CHOICES = {
    "data.hard_negatives": [0, 1, 2],
    "data.fill_negatives": ["random", "none"],
    "model.tie_towers": [False, True],
    "model.unpad": [False, True],
    "model.similarity": ["cosine", "dot"],
    "model.pooling": ["cls", "mean", "last"],
    "model.dropout": [0.0, 0.1],
    "model.gradient_checkpointing": [False, False, True],
    "batch.micro_batch_size": [1, 4, 8],
    "batch.micro_batch_tokens": [None, None, 300],
    "batch.order": ["shuffled", "file"],
    "bank.size": [None, 0, 24, 40],
    "bank.row_weight": ["all", "current"],
    "bank.keep": [False, True, True],
    "bank.warmup_steps": [0, 0, 3],
    "bank.age_decay": [0.0, 0.1],
    "replay.share": [1.0, 0.3],
    "loss.mask_false_negatives": [False, True],
    "loss.false_negative_margin": [None, 0.05],
    "loss.matryoshka_dims": [[], [16, 8]],
    "loss.distillation": ["none", "kl", "margin"],
    "optim.schedule": ["linear", "cosine"],
    "optim.warmup_steps": [0, 0.5, 2],
    "run.precision": ["fp32", "bf16"],
    "run.save_steps": [1, 2],
    "run.drift_steps": [0, 2],
}


def random_config(data, output, seed: int) -> TrainConfig:
    """Return a valid config. Most settings have a random value; the six methods alternate."""
    method = list(METHOD_SPECS)[seed % len(METHOD_SPECS)]
    while True:
        drawn = random.Random(seed)
        changes = {name: drawn.choice(values) for name, values in CHOICES.items()}
        config = train_config(data, output, method, seed=seed, **changes)
        try:
            validate(config)
        except InputError:
            seed += 1000
        else:
            return config


@pytest.mark.acceptance
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(6))
def test_random_settings_resume_byte_identical(seed, tmp_path):
    data = write_scored_lines(write_uneven_beir(tmp_path / "data"))
    config = random_config(data, tmp_path / "whole", seed)
    train(config)
    shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
    checkpoints = sorted((tmp_path / "resumed" / "checkpoints").iterdir())
    for later in checkpoints[random.Random(seed).randrange(1, len(checkpoints)) :]:
        shutil.rmtree(later)
    shutil.rmtree(tmp_path / "resumed" / "model")
    train(replace(config, output_dir=str(tmp_path / "resumed"), resume=True))
    assert weights(tmp_path / "resumed") == weights(tmp_path / "whole")
    logs = [
        [
            (line["step"], line["loss"], line.get("drift"))
            for line in read_log(tmp_path / name)
            if "loss" in line
        ]
        for name in ("whole", "resumed")
    ]
    assert logs[0] == logs[1]

"""Memory benchmarks run every row or say why they skip it."""

import importlib.util
import re
from pathlib import Path

import pytest

from contaccum.encoder import DualEncoder, EncoderSettings, tiny_tower

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def script(name: str):
    """Return a benchmark as a module."""
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def model(tmp_path):
    tower = tiny_tower(
        ["the red fox"] * 3, "mean", layers=1, width=64, vocabulary=200, max_length=40, seed=0
    )
    DualEncoder(tower, tower, EncoderSettings(max_query_length=32, max_passage_length=40)).save(
        tmp_path / "model"
    )
    return str(tmp_path / "model")


@pytest.mark.acceptance
def test_each_memory_switch_runs_or_says_why_not(model):
    switches = script("memory_switches")
    ran, refused = [], {}
    for name, changes in switches.ROWS.items():
        try:
            row = switches.run_row(model, "cpu", 40, 1, changes)
        except ValueError as error:
            refused[name] = str(error)
        else:
            assert 0 < row["start_mib"] <= row["peak_mib"]
            assert row["step_s"] > 0
            ran.append(name)
    assert all(re.search("CUDA|CPU|flash-attn", reason) for reason in refused.values()), refused
    assert {
        "plain (B = 8, fp32)",
        "gradient checkpointing",
        "bf16",
        "unpadded",
        "8-bit AdamW",
    } <= set(ran)


def test_micro_batch_sizes_share_the_same_texts(model):
    switches = script("memory_switches")
    encoder = DualEncoder.load(model)
    tokens = []
    for micro in (4, 16):
        batches = switches.make_batches(encoder, 40, micro)
        assert [len(batch.query_ids) for batch in batches] == [micro] * (switches.PAIRS // micro)
        tokens.append(
            [
                ids[mask.bool()]
                for b in batches
                for ids, mask in zip(b.passages.input_ids, b.passages.attention_mask, strict=True)
            ]
        )
    assert all((one == other).all() for one, other in zip(*tokens, strict=True))

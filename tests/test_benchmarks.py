"""The benchmarks run from end to end on a tiny encoder and smallest sizes, so that they cannot rot unseen."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from contaccum.encoder import DualEncoder, EncoderSettings
from contaccum.encoder.tiny import tiny_tower

ROOT = Path(__file__).parent.parent
NAMES = [
    "methods", "peers", "loss", "scaling", "data_path", "micro_batch_tokens", "memory_switches", "trainer_loss", "adapters",
    "families",
]  # fmt: skip


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory):
    words = ["a", "red", "blue", "green", "fox", "cat", "owl", "bear", "lives", "in", "the", "valley"]
    texts = [" ".join(words[i % len(words) :] + words[: i % len(words)]) for i in range(60)]
    tower = tiny_tower(texts, "mean", layers=1, width=32, vocabulary=200, max_length=32, seed=0)
    settings = EncoderSettings(max_query_length=16, max_passage_length=32, tie_towers=True)
    folder = tmp_path_factory.mktemp("encoder")
    DualEncoder(tower, tower, settings).save(folder / "model")
    return folder / "model" / "query_encoder"


def run(*call: str, **environment: str) -> subprocess.CompletedProcess:
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{sys.prefix}/bin:{os.environ['PATH']}", **environment}
    return subprocess.run(call, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)


@pytest.mark.acceptance
@pytest.mark.parametrize("name", NAMES)
def test_each_benchmark_prints_its_table_and_writes_its_figures(name, tiny_folder, tmp_path):
    places = {"MODEL": str(tiny_folder), "RESULTS": str(tmp_path), "DATA": str(ROOT / "data" / "demo")}
    done = run("bash", "benchmarks/run_all.sh", "--quick", name, **places)
    assert done.returncode == 0, done.stderr[-3000:]
    figures = json.loads((tmp_path / f"{name}.json").read_text())
    assert {"date", "cpu", "versions", "command"} <= figures["environment"].keys()
    assert (tmp_path / f"{name}.md").read_text().strip() == done.stdout.strip()
    assert "| --" in done.stdout or "| :--" in done.stdout
    if name == "peers":  # all that compare N pairs with N take the same loss
        losses = [row["loss"] for row in figures["rows"] if row["loss"] is not None]
        assert len(losses) == 4
        assert max(losses) - min(losses) < 1e-5


def test_a_wrong_folder_is_named(tmp_path):
    done = run(sys.executable, "benchmarks/methods.py", "--quick", "--model", str(tmp_path))
    assert done.returncode == 1
    assert f"--model {tmp_path}: no config.json there" in done.stderr
    done = run("bash", "benchmarks/run_all.sh", "--quick", DATA=str(tmp_path))
    assert done.returncode == 2
    assert "no corpus.jsonl" in done.stderr

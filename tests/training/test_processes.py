"""W processes with B pairs each are one process with W·B pairs, for every method; gloo on the CPU, started by torchrun."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import train_config, weights, write_beir, write_uneven_beir
from safetensors.torch import load_file

from contaccum.config import TRAITS, to_yaml
from contaccum.files import read_json
from contaccum.training.log import read_log

HERE = Path(__file__).parent.parent


def launch(processes: int, *call: str, cache: Path) -> subprocess.CompletedProcess:
    """Run a script or module in several processes, with a cache of its own."""
    runner = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)] if processes > 1 else []
    )
    environment = {**os.environ, "PYTHONPATH": f"{HERE.parent}:{HERE}", "CONTACCUM_CACHE": str(cache)}
    done = subprocess.run(
        [sys.executable, *runner, *call], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """What the worker found in one process, and in both of two."""
    folder = tmp_path_factory.mktemp("processes")
    data = write_beir(folder / "data")
    write_uneven_beir(folder / "data-uneven")
    found = {}
    for processes in (1, 2):
        output = folder / f"of{processes}"
        launch(processes, str(HERE / "gradient_worker.py"), str(data), str(output), cache=folder / "cache")
        found[processes] = [load_file(f"{output}.{rank}.safetensors") for rank in range(processes)]
    return found


CASES = [*TRAITS, *(f"tokens-{method}" for method, traits in TRAITS.items() if not traits.whole)]
"""See gradient_worker.py."""


@pytest.mark.parametrize("method", CASES)
def test_two_processes_give_the_gradients_of_one(method, steps):
    one, two = steps[1][0], steps[2][0]
    limit = 1e-4 if method.startswith("tokens-") else 1e-5  # longer texts, smaller gradients: rounding weighs more
    names = [name for name in one if name.startswith(f"{method}/") and "/bank/" not in name]
    assert len(names) > 3 * 20
    for step in range(3):
        scale = max(
            one[name].abs().max() for name in names if name.startswith(f"{method}/{step}/") and "loss" not in name
        )
        for name in names:
            if name.startswith(f"{method}/{step}/"):
                assert (one[name] - two[name]).abs().max() / scale < limit, name


@pytest.mark.parametrize("method", CASES)
def test_every_process_holds_the_bank_that_one_process_has(method, steps):
    one, (first, second) = steps[1][0], steps[2]
    names = [name for name in one if name.startswith(f"{method}/bank/")]
    assert names
    for name in names:
        assert torch.equal(first[name], second[name]), name
        if not name.endswith("/sums"):  # their blocks are computed in another order
            torch.testing.assert_close(first[name], one[name], atol=1e-5, rtol=1e-4)


def test_the_comparison_sees_a_missing_half(steps):
    """Negative control: methods differ from each other by more than processes do."""
    one, two = steps[1][0], steps[2][0]
    name = "query_tower.backbone.embeddings.word_embeddings.weight"
    difference = (one[f"cont_accum/2/{name}"] - two[f"passage_bank/2/{name}"]).abs().max()
    assert difference / one[f"cont_accum/2/{name}"].abs().max() > 1e-3


def train_in(processes: int, data: Path, output: Path, cache: Path, *extra: str, **changes) -> None:
    changes = {"model.dropout": 0.0, "data.dev": str(data), "batch.micro_batch_size": 4 // processes, **changes}
    file = output.with_suffix(f".{processes}.yaml")
    file.write_text(to_yaml(train_config(data, output, **changes)))
    launch(processes, "-m", "contaccum", "train", "--config", str(file), *extra, cache=cache)


def test_training_in_two_processes_gives_the_metrics_of_one_and_resumes_to_the_byte(tmp_path):
    data, cache = write_beir(tmp_path / "data"), tmp_path / "cache"
    runs = {}
    for processes in (1, 2):
        runs[processes] = tmp_path / f"run{processes}"
        train_in(processes, data, runs[processes], cache, **{"run.save_steps": 3})
    logs = [[line for line in read_log(run) if "loss" in line] for run in runs.values()]
    assert len(logs[0]) == len(logs[1]) == 6
    for one, two in zip(*logs, strict=True):
        for name in ("loss", "query_grad_norm", "passage_grad_norm"):
            assert two[name] == pytest.approx(one[name], rel=1e-4)
        assert two["bank_fill"] == one["bank_fill"]
    one, two = (read_json(run / "dev_metrics.json") for run in runs.values())
    assert two["mean"] == pytest.approx(one["mean"], abs=1e-6)

    unbroken = weights(runs[2])
    for leftover in (runs[2] / "checkpoints" / "step-00000006" / "manifest.json", runs[2] / "model" / "contaccum.json"):
        leftover.unlink()
    train_in(2, data, runs[2], cache, "--resume", **{"run.save_steps": 3})
    assert weights(runs[2]) == unbroken


def test_another_number_of_processes_is_refused_on_resume(tmp_path):
    data, cache = write_beir(tmp_path / "data"), tmp_path / "cache"
    train_in(1, data, tmp_path / "run", cache, **{"batch.micro_batch_size": 4})
    with pytest.raises(AssertionError, match="was written with world 1, expected 2"):
        train_in(2, data, tmp_path / "run", cache, "--resume", **{"batch.micro_batch_size": 4})

"""Every benchmark runs to its end on a tiny encoder with the smallest sizes."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from invented_set import write_invented_set

from contaccum.encoder import DualEncoder, EncoderSettings, tiny_tower

ROOT = Path(__file__).parent.parent
NAMES = ["peers", "loss"]
"""Scripts that the GPU suite does not run, and peers, whose losses are compared here."""


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory):
    words = shlex.split("a red blue green fox cat owl bear lives in the valley")
    texts = [" ".join(words[i % len(words) :] + words[: i % len(words)]) for i in range(60)]
    tower = tiny_tower(texts, "mean", layers=1, width=32, vocabulary=200, max_length=32, seed=0)
    settings = EncoderSettings(max_query_length=16, max_passage_length=32, tie_towers=True)
    folder = tmp_path_factory.mktemp("encoder")
    DualEncoder(tower, tower, settings).save(folder / "model")
    return folder / "model"


def run(*call: str, **environment: str) -> subprocess.CompletedProcess:
    variables = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PATH": f"{sys.prefix}/bin:{os.environ['PATH']}",
        **environment,
    }
    return subprocess.run(
        call, cwd=ROOT, env=variables, capture_output=True, text=True, check=False
    )


@pytest.mark.acceptance
@pytest.mark.parametrize("name", NAMES)
def test_each_benchmark_prints_its_table_and_writes_its_figures(
    name, tiny_folder, forked_programs, tmp_path
):
    places = {
        "MODEL": str(tiny_folder),
        "RESULTS": str(tmp_path),
        "DATA": str(write_invented_set(tmp_path / "data")),
        **forked_programs,
    }
    done = run("bash", "benchmarks/run_all.sh", "--quick", name, **places)
    assert done.returncode == 0, done.stderr[-3000:]
    figures = json.loads((tmp_path / f"{name}.json").read_text())
    assert {"date", "cpu", "versions", "command"} <= figures["environment"].keys()
    assert (tmp_path / f"{name}.md").read_text().strip() == done.stdout.strip()
    assert "| --" in done.stdout or "| :--" in done.stdout
    if name == "peers":  # all that compare N pairs with N have equal losses
        losses = [row["loss"] for row in figures["rows"] if row["loss"] is not None]
        assert len(losses) == 4
        assert max(losses) - min(losses) < 1e-5


@pytest.mark.acceptance
def test_peers_with_the_defaults_of_both_libraries(tiny_folder, forked_programs, tmp_path):
    call = ["benchmarks/peers.py", "--quick", "--defaults", "--model", str(tiny_folder)]
    done = run("python", *call, "--json", str(tmp_path / "peers.json"), **forked_programs)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads((tmp_path / "peers.json").read_text())["rows"]
    by_default = [row for row in rows if row["name"].endswith(", by default")]
    assert len(by_default) == 4
    # with other micro-batches too, these two compare N pairs with N
    losses = [row["loss"] for row in rows if row["loss"] is not None]
    assert sum(row["loss"] is not None for row in by_default) == 2
    assert max(losses) - min(losses) < 1e-5


STEPS_OF_THE_GPU_SUITE = (
    "doctor tests precision shrink resume stalls",
    "methods_8 methods_64 methods_tokens defaults peers plan",
    "encode search study",
)


@pytest.mark.acceptance
@pytest.mark.parametrize("names", STEPS_OF_THE_GPU_SUITE)
def test_the_steps_of_the_gpu_suite_run_on_a_cpu(names, forked_programs, tmp_path):
    out = tmp_path / "out"
    variables = {**forked_programs, "DEVICE": "cpu", "LIMIT": "1800"}
    done = run("bash", "benchmarks/gpu_suite.sh", str(out), *names.split(), **variables)
    assert done.returncode == 0, done.stdout
    states = dict(re.findall(r"^(\w+): (\w+) in ", done.stdout, re.MULTILINE))
    skipped = ["shrink"] if "shrink" in names else []
    assert states == {name: "skipped" if name in skipped else "passed" for name in names.split()}
    assert (out / "steps.log").read_text() == done.stdout
    for name in set(states) - {"doctor", "tests", "study", *skipped}:
        assert json.loads((out / f"{name}.json").read_text())


def test_a_step_of_the_gpu_suite_that_fails_or_hangs_does_not_stop_the_next(tmp_path):
    python = tmp_path / "python"
    python.write_text(
        "#!/bin/sh\ncase $* in *made.py*) ;; *doctor*) echo why >&2; exit 3 ;;"
        " *defaults*) sleep 60 ;; *) echo fine ;; esac\n"
    )
    python.chmod(0o700)
    variables = {"PYTHON": str(python), "DEVICE": "cpu", "LIMIT": "2"}
    names = ["doctor", "defaults", "encode"]
    done = run("bash", "benchmarks/gpu_suite.sh", str(tmp_path / "out"), *names, **variables)
    assert done.returncode == 1
    lines = [re.sub(r"in \d+ s ", "", line) for line in done.stdout.splitlines()]
    assert lines == ["doctor: failed (why)", "defaults: stopped ()", "encode: passed (fine)"]


def test_the_gpu_suite_ends_if_its_data_cannot_be_made(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\ncase $* in *made.py*) exit 3 ;; esac\n")
    python.chmod(0o700)
    variables = {"PYTHON": str(python), "DEVICE": "cpu"}
    done = run("bash", "benchmarks/gpu_suite.sh", str(tmp_path / "out"), "search", **variables)
    assert (done.returncode, done.stdout) == (1, "")
    assert "were not made; see" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "variables", "sentence"),
    [
        ([], {"PYTHON": sys.executable}, "torch sees no CUDA device"),
        (["encod"], {"DEVICE": "cpu"}, "encod: no such step; choose from doctor tests"),
    ],
)
def test_the_gpu_suite_refuses(arguments, variables, sentence, tmp_path):
    variables = {**variables, "CUDA_VISIBLE_DEVICES": ""}
    done = run("bash", "benchmarks/gpu_suite.sh", str(tmp_path / "out"), *arguments, **variables)
    assert done.returncode == 2
    assert sentence in done.stderr
    for name in " ".join(STEPS_OF_THE_GPU_SUITE).split() if arguments else ():
        assert f" {name}" in done.stderr
    assert not (tmp_path / "out").exists()

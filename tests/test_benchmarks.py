"""Every benchmark runs to its end on a tiny encoder with the smallest sizes."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import gpu_suite
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
    assert len(by_default) == 5
    # with other micro-batches too, these two compare N pairs with N
    losses = [row["loss"] for row in rows if row["loss"] is not None]
    assert sum(row["loss"] is not None for row in by_default) == 2
    assert max(losses) - min(losses) < 1e-5


@pytest.mark.acceptance
@pytest.mark.parametrize("part", [1, 2, 3])
def test_each_part_of_the_gpu_suite_runs_on_a_cpu(part, forked_programs, tmp_path):
    out = tmp_path / "out"
    options = ("--device", "cpu", "--part", str(part), "--minutes", "30")
    done = run("bash", "benchmarks/gpu_suite.sh", str(out), *options, **forked_programs)
    assert done.returncode == 0, done.stdout
    found = json.loads((out / f"part{part}.json").read_text())
    skipped = [step["name"] for step in found["steps"] if step["state"] != "passed"]
    assert skipped == (["shrink"] if part == 1 else [])
    assert [step["part"] for step in found["steps"]] == [0] + [part] * (len(found["steps"]) - 1)
    assert (out / f"part{part}.log").read_text() == done.stdout
    steps = gpu_suite.make_steps(out, "cpu", True)
    assert [step["name"] for step in found["steps"][1:]] == [
        step.name for step in steps if step.part == part
    ]
    for name in (step["name"] for step in found["steps"]):
        assert json.loads((out / f"{name}.json").read_text())
        assert (out / f"{name}.log").is_file()


def run_suite(monkeypatch, out: Path, steps: list[gpu_suite.Step], *options: str) -> int:
    monkeypatch.setattr(gpu_suite, "make_steps", lambda *_: steps)
    monkeypatch.setattr(sys, "argv", ["gpu_suite.py", str(out), "--device", "cpu", *options])
    return gpu_suite.main()


def test_steps_of_the_gpu_suite_do_not_depend_on_each_other(tmp_path, monkeypatch, capsys):
    """A step that fails, one without its package and one that takes too long do not stop the last
    one, or the next part."""

    def step(name: str, code: str, *needs: str, most: int = 60, part: int = 1) -> gpu_suite.Step:
        return gpu_suite.Step(part, name, [sys.executable, "-c", code], needs, most)

    steps = [step("fails", "raise ValueError('why')"), step("lacks", "", "no_such_package"),
             step("hangs", "import time; time.sleep(600)", most=8), step("works", "print('fine')"),
             step("next", "print('fine')", part=2)]  # fmt: skip
    assert run_suite(monkeypatch, tmp_path, steps, "--part", "1", "--part", "2") == 1
    found = {
        each["name"]: (each["state"], each["reason"])
        for part in (1, 2)
        for each in json.loads((tmp_path / f"part{part}.json").read_text())["steps"]
    }
    assert found["fails"] == ("failed", "exit code 1: ValueError: why")
    assert found["lacks"] == ("skipped", "needs no_such_package")
    assert found["hangs"][0] == "stopped"
    assert found["works"] == found["next"] == ("passed", "fine")
    assert run_suite(monkeypatch, tmp_path, steps, "--part", "1", "--minutes", "0") == 0
    assert "works: skipped in 0 s (the time of this part is over)" in capsys.readouterr().out
    assert run_suite(monkeypatch, tmp_path, steps, "--step", "works", "--step", "next") == 0
    printed = [line.split(" in ")[0] for line in capsys.readouterr().out.splitlines()]
    assert printed == ["part 1, works: passed", "part 2, next: passed"]
    with pytest.raises(SystemExit):
        run_suite(monkeypatch, tmp_path, steps, "--step", "encod")
    assert "encod: no such step; choose from fails, lacks" in capsys.readouterr().err


def test_the_gpu_suite_refuses_a_machine_without_a_gpu(tmp_path):
    done = run(
        sys.executable, "benchmarks/gpu_suite.py", str(tmp_path / "out"), CUDA_VISIBLE_DEVICES=""
    )
    assert done.returncode == 2
    assert (
        "torch sees no CUDA device; for the smallest sizes on the CPU, add --device cpu"
        in done.stderr
    )
    assert not (tmp_path / "out").exists()

"""A run killed just before any system call, also while it writes a checkpoint, resumes to the same
bytes."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import train_config, weights, write_beir

from contaccum.config import to_yaml
from contaccum.runtime.files import is_leftover
from contaccum.training.run_folder import newest_checkpoint

HERE = Path(__file__).parent
STRIDE = int(os.environ.get("CONTACCUM_FAULT_STRIDE", "6"))
"""Calls between two kills in the acceptance test; 1 takes minutes."""


class Faults:
    """Command-line runs in real processes, killed by SIGKILL at a chosen system call."""

    def __init__(self, folder: Path) -> None:
        compiler = shutil.which("cc")
        if compiler is None or sys.platform != "linux":
            pytest.skip(
                "needs Linux and a C compiler (cc), to stand between a process and its system calls"
            )
        library = folder / "die_at_call.so"
        source = HERE / "die_at_call.c"
        subprocess.run(
            [compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True
        )
        # no worker threads: a fork would lose them
        environment = {
            **os.environ,
            "LD_PRELOAD": str(library),
            "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": "1",
        }
        call = [sys.executable, str(HERE / "fault_worker.py")]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(call, env=environment, text=True, **pipes)

    def run(self, at: int, *arguments: object) -> tuple[int, int]:
        """Exit code, and the number of calls of a run that ended well."""
        self.process.stdin.write(
            json.dumps({"arguments": [str(each) for each in arguments], "at": at}) + "\n"
        )
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        return answer["code"], answer["calls"]

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


@pytest.fixture(scope="module")
def scene(tmp_path_factory):
    """Worker, a run killed after its checkpoint of step 2 of 4, and the weights of the
    uninterrupted run."""
    folder = tmp_path_factory.mktemp("faults")
    faults = Faults(folder)
    data, whole, start = write_beir(folder / "data"), folder / "whole", folder / "start"
    config = train_config(data, whole, **{"optim.max_steps": 4, "run.keep_checkpoints": 1})
    (folder / "config.yaml").write_text(to_yaml(config))
    call = ("train", "--config", folder / "config.yaml", "--output_dir")
    assert faults.run(0, *call, whole, "--run.keep_checkpoints", 9)[0] == 0
    shutil.copytree(whole, start)
    shutil.rmtree(start / "model")
    shutil.rmtree(start / "checkpoints" / "step-00000004")
    yield faults, call, start, weights(whole)
    faults.close()


def resume_killed_at(scene, at: int, run: Path) -> int:
    """Resume a copy of the killed run, kill it before call ``at``, and return the number of calls
    if it survived."""
    faults, call, start, _ = scene
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(start, run)
    code, calls = faults.run(at, *call, run, "--resume")
    assert code in (0, -signal.SIGKILL)
    return calls


def calls_of_a_resume(scene, tmp_path: Path) -> int:
    calls = resume_killed_at(scene, 0, tmp_path / "count")
    assert weights(tmp_path / "count") == scene[3]
    assert calls > 80
    return calls


def resumes_to_the_same_bytes(scene, run: Path) -> None:
    faults, call, _, expected = scene
    assert faults.run(0, *call, run, "--resume")[0] == 0
    assert weights(run) == expected
    assert not [path for path in run.rglob("*") if is_leftover(path.name)]
    assert [folder.name for folder in (run / "checkpoints").iterdir()] == ["step-00000004"]
    assert not (run / "contaccum.lock").exists()


def test_killed_run_ends_with_the_same_bytes(scene, tmp_path):
    calls = calls_of_a_resume(scene, tmp_path)
    for at in range(3, calls, calls // 5):
        assert resume_killed_at(scene, at, tmp_path / "run") == 0
        assert newest_checkpoint(tmp_path / "run") is not None
        resumes_to_the_same_bytes(scene, tmp_path / "run")


@pytest.mark.acceptance
def test_complete_checkpoint_exists_after_a_kill_at_any_call(scene, tmp_path):
    """Kill at every STRIDE-th call; resume every eleventh of these runs to its end."""
    calls, steps = calls_of_a_resume(scene, tmp_path), set()
    for number, at in enumerate(range(1, calls + 1, STRIDE)):
        assert resume_killed_at(scene, at, tmp_path / "run") == 0
        checkpoint = newest_checkpoint(tmp_path / "run")
        assert checkpoint is not None, at
        steps.add(checkpoint.state["step"])
        if number % 11 == 0:
            resumes_to_the_same_bytes(scene, tmp_path / "run")
    assert steps == {2, 4}

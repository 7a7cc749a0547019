"""Diagnoses of working and of broken installations."""

import os
import subprocess
import sys
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from contaccum import doctor
from contaccum.doctor import Diagnosis
from contaccum.errors import Failed, InputError, install_command
from contaccum.retrieval import faiss_library
from contaccum.retrieval.faiss_library import load_faiss, try_faiss

PYTHON = [sys.executable, "-c"]


def test_searches_on_this_machine_are_right():
    assert doctor.check_device("cpu").state == "ok"
    assert doctor.faiss().state == "ok"


def test_wrong_products_and_searches_are_broken(monkeypatch):
    """Negative control."""
    faiss = load_faiss()
    half = SimpleNamespace(IndexFlatIP=lambda d: faiss.index_factory(d, "SQ4", 0))
    for name in ("get_num_gpus", "__version__"):
        setattr(half, name, getattr(faiss, name))
    monkeypatch.setattr(faiss_library, "load_faiss", lambda: half)
    with pytest.raises((AssertionError, RuntimeError)):
        try_faiss()
    monkeypatch.setattr(torch.nn.functional, "normalize", lambda rows: rows * 1e18)
    assert doctor.check_device("cpu").state == "broken"


def faiss_with(monkeypatch, script: str) -> Diagnosis:
    """Diagnosis if the child process runs ``script``."""
    run = subprocess.run

    def run_script(command, **options):
        return run([*PYTHON, script], **options)

    with monkeypatch.context() as patch:
        patch.setattr(doctor.subprocess, "run", run_script)
        return doctor.faiss()


def test_a_crash_of_faiss_is_reported(monkeypatch):
    assert faiss_with(monkeypatch, "print('noise'); print('1.9, 0 GPUs')").found == "1.9, 0 GPUs"
    crash = faiss_with(monkeypatch, "import os; os.kill(os.getpid(), 6)")
    assert (crash.state, crash.found) == ("broken", "its test ended with exit code -6: no message")
    failed = faiss_with(monkeypatch, "import no_such_module")
    assert failed.found.endswith("1: ModuleNotFoundError: No module named 'no_such_module'")
    monkeypatch.setattr(doctor, "FAISS_SECONDS", 0.2)
    assert faiss_with(monkeypatch, "import time; time.sleep(60)").found == "no answer in 0.2 s"


def test_hidden_gpus_are_a_note(monkeypatch):
    """/dev/nvidia0 exists, and torch finds no GPU: broken, unless the user has hidden all GPUs."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(doctor.Path, "exists", lambda _: True)
    for visible, state in (("", "note"), ("-1", "note"), ("0", "broken")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        first = next(doctor.devices())
        assert (first.subject, first.state) == ("torch", state)
    assert "/dev/nvidia0 exists, but " in first.found
    monkeypatch.setattr(doctor.Path, "exists", lambda _: False)
    assert [each.subject for each in doctor.devices()] == ["device"]


def test_version_and_verdict_come_first(monkeypatch):
    ok, note, broken = (Diagnosis(state, state, "text") for state in ("ok", "note", "broken"))
    for found, verdict in (
        ([ok], "training and search work"),
        ([ok, note], "training and search work, with limits: note"),
        ([ok, note, broken], "1 of 3 checks failed: broken"),
    ):
        monkeypatch.setattr(doctor, "diagnose", lambda found=found: iter(found))
        lines = []
        with pytest.raises(Failed, match=verdict) if broken in found else nullcontext():
            doctor.doctor(lines.append)
        assert lines[0] == f"contaccum {version('contaccum')}: {verdict}\n"
        assert lines[1:] == [str(each) for each in found]


@pytest.mark.parametrize(
    ("direct_url", "command"),
    [
        (None, "pip install 'contaccum[lora]'"),
        ('{"url": "file:///a%20b", "dir_info": {"editable": true}}', "pip install -e '/a b[lora]'"),
        ('{"url": "file:///a/x.whl", "archive_info": {}}', "pip install '/a/x.whl[lora]'"),
        (
            '{"url": "https://host/x.git", "vcs_info": {"vcs": "git"}}',
            "pip install 'contaccum[lora] @ git+https://host/x.git'",
        ),
    ],
)
def test_install_advice_fits_the_installation(direct_url, command, monkeypatch):
    installed = SimpleNamespace(read_text=lambda name: direct_url)
    monkeypatch.setattr("contaccum.errors.distribution", lambda name: installed)
    assert install_command("lora") == command


def test_states_of_folders(tmp_path):
    assert doctor.folder("cache", lambda: tmp_path / "new" / "folder", "move").state != "broken"
    assert doctor.folder("cache", lambda: Path("/proc"), "move").state == "broken"

    def no_home() -> Path:
        raise InputError("there is no home folder")

    found = doctor.folder("cache", no_home, "move")
    assert (found.state, found.advice) == ("broken", "move")
    assert "there is no home folder" in found.found


@pytest.mark.acceptance
def test_broken_faiss_exits_with_code_1(tmp_path):
    (tmp_path / "faiss").mkdir()
    (tmp_path / "faiss" / "__init__.py").write_text(
        "raise ImportError('libcublas.so.12: cannot open shared object file')\n"
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    call = [sys.executable, "-m", "contaccum", "doctor"]
    done = subprocess.run(
        call, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr == "contaccum: 1 of 6 checks failed: faiss\n"
    assert "1 of 6 checks failed: faiss" in done.stdout.splitlines()[0]
    assert "broken  faiss" in done.stdout
    assert "(libcublas.so.12: cannot open shared object file)" in done.stdout
    assert "ok      device" in done.stdout

"""Diagnoses of working and of broken installations."""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from importlib.metadata import version
from types import SimpleNamespace

import numpy as np
import pytest

from contaccum import doctor
from contaccum.doctor import Diagnosis
from contaccum.errors import Failed, install_command

PYTHON = [sys.executable, "-c"]


def test_searches_on_this_machine_equal_numpy():
    assert doctor.torch_search("cpu").state == "ok"
    found = list(doctor.faiss())
    assert found[0].subject == "faiss cpu"
    assert {diagnosis.state for diagnosis in found} == {"ok"}


def faiss_with(monkeypatch, script: str) -> list[Diagnosis]:
    """Diagnoses if the child process runs ``script``."""
    run = subprocess.run

    def run_script(command, **options):
        return run([*PYTHON, script], **options)

    with monkeypatch.context() as patch:
        patch.setattr(doctor.subprocess, "run", run_script)
        return list(doctor.faiss())


def test_wrong_searches_are_broken(monkeypatch):
    """Negative control: a wrong row, a wrong score, NaN, and a kernel that fails."""
    queries, passages = doctor.sample_vectors()
    exact = queries @ passages.T
    rows = np.argsort(-exact, axis=1)[:, : doctor.K]
    scores = np.take_along_axis(exact, rows, axis=1)
    assert doctor.error_of_scores(scores, rows) < doctor.TOLERANCE
    other = rows.copy()
    other[3, 0] = int(np.argmin(exact[3]))
    assert doctor.error_of_scores(scores, other) > doctor.TOLERANCE
    off = scores.copy()
    off[0, 2] += 0.01
    assert doctor.error_of_scores(off, rows) > doctor.TOLERANCE
    nan = doctor.error_of_scores(np.full(rows.shape, np.nan), rows)
    assert doctor.search_result("device", "cpu", nan, "").state == "broken"
    errors = {"cpu": 0.0, "gpu 0": "no kernel image", "gpu 1": 0.5, "gpu 2": nan}
    answer = json.dumps({"version": "1", "options": [], "gpus": 3, "errors": errors})
    found = faiss_with(monkeypatch, f"print('noise'); print({answer!r})")
    assert [diagnosis.state for diagnosis in found] == ["ok", "broken", "broken", "broken"]


def test_a_crash_of_faiss_is_reported(monkeypatch):
    (crash,) = faiss_with(monkeypatch, "import os; os.kill(os.getpid(), 6)")
    assert (crash.state, crash.found) == ("broken", "crashed with signal 6: no message")
    (failed,) = faiss_with(monkeypatch, "import no_such_module")
    assert failed.found == "exit code 1: ModuleNotFoundError: No module named 'no_such_module'"
    monkeypatch.setattr(doctor, "FAISS_SECONDS", 0.2)
    (late,) = faiss_with(monkeypatch, "import time; time.sleep(60)")
    assert late.found == "no answer in 0.2 s"


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


def test_missing_extras_are_reported_from_the_metadata():
    """Requirements: an installed package, a package that does not exist, and an extra that no
    option needs."""
    needs = [
        "torch>=2",
        "pytest; extra == 'here'",
        'no-such-package>=1; extra == "gone"',
        "no-such-package; extra == 'dev'",
    ]
    found = doctor.extras(needs)
    assert (found.state, found.found) == ("note", "not installed: gone")
    assert install_command("gone") in found.advice
    assert doctor.extras(needs[:2]) == Diagnosis("ok", "extras", "here")


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
    assert done.stderr == "contaccum: 1 of 14 checks failed: faiss\n"
    assert "1 of 14 checks failed: faiss" in done.stdout.splitlines()[0]
    assert "broken  faiss" in done.stdout
    assert (
        "faiss, which cannot be loaded (libcublas.so.12: cannot open shared object file)"
        in done.stdout
    )
    assert "ok      torch" in done.stdout

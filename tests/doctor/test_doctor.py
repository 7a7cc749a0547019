"""The doctor sees what works, and what does not: each check beside something that is really broken."""

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy as np
import pytest

from contaccum.doctor import examine, trials
from contaccum.doctor.examine import Finding

PYTHON = [sys.executable, "-c"]


def result_of(script: str) -> dict:
    call = [*PYTHON, script]
    return examine._result(subprocess.Popen(call, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))


def test_the_searches_of_this_machine_agree_with_numpy():
    torch_found, faiss_found = trials.torch_trial(), trials.faiss_trial()
    assert json.loads(json.dumps([torch_found, faiss_found]))
    assert [finding.state for finding in examine.devices(torch_found)][:2] == ["ok", "ok"]
    found = list(examine.faiss(faiss_found, faiss_found))
    assert [finding.subject for finding in found][:1] == ["faiss cpu"]
    assert {finding.state for finding in found} == {"ok"}


def test_a_wrong_search_is_seen():
    """Negative control: one row swapped for another, one score off, and a kernel that fails."""
    queries, passages = trials.vectors()
    exact = queries @ passages.T
    rows = np.argsort(-exact, axis=1)[:, : trials.K]
    scores = np.take_along_axis(exact, rows, axis=1)
    assert trials.difference(scores, rows) < examine.TOLERANCE
    other = rows.copy()
    other[3, 0] = int(np.argmin(exact[3]))
    assert trials.difference(scores, other) > examine.TOLERANCE
    off = scores.copy()
    off[0, 2] += 0.01
    assert trials.difference(off, rows) > examine.TOLERANCE
    about = {"version": "1", "options": [], "gpus": 1, "search": {"cpu": 0.0, "gpu 0": "no kernel image", "gpu 1": 0.5}}
    assert [finding.state for finding in examine.faiss(about, about)] == ["ok", "broken", "broken", "ok"]
    device = {"version": "1", "cuda": None, "threads": 1, "devices": [{"device": "cpu", "difference": 0.5}]}
    assert list(examine.devices(device))[-1].state == "broken"


def test_extras_are_those_of_the_metadata():
    """Made requirements: an installed package, one that nobody has, and extras that no option needs."""
    needs = [
        "torch>=2",
        "pytest; extra == 'here'",
        'no-such-package>=1; extra == "gone"',
        "no-such-package; extra == 'dev'",
    ]
    found = examine.extras(needs)
    assert (found.state, found.found) == ("note", "not installed: gone")
    assert "contaccum[gone]" in found.advice
    assert examine.extras(needs[:2]) == Finding("ok", "extras", "here")


def test_a_trial_that_crashes_is_a_finding(monkeypatch):
    assert result_of("print('noise'); print('{\"a\": 1}')") == {"a": 1}
    assert result_of("import os; os.kill(os.getpid(), 6)") == {"error": "signal 6: nothing was said"}
    crash = result_of("import no_such_module")
    assert crash == {"error": "exit code 1: ModuleNotFoundError: No module named 'no_such_module'"}
    monkeypatch.setattr(examine, "TRIAL_SECONDS", 0.2)
    assert result_of("import time; time.sleep(60)") == {"error": "no answer in 0.2 s"}
    assert [finding.state for finding in examine.devices(crash)] == ["broken"]
    orders = list(examine.faiss({"version": "1", "options": [], "gpus": 0, "search": {"cpu": 0.0}}, crash))
    assert [(finding.subject, finding.state) for finding in orders] == [("faiss cpu", "ok"), ("import order", "broken")]
    assert "faiss, then torch: exit code 1" in orders[1].found


def test_versions_are_held_to_the_requirements():
    assert examine.packages(["numpy>=1.0", "matplotlib>=99; extra == 'study'"]).state == "ok"
    wrong = examine.packages(["numpy>=99", "no-such-package>=1"])
    assert wrong.state == "broken"
    assert wrong.advice == "pip install 'numpy>=99' 'no-such-package>=1'"
    assert examine.packages([]).state == "note"


def test_disk_threads_memory_and_flash_attention(tmp_path, monkeypatch):
    assert examine._disk("cache", tmp_path / "new" / "folder", "move").state != "broken"
    assert examine._disk("cache", examine.Path("/proc"), "move").state == "broken"
    monkeypatch.delenv("KMP_DUPLICATE_LIB_OK", raising=False)
    assert examine.threads().state == "ok"
    monkeypatch.setenv("KMP_DUPLICATE_LIB_OK", "TRUE")
    assert examine.threads().state == "note"
    assert "GiB free" in examine.memory().found
    states = [examine.flash_attention({"flash": about}).state for about in (
        {}, {"version": "2", "difference": 1e-3}, {"version": "2", "difference": 1.0}, {"version": "2"}, {"error": "ABI"},
    )]  # fmt: skip
    assert states == ["ok", "ok", "note", "note", "note"]


class Answer(BaseHTTPRequestHandler):
    def do_HEAD(self):
        self.send_response(200 if self.path == "/" else 503)
        self.end_headers()

    def log_message(self, *_):
        pass


def test_the_network_is_never_an_error(monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setenv("HF_ENDPOINT", address)
        assert examine.network() == Finding("ok", "network", f"{address} answers")
        monkeypatch.setenv("HF_ENDPOINT", f"{address}/closed")
        assert examine.network().state == "note"
        server.shutdown()
    monkeypatch.setenv("HF_ENDPOINT", address)
    assert examine.network().state == "note"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE is set" in examine.network().found


@pytest.mark.acceptance
def test_a_faiss_that_cannot_be_loaded_is_exit_code_1(tmp_path):
    (tmp_path / "faiss").mkdir()
    (tmp_path / "faiss" / "__init__.py").write_text(
        "raise ImportError('libcublas.so.12: cannot open shared object file')\n"
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    call = [sys.executable, "-m", "contaccum", "doctor"]
    done = subprocess.run(call, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "contaccum: 1 of 14 findings are broken: import order\n"
    assert "broken  import order" in done.stdout
    assert "faiss, which cannot be loaded (libcublas.so.12: cannot open shared object file)" in done.stdout
    assert "ok      torch" in done.stdout

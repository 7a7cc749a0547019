"""The campaign that damages files of a finished project and runs a command on each."""

import importlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.fixture
def fuzz():
    return importlib.import_module("fuzz_commands")


def test_damaged_values_differ_from_the_original(fuzz):
    content = json.dumps({"a": 1, "b": {"c": [1, 2], "d": "x"}}).encode()
    seen = {fuzz.damage(content, "state.json", random.Random(n)) for n in range(300)}
    assert len(seen) > 100
    assert sum(changed == content for changed, _ in seen) < 10
    assert {done.split()[0] for _, done in seen} == {"flip", "cut", "delete", "repeat", "insert", "empty", "set"}


@pytest.mark.parametrize(
    ("code", "words", "expected"),
    [
        (0, "", "ok"), (2, "contaccum: a sentence", "refused"), (1, "contaccum: train failed: KeyError", "traceback"),
        (2, "Traceback (most recent call last):", "traceback"), (124, "", "hang"), (-11, "", "crash"),
        (2, "contaccum: warning: a file\n", "unexplained"), (2, "usage: contaccum", "unexplained"),
    ],
)  # fmt: skip
def test_outcomes_are_told_apart(fuzz, code, words, expected):
    assert fuzz.outcome(code, words) == expected


def campaign(report: Path, *options: str, before: str = "") -> tuple[int, dict[str, int]]:
    """Run the script in a process of its own; return the exit code and the number of cases with each outcome."""
    call = [sys.executable, "-c", f"{before}\nimport sys, fuzz_commands; sys.exit(fuzz_commands.main())"]
    environment = {**os.environ, "PYTHONPATH": str(SCRIPTS)}
    call += ["--report", str(report), *options]
    done = subprocess.run(call, capture_output=True, text=True, check=False, env=environment)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout.splitlines()[-1])


@pytest.mark.acceptance
def test_no_damaged_file_ends_in_a_traceback_or_unnoticed(fuzz, tmp_path):
    kinds = [kind for kind in fuzz.KINDS if kind not in ("rounds", "study")]  # these two take longest to set up
    options = ("--count", str(len(kinds)), "--seed", "7", "--kinds", ",".join(kinds))
    code, outcomes = campaign(tmp_path / "report", *options)
    cases = [json.loads(line) for line in (tmp_path / "report").read_text().splitlines()]
    assert [case for case in cases if case["outcome"] not in ("ok", "refused")] == []
    assert (code, {case["kind"] for case in cases}) == (0, set(kinds))
    assert outcomes["refused"] > len(kinds) // 3
    written = (tmp_path / "report").read_text()
    assert campaign(tmp_path / "report", *options) == (code, outcomes)  # a second call has nothing left to do
    assert (tmp_path / "report").read_text() == written


@pytest.mark.acceptance
def test_the_campaign_sees_weights_that_nobody_checks(tmp_path):
    """Negative control: the hashes of the weights are not compared; a second call tries the failed cases again."""
    blind = "import contaccum.encoder.dual as dual; dual.check_hashes = lambda *_: None"
    options = ("--count", "20", "--kinds", "weights")  # among them flipped bits, which only the hashes show
    code, outcomes = campaign(tmp_path / "report", *options, before=blind)
    assert code == 1
    assert outcomes["silent"] > 0
    assert campaign(tmp_path / "report", *options) == (0, {"refused": 20})

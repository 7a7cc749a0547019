"""Progress of a long task where stderr is no terminal."""

import time

import pytest

from contaccum.runtime import progress
from contaccum.runtime.progress import announced, progress_bar


def test_a_block_is_announced_only_if_it_is_slow(monkeypatch, capsys):
    monkeypatch.setattr(progress, "FIRST_SECONDS", 1000.0)
    with announced("loading"):
        pass
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress, "FIRST_SECONDS", 0.0)
    printed = ""
    with announced("loading"):
        while not printed:
            time.sleep(0.001)
            printed = capsys.readouterr().err
    assert printed == "contaccum: loading\n"


@pytest.mark.parametrize("seconds", [0.0, 1000.0])
def test_a_bar_is_shown_only_if_the_task_is_slow(seconds, monkeypatch, capsys):
    for name in ("FIRST_SECONDS", "LINE_SECONDS"):
        monkeypatch.setattr(progress, name, seconds)
    assert list(progress_bar(None, "reading", "lines", range(20))) == list(range(20))
    with progress_bar(20, "encoding", "texts") as bar:
        bar.update(10)
    found = capsys.readouterr().err
    assert ("reading: " in found, "10/20" in found) == (seconds == 0, seconds == 0)

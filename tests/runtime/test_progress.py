"""Lines about a long task where stderr is no terminal."""

import re
import time

import pytest

from contaccum.runtime import progress
from contaccum.runtime.progress import Progress, announced


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


@pytest.mark.parametrize(
    ("total", "first", "second"),
    [
        (None, "1,000 lines", "2,000 lines"),
        (3000, "1,000 of 3,000 lines", r"2,000 of 3,000 lines, about [0-9.e-]+ s left"),
    ],
)
def test_the_first_line_comes_soon_and_the_next_after_a_minute(
    total, first, second, monkeypatch, capsys
):
    """Only the later ones have an estimate of the time."""
    monkeypatch.setattr(progress, "FIRST_SECONDS", 0.0)
    with Progress(total, "reading", "lines") as bar:
        for _ in range(3):
            bar.update(1000)
    assert capsys.readouterr().err == f"contaccum: reading: {first}\n"
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    with Progress(total, "reading", "lines") as bar:
        for _ in range(3):
            bar.update(1000)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == (3 if total is None else 2)  # nothing is left after the last item
    assert re.fullmatch(f"contaccum: reading: {second}", lines[1])


def test_items_are_counted_as_they_pass(monkeypatch, capsys):
    monkeypatch.setattr(progress, "FIRST_SECONDS", 0.0)
    assert list(Progress.over(iter(range(2500)), "reading", "lines")) == list(range(2500))
    assert capsys.readouterr().err == "contaccum: reading: 1,000 lines\n"

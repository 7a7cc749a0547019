"""The examples of the library reference, run from top to bottom in an empty folder."""

import doctest

import pytest
from documented import ROOT, blocks

PAGE = ROOT / "docs/reference/library.md"
DOORS = (
    "open_dataset", "fetch", "TrainConfig", "train", "DualEncoder.load", "Retriever.open",
    "evaluate", "console_report", "METHODS", "Engine", "BankLoss", "look", "diagnose", "main",
)  # fmt: skip
"""One entry point of each room."""
OPTIONS = doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL


def failures(source: str, found: list[str]) -> int:
    example = doctest.DocTestParser().get_doctest(source, {}, PAGE.name, str(PAGE), 0)
    runner = doctest.DocTestRunner(verbose=False, optionflags=OPTIONS)
    return runner.run(example, out=found.append).failed


@pytest.mark.filterwarnings(
    "ignore:13 of 300 judged queries have no result"
)  # BM25 finds nothing for them
def test_every_example_of_the_reference_prints_what_the_page_shows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CONTACCUM_CACHE", str(tmp_path / "cache"))
    text = "\n".join(block.text for block in blocks(PAGE) if block.language == "pycon")
    assert [door for door in DOORS if f"{door}(" not in text and f"{door}[" not in text] == []
    printed: list[str] = []
    assert failures(text, printed) == 0, "".join(printed)


def test_a_wrong_result_is_noticed():
    """Negative control."""
    assert failures(">>> 1 + 1\n3\n", []) == 1

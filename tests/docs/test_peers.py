"""Option tables for users of other libraries."""

import re
from dataclasses import fields, is_dataclass

import pytest
from documented import ROOT

from contaccum.cli.commands import COMMANDS
from contaccum.config import METHOD_SPECS, TrainConfig

PAGE = (ROOT / "docs" / "how-to" / "other-libraries.md").read_text()
LIBRARIES = ("sentence-transformers", "Tevatron", "FlagEmbedding", "DPR")
GROUPS = {field.name: getattr(TrainConfig(), field.name) for field in fields(TrainConfig)}
SETTINGS = {
    f"{group}.{f.name}"
    for group, value in GROUPS.items()
    if is_dataclass(value)
    for f in fields(value)
}


def options(text: str, library: str) -> list[tuple[list[str], list[str]]]:
    """The rows of a library's option table: names of the other library, names of contaccum."""
    _, _, after = text.partition(f"| {library} | contaccum |\n")
    rows = re.findall(r"^\| (.+) \| (.+) \|$", after.partition("\n\n")[0], re.M)
    return [
        (re.findall(r"`([^`]+)`", theirs), re.findall(r"`([^`]+)`", ours)) for theirs, ours in rows
    ]


def wrong_names(text: str, library: str) -> list[str]:
    """Names of contaccum in the option table that do not exist."""
    known = SETTINGS | {f"method {name}" for name in METHOD_SPECS}
    names = [name for _, ours in options(text, library) for name in ours]
    commands = {f"contaccum {name}" for name in COMMANDS}
    return [
        name
        for name in names
        if name not in known
        and " ".join(name.split()[:2]) not in commands
        and not name.startswith(".")
    ]


@pytest.mark.parametrize("library", LIBRARIES)
def test_every_setting_of_a_table_exists(library):
    assert len(options(PAGE, library)) >= 9
    assert wrong_names(PAGE, library) == []
    # negative control
    misspelt = PAGE.replace("`batch.global_batch_size`", "`batch.globl_size`")
    assert wrong_names(misspelt, library) != []

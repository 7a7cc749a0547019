"""What the documentation site is made from: the command reference, and a place for every page."""

import re
import sys
from dataclasses import fields, is_dataclass

from documented import ROOT

from contaccum.cli.commands import COMMANDS
from contaccum.config import TrainConfig

sys.path.insert(0, str(ROOT / "scripts"))
from docs_hooks import command_reference


def test_the_command_reference_names_every_verb_and_setting():
    text = command_reference()
    assert set(re.findall(r"^## contaccum (.+)$", text, re.M)) == set(COMMANDS)
    train = text.split("## contaccum encode")[0]
    for group in fields(TrainConfig):
        value = getattr(TrainConfig(), group.name)
        for name in (
            [f"{group.name}.{inner.name}" for inner in fields(value)]
            if is_dataclass(value)
            else [group.name]
        ):
            assert re.search(rf"^\| `--{re.escape(name)}[`,]", train, re.M), name
    about = (
        "Number of steps between two checkpoints. Below 1: share of the run's steps. A checkpoint "
        "is also written 10 minutes after the last one. 0: no checkpoints, except after a signal "
        "or an error."
    )
    assert f"| `--run.save_steps` | {about} Range: at least 0. | `0.25` |" in train
    assert "One of: cls, mean, last." in train
    assert "`--bank.size`" not in text.split("## contaccum encode")[1]
    assert "print_config" not in text


def test_every_page_has_a_place():
    """A page is in the navigation, or the page of its folder's figures links it."""
    docs = ROOT / "docs"
    named = set(re.findall(r"(\S+\.md)", (ROOT / "mkdocs.yml").read_text()))
    figures = [
        docs / name for name in named if name.startswith("results/") and name.endswith("README.md")
    ]
    for page in figures:
        links = re.findall(r"\]\(([^)#]+\.md)", page.read_text())
        named |= {
            str((page.parent / link).resolve().relative_to(docs.resolve()))
            for link in links
            if ".." not in link
        }
    pages = {str(path.relative_to(docs)) for path in docs.rglob("*.md")}
    assert len(figures) == 3
    assert pages - named == set()

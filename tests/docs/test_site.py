"""What the documentation site is made from: the command reference, and a place for every page."""

import re
import sys
from dataclasses import fields, is_dataclass

from documented import ROOT

from contaccum.cli.commands import COMMANDS
from contaccum.config import TrainConfig

sys.path.insert(0, str(ROOT / "scripts"))
from docs_hooks import command_reference, with_all


def test_the_command_reference_names_every_verb_and_setting():
    text = command_reference()
    assert set(re.findall(r"^## contaccum (.+)$", text, re.M)) == set(COMMANDS)
    train = text.split("## contaccum encode")[0]
    for group in fields(TrainConfig):
        value = getattr(TrainConfig(), group.name)
        for name in [f"{group.name}.{inner.name}" for inner in fields(value)] if is_dataclass(value) else [group.name]:
            assert re.search(rf"^\| `--{re.escape(name)}[`,]", train, re.M), name
    about = "Number of steps between two checkpoints. The last step always writes a checkpoint. 0: only at the end."
    assert f"| `--run.save_steps` | {about} Range: at least 0. | `500` |" in train
    assert "One of: cls, mean, last." in train
    assert "`--bank.size`" not in text.split("## contaccum encode")[1]
    assert "print_config" not in text


def test_every_page_has_a_place():
    nav = [{"Home": "index.md"}, {"Results": [{"All": "results/README.md"}]}]
    pages = ["index.md", "mining.md", "results/README.md", "results/loss.md"]
    assert with_all(nav, pages) == [
        nav[0],
        {"Results": [{"All": "results/README.md"}, "results/loss.md"]},
        {"More": ["mining.md"]},
    ]
    assert with_all([{"Home": "index.md"}], ["index.md"]) == [{"Home": "index.md"}]

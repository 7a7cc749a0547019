"""Hook of mkdocs: CONTRIBUTING.md as a page, and a command reference from the options."""

from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from contaccum.cli.commands import COMMANDS
from contaccum.cli.parser import Command, help_texts
from contaccum.config import TrainConfig, train_settings
from contaccum.config.declare import default_of
from contaccum.config.load import choices, range_of

PAGE = "reference/commands.md"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    files.append(File.generated(config, PAGE, content=command_reference()))
    contributing = Path(__file__).parent.parent / "CONTRIBUTING.md"
    text = contributing.read_text(encoding="utf-8").replace("](docs/", "](")
    files.append(File.generated(config, "contributing.md", content=text))
    return files


def command_reference() -> str:
    """Return one section per command: usage, description, and a table of options with defaults."""
    text = [
        "# Commands",
        "`contaccum COMMAND --help` shows the same. Every setting of a config file is listed under "
        "`contaccum train`, by its group.",
        "Exit codes: 0 done; 2 the user's input, settings or disk; 1 anything else, or what was "
        "checked does not hold; 130 Ctrl-C; 143 SIGTERM.",
    ]
    for name, command in COMMANDS.items():
        text += [
            f"## contaccum {name}",
            command.description,
            f"    {command.usage % {'prog': f'contaccum {name}'}}",
            *([f"Example: `{command.example}`"] if command.example else []),
        ]
        for kind in command.kinds:
            if kind is not TrainConfig:
                text += tables(kind, command)
        if name == "train":
            text += [
                "`--config FILE` reads a YAML file with any of these settings.",
                *tables(TrainConfig, command),
            ]
        elif command.trains:
            text.append("Every setting of [contaccum train](#contaccum-train) can be given too.")
    return "\n\n".join(text) + "\n"


def tables(kind: Any, command: Command) -> list[str]:
    """Return the title and the table of a dataclass, and of the groups in it."""
    texts, known = help_texts(kind), command.settings()
    own = [declared for declared in fields(kind) if declared.name in known]
    title = str(kind.__doc__).partition("\n")[0].rstrip(".")
    found = [f"**{title}**", table({each.name: each for each in own}, texts)] if own else []
    for declared in fields(kind):
        if is_dataclass(declared.type):
            prefix = f"{declared.name}."
            title = str(declared.type.__doc__).partition("\n")[0].rstrip(".")
            inner = {
                name: each for name, each in train_settings().items() if name.startswith(prefix)
            }
            found += [f"**{declared.name}: {title}**", table(inner, texts)]
    return found


def table(settings: dict[str, Field], texts: dict[str, str]) -> str:
    rows = ['<div class="options" markdown>\n', "| option | meaning | default |", "|---|---|---|"]
    for name, declared in settings.items():
        meaning = texts[name]
        if allowed := range_of(declared.type):
            meaning += f" Range: {allowed}."
        if len(allowed := choices(declared.type)) > 1:  # the only one is "auto", next to a number
            meaning += f" One of: {', '.join(allowed)}."
        option = name if declared.metadata.get("positional") else f"--{name}"
        rows.append(
            f"| `{option}` | {meaning.replace('|', chr(92) + '|')} | "
            f"{shown_default(name, declared)} |"
        )
    return "\n".join([*rows, "\n</div>"])


def shown_default(name: str, declared: Field) -> str:
    default = default_of(declared)
    if default is MISSING or declared.metadata.get("required"):
        return "required"
    if declared.metadata.get("flag") and "." not in name:
        return "off"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    return "" if default is None or default == "" else f"`{default}`"

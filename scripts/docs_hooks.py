"""Hook of mkdocs: a command reference from the parsers."""

import argparse
from collections.abc import Iterator
from dataclasses import fields
from typing import Any, Literal, get_args, get_origin

from jsonargparse import ArgumentParser
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from contaccum.cli import commands
from contaccum.cli.parser import make_parser
from contaccum.config import TrainConfig

COMMANDS = "reference/commands.md"
HIDDEN = ("--help", "--print_config", "--print_completion")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    files.append(File.generated(config, COMMANDS, content=command_reference()))
    return files


def command_reference() -> str:
    """Return one section per command: usage, description, and a table of options with defaults."""
    known = _options(dict(leaves(make_parser(commands.COMMANDS)))["contaccum train"])
    text = [
        "# Commands",
        "Made from the parsers of the command line, as `contaccum COMMAND --help` is. Every setting of a config file is listed "
        "under `contaccum train`, by its group.",
        "Exit codes: 0 done; 2 the user's input, settings or disk; 1 anything else, or what was checked does not hold; 130 "
        "Ctrl-C; 143 SIGTERM.",
    ]
    for name, parser in leaves(make_parser(commands.COMMANDS)):
        text += [f"## {name}", parser.description, f"    {parser.usage}"]
        shared = False
        for group in parser._action_groups:
            options = [action for action in group._group_actions if _shown(action)]
            if name != "contaccum train":
                own = [action for action in options if _option(action) not in known]
                shared = shared or len(own) < len(options)
                options = own
            if options:
                text += [*_heading(group), _table(options)]
        if shared:
            text.append("Every setting of [contaccum train](#contaccum-train) can be given too.")
    return "\n\n".join(text) + "\n"


def leaves(parser: ArgumentParser, name: str = "contaccum") -> Iterator[tuple[str, ArgumentParser]]:
    """Return (name, parser) of every command."""
    commands = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not commands:
        yield name, parser
    for action in commands:
        for command, inner in action._name_parser_map.items():
            yield from leaves(inner, f"{name} {command}")


def _shown(action: argparse.Action) -> bool:
    return action.help != argparse.SUPPRESS and not any(option in HIDDEN for option in action.option_strings)


def _option(action: argparse.Action) -> tuple[str, str | None]:
    return action.dest, action.help


def _options(parser: ArgumentParser) -> set[tuple[str, str | None]]:
    settings = {field.name for field in fields(TrainConfig)}
    return {_option(action) for action in parser._actions if action.dest.split(".")[0] in settings}


def _heading(group: Any) -> list[str]:
    title = group.title or ""
    return [] if title in ("options", "positional arguments") else [f"**{title}**"]


def _table(actions: list[argparse.Action]) -> str:
    rows = ["| option | meaning | default |", "|---|---|---|"]
    for action in actions:
        name = ", ".join(action.option_strings) or action.dest
        allowed = list(map(str, action.choices or _literals(getattr(action, "_typehint", None))))
        choices = f" One of: {', '.join(allowed)}." if allowed else ""
        stop = "." if choices and not (action.help or "").endswith(".") else ""
        meaning = " ".join(f"{action.help or ''}{stop}{choices}".split()).replace("|", "\\|")
        if action.nargs == 0:
            default = "off"
        elif not action.option_strings or action.required:
            default = "required"
        else:
            default = (
                "" if action.default is None or action.default is argparse.SUPPRESS else f"`{_plain(action.default)}`"
            )
        rows.append(f"| `{name}` | {meaning} | {default} |")
    return "\n".join(rows)


def _literals(kind: Any) -> list[Any]:
    """Return the values of a Literal, also inside a union."""
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    return [value for inner in get_args(kind) for value in _literals(inner)]


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value) if value != "" else "(empty)"

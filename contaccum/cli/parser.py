"""Make each command's argparse parser from its option dataclasses, and read a command line."""

import argparse
import ast
import difflib
import inspect
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from importlib import import_module
from itertools import pairwise
from typing import Any, NoReturn, get_origin

from msgspec.inspect import UnionType, type_info

from contaccum.config.declare import default_of
from contaccum.config.load import choices, hint, load, range_of, settings_of
from contaccum.errors import InputError

TAGLINE = (
    "Fine-tune embedding models for search with large batches while holding only a few pairs in "
    "memory."
)


@dataclass(eq=False, repr=False)
class Command:
    """One command of the command line.

    The option dataclasses are imported only when the command runs.
    """

    run: Callable[..., Any]
    """Function of the command. It is called with an instance of each dataclass in ``options``, in
    order. The value that it returns is printed."""
    summary: str
    """Short text for `contaccum --help`."""
    description: str
    usage: str
    options: str = ""
    """Names of the dataclasses whose fields are options of the command. If two of them have a field
    with the same name, there is one option, declared by the first, and both get its value."""
    group: str = "data and installation"
    """Heading of `contaccum --help` under which the command is listed."""
    skip: tuple[str, ...] = ()
    """Fields that this command does not accept as options."""
    example: str = ""
    """Command line that the help shows."""
    main: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Options that ``--help`` shows, by heading. ``--help all`` shows all options. Empty: both show
    all."""
    hidden: tuple[str, ...] = ()
    """Options that the help does not show. The command accepts these options because every
    config.yaml contains them."""

    @property
    def trains(self) -> bool:
        """Whether the command accepts every setting of a training run."""
        return "TrainConfig" in self.options

    def kinds(self) -> list[type]:
        """Import the dataclasses named in ``options``."""
        modules = ("contaccum.config", "contaccum.config.commands", "contaccum.config.experiments")
        homes = [import_module(name) for name in modules] if self.options else []
        return [
            next(vars(home)[name] for home in homes if hasattr(home, name))
            for name in self.options.split()
        ]

    def settings(self) -> dict[str, Field]:
        """Return the options of the command: name, such as ``bank.size`` -> dataclass field."""
        found: dict[str, Field] = {}
        for kind in self.kinds():
            found = {**settings_of(kind), **found}
        return {name: declared for name, declared in found.items() if name not in self.skip}


class HelpFormatter(argparse.HelpFormatter):
    """Formatter that wraps only at spaces, so that URLs stay whole, and keeps examples."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n\n".join(
            part if part.startswith(" ") else "\n".join(self._split_lines(part, width))
            for part in text.split("\n\n")
        )


class Parser(argparse.ArgumentParser):
    """Parser that raises InputError instead of leaving the program."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{self.prog}: {message}; {self.prog} --help lists the options")


def command_parser(name: str, command: Command, everything: bool = True) -> Parser:
    """Return the parser of a command. It keeps the texts of the options that were given.

    everything: False makes a parser for the short help, with the main options only.
    """
    parser = Parser(
        prog=f"contaccum {name}",
        description=f"{command.description}\n\nexample:\n\n    {command.example}"
        if command.example
        else command.description,
        usage=command.usage,
        allow_abbrev=False,
        add_help=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=HelpFormatter,
    )
    kinds = command.kinds()
    texts = {name: text for kind in reversed(kinds) for name, text in help_texts(kind).items()}
    added = set(command.skip)

    settings = command.settings()

    def add(group: Any, names: Iterable[str]) -> None:
        for option in names:
            if option in added:
                continue
            added.add(option)
            if option == "config":
                group.add_argument("--config", action="append", metavar="FILE", help=CONFIG_HELP)
                continue
            if option == "print_config":
                about = "Print the complete config and stop."
                group.add_argument("--print_config", action="store_true", help=about)
                continue
            declared = settings[option]
            text = _help(texts[option], declared, with_range=everything)
            flag = option if declared.metadata.get("positional") else f"--{option}"
            shown = argparse.SUPPRESS if option in command.hidden else text
            group.add_argument(flag, help=shown, **_keywords(option, declared))

    if command.main and not everything:
        for heading, names in command.main.items():
            add(parser.add_argument_group(heading), names)
        parser.epilog = f"`{parser.prog} --help all` shows all {len(settings)} settings."
        return parser
    for kind in kinds:
        if kind.__name__ != "TrainConfig":
            # the option that must be given first, and those of a base class last
            ordered = sorted(
                fields(kind), key=lambda each: (not each.metadata.get("required"), each.kw_only)
            )
            add(parser.add_argument_group(_title(kind)), [each.name for each in ordered])
    if command.trains:
        run = parser.add_argument_group("settings of the run")
        add(run, ["config", *(option for option in settings if "." not in option), "print_config"])
        for declared in fields(next(kind for kind in kinds if kind.__name__ == "TrainConfig")):
            if is_dataclass(declared.type):
                group = parser.add_argument_group(f"{declared.name}: {_title(declared.type)}")
                prefix = f"{declared.name}."
                add(group, [option for option in settings if option.startswith(prefix)])
    return parser


CONFIG_HELP = """YAML file with any of the settings, or the name of a ready-made config such as
finetune. A later file overrides an earlier one, and options override all files."""


def _title(kind: Any) -> str:
    """Return the first line of a class's docstring, as the title of a group of options."""
    return str(kind.__doc__).partition("\n")[0].rstrip(".")


def _keywords(option: str, declared: Field) -> dict[str, Any]:
    """Return the keyword arguments of ``add_argument`` for an option, except ``help``."""
    kind, metadata = declared.type, declared.metadata
    if metadata.get("flag") and "." not in option:
        return {"action": "store_true"}
    keywords: dict[str, Any] = {"metavar": metadata.get("metavar") or _placeholder(kind)}
    if metadata.get("positional"):
        keywords["metavar"] = option.upper()
    elif metadata.get("required") or default_of(declared) is MISSING:
        keywords["required"] = True
    if get_origin(kind) is tuple:  # several values; the option may also be repeated
        keywords |= {"nargs": "+", "action": "extend"}
    return keywords


def _placeholder(kind: Any) -> str:
    """Return the placeholder of a value in the help, such as ``N``."""
    info = type_info(kind)
    first = info.types[0] if isinstance(info, UnionType) else info
    words = {"BoolType": "true|false", "IntType": "N", "FloatType": "X", "ListType": "LIST"}
    word = words.get(type(first).__name__, "")
    allowed = choices(kind)
    if word:
        return "|".join([word, *allowed])  # such as N|auto
    return "{" + ",".join(allowed) + "}" if allowed else "TEXT"


def _help(text: str, declared: Field, with_range: bool) -> str:
    """Return a help text with the default of the setting, and with its range if it is asked for."""
    notes = [range_of(declared.type)] if with_range and range_of(declared.type) else []
    default = default_of(declared)
    if isinstance(default, bool) and not declared.metadata.get("flag"):
        notes.append(f"default: {str(default).lower()}")
    elif isinstance(default, str | int | float) and default != "" and not isinstance(default, bool):
        notes.append(
            f"default: {default:g}" if isinstance(default, float) else f"default: {default}"
        )
    return f"{text} ({'; '.join(notes)})".replace("%", "%%") if notes else text.replace("%", "%%")


def help_texts(kind: Any) -> dict[str, str]:
    """Return the docstring below each field of a dataclass: name, such as ``k`` -> text."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__[:-1]):  # all but object
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(body, ast.ClassDef)
        for line, following in pairwise(body.body):
            if isinstance(line, ast.AnnAssign) and isinstance(following, ast.Expr):
                name, text = ast.unparse(line.target), ast.literal_eval(following.value)
                found[name] = " ".join(text.split())
    for declared in fields(kind):
        if is_dataclass(declared.type):
            inner = help_texts(declared.type)
            found |= {f"{declared.name}.{name}": text for name, text in inner.items()}
    return found


def parse(name: str, command: Command, words: Sequence[str]) -> tuple[list[Any], bool]:
    """Return an instance of each option dataclass, and whether only to print the config.

    words: the command line after the command. Raises InputError for a word that the command does
    not accept.
    """
    parser, settings = command_parser(name, command), command.settings()
    known = [*settings, *(("config", "print_config") if command.trains else ())]
    for word in words:
        option = word.partition("=")[0].removeprefix("--")
        if word.startswith("--") and word != "--" and option not in known:
            inner = [each for each in known if each.startswith(f"{option}.")]
            if inner:
                raise InputError(
                    f"--{option} is a group of settings, expected one of them, such as --{inner[0]}"
                )
            raise InputError(
                f"--{option}: contaccum {name} has no such option{hint(option, known, '--')}"
            )
    options, others = parser.parse_known_args(list(words))
    if others:
        before = words[words.index(others[0]) - 1] if words.index(others[0]) else ""
        declared = settings.get(before.removeprefix("--"))
        if declared and declared.metadata.get("flag") and "." not in before:
            raise InputError(f"{before} takes no value, but got {others[0]!r}")
        parser.error(f"unexpected argument {others[0]!r}")
    given = vars(options)
    files, print_config = given.pop("config", ()), given.pop("print_config", False)
    return load(command.kinds(), files, given), print_config


def help_of_command(name: str, command: Command, everything: bool) -> str:
    """Return the help text of a command. everything: all options, not only the main ones."""
    return command_parser(name, command, everything).format_help()


def overview(commands: Mapping[str, Command], group: str = "") -> str:
    """Return the list of all commands, or of those in a group such as ``data``."""
    prog = f"contaccum {group}".strip()
    lines = [f"usage: {prog} [--help] [--debug] COMMAND ...", ""]
    lines.append("Check, convert and make data sets." if group else TAGLINE)
    shown = {
        name: command
        for name, command in commands.items()
        if name.startswith(f"{group} " if group else "")
    }
    for heading in dict.fromkeys(command.group for command in shown.values()):
        lines += ["", f"{heading}:"]
        lines += [
            f"  {name.removeprefix(f'{group} '):<14}{command.summary}"
            for name, command in shown.items()
            if command.group == heading
        ]
    lines += ["", f"`{prog} COMMAND --help` shows the options of a command."]
    if not group:
        lines.append("`contaccum --version` shows the version.")
    return "\n".join(lines)


def closest_command(commands: Mapping[str, Command], name: str) -> str:
    """Return the end of an error message about an unknown command."""
    near = difflib.get_close_matches(name, commands, n=1, cutoff=0.6)
    return f"did you mean contaccum {near[0]}?" if near else "contaccum --help lists the commands"

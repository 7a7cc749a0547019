"""Make each command's argparse parser from its option dataclasses, and read a command line."""

import argparse
import ast
import inspect
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from itertools import pairwise
from typing import Any, NoReturn, get_origin

from contaccum.config import TrainConfig
from contaccum.config.declare import default_of
from contaccum.config.load import hint, is_group, load, placeholder, range_of, settings_of
from contaccum.errors import InputError

TAGLINE = (
    "Fine-tune embedding models for search with large batches while holding only a few pairs in "
    "memory."
)


@dataclass(eq=False, repr=False)
class Command:
    """One command of the command line."""

    run: Callable[..., Any]
    """Function of the command. It is called with an instance of each dataclass in ``kinds``, in
    order. The value that it returns is printed."""
    summary: str
    """Short text for `contaccum --help`."""
    description: str
    usage: str
    kinds: tuple[type, ...] = ()
    """Dataclasses whose fields are options of the command. If two of them have a field with the
    same name, there is one option, declared by the first, and both get its value."""
    group: str = "data and installation"
    """Heading of `contaccum --help` under which the command is listed."""
    skip: tuple[str, ...] = ()
    """Fields that this command does not accept as options. A config file may have them."""
    example: str = ""
    """Command line that the help shows."""
    main: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Options that ``--help`` shows, by heading. ``--help all`` shows all options. Empty: both show
    all."""

    @property
    def trains(self) -> bool:
        """Whether the command accepts every setting of a training run."""
        return TrainConfig in self.kinds

    def settings(self) -> dict[str, Field]:
        """Return the options of the command: name, such as ``bank.size`` -> dataclass field."""
        found: dict[str, Field] = {}
        for kind in self.kinds:
            found = {**settings_of(kind), **found}
        return {name: declared for name, declared in found.items() if name not in self.skip}


class Parser(argparse.ArgumentParser):
    """Parser that raises InputError instead of leaving the program."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{self.prog}: {message}; {self.prog} --help lists the options")


def command_parser(name: str, command: Command, everything: bool = True) -> Parser:
    """Return the parser of a command. It keeps the texts of the options that were given.

    everything: False makes a parser for the short help, with the main options only.
    """
    description = textwrap.fill(command.description, 80, break_on_hyphens=False)
    if command.example:
        description += f"\n\nexample:\n\n    {command.example}"
    parser = Parser(
        prog=f"contaccum {name}",
        description=description,
        usage=command.usage,
        allow_abbrev=False,
        add_help=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    settings = command.settings()
    texts: dict[str, str] = {}
    for kind in reversed(command.kinds):
        texts |= help_texts(kind)
    added = set()

    def add(title: str, options: Iterable[str]) -> None:
        group = parser.add_argument_group(title)
        for option in options:
            if option == "config":
                group.add_argument("--config", action="append", metavar="FILE", help=CONFIG_HELP)
            elif option == "print_config":
                about = "Print the complete config and stop."
                group.add_argument("--print_config", action="store_true", help=about)
            elif option in settings and option not in added:
                declared = settings[option]
                text = _help(texts[option], declared, with_range=everything)
                flag = option if declared.metadata.get("positional") else f"--{option}"
                group.add_argument(flag, help=text, **_keywords(option, declared))
                added.add(option)

    if command.main and not everything:
        for heading, names in command.main.items():
            add(heading, names)
        parser.epilog = f"`{parser.prog} --help all` shows all {len(settings)} settings."
        return parser
    for kind in command.kinds:
        own = settings_of(kind)
        if kind is not TrainConfig:
            # the option that must be given first
            add(_title(kind), sorted(own, key=lambda each: not own[each].metadata.get("required")))
            continue
        names = [name for name in own if "." not in name]
        add("settings of the run", ["config", *names, "print_config"])
        for declared in filter(is_group, fields(TrainConfig)):
            prefix = f"{declared.name}."
            title = f"{declared.name}: {_title(declared.type)}"
            add(title, [name for name in own if name.startswith(prefix)])
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
    keywords: dict[str, Any] = {"metavar": metadata.get("metavar") or placeholder(kind)}
    if metadata.get("positional"):
        keywords["metavar"] = option.upper()
    elif metadata.get("required") or default_of(declared) is MISSING:
        keywords["required"] = True
    if get_origin(kind) is tuple:  # several values; the option may also be repeated
        keywords |= {"nargs": "+", "action": "extend"}
    return keywords


def _help(text: str, declared: Field, with_range: bool) -> str:
    """Return a help text with the default of the setting, and with its range if it is asked for."""
    allowed = range_of(declared.type) if with_range else ""
    notes = [allowed] if allowed else []
    default = default_of(declared)
    if (
        isinstance(default, str | int | float)
        and default != ""
        and not declared.metadata.get("flag")
    ):
        notes.append(f"default: {str(default).lower() if isinstance(default, bool) else default}")
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
        if is_group(declared):
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
            raise InputError(
                f"--{option}: contaccum {name} has no such option{hint(option, known, '--')}"
            )
    options, others = parser.parse_known_args(words)
    if others:
        parser.error(f"unexpected argument {others[0]!r}")
    given = vars(options)
    files, print_config = given.pop("config", ()), given.pop("print_config", False)
    return load(command.kinds, files, given), print_config


def overview(commands: Mapping[str, Command], group: str = "") -> str:
    """Return the list of all commands, or of those in a group such as ``data``."""
    prog = f"contaccum {group}".strip()
    lines = [f"usage: {prog} [--help] [--debug] COMMAND ...", ""]
    lines.append("Check, convert and make data sets." if group else TAGLINE)
    prefix = f"{group} " if group else ""
    shown = {name: command for name, command in commands.items() if name.startswith(prefix)}
    for heading in dict.fromkeys(command.group for command in shown.values()):
        lines += ["", f"{heading}:"]
        for name, command in shown.items():
            if command.group == heading:
                lines.append(f"  {name.removeprefix(prefix):<14}{command.summary}")
    lines += ["", f"`{prog} COMMAND --help` shows the options of a command."]
    if not group:
        lines.append("`contaccum --version` shows the version.")
        lines.append("With `--debug`, an error also prints its traceback.")
    return "\n".join(lines)

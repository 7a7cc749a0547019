"""Make the parser of each command from its option dataclasses, and check arguments before jsonargparse reads them."""

import argparse
import difflib
import re
from argparse import ArgumentError
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from importlib import import_module
from itertools import islice, pairwise
from operator import attrgetter
from typing import Any, ClassVar, get_args, get_origin

import yaml
from docstring_parser import parse_from_object
from jsonargparse import ActionConfigFile, ArgumentParser, Namespace, get_loader, set_loader, set_parsing_settings

from contaccum import __version__
from contaccum.errors import InputError

set_parsing_settings(
    add_print_completion_argument=True,
    import_path_denylist=["*"],  # otherwise a value such as {class_path: os.path} would be imported
    import_path_allowlist=[
        "contaccum.config.MixtureConfig",
        "contaccum.config.groups.MixtureConfig",
    ],  # in data.mixture
)
_load_yaml = get_loader("yaml")


def _load(text: str) -> Any:
    """Parse a text as YAML. Values such as ``# 1`` and ``&a``, for example of --query, stay texts; YAML reads them as null."""
    value = _load_yaml(text)
    return text if value is None and text.strip().lower() not in ("", "~", "null") else value


set_loader("yaml", _load, exceptions=(yaml.YAMLError,))


@dataclass(eq=False, repr=False)
class Command:
    """One command of the command line.

    The option dataclasses are imported only when the command runs.
    """

    run: Callable[..., Any]
    """Function of the command. It is called with an instance of each dataclass in ``options``, in order. The value that it
    returns is printed."""
    summary: str
    """Short text for `contaccum --help`."""
    description: str
    usage: str
    options: str = ""
    """Names of the dataclasses whose fields are options of the command. If two dataclasses have a field with the same name, the
    field of the first is used. An entry PREFIX:NAME turns each field of NAME into an option `--PREFIX.FIELD`."""
    skip: tuple[str, ...] = ()
    """Fields that this command does not accept as options."""
    hidden: tuple[str, ...] = ()
    """Options that the help does not show. The command accepts these options because every config.yaml contains them."""

    @property
    def trains(self) -> bool:
        """Whether the command accepts every setting of a training run."""
        return "TrainConfig" in self.options

    def kinds(self) -> list[tuple[str, type]]:
        """Import the dataclasses named in ``options``. Return (prefix of the option names or "", dataclass) for each."""
        named = [each.rpartition(":") for each in self.options.split()]
        modules = ("contaccum.config", "contaccum.config.commands", "contaccum.config.experiments")
        homes = [import_module(name) for name in modules] if named else []
        return [(prefix, next(vars(home)[name] for home in homes if hasattr(home, name))) for prefix, _, name in named]

    def declared(self) -> Iterator[tuple[str, Any, Field]]:
        """Yield (option name, dataclass, field) for every option. Options in the groups of TrainConfig are included."""
        seen = set(self.skip)
        for prefix, kind in self.kinds():
            for each in _in_order(kind):
                if is_dataclass(each.type):
                    yield from ((f"{each.name}.{inner.name}", each.type, inner) for inner in _in_order(each.type))
                elif prefix or each.name not in seen:
                    yield f"{prefix}.{each.name}".lstrip("."), kind, each
            seen |= set() if prefix else {each.name for each in fields(kind)}


def _in_order(kind: Any) -> list[Field]:
    """Return the fields of a dataclass, in the order of the arguments of ``__init__``: keyword-only fields come last."""
    return sorted(fields(kind), key=attrgetter("kw_only"))


MAX_BRACKETS = 200
"""Maximum number of opening brackets in a value on the command line."""


class ConfigFile(ActionConfigFile):
    """Option that reads a YAML file of settings. Its errors name file and line, unlike those of jsonargparse."""

    places: ClassVar[dict[str, str]] = {}
    """Setting -> ``file:line`` where it was read."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        from contaccum.config.file import MAX_BYTES, check_config_file, config_path
        from contaccum.runtime.files import read_text

        values = config_path(values)
        known = {action.dest for action in parser._actions if not action.dest.endswith(".help")}
        known |= {name.rpartition(".")[0] for name in known} - {""}  # groups of settings
        config = check_config_file(values, read_text(values, "a YAML file with settings", MAX_BYTES), known)
        self.places.update(config.places)
        super().__call__(parser, namespace, config.text, option_string)


def new_parser(
    prog: str, description: str, usage: str = "%(prog)s [--help] [--debug] COMMAND ...", **more: Any
) -> ArgumentParser:
    usage = usage.replace("%(prog)s", prog)  # jsonargparse would insert the usage of the main parser
    return ArgumentParser(
        prog=prog, description=description, usage=usage, exit_on_error=False, allow_abbrev=False, **more
    )


def command_parser(name: str, command: Command, documented: bool = True) -> ArgumentParser:
    """Return the parser of a command.

    documented: False leaves out the help texts of the options, which is faster.
    """
    from contaccum.config.declare import spec_of

    parser = new_parser(f"contaccum {name}", command.description, command.usage)
    if command.trains:
        parser.add_argument(
            "--config",
            action=ConfigFile,
            help="YAML file with any of the settings below, or the name of a ready-made config such as finetune.",
        )
    groups: dict[type, Any] = {}
    for option, kind, each in command.declared():
        if kind not in groups:
            groups[kind] = parser.add_argument_group(str(kind.__doc__).partition("\n")[0].rstrip("."))
        spec, keywords = spec_of(each), _keywords(option, each)
        if option in command.hidden:
            keywords["help"] = argparse.SUPPRESS
        elif documented:
            keywords["help"] = _texts(kind)[each.name] + (f" Range: {spec.range()}." if spec.range() else "")
        groups[kind].add_argument(option if spec.positional else f"--{option}", **keywords)
    return parser


def _keywords(option: str, declared: Field) -> dict[str, Any]:
    """Return the keyword arguments of ``add_argument`` for an option, except ``help``."""
    from contaccum.config.declare import default_of, spec_of

    spec, default = spec_of(declared), default_of(declared)
    if spec.flag and "." not in option:
        return {"action": "store_true"}
    # any text can be a query, also "null", which YAML reads as no value
    keywords: dict[str, Any] = {"type": str if option == "query" else declared.type}
    if spec.metavar or spec.unit:
        keywords["metavar"] = spec.metavar or spec.unit.upper()
    if spec.several:
        keywords |= {"type": get_args(declared.type)[0], "nargs": "+", "action": "extend"}  # the option may be repeated
    if spec.positional:
        return keywords
    if spec.required or default is MISSING:
        return keywords | {"required": True}
    return keywords | {"default": list(default) if spec.several else default}


@cache
def _texts(kind: type) -> dict[str, str]:
    """Return the docstrings below the fields of a dataclass and of its base classes, by field name."""
    parsed = [parse_from_object(base) for base in reversed(kind.__mro__[:-1])]
    return {each.arg_name: each.description or "" for found in parsed for each in found.params}


def instances(command: Command, options: Namespace) -> list[Any]:
    """Return an instance of each option dataclass of the command, with the parsed values.

    Raises InputError for a value out of range.
    """
    from contaccum.config import TrainConfig, from_mapping
    from contaccum.config.declare import check_values

    values, made = options.as_dict(), []
    homes = {(kind, each.name) for _, kind, each in command.declared()}
    for prefix, kind in command.kinds():
        given = values[prefix] if prefix else values
        own = {
            each.name: tuple(given[each.name]) if get_origin(each.type) is tuple else given[each.name]
            for each in fields(kind)
            if (kind, each.name) in homes or is_dataclass(each.type)
        }
        made.append(from_mapping(own) if kind is TrainConfig else kind(**own))
        if kind is not TrainConfig:  # validate() checks a TrainConfig
            check_values(made[-1], f"{prefix}." if prefix else "--")
    return made


def make_parser(commands: Mapping[str, Command], arguments: list[str] | None = None) -> ArgumentParser:
    """Return the parser of all commands.

    arguments: words of the command line. None: all commands get their options. Otherwise only the command that is called gets
    its options, which is faster.
    """
    ConfigFile.places.clear()
    about = "Train dense retrievers under a fixed memory budget, and search and evaluate with them."
    parser = new_parser("contaccum", about, version=__version__)
    every = arguments is None or "--print_completion" in " ".join(arguments)
    documented = every or any(word.startswith(("-h", "--help")) for word in arguments or ())
    chosen = arguments[0] if arguments else ""

    groups = {"": parser.add_subcommands(metavar="COMMAND")}
    for name, command in commands.items():
        group, _, last = name.rpartition(" ")
        if group not in groups:  # data is the only group of commands
            data = new_parser("contaccum data", "Check, convert and download data sets.")
            groups[""].add_subcommand(group, data, help="check, convert or download a data set")
            groups[group] = data.add_subcommands(metavar="COMMAND")
        full = every or chosen == (group or name)
        made = command_parser(name, command, documented) if full else new_parser(f"contaccum {name}", "")
        groups[group].add_subcommand(last, made, help=command.summary)
    return parser


def command_in(commands: Mapping[str, Command], arguments: list[str]) -> tuple[str, Command | None]:
    """Return the name of the command in a command line, and its Command (None if the name is unknown)."""
    name = " ".join(arguments[: 2 if arguments[:1] == ["data"] else 1])
    return name, commands.get(name)


def configs_first(arguments: list[str]) -> list[str]:
    """Move every `--config FILE` to the place after the command, so that the other options override the file."""
    configs: list[str] = []
    others: list[str] = []
    words = iter(arguments)
    for word in words:
        if word == "--config":
            configs += [word, *islice(words, 1)]
        else:
            (configs if word.startswith("--config=") else others).append(word)
    return [*others[:1], *configs, *others[1:]]


def check_arguments(commands: Mapping[str, Command], arguments: list[str]) -> None:
    """Raise InputError for an unknown command or option, a removed setting, or a group of settings used as an option."""
    name, command = command_in(commands, arguments)
    if command is None:
        if not name or name == "data" or name.split()[-1].startswith("-"):
            return
        near = difflib.get_close_matches(name, commands, n=1, cutoff=0.6)
        hint = f"did you mean contaccum {near[0]}?" if near else "contaccum --help lists the commands"
        raise InputError(f"contaccum {name}: no such command; {hint}")
    from contaccum.config import GROUPS
    from contaccum.config.declare import MAX_DIGITS, describe
    from contaccum.config.spellings import refuse_removed, unknown

    options = {option: each for option, _, each in command.declared()}
    known = {*options, "help", "print_completion", *(("config", "print_config") if command.trains else ())}
    nested = tuple(f"{option}." for option, each in options.items() if any(map(is_dataclass, get_args(each.type))))
    for option, following in pairwise([*arguments, ""]):
        key, equals, value = option.partition("=")
        if not key.startswith("--") or key == "--":
            continue
        key, value = key[2:], value if equals else following if not following.startswith("--") else ""
        refuse_removed("--", key, value)
        if key in options and "text" not in describe(options[key]):
            if len(value) > MAX_DIGITS and value.lstrip("+-").isdigit():
                raise InputError(f"--{key} has {len(value)} digits, expected at most {MAX_DIGITS}")
            if value.count("[") + value.count("{") > MAX_BRACKETS:
                raise InputError(f"--{key} has more than {MAX_BRACKETS} brackets, expected {describe(options[key])}")
        if command.trains and key in GROUPS:  # jsonargparse would read the value from a file, or import a class
            raise InputError(f"--{key} is a group of settings, expected --{key}.FIELD VALUE, or --config FILE")
        if key.rstrip("+") not in known and not key.replace("+.", ".").startswith(nested):
            raise InputError(f"--{key}: contaccum {name} has no such option{unknown(key, value, options, '--')}")


def explain(commands: Mapping[str, Command], arguments: list[str], error: ArgumentError) -> str:
    """Return an error message of jsonargparse in plain words, with the missing options or the allowed values."""
    from contaccum.config.declare import choices_of, describe, spec_of
    from contaccum.config.spellings import closest

    sentence = " ".join(str(error).split())
    name, command = command_in(commands, arguments)
    declared = {option: each for option, _, each in command.declared()} if command else {}
    if missing := re.search(r"the following arguments are required: (.*)", sentence):
        options = [each.strip().rpartition(".")[2] for each in missing[1].split(",")]
        shown = [
            each.upper() if spec_of(declared[each]).positional else f"--{each}" for each in options if each in declared
        ]
        needed = f"contaccum {name} needs {' and '.join(shown)}; contaccum {name} --help lists all options"
        return needed if shown else sentence
    for option, value in pairwise(arguments) if "unrecognized arguments" in sentence.lower() else ():
        flag = declared.get(option[2:]) if option.startswith("--") else None
        if flag and spec_of(flag).flag and not value.startswith("--"):
            return f"{option} takes no value, but got {value!r}"
    if explicit := re.search(r"argument (--\S+): ignored explicit argument (.*)", sentence):
        return f"{explicit[1]} takes no value, but got {explicit[2]}"
    if unknown := re.search(r"[Kk]ey \"([\w.]+)\": .* Option '(\w+)' is not accepted", sentence):
        names = [each.name for each in fields(get_args(declared[unknown[1]].type)[0])]
        return f"{_source(unknown[1], arguments, unknown[2])}: no such setting{closest(unknown[2], names)}"
    found = re.search(r'[Kk]ey "([\w.]+)": .*(?:Got value|Given value|dot import path string): ?(.*)$', sentence)
    if not found or found[1] not in declared:
        return sentence
    option, value, wrong = found[1], found[2], declared[found[1]]
    where = _source(option, arguments)
    inner = re.search(r'[Kk]ey "(\w+)": ', sentence)
    if inner and (items := next(filter(is_dataclass, get_args(wrong.type)), None)):  # a key of an item of data.mixture
        wrong = next(each for each in fields(items) if each.name == inner[1])
        where = _source(option, arguments, inner[1])
    near = difflib.get_close_matches(value, choices_of(wrong), n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    if (allowed := describe(wrong)).startswith("text") and value[:1] not in ("[", "{"):  # YAML reads 123 as a number
        hint = "; write it in quotes"
    return f"{where} is {value[:100]!r}, expected {allowed}{hint}"


def _source(option: str, arguments: list[str], key: str = "") -> str:
    """Return the name of a setting, with the file and line of its value if a file sets it. key: key of an item of a list."""
    if any(word.partition("=")[0] == f"--{option}" for word in arguments):
        return f"--{option}: {key}" if key else f"--{option}"
    items = [name for name in ConfigFile.places if re.fullmatch(rf"{re.escape(option)}\[\d+\]\.{key}", name)]
    name = items[0] if len(items) == 1 else option
    found = f"{ConfigFile.places[name]}: {name}" if name in ConfigFile.places else f"--{option}"
    return f"{found}: {key}" if key and name == option else found

"""Load settings: defaults, overridden by YAML files, overridden by options of the command line.

Every error names the file and line or the option, what was found, and what is allowed.
"""

import copy
import difflib
import math
import os
import re
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import Field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_origin

import msgspec
import yaml
from msgspec import inspect

from contaccum.errors import InputError

Options = TypeVar("Options")
READY = Path(__file__).parent.parent / "configs"
"""Folder of the ready-made configs."""
PATHS = ("DATA", "DIR", "FILE", "MODEL", "PATH", "RUN")
"""Placeholders in ``--help`` of settings that can be a path."""
CONFIG_VERSION = 1
"""``format_version`` that a run writes into its config.yaml."""


class Given(NamedTuple):
    """Value of a setting, as the user gave it."""

    value: Any
    where: str
    """Name of the setting, after the place where its value was read: ``c.yaml:3: seed``,
    ``--seed``."""


def load(
    kinds: Sequence[type],
    files: Sequence[str] = (),
    options: Mapping[str, str | Sequence[str] | bool] | None = None,
) -> list[Any]:
    """Return an instance of each dataclass in ``kinds``. A later file overrides an earlier one.

    files: paths of YAML files, or names of ready-made configs. options: name of a setting, such as
    ``bank.size`` -> its value as text; a list of texts for an option with several values; True for
    a switch. If two of the dataclasses have a setting with the same name, both get its value.

    Raises InputError for a file that is not YAML, an unknown setting, or a value that is not
    allowed.
    """
    known = {
        name: declared for kind in reversed(kinds) for name, declared in settings_of(kind).items()
    }
    sources = [read_config_file(config_path(file)) for file in files]
    sources.append(
        {
            name: Given(_option_value(known, name, text), f"--{name}")
            for name, text in (options or {}).items()
        }
    )
    given: dict[str, Given] = {}
    for source in sources:
        # A share below 1 makes grad_cache another method, so the share of a config is not carried
        # over to a method that a later config or option (--method, --methods) chooses.
        method, before = source.get("methods", source.get("method")), given.get("method")
        share = given.get("replay.share")
        if method and before and method.value != before.value and share and share.value != 1:
            del given["replay.share"]
            if "replay.share" not in source:
                warnings.warn(
                    f"{share.where} {share.value} is not used, because {method.where} is "
                    f"{shown(method.value)}; give --replay.share {share.value} to use it",
                    stacklevel=2,
                )
        given |= source
    refuse_unknown(given, known)
    return [_build(kind, given) for kind in kinds]


def settings_of(kind: type) -> dict[str, Field]:
    """Return the settings of a dataclass: name, such as ``seed`` or ``bank.size`` -> field."""
    found: dict[str, Field] = {}
    # A dataclass lists the fields of its base classes first. Base classes here are kw_only, which
    # puts them last.
    for declared in sorted(fields(kind), key=lambda each: bool(each.kw_only)):
        if isinstance(declared.type, type) and is_dataclass(declared.type):
            inner = settings_of(declared.type)
            found |= {f"{declared.name}.{name}": each for name, each in inner.items()}
        else:
            found[declared.name] = declared
    return found


def _build(kind: type[Options], given: Mapping[str, Given], prefix: str = "") -> Options:
    """Return an instance of a dataclass. prefix: group of its settings, and a dot."""
    values: dict[str, Any] = {}
    for declared in fields(kind):  # type: ignore[arg-type]
        name = prefix + declared.name
        if isinstance(declared.type, type) and is_dataclass(declared.type):
            values[declared.name] = _build(declared.type, given, f"{name}.")
        elif name in given:
            values[declared.name] = _read(declared, *given[name])
    return kind(**values)


def _read(declared: Field, value: Any, where: str) -> Any:
    """Return the value of a setting as its type. In a path, ``~`` is the home folder."""
    value = converted(declared.type, value, where)
    metadata = declared.metadata
    if metadata.get("positional") or metadata.get("metavar") in PATHS:
        if isinstance(value, str):
            return with_home(value)
        if isinstance(value, tuple):
            return tuple(map(with_home, value))
    return value


def with_home(path: str) -> str:
    """Replace ``~`` at the start of a path, of a ``hub:`` folder, and of each path in a list."""
    if os.path.lexists(path):
        return path
    return re.sub(r"(?<![^,])(hub:)?(~[^/,:?]*)", _expanded, path)


def _expanded(found: re.Match) -> str:
    return (found[1] or "") + os.path.expanduser(found[2])


def from_mapping(kind: type[Options], values: Mapping[str, Any]) -> Options:
    """Build a dataclass from nested mappings, the inverse of ``asdict``."""
    given: dict[str, Given] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            given |= {
                f"{name}.{key}": Given(inner, f"{name}.{key}") for key, inner in value.items()
            }
        else:
            given[name] = Given(value, name)
    refuse_unknown(given, settings_of(kind))
    return _build(kind, given)


def with_changes(config: Options, changes: Mapping[str, str]) -> Options:
    """Return a copy of ``config`` with changed settings.

    changes: name of a setting -> new value as text.
    """
    changed, known = copy.deepcopy(config), settings_of(type(config))
    given = {name: Given(_option_value(known, name, text), name) for name, text in changes.items()}
    refuse_unknown(given, known)
    for name, (value, where) in given.items():
        group, _, key = name.rpartition(".")
        setattr(
            getattr(changed, group) if group else changed,
            key,
            _read(known[name], value, where),
        )
    return changed


def check_values(options: Any, prefix: str = "") -> None:
    """Raise InputError for the first value that is not allowed, and for unknown attributes.

    Python code can assign anything to an attribute. Paths and NumPy numbers are converted.
    """
    for declared in fields(options):
        name, value = prefix + declared.name, getattr(options, declared.name)
        if isinstance(declared.type, type) and is_dataclass(declared.type):
            if not isinstance(value, declared.type):
                raise InputError(f"{name} is {shown(value)}, expected a {declared.type.__name__}")
            check_values(value, f"{name}.")
        else:
            # the dataclass may be frozen
            object.__setattr__(options, declared.name, converted(declared.type, value, name))
    for key in vars(options).keys() - {declared.name for declared in fields(options)}:
        known = [prefix + name for name in settings_of(type(options))]
        raise InputError(f"{prefix}{key}: no such setting{hint(prefix + key, known)}")


def refuse_unknown(given: Mapping[str, Given], known: Collection[str]) -> None:
    """Raise InputError for the first name that is not in ``known``."""
    for name, (value, where) in given.items():
        inner = [each for each in known if each.startswith(f"{name}.")]
        if inner:
            raise InputError(
                f"{where} is {shown(value)}, expected a group of settings, such as {inner[0]}"
            )
        if name not in known:
            raise InputError(f"{where}: no such setting{hint(name, known)}")


def hint(name: str, known: Collection[str], prefix: str = "") -> str:
    """Return the end of an error message about an unknown setting: the closest name, or nothing.

    known: names of the settings that exist. prefix: text before each setting, such as ``--``.
    """
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
    if not near:  # without its group, or in another group
        last_names = {each.rpartition(".")[2] for each in known}
        like = difflib.get_close_matches(name.rpartition(".")[2], last_names, n=2, cutoff=0.65)
        near = sorted(each for each in known if each.rpartition(".")[2] in like)
    return f"; did you mean {' or '.join(prefix + each for each in near)}?" if near else ""


# Values


def converted(kind: Any, value: Any, where: str) -> Any:
    """Return ``value`` as the type of a setting.

    Raise InputError if the type does not allow the value.

    where: name of the setting, after the place where the value was read.
    """
    items = get_args(kind)[0] if get_origin(kind) is list else None
    if is_dataclass(items) and isinstance(value, list):  # such as data.mixture
        return [_item(items, item, f"{where}[{number}]") for number, item in enumerate(value)]
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    elif hasattr(value, "tolist"):  # a number or an array of NumPy or torch
        value = value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        raise InputError(f"{where} is {value}, expected a finite number")
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError:
        number = number_type(kind)
        right_type = type(value) is int or (
            type(value) is float and isinstance(number, inspect.FloatType)
        )
        expected = range_of(kind) if number and right_type else described(kind)
        raise InputError(
            f"{where} is {shown(value)}, expected {expected}{_value_hint(kind, value)}"
        ) from None


def _item(kind: Any, item: Any, where: str) -> Any:
    if isinstance(item, kind):
        check_values(item, f"{where}.")
        return item
    known = settings_of(kind)
    if not isinstance(item, dict):
        raise InputError(f"{where} is {shown(item)}, expected a mapping with {', '.join(known)}")
    given = {str(name): Given(value, f"{where}.{name}") for name, value in item.items()}
    refuse_unknown(given, known)
    return _build(kind, given)


def shown(value: Any) -> str:
    """Return a value as an error message shows it: ``'text'``, ``true``, ``null``, ``a list``."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, int | float):
        return f"{value:g}" if abs(value) > 10**20 else str(value)
    if isinstance(value, str):
        return repr(value[:100])
    if isinstance(value, list | tuple) and all(
        isinstance(each, str | int | float) for each in value
    ):
        return repr(list(value))[:100]
    if isinstance(value, list | tuple):
        return "a list"
    return "a mapping" if isinstance(value, dict) else repr(value)[:100]


def described(kind: Any) -> str:
    """Describe the values that a type allows, such as ``a whole number (at least 0), or null``."""
    info = inspect.type_info(kind)
    allowed = f" ({range_of(kind)})" if range_of(kind) else ""
    words = []
    for each in info.types if isinstance(info, inspect.UnionType) else (info,):
        if isinstance(each, inspect.LiteralType):
            words.append(f"one of {', '.join(choices(kind))}")
        elif isinstance(each, inspect.BoolType):
            words.append("true or false")
        elif isinstance(each, inspect.StrType):
            words.append("text")
        elif isinstance(each, inspect.IntType):
            words.append(f"a whole number{allowed}")
        elif isinstance(each, inspect.FloatType):
            words.append(f"a number{allowed}")
        elif isinstance(each, inspect.ListType | inspect.VarTupleType):
            item = each.item_type
            if isinstance(item, inspect.DataclassType):
                words.append(
                    f"a list of mappings with {', '.join(each.name for each in item.fields)}"
                )
            elif isinstance(item, inspect.StrType):
                words.append("a list of texts")
            elif isinstance(item, inspect.FloatType):
                words.append("a list of numbers above 0")
            else:
                words.append("a list of whole numbers above 0")
        elif isinstance(each, inspect.NoneType):
            words.append("null")
    return ", or ".join(words)


def range_of(kind: Any) -> str:
    """Describe the range of a number, such as ``at least 1``; empty without a range."""
    number = number_type(kind)
    if number is None:
        return ""
    if number.ge is not None and number.le is not None:
        return f"from {number.ge} to {number.le}"
    words = {
        "at least": number.ge,
        "more than": number.gt,
        "at most": number.le,
        "less than": number.lt,
        "a multiple of": number.multiple_of,
    }
    return " and ".join(f"{word} {bound}" for word, bound in words.items() if bound is not None)


def number_type(kind: Any) -> inspect.IntType | inspect.FloatType | None:
    """Return the number type in a type such as ``PositiveInt | None``, with its limits.

    None: no number.
    """
    info = inspect.type_info(kind)
    for each in info.types if isinstance(info, inspect.UnionType) else (info,):
        if isinstance(each, inspect.IntType | inspect.FloatType):
            return each
    return None


def choices(kind: Any) -> list[str]:
    """Return the allowed values of a Literal, also of one that may be None."""
    kinds = (kind, *get_args(kind))
    return [choice for each in kinds if get_origin(each) is Literal for choice in get_args(each)]


def _value_hint(kind: Any, value: Any) -> str:
    near = difflib.get_close_matches(str(value), choices(kind), n=1)
    if near:
        return f"; did you mean {near[0]}?"
    is_text = kind is str or str in get_args(kind)
    return "; write it in quotes" if is_text and isinstance(value, int | float) else ""


# The command line


def _option_value(known: Mapping[str, Field], name: str, given: str | Sequence[str] | bool) -> Any:
    """Return the value of an option. Text stays text; for other types, it is read as YAML."""
    if not isinstance(given, str) or name not in known:
        return given if isinstance(given, bool | str) else list(given)
    kind = known[name].type
    if kind == list[str] and re.fullmatch(r"[\w.-]+", given):
        return [given]  # a single word needs no brackets
    if kind is str or (str in get_args(kind) and get_origin(kind) is not list):
        # in a config, null is no value; for a command, leaving out the option says that
        return None if given == "null" and "." in name and kind is not str else given
    try:
        value = _Loader(given).get_single_data()
    except (yaml.YAMLError, ValueError, RecursionError):
        return given
    # also an empty text, as of --seed "$SEED" without SEED, and a comment would be no value in YAML
    return given if value is None and given.strip() not in ("null", "~") else value


# YAML files


class _Loader(yaml.SafeLoader):
    """Safe loader that refuses duplicate keys, reads 1e-3 as a number, and dates as texts."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML declares it
        first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name in lines:
                problem = f"duplicate key {name!r}, first in line {lines[name]}"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            lines[name] = line
        return super().construct_mapping(node, deep)


# YAML 1.1 reads 1e-3 as a text, because it has no decimal point
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


@contextmanager
def _opened(path: str) -> Iterator[_Loader]:
    """Return the loader of a YAML file.

    Inside the ``with`` block, errors of YAML become InputError.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}: byte {error.start} is not UTF-8, expected YAML with settings"
        ) from error
    try:
        loader = _Loader(text)
        yield loader
        loader.dispose()
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise InputError(
            f"{path}:{line}: not valid YAML ({error.problem}), expected YAML with settings"
        ) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        reason = " ".join(str(error).split())[:200]
        raise InputError(
            f"{path}: not usable YAML ({reason}), expected YAML with settings"
        ) from error


def read_yaml(path: str) -> dict[str, Any]:
    """Return the content of a YAML file that maps names to values."""
    with _opened(path) as loader:
        found = loader.get_single_data()
    if not isinstance(found, dict):
        kind = "a list" if isinstance(found, list) else shown(found)
        raise InputError(f"{path}: found {kind}, expected settings, such as 'seed: 1'")
    return found


def read_config_file(path: str) -> dict[str, Given]:
    """Return the settings of a YAML file: name -> value and place, without ``format_version``.

    A setting is written ``group: {name: value}`` or ``group.name: value``.
    """
    found: dict[str, Given] = {}
    with _opened(path) as loader:
        root = loader.get_single_node()
        if root is None:
            raise InputError(f"{path}: is empty, expected YAML with settings, such as 'seed: 1'")
        if not isinstance(root, yaml.MappingNode):
            kind = (
                "a list"
                if isinstance(root, yaml.SequenceNode)
                else shown(loader.construct_object(root))
            )
            raise InputError(
                f"{path}:{root.start_mark.line + 1}: found {kind}, expected settings, such as "
                "'seed: 1'"
            )
        settings: list[tuple[str, yaml.Node, yaml.Node]] = []
        for key, node in root.value:
            if isinstance(node, yaml.MappingNode):
                settings += [
                    (f"{key.value}.{inner.value}", inner, value) for inner, value in node.value
                ]
            else:
                settings.append((str(key.value), key, node))
        for name, key, node in settings:
            line = key.start_mark.line + 1
            if name in found:
                first = found[name].where.removesuffix(f": {name}").rpartition(":")[2]
                raise InputError(
                    f"{path}:{line}: duplicate setting {name!r} (first in line {first}); give each "
                    "setting once"
                )
            found[name] = Given(loader.construct_object(node, deep=True), f"{path}:{line}: {name}")
    if version := found.pop("format_version", None):
        check_version(*version)
    return found


def check_version(found: Any, where: str) -> None:
    """Raise InputError if ``format_version`` is not the version of files that this code writes."""
    if isinstance(found, bool) or found != CONFIG_VERSION:
        raise InputError(f"{where} is {shown(found)}, expected {CONFIG_VERSION}")


def config_path(name: str | Path) -> str:
    """Return the path of a config file.

    name: a path, which is returned unchanged, or the name of a ready-made config, such as
    ``finetune`` or ``presets/24gb``. Raises InputError for an unknown name. The message lists the
    names of the ready-made configs.
    """
    text = with_home(os.fspath(name))
    ready = {
        path.relative_to(READY).with_suffix("").as_posix(): str(path)
        for path in sorted(READY.rglob("*.yaml"))
    }
    if text in ready and (not os.path.lexists(text) or Path(text).is_dir()):
        return ready[text]  # also if a folder has this name
    # a path, although the file may not exist
    if os.path.lexists(text) or Path(text).suffix or Path(text).is_absolute() or ":" in text:
        return text
    raise InputError(
        f"{text}: no such file, and no ready-made config has this name; choose one of "
        f"{', '.join(ready)}"
    )

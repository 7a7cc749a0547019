"""Load settings: defaults, overridden by YAML files, overridden by options of the command line.

Every error names the file or the option, the setting, what was found, and what is allowed.
"""

import difflib
import math
import os
import re
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import Field, asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_origin

import msgspec
import yaml
from msgspec import inspect

from contaccum.config.declare import METHOD_SPECS, Steps
from contaccum.errors import InputError, library_errors

Options = TypeVar("Options")
READY = Path(__file__).parent.parent / "configs"
"""Folder of the ready-made configs."""
PATHS = ("DATA", "DIR", "FILE", "MODEL", "PATH", "RUN")
"""Placeholders in ``--help`` of settings that can be a path."""
ELSEWHERE = {
    "bf16": "run.precision",
    "fp16": "run.precision",
    "gc_p_chunk_size": "batch.micro_batch_size",
    "gradient_accumulation_steps": "batch.global_batch_size",
    "lr": "optim.learning_rate",
    "lr_scheduler_type": "optim.schedule",
    "model_name_or_path": "model.name",
    "num_train_epochs": "optim.epochs",
    "passage_max_len": "model.max_passage_length",
    "per_device_train_batch_size": "batch.global_batch_size",
    "query_max_len": "model.max_query_length",
    "train_group_size": "data.hard_negatives",
    "untie_encoder": "model.tie_towers",
    "warmup_ratio": "optim.warmup_steps",
}
"""Options of Tevatron and transformers -> the setting for it here, for hints."""
CONFIG_VERSION = 1
"""``format_version`` that a run writes into its config.yaml."""


class Given(NamedTuple):
    """Value of a setting, as the user gave it."""

    value: Any
    where: str
    """Place where the value was read and name of the setting, for messages: ``c.yaml: seed`` or
    ``--seed``."""


def load(
    kinds: Sequence[type],
    files: Sequence[str] = (),
    options: Mapping[str, str | Sequence[str] | bool] | None = None,
) -> list[Any]:
    """Return an instance of each dataclass in ``kinds``. A later file overrides an earlier one.

    files: paths of YAML files, or names of ready-made configs. options: name of a setting, such as
    ``bank.size`` -> its value as text; a list of texts for an option with several values; True for
    a switch. If two of the dataclasses have a setting with the same name, both get its value. A
    value that a later source contradicts, such as the ``replay.share`` of another method, is
    dropped with a warning. A warning is given for an option ``bank.*`` if the method has no bank.

    Raises InputError for a file that is not YAML, an unknown setting, or a value that is not
    allowed.
    """
    known: dict[str, Field] = {}
    for kind in reversed(kinds):
        known |= settings_of(kind)
    sources = [read_config_file(config_path(file)) for file in files]
    sources.append(_from_texts(known, options or {}, "--"))
    given: dict[str, Given] = {}
    for source in sources:
        _drop_contradicted(source, given)
        given |= source
    refuse_unknown(given, known)
    built = [_build(kind, given) for kind in kinds]
    # The bank of a config with another method may stay unused. Commands with more than one
    # dataclass choose methods themselves.
    source = sources[-1] if "method" in given else given
    bank = [each.where for name, each in source.items() if name.startswith("bank.")]
    if bank and len(kinds) == 1 and METHOD_SPECS[built[0].method].bank == "none":
        method = built[0].method
        warnings.warn(f"{', '.join(bank)}: no effect with method {method}", stacklevel=2)
    return built


def _drop_contradicted(source: Mapping[str, Given], given: dict[str, Given]) -> None:
    """Remove values of ``given`` that settings of ``source`` contradict.

    The config.yaml of a run, which may be the start of another one, has what was chosen for
    ``auto``.
    """
    method, before = source.get("methods", source.get("method")), given.get("method")
    if method and before and method.value != before.value:
        # a share below 1 makes grad_cache another method, so another method has its own share
        if "replay.share" in given and given["replay.share"].value != 1:
            _drop("replay.share", given, source, method)
        # with a size of auto, the tokens were chosen, for the other method
        size = given.get("batch.micro_batch_size")
        if size and size.value == "auto":
            _drop("batch.micro_batch_tokens", given, source, method)
        # the size of in_batch is always that of a step
        if before.value == "in_batch":
            _drop("batch.micro_batch_size", given, source, method)
    if size := source.get("batch.micro_batch_size"):
        _drop("batch.micro_batch_tokens", given, source, size)
    attention = source.get("model.attention")
    if attention and attention.value in ("eager", "sdpa"):
        _drop("model.unpad", given, source, attention)


def _drop(name: str, given: dict[str, Given], source: Mapping[str, Given], reason: Given) -> None:
    """Remove a value of ``given`` that ``reason``, a setting of ``source``, contradicts.

    Warn about it if ``source`` has no value of its own.
    """
    dropped = given.pop(name, None)
    if dropped and dropped.value not in (None, "auto") and name not in source:
        advice = f"give --{name} {shown(dropped.value)}"
        if dropped.where == name:  # of a config that ``with_changes`` changes
            advice = f"set it together with {reason.where}"
        warnings.warn(
            f"{dropped.where} {shown(dropped.value)} is not used, because {reason.where} is "
            f"{shown(reason.value)}; {advice} to use it",
            stacklevel=4,
        )


def settings_of(kind: Any) -> dict[str, Field]:
    """Return the settings of a dataclass: name, such as ``seed`` or ``bank.size`` -> field."""
    found: dict[str, Field] = {}
    # A dataclass lists the fields of its base classes first. Base classes here are kw_only, which
    # puts them last.
    for declared in sorted(fields(kind), key=lambda each: bool(each.kw_only)):
        if is_group(declared):
            inner = settings_of(declared.type)
            found |= {f"{declared.name}.{name}": each for name, each in inner.items()}
        else:
            found[declared.name] = declared
    return found


def is_group(declared: Field) -> bool:
    """Return whether a field is a group of settings, such as ``bank``."""
    return isinstance(declared.type, type) and is_dataclass(declared.type)


def _build(kind: Any, given: Mapping[str, Given], prefix: str = "") -> Any:
    """Return an instance of a dataclass. prefix: group of its settings, and a dot."""
    values: dict[str, Any] = {}
    for declared in fields(kind):
        name = prefix + declared.name
        if is_group(declared):
            values[declared.name] = _build(declared.type, given, f"{name}.")
        elif name in given:
            values[declared.name] = _with_home(declared, converted(declared.type, *given[name]))
    return kind(**values)


def _with_home(declared: Field, value: Any) -> Any:
    """Replace ``~`` at the start of a path by the home folder."""
    if declared.metadata.get("positional") or declared.metadata.get("metavar") in PATHS:
        if isinstance(value, str):
            return os.path.expanduser(value)
        if isinstance(value, tuple):
            return tuple(map(os.path.expanduser, value))
    return value


def flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert groups of settings into one mapping with names such as ``group.field``."""
    settings: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            settings |= {f"{key}.{name}": inner for name, inner in value.items()}
        else:
            settings[str(key)] = value
    return settings


def from_mapping(kind: type[Options], values: Mapping[str, Any], where: str = "") -> Options:
    """Build a dataclass from nested mappings, the inverse of ``asdict``.

    where: start of the error messages. Raises InputError for unknown settings.
    """
    given = {name: Given(value, where + name) for name, value in flat(values).items()}
    refuse_unknown(given, settings_of(kind))
    return _build(kind, given)


def with_changes(config: Options, changes: Mapping[str, Any]) -> Options:
    """Return a copy of ``config`` with changed settings.

    changes: name of a setting -> new value; a text is read as that of an option. Values of
    ``config`` that the changes contradict are dropped with a warning, as in ``load``.
    """
    values: Any = config
    given = {name: Given(value, name) for name, value in flat(asdict(values)).items()}
    changed = _from_texts(settings_of(type(config)), changes, "")
    refuse_unknown(changed, given)
    _drop_contradicted(changed, given)
    return _build(type(config), given | changed)


def check_values(options: Any, prefix: str = "") -> None:
    """Raise InputError for the first value that is not allowed, and for unknown attributes.

    Python code can assign anything to an attribute. Paths and NumPy numbers are converted.
    """
    for declared in fields(options):
        name, value = prefix + declared.name, getattr(options, declared.name)
        if is_group(declared):
            check_values(value, f"{name}.")
        else:
            # the dataclass may be frozen
            object.__setattr__(options, declared.name, converted(declared.type, value, name))
    known = settings_of(type(options))
    groups = {declared.name for declared in fields(options)}
    for key in vars(options).keys() - groups:
        raise InputError(f"{prefix}{key}: no such setting{hint(key, known, prefix)}")


def refuse_unknown(given: Mapping[str, Given], known: Collection[str]) -> None:
    """Raise InputError for the first name that is not in ``known``."""
    for name, (_, where) in given.items():
        if name not in known:
            raise InputError(f"{where}: no such setting{hint(name, known)}")


def hint(name: str, known: Collection[str], prefix: str = "") -> str:
    """Return the end of an error message about an unknown setting: the most similar settings.

    Empty if none is similar. known: names of the settings that exist. prefix: text before each
    setting, such as ``--``.
    """
    group, _, last = name.rpartition(".")
    last_words = {each: each.rpartition(".")[2] for each in known}
    near = [each for each in known if each == ELSEWHERE.get(last)]
    near = near or [each for each in known if each.startswith(f"{name}.")][:1]  # such as model
    near = near or sorted(each for each in known if last_words[each] == last)
    near = near or difflib.get_close_matches(name, known, n=1, cutoff=0.8)
    close = difflib.get_close_matches(last, set(last_words.values()), n=2, cutoff=0.7)
    near = near or sorted(each for each in known if last_words[each] in close)
    near = near or [each for each in known if each == group]  # such as model.name for model
    return f"; did you mean {' or '.join(prefix + each for each in near)}?" if near else ""


# Values


def converted(kind: Any, value: Any, where: str) -> Any:
    """Return ``value`` as the type of a setting.

    Raise InputError if the type does not allow the value.

    where: name of the setting, after the place where the value was read.
    """
    item = get_args(kind)[0] if get_origin(kind) is list else None
    if is_dataclass(item) and isinstance(value, list):  # such as data.mixture
        return [_item(item, each, f"{where}[{number}]") for number, each in enumerate(value)]
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    elif hasattr(value, "tolist"):  # a number or an array of NumPy or torch
        value = value.tolist()
    try:
        found = msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        message = str(error)  # such as: Expected `int` >= 1
        expected = message[0].lower() + message[1:].replace("`array`", "a list")
        if "`str" in message and isinstance(value, int | float):
            expected += "; write it in quotes"
        if isinstance(value, str) and "`array`" in message:
            expected += ", such as [a, b]"
        if kind == Steps:
            expected = "expected a number of steps, or a share of the steps below 1"
        if words := choices(kind):
            expected = f"expected {placeholder(kind)}"
            if near := difflib.get_close_matches(str(value), words, n=1):
                expected += f"; did you mean {near[0]}?"
        raise InputError(f"{where} is {shown(value)}, {expected}") from None
    for number in found if isinstance(found, list | tuple) else [found]:
        if isinstance(number, float) and not math.isfinite(number):
            raise InputError(f"{where} is {found}, expected a finite number")
        if isinstance(number, int) and abs(number) >= 2**63:
            raise InputError(f"{where} is {found}, expected a number below 2**63")
    return found


def _item(kind: Any, item: Any, where: str) -> Any:
    if isinstance(item, kind):
        check_values(item, f"{where}.")
        return item
    if not isinstance(item, dict):
        known = ", ".join(settings_of(kind))
        raise InputError(f"{where} is {shown(item)}, expected a mapping with {known}")
    return from_mapping(kind, item, f"{where}.")


def shown(value: Any) -> str:
    """Return a value as an error message shows it: ``'text'``, ``true``, ``null``."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return repr(value)[:100]


def choices(kind: Any) -> list[str]:
    """Return the allowed values of a Literal, also of one that may be None."""
    kinds = (kind, *get_args(kind))
    return [choice for each in kinds if get_origin(each) is Literal for choice in get_args(each)]


def placeholder(kind: Any) -> str:
    """Return a short description of the values that a type allows, such as ``N|auto``."""
    names = {"BoolType": "true|false", "IntType": "N", "FloatType": "X", "ListType": "LIST"}
    name = names.get(type(_alternatives(kind)[0]).__name__, "")
    allowed = choices(kind)
    if name:
        return "|".join([name, *allowed])
    return "{" + ",".join(allowed) + "}" if allowed else "TEXT"


def range_of(kind: Any) -> str:
    """Describe the range of a number, such as ``at least 1``; empty without a range."""
    for each in _alternatives(kind):
        if isinstance(each, inspect.IntType | inspect.FloatType):
            words = {
                "at least": each.ge,
                "more than": each.gt,
                "at most": each.le,
                "less than": each.lt,
                "a multiple of": each.multiple_of,
            }
            bounds = [f"{word} {bound}" for word, bound in words.items() if bound is not None]
            return " and ".join(bounds)
    return ""


def _alternatives(kind: Any) -> Sequence[inspect.Type]:
    info = inspect.type_info(kind)
    return info.types if isinstance(info, inspect.UnionType) else (info,)


# The command line


def _from_texts(
    known: Mapping[str, Field], texts: Mapping[str, Any], prefix: str
) -> dict[str, Given]:
    """Return the settings that options give as texts. prefix: text before the names, or ``--``."""
    given = {}
    for name, text in texts.items():
        is_text = isinstance(text, str) and name in known
        given[name] = Given(_value(known[name], name, text) if is_text else text, prefix + name)
    return given


def _value(declared: Field, name: str, text: str) -> Any:
    """Return the value of an option. Text stays text; for other types, it is read as YAML."""
    kind = declared.type
    if kind == list[str] and re.fullmatch(r"[\w.-]+", text):
        return [text]  # a single word needs no brackets
    if kind is str or (str in get_args(kind) and get_origin(kind) is not list):
        # null means None for a setting in a group, as in a config file; elsewhere it is a text
        return None if text == "null" and "." in name and kind is not str else text
    try:
        value = _Loader(text).get_single_data()
    except (yaml.YAMLError, ValueError, RecursionError):
        return text
    # also an empty text, as of --seed "$SEED" without SEED, and a comment would be no value in YAML
    return text if value is None and text.strip() not in ("null", "~") else value


# YAML files


_OWN = ("timestamp", "int", "float")
"""Types that YAML 1.1 reads in unusual ways: 010 is 8, 1:30 is 90, and 1e-3 is a text."""


class _Loader(yaml.SafeLoader):
    """Safe loader that refuses duplicate keys, reads numbers as people do, and dates as texts."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML declares it
        first: [(tag, pattern) for tag, pattern in resolvers if tag.rpartition(":")[2] not in _OWN]
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

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        return int(self.construct_scalar(node))


class Dumper(yaml.SafeDumper):
    """Dumper that writes a text in quotes if YAML or our loader would read something else."""


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
for _kind in (_Loader, Dumper):
    _kind.add_implicit_resolver(
        "tag:yaml.org,2002:int", re.compile(r"[-+]?[0-9]+(_[0-9]+)*$"), list("-+0123456789")
    )
    _kind.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(
            r"[-+]?([0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)([eE][-+]?[0-9]+)?$"
            r"|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$"
        ),
        list("-+0123456789."),
    )


def read_yaml(path: str) -> dict[str, Any]:
    """Return the content of a YAML file that maps names to values."""
    with (
        library_errors(
            f"{path}: not usable YAML", OSError, ValueError, yaml.YAMLError, RecursionError
        ),
        open(path, encoding="utf-8-sig") as file,
    ):
        values = _Loader(file).get_single_data()
    if not isinstance(values, dict):
        raise InputError(f"{path}: found {shown(values)}, expected settings, such as 'seed: 1'")
    return values


def read_config_file(path: str) -> dict[str, Given]:
    """Return the settings of a YAML file: name -> value and place, without ``format_version``.

    A setting is written ``group: {name: value}`` or ``group.name: value``.
    """
    content = read_yaml(path)
    values = flat(content)
    grouped = flat({name: value for name, value in content.items() if isinstance(value, Mapping)})
    if twice := grouped.keys() & content.keys():
        raise InputError(f"{path}: {min(twice)} is set twice, in its group and by its full name")
    found = {name: Given(value, f"{path}: {name}") for name, value in values.items()}
    if version := found.pop("format_version", None):
        check_version(*version)
    return found


def check_version(found: Any, where: str) -> None:
    """Raise InputError if ``format_version`` is not the version of files that this code writes."""
    if found != CONFIG_VERSION:
        raise InputError(f"{where} is {shown(found)}, expected {CONFIG_VERSION}")


def config_path(name: str | Path) -> str:
    """Return the path of a config file.

    name: a path, or the name of a ready-made config, such as ``finetune`` or ``presets/24gb``. A
    file with this name has priority.
    """
    path = os.path.expanduser(name)
    ready = {
        path.relative_to(READY).with_suffix("").as_posix(): str(path)
        for path in sorted(READY.rglob("*.yaml"))
    }
    if path in ready and not os.path.isfile(path):
        return ready[path]
    if not os.path.lexists(path):
        near = difflib.get_close_matches(path, ready, n=1)
        near = near or [each for each in ready if each.endswith(f"/{path}")]
        advice = f"did you mean {' or '.join(near)}?" if near else f"they are in {READY}"
        raise InputError(f"{path}: no such file, and no ready-made config has this name; {advice}")
    return path

"""Find and check YAML files of settings. Files that are too large or contain anything but settings are refused."""

import os
import re
from collections.abc import Collection, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from contaccum.config.declare import MAX_DIGITS
from contaccum.config.spellings import is_ignored, refuse_removed, unknown
from contaccum.errors import InputError

MAX_BYTES = 1 << 20
"""Maximum number of bytes in a file. A file with all settings has about 2,000 bytes."""
MAX_NODES = 10_000
"""Maximum number of values in a file. There are about 100 settings. Values behind a YAML alias are counted at every use."""
MAX_DEPTH = 20
READY = Path(__file__).parent.parent / "configs"
"""Folder of the ready-made configs."""
CONFIG_VERSION = 1
"""``format_version`` that a run writes into its config.yaml. This code reads this version and older versions."""
MERGE = "tag:yaml.org,2002:merge"
_MERGED = re.compile(r"\[<<\](\[\d+\])?")  # part of the names of merged settings (``<<: *name``)
_IMPORTING = {"class_path", "init_args", "config"}  # keys for which jsonargparse imports a class or reads another file


class ConfigText(NamedTuple):
    """Settings of a file, in the form that jsonargparse reads."""

    text: str
    """YAML text, without settings of earlier versions that no longer have an effect."""
    places: dict[str, str]
    """Setting -> ``file:line`` where it was read."""


def config_path(name: str | Path) -> str:
    """Return the path of a config file.

    name: a path, which is returned unchanged, or the name of a ready-made config, such as ``finetune`` or ``presets/24gb``.
    Raises InputError for an unknown name. The message lists the names of the ready-made configs.
    """
    text = os.fspath(name)
    ready = {path.relative_to(READY).with_suffix("").as_posix(): str(path) for path in sorted(READY.rglob("*.yaml"))}
    if text in ready and Path(text).is_dir():  # such as the folder that `contaccum data demo demo` wrote
        return ready[text]
    # a path, although the file may not exist
    if os.path.lexists(text) or Path(text).suffix or Path(text).is_absolute() or ":" in text:
        return text
    if text not in ready:
        raise InputError(
            f"{text}: no such file, and no ready-made config has this name; choose one of {', '.join(ready)}"
        )
    return ready[text]


def check_version(found: Any, where: str) -> None:
    """Raise InputError if this version of contaccum cannot read the ``format_version`` found in a config file."""
    if str(found) not in map(str, range(1, CONFIG_VERSION + 1)):
        raise InputError(f"{where}: format_version is {found}; this version of contaccum reads up to {CONFIG_VERSION}")


def check_config_file(path: str | Path, text: str, known: Collection[str] | None) -> ConfigText:
    """Check the text of a YAML file, and return its settings, without ``format_version``.

    known: names of the allowed settings. None allows any names. A setting that no longer exists is ignored if it has
    its old default (see ``spellings.REMOVED``). With any other value, it is a fault.

    Raises InputError, with file and line, for the first of these faults: a setting that is not in ``known``, is given twice or
    was removed; a group that is not a mapping; a YAML tag; a key that jsonargparse does not read as a setting, such
    as class_path; too many values; values that are nested too deeply.
    """
    root, found = checked_nodes(path, text)
    lines: dict[str, int] = {}
    for name, parent, key, value in found:
        if name in lines:
            raise _error(path, key, f"duplicate setting {name!r} (first in line {lines[name]}); give each setting once")
        lines[name] = key.start_mark.line + 1
        if key.tag == MERGE:
            continue
        name = _MERGED.sub("", name).lstrip(".")
        is_group = any(each.startswith(f"{name}.") for each in known or ())
        if is_group and not isinstance(value, yaml.MappingNode):
            raise _error(path, value, f"{name} is {_kind(value)}, expected a group of settings")
        text = value.value if isinstance(value, yaml.ScalarNode) else _kind(value)
        plain = {"true": True, "false": False}.get(text.lower(), text)
        place = f"{path}:{key.start_mark.line + 1}"
        if name == "format_version":
            check_version(text, place)
        elif not is_ignored(name, plain):
            refuse_removed(f"{place}: ", name, plain)
            if "[" not in name and known is not None and name not in known and not is_group:
                raise _error(path, key, f"{name}: no such setting{unknown(name, text, known)}")
            continue
        parent.value = [pair for pair in parent.value if pair[0] is not key]
    merged_first = sorted(lines, key=lambda name: "<<" not in name)  # other settings override merged ones
    places = {_MERGED.sub("", name).lstrip("."): f"{path}:{lines[name]}" for name in merged_first}
    # jsonargparse would take a text of one key without a value, such as "seed:", for the name of a file
    return ConfigText(f"# settings\n{yaml.serialize(root)}", places)


def checked_nodes(path: str | Path, text: str) -> tuple[yaml.MappingNode, list[tuple[str, Any, Any, Any]]]:
    """Return the root of a YAML file of settings, and all its values (see ``_nodes``).

    Raises InputError for a file without settings, a YAML tag, too many values, or values that are nested too deeply.
    """
    root = _parsed(path, text)
    if root is None:
        raise InputError(f"{path}: is empty, expected YAML with settings")
    if not isinstance(root, yaml.MappingNode):
        raise _error(path, root, f"found {_kind(root)}, expected settings, such as 'seed: 1'")
    found = list(islice(_nodes(path, root), MAX_NODES + 1))
    if len(found) > MAX_NODES:
        raise _error(path, root, f"has more than {MAX_NODES} values, so it cannot be a file of settings")
    return root, found


def _parsed(path: str | Path, text: str) -> yaml.Node | None:
    try:
        return yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise InputError(f"{path}:{line}: not YAML ({error.problem}), expected YAML with settings") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        found = " ".join(str(error).split())
        raise InputError(f"{path}: not usable YAML ({found}), expected YAML with settings") from error


def _nodes(
    path: str | Path, parent: yaml.Node, prefix: str = "", depth: int = 0
) -> Iterator[tuple[str, Any, Any, Any]]:
    """Yield (name of the setting, container, key, value) for every value in ``parent``, also for nested values.

    Container, key and value are YAML nodes. The container is the mapping or list that directly contains the value. The key of a
    list item is the item itself. If an alias is used several times, its values are yielded each time.
    """
    items = parent.value if isinstance(parent, yaml.MappingNode) else [(each, each) for each in parent.value]
    for number, (key, value) in enumerate(items):
        name = f"{prefix}[{number}]"
        if isinstance(parent, yaml.MappingNode):
            if not isinstance(key, yaml.ScalarNode):
                raise _error(path, key, f"found {_kind(key)} as a key, expected the name of a setting")
            if (last := key.value.rpartition(".")[2]) in _IMPORTING or last.startswith("__"):
                raise _error(path, key, f"found the key {key.value!r}, which is not a setting; remove it")
            name = f"{prefix}[<<]" if key.tag == MERGE else f"{prefix}.{key.value}".lstrip(".")
        if not value.tag.startswith("tag:yaml.org,2002:") or "python" in value.tag:
            raise _error(path, value, f"found the tag {value.tag!r}, expected plain values")
        if value.tag.endswith(":int") and len(value.value) > MAX_DIGITS:
            raise _error(path, value, f"{name} has {len(value.value)} digits, expected at most {MAX_DIGITS}")
        if depth > MAX_DEPTH:
            raise _error(path, value, f"values are nested deeper than {MAX_DEPTH} levels, expected settings")
        yield name, parent, key, value
        if not isinstance(value, yaml.ScalarNode):
            yield from _nodes(path, value, name, depth + 1)


def _kind(node: yaml.Node) -> str:
    if isinstance(node, yaml.ScalarNode):
        return repr(node.value[:40])
    return "a list" if isinstance(node, yaml.SequenceNode) else "a mapping"


def _error(path: str | Path, node: yaml.Node, sentence: str) -> InputError:
    return InputError(f"{path}:{node.start_mark.line + 1}: {sentence}")

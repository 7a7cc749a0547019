"""What can be wrong with a YAML file of settings before any setting is looked at. Imports no torch."""

import re
from collections.abc import Collection
from pathlib import Path

import yaml

from contaccum.errors import InputError

MAX_NODES = 10_000
"""Values in a file, aliases counted as often as they stand: ten times what all settings need."""

MAX_DEPTH = 20
_LEADING_OUT = (
    "class_path",
    "init_args",
    "config",
)  # by these jsonargparse imports what a file names, or reads another


def check_config_file(path: str | Path, groups: Collection[str]) -> None:
    """Refuse a file that is not a mapping of settings, in a sentence that names file and line.

    Refused too: a key that stands twice (YAML would take the last), aliases that unfold to more than ``MAX_NODES`` values,
    tags and keys that ask for anything but plain values, and a member of ``groups`` that is not itself a mapping.
    """
    root = _parsed(path)
    if root is None:
        raise InputError(f"{path}: is empty, expected YAML with settings")
    if not isinstance(root, yaml.MappingNode):
        raise _error(path, root, f"found {_kind(root)}, expected settings, such as 'seed: 1'")
    _Walk(path).size(root)
    for key, value in root.value:
        if key.value in groups and not isinstance(value, yaml.MappingNode):
            raise _error(path, value, f"{key.value} is {_kind(value)}, expected a group of settings")


def _parsed(path: str | Path) -> yaml.Node | None:
    try:
        return yaml.compose(Path(path).read_text(encoding="utf-8-sig"), Loader=yaml.SafeLoader)
    except FileNotFoundError as error:
        raise InputError(f"{path}: no such file, expected YAML with settings") from error
    except IsADirectoryError as error:
        raise InputError(f"{path}: is a folder, expected a file of YAML with settings") from error
    except OSError as error:
        raise InputError(f"{path}: could not be read ({error.strerror or error})") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: byte {error.start} is not UTF-8, expected UTF-8 text") from error
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise InputError(f"{path}, line {line}: not YAML ({error.problem}), expected YAML with settings") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: not usable YAML ({_one_line(error)}), expected YAML with settings") from error


class _Walk:
    def __init__(self, path: str | Path) -> None:
        self.path = path
        self.sizes: dict[int, int] = {}
        self.open: set[int] = set()

    def size(self, node: yaml.Node) -> int:
        """Values in a node, those behind aliases counted wherever they stand."""
        if len(self.open) > MAX_DEPTH:
            raise _error(self.path, node, f"values are nested deeper than {MAX_DEPTH} levels, expected settings")
        if id(node) in self.open:
            raise _error(self.path, node, "an alias stands inside what it names, expected plain values")
        if id(node) not in self.sizes:
            self.open.add(id(node))
            self.sizes[id(node)] = 1 + sum(map(self.size, self._children(node)))
            self.open.remove(id(node))
        if self.sizes[id(node)] > MAX_NODES:
            raise _error(self.path, node, f"holds more than {MAX_NODES} values, expected settings")
        return self.sizes[id(node)]

    def _children(self, node: yaml.Node) -> list[yaml.Node]:
        if not node.tag.startswith("tag:yaml.org,2002:") or "python" in node.tag:
            raise _error(self.path, node, f"found the tag {node.tag!r}, expected plain values")
        if isinstance(node, yaml.SequenceNode):
            return node.value
        if isinstance(node, yaml.MappingNode):
            seen = set()
            for key, _ in node.value:
                if not isinstance(key, yaml.ScalarNode):
                    raise _error(self.path, key, f"found {_kind(key)} as a key, expected the name of a setting")
                if key.value in seen:
                    raise _error(self.path, key, f"{key.value!r} stands a second time, expected every setting once")
                if key.value.rpartition(".")[2] in _LEADING_OUT:
                    raise _error(self.path, key, f"found the key {key.value!r}, expected plain values")
                seen.add(key.value)
            return [value for _, value in node.value]
        return []


def _kind(node: yaml.Node) -> str:
    if isinstance(node, yaml.ScalarNode):
        return repr(node.value[:40])
    return "a list" if isinstance(node, yaml.SequenceNode) else "a mapping"


def _error(path: str | Path, node: yaml.Node, sentence: str) -> InputError:
    return InputError(f"{path}, line {node.start_mark.line + 1}: {sentence}")


def _one_line(error: Exception) -> str:
    return re.sub(r"\s+", " ", str(error))

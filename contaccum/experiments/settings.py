"""Read the variants that ``contaccum compare`` trains: methods, fixed and tuned values."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from contaccum.config import METHOD_SPECS, affects, train_settings
from contaccum.config.load import config_path, converted, flat, read_yaml
from contaccum.errors import InputError

Values = tuple[tuple[str, str], ...]
"""Pairs (name of a setting such as bank.size, value as text)."""


@dataclass(frozen=True)
class Variant:
    """One entry of a comparison: a method, fixed values of settings, and candidates.

    A candidate is a combination of values of the settings to tune. Tuning chooses one candidate. A
    single candidate needs no tuning.
    """

    label: str
    method: str
    fixed: Values = ()
    candidates: tuple[Values, ...] = ((),)

    def changes(self, candidate: Values) -> Values:
        """Return the method, the fixed values and the values of one candidate."""
        return (("method", self.method), *self.fixed, *candidate)


def named(first: str, values: Values) -> str:
    """Join ``first`` and the values into a name, such as ``cont_accum-size=64-seed=1``."""
    return "-".join(
        [first, *(f"{name.partition('.')[2] or name}={value}" for name, value in values)]
    )


def read_names(option: str, text: str, known: Iterable[str]) -> list[str]:
    """Return the names in a comma-separated text.

    Raise InputError for a name that ``known`` lacks.
    """
    names = list(dict.fromkeys(part.strip() for part in text.split(","))) if text else []
    for name in names:
        if name not in known:
            raise InputError(f"{option}: {name!r} is unknown; choose from {', '.join(known)}")
    return names


def read_values(option: str, entries: tuple[str, ...]) -> dict[str, list[str]]:
    """Read entries of the form ``GROUP.FIELD=v1,v2``. Return a dictionary: setting -> values."""
    found: dict[str, list[str]] = {}
    for entry in entries:
        name, _, values = entry.partition("=")
        _check_name(f"{option}: {entry!r}", name, tuned=option == "--tune")
        if name in found or not values.strip():
            raise InputError(
                f"{option}: {entry!r}; expected GROUP.FIELD=v1,v2, and each setting only once"
            )
        # a comma inside square brackets does not split; a prefix may be empty, or end with a space
        parts = re.split(r",(?![^\[]*\])", values)
        found[name] = list(dict.fromkeys(part.lstrip() for part in parts))
    return found


# settings of the score that tuning compares
OF_THE_SCORE = ("data.dev", "data.dev_split", "data.dev_passages", "run.metric")


def _check_name(where: str, name: str, tuned: bool) -> None:
    if name in ("seed", "method"):
        raise InputError(f"{where}: {name} is not varied here; use --{name}s")
    if name not in train_settings() or not any(affects(name, method) for method in METHOD_SPECS):
        raise InputError(
            f"{where}: {name!r} is not a setting that changes the trained model; use one such as "
            "bank.size"
        )
    if tuned and name in OF_THE_SCORE:
        raise InputError(
            f"{where}: {name!r} changes what is measured, so tuning would choose the easiest "
            "measure; set it to one value"
        )


def variants(
    methods: list[str], varied: Mapping[str, list[str]], tuned: Mapping[str, list[str]]
) -> list[Variant]:
    """Return one Variant for each method and each combination of the varied values.

    A variant has no value for a setting that its method does not read.
    """
    for name in (*varied, *tuned):
        if not any(affects(name, method) for method in methods):
            raise InputError(f"{name} has no effect with {', '.join(methods)}; do not vary it")
    return [
        Variant(named(method, values), method, values, combinations(tuned, method))
        for method in methods
        for values in combinations(varied, method)
    ]


def combinations(values: Mapping[str, list[str]], method: str | None) -> tuple[Values, ...]:
    """Return all combinations of the values, without the settings that ``method`` does not read.

    method: name of a method, or None for the untrained encoder.
    """
    used = [
        [(name, value) for value in each] for name, each in values.items() if affects(name, method)
    ]
    return tuple(product(*used))


def read_settings(path: str, tuned: Mapping[str, list[str]]) -> list[Variant]:
    """Read the entries of a comparison from a YAML file that maps names to settings.

    In an entry, the key ``method`` is the method (default: the name of the entry), and the key
    ``tune`` maps settings to lists of values to try. The other keys are settings with fixed values.
    tuned: setting -> values to try. An entry without ``tune`` uses them for each setting that it
    does not fix.
    """
    path = config_path(path)
    entries = []
    for label, row in read_yaml(path).items():
        where = f"{path}: {label}"
        if not isinstance(row, dict):
            raise InputError(f"{where} is {row!r}; it must be a mapping of settings")
        method, tune = row.pop("method", label), row.pop("tune", None)
        row = flat(row)
        if not isinstance(method, str) or method not in METHOD_SPECS:
            raise InputError(
                f"{where}: method is {method!r}; choose from {', '.join(METHOD_SPECS)}"
            )
        own = tune is not None
        if not own:
            tune = {name: values for name, values in tuned.items() if name not in row}
        if isinstance(tune, dict):
            tune = flat(tune)
        if not isinstance(tune, dict) or not all(
            isinstance(values, list) and values for values in tune.values()
        ):
            raise InputError(
                f"{where}: tune is {tune!r}; expected settings with lists of values, such as "
                "{bank.size: [64, 128]}"
            )
        if label in ("bm25", "untrained"):
            raise InputError(f"{where}: this is the name of a baseline; choose another name")
        for name in (*row, *tune):
            _check_name(where, name, tuned=name in tune)
            if name in row and name in tune:
                raise InputError(
                    f"{where}: {name!r} has a value and is tuned; remove one of the two"
                )
        # of several settings to tune, a method may read only some
        idle = [name for name in row if not affects(name, method)]
        if own and not any(affects(name, method) for name in tune):
            idle += tune
        if idle:
            raise InputError(f"{where}: {idle[0]} has no effect with {method}; leave it out")
        lists = {name: [value] for name, value in row.items()} | (tune if own else {})
        for name, values in lists.items():
            for value in values:
                converted(train_settings()[name].type, value, f"{where}: {name}")
        fixed = tuple((name, _text(value)) for name, value in row.items())
        tried = {name: [_text(value) for value in values] for name, values in tune.items()}
        entries.append(Variant(str(label), method, fixed, combinations(tried, method)))
    if not entries:
        raise InputError(
            f"{path}: has no entries; expected names with settings, such as: grad_cache: "
            "{replay.share: 0.5}"
        )
    return entries


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)

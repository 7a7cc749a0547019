"""What a comparison consists of: methods, varied settings and seeds, as runs with names."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from contaccum.config import TRAITS, TrainConfig, validate
from contaccum.errors import InputError
from contaccum.study.runs import NAMES, matters
from contaccum.training.setup import flat

BASELINES = ("bm25", "untrained")
RATE = "optim.learning_rate"
Configure = Callable[[Mapping[str, str]], TrainConfig]
"""The config with some settings, by name, changed to what the given text says."""


@dataclass(frozen=True)
class Planned:
    """One run, or one baseline row."""

    name: str
    kind: str
    """``run``, or one of BASELINES."""
    config: TrainConfig

    @property
    def folder(self) -> Path:
        return Path(self.config.output_dir)


@dataclass(frozen=True)
class Setting:
    """A method with the values of what is varied, by name."""

    method: str
    values: tuple[tuple[str, str], ...]

    @property
    def name(self) -> str:
        return "-".join([self.method, *(f"{name.partition('.')[2]}={value}" for name, value in self.values)])

    def with_rate(self, rate: str) -> "Setting":
        return replace(self, values=(*self.values, (RATE, rate)))


def comma_list(text: str) -> list[str]:
    """The parts of a text between its commas, those inside of brackets left alone."""
    return [part.strip() for part in re.split(r",(?![^\[]*\])", text) if part.strip()]


def read_methods(text: str, own: str) -> list[str]:
    """The methods of a list separated by commas, or the config's ``own``."""
    methods = list(dict.fromkeys(comma_list(text))) or [own]
    for method in methods:
        if method not in TRAITS:
            raise InputError(f"--methods has {method!r}, expected some of {', '.join(TRAITS)}")
    return methods


def read_baselines(text: str) -> list[str]:
    names = [] if text == "none" else comma_list(text)
    for name in names:
        if name not in BASELINES:
            raise InputError(f"--baselines has {name!r}, expected some of {', '.join(BASELINES)}, or none")
    return names


def read_varied(entries: tuple[str, ...]) -> dict[str, list[str]]:
    """``GROUP.FIELD=v1,v2`` as names with their values."""
    varied: dict[str, list[str]] = {}
    for entry in entries:
        name, _, values = entry.partition("=")
        if name not in NAMES or not matters(name, "cont_accum"):
            raise InputError(f"--vary has {entry!r}, expected GROUP.FIELD=v1,v2 of a setting that changes a result")
        if name in varied or not comma_list(values):
            raise InputError(f"--vary has {entry!r}, expected each setting once, with its values separated by commas")
        varied[name] = list(dict.fromkeys(comma_list(values)))
    return varied


def settings(methods: list[str], varied: Mapping[str, list[str]]) -> list[Setting]:
    """Every combination, once: a setting that a method does not read is not varied with it."""
    found = []
    for method in methods:
        own = {name: values for name, values in varied.items() if matters(name, method)}
        found += [Setting(method, tuple(zip(own, values, strict=True))) for values in product(*own.values())]
    return found


def planned_run(setting: Setting, seed: int, configure: Configure, output: Path) -> Planned:
    """A setting with a seed; the config's rules are checked."""
    name = f"{setting.name}-seed{seed}"
    config = _configured(configure, output, name, {"method": setting.method, "seed": str(seed), **dict(setting.values)})
    try:
        validate(config)
    except InputError as error:
        raise InputError(f"{name}: {error}") from None
    return Planned(name, "run", config)


def refuse_same(runs: Iterable[Planned]) -> None:
    """InputError where two runs have the same settings under two names, such as a rate of 1e-3 and one of 0.001."""
    names: dict[str, str] = {}
    for run in runs:
        settings = repr({**flat(asdict(run.config)), "output_dir": ""})
        if names.setdefault(settings, run.name) != run.name:
            raise InputError(f"{run.name} and {names[settings]} are one run, expected every value once")


def planned_baselines(
    names: list[str], varied: Mapping[str, list[str]], configure: Configure, output: Path
) -> list[Planned]:
    """BM25 once, the untrained encoder once for each combination of settings that it reads."""
    found = []
    for kind in names:
        own = {name: values for name, values in varied.items() if kind == "untrained" and matters(name, None)}
        for values in product(*own.values()):
            chosen = dict(zip(own, values, strict=True))
            name = "-".join([kind, *(f"{key.partition('.')[2]}={value}" for key, value in chosen.items())])
            found.append(Planned(name, kind, _configured(configure, output, name, chosen)))
    return found


def identity(kind: str, config: TrainConfig) -> dict[str, Any]:
    """What a baseline's figures depend on besides the test data; a trained run keeps its whole config."""
    if kind != "untrained":
        return {}
    settings = {name: value for name, value in flat(asdict(config)).items() if matters(name, None)}
    data: dict[str, Any] = {"data.train": config.data.train}
    if config.data.mixture:
        data["data.mixture"] = [[each.train, each.split] for each in config.data.mixture]
    return {"settings": {**settings, **data, "seed": config.seed}}


def _configured(configure: Configure, output: Path, name: str, changes: Mapping[str, str]) -> TrainConfig:
    """The config of a run of that name, which becomes a folder's: letters, digits and a few signs."""
    folder = output / "runs" / re.sub(r"[^A-Za-z0-9._=+-]", "_", name)
    return replace(configure(changes), output_dir=str(folder), resume=True)

"""Declare settings: default, range, unit, training methods that read the setting, and whether a resumed run may change it."""

import math
import operator
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, Field, field, fields, is_dataclass
from types import UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

from contaccum.errors import InputError

MethodName = Literal["in_batch", "grad_accum", "grad_cache", "passage_bank", "cont_accum", "cont_cache"]


class MethodSpec(NamedTuple):
    """Properties of a training method that are needed before torch is imported."""

    bank: Literal["none", "passages", "pairs"]
    """Content of the method's bank."""
    two_pass: bool = False
    """Whether the method encodes each text twice: first for the loss of the full step, then for the gradients."""
    whole: bool = False
    """Whether a step is always a single micro-batch."""

    @property
    def pushes_whole_step(self) -> bool:
        return self.two_pass and self.bank != "none"

    def cost(self, pairs: int, micro_batch_size: int | None, replay_share: float = 1.0) -> float:
        """Return the mean cost of one pair in a training step, in forward passes.

        A backward pass costs as much as 2 forward passes. So a pair costs 3 with one pass over the
        texts, and 4 with two. Without partial replay, the last micro-batch of a step keeps its
        graph from the first pass, which saves its second forward pass.

        pairs: pairs in one step (N). micro_batch_size: pairs in one micro-batch (B), or None for
        micro-batches by tokens: their last size is not known, so nothing is subtracted.
        replay_share: share of the texts that the second pass encodes again, with gradients.
        """
        if not self.two_pass:
            return 3.0
        if replay_share < 1:
            return 1 + 3 * replay_share
        return 4 - (micro_batch_size or 0) / pairs


METHOD_SPECS: dict[str, MethodSpec] = {
    "in_batch": MethodSpec("none", whole=True),
    "grad_accum": MethodSpec("none"),
    "grad_cache": MethodSpec("none", two_pass=True),
    "passage_bank": MethodSpec("passages"),
    "cont_accum": MethodSpec("pairs"),
    "cont_cache": MethodSpec("pairs", two_pass=True),
}


_BOUNDS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "at_least": ("at least", operator.ge),
    "above": ("more than", operator.gt),
    "at_most": ("at most", operator.le),
    "below": ("less than", operator.lt),
    "multiple_of": ("a multiple of", lambda value, bound: value % bound == 0),
}
"""Name of a limit in SettingSpec -> (phrase for messages, function that returns whether a value is within the limit)."""


class SettingSpec(NamedTuple):
    """Metadata of one setting.

    Type and default are in the dataclass field. The help text is the docstring below the field.
    """

    unit: str = ""
    """Name of the unit, in the plural. `--help` shows it as the placeholder of the value."""
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    multiple_of: int | None = None
    methods: Literal["all", "bank", "micro_batches", "two_pass"] = "all"
    """Methods that read the setting: all methods (all), those with a bank (bank), with several micro-batches in a step
    (micro_batches), or with two passes (two_pass)."""
    resume: Literal["free", "ask", "never"] = "ask"
    """Whether a resumed run may change the setting: always (free), only with `allow_changes` (ask), or never."""
    training_only: bool = False
    """Whether a model setting has an effect only in training. The vectors of the encoder before training do not depend on it."""
    flag: bool = False
    """Whether the option is a switch without a value. Settings in a group, such as ``data.strict``, always take a value."""
    positional: bool = False
    """Whether the command line gives the value by its position, without an option name."""
    required: bool = False
    """Whether the command line must give the option, even if the dataclass field has a default."""
    several: bool = False
    """Whether the option takes several values on the command line."""
    needs: str = ""
    """Condition that must hold for the option to have an effect. ``NAME``: option NAME is set. ``NAME VALUE``: NAME has this
    value."""
    unused_with: tuple[str, ...] = ()
    """Conditions, written as in ``needs``. The option has no effect if one of them holds. The ``unused_with`` of a dataclass
    applies to all fields of the dataclass."""
    used_with: str = ""
    """Condition, written as in ``needs``. If this condition holds, ``needs`` and ``unused_with`` are ignored."""
    metavar: str = ""
    """Placeholder of the value in `--help`. Default: the unit."""

    def reads(self, method: str) -> bool:
        """Return whether a method reads the setting."""
        spec = METHOD_SPECS[method]
        read = {"all": True, "bank": spec.bank != "none", "micro_batches": not spec.whole, "two_pass": spec.two_pass}
        return read[self.methods]

    def range(self) -> str:
        """Describe the range of allowed values, such as ``at least 1`` or ``from 0 to 1``.

        Return an empty string if there is no limit.
        """
        if self.at_least is not None and self.at_most is not None:
            return f"from {self.at_least} to {self.at_most}"
        bounds = [(words, getattr(self, name)) for name, (words, _) in _BOUNDS.items()]
        return " and ".join(f"{words} {bound}" for words, bound in bounds if bound is not None)

    def allows(self, value: float) -> bool:
        """Return whether a number is in the range of allowed values."""
        bounds = [(holds, getattr(self, name)) for name, (_, holds) in _BOUNDS.items()]
        return all(bound is None or holds(value, bound) for holds, bound in bounds)


LIMITS = {
    "pairs": 10**7, "entries": 10**9, "layers": 1000, "dimensions": 10**5, "minutes": 10**6, "processes": 4096, "epochs": 10**6,
    "seeds": 1000, "runs": 1000, "tokens": 10**9,
}  # fmt: skip
"""Unit -> maximum value of a setting with this unit. Larger values are refused, because no machine can handle them."""
MAX_NUMBER = 10**12
"""Maximum value of a setting that has no ``at_most`` and whose unit is not in LIMITS."""
MAX_DIGITS = 60
"""Maximum number of digits of a number on the command line or in a config file."""
MAX_TEXT = 10_000
"""Maximum number of characters in the value of a setting."""


def setting(default: Any = MISSING, *, factory: Any = MISSING, kw_only: Any = MISSING, **spec: Any) -> Any:
    """Declare a field of an options dataclass.

    factory: function that returns a mutable default. spec: fields of SettingSpec.
    """
    metadata = {"setting": SettingSpec(**spec)}
    return field(default=default, default_factory=factory, kw_only=kw_only, metadata=metadata)


def spec_of(declared: Field) -> SettingSpec:
    """Return the metadata of a dataclass field. A field that was declared without ``setting`` has no limits."""
    return declared.metadata.get("setting", SettingSpec())


def default_of(declared: Field) -> Any:
    """Return the default of a dataclass field, or ``dataclasses.MISSING`` if the field has none."""
    return declared.default if declared.default_factory is MISSING else declared.default_factory()


def leaves(options: Any, prefix: str = "") -> Iterator[tuple[str, Any, Field]]:
    """Yield (name, dataclass instance, field) for every setting.

    The settings of nested dataclasses and of lists of dataclasses are included.
    """
    for declared in fields(options):
        name, value = prefix + declared.name, getattr(options, declared.name)
        if is_dataclass(value):
            yield from leaves(value, f"{name}.")
            continue
        yield name, options, declared
        for number, item in enumerate(value if isinstance(value, list | tuple) else ()):
            if is_dataclass(item):
                yield from leaves(item, f"{name}[{number}].")


def shown(value: Any) -> str:
    """Return a value in the spelling of a config file, such as ``true``, ``null`` or ``0.5``."""
    if value is None or isinstance(value, bool):
        return {True: "true", False: "false", None: "null"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


def describe(declared: Field) -> str:
    """Describe the values that a field accepts, such as ``a whole number (at least 0), or null``."""
    # Literal[...] | None is a typing.Union, other unions are a types.UnionType
    kinds = get_args(declared.type) if get_origin(declared.type) in (Union, UnionType) else (declared.type,)
    words = []
    for kind in kinds:
        origin, inner = get_origin(kind), get_args(kind)
        if origin is Literal:
            words.append(f"one of {', '.join(inner)}")
        elif origin in (list, tuple):
            items = {int: "whole numbers", float: "numbers", str: "texts"}.get(inner[0])
            words.append(f"a list of {items or ', '.join(each.name for each in fields(inner[0]))}")
        elif kind is not type(None):
            other = f"a {kind.__name__}" if isinstance(kind, type) and is_dataclass(kind) else "text"
            words.append({int: "a whole number", float: "a number", bool: "true or false"}.get(kind, other))
    allowed = spec_of(declared).range()
    return " or ".join(words) + (f" ({allowed})" if allowed else "") + (", or null" if type(None) in kinds else "")


def choices_of(declared: Field) -> list[str]:
    """Return the allowed values of a field whose type is a Literal, or a Literal or None. Other fields have no choices."""
    kinds = (declared.type, *get_args(declared.type))
    return [choice for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)]


def plain(value: Any) -> Any:
    """Convert a path to text, a number of NumPy or torch to a number, and an array to a list. Return other values unchanged."""
    if isinstance(value, list | tuple):
        return type(value)(map(plain, value))
    return os.fspath(value) if isinstance(value, os.PathLike) else getattr(value, "tolist", lambda: value)()


def has_type(value: Any, kind: Any) -> bool:
    """Return whether a value has the type of a setting. Whole numbers are also numbers. Choices are not checked."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return any(has_type(value, each) for each in inner)
    if origin in (list, tuple):
        return isinstance(value, list | tuple) and all(has_type(each, inner[0]) for each in value)
    if isinstance(value, bool) or origin is Literal:
        return kind is bool or origin is Literal
    return isinstance(value, int | float if kind is float else kind)


def check_values(options: Any, prefix: str = "") -> None:
    """Raise InputError for the first value that is not allowed for its setting. Paths and NumPy numbers are converted first.

    Not allowed are: null, unless the type of the setting contains None; values of another type; numbers that are infinite, NaN or
    out of range; strings that are too long; values that are not among the choices.
    """
    for name, owner, declared in leaves(options, prefix):
        given, spec = getattr(owner, declared.name), spec_of(declared)
        if (value := plain(given)) is not given:
            object.__setattr__(owner, declared.name, value)  # the dataclass may be frozen
        if value is None:
            if type(None) not in get_args(declared.type):  # jsonargparse accepts null for every type
                raise InputError(f"{name} is null, expected a value")
            continue
        choices = choices_of(declared)
        if choices and value not in choices:
            raise InputError(f"{name} is {value!r}, expected one of {', '.join(map(str, choices))}")
        if not has_type(value, declared.type):
            raise InputError(f"{name} is {repr(value)[:200]}, expected {describe(declared)}")
        if isinstance(value, str) and len(value) > MAX_TEXT:
            raise InputError(f"{name} has {len(value)} characters, expected at most {MAX_TEXT}")
        if isinstance(value, float) and not math.isfinite(value):
            raise InputError(f"{name} is {value}, expected a finite number{spec.range() and ' ' + spec.range()}")
        if isinstance(value, int | float) and not isinstance(value, bool) and not spec.allows(value):
            raise InputError(f"{name} is {value if abs(value) < 10**60 else 'too large'}, expected {spec.range()}")
        limit = LIMITS.get(spec.unit, MAX_NUMBER) if spec.at_most is None else math.inf
        for number in value if isinstance(value, list | tuple) else [value]:
            if isinstance(number, int | float) and math.inf > abs(number) > limit:
                found = f"{number:g}" if abs(number) < 1e308 else "larger than 1e308"
                raise InputError(f"{name} is {found}, expected at most {limit:g}, because no machine can handle more")


def unused_options(options: Sequence[Any], prefix: str = "--") -> Iterator[str]:
    """Yield a sentence for each option that differs from its default but has no effect.

    Whether an option has an effect depends on the values of the other options. options: option dataclasses of one command. If two
    dataclasses declare the same name, the first declaration counts.
    """
    declared: dict[str, tuple[Any, Field]] = {}
    for part in options:
        for name, owner, each in leaves(part):
            declared.setdefault(name, (owner, each))
    values = {name: getattr(owner, each.name) for name, (owner, each) in declared.items()}

    def holds(condition: str) -> bool:
        name, _, wanted = condition.partition(" ")
        value = values.get(name)
        return shown(value) == wanted if wanted else bool(value)

    for name, (owner, each) in declared.items():
        spec = spec_of(each)
        against = (*spec.unused_with, *getattr(owner, "unused_with", ()))
        unused = [f"with {prefix}{other}" for other in against if holds(other)]
        unused += [f"without {prefix}{spec.needs}"] if spec.needs and not holds(spec.needs) else []
        if unused and values[name] != default_of(each) and not (spec.used_with and holds(spec.used_with)):
            yield f"{prefix}{name} has no effect {unused[0]}"


BYTES = {"GiB": 2**30, "MiB": 2**20, "GB": 10**9, "MB": 10**6}


def parse_bytes(text: str, name: str = "run.memory_budget") -> int:
    """Return the number of bytes of a size such as 11GB, 10.5 GiB or 512MB.

    Raises InputError for any other text. The message names the setting ``name``.
    """
    found = re.fullmatch(rf"(\d+(?:\.\d+)?) ?({'|'.join(BYTES)})", text.strip())
    if not found or not 0 < float(found[1]) < 1e15:
        units = ", ".join(BYTES)
        raise InputError(
            f"{name} is {text[:40]!r}, expected a number above 0 and below 1e15, and a unit ({units}), such as 11GB"
        )
    return int(float(found[1]) * BYTES[found[2]])

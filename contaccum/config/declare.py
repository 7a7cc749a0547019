"""Declare settings: methods, types with a range, and what the command line and resume need."""

import re
from collections.abc import Callable
from dataclasses import MISSING, Field, field
from typing import Annotated, Any, Literal, NamedTuple

from msgspec import Meta

from contaccum.errors import InputError

MethodName = Literal[
    "in_batch", "grad_accum", "grad_cache", "passage_bank", "cont_accum", "cont_cache"
]


class MethodSpec(NamedTuple):
    """Properties of a training method that are needed before torch is imported."""

    bank: Literal["none", "passages", "pairs"]
    """Content of the method's bank."""
    two_pass: bool = False
    """Whether the method encodes each text twice: for the loss of the full step, then for the
    gradients."""
    single_micro_batch: bool = False
    """Whether a step is always a single micro-batch."""

    @property
    def pushes_whole_step(self) -> bool:
        return self.two_pass and self.bank != "none"

    def cost(self, pairs: int, micro_batch_size: float, replay_share: float = 1.0) -> float:
        """Return the mean cost of one pair in a training step, in forward passes.

        A backward pass costs as much as 2 forward passes. So a pair costs 3 with one pass over the
        texts, and 4 with two. Without partial replay, as many texts as a micro-batch has keep their
        graph from the first pass, which saves their second forward pass.

        pairs: pairs in one step (N). micro_batch_size: pairs in one micro-batch (B). replay_share:
        share of the texts that the second pass encodes again, with gradients.
        """
        if not self.two_pass:
            return 3.0
        if replay_share < 1:
            return 1 + 3 * replay_share
        return 4 - micro_batch_size / pairs


METHOD_SPECS: dict[str, MethodSpec] = {
    "in_batch": MethodSpec("none", single_micro_batch=True),
    "grad_accum": MethodSpec("none"),
    "grad_cache": MethodSpec("none", two_pass=True),
    "passage_bank": MethodSpec("passages"),
    "cont_accum": MethodSpec("pairs"),
    "cont_cache": MethodSpec("pairs", two_pass=True),
}

NonNegativeInt = Annotated[int, Meta(ge=0)]
PositiveInt = Annotated[int, Meta(ge=1)]
NonNegativeFloat = Annotated[float, Meta(ge=0)]
PositiveFloat = Annotated[float, Meta(gt=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
DecayRate = Annotated[float, Meta(ge=0, lt=1)]
Steps = NonNegativeInt | Annotated[float, Meta(ge=0, lt=1)]
"""A number of steps, or a share of the steps of a run."""

ResumeRule = Literal["free", "ask", "never"]


def setting(
    default: Any = MISSING,
    *,
    factory: Callable[[], Any] | Any = MISSING,
    kw_only: bool | Any = MISSING,
    resume: ResumeRule = "ask",
    flag: bool = False,
    positional: bool = False,
    required: bool = False,
    metavar: str = "",
) -> Any:
    """Declare a field of an options dataclass. Its help text is the docstring below the field.

    A plain default declares a setting without any of the following; a resumed run may change it
    only with ``allow_changes``.

    Args:
        default: value of a setting that is not given.
        factory: function that returns a mutable default.
        kw_only: whether only a keyword argument of ``__init__`` sets the field.
        resume: whether a resumed run may change the setting: always (free), only with
            ``allow_changes`` (ask), or never.
        flag: whether the option is a switch without a value. Settings in a group, such as
            ``data.strict``, always take a value.
        positional: whether the command line gives the value by its position, without an option.
        required: whether the command line must give the option although the field has a default.
        metavar: placeholder of the value in ``--help``. Default: by the type.
    """
    metadata = {
        "resume": resume,
        "flag": flag,
        "positional": positional,
        "required": required,
        "metavar": metavar,
    }
    return field(default=default, default_factory=factory, kw_only=kw_only, metadata=metadata)


def default_of(declared: Field) -> Any:
    """Return the default of a dataclass field, or ``dataclasses.MISSING`` if the field has none."""
    return declared.default if declared.default_factory is MISSING else declared.default_factory()


BYTES = {"GiB": 2**30, "MiB": 2**20, "GB": 10**9, "MB": 10**6}


def parse_bytes(text: str, name: str = "run.memory_budget") -> int:
    """Return the number of bytes of a size such as 11GB, 10.5 GiB or 512MB.

    Raises InputError for any other text. The message names the setting ``name``.
    """
    found = re.fullmatch(rf"(\d+(?:\.\d+)?) ?({'|'.join(BYTES)})", text.strip())
    if not found:
        raise InputError(
            f"{name} is {text!r}, expected a number and a unit ({', '.join(BYTES)}), such as 11GB"
        )
    return int(float(found[1]) * BYTES[found[2]])

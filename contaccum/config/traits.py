"""The memory methods by name, and what must be known of each before anything is loaded. Imports no torch."""

from dataclasses import dataclass
from typing import Literal

MethodName = Literal["in_batch", "grad_accum", "grad_cache", "passage_bank", "cont_accum", "cont_cache"]


@dataclass(frozen=True)
class Traits:
    """What must be known of a method before anything is loaded."""

    bank: Literal["none", "passages", "pairs"]
    """What its bank holds."""
    two_pass: bool = False
    """Whether a whole step meets the loss at once, encoded twice."""
    whole: bool = False
    """Whether a step is one micro-batch."""

    @property
    def pushes_whole_step(self) -> bool:
        return self.two_pass and self.bank != "none"


TRAITS: dict[str, Traits] = {
    "in_batch": Traits("none", whole=True),
    "grad_accum": Traits("none"),
    "grad_cache": Traits("none", two_pass=True),
    "passage_bank": Traits("passages"),
    "cont_accum": Traits("pairs"),
    "cont_cache": Traits("pairs", two_pass=True),
}

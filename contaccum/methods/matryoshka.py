"""Matryoshka learning: the first numbers of a vector are learned to be a vector of their own.

Source: Kusupati et al. 2022 (arXiv 2205.13147), eq. 1.
"""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Prefixes:
    """The widths, besides the whole one, at which vectors are compared."""

    widths: tuple[int, ...] = ()
    """How many of a vector's first numbers; each less than d."""
    weights: tuple[float, ...] = ()
    """What the loss at each width counts for; that at the whole width counts for 1."""
    unit: bool = False
    """Whether vectors are of length 1, which a part of one is made too."""

    def cut(self, vectors: Tensor, width: int) -> Tensor:
        """The first ``width`` numbers of vectors (..., d), (..., width)."""
        part = vectors[..., :width]
        return F.normalize(part, dim=-1) if self.unit else part


WHOLE = Prefixes()

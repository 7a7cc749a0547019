"""What an optimizer step overwrote, kept until it has ended, so that a step that fails leaves no trace."""

from typing import Any

from torch import Tensor


class Undo:
    """Regions of tensors as they were before their first write since the last ``forget``.

    Memory: one copy of each region noted, however often it is written.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[int, str], tuple[Tensor, Any, Tensor]] = {}

    def note(self, tensor: Tensor, where: Any) -> None:
        """To be called before ``tensor[where]`` is written."""
        key = (
            id(tensor),
            repr(where),
        )  # slices cannot be hashed before Python 3.12; the entry keeps the tensor's id taken
        if key not in self._kept:
            self._kept[key] = (tensor, where, tensor[where].clone())

    def restore(self) -> None:
        """Put back everything noted. Regions may overlap: the one noted first holds what stood there first."""
        for tensor, where, old in reversed(self._kept.values()):
            tensor[where] = old
        self.forget()

    def forget(self) -> None:
        self._kept = {}

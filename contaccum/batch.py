"""What passes from the data to the encoders and the loss: one micro-batch of token ids, and the ids of its passages."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

NO_PASSAGE = -1  # padding in RowIds.positives; no passage has this id


@dataclass(frozen=True)
class Tokens:
    """Padded token ids of n texts."""

    input_ids: Tensor  # (n, length) int64
    attention_mask: Tensor  # (n, length) int64, 0 at padding
    host_mask: Tensor | None = None  # the mask on the host, where lengths can be read without waiting for a device

    def to(self, device: torch.device) -> "Tokens":
        mask = self.attention_mask
        return Tokens(
            self.input_ids.to(device, non_blocking=True),
            mask.to(device, non_blocking=True),
            mask if mask.device.type == "cpu" else self.host_mask,
        )

    @staticmethod
    def join(parts: "list[Tokens]", pad_id: int, side: str) -> "Tokens":
        """The texts of all parts, padded on ``side`` to the length of the widest part."""
        length = max(part.input_ids.shape[1] for part in parts)

        def widened(rows: Tensor, value: int) -> Tensor:
            missing = length - rows.shape[1]
            return F.pad(rows, (0, missing) if side == "right" else (missing, 0), value=value)

        return Tokens(
            torch.cat([widened(part.input_ids, pad_id) for part in parts]),
            torch.cat([widened(part.attention_mask, 0) for part in parts]),
        )


@dataclass(frozen=True)
class RowIds:
    """Which passages stand in the columns, and which passages are relevant for each row, as numbers."""

    columns: Tensor  # (b, 1 + H) int64: each row's positive, then its hard negatives
    positives: Tensor  # (b, P) int64: every passage known to be relevant for the row, padded with NO_PASSAGE
    teacher: Tensor | None = None  # (b, 1 + H) float32: a teacher's scores of the columns, NaN where it gave none

    @staticmethod
    def merge(parts: "list[RowIds]", how: Callable[[list[Tensor]], Tensor]) -> "RowIds":
        """Each tensor made by ``how`` of those of the parts."""
        teacher = [part.teacher for part in parts if part.teacher is not None]
        assert len(teacher) in (0, len(parts))
        return RowIds(
            how([part.columns for part in parts]),
            how([part.positives for part in parts]),
            how(teacher) if teacher else None,
        )


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass of one process: B queries with 1 + H passages each.

    ``ids`` covers the rows of all W processes (b = W * B, in rank order): every process derives the whole step's order from
    (seed, step), so ids need no communication. ``query_ids`` names this process's rows in messages.
    """

    queries: Tokens  # (B, length)
    passages: Tokens  # (B * (1 + H), length), pair after pair, the positive first
    ids: RowIds  # (W * B, ...)
    query_ids: list[str]

    def to(self, device: torch.device) -> "MicroBatch":
        """Texts on the device; ids stay on the CPU, where masks are found."""
        return MicroBatch(self.queries.to(device), self.passages.to(device), self.ids, self.query_ids)

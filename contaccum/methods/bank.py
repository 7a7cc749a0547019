"""Dual memory bank: a ring buffer of the embeddings of past queries and passages.

One slot of the ring stores one training pair: a query, its passages and their ids. Stored
embeddings have no gradient. Source: Kim et al. 2024 (arXiv 2406.12356), section 3.2.
"""

import hashlib
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from contaccum.batch import NO_PASSAGE, RowIds
from contaccum.errors import InputError
from contaccum.methods.logsumexp import CachedLogSumExp
from contaccum.methods.pairs import IdIndex, Pairs
from contaccum.methods.similarity import Similarity, full_precision

MIN_CHUNK = 1 << 18  # number of logits that the cached sums compute at once in a small bank


@dataclass(frozen=True)
class BankOptions:
    """Options of a bank. The default values are those of the paper."""

    hard_negatives: int = 0
    """Number of hard negatives that the bank stores with each pair of query and positive."""
    columns_only: bool = False
    """Whether to store only passages and no queries. The bank then adds columns to the loss, but no
    rows."""
    row_weight: str = "all"
    """Divisor of the summed loss: the number of current and bank rows (``all``), or of current rows
    (``current``)."""
    keep: bool = True
    """Whether to keep the pairs after an optimizer step. False is the paper's ablation "without
    past encoder"."""
    warmup_steps: int = 0
    """Number of optimizer steps at the start of a run in which the bank is filled, but the loss
    does not use it."""
    age_decay: float = 0.0
    """Age penalty per optimizer step. A logit is reduced by age_decay times the number of optimizer
    steps between the encoding of its query and the encoding of its passage."""


class BankLogits(NamedTuple):
    """Logits of b current pairs and a bank: computed by the loss, needed again by the push."""

    pointer: int
    """``Bank.pointer`` when the loss was computed."""
    positive: Tensor
    """Logit of each current query and its positive, (b,)."""
    over_current: Tensor
    """Logits of the bank's queries and the current passages, (M, b (1 + H)), without graph."""
    current: Tensor
    """Logits of the current queries and passages, (b, b (1 + H)), without graph."""
    stored: Tensor
    """Logits of the current queries and the bank's passages, (b, M (1 + H)), without graph."""


class Bank:
    """Ring buffer of M slots with one pair each.

    Slots 0 to ``stored`` - 1 contain a pair; the loss uses the first ``fill``, which is 0 during
    the warm-up. A bank of size 0 stays empty.
    """

    truncated: "tuple[Bank, ...]" = ()
    """One bank per truncated embedding width. Empty, except in a
    ``contaccum.methods.matryoshka.MatryoshkaBank``."""

    def __init__(
        self,
        size: int,
        dim: int,
        similarity: Similarity,
        options: BankOptions | None = None,
        *,
        push: int,
        device: torch.device | None = None,
    ) -> None:
        """Create an empty bank.

        size: number of slots, M. dim: width of an embedding, d. push: number of pairs that a push
        usually writes.
        """
        self.size, self.dim, self.similarity, self.push_rows = size, dim, similarity, push
        self.options = options or BankOptions()
        self.per_slot = 1 + self.options.hard_negatives  # number of passages in a slot
        self.pointer = 0  # next slot to overwrite; in a full ring, the slot of the oldest pair
        self.stored = 0  # number of slots that contain a pair
        self.step = 0  # number of finished optimizer steps
        self.pushed = 0  # number of pairs pushed in the current optimizer step
        self.passages = torch.zeros(size, self.per_slot, dim, device=device)
        self.queries = None if self.options.columns_only else torch.zeros(size, dim, device=device)
        self.positive_logits = torch.zeros(size, device=device)
        # optimizer steps since the pair was encoded
        self.age = torch.zeros(size, dtype=torch.long, device=device)
        # the tensors of ids are always on the CPU
        self.column_ids = torch.full((size, self.per_slot), NO_PASSAGE)
        self.positives = torch.full((size, 1), NO_PASSAGE)
        # each query's row number in the training set
        self.query_numbers = torch.zeros(size, dtype=torch.long)
        # index among the pairs of its optimizer step
        self.index_in_step = torch.zeros(size, dtype=torch.long)
        self.sums: CachedLogSumExp | None = None  # None if the bank stores only passages
        self._index_all()
        self.empty()

    @property
    def fill(self) -> int:
        """Number of stored pairs that the loss may use: 0 during the warm-up, then ``stored``."""
        return self.stored if self.step >= self.options.warmup_steps else 0

    @property
    def weighted_rows(self) -> int:
        """Number of bank rows that count in the denominator of the mean loss."""
        return self.fill if self.queries is not None and self.options.row_weight == "all" else 0

    def logsumexp(self) -> Tensor:
        """Return the log-sum-exp of each bank query over its negatives in the bank, (fill,)."""
        assert self.sums is not None
        return self.sums.total(self.fill)

    def ages(self) -> Tensor:
        """Return a copy of the age of each pair, (stored,) int64: 0 for pairs of this step."""
        return self.age[: self.stored].clone()

    def pairs(self, slots: slice) -> Pairs:
        """Return the pairs stored in ``slots``."""
        return Pairs(
            queries=None if self.queries is None else self.queries[slots],
            passages=self.passages[slots],
            positive_logits=self.positive_logits[slots],
            ids=RowIds(
                self.column_ids[slots], self.positives[slots], queries=self.query_numbers[slots]
            ),
            first=slots.start,
            columns_by_id=self._columns_by_id,
            rows_by_id=self._rows_by_id,
            ages=self.age[slots],
            age_decay=self.options.age_decay,
        )

    @torch.no_grad()
    def push(
        self,
        queries: Tensor,
        passages: Tensor,
        ids: RowIds,
        bank_logits: tuple[BankLogits | None, ...] = (),
    ) -> None:
        """Write b new pairs into the next b slots.

        In a full bank, this replaces the b oldest pairs.

        queries: (b, d). passages: (b, 1 + H, d). ids: passage ids of the b pairs. bank_logits:
        ``LossValue.bank_logits`` of the loss that compared the b pairs with this bank, so that the
        push does not compute these logits again.
        """
        if self.size == 0:
            return
        b, stored_before = len(queries), self.stored
        assert b <= self.size, f"a push of {b} rows into a bank of {self.size} would lose rows"
        self._widen(ids.positives.shape[1])
        in_loss = bank_logits[0] if bank_logits else None
        if in_loss is not None:
            positive_logits = in_loss.positive  # (b,)
        elif self.queries is not None:
            positive_logits = self.similarity.positive_logits(queries, passages)  # (b,)
        pieces = self._pieces(b)
        for slots, rows in pieces:
            self._overwritten.append(
                (slots, [tensor[slots].clone() for tensor in self._tensors().values()])
            )
            self._index(slots, remove=True)
            self.passages[slots] = passages[rows, : self.per_slot]
            self.column_ids[slots] = ids.columns[rows, : self.per_slot]
            self.positives[slots] = NO_PASSAGE
            self.positives[slots, : ids.positives.shape[1]] = ids.positives[rows]
            if self.similarity.rules.by_query and ids.queries is not None:
                self.query_numbers[slots] = ids.queries[rows]
            self.age[slots] = 0
            self.index_in_step[slots] = torch.arange(
                self.pushed + rows.start, self.pushed + rows.stop
            )
            if self.queries is not None:
                self.queries[slots] = queries[rows]
                self.positive_logits[slots] = positive_logits[rows]
            self._index(slots)
        self.stored = min(self.size, self.stored + b)
        self.pushed += b
        if self.sums is not None:
            column_logits = row_logits = None
            # the usual case: the bank stores all passages of a pair
            if in_loss is not None and passages.shape[1] == self.per_slot:
                assert in_loss.pointer == self.pointer, "the loss was computed before another push"
                column_logits = in_loss.over_current.unflatten(1, (b, self.per_slot))
                current = in_loss.current.unflatten(1, (b, self.per_slot))
                row_logits = in_loss.stored.new_empty(b, self.stored, self.per_slot)
                row_logits[:, :stored_before] = in_loss.stored.unflatten(
                    1, (stored_before, self.per_slot)
                )
                for slots, rows in pieces:
                    row_logits[:, slots] = current[:, rows]
            self.sums.overwrite(
                [slots for slots, _ in pieces], self.stored, column_logits, row_logits
            )
        self.pointer = (self.pointer + b) % self.size

    def _pieces(self, b: int) -> list[tuple[slice, slice]]:
        """Divide b new pairs at the end of the ring.

        Returns the slots and the rows of the push of each piece.
        """
        count = min(b, self.size - self.pointer)
        pieces = [(slice(self.pointer, self.pointer + count), slice(0, count))]
        if count < b:
            pieces.append((slice(0, b - count), slice(count, b)))
        return pieces

    def _logits(self, rows: slice, slots: slice) -> Tensor:
        """Return the logits of the queries in r slots and passages in s slots, (r, s, 1 + H)."""
        with full_precision(self.passages.device):
            logits = self.similarity.logits(self.pairs(rows), self.pairs(slots)).values
        return logits.unflatten(1, (slots.stop - slots.start, self.per_slot))

    def _widen(self, width: int) -> None:
        """Make room for ``width`` known positives of a query."""
        if width > self.positives.shape[1]:
            self.positives = F.pad(
                self.positives, (0, width - self.positives.shape[1]), value=NO_PASSAGE
            )

    def _index(self, slots: slice, remove: bool = False) -> None:
        """Add the passage ids in ``slots`` to the indexes, or remove them."""
        if self.similarity.mask_false_negatives:
            update = IdIndex.remove if remove else IdIndex.add
            update(self._rows_by_id, slots.start, self.positives[slots])
            update(
                self._columns_by_id, slots.start * self.per_slot, self.column_ids[slots].view(-1, 1)
            )

    def _index_all(self) -> None:
        self._rows_by_id, self._columns_by_id = IdIndex(), IdIndex()
        self._index(slice(0, self.size))

    def end_step(self) -> None:
        """End a step: add 1 to the number of steps; empty the bank if ``keep`` is false."""
        self.step += 1
        self.age[: self.stored] += 1
        if self.options.keep:
            self._begin_step()
        else:
            self.empty()

    def empty(self) -> None:
        """Remove all pairs, but keep the number of steps.

        Call this function only between two optimizer steps.
        """
        self.pointer = self.stored = 0
        if self.queries is not None and self.size:
            # Two copies of a chunk of logits are in memory at once, so a chunk is small compared
            # with the bank.
            device = self.passages.device
            share = self.passages.numel() // (32 if device.type == "cpu" else 12)
            chunk = min(self.similarity.chunk_on(device), max(MIN_CHUNK, share))
            self.sums = CachedLogSumExp(
                self._logits, self.size, self.push_rows, chunk // self.per_slot, device
            )
        self._begin_step()

    def _begin_step(self) -> None:
        """Forget what ``rollback`` would have restored."""
        self.pushed = 0
        self._overwritten: list[tuple[slice, list[Tensor]]] = []  # slots, and their content before
        self._before = self.pointer, self.stored, self.positives.shape[1]
        if self.sums is not None:
            self.sums.begin_step()

    def rollback(self) -> None:
        """Restore exactly the state of the bank at the beginning of the current optimizer step."""
        self.pointer, self.stored, width = self._before
        self.positives = self.positives[:, :width].contiguous()  # a push may have made it wider
        for slots, contents in reversed(self._overwritten):
            for tensor, content in zip(self._tensors().values(), contents, strict=True):
                tensor[slots] = content[:, :width] if tensor is self.positives else content
        if self.sums is not None:
            self.sums.rollback()
        self._index_all()
        self._begin_step()

    def _tensors(self) -> dict[str, Tensor]:
        """Return all tensors that have one entry per slot.

        The keys are their names in a saved state.
        """
        tensors = {
            "passages": self.passages,
            "column_ids": self.column_ids,
            "positives": self.positives,
            "age": self.age,
            "index_in_step": self.index_in_step,
        }
        if self.queries is not None:
            tensors["queries"] = self.queries
            tensors["positive_logits"] = self.positive_logits
        if self.similarity.rules.by_query:
            tensors["query_numbers"] = self.query_numbers
        return tensors

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the tensors and the other values to save in a checkpoint.

        Call this only between two steps.
        """
        tensors = {name: tensor.contiguous() for name, tensor in self._tensors().items()}
        numbers: dict[str, Any] = {
            "size": self.size,
            "pointer": self.pointer,
            "stored": self.stored,
            "step": self.step,
            "sums_of": self._sums_of(),
        }
        if self.sums is not None:
            tensors["sums"] = self.sums.table
        return tensors, numbers

    def load_state(self, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
        """Restore the tensors and the other values that ``state`` returned.

        Raises InputError if the saved tensors do not have the shapes of this bank's tensors. The
        log-sum-exps are computed again if a setting that affects them has changed.
        """
        saved = {name: tensor for name, tensor in tensors.items() if name != "sums"}
        self._widen(saved["positives"].shape[1] if "positives" in saved else 1)
        own = self._tensors()
        saved_shapes = {name: tuple(tensor.shape) for name, tensor in saved.items()}
        shapes = {name: tuple(tensor.shape) for name, tensor in own.items()}
        if saved_shapes != shapes:
            raise InputError(
                f"bank of the checkpoint: its shapes are {saved_shapes}, but this configuration "
                f"needs {shapes}. Resume with the method, bank size, number of hard negatives and "
                "loss settings that the run started with."
            )
        self.empty()
        for name, tensor in own.items():
            tensor.copy_(saved[name])
        self.pointer = numbers["pointer"]
        self.stored = numbers["stored"]
        self.step = numbers["step"]
        self._index_all()
        stop = self.pointer or self.stored  # end of the last push; pointer 0 means the ring's end
        if self.sums is not None and numbers["sums_of"] == self._sums_of():
            self.sums.load(tensors["sums"], stop)
        elif self.sums is not None and self.queries is not None and self.stored:
            self.positive_logits.copy_(self.similarity.positive_logits(self.queries, self.passages))
            self.sums.compute(stop, self.stored)
        self._begin_step()

    def _sums_of(self) -> dict[str, Any]:
        """Return the settings on which the stored log-sum-exps depend."""
        return {
            "push": self.push_rows,
            "age_decay": self.options.age_decay,
            **self.similarity.settings(),
        }

    def fingerprint(self) -> str:
        """Return a hash of the stored pairs.

        Processes that pushed the same pairs get the same hash.
        """
        digest = hashlib.sha256(f"{self.pointer} {self.stored} {self.step}".encode())
        for name, tensor in self._tensors().items():
            # positive_logits are computed, and another machine may round them differently
            if name != "positive_logits":
                digest.update(tensor.cpu().numpy().data)
        return digest.hexdigest()

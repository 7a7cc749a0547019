"""Dual memory bank: a ring buffer of the embeddings of past queries and passages.

One slot of the ring stores one row: a query, its passages and their ids. So the query bank and the passage bank are aligned.
Stored embeddings have no gradient. A ``NestedLogSumExp`` caches log-sum-exps of the logits between stored queries and passages.
Source: Kim et al. 2024 (arXiv 2406.12356), section 4.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from contaccum.batch import NO_PASSAGE, RowIds
from contaccum.errors import InputError
from contaccum.methods.logsumexp import NestedLogSumExp, PartialLogSumExp, RollbackJournal
from contaccum.methods.masking import PairRows
from contaccum.methods.similarity import EntriesById, MaskedPairs, Similarity


@dataclass(frozen=True)
class BankOptions:
    """Options of a bank. The default values are those of the paper."""

    hard_negatives: int = 0
    """Number of hard negatives that the bank stores with each pair of query and positive."""
    columns_only: bool = False
    """Whether to store only passages and no queries. The bank then adds columns to the loss, but no rows."""
    row_weight: str = "all"
    """Divisor of the summed loss: the number of current and bank rows (``all``), or of current rows only (``current``)."""
    keep: bool = True
    """Whether to keep the rows after an optimizer step. False is the ablation "without past encoder" of the paper."""
    warmup_steps: int = 0
    """Number of optimizer steps at the start of a run in which the bank is filled, but the loss does not use it."""
    age_decay: float = 0.0
    """Age penalty per optimizer step. Each logit is reduced by age_decay times the number of optimizer steps between the encoding
    of its query and the encoding of its passage."""
    symmetric: bool = False
    """Whether the loss also has the direction from passages to queries."""


class Bank:
    """Ring buffer of M slots with one row each. Slots 0 to ``stored`` - 1 are filled. A bank of size 0 stays empty."""

    truncated: Sequence["Bank"] = ()
    """One bank per truncated embedding width. Empty, except in a ``contaccum.methods.objective.MatryoshkaBank``."""

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

        size: number of slots, M. dim: width of an embedding, d. push: number of rows that one push usually writes.
        ``NestedLogSumExp`` divides the slots into blocks; its smallest blocks have ``push`` slots.
        """
        self.size, self.dim, self.similarity, self.push_rows = size, dim, similarity, push
        self.options = options = options or BankOptions()
        self.pointer = 0  # next slot to overwrite; in a full ring, the slot of the oldest row
        self.stored = 0  # number of slots that contain a row
        self.step = 0  # number of finished optimizer steps
        self.pushed = 0  # number of rows pushed in the current optimizer step
        self.passages = torch.zeros(size, 1 + options.hard_negatives, dim, device=device)
        self.queries = None if options.columns_only else torch.zeros(size, dim, device=device)
        self.positive_logits = torch.zeros(size, device=device)
        self.written_step = torch.zeros(size, dtype=torch.long, device=device)  # optimizer step that encoded the row
        # the tensors of ids are always on the CPU
        self.column_ids = torch.full((size, 1 + options.hard_negatives), NO_PASSAGE)
        self.positives = torch.full((size, 1), NO_PASSAGE)
        self.query_numbers = torch.zeros(size, dtype=torch.long)  # each query's row number in the training set
        self.index_in_step = torch.zeros(size, dtype=torch.long)  # index among the rows of its optimizer step
        self.journal = RollbackJournal()
        self._map_ids()
        self.empty()

    @property
    def fill(self) -> int:
        """Number of bank rows that the loss may use: 0 during the warm-up, then ``stored``."""
        return self.stored if self.step >= self.options.warmup_steps else 0

    @property
    def weighted_rows(self) -> int:
        """Number of bank rows that count in the denominator of the mean loss."""
        return self.fill if self.queries is not None and self.options.row_weight == "all" else 0

    @property
    def sums(self) -> NestedLogSumExp | None:
        """Cached log-sum-exp of each stored query's logits with all stored passages. None if the bank stores only passages."""
        return self.tables.get("")

    def logsumexp(self, reverse: bool = False) -> Tensor:
        """Return for each bank query the log-sum-exp of its logits with all bank passages, (fill,).

        reverse: instead, return for each bank positive the log-sum-exp of its logits with all bank queries.
        """
        return self.tables["reversed_" if reverse else ""].total(self.fill)

    def ages(self) -> Tensor:
        """Return the number of optimizer steps since each stored row was encoded, (stored,) int64; 0 for rows of this step."""
        return self.step - self.written_step[: self.stored]

    def age_penalty(self) -> Tensor | None:
        """Return one age penalty per bank row, (fill,). Return None if there is no age decay.

        The penalty is subtracted from the logits between the row's query and current passages, and between the row's passages and
        current queries. The method ``logits`` subtracts another penalty from the logits between two stored rows. That penalty
        depends on the difference of the rows' ages. This difference never changes, so the stored log-sum-exps stay valid.
        """
        if not self.options.age_decay:
            return None
        return (self.ages()[: self.fill] * self.options.age_decay).to(self.passages)

    def partial(self, rows: int, columns: int) -> PartialLogSumExp | None:
        """Return an object in which the loss stores log-sum-exps for the next push, or None if the push cannot use them.

        rows: number of rows of the next push. columns: passages per row. The push can use them only if the loss uses the bank, if
        the bank stores all passages and the query of a row, and if the push overwrites one block of the last level of ``sums``.
        """
        one_block = rows == self.push_rows and self.pointer % rows == 0 and self.pointer + rows <= self.size
        if self.sums is None or not self.fill or not one_block or columns != 1 + self.options.hard_negatives:
            return None
        return PartialLogSumExp(self.pointer, self.fill, rows, columns, self.sums)

    @torch.no_grad()
    def push(
        self, queries: Tensor, passages: Tensor, ids: RowIds, partials: Sequence[PartialLogSumExp | None] = ()
    ) -> None:
        """Write b new rows into the next b slots. In a full bank, this replaces the b oldest rows.

        queries: (b, d). passages: (b, 1 + H, d). ids: passage ids of the b rows. partials: ``LossValue.partials`` of the loss
        that compared the b rows with this bank. The push reuses these log-sum-exps to save two matrix products.
        """
        if self.size == 0:
            return
        b, columns = len(queries), 1 + self.options.hard_negatives
        assert b <= self.size, f"a push of {b} rows into a bank of {self.size} would lose rows"
        self._widen(ids.positives.shape[1])
        known = F.pad(ids.positives, (0, self.positives.shape[1] - ids.positives.shape[1]), value=NO_PASSAGE)
        first = min(b, self.size - self.pointer)  # number of rows that fit before the end of the ring
        pieces = [(slice(self.pointer, self.pointer + first), slice(0, first))]
        if first < b:
            pieces.append((slice(0, b - first), slice(first, b)))
        for slots, rows in pieces:
            for tensor in self._tensors().values():
                self.journal.record(tensor, slots)
            self._update_ids(slots, EntriesById.remove)
            self.passages[slots] = passages[rows, :columns]
            self.column_ids[slots] = ids.columns[rows, :columns]
            self.positives[slots] = known[rows]
            if self.similarity.rules.by_query and ids.queries is not None:
                self.query_numbers[slots] = ids.queries[rows]
            self.written_step[slots].fill_(self.step)
            self.index_in_step[slots] = torch.arange(self.pushed + rows.start, self.pushed + rows.stop)
            if self.queries is not None:
                self.queries[slots] = queries[rows]
                self._update_positive_logits(slots)
            self._update_ids(slots, EntriesById.add)
        self.stored = min(self.size, self.stored + b)
        self.pushed += b
        for prefix, table in self.tables.items():
            reused = partials[0] if partials and not prefix else None
            for slots, _ in pieces:
                table.overwrite(slots.start, slots.stop, self.stored, reused)
        self.pointer = (self.pointer + b) % self.size

    def _widen(self, width: int) -> None:
        if width > self.positives.shape[1]:
            self.positives = F.pad(self.positives, (0, width - self.positives.shape[1]), value=NO_PASSAGE)

    def _map_ids(self) -> None:
        """Build ``_by_positive`` and ``_by_column``, the maps from passage ids to rows and to columns of the bank."""
        self._by_positive, self._by_column = EntriesById(), EntriesById()
        self._update_ids(slice(0, self.size), EntriesById.add)

    def _update_ids(self, slots: slice, update: Callable[[EntriesById, int, Tensor], None]) -> None:
        """Add ``slots`` to both maps of passage ids, or remove them. update: ``EntriesById.add`` or ``EntriesById.remove``."""
        if self.similarity.mask_false_negatives:
            update(self._by_positive, slots.start, self.positives[slots])
            update(self._by_column, slots.start * self.column_ids.shape[1], self.column_ids[slots].view(-1, 1))

    def masked_columns(self, positives: Tensor, slots: slice) -> MaskedPairs:
        """Return all pairs (i, column in ``slots``) where the passage id of the column is in row i of ``positives`` (r, P)."""
        per_slot = self.column_ids.shape[1]
        return self._by_column.find(positives, slice(slots.start * per_slot, slots.stop * per_slot))

    def masked_rows(self, column_ids: Tensor, rows: slice) -> MaskedPairs:
        """Return all pairs (i, bank row in ``rows``) where passage i of ``column_ids`` (c,) is a known positive of the row."""
        return self._by_positive.find(column_ids.unsqueeze(1), rows)

    def rule_rows(self, slots: slice) -> PairRows:
        """Return the bank rows in ``slots``, in the form that ``PairRules.leave_out`` takes as ``rows``."""
        # all logits that the rules compare contain the hardness weight, but ``positive_logits`` do not
        scores = self.positive_logits[slots] / self.similarity.positive_share
        return PairRows(self.query_numbers[slots], self.column_ids[slots, 0], scores, self.similarity.scale)

    def logits(self, rows: slice, slots: slice, reverse: bool = False) -> Tensor:
        """Return the logits between the stored queries in the slots ``rows`` and all stored passages in the slots ``slots``.

        The shape is (slots * passages per slot, rows). Logits of masked pairs are minus infinity. The age penalty is subtracted.
        reverse: apply ``PairRules`` in the passage-to-query direction, where hard negatives are never masked.
        """
        assert self.queries is not None
        per_slot = self.column_ids.shape[1]
        if rows.stop - rows.start > slots.stop - slots.start:  # look up the side with fewer ids
            masked = self.masked_rows(self.column_ids[slots].flatten(), rows)
        else:
            masked = self.masked_columns(self.positives[rows], slots).transposed()
        first, end = max(rows.start, slots.start), min(rows.stop, slots.stop)
        if len(masked) and first < end:  # a row's own positive is not masked
            own = torch.arange(first, end)
            masked = masked.without((own - slots.start) * per_slot, own - rows.start)
        logits = self.similarity.logits(self.passages[slots].flatten(0, 1), self.queries[rows], masked)
        if self.similarity.hardness and first < end:
            positives = logits.unflatten(0, (-1, per_slot))[first - slots.start : end - slots.start, 0]
            positives[:, first - rows.start : end - rows.start].diagonal().mul_(self.similarity.positive_share)
        if (rules := self.similarity.rules) and reverse:
            numbers = self.query_numbers[rows]
            rules.leave_out(logits[::per_slot], self.rule_rows(slots), numbers, (slots, rows), of_queries=True)
        elif rules:
            rules.leave_out(logits.T, self.rule_rows(rows), self.column_ids[slots].flatten(), (rows, slots))
        if self.options.age_decay:
            between = logits.new_empty(slots.stop - slots.start, 1, rows.stop - rows.start)
            torch.sub(self.written_step[slots].view(-1, 1, 1), self.written_step[rows], out=between)
            logits.unflatten(0, (-1, per_slot)).sub_(between.abs_().mul_(self.options.age_decay))
        return logits

    def _reversed_logits(self, rows: slice, slots: slice) -> Tensor:
        """Return the logits between the stored positives in ``rows`` and the stored queries in ``slots``: shape (slots, rows)."""
        return self.logits(slots, rows, reverse=True)[:: self.column_ids.shape[1]].T

    def _update_positive_logits(self, slots: slice) -> None:
        assert self.queries is not None
        products = self.queries[slots] * self.passages[slots, 0]
        torch.div(products.sum(1), self.similarity.temperature, out=self.positive_logits[slots])

    def end_step(self) -> None:
        """End an optimizer step: add 1 to the number of steps, and empty the bank if ``options.keep`` is false."""
        self.step += 1
        if not self.options.keep:
            self._clear()
        self._begin_step()
        for bank in self.truncated:
            bank.end_step()

    def empty(self) -> None:
        """Remove all rows, but keep the number of finished steps. Call this function only between two optimizer steps."""
        self._clear()
        self._begin_step()
        for bank in self.truncated:
            bank.empty()

    def _clear(self) -> None:
        self.pointer = self.stored = 0
        self.tables: dict[str, NestedLogSumExp] = {}  # key: prefix of the table's names in a saved state
        if self.queries is not None and self.size:
            tile = self.similarity.tile_on(self.passages.device) // (1 + self.options.hard_negatives)
            settings = self.size, self.push_rows, tile, self.journal, self.passages.device
            self.tables[""] = NestedLogSumExp(self.logits, *settings)
            if self.options.symmetric:
                self.tables["reversed_"] = NestedLogSumExp(self._reversed_logits, *settings)

    def rollback(self) -> None:
        """Restore exactly the state that the bank had at the beginning of the current optimizer step."""
        self.journal.restore()
        self.pointer, self.stored, self.positives, open_blocks = self._at_step_start
        self._map_ids()
        for table, blocks in zip(self.tables.values(), open_blocks, strict=True):
            table.open = blocks
        self._begin_step()
        for bank in self.truncated:
            bank.rollback()

    def _begin_step(self) -> None:
        """Clear the journal, and save the other values that ``rollback`` restores."""
        self.pushed = 0
        self.journal.clear()
        self._at_step_start = (self.pointer, self.stored, self.positives, [each.open for each in self.tables.values()])

    def _tensors(self) -> dict[str, Tensor]:
        """Return all tensors that have one entry per slot. The keys are their names in a saved state."""
        tensors = {"passages": self.passages, "column_ids": self.column_ids, "positives": self.positives}
        tensors |= {"born": self.written_step, "places": self.index_in_step}
        if self.queries is not None:
            tensors |= {"queries": self.queries, "positive_logits": self.positive_logits}
        if self.similarity.rules.by_query:
            tensors["query_numbers"] = self.query_numbers
        return tensors

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the tensors and the other values to save in a checkpoint. Call this only between two optimizer steps."""
        tensors = {name: tensor.contiguous() for name, tensor in self._tensors().items()}
        numbers: dict[str, Any] = {name: getattr(self, name) for name in ("size", "pointer", "stored", "step")}
        numbers |= {"open": None, "sums_of": self._sums_of()}
        for prefix, table in self.tables.items():
            tensors |= {f"{prefix}sums": table.values, f"{prefix}closed": table.closed}
            numbers[f"{prefix}open"] = table.open
        return tensors, numbers

    def load_state(self, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
        """Restore the tensors and the other values that ``state`` returned.

        Raises InputError if the saved tensors do not have the shapes of this bank's tensors. The log-sum-exps are computed again
        if a setting that affects them has changed.
        """
        rows = {name: each for name, each in tensors.items() if not name.endswith(("sums", "closed"))}
        self._widen(rows["positives"].shape[1] if "positives" in rows else 1)
        own = self._tensors()
        found, expected = ({name: tuple(each.shape) for name, each in part.items()} for part in (rows, own))
        if found != expected:
            raise InputError(
                f"bank of the checkpoint: its shapes are {found}, but this configuration needs {expected}. "
                "Resume with the `bank` and `loss` settings that the run started with."
            )
        for name, tensor in own.items():
            tensor.copy_(rows[name])
        self._clear()
        self.pointer, self.stored, self.step = numbers["pointer"], numbers["stored"], numbers["step"]
        self._map_ids()
        same = numbers.get("sums_of") == self._sums_of()
        if self.tables and not same:
            self._update_positive_logits(slice(0, self.stored))
        for prefix, table in self.tables.items():
            if same and f"{prefix}sums" in tensors:
                table.values.copy_(tensors[f"{prefix}sums"])
                table.closed.copy_(tensors[f"{prefix}closed"])
                table.open = list(numbers[f"{prefix}open"])
            elif self.stored:
                table.overwrite(0, self.stored, self.stored)
        self._begin_step()

    def _sums_of(self) -> dict[str, Any]:
        """Return the settings on which the stored log-sum-exps depend."""
        return {"push": self.push_rows, "age_decay": self.options.age_decay, **self.similarity.settings()}

    def fingerprint(self) -> str:
        """Return a hash of the stored rows. Processes that pushed the same rows get the same hash."""
        digest = hashlib.sha256(f"{self.pointer} {self.stored} {self.step}".encode())
        for name, tensor in self._tensors().items():
            if name != "positive_logits":  # computed values, which another machine may round differently
                digest.update(tensor.cpu().numpy().data)
        return digest.hexdigest()

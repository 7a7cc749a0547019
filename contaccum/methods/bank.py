"""The dual memory bank: a first-in-first-out ring of pairs (a past query with its past passages), and their ids.

Capacity is counted in rows. A query and its passages share one slot, so the two banks cannot drift apart. Stored vectors
carry no gradient. Source: Kim et al. 2024 (arXiv 2406.12356), section 4.
"""

import hashlib
from collections.abc import Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from contaccum.batch import NO_PASSAGE, RowIds
from contaccum.errors import InputError
from contaccum.methods.logsumexp import NestedLogSumExp, Preview
from contaccum.methods.loss import InfoNCE
from contaccum.methods.matryoshka import WHOLE, Prefixes
from contaccum.methods.undo import Undo

WAITING = ("queries", "passages", "columns", "known")
"""Of rows that wait for the end of an optimizer step, what a state holds."""
NOT_ROWS = ("sums", "closed", *(f"waiting_{name}" for name in WAITING))
"""Tensors of a state that are no rows in the bank."""


class Bank:
    """M slots, of which ``fill`` are in use; a bank of size 0 is legal and stays empty."""

    def __init__(
        self,
        size: int,
        dim: int,
        loss: InfoNCE,
        *,
        push: int,
        hard_negatives: int = 0,
        queries: bool = True,
        row_weight: str = "all",
        visibility: str = "immediate",
        keep: bool = True,
        warmup_steps: int = 0,
        age_decay: float = 0.0,
        prefixes: Prefixes = WHOLE,
        device: torch.device | None = None,
    ) -> None:
        """
        size: M, in rows. dim: d. loss: gives temperature and masking, which the kept log-sum-exps depend on.
        push: rows that one push usually brings (its size decides the blocks of the kept log-sum-exps, never the values).
        hard_negatives: how many hard negatives of each row are stored behind its positive.
        queries: store the queries too, as further rows; without them the bank gives columns alone.
        row_weight: ``all``: the loss is the mean over current and bank rows (as published); ``current``: over current rows.
        visibility: ``immediate``: a push is seen by the next micro-batch; ``on_step``: after the optimizer step.
        keep: False empties the bank after each optimizer step (the paper's "without past encoder").
        warmup_steps: optimizer steps during which the bank is filled but not used.
        age_decay: by how much the logit of a row and a column falls for each optimizer step between their encodings.
        prefixes: widths besides ``dim`` at which the loss compares; for each there is a bank of the cut vectors, with
        log-sum-exps of its own. Memory: with widths that add up to s, s / dim as much again as without them, and the sums.
        """
        self.size, self.dim = size, dim
        self.loss = loss
        self.row_weight = row_weight
        self.visibility = visibility
        self.keep = keep
        self.warmup_steps = warmup_steps
        self.age_decay = age_decay
        self.hard_negatives = hard_negatives
        self.pointer = 0  # the slot that the next push overwrites first: the oldest row once the ring is full
        self.stored = 0  # slots in use
        self.step = 0  # optimizer steps that have ended
        self.pending: list[tuple[Tensor, Tensor, RowIds, int]] = []
        self.pushed = 0  # rows pushed since the last optimizer step
        self.passages = torch.zeros(size, 1 + hard_negatives, dim, device=device)
        self.column_ids = torch.full((size, 1 + hard_negatives), NO_PASSAGE)  # ids stay on the CPU
        self.positives = torch.full((size, 1), NO_PASSAGE)
        self.queries = torch.zeros(size, dim, device=device) if queries else None
        self.positive_logits = torch.zeros(size, device=device)
        self.born = torch.zeros(
            size, dtype=torch.long
        )  # the step whose weights made a row; on the CPU: no loss reads it
        self.places = torch.zeros(size, dtype=torch.long)  # which row of its step a row is
        self.push_rows = push
        self.undo = Undo()
        self.sums = self._no_sums()
        self.prefixes = prefixes
        options = {"hard_negatives": hard_negatives, "queries": queries, "row_weight": row_weight}
        options |= {"visibility": visibility, "keep": keep, "warmup_steps": warmup_steps, "age_decay": age_decay}
        self.narrower = [Bank(size, width, loss, push=push, device=device, **options) for width in prefixes.widths]  # type: ignore[arg-type]
        """The banks of ``prefixes``, one for each of its widths; every change here is made in them too."""
        self._begin_step()

    def _no_sums(self) -> NestedLogSumExp | None:
        if self.queries is None or self.size == 0:
            return None
        tile = self.loss.tile // (1 + self.hard_negatives)
        return NestedLogSumExp(self.size, self.push_rows, tile, self.undo, self.passages.device)

    @property
    def fill(self) -> int:
        """Rows that the loss may use now: none during the warm-up steps."""
        return self.stored if self.step >= self.warmup_steps else 0

    def logsumexp(self) -> Tensor:
        """Log-sum-exp of each bank row over all bank columns, masked like all others, (fill,); constant."""
        assert self.sums is not None
        return self.sums.total(self.fill)

    def ages(self) -> Tensor:
        """Optimizer steps since each stored row was encoded, (stored,) int64; 0 for rows of the step under way."""
        return self.step - self.born[: self.stored]

    def falls(self) -> Tensor | None:
        """By how much the logits of stored rows and columns against current ones fall for their age, (fill,); None: nothing.

        Between two stored vectors it is the difference of their ages that counts, which stays what it is, so the kept
        log-sum-exps need no change as both grow older.
        """
        if not self.age_decay:
            return None
        return (self.ages()[: self.fill] * self.age_decay).to(self.passages)

    def preview(self, rows: int, columns: int) -> Preview | None:
        """What a loss is to fill for the push of its ``rows`` rows of ``columns`` columns each; None where it would be no use."""
        if self.sums is None or not self.fill or self.visibility == "on_step" or columns != 1 + self.hard_negatives:
            return None
        return self.sums.preview(self.pointer, self.fill, rows, columns)

    def push(self, queries: Tensor, passages: Tensor, ids: RowIds, previews: Sequence[Preview | None] = ()) -> None:
        """Store b rows over the oldest ones. queries (b, d), passages (b, 1 + H, d), ids of the same rows; copied, detached.

        previews: those of the loss that was just taken of these rows against this bank, which saves two products of it with
        them; without them the same is computed here.
        """
        if self.size == 0:
            return
        preview, *narrower = previews or [None]
        keep = 1 + self.hard_negatives
        ids = RowIds(ids.columns[:, :keep], ids.positives)
        rows = (queries.detach(), passages.detach()[:, :keep], ids, self.pushed)
        self.pushed += len(queries)
        if self.visibility == "on_step":
            self.pending.append(rows)
        else:
            self._store(*rows, preview)
        for bank, its_own in zip_longest(self.narrower, narrower):
            cut = partial(self.prefixes.cut, width=bank.dim)
            bank.push(cut(queries.detach()), cut(passages.detach()), ids, (its_own,))

    def end_step(self) -> None:
        """Called after each optimizer step: commits what waits for it, or empties the bank when it is not to be kept."""
        for rows in self.pending:
            self._store(*rows, None)
        self.pending = []
        self.pushed = 0
        self.step += 1
        if not self.keep:
            self._forget_rows()
        for bank in self.narrower:
            bank.end_step()
        self._begin_step()

    def empty(self) -> None:
        """Forget all rows, between two steps; the steps that have ended still count."""
        self._forget_rows()
        for bank in self.narrower:
            bank.empty()
        self._begin_step()

    def _forget_rows(self) -> None:
        self.pointer = self.stored = 0
        self.sums = self._no_sums()

    def rollback(self) -> None:
        """Go back, to the bit, to where the optimizer step began: after construction, ``end_step`` or ``load_state``."""
        self.undo.restore()
        self.pending, self.pushed = list(self._waited), sum(len(rows[0]) for rows in self._waited)
        self.pointer, self.stored, self.positives, opened = self._began
        if self.sums is not None:
            self.sums.open = opened
        for bank in self.narrower:
            bank.rollback()
        self._begin_step()

    def _begin_step(self) -> None:
        self.undo.forget()
        self._waited = list(self.pending)  # none but in a state that was taken within a step
        self._began = (self.pointer, self.stored, self.positives, list(self.sums.open) if self.sums else [])

    @torch.no_grad()
    def _store(self, queries: Tensor, passages: Tensor, ids: RowIds, place: int, preview: Preview | None) -> None:
        """Write b rows, ``place`` being the first one's place in its step."""
        b = len(queries)
        assert b <= self.size, f"a push of {b} rows into a bank of {self.size} would lose rows"
        self._widen(ids.positives.shape[1])
        known = F.pad(ids.positives, (0, self.positives.shape[1] - ids.positives.shape[1]), value=NO_PASSAGE)
        first = min(b, self.size - self.pointer)  # rows that fit before the end of the ring
        pieces = [(self.pointer, slice(0, first)), (0, slice(first, b))] if first < b else [(self.pointer, slice(0, b))]
        for start, rows in pieces:
            slots = slice(start, start + rows.stop - rows.start)
            for name in self._stored_tensors():
                self.undo.note(getattr(self, name), slots)
            self.passages[slots] = passages[rows]
            self.column_ids[slots] = ids.columns[rows]
            self.positives[slots] = known[rows]
            self.born[slots] = self.step
            self.places[slots] = torch.arange(place + rows.start, place + rows.stop)
            if self.queries is not None:
                self.queries[slots] = queries[rows]
        self.stored = min(self.size, self.stored + b)
        if self.sums is not None:
            for start, rows in pieces:
                stop = start + rows.stop - rows.start
                self.sums.overwrite(start, stop, self.stored, self._logits, preview)
                self._keep_positive_logits(start, stop)
        self.pointer = (self.pointer + b) % self.size

    def _widen(self, width: int) -> None:
        """Make room for rows with more known positives than any before."""
        if width > self.positives.shape[1]:
            self.positives = F.pad(self.positives, (0, width - self.positives.shape[1]), value=NO_PASSAGE)

    def _logits(self, rows: slice, slots: slice) -> Tensor:
        """Logits of bank rows against the columns of bank slots, (slots * columns per slot, rows), masked."""
        assert self.queries is not None
        left_out = self.loss.left_out(self.positives[rows], self.column_ids[slots].flatten())
        first, end = max(rows.start, slots.start), min(rows.stop, slots.stop)
        if len(left_out) and first < end:  # rows whose own positive is among the columns
            own = torch.arange(first, end)
            left_out = left_out.without(own - rows.start, (own - slots.start) * self.column_ids.shape[1])
        logits = self.loss.logits(self.passages[slots].flatten(0, 1), self.queries[rows], left_out.transposed())
        if self.age_decay:
            apart = (self.born[slots].unsqueeze(1) - self.born[rows]).abs()
            logits -= (apart * self.age_decay).to(logits).repeat_interleave(self.column_ids.shape[1], 0)
        return logits

    def _keep_positive_logits(self, start: int, stop: int) -> None:
        assert self.queries is not None
        products = self.queries[start:stop] * self.passages[start:stop, 0]
        self.positive_logits[start:stop] = products.sum(1) / self.loss.temperature

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything a resumed run needs: tensors, and plain numbers. Rows that wait for the step's end are among it."""
        tensors = {name: getattr(self, name) for name in self._stored_tensors()}
        if self.sums is not None:
            tensors |= {"sums": self.sums.values, "closed": self.sums.closed}
        numbers: dict[str, Any] = {
            "size": self.size,
            "pointer": self.pointer,
            "stored": self.stored,
            "step": self.step,
            "open": self.sums.open if self.sums else None,
            "sums_of": self._sums_of(),
            "waiting": [len(queries) for queries, *_ in self.pending],
        }
        if self.pending:
            queries, passages, ids, _ = zip(*self.pending, strict=True)
            width = max(each.positives.shape[1] for each in ids)
            known = [F.pad(each.positives, (0, width - each.positives.shape[1]), value=NO_PASSAGE) for each in ids]
            parts = (queries, passages, [each.columns for each in ids], known)
            tensors |= {f"waiting_{name}": torch.cat(list(part)) for name, part in zip(WAITING, parts, strict=True)}
        for bank in self.narrower:
            further, numbers[str(bank.dim)] = bank.state()
            tensors |= {f"{bank.dim}/{name}": tensor for name, tensor in further.items()}
        return {name: tensor.contiguous() for name, tensor in tensors.items()}, numbers

    def load_state(self, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
        """Take over what ``state`` gave; a bank of another shape raises InputError.

        The log-sum-exps are computed anew where they were kept under other settings than this bank's.
        """
        for bank in self.narrower:
            own = f"{bank.dim}/"
            bank.load_state(
                {name.removeprefix(own): tensor for name, tensor in tensors.items() if name.startswith(own)},
                numbers.get(str(bank.dim), {}),
            )
        tensors = {name: tensor for name, tensor in tensors.items() if "/" not in name}
        width = tensors["positives"].shape[1] if "positives" in tensors else 1
        self._widen(width)
        shapes = {name: tuple(getattr(self, name).shape) for name in self._stored_tensors()}
        found = {name: tuple(tensor.shape) for name, tensor in tensors.items() if name not in NOT_ROWS}
        if found != shapes:
            raise InputError(
                f"the checkpoint's bank has the shapes {found}, expected {shapes}: it is another configuration's"
            )
        for name in self._stored_tensors():
            getattr(self, name).copy_(tensors[name])
        self.pointer, self.stored, self.step = numbers["pointer"], numbers["stored"], numbers["step"]
        self.sums = self._no_sums()
        if self.sums is not None and numbers.get("sums_of") == self._sums_of():
            self.sums.load(tensors["sums"], tensors["closed"], numbers["open"])
        elif self.sums is not None:
            self.sums.overwrite(0, self.stored, self.stored, self._logits)
            self._keep_positive_logits(0, self.stored)
        self._load_waiting(tensors, numbers.get("waiting", []))
        self._begin_step()

    def _load_waiting(self, tensors: dict[str, Tensor], pushes: list[int]) -> None:
        """Let rows wait again that were pushed in the step under way, ``pushes`` rows at a time."""
        self.pending, self.pushed = [], 0
        if not pushes:
            return
        parts = (tensors[f"waiting_{name}"].split(pushes) for name in WAITING)
        for queries, passages, columns, known in zip(*parts, strict=True):
            rows = (
                queries.to(self.passages),
                passages.to(self.passages),
                RowIds(columns.cpu(), known.cpu()),
                self.pushed,
            )
            self.pending.append(rows)
            self.pushed += len(queries)

    def _sums_of(self) -> dict[str, Any]:
        """What the kept log-sum-exps depend on besides the stored rows; blocks of another width may make the same shape."""
        return {
            "push": self.push_rows,
            "temperature": self.loss.temperature,
            "age_decay": self.age_decay,
            "mask_false_negatives": self.loss.mask_false_negatives,
        }

    def fingerprint(self) -> str:
        """Hash of all that is stored; processes that were pushed the same rows have the same one."""
        digest = hashlib.sha256(f"{self.pointer} {self.stored} {self.step}".encode())
        # the log-sum-exps are left out: each process computes its own, and unequal machines round them differently
        for name in (name for name in self._stored_tensors() if name != "positive_logits"):
            digest.update(getattr(self, name).cpu().numpy().data)
        return digest.hexdigest()

    def _stored_tensors(self) -> list[str]:
        names = ["passages", "column_ids", "positives", "born", "places"]
        return names if self.queries is None else [*names, "queries", "positive_logits"]

"""InfoNCE loss with a bank, for the training loops of other libraries.

A bank stores vectors of earlier queries and passages. ``BankLoss`` gives the gradients of
``contaccum.methods.cont_accum`` if the training loop divides the loss by the number of
micro-batches in a step. With n processes, the loss uses the vectors of all processes.
DistributedDataParallel divides the gradients by n, so the loss multiplies its own gradient by n.
"""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from contaccum.batch import NO_PASSAGE, RowIds
from contaccum.config import BankConfig
from contaccum.config.declare import NonNegativeInt, PositiveFloat
from contaccum.config.load import converted
from contaccum.errors import InputError, NotFiniteError
from contaccum.methods.bank import Bank, BankLogits, BankOptions
from contaccum.methods.loss import InfoNCE
from contaccum.runtime.files import whole_file
from contaccum.runtime.processes import started_elsewhere, tensor_defaults

BANK_FILE = "contaccum_bank.safetensors"  # file name in a checkpoint folder of the other library
# complete state of a bank: tensors by name, and other values by name
State = tuple[dict[str, Tensor], dict[str, Any]]


class BankLoss:
    """InfoNCE loss of a micro-batch, compared with itself and with a bank.

    Source: Kim et al. 2024 (arXiv 2406.12356).
    """

    def __init__(
        self,
        bank_size: int | None,
        similarity: str,
        temperature: float = 0.05,
        mask_false_negatives: bool = True,
        hard_negatives: bool = True,
        **bank_options: Any,
    ) -> None:
        """Create the loss; the first batch creates the bank.

        bank_size: maximum number of queries in the bank, each with its passages. 0: no bank (plain
        gradient accumulation). None: the value of ``step_pairs`` in ``begin``. similarity:
        ``cosine`` or ``dot``. temperature: every similarity is divided by this number.
        mask_false_negatives: for each query, mask the negatives that equal the positive passage.
        hard_negatives: store hard negatives in the bank. bank_options: ``queries=False`` stores
        only passages in the bank. For row_weight, age_decay, keep and warmup_steps, see
        BankOptions.
        """
        bank_size = converted(NonNegativeInt | None, bank_size, "bank_size")
        temperature = converted(PositiveFloat, temperature, "temperature")
        if similarity not in ("cosine", "dot"):
            raise InputError(f"similarity is {similarity!r}; expected cosine or dot")
        mask_false_negatives = converted(bool, mask_false_negatives, "mask_false_negatives")
        self.hard_negatives = converted(bool, hard_negatives, "hard_negatives")
        self.bank_size, self.similarity, self.size = bank_size, similarity, bank_size or 0
        kinds = {**get_type_hints(BankConfig, include_extras=True), "queries": bool}
        options = self.bank_options = {
            name: converted(kinds[name], value, name) if name in kinds else value
            for name, value in bank_options.items()
        }
        self.options = BankOptions(
            columns_only=not options.get("queries", True),
            **{name: value for name, value in options.items() if name != "queries"},
        )
        self.loss = InfoNCE(temperature, mask_false_negatives)
        self.begun = False
        self.bank: Bank | None = None
        # for the next push
        self._waiting: tuple[Tensor, Tensor, RowIds, tuple[BankLogits | None, ...]] | None = None
        self._state: State = ({}, {})  # saved, until the first batch restores the bank from it
        self._steps = 0  # optimizer steps that ended before the first batch

    def begin(self, saved: State | None = None, step_pairs: int | None = None) -> None:
        """Start training with an empty bank, or with a saved one.

        saved: the result of ``state``; the first batch restores the bank from it. step_pairs:
        number of pairs (query, positive) in one optimizer step, over all processes. If bank_size is
        None, this number is the size of the bank.
        """
        size = self.bank_size if self.bank_size is not None else step_pairs
        if size is None:
            raise InputError("bank_size and step_pairs are both None; set one of them to a number")
        self.size, self.begun, self.bank, self._waiting = size, True, None, None
        self._state = saved or ({}, {})
        self._steps = self._state[1].get("steps_before", 0)

    def end_step(self) -> None:
        """Tell the bank that an optimizer step has ended."""
        self._push()
        if self.bank is not None:
            self.bank.end_step()
        else:  # the first batch of this loss comes later, as with one loss for each data set
            self._steps += 1

    def _push(self) -> None:
        """Add the vectors of the last training batch to the bank."""
        if self.bank is not None and self._waiting is not None:
            self.bank.push(*self._waiting)
        self._waiting = None

    def state(self) -> State:
        """Return the state of the bank, for a checkpoint, also before the first batch."""
        self._push()
        if self.bank is None:
            tensors, numbers = self._state
            return tensors, {**numbers, "steps_before": self._steps}
        tensors, numbers = self.bank.state()
        return tensors, {**numbers, "similarity": self.similarity}

    @tensor_defaults()
    def __call__(
        self, queries: Tensor, passages: Tensor, ids: Tensor | None = None, *, training: bool
    ) -> Tensor:
        """Compute the loss of B queries.

        queries: vectors (B, d). passages: vectors (B, 1 + H, d); for each query, the positive and
        then H hard negatives. ids: passage ids (B, 1 + H), int64, at least 0. Equal passages must
        have equal ids. None: no passage is masked. training: if True, use the vectors of all
        processes and of the bank, and then add the new vectors to the bank. If False, use only
        ``queries`` and ``passages``, and do not change the bank.
        """
        if passages.ndim != 3 or passages[:, 0].shape != queries.shape or not queries.numel():
            shapes = f"queries have shape {tuple(queries.shape)}, passages {tuple(passages.shape)}"
            raise InputError(f"{shapes}; expected (B, d) and (B, 1 + H, d) with at least one query")
        queries, passages = queries.float(), passages.float()
        if self.similarity == "cosine":
            queries, passages = F.normalize(queries, dim=-1), F.normalize(passages, dim=-1)
        known = ids is not None
        if ids is None:
            ids = torch.full(passages.shape[:2], NO_PASSAGE, device=queries.device)
        if ids.shape != passages.shape[:2] or ids.dtype != torch.int64:
            raise InputError(
                f"ids have shape {tuple(ids.shape)} and type {ids.dtype}; expected "
                f"{tuple(passages.shape[:2])} and int64"
            )
        if not training:
            return self.loss(queries, passages, _row_ids(ids, known)).value
        if not self.begun:
            raise InputError(
                "the loss was called in training before begin(). Add ContAccumCallback to the "
                "trainer, or call begin() and end_step() in your own loop."
            )
        group = started_elsewhere(queries.device)
        if others := group.differing(str(list(passages.shape))):
            raise InputError(
                f"the passages of a batch have shape (B, 1 + H, d) {tuple(passages.shape)} in rank "
                f"{group.rank} ({others}); every process needs equally many pairs and hard "
                "negatives in each batch"
            )
        queries, passages, ids = (group.all_rows(each) for each in (queries, passages, ids))
        if 0 < self.size < (pairs := len(queries)):
            raise InputError(
                f"bank_size is {self.size}; expected 0 or at least {pairs} (pairs in one "
                "micro-batch, summed over processes)"
            )
        self._push()
        rows = _row_ids(ids, known)
        bank = self.bank = self.bank or self._make_bank(queries, passages)
        stored, width = bank.options.hard_negatives, bank.passages.shape[2]
        hard = passages.shape[1] - 1 if self.hard_negatives else stored
        if bank.size and (hard, passages.shape[2]) != (stored, width):
            raise InputError(
                f"a batch has {hard} hard negatives per query and vectors of width "
                f"{passages.shape[2]}, but the bank stores {stored} of width {width}. Use the same "
                "number in all data sets, or set hard_negatives=False. For Matryoshka training use "
                "contaccum train with loss.matryoshka_dims."
            )
        found = self.loss(queries, passages, rows, bank)
        value = found.value
        if not torch.isfinite(value):
            raise NotFiniteError(
                f"the loss is {value.item()}; it must be a finite number. The bank is unchanged."
            )
        # The backward pass of the other library still needs the bank as it is, so the vectors are
        # pushed later.
        self._waiting = (queries.detach(), passages.detach(), rows, found.bank_logits)
        # DistributedDataParallel averages the gradients over processes, but the loss needs the sum
        # of the gradients
        return (
            value if group.world == 1 else value.detach() + (value - value.detach()) * group.world
        )

    def _make_bank(self, queries: Tensor, passages: Tensor) -> Bank:
        options = replace(
            self.options, hard_negatives=passages.shape[1] - 1 if self.hard_negatives else 0
        )
        similarity = self.loss.similarity
        bank = Bank(
            self.size,
            queries.shape[1],
            similarity,
            options,
            push=len(queries),
            device=queries.device,
        )
        tensors, numbers = self._state
        if tensors:
            saved = numbers["similarity"]
            if saved != self.similarity:
                raise InputError(
                    f"similarity is {self.similarity}, but the checkpoint has {saved}. Use {saved} "
                    "again."
                )
            bank.load_state(tensors, numbers)
        for _ in range(self._steps):
            bank.end_step()
        self._state, self._steps = ({}, {}), 0
        return bank


def content_ids(rows: list[list[int]]) -> Tensor:
    """Return an id for each of n texts: (n,), int64, at least 0. rows: token ids of each text.

    Equal texts get equal ids.
    """
    digests = (hashlib.blake2b(json.dumps(row).encode(), digest_size=8).digest() for row in rows)
    return torch.tensor([int.from_bytes(digest, "little") >> 1 for digest in digests])


def _row_ids(ids: Tensor, known: bool) -> RowIds:
    """Return ids on the CPU. known: whether the caller of the loss gave them."""
    ids = ids.cpu()
    if known and ids.min() < 0:
        raise InputError(f"ids: the smallest is {ids.min()}; expected at least 0")
    return RowIds(ids, ids[:, :1])  # only the first passage of a query is a known positive


def write_bank(folder: Path, state: State, name: str = BANK_FILE) -> None:
    """Write the state of a bank to the file ``name`` in a checkpoint folder."""
    tensors, numbers = state
    with whole_file(folder / name) as file:
        file.write(
            save(
                {name: tensor.cpu() for name, tensor in tensors.items()},
                {"bank": json.dumps(numbers)},
            )
        )


def read_bank(folder: Path, name: str = BANK_FILE) -> State:
    """Read the state that ``write_bank`` wrote. Raise InputError if there is none."""
    if not (folder / name).is_file():
        raise InputError(
            f"{folder / name}: no such file; expected a checkpoint that ContAccumCallback "
            "saved. If it is in another folder, set resume_from_checkpoint in the training "
            "arguments to it."
        )
    with safe_open(folder / name, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return tensors, json.loads(file.metadata()["bank"])

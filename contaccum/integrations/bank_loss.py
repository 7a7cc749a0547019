"""What the adapters share: our loss over our bank, for a loop that divides, averages and steps by itself.

Such a loop divides each micro-batch's loss by their number in a step, and DistributedDataParallel averages gradients over the
processes. The loss here is that of the rows of all processes, and its gradient is multiplied by their number: what the loop
makes of it is the gradient of our own loop (``contaccum.methods.cont_accum``), and the value that it logs is the loss itself.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from contaccum.batch import NO_PASSAGE, RowIds
from contaccum.errors import InputError, NotFiniteError
from contaccum.files import whole_file
from contaccum.methods.bank import Bank
from contaccum.methods.loss import InfoNCE
from contaccum.processes import started_elsewhere

BANK_FILE = "contaccum_bank.safetensors"
"""What holds the bank in a checkpoint of the other library."""


class BankLoss:
    """InfoNCE of each micro-batch against itself and a bank of the pairs before it (Kim et al. 2024, arXiv 2406.12356)."""

    def __init__(
        self,
        bank_size: int | None,
        similarity: str,
        temperature: float = 0.05,
        mask_false_negatives: bool = True,
        hard_negatives: bool = True,
        **bank_options: Any,
    ) -> None:
        """
        bank_size: M, rows of the bank; 0 is plain gradient accumulation; None: as many as an optimizer step has pairs, which
        ``begin`` is told. similarity: ``cosine`` or ``dot``. temperature: divides every similarity. mask_false_negatives: leave
        out columns that are the same passage as a row's own positive. hard_negatives: bank them too. bank_options: queries,
        row_weight, age_decay, visibility, keep, warmup_steps, as Bank has them.
        """
        if similarity not in ("cosine", "dot"):
            raise InputError(f"similarity is {similarity!r}, expected cosine or dot")
        self.bank_size, self.similarity, self.hard_negatives = bank_size, similarity, hard_negatives
        self.size = bank_size or 0
        self.options = bank_options
        self.loss = InfoNCE(temperature, mask_false_negatives)
        self.begun = False
        self.bank: Bank | None = None  # made at the first push, which tells its width and the hard negatives of a row
        self._state: tuple[dict[str, Tensor], dict[str, Any]] | None = None

    def begin(self, checkpoint: str | Path | None = None, step_pairs: int | None = None) -> None:
        """To be called when training begins, with an empty bank or that of a checkpoint's folder.

        step_pairs: pairs of one optimizer step, over all processes; asked for where no bank size was given.
        """
        size = self.bank_size if self.bank_size is not None else step_pairs
        if size is None:
            raise InputError(
                "bank_size was not given and no trainer says how many pairs a step has, expected a number of rows"
            )
        self.size = size
        self.begun, self.bank = True, None
        self._state = None if checkpoint is None else read_bank(Path(checkpoint))

    def end_step(self) -> None:
        """To be called after each optimizer step."""
        if self.bank is not None:
            self.bank.end_step()

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """The bank's; None before the first batch."""
        if self.bank is None:
            return self._state
        tensors, numbers = self.bank.state()
        return tensors, {**numbers, "similarity": self.similarity}

    def load_state(self, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
        """Go on from what ``state`` gave."""
        self.bank, self._state = None, (tensors, numbers)

    def __call__(self, queries: Tensor, passages: Tensor, ids: Tensor | None = None, *, training: bool) -> Tensor:
        """The loss of this process's rows: queries (B, d), passages (B, 1 + H, d), each row's own first; ids (B, 1 + H) int64.

        In training: over the rows of all processes and the bank, to which they are pushed. Else: over these rows alone, and the
        bank is left as it is. Ids count from 0 and are equal where passages are; without them nothing is masked.
        """
        queries, passages = queries.float(), passages.float()
        if self.similarity == "cosine":
            queries, passages = F.normalize(queries, dim=-1), F.normalize(passages, dim=-1)
        if ids is None:
            ids = torch.full(passages.shape[:2], NO_PASSAGE, device=queries.device)
        if not training:
            return self.loss(queries, passages, _row_ids(ids)).value
        if not self.begun:
            raise InputError(
                "the loss was called in training before begin(), expected its callback among the trainer's, or begin() and "
                "end_step() around the steps of a loop of your own"
            )
        group = started_elsewhere(queries.device)
        queries, passages, ids = (group.all_rows(each) for each in (queries, passages, ids))
        rows = _row_ids(ids)
        bank = self.bank = self.bank or self._make_bank(queries, passages)
        if bank.size:
            self._refuse_other_shapes(bank, passages)
        found = self.loss(queries, passages, rows, columns=bank, rows=bank)
        value = found.value
        if not torch.isfinite(value):
            raise NotFiniteError(f"the loss is {value.item()}, expected a finite number; the bank is as it was before")
        bank.push(queries, passages, rows, found.previews)
        # the gradient is averaged over the processes, where a sum over the rows of all is meant
        return value if group.world == 1 else value.detach() + (value - value.detach()) * group.world

    def _refuse_other_shapes(self, bank: Bank, passages: Tensor) -> None:
        """The bank was made for the first batch; rows of another shape cannot stand in it."""
        hard, width = passages.shape[1] - 1, passages.shape[2]
        if width != bank.passages.shape[2]:
            raise InputError(
                f"vectors are {width} wide and the bank's {bank.passages.shape[2]}, expected one width: a loss that cuts vectors "
                "cannot be wrapped around this one (contaccum train has loss.matryoshka_dims)"
            )
        if self.hard_negatives and hard != bank.hard_negatives:
            raise InputError(
                f"a batch has {hard} hard negatives a query and the bank's rows have {bank.hard_negatives}, expected one number "
                "in all data sets that share the loss, or hard_negatives=False"
            )

    def _make_bank(self, queries: Tensor, passages: Tensor) -> Bank:
        if 0 < self.size < len(queries):
            raise InputError(
                f"bank_size is {self.size}, expected 0 or at least the {len(queries)} pairs of one micro-batch"
            )
        bank = Bank(
            self.size,
            queries.shape[1],
            self.loss,
            push=len(queries),
            hard_negatives=passages.shape[1] - 1 if self.hard_negatives else 0,
            device=queries.device,
            **self.options,
        )
        if self._state is not None:
            tensors, numbers = self._state
            kept = numbers.get("similarity", self.similarity)  # banks once were written without it
            if kept != self.similarity:
                raise InputError(
                    f"similarity is {self.similarity} and the checkpoint's bank holds vectors for {kept}, expected the same"
                )
            bank.load_state(tensors, numbers)
            self._state = None
        return bank


def content_ids(rows: list[list[int]]) -> Tensor:
    """A number for each text's tokens, (n,) int64 from 0 on: the same for the same tokens, in every process and run."""
    digests = (hashlib.blake2b(json.dumps(row).encode(), digest_size=8).digest() for row in rows)
    return torch.tensor([int.from_bytes(digest, "little") >> 1 for digest in digests])


def _row_ids(ids: Tensor) -> RowIds:
    """Of each row, the passage known to be relevant is its own."""
    return RowIds(ids.cpu(), ids[:, :1].cpu())


def write_bank(folder: Path, state: tuple[dict[str, Tensor], dict[str, Any]]) -> None:
    """Keep a bank in a checkpoint's folder."""
    tensors, numbers = state
    with whole_file(folder / BANK_FILE) as file:
        file.write(save({name: tensor.cpu() for name, tensor in tensors.items()}, {"bank": json.dumps(numbers)}))


def read_bank(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What ``write_bank`` kept; InputError where the folder holds no bank."""
    path = folder / BANK_FILE
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, json.loads(file.metadata()["bank"])  # noqa: SIM118
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path}: holds no bank ({error}), expected the checkpoint of a run with one") from error

"""A bank after a step that was taken back is, to the bit, the bank that never saw it."""

import copy
import random

import pytest
import torch
from helpers import make_bank, micro_batches

from contaccum.batch import NO_PASSAGE, RowIds
from contaccum.methods.bank import Bank
from contaccum.methods.loss import InfoNCE
from contaccum.methods.matryoshka import FULL_WIDTH, Matryoshka
from contaccum.methods.objective import Objective
from contaccum.methods.similarity import Similarity

DIM = 8


def push(bank: Bank, rows: int, seed: int, known: int = 2) -> None:
    """Random rows that know ``known`` positives each, the second of them often none."""
    hard = bank.passages.shape[1] - 1
    ids = micro_batches(1, rows, hard, passages=12, seed=seed)[0].ids
    more = torch.full((rows, known), NO_PASSAGE)
    more[:, :2] = ids.positives[:, :known]
    generator = torch.Generator().manual_seed(seed)
    queries, passages = (
        torch.randn(rows, *shape, DIM, generator=generator) for shape in ((), (1 + hard,))
    )
    bank.push(queries, passages, RowIds(ids.columns, more))


def push_often(bank: Bank, times: int) -> None:
    for number in range(times):
        push(bank, 2, 50 + number)


def everything(bank: Bank) -> dict:
    tensors, numbers = bank.state()
    held = {
        name: (tuple(tensor.shape), tensor.numpy().tobytes()) for name, tensor in tensors.items()
    }
    return held | copy.deepcopy(numbers)


def take_steps(bank: Bank, sizes: list[list[int]], seed: int) -> None:
    for step, pushes in enumerate(sizes):
        for number, rows in enumerate(pushes):
            push(bank, rows, seed + 100 * step + number)
        bank.end_step()


@pytest.mark.parametrize("before", [0, 1, 2, 5, 9])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"hard_negatives": 2},
        {"columns_only": True},
        {"keep": False},
        {"warmup_steps": 3},
        {"hard_negatives": 1, "age_decay": 0.5},
        {"matryoshka": Matryoshka((5, 2), (1.0, 1.0), unit=True), "hard_negatives": 1},
    ],
    ids=str,
)
def test_a_step_taken_back_leaves_no_trace(options, before):
    """Pushes of many sizes, which wrap the ring several times and bring rows with more known
    positives than any before."""
    draw = random.Random(before)
    sizes = [[draw.randint(1, 5) for _ in range(draw.randint(1, 6))] for _ in range(before)]
    options = dict(options)
    loss = Objective(InfoNCE(0.2), options.pop("matryoshka", FULL_WIDTH))
    bank = make_bank(23, DIM, loss, push=3, **options)
    take_steps(bank, sizes, 0)
    untouched, kept = copy.deepcopy(bank), everything(bank)
    for attempt in range(3):
        for number in range(attempt * 9 + 1):
            push(bank, draw.randint(1, 5), 5000 + number, known=2 + number % 3)
        assert everything(bank) != kept  # negative control: the failed step had left traces
        bank.rollback()
        assert everything(bank) == kept
    for each in (bank, untouched):
        take_steps(each, [[4, 2], [5, 5, 5, 5, 5], [1]], 900)
    assert everything(bank) == everything(untouched)


def test_a_push_that_breaks_off_in_the_middle_is_taken_back(monkeypatch):
    """Memory runs out between a push's writes, at every place where it can."""
    for place in range(12):
        bank = make_bank(10, DIM, InfoNCE(0.2), push=2)
        take_steps(bank, [[2, 2, 2], [2, 2]], 0)
        kept, calls, plain = everything(bank), iter(range(1000)), Similarity.logits

        def logits(self, *rest, calls=calls, plain=plain, place=place):
            if next(calls) == place:
                raise torch.OutOfMemoryError
            return plain(self, *rest)

        with monkeypatch.context() as patch:
            patch.setattr(Similarity, "logits", logits)
            with pytest.raises(torch.OutOfMemoryError):
                push_often(bank, 9)
        bank.rollback()
        assert everything(bank) == kept


def test_only_what_the_step_overwrote_is_kept():
    """A push keeps the overwritten vectors, and of the table one row of numbers; nothing is kept
    after the step."""
    bank = make_bank(1000, DIM, InfoNCE(0.2), push=2)
    for number in range(5):
        push(bank, 2, number)
    bank.end_step()
    assert bank._overwritten == bank.sums._before == []
    push(bank, 2, 6)
    (slots, contents), *others = bank._overwritten
    assert not others
    assert (slots.start, slots.stop) == (10, 12)
    assert sum(content.numel() for content in contents if content.is_floating_point()) == 2 * (
        2 * DIM + 1
    )
    kept = sum(before.numel() for _, before in bank.sums._before)
    assert kept == 1000 + 2 * len(bank.sums.table) < bank.sums.table.numel() / 10
    bank.end_step()
    assert bank._overwritten == bank.sums._before == []

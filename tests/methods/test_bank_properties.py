"""The bank against a plain list of rows, over pushes of any sizes, ids and settings."""

import pytest
import torch
from helpers import SlowBank, make_bank
from hypothesis import given, settings
from hypothesis import strategies as st

from contaccum.batch import NO_PASSAGE, RowIds
from contaccum.methods.bank import Bank
from contaccum.methods.loss import InfoNCE
from contaccum.methods.pairs import positive_columns

DIM = 3


@st.composite
def stories(draw):
    """Size and settings of a bank, and pushes of rows with their ids."""
    size = draw(st.integers(1, 12))
    hard = draw(st.integers(0, 2))
    lengths = draw(st.lists(st.integers(1, size), min_size=1, max_size=10))
    passages = st.integers(0, 6)
    pushes = []
    for length in lengths:
        columns = [
            draw(st.lists(passages, min_size=1 + hard, max_size=1 + hard)) for _ in range(length)
        ]
        width = draw(st.integers(0, 3))
        known = [
            [
                row[0],
                *draw(st.lists(passages | st.just(NO_PASSAGE), min_size=width, max_size=width)),
            ]
            for row in columns
        ]
        pushes.append(RowIds(torch.tensor(columns), torch.tensor(known)))
    return size, draw(st.integers(1, size)), hard, draw(st.booleans()), pushes


def rows(number: int, length: int, hard: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(length, DIM, generator=generator), torch.randn(
        length, 1 + hard, DIM, generator=generator
    )


@settings(max_examples=50, deadline=None, derandomize=True, database=None)
@given(stories())
def test_the_ring_holds_the_newest_rows_and_their_exact_sums(story):
    size, push, hard, mask, pushes = story
    bank, slow = (
        make_bank(size, DIM, InfoNCE(0.5, mask), push=push, hard_negatives=hard),
        SlowBank(size),
    )
    for number, ids in enumerate(pushes):
        made = rows(number, len(ids.columns), hard)
        bank.push(*made, ids)
        slow.push(*made, ids)
        assert_alike(bank, slow, mask)


def assert_alike(bank: Bank, slow: SlowBank, mask: bool) -> None:
    assert bank.fill == len(slow.rows)
    # oldest first
    order = [(bank.pointer - len(slow.rows) + place) % bank.size for place in range(len(slow.rows))]
    assert bank.column_ids[order].tolist() == [ids for _, _, ids, *_ in slow.rows]
    assert [set(row) - {NO_PASSAGE} for row in bank.positives[order].tolist()] == [
        known for _, _, _, known, *_ in slow.rows
    ]
    assert torch.equal(bank.queries[order], torch.stack([query for query, *_ in slow.rows]))
    assert torch.equal(
        bank.passages[order], torch.stack([torch.stack(own) for _, own, *_ in slow.rows])
    )
    torch.testing.assert_close(
        bank.logsumexp()[order], plain_sums(slow, mask), rtol=1e-5, atol=1e-5
    )


def plain_sums(slow: SlowBank, mask: bool) -> torch.Tensor:
    """Log-sum-exp of each row over all columns, one by one, without its own positive and other
    known ones."""
    sums = []
    for query, own, _, known, *_ in slow.rows:
        logits = [
            query @ passage / 0.5
            for _, passages, ids, *_ in slow.rows
            for passage, key in zip(passages, ids, strict=True)
            if passage is not own[0] and not (mask and key in known)
        ]
        lowest = torch.tensor(torch.finfo(torch.float32).min)
        sums.append(torch.stack([lowest, *logits]).logsumexp(0))
    return torch.stack(sums)


def test_the_plain_reading_sees_a_row_too_many():
    """Negative control."""
    bank, slow = make_bank(3, DIM, InfoNCE(0.5), push=1), SlowBank(4)
    for number in range(4):
        ids = RowIds(torch.tensor([[number]]), torch.tensor([[number]]))
        bank.push(*rows(number, 1, 0), ids)
        slow.push(*rows(number, 1, 0), ids)
    assert bank.fill == 3
    assert not torch.allclose(bank.logsumexp()[[1, 2, 0]], plain_sums(slow, True)[1:], atol=1e-3)


@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(stories(), st.integers(0, 9))
def test_a_saved_bank_goes_on_as_if_it_had_never_stopped(story, stop):
    size, push, hard, mask, pushes = story
    loss = InfoNCE(0.5, mask)
    whole = make_bank(size, DIM, loss, push=push, hard_negatives=hard)
    for number, ids in enumerate(pushes):
        if number == stop:
            whole.end_step()
        whole.push(*rows(number, len(ids.columns), hard), ids)
        whole.end_step()  # a state is one between steps
    broken = make_bank(size, DIM, loss, push=push, hard_negatives=hard)
    for number, ids in enumerate(pushes):
        if number == stop:  # between two steps, as every checkpoint is
            broken.end_step()
            tensors, numbers = broken.state()
            broken = make_bank(size, DIM, loss, push=push, hard_negatives=hard)
            broken.load_state({name: tensor.clone() for name, tensor in tensors.items()}, numbers)
        broken.push(*rows(number, len(ids.columns), hard), ids)
        broken.end_step()
    assert broken.state()[1] == whole.state()[1]
    for name, tensor in whole.state()[0].items():
        assert torch.equal(broken.state()[0][name], tensor), name


def sorted_pairs(positives: torch.Tensor, column_ids: torch.Tensor) -> set[tuple[int, int]]:
    """Reference: (row, column) of the columns (c,) that contain a known positive (r, P) of a row,
    by sorting and searching."""
    ids, order = column_ids.sort()
    wanted = positives.flatten()
    first = torch.searchsorted(ids, wanted)
    counts = torch.searchsorted(ids, wanted, right=True) - first
    counts[wanted == NO_PASSAGE] = 0
    row = (
        torch.arange(len(positives)).repeat_interleave(positives.shape[1]).repeat_interleave(counts)
    )
    begin = (counts.cumsum(0) - counts).repeat_interleave(counts)
    column = order[first.repeat_interleave(counts) + torch.arange(len(row)) - begin]
    return set(zip(row.tolist(), column.tolist(), strict=True))


def assert_masks_alike(bank: Bank, ids: RowIds, part: slice) -> None:
    """Compare the bank's maps with the reference, for current rows and columns against slots
    ``part`` and back."""
    b, hard = len(ids.columns), ids.columns.shape[1] - 1
    current = InfoNCE(0.5)._pairs(*rows(0, b, hard), ids, bank)
    stored = bank.pairs(part)
    columns = bank.column_ids[part].flatten()
    assert positive_columns(current, stored) == sorted_pairs(ids.positives, columns)
    assert positive_columns(stored, current) == sorted_pairs(
        bank.positives[part], ids.columns.flatten()
    )
    own = {(row, row * (1 + hard)) for row in range(part.stop - part.start)}
    assert positive_columns(stored, stored) == sorted_pairs(bank.positives[part], columns) | own


@settings(max_examples=50, deadline=None, derandomize=True, database=None)
@given(stories(), st.integers(0, 9), st.booleans())
def test_bank_finds_masked_pairs_of_the_sorted_search(story, failing, reload):
    """After each push, after a step that is rolled back, and after a bank is loaded."""
    size, push, hard, _, pushes = story
    loss = InfoNCE(0.5)
    bank = make_bank(size, DIM, loss, push=push, hard_negatives=hard)
    for number, ids in enumerate(pushes):
        if number == failing:
            for other in pushes:
                bank.push(*rows(99, len(other.columns), hard), other)
            bank.rollback()
        bank.push(*rows(number, len(ids.columns), hard), ids)
        bank.end_step()
        if reload:
            tensors, numbers = bank.state()
            bank = make_bank(size, DIM, loss, push=push, hard_negatives=hard)
            bank.load_state(tensors, numbers)
        for part in (slice(0, bank.fill), slice(bank.fill // 3, bank.fill - bank.fill // 4)):
            for other in pushes:
                assert_masks_alike(bank, other, part)


def test_sorted_search_sees_a_stale_map():
    """Negative control: a row that the maps do not know is missed."""
    bank = make_bank(3, DIM, InfoNCE(0.5), push=1)
    ids = RowIds(torch.tensor([[4]]), torch.tensor([[4]]))
    bank.push(*rows(0, 1, 0), ids)
    assert_masks_alike(bank, ids, slice(0, 1))
    bank.column_ids[0] = 5
    with pytest.raises(AssertionError):
        assert_masks_alike(bank, ids, slice(0, 1))

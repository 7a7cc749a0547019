"""The four-block loss and the ring against a full matrix built from plain lists, over enough pushes to wrap many times."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from helpers import SlowBank, make_bank, micro_batches, slow_loss
from torch import Tensor

from contaccum.batch import NO_PASSAGE, RowIds
from contaccum.errors import InputError
from contaccum.methods.bank import Bank
from contaccum.methods.logsumexp import NestedLogSumExp, RollbackJournal
from contaccum.methods.loss import InfoNCE
from contaccum.methods.objective import Matryoshka, Objective
from contaccum.methods.similarity import MaskedPairs, Similarity

DIM = 12
TEMPERATURE = 0.2


def embeddings(ids: RowIds, seed: int):
    generator = torch.Generator().manual_seed(seed)
    b, columns = ids.columns.shape
    queries = F.normalize(torch.randn(b, DIM, generator=generator), dim=-1)
    passages = F.normalize(torch.randn(b, columns, DIM, generator=generator), dim=-1)
    return queries.requires_grad_(), passages.requires_grad_()


def differences(
    size, *, b=4, pushes=14, hard=0, mask=True, rows=True, weight="all", few=12, tile=1 << 22, bank_hard=None, push=None,
    decay=0.0, slow_decay=None, taken_over=lambda partials: partials,
):  # fmt: skip
    """Largest difference of loss and gradients between the fast and the slow reading, over all pushes; three to a step.

    taken_over: makes of what each loss leaves for the push what the push is given.
    """
    loss = InfoNCE(TEMPERATURE, mask, tile)
    bank_hard = hard if bank_hard is None else bank_hard
    options = {"hard_negatives": bank_hard, "columns_only": not rows, "row_weight": weight, "age_decay": decay}
    bank = make_bank(size, DIM, loss, push=push or b, **options)
    slow_decay = decay if slow_decay is None else slow_decay
    slow = SlowBank(size)
    largest = 0.0
    for number, batch in enumerate(micro_batches(pushes, b, hard, passages=few)):
        queries, passages = embeddings(batch.ids, number)
        found = loss(queries, passages, batch.ids, columns=bank, rows=bank)
        fast = found.value
        plain = slow_loss(
            queries, passages, batch.ids, slow, TEMPERATURE, mask=mask, rows=rows, weight=weight, decay=slow_decay
        )
        pairs = zip(
            (fast, *torch.autograd.grad(fast, (queries, passages))),
            (plain, *torch.autograd.grad(plain, (queries, passages))),
            strict=True,
        )
        largest = max([largest, *((a - b).abs().max().item() for a, b in pairs)])
        bank.push(queries, passages, batch.ids, taken_over(found.partials))
        keep = 1 + bank_hard
        slow.push(queries, passages[:, :keep], RowIds(batch.ids.columns[:, :keep], batch.ids.positives))
        if number % 3 == 2:
            bank.end_step()
            slow.step += 1
    assert bank.fill == min(size, pushes * b)
    return largest


@pytest.mark.parametrize("size", [4, 8, 10, 16, 23, 100])
@pytest.mark.parametrize("mask", [True, False])
def test_loss_and_gradients_equal_the_full_matrix_while_the_ring_wraps(size, mask):
    assert differences(size, mask=mask) < 2e-6


@pytest.mark.parametrize(
    ("size", "options"),
    [(4, {}), (8, {"hard": 2}), (24, {"decay": 0.7}), (24, {"tile": 7}), (40, {"tile": 50, "hard": 1})],
)
def test_what_the_loss_found_saves_the_push_its_products(size, options):
    """Pushes that are given the loss's findings, and pushes that compute all anew; the ring goes round twice."""
    given = []

    def note(partials):
        given.append(partials[0])
        return partials

    assert differences(size, pushes=24, taken_over=note, **options) < 3e-6
    assert [preview is None for preview in given] == [True] + 23 * [False]  # all but the first, when the bank is empty
    assert differences(size, pushes=24, taken_over=lambda _: (None,), **options) < 3e-6


@pytest.mark.parametrize("part", ["columns", "rows"])
def test_a_push_relies_on_what_the_loss_found(part):
    """Negative control of the one before: findings that are a little off spoil the sums."""

    def spoil(partials):
        if partials[0] is not None:
            getattr(partials[0], part).add_(0.1)
        return partials

    assert differences(24, taken_over=spoil) > 1e-3


@pytest.mark.parametrize(
    ("options", "rows"),
    [({"push": 3}, 4), ({"columns_only": True}, 4), ({"warmup_steps": 1}, 4), ({}, 5)],
)
def test_no_findings_are_kept_where_a_push_could_not_use_them(options, rows):
    loss = InfoNCE(TEMPERATURE)
    bank = make_bank(20, DIM, loss, **{"push": 4, **options})
    for number in range(2):
        (batch,) = micro_batches(1, rows, 0, seed=number)
        queries, passages = embeddings(batch.ids, number)
        assert loss(queries, passages, batch.ids, columns=bank, rows=bank).partials == (None,)
        bank.push(queries, passages, batch.ids)


@pytest.mark.parametrize(("hard", "bank_hard"), [(1, 1), (2, 2), (2, 0)])
def test_hard_negatives_are_columns_and_banked_as_told(hard, bank_hard):
    assert differences(10, hard=hard, bank_hard=bank_hard) < 2e-6


@pytest.mark.parametrize("weight", ["all", "current"])
@pytest.mark.parametrize("rows", [True, False])
def test_row_weights_and_the_one_sided_bank(weight, rows):
    assert differences(12, weight="all" if not rows else weight, rows=rows) < 2e-6


@pytest.mark.parametrize(
    ("size", "options"),
    [(10, {}), (100, {}), (23, {"hard": 2}), (23, {"rows": False}), (10, {"tile": 7, "hard": 1}), (23, {"push": 3})],
)
def test_age_lowers_logits_by_the_steps_between_row_and_column(size, options):
    """Between stored vectors too, where the kept log-sum-exps must not change as both grow older."""
    assert differences(size, decay=0.7, **options) < 2e-6
    assert differences(size, decay=0.7, slow_decay=0.6, **options) > 1e-3


@pytest.mark.parametrize("tile", [1, 7, 50])
def test_tiles_change_nothing(tile):
    assert differences(10, hard=1, tile=tile) < 2e-6


@pytest.mark.parametrize("push", [1, 3, 7])
def test_pushes_that_do_not_fit_the_blocks_change_nothing(push):
    assert differences(29, pushes=20, push=push) < 2e-6


@pytest.mark.parametrize("mask", [True, False])
@pytest.mark.parametrize("weight", ["all", "current"])
def test_micro_batches_of_different_sizes_equal_the_full_matrix(mask, weight):
    """Pushes of 1 to 7 rows into a ring of 23 whose blocks are 4 wide, hard negatives among them, steps of three pushes."""
    loss = InfoNCE(TEMPERATURE, mask)
    bank = make_bank(23, DIM, loss, push=4, hard_negatives=1, row_weight=weight)
    slow = SlowBank(23)
    for number, b in enumerate([4, 1, 7, 3, 3, 6, 2, 7, 5, 1, 4, 7, 6, 2, 3] * 2):
        batch = micro_batches(1, b, 1, passages=15, seed=number)[0]
        queries, passages = embeddings(batch.ids, number)
        found = loss(queries, passages, batch.ids, columns=bank, rows=bank)
        fast = found.value
        plain = slow_loss(queries, passages, batch.ids, slow, TEMPERATURE, mask=mask, weight=weight)
        torch.testing.assert_close(fast, plain, atol=2e-6, rtol=1e-6)  # divided by one row of 24, it nears 30
        for one, other in zip(
            *(torch.autograd.grad(value, (queries, passages)) for value in (fast, plain)), strict=True
        ):
            torch.testing.assert_close(one, other, atol=2e-6, rtol=1e-6)
        bank.push(queries, passages, batch.ids, found.partials)
        slow.push(queries, passages, batch.ids)
        if number % 3 == 2:
            bank.end_step()
    assert bank.fill == 23


def most_held(call) -> int:
    """Most bytes that tensors hold during a call, from the profiler's list of allocations."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(itertools.accumulate(changes))


def test_a_large_step_needs_no_square_matrix():
    """4,096 rows against 4,096 columns, each with gradient, in a few tiles' memory; untiled, the matrix alone is 64 MiB."""
    n = 4096
    ids = torch.arange(n).unsqueeze(1)
    queries = F.normalize(torch.randn(n, 16, generator=torch.Generator().manual_seed(0)), dim=-1).requires_grad_()
    passages = queries.detach().unsqueeze(1).clone().requires_grad_()

    def step(tile):
        value = InfoNCE(TEMPERATURE, tile=tile)(queries, passages, RowIds(ids, ids)).value
        torch.autograd.grad(value, (queries, passages))

    assert most_held(lambda: step(1 << 18)) < 8 * 2**20
    assert most_held(lambda: step(n * n)) > 4 * n * n


def test_what_a_push_takes_over_fits_beside_a_few_tiles():
    """256 rows against a bank of 16,384, whose outermost blocks of 4,096 slots are as wide as four tiles of these rows."""
    rows, size, tile = 256, 16_384, 1 << 18
    loss = InfoNCE(TEMPERATURE, tile=tile)
    bank = make_bank(size, DIM, loss, push=rows)
    assert bank.sums.widths[0] * rows == 4 * tile
    ids = torch.arange(rows).unsqueeze(1)
    step = (*embeddings(RowIds(ids, ids), 0), RowIds(ids, ids))
    bank.push(*step)
    bank.stored = size  # zeros fill the rest

    def take(partials: bool) -> int:
        bank.partial = Bank.partial.__get__(bank) if partials else lambda *shape: None
        return most_held(lambda: loss(*step, columns=bank, rows=bank))

    assert take(True) < take(False) + 4 * size + 3 * 4 * tile


def test_gradients_by_finite_differences():
    """In float64, with masked pairs, a row all of whose bank columns are masked, and both row weights."""
    for weight in ("all", "current"):
        loss = InfoNCE(TEMPERATURE, tile=5)
        bank = make_bank(6, DIM, loss, push=3, row_weight=weight)
        for name in ("passages", "queries", "positive_logits"):
            setattr(bank, name, getattr(bank, name).double())
        bank.sums.values, bank.sums.closed = bank.sums.values.double(), bank.sums.closed.double()
        same = RowIds(torch.tensor([[1], [1], [1]]), torch.tensor([[1], [1], [1]]))
        vectors = [tensor.detach().double() for tensor in embeddings(same, 3)]
        bank.push(*vectors, same)
        ids = RowIds(torch.tensor([[1], [2], [3]]), torch.tensor([[1, 3], [2, -1], [3, -1]]))
        queries, passages = (tensor.detach().double().requires_grad_() for tensor in embeddings(ids, 4))
        assert torch.autograd.gradcheck(
            lambda q, p, loss=loss, bank=bank, ids=ids: loss(q, p, ids, columns=bank, rows=bank).value,
            (queries, passages),
        )


def test_the_slow_reading_tells_wrong_from_right():
    """Negative control: each rule, broken alone, is seen by the comparison above."""
    loss = InfoNCE(TEMPERATURE)
    batch = micro_batches(1, 4, 1, passages=6)[0]
    queries, passages = embeddings(batch.ids, 0)
    bank, slow = make_bank(8, DIM, loss, push=4, hard_negatives=1), SlowBank(8)
    for number, old in enumerate(micro_batches(2, 4, 1, passages=6, seed=9)):
        rows = embeddings(old.ids, 50 + number)
        bank.push(*rows, old.ids)
        slow.push(*rows, old.ids)
    fast = loss(queries, passages, batch.ids, columns=bank, rows=bank).value

    def plain(**wrong):
        return slow_loss(queries, passages, batch.ids, slow, TEMPERATURE, **{"mask": True, **wrong})

    assert abs(fast - plain()) < 1e-6
    for wrong in ({"mask": False}, {"rows": False}, {"weight": "current"}):
        assert abs(fast - plain(**wrong)) > 1e-3
    slow.rows = slow.rows[1:]
    assert abs(fast - plain()) > 1e-4


def test_two_rows_by_hand():
    """Loss of two orthogonal pairs at temperature 1: -log(e / (e + 1))."""
    unit = torch.eye(2)
    ids = RowIds(torch.tensor([[0], [1]]), torch.tensor([[0], [1]]))
    result = InfoNCE(1.0)(unit, unit.unsqueeze(1), ids)
    assert result.value.item() == pytest.approx(0.3132616875, abs=1e-7)
    assert result.negatives.item() == 1
    same = InfoNCE(1.0)(unit, unit.unsqueeze(1), RowIds(torch.tensor([[0], [0]]), torch.tensor([[0], [0]])))
    assert same.value.item() == 0  # the other row's passage is this row's positive: nothing is left to compare with
    assert same.negatives.item() == 0
    assert same.masked.item() == 2


@pytest.mark.parametrize(("rows", "columns"), [(5, 40), (40, 5), (30, 30), (1, 1), (3, 0)])
@pytest.mark.parametrize("passages", [3, 25, 10**6])
def test_left_out_pairs_are_those_of_the_full_comparison(rows, columns, passages):
    generator = torch.Generator().manual_seed(rows + passages)
    positives = torch.randint(NO_PASSAGE, passages, (rows, 4), generator=generator)  # repeats and padding among them
    column_ids = torch.randint(NO_PASSAGE, passages, (columns,), generator=generator)
    found = Similarity(1.0).masked_pairs(positives, column_ids)
    plain = {
        (r, c)
        for r, c in itertools.product(range(rows), range(columns))
        if column_ids[c] != NO_PASSAGE and column_ids[c] in positives[r]
    }
    pairs = list(zip(found.rows.tolist(), found.columns.tolist(), strict=True))
    assert len(pairs) == len(set(pairs))
    assert set(pairs) == plain


def test_left_out_pairs_of_a_block_and_without_the_own_ones():
    pairs = MaskedPairs(torch.tensor([0, 1, 1, 4]), torch.tensor([2, 0, 3, 3]))
    block = pairs.block(slice(1, 5), slice(2, 4))
    assert list(zip(*map(Tensor.tolist, block), strict=True)) == [(0, 1), (3, 1)]
    rest = pairs.without(torch.tensor([1, 4]), torch.tensor([3, 2]))
    assert list(zip(*map(Tensor.tolist, rest), strict=True)) == [(0, 2), (1, 0), (4, 3)]
    logits = Similarity(1.0).logits(torch.zeros(4, 1), torch.zeros(5, 1), pairs.transposed())
    assert logits.isinf().nonzero().tolist() == [[0, 1], [2, 0], [3, 1], [3, 4]]


def test_a_wrapping_push_is_split_over_the_end_of_the_ring():
    loss = InfoNCE(1.0)
    bank = make_bank(5, 1, loss, push=3)
    for number in range(3):
        ids = torch.arange(3).unsqueeze(1) + 3 * number
        bank.push(ids.float(), ids.float().unsqueeze(1), RowIds(ids, ids))
    assert bank.column_ids.flatten().tolist() == [5, 6, 7, 8, 4]
    assert bank.pointer == 4
    assert bank.queries.flatten().tolist() == bank.passages.flatten().tolist() == [5, 6, 7, 8, 4]


def test_keep_and_warmup_decide_the_rows_in_use():
    loss = InfoNCE(1.0)
    ids = RowIds(torch.zeros(2, 1, dtype=torch.long), torch.zeros(2, 1, dtype=torch.long))
    rows = (torch.ones(2, 1), torch.ones(2, 1, 1), ids)

    def fills(**options):
        bank = make_bank(8, 1, loss, push=2, **options)
        seen = []
        for _ in range(3):
            bank.push(*rows)
            seen.append(bank.fill)
            bank.end_step()
            seen.append(bank.fill)
        return seen

    assert fills() == [2, 2, 4, 4, 6, 6]
    assert fills(keep=False) == [2, 0, 2, 0, 2, 0]
    assert fills(warmup_steps=2) == [0, 0, 0, 4, 6, 6]


@pytest.mark.parametrize(
    "changed", [{"push": 8}, {"push": 32}, {"temperature": 0.5}, {"age_decay": 0.5}, {"mask": False}], ids=str
)
def test_a_bank_read_under_other_settings_has_their_sums(changed):
    """At 64 rows, pushes of 8, 16 and 32 divide the kept log-sum-exps into tables of one shape, of blocks of other widths."""

    def bank(push=16, temperature=1.0, age_decay=0.1, mask=True):
        return make_bank(64, DIM, InfoNCE(temperature, mask), push=push, age_decay=age_decay)

    def push(into, rows, number):
        batch = micro_batches(1, rows, passages=40, seed=number)[0]
        into.push(*embeddings(batch.ids, number), batch.ids)
        into.end_step()

    def apart(bank):
        """Largest difference of the kept sums, and of the rows' own logits, from the whole matrix."""
        queries, passages = bank.queries[: bank.fill], bank.passages[: bank.fill, 0]
        logits = queries @ passages.T / bank.similarity.temperature
        own = logits.diagonal().clone()
        written = bank.written_step[: bank.fill]
        logits -= bank.options.age_decay * (written.unsqueeze(1) - written).abs()
        if bank.similarity.mask_false_negatives:
            known = (bank.positives[: bank.fill].unsqueeze(1) == bank.column_ids[: bank.fill]).any(2)
            logits[known & ~torch.eye(bank.fill, dtype=torch.bool)] = -torch.inf
        sums = bank.logsumexp() - logits.logsumexp(1)
        return max(sums.abs().max().item(), (bank.positive_logits[: bank.fill] - own).abs().max().item())

    old = bank()
    for number in range(5):
        push(old, 16, number)
    tensors, numbers = old.state()
    new, deceived = bank(**changed), bank(**changed)
    assert new.sums.values.shape == old.sums.values.shape
    new.load_state(tensors, numbers)
    deceived.load_state(tensors, {**numbers, "sums_of": deceived.state()[1]["sums_of"]})  # negative control
    found = [(apart(new), apart(deceived))]
    for number in range(3):
        for each in (new, deceived):
            push(each, changed.get("push", 16), 10 + number)
        found.append((apart(new), apart(deceived)))
    assert max(right for right, _ in found) < 1e-5
    assert max(wrong for _, wrong in found) > 0.01


@pytest.mark.parametrize("changed", [{"temperature": 0.5}, {"push": 8}], ids=str)
@pytest.mark.parametrize("symmetric", [False, True])
def test_an_empty_bank_is_read_under_other_settings(changed, symmetric):
    """A checkpoint with ``bank.keep`` false stores no rows."""

    def bank(push=16, temperature=1.0):
        return make_bank(64, DIM, InfoNCE(temperature, symmetric=symmetric), push=push, symmetric=symmetric, keep=False)

    new = bank(**changed)
    new.load_state(*bank().state())
    assert new.stored == 0
    batch = micro_batches(1, 16, passages=40)[0]
    for each in (new, fresh := bank(**changed)):
        each.push(*embeddings(batch.ids, 0), batch.ids)
    assert torch.equal(new.logsumexp(), fresh.logsumexp())


def test_a_checkpoint_of_the_removed_visibility_on_step_is_refused():
    """Checkpoints within a step held the rows that waited for its end; those without such rows load."""
    bank = make_bank(6, DIM, InfoNCE(0.1), push=4)
    tensors, numbers = bank.state()
    bank.load_state(tensors, {**numbers, "waiting": []})
    with pytest.raises(InputError, match="bank of the checkpoint: its shapes are"):
        bank.load_state({**tensors, "waiting_queries": torch.zeros(4, DIM)}, {**numbers, "waiting": [4]})


def test_a_bank_emptied_between_steps_is_a_new_one_but_for_its_steps():
    loss = Objective(InfoNCE(0.1), Matryoshka((4,), (1.0,), True))
    used, new = (make_bank(8, DIM, loss, push=4, warmup_steps=1) for _ in range(2))
    batches = micro_batches(4, 4, passages=12)

    def take(bank, batch):
        bank.push(*embeddings(batch.ids, 0), batch.ids)
        bank.end_step()

    for batch in batches[:3]:
        take(used, batch)
    assert used.fill == 8
    used.empty()
    assert used.fill == 0
    for bank in (used, new):
        take(bank, batches[3])
    assert (used.step, used.fill, new.step, new.fill) == (4, 4, 1, 4)
    for left, right in ((used, new), (used.truncated[0], new.truncated[0])):
        assert torch.equal(left.logsumexp(), right.logsumexp())


def test_bank_of_size_zero_stays_empty():
    bank = make_bank(0, 1, InfoNCE(1.0), push=2)
    ids = torch.zeros(2, 1, dtype=torch.long)
    bank.push(torch.ones(2, 1), torch.ones(2, 1, 1), RowIds(ids, ids))
    assert bank.fill == 0


@pytest.mark.parametrize(("size", "push"), list(itertools.product([1, 5, 16, 27, 40], [1, 2, 3])))
def test_nested_sums_equal_plain_ones_after_every_push(size, push):
    """Against logsumexp of the whole matrix, and only the row state named in the module's cost is held."""
    generator = torch.Generator().manual_seed(0)
    matrix = torch.full((size, size, 2), float("nan"))  # rows, slots, columns per slot

    def logits(rows: slice, slots: slice) -> Tensor:
        return matrix[rows, slots].flatten(1).T

    sums = NestedLogSumExp(logits, size, push, tile=16, journal=RollbackJournal())
    pointer = fill = 0
    for _ in range(3 * size // push + 2):
        stop = min(pointer + push, size)
        fill = max(fill, stop)
        matrix[pointer:stop] = torch.randn(stop - pointer, size, 2, generator=generator)
        matrix[:, pointer:stop] = torch.randn(size, stop - pointer, 2, generator=generator)
        sums.overwrite(pointer, stop, fill)
        plain = matrix[:fill, :fill].logsumexp((1, 2))
        torch.testing.assert_close(sums.total(fill), plain)
        pointer = stop % size
    assert sums.fan**3 >= size / push > (sums.fan - 1) ** 3
    assert sums.values.shape == (3, sums.fan, size)

"""Loss and bank against a full matrix built from plain lists in float64, over enough pushes to wrap
many times."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from helpers import SlowBank, make_bank, micro_batches, slow_loss
from torch import Tensor

from contaccum.batch import NO_PASSAGE, RowIds
from contaccum.errors import InputError
from contaccum.methods.logsumexp import CachedLogSumExp
from contaccum.methods.loss import InfoNCE
from contaccum.methods.matryoshka import Matryoshka
from contaccum.methods.objective import Objective
from contaccum.methods.pairs import IdIndex

DIM = 12
TEMPERATURE = 0.2
SAME = 1e-12


@pytest.fixture(autouse=True)
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def embeddings(ids: RowIds, seed: int):
    generator = torch.Generator().manual_seed(seed)
    b, columns = ids.columns.shape
    queries = F.normalize(torch.randn(b, DIM, generator=generator), dim=-1)
    passages = F.normalize(torch.randn(b, columns, DIM, generator=generator), dim=-1)
    return queries.requires_grad_(), passages.requires_grad_()


def differences(
    size: int,
    *,
    b: int | list[int] = 4,
    pushes: int = 14,
    hard: int = 0,
    mask: bool = True,
    rows: bool = True,
    weight: str = "all",
    passages: int = 12,
    chunk: int | None = None,
    bank_hard: int | None = None,
    push: int | None = None,
    decay: float = 0.0,
    slow_decay: float | None = None,
    failing: bool = False,
    handed_over=lambda computed: computed,
) -> float:
    """Largest difference of loss and gradients between the package and the full matrix; three
    pushes are a step.

    b: pairs of each push, or their sizes in turn. handed_over: makes what each push is given from
    what the loss has computed for it. failing: whether each step is tried twice and rolled back
    before it is taken.
    """
    loss = InfoNCE(TEMPERATURE, mask, chunk=chunk)
    bank_hard = hard if bank_hard is None else bank_hard
    sizes = [b] if isinstance(b, int) else b
    options = {
        "hard_negatives": bank_hard,
        "columns_only": not rows,
        "row_weight": weight,
        "age_decay": decay,
    }
    bank = make_bank(size, DIM, loss, push=push or max(sizes), **options)
    slow = SlowBank(size)
    slow_decay = decay if slow_decay is None else slow_decay
    largest = 0.0
    for number, count in enumerate(itertools.islice(itertools.cycle(sizes), pushes)):
        (batch,) = micro_batches(1, count, hard, passages=passages, seed=number)
        queries, passages_of_batch = embeddings(batch.ids, number)
        if failing and number % 3 == 0:
            for attempt in range(2):
                for other in range(attempt + 1):
                    (failed,) = micro_batches(
                        1, sizes[-1], hard, passages=passages, seed=1000 + other
                    )
                    bank.push(*embeddings(failed.ids, 1000 + other), failed.ids)
                bank.rollback()
        found = loss(queries, passages_of_batch, batch.ids, bank)
        plain = slow_loss(
            queries,
            passages_of_batch,
            batch.ids,
            slow,
            TEMPERATURE,
            mask=mask,
            rows=rows,
            weight=weight,
            decay=slow_decay,
        )
        ours = torch.autograd.grad(found.value, (queries, passages_of_batch))
        theirs = torch.autograd.grad(plain, (queries, passages_of_batch))
        largest = max(largest, abs((found.value - plain).item()))
        for one, other in zip(ours, theirs, strict=True):
            largest = max(largest, (one - other).abs().max().item())
        bank.push(queries, passages_of_batch, batch.ids, handed_over(found.bank_logits))
        kept = 1 + bank_hard
        slow.push(
            queries,
            passages_of_batch[:, :kept],
            RowIds(batch.ids.columns[:, :kept], batch.ids.positives),
        )
        if number % 3 == 2:
            bank.end_step()
            slow.step += 1
    assert bank.fill == min(size, len(slow.rows)) == len(slow.rows)
    return largest


@pytest.mark.parametrize("size", [4, 8, 10, 16, 23, 100])
@pytest.mark.parametrize("mask", [True, False])
def test_loss_and_gradients_equal_the_full_matrix_while_the_ring_wraps(size, mask):
    assert differences(size, mask=mask) < SAME


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (4, {}),
        (8, {"hard": 2}),
        (24, {"decay": 0.7}),
        (24, {"push": 3}),
        (25, {"hard": 1}),
        (40, {"b": [4, 1, 7]}),
    ],
)
def test_the_push_gives_the_same_with_and_without_the_logits_of_the_loss(size, options):
    """The ring is overwritten twice."""
    given = []

    def note(computed):
        given.append(computed[0])
        return computed

    assert differences(size, pushes=24, handed_over=note, **options) < SAME
    # only the first bank is empty
    assert [logits is None for logits in given] == [True] + 23 * [False]
    assert differences(size, pushes=24, handed_over=lambda _: (), **options) < SAME


@pytest.mark.parametrize("part", ["over_current", "current", "stored"])
def test_a_push_relies_on_the_logits_of_the_loss(part):
    """Negative control of the test above: slightly wrong logits make the later losses wrong."""

    def spoil(computed):
        if computed[0] is None:
            return computed
        return (computed[0]._replace(**{part: getattr(computed[0], part) + 0.1}),)

    assert differences(24, handed_over=spoil) > 1e-3


def test_logits_computed_before_another_push_are_refused():
    loss = InfoNCE(TEMPERATURE)
    bank = make_bank(20, DIM, loss, push=4)
    first, second, third = micro_batches(3, 4)
    bank.push(*embeddings(first.ids, 0), first.ids)
    computed = loss(*embeddings(second.ids, 1), second.ids, bank).bank_logits
    bank.push(*embeddings(third.ids, 2), third.ids)
    with pytest.raises(AssertionError, match="before another push"):
        bank.push(*embeddings(second.ids, 1), second.ids, computed)


@pytest.mark.parametrize(("hard", "bank_hard"), [(1, 1), (2, 2), (2, 0)])
def test_hard_negatives_are_columns_and_banked_as_told(hard, bank_hard):
    assert differences(10, hard=hard, bank_hard=bank_hard) < SAME


@pytest.mark.parametrize("weight", ["all", "current"])
@pytest.mark.parametrize("rows", [True, False])
def test_row_weights_and_the_one_sided_bank(weight, rows):
    assert differences(12, weight="all" if not rows else weight, rows=rows) < SAME


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (10, {}),
        (100, {}),
        (23, {"hard": 2}),
        (23, {"rows": False}),
        (10, {"chunk": 7, "hard": 1}),
        (23, {"push": 3}),
    ],
)
def test_age_lowers_logits_by_the_steps_between_row_and_column(size, options):
    """Between stored vectors too, where the kept log-sum-exps must not change as both grow
    older."""
    assert differences(size, decay=0.7, **options) < SAME
    assert differences(size, decay=0.7, slow_decay=0.6, **options) > 1e-3


@pytest.mark.parametrize("chunk", [1, 7, 50])
def test_chunks_change_nothing(chunk):
    assert differences(10, hard=1, chunk=chunk) < SAME


@pytest.mark.parametrize("size", [16, 40, 50])
def test_pushes_of_a_whole_step_equal_the_full_matrix(size):
    assert differences(size, b=16, hard=1, passages=40) < SAME


@pytest.mark.parametrize(
    "options", [{}, {"hard": 1, "decay": 0.4}, {"b": [4, 1, 7, 3]}, {"rows": False}], ids=str
)
def test_steps_that_were_rolled_back_change_nothing(options):
    assert differences(23, pushes=24, failing=True, **options) < SAME


@pytest.mark.parametrize("push", [1, 3, 7])
def test_pushes_that_do_not_fit_the_blocks_change_nothing(push):
    assert differences(29, pushes=20, push=push) < SAME


@pytest.mark.parametrize("mask", [True, False])
@pytest.mark.parametrize("weight", ["all", "current"])
def test_micro_batches_of_different_sizes_equal_the_full_matrix(mask, weight):
    """Pushes of 1 to 7 pairs into a ring of 23 with groups of 4."""
    sizes = [4, 1, 7, 3, 3, 6, 2, 7, 5, 1, 4, 7, 6, 2, 3]
    found = differences(
        23, b=sizes, pushes=30, push=4, hard=1, mask=mask, weight=weight, passages=15
    )
    assert found < 1e-11  # divided by one row of 24, a loss is near 30


def most_held(call) -> int:
    """Most bytes that tensors hold during a call, from the profiler's list of allocations."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiler:
        call()
    events = [
        event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(itertools.accumulate(changes))


def test_a_large_step_needs_no_square_matrix():
    """4,096 rows and 4,096 columns, each with gradient, need the memory of a few chunks.

    The matrix has 128 MiB.
    """
    n = 4096
    ids = torch.arange(n).unsqueeze(1)
    queries = F.normalize(
        torch.randn(n, 16, generator=torch.Generator().manual_seed(0)), dim=-1
    ).requires_grad_()
    passages = queries.detach().unsqueeze(1).clone().requires_grad_()

    def step(chunk):
        value = InfoNCE(TEMPERATURE, chunk=chunk)(queries, passages, RowIds(ids, ids)).value
        torch.autograd.grad(value, (queries, passages))

    assert most_held(lambda: step(1 << 18)) < 12 * 2**20
    assert most_held(lambda: step(n * n)) > 8 * n * n


@pytest.mark.parametrize("dim", [384, 768])
def test_memory_beyond_the_bank_is_at_most_15_percent(dim, monkeypatch):
    """Loss, backward pass and push of 8 pairs with a bank of 16,384.

    Most of it is for the opening of a block.
    """
    torch.set_default_dtype(torch.float32)
    size, b = 16_384, 8
    loss = InfoNCE(TEMPERATURE)
    bank = make_bank(size, dim, loss, push=b)
    tensors, numbers = bank.state()
    tensors["sums"].zero_()
    held = sum(tensor.nbytes for tensor in tensors.values())
    width = bank.sums.width

    def step(slot):
        bank.load_state(tensors, {**numbers, "stored": size, "pointer": slot})
        queries = torch.zeros(b, dim, requires_grad=True)
        passages = torch.zeros(b, 1, dim, requires_grad=True)
        ids = torch.arange(b).unsqueeze(1)

        def take():
            value = loss(queries, passages, RowIds(ids, ids), bank)
            torch.autograd.grad(value.value, (queries, passages))
            bank.push(queries, passages, RowIds(ids, ids), value.bank_logits)

        return most_held(take)

    inside, opening = step(b), step(width)
    assert inside < opening < 0.15 * held
    # negative control: chunks as large as the loss's
    monkeypatch.setattr("contaccum.methods.bank.MIN_CHUNK", 1 << 30)
    assert step(width) > 0.15 * held


def test_gradients_by_finite_differences():
    """With masked pairs, a row all of whose bank columns are masked, and both row weights."""
    for weight in ("all", "current"):
        loss = InfoNCE(TEMPERATURE, chunk=5)
        bank = make_bank(6, DIM, loss, push=3, row_weight=weight)
        same = RowIds(torch.tensor([[1], [1], [1]]), torch.tensor([[1], [1], [1]]))
        bank.push(*embeddings(same, 3), same)
        ids = RowIds(torch.tensor([[1], [2], [3]]), torch.tensor([[1, 3], [2, -1], [3, -1]]))
        assert torch.autograd.gradcheck(
            lambda q, p, loss=loss, bank=bank, ids=ids: loss(q, p, ids, bank).value,
            embeddings(ids, 4),
        )


@pytest.mark.parametrize("target", [1e-4, 1e-3, 0.1, 1.0, 5.0])
@pytest.mark.parametrize("size", [0, 64])
def test_float32_gradients_are_exact_at_small_and_large_losses(target, size):
    """Relative error of the gradient against float64 at most 1e-5.

    The negative control is torch's cross_entropy.
    """
    b, dim, columns = 16, 32, torch.arange(32).view(16, 2)
    generator = torch.Generator().manual_seed(0)
    noise = [
        torch.randn(*shape, dim, generator=generator)
        for shape in ((b,), (b, 2), (size,), (size, 2))
    ]

    def vectors(closeness: float) -> list[Tensor]:
        """Queries and passages of the micro-batch and of the bank.

        Each positive is close to its query.
        """
        queries, passages, bank_queries, bank_passages = (
            F.normalize(each, dim=-1) for each in noise
        )
        for own, others in ((queries, passages), (bank_queries, bank_passages)):
            others[:, 0] = F.normalize(closeness * own + (1 - closeness) * others[:, 0], dim=-1)
        return [queries, passages, bank_queries, bank_passages]

    def gradient(closeness: float, dtype: torch.dtype, plain: bool = False) -> tuple[float, Tensor]:
        torch.set_default_dtype(dtype)
        queries, passages, bank_queries, bank_passages = (
            each.to(dtype) for each in vectors(closeness)
        )
        queries.requires_grad_()
        passages.requires_grad_()
        loss = InfoNCE(0.05)
        bank = make_bank(size, dim, loss, push=b, hard_negatives=1)
        for start in range(0, size, b):
            ids = 1000 + 2 * start + columns
            bank.push(
                bank_queries[start : start + b],
                bank_passages[start : start + b],
                RowIds(ids, ids[:, :1]),
            )
        value = loss(queries, passages, RowIds(columns, columns[:, :1]), bank).value
        if plain:
            value = F.cross_entropy(
                queries @ passages.flatten(0, 1).T / 0.05, torch.arange(0, 2 * b, 2)
            )
        gradients = torch.autograd.grad(value, (queries, passages))
        return value.item(), torch.cat([each.double().flatten() for each in gradients])

    low, high = -1.0, 1.0  # the loss falls from above 5 to below 1e-4
    for _ in range(60):
        middle = (low + high) / 2
        loss = gradient(middle, torch.float64)[0]
        low, high = (middle, high) if loss > target else (low, middle)
    value, exact = gradient(low, torch.float64)
    assert value == pytest.approx(target, rel=0.01)
    error = (gradient(low, torch.float32)[1] - exact).norm() / exact.norm()
    assert error < 1e-5
    if size == 0 and target == 1e-4:
        other = gradient(low, torch.float32, plain=True)[1]
        assert (other - exact).norm() / exact.norm() > 1e-5


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
    fast = loss(queries, passages, batch.ids, bank).value

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
    assert result.statistics["negatives"] == 1
    same = InfoNCE(1.0)(
        unit, unit.unsqueeze(1), RowIds(torch.tensor([[0], [0]]), torch.tensor([[0], [0]]))
    )
    # the other row's passage is this row's positive: nothing is left to compare with
    assert same.value.item() == 0
    assert same.statistics["negatives"] == 0
    assert same.statistics["masked"] == 1


@pytest.mark.parametrize(("rows", "columns"), [(5, 40), (40, 5), (30, 30), (1, 1), (3, 0)])
@pytest.mark.parametrize("passages", [3, 25, 10**6])
def test_an_index_finds_the_pairs_of_the_full_comparison(rows, columns, passages):
    generator = torch.Generator().manual_seed(rows + passages)
    # with repeats and padding
    positives = torch.randint(NO_PASSAGE, passages, (rows, 4), generator=generator)
    column_ids = torch.randint(NO_PASSAGE, passages, (columns,), generator=generator)
    index = IdIndex()
    index.add(7, column_ids.unsqueeze(1))
    index.add(100, column_ids.unsqueeze(1))
    index.remove(100, column_ids.unsqueeze(1))
    plain = {
        (r, c)
        for r, c in itertools.product(range(rows), range(columns))
        if column_ids[c] != NO_PASSAGE and column_ids[c] in positives[r]
    }
    assert index.find(positives, range(7, 7 + columns)) == plain
    half = {(r, c - columns // 2) for r, c in plain if c >= columns // 2}
    assert index.find(positives, range(7 + columns // 2, 200)) == half


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
    "changed", [{"push": 20}, {"temperature": 0.5}, {"age_decay": 0.5}, {"mask": False}], ids=str
)
def test_a_bank_read_under_other_settings_has_their_sums(changed):
    """At 64 rows, pushes of 16 and of 20 have tables of one shape, but blocks of other widths."""

    def bank(push=16, temperature=1.0, age_decay=0.1, mask=True):
        return make_bank(64, DIM, InfoNCE(temperature, mask), push=push, age_decay=age_decay)

    def push(into, rows, number):
        batch = micro_batches(1, rows, passages=40, seed=number)[0]
        into.push(*embeddings(batch.ids, number), batch.ids)
        into.end_step()

    def apart(bank):
        """Largest difference of the kept sums, and of the rows' own logits, from the whole
        matrix."""
        queries, passages = bank.queries[: bank.fill], bank.passages[: bank.fill, 0]
        logits = queries @ passages.T / bank.similarity.temperature
        own = logits.diagonal().clone()
        age = bank.age[: bank.fill]
        logits -= bank.options.age_decay * (age.unsqueeze(1) - age).abs()
        if bank.similarity.mask_false_negatives:
            known = (bank.positives[: bank.fill].unsqueeze(1) == bank.column_ids[: bank.fill]).any(
                2
            )
            logits[known] = -torch.inf
        logits.fill_diagonal_(-torch.inf)
        sums = bank.logsumexp() - logits.logsumexp(1)
        return max(
            sums.abs().max().item(), (bank.positive_logits[: bank.fill] - own).abs().max().item()
        )

    old = bank()
    for number in range(5):
        push(old, 16, number)
    tensors, numbers = old.state()
    new, deceived = bank(**changed), bank(**changed)
    assert new.sums.table.shape == old.sums.table.shape
    new.load_state(tensors, numbers)
    # negative control
    deceived.load_state(tensors, {**numbers, "sums_of": deceived.state()[1]["sums_of"]})
    found = [(apart(new), apart(deceived))]
    for number in range(3):
        for each in (new, deceived):
            push(each, changed.get("push", 16), 10 + number)
        found.append((apart(new), apart(deceived)))
    assert max(right for right, _ in found) < 1e-12
    assert max(wrong for _, wrong in found) > 0.01


@pytest.mark.parametrize("changed", [{"temperature": 0.5}, {"push": 8}], ids=str)
def test_an_empty_bank_is_read_under_other_settings(changed):
    """A checkpoint with ``bank.keep`` false stores no rows."""

    def bank(push=16, temperature=1.0):
        return make_bank(64, DIM, InfoNCE(temperature), push=push, keep=False)

    new = bank(**changed)
    new.load_state(*bank().state())
    assert new.stored == 0
    batch = micro_batches(1, 16, passages=40)[0]
    for each in (new, fresh := bank(**changed)):
        each.push(*embeddings(batch.ids, 0), batch.ids)
    assert torch.equal(new.logsumexp(), fresh.logsumexp())


def test_a_state_of_other_tensors_is_refused():
    bank = make_bank(6, DIM, InfoNCE(0.1), push=4)
    tensors, numbers = bank.state()
    with pytest.raises(InputError, match="bank of the checkpoint: its shapes are"):
        bank.load_state({**tensors, "queries": torch.zeros(7, DIM)}, numbers)


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
def test_cached_sums_equal_plain_ones_after_every_push(size, push):
    generator = torch.Generator().manual_seed(0)
    matrix = torch.full((size, size, 2), float("nan"))  # rows, slots, columns per slot
    sums = CachedLogSumExp(lambda rows, slots: matrix[rows, slots], size, push, 16, None)
    pointer = fill = 0
    for _ in range(3 * size // push + 2):
        pieces = []
        while sum(piece.stop - piece.start for piece in pieces) < min(push, size):
            left = min(push, size) - sum(piece.stop - piece.start for piece in pieces)
            stop = min(pointer + left, size, (pointer // sums.width + 1) * sums.width)
            pieces.append(slice(pointer, stop))
            fill, pointer = max(fill, stop), stop % size
        for piece in pieces:
            count = piece.stop - piece.start
            matrix[piece] = torch.randn(count, size, 2, generator=generator)
            matrix[:, piece] = torch.randn(size, count, 2, generator=generator)
        sums.overwrite(pieces, fill)
        torch.testing.assert_close(
            sums.total(fill), matrix[:fill, :fill].logsumexp((1, 2)), rtol=1e-13, atol=1e-13
        )
    groups = sums.width // push
    assert groups**2 >= size / push > (groups - 1) ** 2
    assert sums.table.shape == (3 + groups + -(-size // sums.width), size)

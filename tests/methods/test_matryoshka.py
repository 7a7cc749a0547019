"""Losses at several widths: against sentence-transformers, against full matrices, in every method,
each with a control."""

import pytest
import torch
import torch.nn.functional as F
from helpers import SlowBank, largest_difference, make_bank, micro_batches, run_steps, slow_loss
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import (
    MatryoshkaLoss,
    MultipleNegativesRankingLoss,
)
from torch import Tensor, nn

from contaccum.batch import RowIds
from contaccum.errors import InputError
from contaccum.methods import METHODS
from contaccum.methods.loss import InfoNCE
from contaccum.methods.matryoshka import Matryoshka
from contaccum.methods.objective import Objective

DIM, TEMPERATURE = 16, 0.2
WIDTHS, WEIGHTS = (8, 3), (0.5, 2.0)
SAME, DIFFERENT = 1e-5, 1e-3


def objective(
    unit=True, mask=True, widths=WIDTHS, weights=WEIGHTS, temperature=TEMPERATURE
) -> Objective:
    return Objective(InfoNCE(temperature, mask), Matryoshka(widths, weights, unit))


def vectors(b: int, columns: int, seed: int, unit: bool = True) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = (torch.randn(b, *shape, DIM, generator=generator) for shape in ((), (columns,)))
    return tuple((F.normalize(each, dim=-1) if unit else each).requires_grad_() for each in made)


class Given(nn.Module):
    """A sentence-transformers model whose vectors are its input."""

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return dict(features)

    def get_embedding_dimension(self) -> int:
        return DIM


def theirs(queries: Tensor, passages: Tensor, widths: list[int], weights: list[float]) -> Tensor:
    model = SentenceTransformer(modules=[Given()], device="cpu")
    ranking = MultipleNegativesRankingLoss(model, scale=1 / TEMPERATURE)
    loss = MatryoshkaLoss(model, ranking, matryoshka_dims=widths, matryoshka_weights=weights)
    columns = [queries, *passages.unbind(1)]
    return loss([{"sentence_embedding": each} for each in columns], torch.zeros(0))


@pytest.mark.parametrize("hard", [0, 2])
def test_loss_and_gradients_are_those_of_sentence_transformers(hard):
    raw = vectors(6, 1 + hard, 0, unit=False)
    queries, passages = (F.normalize(each, dim=-1) for each in raw)
    columns = torch.arange(6 * (1 + hard)).view(6, -1)
    ids = RowIds(columns, columns[:, :1])
    ours = objective()(queries, passages, ids).value
    expected = theirs(queries, passages, [DIM, *WIDTHS], [1.0, *WEIGHTS])
    torch.testing.assert_close(ours, expected)
    found = [torch.autograd.grad(value, raw, retain_graph=True) for value in (ours, expected)]
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)
    assert abs(ours - theirs(queries, passages, [DIM, *WIDTHS], [1.0, 1.0, 1.0])) > DIFFERENT
    assert abs(ours - objective(unit=False)(queries, passages, ids).value) > DIFFERENT


def slow_cut(tensor: Tensor, width: int, unit: bool) -> Tensor:
    part = tensor[..., :width]
    return part / part.pow(2).sum(-1, keepdim=True).sqrt() if unit and width < DIM else part


def through_a_bank(
    size=10, hard=1, mask=True, unit=True, row_weight="all", wrong=lambda k: k, pushes=12
) -> float:
    """Largest difference of loss and gradients from full matrices at each width, over pushes that
    wrap the ring."""
    loss = objective(unit, mask, temperature=TEMPERATURE if unit else 5.0)
    options = {"hard_negatives": hard, "row_weight": row_weight}
    bank = make_bank(size, DIM, loss, push=4, **options)
    widths = {DIM: 1.0} | dict(zip(WIDTHS, WEIGHTS, strict=True))
    slow, largest = {width: SlowBank(size) for width in widths}, 0.0
    for number, batch in enumerate(micro_batches(pushes, 4, hard, passages=12)):
        queries, passages = vectors(4, 1 + hard, number, unit)
        value = loss(queries, passages, batch.ids, bank)
        fast = value.value
        plain = torch.zeros(())
        for width, weight in widths.items():
            cut = [slow_cut(each, wrong(width), unit) for each in (queries, passages)]
            at = slow_loss(
                *cut,
                batch.ids,
                slow[width],
                loss.similarity.temperature,
                mask=mask,
                weight=row_weight,
            )
            plain = plain + weight * at
        found = [
            (value, *torch.autograd.grad(value, (queries, passages))) for value in (fast, plain)
        ]
        largest = max(
            [
                largest,
                *((one - other).abs().max().item() for one, other in zip(*found, strict=True)),
            ]
        )
        bank.push(queries, passages, batch.ids, value.bank_logits)
        for width in widths:
            slow[width].push(
                *(slow_cut(each, wrong(width), unit) for each in (queries, passages)), batch.ids
            )
        if number % 3 == 2:
            bank.end_step()
    assert bank.fill == min(size, 4 * pushes)
    return largest


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"size": 23},
        {"hard": 0},
        {"hard": 2},
        {"mask": False},
        {"unit": False},
        {"row_weight": "current"},
    ],
    ids=str,
)
def test_each_width_has_its_own_bank(options):
    assert through_a_bank(**options) < 2e-5


def test_other_widths_would_differ():
    """Negative control of the test above."""
    assert through_a_bank(wrong=lambda width: width if width == DIM else width + 1) > DIFFERENT


def steps(count=2, hard=1):
    return [micro_batches(4, 4, hard, passages=20, seed=i) for i in range(count)]


def run(method, data, widths=(8, 20), bank_size=0, **options):
    """As tests/methods/test_methods.py's, at these widths of the encoder's 32."""
    loss = objective(widths=widths, weights=WEIGHTS[: len(widths)], temperature=0.1)
    return run_steps(method, data, loss=loss, bank_size=bank_size, **options)


def test_the_methods_keep_their_equivalences():
    data = steps()
    plain = run("in_batch", data, dropout=0.2)
    cached = run("grad_cache", data, dropout=0.2)
    assert largest_difference(cached[0], plain[0]) < SAME
    assert cached[1] == pytest.approx(plain[1], rel=1e-5)
    accumulated = run("grad_accum", data, dropout=0.2)
    for method, twin in (
        ("passage_bank", accumulated),
        ("cont_accum", accumulated),
        ("cont_cache", cached),
    ):
        assert largest_difference(run(method, data, dropout=0.2)[0], twin[0]) == 0
    one_sided = run("cont_accum", data, bank_size=16, columns_only=True)[0]
    assert largest_difference(one_sided, run("passage_bank", data, bank_size=16)[0]) == 0
    assert largest_difference(run("cont_accum", data, bank_size=16)[0], one_sided) > DIFFERENT


@pytest.mark.parametrize("method", list(METHODS))
def test_widths_change_every_method_and_no_widths_none(method):
    data = steps(1)
    options = {"bank_size": 16, "push": 16}
    plain = run_steps(method, data, **options)[0]
    assert largest_difference(run(method, data, widths=(), **options)[0], plain) == 0
    assert largest_difference(run(method, data, **options)[0], plain) > DIFFERENT


def test_a_bank_goes_on_from_its_state_at_every_width():
    loss = objective()
    made = [make_bank(10, DIM, loss, push=4) for _ in range(2)]
    batches = micro_batches(9, 4, 0, passages=12)
    for number, batch in enumerate(batches[:5]):
        made[0].push(*vectors(4, 1, number), batch.ids)
    made[0].end_step()
    made[1].load_state(*made[0].state())
    found = []
    for bank in made:
        for number, batch in enumerate(batches[5:], 5):
            bank.push(*vectors(4, 1, number), batch.ids)
        found.append({name: tensor.clone() for name, tensor in bank.state()[0].items()})
    assert {"8/queries", "3/sums", "passages"} < found[0].keys()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    with pytest.raises(InputError, match="bank of the checkpoint: its shapes are"):
        make_bank(10, DIM, objective(widths=(5,), weights=(1.0,)), push=4).load_state(
            *made[0].state()
        )

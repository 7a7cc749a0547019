"""Learning a teacher's scores: by hand, against sentence-transformers, in every method, each with a
control that must differ."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from helpers import gradients, largest_difference, make_bank, micro_batches, run_steps, tiny_encoder
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import DistillKLDivLoss, MarginMSELoss
from torch import Tensor, nn

from contaccum.batch import MicroBatch, RowIds
from contaccum.methods import METHODS
from contaccum.methods.distillation import Distillation
from contaccum.methods.loss import InfoNCE
from contaccum.methods.matryoshka import FULL_WIDTH, Matryoshka
from contaccum.methods.objective import Objective
from contaccum.runtime.engine import Engine

KINDS = ("kl", "margin")
SAME, DIFFERENT = 1e-5, 1e-3
NAN = float("nan")


def test_two_passages_by_hand():
    """Student's logits 1 and 0, teacher's 2 and 0 halved to the same; then 2 and 0 as they are."""
    queries, passages = torch.tensor([[0.5, 0.0]]), torch.tensor([[[1.0, 3.0], [0.0, 5.0]]])
    teacher = torch.tensor([[2.0, 0.0]])
    for kind in KINDS:
        assert Distillation(kind, 0.5, 2.0)(queries, passages, teacher).item() == pytest.approx(
            0, abs=1e-7
        )
    # softmax of (2, 0) is (0.880797, 0.119203), of (1, 0) it is (0.731059, 0.268941)
    expected = 0.880797 * (-0.126928 + 0.313262) + 0.119203 * (-2.126928 + 1.313262)
    assert Distillation("kl", 0.5)(queries, passages, teacher).item() == pytest.approx(
        expected, abs=1e-5
    )
    assert Distillation("margin", 0.5)(queries, passages, teacher).item() == pytest.approx(
        (1 - 2) ** 2
    )
    assert Distillation("margin", 0.5, weight=3.0)(
        queries, passages, teacher
    ).item() == pytest.approx(3)


class Given(nn.Module):
    """A sentence-transformers model whose vectors are its input."""

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return dict(features)


def made(b: int, columns: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    queries, passages, teacher = (
        torch.randn(b, *shape, generator=generator) for shape in ((8,), (columns, 8), (columns,))
    )
    return queries.requires_grad_(), passages.requires_grad_(), teacher * 3


@pytest.mark.parametrize("hard", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_are_those_of_sentence_transformers(kind, hard):
    queries, passages, teacher = made(5, 1 + hard)
    model = SentenceTransformer(modules=[Given()], device="cpu")
    if kind == "kl":  # theirs is multiplied by the squared temperature of the student
        theirs, scale = (
            DistillKLDivLoss(model, student_temperature=2.0, teacher_temperature=4.0),
            1 / 2.0**2,
        )
        ours = Distillation(kind, 2.0, 4.0)
    else:
        theirs, scale, ours = MarginMSELoss(model), 1.0, Distillation(kind, 1.0)
    features = [{"sentence_embedding": each} for each in (queries, *passages.unbind(1))]
    values = ours(queries, passages, teacher), theirs(features, teacher) * scale
    torch.testing.assert_close(*values)
    for one, other in zip(
        *(torch.autograd.grad(value, (queries, passages)) for value in values), strict=True
    ):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)
    assert abs(values[0] - ours(queries, passages, teacher.flip(1))) > DIFFERENT


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_teacher_did_not_score_takes_no_part(kind):
    queries, passages, teacher = made(3, 4)
    teacher[0, 2:] = NAN  # two hard negatives were drawn at random
    teacher[1, :] = NAN  # a query of a set without scores
    loss = Distillation(kind, 0.7)
    value = loss(queries, passages, teacher)
    alone = (
        loss(queries[:1], passages[:1, :2], teacher[:1, :2]),
        loss(queries[2:], passages[2:], teacher[2:]),
    )
    assert value.item() == pytest.approx(sum(one.item() for one in alone) / 3)
    for_queries, for_passages = torch.autograd.grad(value, (queries, passages))
    assert not for_queries[1].any()
    assert not for_passages[1].any()
    assert not for_passages[0, 2:].any()
    assert for_passages[0, :2].abs().min() > 0
    assert for_passages.isfinite().all()
    assert not loss(queries, passages, teacher.fill_(NAN)).item()


def taught(batches: list[MicroBatch], seed: int = 0) -> list[MicroBatch]:
    """The same micro-batches with scores, some of which are missing."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for batch in batches:
        teacher = torch.randn(batch.ids.columns.shape, generator=generator) * 3
        teacher[0, -1] = NAN
        found.append(replace(batch, ids=replace(batch.ids, teacher=teacher)))
    return found


HALF_WIDTH = Matryoshka((8,), (0.5,), True)


def objective(kind, weight=1.0, matryoshka=HALF_WIDTH) -> Objective:
    return Objective(InfoNCE(0.1), matryoshka, Distillation(kind, 0.1, 2.0, weight))


@pytest.mark.parametrize("kind", KINDS)
def test_the_methods_keep_their_equivalences(kind):
    data = [taught(micro_batches(4, 4, 2, passages=20, seed=i), i) for i in range(1)]

    def run(method, data=data, **options):
        return run_steps(method, data, loss=objective(kind), dropout=0.2, **options)

    plain, cached, accumulated = run("in_batch"), run("grad_cache"), run("grad_accum")
    assert largest_difference(cached[0], plain[0]) < SAME
    assert cached[1] == pytest.approx(plain[1], rel=1e-5)
    for method, twin in (
        ("passage_bank", accumulated),
        ("cont_accum", accumulated),
        ("cont_cache", cached),
    ):
        assert largest_difference(run(method)[0], twin[0]) == 0
    # control: another teacher
    others = [taught(batches, 7 + number) for number, batches in enumerate(data)]
    for method in METHODS:
        banked = {"bank_size": 16, "push": 16}
        assert (
            largest_difference(run(method, **banked)[0][:1], run(method, others, **banked)[0][:1])
            > DIFFERENT
        )


@pytest.mark.parametrize("method", [name for name in METHODS if name != "in_batch"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_pair_of_a_step_weighs_the_same_however_it_is_cut(kind, method):
    """What distillation adds to the gradients, with micro-batches of 4, 2 and 6 pairs beside a bank
    in use, against the mean over the step's pairs."""
    batches = [
        taught(micro_batches(1, size, 2, passages=20, seed=size), size)[0] for size in (4, 2, 6)
    ]
    start = tiny_encoder()
    found = []
    for weight in (1e-9, 1.0):
        engine, encoder = Engine(device="cpu"), copy.deepcopy(start).train()
        engine.prepare(encoder, torch.optim.SGD(encoder.parameters(), lr=0.0))
        loss = objective(kind, weight)
        bank = make_bank(
            24, encoder.dim, loss, push=4, hard_negatives=2, columns_only=method == "passage_bank"
        )
        METHODS[method](engine, batches, bank, loss)
        engine.update()
        bank.end_step()
        METHODS[method](engine, batches, bank, loss)
        found.append(gradients(encoder))
    added = {name: found[1][name] - found[0][name] for name in found[0]}
    encoder, total = copy.deepcopy(start).train(), torch.zeros(())
    for batch in batches:
        queries, passages = encoder(batch)
        assert batch.ids.teacher is not None
        for share, width in ((1.0, 32), (0.5, 8)):
            for query, own, scores in zip(
                queries[:, :width], passages[..., :width], batch.ids.teacher, strict=True
            ):
                student = F.cosine_similarity(query, own)[~scores.isnan()] / 0.1
                total = total + share / 12 * by_the_book(
                    kind, student, scores[~scores.isnan()] / 2.0
                )
    total.backward()
    assert largest_difference([added], [gradients(encoder)]) < 5e-5


def by_the_book(kind: str, student: Tensor, teacher: Tensor) -> Tensor:
    """One row: probabilities and margins one by one."""
    if kind == "kl":
        p, q = teacher.exp() / teacher.exp().sum(), student.exp() / student.exp().sum()
        return sum((a * (a / b).log() for a, b in zip(p, q, strict=True)), torch.zeros(()))
    margins = [
        ((student[0] - s) - (teacher[0] - t)) ** 2
        for s, t in zip(student[1:], teacher[1:], strict=True)
    ]
    return sum(margins, torch.zeros(())) / len(margins)


def test_the_two_parts_are_told_apart():
    batch = taught(micro_batches(1, 4, 1))[0]
    queries, passages = tiny_encoder()(batch)
    value = objective("kl", matryoshka=FULL_WIDTH)(queries, passages, batch.ids)
    plain = InfoNCE(0.1)(queries, passages, RowIds(batch.ids.columns, batch.ids.positives))
    assert value.contrast == plain.value
    assert value.distilled == Distillation("kl", 0.1, 2.0)(queries, passages, batch.ids.teacher)
    assert value.value == value.contrast + value.distilled
    assert value.weighted(0.5, 3.0).value == 0.5 * value.contrast + 3 * value.distilled
    assert plain.distilled is None

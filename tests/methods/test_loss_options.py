"""Every method against a full matrix with one graph, and the loss against sentence-transformers."""

import copy

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    SlowBank,
    concatenate,
    gradients,
    largest_difference,
    micro_batches,
    run_steps,
    tiny_encoder,
)
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.util import dot_score

from contaccum.batch import RowIds
from contaccum.config import METHOD_SPECS
from contaccum.methods import METHODS
from contaccum.methods.loss import InfoNCE

TEMPERATURE, BANK = 0.1, 20
SAME, DIFFERENT = 2e-4, 1e-3  # two steps of descent let rounding grow


def full_matrix_loss(queries, passages, ids: RowIds, stored, rows, *, decay=0.0, now=0):
    """Loss over current and stored rows from one matrix of logits.

    stored: rows of a SlowBank; rows: whether they are rows, too; now: step of the current rows."""
    steps = torch.tensor([now] * len(queries) + [row[4] for row in stored])
    age = (
        steps[: len(queries) + len(stored) * rows].unsqueeze(1)
        - steps.repeat_interleave(passages.shape[1])
    ).abs()
    known = [set(own.tolist()) for own in ids.positives]
    columns = [*passages.flatten(0, 1), *(passage for row in stored for passage in row[1])]
    column_ids = [*ids.columns.flatten().tolist(), *(number for row in stored for number in row[2])]
    own = list(range(0, len(columns), passages.shape[1]))
    if rows:
        queries, known = (
            torch.stack([*queries, *(row[0] for row in stored)]),
            known + [row[3] for row in stored],
        )
    similarities = queries @ torch.stack(columns).T
    is_own = F.one_hot(torch.tensor(own[: len(queries)]), len(columns)).bool()
    logits = similarities / TEMPERATURE - decay * age
    masked = torch.tensor([[number in each for number in column_ids] for each in known])
    logits = logits.masked_fill(masked & ~is_own, -torch.inf)
    return F.cross_entropy(logits, is_own.long().argmax(1))


def slow_steps(method, data, start, **options):
    """Gradients and losses of ``run_steps`` with every graph kept and every bank row in a list."""
    spec, encoder, bank = METHOD_SPECS[method], copy.deepcopy(start).train(), SlowBank(BANK)
    optimizer = torch.optim.SGD(encoder.parameters(), lr=0.1)
    found, losses = [], []
    for batches in data:
        optimizer.zero_grad()
        parts = [(*encoder(batch), batch.ids) for batch in batches]
        values = []
        for part in [concatenate(parts)] if spec.single_micro_batch or spec.two_pass else parts:
            stored = bank.rows if spec.bank != "none" else []
            values.append(
                full_matrix_loss(*part, stored, spec.bank == "pairs", now=bank.step, **options)
            )
            bank.push(*part)
        torch.stack(values).mean().backward()
        losses.append(torch.stack(values).mean().item())
        found.append(gradients(encoder))
        optimizer.step()
        bank.step += 1
    return found, losses


def fast_steps(method, data, start, decay=0.0):
    spec = METHOD_SPECS[method]
    push = len(data[0]) * len(data[0][0].query_ids) if spec.two_pass else len(data[0][0].query_ids)
    return run_steps(
        method,
        data,
        encoder=start,
        loss=InfoNCE(TEMPERATURE),
        bank_size=BANK,
        push=push,
        columns_only=spec.bank == "passages",
        age_decay=decay,
    )


@pytest.mark.parametrize("decay", [0.0, 0.5])
@pytest.mark.parametrize("method", METHODS)
def test_gradients_equal_those_of_the_full_matrix(method, decay):
    data = [micro_batches(4, 4, 1, passages=20, seed=number) for number in range(2)]
    start = tiny_encoder()
    found, losses = fast_steps(method, data, start, decay)
    expected, expected_losses = slow_steps(method, data, start, decay=decay)
    assert largest_difference(found, expected) < SAME
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    if METHOD_SPECS[method].bank != "none":  # negative control
        assert largest_difference(fast_steps(method, data, start, 0.2)[0], expected) > DIFFERENT


@pytest.mark.parametrize("hard", [0, 2])
def test_loss_equals_that_of_sentence_transformers(hard):
    batch = micro_batches(1, 6, hard)[0]
    generator = torch.Generator().manual_seed(0)
    queries = F.normalize(torch.randn(6, 8, generator=generator), dim=1).requires_grad_()
    passages = F.normalize(torch.randn(6, 1 + hard, 8, generator=generator), dim=2).requires_grad_()
    theirs = MultipleNegativesRankingLoss(None, 1 / TEMPERATURE, similarity_fct=dot_score)
    expected = theirs.compute_loss_from_embeddings([queries, *passages.unbind(1)], None)
    for temperature, is_equal in ((TEMPERATURE, True), (0.9 * TEMPERATURE, False)):
        value = InfoNCE(temperature, False)(queries, passages, batch.ids).value
        ours, others = (
            torch.autograd.grad(each, (queries, passages), retain_graph=True)
            for each in (value, expected)
        )
        differences = [
            float((one - two).abs().max()) for one, two in zip(ours, others, strict=True)
        ]
        assert (abs(value.item() - expected.item()) < 1e-5) == is_equal
        assert (max(differences) < 1e-5) == is_equal

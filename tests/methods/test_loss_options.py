"""Options of the loss against a full matrix with one graph, for every method, and against sentence-transformers."""

import copy

import pytest
import torch
import torch.nn.functional as F
from helpers import SlowBank, gradients, largest_difference, micro_batches, run_steps, tiny_encoder
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.util import dot_score

from contaccum.batch import RowIds, concatenate
from contaccum.config import METHOD_SPECS
from contaccum.methods import METHODS
from contaccum.methods.loss import InfoNCE

TEMPERATURE, BANK = 0.1, 20
SAME, DIFFERENT = 2e-4, 1e-3  # two steps of descent let rounding grow


def full_matrix_loss(queries, passages, ids: RowIds, stored, rows, *, hardness=0.0, symmetric=False, decay=0.0, now=0):
    """Loss over current and stored rows from one matrix of logits.

    stored: rows of a SlowBank; rows: whether they are rows, too; now: step of the current rows."""
    steps = torch.tensor([now] * len(queries) + [row[4] for row in stored])
    age = (steps[: len(queries) + len(stored) * rows].unsqueeze(1) - steps.repeat_interleave(passages.shape[1])).abs()
    known = [set(own.tolist()) for own in ids.positives]
    columns = [*passages.flatten(0, 1), *(passage for row in stored for passage in row[1])]
    column_ids = [*ids.columns.flatten().tolist(), *(number for row in stored for number in row[2])]
    own = list(range(0, len(columns), passages.shape[1]))
    if rows:
        queries, known = torch.stack([*queries, *(row[0] for row in stored)]), known + [row[3] for row in stored]
    similarities = queries @ torch.stack(columns).T
    is_own = F.one_hot(torch.tensor(own[: len(queries)]), len(columns)).bool()
    logits = similarities / TEMPERATURE + hardness * similarities.detach() * ~is_own - decay * age
    masked = torch.tensor([[number in each for number in column_ids] for each in known])
    logits = logits.masked_fill(masked & ~is_own, -torch.inf)
    loss = F.cross_entropy(logits, is_own.long().argmax(1))
    if symmetric:
        reverse = logits[:, own[: len(queries)]].T
        loss = (loss + F.cross_entropy(reverse, torch.arange(len(queries)))) / 2
    return loss


def slow_steps(method, data, start, **options):
    """Gradients and losses of ``run_steps`` with every graph kept and every bank row in a list."""
    spec, encoder, bank = METHOD_SPECS[method], copy.deepcopy(start).train(), SlowBank(BANK)
    optimizer = torch.optim.SGD(encoder.parameters(), lr=0.1)
    found, losses = [], []
    for batches in data:
        optimizer.zero_grad()
        parts = [(*encoder(batch), batch.ids) for batch in batches]
        values = []
        for part in [concatenate(parts)] if spec.whole or spec.two_pass else parts:
            stored = bank.rows if spec.bank != "none" else []
            values.append(full_matrix_loss(*part, stored, spec.bank == "pairs", now=bank.step, **options))
            bank.push(*part)
        torch.stack(values).mean().backward()
        losses.append(torch.stack(values).mean().item())
        found.append(gradients(encoder))
        optimizer.step()
        bank.step += 1
    return found, losses


def fast_steps(method, data, start, decay=0.0, **options):
    spec = METHOD_SPECS[method]
    push = len(data[0]) * len(data[0][0].query_ids) if spec.two_pass else len(data[0][0].query_ids)
    return run_steps(
        method,
        data,
        encoder=start,
        loss=InfoNCE(TEMPERATURE, **options),
        bank_size=BANK,
        push=push,
        columns_only=spec.bank == "passages",
        symmetric=options.get("symmetric", False),
        age_decay=decay,
    )


OPTIONS = [{}, {"hardness": 3.0}, {"symmetric": True}]
ALL = {"hardness": 3.0, "symmetric": True, "decay": 0.5}


@pytest.mark.parametrize(
    ("method", "options"),
    [*((method, options) for method in METHODS for options in OPTIONS), ("cont_accum", ALL), ("cont_cache", ALL)],
    ids=str,
)
def test_gradients_equal_those_of_the_full_matrix(method, options):
    """The negative control is another option."""
    data = [micro_batches(4, 4, 1, passages=20, seed=number) for number in range(2)]
    start = tiny_encoder()
    found, losses = fast_steps(method, data, start, **options)
    expected, expected_losses = slow_steps(method, data, start, **options)
    assert largest_difference(found, expected) < SAME
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    other = {} if options else {"symmetric": True}
    assert largest_difference(fast_steps(method, data, start, **other)[0], expected) > DIFFERENT


HARDNESS = {"hardness_mode": "all_negatives", "hardness_strength": 5.0}
DIRECTIONS = {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"}


@pytest.mark.parametrize("hard", [0, 2])
@pytest.mark.parametrize(
    ("options", "same", "other"),
    [(HARDNESS, {"hardness": 5.0}, {"hardness": 4.0}), (DIRECTIONS, {"symmetric": True}, {"symmetric": False})],
)
def test_options_equal_those_of_sentence_transformers(options, same, other, hard):
    batch = micro_batches(1, 6, hard)[0]
    generator = torch.Generator().manual_seed(0)
    queries = F.normalize(torch.randn(6, 8, generator=generator), dim=1).requires_grad_()
    passages = F.normalize(torch.randn(6, 1 + hard, 8, generator=generator), dim=2).requires_grad_()
    theirs = MultipleNegativesRankingLoss(None, 1 / TEMPERATURE, similarity_fct=dot_score, **options)
    expected = theirs.compute_loss_from_embeddings([queries, *passages.unbind(1)], None)
    for own, is_equal in ((same, True), (other, False)):
        value = InfoNCE(TEMPERATURE, False, **own)(queries, passages, batch.ids).value
        ours, others = (torch.autograd.grad(each, (queries, passages), retain_graph=True) for each in (value, expected))
        differences = [float((one - two).abs().max()) for one, two in zip(ours, others, strict=True)]
        assert (abs(value.item() - expected.item()) < 1e-5) == is_equal
        assert (max(differences) < 1e-5) == is_equal

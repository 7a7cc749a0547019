"""Pairs that the loss leaves out: all methods against a full matrix of plain lists, each with a
control that must differ."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    concatenate,
    gradients,
    largest_difference,
    make_bank,
    micro_batches,
    run_steps,
    tiny_encoder,
)
from torch import Tensor

from contaccum.batch import MISSING, NO_PASSAGE, MicroBatch, RowIds
from contaccum.config import METHOD_SPECS
from contaccum.methods.distillation import Distillation
from contaccum.methods.loss import InfoNCE
from contaccum.methods.matryoshka import Matryoshka
from contaccum.methods.objective import Objective
from contaccum.methods.rules import Guide, PairRules

K, B, HARD, TEMPERATURE, PASSAGES, QUERIES, SIZE, DECAY = 2, 4, 2, 0.1, 24, 30, 10, 0.3


def steps(count: int = 3) -> list[list[MicroBatch]]:
    """Random steps; some hard negatives are missing, also all of a query.

    The rows know the numbers of their queries.
    """
    found, generator = [], torch.Generator().manual_seed(7)
    for step in range(count):
        batches = micro_batches(K, B, HARD, passages=PASSAGES, seed=step)
        for number, batch in enumerate(batches):
            batch.ids.columns[number::2, 2] = MISSING
            batch.ids.columns[3, 1:] = MISSING
            queries = torch.randint(QUERIES, (B,), generator=generator)
            batches[number] = replace(batch, ids=replace(batch.ids, queries=queries))
        found.append(batches)
    return found


class Table:
    """Random vectors of a guide, which has another width than the encoder."""

    def __init__(self, name: str, rows: int, seed: int) -> None:
        self.name, self.table = (
            name,
            torch.randn(rows, 5, generator=torch.Generator().manual_seed(seed)).half(),
        )

    def __call__(self, rows: Tensor) -> Tensor:
        return self.table[rows]


QUERY_TABLE, PASSAGE_TABLE = Table("queries", QUERIES, 1), Table("passages", 2 * PASSAGES, 2)
GUIDE, SEPARATE = Guide(QUERY_TABLE, PASSAGE_TABLE), torch.arange(QUERIES) % 3 == 0


class Pair(NamedTuple):
    """A row of the loss."""

    query: Tensor
    passages: list[Tensor]
    ids: list[int]
    known: set[int]
    step: int
    number: int


class Case(NamedTuple):
    """A rule and its plain form: whether a row of one pair meets a column of another pair or of the
    same.

    The plain form gets the row's pair, the column's pair, the index of the passage, the score of
    row and column and that of the row and its positive.
    """

    rules: PairRules
    left_out: Callable[[Pair, Pair, int, float, float], bool]


def guide_scores(row: Pair, column: Pair, index: int) -> tuple[float, float]:
    query, positive = (
        QUERY_TABLE.table[row.number].double(),
        PASSAGE_TABLE.table[row.ids[0]].double(),
    )
    return float(query @ PASSAGE_TABLE.table[column.ids[index]].double()), float(query @ positive)


def absolute(margin: float):
    return lambda row, column, index, score, own: score > own - margin


def relative(margin: float):
    return lambda row, column, index, score, own: score > own - margin * abs(own)


def by_guide(rule):
    return lambda row, column, index, score, own: rule(
        row, column, index, *guide_scores(row, column, index)
    )


def missing(row, column, index, score, own) -> bool:
    return column.ids[index] == MISSING


def separate(row, column, index, score, own) -> bool:
    return bool(SEPARATE[row.number]) and row.passages[0] is not column.passages[0]


def both(*rules):
    return lambda *given: missing(*given) or any(rule(*given) for rule in rules)


CASES = {
    "missing": Case(PairRules(missing=True), missing),
    "own": Case(PairRules(missing=True, margin=-0.05, key="own"), both(absolute(-0.05))),
    "own relative": Case(
        PairRules(True, margin=0.03, relative=True, key="own"), both(relative(0.03))
    ),
    "guide": Case(
        PairRules(True, margin=-0.5, guide=GUIDE, key="guide"), both(by_guide(absolute(-0.5)))
    ),
    "guide relative": Case(
        PairRules(True, margin=0.2, relative=True, guide=GUIDE, key="guide"),
        both(by_guide(relative(0.2))),
    ),
    "separate": Case(PairRules(True, SEPARATE, key="separate"), both(separate)),
    "all": Case(
        PairRules(True, SEPARATE, margin=0.0, guide=GUIDE, key="all"),
        both(separate, by_guide(absolute(0.0))),
    ),
}


def plain_loss(current: list[Pair], stored: list[Pair], rows: list[Pair], left_out) -> Tensor:
    """Mean over ``rows`` of the cross-entropy with the columns of ``current`` and ``stored``,
    computed pair by pair."""
    total = torch.zeros(())
    for row in rows:
        logits, target = [], None
        own = (row.query @ row.passages[0]).item()
        for column in current + stored:
            penalty = DECAY * abs(row.step - column.step)
            for index, (passage, number) in enumerate(
                zip(column.passages, column.ids, strict=True)
            ):
                score = row.query @ passage
                if passage is row.passages[0]:
                    target = len(logits)
                elif number in row.known or left_out(row, column, index, score.item(), own):
                    continue
                logits.append(score / TEMPERATURE - penalty)
        total = total + F.cross_entropy(torch.stack(logits).unsqueeze(0), torch.tensor([target]))
    return total / len(rows)


class PlainBank:
    """List of the last ``size`` pairs."""

    def __init__(self, size: int) -> None:
        self.size, self.pairs, self.step = size, [], 0

    def pairs_of(self, queries: Tensor, passages: Tensor, ids: RowIds) -> list[Pair]:
        known = [set(row.tolist()) - {NO_PASSAGE} for row in ids.positives]
        columns = zip(queries, map(list, passages), ids.columns.tolist(), known, strict=True)
        return [
            Pair(*each, self.step, number)
            for each, number in zip(columns, ids.queries.tolist(), strict=True)
        ]

    def push(self, pairs: list[Pair]) -> None:
        if self.size:
            detached = [each._replace(query=each.query.detach()) for each in pairs]
            detached = [
                each._replace(passages=[p.detach() for p in each.passages]) for each in detached
            ]
            self.pairs = (self.pairs + detached)[-self.size :]


def plain_steps(method: str, data, encoder, left_out, matryoshka: Matryoshka | None = None):
    """Gradients and losses of a method with all graphs in memory."""
    spec, encoder = METHOD_SPECS[method], copy.deepcopy(encoder).train()
    truncated = (
        [] if matryoshka is None else list(zip(matryoshka.widths, matryoshka.weights, strict=True))
    )
    banks = [
        (PlainBank(SIZE if spec.bank != "none" else 0), *each)
        for each in [(encoder.dim, 1.0), *truncated]
    ]
    optimizer = torch.optim.SGD(encoder.parameters(), lr=0.1)
    found, losses = [], []
    for batches in data:
        optimizer.zero_grad()
        parts = [(*encoder(batch), batch.ids) for batch in batches]
        groups = [concatenate(parts)] if spec.single_micro_batch or spec.two_pass else parts
        total = 0.0
        for queries, passages, ids in groups:
            value = torch.zeros(())
            for bank, width, weight in banks:
                full = matryoshka is None or width == encoder.dim
                cut = [
                    each if full else matryoshka.truncate(each, width)
                    for each in (queries, passages)
                ]
                current = bank.pairs_of(*cut, ids)
                rows = current + (bank.pairs if spec.bank == "pairs" else [])
                value = value + weight * plain_loss(current, bank.pairs, rows, left_out)
                bank.push(current)
            (value / len(groups)).backward(retain_graph=True)
            total += value.item() / len(groups)
        found.append(gradients(encoder))
        losses.append(total)
        optimizer.step()
        for bank, *_ in banks:
            bank.step += 1
    return found, losses


def fast_steps(method: str, data, encoder, loss, **more):
    spec = METHOD_SPECS[method]
    options = {
        "bank_size": SIZE,
        "push": B * K if spec.pushes_whole_step else B,
        "age_decay": DECAY,
    }
    options |= {"columns_only": spec.bank == "passages"}
    return run_steps(method, data, loss=loss, encoder=encoder, **options, **more)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("method", METHOD_SPECS)
def test_all_methods_equal_a_full_matrix_without_the_pairs_left_out(method, name):
    rules, left_out = CASES[name]
    data, encoder = steps(), tiny_encoder()
    slow, slow_losses = plain_steps(method, data, encoder, left_out)
    for chunk in (None, 7):
        fast, losses = fast_steps(
            method, data, encoder, InfoNCE(TEMPERATURE, rules=rules, chunk=chunk)
        )
        assert largest_difference(fast, slow) < 2e-4
        assert losses == pytest.approx(slow_losses, rel=1e-5)
    wrong = PairRules() if name == "missing" else PairRules(missing=True)  # negative control
    other, _ = fast_steps(method, data, encoder, InfoNCE(TEMPERATURE, rules=wrong))
    assert largest_difference(other, slow) > 1e-3


@pytest.mark.parametrize("name", ["own relative", "guide", "separate"])
@pytest.mark.parametrize("method", ["grad_cache", "cont_accum", "cont_cache"])
def test_rules_apply_to_each_matryoshka_width(method, name):
    rules, left_out = CASES[name]
    data, encoder, matryoshka = steps(), tiny_encoder(), Matryoshka((8,), (0.5,), unit=True)
    slow, slow_losses = plain_steps(method, data, encoder, left_out, matryoshka=matryoshka)
    fast, losses = fast_steps(
        method, data, encoder, Objective(InfoNCE(TEMPERATURE, rules=rules), matryoshka)
    )
    assert largest_difference(fast, slow) < 2e-4
    assert losses == pytest.approx(slow_losses, rel=1e-5)
    # negative control
    plain = Objective(InfoNCE(TEMPERATURE, rules=PairRules(missing=True)), matryoshka)
    assert largest_difference(fast_steps(method, data, encoder, plain)[0], slow) > 1e-3


@pytest.mark.parametrize("name", ["own", "guide", "separate"])
@pytest.mark.parametrize("method", ["grad_cache", "cont_cache"])
def test_partial_replay_has_the_same_loss_without_the_pairs_left_out(method, name):
    rules, left_out = CASES[name]
    data, encoder = steps(1), tiny_encoder()
    _, expected = plain_steps(method, data, encoder, left_out)
    loss = InfoNCE(TEMPERATURE, rules=rules)
    assert fast_steps(method, data, encoder, loss, replay_share=0.5)[1] == pytest.approx(
        expected, rel=1e-5
    )
    _, plain = fast_steps(method, data, encoder, InfoNCE(TEMPERATURE), replay_share=0.5)
    assert plain != pytest.approx(expected, rel=1e-2)  # negative control


def vectors(ids: RowIds, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = len(ids.columns), ids.columns.shape[1], 8
    return F.normalize(torch.randn(shape[0], 8, generator=generator), dim=-1), F.normalize(
        torch.randn(shape, generator=generator), dim=-1
    )


def test_distillation_keeps_the_passages_that_a_rule_leaves_out():
    ids = steps(1)[0][0].ids
    ids = replace(
        ids, teacher=torch.randn(ids.columns.shape, generator=torch.Generator().manual_seed(0))
    )
    distillation = Distillation("kl", TEMPERATURE)
    plain, ruled = (
        Objective(InfoNCE(TEMPERATURE, rules=rules), distillation=distillation)(*vectors(ids), ids)
        for rules in (PairRules(missing=True), CASES["all"].rules)
    )
    assert plain.distilled == ruled.distilled
    assert plain.contrast != ruled.contrast


@pytest.mark.parametrize("name", ["own", "guide"])
def test_left_out_pairs_are_counted(name):
    """For current rows, with current and stored columns, without those that are masked by id or
    missing."""
    rules, left_out = CASES[name]
    (first, second), *_ = steps(1)
    loss, plain = InfoNCE(TEMPERATURE, rules=rules), PlainBank(SIZE)
    bank = make_bank(SIZE, 8, loss, push=B, hard_negatives=HARD)
    stored, now = vectors(first.ids, 1), vectors(second.ids, 2)
    bank.push(*stored, first.ids)
    plain.push(plain.pairs_of(*stored, first.ids))
    found = loss(*now, second.ids, bank).statistics
    current, expected, left = plain.pairs_of(*now, second.ids), 0, 0
    for row in current:
        own = float(row.query @ row.passages[0])
        for column in current + plain.pairs:
            for index, (passage, number) in enumerate(
                zip(column.passages, column.ids, strict=True)
            ):
                if passage is row.passages[0] or number in row.known or number == MISSING:
                    continue
                out = left_out(row, column, index, float(row.query @ passage), own)
                expected, left = expected + out, left + (not out)
    assert expected > 0
    assert found["filtered"].item() == pytest.approx(expected / B)
    assert found["negatives"].item() == pytest.approx(left / B)
    assert "filtered" not in InfoNCE(TEMPERATURE)(*now, second.ids).statistics


def test_own_positive_is_never_left_out():
    """A margin that no passage reaches leaves only the positive, so the loss is 0."""
    ids = steps(1)[0][0].ids
    for guide in (None, GUIDE):
        value = InfoNCE(TEMPERATURE, rules=PairRules(margin=100.0, guide=guide))(*vectors(ids), ids)
        assert value.value == 0
        assert value.statistics["negatives"] == 0


@pytest.mark.parametrize("size", [1, 7])
def test_guide_vectors_are_compared_in_chunks(size, monkeypatch):
    ids = RowIds.merge([batch.ids for batch in steps(1)[0]], torch.cat)
    loss = InfoNCE(TEMPERATURE, rules=CASES["guide"].rules)
    expected = loss(*vectors(ids), ids)
    monkeypatch.setattr("contaccum.methods.rules.CHUNK", size)
    found = loss(*vectors(ids), ids)
    assert found.value == pytest.approx(expected.value.item())
    assert found.statistics["filtered"] == expected.statistics["filtered"] > 0


def test_restored_bank_keeps_its_sums_only_under_the_same_rules():
    """With another margin the log-sum-exps are computed again, as those of a bank that had this
    margin from the start."""
    data = [batch.ids for batch in steps(1)[0]]

    def filled(margin: float) -> tuple[InfoNCE, object]:
        rules = PairRules(True, margin=margin, guide=GUIDE, key=f"margin {margin}")
        loss = InfoNCE(TEMPERATURE, rules=rules)
        bank = make_bank(SIZE, 8, loss, push=B, hard_negatives=HARD)
        for number, ids in enumerate(data):
            bank.push(*vectors(ids, number), ids)
        bank.end_step()
        return bank

    one, other = filled(0.0), filled(0.5)
    assert not torch.allclose(one.logsumexp(), other.logsumexp())
    expected = other.logsumexp().clone()
    other.load_state(*one.state())
    torch.testing.assert_close(other.logsumexp(), expected)


def test_a_rolled_back_bank_has_the_query_numbers_of_before():
    loss = InfoNCE(TEMPERATURE, rules=CASES["all"].rules)
    bank = make_bank(SIZE, 8, loss, push=B, hard_negatives=HARD)
    data = [batch.ids for step in steps(2) for batch in step]
    for number, ids in enumerate(data[:2]):
        bank.push(*vectors(ids, number), ids)
    bank.end_step()
    before = {name: tensor.clone() for name, tensor in bank.state()[0].items()}
    assert before["query_numbers"].any()
    bank.push(*vectors(data[2], 2), data[2])
    assert not torch.equal(bank.query_numbers, before["query_numbers"])
    bank.rollback()
    assert all(torch.equal(tensor, before[name]) for name, tensor in bank.state()[0].items())

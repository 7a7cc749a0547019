"""Equivalences between the six methods, on every parameter's gradient, each with a control that
must differ."""

import copy
import weakref

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    SlowBank,
    concatenate,
    gradients,
    largest_difference,
    make_bank,
    micro_batches,
    run_steps,
    slow_loss,
    tiny_encoder,
)

from contaccum.batch import step_ids
from contaccum.encoder import DualEncoder
from contaccum.methods import METHODS
from contaccum.methods.grad_cache import cache_gradients, represent
from contaccum.methods.loss import InfoNCE
from contaccum.runtime.engine import Engine

SAME = 1e-5
DIFFERENT = 1e-3
TWINS = [("passage_bank", "grad_accum"), ("cont_accum", "grad_accum"), ("cont_cache", "grad_cache")]


def steps(count=3, micro=4, pairs=4, hard=0, passages=1000):
    return [micro_batches(micro, pairs, hard, passages, seed=i) for i in range(count)]


@pytest.mark.parametrize("hard", [0, 2])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_grad_cache_equals_in_batch_on_the_whole_step(hard, dropout):
    data = steps(hard=hard, passages=20)
    cached, cached_loss = run_steps("grad_cache", data, dropout=dropout)
    plain, plain_loss = run_steps("in_batch", data, dropout=dropout)
    assert largest_difference(cached, plain) < SAME
    assert cached_loss == pytest.approx(plain_loss, rel=1e-5)


@pytest.mark.parametrize(("dtype", "same"), [(torch.float32, 2e-5), (torch.float64, 1e-10)])
@pytest.mark.parametrize("hard", [0, 2])
@pytest.mark.parametrize(
    ("tie", "unpad"), [(True, True), (True, False), (False, True), (False, False)]
)
def test_passes_of_each_tower_give_the_gradients_of_one_graph(
    tie, unpad, hard, dtype, same, monkeypatch
):
    """Micro-batches of unequal size, against the graph of the whole step and a plain
    cross-entropy."""
    if dtype == torch.float64:  # without the cast of the vectors to float32
        monkeypatch.setattr(
            DualEncoder, "embed", lambda self, tower, texts: F.normalize(tower(texts), dim=-1)
        )
    start = tiny_encoder(tie=tie).to(dtype)
    start.set_attention("auto", unpad)
    batches = [
        batch for pairs in (5, 2, 3) for batch in micro_batches(1, pairs, hard, 10**6, seed=pairs)
    ]
    plain = copy.deepcopy(start).train()
    queries, passages, _ = concatenate([(*plain(batch), batch.ids) for batch in batches])
    logits = queries @ passages.transpose(0, 1).flatten(0, 1).T / 0.1
    F.cross_entropy(logits, torch.arange(10)).backward()
    for method in ("in_batch", "grad_cache", "cont_cache"):
        found, _ = run_steps(method, [batches], encoder=start)
        assert largest_difference(found, [gradients(plain)]) < same
    other, _ = run_steps("grad_cache", [batches[:2]], encoder=start)  # negative control
    assert largest_difference(other, [gradients(plain)]) > DIFFERENT


def test_grad_cache_differs_when_dropout_is_not_replayed(monkeypatch):
    """Negative control: with other noise in the second pass the gradients are other ones."""
    data = steps(1)
    plain, _ = run_steps("in_batch", data, dropout=0.3)
    calls = iter(range(1000))
    seed = Engine._seed
    monkeypatch.setattr(Engine, "_seed", lambda self, step, _: seed(self, step, next(calls)))
    cached, _ = run_steps("grad_cache", data, dropout=0.3)
    assert largest_difference(cached, plain) > DIFFERENT


def test_grad_cache_differs_from_grad_accum():
    data = steps(1)
    assert (
        largest_difference(run_steps("grad_cache", data)[0], run_steps("grad_accum", data)[0])
        > DIFFERENT
    )


@pytest.mark.parametrize(("with_bank", "without"), TWINS)
@pytest.mark.parametrize("hard", [0, 1])
def test_a_bank_of_size_zero_is_the_bankless_twin_to_the_bit(with_bank, without, hard):
    data = steps(hard=hard)
    empty, empty_loss = run_steps(with_bank, data, dropout=0.1, bank_size=0)
    twin, twin_loss = run_steps(without, data, dropout=0.1)
    assert largest_difference(empty, twin) == 0
    assert empty_loss == twin_loss


@pytest.mark.parametrize(("with_bank", "without"), TWINS)
def test_a_bank_in_use_differs_from_the_twin(with_bank, without):
    data = steps(hard=1)
    banked, _ = run_steps(with_bank, data, bank_size=16, push=4)
    assert largest_difference(banked[1:], run_steps(without, data)[0][1:]) > DIFFERENT


@pytest.mark.parametrize("method", ["grad_accum", "cont_accum", "passage_bank"])
def test_one_micro_batch_and_no_bank_is_in_batch(method):
    data = steps(micro=1)
    one, _ = run_steps(method, data)
    assert largest_difference(one, run_steps("in_batch", data)[0]) < SAME
    several = steps(micro=2)
    assert (
        largest_difference(run_steps(method, several)[0], run_steps("in_batch", several)[0])
        > DIFFERENT
    )


def test_cont_accum_without_bank_queries_is_passage_bank():
    data = steps(hard=1)
    one_sided, _ = run_steps("cont_accum", data, bank_size=16, columns_only=True)
    assert largest_difference(one_sided, run_steps("passage_bank", data, bank_size=16)[0]) == 0
    assert largest_difference(run_steps("cont_accum", data, bank_size=16)[0], one_sided) > DIFFERENT


def test_a_bank_emptied_after_each_step_holds_this_step_alone():
    """Without past encoder: the second step's gradients do not depend on the first step's pairs."""
    first, other, second = steps(3)
    start = tiny_encoder()

    def second_gradients(opening, keep):
        frozen = InfoNCE(0.1)
        encoder = copy.deepcopy(start).train()
        engine = Engine(device="cpu")
        # the weights stay, only the bank can tell
        engine.prepare(encoder, torch.optim.SGD(encoder.parameters(), lr=0.0))
        bank = make_bank(16, encoder.dim, frozen, push=4, keep=keep)
        for step in (opening, second):
            METHODS["cont_accum"](engine, step, bank, frozen)
            found = gradients(encoder)
            engine.update()
            bank.end_step()
        return [found]

    assert (
        largest_difference(second_gradients(first, keep=False), second_gradients(other, keep=False))
        == 0
    )
    assert (
        largest_difference(second_gradients(first, keep=True), second_gradients(other, keep=True))
        > DIFFERENT
    )


@pytest.mark.parametrize("hard", [0, 1])
@pytest.mark.parametrize("mask", [True, False])
@pytest.mark.parametrize("similarity", ["cosine", "dot"])
def test_cont_accum_equals_the_slow_version(hard, mask, similarity):
    """Every parameter's gradient over 4 steps of 4 micro-batches through a ring of 10 rows, against
    plain lists."""
    temperature = 0.1 if similarity == "cosine" else 5.0
    data = steps(4, hard=hard, passages=20)
    start = tiny_encoder(similarity=similarity)
    fast, fast_loss = run_steps(
        "cont_accum", data, bank_size=10, loss=InfoNCE(temperature, mask), encoder=start
    )

    encoder, bank = copy.deepcopy(start).train(), SlowBank(10)
    optimizer = torch.optim.SGD(encoder.parameters(), lr=0.1)
    slow, slow_losses = [], []
    for batches in data:
        optimizer.zero_grad()
        total = 0.0
        for batch in batches:
            queries, passages = encoder(batch)
            value = slow_loss(queries, passages, batch.ids, bank, temperature, mask=mask)
            (value / len(batches)).backward()
            bank.push(queries, passages, batch.ids)
            total += value.item() / len(batches)
        slow.append(gradients(encoder))
        slow_losses.append(total)
        optimizer.step()
    assert largest_difference(fast, slow) < 2e-4  # four steps of descent let rounding grow
    assert fast_loss == pytest.approx(slow_losses, rel=1e-5)
    other = run_steps(
        "cont_accum", data, bank_size=12, loss=InfoNCE(temperature, mask), encoder=start
    )[0]
    assert largest_difference(other, slow) > 1e-3


def test_cont_cache_equals_a_slow_version_that_keeps_every_graph():
    data = steps(3, hard=1, passages=20)
    start = tiny_encoder()
    fast, _ = run_steps("cont_cache", data, bank_size=20, push=16, encoder=start)
    encoder, bank = copy.deepcopy(start).train(), SlowBank(20)
    optimizer = torch.optim.SGD(encoder.parameters(), lr=0.1)
    slow = []
    for batches in data:
        optimizer.zero_grad()
        parts = [(*encoder(batch), batch.ids) for batch in batches]
        queries, passages = (torch.cat([part[i] for part in parts]) for i in (0, 1))
        ids = type(parts[0][2])(
            *(torch.cat([getattr(part[2], n) for part in parts]) for n in ("columns", "positives"))
        )
        slow_loss(queries, passages, ids, bank, 0.1, mask=True).backward()
        bank.push(queries, passages, ids)
        slow.append(gradients(encoder))
        optimizer.step()
    assert largest_difference(fast, slow) < 2e-4
    assert (
        largest_difference(
            run_steps("cont_cache", data, bank_size=16, push=16, encoder=start)[0], slow
        )
        > 1e-3
    )


@pytest.mark.parametrize("method", list(METHODS))
def test_tied_towers_and_gradient_checkpointing_change_no_gradient(method):
    """Recomputed activations, dropout included, give the gradients of kept ones."""
    data = steps(2, hard=1)
    start = tiny_encoder(dropout=0.2, tie=True)
    plain, _ = run_steps(method, data, bank_size=16, push=16, encoder=start)
    start.gradient_checkpointing_enable()
    assert (
        largest_difference(run_steps(method, data, bank_size=16, push=16, encoder=start)[0], plain)
        < SAME
    )


@pytest.mark.parametrize(("count", "kept"), [(1, [4, 4]), (3, [6])])
def test_the_first_pass_keeps_the_graph_of_one_micro_batch(count, kept):
    encoder = tiny_encoder()
    engine = Engine(device="cpu")
    engine.prepare(encoder, torch.optim.SGD(encoder.parameters(), lr=0.1))
    batches = micro_batches(count, 4)
    queries, passages, with_graph = represent(engine, engine.texts(batches))
    assert not queries.requires_grad
    assert not passages.requires_grad
    assert [len(vectors) for vectors in with_graph] == kept
    assert all(vectors.requires_grad for vectors in with_graph)
    value, cache = cache_gradients(queries, passages, step_ids(batches), InfoNCE(0.1))
    assert not value.value.requires_grad
    assert [tuple(each.shape) for each in cache] == [(4 * count, 32), (4 * count, 1, 32)]


@pytest.mark.parametrize("method", list(METHODS))
def test_a_loss_scale_multiplies_every_gradient_alike(method):
    """fp16's scaler scales each of a step's backward passes: undone once, the step's gradients are
    the plain ones."""
    data = steps(1, hard=1)
    plain, plain_loss = run_steps(method, data, bank_size=16, push=16)
    encoder = tiny_encoder().train()
    engine = Engine(device="cpu")
    engine.prepare(encoder, torch.optim.SGD(encoder.parameters(), lr=0.1))
    engine.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    loss = InfoNCE(0.1)
    values = METHODS[method](
        engine,
        data[0],
        make_bank(
            16, encoder.dim, loss, push=16, hard_negatives=1, columns_only=method == "passage_bank"
        ),
        loss,
    )
    scaled = gradients(encoder)
    assert largest_difference([{name: g / 1024 for name, g in scaled.items()}], plain) < SAME
    assert largest_difference([scaled], plain) > 0.9
    assert torch.stack([value.value for value in values]).mean().item() == pytest.approx(
        plain_loss[0], rel=1e-6
    )


def test_cont_cache_frees_the_logits_of_the_bank_before_the_second_pass(monkeypatch):
    data = steps(2)
    encoder, loss = tiny_encoder().train(), InfoNCE(0.1)
    engine = Engine(device="cpu")
    engine.prepare(encoder, torch.optim.SGD(encoder.parameters(), lr=0.1))
    bank = make_bank(16, encoder.dim, loss, push=16)
    METHODS["cont_cache"](engine, data[0], bank, loss)  # fills the bank
    pushed, alive = [], []
    push, backward = bank.push, engine.backward

    def watched_push(queries, passages, ids, bank_logits):
        pushed.append(weakref.ref(bank_logits[0].over_current))
        push(queries, passages, ids, bank_logits)

    def watched_backward(value):
        alive.extend(logits() is not None for logits in pushed)
        backward(value)

    monkeypatch.setattr(bank, "push", watched_push)
    monkeypatch.setattr(engine, "backward", watched_backward)
    METHODS["cont_cache"](engine, data[1], bank, loss)
    assert alive
    assert not any(alive)

"""The cost of a pair that budgets charge is the number of passes that the encoder makes."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from helpers import make_bank, micro_batches, tiny_encoder

from contaccum.batch import Tokens
from contaccum.config import METHOD_SPECS
from contaccum.encoder import Tower
from contaccum.methods import METHODS
from contaccum.methods.loss import InfoNCE
from contaccum.runtime.engine import Engine

PAIRS = 16


def count_passes(tower: Tower) -> Callable[[], int]:
    """Return a function that gives the passes of all texts through a tower so far.

    A backward pass of a text counts as 2.
    """
    texts = {"forward": 0, "backward": 0}

    def count(_tower, _inputs, output: torch.Tensor) -> None:
        texts["forward"] += len(output)  # (texts, d)
        if output.requires_grad:
            output.register_hook(
                lambda gradient: texts.update(backward=texts["backward"] + len(gradient))
            )

    tower.register_forward_hook(count)
    return lambda: texts["forward"] + 2 * texts["backward"]


def passes_of_a_pair(
    method: str, size: int, share: float = 1.0, hard_negatives: int = 0
) -> tuple[float, float]:
    """Run one step of PAIRS pairs in micro-batches of ``size`` pairs.

    All texts have the same length. Return the mean number of passes of a query and of a passage.
    """
    encoder = tiny_encoder().train()
    count_query, count_passage = (
        count_passes(encoder.query_tower),
        count_passes(encoder.passage_tower),
    )
    engine = Engine(device="cpu", replay_share=share)
    engine.prepare(encoder, torch.optim.SGD(encoder.parameters(), lr=0.1))
    loss = InfoNCE(0.1)
    bank = make_bank(
        PAIRS,
        encoder.dim,
        loss,
        push=PAIRS,
        hard_negatives=hard_negatives,
        columns_only=method == "passage_bank",
    )
    batches = micro_batches(PAIRS // size, size, hard_negatives)
    batches = [
        replace(batch, queries=equal(batch.queries), passages=equal(batch.passages))
        for batch in batches
    ]
    METHODS[method](engine, batches, bank, loss)
    return count_query() / PAIRS, count_passage() / (PAIRS * (1 + hard_negatives))


def equal(texts: Tokens) -> Tokens:
    ids = texts.input_ids[:, :4]
    return Tokens(ids, torch.ones_like(ids))


@pytest.mark.parametrize("hard_negatives", [0, 1])
@pytest.mark.parametrize("size", [2, 8, PAIRS])
@pytest.mark.parametrize(
    "method", [name for name, spec in METHOD_SPECS.items() if not spec.single_micro_batch]
)
def test_cost_is_the_number_of_passes_that_the_towers_make(method, size, hard_negatives):
    charged = METHOD_SPECS[method].cost(PAIRS, size)
    query, passage = passes_of_a_pair(method, size, hard_negatives=hard_negatives)
    assert (query + (1 + hard_negatives) * passage) / (2 + hard_negatives) == charged
    # negative control: a second forward pass of every text would cost 4
    assert charged < 4
    # a two-pass method keeps the graph of the last pass, which has passages only
    assert (query == passage) == (size == PAIRS or not METHOD_SPECS[method].two_pass)


def test_a_step_of_one_micro_batch_costs_as_much_as_in_batch():
    charged = METHOD_SPECS["in_batch"].cost(PAIRS, PAIRS)
    assert charged == METHOD_SPECS["grad_cache"].cost(PAIRS, PAIRS) == 3
    assert passes_of_a_pair("in_batch", PAIRS) == (charged, charged)


@pytest.mark.parametrize("share", [0.25, 0.5])
@pytest.mark.parametrize("size", [4, PAIRS])
@pytest.mark.parametrize("method", ["grad_cache", "cont_cache"])
def test_cost_with_partial_replay_is_the_number_of_passes_that_the_towers_make(method, size, share):
    charged = METHOD_SPECS[method].cost(PAIRS, size, share)
    assert charged == 1 + 3 * share
    assert passes_of_a_pair(method, size, share) == (charged, charged)
    # negative control: without partial replay, the same step makes more passes
    assert passes_of_a_pair(method, size)[0] > charged


@pytest.mark.parametrize("method", list(METHOD_SPECS))
@pytest.mark.parametrize(
    ("tie", "unpad"), [(True, True), (True, False), (False, True), (False, False)]
)
def test_passes_of_a_step(method, tie, unpad, monkeypatch):
    """One pass per micro-batch in tied towers without padding, else one for each side.

    If the loss is that of the whole step, each tower fills its passes with as many tokens as the
    largest micro-batch has, and a two-pass method keeps the graph of the last pass.
    """
    encoder = tiny_encoder(tie=tie).train()
    encoder.set_attention("auto", unpad)
    calls = []
    for tower in encoder.towers:
        tower.register_forward_hook(lambda *_: calls.append(1))
    engine = Engine(device="cpu")
    engine.prepare(encoder, torch.optim.SGD(encoder.parameters(), lr=0.1))
    gathers = []
    monkeypatch.setattr(engine, "all_rows", lambda rows: gathers.append(rows) or rows)
    loss = InfoNCE(0.1)
    bank = make_bank(PAIRS, encoder.dim, loss, push=PAIRS, columns_only=method == "passage_bank")
    batches = micro_batches(4, PAIRS // 4)
    METHODS[method](engine, batches, bank, loss)
    spec = METHOD_SPECS[method]
    if not (spec.single_micro_batch or spec.two_pass):
        assert len(calls) == 4 * (1 if tie and unpad else 2)
        assert len(gathers) == 8
        return
    assert len(gathers) == 1  # the second pass needs only the texts of this process
    budget = max(
        batch.queries.count(padded=not unpad) + batch.passages.count(padded=not unpad)
        for batch in batches
    )
    queries, passages = (
        torch.cat([getattr(batch, side).attention_mask.sum(1) for batch in batches]).tolist()
        for side in ("queries", "passages")
    )
    expected = 0
    for lengths in [queries + passages] if tie else [queries, passages]:
        filled: list[int] = []  # lengths of the texts of one pass
        for length in lengths if unpad else sorted(lengths, reverse=True):
            tokens = sum(filled) + length if unpad else max([*filled, length]) * (len(filled) + 1)
            if not filled or tokens > budget:
                expected, filled = expected + 1, []
            filled.append(length)
    assert len(calls) == (2 * expected - 1 if spec.two_pass else expected)
    assert expected < 8  # fewer than one for each side of a micro-batch

"""The bank in a training loop of the user, without the trainer of another library."""

import re

import pytest
import torch

from contaccum.errors import InputError
from contaccum.integrations.bank_loss import BankLoss


def losses(autocast: bool = False, **options) -> list[float]:
    generator = torch.Generator().manual_seed(0)
    loss = BankLoss(bank_size=8, similarity="cosine", **options)
    loss.begin()
    found = []
    for micro_batch in range(6):
        queries, passages = (
            torch.rand(4, n, 8, generator=generator, dtype=torch.float32) for n in (1, 2)
        )
        ids = torch.arange(8).view(4, 2)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            found.append(loss(queries[:, 0], passages, ids, training=True).item())
        if micro_batch % 2:
            loss.end_step()
    return found


def test_loss_does_not_depend_on_the_default_dtype_of_torch():
    expected = losses()
    torch.set_default_dtype(torch.float64)
    try:
        assert losses() == expected
    finally:
        torch.set_default_dtype(torch.float32)


def test_autocast_around_the_loss_changes_nothing():
    """A push computes logits of stored passages, if the bank has no hard negatives."""
    expected = losses(hard_negatives=False)
    assert losses(autocast=True, hard_negatives=False) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0}, "temperature is 0, expected `float` > 0"),
        ({"temperature": -0.05}, "temperature is -0.05, expected `float` > 0"),
        ({"bank_size": -3}, "bank_size is -3, expected `int` >= 0"),
        ({"bank_size": "8"}, "bank_size is '8', expected `int | null`"),
        ({"row_weight": "al"}, "row_weight is 'al', expected {all,current}"),
        ({"age_decay": -1}, "age_decay is -1, expected `float` >= 0"),
        ({"keep": "false"}, "keep is 'false', expected `bool`"),
        ({"queries": "no"}, "queries is 'no', expected `bool`"),
        ({"hard_negatives": 1}, "hard_negatives is 1, expected `bool`"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(InputError, match=re.escape(message)):
        BankLoss(**{"bank_size": 8, "similarity": "dot", **options})
    BankLoss(bank_size=0, similarity="dot", temperature=20)  # control


@pytest.mark.parametrize("shape", [(4, 8), (3, 1, 8), (4, 1, 7)])
def test_passages_of_a_wrong_shape_are_refused(shape):
    loss = BankLoss(bank_size=8, similarity="dot")
    loss.begin()
    with pytest.raises(
        InputError, match=r"queries have shape \(4, 8\), passages .*; expected \(B, d\) and"
    ):
        loss(torch.rand(4, 8), torch.rand(shape), training=True)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.arange(4).view(4, 1), "ids have shape (4, 1) and type torch.int64; expected (4, 2)"),
        (torch.ones(4, 2), "type torch.float32; expected (4, 2) and int64"),
        (torch.arange(8).view(4, 2) - 1, "ids: the smallest is -1; expected at least 0"),
    ],
)
def test_ids_of_another_shape_or_kind_are_refused(ids, message):
    """They masked other passages, or none."""
    loss = BankLoss(bank_size=0, similarity="cosine")
    with pytest.raises(InputError, match=re.escape(message)):
        loss(torch.rand(4, 8), torch.rand(4, 2, 8), ids, training=False)


def test_steps_before_the_first_batch_of_a_loss_count():
    """As those with batches of another data set, also after a checkpoint."""

    def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(4, 8, generator=generator), torch.randn(4, 1, 8, generator=generator)

    def made() -> BankLoss:
        return BankLoss(16, "cosine", age_decay=0.5)

    whole = made()
    whole.begin()
    whole.end_step()
    saved = whole.state()  # without a batch so far
    found = {}
    for number, loss in enumerate((whole, made())):
        if number:
            loss.begin(saved)
        loss.end_step()
        loss(*batch(0), training=True)
        loss.end_step()
        middle = loss.state()
        other = made()
        other.begin(({name: tensor.clone() for name, tensor in middle[0].items()}, middle[1]))
        for each in (loss, other):
            each.end_step()
            found[number, each is other] = each(*batch(1), training=True).item(), each.bank.step
    assert len(set(found.values())) == 1
    assert found[0, False][1] == 4

"""`cont_accum` against a second reading of the published rules, with scripted embeddings and no
encoder.

The rules, from Kim et al. 2024 (arXiv 2406.12356), section 3.2, and their published configurations:
- a micro-batch first meets the banks as the micro-batches before it left them, then enters them,
  overwriting the oldest;
- rows are the current queries, then the bank's; columns are the current positives, the bank's
  positives, the current hard negatives, the bank's hard negatives;
- the loss is the mean over all rows of the cross-entropy over all columns; nothing is masked,
  temperature 1, inner product;
- what comes from a bank carries no gradient; a step's gradient is the mean over its K
  micro-batches.

The reading below holds the whole matrix in float64 and shares no code with the package.
"""

import math

import pytest
import torch
from helpers import make_bank

from contaccum.batch import MicroBatch, RowIds, Tokens
from contaccum.methods import METHODS
from contaccum.methods.loss import InfoNCE

B, K, DIM = 3, 4, 5
STEPS = 9
SAME = 2e-5
DIFFERENT = 1e-3


def script(hard: int, seed: int = 0) -> list[list[dict]]:
    """Embeddings of every micro-batch: queries (B, d), positives (B, d), hard negatives (B, H,
    d)."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, DIM, generator=generator, dtype=torch.float64)

    return [
        [{"q": draw(B), "p": draw(B), "n": draw(B, hard)} for _ in range(K)] for _ in range(STEPS)
    ]


def published(
    steps: list[list[dict]], size: int, *, queries: bool = True, past: bool = True
) -> list[tuple]:
    """Loss of each step and the gradients of each micro-batch's embeddings; ``past`` False empties
    the banks at each step."""
    bank: list[tuple] = []  # (query, positive, hard negatives), oldest first
    found = []
    for step in steps:
        if not past:
            bank = []
        losses, gradients = [], []
        for script in step:
            q, p, n = (script[name].clone().requires_grad_() for name in "qpn")
            flat = n.reshape(-1, DIM)
            rows = torch.cat([q, *(row[0].unsqueeze(0) for row in bank)]) if queries else q
            columns = torch.cat(
                [p, *(row[1].unsqueeze(0) for row in bank), flat, *(row[2] for row in bank)]
            )
            loss = torch.nn.functional.cross_entropy(rows @ columns.T, torch.arange(len(rows)))
            losses.append(loss.item())
            used = [tensor for tensor in (q, p, n) if tensor.numel()]
            gradients.append(torch.autograd.grad(loss / K, used))
            bank += [(q[i].detach(), p[i].detach(), n[i].detach()) for i in range(B)]
            bank = bank[max(0, len(bank) - size) :]
        found.append((sum(losses) / K, gradients))
    return found


class Scripted:
    """An engine whose encoder is a script: its embeddings are leaves, so that a backward pass
    leaves their gradients."""

    def __init__(self) -> None:
        self.leaves: list[tuple[torch.Tensor, torch.Tensor]] = []

    def micro_steps(self, micro_batches):
        yield from micro_batches

    def encode(self, batch):
        script = batch.query_ids[0]
        queries = script["q"].float().requires_grad_()
        passages = (
            torch.cat([script["p"].unsqueeze(1), script["n"]], dim=1).float().requires_grad_()
        )
        self.leaves.append((queries, passages))
        return queries, passages

    def backward(self, value):
        value.backward()


def ours(steps: list[list[dict]], size: int, method: str = "cont_accum", **options) -> list[tuple]:
    """The same from the package: bank, loss and method as a training run has them, with the
    published settings."""
    hard = steps[0][0]["n"].shape[1]
    loss = InfoNCE(1.0, mask_false_negatives=False)
    bank = make_bank(size, DIM, loss, push=B, hard_negatives=hard, **options)
    nothing = Tokens(torch.zeros(0, 0), torch.zeros(0, 0))
    found, first = [], 0
    for step in steps:
        batches = []
        for script in step:
            columns = torch.arange(first, first + B * (1 + hard)).view(B, 1 + hard)
            first += B * (1 + hard)
            batches.append(MicroBatch(nothing, nothing, RowIds(columns, columns[:, :1]), [script]))
        engine = Scripted()
        values = METHODS[method](engine, batches, bank, loss)
        gradients = []
        for queries, passages in engine.leaves:
            parts = [queries.grad, passages.grad[:, 0], passages.grad[:, 1:]]
            gradients.append([part.double() for part in parts if part.numel()])
        found.append((sum(value.value.item() for value in values) / len(values), gradients))
        bank.end_step()
    return found


def apart(one: list[tuple], two: list[tuple]) -> float:
    """Largest difference of any loss or gradient."""
    largest = 0.0
    for (loss, gradients), (other_loss, others) in zip(one, two, strict=True):
        largest = max(largest, abs(loss - other_loss))
        for left, right in zip(gradients, others, strict=True):
            for a, b in zip(left, right, strict=True):
                largest = max(largest, (a - b).abs().max().item())
    assert math.isfinite(largest)
    return largest


@pytest.mark.parametrize("hard", [0, 1, 2])
@pytest.mark.parametrize("size", [B, 7, 12, 50, 200])
def test_loss_and_gradients_are_the_published_ones(size, hard):
    """108 pairs through rings of 3 to 200 rows: most wrap many times, one never fills."""
    steps = script(hard)
    assert apart(ours(steps, size), published(steps, size)) < SAME


@pytest.mark.parametrize("hard", [0, 1])
def test_without_query_bank_equals_passage_bank(hard):
    steps = script(hard)
    assert (
        apart(
            ours(steps, 12, "passage_bank", columns_only=True), published(steps, 12, queries=False)
        )
        < SAME
    )
    assert apart(ours(steps, 12), published(steps, 12, queries=False)) > DIFFERENT


@pytest.mark.parametrize("hard", [0, 1])
def test_without_past_encoder_is_one_switch(hard):
    """The banks are emptied when the weights change, so that they hold this step's micro-batches
    alone."""
    steps = script(hard)
    assert apart(ours(steps, 12, keep=False), published(steps, 12, past=False)) < SAME
    assert apart(ours(steps, 12), published(steps, 12, past=False)) > DIFFERENT


def test_without_query_bank_and_past_encoder_equals_passage_bank_with_keep_false():
    steps = script(1)
    found = published(steps, 12, queries=False, past=False)
    assert apart(ours(steps, 12, "passage_bank", columns_only=True, keep=False), found) < SAME
    assert apart(ours(steps, 12, "passage_bank", columns_only=True), found) > DIFFERENT
    assert apart(ours(steps, 12, keep=False), found) > DIFFERENT


def test_without_accumulation_is_n_equal_to_b():
    """A step of one micro-batch (`batch.global_batch_size` = `batch.micro_batch_size`)."""
    global K
    steps, before = [step[:1] for step in script(1)], K
    try:
        K = 1
        assert apart(ours(steps, 12), published(steps, 12)) < SAME
    finally:
        K = before


def test_the_reading_tells_right_from_wrong():
    """Negative control: another bank size, another order of use and enqueue, other rows or weights
    are seen."""
    steps = script(1)
    right = published(steps, 12)
    assert apart(ours(steps, 11), right) > DIFFERENT
    assert apart(ours(steps, 12, warmup_steps=1), right) > DIFFERENT
    assert apart(ours(steps, 12, row_weight="current"), right) > DIFFERENT
    assert apart(ours(steps, 12, method="passage_bank", columns_only=True), right) > DIFFERENT
    assert apart(ours(steps, 12, method="grad_accum"), right) > DIFFERENT
    assert apart(ours(script(1, seed=1), 12), right) > DIFFERENT

"""A whole optimizer step on PyTorch's ``meta`` device, which holds no values: reading one from the
device fails."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import make_bank, micro_batches
from torch import Tensor

from contaccum.batch import MicroBatch, RowIds, Tokens
from contaccum.methods import METHODS, similarity
from contaccum.methods.bank import Bank
from contaccum.methods.distillation import Distillation
from contaccum.methods.loss import InfoNCE, LossValue
from contaccum.methods.matryoshka import Matryoshka
from contaccum.methods.objective import Loss, Objective
from contaccum.methods.rules import Guide, PairRules
from contaccum.runtime.engine import Engine

META = torch.device("meta")
DIM, B, K = 8, 4, 3


class MetaEncoder:
    """Encoder whose vectors are leaves on the meta device; ids and texts stay on the CPU."""

    one_pass, shard_group = False, None

    def __init__(self) -> None:
        self.towers: list[torch.nn.Module] = []
        self.query_tower, self.passage_tower = (
            SimpleNamespace(tokenizer=SimpleNamespace(pad_token_id=0), unpad=False)
            for _ in range(2)
        )
        self.leaves: list[Tensor] = []

    def parameters(self) -> list[Tensor]:
        return []

    def __call__(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        queries, passages = (
            self.embed(tower, texts)
            for tower, texts in (
                (self.query_tower, batch.queries),
                (self.passage_tower, batch.passages),
            )
        )
        return queries, passages.view(len(queries), -1, DIM)

    def embed(self, tower: object, texts: Tokens) -> Tensor:
        graph = torch.is_grad_enabled()
        self.leaves.append(torch.empty(len(texts.input_ids), DIM, device=META, requires_grad=graph))
        return self.leaves[-1]


def meta_engine() -> Engine:
    engine = Engine(device="cpu")
    engine.prepare(MetaEncoder(), None)  # type: ignore[arg-type]
    return engine


def take_steps(method: str, loss: Loss, steps: int = 2, **options: object) -> Bank:
    """Run optimizer steps of a method with a bank of 10 rows, so that pushes wrap the ring, and
    roll back one more."""
    two_pass = method in ("grad_cache", "cont_cache")
    options = {"columns_only": method == "passage_bank", **options}
    bank = make_bank(
        14 if two_pass else 10, DIM, loss, push=B * K if two_pass else B, device=META, **options
    )
    for step in range(steps + 1):
        engine = meta_engine()
        batches = [taught(batch) for batch in micro_batches(K, B, 1, passages=6, seed=step)]
        values = METHODS[method](engine, batches, bank, loss)
        assert all(value.value.device == META for value in values)
        assert engine.encoder.leaves[-1].grad is not None
        if step < steps:
            bank.end_step()
    bank.rollback()
    return bank


def taught(batch: MicroBatch) -> MicroBatch:
    """Return the micro-batch with a teacher's scores and numbers of queries, on the CPU."""
    columns = batch.ids.columns
    ids = RowIds(
        columns, batch.ids.positives, torch.zeros(columns.shape), torch.arange(len(columns))
    )
    return MicroBatch(batch.queries, batch.passages, ids, batch.query_ids)


def no_vectors(rows: Tensor) -> Tensor:
    return torch.zeros(len(rows), 5)


GUIDED = PairRules(True, torch.arange(B) % 2 == 0, margin=0.1, guide=Guide(no_vectors, no_vectors))
CASES: dict[str, tuple[Callable[[], Loss], dict[str, object]]] = {
    "plain": (lambda: InfoNCE(0.1), {}),
    "chunks": (lambda: InfoNCE(0.1, chunk=20), {"hard_negatives": 1, "age_decay": 0.5}),
    "unmasked": (lambda: InfoNCE(0.1, mask_false_negatives=False), {"keep": False}),
    "guide": (lambda: InfoNCE(0.1, rules=GUIDED), {"hard_negatives": 1}),
    "own scores": (
        lambda: InfoNCE(0.1, rules=PairRules(margin=0.1, relative=True)),
        {"hard_negatives": 1},
    ),
    "objective": (
        lambda: Objective(
            InfoNCE(0.1), Matryoshka((4,), (0.5,), unit=True), Distillation("kl", 0.1)
        ),
        {"hard_negatives": 1},
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("method", METHODS)
def test_methods_read_no_value_from_the_device(method, case):
    make_loss, options = CASES[case]
    bank = take_steps(method, make_loss(), **options)
    on_device = [bank.passages, bank.positive_logits, bank.age]
    if method != "passage_bank":
        on_device += [bank.queries, bank.sums.table]
    assert {tensor.device for tensor in on_device} == {META}
    assert {
        tensor.device.type for tensor in (bank.column_ids, bank.positives, bank.index_in_step)
    } == {"cpu"}


def test_the_tokens_of_a_pass_are_counted_without_the_device():
    (batch,) = micro_batches(1, B, 1)
    tokens = batch.tokens
    on_device = MicroBatch(
        batch.queries.to(META), batch.passages.to(META), batch.ids, batch.query_ids
    )
    assert (on_device.queries.input_ids.device, on_device.tokens) == (META, tokens)


READS: dict[str, Callable[[Tensor], object]] = {
    "cpu": Tensor.cpu,
    "item": lambda queries: queries[0, 0].item(),
    "tolist": Tensor.tolist,
    "nonzero": Tensor.nonzero,
    "mixed devices": lambda queries: queries + torch.zeros(queries.shape),
}


@pytest.mark.parametrize("read", READS)
def test_a_read_from_the_device_fails_on_meta(read, monkeypatch):
    """Negative control: a loss that waits for the device, or mixes devices, does not pass the test
    above."""
    plain = InfoNCE.__call__

    def reading(
        self: InfoNCE, queries: Tensor, passages: Tensor, ids: RowIds, bank: Bank | None = None
    ) -> LossValue:
        READS[read](queries)
        return plain(self, queries, passages, ids, bank)

    monkeypatch.setattr(InfoNCE, "__call__", reading)
    for method in METHODS:
        with pytest.raises((RuntimeError, NotImplementedError)):
            take_steps(method, InfoNCE(0.1), steps=1)


@pytest.mark.parametrize(("size", "pairs"), [(1024, 8), (32_768, 64)])
def test_a_bank_adds_few_device_operations(size, pairs, monkeypatch):
    """At most 70 more than grad_accum, with the openings of blocks spread over the pushes of one
    turn of the ring."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(Path(__file__).parents[2] / "benchmarks")])
    from launches import count

    plain = count("grad_accum", 0, pairs, 0.0)["mean"]
    for age_decay in (0.0, 0.1):
        assert count("cont_accum", size, pairs, age_decay)["mean"] - plain <= 70
    if (
        size * pairs > similarity.CPU_CHUNK // 8
    ):  # negative control: smaller chunks need more operations
        monkeypatch.setattr(similarity, "CHUNK", similarity.CPU_CHUNK // 8)
        assert count("cont_accum", size, pairs, 0.0)["mean"] - plain > 70


def test_pushes_of_unequal_size_reuse_the_logits_of_the_loss(monkeypatch):
    """Also across the ends of the bank's blocks of partial sums and of the ring."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(Path(__file__).parents[2] / "benchmarks")])
    from launches import Count

    most = {}
    for reused in (True, False):
        loss, counts = InfoNCE(0.1), []
        bank = make_bank(200, DIM, loss, push=8, device=META)
        for b in (8, 11, 9, 14, 10, 13) * 8:
            ids = torch.arange(b).unsqueeze(1)
            queries, passages = (
                torch.empty(b, DIM, device=META),
                torch.empty(b, 1, DIM, device=META),
            )
            value = loss(queries, passages, RowIds(ids, ids), bank)
            with Count("meta") as count:
                bank.push(queries, passages, RowIds(ids, ids), value.bank_logits if reused else ())
            counts.append(count.operations)
        most[reused] = max(counts[-18:])
    assert most[True] <= 85 < 95 < most[False]

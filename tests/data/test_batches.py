"""Micro-batches against the sampler's rows and plain padding, and prefetching."""

import threading
from contextlib import closing

import numpy as np
import pytest
import torch
from helpers import open_train_set
from tiny_data import beir

from contaccum.batch import MISSING, NO_PASSAGE, RowIds
from contaccum.data.batches import Batches, BatchForm
from contaccum.data.sampler import StepSampler
from contaccum.runtime.prefetch import prefetch


class Rows:
    """Dummy TokenTable: text n is token n + 1, repeated n % 3 + 1 times."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def longest(self) -> int:
        return 3

    def rows(self, indices):
        return [np.full(n % 3 + 1, n + 1, dtype=np.int32) for n in indices]

    def lengths(self, indices):
        return indices % 3 + 1


@pytest.fixture
def parts(tmp_path):
    qrels = "".join(
        f"q{n}\tp{n}\t1\nq{n}\tp{n + 1}\t1\nq{n}\tp{n + 2}\t0\n" for n in range(0, 20, 2)
    )
    train_set = open_train_set(beir(tmp_path, qrels, passages=22, queries=20), hard_negatives=1)
    sampler = StepSampler(train_set, seed=1, global_batch_size=8, hard_negatives=1)
    return train_set, sampler, Rows(len(train_set.queries)), Rows(len(train_set.passages))


@pytest.mark.parametrize("tokens", [None, 24])
def test_a_missing_passage_has_the_first_token_of_the_positive(tokens, tmp_path):
    qrels = "".join(
        f"q{n}\tp{n + 2}\t1\nq{n}\tp{n}\t0\n" if n % 4 else f"q{n}\tp{n + 2}\t1\n"
        for n in range(0, 20, 2)
    )
    train_set = open_train_set(beir(tmp_path, qrels, passages=22, queries=20), hard_negatives=2)
    sampler = StepSampler(train_set, 1, 8, 2, fill="none")
    tables = Rows(len(train_set.queries)), Rows(len(train_set.passages))
    form = BatchForm(2, tokens)
    found = {}
    for batch in Batches(train_set, sampler, *tables, form).step(0):
        passages = batch.passages.input_ids.unflatten(0, (len(batch.query_ids), 3))
        lengths = batch.passages.attention_mask.sum(1).unflatten(0, (len(batch.query_ids), 3))
        for name, *row in zip(batch.query_ids, batch.ids.columns, passages, lengths, strict=True):
            found[name] = row
    assert len(found) == 8
    for name, (columns, passages, lengths) in found.items():
        assert (columns == MISSING).tolist() == [False, int(name[1:]) % 4 == 0, True]
        token = torch.where(columns == MISSING, columns[0], columns) + 1
        assert passages[:, 0].tolist() == token.tolist()
        assert lengths.tolist() == [
            1 if column == MISSING else column % 3 + 1 for column in columns.tolist()
        ]


def test_one_process_gets_the_steps_rows_in_order(parts):
    train_set, sampler, *tables = parts
    rows = sampler(3)
    batches = Batches(train_set, sampler, *tables, BatchForm(2)).step(3)
    assert len(batches) == 4
    names = [name for batch in batches for name in batch.query_ids]
    assert names == [train_set.queries["id"][n] for n in rows.queries.tolist()]
    assert torch.cat([batch.ids.columns for batch in batches]).tolist() == rows.passages.tolist()
    for k, batch in enumerate(batches):
        assert (
            batch.queries.input_ids[:, 0].tolist() == (rows.queries[2 * k : 2 * k + 2] + 1).tolist()
        )
        assert (
            batch.passages.input_ids[:, 0].tolist()
            == (rows.passages[2 * k : 2 * k + 2].reshape(-1) + 1).tolist()
        )
        for query, positives in zip(
            rows.queries[2 * k : 2 * k + 2], batch.ids.positives.tolist(), strict=True
        ):
            known = train_set.positives.row(query).tolist()
            assert positives == known + [NO_PASSAGE] * (len(positives) - len(known))


def test_micro_batches_of_a_step_can_be_merged(tmp_path):
    """Their queries have different numbers of positives."""
    qrels = "".join(
        f"q{n}\tp{n + more}\t1\n" for n in range(8) for more in range(3 if n == 5 else 1)
    )
    train_set = open_train_set(beir(tmp_path, qrels, passages=12, queries=8))
    sampler = StepSampler(train_set, seed=1, global_batch_size=8, hard_negatives=0)
    tables = Rows(len(train_set.queries)), Rows(len(train_set.passages))
    micro_batches = Batches(train_set, sampler, *tables, BatchForm(2)).step(0)
    merged = RowIds.merge([each.ids for each in micro_batches], torch.cat)
    assert merged.positives.shape == (8, 3)
    assert (merged.positives != NO_PASSAGE).sum(1).sort().values.tolist() == [1] * 7 + [3]


def test_processes_divide_each_micro_batch_and_know_all_ids(parts):
    train_set, sampler, *tables = parts
    rows = sampler(0)
    for rank in range(2):
        source = Batches(train_set, sampler, *tables, BatchForm(2, rank=rank, world=2))
        batches = source.step(0)
        assert len(batches) == 2
        for k, batch in enumerate(batches):
            own = slice(4 * k + 2 * rank, 4 * k + 2 * rank + 2)
            assert batch.queries.input_ids[:, 0].tolist() == (rows.queries[own] + 1).tolist()
            assert batch.ids.columns.tolist() == rows.passages[4 * k : 4 * k + 4].tolist()


def test_queries_and_passages_have_separate_padding_tokens(parts):
    train_set, sampler, *tables = parts
    (batch,) = Batches(train_set, sampler, *tables, BatchForm(8, pad_ids=(77, 88))).step(0)
    for tokens, padding in ((batch.queries, 77), (batch.passages, 88)):
        assert set(tokens.input_ids[tokens.attention_mask == 0].tolist()) == {padding}
        assert tokens.attention_mask[:, 0].all()


def test_prefetch_reads_at_most_depth_items_ahead():
    made = []
    third = threading.Event()

    def produce():
        for number in range(10):
            made.append(number)
            if number == 3:
                third.set()
            yield number

    with closing(prefetch(produce(), depth=2)) as items:
        assert next(items) == 0
        # one taken, two waiting, one in the thread's hand
        assert third.wait(timeout=10)
        assert made == [0, 1, 2, 3]


def test_prefetch_raises_an_error_after_the_items_before_it():
    def produce():
        yield 1
        raise KeyError("broken")

    with closing(prefetch(produce())) as items:
        assert next(items) == 1
        with pytest.raises(KeyError, match="broken"):
            next(items)
        with pytest.raises(StopIteration):
            next(items)


def test_prefetch_can_be_closed_early():
    before = threading.active_count()

    def endless():
        while True:
            yield 0

    items = prefetch(endless(), depth=2)
    next(items)
    items.close()
    assert threading.active_count() == before

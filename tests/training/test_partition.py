"""Micro-batches by tokens: two-pass gradients do not change, and all pairs have equal weight in
one-pass methods."""

import copy
import importlib
import math
import re

import pytest
import torch
from helpers import (
    SlowBank,
    gradients,
    largest_difference,
    open_train_set,
    peak,
    slow_loss,
    train_config,
    weights,
    write_scored_lines,
    write_uneven_beir,
)
from processes import Job, run_jobs
from safetensors.torch import load_file

from contaccum.config import METHOD_SPECS, validate
from contaccum.errors import InputError
from contaccum.methods import METHODS
from contaccum.methods.bank import Bank, BankOptions
from contaccum.methods.grad_cache import represent
from contaccum.methods.loss import InfoNCE, row_weights
from contaccum.runtime.engine import Engine
from contaccum.training import parts
from contaccum.training.log import read_log
from contaccum.training.loop import train
from contaccum.training.run_folder import newest_checkpoint

# of the step's largest gradient; the first is rounding, through four layers
SAME, DIFFERENT = (
    5e-5,
    1e-3,
)
TOKENS = 250
BY_TOKENS = {"batch.micro_batch_tokens": TOKENS, "batch.micro_batch_size": "auto"}
LENGTHS = {"data.hard_negatives": 1, "model.max_passage_length": 48, "model.tiny_layers": 4}


@pytest.fixture
def data(tmp_path):
    return write_uneven_beir(tmp_path / "data")


def run_steps(
    method, data, *, unpad=False, dropout=0.0, no_grad_group_size=1, count=2, sgd=0.1, **changes
):
    """Return gradients and losses of ``count`` steps, and their micro-batches."""
    engine = Engine(device="cpu")
    config = train_config(data, data / "run", method, **LENGTHS, **changes)
    validate(config)
    train_set = open_train_set(str(data), "train", 1)
    encoder = parts.build_encoder(config, train_set).train()
    encoder.set_dropout(dropout)
    encoder.set_attention("auto", unpad)
    batches = parts.build_batches(config, engine, encoder, train_set)
    loss = parts.build_loss(config, encoder)
    bank = parts.build_bank(config, engine, encoder, loss)
    engine.prepare(encoder, torch.optim.SGD(encoder.parameters(), lr=sgd))
    engine.no_grad_group_size = no_grad_group_size
    start, found, losses, taken = copy.deepcopy(encoder), [], [], []
    for number in range(count):
        engine.begin_step(number)
        taken.append(batches.step(number))
        values = METHODS[method](engine, taken[-1], bank, loss)
        losses.append(torch.stack([value.value for value in values]).mean().item())
        found.append(gradients(encoder))
        engine.update()
        bank.end_step()
    return found, losses, taken, start


def sizes(batches) -> list[int]:
    return [len(batch.query_ids) for batch in batches]


@pytest.mark.parametrize("unpad", [False, True])
@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("method", ["grad_cache", "cont_cache"])
@pytest.mark.parametrize("no_grad_group_size", [1, 10])
def test_partition_does_not_change_two_pass_gradients(method, no_grad_group_size, tie, unpad, data):
    """Larger first passes do not change them either."""
    towers = {"model.tie_towers": tie}
    plain, plain_loss, by_pairs, _ = run_steps(method, data, **towers)
    cut, loss, by_tokens, _ = run_steps(
        method,
        data,
        no_grad_group_size=no_grad_group_size,
        unpad=unpad,
        **{**BY_TOKENS, **towers, "batch.micro_batch_tokens": 180 if unpad else TOKENS},
    )
    assert all(sizes(batches) == [4, 4, 4, 4] for batches in by_pairs)
    assert all(sizes(batches) != [4, 4, 4, 4] for batches in by_tokens)
    assert largest_difference(cut, plain) < SAME
    assert loss == pytest.approx(plain_loss, rel=1e-5)


def real_tokens(batch) -> int:
    return int(batch.queries.attention_mask.sum() + batch.passages.attention_mask.sum())


def test_unpadded_micro_batches_count_real_tokens_and_keep_the_order(data):
    """So there are fewer of them than with padding, within the same budget."""
    _, _, by_pairs, _ = run_steps("grad_accum", data)
    _, _, padded, _ = run_steps("grad_accum", data, **BY_TOKENS)
    _, _, unpadded, _ = run_steps("grad_accum", data, unpad=True, **BY_TOKENS)
    for plain, others, cut in zip(by_pairs, padded, unpadded, strict=True):
        names = [name for batch in plain for name in batch.query_ids]
        assert [name for batch in cut for name in batch.query_ids] == names
        assert max(map(real_tokens, cut)) <= TOKENS
        assert len(cut) < len(others)
        assert max(map(padded_tokens, cut)) > TOKENS  # negative control


@pytest.mark.parametrize("size", [32, 24])
def test_partition_does_not_change_the_bank_of_whole_steps(size, data):
    """Negative control: a bank of one and a half steps keeps other pairs of the first step."""
    plain, *_ = run_steps("cont_cache", data, count=3, **{"bank.size": size})
    cut, *_ = run_steps("cont_cache", data, count=3, **{"bank.size": size}, **BY_TOKENS)
    assert largest_difference(cut[:2], plain[:2]) < SAME
    assert (largest_difference(cut, plain) < SAME) == (size % 16 == 0)


@pytest.mark.parametrize("method", ["grad_accum", "passage_bank", "cont_accum"])
def test_partition_changes_one_pass_gradients(method, data):
    """Negative control: in one-pass methods the micro-batches decide which negatives a query
    has."""
    plain, *_ = run_steps(method, data)
    cut, *_ = run_steps(method, data, **BY_TOKENS)
    assert largest_difference(cut, plain) > DIFFERENT


def padded_tokens(batch) -> int:
    return batch.queries.input_ids.numel() + batch.passages.input_ids.numel()


def test_partitioned_step_contains_the_same_pairs_within_the_budget(data):
    _, _, by_pairs, _ = run_steps("grad_accum", data)
    _, _, by_tokens, _ = run_steps("grad_accum", data, **BY_TOKENS)
    for plain, cut in zip(by_pairs, by_tokens, strict=True):
        names, others = (
            [name for batch in batches for name in batch.query_ids] for batches in (plain, cut)
        )
        assert sorted(names) == sorted(others)
        assert names != others
        assert max(map(padded_tokens, cut)) <= TOKENS
        assert sum(map(padded_tokens, cut)) < sum(map(padded_tokens, plain))
        of_pair = {
            name: ids
            for batch in plain
            for name, ids in zip(batch.query_ids, batch.ids.columns.tolist(), strict=True)
        }
        for batch in cut:
            assert batch.ids.columns.tolist() == [of_pair[name] for name in batch.query_ids]


@pytest.mark.parametrize("weight", ["all", "current"])
def test_all_rows_of_a_step_have_equal_weight(weight, data):
    """Compare cont_accum with a full bank to the mean of the losses of all rows."""
    changes = {"bank.row_weight": weight, "bank.size": 16, **BY_TOKENS}
    fast, fast_loss, taken, encoder = run_steps("cont_accum", data, **changes)
    slow, slow_losses = slow_steps(encoder, taken, weight)
    assert len({size for batches in taken for size in sizes(batches)}) > 1
    assert largest_difference(fast[1:], slow[1:]) < 2e-4
    assert fast_loss[1:] == pytest.approx(slow_losses[1:], rel=1e-4)


def slow_steps(encoder, taken, weight):
    optimizer, bank = torch.optim.SGD(encoder.parameters(), lr=0.1), SlowBank(16)
    found, losses = [], []
    for batches in taken:
        optimizer.zero_grad()
        counted = [
            len(batch.query_ids) + (len(bank.rows) if weight == "all" else 0) for batch in batches
        ]
        total = 0.0
        for batch, rows in zip(batches, counted, strict=True):
            queries, passages = encoder(batch)
            value = (
                slow_loss(queries, passages, batch.ids, bank, 0.05, mask=True, weight=weight)
                * rows
                / sum(counted)
            )
            value.backward()
            bank.push(queries, passages, batch.ids)
            total += value.item()
        found.append(gradients(encoder))
        losses.append(total)
        optimizer.step()
    return found, losses


def test_equal_micro_batch_weights_give_other_gradients(data, monkeypatch):
    """Negative control of the test above."""
    changes = {"bank.size": 16, **BY_TOKENS}
    _, _, taken, encoder = run_steps("cont_accum", data, **changes)
    module = importlib.import_module("contaccum.methods.cont_accum")
    monkeypatch.setattr(module, "row_weights", lambda batches, _=None: [1.0] * len(batches))
    even, *_ = run_steps("cont_accum", data, **changes)
    assert largest_difference(even[:1], slow_steps(encoder, taken, "all")[0][:1]) > DIFFERENT


@pytest.mark.parametrize("count", [3, 16])
@pytest.mark.parametrize("stored", [0, 24])
def test_micro_batches_of_equal_size_have_weight_one(count, stored, data):
    """Without a token budget the loss is bit-identical."""
    _, _, taken, encoder = run_steps("grad_accum", data, count=1)
    bank = Bank(24, encoder.dim, InfoNCE(0.1).similarity, BankOptions(columns_only=True), push=4)
    bank.queries, bank.stored = torch.zeros(24, encoder.dim), stored
    assert row_weights(taken[0][:1] * count, bank) == [1.0] * count
    assert row_weights(taken[0][:1] * count) == [1.0] * count


def test_two_processes_by_tokens_equal_one_process(data, tmp_path):
    """With micro-batches of several sizes, joined first passes, three Matryoshka widths and
    distillation."""
    scored = str(write_scored_lines(data))
    jobs = {
        f"of {w}": Job([scored, str(tmp_path / f"of{w}")], w, worker="partition_worker")
        for w in (1, 2)
    }
    for outcome in run_jobs(jobs, tmp_path / "jobs").values():
        outcome.check()
    one, *others = (
        load_file(tmp_path / name)
        for name in ("of1.0.safetensors", "of2.0.safetensors", "of2.1.safetensors")
    )
    for method in (name for name, spec in METHOD_SPECS.items() if not spec.single_micro_batch):
        for number in range(2):
            prefix = f"{method}/{number}/"
            assert len(one[f"{prefix}sizes"].unique()) > 1
            steps = [
                {name: found[name] for name in one if name.startswith(prefix)}
                for found in (one, *others)
            ]
            for found in steps:
                assert torch.equal(found.pop(f"{prefix}sizes"), one[f"{prefix}sizes"])
            for found in steps[1:]:
                assert found.pop(f"{prefix}loss") == pytest.approx(
                    float(one[f"{prefix}loss"]), rel=1e-5
                )
                assert (
                    largest_difference(
                        [{k: v for k, v in steps[0].items() if "loss" not in k}], [found]
                    )
                    < SAME
                )


@pytest.mark.parametrize("method", ["cont_accum", "grad_cache"])
def test_run_by_tokens_resumes_byte_identical(method, data, tmp_path):
    scored = write_scored_lines(data)
    changes = {**LENGTHS, **BY_TOKENS, "model.tiny_layers": 1}
    changes |= {"loss.matryoshka_dims": [8, 20], "loss.distillation": "margin"}
    model = train(train_config(scored, tmp_path / "whole", method, **changes))
    log = read_log(tmp_path / "whole")
    assert all(math.isfinite(line["loss"]) and line["micro_batches"] > 2 for line in log)
    assert all(line["loss"] > line["distillation"] > 0 for line in log)
    train(train_config(scored, tmp_path / "broken", method, **changes))
    for leftover in ("checkpoints/step-00000004", "checkpoints/step-00000006"):
        (tmp_path / "broken" / leftover / "manifest.json").unlink()
    assert newest_checkpoint(tmp_path / "broken").state["step"] == 2
    train(train_config(scored, tmp_path / "broken", method, resume=True, **changes))
    assert weights(tmp_path / "broken") == weights(model.parent)
    banks = [
        newest_checkpoint(tmp_path / name).folder / "bank.safetensors"
        for name in ("whole", "broken")
    ]
    assert banks[0].read_bytes() == banks[1].read_bytes()
    assert (method == "cont_accum") == any(
        name.startswith("20/sums") for name in load_file(banks[0])
    )


def test_token_budget_below_the_longest_pair_is_refused(data, tmp_path):
    changes = {**LENGTHS, **BY_TOKENS, "batch.micro_batch_tokens": 60}
    with pytest.raises(
        InputError,
        match=r"batch.micro_batch_tokens is 60, but a query with its passages can have \d+ tokens",
    ) as error:
        train(train_config(data, tmp_path / "run", **changes))
    needed, query, times, passage = (
        int(n) for n in re.findall(r"\d+", str(error.value).split("can have")[1])[:4]
    )
    assert (times, needed) == (2, query + 2 * passage)
    assert not (tmp_path / "run" / "model").exists()
    changes["batch.micro_batch_tokens"] = needed
    train(train_config(data, tmp_path / "again", **changes, **{"optim.max_steps": 1}))


def test_larger_first_passes_with_dropout_give_other_gradients(data):
    """Negative control: they draw other dropout noise than the second pass."""
    same, *_ = run_steps("grad_cache", data, dropout=0.3, count=1)
    larger, *_ = run_steps("grad_cache", data, dropout=0.3, no_grad_group_size=2, count=1)
    assert largest_difference(larger, same) > DIFFERENT


def test_larger_first_passes_need_less_memory_than_the_second_pass(data):
    *_, encoder = run_steps("grad_cache", data, count=0, **{"model.tiny_width": 128})
    engine = Engine(device="cpu")
    engine.prepare(encoder.train(), torch.optim.SGD(encoder.parameters(), lr=0.1))
    _, _, (batches,), _ = run_steps(
        "grad_cache", data, count=1, sgd=0.0, **{"model.tiny_width": 128}
    )
    batches = [*batches, *batches]  # eight
    texts = engine.texts(batches)

    def second_pass():
        for vectors in engine.encoded(texts.passes[-1:]):
            engine.backward(vectors.sum())

    second_pass()  # the gradients' own memory is there before
    second = peak(second_pass)
    engine.no_grad_group_size = encoder.no_grad_group_size()
    assert engine.no_grad_group_size == 4
    with torch.no_grad():
        wide = peak(lambda: list(engine.encoded(texts.passes_of(size=4)[-1:])))
        whole = peak(lambda: list(engine.encoded(texts.passes_of(size=100)[-1:])))
    assert wide < second
    assert whole > second  # and all passages at once would take more
    # the last one's graph, and the vectors of all
    assert peak(lambda: represent(engine, texts)) < 1.1 * second

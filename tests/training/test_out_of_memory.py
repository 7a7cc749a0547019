"""Steps in which memory runs out: the allocator refuses for real, the step is undone, and smaller micro-batches go on.

``full`` lets the allocator be asked for 2^60 bytes, which it refuses with the error of a full memory. One test sets a limit on
the address space instead.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import train_config, weights, write_uneven_beir
from launched import Job, run_jobs
from safetensors.torch import load_file

from contaccum.config import to_yaml
from contaccum.encoder import DualEncoder
from contaccum.engine import Engine, out_of_memory
from contaccum.errors import InputError
from contaccum.methods.bank import Bank
from contaccum.methods.loss import InfoNCE
from contaccum.processes import Processes
from contaccum.training import fit
from contaccum.training.checkpoint import newest_checkpoint
from contaccum.training.fit import MicroBatchSize, halved_pairs, halved_tokens
from contaccum.training.log import read_log
from contaccum.training.loop import train

HERE = Path(__file__).parent.parent
METHODS = ["grad_accum", "grad_cache", "passage_bank", "cont_accum", "cont_cache"]
CHANGES = {"model.dropout": 0.0, "data.hard_negatives": 1, "bank.size": 32}


@pytest.fixture
def data(tmp_path):
    return write_uneven_beir(tmp_path / "data")


def full() -> None:
    torch.empty(1 << 60, dtype=torch.uint8)


def spoil(monkeypatch, place: str, call: int, above: int = 2) -> None:
    """Memory runs out at the ``call``-th forward pass, backward pass, loss, or gather of queries, before the others' rows have
    come, where it holds more than ``above`` pairs."""
    owner, name = {
        "forward": (DualEncoder, "forward"), "backward": (Engine, "backward"), "loss": (InfoNCE, "__call__"),
        "gather": (Processes, "gather"),
    }[place]  # fmt: skip
    original, calls = getattr(owner, name), iter(range(1, 10_000))

    def spoiled(self, *given, **named):
        if place == "gather" and given[0].ndim != 2:
            return original(self, *given, **named)
        number = next(calls)
        size = len(given[0].query_ids) if place == "forward" else len(given[0]) if place == "loss" else above + 1
        if size > above and number == call:
            full()
        return original(self, *given, **named)

    monkeypatch.setattr(owner, name, spoiled)


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in read_log(run)]


def largest_change(one: Path, other: Path) -> float:
    """Largest difference between two runs' weights."""
    found = 0.0
    for file in one.glob("model/*/model.safetensors"):
        left, right = load_file(file), load_file(other / file.relative_to(one))
        found = max(found, *(float((left[name] - right[name]).abs().max()) for name in left))
    return found


def test_the_errors_of_a_full_memory_are_known():
    with pytest.raises(RuntimeError) as refused:
        full()
    assert out_of_memory(refused.value)
    assert out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."))
    assert out_of_memory(MemoryError())
    assert not out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not out_of_memory(KeyboardInterrupt())


def switched(data, run, method, monkeypatch) -> Path:
    """A run that goes over to half-size micro-batches at the third step, when nothing of it was begun yet."""
    original, calls = fit.try_step, iter(range(1, 10_000))
    with monkeypatch.context() as patch:
        patch.setattr("contaccum.training.loop.try_step", lambda *given: None if next(calls) == 3 else original(*given))
        train(train_config(data, run, method, **CHANGES))
    return run


@pytest.mark.parametrize("method", METHODS)
def test_the_step_is_undone_and_taken_again_with_half_the_micro_batch(method, data, tmp_path, monkeypatch, capsys):
    """Its second micro-batch fails: what the first left in gradients and bank is gone."""
    expected = switched(data, tmp_path / "expected", method, monkeypatch)
    passes = {"grad_cache": 7, "cont_cache": 7}.get(method, 4)  # forward passes of a step of 4 micro-batches
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        spoil(patch, "forward", 2 * passes + 2)
        train(train_config(data, run, method, **CHANGES))
    assert [line["micro_batches"] for line in read_log(run)] == [4, 4, 8, 8, 8, 8]
    assert [line["step"] for line in read_log(run)] == [1, 2, 3, 4, 5, 6]
    assert losses(run) == losses(expected)
    assert weights(run) == weights(expected)
    assert (
        "step 3: out of memory with micro-batches of 4 pairs; the step is taken again with micro-batches of 2 pairs"
        in capsys.readouterr().err
    )
    plain = tmp_path / "plain"
    train(train_config(data, plain, method, **CHANGES))
    same = largest_change(run, plain)  # AdamW turns rounding of tiny gradients into steps, but not into many
    assert (same < 1e-4) if method in ("grad_cache", "cont_cache") else (same > 1e-4)


@pytest.mark.parametrize("place", ["backward", "loss"])
def test_it_does_not_matter_where_memory_runs_out(place, data, tmp_path, monkeypatch):
    expected = switched(data, tmp_path / "expected", "cont_accum", monkeypatch)
    with monkeypatch.context() as patch:
        spoil(patch, place, 2 * 4 + 3)
        train(train_config(data, tmp_path / "run", "cont_accum", **CHANGES))
    assert weights(tmp_path / "run") == weights(expected)


def test_a_bank_that_is_not_taken_back_shows(data, tmp_path, monkeypatch):
    """Negative control: the first micro-batch's rows would be in the bank twice."""
    expected = switched(data, tmp_path / "expected", "cont_accum", monkeypatch)
    with monkeypatch.context() as patch:
        spoil(patch, "forward", 2 * 4 + 2)
        patch.setattr(Bank, "rollback", lambda _: None)
        train(train_config(data, tmp_path / "run", "cont_accum", **CHANGES))
    assert weights(tmp_path / "run") != weights(expected)


def test_a_resumed_run_begins_with_the_smaller_size(data, tmp_path, monkeypatch):
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        spoil(patch, "forward", 2 * 4 + 2)
        train(train_config(data, run, **CHANGES))
    before = weights(run)
    (run / "checkpoints" / "step-00000006" / "manifest.json").unlink()
    assert newest_checkpoint(run).state["micro_batch"]["size"] == 2
    train(train_config(data, run, resume=True, **CHANGES))
    assert weights(run) == before
    assert [line["micro_batches"] for line in read_log(run)] == [4, 4, 8, 8, 8, 8]


def test_a_token_budget_is_halved_down_to_the_longest_pair(data, tmp_path, monkeypatch):
    changes = {
        **CHANGES, "model.max_passage_length": 48, "batch.micro_batch_size": 8, "batch.micro_batch_tokens": 400, "bank.size": 0,
    }  # fmt: skip
    plain, run = tmp_path / "plain", tmp_path / "run"
    train(train_config(data, plain, "grad_cache", **changes))
    spoil(monkeypatch, "forward", 3)
    train(train_config(data, run, "grad_cache", **changes))
    assert newest_checkpoint(run).state["micro_batch"]["size"] == 200
    assert losses(run) == pytest.approx(losses(plain), rel=1e-4)
    for one, other in zip(read_log(run), read_log(plain), strict=True):
        assert one["micro_batches"] > other["micro_batches"]


BY_TOKENS = {"batch.micro_batch_tokens": 400, "batch.micro_batch_size": 8, "model.max_passage_length": 48}


@pytest.mark.parametrize("cut", [{}, BY_TOKENS])
def test_drift_is_measured_on_the_micro_batches_that_each_step_had(cut, data, tmp_path, monkeypatch):
    """Of several sizes, before and behind a change; weights that stay have a cosine of 1, dropout replayed."""
    changes = {**CHANGES, **cut, "model.dropout": 0.3, "optim.learning_rate": 0.0, "run.drift_steps": 1}
    spoil(monkeypatch, "backward", 7)
    train(train_config(data, tmp_path / "run", "cont_accum", **changes))
    counts = [line["micro_batches"] for line in read_log(tmp_path / "run")]
    assert counts[0] < counts[-1]
    for line in read_log(tmp_path / "run"):
        assert line["drift_passage_cosine"] == pytest.approx(1, abs=1e-6)
        assert line["drift_query_cosine"] == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(
    ("method", "changes", "sentence"),
    [
        ("cont_accum", {"batch.micro_batch_size": 1}, "step 1: out of memory with micro-batches of 1 pairs, the smallest"),
        ("cont_accum", {"batch.on_out_of_memory": "stop"}, "step 1: out of memory with micro-batches of 4 pairs, .* is stop"),
        ("in_batch", {}, "in_batch cannot cut its step; grad_cache gives the same gradients"),
    ],
)  # fmt: skip
def test_where_nothing_smaller_is_to_be_had_one_sentence_says_so(
    method, changes, sentence, data, tmp_path, monkeypatch
):
    spoil(monkeypatch, "forward", 1, above=0)
    with pytest.raises(InputError, match=sentence) as error:
        train(train_config(data, tmp_path / "run", method, **{**CHANGES, **changes}))
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run" / "model").exists()


def test_by_option_it_grows_again(data, tmp_path, monkeypatch):
    monkeypatch.setattr(MicroBatchSize, "wait", 1)
    changes = {**CHANGES, "batch.on_out_of_memory": "grow", "optim.max_steps": 8}
    config = train_config(data, tmp_path / "run", "grad_cache", **changes)
    spoil(monkeypatch, "forward", 7 + 1)
    monkeypatch.setattr(
        "contaccum.training.setup.MicroBatchSize", lambda *given, **named: MicroBatchSize(*given, wait=1, **named)
    )
    train(config)
    # wait: 1, doubled to 2 when step 2 shrinks, which counts from the 1 step before
    assert [line["micro_batches"] for line in read_log(tmp_path / "run")] == [4, 8, 8, 4, 4, 4, 4, 4]


def test_sizes_go_down_by_halves_that_divide_a_step_and_up_again_after_ever_longer_waits():
    assert halved_pairs(8, 128) == [8, 4, 2, 1]
    assert halved_pairs(12, 36) == [12, 6, 3, 1]
    assert halved_pairs(5, 15) == [5, 1]
    assert halved_tokens(2560, 300) == [2560, 1280, 640, 320, 300]
    assert halved_tokens(300, 300) == [300]
    size = MicroBatchSize([4, 2, 1], "pairs", grow=True)
    assert size.shrink(10)
    assert size.shrink(10)
    assert not size.shrink(10)
    assert str(size) == "micro-batches of 1 pairs"
    grown = [step for step in range(11, 400) if size.grow_again(step)]
    assert grown == [110, 210]  # shrunk twice: 100 steps each
    assert size.shrink(210)
    assert [step for step in range(211, 500) if size.grow_again(step)] == [410]
    other = MicroBatchSize([8, 4, 2, 1], "pairs", grow=False)
    other.load_state(size.state())
    assert other.now == 4
    assert not other.grow_again(10_000)


def test_when_one_of_two_processes_runs_out_both_take_the_step_again(data, tmp_path):
    """In process 1, in the forward pass, before a gather, in the loss and the backward pass; against one
    process that fails in the same steps."""
    jobs = {}
    for processes in (1, 2):
        (tmp_path / f"of{processes}").mkdir()
        call = [str(data), str(tmp_path / f"of{processes}")]
        jobs[f"of {processes}"] = Job(call, processes, worker="out_of_memory_worker")
    for outcome in run_jobs(jobs, tmp_path / "jobs").values():
        outcome.check()
    cases = sorted(path.name for path in (tmp_path / "of1").iterdir() if path.is_dir())
    assert len(cases) == 4
    for case in cases:
        one, two = tmp_path / "of1" / case, tmp_path / "of2" / case
        counts = [line["micro_batches"] for line in read_log(two)]
        assert counts == [4, 8, 8], case
        assert [line["micro_batches"] for line in read_log(one)] == counts
        assert losses(two) == pytest.approx(losses(one), rel=1e-4), case
        assert [line["bank_fill"] for line in read_log(two)] == [line["bank_fill"] for line in read_log(one)]


def test_out_of_memory_outside_the_passes_is_one_sentence(data, tmp_path, monkeypatch):
    """Where smaller micro-batches are no help: AdamW makes its moments in the first update."""
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda *_: full())
    with pytest.raises(InputError, match=r"memory ran out outside a step's passes .*optim\.name adamw_8bit"):
        train(train_config(data, tmp_path / "run", **CHANGES))


@pytest.mark.acceptance
def test_under_a_limit_on_the_address_space_a_run_finds_what_fits(data, tmp_path):
    """One micro-batch of 64 pairs needs more than what is left below the limit, smaller ones do not."""
    changes = {
        **CHANGES, "data.hard_negatives": 3, "batch.global_batch_size": 64, "batch.micro_batch_size": 64, "model.tiny_width": 128,
        "model.tiny_layers": 2, "model.max_passage_length": 48, "optim.max_steps": 2,
    }  # fmt: skip
    config = train_config(data, tmp_path / "run", "grad_cache", **changes)
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(config))
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent), "CONTACCUM_CACHE": str(tmp_path / "cache")}
    call = [sys.executable, str(HERE / "limited.py"), "120", "train", "--config", str(file)]
    done = subprocess.run(call, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "step 1: out of memory with micro-batches of 64 pairs; the step is taken again with" in done.stderr
    assert "(the gradients stay the same)" in done.stderr
    free = tmp_path / "free"
    config.output_dir = str(free)
    with pytest.warns(UserWarning, match="have fewer than 3 hard negatives"):
        train(config)
    assert read_log(free)[0]["micro_batches"] == 1 < read_log(tmp_path / "run")[0]["micro_batches"]
    assert losses(tmp_path / "run") == pytest.approx(losses(free), rel=1e-4)

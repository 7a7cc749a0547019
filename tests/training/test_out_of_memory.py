"""Out-of-memory recovery: the failed step is undone and retried with smaller micro-batches.

``full`` raises a real out-of-memory error: it asks the allocator for 2^60 bytes. One test limits
the address space instead.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import train_config, weights, write_uneven_beir
from safetensors.torch import load_file
from torch.distributed import DistBackendError

from contaccum.config import to_yaml
from contaccum.encoder import DualEncoder
from contaccum.errors import InputError
from contaccum.methods import METHODS as ALL_METHODS
from contaccum.methods.bank import Bank
from contaccum.methods.loss import InfoNCE
from contaccum.runtime.engine import Engine
from contaccum.training.log import read_log
from contaccum.training.loop import train
from contaccum.training.out_of_memory import MicroBatchSize, advice, out_of_memory
from contaccum.training.run_folder import newest_checkpoint

HERE = Path(__file__).parent.parent
METHODS = ["grad_accum", "grad_cache", "passage_bank", "cont_accum", "cont_cache"]
CHANGES = {"model.dropout": 0.0, "data.hard_negatives": 1, "bank.size": 32}


@pytest.fixture
def data(tmp_path):
    return write_uneven_beir(tmp_path / "data")


def full() -> None:
    torch.empty(1 << 60, dtype=torch.uint8)


def spoil(monkeypatch, place: str, call: int, step: int = 1) -> None:
    """Let memory run out once, in the ``call``-th forward pass of a tower, backward pass or loss of
    ``step``."""
    owner, name = {
        "forward": (DualEncoder, "embed"), "backward": (Engine, "backward"),
        "loss": (InfoNCE, "__call__"),
    }[place]  # fmt: skip
    original, begin_step = getattr(owner, name), Engine.begin_step
    running, calls = [0], [0]

    def begin(self, done):
        running[0] = done + 1
        begin_step(self, done)

    def spoiled(self, *given, **named):
        calls[0] += running[0] == step
        if calls[0] == call:
            calls[0] = 10_000
            full()
        return original(self, *given, **named)

    monkeypatch.setattr(Engine, "begin_step", begin)
    monkeypatch.setattr(owner, name, spoiled)


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in read_log(run)]


def largest_change(one: Path, other: Path) -> float:
    """Return the largest difference between the weights of two runs."""
    found = 0.0
    for file in one.glob("model/*/model.safetensors"):
        left, right = load_file(file), load_file(other / file.relative_to(one))
        found = max(found, *(float((left[name] - right[name]).abs().max()) for name in left))
    return found


def test_out_of_memory_errors_are_recognized():
    with pytest.raises(RuntimeError) as refused:
        full()
    assert out_of_memory(refused.value)
    assert out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."))
    assert out_of_memory(MemoryError())
    assert not out_of_memory(KeyboardInterrupt())


NCCL = (
    "NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled cuda error (run with NCCL_DEBUG=INFO for "
    "details), NCCL version 2.27.5\n"
    "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nFailed to CUDA calloc "
    "async 608 bytes: out of memory"
)


def cuda_error(text: str, code: int) -> Exception:
    """The error of a CUDA call, which is a RuntimeError without a code before torch 2.8."""
    return (
        torch.AcceleratorError(text, code)
        if hasattr(torch, "AcceleratorError")
        else RuntimeError(text)
    )


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (
            cuda_error(
                "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported", 2
            ),
            True,
        ),
        (
            RuntimeError(
                "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
            ),
            True,
        ),
        (RuntimeError("could not create a primitive"), True),  # oneDNN on a CPU
        (RuntimeError("MPS backend out of memory (MPS allocated: 5.00 GB)"), True),
        (cuda_error("CUDA error: device-side assert triggered", 710), False),
        (ValueError("out of memory"), False),
        (DistBackendError(NCCL), True),
    ],
    ids=str,
)
def test_allocation_failures_of_cuda_libraries_are_recognized(error, found):
    assert out_of_memory(error) == found


def test_advice_for_several_processes_says_that_the_step_cannot_be_retried():
    for error in (
        RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        DistBackendError(NCCL),
    ):
        assert "the step cannot be retried" in advice(error, 2)
    assert "the step cannot be retried" not in advice(MemoryError(), 1)
    assert advice(ValueError("another error"), 2) == ""


def switched(data, run, method, monkeypatch) -> Path:
    """Train with half-size micro-batches from the third step on; the method fails before its first
    pass."""
    original, calls = ALL_METHODS[method], iter(range(1, 10_000))

    def fails_once(*given):
        if next(calls) == 3:
            raise MemoryError
        return original(*given)

    with monkeypatch.context() as patch:
        patch.setitem(ALL_METHODS, method, fails_once)
        train(train_config(data, run, method, **CHANGES))
    return run


@pytest.mark.parametrize("method", METHODS)
def test_step_is_undone_and_retried_with_half_the_micro_batch_size(
    method, data, tmp_path, monkeypatch, capsys
):
    """The second micro-batch fails; gradients and bank rows of the first are removed."""
    expected = switched(data, tmp_path / "expected", method, monkeypatch)
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        spoil(patch, "forward", 3, step=3)
        train(train_config(data, run, method, **CHANGES))
    assert [line["micro_batches"] for line in read_log(run)] == [4, 4, 8, 8, 8, 8]
    assert [line["step"] for line in read_log(run)] == [1, 2, 3, 4, 5, 6]
    assert losses(run) == losses(expected)
    assert weights(run) == weights(expected)
    assert (
        "step 3: out of memory with micro-batches of 4 pairs; retrying the step with micro-batches "
        "of 2 pairs" in capsys.readouterr().err
    )
    plain = tmp_path / "plain"
    train(train_config(data, plain, method, **CHANGES))
    same = largest_change(run, plain)  # AdamW amplifies the rounding of tiny gradients
    assert (same < 1e-4) if method in ("grad_cache", "cont_cache") else (same > 1e-4)


@pytest.mark.parametrize("place", ["backward", "loss"])
def test_recovery_works_for_backward_pass_and_loss(place, data, tmp_path, monkeypatch):
    expected = switched(data, tmp_path / "expected", "cont_accum", monkeypatch)
    with monkeypatch.context() as patch:
        spoil(patch, place, 3, step=3)
        train(train_config(data, tmp_path / "run", "cont_accum", **CHANGES))
    assert weights(tmp_path / "run") == weights(expected)


def test_recovery_without_bank_rollback_changes_the_weights(data, tmp_path, monkeypatch):
    """Negative control: the rows of the first micro-batch are in the bank twice."""
    expected = switched(data, tmp_path / "expected", "cont_accum", monkeypatch)
    with monkeypatch.context() as patch:
        spoil(patch, "forward", 3, step=3)
        patch.setattr(Bank, "rollback", lambda _: None)
        train(train_config(data, tmp_path / "run", "cont_accum", **CHANGES))
    assert weights(tmp_path / "run") != weights(expected)


def test_resumed_run_starts_with_the_smaller_size(data, tmp_path, monkeypatch):
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        spoil(patch, "forward", 3, step=3)
        train(train_config(data, run, **CHANGES))
    before = weights(run)
    (run / "checkpoints" / "step-00000006" / "manifest.json").unlink()
    assert newest_checkpoint(run).state["micro_batch"]["size"] == 2
    train(train_config(data, run, resume=True, **CHANGES))
    assert weights(run) == before
    assert [line["micro_batches"] for line in read_log(run)] == [4, 4, 8, 8, 8, 8]


def test_token_budget_is_halved(data, tmp_path, monkeypatch):
    changes = {
        **CHANGES, "model.max_passage_length": 48, "batch.micro_batch_size": "auto",
        "batch.micro_batch_tokens": 400, "bank.size": 0,
    }  # fmt: skip
    plain, run = tmp_path / "plain", tmp_path / "run"
    train(train_config(data, plain, "grad_cache", **changes))
    spoil(monkeypatch, "forward", 3)
    train(train_config(data, run, "grad_cache", **changes))
    assert newest_checkpoint(run).state["micro_batch"]["size"] == 200
    assert losses(run) == pytest.approx(losses(plain), rel=1e-4)
    for one, other in zip(read_log(run), read_log(plain), strict=True):
        assert one["micro_batches"] > other["micro_batches"]


BY_TOKENS = {
    "batch.micro_batch_tokens": 400,
    "batch.micro_batch_size": "auto",
    "model.max_passage_length": 48,
}


@pytest.mark.parametrize(("method", "cut"), [("cont_accum", {}), ("cont_cache", BY_TOKENS)])
def test_drift_measures_steps_since_the_last_change_of_size(
    cut, method, data, tmp_path, monkeypatch
):
    """Before and after a change of size, the cosine is 1 if the weights do not change."""
    changes = {
        **CHANGES,
        **cut,
        "model.dropout": 0.3,
        "optim.learning_rate": 0.0,
        "run.drift_steps": 1,
    }
    spoil(monkeypatch, "backward", 3, step=2)
    train(train_config(data, tmp_path / "run", method, **changes))
    counts = [line["micro_batches"] for line in read_log(tmp_path / "run")]
    assert counts[0] < counts[-1]
    for line in read_log(tmp_path / "run"):
        assert line["drift_passage_cosine"] == pytest.approx(1, abs=1e-6)
        assert line["drift_query_cosine"] == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(
    ("method", "changes", "sentence"),
    [
        (
            "cont_accum",
            {"batch.micro_batch_size": 1},
            "smaller micro-batches are impossible; .* Continue with --resume --allow_changes true "
            "--model.gradient_checkpointing true, or start a new run with a lower",
        ),
        (
            "in_batch",
            {},
            "in_batch cannot split its step into micro-batches; .* Continue with --resume "
            "--allow_changes true --method grad_cache",
        ),
    ],
)  # fmt: skip
def test_unrecoverable_out_of_memory_is_one_sentence(
    method, changes, sentence, data, tmp_path, monkeypatch
):
    spoil(monkeypatch, "forward", 1)
    with pytest.raises(InputError, match=sentence) as error:
        train(train_config(data, tmp_path / "run", method, **{**CHANGES, **changes}))
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run" / "model").exists()


def test_a_size_that_was_changed_on_resume_replaces_the_one_of_the_checkpoint():
    """Drift encodes past micro-batches again, so it needs the step since which this size holds."""
    size = MicroBatchSize([8, 4, 2, 1], "pairs")
    assert size.shrink(10)
    same = MicroBatchSize([8, 4, 2, 1], "pairs")
    same.load_state(size.state(), 20)
    assert (same.now, same.since) == (4, 10)
    other = MicroBatchSize([16, 8, 4, 2, 1], "pairs")
    other.load_state(size.state(), 20)
    assert (other.now, other.since) == (16, 20)


def test_out_of_memory_outside_the_passes_is_one_sentence(data, tmp_path, monkeypatch):
    """AdamW allocates its moments in the first update, where smaller micro-batches do not help."""
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda *_: full())
    with pytest.raises(
        InputError,
        match=r"out of memory outside the forward and backward passes .*optim\.name adamw_8bit",
    ):
        train(train_config(data, tmp_path / "run", **CHANGES))


@pytest.mark.acceptance
def test_run_fits_into_a_limited_address_space(data, tmp_path):
    """A micro-batch of 64 pairs does not fit below the limit, smaller ones do."""
    changes = {
        **CHANGES, "data.hard_negatives": 3, "batch.global_batch_size": 64,
        "batch.micro_batch_size": 64, "model.tiny_width": 128, "model.tiny_layers": 2,
        "model.max_passage_length": 48, "model.unpad": False, "optim.max_steps": 2,
    }  # fmt: skip
    config = train_config(data, tmp_path / "run", "grad_cache", **changes)
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(config))
    environment = {
        **os.environ,
        "PYTHONPATH": str(HERE.parent),
        "CONTACCUM_CACHE": str(tmp_path / "cache"),
    }
    call = [
        sys.executable, str(HERE / "processes.py"), "limited", "120", "train",
        "--config", str(file),
    ]  # fmt: skip
    done = subprocess.run(call, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (
        "step 1: out of memory with micro-batches of 64 pairs; retrying the step with"
        in done.stderr
    )
    assert "(gradients do not change)" in done.stderr
    free = tmp_path / "free"
    config.output_dir = str(free)
    with pytest.warns(UserWarning, match="fewer than 3 hard negatives"):
        train(config)
    assert read_log(free)[0]["micro_batches"] == 1 < read_log(tmp_path / "run")[0]["micro_batches"]
    assert losses(tmp_path / "run") == pytest.approx(losses(free), rel=1e-4)

"""Training on a GPU, compared to the same run on the CPU. Skipped without a GPU."""

import pytest
import torch
from helpers import micro_batches, train_config

from contaccum.config import METHOD_SPECS
from contaccum.errors import InputError
from contaccum.runtime.engine import Engine
from contaccum.training.log import read_log
from contaccum.training.loop import train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]

SAME = {"model.dropout": 0.0, "data.hard_negatives": 1}


def losses(data, folder, method="cont_accum", resume=False, **changes) -> list[float]:
    config = train_config(
        data, folder, method, resume=resume, **{"run.device": "auto", **SAME, **changes}
    )
    train(config)
    return [line["loss"] for line in read_log(folder) if "loss" in line]


@pytest.mark.parametrize("method", list(METHOD_SPECS))
def test_gpu_losses_equal_cpu_losses(method, data, tmp_path):
    found = losses(data, tmp_path / "gpu", method)
    assert found == pytest.approx(
        losses(data, tmp_path / "cpu", method, **{"run.device": "cpu"}), rel=1e-3
    )
    other = losses(data, tmp_path / "other", method, **{"optim.learning_rate": 1e-2})
    assert found != pytest.approx(other, rel=1e-3)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("method", ["grad_cache", "cont_accum"])
def test_half_precision_losses_are_close_to_fp32(method, precision, data, tmp_path):
    found = losses(data, tmp_path / "half", method, **{"run.precision": precision})
    assert found == pytest.approx(losses(data, tmp_path / "whole", method), rel=0.05)


def test_resumed_gpu_run_equals_uninterrupted_run(data, tmp_path):
    steady = {"run.save_steps": 2, "optim.schedule": "constant"}
    whole = losses(data, tmp_path / "whole", **steady)
    losses(data, tmp_path / "broken", **steady, **{"optim.max_steps": 2})
    resumed = losses(data, tmp_path / "broken", resume=True, allow_changes=True, **steady)
    assert resumed == pytest.approx(whole, rel=1e-4)
    assert len(whole) > 2


def test_memory_budget_is_enforced_and_lifted(data, tmp_path):
    losses(data, tmp_path / "run", **{"run.memory_budget": "1GB"})
    whole = torch.cuda.get_device_properties(0).total_memory
    with pytest.raises(InputError, match=r"run\.memory_budget is .* but the GPU has"):
        losses(data, tmp_path / "more", **{"run.memory_budget": f"{2 * whole // 10**9}GB"})
    torch.empty(2 * 10**9, dtype=torch.uint8, device="cuda")  # the limit of the first run is lifted


def test_tf32_is_used_in_a_run_with_evaluations_and_reset_after_it(data, tmp_path):
    """Exact search inside the run computes in full float32 and brings TF32 back."""
    evaluated = {"data.dev": str(data), "run.tf32": True, "run.precision": "fp32"}
    found = []
    config = train_config(data, tmp_path / "run", **{"run.device": "auto", **SAME, **evaluated})
    train(config, after_step=lambda training: found.append(torch.get_float32_matmul_precision()))
    assert set(found) == {"high"}
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.backends.cuda.matmul.allow_tf32


def test_fp16_run_stops_if_gradients_are_never_finite(data, tmp_path, monkeypatch):
    """The gradients are not finite at any loss scale, so halving the scale cannot help."""

    def spoilt(engine: Engine) -> None:
        for parameter in engine.parameters:
            if parameter.grad is not None:
                parameter.grad.fill_(float("nan"))

    monkeypatch.setattr(Engine, "reduce_gradients", spoilt)
    with pytest.raises(
        InputError,
        match=r"not a finite number\. The loss scale 0\.5 is not the cause, because it is below 1",
    ):
        losses(
            data,
            tmp_path / "run",
            **{"run.precision": "fp16", "optim.max_steps": 40, "run.save_steps": 0},
        )


def test_batches_are_copied_to_the_gpu_unchanged():
    (batch,) = micro_batches(1, 4)
    copied = batch.to(torch.device("cuda"))
    assert copied.queries.input_ids.device.type == "cuda"
    assert copied.queries.host_mask.is_pinned()  # copied from page-locked memory
    assert torch.equal(copied.queries.input_ids.cpu(), batch.queries.input_ids)
    assert torch.equal(copied.passages.attention_mask.cpu(), batch.passages.attention_mask)

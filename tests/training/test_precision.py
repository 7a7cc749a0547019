"""Precision and speed switches in whole runs and methods: what stays in fp32, what a CPU refuses, what a resume keeps."""

import copy
import shutil
import subprocess
import sys

import pytest
import torch
from helpers import gradients, micro_batches, tiny_encoder, train_config, weights, write_beir

from contaccum.config import TRAITS
from contaccum.engine import Engine
from contaccum.errors import InputError
from contaccum.methods import METHODS
from contaccum.methods.bank import Bank
from contaccum.methods.loss import InfoNCE
from contaccum.training.log import read_log
from contaccum.training.loop import train


def two_steps(method, start, precision):
    """The gradients of a second step, and the bank after it."""
    encoder = copy.deepcopy(start).train()
    engine = Engine(device="cpu", precision=precision)
    engine.prepare(encoder, torch.optim.SGD(encoder.parameters(), lr=0.1))
    loss = InfoNCE(0.1)
    bank = Bank(16, encoder.dim, loss, push=12, hard_negatives=1)
    for step in range(2):
        engine.step = step
        engine.update()
        values = METHODS[method](engine, micro_batches(3, 4, 1, seed=step), bank, loss)
        bank.end_step()
    assert values[0].value.dtype == torch.float32
    found = torch.cat([gradient.flatten() for gradient in gradients(encoder).values()])
    engine.close()
    return found, bank


@pytest.mark.parametrize("method", list(TRAITS))
def test_bf16_autocast_keeps_loss_bank_and_gradients_in_fp32_and_close(method):
    start = tiny_encoder()
    full, _ = two_steps(method, start, "fp32")
    half, bank = two_steps(method, start, "bf16")
    assert half.dtype == torch.float32
    assert {tensor.dtype for tensor in (bank.passages, bank.queries, bank.positive_logits)} == {torch.float32}
    cosine = torch.nn.functional.cosine_similarity(half, full, dim=0)
    assert cosine > 0.99
    assert not torch.equal(half, full)


def test_a_launcher_s_precision_does_not_reach_a_run(monkeypatch):
    """accelerate launch hands its own default on in the environment; a config of fp32 stays fp32."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    engine = Engine(device="cpu")
    with engine.accelerator.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
    engine.close()
    engine = Engine(device="cpu", precision="bf16")
    with engine.accelerator.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
    engine.close()


def test_fp16_is_refused_on_a_cpu():
    with pytest.raises(InputError, match=r"run\.precision is fp16 on cpu, expected fp32 or bf16"):
        Engine(device="cpu", precision="fp16")


def test_a_scaler_begins_anew_where_the_run_before_had_none():
    """A run that goes on in fp16 after steps in fp32; the scaler is PyTorch's, here on a CPU."""
    engine = Engine(device="cpu")
    assert engine.scaler_state() == {}
    engine.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    engine.load_scaler_state({})
    assert engine.scaler_state()["scale"] == 8.0
    engine.load_scaler_state({**engine.scaler_state(), "scale": 2.0})  # negative control
    assert engine.scaler_state()["scale"] == 2.0


def test_tf32_lasts_as_long_as_its_run_and_warns_without_cuda():
    assert not torch.backends.cuda.matmul.allow_tf32
    with pytest.warns(UserWarning, match=r"run\.tf32 has no effect on cpu"):
        engine = Engine(device="cpu", tf32=True)
    assert torch.backends.cuda.matmul.allow_tf32
    engine.close()
    assert not torch.backends.cuda.matmul.allow_tf32


def test_graphs_are_refused_on_a_cpu(tmp_path):
    with pytest.raises(InputError, match=r"run\.compile is cuda_graphs on cpu, expected a CUDA device"):
        train(train_config(write_beir(tmp_path / "data"), tmp_path / "run", **{"run.compile": "cuda_graphs"}))


def test_an_unpadded_run_learns_what_a_padded_one_does_and_resumes_to_the_byte(tmp_path):
    data = write_beir(tmp_path / "data")
    passages = (data / "corpus.jsonl").read_text().splitlines()
    shorter = [line.replace("lives in ", "") if i % 2 else line for i, line in enumerate(passages)]
    (data / "corpus.jsonl").write_text("\n".join(shorter) + "\n")
    for name, unpad in (("padded", False), ("whole", True)):
        train(train_config(data, tmp_path / name, **{"model.unpad": unpad, "model.dropout": 0.0}))
    for one, other in zip(read_log(tmp_path / "padded"), read_log(tmp_path / "whole"), strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-4)
    assert weights(tmp_path / "whole") != weights(tmp_path / "padded")  # sums are taken in another order
    broken = tmp_path / "broken"
    shutil.copytree(tmp_path / "whole", broken)
    for step in (4, 6):
        shutil.rmtree(broken / "checkpoints" / f"step-{step:08d}")
    train(train_config(data, broken, resume=True, **{"model.unpad": True, "model.dropout": 0.0}))
    assert weights(broken) == weights(tmp_path / "whole")


HEAVY = ("torch", "transformers", "datasets", "numpy", "accelerate", "faiss")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--help"], 0),
        (["train", "--help"], 0),
        (["train", "--config", "no_such.yaml"], 2),
        (["train", "--data.train", "x", "--output_dir", "y", "--optim.learning_rate", "-1"], 2),
        (["train", "--data.train", "x", "--output_dir", "y", "--batch.micro_batch_size", "7"], 2),
        (["train", "--no_such_setting", "1"], 2),
    ],
)
def test_help_and_config_errors_import_nothing_heavy(arguments, code, tmp_path):
    script = (
        "import sys; from contaccum.cli import main\n"
        "try: code = main(sys.argv[1:])\n"
        "except SystemExit as done: code = done.code\n"
        f"found = [name for name in {HEAVY} if name in sys.modules]\n"
        "print('heavy:', *found, file=sys.stderr); sys.exit(code)"
    )
    call = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(call, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert done.stderr.splitlines()[-1] == "heavy:"
    assert not list(tmp_path.iterdir())


@pytest.mark.acceptance
def test_the_import_check_sees_a_heavy_import(tmp_path):
    """Negative control: a verb that runs does import them."""
    script = f"import sys; import contaccum.api; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "torch" in done.stdout

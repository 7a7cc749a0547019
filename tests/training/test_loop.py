"""Files of a run, values in its log, dev evaluation, schedules and memory."""

import errno
import gc
import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
import time
import warnings
import weakref
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from helpers import (
    open_retrieval_set,
    tiny_encoder,
    train_config,
    weights,
)
from processes import python
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

from contaccum import DualEncoder
from contaccum.config import METHOD_SPECS, METRIC_CUTS, METRIC_MEASURES, OptimConfig
from contaccum.data.batches import Batches
from contaccum.encoder import Tower
from contaccum.errors import InputError
from contaccum.evaluation.evaluate import evaluate
from contaccum.methods.bank import Bank
from contaccum.runtime.engine import Engine
from contaccum.runtime.files import read_json
from contaccum.training.log import read_log
from contaccum.training.loop import Training, train
from contaccum.training.parts import learning_rate_factor, make_optimizer, step_count
from contaccum.training.run_folder import newest_checkpoint, total_steps
from contaccum.training.trackers import TensorBoard


@pytest.mark.parametrize("total", [3, 6, 9])
def test_a_changed_number_of_steps_ends_the_run_and_its_schedule(total, data, tmp_path):
    """Of 6 planned steps; the number is changed after the first one."""
    config = train_config(data, tmp_path / "run", **{"optim.warmup_steps": 0})
    train(
        config,
        after_step=lambda training: training.set_total(total) if training.done == 1 else None,
    )
    rates = [line["learning_rate"] for line in read_log(tmp_path / "run")]
    assert rates == pytest.approx([1e-3, *(1e-3 * (1 - step / total) for step in range(1, total))])


@pytest.mark.parametrize("count", [1, 2])
def test_training_on_one_query_warns_that_there_are_no_negatives(count, tmp_path):
    file = tmp_path / "pairs.jsonl"
    file.write_text(
        "".join(
            json.dumps({"query": f"question {n}", "pos": [f"answer {n}"]}) + "\n"
            for n in range(count)
        )
    )
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        train(train_config(file, tmp_path / "run", **{"optim.max_steps": 2}))
    found = [str(one.message) for one in said if "no query has a negative" in str(one.message)]
    assert len(found) == (1 if count == 1 else 0)
    assert [line["negatives"] == 0 for line in read_log(tmp_path / "run")] == [count == 1] * 2


@pytest.mark.parametrize("method", list(METHOD_SPECS))
def test_every_method_trains_logs_and_learns(method, data, tmp_path):
    run = tmp_path / "run"
    model = train(
        train_config(data, run, method, **{"data.hard_negatives": 1, "optim.max_steps": 30})
    )
    assert model == run / "model"
    log = read_log(run)
    assert [line["step"] for line in log] == list(range(1, 31))
    for line in log:
        for name in (
            "loss",
            "grad_norm",
            "query_grad_norm",
            "passage_grad_norm",
            "grad_norm_ratio",
            "seconds",
            "peak_memory",
        ):
            assert math.isfinite(line[name])
            assert line[name] > 0
        assert line["grad_norm"] == pytest.approx(
            math.hypot(line["query_grad_norm"], line["passage_grad_norm"])
        )
        assert line["grad_norm_ratio"] == pytest.approx(
            line["passage_grad_norm"] / line["query_grad_norm"]
        )
        assert line["pairs_per_second"] == pytest.approx(16 / line["seconds"])
        assert 0 <= line["waited"] <= line["seconds"]
    expected = 0 if METHOD_SPECS[method].bank == "none" else 24
    assert [line["bank_fill"] for line in log] == [0] + [min(16, expected)] + [expected] * 28
    if method != "passage_bank":  # with its one-sided bank it learns nothing on such a small set
        assert log[-1]["loss"] < 0.9 * log[2]["loss"]
    assert {path.name for path in run.iterdir()} == {
        "config.yaml", "environment.json", "log.jsonl", "checkpoints", "model",
    }  # fmt: skip
    assert read_json(run / "environment.json")["torch"] == torch.__version__
    assert DualEncoder.load(model).encode_queries(["red fox"]).shape == (1, 32)


class Float64(TorchDispatchMode):
    """Collect the operations that return a float64 tensor, which MPS does not have."""

    found: ClassVar[list[str]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if any(getattr(leaf, "dtype", None) == torch.float64 for leaf in tree_leaves(result)):
            self.found.append(str(func))
        return result


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("method", METHOD_SPECS)
def test_a_step_has_no_float64_tensor(method, double, data, tmp_path, monkeypatch):
    """Negative control: ages in float64."""
    monkeypatch.setattr(Float64, "found", [])
    step, ages = Training.take_step, Bank.ages

    def observed(self, micro_batches):
        with Float64():
            return step(self, micro_batches)

    monkeypatch.setattr(Training, "take_step", observed)
    if double:
        monkeypatch.setattr(Bank, "ages", lambda bank: ages(bank).double())
    train(train_config(data, tmp_path / "run", method, **{"optim.max_steps": 2}))
    assert bool(Float64.found) == double, Float64.found


def test_logged_negatives_equal_columns_minus_the_positive(data, tmp_path):
    """With N = 16, B = 4, H = 1, M = 24: the columns of a row are its micro-batch's and the bank's,
    minus its positive."""
    changes = {"data.hard_negatives": 1, "optim.max_steps": 3, "loss.mask_false_negatives": False}
    seen = {}
    for method in METHOD_SPECS:
        train(train_config(data, tmp_path / method, method, **changes))
        seen[method] = read_log(tmp_path / method)[-1]["negatives"]
    assert seen == {
        "in_batch": 31, "grad_accum": 7, "grad_cache": 31, "passage_bank": 7 + 48,
        "cont_accum": 7 + 48, "cont_cache": 31 + 48,
    }  # fmt: skip


def test_masked_false_negatives_are_counted(data, tmp_path):
    train(train_config(data, tmp_path / "on", **{"optim.max_steps": 6}))
    train(
        train_config(
            data, tmp_path / "off", **{"optim.max_steps": 6, "loss.mask_false_negatives": False}
        )
    )
    assert sum(line["masked"] for line in read_log(tmp_path / "on")) > 0
    assert sum(line["masked"] for line in read_log(tmp_path / "off")) == 0


def test_tied_towers_log_one_norm_and_stay_equal(data, tmp_path):
    model = train(train_config(data, tmp_path / "run", **{"model.tie_towers": True}))
    assert read_log(tmp_path / "run")[0]["grad_norm_ratio"] is None
    encoder = DualEncoder.load(model)
    np.testing.assert_array_equal(
        encoder.encode_queries(["red fox"]), encoder.encode_passages(["red fox"])
    )


def test_by_default_one_encoder_is_trained_unless_the_model_has_two(data, tmp_path):
    def towers(name, **changes):
        changes = {"model.tie_towers": None, "optim.max_steps": 1} | changes
        return len(DualEncoder.load(train(train_config(data, tmp_path / name, **changes))).towers)

    assert towers("one") == 1
    assert towers("two", **{"model.tie_towers": False}) == 2
    start = {name: {"model.name": str(tmp_path / name)} for name in ("one", "two")}
    assert towers("on with one", **start["one"]) == 1
    assert towers("on with two", **start["two"]) == 2
    other = {"model.passage_name": str(tmp_path / "two" / "model" / "passage_encoder")}
    assert towers("other", **start["one"], **other) == 2


def test_lengths_are_those_of_the_encoder_up_to_512_tokens(data, tmp_path):
    base = str(tmp_path / "base")
    steps = {"optim.max_steps": 1}
    lengths = {"model.max_query_length": 48, "model.max_passage_length": 600}
    train(train_config(data, base, **steps, **lengths))

    def trained_on(folder, **lengths):
        changes = {"model.name": base, "model.tie_towers": None, **steps, **lengths}
        model = train(train_config(data, tmp_path / folder, **changes))
        settings = DualEncoder.load(model).settings
        return settings.max_query_length, settings.max_passage_length

    not_set = {"model.max_query_length": None, "model.max_passage_length": None}
    with pytest.warns(UserWarning, match=r"base: max_passage_length is 600, but training uses 512"):
        assert trained_on("usual", **not_set) == (48, 512)
    assert trained_on("set", **not_set | {"model.max_passage_length": 600}) == (48, 600)
    assert trained_on("shorter", **lengths | {"model.max_query_length": 16}) == (16, 600)


def test_best_dev_model_is_saved(data, tmp_path):
    """At a learning rate that damages the model late, the best model is saved, not the last one."""
    run = tmp_path / "run"
    changes = {
        "data.dev": str(data),
        "run.eval_steps": 4,
        "optim.max_steps": 24,
        "optim.schedule": "constant",
    }
    model = train(train_config(data, run, **changes, **{"optim.learning_rate": 0.02}))
    scores = {line["step"]: line["dev"]["ndcg@10"] for line in read_log(run) if "dev" in line}
    assert list(scores) == [0, 4, 8, 12, 16, 20, 24]
    kept = read_json(run / "dev_metrics.json")
    assert kept["mean"]["ndcg@10"] == max(score for step, score in scores.items() if step)
    dev = open_retrieval_set(data, "dev")
    again = evaluate(DualEncoder.load(model), dev)
    assert again["mean"] == pytest.approx(kept["mean"])
    assert max(scores.values()) != scores[24]
    # the score of the best model is not that of one that another end replaced
    more = {"resume": True, "allow_changes": True, "optim.max_steps": 25}
    shutil.copytree(run, tmp_path / "longer")
    train(train_config(data, tmp_path / "longer", **more))
    assert not (tmp_path / "longer" / "dev_metrics.json").exists()


def test_log_and_dev_evaluation_follow_their_settings(data, tmp_path, monkeypatch):
    """The start, every third step and the last are evaluated, the named split is used, and no
    evaluation batch exceeds its tokens."""
    (data / "qrels" / "dev.tsv").rename(data / "qrels" / "held_out.tsv")
    passes = []
    forward = Tower.forward

    def seen(tower, tokens):
        if not tower.training:
            passes.append(tokens.input_ids.numel())
        return forward(tower, tokens)

    monkeypatch.setattr(Tower, "forward", seen)
    changes = {
        "data.dev": str(data),
        "run.eval_steps": 3,
        "run.drift_steps": 0,
        "run.eval_batch_tokens": 40,
    }
    train(train_config(data, tmp_path / "run", **changes, **{"data.dev_split": "held_out"}))
    assert [(line["step"], "dev" in line) for line in read_log(tmp_path / "run")] == [
        (0, True), (1, False), (2, False), (3, False), (3, True), (4, False), (5, False),
        (6, False), (6, True)
    ]  # fmt: skip
    assert 16 < max(passes) <= 40
    with pytest.raises(InputError, match="split 'dev' not found"):
        train(train_config(data, tmp_path / "other", **changes))


def test_every_selectable_metric_is_computed(data, tmp_path):
    train(
        train_config(
            data,
            tmp_path / "run",
            **{"data.dev": str(data), "run.metric": "recall@100", "optim.max_steps": 1},
        )
    )
    computed = read_json(tmp_path / "run" / "dev_metrics.json")["mean"]
    assert set(computed) == {
        f"{measure}@{cut}" for measure in METRIC_MEASURES for cut in METRIC_CUTS
    }


def test_failed_evaluation_is_repeated_on_resume(data, tmp_path, monkeypatch):
    """The step's checkpoint is written first, and a resumed run repeats the evaluation."""
    changes = {"data.dev": str(data), "run.eval_steps": 3, "run.save_steps": 0}
    train(train_config(data, tmp_path / "whole", **changes))
    run = tmp_path / "run"

    def fail(*_, **__):
        raise RuntimeError("no memory left for the evaluation")

    with monkeypatch.context() as patch:

        def fail_next(*arguments, **settings):
            patch.setattr("contaccum.training.dev_evaluator.evaluate", fail)
            return evaluate(*arguments, **settings)

        patch.setattr("contaccum.training.dev_evaluator.evaluate", fail_next)
        with pytest.raises(RuntimeError, match="no memory left"):
            train(train_config(data, run, **changes))
    assert newest_checkpoint(run).state["step"] == 3
    train(train_config(data, run, resume=True, **changes))
    assert weights(run) == weights(tmp_path / "whole")
    evaluations = [
        [line for line in read_log(folder) if "dev" in line] for folder in (run, tmp_path / "whole")
    ]
    assert evaluations[0] == evaluations[1]


def test_best_model_that_was_not_saved_is_saved_on_resume(data, tmp_path, monkeypatch):
    """The disk of ``model/`` is full at the first evaluation, which is the best; the checkpoint
    does not count it."""
    changes = {"data.dev": str(data), "run.eval_steps": 3, "run.save_steps": 0}
    whole, run = tmp_path / "whole", tmp_path / "run"
    # of one run, and of the other, which repeats its evaluation of step 3
    scores = iter([0.1, 0.9, 0.5, 0.1, 0.9, 0.9, 0.5])
    monkeypatch.setattr(
        "contaccum.training.dev_evaluator.evaluate",
        lambda *_, **__: {"mean": {"ndcg@10": next(scores)}, "queries": 1},
    )
    train(train_config(data, whole, **changes))
    save = DualEncoder.save

    def fail(self, folder):
        if folder == run / "model":
            raise InputError(f"{folder}: cannot be written (No space left on device)")
        save(self, folder)

    with monkeypatch.context() as patch:
        patch.setattr(DualEncoder, "save", fail)
        with pytest.raises(InputError, match="No space left"):
            train(train_config(data, run, **changes))
    train(train_config(data, run, resume=True, **changes))
    assert weights(run) == weights(whole)
    assert read_json(run / "dev_metrics.json")["mean"] == {"ndcg@10": 0.9}
    evaluations = [[line for line in read_log(folder) if "dev" in line] for folder in (run, whole)]
    assert evaluations[0] == evaluations[1]


@pytest.mark.parametrize("precision", ["bf16"])
def test_bf16_losses_are_close_to_fp32(precision, data, tmp_path):
    losses = {}
    for name in ("fp32", precision):
        train(
            train_config(
                data, tmp_path / name, "cont_cache", **{"run.precision": name, "model.dropout": 0.0}
            )
        )
        losses[name] = [line["loss"] for line in read_log(tmp_path / name)]
    assert losses[precision] == pytest.approx(losses["fp32"], rel=0.02)
    assert losses[precision] != losses["fp32"]
    assert (
        DualEncoder.load(tmp_path / precision / "model").query_tower.backbone.dtype == torch.float32
    )


def test_a_run_does_not_depend_on_the_state_of_torch_and_restores_it(data, tmp_path):
    torch.manual_seed(3)
    drawn = torch.rand(2).tolist()
    torch.manual_seed(3)
    train(train_config(data, tmp_path / "alone"))
    assert torch.rand(2).tolist() == drawn
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)
    try:
        # not set_default_device: after set_default_device(None), transformers fails with torch 2.6
        with torch.device("meta"):
            with torch.inference_mode():
                train(train_config(data, tmp_path / "after"))
            device = torch.empty(0).device.type
        found = torch.is_grad_enabled(), torch.get_default_dtype(), device
    finally:
        torch.set_grad_enabled(True)
        torch.set_default_dtype(torch.float32)
    assert found == (False, torch.float64, "meta")
    assert weights(tmp_path / "after") == weights(tmp_path / "alone")


def test_a_finished_run_leaves_no_encoder_in_memory(data, tmp_path, monkeypatch):
    """Without garbage collection, which comes too late for the next encoder on a GPU."""
    encoders, take_step = [], Training.take_step

    def kept(training, micro_batches):
        encoders.append(weakref.ref(training.encoder))
        return take_step(training, micro_batches)

    monkeypatch.setattr(Training, "take_step", kept)
    gc.collect()
    gc.disable()
    try:
        train(train_config(data, tmp_path / "run", **{"optim.max_steps": 1}))
        assert encoders[0]() is None
    finally:
        gc.enable()


def test_output_folder_must_be_new_or_empty(data, tmp_path):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "notes.txt").write_text("mine")
    for resume in (False, True):
        with pytest.raises(InputError, match=r"not empty, and without the config\.yaml of a run"):
            train(train_config(data, tmp_path / "taken", resume=resume))
    with pytest.raises(InputError, match="this is a file, not a folder"):
        train(train_config(data, tmp_path / "taken" / "notes.txt"))
    assert [path.name for path in (tmp_path / "taken").iterdir()] == ["notes.txt"]
    (tmp_path / "shown").mkdir()
    (tmp_path / "shown" / ".DS_Store").touch()  # macOS makes it where the Finder shows a folder
    train(train_config(data, tmp_path / "shown", **{"optim.max_steps": 1}))


def test_tensorboard_gets_the_numbers_of_the_log(data, tmp_path):
    run = tmp_path / "run"
    settings = {"run.trackers": ["tensorboard"], "optim.max_steps": 2, "data.dev": str(data)}
    train(train_config(data, run, **settings))
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    lines = [line for line in read_log(run) if "loss" in line]
    for name in ("loss", "learning_rate", "grad_norm", "bank_fill"):
        found = [(event.step, event.value) for event in events.Scalars(name)]
        assert found == [(line["step"], pytest.approx(line[name], rel=1e-6)) for line in lines]
    assert [event.step for event in events.Scalars("dev/ndcg@10")] == [0, 1, 2]


def test_tensorboard_forgets_the_steps_that_a_kill_undid(data, tmp_path):
    run = tmp_path / "run"
    settings = {"run.trackers": ["tensorboard"], "run.save_steps": 2, "optim.max_steps": 4}
    train(train_config(data, run, **settings))
    shutil.rmtree(run / "checkpoints" / "step-00000004")
    train(train_config(data, run, resume=True, **settings))
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("name", "words"), [("comet_ml", "'comet_ml' is unknown"), ("wandb", "pip install wandb")]
)
def test_unusable_trackers_are_refused_before_the_run(name, words, data, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(InputError, match=words):
        train(train_config(data, tmp_path / "run", **{"run.trackers": [name]}))
    assert not (tmp_path / "run").exists()


def test_tracker_that_cannot_start_is_a_sentence(data, tmp_path, monkeypatch):
    """A full disk."""

    def start(self, *_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    settings = {"run.trackers": ["tensorboard"], "optim.max_steps": 2}
    found = r"run: cannot be written \(No space left on device\)$"
    with monkeypatch.context() as patch:
        patch.setattr(TensorBoard, "__init__", start)
        with pytest.raises(InputError, match=found):
            train(train_config(data, tmp_path / "run", **settings))
    train(
        train_config(
            data,
            tmp_path / "run",
            resume=True,
            **settings,
            **{"run.precision": "bf16"},
            allow_changes=True,
        )
    )


@pytest.mark.parametrize(
    ("schedule", "peer"),
    [("linear", get_linear_schedule_with_warmup), ("cosine", get_cosine_schedule_with_warmup)],
)
@pytest.mark.parametrize("warmup", [0, 5])
def test_schedules_equal_transformers(schedule, peer, warmup):
    """The warmup of transformers starts at 0, ours one step later; after the warmup both are
    equal."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = peer(optimizer, warmup, 20)
    for step in range(20):
        ours = learning_rate_factor(step, 20, warmup, schedule)
        theirs = scheduler.get_last_lr()[0]
        assert ours == pytest.approx(theirs if step >= warmup else theirs + 1 / warmup)
        optimizer.step()
        scheduler.step()
    assert learning_rate_factor(7, 20, warmup, "constant") == 1


def test_a_share_of_the_steps_is_rounded_up():
    assert step_count(0.1, 34) == 4
    assert step_count(7, 34) == 7
    assert step_count(0, 34) == 0
    assert step_count(0.07, 100) == 7  # 0.07 * 100 is 7.000000000000001 in floating point
    for epochs, examples, steps in ((1.1, 800, 55), (2.2, 400, 55), (1, 801, 51)):
        changes = {"optim.epochs": epochs, "optim.max_steps": None}
        config = train_config("", "", **changes, **{"batch.global_batch_size": 16})
        assert total_steps(config, examples) == steps


def test_biases_and_normalization_have_no_weight_decay():
    encoder = tiny_encoder()
    optimizer = make_optimizer(encoder, OptimConfig(weight_decay=0.1))
    decayed = {id(p) for p in optimizer.param_groups[0]["params"]}
    for name, parameter in encoder.named_parameters():
        if parameter.requires_grad:
            assert (id(parameter) in decayed) == (
                not name.endswith(".bias") and "LayerNorm" not in name
            ), name
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]


def test_gradients_are_clipped_to_the_joint_norm_of_both_towers(data, tmp_path):
    """The limit applies to the norm of the gradients of both towers together."""
    from contaccum.runtime.engine import Engine

    encoder = tiny_encoder()
    engine = Engine(device="cpu")
    engine.prepare(encoder, torch.optim.SGD(encoder.parameters(), lr=1.0))
    for parameter in engine.parameters:
        parameter.grad = torch.ones_like(parameter)
    query, passage, norm = engine.gradient_norms()
    count = sum(p.numel() for p in engine.parameters)
    assert norm == math.hypot(query, passage) == pytest.approx(math.sqrt(count), rel=1e-5)
    engine.clip(norm, 0.5)
    assert engine.gradient_norms()[-1] == pytest.approx(0.5, rel=1e-4)
    engine.clip(0.5, 2.0)
    assert engine.gradient_norms()[-1] == pytest.approx(0.5, rel=1e-4)


def test_peak_memory_excludes_the_parent_process():
    """A child of a process of 1 GiB reports its own peak, with its own allocation."""
    block = np.ones(2**30, dtype=np.uint8)
    script = (
        "import numpy as np; from contaccum.runtime.processes import peak_resident; before = "
        "peak_resident();block = np.ones(2**28, dtype=np.uint8); print(before, peak_resident())"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    before, after = map(int, done.stdout.split())
    assert before < block.nbytes
    assert after - before > 0.9 * 2**28


def test_peak_memory_excludes_evaluations():
    """Memory of an ``unmeasured`` block does not count, other memory does."""
    script = """
import numpy as np
from contaccum.runtime.engine import Engine
engine = Engine(device="cpu")
engine.reset_peak_memory()
start = engine.peak_memory()
with engine.unmeasured():
    np.ones(2**28, dtype=np.uint8)
inside = engine.peak_memory() - start
np.ones(2**27, dtype=np.uint8)
with engine.unmeasured():
    pass
print(inside / 2**28, (engine.peak_memory() - start) / 2**27)
"""
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("/proc/self/clear_refs cannot be written here")
    done = subprocess.run([python(), "-c", script], capture_output=True, text=True, check=True)
    inside, after = map(float, done.stdout.split())
    assert inside < 0.2
    assert 0.9 < after < 1.3


def test_memory_budget_caps_the_gpu_and_is_lifted_at_the_end(monkeypatch):
    caps = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda.memory, "_lazy_init", lambda: None)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80 * 10**9)
    )
    monkeypatch.setattr(
        torch._C,
        "_cuda_setMemoryFraction",
        lambda share, device: caps.append((share, device)),
        raising=False,
    )
    engine = Engine(device="auto")
    assert engine.device == torch.device("cuda", 0)
    with pytest.raises(InputError, match="but the GPU has 80000000000"):
        engine.limit_memory(81 * 10**9)
    engine.limit_memory(20 * 10**9)
    assert caps == [(0.25, 0)]
    engine.close()
    assert caps == [(0.25, 0), (1.0, 0)]  # a later run in this process has the full GPU again


def test_memory_budget_warns_on_cpu(data, tmp_path):
    with pytest.warns(UserWarning, match="run.memory_budget has no effect on cpu"):
        train(
            train_config(
                data, tmp_path / "run", **{"run.memory_budget": "11GB", "optim.max_steps": 1}
            )
        )


def test_files_of_wandb_are_in_the_folder_of_the_run(data, tmp_path, monkeypatch):
    """With the real wandb, which writes to files only."""
    pytest.importorskip("wandb")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.delenv("WANDB_DIR", raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    train(train_config(data, tmp_path / "run", **{"run.trackers": ["wandb"], "optim.max_steps": 1}))
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    assert not list((tmp_path / "elsewhere").iterdir())


def test_the_log_has_the_seconds_that_a_step_waited_for_data(data, tmp_path, monkeypatch):
    def slow(batches, step, size=None, make=Batches.step):
        time.sleep(1 if step == 0 else 0)
        return make(batches, step, size)

    monkeypatch.setattr(Batches, "step", slow)
    train(train_config(data, tmp_path / "run", **{"optim.max_steps": 2}))
    first, second = read_log(tmp_path / "run")
    assert first["seconds"] > first["waited"] >= 1
    assert second["waited"] < first["waited"]  # not the sum of both

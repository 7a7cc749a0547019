"""Sharded processes (run.sharding fsdp) equal one process that holds the whole encoder (gloo on the
CPU)."""

import signal
from pathlib import Path

import pytest
import torch
from gradient_worker import REPLAYED
from helpers import train_config, weights, write_beir
from processes import Job, run_jobs
from safetensors.torch import load_file
from sharding_memory_worker import LAYERS, WIDTH
from sharding_worker import MEAN, NEED_A_FOLDER, VARIANTS
from test_processes import Runs
from tiny_families import FAMILIES, family_folder

from contaccum.config import METHOD_SPECS, validate
from contaccum.encoder import DualEncoder
from contaccum.errors import InputError
from contaccum.runtime.files import read_json
from contaccum.runtime.launch import refuse_ignored_launch
from contaccum.training.loop import train

LAUNCHES = [("tiny", 1), ("tiny", 4), ("qwen3", 1), ("qwen3", 2)]
PARTS = ("weights", "gradients", "optimizer")


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """Tensors saved by each process of the workers, by model and number of processes."""
    folder = tmp_path_factory.mktemp("steps")
    data = write_beir(folder / "data")
    jobs = {}
    names = {"tiny": "tiny", "qwen3": str(family_folder("qwen3", folder / "qwen3"))}
    for model, world in LAUNCHES:
        reference = [str(folder / f"{model}1.0.safetensors")] if world > 1 else []
        call = [str(data), str(folder / f"{model}{world}"), names[model], *reference]
        jobs[f"{model} {world}"] = Job(call, world, worker="sharding_worker", seconds=600)
    for outcome in run_jobs(jobs, folder / "jobs").values():
        outcome.check()
    return {
        (model, world): [
            load_file(folder / f"{model}{world}.{rank}.safetensors") for rank in range(world)
        ]
        for model, world in LAUNCHES
    }


def difference(one: dict, other: dict, prefix: str) -> float:
    """Return the largest difference of a step's gradients, relative to the largest gradient."""
    names = [name for name in one if name.startswith(f"{prefix}/gradient/")]
    assert names == [name for name in other if name.startswith(f"{prefix}/gradient/")]
    assert names
    scale = max(one[name].abs().max() for name in names)
    return float(max((one[name] - other[name]).abs().max() / scale for name in names))


@pytest.mark.acceptance
@pytest.mark.parametrize(("model", "world"), [each for each in LAUNCHES if each[1] > 1])
def test_sharded_gradients_equal_those_of_one_process(model, world, steps):
    """For every method, partial replay, gradient checkpointing and LoRA, over two steps."""
    (one,) = steps[model, 1]
    labels = (
        {*METHOD_SPECS, *REPLAYED, *VARIANTS}
        - {""}
        - (set(NEED_A_FOLDER) if model == "tiny" else set())
    )
    for label in sorted(labels):
        for found in steps[model, world]:
            for step in range(2):
                assert difference(one, found, f"{label}/{step}") < 1e-5
                for name in ("norms", "clipped"):
                    torch.testing.assert_close(
                        found[f"{label}/{step}/{name}"], one[f"{label}/{step}/{name}"]
                    )


@pytest.mark.acceptance
def test_mean_over_processes_gives_other_gradients(steps):
    """Negative control: FSDP's mean instead of the sum."""
    (one,) = steps["tiny", 1]
    assert all(difference(one, found, f"{MEAN}/0") > 0.1 for found in steps["tiny", 4])


@pytest.mark.acceptance
def test_memory_of_a_sharded_process(tmp_path):
    """Weights, gradients and optimizer state are divided by W. A step adds few gathered layers, not
    all of them."""
    data, world = write_beir(tmp_path / "data"), 4
    jobs = {
        str(w): Job([str(data), str(tmp_path / f"of{w}")], w, worker="sharding_memory_worker")
        for w in (1, world)
    }
    for outcome in run_jobs(jobs, tmp_path / "jobs").values():
        outcome.check()
    one = read_json(tmp_path / "of1.0.json")
    # bytes of a BERT layer: 4 attention matrices, 2 of 4 times their size, 13 vectors
    layer = 4 * (12 * WIDTH**2 + 13 * WIDTH)
    rest = one["weights"] - LAYERS * layer
    assert 0 < rest < layer
    # of four layers: weights, message with the weights of the next layer, gradients, message with
    # the last gradients
    limit = sum(one[name] for name in PARTS) / world + 4 * layer + 2 * rest
    for rank in range(world):
        found = read_json(tmp_path / f"of{world}.{rank}.json")
        for name in PARTS:
            assert found[name] <= 1.02 * one[name] / world
        assert found["peak"] <= limit < found["peak at once"]


# whole runs


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    runs = Runs(tmp_path_factory.mktemp("runs"))
    drift = {"run.drift_steps": 2, "run.eval_batch_tokens": 100}
    fsdp = {"run.sharding": "fsdp", **drift}
    more = ("--resume", "--allow_changes", "true")
    runs.add("whole", 1, **drift)
    for world in (2, 4):
        runs.add(f"of {world}", world, fault="encodes_few_texts_at_a_time", **fsdp)
    for name in ("killed", "to 4", "to none"):
        runs.add(name, 2, fault="is_killed", **fsdp)
    runs.add("to fsdp", 1, fault="is_killed", **drift)
    runs.add("killed again", 2, "--resume", run="killed", **fsdp)
    runs.add("2 to 4", 4, *more, run="to 4", **fsdp)
    runs.add("fsdp to none", 1, *more, run="to none", **drift)
    runs.add("none to fsdp", 2, *more, run="to fsdp", **fsdp)
    adapted = {
        "method": "grad_cache", "model.name": str(family_folder("qwen3", runs["qwen3"])),
        "lora.rank": 2, "model.tie_towers": True, "model.gradient_checkpointing": True,
        "batch.micro_batch_tokens": 150,
    }  # fmt: skip
    runs.add("adapter", 1, imports=["peft"], **drift, **adapted)
    runs.add("sharded adapter", 2, **fsdp, **adapted)
    runs.add("killed adapter", 2, fault="is_killed", **fsdp, **adapted)
    runs.add("killed adapter again", 2, "--resume", run="killed adapter", **fsdp, **adapted)
    quantized = {
        **adapted,
        "model.quantize": "4bit",
        "model.tie_towers": False,
        "batch.micro_batch_tokens": None,
    }
    runs.add("quantized", 1, imports=["bitsandbytes"], **drift, **quantized)
    runs.add("sharded quantized", 2, **fsdp, **quantized)
    runs.add("killed quantized", 2, fault="is_killed", **fsdp, **quantized)
    runs.add("killed quantized again", 2, "--resume", run="killed quantized", **fsdp, **quantized)
    offload = {"run.cpu_offload": True, **fsdp}
    runs.add("killed offload", 2, fault="is_killed", **offload)
    runs.add("killed offload again", 2, "--resume", run="killed offload", **offload)
    runs.add("half", 2, **fsdp, **{"run.precision": "bf16"})
    runs.outcomes = run_jobs(runs.jobs, runs["jobs"])
    return runs


@pytest.mark.acceptance
@pytest.mark.parametrize(
    ("whole", "name"),
    [
        ("whole", "of 2"),
        ("whole", "of 4"),
        ("adapter", "sharded adapter"),
        ("quantized", "sharded quantized"),
    ],
)
def test_sharded_run_equals_the_run_of_one_process(whole, name, runs):
    runs.outcomes[whole].check()
    runs.outcomes[name].check()
    assert_equal_runs(runs, whole, name)
    one, sharded = (runs[run] / "model" for run in (whole, name))
    files = [path.relative_to(one) for path in sorted(one.rglob("*")) if path.is_file()]
    assert files == [
        path.relative_to(sharded) for path in sorted(sharded.rglob("*")) if path.is_file()
    ]
    for file in files:
        if file.suffix != ".safetensors" and file.name != "contaccum.json":
            assert (one / file).read_bytes() == (sharded / file).read_bytes(), file


@pytest.mark.acceptance
@pytest.mark.parametrize(
    ("killed", "whole"),
    [
        ("killed", "of 2"),
        ("killed adapter", "sharded adapter"),
        ("killed quantized", "sharded quantized"),
        ("killed offload", "of 2"),
    ],
)
def test_killed_sharded_run_resumes_byte_identical(killed, whole, runs):
    """On a CPU, offloading changes no byte either."""
    assert runs.outcomes[killed].codes[1] == -signal.SIGKILL
    runs.outcomes[f"{killed} again"].check()
    assert weights(runs[killed]) == weights(runs[whole])


@pytest.mark.acceptance
@pytest.mark.parametrize(
    ("name", "folder"),
    [("2 to 4", "to 4"), ("fsdp to none", "to none"), ("none to fsdp", "to fsdp")],
)
def test_run_resumes_with_other_sharding(name, folder, runs):
    runs.outcomes[name].check()
    assert_equal_runs(runs, "whole", folder)


@pytest.mark.acceptance
def test_sharded_bf16_is_near_fp32(runs):
    runs.outcomes["half"].check()
    losses = [[line["loss"] for line in runs.lines(name)] for name in ("half", "of 2")]
    assert losses[0] == pytest.approx(losses[1], rel=0.05)
    assert losses[0] != losses[1]
    saved = load_file(runs["half"] / "model/query_encoder/model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}


def assert_equal_runs(runs: Runs, whole: str, name: str) -> None:
    """The runs have the same losses, metrics and weights, except for rounding."""
    lines = list(zip(runs.lines(whole), runs.lines(name), strict=True))
    assert len(lines) == 6
    for left, right in lines:
        for key in ("loss", "query_grad_norm", "passage_grad_norm", "grad_norm"):
            assert right[key] == (left[key] and pytest.approx(left[key], rel=1e-4))
        assert (right["bank_fill"], right["masked"]) == (left["bank_fill"], left["masked"])
        assert right.keys() == left.keys()  # the drift is measured too
    metrics = [read_json(runs[run] / "dev_metrics.json")["mean"] for run in (whole, name)]
    assert metrics[1] == pytest.approx(metrics[0], abs=1e-4)
    files = list((runs[whole] / "model").rglob("*.safetensors"))
    assert files
    for file in files:
        one, other = load_file(file), load_file(runs[name] / file.relative_to(runs[whole]))
        assert one.keys() == other.keys()
        for key in one:
            torch.testing.assert_close(other[key], one[key], atol=1e-4, rtol=0)


# without processes


@pytest.mark.parametrize("family", FAMILIES)
def test_units_are_the_layers_and_gathered_weights_are_those_that_transformers_saves(
    family, tmp_path, monkeypatch
):
    encoder = DualEncoder.load(family_folder(family, tmp_path / family, positions=512))
    tower = encoder.query_tower
    assert len(tower.units()) == 1 + tower.backbone.config.num_hidden_layers
    encoder.save(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    monkeypatch.setattr("contaccum.encoder.saving.is_sharded", lambda _: True)
    encoder.save(tmp_path / "gathered")
    written = load_file(tmp_path / "gathered" / "model.safetensors")
    assert saved.keys() == written.keys()
    assert all(torch.equal(saved[name], written[name]) for name in saved)


@pytest.mark.parametrize(
    ("changes", "world", "words"),
    [
        (
            {},
            1,
            "run.sharding is fsdp, but there is only one process; start several processes with "
            "torchrun",
        ),
        (
            {"run.precision": "fp16"},
            2,
            "run.precision is fp16, but run.sharding is fsdp, which needs fp32 or bf16",
        ),
        (
            {"optim.name": "adamw_8bit"},
            2,
            "optim.name is adamw_8bit, but run.sharding is fsdp, which needs adamw",
        ),
    ],
)
def test_settings_that_cannot_be_sharded_are_refused(changes, world, words):
    config = train_config(Path("data"), Path("run"), **{"run.sharding": "fsdp", **changes})
    with pytest.raises(InputError, match=words):
        validate(config, world)


def test_one_process_is_refused_before_anything_is_written(tmp_path):
    data = write_beir(tmp_path / "data")
    with pytest.raises(InputError, match="there is only one process"):
        train(train_config(data, tmp_path / "run", **{"run.sharding": "fsdp"}))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["FSDP", "DEEPSPEED"])
def test_launches_for_other_sharding_are_refused_with_the_setting_to_use(name, monkeypatch):
    monkeypatch.setenv(f"ACCELERATE_USE_{name}", "true")
    with pytest.raises(InputError, match=r"Set run\.sharding"):
        refuse_ignored_launch("fp32")

"""Whole commands with run.sharding fsdp, and commands with the model of a sharded run (gloo on the
CPU)."""

import json
from pathlib import Path

import pytest
from helpers import write_beir
from invented_set import write_invented_set
from processes import Job, run_jobs

import contaccum
from contaccum.runtime.files import read_json

pytestmark = pytest.mark.acceptance
PACKAGE = Path(contaccum.__file__).parent
FINETUNE = [
    "--config", str(PACKAGE / "configs" / "finetune.yaml"), "--model.name", "tiny",
    "--model.dropout", "0", "--optim.epochs", "0.25", "--run.device", "cpu",
]  # fmt: skip
FSDP = ["--run.sharding", "fsdp"]
PROCESSES = (1, 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Outputs of all jobs."""
    folder = tmp_path_factory.mktemp("commands")
    data = str(write_beir(folder / "data"))
    invented = str(write_invented_set(folder / "invented"))
    finetune = [*FINETUNE, "--data.train", invented, "--data.dev", invented]

    def command(name: str, output: str, *options: str) -> list[str]:
        return [
            name,
            *options,
            "--output_dir" if name == "train" else "--output",
            str(folder / output),
        ]

    jobs = {
        "train": Job(command("train", "whole", *finetune)),
        "train sharded": Job(command("train", "sharded", *finetune, *FSDP), 2),
        "train slower": Job(
            command("train", "slower", *finetune, "--optim.learning_rate", "4.0e-5")
        ),
    }
    for name, processes in (("whole", 1), ("sharded", 2), ("slower", 1)):
        evaluated = ["--model", str(folder / name / "model"), "--data", invented, "--device", "cpu"]
        jobs[f"evaluate {name}"] = Job(command("evaluate", f"{name}.json", *evaluated), processes)
    for processes in PROCESSES:
        model = ["--model", str(folder / "sharded" / "model"), "--device", "cpu"]
        encoded = command(
            "encode", f"vectors{processes}", *model, "--input", data, "--shard_size", "10"
        )
        jobs[f"encode {processes}"] = Job(encoded, processes)
        mining = [
            "--data", data, "--num_negatives", "3", "--embeddings", str(folder / f"own{processes}"),
        ]  # fmt: skip
        mined = command("mine", f"mined{processes}.jsonl", *model, *mining)
        jobs[f"mine {processes}"] = Job(mined, processes)
    for outcome in run_jobs(jobs, folder / "jobs").values():
        outcome.check()
    return folder


def largest_difference(one: dict[str, float], other: dict[str, float]) -> float:
    assert one.keys() == other.keys()
    return max(abs(one[name] - other[name]) for name in one)


def test_finetuning_with_fsdp_gives_the_metrics_of_one_process(folder):
    """configs/finetune.yaml, from data to metrics. The control has another learning rate."""
    for file in ("{}.json", "{}/dev_metrics.json"):
        whole, sharded, slower = (
            read_json(folder / file.format(name))["mean"] for name in ("whole", "sharded", "slower")
        )
        assert whole["ndcg@10"] > 0
        assert largest_difference(whole, sharded) <= 1e-4 < largest_difference(whole, slower)


def test_several_processes_encode_with_the_model_of_a_sharded_run(folder):
    one, two = (sorted((folder / f"vectors{processes}").rglob("*.npy")) for processes in PROCESSES)
    assert len(one) > 2
    assert [path.read_bytes() for path in one] == [path.read_bytes() for path in two]


def test_several_processes_mine_with_the_model_of_a_sharded_run(folder):
    one, two = ((folder / f"mined{processes}.jsonl").read_bytes() for processes in PROCESSES)
    assert one == two
    assert all(json.loads(line)["neg"] for line in one.splitlines())

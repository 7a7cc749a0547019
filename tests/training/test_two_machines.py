"""Two torchrun launchers, each with its own cache, simulate two machines."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import train_config, write_beir
from safetensors.torch import load_file

from contaccum.config import to_yaml
from contaccum.runtime.files import read_json
from contaccum.training.loop import train

HERE = Path(__file__).parent.parent
PORTS = iter(range(29641, 29660))

pytestmark = pytest.mark.acceptance


def start(machine: int, port: int, folder: Path, *call: str) -> subprocess.Popen:
    place = ["--nnodes", "2", "--node_rank", str(machine), "--nproc_per_node", "2"]
    address = ["--master_addr", "127.0.0.1", "--master_port", str(port)]
    paths = os.pathsep.join([str(HERE.parent), str(HERE)])
    environment = {
        **os.environ,
        "PYTHONPATH": paths,
        "CONTACCUM_CACHE": str(folder / f"cache{machine}"),
    }
    launcher = [sys.executable, "-m", "torch.distributed.run", *place, *address]
    with (folder / f"err{machine}").open("w") as said:
        return subprocess.Popen(
            [*launcher, *call], env=environment, stdout=subprocess.DEVNULL, stderr=said
        )


def config_file(folder: Path, name: str, micro_batch_size: int, **changes) -> Path:
    changes = {"model.dropout": 0.0, "data.dev": str(folder / "data"), **changes}
    config = train_config(
        folder / "data", folder / name, **{"batch.micro_batch_size": micro_batch_size, **changes}
    )
    file = folder / f"{name}.yaml"
    file.write_text(to_yaml(config))
    return file


def test_two_machines_equal_one_process(tmp_path):
    write_beir(tmp_path / "data", 41)
    file, port = config_file(tmp_path, "two", 1), next(PORTS)
    machines = [
        start(m, port, tmp_path, "-m", "contaccum", "train", "--config", str(file)) for m in (0, 1)
    ]
    assert [machine.wait(200) for machine in machines] == [0, 0], (tmp_path / "err0").read_text()
    whole = {"model.dropout": 0.0, "data.dev": str(tmp_path / "data"), "batch.micro_batch_size": 4}
    train(train_config(tmp_path / "data", tmp_path / "one", **whole))
    one, two = (
        load_file(tmp_path / run / "model/query_encoder/model.safetensors")
        for run in ("one", "two")
    )
    for name in one:
        torch.testing.assert_close(two[name], one[name], atol=1e-4, rtol=0)
    one, two = (read_json(tmp_path / run / "dev_metrics.json")["mean"] for run in ("one", "two"))
    assert two == pytest.approx(one, abs=1e-6)
    names = [
        sorted(path.name for path in (tmp_path / cache).glob("*/*"))
        for cache in ("cache0", "cache1")
    ]
    assert names[0] == names[1] != []

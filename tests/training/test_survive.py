"""Signals, full and read-only disks, two runs in one folder, changed inputs: real processes, real
file systems."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from helpers import train_config, weights
from processes import python, read_only, small_disk

from contaccum.cli import main
from contaccum.config import to_yaml
from contaccum.errors import InputError
from contaccum.runtime.locks import LOCK_FILE
from contaccum.training.log import read_log
from contaccum.training.loop import train
from contaccum.training.run_folder import newest_checkpoint


def start(config, tmp_path: Path, *more: str, before: str = "") -> subprocess.Popen:
    """Start ``contaccum train`` in a process that first runs the Python code ``before``."""
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(config))
    script = f"import sys; from contaccum.cli import main\n{before}\nsys.exit(main(sys.argv[1:]))"
    call = [python(), "-c", script, "train", "--config", str(file), *more]
    return subprocess.Popen(call, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)


def wait_until(condition, process: subprocess.Popen) -> None:
    while not condition():
        assert process.poll() is None, "it ended before it could be stopped"
        time.sleep(0.005)


# signals


@pytest.mark.parametrize(
    ("number", "code", "name"),
    [
        (signal.SIGTERM, 143, "SIGTERM"),
        pytest.param(signal.SIGINT, 130, "SIGINT", marks=pytest.mark.acceptance),
    ],
)
def test_signal_during_setup_leaves_no_files(number, code, name, data, tmp_path):
    """Before the first step there is nothing to save, and the run's folder is removed."""
    pause = (
        "import time; from contaccum.training import parts; parts.build_encoder = lambda *_: "
        "time.sleep(1000)"
    )
    process = start(train_config(data, tmp_path / "run"), tmp_path, before=pause)
    wait_until((tmp_path / "run" / LOCK_FILE).exists, process)
    time.sleep(0.2)
    process.send_signal(number)
    _, said = process.communicate()
    assert process.returncode == code
    assert said.splitlines()[-1] == f"contaccum: stopped by {name}"
    assert "Traceback" not in said
    assert not (tmp_path / "run").exists()


@pytest.mark.acceptance
def test_second_signal_ends_the_run_at_once(data, tmp_path):
    """The step never ends, so the first signal has no effect; the next run takes over the stale
    lock."""
    run = tmp_path / "run"
    endless = (
        "import time; from contaccum.training.loop import Training; take = Training.take_step\n"
        "def fourth_never_ends(self, batches):\n"
        "    while self.done == 3:\n"
        # a signal just before a sleep is seen only after it
        "        time.sleep(0.1)\n"
        "    return take(self, batches)\n"
        "Training.take_step = fourth_never_ends\n"
    )
    process = start(train_config(data, run), tmp_path, before=endless)
    wait_until(lambda: len(read_log(run)) == 3, process)
    process.send_signal(signal.SIGTERM)
    assert any("again to stop at once" in line for line in iter(process.stderr.readline, ""))
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate()
    assert said == "contaccum: stopped at once by a second signal\n"
    assert process.returncode == 143
    assert newest_checkpoint(run).state["step"] == 2
    assert (run / LOCK_FILE).exists()
    train(train_config(data, run, resume=True))
    assert [line["step"] for line in read_log(run)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.acceptance
def test_encode_stops_on_sigterm(data, tmp_path):
    model = train(train_config(data, tmp_path / "run", **{"optim.max_steps": 1}))
    script = (
        "import sys, time; from contaccum import cli; from contaccum.retrieval import encode\n"
        "plain = encode.encode_shard\n"
        "def third_takes_long(encoder, texts, start, *rest):\n"
        "    while start == 20:\n"
        "        time.sleep(0.1)\n"
        "    return plain(encoder, texts, start, *rest)\n"
        "encode.encode_shard = third_takes_long\n"
        "sys.exit(cli.main(sys.argv[1:]))"
    )
    options = (
        "--model", model, "--input", data, "--output", tmp_path / "vectors", "--shard_size", "10",
    )  # fmt: skip
    call = [python(), "-c", script, "encode", *map(str, options)]
    process = subprocess.Popen(call, stderr=subprocess.PIPE, text=True)
    wait_until((tmp_path / "vectors" / "00001.shard.json").exists, process)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate()
    assert (process.returncode, said.splitlines()[-1]) == (143, "contaccum: stopped by SIGTERM")
    assert not (tmp_path / "vectors" / LOCK_FILE).exists()


# two runs in one folder


def test_second_run_in_the_same_folder_is_refused(data, tmp_path):
    run = tmp_path / "run"
    before = f"import os; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))"
    process = start(train_config(data, run, **{"optim.max_steps": 4000}), tmp_path, before=before)
    wait_until(lambda: len(read_log(run)) > 1, process)
    pid = (tmp_path / "pid").read_text()
    with pytest.raises(InputError, match=f"{LOCK_FILE}: process {pid} on host "):
        train(train_config(data, run, resume=True, **{"optim.max_steps": 4000}))
    assert len(read_log(run)) > 1
    process.kill()
    process.communicate()


def test_resumed_run_removes_temporary_files_of_a_killed_one(data, tmp_path):
    run = tmp_path / "run"
    train(train_config(data, run))
    before = weights(run)
    (run / "model").rename(run / ".model.01234567-1.old")
    (run / "checkpoints" / ".step-00000008.01234567-1.part" / "model").mkdir(parents=True)
    (run / ".config.yaml.01234567-1.part").write_text("meth")
    train(train_config(data, run, resume=True))
    assert weights(run) == before
    assert {path.name for path in run.iterdir()} == {
        "config.yaml",
        "environment.json",
        "log.jsonl",
        "checkpoints",
        "model",
    }
    assert all(path.name.startswith("step-") for path in (run / "checkpoints").iterdir())


# changes since the run started


def test_allow_changes_prints_and_accepts_changes(data, tmp_path, capsys):
    run = tmp_path / "run"
    train(train_config(data, run, **{"optim.max_steps": 2}))
    with (data / "qrels" / "train.tsv").open("a") as file:
        file.write("q0\tp9\t1\n")
    changes = {"optim.max_steps": 4, "optim.learning_rate": 1e-4}
    with pytest.raises(
        InputError,
        match=r"optim\.learning_rate was 0\.001 and is 0\.0001; optim\.max_steps was 2 and is 4",
    ):
        train(train_config(data, run, resume=True, **changes))
    capsys.readouterr()
    with pytest.warns(UserWarning, match="the bank starts empty, because the data changed"):
        train(train_config(data, run, resume=True, allow_changes=True, **changes))
    said = capsys.readouterr().err
    assert (
        "(allowed): optim.learning_rate was 0.001 and is 0.0001; optim.max_steps was 2 and is 4"
        in said
    )
    assert "step-00000002: the conditions of training changed (allowed): data was " in said
    assert [line["step"] for line in read_log(run)] == [1, 2, 3, 4]


def test_changed_encoder_folder_is_refused(data, tmp_path):
    model = train(train_config(data, tmp_path / "first", **{"optim.max_steps": 1}))
    base = tmp_path / "base"
    shutil.copytree(model / "query_encoder", base)
    changes = {"model.name": str(base), "optim.max_steps": 2, "model.passage_name": None}
    run = tmp_path / "run"
    train(train_config(data, run, **changes))
    for folder in (
        base,
        run / "checkpoints" / "step-00000002",
    ):  # files of the Hub's downloads and of macOS
        (folder / ".cache").mkdir()
        for name in (".DS_Store", ".cache/CACHEDIR.TAG"):
            (folder / name).write_text("hidden")
    assert newest_checkpoint(run).folder.name == "step-00000002"
    train(train_config(data, run, resume=True, **changes))
    shutil.rmtree(base)  # the weights are in the checkpoint, so the folder is no longer needed
    train(train_config(data, run, resume=True, **changes))


# disks


def sentences(said: str) -> list[str]:
    return [
        line
        for line in said.splitlines()
        if line.startswith("contaccum: ")
        and "warning" not in line
        and "find the vectors in the cache" not in line
    ]


def calls_on(disk: Path, data: Path, model: Path) -> dict[str, list[object]]:
    """Return a call of each command that writes, with its output on ``disk``."""
    return {
        "encode": ["encode", "--model", model, "--input", data, "--output", disk / "vectors"],
        "search": [
            "search", "--model", model, "--data", data, "--output", disk / "runs" / "a.trec",
        ],
        "evaluate": [
            "evaluate", "--model", model, "--data", data, "--output", disk / "metrics.json",
        ],
        "convert": ["data", "convert", data, disk / "all.jsonl", "--to", "jsonl"],
        "convert to a folder": ["data", "convert", data, disk / "beir", "--to", "beir"],
    }  # fmt: skip


@pytest.mark.filterwarnings("default:.* also occur in the training data")
@pytest.mark.parametrize("kind", ["full", "read-only"])
def test_every_writer_reports_a_refusing_disk_in_one_sentence(kind, data, tmp_path, capsys):
    model = train(train_config(data, tmp_path / "run", **{"optim.max_steps": 1}))
    with (small_disk if kind == "full" else read_only)(tmp_path / "disk") as disk:
        if kind == "full":
            fill(disk)
        before = sorted(disk.rglob("*"))
        config = tmp_path / "config.yaml"
        config.write_text(to_yaml(train_config(data, disk / "run")))
        calls = {"train": ["train", "--config", config], **calls_on(disk, data, model)}
        for verb, call in calls.items():
            capsys.readouterr()
            assert main([str(each) for each in call]) == 2, verb
            said = sentences(capsys.readouterr().err)
            assert len(said) == 1, (verb, said)
            assert str(disk) in said[0], (verb, said)
            expected = "No space left on device" if kind == "full" else "Read-only file system"
            # numpy's message
            assert expected in said[0] or "requested and" in said[0], (
                verb,
                said,
            )
            assert sorted(disk.rglob("*")) == before, verb


def fill(disk: Path, leave: int = 0) -> None:
    """Fill a disk up to ``leave`` free bytes."""
    free = os.statvfs(disk)
    with (disk / "filler").open("wb") as file:
        file.write(b"\0" * (free.f_bavail * free.f_frsize - leave))


def test_full_disk_keeps_the_previous_checkpoint(data, tmp_path):
    """The disk has room for the checkpoints of steps 1 and 2, not for that of step 3."""
    config = train_config(data, tmp_path / "measure", **{"optim.max_steps": 1})
    train(config)
    size = sum(
        path.stat().st_size
        for path in (tmp_path / "measure" / "checkpoints").rglob("*")
        if path.is_file()
    )
    changes = {"run.save_steps": 1}
    train(train_config(data, tmp_path / "whole", **changes))
    with small_disk(tmp_path / "disk", int(3.4 * size) // 4096 * 4096) as disk:
        with pytest.raises(
            InputError, match=r"step-00000003: cannot be written \(.*No space left on device"
        ):
            train(train_config(data, disk / "run", **changes))
        assert newest_checkpoint(disk / "run").state["step"] == 2
        assert not [path for path in (disk / "run").rglob("*") if path.name.startswith(".")]
        shutil.copytree(disk / "run", tmp_path / "moved")
    train(train_config(data, tmp_path / "moved", resume=True, **changes))
    assert weights(tmp_path / "moved") == weights(tmp_path / "whole")

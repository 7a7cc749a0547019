"""`contaccum rounds`: equality with the single commands, kills in each stage, and refused options."""

import json
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from helpers import train_config, weights, write_beir
from launched import Job, run_jobs

from contaccum import mine, train
from contaccum.cli import main
from contaccum.config import to_yaml
from contaccum.config.commands import EncoderConfig, MineConfig
from contaccum.config.experiments import RoundsConfig
from contaccum.errors import InputError
from contaccum.experiments import rounds
from contaccum.experiments.rounds import run_rounds
from contaccum.training.log import read_log

CHANGES = {"data.hard_negatives": 1, "optim.max_steps": 6}
MINING = MineConfig(num_negatives=4, range_max=20, range_min=1, sampling_strategy="random", block_size=16)


def write_config(path: Path, config, **rounds) -> Path:
    values = {
        key: value for key, value in yaml.safe_load(to_yaml(config)).items() if key not in ("resume", "allow_changes")
    }
    path.write_text(yaml.safe_dump({**values, "rounds": rounds, "mine": vars(MINING)}))
    return path


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_beir(tmp_path_factory.mktemp("rounds") / "data")


@pytest.fixture(scope="module")
def whole(data):
    """Two uninterrupted rounds."""
    folder = data.parent / "whole"
    options = RoundsConfig(2, "bm25", "base")
    model = run_rounds(train_config(data, folder, **CHANGES), MINING, options)
    assert model == folder / "round-2" / "model"
    return folder


def test_rounds_equal_the_single_commands(data, whole, tmp_path):
    trained_on = [str(data), *(str(whole / f"mined-{number}.jsonl") for number in range(3))]
    for number in range(3):
        model = "bm25" if number == 0 else str(whole / f"round-{number - 1}" / "model")
        mined = tmp_path / f"{number}.jsonl"
        mine(EncoderConfig(model, device="cpu"), str(data), str(mined), mining=MINING)
        found, expected = lines_of(mined), lines_of(whole / f"mined-{number}.jsonl")
        assert [row["neg_id"] for row in found] == [row["neg_id"] for row in expected]
        assert sum(len(row["neg"]) for row in found) > 80
        run = tmp_path / f"run-{number}"
        train(train_config(Path(trained_on[number + 1]), run, **CHANGES))
        assert weights(run) == weights(whole / f"round-{number}")
    assert lines_of(tmp_path / "1.jsonl") != lines_of(tmp_path / "2.jsonl")
    assert weights(whole / "round-1") != weights(whole / "round-2")
    assert not list(whole.glob("vectors-*"))
    assert not list(whole.glob("*.mining"))


@pytest.mark.acceptance
def test_killed_rounds_end_with_the_same_bytes(data, whole, tmp_path, capsys):
    """Each kill hits another stage; finished stages are not repeated."""
    folder = tmp_path / "killed"
    config = write_config(tmp_path / "rounds.yaml", train_config(data, folder, **CHANGES), count=2, first="bm25")
    call = [sys.executable, "-m", "contaccum", "rounds", "--config", str(config)]
    for sign in (
        "mined-0.jsonl.mining/00000.json",
        "round-0/checkpoints/step-00000002",
        "mined-1.jsonl.mining/job.json",
    ):
        process = subprocess.Popen(call, stderr=subprocess.PIPE, text=True)
        while not (folder / sign).exists():
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    done = {path: path.stat().st_mtime_ns for path in [*folder.glob("mined-0.*"), *folder.glob("round-0/model/**/*")]}
    assert len(done) > 5
    assert main(call[3:]) == 0
    assert capsys.readouterr().out == f"{folder / 'round-2' / 'model'}\n"
    assert {path: path.stat().st_mtime_ns for path in done} == done
    for number in range(3):
        assert weights(folder / f"round-{number}") == weights(whole / f"round-{number}")
        assert (folder / f"mined-{number}.jsonl").read_bytes() == (whole / f"mined-{number}.jsonl").read_bytes()


@pytest.mark.acceptance
def test_two_processes_equal_one(data, tmp_path):
    """Mined negatives are identical; losses and weights are equal to rounding."""
    jobs = {}
    for world in (1, 2):
        changes = {**CHANGES, "model.dropout": 0.0, "batch.micro_batch_size": 4 // world}
        config = train_config(data, tmp_path / f"of {world}", **changes)
        path = write_config(tmp_path / f"{world}.yaml", config, count=1, first="bm25")
        jobs[f"of {world}"] = Job(["rounds", "--config", str(path)], world)
    for outcome in run_jobs(jobs, tmp_path / "jobs").values():
        outcome.check()
    for number in range(2):
        mined = [lines_of(tmp_path / name / f"mined-{number}.jsonl") for name in jobs]
        assert [row["neg_id"] for row in mined[0]] == [row["neg_id"] for row in mined[1]]
        losses = [[line["loss"] for line in read_log(tmp_path / name / f"round-{number}")] for name in jobs]
        assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    assert mined[0] != lines_of(tmp_path / "of 1" / "mined-0.jsonl")


def test_rounds_can_start_from_the_previous_model_and_the_data_s_negatives(data, tmp_path):
    config = train_config(data, tmp_path / "rounds", **CHANGES)
    options = RoundsConfig(1, "data", "previous")
    run_rounds(config, MINING, options)
    first = tmp_path / "rounds" / "round-0"
    train(train_config(data, tmp_path / "first", **CHANGES))
    assert weights(tmp_path / "first") == weights(first)
    changes = {**CHANGES, "model.name": str(first / "model")}
    train(train_config(tmp_path / "rounds" / "mined-1.jsonl", tmp_path / "second", **changes))
    assert weights(tmp_path / "second") == weights(tmp_path / "rounds" / "round-1")
    again = {path: path.stat().st_mtime_ns for path in (tmp_path / "rounds").glob("round-0/model/*/*")}
    run_rounds(config, MINING, replace(options, count=2))  # more rounds may follow
    assert (tmp_path / "rounds" / "round-2" / "model").is_dir()
    assert {path: path.stat().st_mtime_ns for path in again} == again


@pytest.mark.parametrize(("file", "kind"), [("corpus.jsonl", "train"), ("qrels/dev.tsv", "dev")])
def test_rounds_do_not_continue_on_changed_data(file, kind, data, tmp_path, monkeypatch):
    folder = shutil.copytree(data, tmp_path / "data")
    config = train_config(folder, tmp_path / "rounds", **CHANGES, **{"data.dev": str(folder)})
    monkeypatch.setattr(rounds._Rounds, "mine", lambda self, number: None)
    monkeypatch.setattr(rounds._Rounds, "train", lambda self, number: None)
    for count in (1, 2):
        run_rounds(config, MINING, RoundsConfig(count, "data"))
    *lines, last = (folder / file).read_text().splitlines()
    (folder / file).write_text(
        "\n".join([*lines, last.replace("valley", "city").replace("\t1", "\t2").replace("\t0", "\t1")])
    )
    with pytest.raises(InputError, match=f"the {kind} data changed since then"):
        run_rounds(config, MINING, RoundsConfig(2, "data"))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--data.hard_negatives", "0"], "data.hard_negatives is 0, so training would ignore"),
        (["--data.hard_negatives", "5"], "mine.num_negatives is 4; it must be at least data.hard_negatives (5)"),
        (
            ["--lora.rank", "2", "--model.name", "base", "--rounds.start", "previous"],
            "rounds.start is 'previous', but lora.rank is above 0",
        ),
        (["--loss.distillation", "kl"], "loss.distillation is kl, so mine.cross_encoder must be set"),
        (["--rounds.count", "0"], "rounds.count is 0, expected at least 1"),
        (["--mine.relative_margin", "7"], "mine.relative_margin is 7.0"),
        (["--output_dir", "{data}"], "contains files that `contaccum rounds` did not write. Use a new or empty folder"),
        (["--output_dir", "{whole}", "--mine.range_max", "30"], "call with other settings (mine.range_max was 20 and is 30)"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:model.tiny_:UserWarning")
def test_wrong_options_are_refused_in_one_sentence(options, sentence, data, whole, tmp_path, capsys):
    folder = tmp_path / "rounds"
    config = write_config(tmp_path / "rounds.yaml", train_config(data, folder, **CHANGES), count=2, first="bm25")
    before = sorted(whole.parent.rglob("*"))
    values = [option.format(data=data, whole=whole) for option in options]
    assert main(["rounds", "--config", str(config), *values]) == 2
    err = capsys.readouterr().err
    assert sentence in err
    assert err.count("contaccum: ") - err.count("contaccum: warning: ") == 1
    assert sorted(whole.parent.rglob("*")) == before
    assert not folder.exists()

"""Folder of a run: files of other versions, a start without resume, changed dev data."""

import json
import math
import shutil
from pathlib import Path

import pytest
from helpers import train_config, weights, write_beir

from contaccum.cli import main
from contaccum.config import TrainConfig
from contaccum.errors import InputError
from contaccum.experiments.report import console_report
from contaccum.runtime.files import sha256_of
from contaccum.training.log import read_log
from contaccum.training.loop import train
from contaccum.training.messages import next_steps

CHANGES = {
    "optim.max_steps": 4,
    "run.save_steps": 1,
    "run.eval_steps": 0,
    "run.keep_checkpoints": 2,
}


@pytest.fixture(scope="module")
def scene(tmp_path_factory):
    """Data, a run with a dev set that took 4 steps, and the bytes of its weights."""
    folder = tmp_path_factory.mktemp("scene")
    data = write_beir(folder / "data")
    train(train_config(data, folder / "whole", **CHANGES, **{"data.dev": str(data)}))
    return data, folder / "whole", weights(folder / "whole")


def interrupted(scene, run: Path) -> Path:
    """Copy the run as it was after step 3."""
    shutil.copytree(scene[1], run)
    shutil.rmtree(run / "model")
    shutil.rmtree(run / "checkpoints" / "step-00000004")
    return run


def resume(scene, run: Path, **changes) -> None:
    train(
        train_config(
            scene[0], run, resume=True, **{**CHANGES, "data.dev": str(scene[0]), **changes}
        )
    )


def edit_state(checkpoint: Path, change) -> None:
    """Change state.json and its entry in the manifest, as another version of contaccum would have
    written them."""
    state, manifest = (
        json.loads((checkpoint / name).read_text()) for name in ("state.json", "manifest.json")
    )
    change(state)
    path = checkpoint / "state.json"
    path.write_text(json.dumps(state))
    manifest["state.json"] = sha256_of(path)
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


# versions


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format_version": 99}, "format_version 99"), ({"format_version": 0}, "format_version 0"),
    ],
)  # fmt: skip
def test_state_of_another_version_is_refused(change, said, scene, tmp_path):
    run = interrupted(scene, tmp_path / "run")
    edit_state(run / "checkpoints" / "step-00000003", lambda state: state.update(change))
    with pytest.raises(InputError, match=said) as error:
        resume(scene, run)
    assert "step-00000003/state.json" in str(error.value)


def test_a_config_that_no_run_wrote_is_refused(scene, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("seed: 1\n")
    for call in (lambda: resume(scene, run), lambda: console_report([str(run)], "ndcg@10")):
        with pytest.raises(InputError, match=r"config\.yaml: has no method, so it is not the"):
            call()


@pytest.mark.parametrize("version", [2, None])
def test_config_of_another_version_is_refused(version, scene, tmp_path, capsys):
    run = interrupted(scene, tmp_path / "run")
    text = (run / "config.yaml").read_text()
    assert text.startswith("format_version: 1\n")
    (run / "config.yaml").write_text(
        text.replace("format_version: 1", f"format_version: {json.dumps(version)}")
    )
    with pytest.raises(InputError, match=r"config\.yaml: format_version is .*, expected 1"):
        resume(scene, run)
    assert (
        main(["train", "--config", str(run / "config.yaml"), "--output_dir", str(tmp_path / "new")])
        == 2
    )
    assert "config.yaml: format_version is " in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_log_of_another_version_is_refused(scene, tmp_path):
    run = interrupted(scene, tmp_path / "run")
    first, *lines = (run / "log.jsonl").read_text().splitlines()
    assert json.loads(first)["format_version"] == 1
    for version in (0, 2):
        (run / "log.jsonl").write_text(
            "\n".join([json.dumps({"format_version": version}), *lines]) + "\n"
        )
        with pytest.raises(InputError, match=rf"log\.jsonl: has format_version {version}"):
            read_log(run)


# starting again


def test_restart_without_resume_says_first_that_the_folder_holds_a_run(scene, tmp_path):
    """Before anything about the data, which may have moved since."""
    run = interrupted(scene, tmp_path / "run")
    moved = tmp_path / "moved data"
    with pytest.raises(InputError, match=r"run: contains a run\. Add --resume to continue it"):
        train(train_config(moved, run, **CHANGES, **{"data.dev": str(moved)}))


@pytest.mark.parametrize("file", ["qrels/dev.tsv", "corpus.jsonl"])
def test_edited_dev_data_are_refused_on_resume(file, scene, tmp_path):
    """The run trains on other files, so only the hash of the dev set can notice the edit."""
    data, dev = write_beir(tmp_path / "data"), write_beir(tmp_path / "dev")
    settings = {**CHANGES, "data.dev": str(dev)}
    run = tmp_path / "run"
    train(train_config(data, run, **settings))
    shutil.rmtree(run / "checkpoints" / "step-00000004")
    text = (dev / file).read_text()
    first, *rest = text.splitlines(keepends=True)
    (dev / file).write_text(
        "".join(
            [first, *rest[:-1]] if file.endswith("tsv") else [first.replace("fox", "dog"), *rest]
        )
    )
    with pytest.raises(
        InputError,
        match=r"conditions of training changed: split dev of .* was [\w-]+ and is [\w-]+",
    ):
        train(train_config(data, run, resume=True, **settings))
    (dev / file).write_text(text)
    train(train_config(data, run, resume=True, **settings))


def test_a_run_at_the_loss_of_guessing_says_so(tmp_path):
    """A mean of 7 negatives with equal logits: the loss is log 8."""
    config = TrainConfig(output_dir=str(tmp_path))
    # the last: hard negatives that are very similar to the positive
    for first, last, learned in ((1.0, math.log(8), False), (1.0, 1.0, True), (4.0, 3.0, True)):
        lines = [
            {"step": step, "loss": first if step < 6 else last, "negatives": 7.0}
            for step in range(1, 11)
        ]
        (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        said = next_steps(config, tmp_path / "model")
        assert any("learned nothing" in line for line in said) is not learned

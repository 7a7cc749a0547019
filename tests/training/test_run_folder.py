"""Folder of a run: files of other versions, symbolic links, strays, a folder that moves, changed
dev data."""

import json
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from helpers import train_config, weights, write_beir
from processes import python, small_disk

from contaccum.cli import main
from contaccum.config import to_yaml
from contaccum.errors import InputError
from contaccum.runtime.files import sha256_of
from contaccum.training.log import read_log
from contaccum.training.loop import train
from contaccum.training.run_folder import (
    LINKS,
    all_checkpoints,
    claimed_folder,
)

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
    manifest["state.json"] = {"size": path.stat().st_size, "sha256": sha256_of(path)}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


# versions


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format_version": 99}, "format_version 99"), ({"format_version": 0}, "format_version 0"),
        ({"bank": 5}, "got `int` - at `[$].bank`"),
    ],
)  # fmt: skip
def test_state_of_another_version_or_of_wrong_types_is_refused(change, said, scene, tmp_path):
    run = interrupted(scene, tmp_path / "run")
    edit_state(run / "checkpoints" / "step-00000003", lambda state: state.update(change))
    with pytest.raises(InputError, match=said) as error:
        resume(scene, run)
    assert "step-00000003/state.json" in str(error.value)


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
    assert "config.yaml:1: format_version is " in capsys.readouterr().err
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


# symbolic links


@pytest.mark.parametrize("linked", ["model", "output", "all"])
def test_folders_of_a_run_on_another_disk(linked, scene, tmp_path):
    """Start, stop, resume and prune through links; the links remain and the other disk has the
    files."""
    run = tmp_path / "run"
    with small_disk(tmp_path / "disk", 1 << 26) as disk:
        if linked == "output":
            (disk / "run").mkdir()
            run.symlink_to(disk / "run")
        else:
            run.mkdir()
            for name in LINKS if linked == "all" else (linked,):
                (disk / name).mkdir()
                (run / name).symlink_to(disk / name)
        settings = {**CHANGES, "data.dev": str(scene[0])}
        train(train_config(scene[0], run, **settings))
        shutil.rmtree(run / "checkpoints" / "step-00000004")
        train(train_config(scene[0], run, resume=True, **settings))
        assert weights(run) == scene[2]
        assert [folder.name for folder in all_checkpoints(run)] == [
            "step-00000004",
            "step-00000003",
        ]
        links = [path.name for path in (run, *run.iterdir()) if path.is_symlink()]
        assert sorted(links) == sorted(
            LINKS if linked == "all" else ["run" if linked == "output" else linked]
        )
        on_disk = {path.name for path in disk.rglob("*") if path.is_dir() and not path.is_symlink()}
        assert on_disk >= ({"query_encoder"} if linked == "model" else {"step-00000004"})
        assert not [*run.rglob(".*"), *disk.rglob(".*")]


def test_pruning_removes_links_but_never_their_targets(scene, tmp_path):
    """Step 3 was moved to another folder and linked back: it resumes from there, and pruning
    removes only the link."""
    run, archive = interrupted(scene, tmp_path / "run"), tmp_path / "archive"
    shutil.move(run / "checkpoints" / "step-00000003", archive)
    (run / "checkpoints" / "step-00000003").symlink_to(archive)
    before = {path: sha256_of(path) for path in archive.rglob("*") if path.is_file()}
    resume(scene, run, **{"run.keep_checkpoints": 1})
    assert weights(run) == scene[2]
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000004"]
    assert before
    assert {path: sha256_of(path) for path in archive.rglob("*") if path.is_file()} == before


def test_checkpoint_is_not_written_through_a_link_to_its_step(scene, tmp_path):
    """The link of step 4 leads to a folder with other files; the new checkpoint replaces the link
    only."""
    run, other = interrupted(scene, tmp_path / "run"), tmp_path / "other"
    other.mkdir()
    (other / "notes.txt").write_text("mine")
    (run / "checkpoints" / "step-00000004").symlink_to(other)
    resume(scene, run)
    assert not (run / "checkpoints" / "step-00000004").is_symlink()
    assert [path.name for path in other.iterdir()] == ["notes.txt"]


def test_strays_among_the_checkpoints_are_skipped_with_a_warning(scene, tmp_path, capsys):
    run = interrupted(scene, tmp_path / "run")
    folder = run / "checkpoints"
    (folder / "step-00000009").symlink_to(folder / "step-00000009")
    (folder / "step-00000008").symlink_to(tmp_path / "absent")
    (folder / "step-00000007").write_text("a file")
    (folder / "step-00000003-backup").mkdir()
    (folder / "step-best").mkdir()
    (folder / "notes.txt").write_text("mine")
    strays = {path.name for path in folder.iterdir()} - {"step-00000002", "step-00000003"}
    resume(scene, run, **{"run.keep_checkpoints": 1})
    said = capsys.readouterr().err
    for name in strays:
        assert f"checkpoints/{name}: ignored, because it is not the folder of a checkpoint" in said
    assert said.count("ignored") == len(strays) == 6
    assert {path.name for path in folder.iterdir()} == strays | {"step-00000004"}
    assert weights(run) == scene[2]


@pytest.mark.parametrize("name", [*LINKS, ""])
@pytest.mark.parametrize(("kind", "again"), [("absent", False), ("file", True)])
def test_links_without_a_folder_are_refused(name, kind, again, scene, tmp_path):
    run = interrupted(scene, tmp_path / "run") if again and name else tmp_path / "run"
    run.mkdir(exist_ok=True) if name else None
    link = run / name
    shutil.rmtree(link, ignore_errors=True)
    (tmp_path / "file").write_text("mine")
    link.symlink_to(tmp_path / kind)
    with pytest.raises(InputError, match=r"this link points to .*, where no folder exists"):
        train(train_config(scene[0], run, resume=again, **CHANGES, **{"data.dev": str(scene[0])}))
    assert (tmp_path / "file").read_text() == "mine"
    assert not (tmp_path / "absent").exists()


@pytest.mark.parametrize("again", [False, True], ids=["new", "resumed"])
def test_link_to_a_folder_with_other_files_is_refused(again, scene, tmp_path):
    """Saving the model would replace them."""
    run, other = tmp_path / "run", tmp_path / "other"
    interrupted(scene, run) if again else run.mkdir()
    other.mkdir()
    (other / "notes.txt").write_text("mine")
    (run / "model").symlink_to(other)
    with pytest.raises(InputError, match=r"model: this link points to .*other, which is not empty"):
        train(train_config(scene[0], run, resume=again, **CHANGES, **{"data.dev": str(scene[0])}))
    assert [path.name for path in other.iterdir()] == ["notes.txt"]


def test_a_folder_with_only_the_file_of_the_macos_finder_is_empty(tmp_path):
    (tmp_path / ".DS_Store").touch()
    with claimed_folder(train_config(tmp_path / "data", tmp_path)):
        (tmp_path / "notes.txt").touch()
    with (
        pytest.raises(InputError, match="not empty"),
        claimed_folder(train_config(tmp_path / "data", tmp_path)),
    ):
        pass


# a folder that moves


@pytest.mark.parametrize("act", ["deleted", "replaced"])
def test_run_ends_with_one_sentence_when_its_folder_moves(act, scene, tmp_path):
    run, file = tmp_path / "run", tmp_path / "config.yaml"
    file.write_text(
        to_yaml(train_config(scene[0], run, **{"optim.max_steps": 100_000, "run.save_steps": 0}))
    )
    call = [python(), "-m", "contaccum", "train", "--config", str(file)]
    process = subprocess.Popen(call, stderr=subprocess.PIPE, text=True)
    while len(read_log(run)) < 2:
        assert process.poll() is None
        time.sleep(0.01)
    if act == "deleted":
        shutil.rmtree(run)
    else:
        run.rename(tmp_path / "elsewhere")
    if act == "replaced":
        run.mkdir()
    _, said = process.communicate(timeout=60)
    assert process.returncode == 2
    assert [line for line in said.splitlines() if line.startswith("contaccum: ")] == [
        f"contaccum: {run}: this folder was renamed or deleted during the run. If it still exists, "
        "continue with --resume and its new name."
    ]
    assert "Traceback" not in said
    if act != "replaced":
        assert not run.exists()


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

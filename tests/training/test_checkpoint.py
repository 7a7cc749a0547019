"""A checkpoint is loaded only if every bit of every file is as written."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import train_config, write_beir

from contaccum.errors import InputError
from contaccum.runtime.files import (
    cache_folder,
    is_leftover,
    sweep,
    whole_file,
    whole_folder,
    write_text,
)
from contaccum.training.loop import train
from contaccum.training.run_folder import newest_checkpoint


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with two checkpoints."""
    folder = tmp_path_factory.mktemp("checkpoint")
    os.environ["CONTACCUM_CACHE"] = str(folder / "cache")
    data = write_beir(folder / "data")
    train(
        train_config(
            data,
            folder / "run",
            **{"optim.max_steps": 2, "run.save_steps": 1, "model.tiny_layers": 1},
        )
    )
    return folder / "run"


def files_of(checkpoint: Path) -> list[Path]:
    return sorted(path for path in checkpoint.rglob("*") if path.is_file())


def test_flipped_bit_in_any_file_falls_back_to_previous_checkpoint(run, capsys):
    """Flip bits of the first, the middle, the last and some other bytes of each file, including the
    manifest."""
    newest, before = (run / "checkpoints" / f"step-{step:08d}" for step in (2, 1))
    files = files_of(newest)
    assert {"manifest.json", "state.json", "bank.safetensors", "optimizer.safetensors"} <= {
        path.name for path in files
    }
    assert len(files) > 20
    assert newest_checkpoint(run).folder == newest
    for path in files:
        content = path.read_bytes()
        for number, place in enumerate(
            sorted({0, len(content) // 3, len(content) // 2, len(content) - 1})
        ):
            spoiled = bytearray(content)
            spoiled[place] ^= 1 << (number * 3 + place) % 8
            path.write_bytes(spoiled)
            assert newest_checkpoint(run).folder == before, (path, place)
            assert f"{newest}: this checkpoint is ignored: " in capsys.readouterr().err
        path.write_bytes(content)
    assert newest_checkpoint(run).folder == newest


@pytest.mark.acceptance
def test_any_changed_byte_of_the_manifest_is_detected(run):
    """Flip one bit of each byte, a different one from byte to byte."""
    newest = run / "checkpoints" / "step-00000002"
    path = newest / "manifest.json"
    content = path.read_bytes()
    for bit in range(0, 8 * len(content), 9):
        spoiled = bytearray(content)
        spoiled[bit // 8] ^= 1 << bit % 8
        path.write_bytes(spoiled)
        assert newest_checkpoint(run).folder != newest, bit
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "is damaged"),
        (lambda path: path.write_bytes(path.read_bytes() + b"\n"), "is damaged"),
        (lambda path: path.unlink(), "is missing"),
        (
            lambda path: path.with_name("more.json").write_text("{}"),
            "or manifest.json does not list",
        ),
        (lambda path: (path.unlink(), path.mkdir()), "is missing"),
    ],
    ids=["cut", "grown", "gone", "one too many", "a folder"],
)
@pytest.mark.parametrize("name", ["state.json", "model/query_encoder/model.safetensors"])
def test_missing_truncated_and_extra_files_are_detected(change, said, name, run, tmp_path, capsys):
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    change(copy / "checkpoints" / "step-00000002" / name)
    assert newest_checkpoint(copy).folder.name == "step-00000001"
    assert said in capsys.readouterr().err


def test_a_model_card_in_a_checkpoint_is_no_damage(run, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    newest = copy / "checkpoints" / "step-00000002"
    (newest / "model" / "README.md").write_text("a card")
    assert newest_checkpoint(copy).folder == newest


def test_nothing_is_deleted_if_all_checkpoints_are_damaged(run, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    for folder in (copy / "checkpoints").iterdir():
        (folder / "notes.txt").write_text("mine")
    before = files_of(copy)
    with pytest.raises(InputError, match="checkpoints: all checkpoints are damaged"):
        train(
            train_config(
                run.parent / "data",
                copy,
                resume=True,
                **{"optim.max_steps": 2, "run.save_steps": 1, "model.tiny_layers": 1},
            )
        )
    assert files_of(copy) == before


def test_checkpoint_with_unreadable_file_is_ignored(run, monkeypatch, capsys):
    plain = newest_checkpoint.__globals__["sha256_of"]

    def bad_sector(path):
        if "step-00000002" in str(path) and Path(path).name == "bank.safetensors":
            raise OSError(5, "Input/output error", str(path))
        return plain(path)

    monkeypatch.setitem(newest_checkpoint.__globals__, "sha256_of", bad_sector)
    assert newest_checkpoint(run).folder.name == "step-00000001"
    assert "Input/output error" in capsys.readouterr().err


# checkpoints rely on atomic folders


def gone_process() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_temporary_files_of_a_killed_run_are_removed(tmp_path):
    """Remove temporary files of killed processes of any host, restore a half-replaced folder, and
    keep all others."""
    pid = gone_process()
    (tmp_path / f".model.01234567-{pid}.part" / "inner").mkdir(parents=True)
    (tmp_path / f".log.jsonl.89abcdef-{pid}.part").write_text("half")
    (tmp_path / f".step-00000001.01234567-{pid}.gone").mkdir()
    (tmp_path / f".model.01234567-{pid}.old").mkdir()
    (tmp_path / f".model.01234567-{pid}.old" / "weights").write_text("the old ones")
    (tmp_path / "kept").mkdir()
    (tmp_path / f".kept.01234567-{pid}.old").mkdir()
    for mine in (".hidden", ".notes.part", "model.01234567-1.part"):
        (tmp_path / mine).write_text("mine")
    sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".hidden",
        ".notes.part",
        "kept",
        "model",
        "model.01234567-1.part",
    ]
    assert (tmp_path / "model" / "weights").read_text() == "the old ones"


def test_a_folder_of_a_process_that_was_killed_between_two_renames_gets_its_name_back(tmp_path):
    name = "model"
    (tmp_path / name).mkdir()
    (tmp_path / name / "a").write_text("old")
    killed = (
        "import os, sys; from contaccum.runtime.files import whole_folder; plain = os.replace\n"
        "os.replace = lambda old, new: (plain(old, new), os._exit(9))\n"
        "with whole_folder(sys.argv[1]): pass"
    )
    assert (
        subprocess.run([sys.executable, "-c", killed, tmp_path / name], check=False).returncode == 9
    )
    assert not (tmp_path / name).exists()
    sweep(tmp_path, name)
    assert [path.relative_to(tmp_path).as_posix() for path in sorted(tmp_path.rglob("*"))] == [
        name,
        f"{name}/a",
    ]


def test_the_next_call_removes_the_half_file_of_a_killed_one(tmp_path):
    """Also if the file is a link to another folder."""
    killed = (
        "import os, sys; from contaccum.runtime.files import write_text; os.replace = lambda *_: "
        "os._exit(9)\n"
        "write_text(sys.argv[1], 'half')"
    )
    (tmp_path / "disk").mkdir()
    (tmp_path / "link.trec").symlink_to("disk/run.trec")
    for name in ("run.trec", "link.trec"):
        assert (
            subprocess.run([sys.executable, "-c", killed, tmp_path / name], check=False).returncode
            == 9
        )
    assert sum(is_leftover(path.name) for path in tmp_path.rglob("*")) == 2
    for name in ("run.trec", "link.trec"):
        write_text(tmp_path / name, "whole")
    names = [path.relative_to(tmp_path).as_posix() for path in sorted(tmp_path.rglob("*"))]
    assert names == ["disk", "disk/run.trec", "link.trec", "run.trec"]


def test_a_file_is_not_replaced_by_a_folder(tmp_path):
    (tmp_path / "model").write_text("mine")
    refused = pytest.raises(
        InputError, match=r"model: cannot be written \(this is a file, not a folder\)"
    )
    with refused, whole_folder(tmp_path / "model") as part:
        (part / "a").write_text("new")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert (tmp_path / "model").read_text() == "mine"


def test_cache_folder_needs_a_home_folder_only_without_settings(monkeypatch, tmp_path):
    """In a container, a user can have an id without a name and without a home folder."""

    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setenv("CONTACCUM_CACHE", str(tmp_path / "a"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == tmp_path / "a"
    monkeypatch.delenv("CONTACCUM_CACHE")
    with pytest.raises(
        InputError, match=r"there is no home folder for the cache .*; set CONTACCUM_CACHE"
    ):
        cache_folder()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "contaccum"


def test_temporary_names_of_two_hosts_differ(tmp_path, monkeypatch):
    names = set()
    for host in ("one", "two"):
        monkeypatch.setattr("platform.node", lambda host=host: host)
        with whole_file(tmp_path / "file") as file:
            file.write(b"content")
            (part,) = (path.name for path in tmp_path.iterdir() if path.name.startswith("."))
        assert is_leftover(part)
        assert (tmp_path / "file").read_bytes() == b"content"
        names.add(part)
    assert len(names) == 2


def test_folder_files_are_flushed_once_before_the_rename(tmp_path, monkeypatch):
    """Flush the content, then its folders, then rename, then flush the parent folder, to survive a
    power failure."""
    flushed, plain_sync, plain_replace = [], os.fsync, os.replace

    def fsync(descriptor):
        flushed.append(("flush", Path(os.readlink(f"/proc/self/fd/{descriptor}")).name))
        plain_sync(descriptor)

    def replace(old, new):
        flushed.append(("rename", Path(new).name))
        plain_replace(old, new)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    with whole_folder(tmp_path / "outer") as outer:
        with whole_file(outer / "a") as file:
            file.write(b"1")
        with whole_folder(outer / "inner") as inner, whole_file(inner / "b") as file:
            file.write(b"2")
    part = outer.name
    assert flushed[:3] == [("rename", "a"), ("rename", "b"), ("rename", "inner")]
    assert sorted(flushed[3:5]) == [("flush", "a"), ("flush", "b")]
    assert flushed[5:] == [
        ("flush", "inner"),
        ("flush", part),
        ("rename", "outer"),
        ("flush", tmp_path.name),
    ]


def test_an_interrupt_between_two_renames_keeps_the_old_folder(monkeypatch, tmp_path):
    """Ctrl-C can arrive after the old folder was moved away and before the new one has its name."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "a").write_text("old")
    plain_replace = os.replace

    def replace(old, new):
        plain_replace(old, new)
        if Path(old).name == "model":
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(KeyboardInterrupt), whole_folder(tmp_path / "model") as part:
        (part / "a").write_text("new")
    assert [path.relative_to(tmp_path).as_posix() for path in sorted(tmp_path.rglob("*"))] == [
        "model",
        "model/a",
    ]
    assert (tmp_path / "model" / "a").read_text() == "old"

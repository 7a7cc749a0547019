"""File systems with fewer abilities than a local disk: no flock, no hard links, no flush of a
folder."""

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import train_config, weights, write_beir

from contaccum.config import to_yaml
from contaccum.training.loop import train

HERE = Path(__file__).parent
WRITE = (
    "import sys; from pathlib import Path; from contaccum.runtime.files import *\n"
    "from contaccum.runtime.locks import folder_lock\n"
    "with folder_lock(sys.argv[1]):\n"
    "    write_text(Path(sys.argv[1]) / 'a', 'whole')\n"
    "    with whole_folder(Path(sys.argv[1]) / 'b') as part: (part / 'c').write_text('whole')"
)


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    compiler = shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs Linux and a C compiler (cc), to refuse system calls")
    found = tmp_path_factory.mktemp("library") / "restricted.so"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-o", found, HERE / "restricted.c", "-ldl"],
        check=True,
    )
    return found


def python(library: Path, log: Path, error: int, *arguments: object) -> subprocess.CompletedProcess:
    environment = {
        **os.environ,
        "LD_PRELOAD": str(library),
        "REFUSED_LOG": str(log),
        "FSYNC_ERROR": str(error),
    }
    call = [sys.executable, *map(str, arguments)]
    return subprocess.run(call, env=environment, capture_output=True, text=True, check=False)


TRAIN_AND_RESUME = """
import os, sys
from contaccum.cli import main
run, first, *call = sys.argv[1:]
assert main(call) == 0
os.mkdir(first)
os.rename(f"{run}/model", f"{first}/model")
sys.exit(main([*call, "--resume"]))
"""


def test_training_works_on_a_restricted_file_system(library, tmp_path):
    """Start, stop, resume and prune; the cache is on the same file system."""
    data, log = write_beir(tmp_path / "data"), tmp_path / "refused"
    settings = {"run.keep_checkpoints": 1, "optim.max_steps": 3}
    train(train_config(data, tmp_path / "whole", **settings))
    (tmp_path / "config.yaml").write_text(to_yaml(train_config(data, tmp_path / "run", **settings)))
    call = ("train", "--config", tmp_path / "config.yaml")
    done = python(
        library,
        log,
        errno.EINVAL,
        "-c",
        TRAIN_AND_RESUME,
        tmp_path / "run",
        tmp_path / "first",
        *call,
    )
    assert done.returncode == 0, done.stderr
    assert weights(tmp_path / "first") == weights(tmp_path / "run") == weights(tmp_path / "whole")
    assert "fsync" in log.read_text().split()


@pytest.mark.parametrize("error", [errno.EINVAL, errno.EOPNOTSUPP])
def test_files_and_locks_do_not_need_a_flush_of_folders(error, library, tmp_path):
    done = python(library, tmp_path / "refused", error, "-c", WRITE, tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert (
        (tmp_path / "out" / "a").read_text()
        == (tmp_path / "out" / "b" / "c").read_text()
        == "whole"
    )
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["a", "b"]
    assert "fsync" in (tmp_path / "refused").read_text().split()


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
def test_a_disk_that_fails_is_not_taken_for_one_that_cannot_flush(error, library, tmp_path):
    """Negative control."""
    done = python(library, tmp_path / "refused", error, "-c", WRITE, tmp_path / "out")
    assert done.returncode == 1
    assert "InputError" in done.stderr
    assert os.strerror(error) in done.stderr

"""Locks: one process per folder, stale locks taken over, foreign locks refused."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from contaccum.config import TrainConfig
from contaccum.errors import InputError
from contaccum.runtime import locks as module
from contaccum.runtime.locks import LOCK_FILE, folder_lock, waiting_lock
from contaccum.training.run_folder import claimed_folder

HOLD = """
import sys, time
from contaccum.runtime.locks import folder_lock
with folder_lock(sys.argv[1]):
    print("held", flush=True)
    time.sleep(1000)
"""


@pytest.fixture
def holder(tmp_path):
    """A real process that holds the lock of ``tmp_path / "run"``."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def lines_of(folder) -> list[str]:
    """Process, host and start of the holder."""
    return (folder / LOCK_FILE).read_text().splitlines()


def test_a_second_process_is_refused_with_the_pid_and_host_of_the_first(holder, tmp_path):
    host = lines_of(tmp_path / "run")[1].replace("?", r"\?")
    said = f"process {holder.pid} on host {host} is using the folder of this lock file"
    with pytest.raises(InputError, match=said) as error, folder_lock(tmp_path / "run"):
        pass
    assert str(tmp_path / "run" / LOCK_FILE) in str(error.value)
    assert lines_of(tmp_path / "run")[0] == str(holder.pid)


def test_the_lock_of_a_killed_process_is_taken_over_with_a_note(holder, tmp_path, capsys):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with folder_lock(tmp_path / "run"):
        assert lines_of(tmp_path / "run")[0] == str(os.getpid())
    said = capsys.readouterr().err
    assert f"process {holder.pid} on host " in said
    assert "has ended; this process takes over its lock" in said
    assert not (tmp_path / "run").exists() or not list((tmp_path / "run").iterdir())


def test_a_reused_process_number_is_no_holder(holder, tmp_path, capsys):
    """The number is alive, but its process started at another time, or before the machine's last
    boot."""
    pid, host, _ = lines_of(tmp_path / "run")
    (tmp_path / "run" / LOCK_FILE).write_text(f"{pid}\n{host}\n1\n")
    with folder_lock(tmp_path / "run"):
        pass
    assert "this process takes over its lock" in capsys.readouterr().err


def test_the_lock_of_another_host_is_refused_and_the_file_to_delete_is_named(tmp_path):
    (tmp_path / LOCK_FILE).write_text("4\nnode7\n")
    said = (
        f"{LOCK_FILE}: process 4 on host node7 is using .* If that process has ended, delete the "
        "lock file"
    )
    with pytest.raises(InputError, match=said), folder_lock(tmp_path):
        pass
    (tmp_path / LOCK_FILE).unlink()
    with folder_lock(tmp_path):
        pass


@pytest.mark.parametrize("content", ["{", "\0\0\0"])
def test_a_lock_that_names_no_process_is_taken_over(content, tmp_path, capsys):
    """A power cut left half of it, or an earlier version wrote it."""
    (tmp_path / LOCK_FILE).write_text(content)
    with folder_lock(tmp_path):
        pass
    assert (
        "an unknown process has ended; this process takes over its lock" in capsys.readouterr().err
    )


def test_an_empty_lock_is_taken_over_after_a_wait(tmp_path, monkeypatch, capsys):
    """Its process was killed before it wrote its name."""
    monkeypatch.setattr(module, "_PATIENCE", 0.1)
    (tmp_path / LOCK_FILE).touch()
    with folder_lock(tmp_path):
        assert (tmp_path / LOCK_FILE).read_text()
    assert (
        "an unknown process has ended; this process takes over its lock" in capsys.readouterr().err
    )


def test_the_file_of_a_killed_takeover_is_no_foreign_file(tmp_path):
    """filelock writes it while it takes over a lock; a second kill at that moment leaves it."""
    (tmp_path / f"{LOCK_FILE}.break.123.0123456789abcdef").write_text("")
    config = TrainConfig(output_dir=str(tmp_path))
    with claimed_folder(config):
        assert (tmp_path / LOCK_FILE).is_file()
    (tmp_path / "notes.txt").write_text("mine")  # negative control
    with pytest.raises(InputError, match="not empty"), claimed_folder(config):
        pass


def test_one_of_many_threads_gets_a_free_or_stale_lock(tmp_path):
    """Every round starts with a stale lock; two holders at a time never happen."""
    inside, most, refused = [0], [0], [0]

    def attempt():
        try:
            with folder_lock(tmp_path):
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                threading.Event().wait(0.002)
                inside[0] -= 1
        except InputError:
            refused[0] += 1

    with folder_lock(tmp_path):
        pid, host, _ = lines_of(tmp_path)
    for _ in range(20):
        (tmp_path / LOCK_FILE).write_text(f"{pid}\n{host}\n1\n")
        threads = [threading.Thread(target=attempt) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert most[0] == 1
    assert refused[0] > 0


def test_an_empty_folder_made_for_the_lock_is_removed(tmp_path):
    with folder_lock(tmp_path / "a" / "b"):
        assert (tmp_path / "a" / "b" / LOCK_FILE).is_file()
    assert list(tmp_path.iterdir()) == []
    with folder_lock(tmp_path / "a" / "b"):
        (tmp_path / "a" / "b" / "result").write_text("1")
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["result"]


def test_a_waiting_lock_waits_for_its_holder_and_says_so(holder, tmp_path, capsys):
    threading.Timer(1.0, holder.kill).start()
    began = time.monotonic()
    threading.Timer(1.2, holder.wait).start()  # until then it is a zombie
    with waiting_lock(tmp_path / "run" / LOCK_FILE, after=0.2):
        assert time.monotonic() - began > 0.9
    assert f"waiting for process {holder.pid} on host " in capsys.readouterr().err

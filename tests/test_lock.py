"""One process a folder; a lock left behind is told from one that is held."""

import json
import os
import signal
import subprocess
import sys
import threading

import pytest

from contaccum import lock as module
from contaccum.errors import InputError
from contaccum.lock import LOCK_FILE, folder_lock

HOLD = """
import sys, time
from contaccum.lock import folder_lock
with folder_lock(sys.argv[1]):
    print("held", flush=True)
    time.sleep(1000)
"""


@pytest.fixture
def holder(tmp_path):
    """A real process that holds the lock of ``tmp_path / "run"``."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_second_process_is_refused_and_the_sentence_names_the_first(holder, tmp_path):
    said = f"held by process {holder.pid} on this host, expected no other run"
    with pytest.raises(InputError, match=said) as error, folder_lock(tmp_path / "run"):
        pass
    assert str(tmp_path / "run" / LOCK_FILE) in str(error.value)
    assert (tmp_path / "run" / LOCK_FILE).exists()


def test_the_lock_of_a_killed_process_is_taken_over_with_a_note(holder, tmp_path, capsys):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with folder_lock(tmp_path / "run"):
        assert json.loads((tmp_path / "run" / LOCK_FILE).read_text())["pid"] == os.getpid()
    assert f"left by process {holder.pid}, which is gone; taken over" in capsys.readouterr().err
    assert not (tmp_path / "run").exists() or not list((tmp_path / "run").iterdir())


def test_a_process_number_given_again_is_no_holder(holder, tmp_path, capsys):
    """The number is alive, but was started at another time."""
    file = tmp_path / "run" / LOCK_FILE
    found = json.loads(file.read_text())
    file.write_text(json.dumps({**found, "started": "1"}))
    with folder_lock(tmp_path / "run"):
        pass
    assert "taken over" in capsys.readouterr().err


def test_a_machine_started_anew_has_no_holders(holder, tmp_path, capsys):
    file = tmp_path / "run" / LOCK_FILE
    file.write_text(json.dumps({**json.loads(file.read_text()), "boot": "another"}))
    with folder_lock(tmp_path / "run"):
        pass
    assert "taken over" in capsys.readouterr().err


def test_another_host_is_refused_and_told_how_to_go_on(tmp_path):
    with folder_lock(tmp_path):
        found = json.loads((tmp_path / LOCK_FILE).read_text())
    (tmp_path / LOCK_FILE).write_text(json.dumps({**found, "host": "node7", "pid": 4}))
    said = r"held by process 4 on host node7.* if it is gone, delete this file"
    with pytest.raises(InputError, match=said), folder_lock(tmp_path):
        pass
    (tmp_path / LOCK_FILE).unlink()
    with folder_lock(tmp_path):
        pass


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": 3}', "\0\0\0"])
def test_a_lock_without_a_name_is_taken_over(content, tmp_path, capsys, monkeypatch):
    """Its process died between creating and writing it, or the power did."""
    monkeypatch.setattr(module, "_PATIENCE", 0.0)
    (tmp_path / LOCK_FILE).write_text(content)
    with folder_lock(tmp_path):
        pass
    assert "left by a process that died at once" in capsys.readouterr().err


def test_of_many_threads_that_find_it_free_or_stale_one_gets_it(tmp_path, monkeypatch):
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
        stale = {**json.loads((tmp_path / LOCK_FILE).read_text()), "started": "1"}
    for _ in range(20):
        (tmp_path / LOCK_FILE).write_text(json.dumps(stale))
        threads = [threading.Thread(target=attempt) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert most[0] == 1
    assert refused[0] > 0


def test_a_folder_that_the_lock_made_goes_when_nothing_came_of_it(tmp_path):
    with folder_lock(tmp_path / "a" / "b"):
        assert (tmp_path / "a" / "b" / LOCK_FILE).is_file()
    assert list(tmp_path.iterdir()) == []
    with folder_lock(tmp_path / "a" / "b"):
        (tmp_path / "a" / "b" / "result").write_text("1")
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["result"]


def test_ended_and_zombie_processes_are_gone():
    process = subprocess.Popen([sys.executable, "-c", ""])
    assert module._started(os.getpid()) not in ("", module._started(process.pid))
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie now
    assert module._started(process.pid) == ""
    process.wait()
    assert module._started(process.pid) == ""

"""Options of accelerate launch: agreed with the settings, or refused.

Signals in and after a deferred block. Processes that leave their group.
"""

import os
import signal
import socket
import subprocess
import sys

import pytest
from helpers import train_config, write_beir
from processes import Job, python, run_jobs

from contaccum.config import to_yaml
from contaccum.errors import InputError
from contaccum.runtime import processes
from contaccum.runtime.launch import refuse_ignored_launch


@pytest.mark.parametrize(
    ("precision", "environment", "said"),
    [
        ("bf16", {"MIXED_PRECISION": "bf16"}, None),
        ("bf16", {"MIXED_PRECISION": "no"}, None),
        (
            "fp32",
            {"MIXED_PRECISION": "bf16"},
            "ACCELERATE_MIXED_PRECISION to bf16, which has no effect here. Set run.precision",
        ),
    ],
)
def test_launcher_options_agree_with_the_settings_or_are_refused(
    precision, environment, said, monkeypatch
):
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(f"ACCELERATE_{name}", value)
    if said is None:
        refuse_ignored_launch(precision)
        return
    with pytest.raises(InputError) as error:
        refuse_ignored_launch(precision)
    assert said in str(error.value)


def test_accelerate_launch_is_refused_in_one_sentence(tmp_path):
    (tmp_path / "config.yaml").write_text(
        to_yaml(train_config(write_beir(tmp_path / "data"), tmp_path / "run"))
    )
    launch = ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1"]
    launch += ["--mixed_precision", "bf16"]
    call = [
        python(), *launch, "-m", "contaccum", "train", "--config", str(tmp_path / "config.yaml"),
    ]  # fmt: skip
    environment = {**os.environ, "HF_HOME": str(tmp_path)}  # without the user's accelerate config
    done = subprocess.run(call, capture_output=True, text=True, check=False, env=environment)
    found = [line for line in done.stderr.splitlines() if line.startswith("contaccum: ")]
    assert len(found) == 1
    assert "accelerate launch set ACCELERATE_MIXED_PRECISION to bf16" in found[0]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("outer", "code", "printed"), [("nullcontext", 0, "continues\n"), ("StopSignals", 130, "")]
)
def test_a_second_ctrl_c_ends_the_command_line_but_not_another_program(outer, code, printed):
    """The command line has a StopSignals of its own around that of the training run."""
    script = (
        "import os, signal; from contextlib import nullcontext; from contaccum.runtime.launch "
        "import StopSignals\n"
        # the tests may run with SIGINT ignored
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"with {outer}():\n"
        "    try:\n"
        "        with StopSignals() as signals, signals.deferred():\n"
        "            [os.kill(os.getpid(), signal.SIGINT) for _ in range(2)]\n"
        "    except KeyboardInterrupt:\n"
        "        print('continues')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (code, printed), done.stderr


@pytest.mark.parametrize("world", ["1", "2"])
@pytest.mark.parametrize("place", ["inside", "after"])
def test_a_signal_outside_a_deferred_block_ends_one_of_several_processes(place, world):
    """Alone, the process raises Interrupted instead, because it cannot wait for another process."""
    script = (
        "import os, signal; from contaccum.runtime.launch import StopSignals\n"
        "stop = lambda: os.kill(os.getpid(), signal.SIGTERM)\n"
        "with StopSignals() as signals:\n"
        f"    with signals.deferred(): {'stop()' if place == 'inside' else 'pass'}\n"
        f"    {'stop()' if place == 'after' else 'print(signals.received)'}\n"
    )
    environment = {**os.environ, "WORLD_SIZE": world, "RANK": "0"}
    call = [sys.executable, "-c", script]
    done = subprocess.run(call, capture_output=True, text=True, check=False, env=environment)
    if place == "inside":
        assert (done.returncode, done.stdout) == (0, "15\n"), done.stderr
    elif world == "1":
        assert "Interrupted: stopped by SIGTERM" in done.stderr
    else:
        assert done.returncode == -signal.SIGTERM


def test_processes_leave_their_group_right_after_a_message(tmp_path):
    """Many times, because the deadlock of torch before 2.8 is rare."""
    job = Job(["30"], processes=2, worker="group_worker")
    assert run_jobs({"groups": job}, tmp_path)["groups"].check().codes == [0, 0]


def test_a_process_that_never_starts_is_one_sentence(monkeypatch):
    """The launcher's store was asked again for each sentence, each time until a timeout."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in place.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(processes, "_NOT_CONNECTED", [])
    with pytest.raises(InputError, match=rf"not all 2 processes connected to 127\.0\.0\.1:{port}"):
        processes.start_group("cpu", timeout_minutes=0.02)
    monkeypatch.setattr(processes.dist, "TCPStore", None)  # a call would fail
    assert processes.first_to_say("any sentence")

"""Standard streams, launch variables and unexpected errors: a sentence and an exit code, never a
traceback."""

import io
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from helpers import train_config, write_beir

from contaccum import doctor
from contaccum.cli import main
from contaccum.cli.commands import COMMANDS
from contaccum.config import to_yaml
from contaccum.errors import InputError
from contaccum.experiments.page import Table
from contaccum.runtime.launch import check_launch, local_place, process_place
from contaccum.training.log import read_log

BROKEN_PIPE = 128 + signal.SIGPIPE
CALL = f"{sys.executable} -m contaccum"


@pytest.fixture
def data(tmp_path):
    """Corpus whose ids are not ASCII: `data check` prints an example of them."""
    (tmp_path / "é.jsonl").write_text(
        '{"_id": "ü→", "title": "", "text": "Größe 字"}\n', encoding="utf-8"
    )
    return tmp_path


def shell(script: str, folder: Path, **environment: str) -> tuple[list[int], str]:
    """Run a pipeline in bash; return the exit code of each part, and stderr."""
    text = f'{{ {script}; codes="${{PIPESTATUS[@]}}"; }} 2> err\necho "$codes" > codes\n'
    subprocess.run(
        ["bash", "-c", text],
        cwd=folder,
        env={**os.environ, **environment},
        check=False,
        timeout=120,
    )
    return list(map(int, (folder / "codes").read_text().split())), (folder / "err").read_text(
        errors="replace"
    )


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
@pytest.mark.parametrize(
    "call",
    [["data", "check", "é.jsonl"], ["data", "fetch", "\udcff字"]],
)
def test_stream_that_cannot_encode_gets_replacement_characters(call, encoding, data, monkeypatch):
    monkeypatch.chdir(data)
    out, err = io.BytesIO(), io.BytesIO()
    for name, buffer in (("stdout", out), ("stderr", err)):
        stream = io.TextIOWrapper(buffer, encoding=encoding, write_through=True)
        monkeypatch.setattr(sys, name, stream)
        # negative control: the stream is strict before the command runs
        with pytest.raises(UnicodeEncodeError):
            stream.write("字")
    code = main(call)
    assert code == (2 if "字" in call[-1] else 0), err.getvalue()
    said = (err if code else out).getvalue().decode(encoding)
    assert ("?" in said) == (code == 2 or encoding == "ascii")


def test_terminal_without_utf8_ends_with_the_exit_code(data):
    environment = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    assert shell(f"{CALL} data fetch é.jsonl > out", data, **environment) == ([0], "")


def test_command_works_without_a_place_for_messages(data):
    sample = Path(__file__).parent.parent / "data" / "sample"
    assert shell(f"{CALL} data convert {sample} pairs.jsonl --to jsonl 2> /dev/full", data) == (
        [0],
        "",
    )
    assert (data / "pairs.jsonl").stat().st_size > 0


def test_command_without_stdout_still_reports_its_error(data):
    codes, err = shell(f"{CALL} data fetch nowhere >&-", data)
    assert (codes, err.startswith("contaccum: nowhere: "), err.count("\n")) == ([2], True, 1)


@pytest.mark.parametrize("call", ["data fetch é.jsonl", "train --help"])
def test_reader_that_leaves_early_ends_the_command_quietly(call, data):
    codes, err = shell(f"{CALL} {call} | true", data)
    assert (codes[0] in (0, BROKEN_PIPE), err) == (True, "")


def test_full_disk_behind_stdout_is_one_sentence(data):
    codes, err = shell(f"{CALL} data fetch é.jsonl > /dev/full", data)
    assert (codes, err.count("\n")) == ([2], 1)
    assert "standard output" in err
    assert "No space left on device" in err


def failing(monkeypatch, error: BaseException) -> None:
    def fail():
        raise error

    monkeypatch.setitem(COMMANDS, "doctor", replace(COMMANDS["doctor"], run=fail))


UNEXPECTED = [
    (ValueError("bad\nvalue"), "ValueError: bad value"),
    (BrokenPipeError("of a worker"), "BrokenPipeError: of a worker"),
    (RuntimeError("x" * 9999), "RuntimeError: " + "x" * 500 + "\n"),
]


@pytest.mark.parametrize(("error", "words"), UNEXPECTED, ids=lambda value: type(value).__name__)
def test_unexpected_error_is_two_lines_and_code_1(error, words, monkeypatch, capsys):
    failing(monkeypatch, error)
    assert main(["doctor"]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 2)
    assert err.startswith(f"contaccum: doctor failed: {words}")
    assert err.splitlines()[1].endswith("Run the command again with --debug and report its output")


@pytest.mark.parametrize("arguments", [["--debug", "doctor"], ["doctor", "--debug"]])
def test_debug_shows_the_traceback(arguments, monkeypatch, capsys):
    failing(monkeypatch, KeyError("weight"))
    assert main(arguments) == 1
    err = capsys.readouterr().err
    assert err.startswith("Traceback (most recent call last):")
    assert "in fail" in err
    assert err.endswith("Report the traceback above\n")
    failing(monkeypatch, InputError("a.jsonl:1: found b; c is expected"))
    assert main(arguments) == 2
    assert "Traceback" in capsys.readouterr().err


SOUND = {
    "WORLD_SIZE": "2",
    "RANK": "1",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
}
LAUNCHES = [
    ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two', expected a whole number"),
    ({**SOUND, "WORLD_SIZE": "-2"}, "WORLD_SIZE is '-2', expected a whole number"),
    ({**SOUND, "RANK": ""}, "WORLD_SIZE is 2, but RANK is not set"),
    ({**SOUND, "RANK": "2"}, "RANK 2, WORLD_SIZE 2"),
    ({**SOUND, "LOCAL_RANK": "2"}, "RANK 1, WORLD_SIZE 2, LOCAL_RANK 2"),
    (
        {**SOUND, "MASTER_PORT": "70000"},
        "RANK 1, WORLD_SIZE 2, LOCAL_RANK 1, LOCAL_WORLD_SIZE 2 and MASTER_PORT 70000",
    ),
    ({**SOUND, "MASTER_ADDR": ""}, "WORLD_SIZE is 2, but MASTER_ADDR is not set"),
]


@pytest.fixture
def launched(monkeypatch):
    def launch(variables: dict[str, str]) -> None:
        for name in (
            "WORLD_SIZE",
            "RANK",
            "LOCAL_RANK",
            "LOCAL_WORLD_SIZE",
            "MASTER_ADDR",
            "MASTER_PORT",
        ):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return launch


@pytest.mark.parametrize(("variables", "words"), LAUNCHES)
def test_invalid_launch_is_refused_at_once(variables, words, launched, capsys):
    launched(variables)
    assert main(["data", "check", "x"]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"contaccum: {words}")
    assert err.count("\n") == 1
    assert all(
        name in err for name in ("torchrun", "SLURM_PROCID", "SLURM_NTASKS", "OMPI_COMM_WORLD_RANK")
    )


def test_valid_launches_are_accepted(launched):
    """Negative control of the test above."""
    for variables in ({}, {"RANK": "1"}):
        launched(variables)
        assert (check_launch(), process_place(), local_place()) == (1, (0, 1), (0, 1))
    launched(SOUND)
    assert (check_launch(), process_place(), local_place()) == (2, (1, 2), (1, 2))
    launched({**SOUND, "WORLD_SIZE": " 4 ", "LOCAL_WORLD_SIZE": "2", "RANK": "3"})
    assert (check_launch(), process_place(), local_place()) == (4, (3, 4), (1, 2))


@pytest.mark.parametrize("terminal", [True, False])
def test_training_shows_progress_and_the_next_command(terminal, tmp_path, capsys, monkeypatch):
    data, model = write_beir(tmp_path / "data"), tmp_path / "run" / "model"
    config = tmp_path / "config.yaml"
    config.write_text(
        to_yaml(
            train_config(data, tmp_path / "run", **{"data.dev": str(data), "optim.max_steps": 2})
        )
    )
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    assert main(["train", "--config", str(config)]) == 0
    out, err = capsys.readouterr()
    assert out == f"{model}\n"
    best = json.loads((tmp_path / "run" / "dev_metrics.json").read_text())
    scores = {line["step"]: line["dev"] for line in read_log(tmp_path / "run") if "dev" in line}
    assert max(scores, key=lambda step: scores[step]["ndcg@10"]) == best["step"]
    ending = [
        f"the model is from step {best['step']}, the one with the best dev ndcg@10: "
        f"{scores[best['step']]['ndcg@10']:.4f}",
        f"next: contaccum evaluate --model {model} --data {data}",
    ]
    assert err.splitlines()[-2:] == ending
    assert "2/2" in err
    for shown in ("loss=", "negatives=", "pairs/s=", "peak=", "step/s"):
        assert (shown in err) == terminal, shown


def test_control_characters_do_not_reach_the_terminal(monkeypatch, capsys):
    """Neither in an error nor in a result; a title of the terminal or a cleared screen could be set
    by a data file."""
    name = "a\x1b]0;title\x07\x1b[2J\rb\x9b1m\tc"
    shown = r"a\u001b]0;title\u0007\u001b[2J\rb\u009b1m" + "\tc"
    failing(monkeypatch, InputError(f"{name}: no such setting"))
    assert main(["doctor"]) == 2
    assert capsys.readouterr().err == f"contaccum: {shown}: no such setting\n"
    monkeypatch.setitem(
        COMMANDS, "doctor", replace(COMMANDS["doctor"], run=lambda: f"{name}\nsecond line")
    )
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out == f"{shown}\nsecond line\n"


def test_logins_in_addresses_are_not_printed(monkeypatch, capsys):
    """HF_ENDPOINT can be a mirror with a password; the output of `contaccum doctor` is made to be
    shared."""
    text = (
        "https://{}mirror.example:8080/api?mail=a@b, and hub:/home/me@company/set does not answer"
    )
    for login in ("bob:sesame@", "hf_token@"):
        failing(monkeypatch, InputError(text.format(login)))
        assert main(["doctor"]) == 2
        assert capsys.readouterr().err == f"contaccum: {text.format('***@')}\n"
        found = doctor.Diagnosis("ok", "network", text.format(login))
        monkeypatch.setattr(doctor, "diagnose", partial(list, [found]))
        doctor.doctor(print)
        assert text.format("***@") in capsys.readouterr().out
        monkeypatch.setitem(
            COMMANDS, "doctor", replace(COMMANDS["doctor"], run=partial(text.format, login))
        )
        # the result of another command, such as a passage, keeps its addresses
        assert main(["doctor"]) == 0
        assert capsys.readouterr().out == f"{text.format(login)}\n"


def test_control_characters_do_not_break_a_table():
    assert (
        Table(["run|\r"], [["a\r\nb"]]).markdown()
        == r"""
| run\|\r |
| ------- |
| a\r\nb  |"""[1:]
    )

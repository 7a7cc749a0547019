"""Queries from a pipe and from a terminal, and lines that fit its width."""

import io
import os
import pty
import subprocess
import sys

import pytest
from helpers import write_beir

from contaccum.cli import main
from contaccum.explore.app import typed
from contaccum.retrieval.runs import RankedPassage, render_passages, truncate_line


@pytest.fixture
def data(tmp_path):
    return write_beir(tmp_path / "data")


def ask(monkeypatch, capsys, lines: str, *arguments: object) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    code = main(["search", "--interactive", *map(str, arguments)])
    return code, *capsys.readouterr()


def test_queries_from_a_pipe(data, monkeypatch, capsys):
    known, free = "where is the red fox of valley 0", "white bear"
    code, out, err = ask(
        monkeypatch, capsys, f"{known}\n  {free}\n\nblue cat\n", "--model", "bm25", "--data", data, "--k", 2
    )
    assert (code, err) == (0, "")
    first, second, rest = out.split("\n\n")
    lines = first.splitlines()
    assert [line[:5] for line in lines[::2]] == ["  1 +", "  2  ", "1 of "]
    assert lines[0].endswith("  p0  fox")
    assert lines[1].strip() == "a red fox lives in valley 0"
    assert lines[-1] == "1 of 1 relevant passages are among these 2"
    assert "white bear" in second
    assert "+" not in second
    assert rest == ""  # an empty line ends it
    unjudged = ask(monkeypatch, capsys, known, "--model", "bm25", "--data", data / "corpus.jsonl", "--k", 2)[1]
    assert unjudged == "\n".join(lines[:-1]).replace("+", " ") + "\n\n"


@pytest.mark.parametrize("name", ["pairs.jsonl", "hub:faq?query=question&pos=answer"])
def test_one_query_searches_what_the_prompt_searches(name, tmp_path, monkeypatch, capsys):
    """--query once refused a file of examples, and a table without a split named test, although --interactive read both."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "faq").mkdir()
    (tmp_path / "faq" / "a.csv").write_text("question,answer\nwhere,here we are\nwhen,now or never\n")
    (tmp_path / "pairs.jsonl").write_text('{"query": "when", "pos": ["now or never"], "neg": ["here we are"]}\n')
    call = ["search", "--model", "bm25", "--data", name, "--split", "train"]
    monkeypatch.setattr("sys.stdin", io.StringIO("now\n"))
    assert main([*call, "--interactive"]) == 0
    prompted = capsys.readouterr().out
    assert main([*call, "--query", "now"]) == 0
    assert capsys.readouterr() == (prompted.rstrip("\n") + "\n", "")
    assert "now or never" in prompted


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--k", "0"], "k is 0"),
        (["--split", "best"], "split 'best' not found"),
        (
            ["--query", "fox"],
            "search needs exactly one of --query, --output and --interactive, but got --query and --interactive",
        ),
    ],
)
def test_what_cannot_be_asked_is_refused(arguments, words, data, monkeypatch, capsys):
    code, out, err = ask(monkeypatch, capsys, "fox\n", "--model", "bm25", "--data", data, *arguments)
    assert (code, out) == (2, "")
    assert words in err


def test_several_processes_have_no_prompt(data, monkeypatch, capsys):
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    from contaccum.config.commands import EncoderConfig
    from contaccum.errors import InputError
    from contaccum.explore.app import converse

    with pytest.raises(InputError, match="needs one process, but 2 were started"):
        converse(EncoderConfig("bm25"), str(data))


@pytest.mark.parametrize(("lines", "queries"), [("a b\n c \n \nd\n", ["a b", "c"]), ("a", ["a"]), ("", [])])
def test_an_empty_line_or_the_end_stops(lines, queries, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    assert list(typed()) == queries


def test_lines_fit_the_terminal():
    assert truncate_line("one two3", 8) == "one two3"
    assert truncate_line("one two three", 8) == "one two…"
    assert truncate_line("漢字漢字", 8) == "漢字漢字"
    assert truncate_line("漢字漢字漢", 8) == "漢字漢…"  # two columns each
    assert truncate_line("cafe\u0301s", 5) == "cafe\u0301s"  # the accent takes none
    assert truncate_line("any length", None) == "any length"


def test_a_passage_cannot_write_to_the_terminal():
    hit = RankedPassage("p\x1b[31m", 0.5, "two\nlines\x07", "\x1b]0;title\x07red\x9b2J\u202e text\r\t end")
    shown = render_passages([hit], {"p\x1b[31m": 0})
    assert all(letter.isprintable() or letter == "\n" for letter in shown)
    assert shown.splitlines() == ["  1 -  0.5000  p [31m  two lines ", "       ]0;title red 2J  text   end"]


@pytest.mark.acceptance
def test_a_terminal_is_prompted_and_ctrl_d_ends_well(data):
    """In a process of its own with a terminal of 30 columns."""
    controller, terminal = pty.openpty()
    call = ["bash", "-c", 'stty cols 30 rows 20 -echo; exec "$@"', "sh", sys.executable, "-m", "contaccum"]
    call += ["search", "--model", "bm25", "--data", str(data), "--interactive", "--k", "1"]
    # A size in the environment, which some shells export, would win over the terminal's own.
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    environment["TERM"] = "dumb"
    process = subprocess.Popen(call, stdin=terminal, stdout=terminal, stderr=subprocess.PIPE, env=environment)
    os.close(terminal)
    until(controller, b"query> ")
    os.write(controller, b"where is the white bear of valley 3\n")
    lines = until(controller, b"query> ").decode().replace("\r", "").splitlines()
    (head,) = [number for number, line in enumerate(lines) if line.startswith("  1 +")]
    assert lines[head].endswith("  p3  bear")
    assert lines[head + 1 : head + 3] == ["      a white bear lives in v…", "1 of 1 relevant passages are …"]
    os.write(controller, b"\x04")
    assert process.wait(60) == 0
    assert process.stderr.read() == b""


def until(controller: int, words: bytes) -> bytes:
    shown = b""
    while words not in shown:
        shown += os.read(controller, 4096)
    return shown

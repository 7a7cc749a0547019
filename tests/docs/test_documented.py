"""Every command of README and docs is run, in a folder where the names that the pages use exist and
are small.

A command that a page says is not run is parsed all the same; the default suite runs README's, the
acceptance tests all.
"""

import contextlib
import fcntl
import glob
import io
import os
import re
import struct
import subprocess
import sys
import termios
import threading
from pathlib import Path

import pandas
import pyarrow
import pytest
from datasets import load_dataset
from documented import PAGES, ROOT, Command, blocks, commands
from helpers import write_beir
from tiny_families import family_folder
from transformers import BertConfig, BertForSequenceClassification

from contaccum.cli import main
from contaccum.cli.commands import COMMANDS as CLI
from contaccum.cli.parser import parse
from contaccum.config.commands import SearchConfig
from contaccum.data.commands import convert
from contaccum.data.dataset import open_dataset
from contaccum.encoder import DualEncoder, EncoderSettings, tiny_tower
from contaccum.errors import InputError
from contaccum.retrieval.retriever import look
from contaccum.retrieval.runs import read_run

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10, where pytest installs tomli
    import tomli as tomllib

COMMANDS = [command for page in PAGES for block in blocks(page) for command in commands(block)]
ENCODERS = [
    "sentence-transformers/all-MiniLM-L6-v2",
    "bert-base-uncased",
    "BAAI/bge-base-en-v1.5",
    "MODEL",
]
SLOW = ("compare", "plan", "doctor")
"""Verbs that start processes of their own."""
THEIRS = "another project's commands"


def page_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def is_quick(command: Command) -> bool:
    return (
        command.words[0] == "contaccum"
        and ">" not in command.words
        and command.arguments[0] not in SLOW
    )


def runs(command: Command) -> bool:
    """Whether a command can be run as it stands."""
    return command.reason is None and not command.abbreviated


@pytest.fixture(scope="module")
def workspace(tmp_path_factory) -> Path:
    """A folder with everything that the pages name: data in each form, encoders, configs,
    scripts."""
    folder = tmp_path_factory.mktemp("documented")
    data = write_beir(folder / "MY_FOLDER")
    for name in ("medquad", "my_data"):
        (folder / name).symlink_to(data)
    for name in ("configs", "scripts", "benchmarks", "data", "tests"):
        (folder / name).symlink_to(ROOT / name)
    convert(data, folder / "pairs.jsonl", "jsonl")
    convert(folder / "pairs.jsonl", folder / "TRAIN_FOLDER", "beir")
    convert(data, folder / "biencoder-nq-train.json", "dpr")
    convert(data, folder / "tevatron.jsonl", "tevatron")
    (folder / "train.json").symlink_to(folder / "biencoder-nq-train.json")
    passages = [f"{n}\ta fox lives in valley {n}\tfox" for n in range(40)]
    (folder / "psgs_w100.tsv").write_text("\n".join(["id\ttext\ttitle", *passages]) + "\n")
    (folder / "nq-test.qa.csv").write_text("where is the fox of valley 3\t['valley 3']\n")
    texts = [line.split("\t")[1] for line in (folder / "psgs_w100.tsv").read_text().splitlines()]
    tower = tiny_tower(texts, "mean", layers=1, width=32, vocabulary=200, max_length=256, seed=0)
    settings = EncoderSettings(tie_towers=True)
    DualEncoder(tower, tower, settings).save(folder / "saved")
    config = BertConfig(
        vocab_size=len(tower.tokenizer),
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        num_labels=1,
    )
    reader = folder / "cross-encoder" / "ms-marco-MiniLM-L6-v2"
    BertForSequenceClassification(config).save_pretrained(reader)
    tower.tokenizer.save_pretrained(reader)
    wide = tiny_tower(texts, "mean", layers=1, width=384, vocabulary=200, max_length=256, seed=0)
    DualEncoder(wide, wide, settings).save(folder / "wide")
    for name in ("saved", "wide"):  # as sentence-transformers saves a model
        (folder / name / "contaccum.json").unlink()
    (folder / "BAAI").mkdir()
    (folder / "BAAI" / "bge-small-en-v1.5").symlink_to(folder / "wide")
    for name in ENCODERS:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).symlink_to(folder / "saved")
    family_folder("qwen3", folder / "Qwen" / "Qwen3-Embedding-0.6B", texts, positions=256)
    return folder


@pytest.fixture
def place(workspace, monkeypatch) -> Path:
    monkeypatch.chdir(workspace)
    monkeypatch.setenv("CONTACCUM_CACHE", str(workspace / "cache"))
    return workspace


def write_files(page: Path, folder: Path) -> None:
    """The files that a page's blocks stand for."""
    for block in blocks(page):
        if block.title:
            (folder / block.title).parent.mkdir(parents=True, exist_ok=True)
            (folder / block.title).write_text(block.text, encoding="utf-8")


def make_way(arguments: list[str]) -> None:
    """Remove what a command is about to write; the pages name the same folder for one thing done in
    several ways."""
    target = None
    if (
        arguments[0] in ("train", "compare")
        and "--resume" not in arguments
        and "--output_dir" in arguments
    ):
        target = arguments[arguments.index("--output_dir") + 1]
    elif arguments[0] in ("encode", "mine"):
        target = arguments[arguments.index("--output") + 1]
    elif arguments[0] == "merge":
        target = arguments[2]
    elif arguments[:2] == ["data", "convert"]:
        target = arguments[3]
    if target is not None:
        subprocess.run(["rm", "-rf", target], check=True)


def run_here(command: Command) -> None:
    make_way(command.arguments)
    arguments = [*command.arguments]
    if arguments[0] == "auto":  # it uses the time that it is given
        arguments[arguments.index("--time") + 1] = "120s"
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(arguments)
    assert code == 0, f"{command.where}\n{err.getvalue()[-2000:]}"


def run_outside(command: Command, programs: dict[str, str]) -> None:
    if command.arguments:
        make_way(command.arguments)
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    variables = {"VIRTUAL_ENV": sys.prefix, "PYTHONPATH": path, **programs}
    call = ["bash", "-c", command.text]
    done = subprocess.run(
        call, env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command.where}\n{done.stderr[-2000:]}"


def test_commands_are_found():
    """The number is told, so that a page whose blocks are no longer understood is noticed."""
    ours = [command for command in COMMANDS if command.arguments is not None]
    run = [command for command in COMMANDS if runs(command)]
    pages = len({command.page for command in COMMANDS})
    print(
        f"{len(COMMANDS)} commands on {pages} pages, {len(ours)} of them contaccum's; {len(run)} "
        "are run"
    )
    assert len(COMMANDS) >= 90
    assert len(run) >= 40
    assert any(command.launcher[:1] == ["torchrun"] for command in ours)


def test_the_finder_reads_what_a_page_can_hold(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "Text\n\n    contaccum train --config a \\\n        --seed 1  # why\n"
        "    LAUNCH='a b' bash scripts/nq.sh x\n    no command\n\n"
        '```json title="a.json"\n{}\n```\n\n<!-- not run: it takes days -->\n\n```bash\ntorchrun '
        "-m contaccum train ...\n```\n\n"
        "- entry\n\n    contaccum belongs to the entry\n"
    )
    found = [command for block in blocks(page) for command in commands(block)]
    assert [command.words for command in found] == [
        ["contaccum", "train", "--config", "a", "--seed", "1"],
        ["bash", "scripts/nq.sh", "x"],
        ["torchrun", "-m", "contaccum", "train", "..."],
    ]
    assert [command.line for command in found] == [3, 5, 15]
    assert [command.reason for command in found] == [None, None, "it takes days"]
    assert found[1].variables == {"LAUNCH": "a b"}
    assert (found[2].arguments, found[2].abbreviated) == (["train"], True)
    assert [block.title for block in blocks(page)] == [None, "a.json", None]


def parsed(command: Command) -> str | None:
    """Return the error message of the command line for a command, or None if it accepts the
    command."""
    arguments = command.arguments
    name = " ".join(arguments[: 2 if arguments[0] == "data" else 1])
    if name.startswith("-"):  # --help, --version
        return None
    if name not in CLI:
        return f"no such command: {name}"
    words = arguments[len(name.split()) :]
    placeholders = [
        word
        for word in words
        if re.fullmatch(r"FILE|RUN|METHOD|DIR|SOURCE|TARGET|PATH|NAME|VERB", word)
    ]
    if placeholders or command.abbreviated or "--help" in words:
        known = {f"--{option}" for option in CLI[name].settings()} | {
            "--config",
            "--print_config",
            "--help",
            "--debug",
        }
        unknown = {word.partition("=")[0] for word in words if word.startswith("--")} - known
        return f"no such options: {unknown}" if unknown else None
    try:
        parse(name, CLI[name], words)
    except InputError as error:
        return str(error)
    return None


def test_every_command_of_contaccum_is_parsed(place):
    """Those that are run and those that are not; configs are read, options and their values
    checked."""
    for page in PAGES:
        write_files(page, place)
    wrong = {c.where: parsed(c) for c in COMMANDS if c.arguments is not None}
    assert {where: why for where, why in wrong.items() if why} == {}


def test_the_parser_refuses_what_is_wrong():
    """Negative control."""
    page = ROOT / "README.md"
    for words in (
        ["contaccum", "train", "--bank.sise", "3"],
        ["contaccum", "report", "FILE", "--htlm", "x"],
    ):
        assert parsed(Command(page, 1, "", words=words))


@pytest.mark.parametrize(
    "command",
    [c for c in COMMANDS if c.arguments is None and c.reason != THEIRS and not c.of_earlier_commit],
    ids=lambda c: f"{page_name(c.page)}:{c.line}",
)
def test_what_other_commands_name_exists(command):
    """Scripts and their options, test files and their tests, extras."""
    words = command.words
    for word in words[1:]:
        if re.fullmatch(r"(scripts|benchmarks|tests)/[\w/]+\.(py|sh)(::\w+)?|tests/[\w/]+", word):
            file, _, name = word.partition("::")
            assert (ROOT / file).exists(), command.where
            assert not name or f"def {name}(" in (ROOT / file).read_text(), command.where
    if words[0] == "python" and words[1].endswith(".py") and (ROOT / words[1]).is_file():
        source = (ROOT / words[1]).read_text() + (ROOT / "benchmarks" / "common.py").read_text()
        options = [word for word in words if word.startswith("--")]
        assert [option for option in options if f'"{option}"' not in source] == [], command.where
    if words[0] == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
            "optional-dependencies"
        ]
        named = re.findall(r"\[([\w,-]+)\]", command.text)
        assert {extra for group in named for extra in group.split(",")} <= extras.keys(), (
            command.where
        )


@pytest.mark.filterwarnings("default:.* also occur in the training data")
def test_the_quick_commands_of_the_readme_run(place):
    chosen = [c for c in COMMANDS if page_name(c.page) == "README.md" and runs(c) and is_quick(c)]
    assert {"train", "mine", "encode", "search", "evaluate"} <= {
        command.arguments[0] for command in chosen
    }
    for command in chosen:
        run_here(command)


@pytest.mark.acceptance
@pytest.mark.filterwarnings("default:.* also occur in the (training|dev) data")
@pytest.mark.parametrize(
    "name", sorted({page_name(command.page) for command in COMMANDS if runs(command)})
)
def test_all_commands_run(name, place, forked_programs):
    write_files(ROOT / name, place)
    chosen = [command for command in COMMANDS if page_name(command.page) == name and runs(command)]
    assert chosen
    for command in chosen:
        run_here(command) if is_quick(command) else run_outside(command, forked_programs)


def python_blocks(name: str) -> list[str]:
    found = [
        block
        for block in blocks(ROOT / name)
        if block.language == "python" and not block.title and not block.reason
    ]
    return [block.text for block in found]


def test_the_library_example_runs_as_it_stands(place, capfd):
    """The one of the docs; README shows the same.

    What it does not print itself stays off stdout, and no bar is drawn.
    """
    (example,) = python_blocks("docs/reference/library.md")
    assert example in python_blocks("README.md")
    subprocess.run(["rm", "-rf", "runs/library"], check=True)
    found: dict = {}
    exec(example, found)
    out, err = capfd.readouterr()
    assert out == ""
    assert "\r" not in err
    assert not re.search(r"\d+%\||it/s|s/it|step/s", err)
    assert found["vectors"].shape == (1, 32)
    assert 0.0 <= found["ndcg"] <= 1.0
    assert {len(hits) for hits in found["run"].values()} == {3}


def test_sections_of_markdown_files_become_pairs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_notes").mkdir()
    code = "```bash\n# no heading\n```\n"
    text = f"before\n# One\n\nfirst\n{code}\n## Two\n\n## Three ##\nthird\n"
    (tmp_path / "my_notes" / "a.md").write_text(text)
    (tmp_path / "my_notes" / "b.md").write_text("# C#\nfourth\n", encoding="utf-8-sig")
    exec(python_blocks("docs/how-to/own-data.md")[0], {})
    found = list(open_dataset("my_notes.jsonl").examples())
    pairs = [(each.query.text, each.positives[0].text) for each in found]
    assert pairs == [
        ("a", "before"), ("One", "first"), ("Three", "third"), ("C#", "fourth")
    ]  # fmt: skip


def test_paragraphs_of_text_files_become_pairs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_texts").mkdir()
    paragraphs = ["This is a first sentence. The rest.\nMore.", "Too short. No pair.", "Only one."]
    text = "\n \n".join(paragraphs)
    (tmp_path / "my_texts" / "a.txt").write_text(text, encoding="utf-8-sig")
    exec(python_blocks("docs/how-to/own-data.md")[1], {})
    found = list(open_dataset("first_sentences.jsonl").examples())
    pairs = [(each.query.text, each.positives[0].text) for each in found]
    assert pairs == [("This is a first sentence.", "The rest.\nMore.")]


def test_duckdb_finds_what_search_finds(place):
    """With the commands and the SQL of the page."""
    duckdb = pytest.importorskip("duckdb")
    page = ROOT / "docs/how-to/search.md"
    for command in (command for block in blocks(page) for command in commands(block)):
        run_here(command)
    found: dict = {}
    exec(python_blocks("docs/how-to/search.md")[0], found)
    ours = read_run("test.trec")
    theirs: dict[str, list] = {}
    for query, passage, score in found["top"]:
        theirs.setdefault(query, []).append((passage, score))
    assert ours.keys() <= theirs.keys()
    for query, hits in ours.items():
        assert [passage for passage, _ in theirs[query]] == [passage for passage, _ in hits]
        assert [score for _, score in theirs[query]] == pytest.approx(
            [score for _, score in hits], abs=1e-6
        )
    # negative control
    assert [passage for passage, _ in theirs["q0"]] != [passage for passage, _ in ours["q1"]]
    texts = dict(duckdb.sql("SELECT id, text FROM 'passages/*.parquet'").fetchall())
    assert texts["p3"] == "bear a white bear lives in valley 3"
    assert {
        len(row[0]) for row in duckdb.sql("SELECT embedding FROM 'passages/*.parquet'").fetchall()
    } == {32}


def test_other_libraries_read_the_shards(place):
    """With the encode commands and the Python of the page."""
    page = ROOT / "docs/how-to/search.md"
    for command in (command for block in blocks(page) for command in commands(block)):
        if command.arguments[0] == "encode":
            run_here(command)
    found: dict = {}
    exec(python_blocks("docs/how-to/search.md")[1], found)
    model, query = "sentence-transformers/all-MiniLM-L6-v2", "where does the fox live"
    ours = look(model, "MY_FOLDER", query, 4, settings=SearchConfig(embeddings="vectors"))
    assert found["found"] == [hit.id for hit in ours[:3]]
    assert found["scores"][0] == pytest.approx([hit.score for hit in ours[:3]], abs=1e-5)
    assert found["found"][:2] != [hit.id for hit in ours[1:3]]  # negative control

    corpus = open_dataset("MY_FOLDER").corpus
    texts = {row["id"]: f"{row['title']} {row['text']}".strip() for row in corpus}
    text = page.read_text()
    assert 'pandas.read_parquet(sorted(glob.glob("passages/*.parquet")))' in text
    frame = pandas.read_parquet(sorted(glob.glob("passages/*.parquet")))
    assert 'load_dataset("parquet", data_files="passages/*.parquet")' in text
    rows = load_dataset("parquet", data_files="passages/*.parquet")["train"]
    for table in (frame, rows):
        assert dict(zip(table["id"], table["text"], strict=True)) == texts
    with pytest.raises(pyarrow.ArrowInvalid):  # negative control: the folder has other files
        pandas.read_parquet("passages")


def test_a_terminal_gets_the_bars(place, monkeypatch):
    """Negative control: the same calls draw progress where stderr is a terminal."""
    controller, terminal = os.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    shown: list[bytes] = []
    reader = threading.Thread(target=read_all, args=(controller, shown))
    reader.start()
    subprocess.run(["rm", "-rf", "runs/library"], check=True)
    with os.fdopen(terminal, "w") as stderr, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stderr)
        exec(python_blocks("docs/reference/library.md")[0], {})
    reader.join()
    os.close(controller)
    text = b"".join(shown).decode()
    assert "step/s" in text or "s/step" in text
    assert "%|" in text


def read_all(controller: int, shown: list[bytes]) -> None:
    with contextlib.suppress(OSError):  # the terminal's end is closed
        while data := os.read(controller, 4096):
            shown.append(data)

"""An output that is an input of the same call is refused, and so is text that UTF-8 cannot
encode."""

import os
from pathlib import Path

import pytest
from datasets import Dataset
from helpers import open_corpus, write_beir
from tiny_families import family_folder

from contaccum import DualEncoder
from contaccum.cli import main
from contaccum.data.tables import build_token_table
from contaccum.errors import InputError
from contaccum.retrieval.retriever import Retriever
from contaccum.runtime.checks import refuse_input_as_output, require_utf8
from contaccum.runtime.files import write_text

BM25 = "--model bm25 --data d"


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CONTACCUM_CACHE", str(tmp_path / "cache"))
    write_beir(tmp_path / "d")
    Path("link.jsonl").symlink_to("d/corpus.jsonl")
    os.link("d/queries.jsonl", "hard-link.jsonl")
    Path("m").mkdir()
    Path("m/config.json").write_text("{}")
    Path("m/query_encoder").mkdir()
    Path("m/query_encoder/model.safetensors").write_text("")
    for name in ("run.trec", "other.trec"):
        Path(name).write_text("q0 Q0 p0 1 1.0 x\n")
    Path("qa.csv").write_text("what is it?\t['word']\n")
    Path("psgs.tsv").write_text("id\ttext\ttitle\n1\tword two\tT\n")
    for name in ("pairs.jsonl", "mined.about.json"):
        Path(name).write_text('{"query": "what is it?", "pos": ["a word"], "neg": ["no"]}\n' * 1)


def contents() -> dict[str, bytes]:
    return {
        str(path): path.read_bytes()
        for path in Path().rglob("*")
        if path.is_file() and "cache" not in path.parts
    }


@pytest.mark.parametrize(
    "call",
    [
        f"search {BM25} --split test --output d/corpus.jsonl",
        f"search {BM25} --split test --output d/queries.jsonl",
        f"search {BM25} --split test --output d/qrels/test.tsv",
        f"search {BM25} --split test --output d/../d/corpus.jsonl",
        f"search {BM25} --split test --output link.jsonl",
        f"search {BM25} --split test --output hard-link.jsonl",
        "search --model m --data d --split test --output m/config.json",
        "search --model m --data d --split test --output m/query_encoder/model.safetensors",
        f"evaluate {BM25} --output d/qrels/test.tsv",
        f"evaluate {BM25} --output d/corpus.jsonl",
        "evaluate --run run.trec --qrels d/qrels/test.tsv --output run.trec",
        "evaluate --run run.trec --qrels d/qrels/test.tsv --output d/qrels/test.tsv",
        "evaluate --run run.trec --qrels d/qrels/test.tsv --against other.trec --output other.trec",
        "evaluate --model m --questions qa.csv --passages psgs.tsv --output psgs.tsv",
        "evaluate --model m --questions qa.csv --passages psgs.tsv --output qa.csv",
        "mine --model bm25 --data pairs.jsonl --output pairs.jsonl",
        "mine --model bm25 --data mined.about.json --output mined.jsonl",
        "encode --model m --input d --output d",
        "encode --model m --input d/corpus.jsonl --output d/corpus.jsonl",
        "encode --model m --input d --output m",
        "data convert pairs.jsonl pairs.jsonl --to dpr",
        "data convert d d --to beir --split test",
    ],
)
def test_an_output_that_is_an_input_is_refused_and_nothing_changes(call, capsys):
    before = contents()
    assert main(call.split()) == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    assert "is an input of this call" in sentence or "exists" in sentence, sentence
    assert contents() == before


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (f"search {BM25} --split test --output m", "m: is a folder; expected the name of a file"),
        (f"search {BM25} --split test --output .", ".: is a folder; expected the name of a file"),
        (f"evaluate {BM25} --output m", "m: is a folder; expected the name of a file"),
        (
            f"search {BM25} --split test --output pipe",
            "pipe: is a device or a pipe; expected the name of a file",
        ),
        (f"mine {BM25} --output .", ".: exists already; choose a new path"),
        (
            "data convert ../d . --to beir --split test",
            ".: this folder cannot be replaced; choose a new path",
        ),
    ],
)
def test_an_output_that_is_no_file_is_refused_before_the_work(call, sentence, capsys, monkeypatch):
    monkeypatch.setattr(Retriever, "open", None)
    os.mkfifo("pipe")
    if "../d" in call:
        Path("empty").mkdir()
        monkeypatch.chdir("empty")
    assert main(call.split()) == 2
    assert capsys.readouterr().err.splitlines() == [f"contaccum: {sentence}"]


@pytest.mark.parametrize(
    "call",
    [f"search {BM25} --split test --output d/run.trec", f"evaluate {BM25} --output d/m.json"],
)
def test_an_output_next_to_the_inputs_is_written_again(call, capsys):
    """Negative control: only files that commands read count as inputs."""
    output = Path(call.split()[-1])
    assert main(call.split()) == 0
    written = output.read_bytes()
    output.write_text("older")
    assert main(call.split()) == 0
    assert output.read_bytes() == written


def test_a_linked_output_replaces_the_target_of_the_link(tmp_path):
    """A result on another disk.

    A device, such as /dev/null for root, is never replaced by a file.
    """
    (tmp_path / "disk").mkdir()
    Path("result.trec").symlink_to("disk/run.trec")
    assert main(f"search {BM25} --split test --output plain.trec".split()) == 0
    for _ in range(2):  # the target is missing in the first call, and exists in the second
        assert main(f"search {BM25} --split test --output result.trec".split()) == 0
        assert Path("result.trec").is_symlink()
        assert [path.name for path in (tmp_path / "disk").iterdir()] == ["run.trec"]
        assert Path("disk/run.trec").read_bytes() == Path("plain.trec").read_bytes()
    os.mkfifo("pipe")
    Path("to-pipe").symlink_to("pipe")
    for name in ("pipe", "to-pipe"):
        with pytest.raises(InputError, match=r"this is a device or a pipe, not a file"):
            write_text(name, "text")
    assert Path("pipe").is_fifo()


def test_names_and_objects_are_no_paths(tmp_path):
    output = tmp_path / "out"
    output.write_text("")
    others = ("scifact", None, object(), tmp_path / "nowhere")
    for case in ((output, *others), (None, output, *others), (tmp_path / "new", *others)):
        assert refuse_input_as_output(*case) is None
    with pytest.raises(
        InputError, match="is an input of this call"
    ):  # control: the check does reach the last input
        refuse_input_as_output(output, *others, output)


@pytest.mark.parametrize("text", ["na\udcffve", "half \ud83d", "two \udcc3\udc28 bytes"])
def test_text_that_is_not_utf8_is_refused_in_one_sentence(text, capsys):
    """In a query, a passage or a prefix. Control: text of every plane is searched and encoded."""
    sound = "naïve 🦉 \u2028"
    assert require_utf8(sound, "the query") == sound
    with pytest.raises(InputError, match=r"^the prefix: .*; the text must be valid UTF-8$"):
        require_utf8(text, "the prefix")
    search = ["search", "--model", "bm25", "--data", "d", "--query"]
    assert main([*search, sound]) == 0
    capsys.readouterr()
    assert main([*search, text]) == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    assert "must be valid UTF-8" in sentence
    with pytest.raises(InputError, match=r"query 'q7': .*must be valid UTF-8"):
        Retriever.open("bm25", open_corpus("d")).search({"q1": "sound", "q7": text}, 1)
    folder = family_folder("bert", Path("bert"))
    model = DualEncoder.load(folder, max_query_length=8, max_passage_length=8)
    for side, encode in (("query", model.encode_queries), ("passage", model.encode_passages)):
        with pytest.raises(InputError, match=rf"^{side} 1: .*; the text must be valid UTF-8$"):
            encode(["sound", text])
        assert encode([sound]).shape == (1, model.dim)
    with pytest.raises(InputError, match=r"bert: query_prefix: .*; the text must be valid UTF-8$"):
        DualEncoder.load(folder, query_prefix=text)
    table = Dataset.from_dict({"text": ["sound"]})
    with pytest.raises(
        InputError, match=r"^prefix '.*': .*; the text must be valid UTF-8$"
    ):  # of a mixture's data set
        build_token_table(
            table, ["text"], model.query_tower.tokenizer, max_length=8, prefix=text, fingerprint=""
        )

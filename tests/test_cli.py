"""The command line from end to end on a small set."""

import json
import re
import subprocess
import sys
from dataclasses import MISSING
from pathlib import Path

import numpy as np
import pytest
from helpers import train_config, write_beir

import contaccum
from contaccum import DualEncoder, evaluate, search, train
from contaccum.cli import main
from contaccum.cli.commands import COMMANDS
from contaccum.cli.parser import help_texts, parse
from contaccum.config import to_yaml, train_settings
from contaccum.config.declare import default_of


@pytest.fixture
def run(data, tmp_path):
    train(train_config(data, tmp_path / "run", **{"optim.max_steps": 12}))
    return tmp_path / "run"


def call(capsys, *arguments: object) -> tuple[int, str, str]:
    code = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.filterwarnings("default:.* also occur in the training data")
def test_train_encode_search_evaluate_report(data, tmp_path, capsys):
    config = tmp_path / "config.yaml"
    config.write_text(to_yaml(train_config(data, tmp_path / "run")))
    code, out, _ = call(
        capsys, "train", "--config", config, "--optim.max_steps", 12, "--method", "grad_cache"
    )
    assert (code, out) == (0, f"{tmp_path / 'run' / 'model'}\n")
    model = tmp_path / "run" / "model"

    code, out, _ = call(
        capsys, "encode", "--model", model, "--input", data, "--output", tmp_path / "vectors"
    )
    assert code == 0
    assert "40 passage vectors of 32 numbers" in out
    code, out, _ = call(
        capsys, "encode", "--model", model, "--input", data, "--output", tmp_path / "asked",
        "--kind", "query",
    )  # fmt: skip
    assert "40 query vectors of 32 numbers" in out

    trec = tmp_path / "test.trec"
    code, out, _ = call(
        capsys, "search", "--model", model, "--data", data, "--embeddings", tmp_path / "vectors",
        "--output", trec,
    )  # fmt: skip
    assert (code, out) == (0, f"{trec}\n")
    assert len(trec.read_text().splitlines()) == 10 * 40

    direct, scored = tmp_path / "run" / "metrics.json", tmp_path / "scored.json"
    code, out, _ = call(capsys, "evaluate", "--model", model, "--data", data, "--output", direct)
    assert code == 0
    assert out.splitlines()[0].split() == ["@1", "@3", "@5", "@10", "@20", "@100"]
    qrels = data / "qrels" / "test.tsv"
    assert call(capsys, "evaluate", "--run", trec, "--qrels", qrels, "--output", scored)[0] == 0
    means = [json.loads(path.read_text())["mean"] for path in (direct, scored)]
    # the run holds 40 passages a query, so it says nothing at 100
    assert {int(name.split("@")[1]) for name in means[1]} == {1, 3, 5, 10, 20}
    assert {name: means[0][name] for name in means[1]} == pytest.approx(means[1])
    assert len(json.loads(direct.read_text())["per_query"]) == 10
    assert evaluate(str(model), str(data))["mean"] == pytest.approx(means[0])
    assert evaluate(DualEncoder.load(model), str(data))["mean"] == pytest.approx(means[0])
    assert search(str(model), str(data)) == search(DualEncoder.load(model), str(data))

    baseline = tmp_path / "bm25"
    assert (
        call(
            capsys, "evaluate", "--model", "bm25", "--data", data,
            "--output", baseline / "metrics.json",
        )[0]
        == 0
    )  # fmt: skip
    code, out, _ = call(capsys, "report", tmp_path / "run", baseline)
    head, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in out.splitlines()
    ]
    assert head[:3] == ["run", "settings", "ndcg@10"], (head, rows)
    assert len(head) == 7
    assert ["run", "grad_cache", f"{means[0]['ndcg@10']:.4f}"] in [row[:3] for row in rows]
    assert ["bm25", "-"] in [row[:2] for row in rows]


def trec_of(capsys, data, model, path, *options: object) -> list[tuple[str, str, float]]:
    code, _, err = call(
        capsys, "search", "--model", model, "--data", data, "--output", path, "--k", 40, *options
    )
    assert code == 0, err
    lines = [line.split() for line in path.read_text().splitlines()]
    return [(query, passage, float(score)) for query, _, passage, _, score, _ in lines]


def test_form_backend_and_index_of_a_search_reach_it_from_the_command_line(
    data, run, tmp_path, capsys
):
    model, trec, vectors = run / "model", tmp_path / "out.trec", tmp_path / "vectors"
    form = ["--dtype", "float16", "--shard_size", 15, "--batch_tokens", 40]
    assert (
        call(capsys, "encode", "--model", model, "--input", data, "--output", vectors, *form)[0]
        == 0
    )
    shards = [np.load(path) for path in sorted(vectors.glob("*.npy"))]
    assert [(len(shard), shard.dtype) for shard in shards] == [
        (15, "float16"),
        (15, "float16"),
        (10, "float16"),
    ]

    exact = trec_of(capsys, data, model, trec)
    for backend in ("faiss", "torch"):
        assert trec_of(
            capsys, data, model, trec, "--backend", backend, "--batch_tokens", 10_000
        ) == [(query, passage, pytest.approx(score, abs=1e-5)) for query, passage, score in exact]
    rounded = trec_of(capsys, data, model, trec, "--embeddings", vectors)
    assert rounded != exact
    assert [score for *_, score in rounded] == pytest.approx(
        [score for *_, score in exact], abs=2e-3
    )

    index = ["--factory", "IVF2,Flat", "--index_dir", tmp_path / "index"]
    some = trec_of(capsys, data, model, trec, *index, "--search_params", "nprobe=1")
    assert 0 < len(some) < len(exact)
    assert (tmp_path / "index" / "index.faiss").is_file()
    everything = trec_of(capsys, data, model, trec, *index, "--search_params", "nprobe=2")
    assert {hit[:2] for hit in everything} == {hit[:2] for hit in exact}
    index[1] = "IVF3,Flat"
    call_again = [
        "search", "--model", model, "--data", data, "--output", tmp_path / "other.trec", *index,
    ]  # fmt: skip
    code, _, err = call(capsys, *call_again)
    assert (code, "was made with other data or settings (factory 'IVF2,Flat'" in err) == (
        2,
        True,
    )
    assert len(err.strip().splitlines()) == 1
    assert not (tmp_path / "other.trec").exists()


@pytest.mark.filterwarnings("always::UserWarning")
def test_repair_accepts_repeated_ids_in_training_and_evaluation(data, run, tmp_path, capsys):
    with (data / "queries.jsonl").open("a") as file:
        file.write(json.dumps({"_id": "q0", "text": "where is the red fox of valley 0 now"}) + "\n")
    config = train_config(data, tmp_path / "again", **{"data.dev": str(data), "optim.max_steps": 1})
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    for call_of in (
        ["train", "--config", tmp_path / "config.yaml", "--data.repair"],
        ["evaluate", "--model", run / "model", "--data", data, "--repair"],
        ["data", "check", data, "--repair"],  # reads the file once for each split
    ):
        refused = [*call_of, "false"] if call_of[0] == "train" else call_of[:-1]
        code, _, err = call(capsys, *refused)
        assert code == 2
        assert "queries.jsonl:41: duplicate query id 'q0' (first at line 1)" in err
        code, _, err = call(capsys, *call_of, *(["true"] if call_of[0] == "train" else []))
        assert code == 0
        assert "contaccum: warning: " in err
        assert err.count("skipped 1 query with the id of a later one") == 1


@pytest.mark.parametrize("changes", [{"model.tiny_width": 64}, {"data.train": "other"}])
def test_embeddings_of_another_model_or_corpus_are_refused(changes, data, run, tmp_path, capsys):
    vectors = tmp_path / "vectors"
    assert (
        call(capsys, "encode", "--model", run / "model", "--input", data, "--output", vectors)[0]
        == 0
    )
    if "data.train" in changes:
        data = write_beir(tmp_path / "other", queries=30)
        model = run / "model"
    else:
        model = train(train_config(data, tmp_path / "wide", **changes))
    code, _, err = call(
        capsys, "search", "--model", model, "--data", data, "--embeddings", vectors,
        "--output", tmp_path / "out.trec",
    )  # fmt: skip
    assert code == 2
    assert str(vectors) in err
    assert not (tmp_path / "out.trec").exists()


def help_of(capsys, *words: str) -> str:
    assert main([*words, "--help"]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", [name for name, command in COMMANDS.items() if command.main])
def test_short_help_shows_an_example_and_the_options_that_matter(name, capsys):
    command = COMMANDS[name]
    text = help_of(capsys, name)
    assert f"example:\n\n    {command.example}\n" in text
    shown = re.findall(r"^  --(\S+)", text, re.MULTILINE)
    assert shown == [option for options in command.main.values() for option in options]
    assert len(shown) <= 18
    assert f"`contaccum {name} --help all` shows all {len(command.settings())} settings." in text
    assert "(at least" not in text


def test_examples_are_valid_command_lines():
    for name, command in COMMANDS.items():
        if command.example:
            program, *words = command.example.split()
            assert (program, words[: len(name.split())]) == ("contaccum", name.split())
            options, prints_config = parse(name, command, words[len(name.split()) :])
            assert options
            assert not prints_config


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_has_a_help_text(name, capsys):
    command = COMMANDS[name]
    assert main([*name.split(), "--help", "all"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert " ".join(command.description.split()) in text
    texts = {key: value for kind in command.kinds for key, value in help_texts(kind).items()}
    assert command.settings().keys() <= texts.keys()
    assert not [key for key, value in texts.items() if not value.endswith((".", ".)"))]


OPTIONS = Path(__file__).parent / "options.txt"


def test_commands_and_options_are_the_listed_ones():
    """A new option needs an edit of options.txt, made by: python tests/test_cli.py >
    tests/options.txt"""
    assert options_of_all_commands() == OPTIONS.read_text()


def options_of_all_commands() -> str:
    """Return a line with command, option and default for each option.

    Settings of training are listed once.
    """
    lines = []
    for name, command in COMMANDS.items():
        for option, declared in command.settings().items():
            if name == "train" or option not in train_settings() or not command.trains:
                default = default_of(declared)
                lines.append(
                    f"{name} {option} {'required' if default is MISSING else json.dumps(default)}\n"
                )
    return "".join(lines)


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"contaccum {contaccum.__version__}\n"


def test_start_up_needs_no_torch(tmp_path):
    """`--help`, a refused config, the `data` commands and `evaluate --run` import no torch."""
    run, qrels = tmp_path / "run.trec", tmp_path / "qrels.tsv"
    run.write_text("q Q0 p 1 1.0 x\n")
    qrels.write_text("q\tp\t1\n")
    script = """
import sys
from contaccum.cli import main
main(sys.argv[1:])
print("torch" in sys.modules)
"""
    for arguments in (
        ["--help"],
        ["train", "--help"],
        ["train", "--bank.sise", "3"],
        ["data", "check", "absent"],
        ["evaluate", "--run", run, "--qrels", qrels],
    ):
        done = subprocess.run(
            [sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=True
        )
        assert done.stdout.splitlines()[-1] == "False"


@pytest.mark.filterwarnings("always:BM25 found no passage")
def test_a_query_without_results_is_answered_with_a_sentence(data, capsys):
    """BM25 finds nothing if no passage has a word of the query."""
    assert main(["search", "--model", "bm25", "--data", str(data), "--query", "xylophone"]) == 0
    assert capsys.readouterr().out == "no passage was found\n"


def test_prefixes_of_options_are_not_completed(capsys):
    for words in (
        ["train", "--optim.learning_rat", "1"],
        ["train", "--methd", "x"],
        ["report", "a", "--metri", "x"],
    ):
        assert main(words) == 2
        assert "has no such option; did you mean --" in capsys.readouterr().err


if __name__ == "__main__":
    print(options_of_all_commands(), end="")

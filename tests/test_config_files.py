"""Settings in config files and on the command line: what is refused, with which sentence, and what
overrides what."""

from pathlib import Path

import pytest
import yaml

from contaccum.cli import main
from contaccum.cli.commands import COMMANDS
from contaccum.config import TrainConfig, to_yaml
from contaccum.config.load import described

SOUND = "output_dir: out\ndata: {train: nowhere, hard_negatives: 1}\n"
"""Settings that are accepted; the command then ends because the data do not exist."""


def refused(capsys, *arguments: object) -> str:
    assert main([str(argument) for argument in arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), err.startswith("contaccum: ")) == ("", 1, True), err
    assert "class '" not in err
    assert "Traceback" not in err
    return err.removeprefix("contaccum: ")


def printed(capsys, *arguments: str) -> dict:
    assert main(["train", *arguments, "--print_config"]) == 0
    return yaml.safe_load(capsys.readouterr().out)


@pytest.fixture
def written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(text: str | bytes) -> str:
        Path("c.yaml").write_bytes(text.encode() if isinstance(text, str) else text)
        return "c.yaml"

    return write


def test_sound_config_gets_as_far_as_its_data(written, capsys):
    """Negative control of this file: the settings that the cases add to are accepted."""
    dotted = "optim.learning_rate: 0.1\noptim: {max_steps: 3}\n"
    for text in (
        SOUND,
        SOUND + dotted,
        SOUND + "format_version: 1\n",
        SOUND + "bank: &b {size: 256}\n",
    ):
        assert "nowhere" in refused(capsys, "train", "--config", written(text))


BOMB = "a0: &a0 [x]\n" + "".join(
    f"a{n + 1}: &a{n + 1} [{', '.join([f'*a{n}'] * 9)}]\n" for n in range(9)
)
MIXTURE = "data:\n  mixture: [{}]\n"
FILES: list[tuple[str | bytes, str]] = [
    ("", "c.yaml: is empty, expected YAML with settings, such as 'seed: 1'"),
    ("\n- a\n- b\n", "c.yaml:2: found a list, expected settings"),
    ("hello\n", "c.yaml:1: found 'hello', expected settings"),
    ("5\n", "c.yaml:1: found 5, expected settings"),
    ("batch:\n\tmicro_batch_size: 2\n",
     "c.yaml:2: not valid YAML (found character '\\t' that cannot start any token)"),
    ("method cont_accum\nseed: 1\n", "c.yaml:2: not valid YAML"),
    (b"method: \xff\n", "c.yaml: byte 8 is not UTF-8, expected YAML"),
    (b"method: \0\n", "c.yaml: not usable YAML"),
    ("a: " + "[" * 99_000 + "]" * 99_000, "c.yaml: not usable YAML"),
    (BOMB, "c.yaml:1: a0: no such setting"),
    ("output_dir: !secret x\n",
     "c.yaml:1: not valid YAML (could not determine a constructor for the tag '!secret')"),
    ("output_dir: !!python/object/apply:os.mkdir [x]\n", "c.yaml:1: not valid YAML"),
    ("seed: " + "9" * 5000 + "\n", "c.yaml: not usable YAML"),
    # names
    ("seed: 1\nconfig: other.yaml\n", "c.yaml:2: config: no such setting"),
    ("model: {class_path: x}\n", "c.yaml:1: model.class_path: no such setting"),
    ("bank: {sise: 4}\n", "c.yaml:1: bank.sise: no such setting; did you mean bank.size?"),
    ("optm:\n  epochs: 1\n", "c.yaml:2: optm.epochs: no such setting; did you mean optim.epochs?"),
    ("bank: 5\n", "c.yaml:1: bank is 5, expected a group of settings, such as bank.size"),
    ("seed: 1\nbank: [1]\n",
     "c.yaml:2: bank is [1], expected a group of settings, such as bank.size"),
    ("format_version: 2\n", "c.yaml:1: format_version is 2, expected 1"),
    # a setting twice
    ("seed: 1\nseed: 2\n",
     "c.yaml:2: duplicate setting 'seed' (first in line 1); give each setting once"),
    ("bank: {size: 4}\nbank: {size: 4}\n",
     "c.yaml:2: duplicate setting 'bank.size' (first in line 1)"),
    ("optim.epochs: 1\noptim: {epochs: 2}\n",
     "c.yaml:2: duplicate setting 'optim.epochs' (first in line 1)"),
    ("run:\n  device: cpu\n  tf32: true\n  device: auto\n",
     "c.yaml:4: duplicate setting 'run.device' (first in line 2)"),
    # values
    ("seed:", "c.yaml:1: seed is null, expected a whole number (at least 0)"),
    ("seed: ''\n", "c.yaml:1: seed is '', expected a whole number (at least 0)"),
    ("run: {tf32: 1}\n", "c.yaml:1: run.tf32 is 1, expected true or false"),
    ("bank: {size: true}\n",
     "c.yaml:1: bank.size is true, expected a whole number (at least 0), or null"),
    ("bank: {size: [4]}\n", "c.yaml:1: bank.size is [4], expected a whole number"),
    ("bank: {size: -4}\n", "c.yaml:1: bank.size is -4, expected at least 0"),
    ("model: {temperature: 0}\n", "c.yaml:1: model.temperature is 0, expected more than 0"),
    ("optim: {warmup_ratio: 2}\n", "c.yaml:1: optim.warmup_ratio is 2, expected from 0 to 1"),
    ("optim: {learning_rate: .nan}\n",
     "c.yaml:1: optim.learning_rate is nan, expected a finite number"),
    ("optim: {learning_rate: .inf}\n",
     "c.yaml:1: optim.learning_rate is inf, expected a finite number"),
    ("run: {metric: 7}\n", "c.yaml:1: run.metric is 7, expected text; write it in quotes"),
    ("data:\n  train: {a: 1}\n", "c.yaml:2: data.train is a mapping, expected text"),
    ("run: {trackers: [[]]}\n", "c.yaml:1: run.trackers is a list, expected a list of texts"),
    # data.mixture
    (MIXTURE.format("{train: a, weightt: 3}"),
     "c.yaml:2: data.mixture[0].weightt: no such setting; did you mean weight?"),
    (MIXTURE.format("{train: a}, {train: b, weight: heavy}"),
     "c.yaml:2: data.mixture[1].weight is 'heavy', expected a number (more than 0), or null"),
    (MIXTURE.format("{train: a, train: b}"),
     "c.yaml:2: not valid YAML (duplicate key 'train', first in line 2)"),
    (MIXTURE.format("scifact"),
     "c.yaml:2: data.mixture[0] is 'scifact', expected a mapping with train, split, weight"),
    ("data: {mixture: scifact}\n",
     "c.yaml:1: data.mixture is 'scifact', expected a list of mappings with train, split"),
]  # fmt: skip
"""Content of a config file -> the sentence that refuses it."""


@pytest.mark.parametrize(("text", "sentence"), FILES, ids=lambda value: str(value)[:40])
def test_wrong_config_file_is_refused_with_file_and_line(text, sentence, written, capsys):
    assert refused(capsys, "train", "--config", written(text)).startswith(sentence)
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: None, "c.yaml: cannot be read (No such file or directory)"),
        (lambda path: path.mkdir(), "c.yaml: cannot be read (Is a directory)"),
        (lambda path: path.symlink_to(path.name), "c.yaml: cannot be read (Too many levels"),
    ],
)
def test_path_that_is_no_file_is_refused(make, words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make(Path("c.yaml"))
    assert refused(capsys, "train", "--config", "c.yaml").startswith(words)


VALUES = [
    ("bank.size", "many", "expected a whole number (at least 0), or null"),
    ("bank.size", "4.5", "expected a whole number (at least 0), or null"),
    ("run.tf32", "maybe", "expected true or false"),
    ("optim.learning_rate", "fast", "expected a number (at least 0)"),
    ("loss.matryoshka_dims", "64", "expected a list of whole numbers"),
    (
        "method",
        "cont_acum",
        "expected one of in_batch, grad_accum, grad_cache, passage_bank, cont_accum, cont_cache; "
        "did you mean cont_accum?",
    ),
    ("run.precision", "half", "expected one of auto, fp32, bf16, fp16"),
    ("model.pooling", "none", "expected one of cls, mean, last, or null\n"),
    ("model.similarity", "cosin", "expected one of cosine, dot, or null; did you mean cosine?"),
]


@pytest.mark.parametrize(("name", "value", "words"), VALUES)
def test_wrong_value_is_answered_with_the_allowed_values(name, value, words, written, capsys):
    for call, where in (
        (["train", f"--{name}", value], f"--{name} is "),
        (
            ["train", "--config", written(f"output_dir: out\n{name}: {value}\n")],
            f"c.yaml:2: {name} is ",
        ),
        (["train", "--config", "c.yaml", f"--{name}={value}"], f"--{name} is "),
    ):
        err = refused(capsys, *call)
        assert err.startswith(where)
        assert value in err
        assert words in err


@pytest.mark.parametrize("name", ["seed", "model.dropout", "batch.micro_batch_tokens"])
def test_empty_value_is_answered_with_the_allowed_values(name, capsys):
    """As --seed "$SEED" without SEED."""
    assert refused(capsys, "train", f"--{name}", "").startswith(f"--{name} is '', expected a")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["search", "--model", "m", "--data", "d", "--query", "q", "--k", "0"],
         "--k is 0, expected at least 1"),
        (["evaluate", "--model", "m", "--data", "d", "--processes", "x"],
         "--processes is 'x', expected a whole number"),
        (["compare", "--config", "c.yaml", "--seeds", "0"], "--seeds is 0, expected at least 1"),
        (["compare", "--config", "c.yaml", "--seed", "-1"], "--seed is -1, expected at least 0"),
    ],
)  # fmt: skip
def test_wrong_value_of_other_commands_is_refused(arguments, words, written, capsys):
    written(SOUND)
    assert refused(capsys, *arguments).startswith(words)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("learning_rate", "did you mean {0}optim.learning_rate?"),
        ("learningrate", "did you mean {0}optim.learning_rate?"),
        ("batch_size", "did you mean {0}batch.global_batch_size or {0}batch.micro_batch_size?"),
        ("bank.sise", "did you mean {0}bank.size?"),
    ],
)  # fmt: skip
def test_misspelt_name_is_answered_with_the_closest_setting(name, words, written, capsys):
    assert words.format("--") in refused(capsys, "train", f"--{name}", "1")
    assert words.format("--") in refused(capsys, "train", f"--{name}=1")
    err = refused(capsys, "train", "--config", written(f"output_dir: out\n{name}: 1\n"))
    assert words.format("") in err
    assert err.startswith("c.yaml:2: ")


def test_a_setting_of_training_is_answered_with_the_option_of_another_command(capsys):
    call = ["evaluate", "--model", "bm25", "--data", "x"]
    assert refused(capsys, *call, "--run.device", "cpu").endswith(
        "no such option; did you mean --device?\n"
    )


@pytest.mark.parametrize("prefix", ["# ", "&a", "&query ", "1", "true", "[a"])
def test_a_text_on_the_command_line_is_not_read_as_yaml(prefix, capsys):
    """A comment or an anchor is no value in YAML: the prefix would be left out silently."""
    model = printed(capsys, "--model.query_prefix", prefix, "--model.passage_prefix", "null")[
        "model"
    ]
    assert (model["query_prefix"], model["passage_prefix"]) == (prefix, None)


def test_numbers_are_read_as_people_write_them(written, capsys):
    """YAML 1.1 would read 1e-3 as a text, and 2026-11-25 as a date."""
    found = printed(
        capsys,
        "--config",
        written("optim: {learning_rate: 1e-3}\nmodel: {query_prefix: 2026-11-25}\n"),
    )
    assert (found["optim"]["learning_rate"], found["model"]["query_prefix"]) == (
        0.001,
        "2026-11-25",
    )
    assert printed(capsys, "--optim.learning_rate", "2e-4")["optim"]["learning_rate"] == 0.0002
    assert printed(capsys, "--loss.matryoshka_dims", "[8, 16]")["loss"]["matryoshka_dims"] == [
        8,
        16,
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--config", "c.yaml", "--seed", "3"],
        ["--seed", "3", "--config", "c.yaml"],
        ["--seed=3", "--config=c.yaml"],
        ["--seed", "3", "--config", "c.yaml", "--config", "d.yaml"],
    ],
)
def test_options_override_the_config_also_before_it(arguments, written, capsys):
    written("seed: 1\nbank: {size: 200}\n")
    Path("d.yaml").write_text("seed: 2\nbank: {size: 300}\n")
    found = printed(capsys, *arguments)
    assert (found["seed"], found["bank"]["size"]) == (3, 300 if "d.yaml" in arguments else 200)


@pytest.mark.parametrize(
    "arguments",
    [
        ["train"],
        ["compare"],
        ["plan", "--memory", "8GB"],
        ["auto", "--memory", "8GB", "--time", "1m"],
    ],
)
def test_config_of_a_finished_run_is_accepted(arguments, written, capsys):
    config = TrainConfig(output_dir="out")
    config.data.train = "nowhere"
    config.model.name = "tiny"
    assert main([*arguments, "--config", written(to_yaml(config))]) == 2
    assert "contaccum: nowhere: " in capsys.readouterr().err


def test_every_setting_says_what_it_accepts():
    assert all(
        described(declared.type)
        for command in COMMANDS.values()
        for declared in command.settings().values()
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["report"],
            "contaccum report: the following arguments are required: RUNS; contaccum report --help "
            "lists",
        ),
        (["merge"], "contaccum merge: the following arguments are required: MODEL, OUTPUT;"),
        (["data", "convert", "a"],
         "contaccum data convert: the following arguments are required: TARGET, --to;"),
        (["encode", "--model", "x"],
         "contaccum encode: the following arguments are required: --input, --output;"),
        (["train", "--seed"], "contaccum train: argument --seed: expected one argument;"),
        (["train", "seed"], "contaccum train: unexpected argument 'seed';"),
        (["train", "--resume", "true"], "--resume takes no value, but got 'true'"),
        (["train", "--data", "x"],
         "--data is a group of settings, expected one of them, such as --data."),
        (["data", "convertt", "a"],
         "contaccum data convertt: no such command; did you mean contaccum data convert?"),
        (["searchh"], "contaccum searchh: no such command; did you mean contaccum search?"),
        (["fly"], "contaccum fly: no such command; contaccum --help lists the commands"),
        (["data"], "no command was given; contaccum data --help lists the commands"),
    ],
)  # fmt: skip
def test_incomplete_or_misspelt_call_is_answered_with_what_is_missing(arguments, words, capsys):
    assert refused(capsys, *arguments).startswith(words)

"""Settings in config files and on the command line: given twice, internal keys, other trainers' names, limits."""

import os
from pathlib import Path

import pytest
import yaml

from contaccum.cli import main
from contaccum.cli.commands import COMMANDS
from contaccum.config import GROUPS, TrainConfig, check_values, to_yaml, train_settings
from contaccum.config.declare import LIMITS, describe, leaves
from contaccum.config.file import MAX_BYTES, MAX_NODES
from contaccum.config.spellings import _OTHER_TRAINERS
from contaccum.errors import InputError

SOUND = "output_dir: out\ndata: {train: nowhere, hard_negatives: 1}\n"
"""Settings that are accepted; the command then ends because the data do not exist."""


def refused(capsys, *arguments: object) -> str:
    assert main([str(argument) for argument in arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), err.startswith("contaccum: ")) == ("", 1, True), err
    assert "class '" not in err
    assert "Traceback" not in err
    return err.removeprefix("contaccum: ")


@pytest.fixture
def written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(text: str) -> str:
        Path("c.yaml").write_text(text)
        return "c.yaml"

    return write


def test_sound_config_gets_as_far_as_its_data(written, capsys):
    """Negative control of this file: the settings that the cases add to are accepted."""
    dotted = "optim.learning_rate: 0.1\noptim: {max_steps: 3}\n"
    for text in (
        SOUND,
        SOUND + dotted,
        SOUND + "bank: &b {size: 256}\n",
        SOUND + "loss: {<<: {distillation_weight: 1.0}}\n",
    ):
        assert "nowhere" in refused(capsys, "train", "--config", written(text))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("optim.learning_rate: 1.0e-3\noptim: {learning_rate: 1.0e-5}\n", "optim.learning_rate"),
        ("optim: {learning_rate: 1.0e-5}\noptim.learning_rate: 1.0e-5\n", "optim.learning_rate"),
        ("bank: {size: 4}\nseed: 1\nbank: {age_decay: 0.1}\n", "bank"),
        ("data.hard_negatives: 1\ndata.hard_negatives: 1\n", "data.hard_negatives"),
        ("run:\n  device: cpu\n  tf32: true\n  device: auto\n", "run.device"),
        ("lora.rank: 0\nlora:\n  alpha: 2.0\n  rank: 4\n", "lora.rank"),
    ],
)
@pytest.mark.parametrize("command", ["train", "compare"])
def test_setting_given_twice_is_refused(command, text, name, written, capsys):
    err = refused(capsys, command, "--config", written("output_dir: out\n" + text))
    assert f"duplicate setting {name!r} (first in line " in err
    assert err.startswith("c.yaml:")


@pytest.mark.parametrize(
    "key", ["__path__", "__orig__", "__default_config__", "__class__", "config", "class_path", "init_args"]
)
@pytest.mark.parametrize(
    "where", ["{}: x\n", "model: {{{}: x}}\n", "data: {{mixture: [{{train: a, {}: x}}]}}\n", "bank.{}: x\n"]
)
def test_internal_key_is_refused(key, where, written, capsys):
    err = refused(capsys, "train", "--config", written("output_dir: out\n" + where.format(key)))
    assert f"{key}'" in err
    assert err.startswith("c.yaml:2: ")


def fifo(path: Path) -> None:
    os.mkfifo(path)


NO_CONFIG = {
    "FIFO": (fifo, "not a regular file"),
    "endless device": (lambda path: path.symlink_to("/dev/zero"), "not a regular file"),
    "null device": (lambda path: path.symlink_to("/dev/null"), "not a regular file"),
    "folder": (lambda path: path.mkdir(), "c.yaml: "),
    "loop": (lambda path: path.symlink_to(path.name), "cannot be read"),
    "100 MB": (
        lambda path: path.write_bytes(b"#" * 10**8),
        f"has 100000000 bytes; a YAML file with settings may have at most {MAX_BYTES}",
    ),
    "many lists": (
        lambda path: path.write_text("a: [" + "[]," * (MAX_NODES + 1) + "]"),
        f"more than {MAX_NODES} values",
    ),
    "deep lists": (lambda path: path.write_text("a: " + "[" * 30 + "]" * 30), "nested deeper than 20 levels"),
    "deep mappings": (lambda path: path.write_text("{a: " * 30 + "1" + "}" * 30), "nested deeper than 20 levels"),
    "deepest lists": (lambda path: path.write_text("a: " + "[" * 200_000), "c.yaml: not usable YAML"),
}


@pytest.mark.parametrize("name", NO_CONFIG)
def test_file_that_is_no_config_is_refused_at_once(name, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make, words = NO_CONFIG[name]
    make(Path("c.yaml"))
    assert words in refused(capsys, "train", "--config", "c.yaml")


NINES = "9" * 5000
NUMBERS = [
    ("bank.size", NINES, "has 5000 digits, expected at most 60"),
    ("bank.size", "-" + NINES, "digits, expected at most 60"),
    ("optim.learning_rate", "1" + "0" * 400, "has 401 digits, expected at most 60"),
    ("optim.learning_rate", "1.0e+400", "is inf, expected a finite number"),
    ("bank.size", "1" + "0" * 30, "bank.size is 1e+30, expected at most 1e+09, because no machine can handle more"),
    ("batch.global_batch_size", "1" + "0" * 12, "batch.global_batch_size is 1e+12, expected at most 1e+07"),
    ("batch.micro_batch_size", "10000001", "batch.micro_batch_size is 1e+07, expected at most 1e+07"),
    ("batch.micro_batch_tokens", "2000000000", "batch.micro_batch_tokens is 2e+09, expected at most 1e+09"),
    ("model.tiny_layers", "1000000000", "model.tiny_layers is 1e+09, expected at most 1000"),
    ("model.tiny_width", "32000000", "model.tiny_width is 3.2e+07, expected at most 100000"),
    ("run.timeout_minutes", "1.0e+300", "run.timeout_minutes is 1e+300, expected at most 1e+06"),
    ("lora.rank", "1000000000", "lora.rank is 1e+09, expected at most 100000"),
    ("data.hard_negatives", "1" + "0" * 50, "data.hard_negatives is 1e+50, expected at most 1e+12"),
    ("optim.epochs", "1.0e+18", "optim.epochs is 1e+18, expected at most 1e+06"),
    ("loss.matryoshka_dims", "[10000000]", "loss.matryoshka_dims is 1e+07, expected at most 100000"),
    ("model.query_prefix", "x" * 90_000, "model.query_prefix has 90000 characters, expected at most 10000"),
]


@pytest.mark.parametrize(("name", "value", "words"), NUMBERS, ids=lambda value: str(value)[:20])
def test_number_or_text_that_no_machine_can_meet_is_refused(name, value, words, written, capsys):
    group, _, field = name.partition(".")
    sound = yaml.safe_load(SOUND)
    sound.setdefault(group, {})[field] = "VALUE"
    text = yaml.safe_dump(sound).replace("VALUE", value)
    assert words in refused(capsys, "train", "--config", written(text))
    assert words in refused(capsys, "train", "--config", written(SOUND), f"--{name}", value)
    assert not Path("out").exists()


def test_limits_name_units_that_settings_have_and_allow_every_default():
    """A prefix of 50 MB is only possible in Python."""
    assert set(LIMITS) <= {spec.unit for spec in train_settings().values()} | {"processes", "seeds", "runs"}
    config = TrainConfig()
    check_values(config)
    config.model.passage_prefix = "p" * 50_000_000
    with pytest.raises(InputError, match=r"model\.passage_prefix has 50000000 characters, expected at most 10000"):
        check_values(config)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["search", "--model", "m", "--data", "d", "--query", "q", "--k", "1" + "0" * 13],
            "--k is 1e+13, expected at most",
        ),
        (
            ["encode", "--model", "m", "--input", "i", "--output", "o", "--batch_tokens", "1" + "0" * 10],
            "at most 1e+09",
        ),
        (["compare", "--config", "c.yaml", "--seeds", "1" + "0" * 20], "--seeds is 1e+20, expected at most 1000"),
        (["mine", "--model", "m", "--data", "d", "--output", "o", "--num_negatives", "9" * 70], "has 70 digits"),
        (["train", "--data.mixture", "[" * 20_000], "--data.mixture has more than 200 brackets"),
    ],
)
def test_option_of_any_command_that_no_machine_can_meet_is_refused(arguments, words, written, capsys):
    written(SOUND)
    assert words in refused(capsys, *arguments)


OTHER_NAMES = [
    (
        "per_device_train_batch_size",
        "16",
        "use {0}batch.global_batch_size with the value 16 (pairs per update), or {0}batch.micro_batch_size (pairs in memory)",
    ),
    (
        "gradient_accumulation_steps",
        "16",
        "use {}batch.global_batch_size with the value 16 x batch.micro_batch_size x number of processes",
    ),
    ("num_train_epochs", "3", "use {}optim.epochs with the value 3"),
    ("num_epochs", "3", "use {}optim.epochs with the value 3"),
    ("fp16", "true", "use {}run.precision with the value fp16"),
    ("bf16", "true", "use {}run.precision with the value bf16"),
    ("lr_scheduler_type", "cosine", "use {}optim.schedule with the value linear, cosine or constant"),
    ("sequence_len", "512", "use {}model.max_passage_length with the value 512"),
    ("scale", "20", "use {}model.temperature with the value 1 / 20"),
    ("max_seq_length", "64", "use {}model.max_passage_length with the value 64 (for queries: max_query_length)"),
    ("q_max_len", "32", "use {}model.max_query_length with the value 32"),
    ("train_n_passages", "8", "use {}data.hard_negatives with the value 8 - 1"),
    ("model_name_or_path", "bert-base-uncased", "use {}model.name with the value bert-base-uncased"),
    ("base_model", "bert-base-uncased", "use {}model.name with the value bert-base-uncased"),
    ("save_total_limit", "2", "use {}run.keep_checkpoints with the value 2"),
    ("load_in_4bit", "true", "use {}model.quantize with the value 4bit"),
    ("lora_r", "16", "use {}lora.rank with the value 16"),
    ("resume_from_checkpoint", "x", "use {}resume"),
    ("learning_rate", "1", "did you mean {}optim.learning_rate?"),
    ("max_steps", "1", "did you mean {}optim.max_steps?"),
    ("weight_decay", "1", "did you mean {}optim.weight_decay?"),
    ("gradient_checkpointing", "true", "did you mean {}model.gradient_checkpointing?"),
    ("learningrate", "1", "did you mean {}optim.learning_rate?"),
    ("optim.lr", "1", "use {}optim.learning_rate with the value 1"),
]


@pytest.mark.parametrize(("name", "value", "words"), OTHER_NAMES)
def test_name_of_another_trainer_is_answered_with_our_setting(name, value, words, written, capsys):
    assert words.format("--") in refused(capsys, "train", f"--{name}", value)
    assert words.format("--") in refused(capsys, "train", f"--{name}={value}")
    err = refused(capsys, "train", "--config", written(f"output_dir: out\n{name}: {value}\n"))
    assert words.format("") in err
    assert err.startswith("c.yaml:2: ")


def test_a_misspelt_group_is_answered_with_the_group(written, capsys):
    err = refused(capsys, "train", "--config", written("optm:\n  epochs: 1\n"))
    assert err.startswith("c.yaml:1: optm: no such setting; did you mean optim?")


def test_every_advised_setting_exists_and_no_name_is_ours():
    options = {option for command in COMMANDS.values() for option, *_ in command.declared()}
    for line in _OTHER_TRAINERS.strip().splitlines():
        theirs, _, ours = line.partition(" = ")
        for each in ours.split(" ")[0].split("|"):
            assert each in options
        assert not set(theirs.split(", ")) & set(train_settings())
        assert not set(theirs.split(", ")) & set(GROUPS)


def test_switches_are_advised_and_refused_as_they_are_written(written, capsys):
    """The advice once was --resume with the value true, and --resume true was answered with: unrecognized arguments: true."""
    assert "; use --resume, with output_dir" in refused(capsys, "train", "--resume_from_checkpoint", "x")
    advice = refused(capsys, "train", "--config", written("resume_from_checkpoint: x\n"))
    assert "; use resume with the value true, with output_dir" in advice
    for switch in (["--resume", "true"], ["--resume=true"]):
        assert "--resume takes no value, but got 'true'" in refused(capsys, "train", *switch)


@pytest.mark.parametrize("prefix", ["# ", "&a", "&query "])
def test_a_value_that_yaml_reads_as_nothing_is_a_text(prefix, capsys):
    """A comment or an anchor was read as an empty YAML text, that is null: the prefix was left out silently."""
    with pytest.raises(SystemExit, match="0"):
        main(["train", "--model.query_prefix", prefix, "--model.passage_prefix", "null", "--print_config"])
    model = yaml.safe_load(capsys.readouterr().out)["model"]
    assert (model["query_prefix"], model["passage_prefix"]) == (prefix, None)


def test_a_switch_of_another_trainer_does_not_swallow_the_next_option(capsys):
    assert "use --run.precision with the value bf16" in refused(capsys, "train", "--bf16", "--seed", "1")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("bank.size", "many", "expected a whole number (at least 0), or null"),
        ("bank.size", "4.5", "expected a whole number (at least 0), or null"),
        ("run.tf32", "maybe", "expected true or false"),
        ("optim.learning_rate", "fast", "expected a number (at least 0)"),
        ("loss.matryoshka_dims", "64", "expected a list of whole numbers"),
        (
            "method",
            "cont_acum",
            "expected one of in_batch, grad_accum, grad_cache, passage_bank, cont_accum, cont_cache; did you mean cont_accum?",
        ),
        ("method", "none", "expected one of in_batch, grad_accum, grad_cache, passage_bank, cont_accum, cont_cache\n"),
        ("run.precision", "half", "expected one of fp32, bf16, fp16"),
        ("model.pooling", "none", "expected one of cls, mean, last, or null\n"),
        ("model.similarity", "cosin", "expected one of cosine, dot, or null; did you mean cosine?"),
        ("optim.schedule", "cosin", "did you mean cosine?"),
    ],
)
def test_wrong_value_is_answered_with_the_allowed_values(name, value, words, written, capsys):
    err = refused(capsys, "train", f"--{name}", value)
    assert err.startswith(f"--{name} is '{value}', ")
    assert words in err
    err = refused(capsys, "train", "--config", written(f"output_dir: out\n{name}: {value}\n"))
    assert err.startswith(f"c.yaml:2: {name} is '{value}', ")
    assert words in err
    assert f"--{name} is " in refused(capsys, "train", "--config", "c.yaml", f"--{name}={value}")


@pytest.mark.parametrize("name", ["seed", "model.dropout", "batch.micro_batch_tokens"])
def test_empty_value_is_answered_with_the_allowed_values(name, written, capsys):
    """As --seed "$SEED" without SEED. The answer once was a sentence of jsonargparse with Python types."""
    assert f"--{name} is '', expected a" in refused(capsys, "train", f"--{name}", "")
    assert f"c.yaml:1: {name} is '', expected a" in refused(capsys, "train", "--config", written(f"{name}: ''\n"))


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
    """A config file once replaced the options before it silently."""
    written("seed: 1\nbank: {size: 200}\n")
    Path("d.yaml").write_text("seed: 2\nbank: {size: 300}\n")
    with pytest.raises(SystemExit, match="0"):
        main(["train", *arguments, "--print_config"])
    found = yaml.safe_load(capsys.readouterr().out)
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
    """Plan and auto once answered the line `resume: false`, which every config.yaml has, with: no such setting."""
    config = TrainConfig(output_dir="out")
    config.data.train = "nowhere"
    config.model.name = "tiny"
    assert main([*arguments, "--config", written(to_yaml(config))]) == 2
    assert "contaccum: nowhere: " in capsys.readouterr().err


def test_a_number_for_a_text_setting_is_answered_with_quotes(written, capsys):
    """`data.train: 123` was once answered with: data.train is '123', expected text."""
    found = refused(capsys, "train", "--config", written("data:\n  train: 123\n"))
    assert "c.yaml:2: data.train is '123', expected text; write it in quotes" in found


def test_every_setting_says_what_it_accepts():
    assert all(describe(declared) for _, _, declared in leaves(TrainConfig()))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["report"], "contaccum report needs RUNS; contaccum report --help lists all options"),
        (["merge"], "contaccum merge needs MODEL and OUTPUT;"),
        (["data", "convert", "a"], "contaccum data convert needs TARGET and --to;"),
        (["encode", "--model", "x"], "contaccum encode needs --input and --output;"),
        (["data", "convertt", "a"], "contaccum data convertt: no such command; did you mean contaccum data convert?"),
        (["searchh"], "contaccum searchh: no such command; did you mean contaccum search?"),
        (["fly"], "contaccum fly: no such command; contaccum --help lists the commands"),
    ],
)
def test_incomplete_or_misspelt_call_is_answered_with_what_is_missing(arguments, words, capsys):
    assert words in refused(capsys, *arguments)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("seed:", "seed is null, expected a value"),
        ("run: {<<: {save_steps: a}}", "c.yaml:1: run.save_steps is 'a', expected a whole number (at least 0)"),
        ("run: {<<: [{seed: 1}]}", "c.yaml:1: run.seed: no such setting; did you mean seed?"),
        ("<<: {run: 3}", "c.yaml:1: run is '3', expected a group of settings"),
        ("<<: {optim: {fused: false}}", "c.yaml:1: optim.fused is false, but this setting was removed"),
        (
            "run:\n  save_steps: a\n  <<: {save_steps: 5}",
            "c.yaml:2: run.save_steps is 'a', expected a whole number (at least 0)",
        ),
    ],
)
def test_wrong_setting_is_named_where_yaml_merges_it_and_without_a_value(text, words, written, capsys):
    assert words in refused(
        capsys, "train", "--config", written(text), "--output_dir", "out", "--data.train", "nowhere"
    )


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("{train: a, weightt: 3}", "c.yaml:2: data.mixture[0].weightt: no such setting; did you mean weight?"),
        ("{train: a, weight: heavy}", "c.yaml:2: data.mixture[0].weight is 'heavy', expected a number (more than 0)"),
        (
            "{train: a, weight: 1}, {train: b, weight: heavy}",
            "c.yaml:2: data.mixture: weight is 'heavy', expected a number (more than 0), or null",
        ),
        ("{train: a, __path__: x}", "c.yaml:2: found the key '__path__'"),
        ("scifact", "c.yaml:2: data.mixture is 'scifact', expected a list of train, split, weight, "),
    ],
)
def test_wrong_entry_of_a_mixture_is_named(entry, words, written, capsys):
    assert words in refused(capsys, "train", "--config", written(f"output_dir: out\ndata: {{mixture: [{entry}]}}\n"))

"""Settings in config files and on the command line: what is refused, with which sentence, and what
overrides what."""

from pathlib import Path

import pytest
import yaml

from contaccum.cli import main
from contaccum.config import TrainConfig, to_yaml
from contaccum.config.load import ELSEWHERE

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
        SOUND + "method: cont_accum\nbank: &b {size: 256}\n",
    ):
        assert "nowhere" in refused(capsys, "train", "--config", written(text))


VALUES = [
    ("bank.size", "many", "expected `int | null`, got `str`"),
    ("optim.learning_rate", "fast", "expected `float`, got `str`"),
    ("optim.warmup_steps", "1.5", "expected a number of steps, or a share of the steps below 1"),
    ("batch.micro_batch_size", "many", "expected N|auto"),
    ("model.similarity", "cosin", "expected {cosine,dot}; did you mean cosine?"),
]


@pytest.mark.parametrize(("name", "value", "words"), VALUES)
def test_wrong_value_is_answered_with_the_allowed_values(name, value, words, written, capsys):
    for call, where in (
        (["train", f"--{name}", value], f"--{name} is "),
        (
            ["train", "--config", written(f"output_dir: out\n{name}: {value}\n")],
            f"c.yaml: {name} is ",
        ),
        (["train", "--config", "c.yaml", f"--{name}={value}"], f"--{name} is "),
    ):
        err = refused(capsys, *call)
        assert err.startswith(where)
        assert value in err
        assert words in err


def test_empty_value_is_answered_with_the_allowed_values(capsys):
    """As --seed "$SEED" without SEED."""
    assert refused(capsys, "train", "--seed", "").startswith("--seed is '', expected `int`")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("learning_rate", "did you mean {0}optim.learning_rate?"),
        ("batch_size", "did you mean {0}batch.global_batch_size or {0}batch.micro_batch_size?"),
        ("bank.sise", "did you mean {0}bank.size?"),
        ("warmup_steps", "did you mean {0}bank.warmup_steps or {0}optim.warmup_steps?"),
        *((name, f"did you mean {{0}}{setting}?") for name, setting in ELSEWHERE.items()),
        ("dev", "did you mean {0}data.dev?"),  # not run.device
        ("optim", "did you mean {0}optim.name?"),
    ],
)  # fmt: skip
def test_misspelt_name_is_answered_with_the_closest_setting(name, words, written, capsys):
    assert words.format("--") in refused(capsys, "train", f"--{name}", "1")
    assert words.format("--") in refused(capsys, "train", f"--{name}=1")
    err = refused(capsys, "train", "--config", written(f"output_dir: out\n{name}: 1\n"))
    assert words.format("") in err
    assert err.startswith("c.yaml: ")


@pytest.mark.parametrize(
    ("option", "closest"), [("--run.device", "--device"), ("--model.name", "--model")]
)
def test_a_setting_of_training_is_answered_with_the_option_of_another_command(
    option, closest, capsys
):
    err = refused(capsys, "evaluate", "--data", "x", option, "x")
    assert err.endswith(f"no such option; did you mean {closest}?\n")


@pytest.mark.parametrize("prefix", ["# ", "&a", "true"])
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


def test_whole_numbers_have_no_other_bases(written, capsys):
    """YAML 1.1 would read 010 as 8, and 1:30 as 90."""
    assert printed(capsys, "--seed", "010")["seed"] == 10
    assert printed(capsys, "--config", written("seed: 0012\n"))["seed"] == 12
    for option, value in (("--optim.warmup_steps", "1:30"), ("--optim.epochs", ".inf")):
        assert main(["train", option, value, "--print_config"]) == 2
        assert f"{option} is " in capsys.readouterr().err
    assert main(["train", "--seed", str(2**70), "--print_config"]) == 2
    assert "expected a number below 2**63" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["08", "1e5", "1_0", "0012", "no", "2026-11-25", ".5", "1:30"])
def test_a_text_that_looks_like_a_number_is_written_in_quotes(text, written, capsys):
    file = written(to_yaml(TrainConfig(output_dir=text)))
    assert printed(capsys, "--config", file)["output_dir"] == text


def test_a_setting_in_a_group_and_by_its_full_name_is_a_duplicate(written, capsys):
    file = written("optim: {learning_rate: 1e-3}\noptim.learning_rate: 2e-3\n")
    assert main(["train", "--config", file, "--print_config"]) == 2
    assert "optim.learning_rate is set twice" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ([], {"micro_batch_size": "auto", "micro_batch_tokens": 2048}),
        (["--method", "grad_accum"], {"micro_batch_size": "auto", "micro_batch_tokens": None}),
        (
            ["--batch.micro_batch_size", "4"],
            {"micro_batch_size": 4, "micro_batch_tokens": None},
        ),
        (
            ["--method", "grad_accum", "--batch.micro_batch_tokens", "512"],
            {"micro_batch_size": "auto", "micro_batch_tokens": 512},
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:.*micro_batch_tokens 2048 is not used, because")
def test_what_a_run_chose_gives_way_to_later_settings(options, kept, written, capsys):
    """The config.yaml of a run, which has its choices for auto, may be the start of another run."""
    file = written(
        "method: grad_cache\nbatch: {micro_batch_size: auto, micro_batch_tokens: 2048}\n"
    )
    batch = printed(capsys, "--config", file, *options)["batch"]
    assert {name: batch[name] for name in kept} == kept


@pytest.mark.parametrize(("options", "size"), [(["--method", "grad_accum"], "auto"), ([], 16)])
@pytest.mark.filterwarnings("ignore:.*micro_batch_size 16 is not used, because")
def test_the_whole_step_of_in_batch_is_no_micro_batch_of_another_method(
    options, size, written, capsys
):
    file = written("method: in_batch\nbatch: {micro_batch_size: 16, global_batch_size: 16}\n")
    assert printed(capsys, "--config", file, *options)["batch"]["micro_batch_size"] == size


@pytest.mark.filterwarnings("ignore:.*model.unpad true is not used, because")
def test_attention_that_needs_padding_gives_padding(written, capsys):
    file = written("model: {unpad: true}\n")
    found = printed(capsys, "--config", file, "--model.attention", "eager")["model"]
    assert (found["attention"], found["unpad"]) == ("eager", "auto")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--config", "c.yaml", "--seed", "3"],
        ["--seed", "3", "--config", "c.yaml", "--config", "d.yaml"],
    ],
)
def test_options_override_the_config_also_before_it(arguments, written, capsys):
    written("seed: 1\nmethod: cont_accum\nbank: {size: 200}\n")
    Path("d.yaml").write_text("seed: 2\nbank: {size: 300}\n")
    found = printed(capsys, *arguments)
    assert (found["seed"], found["bank"]["size"]) == (3, 300 if "d.yaml" in arguments else 200)


@pytest.mark.parametrize(
    "arguments",
    [
        ["train"],
        ["compare"],
    ],
)
def test_config_of_a_finished_run_is_accepted(arguments, written, capsys):
    config = TrainConfig(output_dir="out")
    config.data.train = "nowhere"
    config.model.name = "tiny"
    assert main([*arguments, "--config", written(to_yaml(config))]) == 2
    assert "contaccum: nowhere: " in capsys.readouterr().err

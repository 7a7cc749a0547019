"""Every rule between settings, every config file, and what the run's folder keeps of them."""

import json
import re
import warnings
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import yaml
from helpers import train_config

from contaccum.cli import main
from contaccum.cli.commands import COMMANDS
from contaccum.cli.parser import parse
from contaccum.config import (
    METHOD_SPECS,
    MixtureConfig,
    TrainConfig,
    affects,
    from_mapping,
    load,
    parse_bytes,
    to_yaml,
    train_settings,
    validate,
    with_changes,
)
from contaccum.errors import InputError
from contaccum.methods import METHODS

CONFIGS = [
    path
    for path in sorted((Path(__file__).parent.parent / "configs").rglob("*.yaml"))
    if "methods" not in path.name
]
"""Config files; configs/study/methods*.yaml are the rows of comparisons."""


def config(method="cont_accum", **changes) -> TrainConfig:
    return train_config(Path("data"), Path("out"), method, **changes)


def print_config(capsys, path: Path, *given: str) -> dict:
    assert main(["train", "--config", str(path), *given, "--print_config"]) == 0
    return yaml.safe_load(capsys.readouterr().out)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_config_file_parses_and_holds_together(path, capsys):
    given = ["--output_dir", "x", "--data.train", "x"]
    printed = print_config(capsys, path, *given)
    written = yaml.safe_load(path.read_text())
    for group, values in written.items():
        if isinstance(values, dict):
            for name, value in values.items():
                if (group, name) != ("data", "train"):
                    assert printed[group][name] == value


@pytest.mark.parametrize("name", ["finetune", "presets/24gb"])
def test_ready_made_configs_have_names(name, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # an installed package has no folder configs
    given = ["--output_dir", "x", "--data.train", "x"]
    named = print_config(capsys, Path(name), *given)
    path = next(path for path in CONFIGS if path.as_posix().endswith(f"/{name}.yaml"))
    assert named == print_config(capsys, path, *given)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("finetun",
         "finetun: no such file, and no ready-made config has this name; did you mean finetune?"),
        ("nq", "did you mean paper/nq?"),
        ("no.yaml", "no.yaml: no such file, and no ready-made config has this name; they are in /"),
        ("s3://bucket/finetune.yaml", "s3://bucket/finetune.yaml: no such file"),
    ],
)  # fmt: skip
def test_unknown_config_names_are_refused(name, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["train", f"--config={name}"]) == 2
    assert words in capsys.readouterr().err


def test_a_file_comes_before_a_ready_made_config(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("finetune").write_text("seed: 17\n")
    assert (
        print_config(capsys, Path("finetune"), "--output_dir", "x", "--data.train", "x")["seed"]
        == 17
    )
    Path("quickstart").mkdir()
    assert (
        print_config(capsys, Path("quickstart"), "--output_dir", "x", "--data.train", "x")["method"]
        == "grad_cache"
    )


@pytest.mark.parametrize(
    ("memory", "fast"),
    [("11gb", False), ("24gb", True), ("80gb", False)],
)
def test_presets_are_laid_over_a_config_without_a_warning(memory, fast, capsys, recwarn):
    """`fast` is for steps that do not fit at once; a whole one needs neither bank nor second
    pass."""
    folder = CONFIGS[0].parent / "presets"
    over = [f"{memory}.yaml", *(["fast.yaml"] if fast else [])]
    given = [word for name in over for word in ("--config", str(folder / name))]
    printed = print_config(
        capsys, CONFIGS[0].parent / "finetune.yaml", *given, "--output_dir", "x",
        "--data.train", "x",
    )  # fmt: skip
    made = from_mapping(TrainConfig, printed)
    validate(made)
    assert not [str(one.message) for one in recwarn if "no effect" in str(one.message)]
    assert made.micro_batch_size(1) == {"11gb": 8, "24gb": 32, "80gb": 128}[memory]
    assert made.bank_size() == (128 if fast else 0)


def test_the_replay_preset_keeps_the_pairs_of_an_update_in_a_bank(capsys, recwarn):
    options = ["--config", "presets/replay", "--output_dir", "x", "--data.train", "x"]
    made = from_mapping(
        TrainConfig, print_config(capsys, CONFIGS[0].parent / "finetune.yaml", *options)
    )
    validate(made)
    assert not [str(one.message) for one in recwarn if "no effect" in str(one.message)]
    assert (made.method, made.bank_size(), made.replay_share) == ("cont_cache", 128, 0.5)
    assert made.batch.global_batch_size == 128


SHARED = "method: cont_cache\nreplay: {share: 0.5}\n"


@pytest.mark.parametrize(
    ("files", "options", "share"),
    [
        ([SHARED], ["--method", "grad_cache"], 1.0),
        ([SHARED, "method: grad_cache\nreplay: {share: 0.25}"], [], 0.25),
        ([SHARED], ["--method", "grad_cache", "--replay.share", "0.5"], 0.5),
        (["replay: {share: 0.5}"], ["--method", "grad_cache"], 0.5),
    ],
)
def test_another_method_does_not_take_over_the_share_of_a_config(files, options, share, tmp_path):
    words = []
    for number, text in enumerate(files):
        (tmp_path / f"{number}.yaml").write_text(text)
        words += ["--config", str(tmp_path / f"{number}.yaml")]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        (config,), _ = parse("train", COMMANDS["train"], [*words, *options])
    assert config.replay.share == share
    lost = share == 1.0
    assert [("0.yaml: replay.share 0.5 is not used" in str(one.message)) for one in said] == [
        True
    ] * lost


@pytest.mark.parametrize(
    ("text", "options", "sentence"),
    [
        ("batch: {micro_batch_tokens: 512}", ["--batch.micro_batch_size", "4"],
         "c.yaml: batch.micro_batch_tokens 512 is not used, because --batch.micro_batch_size is 4"),
        ("model: {unpad: true}", ["--model.attention", "sdpa"],
         "c.yaml: model.unpad true is not used, because --model.attention is 'sdpa'"),
        ("batch: {micro_batch_tokens: null}", ["--batch.micro_batch_size", "4"], None),
        ("batch: {micro_batch_size: 8}", ["--batch.micro_batch_tokens", "512"], None),
    ],
)  # fmt: skip
def test_a_value_that_a_later_setting_contradicts_is_named(text, options, sentence, tmp_path):
    (tmp_path / "c.yaml").write_text(text)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        parse("train", COMMANDS["train"], ["--config", str(tmp_path / "c.yaml"), *options])
    assert len(said) == (sentence is not None)
    assert all(sentence in str(one.message) for one in said)


@pytest.mark.parametrize(
    ("command", "text", "options", "sentence"),
    [
        ("train", "seed: 1", ["--bank.size", "24"], "--bank.size: no effect with method grad_ca"),
        ("train", "bank: {keep: false}", [], "c.yaml: bank.keep: no effect with method grad_ca"),
        ("train", "method: in_batch", ["--bank.size", "24"], "--bank.size: no effect with method"),
        # negative controls: a method with a bank, the bank of a config for another method, and a
        # command with several methods
        ("train", "method: cont_accum", ["--bank.size", "24"], None),
        ("train", "bank: {size: 24}\nmethod: cont_accum", ["--method", "in_batch"], None),
        ("compare", "seed: 1", ["--bank.size", "24"], None),
    ],
)
def test_a_bank_that_the_method_does_not_have_is_named(command, text, options, sentence, tmp_path):
    (tmp_path / "c.yaml").write_text(text)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        parse(command, COMMANDS[command], ["--config", str(tmp_path / "c.yaml"), *options])
    assert len(said) == (sentence is not None)
    assert all(sentence in str(one.message) for one in said)


def test_changes_to_another_method_do_not_keep_the_share():
    """A share below 1 would make grad_cache another method, in ``compare`` and ``auto`` as well."""
    base = TrainConfig.from_config("presets/replay")
    with pytest.warns(
        UserWarning, match=r"^replay\.share 0\.5 is not used, .* 'grad_cache'; set it"
    ):
        assert with_changes(base, {"method": "grad_cache"}).replay_share == 1
    assert with_changes(base, {"method": "cont_cache"}).replay_share == 0.5
    assert with_changes(base, {"method": "grad_cache", "replay.share": "0.3"}).replay_share == 0.3


def test_changes_drop_what_a_run_chose_for_the_settings_that_they_replace():
    """The same rule as for options, so that ``compare --vary`` trains what it says."""
    base = config(
        "grad_cache", **{"batch.micro_batch_size": "auto", "batch.micro_batch_tokens": 400}
    )
    with pytest.warns(
        UserWarning, match=r"^batch\.micro_batch_tokens 400 is not used, because batch"
    ):
        made = with_changes(base, {"batch.micro_batch_size": "2"})
    assert (made.batch.micro_batch_size, made.batch.micro_batch_tokens) == (2, None)
    kept = with_changes(base, {"optim.learning_rate": "1e-3"})
    assert kept.batch == base.batch


@pytest.mark.filterwarnings("ignore:.*replay.share 0.5 is not used")
@pytest.mark.parametrize(
    ("options", "share"),
    [
        (["--methods", "grad_cache"], 1.0),
        (["--methods", "grad_cache", "--replay.share", "0.5"], 0.5),
        ([], 0.5),
    ],
)
def test_compared_methods_do_not_take_over_the_share_of_a_config(options, share, tmp_path):
    (tmp_path / "c.yaml").write_text(SHARED)
    words = ["--config", str(tmp_path / "c.yaml"), *options]
    (_, config), _ = parse("compare", COMMANDS["compare"], words)
    assert config.replay.share == share


@pytest.mark.parametrize("quoted", [True, False])
def test_dates_are_texts(quoted, tmp_path):
    value = "2024-01-01"
    text = json.dumps(value) if quoted else value
    (tmp_path / "c.yaml").write_text(
        f"output_dir: {text}\ndata: {{train: x, split: {text}}}\nrun: {{trackers: [{text}]}}\n"
    )
    (config,), _ = parse("train", COMMANDS["train"], ["--config", str(tmp_path / "c.yaml")])
    assert (config.output_dir, config.data.split, config.run.trackers) == (value, value, [value])
    (again,), _ = parse("train", COMMANDS["train"], ["--data.split", value])
    assert again.data.split == value
    (tmp_path / "d.yaml").write_text(to_yaml(config))  # and after a round through a config.yaml
    assert load([TrainConfig], [str(tmp_path / "d.yaml")]) == [config]


def test_a_bank_has_the_rows_of_a_step_unless_told_otherwise():
    """None older than one optimizer step; 0 stays 0, and a method without a bank has none."""
    plain = TrainConfig(method="cont_accum")
    assert plain.bank.size is None
    for pairs in (128, 256):
        plain.batch.global_batch_size = pairs
        assert plain.bank_size() == pairs
    assert config("cont_accum", **{"bank.size": 0}).bank_size() == 0
    assert config("cont_accum", **{"bank.size": 40}).bank_size() == 40
    plain.method = "grad_cache"
    assert plain.bank_size() == 0


def test_the_saved_config_is_complete_and_can_be_read_back(tmp_path, capsys):
    original = config(**{"run.trackers": ["tensorboard"]})
    (tmp_path / "config.yaml").write_text(to_yaml(original))
    assert print_config(capsys, tmp_path / "config.yaml") == asdict(original)


SEPARATE = {
    "data.train": "",
    "data.hard_negatives": 1,
    "data.fill_negatives": "none",
    "data.mixture": [MixtureConfig("y"), MixtureConfig("x", in_batch_negatives=False)],
}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"batch.micro_batch_size": 5},
         "batch.global_batch_size 16 is not divisible by batch.micro_batch_size 5"),
        ({"batch.micro_batch_tokens": 320, "batch.micro_batch_size": 8, "bank.size": 12},
         "bank.size is 12, but cont_accum can push 16 entries at once"),
        (
            {"run.memory_budget": "11"},
            "run.memory_budget is '11', expected a number and a unit (GiB, "
            "MiB, GB, MB",
        ),
        ({"bank.size": 3}, "bank.size is 3, but cont_accum can push 4 entries at once"),
        ({"method": "cont_cache", "bank.size": 12},
         "bank.size is 12, but cont_cache can push 16 entries at once"),
        ({"method": "no_such"}, "method is 'no_such', expected {in_batch,"),
        ({"model.temperature": 0.0}, "model.temperature is 0.0, expected `float` > 0"),
        ({"loss.matryoshka_dims": [0]}, "loss.matryoshka_dims is [0], expected `int` >= 1 - at"),
        ({"loss.matryoshka_dims": [8], "loss.matryoshka_weights": [1.0, 2.0]},
         "loss.matryoshka_weights has 2 numbers, expected 1: one per width in matryoshka_dims"),
        ({"loss.matryoshka_weights": [1.0]}, "loss.matryoshka_weights has 1 numbers, expected 0"),
        ({"loss.distillation": "kl"},
         "loss.distillation is kl, but data.hard_negatives is 0; set it to at least 1"),
        (
            {"loss.false_negative_margin": 1.5, "loss.margin_strategy": "relative"},
            "loss.false_negative_margin is 1.5, expected a number from 0 to 1, because "
            "loss.margin_strategy is relative",
        ),
        ({**SEPARATE, "data.hard_negatives": 0},
         "data.mixture[1].in_batch_negatives is false, so this data set needs"),
        ({**SEPARATE, "data.fill_negatives": "random"},
         "data.mixture[1].in_batch_negatives is false, so this data set needs"),
        (
            {"run.metric": "ndcg@1O"},
            "run.metric is 'ndcg@1O', expected MEASURE@K, such as ndcg@10 (MEASURE: ndcg, map, "
            "recall, precision, mrr; K: 1, 3",
        ),
    ],
)  # fmt: skip
def test_each_broken_rule_is_one_sentence(changes, sentence):
    with pytest.raises(InputError, match=re.escape(sentence)) as error:
        validate(config(**changes))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"model.name": "tiny", "model.passage_name": "other"},
            "model.passage_name has no effect with model.name tiny",
        ),
        ({"replay.share": 0.5}, "replay.share has no effect with method cont_accum"),
        ({"run.eval_steps": 2}, "run.eval_steps has no effect without data.dev"),
        ({"data.dev_split": "a"}, "data.dev_split has no effect without data.dev"),
        (
            {"loss.distillation_weight": 2.0},
            "loss.distillation_weight has no effect without loss.distillation",
        ),
        ({"run.early_stopping": 2}, "run.early_stopping has no effect without data.dev"),
        (
            {"data.dev": "x", "run.eval_steps": 0, "run.early_stopping": 2},
            "run.early_stopping has no effect without data.dev and run.eval_steps",
        ),
        ({"lora.alpha": 3.0}, "lora.alpha has no effect with lora.rank 0"),
        ({"run.cpu_offload": True}, "run.cpu_offload has no effect without run.sharding fsdp"),
        (
            {"loss.margin_strategy": "relative"},
            "loss.margin_strategy has no effect without loss.false_negative_margin or loss.guide",
        ),
    ],
)  # fmt: skip
def test_settings_without_effect_are_named(changes, sentence):
    with pytest.warns(UserWarning, match=sentence):
        validate(config(**changes))


def test_settings_with_effect_are_not_named(recwarn):
    changes = {
        "data.hard_negatives": 1,
        "data.dev": "dev",
        "run.metric": "mrr@10",
        "loss.margin_strategy": "relative",
        "loss.false_negative_margin": 0.1,
    }
    validate(
        config(
            **changes, **{"model.unpad": True, "optim.name": "adamw_8bit", "bank.warmup_steps": 5}
        )
    )
    assert not recwarn


def test_in_batch_takes_its_step_whole():
    assert config("in_batch").micro_batch_size(world=1) == 16
    assert config("in_batch").micro_batch_size(world=4) == 4
    assert config("grad_cache").micro_batch_size(world=4) == 4


def test_processes_count_in_what_must_divide():
    validate(config(), world=4)
    with pytest.raises(InputError, match="x 3 processes = 12"):
        validate(config(), world=3)
    for size in (2, 10):  # in_batch ignores B
        in_batch = config("in_batch", **{"batch.global_batch_size": size})
        with pytest.raises(InputError, match=f"size {size} is not divisible by 4 processes$"):
            validate(in_batch, world=4)


def test_a_token_budget_only_wants_a_step_that_processes_can_share():
    by_tokens = config(**{"batch.micro_batch_tokens": 320, "batch.micro_batch_size": 8})
    validate(by_tokens, world=2)
    with pytest.raises(
        InputError, match=r"batch\.global_batch_size 16 is not divisible by 3 processes"
    ):
        validate(by_tokens, world=3)
    # three of the longest pairs in each process
    assert by_tokens.usual_push(world=2, longest=100) == 6
    assert by_tokens.usual_push(world=2, longest=10) == 16
    assert (
        config("cont_cache", **{"batch.micro_batch_tokens": 320}).usual_push(world=2, longest=100)
        == 16
    )
    assert config().usual_push(world=2, longest=100) == 8


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("11GB", 11_000_000_000),
        ("512MiB", 536_870_912),
    ],
)
def test_memory_in_bytes(text, size):
    assert parse_bytes(text) == size


def assigned(**changes) -> TrainConfig:
    """Return a config after assignments, which Python allows for every name."""
    made = config()
    for name, value in changes.items():
        group, _, key = name.rpartition(".")
        setattr(getattr(made, group) if group else made, key, value)
    return made


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"optim.max_steps": "6"}, "optim.max_steps is '6', expected `int | null`, got `str`"),
        ({"data.mixture": [{"train": 1}]}, "data.mixture[0].train is 1, expected `str`"),
        ({"bank.sise": 4}, "bank.sise: no such setting; did you mean bank.size?"),
    ],
)  # fmt: skip
def test_a_config_of_python_refuses_wrong_types_and_names(changes, sentence):
    with pytest.raises(InputError, match=re.escape(sentence)):
        validate(assigned(**changes))


def test_a_config_of_python_accepts_paths_and_numpy_numbers():
    wanted = {
        "optim.learning_rate": 2e-5,
        "seed": 3,
        "data.train": "a",
        "loss.matryoshka_dims": [8],
    }
    given = {"optim.learning_rate": np.float64(2e-5), "seed": np.int64(3), "data.train": Path("a")}
    made = assigned(**given, **{"loss.matryoshka_dims": np.array([8])})
    validate(made)
    assert to_yaml(made) == to_yaml(config(**wanted))


def test_changes_as_text_give_the_values_of_the_command_line():
    made = with_changes(
        config(),
        {"optim.learning_rate": "1e-3", "bank.size": "null", "loss.matryoshka_dims": "[8]"},
    )
    assert (made.optim.learning_rate, made.bank.size, made.loss.matryoshka_dims) == (
        1e-3,
        None,
        [8],
    )
    assert config().bank.size is not None
    with pytest.raises(InputError, match=r"bank.size is 'many', expected `int | null`"):
        with_changes(config(), {"bank.size": "many"})


def test_a_config_of_a_mapping_is_the_config_that_it_came_from():
    original = config(
        **{"data.train": "", "data.mixture": [MixtureConfig("x"), MixtureConfig("y")]}
    )
    assert from_mapping(TrainConfig, asdict(original)) == original
    with pytest.raises(InputError, match=r"bank.sise: no such setting; did you mean bank.size\?"):
        from_mapping(TrainConfig, {"bank": {"sise": 3}})


READ_BY = {
    "bank.size": {"passage_bank", "cont_accum", "cont_cache"},
    "bank.row_weight": {"cont_accum", "cont_cache"},
    "replay.share": {"grad_cache", "cont_cache"},
    "batch.micro_batch_size": set(METHODS) - {"in_batch"},
    "model.temperature": set(METHODS),
    "run.save_steps": set(),
    "seed": set(),
}


@pytest.mark.parametrize(("name", "methods"), READ_BY.items())
def test_settings_affect_the_methods_that_read_them(name, methods):
    assert {method for method in METHODS if affects(name, method)} == methods


def test_the_untrained_encoder_depends_on_the_settings_of_the_model():
    assert {name for name in train_settings() if affects(name, None)} == {
        name for name in train_settings() if name.startswith("model.")
    } - {
        "model.temperature",
        "model.dropout",
        "model.attention_dropout",
        "model.gradient_checkpointing",
    }


def test_specs_and_methods_name_the_same_six():
    assert list(METHOD_SPECS) == list(METHODS)
    assert len(METHODS) == 6

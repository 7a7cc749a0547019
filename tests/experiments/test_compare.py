"""`contaccum compare` with real processes on a small data set."""

import base64
import html
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

import pytest
import torch.distributed as dist
from helpers import train_config, weights, write_beir
from processes import python

from contaccum.cli import main
from contaccum.config import DataConfig, MixtureConfig, to_yaml
from contaccum.config.experiments import CompareConfig
from contaccum.errors import InputError
from contaccum.experiments import jobs as jobs_module
from contaccum.experiments.compare import FULL, Study, require_unseen
from contaccum.experiments.jobs import Job, Worker, contents_of, run_job
from contaccum.experiments.run_records import RunRecord, group_runs
from contaccum.experiments.settings import read_settings, read_values, variants
from contaccum.runtime.files import read_json
from contaccum.training.log import read_log
from contaccum.training.run_folder import flat

pytestmark = [
    pytest.mark.filterwarnings(
        "default:.*1 invalid record is skipped",
        "default:.* also occur in the (training|dev) data",
    ),
    pytest.mark.usefixtures("forked_workers"),
]

FILE = "examples.jsonl"
NEW_PYTHON = sys.executable
"""For processes that are killed: SIGKILL ends a forked process a moment after its client."""


@pytest.fixture(scope="module")
def study_folder(tmp_path_factory):
    """Data with a repeated passage id, a config, and a finished comparison of two methods, two bank
    sizes and two baselines."""
    folder = tmp_path_factory.mktemp("compare")
    data = write_beir(folder / "data")
    with (data / "corpus.jsonl").open("a") as corpus:
        corpus.write(json.dumps({"_id": "p0", "text": "again"}) + "\n")
    changes = {
        "optim.max_steps": 3,
        "run.save_steps": 0,
        "data.dev": str(data),
        "data.repair": True,
        "run.eval_steps": 1,
        "run.drift_steps": 1,
    }
    (folder / "config.yaml").write_text(to_yaml(train_config(data, folder / "unused", **changes)))
    call = [
        *command(folder, folder / "study"), "--seeds", "1", "--vary", "bank.size=16,24",
        "--parallel", "2",
    ]  # fmt: skip
    environment = {**os.environ, "COLUMNS": "120", "CONTACCUM_CACHE": str(folder / "cache")}
    done = subprocess.run(call, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (folder / "stdout").write_text(done.stdout)
    return folder


def command(folder: Path, output: Path) -> list[str]:
    methods = ["--methods", "grad_accum,cont_accum", "--output_dir", str(output)]
    return [
        python(), "-m", "contaccum", "compare", "--config", str(folder / "config.yaml"), *methods,
    ]  # fmt: skip


def call(capsys, folder: Path, *arguments: object) -> tuple[int, str]:
    code = main(["compare", "--config", str(folder / "config.yaml"), *map(str, arguments)])
    return code, capsys.readouterr().err


def folders(study: Path) -> list[str]:
    return sorted(path.name for path in (study / "runs").iterdir())


def stamps(study: Path) -> dict[str, int]:
    return {
        str(path): path.stat().st_mtime_ns for path in (study / "runs").rglob("*") if path.is_file()
    }


def test_every_combination_is_trained_and_evaluated_once(study_folder):
    """grad_accum uses no bank, so it runs once and not once per bank size."""
    study = study_folder / "study"
    trained = ["cont_accum-size=16-seed0", "cont_accum-size=24-seed0", "grad_accum-seed0"]
    assert folders(study) == sorted([*trained, "bm25", "untrained"])
    for name in folders(study):
        metrics = read_json(study / "runs" / name / "metrics.json")
        assert len(metrics["per_query"]) == 10
        assert (metrics["data"], metrics["split"]) == (str(study_folder / "data"), "test")
    assert len(read_log(study / "runs" / "cont_accum-size=16-seed0")) == 7


def test_finished_comparison_runs_nothing_again(study_folder, capsys):
    study = study_folder / "study"
    before = stamps(study)
    arguments = [
        "--methods", "grad_accum,cont_accum", "--seeds", 1, "--vary", "bank.size=16,24",
        "--output_dir", study,
    ]  # fmt: skip
    code, said = call(capsys, study_folder, *arguments)
    assert (code, len(said.splitlines())) == (0, 4)
    assert "skipped 1 passage with" in said
    assert "10 of 10 test queries also occur in the dev data" in said
    assert "10 of 10 test queries also occur in the training data" in said
    assert "10 of 10 dev queries also occur in the training data" in said
    assert stamps(study) == before


def test_weights_of_finished_runs_are_deleted_too(study_folder, tmp_path, capsys):
    study = shutil.copytree(study_folder / "study", tmp_path / "study")
    scores = read_json(study / "compare.json")["results"]
    arguments = [
        "--methods", "grad_accum,cont_accum", "--seeds", 1, "--vary", "bank.size=16,24",
        "--output_dir", study, "--keep_weights", "false",
    ]  # fmt: skip
    assert len(list(study.glob("runs/*/model"))) == 3
    assert call(capsys, study_folder, *arguments)[0] == 0
    assert not list(study.glob("runs/*/model"))
    assert read_json(study / "compare.json")["results"] == scores


@pytest.mark.parametrize(
    ("file", "before", "after", "kind"),
    [
        ("qrels/test.tsv", "\t1\n", "\t2\n", "test"),
        ("qrels/train.tsv", "\t1\n", "\t1\nq0\tp9\t1\n", "train"),
    ],
)
def test_edited_data_is_noticed(file, before, after, kind, study_folder, capsys):
    study, path = study_folder / "study", study_folder / "data" / file
    arguments = [
        "--methods", "grad_accum,cont_accum", "--seeds", 1, "--vary", "bank.size=16,24",
        "--output_dir", study,
    ]  # fmt: skip
    unchanged = stamps(study)
    content, status = path.read_text(), path.stat()
    path.write_text(content.replace(before, after, 1))
    code, said = call(capsys, study_folder, *arguments)
    path.write_text(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert code == 2, said
    assert re.search(
        rf"made with other settings or data: .*content of the {kind}\w* data was", said
    )
    assert call(capsys, study_folder, *arguments)[0] == 0  # negative control
    assert stamps(study) == unchanged


def test_changed_encoder_is_noticed(study_folder, tmp_path, capsys):
    """Otherwise, the models of additional seeds would start from another encoder than those of the
    first call."""
    base = shutil.copytree(
        study_folder / "study" / "runs" / "grad_accum-seed0" / "model", tmp_path / "base"
    )
    changes = {"model.name": str(base), "data.repair": True, "optim.max_steps": 1}
    (tmp_path / "config.yaml").write_text(
        to_yaml(train_config(study_folder / "data", tmp_path / "unused", **changes))
    )
    arguments = ["--output_dir", tmp_path / "study", "--methods", "grad_accum"]
    code, said = call(capsys, tmp_path, *arguments, "--seeds", 1, "--baselines", "untrained")
    assert code == 0, said
    (base / "README.md").write_text("another model")
    for more in (
        ["--seeds", 2, "--baselines", "none"],
        ["--seeds", 1, "--methods", "in_batch", "--baselines", "untrained"],
    ):
        code, said = call(capsys, tmp_path, *arguments, *more)
        assert code == 2
        assert "made with other settings or data: content of model.name was" in said


def test_folder_with_other_settings_is_refused(study_folder, capsys):
    arguments = ["--methods", "grad_accum", "--seeds", 1, "--output_dir", study_folder / "study"]
    code, said = call(capsys, study_folder, *arguments, "--optim.max_steps", 4)
    assert code == 2, said
    assert "grad_accum-seed0: was made with other settings or data" in said
    assert "optim.max_steps was 3 and is 4" in said
    qrels = study_folder / "data" / "qrels"
    shutil.copy(qrels / "test.tsv", qrels / "other.tsv")
    code, said = call(capsys, study_folder, *arguments, "--test_split", "other")
    (qrels / "other.tsv").unlink()
    assert code == 2, said
    assert "test split was test and is other" in said
    code, said = call(
        capsys, study_folder, *arguments, "--model.tiny_width", 64, "--methods", "in_batch"
    )
    assert code == 2, said
    assert "model.tiny_width was" in said


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--vary", "bank.sise=1,2"], "--vary: 'bank.sise=1,2'"),
        (["--vary", "run.save_steps=1,2"], "is not a setting that changes the trained model"),
        (["--tune", "data.dev_passages=50,60"], "'data.dev_passages' changes what is measured"),
        (
            ["--vary", "bank.size=16,many"],
            "cont_accum-size=many: bank.size is 'many', expected `int | null`",
        ),
        (["--vary", "bank.size=2"], "cont_accum-size=2: bank.size is 2, but"),
        (["--data.train", "./absent", "--test", FILE], "absent: no such"),
        (["--data.dev", "./absent"], "absent: no such"),
        (["--vary", f"data.train=./other,{FILE}", "--test", FILE], "is the training data"),
        (["--seeds", 0], "--seeds is 0, expected `int` >= 1"),
        (["--budget", "12"], "--budget is '12'; it must be a number above 0"),
        (["--budget", "40f", "--run.eval_steps", 0], "one step of cont_accum costs"),
        (["--budget", "96f"], "run.eval_steps is 1, but --budget and --tune change the number"),
        (["--methods", ","], "--methods: '' is unknown"),
        (["--vary", "seed=1,2"], "seed is not varied here; use --seeds"),
        (["--tune", "bank.size=16", "--rungs", 2], "--rungs 2 has no effect without several"),
        (["--budget", "96f", "--optim.warmup_steps", 2], "Use a share of the steps"),
        (["--rungs", 0], "--rungs is 0"),
        (["--rungs", 3], "--rungs 3 has no effect without several values"),
        (
            ["--budget", "96f", "--vary", "optim.warmup_steps=0.1,2"],
            "optim.warmup_steps is 2, but --budget",
        ),
        (["--tune", "bank.size=2,3"], "cont_accum-size=2: bank.size is 2, but"),
        (["--tune", "bank.size=16", "--tune", "bank.size=24"], "each setting only once"),
        (
            ["--vary", "optim.learning_rate=1e-3,0.001"],
            "cont_accum-learning_rate=0.001: another run has the same settings",
        ),
        (["--against", "in_batch"], "--against is 'in_batch'; choose from cont_accum"),
        (
            ["--tune", "optim.learning_rate=1e-3,2e-3", "--test_split", "dev"],
            "data.dev is the test data",
        ),
        (
            [
                "--tune",
                "optim.learning_rate=1e-3,2e-3",
                "--data.dev",
                "null",
                "--run.eval_steps",
                0.25,
            ],
            "data.dev: not set",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:--budget sets the number of steps")
def test_wrong_options_are_refused_before_the_first_run(
    study_folder, tmp_path, capsys, monkeypatch, arguments, sentence
):
    example = {
        "query": "where is the red fox",
        "pos": ["a red fox lives here"],
        "neg": ["a blue cat lives there"],
    }
    (tmp_path / FILE).write_text(json.dumps(example) + "\n")
    monkeypatch.chdir(tmp_path)
    code, said = call(capsys, study_folder, "--output_dir", tmp_path / "new", *arguments)
    assert code == 2, said
    assert sentence in said
    assert not (tmp_path / "new").exists()


HUB = "?query=question&pos=answer"


@pytest.mark.parametrize(
    ("train", "test", "split", "same"),
    [
        ("beir", "./beir/", "train", True),
        ("beir", "beir", "test", False),
        ("pairs.jsonl", "pairs.jsonl", "test", True),
        (f"hub:faq.csv{HUB}", f"hub:./faq.csv{HUB}&neg=n", "test", True),
        (f"hub:faq{HUB}", f"hub:faq::train{HUB}", "test", True),
        (f"hub:faq::train{HUB}", f"hub:faq::train{HUB}", "test", True),
        (f"hub:faq::a{HUB}", f"hub:faq::b{HUB}", "train", False),
        ("hub:owner/name", "hub:owner/name:other", "train", False),
        ("dpr/nq-train", "dpr/nq-train", "test", True),
        ("scifact", "scifact", "test", False),
    ],
)
def test_test_data_that_training_reads_are_refused(train, test, split, same, tmp_path, monkeypatch):
    """Alone, in a mixture and as dev data; the split in a name replaces the other."""
    monkeypatch.chdir(tmp_path)
    for folder in ("beir", "faq"):
        Path(folder).mkdir()
    for name in ("faq.csv", "pairs.jsonl", "faq/faq.csv"):
        Path(name).write_text("question,answer\nhow,so\n")
    mixture = [MixtureConfig("others"), MixtureConfig(train)]
    for data, sentence in (
        (DataConfig(train=train), "the test data is the training data"),
        (DataConfig(mixture=mixture), "the test data is the training data"),
        (DataConfig(train="others", dev=train, dev_split="train"), "data.dev is the test data"),
    ):
        with pytest.raises(InputError, match=sentence) if same else nullcontext():
            require_unseen(test, split, data)


def test_test_queries_with_the_text_of_a_training_query_are_counted(tmp_path):
    """Their ids and spaces differ; other queries with the id of a training query are fine."""
    train, test = write_beir(tmp_path / "train"), write_beir(tmp_path / "test")
    queries = [
        {"_id": "q0", "text": "where is nothing"},
        {"_id": "q1", "text": "where is  the red fox of valley 0"},
    ]
    (test / "queries.jsonl").write_text("\n".join(map(json.dumps, queries)) + "\n")
    judged = "query-id\tcorpus-id\tscore\nq0\tp1\t1\nq1\tp0\t1\n"
    (test / "qrels" / "test.tsv").write_text(judged)
    config = train_config(train, tmp_path / "run")
    with pytest.warns(UserWarning, match=r"test: 1 of 2 test queries also occur .*first: 'q1'"):
        contents_of("run", config, {"data": str(test), "split": "test"})
    queries[1]["text"] = "where is the other fox"
    (test / "queries.jsonl").write_text("\n".join(map(json.dumps, queries)) + "\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        contents_of("run", config, {"data": str(test), "split": "test"})


@pytest.mark.parametrize("trained", [True, False])
def test_queries_with_the_text_of_a_training_or_dev_query_are_counted(trained, tmp_path):
    """A run keeps its best model on dev."""
    data, train = write_beir(tmp_path / "data"), write_beir(tmp_path / "train")
    shutil.copy(data / "qrels" / "dev.tsv", data / "qrels" / "test.tsv")
    queries = train / "queries.jsonl"
    if not trained:
        queries.write_text(queries.read_text().replace("where is", "who is"))
    config = train_config(train, tmp_path / "run", **{"data.dev": str(data)})
    test = {"data": str(data), "split": "test"}

    def shared(kind: str, test: dict[str, str] | None) -> list[tuple[str, str]]:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            contents_of(kind, config, test)
        found = re.compile(r"10 of 10 (\w+) queries also occur in the (\w+) data")
        return [found.search(str(each.message)).groups() for each in warned]

    assert shared("run", test) == [
        *[("test", "training"), ("dev", "training")] * trained,
        ("test", "dev"),
    ]
    # no dev query has influenced the untrained encoder
    assert shared("untrained", test) == [("test", "training")] * trained
    assert shared("run", None) == [("dev", "training")] * trained


@pytest.mark.filterwarnings("ignore:.*also occur in the")
@pytest.mark.parametrize("changed", ["train", "dev", "test"])
def test_data_that_change_between_two_runs_are_refused(changed, tmp_path):
    """The plan has read them; the first run used them, and the second would use others."""
    data = write_beir(tmp_path / "data")
    test = {"data": str(data), "split": "test"} if changed == "test" else None
    other = {"data.dev": str(data), "optim.max_steps": 1}
    first, second = (train_config(data, tmp_path / name, **other) for name in "ab")
    contents = contents_of("run", first, test)
    run_job("run", first, test, contents=contents)
    qrels = data / "qrels" / f"{changed}.tsv"
    before = qrels.read_text()
    qrels.write_text(before.replace("q1\tp1\t1", "q1\tp5\t1"))
    with pytest.raises(InputError, match=f"^content of the {changed}.* data changed after the"):
        run_job("run", second, test, contents=contents)
    assert not (tmp_path / "b").exists()
    qrels.write_text(before)
    run_job("run", second, test, contents=contents)
    assert (tmp_path / "b" / ("metrics.json" if test else "tuned.json")).exists()


def test_a_budget_of_passes_warns_of_passes_that_cost_more(tmp_path):
    file = tmp_path / "rows.yaml"
    data = write_beir(tmp_path / "data")

    def study(budget: str, rows: str) -> Study:
        file.write_text(rows)
        options = CompareConfig(settings=str(file), budget=budget, test_split="dev")
        plain = train_config(data, tmp_path / "study", **{"optim.max_steps": None})
        return Study(plain, options)

    same = "a: {method: grad_cache}\nb: {method: grad_accum}\n"
    longer = same + "c: {method: grad_cache, model.max_passage_length: 12}\n"
    with pytest.warns(UserWarning, match=r"960f .* if model\.max_passage_length differs between"):
        study("960f", longer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        study("960f", same)
        study("9s", longer)


def test_partial_replay_beside_rows_with_dropout_gives_a_warning(tmp_path):
    """It trains without dropout, so a difference is not only that of the methods."""
    file, data = tmp_path / "rows.yaml", write_beir(tmp_path / "data")

    def study(rows: str) -> Study:
        file.write_text(rows)
        plain = train_config(data, tmp_path / "study")
        return Study(plain, CompareConfig(settings=str(file)))

    replay = "a: {method: cont_cache, replay.share: 0.5}\n"
    with pytest.warns(UserWarning, match=r"other runs with it; set model\.dropout 0"):
        study(replay + "b: {method: grad_cache, model.dropout: null}\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        study(replay + "b: {method: grad_cache, model.dropout: 0}\n")
        study("a: {method: grad_cache}\nb: {method: grad_accum}\n")


def test_settings_of_the_number_of_steps_and_a_budget_contradict_each_other(tmp_path):
    data, file = write_beir(tmp_path / "data"), tmp_path / "rows.yaml"
    file.write_text("a: {method: grad_cache, optim.epochs: 3}\n")
    plain = train_config(data, tmp_path / "study", **{"optim.max_steps": 5})
    for name in ("optim.epochs=1,5", "optim.max_steps=1,5"):
        options = CompareConfig(vary=(name,), budget="960f", test_split="dev")
        with pytest.raises(InputError, match=rf"{name.split('=')[0]} has no effect on a run"):
            Study(plain, options)
    with pytest.raises(InputError, match=r"optim\.epochs has no effect on a run"):
        Study(plain, CompareConfig(settings=str(file), budget="960f", test_split="dev"))
    with pytest.warns(UserWarning, match=r"so optim\.max_steps 5 has no effect"):
        Study(plain, CompareConfig(budget="960f", test_split="dev"))


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ("untrained: {method: grad_cache}", "untrained: this is the name of a baseline"),
        ("a: {method: in_batch, bank.size: 64}", "bank.size has no effect with in_batch"),
        ("a: {method: grad_cache, tune: {bank.size: [4, 8]}}", "bank.size has no effect with grad"),
        (
            "a: {method: grad_cache, model.query_prefix: no}",
            "a: model.query_prefix is false",
        ),
        ("a: {method: grad_cache, tune: {seed: [1, 2]}}", "a: seed is not varied here"),
        ("a: {method: grad_cache, tune: {optim: {epochs: [1, x]}}}", "optim.epochs is 'x'"),
    ],
)
def test_entries_that_would_be_misread_are_refused(row, sentence, tmp_path):
    file = tmp_path / "rows.yaml"
    file.write_text(row)
    with pytest.raises(InputError, match=sentence):
        read_settings(str(file), {})
    # settings for all entries are tuned where they have an effect
    file.write_text("a: {method: grad_cache}")
    assert read_settings(str(file), {"bank.size": ["4"]})[0].candidates == ((),)


def test_entries_may_have_groups_and_an_untrained_row_for_each_of_their_encoders(tmp_path):
    file, data = tmp_path / "rows.yaml", write_beir(tmp_path / "data")
    file.write_text(
        "a: {method: grad_cache, model: {tiny_width: 32}, optim: {epochs: 2}}\n"
        "b: {method: grad_accum, model.tiny_width: 32}\n"
        "c: {method: grad_cache, model.tiny_width: 64}\n"
    )
    plain = train_config(data, tmp_path / "study")
    study = Study(plain, CompareConfig(settings=str(file)))
    assert [(config.model.tiny_width, config.optim.epochs) for config in study.configs] == [
        (32, 2), (32, plain.optim.epochs), (64, plain.optim.epochs)
    ]  # fmt: skip
    assert study.baselines == [
        ("bm25", ()),
        ("untrained", (("model.tiny_width", "32"),)),
        ("untrained", (("model.tiny_width", "64"),)),
    ]


def test_an_encoder_that_does_not_exist_is_refused_before_the_first_run(tmp_path):
    data = write_beir(tmp_path / "data")
    config = train_config(data, tmp_path / "a", **{"model.name": "no/encoder"})
    with pytest.raises(InputError, match=r"model\.name is 'no/encoder': no folder has"):
        contents_of("run", config, None)


def test_the_settings_of_a_comparison_are_those_of_all_its_methods(tmp_path):
    """What a file says for another method was dropped when it was read."""
    sizes = {"batch.micro_batch_size": "auto", "batch.micro_batch_tokens": 512}
    changes = {"replay.share": 0.5, "model.dropout": 0, **sizes}
    plain = train_config(write_beir(tmp_path / "data"), tmp_path / "study", "grad_cache", **changes)
    study = Study(plain, CompareConfig(methods="grad_cache,cont_cache"))
    assert [
        (config.method, config.replay_share, config.batch.micro_batch_tokens)
        for config in study.configs
    ] == [("grad_cache", 0.5, 512), ("cont_cache", 0.5, 512)]
    varied = CompareConfig(methods="grad_cache", vary=("batch.micro_batch_size=4,8",))
    with pytest.warns(UserWarning, match=r"^batch\.micro_batch_tokens 512 is not used"):
        study = Study(plain, varied)
    assert [config.batch.micro_batch_tokens for config in study.configs] == [None, None]


def test_a_budget_in_seconds_is_measured_with_the_threads_of_a_run(tmp_path, monkeypatch):
    """With two runs at a time, each has half of the cores."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    found = []

    def measure_cost(config, unit, environment):
        found.append(dict(environment))
        return 1.0

    monkeypatch.setattr("contaccum.experiments.tuning.measure_cost", measure_cost)
    plain = train_config(write_beir(tmp_path / "data"), tmp_path / "study")
    for parallel in (1, 2):
        options = CompareConfig(budget="9s", parallel=parallel, test_split="dev")
        with pytest.warns(UserWarning, match=r"so optim\.max_steps 6 has no effect"):
            study = Study(plain, options)
        study.output.mkdir(exist_ok=True)
        (variant,) = study.variants
        study._plan_run(variant, variant.candidates[0], 0, FULL, None)
    assert found == [{}, {"OMP_NUM_THREADS": "4"}]


def test_a_tuning_run_keeps_the_test_data_of_a_result_in_its_folder(tmp_path):
    """Both have one folder, and a result on other test data would be reported as the new one."""
    data = write_beir(tmp_path / "data")
    config = train_config(data, tmp_path / "runs" / "a")
    tests = [{"data": str(data), "split": split} for split in ("test", "dev")]
    final, trial, other = (
        Job("a", "run", config, contents_of("run", config, test), test)
        for test in (tests[0], None, tests[1])
    )
    final.write()
    final.folder.mkdir(parents=True)
    trial.write()
    final.refuse_changes()
    with pytest.raises(
        InputError, match=r"made with other settings .*test split was test and is dev"
    ):
        other.refuse_changes()
    final.folder.rmdir()  # nothing is known of a deleted result
    other.write()
    final.folder.mkdir()
    other.refuse_changes()


def test_warnings_of_two_runs_are_shown_once_and_the_last_line_of_each_running_job(
    study_folder, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr("contaccum.experiments.jobs.LINE_SECONDS", 0.0)  # instead of a minute
    options = ["--methods", "grad_accum", "--seeds", 2, "--baselines", "none"]
    alone = ["--batch.micro_batch_size", 1, "--optim.max_steps", 1, "--run.eval_steps", 0]
    study = tmp_path / "study"
    code, said = call(capsys, study_folder, *options, *alone, "--output_dir", study)
    assert code == 0, said
    logs = [(study / "jobs" / f"grad_accum-seed{seed}.log").read_text() for seed in range(2)]
    assert all("no query has a negative" in log for log in logs)
    assert said.count("grad_accum-seed0: warning: step 1: no query has a negative") == 1
    assert said.count("warning: step 1: no query has a negative") == 1
    assert f"2 runs, 1 at a time; logs in {study / 'jobs'}" in said
    log = logs[0].replace("contaccum: ", "").splitlines()
    lines = [line.partition("grad_accum-seed0: ")[2] for line in said.splitlines()]
    assert any(line and line in log for line in lines)
    assert "no message" not in lines  # while the worker imports libraries


def test_only_what_this_worker_printed_is_read(tmp_path):
    job = Job("a", "run", train_config(tmp_path, tmp_path / "study" / "runs" / "a"), {})
    package = Path(jobs_module.__file__).parents[1]
    before = f"{package}/training/loop.py:9: UserWarning: old\nstopped after step 40\n"
    job.log.parent.mkdir(parents=True)
    job.log.write_text(before)
    worker = Worker(job, subprocess.Popen(["true"]), 0.0, len(before))
    assert (worker.last_line(), worker.warnings()) == ("no message", [])
    job.log.write_text(
        f"{before}{package}/training/loop.py:9: UserWarning: new\n  warnings.warn(\n"
        f"{tmp_path}/contaccum/.venv/torch/x.py:3: UserWarning: of torch\ncontaccum: failed\n"
    )
    assert (worker.last_line(), worker.warnings()) == ("failed", ["new"])


def test_seeds_with_other_automatic_settings_are_one_row(tmp_path):
    """On a GPU, `auto` chooses the micro-batches of each seed by the memory that is free."""
    runs, labels = [], {}
    for method in ("grad_cache", "cont_cache"):
        for seed, tokens in enumerate((30000, 29952, 17000)):
            folder = tmp_path / f"{method}-seed{seed}"
            changes = {"batch.micro_batch_tokens": tokens, "seed": seed}
            config = train_config(tmp_path / "data", folder, method, **changes)
            runs.append(RunRecord(folder, flat(asdict(config)), [], [], None, {}))
            labels[folder] = method
    groups = group_runs(runs, labels)
    assert [(each.label, each.settings, len(each.runs)) for each in groups] == [
        ("grad_cache", "grad_cache", 3),
        ("cont_cache", "cont_cache", 3),
    ]
    assert len(group_runs(runs)) == 6  # negative control: runs without a common label


@pytest.mark.acceptance
def test_killed_comparison_continues_with_the_missing_runs(study_folder, tmp_path):
    """Workers of a killed comparison save and exit; the next one waits for them and keeps finished
    runs."""
    study = tmp_path / "study"
    long = [
        "--seeds", "2", "--baselines", "none", "--methods", "grad_accum", "--data.dev", "null",
        "--optim.max_steps", "20", "--run.save_steps", "2",
    ]  # fmt: skip
    long += ["--run.eval_steps", "0"]
    first = subprocess.Popen(
        [NEW_PYTHON, *command(study_folder, study)[1:], *long],
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    second = study / "runs" / "grad_accum-seed1"
    while not (second / "log.jsonl").exists() or len(read_log(second)) < 2:
        assert first.poll() is None
        time.sleep(0.02)
    first.send_signal(signal.SIGKILL)
    first.wait()
    finished = study / "runs" / "grad_accum-seed0"
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*")}
    done = subprocess.run(
        [*command(study_folder, study), *long], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert re.findall(r"\[\d/1\] (\S+): done", done.stderr) == ["grad_accum-seed1"]
    assert {path: path.stat().st_mtime_ns for path in finished.rglob("*")} == before
    assert "resuming at step" in (study / "jobs" / "grad_accum-seed1.log").read_text()
    assert [line["step"] for line in read_log(second)] == list(range(1, 21))
    assert len({json.dumps(weights(study / "runs" / name)) for name in folders(study)}) == 2


@pytest.mark.acceptance
def test_failed_run_is_named_and_the_others_are_reported(study_folder, tmp_path, capsys):
    study = tmp_path / "study"
    arguments = [
        "--methods", "grad_accum", "--seeds", 1, "--baselines", "none", "--output_dir", study,
    ]  # fmt: skip
    varied = [
        "--vary", "optim.learning_rate=1e-3,1e9", "--optim.schedule", "constant",
        "--run.drift_steps", 0,
    ]  # fmt: skip
    code, said = call(capsys, study_folder, *arguments, *varied)
    assert code == 1
    assert "1 run failed. The first is grad_accum-learning_rate=1e9-seed0: exit code 2," in said
    assert "contains NaN, infinity" in said
    page = (study / "report.html").read_text()
    assert "Failed runs, not in the tables: grad_accum-learning_rate=1e9-seed0" in page
    assert (study / "runs" / "grad_accum-learning_rate=1e-3-seed0" / "metrics.json").exists()


@pytest.mark.acceptance
def test_learning_rate_is_chosen_on_dev_and_never_on_test(study_folder, tmp_path, capsys):
    study = tmp_path / "study"
    rates = ["--tune", "optim.learning_rate=1e-9,3e-3"]
    arguments = [
        "--methods", "cont_accum", "--seeds", 2, "--baselines", "none", "--output_dir", study,
    ]  # fmt: skip
    code, said = call(capsys, study_folder, *arguments, *rates, "--optim.max_steps", 12)
    assert code == 0, said
    scores = {
        rate: read_json(study / "runs" / f"cont_accum-learning_rate={rate}-seed0" / "tuned.json")[
            "score"
        ]
        for rate in ("1e-9", "3e-3")
    }
    chosen = max(scores, key=scores.get)
    other = next(rate for rate in scores if rate != chosen)
    for seed in (0, 1):
        assert (
            study / "runs" / f"cont_accum-learning_rate={chosen}-seed{seed}" / "metrics.json"
        ).exists()
    lost = study / "runs" / f"cont_accum-learning_rate={other}-seed0"
    assert not (lost / "metrics.json").exists()
    assert not (study / "runs" / f"cont_accum-learning_rate={other}-seed1").exists()
    rows = [row[1:] for row in tables_of(study, "Tuning")[0] if row[0] == "cont_accum"]
    mark = "chosen, optim.learning_rate at the edge"
    assert rows == [
        [f"optim.learning_rate={rate}", f"{score:.4f}", mark if rate == chosen else ""]
        for rate, score in scores.items()
    ]
    before = stamps(study)
    assert call(capsys, study_folder, *arguments, *rates, "--optim.max_steps", 12)[0] == 0
    assert stamps(study) == before


def tables_of(study: Path, title: str) -> list[list[list[str]]]:
    """Return the rows of each table in a section of report.html, without the headings."""
    section = (study / "report.html").read_text().split(f"<h2>{title}</h2>")[1].split("<h2>")[0]
    return [
        [
            [html.unescape(cell) for cell in re.findall(r"<td>(.*?)</td>", row)]
            for row in re.findall(r"<tr>(.*?)</tr>", body)
        ]
        for body in re.findall(r"<tbody>(.*?)</tbody>", section, re.DOTALL)
    ]


BUDGET = [
    "--budget", "180f", "--seeds", "1", "--baselines", "none", "--methods", "grad_cache",
    "--keep_weights", "false",
]  # fmt: skip
TUNED = [
    "--tune", "optim.learning_rate=1e-9,3e-3", "--tune", "batch.global_batch_size=4,16",
    "--run.eval_steps", "0",
]  # fmt: skip


@pytest.fixture(scope="module")
def tuned_study(study_folder):
    """A finished comparison that tuned four combinations in two rungs."""
    done = subprocess.run(
        [*command(study_folder, study_folder / "tuned"), *BUDGET, *TUNED],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return study_folder / "tuned"


@pytest.mark.acceptance
def test_runs_get_the_steps_that_the_budget_pays_for(tuned_study):
    """180 forward passes pay for 15 steps of 4 pairs (12 passes each) and 3 of 16 pairs (60); a
    third of them for 5 and 1."""
    names = [
        f"grad_cache-learning_rate={rate}-global_batch_size={n}-seed0"
        for rate in ("1e-9", "3e-3")
        for n in (4, 16)
    ]
    for name, count in zip(names, (5, 1, 5, 1), strict=True):
        run = tuned_study / "tuning" / f"{name}-1of3"
        rates = [line["learning_rate"] for line in read_log(run) if "loss" in line]
        assert len(rates) == count
        # the linear schedule ends with this run
        assert rates[-1] == pytest.approx(rates[0] / count)
        assert not (run / "model").exists()
    rows = tables_of(tuned_study, "Tuning")[0]
    assert len(rows) == 4
    finalists = {row[1]: row[3] for row in rows if row[3] != "-"}
    assert len(finalists) == 2
    found = read_json(tuned_study / "compare.json")
    chosen = found["chosen"]["grad_cache"]
    best = max(finalists, key=finalists.get)
    assert ", ".join(f"{name}={value}" for name, value in chosen.items()) == best
    (mark,) = (row[-1] for row in rows if row[-1])
    assert mark == "chosen" + "".join(f", {name} at the edge" for name in chosen)
    (row,) = found["results"]
    n = int(chosen["batch.global_batch_size"])
    assert (row["run"], row["steps"], row["forward_passes"]) == (
        "grad_cache",
        180 // (4 * n - 4),
        180,
    )
    assert not list(tuned_study.glob("runs/*/model")) + list(tuned_study.glob("runs/*/checkpoints"))
    ((shown,),) = tables_of(tuned_study, "Quality")
    assert shown[2] == f"{row['mean']:.4f}"
    assert shown[4:8] == [str(row[name]) for name in ("N", "steps", "pairs", "forward_passes")]


@pytest.mark.acceptance
def test_killed_tuning_continues_with_the_same_choice(study_folder, tuned_study, tmp_path):
    study = tmp_path / "study"
    first = subprocess.Popen(
        [NEW_PYTHON, *command(study_folder, study)[1:], *BUDGET, *TUNED],
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    while len(list(study.glob("tuning/*/tuned.json"))) < 2:
        assert first.poll() is None
        time.sleep(0.02)
    first.send_signal(signal.SIGKILL)
    first.wait()
    done = subprocess.run(
        [*command(study_folder, study), *BUDGET, *TUNED], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "[1/2]" in done.stderr  # the two finished runs of the first rung are not repeated
    found, expected = (read_json(each / "compare.json") for each in (study, tuned_study))
    assert found["chosen"] == expected["chosen"]
    assert tables_of(study, "Tuning") == tables_of(tuned_study, "Tuning")
    assert found["results"][0]["mean"] == expected["results"][0]["mean"]


@pytest.mark.acceptance
@pytest.mark.filterwarnings("ignore:--budget sets the number of steps")
def test_budget_in_seconds_is_measured_once(study_folder, tmp_path, capsys):
    arguments = [
        "--output_dir", tmp_path, "--methods", "grad_accum", "--seeds", 1, "--baselines", "none",
        "--data.dev", "null",
    ]  # fmt: skip
    assert (
        call(capsys, study_folder, *arguments, "--budget", "1s", "--run.eval_steps", 0.25)[0] == 0
    )
    (seconds,) = read_json(tmp_path / "step_costs.json").values()
    (row,) = read_json(tmp_path / "compare.json")["results"]
    assert row["steps"] == int(1 / seconds)
    before = stamps(tmp_path)
    assert (
        call(capsys, study_folder, *arguments, "--budget", "1s", "--run.eval_steps", 0.25)[0] == 0
    )
    assert stamps(tmp_path) == before


def test_launch_in_several_processes_is_refused(study_folder, tmp_path, capsys, monkeypatch):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as torchrun's
    place = {
        "WORLD_SIZE": "2",
        "RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
    }
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    code, said = call(capsys, study_folder, "--output_dir", tmp_path / "new")
    assert (code, "compare needs one process, but 2 were started" in said) == (2, True)


def test_different_runs_with_one_folder_are_refused(study_folder, tmp_path, capsys):
    """The second run would otherwise count as finished, or train with the settings of the first."""
    settings = tmp_path / "settings.yaml"
    settings.write_text(
        "a: {method: cont_accum, bank.size: 16, tune: {optim.learning_rate: [0.1]}}\n"
        "a-learning_rate=0.1: {method: cont_accum, bank.size: 24}"
    )
    code, said = call(
        capsys, study_folder, "--output_dir", tmp_path / "new", "--settings", settings
    )
    assert code == 2, said
    assert "two runs would use this folder" in said
    assert not (tmp_path / "new").exists()


def test_methods_vary_only_over_settings_that_they_use():
    assert read_values("--vary", ("loss.matryoshka_dims=[64,32],[],[16]",)) == {
        "loss.matryoshka_dims": ["[64,32]", "[]", "[16]"]
    }
    assert read_values("--vary", ("model.query_prefix=,query: , a",)) == {
        "model.query_prefix": ["", "query: ", "a"]
    }
    varied = read_values(
        "--vary", ("bank.size=1,2", "batch.micro_batch_size=4,8", "optim.learning_rate=1,2")
    )
    names = [one.label for one in variants(["in_batch", "grad_cache", "cont_cache"], varied, {})]
    assert names[:6] == [
        "in_batch-learning_rate=1",
        "in_batch-learning_rate=2",
        *(
            f"grad_cache-micro_batch_size={b}-learning_rate={rate}"
            for b in (4, 8)
            for rate in (1, 2)
        ),
    ]
    assert len(names) == 6 + 8
    for varied_and_tuned in ((varied, {}), ({}, varied)):
        with pytest.raises(InputError, match=r"bank\.size has no effect with in_batch, grad_cache"):
            variants(["in_batch", "grad_cache"], *varied_and_tuned)


def test_a_baseline_depends_only_on_what_it_is_made_of():
    """The encoder `tiny` builds its vocabulary from the training texts, including all sets of a
    mixture."""

    def made(kind: str, *sets: tuple[str, str], train: str = "", **changes) -> dict:
        config = train_config(Path(train), Path("out"), **changes)
        config.data.train = train
        config.data.mixture = [MixtureConfig(train=name, split=split) for name, split in sets]
        return Job("name", kind, config, {}).made_of

    both = made("untrained", ("a", "train"), ("b", "train"))
    assert both == made("untrained", ("a", "train"), ("b", "train"), **{"optim.max_steps": 9})
    others = [
        made("untrained", ("a", "train")),
        made("untrained", ("a", "train"), ("b", "dev")),
        made("untrained", ("b", "train"), ("a", "train")),
        made("untrained", train="a"),
        made("untrained", ("a", "train"), ("b", "train"), seed=5),
        made("untrained", ("a", "train"), ("b", "train"), **{"model.max_passage_length": 9}),
    ]
    assert all(both != other for other in others)
    assert made("bm25", train="a") == made("bm25", train="b")
    assert made("run", train="a") != made("run", train="a", **{"optim.max_steps": 9})


def test_report_figures_equal_those_in_the_run_files(study_folder):
    study = study_folder / "study"
    rows = {row["run"]: row for row in read_json(study / "compare.json")["results"]}
    assert len(rows) == len(folders(study))
    run = study / "runs" / "cont_accum-size=24-seed0"
    value = read_json(run / "metrics.json")["mean"]["ndcg@10"]
    row = rows["cont_accum-size=24"]
    assert row["mean"] == value
    seconds = sum(line["seconds"] for line in read_log(run) if "loss" in line)
    assert row["train_seconds"] == pytest.approx(seconds)
    (quality,), (each,) = tables_of(study, "Quality"), tables_of(study, "Runs")
    cells = next(row for row in quality if row[0] == run.name[:-6])
    assert cells[1:4] == ["cont_accum size=24", f"{value:.4f}", "1"]
    assert row["against"] == "grad_accum"
    assert cells[4:6] == [
        f"{row['difference']:+.4f}", f"{row['low']:+.4f} to {row['high']:+.4f}",
    ]  # fmt: skip
    assert {row[0]: row[4] for row in quality}["grad_accum"] == "-"
    assert sorted(row[0] for row in each) == folders(study)
    page = (study / "report.html").read_text()
    for heading in ("Result", "Figures", "Runs"):
        assert f"<h2>{heading}</h2>" in page
    assert re.findall(r'<figure id="(\S+)">', page) == [
        "metric-time", "metric-memory", "dev", "loss", "grad-ratio", "bank-drift",
    ]  # fmt: skip


def test_summary_lists_the_tested_differences_best_first(study_folder):
    """The table that the command prints, and the page's path."""
    text, page = (study_folder / "stdout").read_text().rstrip("\n").split("\n\n")
    _, _, table = text.split("\n", 2)  # after the lines about p
    assert page == str(study_folder / "study" / "report.html")
    heads, _, *rows = (
        [cell.strip() for cell in line.strip("| ").split("|")] for line in table.splitlines()
    )
    assert heads[:4] == ["run", "ndcg@10", "minus grad_accum", "95 % interval"]
    assert len(heads) == 7
    scores = {row[0]: float(row[1]) for row in rows}
    assert sorted(scores.values(), reverse=True) == list(scores.values())
    metrics = read_json(study_folder / "study" / "runs" / "bm25" / "metrics.json")
    assert scores["bm25"] == pytest.approx(metrics["mean"]["ndcg@10"], abs=5e-5)
    for row in rows:
        if row[0] == "grad_accum":
            assert row[2:5] == ["-", "-", "-"]
        else:
            apart = scores[row[0]] - scores["grad_accum"]
            assert float(row[2]) == pytest.approx(apart, abs=2e-4)
            low, high = map(float, row[3].split(" to "))
            assert low <= float(row[2]) <= high


def test_page_is_self_contained(study_folder):
    text = (study_folder / "study" / "report.html").read_text()
    addresses = re.findall(r'\s(?:src|href|data|action)="([^"]*)"', text)
    assert len(addresses) == text.count("<figcaption") == 6
    for address in addresses:
        kind, image = address.split(",")
        assert kind == "data:image/svg+xml;base64"
        plot = base64.b64decode(image).decode()
        assert plot.startswith("<?xml")
        assert re.search(r'<(script|image)\b|(href="|url\()(?!#)', plot) is None
    assert re.search(r"<(script|link|iframe|object)\b|url\(", text) is None


def test_page_escapes_names(study_folder, tmp_path, capsys):
    """A folder name that looks like HTML is shown as text."""
    run = tmp_path / "<b>bold&amp;"
    run.mkdir()
    (run / "metrics.json").write_text(
        (study_folder / "study" / "runs" / "bm25" / "metrics.json").read_text()
    )
    other = study_folder / "study" / "runs" / "cont_accum-size=16-seed0"
    page = tmp_path / "page.html"
    assert main(["report", str(run), str(other), "--html", str(page)]) == 0
    assert capsys.readouterr().out.endswith(f"|\n\n{page}\n")
    assert "<b>" not in page.read_text()
    assert "&lt;b&gt;bold&amp;amp;" in page.read_text()

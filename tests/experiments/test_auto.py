"""`contaccum auto`: its limits, its plan, its verdict, and a whole call that is killed twice."""

import json
import os
import re
import signal
import subprocess
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import train_config, write_beir
from processes import python

from contaccum.cli import main
from contaccum.config.experiments import AutoConfig
from contaccum.errors import InputError, Interrupted
from contaccum.evaluation.significance import compare
from contaccum.experiments import auto
from contaccum.experiments.auto_state import parse_time
from contaccum.experiments.page import duration
from contaccum.experiments.sizes import FittingSize
from contaccum.experiments.tuning import rung_shares, survivors

pytestmark = pytest.mark.filterwarnings("ignore:contaccum auto chooses these settings")

SECONDS = {"dev": 2.0, "run": 3.0, "cont_accum": 0.01, "cont_cache": 0.01, "grad_cache": 0.012}


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("30m", 1800), ("1.5h", 5400), ("2h", 7200)]
)
def test_times_have_a_unit(text, seconds):
    assert parse_time(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "30", "m", "-1m", "0s", "nanm", "infh", "1e300h", "30 minutes", "0x10s"]
)
def test_other_times_are_refused(text):
    with pytest.raises(InputError, match=r"--time is .*such as 30m"):
        parse_time(text)


@pytest.mark.parametrize(
    ("trained", "word"),
    [
        ((0.9, 0.8, 0.9, 0.85), "the trained model is better; use it"),
        ((0.1, 0.2, 0.1, 0.15), "the trained model is worse; do not use it"),
        ((0.9, 0.1, 0.5, 0.5), "no significant difference"),
    ],
)
def test_the_verdict_follows_the_interval(trained, word):
    def scores(values):
        return {0: {f"q{n}": {"ndcg@10": value} for n, value in enumerate(values)}}

    assert word in auto.verdict(
        compare(scores(trained), scores((0.5, 0.5, 0.5, 0.5)), "ndcg@10"), "ndcg@10"
    )


@pytest.fixture
def planned(tmp_path):
    """Function from a time to the plan of tuning with known seconds."""
    data = write_beir(tmp_path / "data")

    def plan(limit: str):
        config = train_config(data, tmp_path / "auto")
        made = auto.Auto(lambda changes: config, AutoConfig(memory="8GB", time=limit))
        made.state.seconds = SECONDS
        return made, *made.state.tuning_plan(made._candidates(), made.total)

    return plan


def cost(made, candidates, budget):
    """Seconds of tuning: every run trains for its share of the budget and evaluates once on dev."""
    left, seconds = len(candidates), 0.0
    for share in rung_shares(len(candidates), None):
        seconds += left * (budget * share + made.state.seconds["run"])
        left = survivors(left)
    return seconds


@pytest.mark.parametrize("limit", ["5m", "15m", "2h"])
def test_tuning_costs_at_most_a_fifth_of_the_time(planned, limit):
    made, candidates, budget = planned(limit)
    assert len(candidates) > 1
    assert cost(made, candidates, budget) <= 0.2 * made.total * 1.001


def test_more_time_tries_more_combinations(planned):
    few, many = (len(planned(limit)[1]) for limit in ("3m", "2h"))
    assert few < many == len(planned("2h")[0]._candidates())


def test_without_time_for_tuning_the_first_combination_is_used(planned):
    made, candidates, _ = planned("20s")
    assert candidates == made._candidates()[:1]


@pytest.mark.parametrize(("limit", "enough"), [("20s", False), ("15m", True)])
def test_time_that_leaves_no_training_is_refused(planned, limit, enough):
    made, candidates, _ = planned(limit)
    made.state.spent = 15.0  # seconds of the measurements
    made.state.seconds = {**SECONDS, "dev": 2.0, "run": 1.0}
    assert made.state.evaluation_seconds == pytest.approx(5 * 2.0)
    if enough:
        made._check_time(len(candidates) > 1)
        return
    with pytest.raises(InputError, match="--time is 20s, but it leaves no time to train"):
        made._check_time(len(candidates) > 1)
    made.state.steps = 1  # the final run was planned in an earlier call
    made._check_time(len(candidates) > 1)


@pytest.mark.parametrize(
    ("limit", "tuning", "left"),
    [("20s", "none, because the time is too short", 15), ("15m", "3 min", 715)],
)
def test_the_plan_divides_the_whole_time(planned, monkeypatch, limit, tuning, left):
    made, candidates, budget = planned(limit)
    made.state.spent = 5.0  # seconds of the measurements
    monkeypatch.setattr(time, "monotonic", lambda: made.state.began)
    shown = dict(line.split(": ", 1) for line in made._plan_text(candidates, budget).splitlines())
    assert tuning in shown["tuning"]
    assert shown["final training and evaluation"] == duration(left)


def test_tuning_ends_when_its_time_is_over(planned):
    made, candidates, budget = planned("15m")
    made.state.tuning = 0.2 * made.total
    made._tune(candidates, budget)
    assert made.state.chosen == dict(candidates[0])
    assert not (made.output / "tune").exists()


def test_a_tuning_run_has_at_most_20_epochs(planned):
    made, candidates, _ = planned("15m")
    assert [made._most_steps(each) for each in candidates[:1]] == [20 * made._queries // 16]


def test_settings_that_auto_chooses_are_named(tmp_path):
    """They had no effect, but micro_batch_tokens replaced the size that fits into --memory."""
    changes = {
        "batch.micro_batch_tokens": 40,
        "optim.max_steps": 5,
        "batch.global_batch_size": 128,
        "bank.size": None,
    }
    given = train_config(write_beir(tmp_path / "data"), tmp_path / "auto", "in_batch", **changes)
    with pytest.warns(
        UserWarning,
        match="ignores your values: method, .*batch.micro_batch_tokens, .*optim.max_steps",
    ) as found:
        made = auto.Auto(lambda _: given, AutoConfig(memory="8GB", time="1h"))
    assert not re.search("global_batch_size|bank.size|learning_rate", str(found[0].message))
    assert made.config("run", {}).batch.micro_batch_tokens is None


def test_distillation_without_dev_data_is_refused(tmp_path):
    """Held-out data have no teacher scores, and training said that the user's data have none."""
    given = train_config(
        write_beir(tmp_path / "data"), tmp_path / "auto", **{"loss.distillation": "kl"}
    )
    (tmp_path / "data" / "qrels" / "dev.tsv").unlink()
    with pytest.raises(InputError, match=r"^loss\.distillation is kl, so data\.dev must be set"):
        auto.Auto(lambda _: given, AutoConfig(memory="8GB", time="1h"))


def test_memory_of_earlier_runs_is_freed_before_a_method_is_measured(planned, monkeypatch):
    made, calls = planned("15m")[0], []
    made.state.seconds = {}
    monkeypatch.setattr(made, "_evaluate", lambda *_: calls.append("run"))
    monkeypatch.setattr(made, "_trial", lambda _: calls.append("run") or 1.0)
    monkeypatch.setattr(auto.Engine, "free_memory", lambda: calls.append("free"))
    monkeypatch.setattr(
        auto,
        "measure_micro_batch",
        lambda *_: calls.append("measure") or FittingSize(4, 1.0, 0.0, 4),
    )
    made._measure()
    assert calls == ["run", *["free", "measure", "run"] * 3]


def test_every_step_of_a_measured_run_is_logged(planned):
    """run.log_steps 10 left no line in a trial of 8 steps, and no time to take the median of."""
    made, candidates, _ = planned("15m")
    base = made.configure({})
    made.configure = lambda _: replace(base, run=replace(base.run, log_steps=10))
    logged = [
        made._run_config("run", dict(candidates[0]), 8, evaluations).run.log_steps
        for evaluations in (0, 4)
    ]
    assert logged == [1, 10]


@pytest.mark.filterwarnings("ignore:.*1 queries are skipped")
def test_training_queries_are_counted_as_training_reads_them(tmp_path):
    data = write_beir(tmp_path / "data")
    lines = (data / "queries.jsonl").read_text().splitlines(keepends=True)
    (data / "queries.jsonl").write_text("".join([*lines, lines[0]]))
    config = train_config(data, tmp_path / "auto", **{"data.repair": True})
    once = train_config(write_beir(tmp_path / "once"), tmp_path / "auto")
    counts = [
        auto.Auto(lambda _, each=each: each, AutoConfig(memory="8GB", time="1h"))._queries
        for each in (config, once)
    ]
    assert counts[0] == counts[1] > 0


def test_every_combination_has_a_micro_batch_that_divides_its_batch(tmp_path):
    config = train_config(write_beir(tmp_path / "data"), tmp_path / "auto")

    def configure(changes):
        sizes = {
            name: int(changes.get(f"batch.{name}", 8))
            for name in ("global_batch_size", "micro_batch_size")
        }
        return replace(config, batch=replace(config.batch, **sizes))

    made = auto.Auto(configure, AutoConfig(memory="8GB", time="1h"))
    made.state.sizes = {"cont_accum": 32, "cont_cache": 8, "grad_cache": 64}
    for candidate in made._candidates():
        batch = made.config("x", dict(candidate)).batch
        assert batch.global_batch_size % batch.micro_batch_size == 0
        assert batch.micro_batch_size <= made.state.sizes[dict(candidate)["method"]]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--time", "soon"], "--time is 'soon'"),
        (["--time", "60s", "--memory", "lots"], "--memory is 'lots'"),
        (["--time", "60s", "--optim.learning_rat", "1"], "optim.learning_rate"),
        (["--memory", "8GB"], "time"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_written(
    tmp_path, capsys, arguments, sentence
):
    data = write_beir(tmp_path / "data")
    base = [
        "--data.train",
        str(data),
        "--model.name",
        "tiny",
        "--output_dir",
        str(tmp_path / "auto"),
    ]
    memory = [] if "--memory" in arguments else ["--memory", "8GB"]
    assert main(["auto", *base, *memory, *arguments]) == 2
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "auto").exists()


def test_the_state_is_read_after_waiting_for_another_call(tmp_path, monkeypatch):
    config = train_config(write_beir(tmp_path / "data"), tmp_path / "auto")

    def run(limit):
        return auto.run_auto(lambda changes: config, AutoConfig(memory="8GB", time=limit))

    @contextmanager
    def waiting(path, after):
        other = auto.Auto(lambda changes: config, AutoConfig(memory="8GB", time="2m"))
        other.state.seconds = SECONDS
        other.state.save()
        yield

    monkeypatch.setattr(auto, "waiting_lock", waiting)
    monkeypatch.setattr(auto.Auto, "run", lambda self: self.state.seconds)
    assert run("2m") == SECONDS
    (tmp_path / "auto" / "auto.json").unlink()
    with pytest.raises(InputError, match=r"auto\.time was 2m and is 3m"):
        run("3m")


@pytest.mark.parametrize("kind", ["train", "dev", "test"])
def test_a_call_on_changed_data_is_refused(kind, tmp_path, monkeypatch):
    data = write_beir(tmp_path / "data")
    config = train_config(data, tmp_path / "auto")

    def stop(self):
        raise Interrupted(signal.SIGTERM, "stopped")

    def run():
        auto.run_auto(lambda changes: config, AutoConfig(memory="8GB", time="2m"))

    monkeypatch.setattr(auto.Auto, "_divide", stop)
    for _ in range(2):
        with pytest.raises(Interrupted):
            run()
    qrels = data / "qrels" / f"{kind}.tsv"
    qrels.write_text(qrels.read_text() + "q0\tp3\t1\n")
    with pytest.raises(InputError, match=rf"the {kind} data changed since then"):
        run()


@pytest.mark.acceptance
def test_a_call_that_is_killed_twice_ends_with_a_better_model(tmp_path):
    """The demo set without its dev split; killed in tuning and in training."""
    assert main(["data", "demo", str(tmp_path / "demo")]) == 0
    (tmp_path / "demo" / "qrels" / "dev.tsv").unlink()
    call = [python(), "-m", "contaccum", "auto", "--memory", "8GB", "--time", "150s"]
    call += [
        "--output_dir",
        str(tmp_path / "auto"),
        "--data.train",
        str(tmp_path / "demo"),
        "--model.name",
        "tiny",
    ]
    call += ["--model.temperature", "0.05", "--optim.learning_rate", "1e-3", "--run.device", "cpu"]
    call += ["--model.max_passage_length", "64"]
    environment = {**os.environ, "CONTACCUM_CACHE": str(tmp_path / "cache")}
    state = tmp_path / "auto" / "auto.json"
    ends = {
        "tuning": lambda: len(list((tmp_path / "auto" / "tune").glob("*/tuned.json"))) >= 2,
        "training": lambda: any((tmp_path / "auto" / "train" / "checkpoints").glob("step-*")),
    }
    for reached in ends.values():
        with subprocess.Popen(call, env=environment, stderr=subprocess.DEVNULL) as running:
            while not reached():
                assert running.poll() is None
                time.sleep(0.1)
            running.send_signal(signal.SIGKILL)
        before = json.loads(state.read_text())
    done = subprocess.run(call, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "against the untrained model: the trained model is better; use it" in done.stdout
    after = json.loads(state.read_text())
    assert (after["chosen"], after["steps"]) == (before["chosen"], before["steps"])
    assert (tmp_path / "auto" / "report.html").is_file()
    test_queries = {
        line.split("\t")[0]
        for line in (tmp_path / "demo" / "qrels" / "test.tsv").read_text().splitlines()[1:]
    }
    metrics = json.loads((tmp_path / "auto" / "train" / "metrics.json").read_text())
    assert metrics["per_query"].keys() == test_queries
    for part in ("train", "dev"):
        text = (Path(tmp_path / "auto" / "data" / part / "qrels") / f"{part}.tsv").read_text()
        assert not test_queries & {line.split("\t")[0] for line in text.splitlines()[1:]}
    again = subprocess.run(call, env=environment, capture_output=True, text=True, check=False)
    assert again.stdout.splitlines()[:-1] == done.stdout.splitlines()[:-1]  # all but the time

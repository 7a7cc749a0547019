"""`contaccum auto`: its limits, its plan, its verdict, and a whole call that is killed twice."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from helpers import tiny_encoder, train_config, write_beir

from contaccum.cli import main
from contaccum.config.experiments import AutoConfig
from contaccum.data.dataset import load_training, open_dataset
from contaccum.errors import InputError, Interrupted
from contaccum.evaluation.significance import Comparison, compare
from contaccum.experiments import auto, auto_state
from contaccum.experiments.auto_state import parse_time
from contaccum.experiments.run_records import Difference, RunGroup
from contaccum.experiments.tuning import rung_shares, survivors
from contaccum.runtime.files import write_json
from contaccum.training.run_folder import finish

pytestmark = pytest.mark.filterwarnings(
    "ignore:contaccum auto chooses .* itself",
    "default:.* also occur in the (training|dev) data",
)

PREDICTED = {"start": 20.0, "dev": 2.0, "untrained": 20.0, "bm25": 1.0, "run": 3.0}
PREDICTED |= {"pass": 0.003, "report": 5.0}


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("1.5h", 5400)])
def test_times_have_a_unit(text, seconds):
    assert parse_time(text) == seconds


@pytest.mark.parametrize("text", ["30", "-1m", "nanm"])
def test_other_times_are_refused(text):
    with pytest.raises(InputError, match=r"--time is .*such as 30m"):
        parse_time(text)


def difference(found: Comparison) -> Difference:
    """A test that is not corrected."""
    group = RunGroup("a", "", [])
    return Difference(group, group, found, found.p_permutation, found.p_permutation)


@pytest.mark.parametrize(
    ("trained", "bm25", "word"),
    [
        ((0.9, 0.8, 0.9, 0.85), 0.4, "the trained model is better; use it"),
        ((0.9, 0.8, 0.9, 0.85), 0.95, "better than before training, but BM25 is better (ndcg"),
        ((0.9, 0.8, 0.9, 0.85), 0.85, "but no significant difference from BM25 (ndcg@10 +0.013"),
        ((0.1, 0.2, 0.1, 0.15), 0.4, "the trained model is worse; do not use it"),
        ((0.9, 0.1, 0.5, 0.5), 0.95, "no significant difference"),
    ],
)
def test_the_verdict_follows_both_intervals(trained, bm25, word):
    def scores(values):
        return {0: {f"q{n}": {"ndcg@10": value} for n, value in enumerate(values)}}

    untrained, words = (
        compare(scores(trained * 3), scores((other,) * 12), "ndcg@10") for other in (0.5, bm25)
    )
    assert word in auto.verdict(difference(untrained), difference(words), "ndcg@10")


def test_a_gain_on_two_queries_proves_nothing():
    """All intervals of equal gains are empty, so p decides: 0.5, as two of four sign flips."""
    better = {0: {f"q{n}": {"ndcg@10": 0.9} for n in range(2)}}
    found = compare(better, {0: {f"q{n}": {"ndcg@10": 0.1} for n in range(2)}}, "ndcg@10")
    assert found.low > 0
    assert "no significant difference" in auto.verdict(
        difference(found), difference(found), "ndcg@10"
    )


def test_the_verdict_has_the_p_of_the_report():
    """It is corrected for two comparisons, so 0.04 is no difference."""
    better = {0: {"q": {"m": 1.0}, "r": {"m": 0.9}}}
    found = compare(better, {0: {"q": {"m": 0.0}, "r": {"m": 0.1}}}, "m")
    found = replace(found, low=0.01, p_permutation=0.04)
    assert "use it" in auto.verdict(difference(found), difference(found), "m")
    corrected = difference(found)._replace(p=0.08)
    assert "no significant difference" in auto.verdict(corrected, difference(found), "m")


def auto_of(config, limit: str) -> auto.Auto:
    return auto.Auto(config, AutoConfig(time=limit), auto.time.monotonic())


def set_clock(monkeypatch, clock):
    """Let ``auto`` read the time from ``clock[0]``."""
    fake = SimpleNamespace(monotonic=lambda: clock[0], perf_counter=lambda: clock[0])
    monkeypatch.setattr(auto, "time", fake)
    monkeypatch.setattr(auto_state, "time", fake)


@pytest.fixture
def planned(tmp_path, monkeypatch):
    """Function from a time to the plan of tuning with known seconds and a clock that stands
    still."""
    set_clock(monkeypatch, [0.0])
    config = train_config(write_beir(tmp_path / "data"), tmp_path / "auto")

    def plan(limit: str):
        made = auto_of(config, limit)
        made.state.predicted = PREDICTED
        return made, *made.state.tuning_plan(made._candidates(), made.total)

    return plan


def cost(made, candidates, budget):
    """Seconds of tuning: every run trains for its share of the budget and evaluates once on dev."""
    left, seconds = len(candidates), 0.0
    for share in rung_shares(len(candidates), None):
        seconds += left * (budget * share + made.state.expected("run"))
        left = survivors(left)
    return seconds


@pytest.mark.parametrize("limit", ["5m", "2h"])
def test_tuning_costs_at_most_a_fifth_of_the_time(planned, limit):
    made, candidates, budget = planned(limit)
    assert len(candidates) > 1
    assert cost(made, candidates, budget) <= 0.2 * made.total * 1.001


def test_more_time_tries_more_combinations(planned):
    few, many = (len(planned(limit)[1]) for limit in ("5m", "2h"))
    assert few < many == len(planned("2h")[0]._candidates())


def test_without_time_for_tuning_the_first_combination_is_used(planned):
    made, candidates, _ = planned("20s")
    assert candidates == made._candidates()[:1]


@pytest.mark.parametrize(("slower", "spent"), [(1.0, 0.0), (4.0, 40.0)])
def test_a_refusal_names_a_time_that_is_enough(planned, slower, spent):
    made = planned("60s")[0]
    made.state.predicted = {key: slower * value for key, value in PREDICTED.items()}
    made.state.spent = spent
    with pytest.raises(InputError, match=r"--time is 60s.*two are needed") as refused:
        made._check_time()
    named = re.search(r"Use (--time \d+m) with the same folder", str(refused.value))[1]
    minutes = named.split()[1]
    raised = planned(minutes)[0]
    # the next call starts again, and the machine may be slower
    raised.state.spent = spent + 1.2 * slower * PREDICTED["start"]
    raised.state.predicted = {key: 1.2 * value for key, value in made.state.predicted.items()}
    raised._check_time()
    raised.state.predicted = made.state.predicted
    # not much more than needed: a third of it would be refused
    assert not raised.state.enough(raised.total / 3)


def test_a_measured_stage_replaces_its_prediction(planned):
    """An evaluation that took three times as long leaves less time, and later no time."""
    made = planned("150s")[0]
    made._check_time()
    before = made.state.training_seconds(150)
    made.state.seconds["untrained"] = 60.0
    made.state.spent = 60.0
    # 60 seconds are gone instead of 20 expected ones, and the last evaluation takes longer too
    assert made.state.training_seconds(150) == pytest.approx(before - 40 - 1.1 * 40)
    with pytest.raises(InputError, match="takes about 1 min,"):
        made._check_time()


def test_a_call_that_has_begun_trains_in_little_time(planned):
    """A new call would be refused; after a kill, the evaluations that are done would be lost."""
    made = planned("90s")[0]
    made.state.spent = 45.0
    made.state.seconds = {key: PREDICTED[key] for key in ("dev", "untrained", "bm25")}
    made._check_time()
    made.state.seconds, made.state.spent = {}, 22.0  # as much time for training
    with pytest.raises(InputError, match="no time to train"):
        made._check_time()


@pytest.mark.parametrize(("limit", "evaluations"), [("20s", 1), ("2h", 5)])
def test_a_short_time_has_fewer_dev_evaluations(planned, limit, evaluations):
    made = planned(limit)[0]
    assert made.state.evaluations(made.total) == evaluations


@pytest.mark.parametrize(("limit", "passages", "queries"), [("1m", 200, 50), ("20m", 300, 75)])
def test_the_dev_set_is_as_large_as_the_time_allows(planned, monkeypatch, limit, passages, queries):
    """30 seconds for four evaluations of passages that take 0.1 s each; at least 200 passages."""
    made = planned(limit)[0]
    monkeypatch.setattr(auto, "build_encoder", lambda *_: tiny_encoder())
    monkeypatch.setattr(auto, "encoding_seconds", lambda *_: 0.1)
    made._predict()
    assert (made.state.dev_passages, made._dev_queries) == (passages, queries)
    corpus, test_queries = 40, 10
    assert made.state.predicted["untrained"] == pytest.approx(0.1 * (corpus + test_queries))


class SteadyRun:
    """Training run on a clock that only the steps move."""

    def __init__(self, clock, total):
        self.clock, self.total, self.done = clock, total, 0
        self.dev = SimpleNamespace(evaluated=0)
        self.totals = []  # all changes

    def set_total(self, total):
        self.total = max(self.done, total)
        self.totals.append(self.total)

    def run(self, pace, seconds, slower=1.0):
        """Take all steps, and evaluate when it is due. seconds: function from a step to its
        seconds."""
        while self.done < self.total:
            self.clock[0] += seconds(self.done)
            self.done += 1
            pace(self)
            left = self.total - self.done
            due = pace.eval_steps and self.done % pace.eval_steps == 0
            if left == 0 or (due and left >= pace.eval_steps / 2):
                self.clock[0] += slower * pace.evaluation
                self.dev.evaluated = self.done


@pytest.mark.parametrize(
    ("seconds", "steps"),
    [
        (lambda step: 1.0, 100),
        (lambda step: 2.0, 50),  # the machine is half as fast as planned
        (lambda step: 1.0 if step < 20 else 4.0, 40),  # it becomes slow during the run
        (lambda step: 0.25, 200),  # it is faster, but no run has more than 200 steps
    ],
)
def test_a_run_ends_at_its_deadline(monkeypatch, seconds, steps):
    clock = [0.0]
    set_clock(monkeypatch, clock)
    run = SteadyRun(clock, 100)
    run.run(auto.Pace(end=100.0, most=200), seconds)
    assert clock[0] <= 104
    assert run.done == pytest.approx(steps, rel=0.1)


def test_the_number_of_steps_does_not_change_to_and_fro(monkeypatch):
    """With an evaluation after step 70 there is time for 100 steps, without it for 120.

    None is made less than 35 steps before the end, so 104 steps are the most until step 70.
    """
    clock = [0.0]
    set_clock(monkeypatch, clock)
    run, reported = SteadyRun(clock, 115), []
    pace = auto.Pace(140.0, 200, evaluation=20.0, eval_steps=70, reported=0.0)
    pace.report = lambda training: reported.append(training.total)
    run.run(pace, lambda _: 1.0)
    assert run.totals == [104, 120]
    assert reported == [104]  # once a minute
    assert clock[0] <= 142


@pytest.mark.parametrize("slower", [1.0, 2.0])
def test_a_slow_dev_evaluation_leaves_more_time_for_the_last_one(monkeypatch, slower):
    """The first of two dev evaluations shows how long the test will take."""
    clock = [0.0]
    set_clock(monkeypatch, clock)
    run = SteadyRun(clock, 70)
    pace = auto.Pace(100.0, 200, evaluation=5.0, eval_steps=30, after=20.0)
    run.run(pace, lambda _: 1.0, slower)
    assert clock[0] + slower * pace.after <= 102
    assert pace.slower == pytest.approx(slower)


def test_tuning_ends_when_its_time_is_over(planned):
    made, candidates, _ = planned("15m")
    made.state.tuning = 0.2 * made.total
    made._tune()
    assert made.state.chosen == dict(candidates[0])
    assert not (made.output / "tune").exists()


@pytest.mark.parametrize(("slower", "measured"), [(1.0, False), (0.1, True)])
def test_a_prediction_that_was_too_high_does_not_prevent_tuning(
    planned, monkeypatch, slower, measured
):
    """The first dev evaluation took ``slower`` times the predicted time."""
    made, *_ = planned("2m")
    made.state.predicted = PREDICTED | {"pass": 0.1}
    made.state.seconds = {"dev": slower * PREDICTED["dev"]}
    assert made.state.expected("pass") == pytest.approx(0.1 * slower)
    tried = []
    monkeypatch.setattr(made, "_run_trial", lambda name, *_: tried.append(name))
    made._plan_tuning()
    assert ("tune/measure" in tried) == measured


def test_tuning_runs_of_a_rung_cost_equally_much(planned, monkeypatch):
    """The prediction is three times too high, and the call is stopped in the fourth run.

    grad_cache encodes 16 pairs only once.
    """
    made, _, _ = planned("15m")
    pass_seconds = PREDICTED["pass"] / 3
    costs, starts = {}, []

    def run_job(kind, config, test, after_step):
        starts.append(config.output_dir)
        if len(starts) == 4:
            raise Interrupted(signal.SIGTERM, "stopped")
        folder = Path(config.output_dir)
        folder.mkdir(parents=True)
        values = {
            "method": config.method,
            "batch.global_batch_size": config.batch.global_batch_size,
            "replay.share": config.replay_share,
        }
        step = replace(made.state, micro_batch=16).passes(values)
        # the methods differ a little
        seconds = step * pass_seconds * (1.1 if config.method == "cont_cache" else 1.0)
        steps = config.optim.max_steps
        lines = [
            json.dumps({"step": n, "loss": 1.0, "seconds": seconds, "passes": step})
            for n in range(1, steps + 1)
        ]
        (folder / "log.jsonl").write_text("\n".join(lines) + "\n")
        (folder / "tuned.json").write_text('{"score": 0.5}')
        costs[folder.name] = steps * step

    monkeypatch.setattr(auto, "run_job", run_job)
    monkeypatch.setattr(made, "_most_steps", lambda values: 10_000)
    with pytest.raises(Interrupted):
        made._tune()
    again = auto_of(made.base, "15m")
    again.state = auto_state.State.read(made.state.file, made.state.settings, 0.0)
    monkeypatch.setattr(again, "_most_steps", lambda values: 10_000)
    again._tune()
    assert len(starts) == len(set(starts)) + 1  # only the stopped run started again
    rungs = Counter(
        re.sub("-[0-9]+$", "", name) for name in costs if name.startswith("run-")
    )  # runs of each candidate
    first_rung = list(costs.values())[1 : 1 + len(rungs)]
    assert len(first_rung) > 3
    assert max(first_rung) <= 1.2 * min(first_rung)


def test_a_call_that_was_stopped_in_the_test_keeps_the_length_of_training(planned, monkeypatch):
    """Training may end after fewer steps than it began with."""
    made, candidates, _ = planned("15m")
    made.state.chosen, made.state.steps = dict(candidates[0]), 6
    found = []
    for total in (None, 3):
        if total:
            folder = made.output / "train"
            folder.mkdir(parents=True)
            finish(folder, total, 64, {}, total)
        monkeypatch.setattr(auto, "run_job", lambda kind, config, *_, **__: found.append(config))
        made._train()
    steps = [config.optim.max_steps for config in found]
    assert steps[0] != 3
    assert steps[1] == 3


@pytest.mark.parametrize(("final", "kept"), [(0.5, ["b"]), (0.7, [])])
def test_a_better_model_from_tuning_is_kept(planned, final, kept):
    made, *_ = planned("15m")
    for run, score in [("tune/a", 0.4), ("tune/b", 0.6), ("tune/c", 0.3), ("train", final)]:
        (made.output / run / "model").mkdir(parents=True)
        metrics = {"mean": {"ndcg@10": score}, "per_query": {"q0": {"ndcg@10": score}}}
        write_json(made.output / run / "dev_metrics.json", metrics)
    made._keep_best_trial()
    assert [run.name for run in made._kept_trials()] == ["b"]
    made._keep_better_trial()
    assert [run.name for run in made._kept_trials()] == kept


def test_the_final_run_may_use_all_the_time_but_the_reserve(planned, monkeypatch):
    """Nothing is counted twice: not loading, not the dev evaluations, not the test."""
    made, candidates, _ = planned("15m")
    made.state.seconds = {stage: PREDICTED[stage] for stage in auto_state.STAGES}  # took no time
    made.state.chosen = dict(candidates[0])
    found = []
    monkeypatch.setattr(auto, "run_job", lambda *_, after_step, **__: found.append(after_step))
    made._train()
    assert found[0].end == pytest.approx((1 - auto_state.RESERVE) * made.total)


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
        match="chooses method, .*batch.micro_batch_tokens, .*optim.max_steps.* itself",
    ) as found:
        made = auto_of(given, "1h")
    assert not re.search("global_batch_size|bank.size|learning_rate", str(found[0].message))
    batch = made.config("run", {}).batch
    assert (batch.micro_batch_size, batch.micro_batch_tokens) == ("auto", None)


def test_dropout_that_partial_replay_does_not_have_is_named(tmp_path):
    given = train_config(write_beir(tmp_path / "data"), tmp_path / "auto", **{"model.dropout": 0.2})
    with pytest.warns(UserWarning, match=r"without dropout, so model\.dropout has no effect"):
        auto_of(given, "1h")


def test_distillation_without_dev_data_is_refused(tmp_path):
    """Held-out data have no teacher scores, and training said that the user's data have none."""
    changes = {"loss.distillation": "kl", "data.hard_negatives": 1}
    given = train_config(write_beir(tmp_path / "data"), tmp_path / "auto", **changes)
    (tmp_path / "data" / "qrels" / "dev.tsv").unlink()
    with pytest.raises(InputError, match=r"^loss\.distillation is kl, so data\.dev must be set"):
        auto_of(given, "1h")


@pytest.mark.filterwarnings("default:.*empty")
def test_copies_of_a_set_by_name_may_have_empty_passages(tmp_path, monkeypatch):
    """As the set itself, whose passages are repaired when it is read."""
    monkeypatch.setenv("CONTACCUM_CACHE", str(tmp_path / "cache"))
    data = write_beir(tmp_path / "cache" / "beir" / "fiqa")
    with (data / "corpus.jsonl").open("a") as file:
        file.write('{"_id": "empty", "title": "", "text": ""}\n')
    for split in ("dev", "test"):
        (data / "qrels" / f"{split}.tsv").unlink()
    given = train_config("fiqa", tmp_path / "auto")
    made = auto_of(given, "1h")
    made.state.dev_passages = 41
    made._divide()
    config = made.config("run", {})
    dev = open_dataset(config.data.dev, "dev", config.data.policy).retrieval_set
    assert "empty" in dev.corpus["id"]
    assert len(load_training(config.data).queries) + len(dev.queries) == 40
    with pytest.raises(InputError, match="empty"):  # negative control
        _ = open_dataset(config.data.dev, "dev", given.data.policy).retrieval_set.corpus


def test_without_matplotlib_no_time_is_spent(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InputError, match="matplotlib"):
        auto_of(train_config(write_beir(tmp_path / "data"), tmp_path / "auto"), "1h")


def test_only_cont_accum_has_a_fixed_micro_batch(tmp_path):
    """It decides how many negatives a query has: 2,048 tokens of passages, at most the batch."""
    config = train_config(write_beir(tmp_path / "data"), tmp_path / "auto")
    made = auto.Auto(config, AutoConfig(time="1h"), 0.0)
    made.state.passage_length = 60
    sizes = {
        (method, pairs): made.config("x", {"method": method, **auto._batch(pairs)}).batch
        for method in ("cont_accum", "cont_cache")
        for pairs in (16, 64)
    }
    passages = 60 * (1 + config.data.hard_negatives)
    expected = max(size for size in (8, 16, 32, 64) if size * passages <= 2048)
    assert sizes["cont_accum", 16].micro_batch_size == min(16, expected)
    assert sizes["cont_accum", 64].micro_batch_size == expected
    assert {sizes["cont_cache", pairs].micro_batch_size for pairs in (16, 64)} == {"auto"}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--time", "soon"], "--time is 'soon'"),
        (["--time", "1h", "--test_split", "train"], "the test data is the training data"),
        (["--time", "1h", "--test_split", "dev"], "data.dev is the test data"),
        (["--time", "1h", "--test_split", "tset"], "test_split is tset, but "),
        (["--time", "1h", "--data.dev_split", "dve"], "data.dev_split is dve, but "),
        (["--time", "1h", "--run.metric", "ndcg@7"], "run.metric is 'ndcg@7'"),
        (["--time", "1h", "--run.sharding", "fsdp"], "run.sharding is fsdp"),
        (["--time", "1h", "--data.train", ""], "data.train is not set"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_written(
    tmp_path, capsys, arguments, sentence
):
    data = write_beir(tmp_path / "data")
    base = [
        "--data.train", str(data), "--model.name", "tiny", "--output_dir", str(tmp_path / "auto"),
    ]  # fmt: skip
    assert main(["auto", *base, *arguments]) == 2
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "auto").exists()


def test_a_folder_with_other_files_is_refused(tmp_path, capsys):
    """The dev set would replace the folder ``data``."""
    data = write_beir(tmp_path / "project" / "data" / "mine")
    arguments = ["--data.train", str(data), "--model.name", "tiny", "--time", "1h"]
    assert main(["auto", *arguments, "--output_dir", str(tmp_path / "project")]) == 2
    assert "not empty, and without the auto.json of a run" in capsys.readouterr().err
    assert (data / "corpus.jsonl").is_file()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("time", None),
        ("test_split", r"auto\.test_split was test and is other"),
        ("train", "content of the training data was"),
        ("test", "content of the test data was"),
    ],
)
def test_a_second_call_may_have_another_time_but_no_other_settings_or_data(
    change, said, tmp_path, monkeypatch
):
    data = write_beir(tmp_path / "data")
    shutil.copy(data / "qrels" / "test.tsv", data / "qrels" / "other.tsv")
    config = train_config(data, tmp_path / "auto")

    def stop(self):
        raise Interrupted(signal.SIGTERM, "stopped")

    def run(limit="2m", split="test"):
        auto.run_auto(config, AutoConfig(test_split=split, time=limit))

    monkeypatch.setattr(auto.Auto, "_divide", stop)
    with pytest.raises(Interrupted):
        run()
    if change in ("train", "test"):
        with (data / "qrels" / f"{change}.tsv").open("a") as qrels:
            qrels.write("q0\tp3\t1\n")
    with pytest.raises(InputError if said else Interrupted, match=said):
        run("3m", "other" if change == "test_split" else "test")


@contextmanager
def slowed(share: float):
    """Stop the processes that this test started for all but ``share`` of the time."""
    ended = threading.Event()

    def signal_all(number):
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def run():
        while not ended.wait(0.2 * share):
            signal_all(signal.SIGSTOP)
            ended.wait(0.2 * (1 - share))
            signal_all(signal.SIGCONT)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@pytest.mark.acceptance
def test_a_slowed_call_with_more_time_that_is_killed_twice_ends_in_time(tmp_path):
    """Without a dev split, at half of the CPU.

    The first time is too short. The call with the time that the message names is killed after the
    evaluation of the untrained model and in training.
    """
    data = write_beir(tmp_path / "demo", 300)
    (data / "qrels" / "dev.tsv").unlink()
    train = data / "qrels" / "train.tsv"  # without the test queries, q0 to q9
    train.write_text(re.sub(r"^q\d\t.*\n", "", train.read_text(), flags=re.MULTILINE))
    folder = tmp_path / "auto"
    call = [sys.executable, "-m", "contaccum", "auto", "--output_dir", str(folder)]
    call += ["--data.train", str(tmp_path / "demo"), "--model.name", "tiny"]
    call += ["--model.temperature", "0.05", "--optim.learning_rate", "1e-3", "--run.device", "cpu"]
    call += ["--model.max_passage_length", "64", "--time"]
    environment = {**os.environ, "CONTACCUM_CACHE": str(tmp_path / "cache")}

    def state():
        file = folder / "auto.json"
        return json.loads(file.read_text()) if file.is_file() else {"seconds": {}}

    with slowed(0.5):
        short = subprocess.run([*call, "5s"], env=environment, capture_output=True, text=True)
        assert short.returncode == 2
        assert "--time is 5s, which leaves no time to train on this machine" in short.stderr
        minutes = int(re.search(r"Use --time (\d+)m with the same folder", short.stderr)[1])
        call.append(f"{minutes}m")
        for reached in (
            lambda: "untrained" in state()["seconds"],
            lambda: any((folder / "train" / "checkpoints").glob("step-*")),
        ):
            with subprocess.Popen(call, env=environment, stderr=subprocess.DEVNULL) as running:
                while not reached():
                    assert running.poll() is None
                    time.sleep(0.1)
                running.send_signal(signal.SIGKILL)
        before = state()
        done = subprocess.run(call, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "against the untrained model: " in done.stdout
    after = state()
    for kept in ("chosen", "dev_passages"):
        assert after[kept] == before[kept]
    assert after["seconds"]["untrained"] == before["seconds"]["untrained"]
    assert after["spent"] < 60 * minutes
    assert (folder / "report.html").is_file()
    test_queries = {
        line.split("\t")[0]
        for line in (tmp_path / "demo" / "qrels" / "test.tsv").read_text().splitlines()[1:]
    }
    metrics = json.loads((folder / "train" / "metrics.json").read_text())
    assert metrics["per_query"].keys() == test_queries
    for part in ("train", "dev"):
        text = (folder / "data" / part / "qrels" / f"{part}.tsv").read_text()
        assert not test_queries & {line.split("\t")[0] for line in text.splitlines()[1:]}
    again = subprocess.run(call, env=environment, capture_output=True, text=True, check=False)
    assert again.stdout.splitlines()[:-1] == done.stdout.splitlines()[:-1]  # all but the time

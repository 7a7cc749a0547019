"""A run that one can watch: lines without a terminal, sampled dev corpus, early stopping, disk."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import train_config, weights, write_beir

from contaccum import DualEncoder, evaluate, train
from contaccum.cli import main
from contaccum.data.dataset import open_dataset
from contaccum.data.dev_set import sample_passages
from contaccum.errors import InputError
from contaccum.runtime.files import read_json
from contaccum.training.log import read_log
from contaccum.training.loop import Training, load_data

ONLY_MODEL = {"run.keep_checkpoints": None}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_beir(tmp_path_factory.mktemp("data") / "beir")


def evaluated(run) -> list[int]:
    return [line["step"] for line in read_log(run) if "dev" in line]


def test_without_a_terminal_each_20th_of_a_run_has_a_line(data, tmp_path, capsys):
    train(train_config(data, tmp_path / "run", **{"data.dev": str(data)}))
    lines = capsys.readouterr().err.splitlines()
    assert "training: 6 updates of 16 pairs with cont_accum" in lines
    towers = "tiny: mean pooling, cosine similarity, two encoders, "
    assert f"{towers}at most 16 tokens per query and 16 per passage" in lines
    progress = [line for line in lines if line.startswith("step ") and "loss" in line]
    assert [line.split()[1] for line in progress] == [f"{step}/6" for step in range(1, 7)]
    assert all("pairs/s" in line for line in progress)
    left = [line.rpartition("about ")[2] for line in progress]
    # the evaluation before training shows how long the others take
    assert all("left" in text and "evaluation" not in text for text in left[:5])
    assert "left" not in left[5]
    assert re.search(r"last dev ndcg@10 \d\.\d{4}  ", progress[-1])


def test_a_batch_larger_than_the_data_is_said(data, tmp_path, capsys):
    queries = len(open_dataset(data, "train").examples())
    for pairs, larger in ((queries + 1, True), (queries, False)):
        changes = {"batch.global_batch_size": pairs, "optim.max_steps": 1, "bank.size": pairs}
        train(train_config(data, tmp_path / str(pairs), "in_batch", **changes))
        err = capsys.readouterr().err
        assert f"training: 1 update of {pairs} pairs with in_batch\n" in err
        found = f"global_batch_size is {pairs}, but the training set has only {queries} queries"
        assert (found in err) == larger


@pytest.mark.parametrize(
    ("setting", "long", "short", "consequence"),
    [
        ("bank.warmup_steps", 2, 1, "the loss never uses"),
        ("optim.warmup_steps", 500, 0.1, "the learning rate hardly reaches"),
    ],
)
def test_a_warmup_as_long_as_the_run_is_said(
    setting, long, short, consequence, data, tmp_path, capsys
):
    for steps in (long, short):
        changes = {setting: steps, "optim.max_steps": 2}
        train(train_config(data, tmp_path / str(steps), **changes))
        found = f"{setting} is {steps}, but the run has only 2 steps, so {consequence}"
        assert (found in capsys.readouterr().err) == (steps == long)


@pytest.mark.parametrize(("rate", "said"), [(0.5, True), (0.01, False)])
def test_a_very_high_learning_rate_is_said(rate, said, data, tmp_path, capsys):
    train(train_config(data, tmp_path, **{"optim.learning_rate": rate, "optim.max_steps": 1}))
    assert ("note: optim.learning_rate is 0.5; encoders are" in capsys.readouterr().err) == said


def test_the_training_data_are_refused_as_dev_data(data, tmp_path):
    config = train_config(data, tmp_path / "run", **{"data.dev": str(data)})
    same = replace(config, data=replace(config.data, dev_split="train"))
    with pytest.raises(InputError, match=r"data\.dev is the training data .* best model"):
        train(same)


def test_few_updates_and_truncated_passages_are_noted(data, tmp_path, capsys):
    said = []
    for number, changes in enumerate(
        (
            {"optim.max_steps": None, "model.max_passage_length": 3},
            {"optim.max_steps": 1, "model.max_passage_length": 64},
        )
    ):
        train(train_config(data, tmp_path / str(number), **changes))
        said.append(capsys.readouterr().err)
    assert re.search(r"note: the run has only \d updates; a smaller batch", said[0])
    assert "note: 100% of the passages have 3 tokens or more, and the text after" in said[0]
    assert "note: the run has only" not in said[1]
    assert "of the passages have" not in said[1]


@pytest.mark.filterwarnings("default:.*(was trained on these queries|in the training data)")
def test_an_evaluation_on_the_training_data_is_named(data, tmp_path, monkeypatch, capsys):
    """Its scores say nothing about other queries."""
    monkeypatch.chdir(tmp_path)
    train(train_config(data, tmp_path / "run", **{"optim.max_steps": 1}))
    copy = shutil.copytree(data, tmp_path / "copy")
    for output, model, sets, split, warned in (
        ("1", "run/model", str(data), "train", True),
        ("2", "run", str(data), "train", True),
        ("3", "run/model", str(copy), "train", False),
        ("4", "run/model", str(data), "dev", False),
        ("5", "run/model", f"{data},{copy}", "train", True),
    ):
        options = ["--data", sets, "--split", split, "--output", output]
        assert main(["evaluate", "--model", model, *options]) == 0
        said = capsys.readouterr().err
        assert (f"{model} was trained on these queries" in said) == warned
        # the copy has another name, but the same queries
        found = re.search(r"copy train: (\d+) of \1 test queries also occur in the training", said)
        assert bool(found) == (output == "3")


def test_shares_of_the_run_decide_when_to_save_and_evaluate(data, tmp_path, capsys):
    steps = {"run.eval_steps": 0.25, "run.save_steps": 0.5, "optim.max_steps": 10}
    train(train_config(data, tmp_path / "run", **{"data.dev": str(data), **steps}))
    # every third step, but not step 9, because the last one follows
    assert evaluated(tmp_path / "run") == [0, 3, 6, 10]
    # without an evaluation before training, nobody knows how long the last one takes
    capsys.readouterr()
    train(train_config(data, tmp_path / "last", **{"data.dev": str(data), "run.eval_steps": 0}))
    assert evaluated(tmp_path / "last") == [6]
    assert "and 1 evaluation left\n" in capsys.readouterr().err
    saved = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert saved == ["step-00000005", "step-00000010"]


def test_a_run_says_whether_training_helped(data, tmp_path, capsys):
    """The score before training is the starting model's; measuring it changes no weight."""
    start = tmp_path / "start"
    train(train_config(data, start, **{"optim.max_steps": 1, "optim.learning_rate": 1e-9}))
    before = evaluate(DualEncoder.load(start / "model"), data, split="dev")["mean"]["ndcg@10"]
    settings = {"data.dev": str(data), "model.name": str(start / "model")}
    for rate, helped in ((1e-9, False), (1e-3, True)):
        run, unseen = tmp_path / str(rate), tmp_path / f"{rate}-unseen"
        settings["optim.learning_rate"] = rate
        train(train_config(data, run, **settings))
        err = capsys.readouterr().err
        assert f"before training: dev ndcg@10 {before:.4f}\n" in err
        best = max(line["dev"]["ndcg@10"] for line in read_log(run)[1:] if "dev" in line)
        assert (best > before) == helped
        said = f"training did not help: dev ndcg@10 is {before:.4f} before training and {best:.4f}"
        assert (said in err) == (not helped)
        train(train_config(data, unseen, **settings, **{"run.eval_steps": 0}))
        assert "before training" not in capsys.readouterr().err
        last = Path("checkpoints", "step-00000006")
        assert weights(run / last) == weights(unseen / last)


@pytest.mark.parametrize(("metric", "compared"), [("ndcg@10", True), ("precision@10", False)])
def test_a_resume_with_another_metric_forgets_the_score_before(
    metric, compared, data, tmp_path, capsys
):
    """Stopped before the first evaluation of a trained model."""
    settings = {"data.dev": str(data), "run.eval_steps": 3, "optim.learning_rate": 1e-9}

    def stop(training: Training) -> None:
        if training.done == 2:
            raise KeyboardInterrupt

    run = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        train(train_config(data, run, **settings, **{"run.save_steps": 1}), after_step=stop)
    more = {"run.metric": metric, "resume": True, "allow_changes": True}
    train(train_config(data, run, **settings, **{"run.save_steps": 1}, **more))
    assert ("training did not help" in capsys.readouterr().err) == compared


def test_a_checkpoint_is_due_when_the_last_one_is_old(data, tmp_path, monkeypatch):
    changes = {"run.save_steps": 100, "run.keep_checkpoints": 9, "optim.max_steps": 3}
    for seconds, steps in ((600.0, [3]), (0.0, [1, 2, 3])):
        monkeypatch.setattr("contaccum.training.loop.SAVE_SECONDS", seconds)
        run = tmp_path / str(seconds)
        train(train_config(data, run, **changes))
        saved = sorted(path.name for path in (run / "checkpoints").iterdir())
        assert saved == [f"step-{step:08}" for step in steps]


def test_dev_corpus_is_sampled_once_and_named(data, tmp_path, capsys):
    whole = open_dataset(data, "dev").retrieval_set
    judged = {passage for grades in whole.qrels.values() for passage in grades}
    most = len(judged) + 3
    assert most < len(whole.corpus)
    sampled = sample_passages(whole, most, seed=0)
    assert len(sampled.corpus) == most
    assert judged <= set(sampled.corpus["id"])
    assert sampled.fingerprint() == sample_passages(whole, most, seed=0).fingerprint()
    assert sampled.fingerprint() != sample_passages(whole, most, seed=1).fingerprint()
    assert sample_passages(whole, 0 + len(whole.corpus), seed=0) is whole

    changes = {"data.dev": str(data), "data.dev_passages": most, "optim.max_steps": 1}
    train(train_config(data, tmp_path / "run", **changes))
    other = train_config(data, tmp_path / "other", seed=1, **changes)
    assert (
        load_data(other)[1].dev_set.fingerprint() == sampled.fingerprint()
    )  # scores can be compared
    shown = capsys.readouterr().err
    assert "10 of 10 dev queries are also training queries, so the dev score is too high" in shown
    label = f"ndcg@10 on {most} of {len(whole.corpus)} passages"
    assert f"dev {label} " in shown
    assert read_json(tmp_path / "run" / "dev_metrics.json")["label"] == label


def test_only_the_model_stays_after_success(data, tmp_path):
    run = tmp_path / "run"
    train(train_config(data, run, **ONLY_MODEL))
    assert not (run / "checkpoints").exists()
    kept = weights(run)
    train(train_config(data, tmp_path / "kept", **{"run.keep_checkpoints": 1}))
    # negative control
    assert [path.name for path in (tmp_path / "kept" / "checkpoints").iterdir()] == [
        "step-00000006"
    ]
    assert weights(tmp_path / "kept") == kept

    # a finished run is not repeated, and does not continue without its checkpoints
    assert train(train_config(data, run, resume=True, **ONLY_MODEL)) == run / "model"
    assert weights(run) == kept
    more = {"optim.max_steps": 7, "allow_changes": True}
    with pytest.raises(InputError, match="ended after 6 steps and deleted its checkpoints"):
        train(train_config(data, run, resume=True, **ONLY_MODEL, **more))


@pytest.mark.parametrize("patience", [1, 2])
def test_early_stopping_composes_with_resume(patience, data, tmp_path):
    """A learning rate of almost 0 never improves the first score."""
    settings = {
        "data.dev": str(data),
        "run.early_stopping": patience,
        "run.eval_steps": 1,
        "run.save_steps": 1,
        "optim.learning_rate": 1e-20,
    }
    run = tmp_path / "run"
    train(train_config(data, run, **settings))
    assert evaluated(run) == list(range(patience + 2))

    def stop(training: Training) -> None:
        if training.done == 2:
            raise KeyboardInterrupt

    again = tmp_path / "again"
    with pytest.raises(KeyboardInterrupt):
        train(train_config(data, again, **settings), after_step=stop)
    train(train_config(data, again, resume=True, **settings))
    assert evaluated(again) == evaluated(run)
    assert weights(again) == weights(run)
    without = tmp_path / "without"
    train(train_config(data, without, **{**settings, "run.early_stopping": 0}))
    assert evaluated(without) == list(range(7))  # negative control
    shutil.rmtree(without)

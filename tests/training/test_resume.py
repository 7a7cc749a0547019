"""A resumed run ends with the same bytes as the uninterrupted one."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from helpers import train_config, weights, write_beir
from processes import python
from tiny_families import family_folder

from contaccum.config import METHOD_SPECS, to_yaml
from contaccum.encoder import DualEncoder
from contaccum.errors import InputError, Interrupted
from contaccum.evaluation.evaluate import evaluate
from contaccum.methods.matryoshka import MatryoshkaBank
from contaccum.runtime.files import sha256_of
from contaccum.training.log import read_log
from contaccum.training.loop import Training, train
from contaccum.training.run_folder import newest_checkpoint


def broken_after(run: Path, step: int, copy: Path) -> Path:
    """Copy a run's folder as it was right after the checkpoint of ``step``, with later log
    lines."""
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "model")
    for folder in (copy / "checkpoints").iterdir():
        if int(folder.name.removeprefix("step-")) > step:
            shutil.rmtree(folder)
    return copy


@pytest.mark.parametrize("best", ["last", "earlier"])
def test_deleted_model_of_the_best_score_is_written_again(best, data, tmp_path):
    """The checkpoint has the weights of its own step: the best ones, or the next best."""
    whole, run = tmp_path / "whole", tmp_path / "run"
    settings = {"data.dev": str(data), "run.eval_steps": 2, "optim.max_steps": 4}
    train(train_config(data, whole, **settings))
    shutil.copytree(whole, run)
    shutil.rmtree(run / "model")
    if best == "earlier":
        folder = newest_checkpoint(run).folder
        state = json.loads((folder / "state.json").read_text())
        state["best"] |= {"step": 2, "score": 1.0}  # which no later score can exceed
        (folder / "state.json").write_text(json.dumps(state))
        files = json.loads((folder / "manifest.json").read_text())
        files["state.json"] = sha256_of(folder / "state.json")
        (folder / "manifest.json").write_text(json.dumps(files))
    with pytest.warns(UserWarning, match="the best score so far is ignored: its model was deleted"):
        train(train_config(data, run, resume=True, **settings))
    last = {name.removeprefix("model/"): value for name, value in weights(run).items()}
    if best == "last":
        assert weights(run) == weights(whole)
    folder = newest_checkpoint(run).folder
    assert last == {name.removeprefix("model/"): value for name, value in weights(folder).items()}


def steps_of(run: Path) -> list[tuple]:
    """Return the log's values of each step, without times."""
    return [
        (line["step"], line["loss"], line["grad_norm"], line["bank_fill"])
        for line in read_log(run)
        if "loss" in line
    ]


@pytest.mark.parametrize("method", METHOD_SPECS)
def test_resumed_run_equals_uninterrupted_run_to_the_byte(method, data, tmp_path):
    whole = tmp_path / "whole"
    train(train_config(data, whole, method, **{"data.hard_negatives": 1}))
    broken = broken_after(whole, 2, tmp_path / "broken")
    assert steps_of(whole)
    train(train_config(data, broken, method, **{"data.hard_negatives": 1, "resume": True}))
    assert weights(broken) == weights(whole)
    assert steps_of(broken) == steps_of(whole)
    # so that a run from this file does not resume
    settings = [yaml.safe_load((run / "config.yaml").read_text()) for run in (whole, broken)]
    assert [one["resume"] for one in settings] == [False, False]
    last = [newest_checkpoint(run).folder for run in (whole, broken)]
    for name in ("optimizer.safetensors", "bank.safetensors"):
        assert (last[0] / name).read_bytes() == (last[1] / name).read_bytes()


@pytest.mark.filterwarnings("ignore:.*random passages are added")
def test_run_with_missing_negatives_resumes_to_the_byte(data, tmp_path):
    whole, hard = tmp_path / "whole", {"data.hard_negatives": 2}
    changes = {**hard, "data.fill_negatives": "none"}
    train(train_config(data, whole, "cont_cache", **changes))
    broken = broken_after(whole, 2, tmp_path / "broken")
    train(train_config(data, broken, "cont_cache", resume=True, **changes))
    assert weights(broken) == weights(whole)
    assert steps_of(broken) == steps_of(whole)
    last = [newest_checkpoint(run).folder / "bank.safetensors" for run in (whole, broken)]
    assert last[0].read_bytes() == last[1].read_bytes()
    train(train_config(data, tmp_path / "other", "cont_cache", **hard))
    assert weights(tmp_path / "other") != weights(broken)  # negative control


def test_another_seed_gives_other_bytes(data, tmp_path):
    """Negative control: another seed gives other weights."""
    train(train_config(data, tmp_path / "one"))
    train(train_config(data, tmp_path / "same"))
    train(train_config(data, tmp_path / "other", seed=1))
    assert weights(tmp_path / "one") == weights(tmp_path / "same")
    assert weights(tmp_path / "one") != weights(tmp_path / "other")


def test_resume_without_the_bank_changes_the_weights(data, tmp_path, monkeypatch):
    """Negative control: a resume that does not load the bank is detected."""
    whole = tmp_path / "whole"
    train(train_config(data, whole))
    broken = broken_after(whole, 2, tmp_path / "broken")
    monkeypatch.setattr("contaccum.methods.bank.Bank.load_state", lambda *_: None)
    train(train_config(data, broken, resume=True))
    assert weights(broken) != weights(whole)


def test_resume_without_checkpoint_restarts_and_of_finished_run_does_nothing(data, tmp_path):
    run = tmp_path / "run"
    train(train_config(data, run))
    before = weights(run)
    train(train_config(data, run, resume=True))
    assert weights(run) == before
    shutil.rmtree(run / "checkpoints")
    train(train_config(data, run, resume=True))
    assert weights(run) == before
    train(train_config(data, tmp_path / "new", resume=True))
    assert weights(tmp_path / "new") == before


def test_run_resumes_with_another_spelling_of_the_path_of_its_data(two_steps):
    data, run = two_steps
    before = weights(run)
    named = {"data.dev": f"{data}/../{data.name}"}
    train(train_config(f"{data}/.", run, resume=True, **TWO_STEPS, **named))
    assert weights(run) == before
    copy = shutil.copytree(data, data.parent / "copy")  # a copy is another path
    with pytest.raises(InputError, match=r"data.train was .*data.* and is .*copy"):
        train(train_config(copy, run, resume=True, **TWO_STEPS, **{"data.dev": str(data)}))


def test_damaged_checkpoints_are_ignored(data, tmp_path, capsys):
    run = tmp_path / "run"
    train(train_config(data, run))
    before = weights(run)
    folders = sorted((run / "checkpoints").iterdir(), reverse=True)
    (folders[0] / "manifest.json").unlink()
    file = folders[1] / "bank.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert newest_checkpoint(run).folder == folders[2]
    said = capsys.readouterr().err
    assert (
        f"{folders[0]}: this checkpoint is ignored: {folders[0]}/manifest.json: cannot be read"
        in said
    )
    assert f"{folders[1]}: this checkpoint is ignored: bank.safetensors is damaged" in said
    train(train_config(data, run, resume=True))
    assert weights(run) == before


def test_rotation_keeps_the_checkpoint_just_written(data, tmp_path, capsys):
    """A damaged later checkpoint does not displace the one that a resumed run writes."""
    run = tmp_path / "run"
    train(train_config(data, run, **{"run.keep_checkpoints": 2}))
    shutil.rmtree(run / "checkpoints" / "step-00000006")
    (run / "checkpoints" / "step-00000008").mkdir()
    train(train_config(data, run, resume=True, **{"run.keep_checkpoints": 1, "run.save_steps": 3}))
    assert "step-00000008: this checkpoint is ignored" in capsys.readouterr().err
    assert [folder.name for folder in (run / "checkpoints").iterdir()] == ["step-00000006"]
    assert newest_checkpoint(run).state["step"] == 6


def test_checkpoint_with_malformed_manifest_is_ignored(data, tmp_path, capsys):
    run = tmp_path / "run"
    train(train_config(data, run, **{"optim.max_steps": 1}))
    (run / "checkpoints" / "step-00000001" / "manifest.json").write_text("[]")
    with pytest.raises(InputError, match="checkpoints: all checkpoints are damaged"):
        newest_checkpoint(run)
    assert "manifest.json: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"bank.size": 32}, "bank.size was 24 and is 32"),
        ({"model.tiny_width": 64}, "model.tiny_width was 32 and is 64"),
        ({"seed": 5}, "seed was 0 and is 5"),
        (
            {"model.temperature": 0.1},
            "model.temperature was 0.05 and is 0.1",
        ),  # the bank's cached log-sum-exps depend on it
        ({"loss.mask_false_negatives": False}, "loss.mask_false_negatives was True and is False"),
    ],
)
def test_changed_settings_are_refused(changes, named, data, tmp_path):
    train(train_config(data, tmp_path / "run", **{"optim.max_steps": 2}))
    with pytest.raises(InputError, match=named):
        train(
            train_config(data, tmp_path / "run", resume=True, **{"optim.max_steps": 2, **changes})
        )


@pytest.mark.parametrize("keep", [1, None])
def test_changed_data_is_refused(keep, data, tmp_path):
    """Also of a finished run without checkpoints (None), whose model is of the old data."""
    run, changes = tmp_path / "run", {"optim.max_steps": 2, "run.keep_checkpoints": keep}
    train(train_config(data, run, **changes))
    assert (run / "finished.json").exists() == (keep is None)
    with (data / "qrels" / "train.tsv").open("a") as file:
        file.write("q0\tp9\t1\n")
    where = "step-00000002" if keep else "run"
    said = f"{where}: the conditions of training changed: "
    if keep is None:
        said = (
            "run: this run ended and deleted its checkpoints, so it cannot continue with changes ("
        )
    with pytest.raises(InputError, match=re.escape(said) + r"data was \w+ and is \w+"):
        train(train_config(data, run, resume=True, allow_changes=keep is None, **changes))


def test_an_ended_run_never_ignores_a_change(data, tmp_path, capsys):
    run, changes = tmp_path / "run", {"optim.max_steps": 2, "run.keep_checkpoints": None}
    train(train_config(data, run, **changes))
    train(train_config(data, run, resume=True, **changes))
    assert "this run has ended; nothing is trained" in capsys.readouterr().err
    for change, said in (
        ({"optim.learning_rate": 1e-5}, r"optim.learning_rate was \S+ and is 1e-05"),
        ({"method": "grad_cache"}, "method was cont_accum and is grad_cache"),
    ):
        with pytest.raises(InputError, match=rf"with changes \({said}"):
            train(train_config(data, run, resume=True, allow_changes=True, **changes, **change))


def test_a_run_that_stopped_early_has_the_number_of_its_steps(data, tmp_path):
    run = tmp_path / "run"
    changes = {
        "optim.max_steps": 6, "run.keep_checkpoints": None, "data.dev": str(data),
        "run.eval_steps": 1, "run.early_stopping": 1, "optim.learning_rate": 1e-9,
    }  # fmt: skip
    train(train_config(data, run, **changes))
    steps = len(steps_of(run))
    assert steps < 6
    assert json.loads((run / "finished.json").read_text())["done"] == steps
    train(train_config(data, run, resume=True, **changes))  # the same command does nothing
    fewer = {"optim.max_steps": steps, "run.eval_steps": 2, "allow_changes": True, "resume": True}
    train(train_config(data, run, **(changes | fewer)))  # nor do settings of its length, as of auto
    changes |= {"optim.max_steps": 9, "allow_changes": True, "resume": True}
    with pytest.raises(InputError, match=f"this run ended after {steps} step"):
        train(train_config(data, run, **changes))


def test_the_best_model_is_not_one_of_steps_that_a_kill_undid(data, tmp_path):
    """Resumed with other settings, the run does not repeat the step that saved its model."""
    run, changes = tmp_path / "run", {"data.dev": str(data), "run.eval_steps": 2}
    train(train_config(data, run, **changes))
    copy = broken_after(run, 2, tmp_path / "copy")
    best = newest_checkpoint(copy).state["best"]
    shutil.copytree(run / "checkpoints" / "step-00000004" / "model", copy / "model")
    changes |= {"optim.max_steps": 4, "optim.learning_rate": 1e-9, "allow_changes": True}
    train(train_config(data, copy, resume=True, **changes))
    after = newest_checkpoint(copy).state["best"]
    files = [folder / "model" / "contaccum.json" for folder in (copy, run)]
    assert after["model"] == sha256_of(files[0]) != sha256_of(files[1])
    assert after["score"] >= best["score"]
    evaluated = [line["step"] for line in read_log(copy) if "dev" in line]
    assert evaluated == [0, 2, 4]


def test_metrics_and_card_of_an_older_model_are_moved_away(data, tmp_path, capsys):
    run, metrics = tmp_path / "run", tmp_path / "run" / "metrics.json"
    card = run / "model" / "README.md"
    train(train_config(data, run, **{"optim.max_steps": 2}))
    evaluate(run, data, "train", output=metrics)
    card.write_text("# My model")
    content = metrics.read_text()
    train(train_config(data, run, resume=True, **{"optim.max_steps": 2}))
    # negative control: the model is the same
    assert (metrics.read_text(), card.read_text()) == (content, "# My model")
    changes = {"optim.max_steps": 3, "allow_changes": True}
    train(train_config(data, run, resume=True, **changes))
    assert not metrics.exists()
    assert not card.exists()
    assert (run / "metrics.old.json").read_text() == content
    assert (run / "README.old.md").read_text() == "# My model"
    said = capsys.readouterr().err
    assert f"{metrics}: is now {run}/metrics.old.json, because" in said
    assert f"{card}: is now {run}/README.old.md, because" in said


def test_killed_save_leaves_no_metrics_of_an_older_model(data, tmp_path, monkeypatch):
    run, metrics = tmp_path / "run", tmp_path / "run" / "metrics.json"
    train(train_config(data, run, **{"optim.max_steps": 2}))
    evaluate(run, data, "train", output=metrics)
    content = metrics.read_text()
    save = DualEncoder.save

    def killed_after(self, folder):
        save(self, folder)
        if folder.parent == run:
            raise KeyboardInterrupt

    changes = {"optim.max_steps": 3, "allow_changes": True, "resume": True}
    with monkeypatch.context() as patch:
        patch.setattr(DualEncoder, "save", killed_after)
        with pytest.raises(KeyboardInterrupt):
            train(train_config(data, run, **changes))
    train(train_config(data, run, **changes))
    assert not metrics.exists()
    assert (run / "metrics.old.json").read_text() == content


def test_checkpoint_of_another_bank_is_refused(data, tmp_path):
    run = tmp_path / "run"
    train(train_config(data, run, **{"optim.max_steps": 2}))
    for changes in ({"bank.size": 48}, {"method": "passage_bank"}):
        resumed = {"optim.max_steps": 2, "resume": True, "allow_changes": True, **changes}
        sentence = "needs .*Resume with the method, bank size, number of hard negatives"
        with pytest.raises(InputError, match=sentence):
            train(train_config(data, run, **resumed))


@pytest.mark.parametrize("dev", [True, False])
def test_run_resumed_after_its_last_step_has_a_model(dev, data, tmp_path):
    """The checkpoint is of step 4 and the run now has three steps; the model of step 4 is evaluated
    and saved."""
    run, changes = tmp_path / "run", {"data.dev": str(data), "run.eval_steps": 50} if dev else {}
    train(train_config(data, run, **changes))
    broken = broken_after(run, 4, tmp_path / "broken")
    model = train(
        train_config(
            data, broken, resume=True, allow_changes=True, **changes, **{"optim.max_steps": 3}
        )
    )
    saved = newest_checkpoint(broken)
    assert saved.state["step"] == 4
    assert weights(broken) == weights(saved.folder)
    assert model.is_dir()
    assert (saved.state["best"].get("step"), saved.state["evaluated"]) == (
        (4, 4) if dev else (None, 0)
    )


TWO_STEPS = {"optim.max_steps": 2, "run.metric": "recall@100"}


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
    """Data, and a run of two steps with one evaluation by recall@100."""
    folder = tmp_path_factory.mktemp("two")
    data = write_beir(folder / "data")
    train(train_config(data, folder / "run", **TWO_STEPS, **{"data.dev": str(data)}))
    return data, folder / "run"


@pytest.mark.parametrize(
    "changes",
    [
        {"model.tie_towers": True},
        {"model.tiny_width": 64},
        {
            "model.max_query_length": None
        },  # None takes the folder's value, and the folder is now the checkpoint
        {"optim.name": "adamw_8bit"},
        {"lora.rank": 4, "model.name": "another"},
    ],
    ids=str,
)
def test_settings_that_fix_the_checkpoint_never_change(changes, two_steps):
    data, run = two_steps
    before = (run / "config.yaml").read_bytes()
    config = train_config(
        data,
        run,
        resume=True,
        allow_changes=True,
        **TWO_STEPS,
        **{"data.dev": str(data), **changes},
    )
    with pytest.raises(
        InputError, match="the checkpoints need these settings unchanged"
    ) as refusal:
        train(config)
    assert all(f"{name} was " in str(refusal.value) for name in changes)
    assert (run / "config.yaml").read_bytes() == before


@pytest.mark.filterwarnings("ignore:.*fewer than 3 hard negatives")
def test_missing_passages_in_the_bank_stay_masked_if_new_ones_are_filled(data, tmp_path):
    """Each query has one hard negative, so a stored pair of the first two steps lacks two of four
    passages. Also after a second resume, without ``allow_changes``."""
    run = tmp_path / "run"
    settings = {"data.hard_negatives": 3, "bank.size": 16, "loss.mask_false_negatives": False}
    train(
        train_config(data, run, **settings, **{"data.fill_negatives": "none", "optim.max_steps": 2})
    )
    settings["optim.max_steps"] = 4
    with pytest.raises(Interrupted):
        train(
            train_config(data, run, resume=True, allow_changes=True, **settings),
            after_step=lambda training: setattr(training.signals, "received", 15),
        )
    # four micro-batches of four pairs; each replaces four pairs of two passages by four pairs of
    # four
    assert read_log(run)[-1]["negatives"] == 15 + sum(32 + 8 * filled for filled in range(4)) / 4
    copied = tmp_path / "copied"
    shutil.copytree(run, copied)
    losses = []
    for folder, changes in ((run, {}), (copied, {"allow_changes": True})):
        train(train_config(data, folder, resume=True, **settings, **changes))
        losses.append([line["loss"] for line in read_log(folder)])
    assert losses[0] == losses[1]


def test_changed_data_empties_the_bank(tmp_path):
    """The bank stores row numbers of passages, which a new first passage changes. Then the bank may
    also have another shape."""
    file, run = tmp_path / "pairs.jsonl", tmp_path / "run"
    lines = [
        json.dumps(
            {"query": f"where is owl {n}", "pos": [f"owl {n} sleeps"], "neg": [f"owl {n} eats"]}
        )
        for n in range(20)
    ]
    settings = {"model.tie_towers": True}
    file.write_text("\n".join(lines[1:]))
    train(train_config(file, run, **settings, **{"optim.max_steps": 2}))
    file.write_text("\n".join(lines))
    settings |= {"resume": True, "allow_changes": True, "data.hard_negatives": 1}
    with pytest.warns(UserWarning, match="the bank starts empty, because the data changed"):
        train(train_config(file, run, **settings, **{"optim.max_steps": 4}))
    assert [line["bank_fill"] for line in read_log(run)] == [0, 16, 0, 16]


def test_without_a_bank_a_resumed_run_may_use_more_hard_negatives(tmp_path):
    file, run = tmp_path / "pairs.jsonl", tmp_path / "run"
    lines = [{"query": f"owl {n}", "pos": [f"{n}"], "neg": [f"a {n}", f"b {n}"]} for n in range(40)]
    file.write_text("\n".join(map(json.dumps, lines)))
    for steps, changes in ((1, {}), (2, {"resume": True, "allow_changes": True})):
        changes |= {"optim.max_steps": steps, "data.hard_negatives": steps}
        train(train_config(file, run, "grad_cache", **changes))
    assert [line["negatives"] for line in read_log(run)] == [31, 47]  # 16 (1 + H) - 1


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"run.metric": "ndcg@1"},
        {
            "run.metric": "ndcg@1",
            "optim.max_steps": 2,
        },  # no step is left; the last one is evaluated again
        {"data.dev_split": "other"},
    ],
    ids=str,
)
def test_best_score_counts_only_for_the_same_metric_and_dev_set(changes, two_steps, tmp_path):
    data, two = two_steps
    run = Path(shutil.copytree(two, tmp_path / "run"))
    before = newest_checkpoint(run).state["best"]
    assert before["score"] == 1.0  # which no later score can exceed
    judged = (data / "qrels" / "train.tsv").read_text().splitlines(keepends=True)
    (data / "qrels" / "other.tsv").write_text("".join(judged[:5]))
    steps = {**TWO_STEPS, "data.dev": str(data), "optim.max_steps": 3, "run.eval_steps": 0}
    config = train_config(data, run, resume=True, allow_changes=True, **(steps | changes))
    if not changes:
        train(config)
        assert newest_checkpoint(run).state["best"] == before
        return
    with pytest.warns(
        UserWarning, match="the best score so far is ignored: the metric or the dev set changed"
    ):
        train(config)
    best = newest_checkpoint(run).state["best"]
    assert best["step"] == config.optim.max_steps
    assert (best["metric"] == before["metric"], best["dev"] == before["dev"]) == (
        "run.metric" not in changes,
        "data.dev_split" not in changes,
    )


def command(config, folder: Path) -> list[str]:
    file = folder.with_suffix(".yaml")
    file.write_text(to_yaml(replace(config, resume=False)))
    return [
        python(), "-m", "contaccum", "train", "--config", str(file),
        *(["--resume"] if config.resume else []),
    ]  # fmt: skip


def wait_for(path: Path, process: subprocess.Popen) -> None:
    while not path.exists():
        assert process.poll() is None, "the run ended before it could be stopped"
        time.sleep(0.01)


LONG = {"optim.max_steps": 40, "run.save_steps": 3}


@pytest.mark.acceptance  # in the default suite test_faults.py kills processes
@pytest.mark.parametrize("kind", ["tiny", "decoder with adapters"])
def test_killed_process_resumes_byte_identical(kind, data, tmp_path):
    settings = LONG
    if kind != "tiny":
        folder = family_folder("qwen3", tmp_path / "base", [(data / "corpus.jsonl").read_text()])
        settings = LONG | {"model.name": str(folder), "lora.rank": 4, "lora.dropout": 0.1}
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    train(train_config(data, whole, **settings))
    call = [sys.executable, *command(train_config(data, killed, **settings), killed)[1:]]
    process = subprocess.Popen(call, stderr=subprocess.DEVNULL)
    wait_for(killed / "checkpoints" / "step-00000003", process)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not (killed / "model").exists()
    again = command(train_config(data, killed, resume=True, **settings), killed)
    assert subprocess.run(again, check=False).returncode == 0
    assert weights(killed) == weights(whole)
    assert steps_of(killed) == steps_of(whole)


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.acceptance)],
)
def test_signal_saves_a_checkpoint_and_ends_the_run(number, code, data, tmp_path):
    run = tmp_path / "run"
    changes = {"optim.max_steps": 4000, "run.save_steps": 0}
    process = subprocess.Popen(
        command(train_config(data, run, **changes), run), stderr=subprocess.PIPE, text=True
    )
    wait_for(run / "log.jsonl", process)
    while len(read_log(run)) < 3:
        time.sleep(0.01)
    process.send_signal(number)
    _, said = process.communicate()
    assert process.returncode == code
    assert "continue with --resume" in said
    saved = newest_checkpoint(run)
    assert saved is not None
    assert saved.state["step"] == read_log(run)[-1]["step"] >= 3


@pytest.mark.parametrize("method", ["grad_cache", "cont_accum", "cont_cache"])
def test_signal_within_a_step_saves_the_step_before(method, data, tmp_path, monkeypatch):
    """The third step is stopped after a backward pass, when pairs may be in the bank."""
    whole, run, wrong = (tmp_path / name for name in ("whole", "run", "wrong"))
    train(train_config(data, whole, method))
    before_pass = Training.before_pass

    def stop_in_third_step(training, tokens, graph):
        if training.done == 2 and any(p.grad is not None for p in training.engine.parameters):
            signal.raise_signal(signal.SIGTERM)
        before_pass(training, tokens, graph)

    def stopped_run(folder):
        with pytest.raises(Interrupted, match="stopped after step 2; continue with --resume"):
            train(train_config(data, folder, method, **{"run.save_steps": 0}))
        return newest_checkpoint(folder).folder

    with monkeypatch.context() as patch:
        patch.setattr(Training, "before_pass", stop_in_third_step)
        saved = stopped_run(run)
        patch.setattr(MatryoshkaBank, "rollback", lambda bank: None)  # negative control
        banks = [folder / "bank.safetensors" for folder in (saved, stopped_run(wrong))]
    assert (banks[0].read_bytes() == banks[1].read_bytes()) == (method == "grad_cache")
    for name in ("optimizer.safetensors", "bank.safetensors"):
        expected = whole / "checkpoints" / "step-00000002" / name
        assert (saved / name).read_bytes() == expected.read_bytes()
    train(train_config(data, run, method, resume=True))
    assert weights(run) == weights(whole)
    assert steps_of(run) == steps_of(whole)


@pytest.mark.acceptance
def test_file_size_limit_keeps_the_previous_checkpoint(data, tmp_path):
    """From the second checkpoint on, files are limited to 60 KB, as on a full disk."""
    run = tmp_path / "run"
    train(train_config(data, run, **{"optim.max_steps": 6}))
    broken_after(run, 2, tmp_path / "full")
    config = train_config(data, tmp_path / "full", resume=True, **{"optim.max_steps": 6})
    script = (
        "import resource, sys; from contaccum.cli import main;"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000)); sys.exit(main(sys.argv[1:]))"
    )
    call = [python(), "-c", script, *command(config, tmp_path / "full")[3:]]
    done = subprocess.run(call, capture_output=True, text=True, check=False, env=os.environ)
    assert done.returncode == 2, done.stderr
    assert "cannot be written" in done.stderr.splitlines()[-1]
    assert [folder.name for folder in (tmp_path / "full" / "checkpoints").iterdir()] == [
        "step-00000002"
    ]
    train(config)
    assert weights(tmp_path / "full") == weights(run)


def test_truncated_log_line_is_ignored(data, tmp_path):
    run = tmp_path / "run"
    train(train_config(data, run))
    before = steps_of(run)
    with (run / "log.jsonl").open("a") as file:
        file.write('{"step": 7, "lo')
    assert steps_of(run) == before
    assert all(json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()[:-1])

"""ContAccumLoss in SentenceTransformerTrainer: steps equal to our loop's, and the bank under
resume, evaluation and DDP."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from datasets import Dataset
from helpers import open_train_set, train_config, write_beir
from processes import Job, run_jobs
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
from st_worker import make_trainer

from contaccum import DualEncoder, train
from contaccum.config import TrainConfig
from contaccum.encoder import EncoderSettings, tiny_tower
from contaccum.errors import InputError
from contaccum.integrations.bank_loss import BANK_FILE, BankLoss, read_bank, write_bank
from contaccum.integrations.sentence_transformers import (
    ContAccumCallback,
    ContAccumLoss,
    tokens_of_texts,
)
from contaccum.methods.bank import Bank
from contaccum.runtime.engine import Engine
from contaccum.training import parts
from contaccum.training.log import read_log

ROOT = Path(__file__).resolve().parents[2]
STEPS, N, B = 20, 16, 4


def start(folder: Path, data: Path, similarity: str = "cosine", dropout: float = 0.0) -> Path:
    """Save two small towers."""
    words = [(data / name).read_text() for name in ("corpus.jsonl", "queries.jsonl")]
    size = {"layers": 1, "width": 32, "vocabulary": 200, "max_length": 16}
    towers = [tiny_tower(words, "mean", seed=seed, **size) for seed in (0, 1)]
    encoder = DualEncoder(
        *towers, EncoderSettings(similarity=similarity, max_query_length=16, max_passage_length=16)
    )
    for tower in towers:
        for name in ("hidden_dropout_prob", "attention_probs_dropout_prob"):
            setattr(tower.backbone.config, name, dropout)
    encoder.save(folder)
    return folder


def own_config(model: Path, data: Path, output: Path, **changes) -> TrainConfig:
    return train_config(
        data, output, **{
            "model.name": str(model), "optim.max_steps": STEPS, "optim.max_grad_norm": 1.0,
            "optim.warmup_steps": 0, "optim.weight_decay": 0.0, "run.save_steps": 0, **changes,
        },
    )  # fmt: skip


def rows_of(config: TrainConfig) -> list[dict[str, str]]:
    """Texts of our loop's micro-batches, in order."""
    train_set = open_train_set(config.data.train, "train", config.data.hard_negatives)
    encoder = DualEncoder.load(config.model.name)
    batches = parts.build_batches(
        config, Engine(device="cpu", seed=config.seed), encoder, train_set
    )
    texts = dict(zip(train_set.queries["id"], train_set.queries["text"], strict=True))
    names = ["query", "positive", "negative"][: 2 + config.data.hard_negatives]
    passages = [f"{row['title']} {row['text']}" for row in train_set.passages]
    found = []
    for step in range(config.optim.max_steps):
        for batch in batches.step(step):
            for query, columns in zip(batch.query_ids, batch.ids.columns.tolist(), strict=True):
                found.append(
                    dict(
                        zip(
                            names,
                            [texts[query], *(passages[each] for each in columns)],
                            strict=True,
                        )
                    )
                )
    return found


def weights_apart(left: DualEncoder, right: DualEncoder) -> float:
    ours, theirs = left.state_dict(), right.state_dict()
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_beir(tmp_path_factory.mktemp("data") / "beir")


@dataclass
class Taken:
    """Result of a training run."""

    losses: np.ndarray  # (steps, micro-batches)
    encoder: DualEncoder
    trainer: SentenceTransformerTrainer


def take(
    model: Path, rows: list[dict[str, str]], output: Path, resume: str | None = None, **options
) -> Taken:
    trainer, losses = make_trainer(str(model), rows, str(output), **options)
    trainer.train(resume_from_checkpoint=resume)
    trainer.model.save(str(output / "model"), create_model_card=False)
    accumulated = options.get("accumulate", N // B)
    return Taken(
        np.array(losses).reshape(-1, accumulated), DualEncoder.load(output / "model"), trainer
    )


@pytest.mark.parametrize(
    ("method", "similarity", "temperature", "hard", "options"),
    [
        ("cont_accum", "cosine", 0.05, 0, {}),
        pytest.param("cont_accum", "dot", 1.0, 1, {}, marks=pytest.mark.acceptance),
        pytest.param(
            "passage_bank", "cosine", 0.05, 0, {"queries": False}, marks=pytest.mark.acceptance
        ),
        pytest.param(
            "cont_cache", "cosine", 0.05, 0, {"mini_batch_size": B}, marks=pytest.mark.acceptance
        ),
    ],
)
def test_trainer_steps_equal_our_loop(
    method, similarity, temperature, hard, options, data, tmp_path
):
    model = start(tmp_path / "start", data, similarity)
    changes = {"data.hard_negatives": hard, "model.temperature": temperature}
    config = own_config(model, data, tmp_path / "own", method=method, **changes)
    rows = rows_of(config)
    train(config)
    own = np.array([line["loss"] for line in read_log(tmp_path / "own")])
    loss = {"temperature": temperature, **options}
    # then a step is one batch, in pieces
    shape = {"batch": N, "accumulate": 1} if "mini_batch_size" in options else {}
    found = take(model, rows, tmp_path / "theirs", loss=loss, **shape)
    means = found.losses.mean(1)
    assert np.abs(means - own).max() < 1e-5
    assert weights_apart(DualEncoder.load(tmp_path / "own" / "model"), found.encoder) < 1e-5
    logged = [entry["loss"] for entry in found.trainer.state.log_history if "loss" in entry]
    np.testing.assert_allclose(logged, means, rtol=1e-4)


@pytest.fixture(scope="module")
def plain(data, tmp_path_factory) -> tuple[Path, list[dict[str, str]], Taken]:
    """Model, rows, and an uninterrupted run of eight steps."""
    folder = tmp_path_factory.mktemp("plain")
    model = start(folder / "start", data)
    rows = rows_of(own_config(model, data, folder / "own", **{"optim.max_steps": 8}))
    return model, rows, take(model, rows, folder / "plain", steps=8)


def test_steps_without_the_bank_differ(plain, tmp_path):
    """Negative control."""
    model, rows, whole = plain
    without = take(model, rows, tmp_path / "none", steps=8, loss={"bank_size": 0})
    assert abs(without.losses[0, 0] - whole.losses[0, 0]) < 1e-6  # nothing is banked yet
    assert np.abs(without.losses - whole.losses)[1:].min() > 0.01
    assert weights_apart(without.encoder, whole.encoder) > 1e-3


def test_default_bank_size_is_one_step(plain, tmp_path):
    model, rows, whole = plain
    found = take(model, rows, tmp_path / "unsaid", steps=3, loss={"bank_size": None})
    said = take(model, rows, tmp_path / "said", steps=3, loss={"bank_size": N})
    assert (found.losses == said.losses).all()
    assert (
        found.trainer.loss.bank_loss.bank.fill
        == found.trainer.loss.get_config_dict()["bank_size"]
        == N
    )
    assert (found.losses != whole.losses[:3]).any()  # those met a bank of 24


def test_evaluation_does_not_change_the_bank(plain, tmp_path):
    model, rows, whole = plain
    seen = take(
        model,
        rows,
        tmp_path / "seen",
        steps=8,
        eval_rows=rows[:8],
        eval_strategy="steps",
        eval_steps=2,
    )
    evaluations = [
        entry["eval_loss"] for entry in seen.trainer.state.log_history if "eval_loss" in entry
    ]
    assert len(evaluations) == 4
    assert weights_apart(seen.encoder, whole.encoder) == 0
    banks = [taken.trainer.loss.bank_loss.bank for taken in (seen, whole)]
    assert banks[0].fingerprint() == banks[1].fingerprint()
    assert banks[0].fill == 24
    assert banks[0].step == 8
    halves = []
    for part in (rows[:4], rows[4:8]):
        queries = torch.from_numpy(seen.encoder.encode_queries([row["query"] for row in part]))
        passages = torch.from_numpy(seen.encoder.encode_passages([row["positive"] for row in part]))
        halves.append(
            torch.nn.functional.cross_entropy(queries @ passages.T / 0.05, torch.arange(4)).item()
        )
    assert evaluations[-1] == pytest.approx(np.mean(halves), abs=1e-4)


def test_resumed_run_restores_the_bank(data, plain, tmp_path):
    _, rows, _ = plain
    model = start(tmp_path / "start", data, dropout=0.1)
    saving = {"steps": 8, "save_strategy": "steps", "save_steps": 4}
    whole = take(model, rows, tmp_path / "run", **saving)
    checkpoint = tmp_path / "run" / "checkpoint-4"
    again = take(model, rows, tmp_path / "run", str(checkpoint), **saving)
    assert weights_apart(again.encoder, whole.encoder) == 0
    np.testing.assert_array_equal(again.losses, whole.losses[4:])
    moved = checkpoint.rename(tmp_path / "moved")
    other = take(
        model, rows, tmp_path / "other", str(moved), **saving, resume_from_checkpoint=str(moved)
    )
    assert weights_apart(other.encoder, whole.encoder) == 0
    tensors, numbers = read_bank(moved)
    # negative control: most rows forgotten
    write_bank(moved, (tensors, {**numbers, "stored": 4, "pointer": 4}))
    poorer = take(
        model, rows, tmp_path / "poorer", str(moved), **saving, resume_from_checkpoint=str(moved)
    )
    assert weights_apart(poorer.encoder, whole.encoder) > 1e-4
    with pytest.raises(InputError, match="bank of the checkpoint: its shapes"):
        take(
            model,
            rows,
            tmp_path / "x",
            str(moved),
            **saving,
            resume_from_checkpoint=str(moved),
            loss={"bank_size": 32},
        )
    (moved / BANK_FILE).unlink()
    with pytest.raises(InputError, match=f"{BANK_FILE}: no such file; expected a checkpoint that"):
        take(model, rows, tmp_path / "x", str(moved), **saving, resume_from_checkpoint=str(moved))


@pytest.mark.acceptance
def test_half_precision_training_stores_float32(data, plain, tmp_path):
    model, rows, whole = plain
    half = take(model, rows, tmp_path / "half", steps=8, bf16=True)
    config = own_config(
        model, data, tmp_path / "own", **{"optim.max_steps": 8, "run.precision": "bf16"}
    )
    train(config)
    own = np.array([line["loss"] for line in read_log(tmp_path / "own")])
    assert np.abs(half.losses.mean(1) - own).max() < 1e-4
    # negative control: something was rounded
    assert np.abs(half.losses - whole.losses).max() > 1e-5
    bank = half.trainer.loss.bank_loss.bank
    assert bank.queries.dtype == torch.float32
    assert torch.isfinite(bank.passages).all()


@pytest.mark.acceptance
def test_two_processes_equal_one(plain, tmp_path):
    model, rows, whole = plain
    cached = take(
        model, rows, tmp_path / "one", steps=8, batch=N, accumulate=1, loss={"mini_batch_size": 4}
    )
    jobs, ways = (
        {},
        {
            "pairs": {"batch": 2, "ddp_find_unused_parameters": False},
            "cached": {"batch": 8, "accumulate": 1, "loss": {"mini_batch_size": 4}},
            "searched": {"batch": 2},
        },
    )
    for name, way in ways.items():
        options = {
            "model": str(model),
            "rows": rows,
            "output": str(tmp_path / name),
            "steps": 8,
            **way,
        }
        (tmp_path / f"{name}.json").write_text(json.dumps(options))
        jobs[name] = Job([str(tmp_path / f"{name}.json")], processes=2, worker="st_worker")
    outcomes = run_jobs(jobs, tmp_path / "jobs")
    assert (
        "ddp_find_unused_parameters is None, but the model has a Router"
        in outcomes["searched"].err[0]
    )
    for name, one in (("pairs", whole), ("cached", cached)):
        outcomes[name].check()
        losses = np.array(json.loads((tmp_path / name / "losses.json").read_text())).reshape(
            one.losses.shape
        )
        assert np.abs(losses - one.losses).max() < 1e-5, name
        assert weights_apart(DualEncoder.load(tmp_path / name / "model"), one.encoder) < 1e-5, name
    banks = [json.loads((tmp_path / "pairs" / f"bank-{rank}.json").read_text()) for rank in (0, 1)]
    assert banks[0] == banks[1]
    assert banks[0][1] == 24


def test_equal_passages_are_masked(plain):
    """Computed by hand: two rows share a passage, in one batch and through the bank."""
    model, rows, _ = plain
    encoder = SentenceTransformer(str(model), device="cpu")
    twice = [rows[0], {"query": "another question", "positive": rows[0]["positive"]}, rows[1]]
    features = [
        encoder.preprocess([row[name] for row in twice], task=task)
        for name, task in (("query", "query"), ("positive", "document"))
    ]
    queries, passages = (encoder(each)["sentence_embedding"] for each in features)
    logits = (queries @ passages.T / 0.05).detach()
    expected = {True: logits.clone(), False: logits}
    expected[True][0, 1] = expected[True][1, 0] = -torch.inf
    for mask, matrix in expected.items():
        encoder.train()
        for module in encoder.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        loss = ContAccumLoss(encoder, bank_size=8, mask_false_negatives=mask)
        loss.bank_loss.begin()
        right = torch.nn.functional.cross_entropy(matrix, torch.arange(3)).item()
        assert loss(features).item() == pytest.approx(right, abs=1e-5)
        columns = torch.cat([matrix, matrix], 1)  # the bank holds the same rows again
        if mask:
            columns[torch.arange(3), torch.arange(3, 6)] = -torch.inf
        # bank rows mirror the current ones
        right = torch.nn.functional.cross_entropy(columns, torch.arange(3)).item()
        assert loss(features).item() == pytest.approx(right, abs=1e-5)


@pytest.mark.parametrize("kind", ["flattened", "offsets"])
def test_passages_are_told_apart_without_an_attention_mask(kind, plain):
    """FlashAttention and StaticEmbedding have the tokens of all texts in one row."""
    model, rows, _ = plain
    encoder = SentenceTransformer(str(model), device="cpu")
    first, second = (row["positive"] for row in rows[:2])
    padded = encoder.preprocess([first, f"{first} {second}", second])
    texts = [
        row[mask.bool()]
        for row, mask in zip(padded["input_ids"], padded["attention_mask"], strict=True)
    ]
    starts = torch.tensor([0, *[len(text) for text in texts]]).cumsum(0)
    one_row = torch.cat(texts)
    other = (
        {"input_ids": one_row.unsqueeze(0), "cu_seq_lens_q": starts.int()}
        if kind == "flattened"
        else {"input_ids": one_row, "offsets": starts[:-1]}
    )
    assert tokens_of_texts(other) == tokens_of_texts(padded) == [text.tolist() for text in texts]
    assert len({len(text) for text in texts}) > 1


def test_batches_of_another_shape_are_refused():
    bank = BankLoss(8, "cosine")
    bank.begin()
    queries, passages = torch.randn(2, 16), torch.randn(2, 2, 16)
    bank(queries, passages, training=True)
    with pytest.raises(
        InputError, match=r"a batch has 0 hard negatives .* of width 16, but the bank stores 1"
    ):
        bank(queries, passages[:, :1], training=True)
    with pytest.raises(InputError, match="of width 4, but the bank stores 1 of width 16"):
        bank(queries[:, :4], passages[:, :, :4], training=True)
    assert bank.bank.fill == 2
    none = BankLoss(0, "cosine")  # plain gradient accumulation keeps nothing
    none.begin()
    for columns in (2, 1):
        assert none(queries, passages[:, :columns], training=True).isfinite()
    without = BankLoss(8, "cosine", hard_negatives=False)
    without.begin()
    for columns in (2, 1):
        without(queries, passages[:, :columns], training=True)
    without.end_step()
    assert without.bank.fill == 4


@pytest.mark.parametrize(("first", "temperature"), [(16, 0.2), (32, 0.2), (8, 0.2), (16, 0.05)])
def test_resumed_bank_accepts_any_first_batch_and_temperature(first, temperature, tmp_path):
    """The first batch after a resume, possibly a short one, creates the bank; 64 rows have one
    shape at pushes of 8 to 32."""
    generator = torch.Generator().manual_seed(0)

    def take(loss, rows):
        vectors = torch.randn(2, rows, 1, 8, generator=generator)
        value = loss(vectors[0, :, 0], vectors[1], training=True)
        loss.end_step()
        return value.item()

    begun = BankLoss(64, "cosine", 0.2)
    begun.begin()
    for _ in range(6):
        take(begun, 16)
    write_bank(tmp_path, begun.state())
    other = BankLoss(64, "dot")
    other.begin(read_bank(tmp_path))
    with pytest.raises(InputError, match="similarity is dot, but the checkpoint has cosine"):
        take(other, 16)
    rest = BankLoss(64, "cosine", temperature)
    rest.begin(read_bank(tmp_path))
    own_positives = torch.eye(64, dtype=torch.bool)  # no negatives, so not in the sums
    for rows in (first, 16, 16):
        take(rest, rows)
        queries, passages = rest.bank.queries, rest.bank.passages[:, 0]
        plain = (
            (queries @ passages.T / temperature).masked_fill(own_positives, -torch.inf).logsumexp(1)
        )
        torch.testing.assert_close(rest.bank.logsumexp(), plain)
    other = (queries @ passages.T / (2 * temperature)).masked_fill(own_positives, -torch.inf)
    stale = other.logsumexp(1)  # negative control
    assert not torch.allclose(rest.bank.logsumexp(), stale, atol=0.1)


def test_batch_larger_than_the_bank_is_refused_also_after_the_first(tmp_path):
    loss = BankLoss(4, "cosine")
    loss.begin()
    loss(torch.randn(2, 8), torch.randn(2, 1, 8), training=True)
    before = loss.bank.fingerprint()
    with pytest.raises(InputError, match="bank_size is 4; expected 0 or at least 6"):
        loss(torch.randn(6, 8), torch.randn(6, 1, 8), training=True)
    assert loss.bank.fingerprint() == before


def test_resumed_run_refuses_the_bank_of_another_run(data, plain, tmp_path):
    """The trainer resumes from another folder, and its output folder has a checkpoint of the same
    step."""
    model, rows, _ = plain
    saving = {"steps": 8, "save_strategy": "steps", "save_steps": 4}
    whole = take(model, rows, tmp_path / "run", **saving)
    take(model, rows[::-1], tmp_path / "other", **saving)
    checkpoint = str(tmp_path / "run" / "checkpoint-4")
    with pytest.raises(
        InputError,
        match=r"other/checkpoint-4: this checkpoint, whose bank would be used, is of another run",
    ):
        take(model, rows, tmp_path / "other", checkpoint, **saving)
    again = take(
        model, rows, tmp_path / "other", checkpoint, **saving, resume_from_checkpoint=checkpoint
    )
    np.testing.assert_array_equal(again.losses, whole.losses[4:])


def test_each_data_set_may_have_a_loss_whose_bank_is_restored(plain, tmp_path):
    """Each bank was saved over the one before, so a resumed run had the last bank twice."""
    model, rows, _ = plain

    def two(steps: int, resume: bool = False) -> list[Bank]:
        trainer, _ = make_trainer(
            str(model), rows, str(tmp_path), steps=steps, save_strategy="steps", save_steps=4
        )
        losses = [ContAccumLoss(trainer.model, bank_size=16) for _ in range(2)]
        data = {"a": Dataset.from_list(rows[:40]), "b": Dataset.from_list(rows[40:80])}
        again = SentenceTransformerTrainer(
            model=trainer.model,
            args=trainer.args,
            train_dataset=data,
            loss=dict(zip(data, losses, strict=True)),
            callbacks=[ContAccumCallback(*losses)],
        )
        again.train(resume_from_checkpoint=resume)
        return [loss.bank_loss.bank for loss in losses]

    whole = two(6)
    assert whole[0].fingerprint() != whole[1].fingerprint()
    shutil.rmtree(tmp_path / "checkpoint-6")
    resumed = two(6, resume=True)
    assert [bank.fingerprint() for bank in resumed] == [bank.fingerprint() for bank in whole]
    # a loss without a batch before the first checkpoint
    state = SimpleNamespace(global_step=4, is_world_process_zero=True, log_history=[])
    losses = [ContAccumLoss(SentenceTransformer(str(model), device="cpu")) for _ in range(2)]
    callback = ContAccumCallback(*losses)
    args = make_trainer(str(model), rows, str(tmp_path))[0].args
    callback.on_train_begin(args, SimpleNamespace(global_step=0), None)
    callback.on_save(args, state, None)
    (tmp_path / "checkpoint-4" / "trainer_state.json").write_text('{"log_history": []}')
    ContAccumCallback(*losses).on_train_begin(args, state, None)


def test_callbacks_that_would_mix_up_banks_are_refused(plain, tmp_path):
    model, rows, _ = plain
    trainer, _ = make_trainer(str(model), rows, str(tmp_path))
    trainer.add_callback(ContAccumCallback(trainer.loss))
    with pytest.raises(InputError, match="there are two ContAccumCallback; expected one, with all"):
        trainer.train()
    callback = ContAccumCallback(trainer.loss, trainer.loss)
    with pytest.raises(InputError, match="2 losses with banks train in several processes"):
        callback.on_train_begin(SimpleNamespace(world_size=2), SimpleNamespace(), None)


def test_wrong_options_and_calls_are_refused(data, plain, tmp_path):
    model, rows, _ = plain
    with pytest.raises(InputError, match="was called in training before begin"):
        take(model, rows, tmp_path / "a", callback=False)
    with pytest.raises(InputError, match="bank_size is 2; expected 0 or at least 4"):
        take(model, rows, tmp_path / "b", loss={"bank_size": 2})
    with pytest.raises(InputError, match="similarity is 'euclidean'; expected cosine or dot"):
        ContAccumLoss(SentenceTransformer(str(model), device="cpu"), similarity="euclidean")
    with pytest.raises(InputError, match="mini_batch_size is 0, expected `int` >= 1"):
        ContAccumLoss(SentenceTransformer(str(model), device="cpu"), mini_batch_size=0)
    with pytest.raises(InputError, match="the data has one column of texts; expected the columns"):
        take(model, [{"query": row["query"]} for row in rows], tmp_path / "c")
    trainer, _ = make_trainer(str(model), rows, str(tmp_path / "d"))
    with torch.no_grad():
        next(trainer.model.parameters()).fill_(torch.nan)
    with pytest.raises(InputError, match="the loss is nan; it must be a finite number"):
        trainer.train()
    assert trainer.loss.bank_loss.bank.fill == 0
    # what broke off inside an optimizer step leaves accelerate's updates switched off; our own runs
    # after it are whole
    assert not trainer.accelerator.gradient_state.sync_gradients
    config = own_config(model, data, tmp_path / "own", **{"optim.max_steps": 1})
    train(config)
    assert (
        weights_apart(DualEncoder.load(tmp_path / "own" / "model"), DualEncoder.load(model)) > 1e-5
    )


@pytest.mark.acceptance
def test_example_script_runs(data, tmp_path):
    encoder = DualEncoder.load(start(tmp_path / "start", data))
    tower = encoder.query_tower
    settings = EncoderSettings(max_query_length=16, max_passage_length=16, tie_towers=True)
    DualEncoder(tower, tower, settings).save(tmp_path / "one")
    rows = rows_of(
        own_config(tmp_path / "start", data, tmp_path / "own", **{"optim.max_steps": 40})
    )
    (tmp_path / "pairs.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    script = ROOT / "examples" / "sentence_transformers_contaccum.py"
    arguments = {
        "model": tmp_path / "one",
        "data": tmp_path / "pairs.jsonl",
        "output": tmp_path / "run",
    }
    call = [sys.executable, str(script), "--max_steps", "4"]
    call += [part for name, value in arguments.items() for part in (f"--{name}", str(value))]
    paths = {
        "PYTHONPATH": str(ROOT),
        "HF_DATASETS_CACHE": str(tmp_path / "cache"),
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(
        call, env={**os.environ, **paths}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == f"{tmp_path}/run/final"
    assert (
        len(DualEncoder.load(tmp_path / "run" / "final").encode_queries(["where is the red fox"]))
        == 1
    )

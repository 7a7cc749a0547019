"""Training runs whose loss leaves out pairs: by a guide's scores, by the model's own scores, by the
rule of a set."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from helpers import train_config, weights, write_beir
from processes import Job, run_jobs
from safetensors.torch import load_file

from contaccum.cli import main
from contaccum.config import MixtureConfig, TrainConfig, to_yaml
from contaccum.data.dataset import load_training
from contaccum.encoder import DualEncoder, EncoderSettings, tiny_tower
from contaccum.errors import InputError
from contaccum.runtime.engine import Engine
from contaccum.runtime.files import cache_folder
from contaccum.training import parts
from contaccum.training.log import read_log
from contaccum.training.loop import train
from contaccum.training.run_folder import newest_checkpoint


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """BEIR folder ``data``, a second set ``pairs.jsonl``, and an encoder ``guide`` with another
    tokenizer and width."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CONTACCUM_CACHE", str(tmp_path / "cache"))
    data = write_beir(tmp_path / "data")
    rows = [
        {"query": f"which bird sings in {n}", "pos": [f"a lark in {n}"], "neg": [f"an owl of {n}"]}
        for n in range(13)
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = [json.loads(line)["text"] for line in (data / "corpus.jsonl").read_text().splitlines()]
    tower = tiny_tower(texts, "mean", layers=1, width=48, vocabulary=100, max_length=24, seed=3)
    settings = EncoderSettings(
        tie_towers=True, max_query_length=24, max_passage_length=24, query_prefix="query "
    )
    DualEncoder(tower, tower, settings).save(tmp_path / "guide")
    return tmp_path


def config(name: str, method: str = "cont_accum", **changes) -> TrainConfig:
    """``mixture``: values of ``in_batch_negatives`` of both sets, instead of one set."""
    mixture = changes.pop("mixture", None)
    changes = {"data.hard_negatives": 1, "data.fill_negatives": "none", **changes}
    if mixture is not None:
        sets = zip(("data", "pairs.jsonl"), mixture, strict=True)
        changes["data.mixture"] = [
            MixtureConfig(path, in_batch_negatives=each) for path, each in sets
        ]
    data = "" if mixture is not None else "data"
    return train_config(Path(data), Path(name), method, **{"data.train": data, **changes})


BY_GUIDE = {
    "loss.guide": "guide",
    "loss.false_negative_margin": 0.002,
    "loss.margin_strategy": "relative",
}
BY_MODEL = {"loss.false_negative_margin": 0.02}
WIDTHS = {"loss.matryoshka_dims": [8], "bank.age_decay": 0.1}
RUNS = {
    "guide widths": ("cont_cache", {**BY_GUIDE, **WIDTHS}, {"loss.false_negative_margin": 0.2}),
    "own": ("cont_accum", BY_MODEL, {"loss.false_negative_margin": None}),
    "separate": ("cont_cache", {"mixture": (True, False)}, {"mixture": (True, True)}),
    "all": (
        "cont_accum",
        {**BY_GUIDE, **WIDTHS, "mixture": (False, True)},
        {"mixture": (True, True)},
    ),
}


@pytest.mark.filterwarnings("ignore:.*no negatives")
@pytest.mark.parametrize("name", RUNS)
def test_run_with_left_out_pairs_resumes_to_the_byte(name, folder):
    method, changes, other = RUNS[name]
    train(config("whole", method, **changes))
    shutil.copytree("whole", "broken")
    shutil.rmtree("broken/model")
    for step in (4, 6):
        shutil.rmtree(f"broken/checkpoints/step-0000000{step}")
    train(config("broken", method, resume=True, **changes))
    assert weights(folder / "broken") == weights(folder / "whole")
    runs = [
        [line for line in read_log(folder / run) if "loss" in line] for run in ("whole", "broken")
    ]
    assert [line["loss"] for line in runs[0]] == [line["loss"] for line in runs[1]]
    banks = [
        newest_checkpoint(folder / run).folder / "bank.safetensors" for run in ("whole", "broken")
    ]
    assert banks[0].read_bytes() == banks[1].read_bytes()
    filtered = [line.get("filtered", 0) for line in runs[0]]
    assert sum(filtered) > 0 or name == "separate"
    # a row number, and no second vector
    assert ("query_numbers" in load_file(banks[0])) == ("own" not in name)
    train(config("other", method, **{**changes, **other}))  # negative control
    assert weights(folder / "other") != weights(folder / "whole")


@pytest.mark.parametrize("mixture", [None, (True, False)])
def test_guide_vectors_are_those_of_the_texts_in_the_step(mixture, folder):
    made = config("run", **BY_GUIDE, mixture=mixture) if mixture else config("run", **BY_GUIDE)
    train_set, engine, guide = (
        load_training(made.data),
        Engine(device="cpu"),
        DualEncoder.load("guide"),
    )
    encoder = parts.build_encoder(made, train_set)
    rules = parts.build_rules(made, engine, train_set)
    passages = [f"{row['title']} {row['text']}".strip() for row in train_set.passages]
    seen = set()
    for batch in parts.build_batches(made, engine, encoder, train_set).step(0):
        queries = batch.ids.queries
        assert [train_set.queries[int(row)]["id"] for row in queries] == batch.query_ids
        texts = [train_set.queries[int(row)]["text"] for row in queries]
        np.testing.assert_allclose(
            rules.guide.queries(queries), guide.encode_queries(texts), atol=2e-3
        )
        ids = batch.ids.columns.flatten()
        texts = [passages[int(row)] for row in ids]
        np.testing.assert_allclose(
            rules.guide.passages(ids), guide.encode_passages(texts), atol=2e-3
        )
        seen |= set(queries.tolist())
        if mixture:
            assert rules.separate[queries].tolist() == [
                text.startswith("which bird") for text in batch_texts(train_set, queries)
            ]
    assert len(seen) == 16
    assert (rules.separate is None) == (mixture is None)


def batch_texts(train_set, queries) -> list[str]:
    return [train_set.queries[int(row)]["text"] for row in queries]


def test_untrained_model_can_be_the_guide(folder):
    """With its settings for this run."""
    name = str(folder / "guide")
    changes = {"model.name": name, "loss.guide": name, "optim.max_steps": 1}
    train(config("run", "grad_cache", **changes, **{"model.query_prefix": "red "}))
    queries_and_passages = 2
    assert len(list((cache_folder() / "vectors").iterdir())) == queries_and_passages
    train(config("other", "grad_cache", **changes, **{"model.query_prefix": "blue "}))
    assert len(list((cache_folder() / "vectors").iterdir())) == queries_and_passages + 1
    assert "filtered" in read_log(folder / "run")[0]


def test_changed_guide_is_refused_on_resume(folder):
    changes = {**BY_GUIDE, "optim.max_steps": 2}
    train(config("run", **changes))
    with pytest.raises(InputError, match=r"loss.false_negative_margin was 0.002 and is 0.1"):
        train(config("run", resume=True, **{**changes, "loss.false_negative_margin": 0.1}))


MISSING = (
    "loss.guide: no/such/guide: no such folder; expected the folder of a model or of a run, or a "
    "Hub name"
)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--loss.guide", "no/such/guide"], MISSING),
        (
            ["--loss.guide", "data/corpus.jsonl"],
            "loss.guide: data/corpus.jsonl: no such folder",
        ),
    ],
)
def test_unusable_guide_is_refused_before_anything_is_loaded(
    options, sentence, folder, capsys, monkeypatch
):
    monkeypatch.setattr(
        "contaccum.training.loop.load_training", lambda *given: pytest.fail("data was read")
    )
    assert (
        main(
            [
                "train", "--data.train", "data", "--output_dir", "run", "--model.name", "tiny",
                *options,
            ]
        )
        == 2
    )  # fmt: skip
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith(f"contaccum: {sentence}")
    assert not Path("run").exists()


def test_set_without_negatives_is_refused_or_named(folder):
    rows = [json.loads(line) for line in Path("pairs.jsonl").read_text().splitlines()]
    Path("pairs.jsonl").write_text(
        "".join(json.dumps(row | {"neg": row["neg"][: n % 2]}) + "\n" for n, row in enumerate(rows))
    )
    with pytest.warns(
        UserWarning,
        match=r"pairs.jsonl: no hard negative for 7 of 13 queries, .* of a query is 0",
    ):
        load_training(config("run", mixture=(True, False)).data)
    Path("pairs.jsonl").write_text("".join(json.dumps(row | {"neg": []}) + "\n" for row in rows))
    with pytest.raises(
        InputError, match=r"pairs.jsonl: no hard negative for 13 of 13 queries.* no negatives"
    ):
        load_training(config("run", mixture=(True, False)).data)
    load_training(config("run", mixture=(True, True)).data)  # negative control


@pytest.mark.acceptance
def test_two_processes_leave_out_the_pairs_of_one(folder):
    jobs = {}
    for name, world, margin in (("one", 1, 0.002), ("two", 2, 0.002), ("other", 2, 0.2)):
        changes = {
            **BY_GUIDE,
            "loss.false_negative_margin": margin,
            "mixture": (True, False),
            "model.dropout": 0.0,
        }
        made = config(
            str(folder / name),
            **changes,
            **{"batch.micro_batch_size": 4 // world},
        )
        Path(f"{name}.yaml").write_text(to_yaml(made))
        jobs[name] = Job(["train", "--config", f"{name}.yaml"], world)
    for outcome in run_jobs(jobs, folder / "jobs").values():
        outcome.check()
    logs = {name: [line for line in read_log(folder / name) if "loss" in line] for name in jobs}
    values = {
        name: [(line["loss"], line["filtered"]) for line in lines] for name, lines in logs.items()
    }
    assert [each for each, _ in values["two"]] == pytest.approx(
        [each for each, _ in values["one"]], rel=1e-4
    )
    assert [count for _, count in values["two"]] == [count for _, count in values["one"]]
    assert [each for each, _ in values["other"]] != pytest.approx(
        [each for each, _ in values["one"]], rel=1e-3
    )

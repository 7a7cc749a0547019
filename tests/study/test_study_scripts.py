"""The scripts behind docs/results/study.md: what is cut, what is tried, what is packed, and that the page's tables are theirs."""

import gzip
import json
import sys
from pathlib import Path

import cut
import heads
import numpy as np
import pack
import pytest
import tables
import torch
from helpers import write_beir
from ideas import Idea, Variant

from contaccum.batch import MicroBatch, RowIds, Tokens
from contaccum.methods import METHODS
from contaccum.methods.bank import Bank
from contaccum.methods.loss import InfoNCE

ROOT = Path(__file__).parent.parent.parent
DIM, B, M = 8, 4, 20
SAME = 2e-5


def call(monkeypatch, main, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["script", *map(str, arguments)])
    main()


def steps(count: int = 6, micro_batches: int = 3) -> list[list[MicroBatch]]:
    """Pairs of 30 texts on each side, some passages more than once, and a second known positive here and there."""
    random = np.random.default_rng(0)

    def tokens(numbers: np.ndarray) -> Tokens:
        ids = torch.from_numpy(numbers).reshape(-1, 1)
        return Tokens(ids, torch.ones_like(ids))

    def batch() -> MicroBatch:
        queries, passages = random.integers(30, size=B), random.integers(30, size=(B, 1))
        known = np.concatenate([passages, random.integers(-1, 30, size=(B, 1))], axis=1)
        ids = RowIds(torch.from_numpy(passages), torch.from_numpy(known))
        return MicroBatch(tokens(queries), tokens(passages), ids, [""] * B)

    return [[batch() for _ in range(micro_batches)] for _ in range(count)]


def gradients(method, **options) -> torch.Tensor:
    """Of all weights at every step, by plain gradient descent."""
    torch.manual_seed(0)
    towers = heads.Towers(DIM, 0.1)
    vectors = tuple(torch.nn.functional.normalize(torch.randn(30, DIM), dim=1) for _ in range(2))
    engine, loss = heads.Engine(towers, vectors, 0), InfoNCE(0.2)
    bank = Bank(M, DIM, loss, push=B, **options)
    optimizer, found = torch.optim.SGD(towers.parameters(), lr=3.0), []
    for number, batches in enumerate(steps()):
        engine.step = number
        method(engine, batches, bank, loss)
        found.append(torch.cat([p.grad.flatten() for p in towers.parameters()]))
        optimizer.step()
        optimizer.zero_grad()
        bank.end_step()
    return torch.stack(found)


@pytest.mark.parametrize(
    ("idea", "options"), [(Idea(), {}), (Idea(), {"row_weight": "current"}), (Idea(decay=0.7), {"age_decay": 0.7})]
)
def test_the_full_matrix_of_the_ideas_is_the_packages_method(idea, options):
    ours = gradients(METHODS["cont_accum"], **options)
    theirs = gradients(Variant(idea, M, options.get("row_weight", "all")))
    assert (ours - theirs).abs().max() < SAME * ours.abs().max()


@pytest.mark.parametrize("name", heads.IDEAS)
def test_each_idea_changes_the_gradients(name):
    plain = gradients(METHODS["cont_accum"])
    assert (gradients(Variant(heads.IDEAS[name], M)) - plain).abs().max() > 1e-3 * plain.abs().max()


@pytest.fixture
def data(tmp_path, monkeypatch):
    """A cut set: 40 passages and queries, ten of them the dev and test queries of the demo folder."""
    call(monkeypatch, cut.main, write_beir(tmp_path / "whole"), tmp_path / "small", "--sample", 5)
    return tmp_path / "small"


def lines(file: Path) -> list[str]:
    return file.read_text().splitlines()


def test_a_cut_set_holds_the_judged_passages_and_the_sample(data, tmp_path, monkeypatch):
    judged = {line.split("\t")[1] for line in lines(data / "test" / "qrels" / "test.tsv")[1:]}
    passages = {json.loads(line)["_id"] for line in lines(data / "test" / "corpus.jsonl")}
    assert judged <= passages
    assert len(passages) == len(judged) + 5
    assert len(lines(data / "train" / "corpus.jsonl")) == 40
    call(monkeypatch, cut.main, tmp_path / "whole", tmp_path / "held", "--held_out", 7, "--sample", -1)
    asked = [
        {line.split("\t")[0] for line in lines(tmp_path / "held" / s / "qrels" / f"{s}.tsv")[1:]}
        for s in ("train", "dev")
    ]
    assert len(asked[1]) == 7
    assert not asked[0] & asked[1]
    assert len(lines(tmp_path / "held" / "dev" / "corpus.jsonl")) == 40


def test_runs_on_frozen_vectors_are_packed_and_read_again(data, tmp_path, monkeypatch):
    few = {"optim.max_steps": 3, "batch.global_batch_size": 16, "batch.micro_batch_size": 4, "bank.size": 16}
    cases = [(name, {**few, "method": name}, Idea()) for name in ("grad_cache", "cont_accum")]
    monkeypatch.setattr(heads, "PARTS", {"few": lambda: iter(cases)})
    monkeypatch.chdir(ROOT)
    vectors = tmp_path / "runs" / "heads-small" / "vectors"
    vectors.mkdir(parents=True)
    random = np.random.default_rng(0)
    for split in ("train", "dev", "test"):
        for side, file in (("queries", "queries"), ("passages", "corpus")):
            rows = random.standard_normal((len(lines(data / split / f"{file}.jsonl")), DIM)).astype(np.float32)
            np.save(vectors / f"{split}-{side}.npy", rows / np.linalg.norm(rows, axis=1, keepdims=True))
    arguments = ("--data", data, "--model", "none", "--out", tmp_path / "runs", "--seeds", 2)
    call(monkeypatch, heads.main, *arguments)
    found = sorted(path.name for path in (tmp_path / "runs" / "heads-small" / "runs").iterdir())
    assert found == [f"{name}-seed{seed}.json" for name in ("cont_accum", "grad_cache") for seed in (0, 1)]
    call(monkeypatch, pack.main, tmp_path / "runs", tmp_path / "study.jsonl.gz")
    runs = tables.read_pack(tmp_path / "study.jsonl.gz")["heads-small"]
    assert [run.config["method"] for run in runs] == ["cont_accum"] * 2 + ["grad_cache"] * 2
    for run in runs:
        per_query = [values["ndcg@10"] for values in run.metrics["per_query"].values()]
        assert sum(per_query) / len(per_query) == pytest.approx(run.score("ndcg@10"), abs=1e-4)
    table = tables.against(tables.best_rates(runs), "grad_cache")
    assert sorted(row[0] for row in table.rows) == ["cont_accum", "grad_cache"]


def test_a_runs_name_is_its_setting_its_rate_and_its_seed():
    run = tables.Run(Path("cont_accum-size=64-learning_rate=3e-4-seed2"), {}, [], [], None, {})
    assert tables.label(run) == "cont_accum size=64"
    assert tables.label(run, rate=True) == "cont_accum size=64 lr=3e-4"


@pytest.mark.acceptance
def test_the_tables_of_the_page_are_those_of_the_packed_runs():
    results = ROOT / "docs" / "results"
    page = (results / "study.md").read_text()
    studies = tables.read_pack(results / "study.jsonl.gz")
    named = tables.MARKED.findall(page)
    assert len(named) > 5
    for name, _, shown in named:
        make, study = tables.TABLES[name]
        assert make(studies, study).markdown() == shown, name


def test_the_pack_holds_every_runs_settings_log_and_scores():
    with gzip.open(ROOT / "docs" / "results" / "study.jsonl.gz", "rt") as file:
        queries, *runs = map(json.loads, file)
    assert runs
    for run in runs:
        assert len(run["per_query"]) in (0, len(queries.get(run["test"], [])))
        steps = run["config"].get("optim.max_steps")  # else an epoch's
        assert steps is None or run["log"]["step"][-1] == steps

"""Scripts of the studies in docs/results: reduced data, changed methods, packed runs, and equality
of the page's tables."""

import gzip
import json
import re
import sys
from pathlib import Path

import cut
import pack
import plots
import pytest
import tables
import yaml
from helpers import train_config, write_beir

from contaccum.cli import main as cli
from contaccum.config import validate
from contaccum.experiments.settings import read_settings
from contaccum.experiments.tuning import limited, parse_budget, rung_shares, step_price

ROOT = Path(__file__).parent.parent.parent


def call(monkeypatch, main, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["script", *map(str, arguments)])
    main()


@pytest.fixture
def data(tmp_path, monkeypatch):
    """Reduced set of 40 passages and queries, with ten dev and test queries."""
    call(monkeypatch, cut.main, write_beir(tmp_path / "whole"), tmp_path / "small", "--sample", 5)
    return tmp_path / "small"


def lines(file: Path) -> list[str]:
    return file.read_text().splitlines()


def test_reduced_set_has_the_judged_passages_and_the_sample(data, tmp_path, monkeypatch):
    judged = {line.split("\t")[1] for line in lines(data / "test" / "qrels" / "test.tsv")[1:]}
    passages = {json.loads(line)["_id"] for line in lines(data / "test" / "corpus.jsonl")}
    assert judged <= passages
    assert len(passages) == len(judged) + 5
    assert len(lines(data / "train" / "corpus.jsonl")) == 40
    call(
        monkeypatch, cut.main, tmp_path / "whole", tmp_path / "held", "--held_out", 7,
        "--sample", -1,
    )  # fmt: skip
    asked = [
        {line.split("\t")[0] for line in lines(tmp_path / "held" / s / "qrels" / f"{s}.tsv")[1:]}
        for s in ("train", "dev")
    ]
    assert len(asked[1]) == 7
    assert not asked[0] & asked[1]
    assert len(lines(tmp_path / "held" / "dev" / "corpus.jsonl")) == 40


def test_disjoint_splits_share_no_passage_and_no_title(tmp_path, monkeypatch):
    whole = tmp_path / "whole"
    (whole / "qrels").mkdir(parents=True)
    # passages 2k and 2k + 1 have the same title; query i is about passage i % 12
    passages = [
        {"_id": f"p{i}", "title": f"article {i // 2}", "text": f"text {i}"} for i in range(12)
    ]
    queries = [{"_id": f"q{i}", "text": f"question {i}"} for i in range(40)]
    for name, rows in (("corpus", passages), ("queries", queries)):
        (whole / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for split, first, last in (("train", 0, 24), ("dev", 24, 31), ("test", 31, 40)):
        judged = [f"q{i}\tp{i % 12}\t1" for i in range(first, last)]
        (whole / "qrels" / f"{split}.tsv").write_text(
            "\n".join(["query-id\tcorpus-id\tscore", *judged]) + "\n"
        )

    def titles_and_queries(
        out: str, *options: str
    ) -> tuple[dict[str, set[int]], dict[str, set[str]]]:
        call(monkeypatch, cut.main, whole, tmp_path / out, *options)
        rows = {
            split: [
                line.split("\t")
                for line in lines(tmp_path / out / split / "qrels" / f"{split}.tsv")[1:]
            ]
            for split in ("train", "dev", "test")
        }
        titles = {
            split: {int(passage[1:]) // 2 for _, passage, _ in found}
            for split, found in rows.items()
        }
        return titles, {split: {query for query, *_ in found} for split, found in rows.items()}

    titles, asked = titles_and_queries("disjoint", "--disjoint")
    assert not titles["train"] & (titles["dev"] | titles["test"]) | titles["dev"] & titles["test"]
    assert sum(map(len, asked.values())) == len(set().union(*asked.values())) == 40
    assert 0 < len(asked["dev"]) <= 7
    assert 0 < len(asked["test"]) <= 9
    # negative control: the splits as they are share titles
    titles, _ = titles_and_queries("plain")
    assert titles["train"] & titles["test"]


@pytest.mark.parametrize(
    ("name", "budget"),
    [
        ("methods", "6144f"),
        ("methods-demo", "80000f"),
        ("methods-options", "4096f"),
        ("methods-less-time", "4096f"),
        ("methods-longer", "24576f"),
        ("methods-large-banks", "49152f"),
        ("methods-whole", "36000f"),
    ],
)
def test_study_settings_can_be_trained_in_every_rung(name, budget):
    for row in read_settings(str(ROOT / f"configs/study/{name}.yaml"), {}):
        for candidate in row.candidates:
            # yaml reads 1e-05 as a text
            readers = {"optim.learning_rate": float}
            changes = {
                key: readers.get(key, yaml.safe_load)(value)
                for key, value in row.changes(candidate)
            }
            if name != "methods-demo":
                changes["model.name"] = "an encoder"
            config = train_config(
                Path("d"),
                Path("o"),
                **changes,
                **{"batch.micro_batch_size": 8, "optim.max_steps": None},
            )
            validate(config)
            price = step_price(config, parse_budget(budget), Path("d"), {})
            shortest = rung_shares(len(row.candidates), None)[0]
            steps = limited(config, parse_budget(budget), shortest, price).optim.max_steps
            assert steps >= 8
            assert config.bank_size() == 0 or steps > config.bank.warmup_steps


@pytest.mark.acceptance
@pytest.mark.filterwarnings("default:.* also occur in the (training|dev) data")
@pytest.mark.usefixtures("forked_workers")
def test_packed_runs_of_a_comparison_can_be_read_again(data, tmp_path, monkeypatch):
    splits = {f"--data.{part}": data / part for part in ("train", "dev")}
    options = {
        **splits,
        "--test": data / "test",
        "--methods": "grad_cache,cont_accum",
        "--seeds": 1,
        "--output_dir": tmp_path / "runs" / "small",
        "--baselines": "none",
        "--optim.max_steps": 3,
        "--batch.global_batch_size": 16,
        "--model.tiny_width": 32,
        "--batch.micro_batch_size": 4,
        "--model.name": "tiny",
        "--bank.size": 16,
    }
    assert cli(["compare", *(str(part) for option in options.items() for part in option)]) == 0
    call(monkeypatch, pack.main, tmp_path / "runs", tmp_path / "study.jsonl.gz")
    runs = tables.read_pack(tmp_path / "study.jsonl.gz")["small"]
    assert [run.config["method"] for run in runs] == ["cont_accum", "grad_cache"]
    for run in runs:
        per_query = [values["ndcg@10"] for values in run.metrics["per_query"].values()]
        assert sum(per_query) / len(per_query) == pytest.approx(run.score("ndcg@10"), abs=1e-4)


@pytest.mark.acceptance
def test_tables_of_the_page_equal_those_of_the_packed_runs():
    results = ROOT / "docs" / "results"
    studies = tables.read_pack(results / "study.jsonl.gz")
    main_page, tables_page = (
        tables.MARKED.findall((results / name).read_text())
        for name in ("small_encoder.md", "study_tables.md")
    )
    assert len(main_page) == 1
    assert len(tables_page) > 5
    for name, _, shown in main_page + tables_page:
        make, study = tables.TABLES[name]
        assert make(studies, study).markdown() == shown.rstrip("\n"), name


@pytest.mark.acceptance
def test_plot_shows_the_scores_of_the_tables_over_the_measured_time(tmp_path, monkeypatch):
    results = ROOT / "docs" / "results"
    page, studies = (
        (results / "study_tables.md").read_text(),
        tables.read_pack(results / "study.jsonl.gz"),
    )
    for name in plots.SETS:
        for points in plots.points(studies, name).values():
            assert points == sorted(points)
            assert all(
                re.search(rf"\| {score:.4f} +\| {deviation:.4f} +\|", page)
                for _, score, deviation in points
            )
    assert all(
        f"{seconds:.3f} s" in page
        for of_set in plots.SECONDS.values()
        for seconds in of_set.values()
    )
    medquad = plots.points(studies, "medquad")["grad_cache"]
    assert [seconds for seconds, _, _ in medquad] == pytest.approx(
        [96 * 0.614, 112 * 0.614, 384 * 0.614]
    )
    call(monkeypatch, plots.main, results / "study.jsonl.gz", tmp_path)
    assert {path.stem for path in tmp_path.glob("*.svg")} == set(plots.PLOTS)
    drawn = (tmp_path / "study_time.svg").read_text()
    assert all(
        f">{text}<" in drawn
        for text in (*plots.SETS.values(), *plots.LABELS.values(), "seconds of training")
    )


def test_pack_contains_settings_log_and_scores_of_every_run():
    with gzip.open(ROOT / "docs" / "results" / "study.jsonl.gz", "rt") as file:
        queries, *runs = map(json.loads, file)
    assert runs
    for run in runs:
        assert len(run["per_query"]) in (0, len(queries.get(run["test"], [])))
        steps = run["config"].get("optim.max_steps")  # else an epoch's
        assert steps is None or run["log"]["step"][-1] == steps


def test_the_quality_in_readme_is_that_of_the_study():
    names = ("README.md", "docs/results/whole_encoders.md")
    readme, page = ((ROOT / name).read_text() for name in names)
    rows = re.findall(r"^\| replay with a bank \|.*$", page, re.M)
    medquad, api = (float(re.search(r"\| ([+-]0\.\d{4}) \(", row)[1]) for row in rows)
    assert f"(MedQuAD {medquad:+.3f}, p < 0.001; API docs {api:+.3f}," in " ".join(readme.split())

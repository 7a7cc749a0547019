"""The table's figures from logs written by hand."""

import json
from pathlib import Path

import pytest
from helpers import train_config

from contaccum.config import to_yaml
from contaccum.errors import InputError
from contaccum.study.report import render_table, summarise


def folder(path: Path, method: str, seconds: list[float], **changes) -> Path:
    path.mkdir()
    (path / "config.yaml").write_text(to_yaml(train_config(Path("data"), path, method, **changes)))
    (path / "metrics.json").write_text(json.dumps({"mean": {"ndcg@10": 0.25, "recall@100": 0.5}}))
    lines = [
        {
            "step": n + 1, "loss": 1.0, "bank_fill": 4 * n, "seconds": value, "waited": 0.75 if n else 9.0,
            "pairs_per_second": 16 / value, "negatives": 7.0,
            "peak_memory": 2**20 * (n + 1), "grad_norm_ratio": None if n == 1 else 2.0 + n,
        }
        for n, value in enumerate(seconds)
    ]  # fmt: skip
    lines.insert(1, {"step": 1, "dev": {"ndcg@10": 0.2}})
    (path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_medians_leave_out_the_first_step(tmp_path):
    row = summarise(folder(tmp_path / "run", "cont_accum", [9.0, 2.0, 4.0, 1.0]), "ndcg@10")
    assert (row.name, row.method, row.metric) == ("run", "cont_accum", 0.25)
    assert (row.global_batch_size, row.micro_batch_size, row.bank_size) == (16, 4, 12)
    assert (row.seconds, row.pairs_per_second, row.negatives) == (2.0, 8.0, 7.0)
    assert row.peak_memory == 4 * 2**20
    assert row.grad_norm_ratio == 4.5
    assert row.waited == 3 * 0.75 / 7.0


def test_the_share_of_waiting_is_a_column(tmp_path):
    table = render_table(
        [summarise(folder(tmp_path / "run", "cont_accum", [9.0, 2.0, 4.0, 1.0]), "ndcg@10")], "ndcg@10"
    )
    heads, _, cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    assert cells[heads.index("wait %")] == "32.1"


def test_a_token_budget_is_shown_as_one(tmp_path):
    changes = {"batch.micro_batch_tokens": 2560}
    assert (
        summarise(folder(tmp_path / "a", "grad_cache", [1.0], **changes), "ndcg@10").micro_batch_size == "2560 tokens"
    )
    assert summarise(folder(tmp_path / "b", "in_batch", [1.0], **changes), "ndcg@10").micro_batch_size == 16


def test_a_method_that_takes_its_step_whole_shows_it(tmp_path):
    assert summarise(folder(tmp_path / "run", "in_batch", [1.0]), "recall@100").micro_batch_size == 16


def test_runs_without_training_or_metrics_have_blanks(tmp_path):
    trained = folder(tmp_path / "a", "grad_cache", [1.0, 1.0])
    (trained / "metrics.json").unlink()
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "metrics.json").write_text(json.dumps({"mean": {"top20": 0.75}}))
    table = render_table([summarise(trained, "top20"), summarise(tmp_path / "b", "top20")], "top20")
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    assert lines[0][5] == "top20"
    assert lines[2][5] == "-"
    assert lines[3] == ["b", "-", "-", "-", "-", "0.7500", "-", "-", "-", "-", "-", "-"]
    assert len({len(line) for line in table.splitlines()}) == 1


def test_refusals(tmp_path):
    with pytest.raises(InputError, match="holds neither"):
        summarise(tmp_path, "ndcg@10")
    with pytest.raises(InputError, match=r"has no metric 'top20', expected one of ndcg@10, recall@100"):
        summarise(folder(tmp_path / "run", "cont_accum", [1.0]), "top20")

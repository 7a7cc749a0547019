"""`contaccum plan`: lines through synthetic and real peaks, and the command."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from helpers import train_config, write_beir
from invented_set import write_invented_set
from processes import small_disk

from contaccum.batch import RowIds
from contaccum.cli import main
from contaccum.config import from_mapping
from contaccum.experiments.measure import Probe, measure_micro_batch
from contaccum.experiments.sizes import largest, largest_bank, largest_micro_batch, predict

pytestmark = pytest.mark.usefixtures("forked_workers")


def curve(size: int) -> float:
    """Peak that grows faster than a line."""
    return 1000 + 50 * size + size**2


def test_prediction_lies_on_lines_through_the_measured_peaks():
    peaks = {2: 100.0, 4: 200.0, 8: 600.0}
    assert [predict(peaks, size) for size in (1, 2, 3, 6, 8, 16)] == [50, 100, 150, 400, 600, 1400]
    assert predict({2: 200.0, 4: 100.0}, 8) == 100  # noise: a larger step never needs less


def test_the_largest_size_is_measured_and_the_prediction_corrected():
    """The line through 2 and 4 predicts that 64 fits; the measurement says no."""
    budget, peaks, asked = 4000.0, {2: curve(2), 4: curve(4)}, []

    def measure(size: int) -> float:
        asked.append(size)
        return curve(size)

    size, error = largest(peaks, [1, 2, 4, 8, 16, 32, 64, 128], budget, measure)
    assert (size, asked) == (32, [32])
    assert error == pytest.approx((curve(4) + 28 * (curve(4) - curve(2)) / 2) / curve(32) - 1)
    size, _ = largest({2: curve(2), 4: curve(4)}, range(1, 200), budget, measure)
    assert curve(size) <= budget < curve(size + 2)
    unchecked, _ = largest({2: curve(2), 4: curve(4)}, range(1, 200), budget, lambda size: None)
    assert curve(unchecked) > budget  # negative control: without measuring the prediction is wrong


def test_sizes_that_run_out_of_memory_on_a_gpu_with_the_budget_do_not_fit(tmp_path, monkeypatch):
    """A smaller GPU says nothing about the budget, so the prediction is used for it."""
    changes = {"batch.global_batch_size": 64, "data.hard_negatives": 0, "batch.micro_batch_size": 4}
    probe = Probe(
        train_config(write_beir(tmp_path / "data"), tmp_path / "run", "cont_accum", **changes)
    )
    probe.engine.device = torch.device("cuda")
    monkeypatch.setattr(probe, "_full_bank", lambda size, rows: (size, rows))
    monkeypatch.setattr(probe, "context", lambda: 0)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: most)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 2300))

    def steps(config, train_set, bank, count):
        nonlocal most
        size, rows = bank
        most = 1000 + 20 * size + size**2 + rows / 1000
        if most > 2300 or rows > 255_000:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(probe, "_steps", steps)
    most = 0.0
    assert [probe.peak(16, 64, budget) for budget in (2300, 2301)] == [pytest.approx(1576.064)] * 2
    assert [probe.peak(32, 64, budget) for budget in (2300, 2301)] == [math.inf, None]
    # a line through 2 and 4 pairs predicts that 32 fit
    assert largest_micro_batch(probe, 2300).size == 16
    assert largest_micro_batch(probe, 2301).size == 32
    probe.config = replace(probe.config, method="in_batch")
    none = largest_micro_batch(probe, 2300)
    assert none.size is None
    assert none.peak >= 2300
    probe.config = replace(probe.config, batch=replace(probe.config.batch, micro_batch_size=32))
    # 32, 64 and 128 pairs do not fit: 16 and 8 are measured
    assert largest_micro_batch(probe, 2300).measured == 16
    probe.config = replace(probe.config, method="cont_accum")
    assert 250_064 < largest_bank(probe, 64, 4, 2300) <= 255_000
    assert largest_bank(probe, 64, 4, 2301) > 1_000_000


def test_no_size_fits_below_the_smallest_peak():
    assert largest({2: 100.0, 4: 200.0}, [1, 2, 4], 10.0, curve) == (None, 0.0)
    assert largest({2: 100.0, 4: 200.0}, [64], 300.0, curve) == (None, 0.0)


DEMO = [
    "--config", "configs/study/demo.yaml", "--model.tiny_vocabulary", "300",
    "--batch.micro_batch_size", "4", "--replay.share", "1",
]  # fmt: skip


def test_plan_command_measures_and_writes_json(tmp_path, capsys, monkeypatch):
    # freed memory goes back, so the peak is a line in B
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    output = tmp_path / "plan.json"
    data = str(write_invented_set(tmp_path / "data"))
    extra = ["--methods", "cont_accum", "--memory", "4GB", "--output", str(output)]
    assert main(["plan", *DEMO, "--data.train", data, *extra]) == 0
    shown = capsys.readouterr().out
    assert "| cont_accum |" in shown
    made = json.loads(output.read_text())["methods"][0]
    assert made["micro_batch_size"] in (4, 8, 16, 32, 64, 128)
    assert 1e8 < made["peak"] <= 4e9
    assert abs(made["error"]) < 0.2
    assert made["largest_bank"] > 10_000


def test_a_micro_batch_with_blocks_below_32_mb_is_predicted_within_a_tenth(tmp_path):
    """The prediction is a line through the peaks of 4, 8 and 16 pairs; the size that it finds is
    then measured."""
    config = from_mapping(
        yaml.safe_load(Path("configs/study/demo.yaml").read_text())
        | {
            "method": "cont_accum",
            "output_dir": "not written to",
            "data": {"train": str(write_invented_set(tmp_path / "data"))},
            "batch": {"global_batch_size": 1024, "micro_batch_size": 16},
        }
    )
    found = measure_micro_batch(config, 800_000_000)
    assert found.size is not None
    assert 32 <= found.size <= 128
    assert abs(found.error) < 0.1


def test_on_a_gpu_the_first_measured_push_opens_a_block(tmp_path):
    """Opening a block needs memory.

    On a CPU no block is opened, because only time is measured there.
    """
    changes = {"bank.size": 600, "data.hard_negatives": 0, "batch.micro_batch_size": 4}
    probe = Probe(
        train_config(write_beir(tmp_path / "data"), tmp_path / "run", "cont_accum", **changes)
    )
    ids = RowIds(torch.arange(4).unsqueeze(1), torch.arange(4).unsqueeze(1))
    for device, opens in (("cpu", False), ("meta", True)):
        probe.engine.device = torch.device(device)
        bank = probe._full_bank(4, 600)
        assert bank.stored == 600
        vectors = torch.empty(4, probe.encoder.dim, device=device)
        opened = []
        bank.sums._open = lambda block, fill, opened=opened: opened.append(block)
        bank.push(vectors, vectors.unsqueeze(1), ids)
        assert opened == [0] * opens


def test_peak_is_measured_with_the_longest_query_and_the_longest_passage(tmp_path, monkeypatch):
    """They belong to different pairs here, and a micro-batch is padded to both."""
    data = write_beir(tmp_path / "data", queries=60)
    for name, rows, words in (
        ("queries", [7], "why " * 10),
        ("corpus", range(30, 60), "then " * 20),
    ):
        lines = [json.loads(line) for line in (data / f"{name}.jsonl").read_text().splitlines()]
        for row in rows:
            lines[row]["text"] += " " + words
        (data / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    changes = {"batch.global_batch_size": 4, "batch.micro_batch_size": 2, "data.hard_negatives": 0}
    # takes 20 s for a million strings
    monkeypatch.setattr("datasets.arrow_dataset.Column.__iter__", None)
    queries = Probe(train_config(data, tmp_path / "run", "cont_accum", **changes)).longest.queries[
        "text"
    ][:]
    assert len(queries) == 16
    assert sum("why why" in text for text in queries) == 1  # 30 pairs have more characters
    assert sum(int(text.split()[7]) >= 30 for text in queries) >= 8


def test_a_full_disk_ends_the_plan_in_one_sentence(tmp_path, capsys, monkeypatch):
    with small_disk(tmp_path / "disk") as disk:
        monkeypatch.setenv("CONTACCUM_CACHE", str(disk / "cache"))
        (disk / "filler").write_bytes(bytes((1 << 20) - (1 << 15)))
        data = ["--data.train", str(write_invented_set(tmp_path / "data"))]
        assert main(["plan", *DEMO, *data, "--methods", "grad_accum", "--memory", "4GB"]) == 2
    said = capsys.readouterr().err
    assert "No space left on device" in said.strip().splitlines()[-1]
    assert "Traceback" not in said

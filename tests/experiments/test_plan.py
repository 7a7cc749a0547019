"""`contaccum plan`: lines through synthetic and real peaks, and the command."""

import json
import math
from dataclasses import replace

import pytest
import torch
from helpers import train_config, write_beir
from invented_set import write_invented_set
from processes import small_disk

from contaccum.batch import RowIds
from contaccum.cli import main
from contaccum.config.experiments import PlanConfig
from contaccum.errors import InputError
from contaccum.experiments.measure import Measurement, Probe, memory_budget, predicted_peak
from contaccum.experiments.plan import render, run_plan

pytestmark = pytest.mark.usefixtures("forked_workers")


def test_prediction_lies_on_lines_through_the_measured_peaks():
    peaks = {2: 100.0, 4: 200.0, 8: 600.0, 16: math.inf}
    found = [predicted_peak(peaks, size) for size in (1, 2, 3, 6, 8, 32)]
    assert found == [50, 100, 150, 400, 600, 3000]
    assert predicted_peak({2: 200.0, 4: 100.0}, 8) == 100  # noise: more pairs never need less
    assert predicted_peak({2: 100.0, 4: math.inf}, 1) == math.inf


@pytest.fixture
def probe(tmp_path, monkeypatch):
    """Probe of `cont_accum` with N = 64 whose peaks grow faster than a line, and which has 2,300
    bytes. ``probe.measured`` lists the sizes that were measured."""
    changes = {"batch.global_batch_size": 64, "data.hard_negatives": 0, "bank.size": 64}
    made = Probe(
        train_config(write_beir(tmp_path / "data"), tmp_path / "run", "cont_accum", **changes)
    )
    made.engine.device = torch.device("cuda")
    monkeypatch.setattr(made, "full_bank", lambda config: None)
    monkeypatch.setattr(made, "context", lambda: 0)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: peak(made.measured[-1]))
    made.measured = []

    def peak(size: int) -> float:
        return 1000 + 20 * size + size**2

    def take_steps(config, train_set, bank, count):
        made.measured.append(config.batch.micro_batch_size)
        if peak(made.measured[-1]) > 2300:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(made, "take_steps", take_steps)
    return made


def test_the_largest_micro_batch_is_predicted_and_measured(probe):
    """The line through 1 and 2 pairs predicts that 64 fit: they and 32 run out of memory."""
    assert probe.largest_micro_batch(3000) == (16, 1000 + 20 * 16 + 16**2)
    assert probe.measured == [1, 2, 64, 32, 16]


def test_sizes_that_are_predicted_not_to_fit_are_not_measured(probe):
    assert probe.largest_micro_batch(1090) == (2, 1044)
    assert probe.measured == [1, 2, 4]
    assert probe.largest_micro_batch(1030) == (1, 1021)
    assert probe.largest_micro_batch(1000) == (None, None)


def test_a_small_batch_in_one_pass_is_measured_at_two_sizes(probe):
    """An eighth and a quarter of 4 pairs are both 1, and one point predicted that nothing fits."""
    batch = replace(probe.config.batch, global_batch_size=4, micro_batch_size="auto")
    probe.config = replace(probe.config, method="in_batch", batch=batch)
    assert probe.largest_micro_batch(3000) == (4, 1000 + 20 * 4 + 4**2)
    assert probe.measured == [1, 2, 4]


def test_no_method_is_measured_if_another_one_is_invalid(tmp_path, monkeypatch):
    """The measurements of the methods before it were lost."""
    monkeypatch.setattr("contaccum.experiments.plan.measure_method", None)  # a call would fail
    config = train_config(write_beir(tmp_path / "data"), tmp_path, "grad_cache", **{"bank.size": 2})
    with pytest.raises(InputError, match=r"bank\.size is 2, but .* can push"):
        run_plan(PlanConfig(methods="grad_cache,cont_cache"), config)


def test_a_size_divides_an_odd_number_of_pairs(probe):
    """Two pairs are measured and fit, but three, the next size, do not."""
    probe.config = replace(probe.config, batch=replace(probe.config.batch, global_batch_size=15))
    assert probe.largest_micro_batch(1050) == (1, 1021)


def test_in_batch_fits_only_as_a_whole(probe):
    probe.config = replace(probe.config, method="in_batch")
    assert probe.largest_micro_batch(10_000) == (None, None)
    assert probe.measured == [8, 16, 64]
    probe.config = replace(probe.config, batch=replace(probe.config.batch, global_batch_size=16))
    assert probe.largest_micro_batch(10_000) == (16, 1576)


def test_sizes_above_the_bank_are_not_measured(probe):
    probe.config = replace(probe.config, bank=replace(probe.config.bank, size=8))
    assert probe.largest_micro_batch(10_000) == (8, 1000 + 20 * 8 + 8**2)
    assert probe.measured == [1, 2, 8]
    # negative control: a method without a bank
    probe.config = replace(probe.config, method="grad_accum")
    assert probe.largest_micro_batch(10_000)[0] == 16


def test_a_device_without_memory_for_one_pair_is_named(probe, monkeypatch):
    monkeypatch.setattr(probe, "peak", lambda size: math.inf)
    with pytest.raises(InputError, match="a micro-batch of 1 pair does not fit"):
        probe.largest_micro_batch(1000)


def test_memory_on_a_cpu_is_at_most_what_is_free():
    free = memory_budget(None, "cpu")
    assert memory_budget("1GB", "cpu") == 1_000_000_000 < free
    assert memory_budget("100000GB", "cpu") == pytest.approx(free, rel=0.1)


DEMO = [
    "--config", "configs/study/demo.yaml", "--model.tiny_vocabulary", "300",
    "--batch.micro_batch_size", "4", "--replay.share", "1",
]  # fmt: skip


def measurement(size: int | None) -> Measurement:
    peak, step = (None, None) if size is None else (10**9, 0.5)
    return Measurement(
        micro_batch_size=size, peak=peak, step=step, context=0, pairs=64,
        query_length=64, passage_length=256,
    )  # fmt: skip


def test_the_plan_names_a_bank_only_for_methods_with_one(tmp_path):
    config = train_config("", tmp_path / "run")
    found = measurement(8)
    alone = render({"in_batch": found}, config, 4 * 10**9)
    assert "the largest B. Queries have at most 64 tokens, passages 256.\n" in alone
    both = render({"in_batch": found, "cont_accum": found}, config, 4 * 10**9)
    assert f"the largest B, with a bank of {config.bank_rows} rows. Queries" in both


def test_the_plan_says_what_to_lower_if_nothing_fits(tmp_path):
    config = train_config("", tmp_path / "run")
    none, fits = measurement(None), measurement(8)
    shown = render({"in_batch": none, "grad_cache": fits}, config, 4 * 10**9)
    assert "\nin_batch: no size fits. Lower model.max_passage_length" in shown
    assert "no size" not in render({"grad_cache": fits}, config, 4 * 10**9)


def test_a_plan_is_made_by_one_process(tmp_path, monkeypatch):
    place = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match="plan needs one process, but 2 were started"):
        run_plan(PlanConfig(), train_config("", tmp_path / "run"))


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
    assert made["step"] > 0


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
        bank = probe.full_bank(probe.sized(4, 2))
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


def test_few_long_pairs_get_random_negatives_from_the_other_passages(tmp_path):
    lines = [{"query": f"is it so {n} " + "long " * 20, "pos": ["yes"]} for n in range(20)]
    lines += [{"query": f"short {n}", "pos": [f"answer {n}"]} for n in range(20)]
    (tmp_path / "lines.jsonl").write_text("\n".join(map(json.dumps, lines)))
    changes = {"batch.global_batch_size": 4, "batch.micro_batch_size": 2, "data.hard_negatives": 14}
    probe = Probe(train_config(tmp_path / "lines.jsonl", tmp_path / "run", "grad_cache", **changes))
    assert len(probe.longest.queries) == 16
    with pytest.warns(UserWarning, match="random passages are added"):
        assert probe.peak(2) < math.inf


def test_a_full_disk_ends_the_plan_in_one_sentence(tmp_path, capsys, monkeypatch):
    with small_disk(tmp_path / "disk") as disk:
        monkeypatch.setenv("CONTACCUM_CACHE", str(disk / "cache"))
        (disk / "filler").write_bytes(bytes((1 << 20) - (1 << 15)))
        data = ["--data.train", str(write_invented_set(tmp_path / "data"))]
        assert main(["plan", *DEMO, *data, "--methods", "grad_accum", "--memory", "4GB"]) == 2
    said = capsys.readouterr().err
    assert "No space left on device" in said.strip().splitlines()[-1]
    assert "Traceback" not in said

"""Straight lines through made-up and real peaks, sizes of indexes against faiss's own files, and the verb."""

import json

import faiss
import numpy as np
import pytest

from contaccum.cli import main
from contaccum.config import TrainConfig
from contaccum.study.corpus_costs import index_costs, lists_for
from contaccum.study.measure import Measurement, Peak
from contaccum.study.plan import banks_to_measure, fit, make_plan, sizes_to_measure
from contaccum.study.units import duration, gigabytes

LINE = [Peak(2, 100, 1000 + 2 * 50 + 100 * 3), Peak(4, 100, 1000 + 4 * 50 + 300), Peak(8, 100, 1000 + 8 * 50 + 300)]


def measurement(peaks: list[Peak] = LINE) -> Measurement:
    return Measurement(peaks, per_micro_step=0.8, per_update=0.5, timed_size=8, passages_per_second=100.0,
                       seconds_per_comparison=1e-9, dim=64, pairs=1000)  # fmt: skip


def config(**changes) -> TrainConfig:
    made = TrainConfig(**{"method": "cont_accum", "output_dir": "run", **changes})
    made.data.train = "data"
    made.batch.global_batch_size, made.batch.micro_batch_size, made.bank.size = 128, 8, 100
    return made


def test_points_on_a_line_give_it_back():
    found = fit([*LINE, Peak(8, 300, 1000 + 8 * 50 + 900)])
    assert found.fixed == pytest.approx(1000)
    assert found.per_pair == pytest.approx(50)
    assert found.per_bank_row == pytest.approx(3)
    assert found.error == pytest.approx(0, abs=1e-12)
    assert found.peak(16, 200) == pytest.approx(1000 + 800 + 600)


def test_the_error_is_the_smaller_sizes_line_at_the_largest():
    bent = [Peak(2, 0, 100), Peak(4, 0, 200), Peak(8, 0, 500)]  # the line through the first two says 400
    assert fit(bent).error == pytest.approx(400 / 500 - 1)


def test_the_largest_divisor_within_the_budget():
    line = fit([*LINE, Peak(8, 300, 1000 + 8 * 50 + 900)])
    made = make_plan(config(), 1000 + 300 + 50 * 20, line, measurement())
    assert made.micro_batch_size == 16  # 20 would fit, but 128 is divided by 16 next
    assert made.peak == pytest.approx(1000 + 300 + 50 * 16)
    assert made.largest_bank == (1000 - 400 + 300) // 3
    assert made.step == pytest.approx(0.1 * 128 + 0.5)
    assert made.epoch == pytest.approx((0.1 * 128 + 0.5) * 1000 / 128)


def test_nothing_fits():
    assert make_plan(config(), 100, fit(LINE), measurement()).micro_batch_size is None
    assert make_plan(config(method="in_batch"), 1300 + 50 * 100, fit(LINE), measurement()).micro_batch_size is None
    assert make_plan(config(method="in_batch"), 1300 + 50 * 128, fit(LINE), measurement()).micro_batch_size == 128


def test_what_is_measured():
    assert sizes_to_measure(config()) == [2, 4, 8]
    assert sizes_to_measure(config(method="in_batch")) == [8, 16, 32]
    assert banks_to_measure(config(method="grad_accum")) == [0]
    first, second = banks_to_measure(config())
    assert first == 100
    assert second > 10_000


@pytest.mark.parametrize("place", [0, 1, pytest.param(2, marks=pytest.mark.acceptance), 3])  # 2 trains for minutes
def test_index_sizes_are_faiss_own(place):
    """The size of the file that faiss writes, within 2 %."""
    rows, dim = 4_000, 64
    cost = index_costs(rows, dim)[place]
    random = np.random.default_rng(0)
    vectors = random.standard_normal((rows, dim), dtype=np.float32)
    index = faiss.index_factory(dim, cost.factory, faiss.METRIC_INNER_PRODUCT)
    index.train(vectors)
    index.add(vectors)
    assert cost.bytes == pytest.approx(len(faiss.serialize_index(index)), rel=0.02)


def test_lists_are_a_power_of_two_near_four_roots():
    assert lists_for(1_000_000) == 2048
    assert lists_for(21_015_324) == 16_384


def test_times_and_sizes_for_the_eye():
    assert [duration(s) for s in (0.25, 59, 61, 3661, 90000)] == ["0.25 s", "59 s", "1 min 1 s", "1 h 1 min", "1 d 1 h"]
    assert gigabytes(1.5e9) == "1.50 GB"


DEMO = ["--config", "configs/demo.yaml", "--model.tiny_vocabulary", "300", "--batch.micro_batch_size", "4"]


def test_the_verb_measures_for_real(tmp_path, capsys):
    output = tmp_path / "plan.json"
    extra = ["--methods", "cont_accum", "--memory", "4GB", "--corpus_size", "1000000", "--output", str(output)]
    assert main(["plan", *DEMO, *extra]) == 0
    shown = capsys.readouterr().out
    assert "| cont_accum |" in shown
    assert "| IVF2048,Flat |" in shown
    made = json.loads(output.read_text())["methods"][0]
    assert made["micro_batch_size"] in (4, 8, 16, 32, 64, 128)
    assert 1e8 < made["peak"] <= 4e9
    assert abs(made["error"]) < 0.2
    assert made["largest_bank"] > 10_000


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--memory", "much"], "--memory is 'much', expected a number above 0"),
        (["--memory", "4GB", "--methods", "dpr"], "--methods names dpr"),
        (["--memory", "4GB", "--corpus_size", "0"], "--corpus_size is 0"),
        (["--memory", "4GB", "--methods", "grad_accum", "--data.train", "nowhere"], "nowhere"),
    ],
)
def test_bad_requests(options, words, capsys):
    assert main(["plan", *DEMO, *options]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert words in said[-1]

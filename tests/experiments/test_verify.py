"""`contaccum verify` passes on a correct model and exits with 1 if a method, the bank or a resume is broken."""

import pytest
import torch
from helpers import train_config, write_beir
from opened import open_train_set

from contaccum.cli import main
from contaccum.config import to_yaml
from contaccum.experiments import verify
from contaccum.methods import METHODS
from contaccum.runtime.engine import Engine
from contaccum.runtime.files import read_json

NAMES = [
    "grad_cache = in_batch",
    "passage_bank with bank.size 0 = grad_accum",
    "cont_accum with bank.size 0 = grad_accum",
    "cont_cache with bank.size 0 = grad_cache",
    "incremental log-sum-exp = log-sum-exp of the full matrix",
    "resumed = uninterrupted",
    "two processes = one",
]


@pytest.fixture
def config(tmp_path):
    """Config with dropout, hard negatives, and larger steps and bank than those checked."""
    data = write_beir(tmp_path / "data")
    changes = {"data.hard_negatives": 1, "model.dropout": 0.1, "bank.size": 64, "optim.max_steps": 100}
    return train_config(data, tmp_path / "run", **changes)


def call(config, tmp_path, capsys) -> tuple[int, dict[str, list[str]], str]:
    """Return exit code, the table's rows by name, and stderr."""
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    code = main(["verify", "--config", str(tmp_path / "config.yaml")])
    out, err = capsys.readouterr()
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in out.splitlines()[2:]]
    return code, {row[0]: row[1:] for row in rows}, err


@pytest.mark.acceptance
def test_correct_model_passes(config, tmp_path, capsys):
    code, rows, err = call(config, tmp_path, capsys)
    assert code == 0, err
    assert list(rows) == NAMES
    for name, (difference, tolerance, verdict, _) in rows.items():
        assert verdict == "holds", name
        assert 0 <= float(difference) <= float(tolerance)
    assert [rows[name][0] for name in NAMES[1:4]] == ["0.0e+00"] * 3
    assert "the weight files are identical" in rows["resumed = uninterrupted"][3]
    assert "gloo on the CPU, without dropout" in rows["two processes = one"][3]
    assert not (tmp_path / "run").exists()


def test_correct_model_passes_in_one_process(config, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        verify, "_processes", lambda *_: verify.Equivalence("two processes = one", None, 0.0, "skipped")
    )
    code, rows, err = call(config, tmp_path, capsys)
    assert code == 0, err
    assert [row[2] for row in rows.values()] == ["holds"] * 6 + ["not checked"]


def bench_of(config, engine) -> verify.Bench:
    return verify.Bench(verify.small_config(config), engine)


@pytest.fixture
def bench(config):
    return bench_of(config, Engine(device="cpu"))


def test_broken_method_or_resume_fails_with_exit_code_1(config, tmp_path, capsys, monkeypatch):
    """Replace grad_cache by grad_accum and make resume ignore the bank; the slow check is skipped."""
    monkeypatch.setitem(METHODS, "grad_cache", METHODS["grad_accum"])
    monkeypatch.setattr("contaccum.methods.bank.Bank.load_state", lambda *_: None)
    monkeypatch.setattr(
        verify, "_processes", lambda *_: verify.Equivalence("two processes = one", None, 0.0, "skipped")
    )
    code, rows, err = call(config, tmp_path, capsys)
    assert code == 1
    failed = [name for name, row in rows.items() if row[2] == "FAILS"]
    assert failed == [NAMES[0], NAMES[3], NAMES[5]]
    assert f"3 of 7 equivalences do not hold: {'; '.join(failed)}" in err
    assert rows[NAMES[6]][2] == "not checked"


def test_empty_bank_that_changes_gradients_fails(bench, monkeypatch):
    cont_accum = METHODS["cont_accum"]

    def broken(engine, micro_batches, bank, loss):
        return cont_accum(engine, [*micro_batches, micro_batches[0]], bank, loss)

    monkeypatch.setitem(METHODS, "cont_accum", broken)
    assert [result.holds for result in verify._equal_methods(bench)][1:] == [True, False, True]


@pytest.mark.parametrize(("mask", "widths"), [(True, []), (False, []), (True, [8])])
def test_cached_logsumexp_that_misses_an_overwritten_row_fails(config, mask, widths, monkeypatch):
    config.loss.mask_false_negatives, config.loss.matryoshka_dims = mask, widths
    bench = bench_of(config, Engine(device="cpu"))
    good = verify._cached_logsumexp(bench)
    assert good.holds
    assert good.difference > 0
    push = verify.Bank.push

    def broken(self, *rows):
        push(self, *rows)
        if not widths or self.dim in widths:
            self.passages[0] = torch.roll(self.passages[1], 1)

    monkeypatch.setattr(verify.Bank, "push", broken)
    assert not verify._cached_logsumexp(bench).holds


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["v", "w"])
@pytest.mark.parametrize("sides", [(0,), (1,), (0, 1)])
def test_gradients_that_are_not_finite_are_not_equal(value, name, sides):
    pair = [{"v": torch.ones(2), "w": torch.ones(2)} for _ in range(2)]
    assert verify.largest_difference(*([each] for each in pair)) == 0
    for side in sides:
        pair[side][name][1] = value
    assert verify.largest_difference(*([each] for each in pair)) == float("inf")


def test_zero_or_missing_gradients_are_not_equal():
    one = {"w": torch.ones(2)}
    assert verify.largest_difference([one], [{"v": torch.ones(2)}]) == float("inf")
    assert verify.largest_difference([{"w": torch.zeros(2)}], [{"w": torch.zeros(2)}]) == float("inf")


@pytest.mark.acceptance
def test_processes_with_other_gradients_fail(config, tmp_path, monkeypatch):
    """Negative control: the second call computes another method's gradients."""
    small = verify.replace(verify.small_config(config), method="cont_accum")
    launch, worlds = verify._launch, []

    def other(world, job, output):
        worlds.append(world)
        job.write_text(
            job.read_text().replace('"cont_accum"', '"passage_bank"') if len(worlds) == 2 else job.read_text()
        )
        return launch(1, job, output)

    monkeypatch.setattr(verify, "_launch", other)
    assert not verify._processes(small, tmp_path).holds
    assert worlds == [1, 2]


def test_two_processes_compute_in_fp32_if_the_cpu_has_no_fp16(config, tmp_path, monkeypatch):
    """With one GPU, both processes use the CPU. In fp16 they ended with an error, and the check failed."""
    config.run.precision, config.run.device = "fp16", "auto"

    def launch(world, job, output):
        run = read_json(job)["run"]
        Engine(device=run["device"], precision=run["precision"]).close()
        return [{"w": torch.ones(1)}]

    monkeypatch.setattr(verify, "_launch", launch)
    found = verify._processes(verify.small_config(config), tmp_path)
    assert found.holds
    assert "gloo on the CPU in fp32" in found.note


def test_skipped_check_is_reported_as_not_checked(config):
    config.bank.keep = False
    result = verify._cached_logsumexp(bench_of(config, Engine(device="cpu")))
    assert (result.verdict, result.difference) == ("not checked", None)


def test_small_config_keeps_the_users_settings(config):
    small = verify.small_config(config)
    assert small.model == config.model
    assert small.loss == config.loss
    assert small.data.hard_negatives == 1
    assert (small.batch.global_batch_size, small.batch.micro_batch_size, small.bank.size) == (16, 4, 40)
    assert len(open_train_set(config.data.train).queries) == 40

"""W processes with B pairs equal one process with W·B pairs, for every method, and end together
(gloo on the CPU)."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gradient_worker import LONELY, REPLAYED
from helpers import train_config, weights, write_beir
from processes import Job, python, run_jobs
from safetensors.torch import load_file

from contaccum.batch import RowIds
from contaccum.config import METHOD_SPECS, to_yaml
from contaccum.errors import InputError
from contaccum.methods.bank import Bank
from contaccum.methods.loss import InfoNCE
from contaccum.runtime.files import read_json
from contaccum.training.log import read_log
from contaccum.training.loop import train

HERE = Path(__file__).parent.parent
WORLDS = (1, 2, 4)
RUN = {
    "model.dropout": 0.0,
    "optim.max_steps": None,
    "optim.epochs": 2.3,
    "run.save_steps": 3,
}
"""41 queries in steps of 16: epochs end inside steps, and the last step goes beyond the last
epoch's end."""


class Runs:
    """Training runs on the same data: their jobs, and their folders by name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.data = write_beir(folder / "data", queries=41)
        # The last passage has the words of the first one, and for small vocabularies its number is
        # an unknown word. Texts with equal tokens would have a rank that depends on rounding.
        corpus = self.data / "corpus.jsonl"
        corpus.write_text(corpus.read_text().replace("valley 40", "red valley 40"))
        self.jobs: dict[str, Job] = {}

    def add(
        self, name: str, processes: int, *more: str, run: str = "", data: Path | None = None, **rest
    ) -> None:
        """Add a job; names with a dot are settings, the others are arguments of Job. run: name of
        the run's folder."""
        data = data or self.data
        settings = {key: rest.pop(key) for key in list(rest) if "." in key or key == "method"}
        changes = {
            "data.dev": str(data),
            "batch.micro_batch_size": 4 // processes,
            **RUN,
            **settings,
        }
        file = self.folder / f"{name}.yaml"
        file.write_text(to_yaml(train_config(data, self[run or name], **changes)))
        self.jobs[name] = Job(["train", "--config", str(file), *more], processes, **rest)

    def __getitem__(self, name: str) -> Path:
        return self.folder / name

    def lines(self, name: str) -> list[dict]:
        return [line for line in read_log(self[name]) if "loss" in line]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    runs = Runs(tmp_path_factory.mktemp("runs"))
    for world in WORLDS:
        reference = [] if world == 1 else [str(runs["steps1.0.safetensors"])]
        call = [str(runs.data), str(runs[f"steps{world}"]), *reference]
        runs.jobs[f"steps of {world}"] = Job(call, world, worker="gradient_worker")
        runs.add(f"of {world}", world, fault="counts_gradient_messages")
    for world in WORLDS[:2]:
        call = [str(runs.data), str(runs[f"dev{world}"])]
        runs.jobs[f"dev of {world}"] = Job(call, world, worker="dev_evaluation_worker")
    call = [str(runs.data), str(runs["ends"])]
    runs.jobs["ends"] = Job(call, 2, worker="last_step_worker")
    runs.add("machines", 4, machines=2, fault="tells_what_it_builds")
    runs.add("killed", 2, fault="is_killed")
    runs.add("killed alone", 1, fault="is_killed")
    runs.add("raises", 2, fault="raises")
    runs.add("unevaluated", 2, fault="cannot_evaluate")
    runs.add("full", 2, fault="has_a_full_disk")
    runs.add("memory", 2, fault="runs_out_of_memory")
    runs.add("stuck", 2, fault="is_stuck", grace=0, **{"run.timeout_minutes": 0.2})
    runs.add("flipped", 2, fault="flips_a_bit_of_its_bank", **{"run.save_steps": 2})
    runs.add("refused", 1, "--resume", run="stuck", **{"batch.micro_batch_size": 2})
    runs.add("blind", 2, "--resume", run="stuck", fault="sees_no_checkpoint")
    runs.add("wrong", 2, **{"data.split": "absent"})
    runs.add("2 to 2", 2, "--resume", run="killed")
    more = ("--resume", "--allow_changes", "true")
    runs.add("2 to 1", 1, *more, run="raises")
    runs.add("2 to 4", 4, *more, run="full")
    runs.add("1 to 2", 2, *more, run="killed alone")
    runs.add("other rows", 1, *more, run="stuck", **{"batch.micro_batch_size": 2})
    runs.outcomes = run_jobs(runs.jobs, runs["jobs"])
    return runs


@pytest.fixture(scope="module")
def steps(runs):
    """Tensors saved by each process of the workers with one, two and four processes."""
    for world in WORLDS:
        runs.outcomes[f"steps of {world}"].check()
    return {
        world: [load_file(runs[f"steps{world}.{rank}.safetensors"]) for rank in range(world)]
        for world in WORLDS
    }


def difference(one: dict, other: dict, method: str, step: int) -> float:
    """Return the largest difference of a step's gradients, relative to the largest gradient."""
    names = [name for name in one if name.startswith(f"{method}/{step}/gradient/")]
    assert len(names) > 20
    scale = max(one[name].abs().max() for name in names)
    return float(max((one[name] - other[name]).abs().max() / scale for name in names))


@pytest.mark.parametrize("world", WORLDS[1:])
@pytest.mark.parametrize("method", [*METHOD_SPECS, *REPLAYED])
def test_gradients_of_several_processes_equal_one(method, world, steps):
    one = steps[1][0]
    for step in range(3):
        name = f"{method}/{step}"
        for found in steps[world]:
            assert difference(one, found, method, step) < 1e-5
            torch.testing.assert_close(
                found[f"{name}/loss"], one[f"{name}/loss"], rtol=1e-6, atol=1e-6
            )
            assert found[f"{name}/masked"] == one[f"{name}/masked"]
    assert one[f"{method}/0/masked"] > 0


@pytest.mark.parametrize("world", WORLDS[1:])
@pytest.mark.parametrize("method", ["in_batch", "cont_accum"])
def test_processes_without_gather_give_other_gradients(method, world, steps):
    """Negative control."""
    for step in range(3):
        assert difference(steps[1][0], steps[world][0], f"{LONELY}/{method}", step) > 0.1


@pytest.mark.parametrize("world", WORLDS[1:])
@pytest.mark.parametrize("method", list(METHOD_SPECS))
def test_bank_of_every_process_equals_that_of_one(method, world, steps):
    one, (first, *others) = steps[1][0], steps[world]
    names = [name for name in one if name.startswith(f"{method}/bank/")]
    assert names
    for name in names:
        for other in others:
            assert torch.equal(first[name], other[name]), name
        if not name.endswith("/sums"):  # computed in another order
            torch.testing.assert_close(first[name], one[name], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("world", WORLDS[1:])
def test_search_handles_uneven_passage_counts(world, steps):
    for count in range(1, 6):
        for found in steps[world]:
            torch.testing.assert_close(
                found[f"passages/{count}"], steps[1][0][f"passages/{count}"], rtol=1e-5, atol=1e-6
            )


@pytest.mark.parametrize(
    ("whole", "name"), [("of 1", "of 2"), ("of 1", "of 4"), ("of 1", "machines")]
)
def test_metrics_of_several_processes_equal_one(whole, name, runs):
    one, several = runs.lines(whole), runs.lines(name)
    assert len(one) == len(several) == 6
    for left, right in zip(one, several, strict=True):
        for key in ("loss", "query_grad_norm", "passage_grad_norm"):
            assert right[key] == pytest.approx(left[key], rel=1e-4)
        assert (right["bank_fill"], right["masked"]) == (left["bank_fill"], left["masked"])
    left, right = (read_json(runs[run] / "dev_metrics.json") for run in (whole, name))
    assert right["mean"] == pytest.approx(left["mean"], abs=1e-6)


def test_the_largest_number_of_steps_of_all_processes_counts(runs):
    runs.outcomes["ends"].check()
    assert [read_json(runs[f"ends.{rank}.json"]) for rank in (0, 1)] == 2 * [[6, 6, 4, 4]]


@pytest.mark.parametrize("world", WORLDS)
def test_sums_in_several_messages_equal_sums_of_gathered_tensors(world, steps):
    for found in steps[world]:
        sums, right, own = (
            [found[f"{name}/{number}"] for number in range(8)] for name in ("sum", "right", "own")
        )
        assert all(map(torch.equal, sums, right))
        assert all(map(torch.equal, sums, own)) == (world == 1)


@pytest.mark.parametrize("world", WORLDS)
def test_gradients_of_a_step_travel_in_one_message(world, runs):
    """None for one process."""
    for text in runs.outcomes[f"of {world}"].check().err:
        found = re.findall(r"^messages: (\d+), gradients: (\d+)$", text, re.MULTILINE)
        assert [int(messages) for messages, _ in found] == [int(world > 1)] * 6
        assert min(int(gradients) for _, gradients in found) > 15


def test_notes_of_all_processes_are_printed_once(runs):
    said = "".join(runs.outcomes["2 to 4"].check().err)
    assert said.count("the settings of this run changed (allowed)") <= 1
    assert said.count("the conditions of training changed (allowed): world was 2 and is 4") == 1
    assert said.count("resuming at step") == 1


def test_dev_evaluation_shares_the_corpus_and_gives_every_process_the_metrics_of_one(runs):
    for world in WORLDS[:2]:
        runs.outcomes[f"dev of {world}"].check()
    one, first, second = (read_json(runs[f"dev{name}.json"]) for name in ("1.0", "2.0", "2.1"))
    assert first["mean"] == second["mean"] == one["mean"]
    assert first["best"] == second["best"] == one["best"]
    assert one["encoded"] == first["encoded"] + second["encoded"] == 41
    assert min(first["encoded"], second["encoded"]) >= 16  # about half each


SOUND = [
    "of 1", "of 2", "of 4", "machines", "2 to 2", "2 to 1", "2 to 4", "1 to 2",
    "other rows",
]  # fmt: skip


@pytest.mark.parametrize("name", SOUND)
def test_only_the_main_process_prints_the_model(name, runs):
    outcome = runs.outcomes[name].check()
    assert outcome.out[0].endswith("/model\n")
    assert not any(outcome.out[1:])


def test_each_machine_fills_its_cache_once(runs):
    """The other processes of a machine reuse the cache entries of the first."""
    caches = [runs["jobs"] / f"cache-{place}" for place in ("1-0", "2-0", "2-1")]
    entries = [
        sorted(str(path.relative_to(cache)) for path in cache.glob("[!l]*/*")) for cache in caches
    ]
    assert len(entries[1]) == 3  # the corpus, query tokens and passage tokens, without locks
    assert entries[1] == entries[2]
    assert set(entries[1]) <= set(entries[0])
    assert [text.count("builds ") for text in runs.outcomes["machines"].err] == [3, 0, 3, 0]


# resuming


def test_killed_run_resumes_byte_identical(runs):
    assert runs.outcomes["killed"].codes[1] == -signal.SIGKILL
    assert weights(runs["killed"]) == weights(runs["of 2"])


@pytest.mark.parametrize(
    ("name", "whole"), [("raises", "of 2"), ("full", "of 2"), ("killed alone", "of 1")]
)
def test_run_resumes_with_another_number_of_processes(name, whole, runs):
    """The run equals the uninterrupted one up to rounding."""
    for left, right in zip(runs.lines(whole), runs.lines(name), strict=True):
        assert right["loss"] == pytest.approx(left["loss"], rel=1e-4)
        assert right["bank_fill"] == left["bank_fill"]
    tensors = [
        load_file(runs[run] / "model/query_encoder/model.safetensors") for run in (name, whole)
    ]
    for key in tensors[0]:
        torch.testing.assert_close(tensors[0][key], tensors[1][key], atol=1e-4, rtol=0)
    metrics = [read_json(runs[run] / "dev_metrics.json")["mean"] for run in (name, whole)]
    assert metrics[0] == pytest.approx(metrics[1], abs=1e-6)


def test_other_rows_per_loss_give_another_result(runs):
    """Negative control: with another B x W the losses differ from the first step after the
    resume."""
    pairs = list(zip(runs.lines("of 2"), runs.lines("stuck"), strict=True))
    assert all(right["loss"] == pytest.approx(left["loss"], rel=1e-4) for left, right in pairs[:3])
    assert all(right["loss"] != pytest.approx(left["loss"], rel=1e-3) for left, right in pairs[3:])


def test_another_number_of_processes_needs_allow_changes(runs):
    outcome = runs.outcomes["refused"]
    assert outcome.codes == [2]
    assert (
        "world was 2 and is 1. Undo these changes, or allow them with --allow_changes true."
        in outcome.err[0]
    )


def test_bank_loaded_with_another_push_size_has_the_same_sums():
    torch.manual_seed(0)

    def rows(count: int, first: int) -> tuple:
        numbers = torch.arange(first, first + count).unsqueeze(1)
        return torch.randn(count, 8), torch.randn(count, 1, 8), RowIds(numbers, numbers)

    old, new = (Bank(24, 8, InfoNCE(0.1).similarity, push=push) for push in (4, 2))
    for number in range(8):  # one and a third turns of the ring
        old.push(*rows(4, 4 * number))
    new.load_state(*old.state())
    assert new.sums.table.shape != old.sums.table.shape
    torch.testing.assert_close(new.logsumexp(), old.logsumexp())
    more = rows(4, 40)
    old.push(*more)
    assert not torch.allclose(new.logsumexp(), old.logsumexp())
    new.push(*more)
    torch.testing.assert_close(new.logsumexp(), old.logsumexp())


# ending


def test_bank_that_differs_between_processes_stops_the_run(runs):
    outcome = runs.outcomes["flipped"]
    assert outcome.codes == [1, 1]
    said = "".join(outcome.err)  # once, although every process stops with this error
    assert (
        said.count(
            "step 4: the bank is not the same in all processes (different from rank 0: rank 1)"
        )
        == 1
    )
    assert "the last good state is" in said


def test_machines_without_shared_output_folder_are_refused(runs):
    outcome = runs.outcomes["blind"]
    assert outcome.codes == [2, 2]
    said = "".join(outcome.err)
    assert (
        said.count("checkpoint is not the same in all processes (different from rank 0: rank 1)")
        == 1
    )


def test_same_error_in_all_processes_is_printed_once(runs):
    outcome = runs.outcomes["wrong"]
    assert outcome.codes[0] == 2
    assert outcome.codes[1] not in (0, None)
    assert "".join(outcome.err).count("split 'absent' not found") == 1


@pytest.mark.parametrize(
    ("name", "spoiled", "code", "words"),
    [
        ("raises", 1, 1, "ZeroDivisionError: a fault of process 1 alone"),
        ("unevaluated", 1, 1, "ZeroDivisionError: a fault in the evaluation of process 1 alone"),
        ("killed", 1, -signal.SIGKILL, ""),
        ("full", 0, 2, "cannot be written"),
        ("memory", 1, 2, "out of memory in one of several processes; the step cannot be retried"),
    ],
)
def test_other_processes_end_when_one_ends(name, spoiled, code, words, runs):
    outcome = runs.outcomes[name]
    assert outcome.codes[spoiled] == code
    assert outcome.codes[1 - spoiled] not in (0, None)
    assert words in outcome.err[spoiled]


def test_stuck_process_ends_the_run_after_the_timeout(runs):
    outcome = runs.outcomes["stuck"]
    assert outcome.codes == [1, None]
    assert "timed out" in outcome.err[0].lower()


# launchers

SPOILED = """
import os, signal, sys
sys.path.insert(0, {tests!r})
import processes
rank = int(os.environ["RANK"])
processes.raises(rank)
if rank == 0:
    # torchrun compares times of whole seconds: process 0 must not fail within the same second.
    processes.before_step(signal.pause)
from contaccum.cli import main
sys.exit(main())
"""


def test_torchrun_reports_the_traceback_of_the_first_failure(tmp_path):
    runs = Runs(tmp_path)
    runs.add("run", 2)
    script = tmp_path / "spoiled.py"
    script.write_text(SPOILED.format(tests=str(HERE)))
    call = [
        "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script),
        *runs.jobs["run"].call,
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent)}
    done = subprocess.run(
        [python(), *call], env=environment, capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == 1
    report = done.stderr[done.stderr.index("Root Cause") :]
    assert "rank      : 1" in report
    assert "ZeroDivisionError: a fault of process 1 alone" in report


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}, "ACCELERATE_USE_FSDP to true"),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "ACCELERATE_USE_DEEPSPEED to true"),
    ],
)
def test_unsupported_launchers_are_refused(environment, words, tmp_path, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    data = write_beir(tmp_path / "data")
    with pytest.raises(InputError, match=words):
        train(train_config(data, tmp_path / "run"))
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is seen: auto means it")
@pytest.mark.acceptance
def test_cpu_processes_use_gloo_by_default(tmp_path):
    """With `run.device auto` on a CPU, the processes train together."""
    script = tmp_path / "place.py"
    script.write_text(
        "import os, pathlib\nfrom contaccum.runtime.engine import Engine\nengine = Engine()\n"
        "found = f'{engine.rank} of {engine.world} {engine.is_main}'\n"
        "pathlib.Path(__file__).with_name(os.environ['RANK']).write_text(found)\nengine.close()\n"
    )
    call = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
        str(script),
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent)}
    done = subprocess.run(call, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["0 of 2 True", "1 of 2 False"]

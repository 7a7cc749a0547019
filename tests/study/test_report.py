"""The tables' figures from logs written by hand."""

import json
import re
from pathlib import Path

import pytest
from helpers import train_config

from contaccum.config import to_yaml
from contaccum.errors import InputError
from contaccum.study.plots import curves, draw_all
from contaccum.study.report import console_report, runs_table
from contaccum.study.runs import group_runs, read_run
from contaccum.study.tables import best_of_method, differences, equal_memory, equal_time, quality, score_at


def folder(
    path: Path, method: str, seconds: list[float], score: float = 0.25, evaluations=None, every=1, **changes
) -> Path:
    """A run of len(seconds) logged steps, ``every`` steps apart, with dev scores by step."""
    path.mkdir()
    (path / "config.yaml").write_text(to_yaml(train_config(Path("data"), path, method, **changes)))
    per_query = {f"q{i}": {"ndcg@10": score + (0.1 if i % 2 else -0.1) * (i % 3)} for i in range(12)}
    mean = {"ndcg@10": sum(values["ndcg@10"] for values in per_query.values()) / 12, "recall@100": 0.5}
    (path / "metrics.json").write_text(json.dumps({"mean": mean, "per_query": per_query}))
    lines = []
    for n, value in enumerate(seconds):
        step = (n + 1) * every
        lines.append(
            {
                "step": step, "loss": 1.0 + n, "bank_fill": 4 * n, "seconds": value, "waited": 0.75 if n else 9.0,
                "pairs_per_second": 16 / value, "negatives": 7.0, "peak_memory": 2**20 * (n + 1),
                "grad_norm_ratio": None if n == 1 else 2.0 + n,
            }
        )  # fmt: skip
        if evaluations and step in evaluations:
            lines.append({"step": step, "dev": {"ndcg@10": evaluations[step]}})
    (path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def cells(markdown: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in markdown.splitlines()]


def test_medians_leave_out_the_first_step(tmp_path):
    run = read_run(folder(tmp_path / "run", "cont_accum", [9.0, 2.0, 4.0, 1.0], evaluations={1: 0.2}))
    row = runs_table([run], "ndcg@10").rows[0]
    assert row == ["run", "cont_accum", "16", "4", "12", "0.2500", "2.000", "8.0", "4", "32.1", "4.50", "7.0"]
    assert run.train_seconds == 16.0
    assert run.peak_memory == 4 * 2**20
    assert run.waited == 3 * 0.75 / 7.0


def test_a_token_budget_is_shown_as_one(tmp_path):
    changes = {"batch.micro_batch_tokens": 2560}
    for name, method, shown in (("a", "grad_cache", "2560 tokens"), ("b", "in_batch", "16")):
        run = read_run(folder(tmp_path / name, method, [1.0], **changes))
        assert runs_table([run], "ndcg@10").rows[0][3] == shown


def test_a_method_that_takes_its_step_whole_shows_it(tmp_path):
    run = read_run(folder(tmp_path / "run", "in_batch", [1.0]))
    assert runs_table([run], "recall@100").rows[0][3] == "16"


def test_a_line_of_the_log_stands_for_the_steps_since_the_one_before(tmp_path):
    run = read_run(folder(tmp_path / "run", "grad_accum", [1.0, 2.0], every=5))
    assert run.times == {5: 5.0, 10: 15.0}


def test_runs_without_training_or_metrics_have_blanks(tmp_path):
    trained = folder(tmp_path / "a", "grad_cache", [1.0, 1.0])
    (trained / "metrics.json").unlink()
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "metrics.json").write_text(json.dumps({"mean": {"top20": 0.75}}))
    table = console_report([str(trained), str(tmp_path / "b")], "top20", None, None)
    lines = cells(table)
    assert lines[0][5] == "top20"
    assert lines[2][5] == "-"
    assert lines[3] == ["b", "-", "-", "-", "-", "0.7500", "-", "-", "-", "-", "-", "-"]
    assert len({len(line) for line in table.splitlines()}) == 1


def study(tmp_path: Path):
    """Two seeds of grad_cache and of cont_accum with two bank sizes; the smaller bank is quicker and scores less."""
    for seed in (0, 1):
        folder(tmp_path / f"g{seed}", "grad_cache", [3.0] * 4, 0.50 + 0.02 * seed, {2: 0.3, 4: 0.5}, seed=seed)
        for size, score in ((16, 0.40), (24, 0.60)):
            changes = {"seed": seed, "bank.size": size}
            evaluations = {1: 0.1, 2: 0.2 + seed / 10, 4: 0.6}
            folder(
                tmp_path / f"c{size}-{seed}", "cont_accum", [size / 8] * 4, score + 0.01 * seed, evaluations, **changes
            )
    return [read_run(path) for path in sorted(tmp_path.iterdir())]


def test_runs_that_differ_in_the_seed_are_one_group(tmp_path):
    groups = group_runs(study(tmp_path))
    assert [(group.label, len(group.runs)) for group in groups] == [
        ("cont_accum size=16", 2), ("cont_accum size=24", 2), ("grad_cache", 2),
    ]  # fmt: skip
    again = group_runs([*groups[2].runs, groups[2].runs[0]])  # a seed twice is no second seed
    assert [len(group.runs) for group in again] == [2, 1]


def test_mean_deviation_and_the_reference_by_hand(tmp_path):
    """Standard deviations of two values are their difference over the square root of 2."""
    groups = group_runs(study(tmp_path))
    rows = quality(groups, "ndcg@10").rows
    assert [row[:5] for row in rows] == [
        ["cont_accum size=24", "0.6050", "0.0071", "2", "12.0"],
        ["grad_cache", "0.5100", "0.0141", "2", "12.0"],
        ["cont_accum size=16", "0.4050", "0.0071", "2", "8.0"],
    ]
    found = differences(groups, "ndcg@10", best_of_method("cont_accum", "ndcg@10"))
    assert {one.reference.label for one in found} == {"cont_accum size=24"}  # the best of the method's settings
    assert [round(one.found.difference, 4) for one in found] == [-0.2, -0.095]
    assert all(one.permutation >= one.found.p_permutation for one in found)
    assert found[0].permutation == pytest.approx(min(1.0, 2 * found[0].found.p_permutation))


def test_equal_time_takes_the_last_evaluation_before_the_quickest_ends(tmp_path):
    """The quickest setting takes 8 s. At 3 s a step the others have ended step 2, whose scores are 0.3, and 0.2 and 0.3."""
    runs = study(tmp_path)
    seconds, table = equal_time(group_runs(runs), "ndcg@10")
    assert seconds == 8.0
    assert table.rows == [
        ["cont_accum size=16", "0.6000", "0.0000", "2", "4", "8.0"],
        ["grad_cache", "0.3000", "0.0000", "2", "2", "12.0"],
        ["cont_accum size=24", "0.2500", "0.0707", "2", "2", "12.0"],
    ]
    assert score_at(runs[0], 1.9, "ndcg@10") is None
    assert score_at(runs[0], 2.0, "ndcg@10") == (1, 0.1)


def test_equal_memory_by_hand(tmp_path):
    """Peaks of 100, 104 and 106 MiB: the first two are within 5 % of 100."""
    for name, method, peak, score in (
        ("a", "in_batch", 106, 0.9),
        ("b", "grad_accum", 100, 0.3),
        ("c", "grad_cache", 104, 0.4),
    ):
        run = folder(tmp_path / name, method, [1.0], score)
        line = json.loads((run / "log.jsonl").read_text())
        (run / "log.jsonl").write_text(json.dumps({**line, "peak_memory": peak * 2**20}) + "\n")
    rows = equal_memory(group_runs([read_run(tmp_path / name) for name in "abc"]), "ndcg@10").rows
    assert [row[:4] for row in rows] == [
        ["100 to 105", "grad_cache", "16", "104"], ["100 to 105", "grad_accum", "16", "100"],
        ["106 to 111", "in_batch", "16", "106"],
    ]  # fmt: skip


def test_methods_of_another_step_size_have_a_reference_of_their_own(tmp_path):
    for name, method, size, score in (("a", "grad_cache", 16, 0.5), ("b", "grad_accum", 16, 0.4), ("c", "grad_cache", 32, 0.8),
                                      ("d", "grad_accum", 32, 0.3)):  # fmt: skip
        folder(tmp_path / name, method, [1.0], score, **{"batch.global_batch_size": size})
    groups = group_runs([read_run(tmp_path / name) for name in "abcd"])
    found = differences(groups, "ndcg@10", best_of_method("grad_cache", "ndcg@10"))
    assert [(one.group.runs[0].name, one.reference.runs[0].name) for one in found] == [("b", "a"), ("d", "c")]


def test_long_curves_are_averaged_over_neighbours(tmp_path):
    groups = group_runs([read_run(folder(tmp_path / "run", "grad_accum", [1.0] * 700))])
    steps, mean, low, high = curves(groups[0], "loss")
    assert (steps[0], mean[0]) == (2, 2)  # steps 1, 2, 3 have losses 1, 2, 3
    assert len(steps) == 234
    assert low == mean == high
    assert {plot.name for plot in draw_all(groups, "ndcg@10")} == {"metric-time", "metric-memory", "loss", "grad-ratio"}


def test_the_page_without_matplotlib_says_what_to_install(tmp_path, monkeypatch):
    run = folder(tmp_path / "run", "grad_accum", [1.0])
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(InputError, match=r"pip install 'contaccum\[study\]'"):
        console_report([str(run)], "ndcg@10", None, str(tmp_path / "page.html"))
    assert not (tmp_path / "page.html").exists()
    assert "grad_accum" in console_report([str(run)], "ndcg@10", None, None)


def test_refusals(tmp_path):
    with pytest.raises(InputError, match="holds neither"):
        read_run(tmp_path)
    run = folder(tmp_path / "run", "cont_accum", [1.0])
    with pytest.raises(InputError, match=r"has no metric 'top20', expected one of ndcg@10, recall@100"):
        console_report([str(run)], "top20", None, None)
    file = run / "metrics.json"
    with pytest.raises(InputError, match=rf"^{re.escape(str(file))}: has no metric 'ndcg@7', expected one of ndcg@10"):
        console_report([str(file)], "ndcg@7", None, None)


LINE = {"step": 1, "loss": 1.0, "bank_fill": 0, "seconds": 1.0, "waited": 0.0, "peak_memory": 1}


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("metrics.json", "[1]", "holds no means"),
        ("metrics.json", "{}", "holds no means"),
        ("metrics.json", '{"mean": {"ndcg@10": "high"}}', "holds no means"),
        ("metrics.json", '{"mean": {"ndcg@10": NaN}}', "holds no means"),
        ("metrics.json", '{"mean": {"ndcg@10": 1}, "per_query": [1]}', "per_query is no mapping"),
        ("metrics.json", '{"mean": {"ndcg@10": 1}, "per_query": {"q": 5}}', "values of query 'q'"),
        ("metrics.json", '{"mean"', "line 1"),
        ("log.jsonl", {**LINE, "seconds": "long"}, "the line of step 1 has seconds 'long'"),
        ("log.jsonl", {**LINE, "seconds": 0}, "the line of step 1 has seconds 0"),
        ("log.jsonl", {"step": 1, "loss": 1.0}, "the line of step 1 has seconds None"),
        ("log.jsonl", {**LINE, "negatives": [7]}, r"has negatives \[7\]"),
        ("log.jsonl", {**LINE, "drift": [{"age": 1}]}, "has drift"),
        ("log.jsonl", {**LINE, "drift": 5}, "has drift 5"),
        ("log.jsonl", {**LINE, "drift": [{"age": 1, "query": None, "passage": None}]}, "has drift"),
        ("log.jsonl", {"step": 1, "dev": [0.5]}, "the line of step 1 has no numbers under dev"),
        ("config.yaml", "method: best", "method is 'best'"),
        ("config.yaml", "method: grad_accum", "seed is None"),
        ("config.yaml", "[1]", "holds list"),
        ("environment.json", "[1]", "holds no versions"),
        ("environment.json", "{", "line 1"),
    ],
)  # fmt: skip
def test_a_run_s_file_that_is_not_what_a_run_writes_is_named(tmp_path, file, content, words):
    run = folder(tmp_path / "run", "cont_accum", [1.0])
    assert read_run(run).metrics  # sound before it is spoilt
    (run / file).write_text(content if isinstance(content, str) else json.dumps(content) + "\n")
    with pytest.raises(InputError, match=words) as caught:
        read_run(run)
    assert str(caught.value).startswith(str(run / file))

"""Figures of the report's tables, from small hand-written logs."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from helpers import tiny_encoder, train_config, write_beir

from contaccum import evaluate, evaluate_run_file, search
from contaccum.config import to_yaml
from contaccum.config.commands import SearchConfig
from contaccum.errors import InputError, install_command
from contaccum.evaluation.benchmark import evaluate_benchmark
from contaccum.evaluation.significance import compare
from contaccum.experiments.report import (
    about_seeds,
    console_report,
    results,
    results_table,
    runs_table,
    verdict,
)
from contaccum.experiments.run_records import differences, group_runs, load_run_record
from contaccum.runtime.files import read_json, write_json


def folder(
    path: Path,
    method: str,
    seconds: list[float],
    score: float = 0.25,
    evaluations=None,
    every=1,
    **changes,
) -> Path:
    """A run of len(seconds) logged steps, ``every`` steps apart, with dev scores by step."""
    path.mkdir()
    (path / "config.yaml").write_text(to_yaml(train_config(Path("data"), path, method, **changes)))
    per_query = {
        f"q{i}": {"ndcg@10": score + (0.1 if i % 2 else -0.1) * (i % 3)} for i in range(12)
    }
    mean = {
        "ndcg@10": sum(values["ndcg@10"] for values in per_query.values()) / 12,
        "recall@100": 0.5,
    }
    (path / "metrics.json").write_text(json.dumps({"mean": mean, "per_query": per_query}))
    lines = []
    for n, value in enumerate(seconds):
        step = (n + 1) * every
        lines.append(
            {
                "step": step, "loss": 1.0 + n, "bank_fill": 4 * n, "seconds": value, "passes": 60.0,
                "waited": 0.75 if n else 9.0, "pairs_per_second": 16 / value, "negatives": 7.0,
                "peak_memory": 2**20 * (n + 1), "grad_norm_ratio": None if n == 1 else 2.0 + n,
            }
        )  # fmt: skip
        if evaluations and step in evaluations:
            lines.append({"step": step, "dev": {"ndcg@10": evaluations[step]}})
    (path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def cells(markdown: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in markdown.splitlines()]


def rows_of(table) -> list[dict[str, str]]:
    return [dict(zip(table.heads, row, strict=True)) for row in table.rows]


def test_medians_exclude_the_first_step(tmp_path):
    run = load_run_record(
        folder(tmp_path / "run", "cont_accum", [9.0, 2.0, 4.0, 1.0], evaluations={1: 0.2})
    )
    (row,) = runs_table(group_runs([run]), "ndcg@10").rows
    assert row == ["run", "0", "0.2500", "2.000", "8.0", "16.0", "4"]
    (row,) = rows_of(results_table(group_runs([run]), "ndcg@10", []))
    assert (row["train s"], row["peak MiB"]) == ("16", "4")
    assert (row["grad ratio"], row["negatives"]) == ("4.50", "7.0")


def test_cost_of_a_run_is_that_of_its_steps(tmp_path):
    run = load_run_record(folder(tmp_path / "a", "grad_cache", [1.0, 1.0], every=5))
    (row,) = rows_of(results_table(group_runs([run]), "ndcg@10", []))
    found = [row[column] for column in ("N", "steps", "pairs", "forward passes")]
    assert found == ["16", "10", "160", "600"]  # 10 steps of 60 passes


def test_console_shows_the_best_run_first(tmp_path):
    runs = [
        str(folder(tmp_path / name, "grad_cache", [1.0, 1.0], score))
        for name, score in (("a", 0.2), ("b", 0.4))
    ]
    heads, _, *rows = cells(console_report(runs, "ndcg@10"))
    # "grad ratio" has no value in these runs
    assert heads == ["run", "settings", "ndcg@10", "train s", "peak MiB", "negatives"]
    assert rows[0] == ["b", "grad_cache", "0.4000", "2", "2", "7.0"]
    assert rows[1][0] == "a"
    about_p, seeds, table = console_report(runs, "ndcg@10", runs[0]).split("\n", 2)
    assert about_p.startswith("p: probability of such a difference by chance")
    assert len(about_p) <= 120
    assert seeds == "The interval and p are over queries only, because there are too few seeds"
    heads, _, *rows = cells(table)
    assert heads == [
        "run", "ndcg@10", "minus a", "95 % interval", "p", "train s", "peak MiB",
    ]  # fmt: skip
    assert rows[0][2] == "+0.2000"
    assert rows[1][2:5] == ["-", "-", "-"]


def test_runs_with_different_tests_cause_a_warning(tmp_path, recwarn):
    data, encoder = write_beir(tmp_path / "data"), tiny_encoder()
    encoder_folder = tmp_path / "encoder"
    encoder.save(encoder_folder)
    qrels, trec = data / "qrels" / "train.tsv", tmp_path / "run.trec"
    qrels.write_text(qrels.read_text().replace("\t1\n", "\t2\n", 1))

    def scored(name: str, split: str = "train", **options) -> str:
        evaluate(encoder, data, split, output=tmp_path / name, **options)
        return str(tmp_path / name)

    def scored_run(name: str) -> str:
        evaluate_run_file(trec, qrels, tmp_path / name)
        return str(tmp_path / name)

    first, same = scored("first"), scored("same")
    level, queries = scored("level", relevance_level=2), scored("queries", "dev")
    index = scored("index", settings=SearchConfig(factory="IVF2,Flat"))
    search(encoder, data, "train", output=trec)
    same_run = scored_run("same_run")
    evaluate_benchmark(encoder_folder, str(data), "train", output=tmp_path / "sets")
    (of_benchmark,) = map(str, (tmp_path / "sets").glob("*data.json"))
    own = read_json(Path(same_run)) | {"own_ids": True}
    write_json(tmp_path / "own", own)
    qrels.write_text(qrels.read_text().replace("\t0\n", "\t1\n"))
    judged = scored_run("judged")
    with (data / "corpus.jsonl").open("a") as corpus:
        corpus.write('{"_id": "new", "title": "", "text": "fox"}\n')
    texts = scored("texts")
    for other, said in (
        (level, "with different relevance levels"),
        (queries, "on different test queries"),
        (index, "with different indexes"),
        (judged, "with different judgements"),
        (texts, "on different test data"),
    ):
        with pytest.warns(UserWarning, match=f"first and {other} were evaluated {said}"):
            console_report([first, other], "ndcg@10")
    with pytest.warns(UserWarning, match="evaluated with and without the passages that have the"):
        console_report([of_benchmark, str(tmp_path / "own")], "ndcg@10")
    recwarn.clear()
    for other in (same, same_run, of_benchmark):  # negative controls
        console_report([first, other], "ndcg@10")
    assert not recwarn.list


def test_runs_that_did_not_end_or_have_no_metrics_are_named(tmp_path, recwarn):
    for name, seed in (("a0", 0), ("a1", 1)):
        folder(
            tmp_path / name, "grad_cache", [1.0] * 3, seed=seed, **{"run.keep_checkpoints": None}
        )
    runs = [str(tmp_path / name) for name in ("a0", "a1")]
    (tmp_path / "a0" / "finished.json").write_text("{}")
    with pytest.warns(UserWarning, match=r"a1: the run did not end; its last logged step is 3"):
        console_report(runs, "ndcg@10")
    (tmp_path / "a1" / "finished.json").write_text("{}")
    recwarn.clear()
    console_report(runs, "ndcg@10")  # negative control
    assert not recwarn.list
    (tmp_path / "a1" / "metrics.json").unlink()
    with pytest.warns(UserWarning, match=r"a1: has no metrics.json, so it has no score here"):
        console_report(runs, "ndcg@10")
    groups = group_runs([load_run_record(run) for run in runs])
    assert [row["seeds"] for row in results(groups, "ndcg@10", [])] == [[0]]
    other = folder(tmp_path / "b", "in_batch", [1.0] * 3)
    (tmp_path / "b" / "metrics.json").unlink()
    with pytest.warns(UserWarning, match=r"b: has no metrics.json"):
        console_report([runs[0], str(other)], "ndcg@10", against=runs[0])


def test_seeds_that_were_trained_on_other_data_are_named(tmp_path, recwarn):
    """The data at the same path had changed between the two runs."""
    for seed in (0, 1):
        run = folder(
            tmp_path / f"a{seed}", "grad_cache", [1.0], seed=seed, **{"run.keep_checkpoints": None}
        )
        (run / "finished.json").write_text(json.dumps({"identity": {"data": "x"}}))
    runs = [str(tmp_path / name) for name in ("a0", "a1")]
    console_report(runs, "ndcg@10")  # negative control
    assert not recwarn.list
    (tmp_path / "a1" / "finished.json").write_text(json.dumps({"identity": {"data": "y"}}))
    with pytest.warns(UserWarning, match=r"^a: its runs were trained on different data"):
        console_report(runs, "ndcg@10")


def test_the_cost_of_a_row_is_the_mean_over_its_seeds(tmp_path):
    """Early stopping ends each seed after another number of steps."""
    for seed, steps in ((0, 8), (1, 4)):
        folder(tmp_path / f"a{seed}", "grad_cache", [1.0] * steps, 0.5, seed=seed)
    runs = [load_run_record(tmp_path / name) for name in ("a0", "a1")]
    (row,) = results(group_runs(runs), "ndcg@10", [])
    assert (row["steps"], row["pairs"]) == (6, 6 * row["N"])


def study(tmp_path: Path):
    """Two seeds of grad_cache and of cont_accum with two bank sizes; the smaller bank is faster and
    scores lower."""
    for seed in (0, 1):
        folder(
            tmp_path / f"g{seed}",
            "grad_cache",
            [3.0] * 4,
            0.50 + 0.02 * seed,
            {2: 0.3, 4: 0.5},
            seed=seed,
        )
        for size, score in ((16, 0.40), (24, 0.60)):
            changes = {"seed": seed, "bank.size": size}
            evaluations = {1: 0.1, 2: 0.2 + seed / 10, 4: 0.6}
            folder(
                tmp_path / f"c{size}-{seed}",
                "cont_accum",
                [size / 8] * 4,
                score + 0.01 * seed,
                evaluations,
                **changes,
            )
    return [load_run_record(path) for path in sorted(tmp_path.iterdir())]


def test_runs_that_differ_only_in_the_seed_form_one_group(tmp_path):
    groups = group_runs(study(tmp_path))
    assert [(group.label, len(group.runs)) for group in groups] == [
        ("c16", 2), ("c24", 2), ("g", 2),
    ]  # fmt: skip
    assert [group.settings for group in groups] == [
        "cont_accum size=16", "cont_accum size=24", "grad_cache",
    ]  # fmt: skip
    again = group_runs([*groups[2].runs, groups[2].runs[0]])  # a repeated seed is no second seed
    assert [len(group.runs) for group in again] == [2, 1]


def test_runs_of_one_name_are_shown_with_their_paths(tmp_path):
    files = [tmp_path / model / "scifact.json" for model in ("base", "tuned")]
    for file in files:
        write_json(file, {"mean": {"ndcg@10": 0.5}})
    groups = group_runs([load_run_record(file) for file in files])
    assert [group.label for group in groups] == [f"scifact.json ({file})" for file in files]


def test_a_setting_without_a_value_is_not_shown_as_a_difference(tmp_path):
    changes = ({"optim.max_steps": None}, {"optim.max_steps": 40})
    runs = [
        load_run_record(folder(tmp_path / name, "grad_cache", [1.0], **each))
        for name, each in zip("ab", changes, strict=True)
    ]
    settings = [group.settings for group in group_runs(runs)]
    assert settings == ["grad_cache", "grad_cache max_steps=40"]


def test_a_baseline_is_its_own_group(tmp_path):
    trained = [
        load_run_record(folder(tmp_path / f"run{n}", "grad_cache", [1.0], seed=n)) for n in (1, 2)
    ]
    file = tmp_path / "grad_cache"
    file.mkdir()
    (file / "metrics.json").write_text((trained[0].folder / "metrics.json").read_text())
    baseline = load_run_record(file)
    for runs in ([*trained, baseline], [baseline, *trained]):
        groups = {group.label: [one.name for one in group.runs] for group in group_runs(runs)}
        assert groups == {"run": ["run1", "run2"], "grad_cache": ["grad_cache"]}


def test_results_of_a_single_test_query_are_valid_json(tmp_path):
    runs = [folder(tmp_path / name, name, [1.0]) for name in ("grad_cache", "cont_accum")]
    for run, score in zip(runs, (0.3, 0.5), strict=True):
        values = {"ndcg@10": score}
        (run / "metrics.json").write_text(json.dumps({"mean": values, "per_query": {"q": values}}))
    groups = group_runs([load_run_record(run) for run in runs])
    found = results(groups, "ndcg@10", differences(groups, "ndcg@10", {runs[0]}))
    test = json.loads(json.dumps(found), parse_constant=pytest.fail)[0]
    assert (test["low"], test["high"], test["difference"]) == (None, None, pytest.approx(0.2))


def test_line_breaks_and_bars_in_cells_do_not_change_the_table(tmp_path):
    prefix = {"model.query_prefix": "Instruct: find\nQuery: "}
    runs = [
        folder(tmp_path / "a|b", "grad_cache", [1.0], **prefix),
        folder(tmp_path / "c", "grad_cache", [1.0]),
    ]
    records = [load_run_record(run) for run in runs]
    lines = results_table(group_runs(records), "ndcg@10", []).markdown().splitlines()
    assert len(lines) == 4
    assert lines[2].startswith("| a\\|b | grad_cache query_prefix=Instruct: find\\nQuery:  |")
    assert len({len(line) for line in lines}) == 1
    assert "| a\\|b |" in runs_table(group_runs(records), "ndcg@10").markdown()


def test_mean_deviation_and_reference_equal_hand_computed_values(tmp_path):
    """Standard deviations of two values are their difference over the square root of 2."""
    groups = group_runs(study(tmp_path))
    rows = results_table(groups, "ndcg@10", []).rows
    assert [row[:5] for row in rows] == [
        ["c24", "cont_accum size=24", "0.6050", "0.0071", "2"],
        ["g", "grad_cache", "0.5100", "0.0141", "2"],
        ["c16", "cont_accum size=16", "0.4050", "0.0071", "2"],
    ]
    runs = {run.folder for group in groups if group.method == "cont_accum" for run in group.runs}
    found = differences(groups, "ndcg@10", runs)
    # the best of the method's settings
    assert {one.reference.label for one in found} == {"c24"}
    assert [round(one.found.difference, 4) for one in found] == [-0.2, -0.095]
    # Holm's method: the smaller of two p values is doubled
    plain = [compare(one.group.per_query(), one.reference.per_query(), "ndcg@10") for one in found]
    for name in ("p_permutation", "p_both"):
        before = [getattr(one, name) for one in plain]
        after = [one.p if name == "p_both" else one.p_queries for one in found]
        assert min(after) == pytest.approx(min(1.0, 2 * min(before)))
        assert max(after) == pytest.approx(max(2 * min(before), max(before)))


def test_report_without_matplotlib_names_the_extra_to_install(tmp_path, monkeypatch):
    run = folder(tmp_path / "run", "grad_accum", [1.0])
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(InputError, match=re.escape(install_command("study"))):
        console_report([str(run)], "ndcg@10", None, str(tmp_path / "page.html"))
    assert not (tmp_path / "page.html").exists()
    assert "grad_accum" in console_report([str(run)], "ndcg@10")


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("metrics.json", "[1]", "Expected `object`, got `array`"),
        ("config.yaml", "[1]", r"found \[1\]"),
        ("environment.json", "[1]", "Expected `object`, got `array`"),
    ],
)  # fmt: skip
def test_unusable_run_file_is_named_in_one_sentence(tmp_path, file, content, words):
    run = folder(tmp_path / "run", "cont_accum", [1.0])
    assert load_run_record(run).metrics  # valid before it is changed
    (run / file).write_text(content if isinstance(content, str) else json.dumps(content) + "\n")
    with pytest.raises(InputError, match=words) as caught:
        load_run_record(run)
    assert str(caught.value).startswith(str(run / file))


def test_verdict_names_the_best_setting_and_what_differs_from_the_reference(tmp_path):
    groups = group_runs(study(tmp_path))
    first, warning = verdict(groups, "ndcg@10", []).split(": ")
    assert first == "c24 has the highest ndcg@10"
    assert "No significance test was run" in warning
    (one, *_) = differences(groups, "ndcg@10", {run.folder for run in groups[0].runs})
    assert one.found.difference > 0
    for p, kind in ((0.04, "better"), (0.06, "not significantly different")):
        words = verdict(groups, "ndcg@10", [one._replace(p=p, p_queries=0.01)])
        assert words.endswith(
            f" Compared with {groups[0].label} (p below 0.05): {kind}: {one.group.label}."
        )


def test_p_is_over_queries_where_a_setting_has_a_single_seed(tmp_path):
    """Holm's method then corrects p values of both kinds together."""
    rng = np.random.default_rng(0)
    for name, method, seed, score in (
        ("a0", "grad_cache", 0, 0.3), ("a1", "grad_cache", 1, 0.31), ("b0", "cont_accum", 0, 0.34),
        ("b1", "cont_accum", 1, 0.38), ("c0", "grad_accum", 0, 0.22),
    ):  # fmt: skip
        metrics = folder(tmp_path / name, method, [1.0], score, seed=seed) / "metrics.json"
        content = json.loads(metrics.read_text())
        for values in content["per_query"].values():
            values["ndcg@10"] += rng.normal(0, 0.05)
        metrics.write_text(json.dumps(content))
    groups = group_runs(
        [load_run_record(tmp_path / name) for name in ("a0", "a1", "b0", "b1", "c0")]
    )
    found = differences(groups, "ndcg@10", {tmp_path / "a0"})
    raw = [found[0].found.p_both, found[1].found.p_permutation]
    assert found[1].found.p_both is None
    assert 0 < 2 * raw[1] < raw[0] < 0.5
    assert [one.p for one in found] == [raw[0], 2 * raw[1]]  # the smaller of two is doubled
    assert about_seeds(found).endswith("only where there are too few seeds: c0")
    assert about_seeds(found[:1]) == "The interval and p are over queries and seeds"
    rows = {row["run"]: row for row in results(groups, "ndcg@10", found)}
    one, two = found[0].found, found[1].found
    assert [rows["b"]["p_uncorrected"], rows["c0"]["p_uncorrected"]] == raw
    assert (rows["b"]["low"], rows["b"]["high"]) == one.both != (one.low, one.high)
    assert (rows["c0"]["low"], rows["c0"]["high"]) == (two.low, two.high)
    assert [rows[name]["over"] for name in ("b", "c0")] == ["queries and seeds", "queries"]


def test_the_report_says_where_only_some_seeds_are_compared(tmp_path):
    names = []
    for method, seeds in (("grad_cache", 3), ("cont_accum", 3), ("grad_accum", 2)):
        for seed in range(seeds):
            names.append(f"{method}{seed}")
            folder(tmp_path / names[-1], method, [1.0], 0.2 + 0.1 * seed, seed=seed)
    groups = group_runs([load_run_record(tmp_path / name) for name in names])
    found = differences(groups, "ndcg@10", {tmp_path / "grad_cache0"})
    assert about_seeds(found) == (
        "The interval and p are over queries and seeds. Where one side has more seeds, only "
        "those of both count: grad_accum (2 seeds)"
    )
    rows = {row["run"]: row for row in results(groups, "ndcg@10", found)}
    # the mean of the third seed, which grad_accum lacks, is not in the difference
    assert rows["grad_accum"]["mean"] < rows["grad_cache"]["mean"]
    assert rows["grad_accum"]["difference"] == 0
    assert [rows[name]["compared_seeds"] for name in ("cont_accum", "grad_accum")] == [3, 2]

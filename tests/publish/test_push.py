"""The card of a trained model, its code run as it stands, and the upload by the Hub's own client to a small hub of our own."""

import base64
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import yaml
from helpers import train_config, write_beir
from huggingface_hub import constants

from contaccum import DualEncoder, evaluate, train
from contaccum.cli import main
from contaccum.errors import InputError
from contaccum.files import write_json
from contaccum.publish.card import find_model, write_up
from contaccum.publish.hub import push

TOKEN = "hf_" + "x" * 34
NAME = "somebody/valley-retriever"


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run with an evaluation of its model."""
    folder = tmp_path_factory.mktemp("push")
    data = write_beir(folder / "secret place" / "valleys")
    changes = {"model.query_prefix": "ask: ", "data.dev": str(data), "run.eval_steps": 3, "run.metric": "ndcg@10"}
    train(train_config(data, folder / "run", **changes))
    metrics = evaluate(str(folder / "run" / "model"), str(data))
    write_json(folder / "run" / "metrics.json", {"data": str(data), "split": "test", **metrics})
    return folder / "run"


def card_of(run: Path, licence: str | None = "cc-by-4.0", name: str = NAME) -> tuple[dict, str]:
    text = write_up(run / "model", run, name, licence)
    _, front, body = text.split("---\n", 2)
    return yaml.safe_load(front), body


def test_the_card_says_how_the_model_was_made_and_how_it_scores(run):
    front, body = card_of(run)
    assert front["license"] == "cc-by-4.0"
    assert front["library_name"] == "sentence-transformers"
    assert "base_model" not in front
    metrics = json.loads((run / "metrics.json").read_text())["mean"]
    told = {each["type"]: each["value"] for each in front["model-index"][0]["results"][0]["metrics"]}
    assert told["ndcg@10"] == pytest.approx(metrics["ndcg@10"], abs=1e-5)
    assert f"| ndcg@10 | {metrics['ndcg@10']:.4f} |" in body
    assert "| `bank.size` | `24` |" in body
    assert "| `data.train` | `valleys` |" in body
    assert "secret place" not in str(front) + body
    log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["loss"] for line in log if "loss" in line}
    dev = {line["step"]: line["dev"] for line in log if "dev" in line}
    curve = re.findall(r"^\| (\d+) \| ([\d.]+) \| \S+ \| (.*) \|$", body, re.MULTILINE)
    assert [int(step) for step, *_ in curve] == [1, 2, 3, 4, 5, 6]
    for step, loss, score in curve:
        assert float(loss) == pytest.approx(losses[int(step)], abs=1e-4)
        assert bool(score) == (int(step) in dev)
    assert "## Licence\n\ncc-by-4.0" in body
    without, body = card_of(run, licence=None)
    assert "license" not in without
    assert "## Licence\n\nNone is stated." in body


@pytest.mark.parametrize(("pooling", "similarity"), [("mean", "cosine"), ("cls", "dot"), ("last", "cosine")])
def test_the_code_in_the_card_gives_our_vectors(pooling, similarity, run, tmp_path):
    encoder = DualEncoder.load(run / "model", pooling=pooling, similarity=similarity)
    encoder.save(tmp_path / "model")
    text = write_up(tmp_path / "model", None, str(tmp_path / "model"), None)
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        found: dict = {}
        exec(block, found)  # our own text
        np.testing.assert_allclose(found["queries"], encoder.encode_queries(["What is asked"]), atol=1e-6)
        passages = encoder.encode_passages(["Title and text of a passage"])
        np.testing.assert_allclose(found["passages"], passages, atol=1e-6)


def test_a_model_or_its_run_and_nothing_else(run, tmp_path):
    assert find_model(run) == find_model(run / "model") == (run / "model", run)
    with pytest.raises(InputError, match="holds no model"):
        find_model(tmp_path)
    for name, said in (("valleys", "expected owner/name"), ("a/b c", "no name on the Hub")):
        with pytest.raises(InputError, match=said):
            push(str(run), name, dry_run=True)
    assert not (run / "model" / "README.md").exists()


class Hub(BaseHTTPRequestHandler):
    """What an upload asks of the Hub: the names of its addresses, and files as base64 in one commit."""

    seen: dict = {}  # noqa: RUF012

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.seen["token"] = self.headers.get("Authorization")
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.answer({"error": f"{self.headers.get('Authorization')} is not known"}, 401)
        if self.path == "/api/repos/create":
            self.seen["repository"] = json.loads(body)
            return self.answer({"url": f"http://{self.headers['Host']}/{NAME}"})
        if self.path.endswith("/preupload/main"):
            files = [{"path": each["path"], "uploadMode": "regular"} for each in json.loads(body)["files"]]
            return self.answer({"files": [{**each, "shouldIgnore": False, "oid": None} for each in files]})
        if self.path == "/api/validate-yaml":
            return self.answer({"warnings": [], "errors": []})
        lines = [json.loads(line)["value"] for line in body.splitlines()]
        self.seen["files"] = {line["path"]: base64.b64decode(line["content"]) for line in lines if "path" in line}
        return self.answer(
            {"commitUrl": f"http://{self.headers['Host']}/{NAME}/commit/1", "commitOid": "1", "hookOutput": ""}
        )

    def do_GET(self) -> None:
        self.answer({"error": "not found"}, 404)

    def answer(self, value: dict, status: int = 200) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub():
    Hub.seen = {}
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.fixture
def call(run, monkeypatch, capsys, tmp_path):
    """``contaccum push`` of the run to an address, with a token; returns exit code, stdout and stderr."""

    def run_it(endpoint: str, *more: str, token: str | None = TOKEN) -> tuple[int, str, str]:
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # whatever the machine says: this Hub is its own
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        if token is not None:
            monkeypatch.setenv("HF_TOKEN", token)
        code = main(["push", str(run), NAME, *more])
        return code, *capsys.readouterr()

    return run_it


def test_the_folder_goes_to_the_hub_as_it_lies(run, hub, call):
    model = run / "model"
    code, dry, _ = call(hub, "--licence", "mit", "--dry_run")
    assert (code, Hub.seen) == (0, {})
    assert f"go to {NAME}" in dry
    assert "passage_encoder/model.safetensors" in dry
    code, out, err = call(hub, "--private")
    assert code == 0, err
    asked = Hub.seen["repository"]
    assert asked["name"] == "valley-retriever"
    assert asked.get("private") or asked["visibility"] == "private"
    files = {path.relative_to(model).as_posix(): path.read_bytes() for path in model.rglob("*") if path.is_file()}
    assert Hub.seen["files"] == files
    assert b"license: mit" in files["README.md"]
    assert f"/{NAME}/commit/1" in out
    refused = call(hub, token="hf_" + "y" * 34)
    assert refused[0] == 2
    assert "the Hub refused (status 401" in refused[2]
    again = call(hub, "--licence", "mit")
    assert again[0] == 2
    assert "stands already" in again[2]
    said = dry + out + err + "".join(refused[1:] + again[1:])
    assert TOKEN not in said
    assert "y" * 34 not in said


def test_no_network_and_no_token_are_a_sentence_each(call):
    code, _, err = call("http://127.0.0.1:9")
    assert (code, err.count("\n")) == (2, 1)
    assert "the Hub at http://127.0.0.1:9 was not reached" in err
    code, _, err = call("http://127.0.0.1:9", token=None)
    assert code == 2
    assert "no token for the Hub was found" in err

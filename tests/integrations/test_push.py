"""Model cards, the code in them, and uploads with the Hub's client to a small local Hub."""

import base64
import json
import re
import shutil
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
from contaccum.integrations.push import push, write_card
from contaccum.runtime.files import write_json

TOKEN = "hf_" + "x" * 34
NAME = "somebody/valley-retriever"


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """Training run with an evaluated model."""
    folder = tmp_path_factory.mktemp("push")
    data = write_beir(folder / "secret place" / "valleys")
    changes = {
        "model.query_prefix": "ask: ",
        "data.dev": str(data),
        "run.eval_steps": 3,
        "run.metric": "recall@10",
    }
    train(train_config(data, folder / "run", **changes))
    metrics = evaluate(str(folder / "run" / "model"), str(data))
    write_json(folder / "run" / "metrics.json", {"data": str(data), "split": "test", **metrics})
    return folder / "run"


def card_of(run: Path, licence: str | None = "cc-by-4.0", name: str = NAME) -> tuple[dict, str]:
    text = write_card(run / "model", name, licence)
    _, front, body = text.split("---\n", 2)
    return yaml.safe_load(front), body


def test_card_shows_settings_and_scores(run):
    front, body = card_of(run)
    assert front["license"] == "cc-by-4.0"
    assert front["library_name"] == "sentence-transformers"
    assert "base_model" not in front
    metrics = json.loads((run / "metrics.json").read_text())["mean"]
    told = {
        each["type"]: each["value"] for each in front["model-index"][0]["results"][0]["metrics"]
    }
    assert told["ndcg@10"] == pytest.approx(metrics["ndcg@10"], abs=1e-5)
    assert f"| ndcg@10 | {metrics['ndcg@10']:.4f} |" in body
    assert "| `bank.size` | `24` |" in body
    assert "| `data.train` | `valleys` |" in body
    assert "secret place" not in str(front) + body
    assert "## Licence\n\ncc-by-4.0" in body
    without, body = card_of(run, licence=None)
    assert "license" not in without
    assert "## Licence\n\nNone is stated." in body


def test_scores_on_dev_say_how_many_passages_were_searched_and_are_no_result(run, tmp_path):
    """They choose the model, and often on a sample of the passages."""
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    (copy / "metrics.json").unlink()
    metrics = json.loads((copy / "dev_metrics.json").read_text())
    write_json(copy / "dev_metrics.json", metrics | {"label": "recall@10 on 9 of 40 passages"})
    front, body = card_of(copy)
    assert "model-index" not in front
    assert "On `dev set (recall@10 on 9 of 40 passages)`" in body
    assert f"| recall@10 | {metrics['mean']['recall@10']:.4f} |" in body


def test_card_names_every_training_set_and_no_local_path(run, tmp_path):
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    config = yaml.safe_load((copy / "config.yaml").read_text())
    names = [
        "/secret place/a",
        "hub:/secret place/b?query=q&pos=p",
        "hub:o/n@v1:c?query=q&pos=p",
        "nanobeir/nq",
        "hub:o/n",
    ]
    config["data"] |= {
        "train": "",
        "mixture": [{"train": name, "split": f"s{i}"} for i, name in enumerate(names)],
    }
    config["loss"] |= {"guide": "/secret place/guide"}
    (copy / "config.yaml").write_text(yaml.safe_dump(config))
    metrics = json.loads((copy / "metrics.json").read_text())
    write_json(copy / "metrics.json", metrics | {"data": "nanobeir/scifact"})
    front, body = card_of(copy)
    shown = ["a", "b?query=q&pos=p", *names[2:]]
    assert f"Trained on {', '.join(f'`{name}` (s{i})' for i, name in enumerate(shown))};" in body
    assert "On `nanobeir/scifact test`" in body
    assert "secret place" not in str(front) + body


@pytest.mark.parametrize(("name", "base"), [("../bert", None), ("o/n", "o/n")])
def test_card_names_only_a_base_on_the_hub(name, base, run, tmp_path):
    """The folder of the base does not exist where the model is pushed; the Hub refuses its path."""
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    config = yaml.safe_load((copy / "config.yaml").read_text())
    config["model"]["name"] = name
    (copy / "config.yaml").write_text(yaml.safe_dump(config))
    assert card_of(copy)[0].get("base_model") == base


@pytest.mark.parametrize(("pooling", "similarity"), [("mean", "cosine"), ("cls", "dot")])
def test_code_in_the_card_gives_equal_vectors(pooling, similarity, run, tmp_path):
    encoder = DualEncoder.load(run / "model", pooling=pooling, similarity=similarity)
    encoder.save(tmp_path / "model")
    text = write_card(tmp_path / "model", str(tmp_path / "model"), None)
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        found: dict = {}
        exec(block, found)
        np.testing.assert_allclose(
            found["queries"], encoder.encode_queries(["how do I open a file"]), atol=1e-6
        )
        passages = encoder.encode_passages(["Title and text of a passage"])
        np.testing.assert_allclose(found["passages"], passages, atol=1e-6)


def test_push_accepts_only_a_model_or_a_run(run, tmp_path, monkeypatch):
    with pytest.raises(InputError, match="no model found"):
        push(str(tmp_path), NAME)
    (run / "model" / "README.md").unlink(missing_ok=True)  # other tests write it
    for name in ("valleys", "a/b c"):
        with pytest.raises(InputError, match="expected a valid Hub name of the form owner/name"):
            push(str(run), name, dry_run=True)
    assert not (run / "model" / "README.md").exists()
    monkeypatch.chdir(run / "model")
    for path in (".", str(run), str(run / "model")):
        push(path, NAME, dry_run=True)
        assert "## Training" in (run / "model" / "README.md").read_text()  # the run was found
        (run / "model" / "README.md").unlink()


class Hub(BaseHTTPRequestHandler):
    """Minimal Hub: creates a repository and accepts files as base64 in one commit."""

    seen: dict = {}  # noqa: RUF012
    private = True  # a new repository gets the visibility that it is asked for

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.seen["token"] = self.headers.get("Authorization")
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.answer({"error": "this token is not known"}, 401)
        if self.path == "/api/repos/create":
            self.seen["repository"] = json.loads(body)
            return self.answer({"url": f"http://{self.headers['Host']}/{NAME}"})
        if self.path.endswith("/preupload/main"):
            files = [
                {"path": each["path"], "uploadMode": "regular"}
                for each in json.loads(body)["files"]
            ]
            return self.answer(
                {"files": [{**each, "shouldIgnore": False, "oid": None} for each in files]}
            )
        if self.path == "/api/validate-yaml":
            return self.answer({"warnings": [], "errors": []})
        lines = [json.loads(line)["value"] for line in body.splitlines()]
        self.seen["files"] = {
            line["path"]: base64.b64decode(line["content"]) for line in lines if "path" in line
        }
        return self.answer(
            {
                "commitUrl": f"http://{self.headers['Host']}/{NAME}/commit/1",
                "commitOid": "1",
                "hookOutput": "",
            }
        )

    def do_GET(self) -> None:
        if self.path == f"/api/models/{NAME}":
            return self.answer({"id": NAME, "private": self.private})
        return self.answer({"error": "not found"}, 404)

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
    """Run ``contaccum push`` against an endpoint with a token; returns exit code, stdout and
    stderr."""

    def run_it(endpoint: str, *more: str, token: str | None = TOKEN) -> tuple[int, str, str]:
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # the local Hub needs no network
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        if token is not None:
            monkeypatch.setenv("HF_TOKEN", token)
        code = main(["push", str(run), NAME, *more])
        return code, *capsys.readouterr()

    return run_it


def test_push_uploads_the_folder_unchanged(run, hub, call):
    model = run / "model"
    code, dry, _ = call(hub, "--licence", "mit", "--dry_run")
    assert (code, Hub.seen) == (0, {})
    assert f"are uploaded to {NAME}" in dry
    assert "passage_encoder/model.safetensors" in dry
    code, out, err = call(hub, "--private")
    assert code == 0, err
    asked = Hub.seen["repository"]
    assert asked["name"] == "valley-retriever"
    assert asked.get("private") or asked["visibility"] == "private"
    files = {
        path.relative_to(model).as_posix(): path.read_bytes()
        for path in model.rglob("*")
        if path.is_file()
    }
    assert Hub.seen["files"] == files
    assert b"license: mit" in files["README.md"]
    assert f"/{NAME}/commit/1" in out
    refused = call(hub, token="hf_" + "y" * 34)
    assert refused[0] == 2
    assert f"{NAME}: cannot be uploaded to {hub} (" in refused[2]
    assert "401" in refused[2]
    again = call(hub, "--licence", "mit")
    assert again[0] == 2
    assert "already exists, so --licence has no effect" in again[2]
    said = dry + out + err + "".join(refused[1:] + again[1:])
    assert TOKEN not in said
    assert "y" * 34 not in said


def test_private_upload_to_a_public_repository_is_refused(hub, call, monkeypatch):
    """The repository existed, and creating it again does not change its visibility."""
    monkeypatch.setattr(Hub, "private", False)
    code, _, err = call(hub, "--private")
    assert code == 2
    assert f"{NAME}: this repository exists and is public" in err
    assert "files" not in Hub.seen
    code, _, err = call(hub)
    assert code == 0, err
    assert "files" in Hub.seen


def test_missing_network_and_missing_token_are_one_line_errors(call):
    code, _, err = call("http://127.0.0.1:9")
    assert (code, err.count("\n")) == (2, 1)
    assert f"{NAME}: cannot be uploaded to http://127.0.0.1:9 (" in err
    code, _, err = call("http://127.0.0.1:9", token=None)
    assert code == 2
    assert "no Hub token found" in err


@pytest.mark.parametrize(
    ("target", "refused"), [("../../config.yaml", True), ("../contaccum.json", False)]
)
def test_push_refuses_links_that_leave_the_model(target, refused, run, hub, call):
    link = run / "model" / "query_encoder" / "extra.json"
    link.symlink_to(target)
    try:
        code, _, err = call(hub, "--dry_run")
    finally:
        link.unlink()
    assert code == (2 if refused else 0), err
    assert ("this symbolic link leads out of the model's folder" in err) == refused

"""Without a network, every command that asks the Hub ends soon with one sentence, and cached files
still work."""

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import requests
from hub_server import HubServer
from huggingface_hub import constants
from tiny_data import write
from tiny_families import family_folder

from contaccum import DualEncoder
from contaccum.errors import InputError
from contaccum.runtime import hub

CALL = """
import json, os, sys, time
# imports take time, the answer of the Hub must not
from contaccum.catalog import fetch, hub_sets, pinned
from contaccum.encoder import DualEncoder
from contaccum.errors import InputError
for name in sys.argv[1:]:
    # all look-ups at the same time, each in its own process, so that none knows of a failure
    if os.fork():
        continue
    began, said = time.monotonic(), ""
    try:
        if name in ("hub:owner/name", "miracl/sw", "mteb/NFCorpus"):
            fetch(name)
        else:
            DualEncoder.load(name, max_query_length=8, max_passage_length=8)
    except InputError as error:
        said = str(error)
    line = json.dumps([name, said, time.monotonic() - began])
    os.write(1, f"{line}\\n".encode())  # in one write, because the processes share the pipe
    break
else:
    for _ in sys.argv[1:]:
        os.wait()
"""


def look_up(endpoint: str, home: Path, *names: str) -> tuple[dict[str, tuple[str, float]], str]:
    """Return the sentence and the seconds of each look-up, and stderr.

    The Hub's library reads the variables on import.
    """
    variables = {
        key: value
        for key, value in os.environ.items()
        if "proxy" not in key.lower() and "OFFLINE" not in key
    }
    variables |= {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(home),
        "CONTACCUM_CACHE": str(home),
        "NO_PROXY": "*",
    }
    call = [sys.executable, "-W", "ignore", "-c", CALL, *names]
    done = subprocess.run(call, env=variables, capture_output=True, text=True, check=True)
    found = {
        name: (said, seconds) for name, said, seconds in map(json.loads, done.stdout.splitlines())
    }
    assert found.keys() == set(names), done.stderr
    return found, done.stderr


REFUSED, SILENT, CACHED = (
    ("owner/name", "hub:owner/name", "miracl/sw"),
    ("bert-base", "mteb/NFCorpus"),
    "owner/cached",
)


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Endpoint, answers and stderr of a server that refuses connections, and of one that accepts
    them and never answers."""
    home, found = tmp_path_factory.mktemp("hub"), []
    commit = "0" * 39 + "1"
    repository = home / "hub" / f"models--{CACHED.replace('/', '--')}"
    family_folder("bert", repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    for listens, names in ((False, (*REFUSED, CACHED)), (True, SILENT)):
        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))
            if listens:
                server.listen(16)
            endpoint = f"http://127.0.0.1:{server.getsockname()[1]}"
            found.append((endpoint, *look_up(endpoint, home, *names)))
    return found


@pytest.mark.parametrize(
    ("listens", "name"), [*((False, name) for name in REFUSED), *((True, name) for name in SILENT)]
)
def test_missing_network_is_one_sentence_within_seconds(listens, name, answers):
    """The server refuses connections, or accepts them and never answers."""
    endpoint, found, errors = answers[listens]
    said, seconds = found[name]
    assert "\n" not in said
    assert f"{endpoint} does not answer" in said
    assert "only the cache of the Hub is used" in said
    assert "Retrying" not in errors
    assert "thrown while requesting" not in errors
    assert seconds < 8  # 4 for the connection; this machine may be busy


def test_cached_encoder_loads_without_network(answers):
    assert answers[False][1][CACHED][0] == ""


def test_offline_mode_is_named(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    said = "HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set, so only the cache of the Hub is used"
    with pytest.raises(InputError, match=said):
        DualEncoder.load("owner/name", max_query_length=8, max_passage_length=8)


def test_a_late_answer_of_the_hub_is_not_taken_for_a_setting_of_the_user(monkeypatch):
    """The look-up of an address can take longer than the wait. contaccum has then set
    HF_HUB_OFFLINE, not the user."""
    looked_up, asked = threading.Event(), []

    def head(*_, **__):
        asked.append(threading.current_thread())
        looked_up.wait(10)

    monkeypatch.setattr(requests, "head", head)
    monkeypatch.setattr(hub, "SECONDS", 0.05)
    monkeypatch.setattr(hub, "_failures", {})
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    said = []
    for _ in range(2):
        with pytest.raises(InputError) as error, hub.hub_errors("problem", KeyError):
            raise KeyError("missing")
        said.append(str(error.value))
        looked_up.set()
        asked[0].join(10)
    assert said[0] == said[1]
    assert "does not answer, so only the cache of the Hub is used" in said[1]
    assert len(asked) == 1
    monkeypatch.setattr(hub, "AGAIN", 0)  # the network is back when the Hub is asked again
    monkeypatch.setattr(hub, "SECONDS", 10)
    with pytest.raises(InputError) as error, hub.hub_errors("problem", KeyError):
        raise KeyError("missing")
    assert "does not answer" not in str(error.value)
    assert (len(asked), constants.HF_HUB_OFFLINE, os.environ["HF_HUB_OFFLINE"]) == (2, False, "0")


# loads owner/name as each line of stdin says, and answers with its pooling, or an error or warning
LOAD = """
import json, sys, warnings
from huggingface_hub import constants
from transformers import AutoModel, AutoTokenizer
from contaccum import DualEncoder
from contaccum.errors import InputError
warnings.simplefilter("error")
for line in sys.stdin:
    request = json.loads(line)
    constants.HF_HUB_OFFLINE = request.get("offline", False)
    try:
        if request.get("plain"):
            for kind in (AutoModel, AutoTokenizer):
                kind.from_pretrained("owner/name")
            answer = ""
        else:
            answer = DualEncoder.load("owner/name", **request.get("settings", {})).settings.pooling
    except (InputError, UserWarning) as error:
        answer = f"{type(error).__name__}: {error}"
    print(json.dumps(answer), flush=True)
"""


@pytest.fixture
def served(tmp_path):
    """A Hub with a sentence-transformers model that pools by its first token."""
    server = HubServer(tmp_path / "served")
    folder = family_folder("bert", server.folder / "owner" / "name")
    modules = [
        {"path": path, "type": f"sentence_transformers.models.{kind}"}
        for path, kind in (("", "Transformer"), ("1_Pooling", "Pooling"))
    ]
    write(folder / "modules.json", json.dumps(modules))
    write(folder / "1_Pooling" / "config.json", json.dumps({"pooling_mode_cls_token": True}))
    yield server
    server.close()


@pytest.fixture
def load(served, tmp_path):
    """A process that loads the model, because transformers reads the Hub's address on import."""
    variables = {key: value for key, value in os.environ.items() if "OFFLINE" not in key}
    variables |= {"HF_ENDPOINT": served.url, "HF_HOME": str(tmp_path / "hub"), "NO_PROXY": "*"}
    call = [sys.executable, "-c", LOAD]
    pipe = subprocess.PIPE
    with subprocess.Popen(call, env=variables, stdin=pipe, stdout=pipe, text=True) as process:

        def answer(**request: object) -> str:
            process.stdin.write(f"{json.dumps(request)}\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        yield answer
        process.stdin.close()


def test_a_file_that_the_hub_fails_to_serve_is_not_taken_for_missing(served, load):
    """Without these files, an encoder has mean pooling."""
    for file in ("modules.json", "1_Pooling/config.json"):
        served.status = {file: 403}
        said = load()
        assert said.startswith("InputError: owner/name: ")
        assert "403" in said
    served.status = {}
    assert load() == "cls"
    served.status = {"modules.json": 403}  # the cache of the Hub has it now
    assert load() == "cls"


def test_a_cache_that_does_not_know_the_modules_gives_a_warning(served, load):
    """transformers does not ask for them, and the Hub cannot be asked later."""
    load(plain=True)
    assert load(offline=True).startswith("UserWarning: owner/name: the cache of the Hub does not")
    assert load(offline=True, settings={"pooling": "mean"}) == "mean"
    (served.folder / "owner" / "name" / "modules.json").unlink()
    assert load() == "mean"
    assert load(offline=True) == "mean"  # the cache knows now that there are none

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
from huggingface_hub import constants
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

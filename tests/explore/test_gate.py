"""Requests to the page that only an attacker sends, raw, over a real server; and those of a real client."""

import json
import os
import re
import socket
import subprocess
import time
from contextlib import suppress
from types import SimpleNamespace

import pytest
from forked import python
from helpers import write_beir

from contaccum.explore.app import MAX_BODY, Gate
from contaccum.explore.explorer import MAX_QUERY

JOINED = "POST /gradio_api/queue/join HTTP/1.1\nHost: {host}"


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    pytest.importorskip("gradio", reason="needs gradio (extra explore)")
    folder = tmp_path_factory.mktemp("gate")
    data = write_beir(folder / "data")
    call = ["explore", "--models", "bm25", "--data", str(data), "--port", "0"]
    environment = {**os.environ, "CONTACCUM_CACHE": str(folder / "cache"), "GRADIO_TEMP_DIR": str(folder / "uploads")}
    with (folder / "err").open("w") as err:
        process = subprocess.Popen(
            [python(), "-m", "contaccum", *call], stdout=subprocess.PIPE, stderr=err, text=True, env=environment
        )
        address = re.fullmatch(r"http://127\.0\.0\.1:([1-9]\d*)/\n", process.stdout.readline())
        assert address, (folder / "err").read_text()
        port = int(address[1])
        yield SimpleNamespace(port=port, folder=folder, host=f"127.0.0.1:{port}")
        process.kill()
        process.wait()


def raw(served, request: str, body: bytes = b"") -> tuple[int, bytes]:
    """Send bytes to the server; return the status and the body of its answer."""
    with socket.create_connection(("127.0.0.1", served.port), 30) as connection:
        close = "" if "Upgrade" in request else "\nConnection: close"
        head = (request.format(host=served.host) + close).replace("\n", "\r\n") + "\r\n\r\n"
        connection.sendall(head.encode("latin-1"))
        with suppress(BrokenPipeError, ConnectionResetError):  # the server answers before it has read everything
            connection.sendall(body)
        answer = b""
        with suppress(ConnectionResetError):
            while chunk := connection.recv(1 << 16):
                answer += chunk
    head, _, content = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), content


REFUSED = {
    "an upload": ("POST /gradio_api/upload HTTP/1.1\nHost: {host}\nContent-Length: 0", b"", 404),
    "an upload with a trailing slash": ("POST /gradio_api/upload/ HTTP/1.1\nHost: {host}\nContent-Length: 0", b"", 404),
    "an upload by its old address": ("POST /upload HTTP/1.1\nHost: {host}\nContent-Length: 0", b"", 404),
    "an upload below a double slash": ("POST //gradio_api/upload HTTP/1.1\nHost: {host}\nContent-Length: 0", b"", 404),
    "an encoded upload": ("POST /gradio_api/%75pload HTTP/1.1\nHost: {host}\nContent-Length: 0", b"", 404),
    "another method": ("PUT / HTTP/1.1\nHost: {host}\nContent-Length: 0", b"", 404),
    "a file of the server": ("GET /gradio_api/file=/etc/passwd HTTP/1.1\nHost: {host}", b"", 404),
    "a proxied address": ("GET /gradio_api/proxy=http://192.0.2.1/ HTTP/1.1\nHost: {host}", b"", 404),
    "a path out of the assets": ("GET /assets/../gradio_api/file=/etc/passwd HTTP/1.1\nHost: {host}", b"", 404),
    "a foreign name": ("GET / HTTP/1.1\nHost: evil.example:80", b"", 421),
    "a foreign name that looks like an address": ("GET / HTTP/1.1\nHost: 127.0.0.1.evil.example", b"", 421),
    "a foreign name with a user": ("GET / HTTP/1.1\nHost: 127.0.0.1@evil.example", b"", 421),
    "no name": ("GET / HTTP/1.0\nX: y", b"", 421),
    "a foreign page": (JOINED + "\nOrigin: http://evil.example\nContent-Length: 2", b"{}", 403),
    "a page without an origin": (JOINED + "\nOrigin: null\nContent-Length: 2", b"{}", 403),
    "a page with an invalid origin": (JOINED + "\nOrigin: http://[\nContent-Length: 2", b"{}", 403),
    "a page of another port": (JOINED + "\nOrigin: http://127.0.0.1:1\nContent-Length: 2", b"{}", 403),
    "a page of another site": (JOINED + "\nSec-Fetch-Site: cross-site\nContent-Length: 2", b"{}", 403),
    "a body of 30 MB": (JOINED + "\nContent-Length: 30000000", b"x" * (1 << 20), 413),
    "a body without a length": (JOINED + "\nTransfer-Encoding: chunked", b"2\r\n{}\r\n0\r\n\r\n", 411),
    "a web socket": (
        "GET /gradio_api/queue/join HTTP/1.1\nHost: {host}\nUpgrade: websocket\nConnection: Upgrade\n"
        "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\nSec-WebSocket-Version: 13",
        b"",
        (403, 404),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("request_", "body", "status"), REFUSED.values(), ids=REFUSED)
def test_a_request_that_the_page_does_not_send_is_refused(served, request_, body, status):
    found, content = raw(served, request_, body)
    assert found in (status if isinstance(status, tuple) else (status,))
    assert b"root:" not in content
    assert not (served.folder / "uploads").exists() or not [*(served.folder / "uploads").rglob("*.*")]


@pytest.mark.parametrize("name", ["{host}", "localhost", "LOCALHOST:1", "[::1]:80", "192.168.7.9:7860"])
def test_the_page_and_everything_that_it_names_is_served(served, name):
    """Negative control of the refusals."""
    status, page = raw(served, f"GET / HTTP/1.1\nHost: {name}")
    assert status == 200
    named = sorted(set(re.findall(r'(?:src|href)="\.?(/?(?:assets|static|svelte|theme)[^"]+)"', page.decode())))
    assert named
    for path in named:
        assert raw(served, f"GET /{path.lstrip('/')} HTTP/1.1\nHost: {name}")[0] == 200


def answer(served, query: str) -> str:
    """Ask as the page does: join the queue, and read the answer from the stream of events."""
    _, config = raw(served, "GET /config HTTP/1.1\nHost: {host}")
    config = json.loads(config[config.index(b"{") : config.rindex(b"}") + 1])
    number = next(d["id"] for d in config["dependencies"] if d["api_name"] == "answer")
    body = json.dumps({"data": [query, "bm25", "bm25", 10], "fn_index": number, "session_hash": "s"}).encode()
    head = JOINED + "\nOrigin: http://{host}\nSec-Fetch-Site: same-origin"
    status, _ = raw(served, f"{head}\nContent-Type: application/json\nContent-Length: {len(body)}", body)
    if status != 200:
        return str(status)
    _, events = raw(served, "GET /gradio_api/queue/data?session_hash=s HTTP/1.1\nHost: {host}")
    found = [json.loads(line[6:]) for line in events.decode().splitlines() if line.startswith("data: ")]
    return next(event for event in found if event["msg"] == "process_completed")["output"]["data"][0]


def test_a_query_of_the_page_is_answered(served):
    assert 'data-id="p0"' in answer(served, "where is the red fox of valley 0")


@pytest.mark.parametrize("length", [MAX_QUERY + 1, 20_000])
def test_a_long_query_is_answered_with_a_sentence(served, length):
    assert f"The query has {length} characters; at most {MAX_QUERY} are allowed." in answer(served, "x" * length)


def test_a_query_that_is_as_long_as_allowed_fits_into_a_request(served):
    assert "no passage was found" in answer(served, "\U0001f98a" * MAX_QUERY)  # 12 bytes each in JSON


def test_a_very_long_query_is_refused_at_once_and_blocks_nobody(served):
    start = time.monotonic()
    assert answer(served, "fox " * (MAX_BODY // 4)) == "413"
    assert time.monotonic() - start < 20
    assert 'data-id="p0"' in answer(served, "fox")


@pytest.mark.parametrize(
    ("host", "name", "ours"),
    [
        ("127.0.0.1", "127.0.0.1:7860", True),
        ("gpu7.lab.example", "gpu7.lab.example:7860", True),
        ("gpu7.lab.example", "GPU7.lab.example", True),
        ("0.0.0.0", "10.1.2.3:7860", True),
        ("0.0.0.0", "gpu7.lab.example", False),
        ("127.0.0.1", "evil.example", False),
        ("127.0.0.1", "", False),
        ("127.0.0.1", "[::1", False),
        ("127.0.0.1", "localhost.evil.example", False),
        ("127.0.0.1", "2130706433", False),
    ],
)  # fmt: skip
def test_the_names_of_a_server_are_its_host_and_addresses(host, name, ours):
    assert Gate(None, host).is_our_name(name.lower()) == ours

"""The page in a real browser, over a real server with real models and files.

The server notes every address that it connects to or looks up; the browser every request, and every error on its console.
"""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from browser import find_chromium, opened
from helpers import train_config, write_beir

from contaccum import train

pytestmark = pytest.mark.acceptance

CANARY = "document.body.id='canary'"
HOSTILE = f'<script>{CANARY}</script><img src=x onerror="{CANARY}">${{{CANARY}}}{{{{1}}}}'
SERVER = """
import sys
allowed, file = ("127.0.0.1", "localhost", "::1"), open(sys.argv[1], "w", buffering=1)

def note(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname"):
        address = arguments[1] if event == "socket.connect" else arguments[:1]
        if isinstance(address, tuple) and address[0] not in allowed:
            print(event, address, file=file)

sys.addaudithook(note)
from contaccum.cli import main
sys.exit(main(sys.argv[2:]))
"""
FOX = "where is the red fox of valley 0"


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A page of two trained models and BM25 over a corpus with a hostile passage and a hostile query."""
    pytest.importorskip("gradio", reason="needs gradio (extra explore)")
    if find_chromium() is None:
        pytest.skip("no Chromium on this machine: install chromium, or name it in CHROMIUM")
    folder = tmp_path_factory.mktemp("explore")
    data = write_beir(folder / "data")
    with (data / "corpus.jsonl").open("a") as file:
        file.write(json.dumps({"_id": "evil", "title": HOSTILE, "text": f"a red fox {HOSTILE}"}) + "\n")
    with (data / "queries.jsonl").open("a") as file:
        file.write(json.dumps({"_id": "hostile", "text": f"red fox {HOSTILE}"}) + "\n")
    with (data / "qrels" / "test.tsv").open("a") as file:
        file.write("hostile\tevil\t1\n")
    environment = {**os.environ, "CONTACCUM_CACHE": str(folder / "cache")}
    models = [
        train(train_config(data, folder / name, method, **{"optim.max_steps": steps}))
        for name, method, steps in (("one", "cont_accum", 20), ("two", "grad_cache", 1))
    ]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    call = ["explore", "--models", *map(str, models), "bm25", "--data", str(data), "--port", str(port)]
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(folder / "connections"), *call],
        stdout=subprocess.PIPE, stderr=(folder / "err").open("w"), text=True, env=environment,
    )  # fmt: skip
    address = process.stdout.readline().strip()
    assert address == f"http://127.0.0.1:{port}/", (folder / "err").read_text()
    yield SimpleNamespace(address=address, process=process, folder=folder, port=port)
    if process.poll() is None:
        process.kill()


@pytest.fixture
def page(served, tmp_path):
    with opened(find_chromium(), tmp_path / "profile") as page:
        page.look(1280)
        page.open(served.address)
        page.wait("!!document.querySelector('#query textarea, #query input')")
        yield page
        assert page.errors == []
        assert page.hosts == {f"127.0.0.1:{served.port}"}
        assert page.run("document.body.id") != "canary"
        assert page.run("document.querySelectorAll('.shown script, .shown img').length") == 0


def ask(page, query: str) -> None:
    page.type("#query textarea, #query input", query)


def open_list(page) -> None:
    page.run(
        "[...document.querySelectorAll('button[role=tab]')].find(e => e.innerText === 'Queries of test').id = 'to-list'"
    )
    page.click("#to-list")
    page.wait("document.querySelectorAll('#lost button').length === 11")


def test_a_query_is_answered_by_both_models(page):
    ask(page, FOX)
    page.wait("document.querySelectorAll('#answer .system').length === 2")
    assert page.texts("#answer .system h3") == ["one", "two"]
    assert page.run("document.querySelectorAll('#answer .hit').length") == 20
    (best,) = page.texts("#answer .system:first-child .hit.relevant")
    assert "relevant (grade 1)" in best
    assert "p0" in best
    marked = {word.lower() for word in page.texts("#answer mark")}
    assert {"red", "fox", "valley"} <= marked <= {"red", "fox", "valley", "where"}


def test_a_hostile_passage_is_text(page):
    ask(page, f"red fox {HOSTILE}")
    page.wait("document.querySelector('#answer [data-id=evil]')?.innerText.includes('canary')")
    assert HOSTILE in page.text("#answer .system:first-child [data-id=evil] summary")
    open_list(page)
    page.click("#lost button[data-query=hostile]")
    page.wait("document.querySelector('#query-page h2')?.innerText.includes('canary')")
    assert page.text("#query-page h2") == f"red fox {HOSTILE}"


def test_a_query_is_chosen_from_those_that_were_lost(page):
    open_list(page)
    rows = page.texts("#lost tbody tr")
    differences = [float(row.split()[-1]) for row in rows]
    assert differences == sorted(differences)
    query = page.run("document.querySelector('#lost button').dataset.query")
    page.click("#lost button")
    page.wait("document.querySelectorAll('#query-page .system').length === 2")
    assert f"query {query} of the split test" in page.text("#query-page")
    passage = {"hostile": "evil"}.get(query, query.replace("q", "p"))
    ranks = page.texts("#query-page tbody tr td[data-column]")
    assert ranks[0] == "1"  # the grade
    shown = page.run(
        "[...document.querySelectorAll('#query-page .system')].map(s => [...s.querySelectorAll('.hit')]"
        f".findIndex(e => e.dataset.id === '{passage}') + 1)"
    )
    assert [int(rank) for rank in ranks[1:]] == [
        rank or int(found) for rank, found in zip(shown, ranks[1:], strict=True)
    ]
    page.click("#back")
    page.wait("document.querySelector('#lost')?.offsetParent")
    assert page.texts("#lost tbody tr") == rows
    page.click("#lost button[data-query=q3]")  # once more, and another one
    page.wait("document.querySelector('#query-page')?.innerText.includes('query q3 of the split test')")


def test_another_model_can_be_put_beside(page):
    ask(page, FOX)
    page.wait("document.querySelectorAll('#answer .system').length === 2")
    page.click("#right input")
    page.wait("[...document.querySelectorAll('[role=option]')].some(e => e.innerText.includes('bm25'))")
    page.run(
        "[...document.querySelectorAll('[role=option]')].find(e => e.innerText.includes('bm25')).id = 'choose-bm25'"
    )
    page.click("#choose-bm25")
    page.wait("document.querySelectorAll('#answer .system h3')[1]?.innerText === 'bm25'")
    assert len(page.texts("#answer .system")) == 2
    assert page.texts("#answer .system h3")[0] != "bm25"


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("dark", [False, True])
def test_no_page_is_wider_than_the_screen(page, width, dark):
    page.look(width, dark=dark)
    ask(page, FOX)
    page.wait("document.querySelectorAll('#answer .hit').length === 20")
    sideways = [page.scrolls_sideways()]
    open_list(page)
    sideways.append(page.scrolls_sideways())
    page.click("#lost button")
    page.wait("document.querySelectorAll('#query-page .hit').length === 20")
    assert [*sideways, page.scrolls_sideways()] == [False] * 3
    assert page.run("document.body.classList.contains('dark')") == dark
    tops = "[...document.querySelectorAll('#query-page .system')].map(side => side.getBoundingClientRect().top)"
    assert len(set(page.run(tops))) == (1 if width == 1280 else 2)  # beside each other, or under each other


def test_the_server_called_nobody_and_stops(served):
    """The last one."""
    assert (served.folder / "connections").read_text() == ""
    served.process.send_signal(signal.SIGINT)
    assert served.process.wait(30) == 130
    with socket.create_server(("127.0.0.1", served.port)):
        pass


def test_the_server_is_watched(tmp_path):
    """Negative control: a connection to another machine is noted."""
    connect = "import socket\ntry:\n    socket.create_connection(('192.0.2.1', 9), 0.1)\nexcept OSError:\n    pass\n"
    script = SERVER.split("from contaccum")[0] + connect
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "connections")], check=True)
    assert "192.0.2.1" in Path(tmp_path / "connections").read_text()

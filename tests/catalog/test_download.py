"""Data sets by name, from a real server on this machine; hostile archives; no network."""

import gzip
import hashlib
import json
import socket
import stat
import subprocess
import threading
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from helpers import open_retrieval_set, open_train_set
from processes import python

from contaccum.catalog import download
from contaccum.catalog.download import MD5, beir_folder, dpr_file, unpack
from contaccum.errors import InputError
from contaccum.formats.dpr import read_questions

FILES = {
    "corpus.jsonl": '{"_id": "p", "title": "", "text": "some text"}\n',
    "queries.jsonl": '{"_id": "q", "text": "a query"}\n',
    "qrels/test.tsv": "query-id\tcorpus-id\tscore\nq\tp\t1\n",
}


class Server:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.requests: list[str] = []
        outer = self

        class Handler(SimpleHTTPRequestHandler):
            def log_message(self, format: str, *args: object) -> None:
                outer.requests.append(self.path)

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
        self.url = f"http://127.0.0.1:{self.http.server_port}"


@pytest.fixture
def server(tmp_path, monkeypatch) -> Iterator[Server]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    (tmp_path / "served").mkdir()
    server = Server(tmp_path / "served")
    thread = threading.Thread(target=server.http.serve_forever)
    thread.start()
    yield server
    server.http.shutdown()
    thread.join()
    server.http.server_close()


def archive(path: Path, entries: dict[str, str] | list[tuple[zipfile.ZipInfo | str, bytes]]) -> str:
    """Write a zip file; returns its MD5."""
    pairs = list(entries.items()) if isinstance(entries, dict) else entries
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as bundle:
        for name, data in pairs:
            bundle.writestr(name, data)
    return hashlib.md5(path.read_bytes()).hexdigest()


def beir_archive(path: Path, name: str) -> str:
    return archive(path, {f"{name}/{file}": text for file, text in FILES.items()})


def left(cache: Path) -> list[str]:
    """Names of all that stands in a cache, its locks aside."""
    return sorted(
        path.name for path in cache.rglob("*") if "locks" not in path.relative_to(cache).parts
    )


def test_a_name_is_downloaded_checked_unpacked_and_kept(server, tmp_path):
    md5 = beir_archive(server.folder / "scifact.zip", "scifact")
    folder = beir_folder("scifact", tmp_path / "cache", base_url=server.url, md5=md5)
    assert folder == tmp_path / "cache" / "scifact"
    assert left(tmp_path / "cache") == [
        "corpus.jsonl",
        "qrels",
        "queries.jsonl",
        "scifact",
        "test.tsv",
    ]
    assert open_retrieval_set(folder, "test").qrels == {"q": {"p": 1}}
    assert beir_folder("scifact", tmp_path / "cache", base_url=server.url) == folder
    assert server.requests == ["/scifact.zip"]


def test_an_archive_that_differs_from_its_published_checksum_is_refused(server, tmp_path):
    beir_archive(server.folder / "scifact.zip", "scifact")
    with pytest.raises(InputError, match=f"expected {MD5['scifact']}"):
        beir_folder("scifact", tmp_path / "cache", base_url=server.url)
    assert left(tmp_path / "cache") == []


def test_one_forum_of_cqadupstack(server, tmp_path):
    entries = {
        f"cqadupstack/{forum}/{file}": text
        for forum in ("tex", "unix")
        for file, text in FILES.items()
    }
    md5 = archive(server.folder / "cqadupstack.zip", entries)
    folder = beir_folder("cqadupstack/tex", tmp_path / "cache", base_url=server.url, md5=md5)
    assert open_retrieval_set(folder, "test").queries == {"q": "a query"}
    beir_folder("cqadupstack/unix", tmp_path / "cache", base_url=server.url)
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("scifacts", "no folder or data set has this name; expected a path, one of arguana, "),
        ("cqadupstack/cooking", "one of cqadupstack/android, "),
        ("scifact/..", "no folder or data set has this name"),
    ],
)
def test_names_that_cannot_be_fetched(name, words, tmp_path):
    with pytest.raises(InputError, match=words):
        beir_folder(name, tmp_path / "cache", base_url="http://127.0.0.1:9")
    assert not (tmp_path / "cache").exists()


def test_without_a_network_one_sentence_says_where_a_copy_may_be_put(tmp_path, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with socket.socket() as unused:  # bound and not listening: connections are refused
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(InputError, match="cannot be downloaded") as error:
            beir_folder("nq", tmp_path / "cache", base_url=url)
    assert f"at {tmp_path / 'cache' / 'nq'}, or give the path" in str(error.value)
    assert "\n" not in str(error.value)
    assert left(tmp_path / "cache") == []


def test_an_archive_that_the_server_lacks_is_named_with_the_status(server, tmp_path):
    with pytest.raises(InputError, match="HTTP status 404"):
        beir_folder("nq", tmp_path / "cache", base_url=server.url)


@contextmanager
def scripted(*answers: bytes) -> Iterator[tuple[str, list[bytes]]]:
    """A server that gives these answers, whole responses one a connection; its address and the
    requests it saw."""
    seen: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def give() -> None:
            for answer in answers:
                connection, _ = listener.accept()
                with connection:
                    seen.append(connection.recv(4096))
                    connection.sendall(answer)

        thread = threading.Thread(target=give, daemon=True)  # a failed test leaves it waiting
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", seen
        thread.join()


WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"
REST = (
    b"HTTP/1.1 206 Partial Content\r\nContent-Length: %d\r\n"
    b"Content-Range: bytes %d-%d/%d\r\nConnection: close\r\n\r\n"
)


@pytest.mark.parametrize("answer", ["rest", "whole file", "no rest", "cut rest"])
def test_a_broken_download_is_resumed(answer, tmp_path, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(download, "_CHUNK", 16)  # a chunk that the connection cuts is lost
    data = bytes(range(256)) * 4
    half = len(data) // 2
    whole, cache = WHOLE % len(data) + data, tmp_path / "files"
    rest = REST % (len(data) - half, half, len(data) - 1, len(data))
    second = {
        "rest": rest + data[half:],
        "whole file": whole,
        "no rest": b"HTTP/1.1 416 Range Not Satisfiable\r\nContent-Length: 0\r\nConnection: "
        b"close\r\n\r\n",
        "cut rest": rest + data[half:-16],
    }[answer]
    answers = [WHOLE % len(data) + data[:half], second]
    if answer == "no rest":
        answers.append(whole)
    with scripted(*answers) as (url, seen):
        with pytest.raises(InputError, match="cannot be downloaded"):
            dpr_file("nq-train", cache, base_url=url)
        part = cache / ".biencoder-nq-train.json.gz.unfinished"
        assert part.read_bytes() == data[:half]
        if answer == "cut rest":
            with pytest.raises(InputError, match="cannot be downloaded"):
                dpr_file("nq-train", cache, base_url=url)
            assert part.read_bytes() == data[:-16]
        else:
            assert dpr_file("nq-train", cache, base_url=url).read_bytes() == data
            assert left(cache) == ["biencoder-nq-train.json.gz"]
    assert b"Range" not in seen[0]
    assert b"Range: bytes=%d-" % half in seen[1]
    assert answer != "no rest" or b"Range" not in seen[2]


def test_the_rest_of_a_download_is_of_the_same_version(tmp_path, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(download, "_CHUNK", 16)
    old, new = b"o" * 64, b"n" * 64
    for number, (given, sent) in enumerate(
        [
            (b'ETag: "one"', b'If-Range: "one"'),
            (b'ETag: W/"one"\r\nLast-Modified: Sun', b"If-Range: Sun"),
            (b"X: y", None),
        ]
    ):
        head = WHOLE.replace(b"Connection", given + b"\r\nConnection") % 64
        cache = tmp_path / str(number)
        with scripted(head + old[:32], WHOLE % 64 + new) as (url, seen):
            with pytest.raises(InputError, match="cannot be downloaded"):
                dpr_file("nq-train", cache, base_url=url)
            assert dpr_file("nq-train", cache, base_url=url).read_bytes() == new
        assert left(cache) == ["biencoder-nq-train.json.gz"]
        assert b"Range: bytes=32-" in seen[1]
        assert (b"If-Range" in seen[1], sent is None or sent in seen[1]) == (sent is not None, True)


def test_what_a_process_killed_while_unpacking_left_is_swept(server, tmp_path):
    md5, cache = beir_archive(server.folder / "nq.zip", "nq"), tmp_path / "cache"
    call = (
        "import os, signal, sys\n"
        "from contaccum.catalog import download\n"
        "download.zipfile.ZipFile.extractall = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "download.beir_folder('nq', sys.argv[1], base_url=sys.argv[2], md5=sys.argv[3])\n"
    )
    assert (
        subprocess.run([python(), "-c", call, cache, server.url, md5], check=False).returncode == -9
    )
    half, archive = left(cache)
    assert (half.startswith(".nq."), archive) == (True, "nq.zip")
    assert beir_folder("nq", cache, base_url=server.url, md5=md5).is_dir()
    assert left(cache) == ["corpus.jsonl", "nq", "qrels", "queries.jsonl", "test.tsv"]


def test_processes_that_want_the_same_set_fetch_it_once(server, tmp_path):
    md5 = beir_archive(server.folder / "nq.zip", "nq")
    want = partial(beir_folder, "nq", tmp_path / "cache", base_url=server.url, md5=md5)
    with ThreadPoolExecutor(4) as pool:
        folders = {future.result() for future in [pool.submit(want) for _ in range(4)]}
    assert folders == {tmp_path / "cache" / "nq"}
    assert len(server.requests) == 1


def test_a_file_of_dpr_is_fetched_whole_and_kept_as_it_came(server, tmp_path, monkeypatch):
    record = {
        "question": "q",
        "answers": ["a"],
        "positive_ctxs": [{"title": "t", "text": "x", "passage_id": "7"}],
    }
    content = gzip.compress(
        json.dumps([record | {"negative_ctxs": [], "hard_negative_ctxs": []}]).encode()
    )
    served = server.folder / "data" / "retriever" / "biencoder-nq-train.json.gz"
    served.parent.mkdir(parents=True)
    served.write_bytes(content)
    file = dpr_file("nq-train", tmp_path / "cache", base_url=server.url)
    assert file.read_bytes() == content
    server.requests.clear()
    assert dpr_file("nq-train", tmp_path / "cache", base_url=server.url) == file
    assert server.requests == []
    (server.folder / "data" / "retriever" / "nq-test.qa.csv").write_text("who\t['she']\n")
    questions = dpr_file("nq-test-questions", tmp_path / "cache", base_url=server.url)
    assert next(read_questions(questions)).answers == ["she"]
    # by name, from the cache: nothing is fetched
    monkeypatch.setenv("CONTACCUM_CACHE", str(tmp_path))
    (tmp_path / "cache").rename(tmp_path / "dpr")
    assert open_train_set("dpr/nq-train").queries["text"][:] == ["q"]
    with pytest.raises(
        InputError,
        match="dpr/nq-trian: no DPR file has this name; expected dpr/ and one of psgs_w100",
    ):
        open_train_set("dpr/nq-trian")


@pytest.mark.parametrize("entry", ["nq/../../escaped", "nq//escaped"])
def test_entries_stay_inside_the_folder(tmp_path, entry):
    archive(tmp_path / "nq.zip", {"nq/corpus.jsonl": "", entry: "x"})
    unpack(tmp_path / "nq.zip", "nq", tmp_path / "deep" / "out")
    outside = [
        path
        for path in tmp_path.rglob("*escaped*")
        if tmp_path / "deep" / "out" not in path.parents
    ]
    assert not outside


def test_a_link_in_an_archive_becomes_a_file(tmp_path):
    link = zipfile.ZipInfo("nq/corpus.jsonl")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    archive(tmp_path / "nq.zip", [(link, b"/etc/passwd")])
    unpack(tmp_path / "nq.zip", "nq", tmp_path / "out")
    assert not (tmp_path / "out" / "corpus.jsonl").is_symlink()
    assert (tmp_path / "out" / "corpus.jsonl").read_bytes() == b"/etc/passwd"


def test_an_archive_without_the_folder_is_refused(tmp_path):
    for name in ("nq", "other/corpus.jsonl"):
        archive(tmp_path / "nq.zip", {name: "x"})
        with pytest.raises(InputError, match="has no folder 'nq'"):
            unpack(tmp_path / "nq.zip", "nq", tmp_path / "out")
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("fault", ["cut", "flipped"])
def test_a_damaged_archive_is_refused_and_nothing_is_left(tmp_path, fault):
    beir_archive(tmp_path / "nq.zip", "nq")
    data = (tmp_path / "nq.zip").read_bytes()
    content = data.index(b"corpus.jsonl") + len(b"corpus.jsonl") + 5
    broken = {
        "cut": data[:-30],
        "flipped": data[:content] + bytes([data[content] ^ 0xFF]) + data[content + 1 :],
    }[fault]
    (tmp_path / "nq.zip").write_bytes(broken)
    with pytest.raises(InputError, match="not a readable zip archive"):
        unpack(tmp_path / "nq.zip", "nq", tmp_path / "out" / "nq")
    assert not (tmp_path / "out" / "nq").exists()

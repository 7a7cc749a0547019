"""Data sets by name, from a real server on this machine; hostile archives; no network."""

import gzip
import hashlib
import io
import json
import random
import signal
import socket
import stat
import subprocess
import threading
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from forked import python
from opened import open_retrieval_set, open_train_set

from contaccum.catalog import download, fetch
from contaccum.catalog.download import MD5, beir_folder, dpr_file, unpack
from contaccum.data.dataset import open_dataset
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
    return sorted(path.name for path in cache.rglob("*") if "locks" not in path.relative_to(cache).parts)


def test_a_name_is_downloaded_checked_unpacked_and_kept(server, tmp_path):
    md5 = beir_archive(server.folder / "scifact.zip", "scifact")
    folder = beir_folder("scifact", tmp_path / "cache", base_url=server.url, md5=md5)
    assert folder == tmp_path / "cache" / "scifact"
    assert left(tmp_path / "cache") == ["corpus.jsonl", "qrels", "queries.jsonl", "scifact", "test.tsv"]
    assert open_retrieval_set(folder, "test").qrels == {"q": {"p": 1}}
    assert beir_folder("scifact", tmp_path / "cache", base_url=server.url) == folder
    assert server.requests == ["/scifact.zip"]


def test_an_archive_that_differs_from_its_published_checksum_is_refused(server, tmp_path):
    beir_archive(server.folder / "scifact.zip", "scifact")
    with pytest.raises(InputError, match=f"expected {MD5['scifact']}"):
        beir_folder("scifact", tmp_path / "cache", base_url=server.url)
    assert left(tmp_path / "cache") == []


def test_a_path_is_a_path_though_a_data_set_has_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scifact").mkdir()
    assert fetch("scifact") == Path("scifact")
    assert not open_dataset("scifact").policy.repair


def test_the_projects_cache_is_the_place_where_nothing_else_is_said(server, tmp_path):
    md5 = beir_archive(server.folder / "fiqa.zip", "fiqa")
    assert beir_folder("fiqa", base_url=server.url, md5=md5) == tmp_path / "cache" / "beir" / "fiqa"


def test_one_forum_of_cqadupstack(server, tmp_path):
    entries = {f"cqadupstack/{forum}/{file}": text for forum in ("tex", "unix") for file, text in FILES.items()}
    md5 = archive(server.folder / "cqadupstack.zip", entries)
    folder = beir_folder("cqadupstack/tex", tmp_path / "cache", base_url=server.url, md5=md5)
    assert open_retrieval_set(folder, "test").queries == {"q": "a query"}
    beir_folder("cqadupstack/unix", tmp_path / "cache", base_url=server.url)
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("scifacts", "no folder or data set has this name; expected a path, one of arguana, "),
        ("../etc", "no folder or data set"),
        ("x" * 5000, "no folder or data set"),
        ("robust04", "licence forbids the download"),
        ("cqadupstack", "not a data set; expected cqadupstack/ and one of"),
        ("cqadupstack/cooking", "not a data set; expected cqadupstack/ and one of"),
        ("scifact/..", "scifact/..: not a data set; scifact has no parts"),
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


def test_a_download_beyond_the_limit_is_stopped(server, tmp_path, monkeypatch):
    md5 = archive(server.folder / "nq.zip", [("nq/corpus.jsonl", bytes(hashlib.sha512(b"").digest()) * 40)])
    size = (server.folder / "nq.zip").stat().st_size
    monkeypatch.setattr(download, "MAX_DOWNLOAD", size - 1)
    with pytest.raises(InputError, match=f"more than {size - 1} bytes"):
        beir_folder("nq", tmp_path / "cache", base_url=server.url, md5=md5)
    assert left(tmp_path / "cache") == []
    monkeypatch.setattr(download, "MAX_DOWNLOAD", size)
    assert beir_folder("nq", tmp_path / "cache", base_url=server.url, md5=md5).is_dir()


@contextmanager
def scripted(*answers: bytes) -> Iterator[tuple[str, list[bytes]]]:
    """A server that gives these answers, whole responses one a connection; its address and the requests it saw."""
    seen: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def give() -> None:
            for answer in answers:
                connection, _ = listener.accept()
                with connection:
                    seen.append(connection.recv(4096))
                    connection.sendall(answer)

        thread = threading.Thread(target=give)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", seen
        thread.join()


def test_a_broken_download_is_continued_where_the_server_allows(tmp_path, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    md5 = beir_archive(tmp_path / "nq.zip", "nq")
    data = (tmp_path / "nq.zip").read_bytes()
    half, cache = len(data) // 32 * 16, tmp_path / "cache"
    first = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(data) + data[:half]
    head = b"HTTP/1.1 206 Partial Content\r\nContent-Length: %d\r\nContent-Range: bytes %d-%d/%d\r\n\r\n"
    monkeypatch.setattr(download, "CHUNK", 16)  # what is read when the connection breaks is lost up to one chunk
    second = head % (len(data) - half, half, len(data) - 1, len(data)) + data[half:]
    with scripted(first, second) as (url, seen):
        with pytest.raises(InputError, match="cannot be downloaded"):
            beir_folder("nq", cache, base_url=url, md5=md5)
        assert left(cache) == [".nq.zip.part"]
        folder = beir_folder("nq", cache, base_url=url, md5=md5)
    assert b"Range" not in seen[0]
    assert b"Range: bytes=%d-" % half in seen[1]
    assert open_retrieval_set(folder, "test").qrels == {"q": {"p": 1}}
    assert not list(cache.glob(".*"))


def test_what_a_process_killed_while_unpacking_left_is_swept(server, tmp_path):
    md5, cache = beir_archive(server.folder / "nq.zip", "nq"), tmp_path / "cache"
    call = (
        "import os, signal, sys\n"
        "from contaccum.catalog import download\n"
        "download.zipfile.ZipFile.extract = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "download.beir_folder('nq', sys.argv[1], base_url=sys.argv[2], md5=sys.argv[3])\n"
    )
    assert subprocess.run([python(), "-c", call, cache, server.url, md5], check=False).returncode == -9
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
    record = {"question": "q", "answers": ["a"], "positive_ctxs": [{"title": "t", "text": "x", "passage_id": "7"}]}
    content = gzip.compress(json.dumps([record | {"negative_ctxs": [], "hard_negative_ctxs": []}]).encode())
    served = server.folder / "data" / "retriever" / "biencoder-nq-train.json.gz"
    served.parent.mkdir(parents=True)
    served.write_bytes(content[:-3])
    for _ in range(2):
        with pytest.raises(InputError, match=r"biencoder-nq-train.json.gz: the gzip stream is damaged or truncated"):
            dpr_file("nq-train", tmp_path / "cache", base_url=server.url)
        assert left(tmp_path / "cache") == []
    served.write_bytes(content)
    file = dpr_file("nq-train", tmp_path / "cache", base_url=server.url)
    assert file.read_bytes() == content
    server.requests.clear()
    assert dpr_file("nq-train", tmp_path / "cache", base_url=server.url) == file
    assert server.requests == []
    (server.folder / "data" / "retriever" / "nq-test.qa.csv").write_text("who\t['she']\n")
    questions = dpr_file("nq-test-questions", tmp_path / "cache", base_url=server.url)
    assert next(read_questions(questions)).answers == ["she"]
    monkeypatch.setenv("CONTACCUM_CACHE", str(tmp_path))  # by name, from the cache: nothing is fetched
    (tmp_path / "cache").rename(tmp_path / "dpr")
    assert open_train_set("dpr/nq-train").queries["text"][:] == ["q"]
    with pytest.raises(InputError, match="dpr/nq-trian: no DPR file has this name; expected dpr/ and one of psgs_w100"):
        open_train_set("dpr/nq-trian")


def test_a_downloaded_dpr_file_needs_no_lock(tmp_path):
    """The cache may be read-only, and another process may be downloading another file for hours."""
    file = tmp_path / "cache" / "dpr" / "nq-test.qa.csv"
    file.parent.mkdir(parents=True)
    file.touch()
    (tmp_path / "cache" / "locks").touch()  # no lock can be created
    assert dpr_file("nq-test-questions") == file
    with pytest.raises(InputError, match="cannot be written"):  # negative control
        dpr_file("nq-train")


def test_a_broken_download_of_a_gzipped_file_is_continued(tmp_path, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(download, "CHUNK", 16)
    data = gzip.compress(random.Random(0).randbytes(800))
    half = len(data) // 32 * 16
    first = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(data) + data[:half]
    head = b"HTTP/1.1 206 Partial Content\r\nContent-Length: %d\r\nContent-Range: bytes %d-%d/%d\r\n\r\n"
    second = head % (len(data) - half, half, len(data) - 1, len(data)) + data[half:]
    with scripted(first, second) as (url, seen):
        with pytest.raises(InputError, match=r"nq-dev.json.gz: not found in .*Put the file at"):
            dpr_file("nq-dev", tmp_path, base_url=url)
        assert dpr_file("nq-dev", tmp_path, base_url=url).read_bytes() == data
    assert b"Range: bytes=%d-" % half in seen[1]


def test_an_interrupted_download_is_continued(tmp_path, monkeypatch):
    """Ctrl-C in the middle; and once more behind the last byte, before the whole is tried."""
    monkeypatch.setattr(download, "CHUNK", 1 << 14)  # larger than what an open file holds back
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    data = gzip.compress(random.Random(0).randbytes(1 << 17))
    part = tmp_path / ".biencoder-nq-dev.json.gz.part"
    script = (
        "import sys; from pathlib import Path; from contaccum.catalog import download; "
        "from contaccum.catalog.download import dpr_file;"
        f"download.CHUNK = {download.CHUNK}; dpr_file('nq-dev', Path(sys.argv[1]), base_url=sys.argv[2])"
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(60)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        process = subprocess.Popen([python(), "-c", script, str(tmp_path), url], stderr=subprocess.PIPE, text=True)
        connection, _ = listener.accept()
        with connection:
            asked_first = connection.recv(4096)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(data) + data[: len(data) // 2])
            while process.poll() is None and not (part.is_file() and part.stat().st_size):
                time.sleep(0.01)
            process.send_signal(signal.SIGINT)
            said = process.communicate(timeout=60)[1]
            assert "KeyboardInterrupt" in said
    kept = part.stat().st_size
    assert data.startswith(part.read_bytes())
    head = b"HTTP/1.1 206 Partial Content\r\nContent-Length: %d\r\nContent-Range: bytes %d-%d/%d\r\n\r\n"
    second = head % (len(data) - kept, kept, len(data) - 1, len(data)) + data[kept:]
    end = b"HTTP/1.1 416 Range Not Satisfiable\r\nContent-Range: bytes */%d\r\nContent-Length: 0\r\n\r\n" % len(data)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with scripted(second, end) as (url, asked):
        with monkeypatch.context() as patch:
            patch.setattr(download, "_refuse_broken_gzip", interrupted)
            with pytest.raises(KeyboardInterrupt):
                dpr_file("nq-dev", tmp_path, base_url=url)
        assert dpr_file("nq-dev", tmp_path, base_url=url).read_bytes() == data
    assert b"Range" not in asked_first
    for start, request in zip((kept, len(data)), asked, strict=True):
        assert b"Range: bytes=%d-" % start in request
    assert not part.exists()


@pytest.mark.parametrize("rest", [b"something else", b"x" * 100_000])
def test_a_server_that_does_not_continue_gives_all_again(rest, server, tmp_path):
    md5 = beir_archive(server.folder / "nq.zip", "nq")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / ".nq.zip.part").write_bytes(rest)
    assert beir_folder("nq", tmp_path / "cache", base_url=server.url, md5=md5).is_dir()
    assert left(tmp_path / "cache") == ["corpus.jsonl", "nq", "qrels", "queries.jsonl", "test.tsv"]


@pytest.mark.parametrize("status", [b"416 Range Not Satisfiable", b"206 Partial Content\r\nContent-Range: bytes 0-0/9"])
def test_a_part_that_the_server_cannot_continue_is_dropped(status, tmp_path, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    md5 = beir_archive(tmp_path / "nq.zip", "nq")
    data = (tmp_path / "nq.zip").read_bytes()
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / ".nq.zip.part").write_bytes(b"x" * 100_000)
    refusal = b"HTTP/1.1 " + status + b"\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    with scripted(refusal, b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(data) + data) as (url, _):
        assert beir_folder("nq", tmp_path / "cache", base_url=url, md5=md5).is_dir()


@pytest.mark.parametrize("status", [b"503 Service Unavailable", b"429 Too Many Requests", b"404 Not Found"])
def test_an_error_of_the_server_keeps_the_part(status, tmp_path, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    data = gzip.compress(random.Random(0).randbytes(800))
    part = tmp_path / ".biencoder-nq-dev.json.gz.part"
    part.write_bytes(data[:400])
    page = b"HTTP/1.1 " + status + b"\r\nContent-Length: 5\r\nConnection: close\r\n\r\nerror"
    head = b"HTTP/1.1 206 Partial Content\r\nContent-Length: %d\r\nContent-Range: bytes 400-%d/%d\r\n\r\n"
    with scripted(page, head % (len(data) - 400, len(data) - 1, len(data)) + data[400:]) as (url, seen):
        with pytest.raises(InputError, match=f"cannot be downloaded .HTTP status {status[:3].decode()}"):
            dpr_file("nq-dev", tmp_path, base_url=url)
        assert part.read_bytes() == data[:400]
        assert dpr_file("nq-dev", tmp_path, base_url=url).read_bytes() == data
    assert b"Range: bytes=400-" in seen[1]


def test_halves_that_do_not_belong_together_are_refused_and_forgotten(tmp_path, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / ".nq.zip.part").write_bytes(b"old")
    answer = b"HTTP/1.1 206 Partial Content\r\nContent-Length: 3\r\nContent-Range: bytes 3-5/6\r\n\r\nnew"
    with scripted(answer) as (url, _), pytest.raises(InputError, match="the archive has MD5"):
        beir_folder("nq", tmp_path / "cache", base_url=url)
    assert left(tmp_path / "cache") == []


def test_what_came_of_an_archive_without_a_checksum_is_not_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nPK\3\4"
    with scripted(answer) as (url, _), pytest.raises(InputError, match="cannot be downloaded"):
        beir_folder("nq-train", tmp_path / "cache", base_url=url)
    assert left(tmp_path / "cache") == []


def link(name: str, kind: int = stat.S_IFLNK) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name)
    entry.create_system = 3
    entry.external_attr = (kind | 0o777) << 16
    return entry


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("nq/../../evil.txt", "has a path outside"),
        ("../evil.txt", "has a path outside"),
        ("/tmp/evil.txt", "has a path outside"),
        ("nq\\..\\..\\evil.txt", "has a path outside"),
        ("C:/evil.txt", "has a path outside"),
        (link("nq/corpus.jsonl"), "is a link or device"),
        (link("nq/corpus.jsonl", stat.S_IFIFO), "is a link or device"),
    ],
)
def test_hostile_entries_are_refused_and_nothing_is_unpacked(tmp_path, entry, words):
    archive(tmp_path / "nq.zip", [("nq/queries.jsonl", b"{}"), (entry, b"/etc/passwd")])
    with pytest.raises(InputError, match=words):
        unpack(tmp_path / "nq.zip", "nq", tmp_path / "out" / "nq")
    assert not list(tmp_path.rglob("*evil*"))
    assert not (tmp_path / "out").exists()


def test_a_bomb_within_the_limit_is_told_by_its_ratio(tmp_path):
    """30 MB of zeros in 30 kB; the same bytes beside as many that do not shrink are let in."""
    archive(tmp_path / "nq.zip", [("nq/corpus.jsonl", bytes(30_000_000))])
    with pytest.raises(InputError, match=r"unpacks to more than \d+ bytes"):
        unpack(tmp_path / "nq.zip", "nq", tmp_path / "out" / "nq")
    assert not (tmp_path / "out").exists()
    archive(
        tmp_path / "nq.zip", [("nq/corpus.jsonl", bytes(30_000_000)), ("nq/queries.jsonl", random.randbytes(400_000))]
    )
    unpack(tmp_path / "nq.zip", "nq", tmp_path / "out" / "nq")


def test_an_entry_with_more_bytes_than_it_announces_is_refused(tmp_path):
    archive(tmp_path / "nq.zip", [("nq/corpus.jsonl", random.randbytes(2000))])
    unpack(tmp_path / "nq.zip", "nq", tmp_path / "whole" / "nq", limit=2000)
    data = bytearray((tmp_path / "nq.zip").read_bytes())
    announced = data.index(b"PK\x01\x02") + 24  # size after unpacking, in the first directory entry
    data[announced : announced + 4] = (10).to_bytes(4, "little")
    (tmp_path / "false.zip").write_bytes(data)
    with pytest.raises(InputError, match="not a readable zip archive"):
        unpack(tmp_path / "false.zip", "nq", tmp_path / "out" / "nq", limit=1000)
    assert not (tmp_path / "out").exists()


def test_a_file_with_the_name_of_the_folder_is_no_folder(tmp_path):
    archive(tmp_path / "nq.zip", {"nq": "{}", "other/corpus.jsonl": "{}"})
    with pytest.raises(InputError, match="has no folder 'nq'"):
        unpack(tmp_path / "nq.zip", "nq", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_bomb_is_stopped_by_the_size_that_it_unpacks_to(tmp_path):
    archive(
        tmp_path / "nq.zip", [("nq/corpus.jsonl", bytes(30_000_000)), ("nq/queries.jsonl", random.randbytes(400_000))]
    )
    with pytest.raises(InputError, match=r"unpacks to more than \d+ bytes"):
        unpack(tmp_path / "nq.zip", "nq", tmp_path / "out" / "nq", limit=30_399_999)
    assert not (tmp_path / "out").exists()
    unpack(tmp_path / "nq.zip", "nq", tmp_path / "out" / "nq", limit=30_400_000)
    assert (tmp_path / "out" / "nq" / "corpus.jsonl").stat().st_size == 30_000_000


def test_many_entries_an_encrypted_one_and_another_layout_are_refused(tmp_path):
    archive(tmp_path / "many.zip", [(f"nq/{n}", b"") for n in range(1001)])
    with pytest.raises(InputError, match="has 1001 entries"):
        unpack(tmp_path / "many.zip", "nq", tmp_path / "out")
    archive(tmp_path / "other.zip", {"other/corpus.jsonl": "{}"})
    with pytest.raises(InputError, match="has no folder 'nq'"):
        unpack(tmp_path / "other.zip", "nq", tmp_path / "out")
    beir_archive(tmp_path / "plain.zip", "nq")
    data = bytearray((tmp_path / "plain.zip").read_bytes())
    data[data.index(b"PK\x01\x02") + 8] |= 1  # the flag of encryption in the first directory entry
    (tmp_path / "encrypted.zip").write_bytes(data)
    with pytest.raises(InputError, match="is encrypted or has an unknown compression"):
        unpack(tmp_path / "encrypted.zip", "nq", tmp_path / "out")
    with zipfile.ZipFile(tmp_path / "rare.zip", "w", zipfile.ZIP_LZMA) as bundle:
        bundle.writestr("nq/corpus.jsonl", "{}")
    with pytest.raises(InputError, match="has an unknown compression"):
        unpack(tmp_path / "rare.zip", "nq", tmp_path / "out")


@pytest.mark.parametrize("fault", ["no zip", "cut", "flipped", "name"])
def test_a_damaged_archive_is_refused_and_nothing_is_left(tmp_path, fault):
    beir_archive(tmp_path / "nq.zip", "nq")
    data = (tmp_path / "nq.zip").read_bytes()
    content = data.index(b"corpus.jsonl") + len(b"corpus.jsonl") + 5
    directory = data.index(b"PK\x01\x02")
    broken = {
        "no zip": b"<html>not found</html>",
        "cut": data[:-30],
        "flipped": data[:content] + bytes([data[content] ^ 0xFF]) + data[content + 1 :],
        # its first name is said to be UTF-8, and is not
        "name": data[: directory + 9]
        + b"\x08"
        + data[directory + 10 : directory + 46]
        + b"\xff"
        + data[directory + 47 :],
    }[fault]
    (tmp_path / "nq.zip").write_bytes(broken)
    with pytest.raises(InputError, match="not a readable zip archive"):
        unpack(tmp_path / "nq.zip", "nq", tmp_path / "out" / "nq")
    assert not (tmp_path / "out" / "nq").exists()


def test_what_else_is_in_an_archive_is_left_out(tmp_path):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as bundle:
        for name in ("./", "nq/", "nq/corpus.jsonl", "__MACOSX/nq/._corpus.jsonl", "nq2/corpus.jsonl"):
            bundle.writestr(name, "")
    (tmp_path / "nq.zip").write_bytes(buffer.getvalue())
    unpack(tmp_path / "nq.zip", "nq", tmp_path / "out")
    assert left(tmp_path / "out") == ["corpus.jsonl"]


@pytest.mark.parametrize(
    ("length", "wrong"),
    [
        *((each, False) for each in (b"abc", b"-5", b"1e3", b"0x10", b"\xb2", b"", b"9" * 5000)),
        *((each, True) for each in (b"5, 6", b"9" * 19)),
    ],
)
def test_wrong_content_length_is_one_sentence_or_ignored(length, wrong, tmp_path, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    md5 = beir_archive(tmp_path / "nq.zip", "nq")
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: " + length + b"\r\nConnection: close\r\n\r\n"
    refused = pytest.raises(InputError, match="cannot be downloaded")
    with scripted(answer + (tmp_path / "nq.zip").read_bytes()) as (url, _), refused if wrong else nullcontext():
        assert beir_folder("nq", tmp_path / "cache", base_url=url, md5=md5).is_dir()


@pytest.mark.parametrize(
    "target",
    [
        b"http://[::1",
        b"http://a..b/x",
        b"http://" + b"a" * 300,
        b"ftp://127.0.0.1/x",
        b"http://127.0.0.1:99999/",
        b"nonsense://x",
        b"http://:80:80/",
        b"http://%zz/",
        b"http://\xff\xfe/",
        b"//",
    ],
)
def test_redirect_to_a_broken_address_is_one_sentence(target, tmp_path, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setattr(download, "_TIMEOUT", 0.5)  # "//" is the same server, which answers once
    answer = b"HTTP/1.1 302 Found\r\nLocation: " + target + b"\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    with scripted(answer) as (url, _), pytest.raises(InputError, match="cannot be downloaded") as error:
        beir_folder("nq", tmp_path / "cache", base_url=url)
    assert "\n" not in str(error.value)
    assert left(tmp_path / "cache") == []


@contextmanager
def dripping(data: bytes, head: bytes, pause: float) -> Iterator[str]:
    """Serve ``data`` one byte at a time to the first connection; yield the address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def drip() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(head)
                for byte in data:
                    try:
                        connection.sendall(bytes([byte]))
                    except OSError:  # the client left
                        return
                    time.sleep(pause)

        thread = threading.Thread(target=drip)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join()


@pytest.mark.parametrize("chunked", [False, True])
def test_slow_server_is_left_and_its_bytes_are_kept(chunked, tmp_path, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(download, "_TIMEOUT", 0.6)
    data = gzip.compress(random.Random(0).randbytes(5000))
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"%x\r\n" % len(data) if chunked else b""
    head = head or b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(data)
    began = time.monotonic()
    with (
        dripping(data, head, 0.02) as url,
        pytest.raises(
            InputError,
            match=r"nq-dev.json.gz cannot be downloaded \(the server is too slow: received \d+ bytes in 1 s\)",
        ),
    ):
        dpr_file("nq-dev", tmp_path, base_url=url)
    assert time.monotonic() - began < 10
    kept = (tmp_path / ".biencoder-nq-dev.json.gz.part").read_bytes()
    assert 5 < len(kept) < 1000
    assert data.startswith(kept)
    head = b"HTTP/1.1 206 Partial Content\r\nContent-Length: %d\r\nContent-Range: bytes %d-%d/%d\r\n\r\n"
    rest = head % (len(data) - len(kept), len(kept), len(data) - 1, len(data)) + data[len(kept) :]
    with scripted(rest) as (url, seen):
        assert dpr_file("nq-dev", tmp_path, base_url=url).read_bytes() == data
    assert b"Range: bytes=%d-" % len(kept) in seen[0]


def test_server_above_the_minimum_rate_is_not_left(tmp_path, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(download, "_TIMEOUT", 0.2)
    monkeypatch.setattr(download, "_MIN_RATE", 10)
    data = gzip.compress(b"some questions " * 5)
    with dripping(data, b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(data), 0.02) as url:
        assert dpr_file("nq-dev", tmp_path, base_url=url).read_bytes() == data

"""A Hub of our own: it lists the files of data sets and gives them, whole or from a byte on, as the real one's addresses do."""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

LARGE = (".gz", ".parquet")
"""Endings of files that the Hub keeps as large ones, known by their SHA-256."""


def git_name(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class HubServer:
    """Serves ``folder/owner/name/...`` under any commit's name. ``cut`` and ``other`` are faults, by path inside a repository."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked: list[str] = []
        """Paths of files that were asked for, with the first byte where that is not 0."""
        self.commits: set[str] = set()
        self.tokens: set[str | None] = set()
        self.cut: dict[str, int] = {}  # bytes after which the connection breaks, once
        self.other: dict[str, bytes] = {}  # what is given in the place of what is listed
        self.extra: list[dict] = []  # further entries of a list
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.answer(self)

            def log_message(self, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.http.shutdown()
        self.thread.join()
        self.http.server_close()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        parts = request.path.partition("?")[0].strip("/").split("/")
        if "datasets" not in parts[:2]:
            return self.send(request, 404, b'{"error": "not found"}')
        self.tokens.add(request.headers.get("Authorization"))
        listing = parts[0] == "api"
        owner, name, verb, commit, *rest = parts[2 if listing else 1 :]
        self.commits.add(commit)
        root = self.folder / owner / name
        if listing and root.is_dir() and verb == "tree":
            return self.send(request, 200, json.dumps([*self.entries(root), *self.extra]).encode())
        path = "/".join(rest)
        if listing or not (root / path).is_file():
            return self.send(request, 404, b'{"error": "not found"}')
        start = int((request.headers.get("Range") or "bytes=0-").removeprefix("bytes=").rstrip("-"))
        self.asked.append(f"{path}@{start}" if start else path)
        content = self.other.get(path) or (root / path).read_bytes()
        return self.send(request, 206 if start else 200, content, start, self.cut.pop(path, None))

    def entries(self, root: Path) -> list[dict]:
        found: list[dict] = []
        for path in sorted(root.rglob("*")):
            name = path.relative_to(root).as_posix()
            if path.is_dir():
                found.append({"type": "directory", "path": name, "oid": "0" * 40})
                continue
            content = path.read_bytes()
            entry = {"type": "file", "path": name, "size": len(content), "oid": git_name(content)}
            if name.endswith(LARGE):  # its oid is then that of a file that points to it
                large = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
                entry |= {"oid": git_name(b"pointer"), "lfs": large}
            found.append(entry)
        return found

    def send(
        self, request: BaseHTTPRequestHandler, status: int, content: bytes, start: int = 0, cut: int | None = None
    ) -> None:
        request.send_response(status)
        request.send_header("Content-Length", str(len(content) - start))
        if start:
            request.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        request.end_headers()
        request.wfile.write(content[start:cut])

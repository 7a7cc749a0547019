"""Local server with the addresses and headers that huggingface_hub and datasets ask the Hub for."""

import gzip
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote

import datasets
import huggingface_hub
import pytest
from datasets import Dataset
from tiny_data import lines, write

LARGE = (".gz", ".parquet")
"""Endings of files that the Hub stores as large files, with their SHA-256."""
MAIN = "0" * 39 + "1"
"""Commit of the branch main."""


def git_name(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class HubServer:
    """Serves the data sets and models ``folder/owner/name/...`` at any commit. By path inside the
    repository, ``cut`` breaks a download, and ``status`` fails every request."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked: list[str] = []
        """Paths of downloaded files, with the first byte where that is not 0."""
        self.commits: set[str] = set()
        self.tokens: set[str | None] = set()
        self.cut: dict[str, int] = {}  # bytes after which the connection breaks, once
        self.status: dict[str, int] = {}
        self.extra: list[dict] = []  # more entries of each listing
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.answer(self)

            do_HEAD = do_POST = do_GET

            def log_message(self, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True)
        self.thread.start()

    def connect(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make this the Hub, with its caches beside the folder."""
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        constants, cache = huggingface_hub.constants, self.folder.parent
        monkeypatch.setattr(constants, "ENDPOINT", self.url)
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", self.url)
        model = f"{self.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", model)
        data = f"{self.url}/datasets/{{repo_id}}/resolve/{{revision}}/{{path}}"
        monkeypatch.setattr(datasets.config, "HUB_DATASETS_URL", data)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache / "hub"))
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache / "datasets")
        plug(monkeypatch, True)

    def close(self) -> None:
        self.http.shutdown()
        self.thread.join()
        self.http.server_close()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0)).decode()
        parts = unquote(request.path.partition("?")[0]).strip("/").split("/")
        listing = parts[0] == "api"
        parts = parts[listing:]
        if parts[0] in ("datasets", "models"):
            parts = parts[1:]
        if len(parts) < 2:
            return self.send(request, 404, b"")
        self.tokens.add(request.headers.get("Authorization"))
        owner, name, *rest = parts
        root = self.folder / owner / name
        if not root.is_dir():
            return self.send(request, 404, b"", error="RepoNotFound")
        verb, revision, *path = rest or ["revision", "main"]
        commit = MAIN if revision == "main" else revision
        self.commits.add(commit)
        if not listing:
            return self.give(request, root / "/".join(path), "/".join(path), commit)
        if verb == "revision":
            files = [
                {"rfilename": entry["path"]}
                for entry in self.entries(root)
                if entry["type"] == "file"
            ]
            found: object = {
                "id": f"{owner}/{name}",
                "sha": commit,
                "private": False,
                "tags": [],
                "siblings": files,
            }
        elif verb == "paths-info":
            wanted = (
                parse_qs(body)["paths"] if not body.startswith("{") else json.loads(body)["paths"]
            )
            found = [entry for entry in self.entries(root) if entry["path"] in wanted]
        else:
            under = "/".join(path)
            recursive = "recursive=true" in request.path.casefold()
            found = [
                entry for entry in self.entries(root) if inside(entry["path"], under, recursive)
            ]
            if under and not (root / under).is_dir():
                return self.send(request, 404, b"", error="EntryNotFound")
        return self.send(request, 200, json.dumps(found).encode(), {"X-Repo-Commit": commit})

    def give(self, request: BaseHTTPRequestHandler, file: Path, path: str, commit: str) -> None:
        headers = {"X-Repo-Commit": commit}
        if path in self.status:
            return self.send(request, self.status[path], b"")
        if not file.is_file():
            return self.send(request, 404, b"", headers, error="EntryNotFound")
        content = file.read_bytes()
        start = int(
            (request.headers.get("Range") or "bytes=0-").removeprefix("bytes=").split("-")[0]
        )
        large = path.endswith(LARGE)
        headers["ETag"] = f'"{hashlib.sha256(content).hexdigest() if large else git_name(content)}"'
        if large:
            headers["X-Linked-Size"], headers["X-Linked-ETag"] = str(len(content)), headers["ETag"]
        if request.command == "HEAD":
            return self.send(request, 200, content, headers)
        self.asked.append(f"{path}@{start}" if start else path)
        return self.send(
            request, 206 if start else 200, content, headers, start, self.cut.pop(path, None)
        )

    def entries(self, root: Path) -> list[dict]:
        found: list[dict] = [*self.extra]
        for path in sorted(root.rglob("*")):
            name = path.relative_to(root).as_posix()
            if path.is_dir():
                found.append({"type": "directory", "path": name, "oid": "0" * 40})
                continue
            content = path.read_bytes()
            entry = {"type": "file", "path": name, "size": len(content), "oid": git_name(content)}
            if name.endswith(LARGE):  # its oid is that of a pointer file
                large = {
                    "oid": hashlib.sha256(content).hexdigest(),
                    "size": len(content),
                    "pointerSize": 130,
                }
                entry |= {"oid": git_name(b"pointer"), "lfs": large}
            found.append(entry)
        return found

    def send(
        self,
        request: BaseHTTPRequestHandler,
        status: int,
        content: bytes,
        headers: dict[str, str] | None = None,
        start: int = 0,
        cut: int | None = None,
        error: str = "",
    ) -> None:
        request.send_response(status)
        request.send_header("Content-Length", str(len(content) - start))
        for name, value in {
            **(headers or {}),
            **({"X-Error-Code": error} if error else {}),
        }.items():
            request.send_header(name, value)
        if start:
            request.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(content[start:cut])


def plug(monkeypatch: pytest.MonkeyPatch, connected: bool) -> None:
    """Allow requests to the Hub, or refuse them without sending a packet."""
    for constants in (huggingface_hub.constants, datasets.config):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", not connected)


def inside(path: str, under: str, recursive: bool) -> bool:
    """Return whether a listing of the folder ``under`` has this path."""
    rest = path.removeprefix(f"{under}/") if under else path
    return (not under or rest != path) and (recursive or "/" not in rest)


Parts = dict[str, dict[str, tuple[str, dict[str, list]]]]
"""By configuration and split the path of a file and its columns."""


def card(root: Path, parts: Parts) -> None:
    """A repository of the Hub: files in the form that their names end in, and a README that names
    them."""
    head = ["---", "configs:"]
    for name, splits in parts.items():
        head += [f"- config_name: {name}", "  data_files:"]
        for split, (path, columns) in splits.items():
            head += [f"  - split: {split}", f"    path: {path.replace('-00000-of-00001', '-*')}"]
            rows = Dataset.from_dict(columns)
            if path.endswith(".parquet"):
                (root / path).parent.mkdir(parents=True, exist_ok=True)
                rows.to_parquet(root / path)
            elif path.endswith(".csv"):
                rows.to_csv(write(root / path, ""))
            else:
                text = lines(*rows).encode()
                write(root / path, gzip.compress(text) if path.endswith(".gz") else text)
    write(root / "README.md", "\n".join([*head, "---", "# A card", ""]))

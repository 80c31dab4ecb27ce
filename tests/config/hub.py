"""A Hugging Face cache on disk as huggingface_hub lays it out, and a hub on loopback that it can download from."""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def fill_cache(
    cache: Path, name: str, files: Path, *, revision: str = "main", commit: str = COMMIT, without: tuple[str, ...] = ()
) -> Path:
    """`files` as the model `name`: blobs by hash, a snapshot of links to them, a ref. Returns the snapshot."""
    repository = cache / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / commit
    for folder in (repository / "blobs", repository / "refs", snapshot):
        folder.mkdir(parents=True, exist_ok=True)
    (repository / "refs" / revision).write_text(commit)
    for path in files.rglob("*"):
        if path.name in without or path.is_dir():
            continue
        blob = repository / "blobs" / hashlib.sha256(path.read_bytes()).hexdigest()
        if not blob.exists():
            os.link(path, blob)
        link = snapshot / path.relative_to(files)
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    return snapshot


class Hub:
    """Serves `files` of one model by the routes that huggingface_hub asks. One is gated, others are not there. A body
    of `stalled` stops half way until the hub ends."""

    def __init__(
        self, name: str, files: dict[str, bytes], gated: str = "acme/gated", stalled: tuple[str, ...] = ()
    ) -> None:
        self.files = files
        self.asked: list[str] = []
        self.halfway = threading.Event()  # a body has stopped
        self._ended = threading.Event()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.answer(body=True)

            def do_HEAD(self) -> None:
                self.answer(body=False)

            def answer(self, *, body: bool) -> None:
                path = self.path.partition("?")[0]
                hub.asked.append(f"{self.command} {path}")
                if path.startswith(f"/api/models/{gated}"):
                    return self.reply(403, b"{}", body, **{"X-Error-Code": "GatedRepo"})
                if path == f"/api/models/{name}/revision/main":
                    siblings = [sibling(*item) for item in files.items()]
                    about = {"id": name, "sha": COMMIT, "siblings": siblings}
                    return self.reply(200, json.dumps(about).encode(), body)
                if path.startswith(f"/api/models/{name}/revision/"):
                    return self.reply(404, b"{}", body, **{"X-Error-Code": "RevisionNotFound"})
                found = re.fullmatch(f"/{name}/resolve/main/(.+)", path)
                if found and found[1] in files:
                    data = files[found[1]]
                    stop = found[1] in stalled
                    headers = {"ETag": f'"{digest(data)}"', "X-Repo-Commit": COMMIT}
                    return self.reply(200, data, body, stop=stop, **headers)
                return self.reply(404, b"{}", body, **{"X-Error-Code": "RepoNotFound"})

            def reply(self, status: int, data: bytes, body: bool, *, stop: bool = False, **headers: str) -> None:
                self.send_response(status)
                for key, value in {"Content-Type": "application/json", **headers}.items():
                    self.send_header(key, value)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                if body and stop:
                    self.wfile.write(data[: len(data) // 2])
                    hub.halfway.set()
                    hub._ended.wait(60)
                elif body:
                    self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def answer_here(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Lets huggingface_hub in this process ask this hub."""
        for variable in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.delenv(variable, raising=False)
        monkeypatch.setattr(constants, "ENDPOINT", self.url)
        address = self.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address)

    @contextmanager
    def serving(self) -> Iterator[Hub]:
        thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield self
        finally:
            self._ended.set()
            self._server.shutdown()
            self._server.server_close()
            thread.join()


def digest(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


def sibling(path: str, data: bytes) -> dict[str, Any]:
    return {"rfilename": path, "size": len(data), "blobId": digest(data)}

"""A Hugging Face hub on this machine: as much of its HTTP interface as huggingface_hub uses to upload and download."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

import yaml

TOKEN = "hf_test"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub(ThreadingHTTPServer):
    """Repositories as dictionaries of files. Weights go the way of large files, everything else inside the commit."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.private: set[str] = set()
        self.objects: dict[str, bytes] = {}  # large files by their SHA-256

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    hub = FakeHub()
    thread = threading.Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()


def _yaml_errors(text: str) -> list[dict[str, str]]:
    """What is wrong with a model card's front matter, as the hub answers it."""
    values = yaml.safe_load(text.split("---")[1])
    return [{"message": f"{key} is missing"} for key in ("library_name", "pipeline_tag", "tags") if key not in values]


class _Handler(BaseHTTPRequestHandler):
    server: FakeHub  # type: ignore[assignment]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._json({"error": "Invalid username or password."}, 401)
        parts = self.path.strip("/").split("/")
        if self.path == "/api/repos/create":
            return self._create(json.loads(body))
        if self.path == "/api/validate-yaml":
            return self._json({"errors": _yaml_errors(json.loads(body)["content"]), "warnings": []})
        if self.path.endswith("/info/lfs/objects/batch"):
            return self._batch(json.loads(body))
        if parts[:2] == ["api", "models"] and parts[4:5] == ["preupload"]:
            files = [{"path": file["path"], **self._mode(file["path"])} for file in json.loads(body)["files"]]
            return self._json({"files": files})
        if parts[:2] == ["api", "models"] and parts[4:5] == ["commit"]:
            return self._commit("/".join(parts[2:4]), body)
        return self._json({"error": self.path}, 404)

    def do_PUT(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.objects[hashlib.sha256(content).hexdigest()] = content
        self._json({})

    def do_HEAD(self) -> None:
        self._file(with_content=False)

    def do_GET(self) -> None:
        parts = self.path.partition("?")[0].strip("/").split("/")
        if parts[:2] != ["api", "models"]:
            return self._file(with_content=True)
        files = self.server.repositories.get("/".join(parts[2:4]))
        if files is None:
            return self._json({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
        if parts[4:5] == ["tree"]:
            return self._json([{"type": "file", "path": path, **self._described(files[path])} for path in files])
        siblings = [{"rfilename": path} for path in files]
        return self._json({"id": "/".join(parts[2:4]), "sha": COMMIT, "siblings": siblings, "private": False})

    def _create(self, request: dict[str, object]) -> None:
        repository = f"{request['organization']}/{request['name']}"
        if repository in self.server.repositories:
            return self._json({"error": "exists", "url": f"{self.server.url}/{repository}"}, 409)
        self.server.repositories[repository] = {}
        if request.get("private") or request.get("visibility") == "private":
            self.server.private.add(repository)
        return self._json({"url": f"{self.server.url}/{repository}", "name": repository})

    def _mode(self, path: str) -> dict[str, object]:
        return {"uploadMode": "lfs" if path.endswith(".safetensors") else "regular", "shouldIgnore": False}

    def _batch(self, request: dict[str, list[dict[str, object]]]) -> None:
        objects = [
            {"oid": item["oid"], "size": item["size"], "actions": {"upload": {"href": f"{self.server.url}/upload"}}}
            for item in request["objects"]
        ]
        self._json({"transfer": "basic", "objects": objects})

    def _commit(self, repository: str, body: bytes) -> None:
        files = self.server.repositories[repository]
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.server.objects[value["oid"]]
        self._json({"commitUrl": f"{self.server.url}/{repository}/commit/{COMMIT}", "commitOid": COMMIT})

    def _file(self, *, with_content: bool) -> None:
        parts = unquote(self.path.partition("?")[0]).strip("/").split("/")  # owner/name/resolve/REVISION/path
        content = self.server.repositories.get("/".join(parts[:2]), {}).get("/".join(parts[4:]))
        if content is None or parts[2] != "resolve":
            return self._json({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"})
        self.send_response(200)
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if with_content:
            self.wfile.write(content)

    def _described(self, content: bytes) -> dict[str, object]:
        return {"size": len(content), "oid": hashlib.sha1(content).hexdigest()}

    def _json(self, value: object, status: int = 200, headers: dict[str, str] | None = None) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        for key, text in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(key, text)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *arguments: object) -> None:
        """Print nothing."""

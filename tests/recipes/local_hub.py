"""The Hugging Face hub on the loopback: what its client asks for when it looks, fetches and pushes.

    with LocalHub() as hub:
        hub.add("some/model", folder)

Its client and `datasets` speak real HTTP to it; status codes and headers are those of the hub.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlparse

TOKEN, OTHER = TOKENS = ("hf_of_this_test", "hf_of_somebody_else")  # the second opens nothing that is gated
GATED = {"X-Error-Code": "GatedRepo"}


@dataclass
class Repo:
    """A model or a data set: commits by branch, files by commit."""

    kind: str  # models or datasets
    gated: bool = False  # its files, not what is told of it
    card: dict[str, str] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)  # files that were sent

    def commit(self, files: dict[str, bytes], branch: str = "main") -> str:
        """Now the newest of `branch`; its name."""
        told = "".join(f"{name} {hashlib.sha1(data).hexdigest()}" for name, data in sorted(files.items()))
        name = hashlib.sha1(f"{len(self.commits)} {told}".encode()).hexdigest()
        self.commits[name], self.branches[branch] = files, name
        return name

    def at(self, revision: str) -> str | None:
        found = self.branches.get(revision, revision)
        return found if found in self.commits else None


class LocalHub:
    """Serves until its end. `down`: it answers 503 to everything."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}  # models/owner/name, datasets/owner/name
        self.down = False
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Answers", (Answers,), {"hub": self}))
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05})

    def add(
        self, name: str, files: Path | dict[str, bytes], kind: str = "models", gated: bool = False
    ) -> Repo:
        repo = self.repos[f"{kind}/{name}"] = Repo(kind, gated)
        repo.commit(contents(files))
        return repo

    def __enter__(self) -> LocalHub:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


def ask_only(hub: LocalHub, monkeypatch: Any, cache: Path) -> None:
    """Have the hub's client of this process ask this hub, without a token, and use this cache."""
    constants = "huggingface_hub.constants."
    monkeypatch.setattr(constants + "ENDPOINT", hub.url)
    template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants + "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants + "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants + "HF_HUB_CACHE", str(cache))
    monkeypatch.delenv("HF_TOKEN", raising=False)


def contents(files: Path | dict[str, bytes]) -> dict[str, bytes]:
    if isinstance(files, dict):
        return files
    return {str(path.relative_to(files)): path.read_bytes() for path in files.rglob("*") if path.is_file()}


class Answers(BaseHTTPRequestHandler):
    """One request after the other of one connection."""

    hub: LocalHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Log nothing."""

    def do_GET(self) -> None:
        self.serve()

    def do_HEAD(self) -> None:
        self.serve()

    def do_POST(self) -> None:
        self.serve()

    def serve(self) -> None:
        url, length = urlparse(self.path), int(self.headers.get("Content-Length") or 0)
        self.body = self.rfile.read(length)
        self.path, self.query = unquote(url.path), parse_qs(url.query)
        if self.hub.down:
            return self.say(503)
        if (token := self.headers.get("Authorization")) and token.removeprefix("Bearer ") not in TOKENS:
            return self.say(401, headers={"X-Error-Message": "Invalid credentials in Authorization header"})
        words = self.path.strip("/").split("/")
        if words[0] != "api":
            return self.file(words)
        if self.path == "/api/whoami-v2":
            return self.say(200, {"name": "me"}) if self.known else self.say(401)
        if self.path == "/api/repos/create":
            return self.create()
        return self.about(words[1], "/".join(words[2:4]), words[4:])

    @property
    def known(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def repo(self, kind: str, name: str) -> Repo | None:
        """None: it is not there, which is told."""
        found = self.hub.repos.get(f"{kind}/{name}")
        if found is None:
            self.say(404 if self.known else 401, headers={"X-Error-Code": "RepoNotFound"})
        return found

    def at(self, repo: Repo, revision: str) -> str | None:
        found = repo.at(revision)
        if found is None:
            self.say(404, headers={"X-Error-Code": "RevisionNotFound"})
        return found

    def about(self, kind: str, name: str, rest: list[str]) -> None:
        if (repo := self.repo(kind, name)) is None:
            return None
        what, revision = rest[:2] if len(rest) > 1 else (*rest, "main", "main")[:2]
        if what == "auth-check":
            return self.say(403, headers=GATED) if repo.gated and not self.known else self.say(200, {})
        if what == "preupload":
            asked = [{**file, "uploadMode": "regular", "shouldIgnore": False} for file in self.json["files"]]
            return self.say(200, {"files": asked})
        if what == "commit":
            return self.commit(repo, name, revision)
        if (commit := self.at(repo, revision)) is None:
            return None
        files = repo.commits[commit]
        entries = [entry(path, data) for path, data in sorted(files.items())]
        if what == "tree":
            return self.say(200, entries)
        if what == "paths-info":
            paths = self.json["paths"]
            return self.say(200, [e for e in entries if e["path"] in paths])
        siblings = [{"rfilename": e["path"], "size": e["size"], "blobId": e["oid"]} for e in entries]
        gated = "manual" if repo.gated else False
        told = {"id": name, "sha": commit, "siblings": siblings, "gated": gated, "tags": []}
        told |= {"cardData": repo.card} if repo.card else {}
        return self.say(200, told)

    def file(self, words: list[str]) -> None:
        """[datasets/]owner/name/resolve/revision/path"""
        kind = words.pop(0) if words[0] == "datasets" else "models"
        if len(words) < 5 or words[2] != "resolve":
            return self.say(404)
        if (repo := self.repo(kind, "/".join(words[:2]))) is None:
            return None
        if repo.gated and not self.known:
            return self.say(403 if self.headers.get("Authorization") else 401, headers=GATED)
        if (commit := self.at(repo, words[3])) is None:
            return None
        path = "/".join(words[4:])
        if (data := repo.commits[commit].get(path)) is None:
            return self.say(404, headers={"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
        if self.command == "GET":
            repo.asked.append(path)
        etag = f'"{hashlib.sha1(data).hexdigest()}"'
        return self.say(200, data, {"ETag": etag, "X-Repo-Commit": commit, "Accept-Ranges": "bytes"})

    def create(self) -> None:
        asked = self.json
        name = "/".join(filter(None, (asked.get("organization") or "me", asked["name"].split("/")[-1])))
        if not self.known:
            return self.say(401, headers={"X-Error-Message": "Invalid credentials in Authorization header"})
        if f"models/{name}" in self.hub.repos:
            return self.say(409, {"url": f"{self.hub.url}/{name}"})
        self.hub.add(name, {})
        return self.say(200, {"url": f"{self.hub.url}/{name}", "name": name})

    def commit(self, repo: Repo, name: str, branch: str) -> None:
        files = dict(repo.commits[repo.branches[branch]])
        for line in self.body.splitlines():
            told = json.loads(line)
            if told["key"] == "file":
                files[told["value"]["path"]] = base64.b64decode(told["value"]["content"])
        commit = repo.commit(files, branch)
        self.say(200, {"commitOid": commit, "commitUrl": f"{self.hub.url}/{name}/commit/{commit}"})

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    def say(self, status: int, what: Any = b"", headers: dict[str, str] | None = None) -> None:
        data = what if isinstance(what, bytes) else json.dumps(what).encode()
        begin, end = 0, len(data)
        if status == 200 and (wanted := self.headers.get("Range")) and isinstance(what, bytes):
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            begin, end, status = int(first), min(end, int(last) + 1) if last else end, 206
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        if status == 206:
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(data)}")
        if not isinstance(what, bytes):
            self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(end - begin))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[begin:end])


def entry(path: str, data: bytes) -> dict[str, Any]:
    return {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}

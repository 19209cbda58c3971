"""A server on this machine that speaks the Hugging Face hub's protocol, for the hub's own client."""

import base64
import hashlib
import json
import re
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

TOKEN = "hf_of_the_test"


@dataclass
class Repo:
    files: dict[str, bytes]
    gated: bool = False
    private: bool = False
    revisions: dict[str, dict[str, bytes]] = field(default_factory=dict)  # commit -> files

    @property
    def sha(self) -> str:
        found = hashlib.sha1(json.dumps({k: hashlib.sha1(v).hexdigest() for k, v in self.files.items()}).encode())
        self.revisions[found.hexdigest()] = dict(self.files)
        return found.hexdigest()


@dataclass
class Hub:
    url: str = ""
    repos: dict[str, Repo] = field(default_factory=dict)  # models/OWNER/NAME, datasets/OWNER/NAME
    asked: list[tuple[str, str]] = field(default_factory=list)  # method, path
    writable: bool = True

    def downloads(self) -> list[str]:
        return [path.rpartition("/")[2] for method, path in self.asked if method == "GET" and "/resolve/" in path]


class Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def answer(self, code: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def json(self, value, code: int = 200, **headers: str) -> None:
        self.answer(code, json.dumps(value).encode(), Content_Type="application/json", **headers)

    def refuse(self, code: int, why: str, what: str) -> None:
        self.json({"error": what}, code, X_Error_Code=why, X_Error_Message=what)

    def repo(self, key: str, revision: str, content: bool) -> tuple[str, dict[str, bytes]] | None:
        """Commit and files; answers itself where there are none to see."""
        repo = self.hub.repos.get(key)
        allowed = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if repo is None or (repo.private and not allowed):
            self.refuse(401, "RepoNotFound", "Repository not found")
            return None
        if repo.gated and content and not allowed:
            self.refuse(403, "GatedRepo", "Access to this resource is restricted")
            return None
        newest = repo.sha
        commit = newest if revision == "main" else revision
        if commit not in repo.revisions:
            self.refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return None
        return commit, repo.revisions[commit]

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append((self.command, path))
        if path == "/api/whoami-v2":
            allowed = self.headers.get("Authorization") == f"Bearer {TOKEN}"
            self.json({"name": "me", "type": "user"}) if allowed else self.refuse(401, "", "Invalid token")
        elif found := re.fullmatch(r"/api/((?:models|datasets)/[^/]+/[^/]+)(?:/revision/(.+))?", path):
            if there := self.repo(found[1], found[2] or "main", content=False):
                files = [{"rfilename": name, "size": len(data)} for name, data in there[1].items()]
                self.json({"id": found[1].partition("/")[2], "sha": there[0], "siblings": files, "tags": []})
        elif found := re.fullmatch(r"/api/((?:models|datasets)/[^/]+/[^/]+)/tree/([^/]+)/?", path):
            if there := self.repo(found[1], found[2], content=False):
                self.json([{"type": "file", "path": n, "size": len(d), "oid": hashlib.sha1(d).hexdigest()}
                           for n, d in there[1].items()])  # fmt: skip
        elif found := re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            if there := self.repo(f"{found[1] or 'models/'}{found[2]}", found[3], content=True):
                self.file(there[0], there[1].get(found[4]))
        else:
            self.refuse(404, "", "Not here")

    do_HEAD = do_GET

    def file(self, commit: str, data: bytes | None) -> None:
        if data is None:
            return self.refuse(404, "EntryNotFound", "Entry not found")
        return self.answer(200, data, **{"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": commit})

    def do_POST(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append((self.command, path))
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Authorization") != f"Bearer {TOKEN}" or not self.hub.writable:
            self.refuse(403, "", "Forbidden: this token may not write")
        elif path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'me'}/{asked['name']}"
            key = f"{asked.get('type') or 'model'}s/{name}"
            if key in self.hub.repos:
                self.json({"error": "You already created this repo", "url": f"{self.hub.url}/{name}"}, 409)
            else:
                self.hub.repos[key] = Repo(
                    {}, private=bool(asked.get("private") or asked.get("visibility") == "private")
                )
                self.json({"url": f"{self.hub.url}/{name}", "name": name})
        elif path == "/api/validate-yaml":
            self.json({"errors": [], "warnings": []})
        elif found := re.fullmatch(r"/api/(models/[^/]+/[^/]+)/(preupload|commit)/main", path):
            self.write(self.hub.repos[found[1]], found[1].partition("/")[2], found[2], body)
        else:
            self.refuse(404, "", "Not here")

    def write(self, repo: Repo, name: str, what: str, body: bytes) -> None:
        """All files are small enough to be sent within the commit."""
        if what == "preupload":
            files = [file["path"] for file in json.loads(body)["files"]]
            self.json({"files": [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in files]})
            return
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                repo.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        url = f"{self.hub.url}/{name}/commit/{repo.sha}"
        self.json({"success": True, "commitOid": repo.sha, "commitUrl": url, "hookOutput": "", "pullRequestUrl": None})


@contextmanager
def serving():
    """Gives the hub, at hub.url."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

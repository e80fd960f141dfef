"""A Hugging Face Hub small enough to read: one process, in memory, on the loopback address, with faults to order.

It speaks what huggingface_hub 2.4 sends to create repositories, commit (files inside the commit, or Git LFS above
`lfs_over` bytes), open and merge pull requests, list, and download. Tokens name their owner and role; private and gated
repositories are seen by their owner alone. `python tests/hub_server.py` serves until it is stopped.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

NOW = "2026-01-01T00:00:00.000Z"
WRITER, READER, STRANGER = (f"hf_{letter * 34}" for letter in "wrs")
TOKENS = {WRITER: ("user", "write"), READER: ("user", "read"), STRANGER: ("stranger", "write")}


def git_oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@dataclass
class Repo:
    """A repository: every commit's whole tree, and which commit each branch, tag and pull request is at."""

    id: str
    type: str
    private: bool = False
    gated: bool = False
    refs: dict[str, str] = field(default_factory=dict)  # name -> commit
    trees: dict[str, dict[str, bytes]] = field(default_factory=dict)  # commit -> path -> content
    messages: list[str] = field(default_factory=list)
    pulls: dict[int, dict] = field(default_factory=dict)

    def commit(self, ref: str, tree: dict[str, bytes], message: str) -> str:
        seed = [self.id, ref, message, len(self.trees), sorted((path, git_oid(data)) for path, data in tree.items())]
        oid = hashlib.sha1(json.dumps(seed).encode()).hexdigest()
        self.trees[oid], self.refs[ref] = tree, oid
        self.messages.append(message)
        return oid

    def resolve(self, revision: str) -> str | None:
        return revision if revision in self.trees else self.refs.get(revision)

    def files(self, revision: str = "main") -> dict[str, bytes]:
        return self.trees[self.resolve(revision)]


@dataclass
class Fault:
    """What goes wrong with the next `times` requests of a method whose path holds `part`.

    Args:
        kind (`int` or `str`):
            A status to answer with; "drop" closes the connection in the middle of the request, "cut" in the middle of the
            answer's body, "lose" after doing what was asked.
    """

    method: str
    part: str
    kind: int | str
    times: int = 1


class Hub(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, lfs_over: int | None = None):
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos: dict[tuple[str, str], Repo] = {}
        self.lfs: dict[str, bytes] = {}
        self.lfs_over, self.lock = lfs_over, threading.Lock()
        self.faults: list[Fault] = []
        self.log: list[str] = []  # method, path and query of each request

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request, client_address) -> None:
        """Connections that a fault broke are no news."""

    def fault(self, method: str, path: str) -> int | str | None:
        for fault in self.faults:
            if fault.times and fault.method == method and fault.part in path:
                fault.times -= 1
                return fault.kind
        return None

    def seed(self, repo_id: str, files: dict[str, bytes], *, type: str = "model", **access) -> Repo:
        """A repository that somebody has pushed."""
        repo = self.repos[type, repo_id] = Repo(repo_id, type, **access)
        repo.commit("main", files, "seed")
        return repo


@contextlib.contextmanager
def serve(**options):
    hub = Hub(**options)
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *_):
        pass

    def handle_request(self):
        url = urlsplit(self.path)
        self.query = {key: values[-1] for key, values in parse_qs(url.query).items()}
        self.user, self.role = TOKENS.get(
            (self.headers.get("Authorization") or "").removeprefix("Bearer "), (None, None)
        )
        with self.server.lock:
            self.server.log.append(f"{self.command} {self.path}")
            self.kind = self.server.fault(self.command, url.path)
        if self.kind == "drop":
            self.rfile.read(int(self.headers.get("Content-Length") or 0) // 2)
            return self.hang_up()
        self.raw = self.read_body()
        if isinstance(self.kind, int):
            return self.reply({"error": "a fault of the test"}, self.kind)
        if self.headers.get("Authorization") and self.user is None:
            return self.reply({"error": "bad"}, 401, X_Error_Message="Invalid credentials in Authorization header")
        with self.server.lock:
            for methods, pattern, answer in ROUTES:
                if self.command in methods and (match := re.fullmatch(pattern, url.path)):
                    return answer(
                        self, **{key: unquote(value) if value else None for key, value in match.groupdict().items()}
                    )
        self.reply({"error": f"no route {self.command} {url.path}"}, 404)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = handle_request

    def read_body(self) -> bytes:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Transfer-Encoding") == "chunked":
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        return body

    def hang_up(self):
        self.close_connection = True
        self.wfile.flush()
        self.connection.shutdown(2)

    def reply(self, body=None, status=200, **headers):
        if self.kind == "lose":
            return self.hang_up()
        data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", "Content-Length": str(len(data))} | headers
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[: len(data) // 2] if self.kind == "cut" else data)
            if self.kind == "cut":
                self.hang_up()

    def refuse(self, code, status=404, **headers):  # the client makes its exceptions of X-Error-Code
        self.reply({"error": code}, status, X_Error_Code=code, X_Error_Message=code, **headers)

    # Account

    def validate_yaml(self):
        self.reply({"errors": [], "warnings": []})

    def may_write(self, repo_id: str) -> bool:
        if self.role == "write" and repo_id.startswith(f"{self.user}/"):
            return True
        self.refuse("Forbidden", 403 if self.user else 401)
        return False

    # Repositories

    def create_repo(self):
        asked = json.loads(self.raw)
        kind, repo_id = asked.get("type") or "model", f"{asked.get('organization') or self.user}/{asked['name']}"
        about = {"url": f"{self.server.endpoint}/{'' if kind == 'model' else kind + 's/'}{repo_id}", "name": repo_id}
        if not self.may_write(repo_id):
            return
        if (kind, repo_id) in self.server.repos:
            return self.reply(about | {"error": "You already created this repo"}, 409)
        private = asked.get("private") or asked.get("visibility") == "private"
        self.server.seed(repo_id, {".gitattributes": b""}, type=kind, private=bool(private))
        self.reply(about | {"id": repo_id})

    def find(self, type, repo, rev=None) -> tuple[Repo | None, str | None]:
        found = self.server.repos.get(((type or "models").rstrip("/")[:-1], repo))
        owner = found and self.user == found.id.split("/")[0]
        if found is None or (found.private and not owner):
            self.refuse("RepoNotFound", 404 if self.user else 401)
        elif found.gated and not owner and "/resolve/" in self.path:
            self.refuse("GatedRepo", 403)
        elif (oid := found.resolve(rev or "main")) is None:
            self.refuse("RevisionNotFound")
        else:
            return found, oid
        return None, None

    def info(self, type, repo, rev=None):
        found, oid = self.find(type, repo, rev)
        if found:
            siblings = [{"rfilename": path, "size": len(data)} for path, data in sorted(found.trees[oid].items())]
            about = {"id": found.id, "modelId": found.id, "_id": oid[:24], "sha": oid, "private": found.private}
            self.reply(about | {"tags": [], "downloads": 0, "likes": 0, "createdAt": NOW, "siblings": siblings})

    def is_lfs(self, size: int) -> bool:
        return self.server.lfs_over is not None and size > self.server.lfs_over

    def etag(self, data: bytes) -> str:
        return hashlib.sha256(data).hexdigest() if self.is_lfs(len(data)) else git_oid(data)

    def entry(self, path: str, data: bytes) -> dict:
        about = {"type": "file", "path": path, "size": len(data), "oid": git_oid(data)}
        lfs = {"oid": self.etag(data), "size": len(data), "pointerSize": 130}
        return about | ({"lfs": lfs} if self.is_lfs(len(data)) else {})

    def tree(self, type, repo, rev, path=None):
        found, oid = self.find(type, repo, rev)
        if not found:
            return
        root = f"{path.strip('/')}/" if path else ""
        files, folders = [], set()
        for name, data in sorted(found.trees[oid].items()):
            below = name.removeprefix(root)
            if name.startswith(root) and "/" in below and self.query.get("recursive", "false").lower() != "true":
                folders.add(root + below.split("/")[0])
            elif name.startswith(root):
                files.append(self.entry(name, data))
        self.reply([{"type": "directory", "path": name, "oid": git_oid(b""), "size": 0} for name in folders] + files)

    def paths_info(self, type, repo, rev):
        found, oid = self.find(type, repo, rev)
        if found:
            paths = parse_qs(self.raw.decode()).get("paths", [])
            self.reply([self.entry(path, found.trees[oid][path]) for path in paths if path in found.trees[oid]])

    def refs(self, type, repo):
        found, _ = self.find(type, repo)
        if found:
            rows = [
                {"name": ref, "ref": ref if "/" in ref else f"refs/heads/{ref}", "targetCommit": oid}
                for ref, oid in found.refs.items()
            ]
            pulls = [row for row in rows if row["name"].startswith("refs/pr/")]
            branches = [row for row in rows if row not in pulls]
            self.reply({"branches": branches, "converts": [], "tags": [], "pullRequests": pulls})

    def new_ref(self, type, repo, rev):
        found, _ = self.find(type, repo)
        if found and self.may_write(repo):
            asked = json.loads(self.raw or b"{}") or {}
            name, start = (asked["tag"], rev) if "tag" in asked else (rev, asked.get("startingPoint", "main"))
            if name in found.refs:
                return self.reply({"error": "exists"}, 409)
            found.refs[name] = found.resolve(start)
            self.reply({})

    # Commits

    def preupload(self, type, repo, rev):
        found, oid = self.find(type, repo, rev)
        if found:
            tree, answers = found.trees[oid], []
            for file in json.loads(self.raw)["files"]:
                path, mode = file["path"], "lfs" if self.is_lfs(file["size"]) else "regular"
                known = self.etag(tree[path]) if path in tree else None  # lets the client skip unchanged files
                answers.append({"path": path, "shouldIgnore": False, "uploadMode": mode, "oid": known})
            self.reply({"files": answers})

    def commit(self, type, repo, rev):
        found, oid = self.find(type, repo, rev)
        pull = self.query.get("create_pr") == "1"
        if not found or not (pull or self.may_write(repo)):
            return
        lines = [json.loads(line) for line in self.raw.splitlines() if line.strip()]
        header = next(line["value"] for line in lines if line["key"] == "header")
        if header.get("parentCommit") and not oid.startswith(header["parentCommit"]):
            return self.reply({"error": "A commit has happened since."}, 412)
        tree = dict(found.trees[oid])
        for line in lines:
            key, value = line["key"], line["value"]
            if key == "file":
                tree[value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile":
                tree[value["path"]] = self.server.lfs[value["oid"]]
            elif key == "deletedFile":
                del tree[value["path"]]
        answer = {"success": True}
        if pull:
            number = len(found.pulls) + 1
            found.pulls[number] = {"title": header["summary"], "status": "open"}
            rev = f"refs/pr/{number}"
            answer["pullRequestUrl"] = f"{self.server.endpoint}/{repo}/discussions/{number}"
        new = found.commit(rev, tree, header["summary"])
        self.reply(answer | {"commitOid": new, "commitUrl": f"{self.server.endpoint}/{repo}/commit/{new}"})

    def discussion(self, type, repo, num):
        found, _ = self.find(type, repo)
        if found:
            about = found.pulls[int(num)] | {
                "num": int(num),
                "author": {"name": "user"},
                "createdAt": NOW,
                "events": [],
            }
            about |= {"repo": {"name": found.id, "type": found.type}, "isPullRequest": True, "diff": ""}
            self.reply(about | {"filesWithConflicts": False, "changes": {"base": "refs/heads/main"}})

    def merge(self, type, repo, num):
        found, _ = self.find(type, repo)
        if found and self.may_write(repo):
            found.refs["main"] = found.refs[f"refs/pr/{num}"]
            found.pulls[int(num)]["status"] = "merged"
            event = {"id": "1", "type": "status-change", "createdAt": NOW, "author": {"name": "user"}}
            self.reply({"newStatus": event | {"data": {"status": "merged"}}})

    # Git LFS, where `lfs_over` asks for it

    def lfs_batch(self, type, repo):
        objects = []
        for item in json.loads(self.raw)["objects"]:
            upload = {"upload": {"href": f"{self.server.endpoint}/lfs/{item['oid']}", "header": {}}}
            there = item["oid"] in self.server.lfs
            objects.append({"oid": item["oid"], "size": item["size"]} | ({} if there else {"actions": upload}))
        self.reply({"transfer": "basic", "objects": objects})

    def lfs_put(self, oid):
        if hashlib.sha256(self.raw).hexdigest() != oid:
            return self.reply({"error": "sha256"}, 400)
        self.server.lfs[oid] = self.raw
        self.reply(b"")

    # Files

    def resolve(self, type, repo, rev, path):
        found, oid = self.find(type, repo, rev)
        if not found:
            return
        if path not in found.trees[oid]:
            return self.refuse("EntryNotFound", X_Repo_Commit=oid)
        data = found.trees[oid][path]
        headers = {"X_Repo_Commit": oid, "ETag": f'"{self.etag(data)}"', "Accept_Ranges": "bytes"}
        headers["Content_Type"] = "application/octet-stream"
        if match := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or ""):
            low, high = int(match[1]), int(match[2] or len(data) - 1)
            headers["Content_Range"] = f"bytes {low}-{high}/{len(data)}"
            return self.reply(data[low : high + 1], 206, **headers)
        self.reply(data, **headers)


REPO = r"(?P<repo>[^/]+/[^/]+)"
API = rf"/api/(?P<type>models|datasets|spaces)/{REPO}"
PAGE = rf"/(?P<type>datasets/|spaces/)?{REPO}"
ROUTES = [
    ("POST", r"/api/validate-yaml", Handler.validate_yaml),
    ("POST", r"/api/repos/create", Handler.create_repo),
    ("GET", API, Handler.info),
    ("GET", API + r"/revision/(?P<rev>.+)", Handler.info),
    ("GET", API + r"/tree/(?P<rev>[^/]+)(?P<path>/.+)?", Handler.tree),
    ("POST", API + r"/paths-info/(?P<rev>.+)", Handler.paths_info),
    ("GET", API + r"/refs", Handler.refs),
    ("POST", API + r"/(?:branch|tag)/(?P<rev>.+)", Handler.new_ref),
    ("POST", API + r"/preupload/(?P<rev>.+)", Handler.preupload),
    ("POST", API + r"/commit/(?P<rev>.+)", Handler.commit),
    ("GET", API + r"/discussions/(?P<num>\d+)", Handler.discussion),
    ("POST", API + r"/discussions/(?P<num>\d+)/merge", Handler.merge),
    ("POST", PAGE + r"\.git/info/lfs/objects/batch", Handler.lfs_batch),
    ("PUT", r"/lfs/(?P<oid>[0-9a-f]{64})", Handler.lfs_put),
    (("GET", "HEAD"), PAGE + r"/resolve/(?P<rev>[^/]+)/(?P<path>.+)", Handler.resolve),
]

if __name__ == "__main__":
    with serve() as server:
        print(f"export HF_ENDPOINT={server.endpoint} HF_TOKEN={WRITER}", flush=True)
        threading.Event().wait()

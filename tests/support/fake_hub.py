"""The HTTP edge of the Hugging Face hub, as huggingface_hub 2.4 asks it, with a storage for large files on another address.

It refuses what the hub refuses: an unknown token, a gated repository, a revision or file that is not there, a card that names
what the hub does not know, a commit whose parent has moved or whose large files were not uploaded, other bytes than their sha256,
and at the storage a token at all. `busy` answers 429 so many times; `broken` closes a connection after so many bytes, once, and
`changed` serves other bytes: both by path, or by sha256 for large files. Xet is not spoken: set HF_HUB_DISABLE_XET.
"""

import base64
import hashlib
import json
import re
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

LARGE = (".safetensors", ".parquet", ".gz", ".bin", ".pkl", ".onnx")
PAGE = 3
"""Files in a page of a listing."""
LICENSES = ("apache-2.0", "mit", "cc-by-4.0", "cc-by-nc-4.0", "openrail", "other", "unknown")


def git_oid(data):
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def pointer(data):
    digest = hashlib.sha256(data).hexdigest()
    return f"version https://git-lfs.github.com/spec/v1\noid sha256:{digest}\nsize {len(data)}\n".encode()


@dataclass
class Repo:
    """A repository: its commits, newest last, each with all files by path; branches and tags name commits."""

    private: bool = False
    gated: bool = False
    commits: dict = field(default_factory=dict)
    branches: dict = field(default_factory=dict)
    tags: dict = field(default_factory=dict)
    messages: list = field(default_factory=list)

    def commit(self, files, branch="main", message="first"):
        oid = hashlib.sha1(f"{message} {len(self.commits)} {sorted(files)}".encode()).hexdigest()
        self.commits[oid], self.branches[branch] = dict(files), oid
        self.messages.append(message)
        return oid

    def resolve(self, revision):
        names = {**self.branches, **self.tags}
        return names.get(revision) or (revision if revision in self.commits else None)


class Hub:
    """The state of a hub, which tests change, and the requests that it got: (method, path, whether with a token)."""

    def __init__(self):
        self.repos, self.objects, self.tokens = {}, {}, {}
        self.busy, self.broken, self.changed, self.requests, self.served = 0, {}, {}, [], 0
        self.url = self.storage = ""

    def add(self, name, files, **how):
        """A repository `datasets/ORG/NAME` or `models/ORG/NAME` with one commit; returns it."""
        repo = self.repos[name] = Repo(**how)
        repo.commit({".gitattributes": b"*.safetensors filter=lfs\n", **files})
        return repo

    def asked(self, method, ending):
        return [path for verb, path, _ in self.requests if verb == method and re.search(ending, path)]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1

    def log_message(self, *_):
        pass

    def answer(self, status, body=b"", **headers):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)
        self.wfile.flush()

    def body(self):
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def send_file(self, path, data, **headers):
        """A file, or the rest of it from where the client goes on; closed in the middle where a test wants that."""
        start = int(match[1]) if (match := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))) else 0
        self.send_response(206 if start else 200)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(data) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if self.command == "HEAD":
            return
        rest = data[start:]
        if path in self.hub.broken:
            rest, self.close_connection = rest[: self.hub.broken.pop(path)], True
        self.hub.served += len(rest)
        self.wfile.write(rest)
        self.wfile.flush()


class _Storage(_Handler):
    """Where large files lie: addresses are signed, and a token is refused, as S3 does with two ways of saying who asks."""

    def do_GET(self):
        digest, signature = self.path.strip("/").split("?signature=")
        if "Authorization" in self.headers or signature != f"s-{digest[:8]}":
            self.answer(400, b"Only one auth mechanism allowed")
            return
        data = self.hub.objects[digest]
        self.send_file(digest, self.hub.changed.get(digest, data))

    def do_PUT(self):
        digest, data = self.path.strip("/").split("?")[0], self.body()
        if "Authorization" in self.headers or hashlib.sha256(data).hexdigest() != digest:
            self.answer(400, b"XAmzContentSHA256Mismatch")
            return
        self.hub.objects[digest] = data
        self.answer(200, b"", ETag=f'"{digest[:8]}"')


class _Api(_Handler):
    def do_HEAD(self):
        self.route()

    def do_GET(self):
        self.route()

    def do_POST(self):
        self.route()

    def route(self):
        path = urlsplit(self.path).path
        self.hub.requests.append((self.command, self.path, "Authorization" in self.headers))
        if path == "/api/agent-harnesses":
            self.answer(404)
            return
        if self.hub.busy:
            self.hub.busy -= 1
            self.body()
            self.answer(429, {"error": "too many requests"}, Retry_After="0")
            return
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token and token not in self.hub.tokens:
            self.body()
            self.answer(401, b"", X_Error_Message="Invalid credentials in Authorization header")
            return
        self.rights = self.hub.tokens.get(token, {"reads": (), "writes": ()})
        for pattern, method in ROUTES:
            match = re.fullmatch(pattern, path)
            if match and method.startswith(self.command.lower().replace("head", "get")):
                groups = {name: unquote(value) for name, value in match.groupdict().items() if value is not None}
                getattr(self, method)(**groups)
                return
        self.body()
        self.answer(404, {"error": f"no route {self.command} {path}"})

    def repo(self, name, *, revision=None, content=False):
        """The repository, and the commit, that somebody may see; None after an answer that says why not."""
        repo = self.hub.repos.get(name)
        sees = repo and (not repo.private or name in self.rights["reads"] or self.writes(name))
        if not sees:
            status = 404 if "Authorization" in self.headers else 401
            self.answer(status, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
            return None, None
        if content and repo.gated and name not in self.rights["reads"]:
            status = 403 if "Authorization" in self.headers else 401
            self.answer(status, {"error": "Access is restricted"}, X_Error_Code="GatedRepo")
            return None, None
        commit = repo.resolve(revision or "main")
        if commit is None:
            self.answer(404, {"error": f"Invalid rev id: {revision}"}, X_Error_Code="RevisionNotFound")
            return None, None
        return repo, commit

    def writes(self, name):
        return name.split("/")[1] in self.rights["writes"]

    def get_info(self, kind, name, revision=None):
        repo, commit = self.repo(f"{kind}/{name}", revision=revision)
        if repo:
            files = repo.commits[commit]
            card = files.get("README.md", b"").decode().split("---\n")
            said = yaml.safe_load(card[1]) if len(card) > 2 else None
            siblings = [{"rfilename": path} for path in files]
            payload = {"id": name, "sha": commit, "private": repo.private, "gated": "manual" if repo.gated else False}
            self.answer(200, {**payload, "siblings": siblings, "tags": [], **({"cardData": said} if said else {})})

    def get_tree(self, kind, name, revision):
        repo, commit = self.repo(f"{kind}/{name}", revision=revision)
        if repo:
            files = sorted(repo.commits[commit].items())
            start = int(parse_qs(urlsplit(self.path).query).get("cursor", ["0"])[0])
            rows = [self.entry(path, data) for path, data in files[start : start + PAGE]]
            more = start + PAGE < len(files)
            link = (
                f'<{self.hub.url}/api/{kind}/{name}/tree/{revision}?recursive=true&cursor={start + PAGE}>; rel="next"'
            )
            self.answer(200, rows, **({"Link": link} if more else {}))

    def entry(self, path, data):
        row = {"type": "file", "path": path, "size": len(data), "oid": git_oid(data)}
        if path.endswith(LARGE):
            stub = pointer(data)
            row |= {"oid": git_oid(stub)}
            row["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": len(stub)}
        return row

    def get_file(self, name, revision, path, kind="models"):
        repo, commit = self.repo(f"{kind.strip('/')}/{name}", revision=revision, content=True)
        if not repo:
            return
        if path not in repo.commits[commit]:
            self.answer(404, b"Entry not found", X_Error_Code="EntryNotFound", X_Repo_Commit=commit)
            return
        data = repo.commits[commit][path]
        if path.endswith(LARGE):
            digest = hashlib.sha256(data).hexdigest()
            self.hub.objects[digest] = data
            where = f"{self.hub.storage}/{digest}?signature=s-{digest[:8]}"
            linked = {"X_Linked_Etag": f'"{digest}"', "X_Linked_Size": str(len(data))}
            self.answer(302, b"", Location=where, X_Repo_Commit=commit, **linked)
        else:
            self.send_file(path, self.hub.changed.get(path, data), X_Repo_Commit=commit, ETag=f'"{git_oid(data)}"')

    def get_refs(self, kind, name):
        repo, _ = self.repo(f"{kind}/{name}")
        if repo:
            heads = {"branches": ("heads", repo.branches), "tags": ("tags", repo.tags)}
            rows = {
                key: [{"name": n, "ref": f"refs/{under}/{n}", "targetCommit": oid} for n, oid in names.items()]
                for key, (under, names) in heads.items()
            }
            self.answer(200, {**rows, "converts": []})

    def post_create(self):
        wanted = json.loads(self.body())
        name = f"{wanted.get('type', 'model')}s/{wanted['organization']}/{wanted['name']}"
        if not self.writes(name):
            self.answer(403, {"error": "You don't have the rights to create a model under this namespace"})
        elif name in self.hub.repos:
            self.answer(409, {"error": "You already created this model repo"})
        else:
            self.hub.add(name, {}, private=wanted.get("visibility") == "private" or wanted.get("private", False))
            self.answer(200, {"url": f"{self.hub.url}/{name.removeprefix('models/')}"})

    def post_branch(self, kind, name, branch):
        start = json.loads(self.body() or b"{}").get("startingPoint")
        repo, commit = self.repo(f"{kind}/{name}", revision=start)
        if repo and branch in repo.branches:
            self.answer(409, {"error": "Reference already exists"})
        elif repo:
            repo.branches[branch] = commit
            self.answer(200, {})

    def post_validate(self):
        content = json.loads(self.body())["content"].split("---\n")
        matter = yaml.safe_load(content[1]) if len(content) > 2 else {}
        errors = []
        bases, sets = (
            [one] if isinstance(one, str) else one for one in (matter.get(k, []) for k in ("base_model", "datasets"))
        )
        valid = re.compile(r"(?:[\w.-]+/)?[\w.-]+")
        errors += [
            f'"base_model" with value "{b}" is not valid. Use a model id from https://hf.co/models.'
            for b in bases
            if not valid.fullmatch(b)
        ]
        errors += [f'"datasets" with value "{s}" is not valid.' for s in sets if not valid.fullmatch(s)]
        if matter.get("license", "mit") not in LICENSES:
            errors.append(f'"license" must be one of {list(LICENSES)}')
        rows = [{"message": message} for message in errors]
        self.answer(400 if rows else 200, {"errors": rows, "warnings": []})

    def post_preupload(self, kind, name, revision):
        wanted = json.loads(self.body())["files"]
        repo, commit = self.repo(f"{kind}/{name}", revision=revision)
        if not repo:
            return
        if not self.writes(f"{kind}/{name}"):
            self.answer(403, {"error": "no write access"})
            return
        files, rows = repo.commits[commit], []
        for one in wanted:
            large = one["path"].endswith(LARGE)
            oid = self.entry(one["path"], files[one["path"]])["oid"] if one["path"] in files else None
            mode = "lfs" if large else "regular"
            rows.append({"path": one["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self.answer(200, {"files": rows})

    def post_batch(self, name):
        wanted = json.loads(self.body())
        if not self.writes(f"models/{name}"):
            self.answer(403, {"error": "no write access"})
            return
        rows = []
        for one in wanted["objects"]:
            row = {"oid": one["oid"], "size": one["size"]}
            if one["oid"] not in self.hub.objects:
                upload = {"href": f"{self.hub.storage}/{one['oid']}?signature=up"}
                row["actions"] = {"upload": upload, "verify": {"href": f"{self.hub.url}/{name}.git/verify"}}
            rows.append(row)
        self.answer(200, {"objects": rows, "transfer": "basic"})

    def post_verify(self, name):
        wanted = json.loads(self.body())
        data = self.hub.objects.get(wanted["oid"])
        self.answer(200 if data is not None and len(data) == wanted["size"] else 404, {})

    def post_commit(self, kind, name, revision):
        lines = [json.loads(line) for line in self.body().splitlines()]
        repo, commit = self.repo(f"{kind}/{name}", revision=revision)
        if not repo:
            return
        header = lines[0]["value"]
        if not self.writes(f"{kind}/{name}"):
            self.answer(403, {"error": "no write access"})
            return
        if header.get("parentCommit", commit) != commit:
            self.answer(412, {"error": "A commit has happened since. Please refresh and try again."})
            return
        files = dict(repo.commits[commit])
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                if value["oid"] not in self.hub.objects:
                    self.answer(400, {"error": f"LFS pointer pointed to a file that does not exist: {value['path']}"})
                    return
                files[value["path"]] = self.hub.objects[value["oid"]]
            elif line["key"] == "deletedFile" and files.pop(value["path"], None) is None:
                self.answer(404, {"error": "A file with this name doesn't exist"}, X_Error_Code="EntryNotFound")
                return
        oid = repo.commit(files, revision, header["summary"])
        self.answer(200, {"commitUrl": f"{self.hub.url}/{name}/commit/{oid}", "commitOid": oid, "success": True})


NAME = r"(?P<name>[^/]+/[^/]+?)"
KIND = r"(?P<kind>models|datasets)"
ROUTES = (
    (rf"/api/{KIND}/{NAME}", "get_info"),
    (rf"/api/{KIND}/{NAME}/revision/(?P<revision>[^/]+)", "get_info"),
    (rf"/api/{KIND}/{NAME}/tree/(?P<revision>[^/]+)", "get_tree"),
    (rf"/api/{KIND}/{NAME}/refs", "get_refs"),
    (rf"/(?P<kind>datasets/)?{NAME}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", "get_file"),
    (r"/api/repos/create", "post_create"),
    (rf"/api/{KIND}/{NAME}/branch/(?P<branch>[^/]+)", "post_branch"),
    (r"/api/validate-yaml", "post_validate"),
    (rf"/api/{KIND}/{NAME}/preupload/(?P<revision>[^/]+)", "post_preupload"),
    (rf"/{NAME}\.git/info/lfs/objects/batch", "post_batch"),
    (rf"/{NAME}\.git/verify", "post_verify"),
    (rf"/api/{KIND}/{NAME}/commit/(?P<revision>[^/]+)", "post_commit"),
)


@contextmanager
def running():
    """A hub that listens."""
    hub = Hub()
    servers = []
    for handler in (_Api, _Storage):
        server = ThreadingHTTPServer(("127.0.0.1", 0), type(handler.__name__, (handler,), {"hub": hub}))
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        servers.append(server)
    hub.url, hub.storage = (f"http://127.0.0.1:{server.server_port}" for server in servers)
    try:
        yield hub
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()

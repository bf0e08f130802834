"""`make images-refresh`: the digests behind the tags, from a registry that speaks OCI's protocol as Docker Hub does."""

import hashlib
import json
import re
import shutil
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest
from containers import ROOT

from benchmarks.images import PIN, SOURCE, BuildError, refresh

INDEX = "application/vnd.oci.image.index.v1+json"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"


def manifest(name, tag, kind):
    """Some manifest of an image, one for each tag."""
    return json.dumps({"schemaVersion": 2, "mediaType": kind, "annotations": {"of": f"{name}:{tag}"}}).encode()


class Registry(BaseHTTPRequestHandler):
    """A registry that anybody may read, with a token for the one repository.

    A client that does not accept an index gets the manifest of one platform, as from Docker Hub.
    """

    def do_GET(self):
        url = urlsplit(self.path)
        if url.path == "/token":
            scope = parse_qs(url.query)["scope"][0]
            return self.answer(200, json.dumps({"token": f"for {scope}"}).encode())
        asked = re.fullmatch(r"/v2/(?:(.+)/manifests/(.+))?", url.path)
        scope = f"repository:{asked[1]}:pull"
        if not asked[1] or self.headers["Authorization"] != f"Bearer for {scope}":
            realm = f'Bearer realm="http://{self.headers["Host"]}/token",service="registry",scope="{scope}"'
            return self.answer(401, b'{"errors": [{"code": "UNAUTHORIZED"}]}', WWW_Authenticate=realm)
        if asked[1] in self.server.gone:
            return self.answer(404, b'{"errors": [{"code": "MANIFEST_UNKNOWN", "message": "no such tag"}]}')
        kind = INDEX if INDEX in ",".join(self.headers.get_all("Accept", [])) else MANIFEST
        body = self.server.page or manifest(asked[1], asked[2], kind)
        return self.answer(
            200, body, Content_Type=kind, Docker_Content_Digest=f"sha256:{hashlib.sha256(body).hexdigest()}"
        )

    def answer(self, status, body, **headers):
        self.send_response(status)
        for key, value in {"Content_Type": "application/json", **headers, "Content_Length": str(len(body))}.items():
            self.send_header(key.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def registry(monkeypatch, tmp_path):
    """Stands for every registry that our files name, and a repository for every source."""
    if not shutil.which("skopeo"):
        pytest.skip("skopeo is not installed (Debian: apt-get install skopeo)")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Registry)
    server.gone, server.page = set(), b""
    threading.Thread(target=server.serve_forever, daemon=True).start()
    settings = [
        f'[[registry]]\nprefix = "{prefix}"\nlocation = "127.0.0.1:{server.server_port}"\ninsecure = true\n'
        for prefix in ("docker.io", "mcr.microsoft.com")
    ]
    (tmp_path / ".config/containers").mkdir(parents=True)
    (tmp_path / ".config/containers/registries.conf").write_text("".join(settings))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / ".config"))
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", f"url.file://{tmp_path}/github/.insteadOf")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", "https://github.com/")
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def checkout(tmp_path):
    """Our files that name images, and beside them the sources that they name."""
    for name in ("docker", ".devcontainer"):
        shutil.copytree(ROOT / name, tmp_path / "checkout" / name)
    for address, _ in SOURCE.findall((ROOT / "docker/cluster.Dockerfile").read_text()):
        repository = tmp_path / "github" / address.removeprefix("https://github.com/")
        git = ["git", "-C", str(repository), "-c", "user.name=a", "-c", "user.email=a@b.example"]
        subprocess.run(["git", "init", "--quiet", repository], check=True)
        subprocess.run([*git, "commit", "--quiet", "--allow-empty", "--message", "one"], check=True)
        for tag in ("v2.9.0", "v2.19.0"):
            subprocess.run([*git, "tag", tag], check=True)
    return tmp_path / "checkout"


def texts(folder):
    return {path.relative_to(folder): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_each_tag_gets_the_digest_of_its_index_everywhere(registry, checkout):
    before = texts(checkout)
    lines = refresh(checkout).splitlines()
    after = texts(checkout)
    assert {path: PIN.sub("", text) for path, text in before.items()} == {
        path: PIN.sub("", text) for path, text in after.items()
    }
    pins = {(path, *match.groups()) for path, text in after.items() for match in PIN.finditer(text)}
    assert len(pins) == 6 and len({image for _, image, _ in pins}) == 4
    for _, image, digest in pins:
        name, _, tag = image.removeprefix("mcr.microsoft.com/").rpartition(":")
        name = name if image.startswith("mcr.") else f"library/{name}"
        assert digest == f"sha256:{hashlib.sha256(manifest(name, tag, INDEX)).hexdigest()}"
        assert f"{dict(PIN.findall(str(before)))[image]} is now {digest}" in "\n".join(lines)
    assert [line for line in lines if ".git: " in line and "its newest tag is v2.19.0 (" not in line] == []
    assert [line.rpartition(": ")[2] for line in refresh(checkout).splitlines()[:4]] == ["unchanged"] * 4


def test_a_tag_that_is_gone_is_named_and_no_file_changes(registry, checkout):
    before = texts(checkout)
    registry.gone = {"library/python"}
    with pytest.raises(
        BuildError, match=r"^python:3\.11\.\S+: its registry gave no manifest, and no file.*no such tag"
    ):
        refresh(checkout)
    assert texts(checkout) == before


def test_a_registry_that_is_not_reached_is_named_and_no_file_changes(registry, checkout):
    before = texts(checkout)
    registry.shutdown()
    registry.server_close()
    with pytest.raises(BuildError, match="no file was changed.*connection refused"):
        refresh(checkout)
    assert texts(checkout) == before


def test_a_page_in_the_place_of_a_manifest_is_no_manifest(registry, checkout):
    before = texts(checkout)
    registry.page = b"<html>Log in to this network</html>"
    with pytest.raises(BuildError, match="is no manifest, and no file was changed: b'<html>"):
        refresh(checkout)
    assert texts(checkout) == before

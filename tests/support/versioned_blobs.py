"""Blob versioning before Azurite, which has none: what the REST documentation says of versions, so that tests need no account.

Each write of a blob (Put Blob, Put Block List, Copy Blob, Set Blob Metadata; not Put Block or Append Block) is answered
with `x-ms-version-id`, and kept as a server-side copy in a hidden container. `versionid` names such a copy in Get Blob, Get
Blob Properties, Delete Blob and as the source of a copy; List Blobs takes `include=versions`. Deleting a blob leaves its
versions, and none of them is current; the current one cannot be deleted by its id (403 OperationNotAllowedOnRootBlob).
Whatever else names a version is refused.
Sources: azure-docs versioning-overview.md; REST "Delete Blob", "List Blobs", "Copy Blob From URL".
"""

import email.utils
import hashlib
import hmac
import threading
import time
from dataclasses import dataclass, replace
from urllib.parse import parse_qsl, urlsplit
from xml.sax.saxutils import escape

from azurite import Endpoint
from blob_relay import Relay, Request, Response, own_request, problem, signature, signed, target_of

HIDDEN = "headwayversions"
CONDITIONS = ("if-match", "if-none-match", "if-modified-since", "if-unmodified-since")
CLOCK_MAY_DIFFER = 15 * 60
LISTED = {
    "Creation-Time": "x-ms-creation-time",
    "Last-Modified": "last-modified",
    "Etag": "etag",
    "Content-Length": "content-length",
    "Content-Type": "content-type",
    "Content-MD5": "content-md5",
    "BlobType": "x-ms-blob-type",
    "AccessTier": "x-ms-access-tier",
}
COPIED = {
    "CopyId": "x-ms-copy-id",
    "CopyStatus": "x-ms-copy-status",
    "CopySource": "x-ms-copy-source",
    "CopyProgress": "x-ms-copy-progress",
    "CopyCompletionTime": "x-ms-copy-completion-time",
}
"""What List Blobs says with `include=copy` of a blob that a copy made."""


@dataclass(frozen=True)
class Version:
    """One version of a blob: the copy that holds it, and the headers that a read of it answered when it was written."""

    id: str
    copy: str
    headers: dict[str, str]


class VersionedBlobs(Relay):
    """An account with versioning. `skew`: seconds that its clock is ahead of ours."""

    def __init__(self, behind: Endpoint, *, skew: float = 0.0) -> None:
        super().__init__(behind)
        self.skew = skew
        self.polls_until_copied = 0
        """Times that a blob answers that its copy is pending; 0: a copy is done with its first answer."""
        self._pending: dict[tuple[str, str], int] = {}
        self.versions: dict[tuple[str, str], list[Version]] = {}
        """Oldest first, by container and blob."""
        self.current: dict[tuple[str, str], str] = {}
        self._locks = [threading.RLock() for _ in range(64)]
        self._last = 0
        self._clock = threading.Lock()
        self._ask("PUT", f"{target_of(HIDDEN, '')[:-1]}?restype=container")

    def clock(self) -> float:
        return time.time() + self.skew

    def answer(self, request: Request) -> Response:
        refused = self._refused(request)
        if refused:
            return refused
        container, blob = request.place
        if container == HIDDEN:
            return problem(404, "ContainerNotFound", "The specified container does not exist.")
        if not blob:
            return self._about_container(request, container)
        with self._locks[hash((container, blob)) % len(self._locks)]:
            return self._about_blob(request, container, blob)

    def _refused(self, request: Request) -> Response | None:
        """Nobody comes in without a signature that fits, made by a clock that is about right."""
        said = request.header("authorization")
        if not said:
            return problem(401, "NoAuthenticationInformation", "Server failed to authenticate the request.")
        made = email.utils.parsedate_to_datetime(request.header("x-ms-date") or request.header("date"))
        if abs(made.timestamp() - self.clock()) > CLOCK_MAY_DIFFER:
            return problem(403, "AuthenticationFailed", f"Request date header too old: '{made}'")
        if not hmac.compare_digest(said, signature(request)):
            return problem(403, "AuthenticationFailed", "The MAC signature found in the HTTP request is not the same.")
        if not request.header("x-ms-version") >= "2019-12-12":
            return problem(400, "InvalidHeaderValue", "x-ms-version knows no versions")
        return None

    def _about_container(self, request: Request, container: str) -> Response:
        query = request.query
        if query.get("comp") == "list" and "versions" in query.get("include", "").split(","):
            return self._list(request, container, query)
        answer = self.upstream.ask(request)
        if request.method == "DELETE" and answer.status == 202:
            for key in [key for key in self.versions if key[0] == container]:
                self.current.pop(key, None)
                del self.versions[key]
        return answer

    def _about_blob(self, request: Request, container: str, blob: str) -> Response:
        key, query = (container, blob), request.query
        if "versionid" in query:
            return self._about_version(request, key, query)
        if makes_version(request, query):
            return self._write(request, key)
        answer = self.upstream.ask(request)
        if request.method == "DELETE" and not query.get("snapshot") and answer.status == 202:
            self.current.pop(key, None)
        if request.method in ("GET", "HEAD") and answer.status < 300 and "comp" not in query:
            if self._pending.get(key):
                self._pending[key] -= 1
                answer = answer.with_headers(x_ms_copy_status="pending")
            return self._named(answer, key, self.current.get(key))
        return answer

    def _write(self, request: Request, key: tuple[str, str]) -> Response:
        """Pass a write on, and keep what it made."""
        source = request.header("x-ms-copy-source")
        if source:
            found = self._copy_source(request, source)
            if isinstance(found, Response):
                return found
            request = found
        answer = self.upstream.ask(request)
        if answer.status not in (200, 201, 202):
            return answer
        version = self._keep(key, source)
        if source and self.polls_until_copied:
            self._pending[key] = self.polls_until_copied
            answer = answer.with_headers(x_ms_copy_status="pending")
        return answer.with_headers(x_ms_version_id=version.id)

    def _copy_source(self, request: Request, source: str) -> Request | Response:
        """The copy request with the kept copy as its source, when that names a version; else as it is."""
        parts = urlsplit(source)
        query = dict(parse_qsl(parts.query))
        allowed = "sig" in query or request.header("x-ms-copy-source-authorization")
        if request.header("x-ms-requires-sync") and not allowed:
            return problem(
                401, "CannotVerifyCopySource", "The source of Copy Blob From URL needs a signature of its own."
            )
        if "versionid" not in query:
            return request
        place = Request("GET", parts.path, ()).place
        version = self._find(place, query["versionid"])
        if not version:
            return problem(404, "BlobNotFound", "The specified blob does not exist.")
        kept = f"http://127.0.0.1:{self.upstream.port}{target_of(HIDDEN, version.copy)}"
        return signed(request.without("x-ms-copy-source-authorization").with_header("x-ms-copy-source", kept))

    def _keep(self, key: tuple[str, str], copied_from: str) -> Version:
        """Copy what a blob is now. A version's id is the time of its write, to 100 ns, and no two are the same."""
        with self._clock:
            self._last = max(self._last + 1, int(self.clock() * 10_000_000))
            ticks = self._last
        whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(ticks // 10_000_000))
        id_ = f"{whole}.{ticks % 10_000_000:07d}Z"
        copy = f"{hashlib.sha256('/'.join(key).encode()).hexdigest()}/{ticks}"
        source = f"http://127.0.0.1:{self.upstream.port}{target_of(*key)}"
        self._ask("PUT", target_of(HIDDEN, copy), **{"x-ms-copy-source": source})
        headers = {name.lower(): value for name, value in self._ask("HEAD", target_of(*key)).headers}
        if copied_from and "x-ms-copy-source" in headers:
            headers["x-ms-copy-source"] = copied_from
        version = Version(id_, copy, headers)
        self.versions.setdefault(key, []).append(version)
        self.current[key] = id_
        return version

    def _about_version(self, request: Request, key: tuple[str, str], query: dict[str, str]) -> Response:
        if set(query) - {"versionid", "timeout"} or request.method not in ("GET", "HEAD", "DELETE"):
            return problem(400, "UnsupportedQueryParameter", "this service knows no such operation on a version")
        version = self._find(key, query["versionid"])
        if not version:
            return problem(404, "BlobNotFound", "The specified blob does not exist.")
        if request.method == "DELETE":
            return self._delete_version(key, version)
        wanted, refused = request.header("if-match"), request.header("if-none-match")
        if (wanted and wanted not in ("*", version.headers["etag"])) or (refused in ("*", version.headers["etag"])):
            return problem(
                412, "ConditionNotMet", "The condition specified using HTTP conditional header(s) is not met."
            )
        plain = replace(request.without(*CONDITIONS), target=target_of(HIDDEN, version.copy))
        answer = self.upstream.ask(signed(plain))
        if answer.status >= 300:
            return answer
        kept = ("etag", "last-modified", *COPIED.values())
        original = {name.replace("-", "_"): version.headers.get(name) for name in kept}
        return self._named(answer.with_headers(**original), key, version.id)

    def _delete_version(self, key: tuple[str, str], version: Version) -> Response:
        if self.current.get(key) == version.id:
            return problem(403, "OperationNotAllowedOnRootBlob", "The specified operation is not allowed on root blob.")
        self._ask("DELETE", target_of(HIDDEN, version.copy))
        self.versions[key].remove(version)
        return Response(202, (("x-ms-delete-type-permanent", "true"),))

    def expire(self, container: str, blob: str, version_id: str) -> None:
        """What a lifecycle rule does to an old version."""
        version = self._find((container, blob), version_id)
        assert version and self._delete_version((container, blob), version).status == 202

    def _find(self, key: tuple[str, str], id_: str) -> Version | None:
        return next((version for version in self.versions.get(key, []) if version.id == id_), None)

    def _named(self, answer: Response, key: tuple[str, str], id_: str | None) -> Response:
        current = "true" if id_ and self.current.get(key) == id_ else None
        return answer.with_headers(x_ms_version_id=id_, x_ms_is_current_version=current)

    def _list(self, request: Request, container: str, query: dict[str, str]) -> Response:
        """List Blobs with versions: by name, and oldest first within a name."""
        asked = set(query["include"].split(","))
        if asked - {"versions", "metadata", "copy"} or "delimiter" in query:
            return problem(400, "UnsupportedQueryParameter", f"this service lists no {sorted(asked)} together")
        held = self._ask("HEAD", f"{target_of(container, '')[:-1]}?restype=container")
        if held.status >= 300:
            return problem(404, "ContainerNotFound", "The specified container does not exist.")
        rows = [
            (blob, version)
            for (place, blob), versions in sorted(self.versions.items())
            if place == container and blob.startswith(query.get("prefix", ""))
            for version in versions
        ]
        start, size = int(query.get("marker") or 0), int(query.get("maxresults") or 5000)
        shown, rest = rows[start : start + size], rows[start + size :]
        items = "".join(self._row(container, blob, version, asked) for blob, version in shown)
        body = (
            f'<?xml version="1.0" encoding="utf-8"?><EnumerationResults ServiceEndpoint="{self.endpoint.url}" '
            f'ContainerName="{container}"><Prefix>{escape(query.get("prefix", ""))}</Prefix><Blobs>{items}</Blobs>'
            f"<NextMarker>{start + size if rest else ''}</NextMarker></EnumerationResults>"
        )
        said = (("Content-Type", "application/xml"), ("x-ms-version", request.header("x-ms-version")))
        return Response(200, said, body.encode())

    def _row(self, container: str, blob: str, version: Version, asked: set[str]) -> str:
        current = (
            "<IsCurrentVersion>true</IsCurrentVersion>" if self.current.get((container, blob)) == version.id else ""
        )
        properties = "".join(
            f"<{name}>{escape(version.headers[header].strip(chr(34)))}</{name}>"
            for name, header in (LISTED | (COPIED if "copy" in asked else {})).items()
            if header in version.headers
        )
        own = {k.removeprefix("x-ms-meta-"): v for k, v in version.headers.items() if k.startswith("x-ms-meta-")}
        said = (
            "".join(f"<{name}>{escape(value)}</{name}>" for name, value in own.items()) if "metadata" in asked else ""
        )
        return (
            f"<Blob><Name>{escape(blob)}</Name><VersionId>{version.id}</VersionId>{current}"
            f"<Properties>{properties}</Properties><Metadata>{said}</Metadata></Blob>"
        )

    def _ask(self, method: str, target: str, **headers: str) -> Response:
        """A request of our own to Azurite."""
        return self.upstream.ask(own_request(method, target, **headers))


def makes_version(request: Request, query: dict[str, str]) -> bool:
    """Whether a request writes a blob so that it becomes a new version."""
    if request.method != "PUT":
        return False
    whole = "comp" not in query and (request.header("x-ms-blob-type") or request.header("x-ms-copy-source"))
    return bool(whole) or query.get("comp") in ("blocklist", "metadata")

"""The services that stand in for Azure are held to what Azure's own client says, and refuse whom Azure refuses."""

import base64
import time
import urllib.error
import urllib.request
from http.client import HTTPConnection, IncompleteRead

import pytest
from azure.core.exceptions import HttpResponseError, ResourceExistsError, ResourceNotFoundError
from azure.storage.blob import BlobServiceClient
from azurite import ACCOUNT, KEY
from blob_relay import own_request, target_of
from fault_proxy import FaultProxy, dead_endpoint
from versioned_blobs import HIDDEN, VersionedBlobs
from waiting import limit


def client(endpoint, key=KEY, **options):
    """The SDK's client, without its retries."""
    return BlobServiceClient(endpoint.url, credential={"account_name": ACCOUNT, "account_key": key}, **options)


def once():
    return {"retry_total": 0, "read_timeout": limit(5), "connection_timeout": limit(5)}


@pytest.fixture(scope="module")
def service(azurite):
    with VersionedBlobs(azurite).running() as running:
        yield running


@pytest.fixture
def container(service):
    return client(service.endpoint).create_container(f"c{time.time_ns()}")


@pytest.fixture
def proxy(azurite):
    with FaultProxy(azurite).running() as running:
        yield running


@pytest.fixture
def blob(proxy):
    held = client(proxy.endpoint, **once()).create_container(f"c{time.time_ns()}")
    return held.upload_blob("a", bytes(1000))


def test_every_write_makes_a_version_that_is_read_by_its_id(container):
    blob = container.get_blob_client("deep/umlaut ä.bin")
    ids = [blob.upload_blob(text, overwrite=True)["version_id"] for text in (b"one", b"two")]
    blob.stage_block("MDAwMQ==", b"three")
    ids.append(blob.commit_block_list(["MDAwMQ=="])["version_id"])
    ids.append(blob.set_blob_metadata({"say": "hello"})["version_id"])
    assert ids == sorted(set(ids)) and len(ids) == 4
    read = [blob.download_blob(version_id=each) for each in ids]
    assert [each.readall() for each in read] == [b"one", b"two", b"three", b"three"]
    assert [each.properties.version_id for each in read] == ids
    assert [each.properties.is_current_version for each in read] == [None, None, None, True]
    now = blob.get_blob_properties()
    assert (now.version_id, now.is_current_version, now.metadata) == (ids[3], True, {"say": "hello"})
    assert blob.download_blob(version_id=ids[2], offset=1, length=3).readall() == b"hre"


def test_versions_are_listed_as_the_client_understands_them(container):
    for name, texts in (("x/b", "12"), ("x/a", "345"), ("y", "6")):
        for text in texts:
            container.upload_blob(name, text.encode(), overwrite=True, metadata={"said": text})
    listed = list(container.list_blobs(name_starts_with="x/", include=["versions", "metadata"], results_per_page=2))
    assert [(each.name, each.metadata["said"]) for each in listed] == [
        ("x/a", "3"),
        ("x/a", "4"),
        ("x/a", "5"),
        ("x/b", "1"),
        ("x/b", "2"),
    ]
    assert [bool(each.is_current_version) for each in listed] == [False, False, True, False, True]
    for each in listed:
        found = container.get_blob_client(each.name).get_blob_properties(version_id=each.version_id)
        assert (found.size, found.etag.strip('"'), found.last_modified) == (each.size, each.etag, each.last_modified)
    assert [each.name for each in container.list_blobs()] == ["x/a", "x/b", "y"]


def test_a_deleted_blob_leaves_its_versions_and_a_version_is_deleted_by_its_id(container):
    blob = container.get_blob_client("a")
    old, new = [blob.upload_blob(text, overwrite=True)["version_id"] for text in (b"old", b"new")]
    with pytest.raises(HttpResponseError) as refused:
        blob.delete_blob(version_id=new)
    assert (refused.value.status_code, refused.value.error_code) == (403, "OperationNotAllowedOnRootBlob")
    blob.delete_blob(version_id=old)
    with pytest.raises(ResourceNotFoundError):
        blob.download_blob(version_id=old)
    blob.delete_blob()
    with pytest.raises(ResourceNotFoundError):
        blob.get_blob_properties()
    assert blob.download_blob(version_id=new).readall() == b"new"
    assert [each.is_current_version for each in container.list_blobs(include=["versions"])] == [None]


def test_an_old_version_is_promoted_by_a_copy_that_moves_no_bytes_through_the_client(container, service):
    blob = container.get_blob_client("a")
    old = blob.upload_blob(b"old", overwrite=True)["version_id"]
    blob.upload_blob(b"new", overwrite=True)
    service.log.clear()
    promoted = blob.start_copy_from_url(f"{blob.url}?versionid={old}")
    assert promoted["copy_status"] == "success" and promoted["version_id"] > old
    assert blob.download_blob().readall() == b"old" == blob.download_blob(version_id=promoted["version_id"]).readall()
    assert [request.header("content-length") or "0" for request in service.log if request.method == "PUT"] == ["0"]
    copies = [each.copy for each in container.list_blobs(include=["versions", "copy"])]
    assert [(each.status, each.source) for each in copies[:2]] == [(None, None)] * 2
    assert (copies[2].status, copies[2].source) == ("success", f"{blob.url}?versionid={old}")
    with pytest.raises(HttpResponseError, match="needs a signature of its own"):
        blob.start_copy_from_url(f"{blob.url}?versionid={old}", requires_sync=True)
    with pytest.raises(ResourceNotFoundError):
        blob.start_copy_from_url(f"{blob.url}?versionid=2020-01-01T00:00:00.0000000Z")


def test_a_copy_can_take_its_time(container, service):
    blob = container.get_blob_client("a")
    old = blob.upload_blob(b"old")["version_id"]
    service.polls_until_copied = 1
    try:
        assert blob.start_copy_from_url(f"{blob.url}?versionid={old}")["copy_status"] == "pending"
        assert [blob.get_blob_properties().copy.status for _ in range(2)] == ["pending", "success"]
    finally:
        service.polls_until_copied = 0


def test_conditions_hold_for_versions_and_for_the_blob(container):
    blob = container.get_blob_client("a")
    first = blob.upload_blob(b"one")
    with pytest.raises(ResourceExistsError):
        blob.upload_blob(b"two", overwrite=False)
    blob.upload_blob(b"two", overwrite=True)
    same, changed = [{"etag": first["etag"], "match_condition": each} for each in conditions()]
    assert blob.download_blob(version_id=first["version_id"], **same).readall() == b"one"
    with pytest.raises(HttpResponseError) as refused:
        blob.download_blob(version_id=first["version_id"], **changed)
    assert refused.value.status_code == 412
    with pytest.raises(HttpResponseError):
        blob.upload_blob(b"three", overwrite=True, **same)


def conditions():
    from azure.core import MatchConditions

    return MatchConditions.IfNotModified, MatchConditions.IfModified


def test_nobody_comes_in_with_a_wrong_key_without_one_or_with_a_wrong_clock(service, azurite, container):
    url = f"{service.endpoint.url}/{container.container_name}?restype=container&comp=list&include=versions"
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(url, timeout=limit(10))
    assert refused.value.code == 401
    wrong = client(service.endpoint, base64.b64encode(b"wrong").decode(), **once())
    with pytest.raises(HttpResponseError) as refused:
        wrong.get_container_client(container.container_name).upload_blob("a", b"")
    assert refused.value.status_code == 403
    with VersionedBlobs(azurite, skew=3600).running() as ahead, pytest.raises(HttpResponseError, match="too old"):
        client(ahead.endpoint, **once()).get_account_information()


def test_what_the_service_does_not_know_of_versions_it_refuses(service, container):
    blob = container.get_blob_client("a")
    made = blob.upload_blob(b"one")["version_id"]
    with pytest.raises(HttpResponseError, match="no such operation"):
        blob.set_blob_tags({"a": "b"}, version_id=made)
    with pytest.raises(HttpResponseError, match="lists no"):
        list(container.list_blobs(include=["versions", "snapshots"]))
    with pytest.raises(ResourceNotFoundError):
        list(client(service.endpoint).get_container_client(HIDDEN).list_blobs())


@pytest.mark.parametrize("kind", ["busy", "throttled", "expired", "cut", "stall"])
def test_a_fault_hits_the_request_that_it_was_armed_for(proxy, blob, kind):
    fault = proxy.arm(kind, method="GET", nth=2)
    ask = own_request("GET", target_of(blob.container_name, "a"))
    first, second, third = [answer_or_error(proxy, ask) for _ in range(3)]
    said = {"busy": 503, "throttled": 429, "expired": 403, "cut": IncompleteRead, "stall": TimeoutError}
    assert (first, second, third, fault.fired) == (200, said[kind], 200, 1)


def answer_or_error(proxy, request):
    """Status of one answer, without the retries of a client; or the class of what went wrong."""
    connection = HTTPConnection("127.0.0.1", proxy.endpoint.port, timeout=limit(2))
    try:
        connection.request(request.method, request.target, headers=dict(request.headers))
        answer = connection.getresponse()
        answer.read()
        return answer.status
    except (IncompleteRead, OSError) as error:
        return type(error)
    finally:
        connection.close()


def test_bytes_are_flipped_in_both_directions(proxy, blob):
    proxy.arm("flip", method="GET")
    assert blob.download_blob().readall() == bytes(500) + b"\x01" + bytes(499)
    proxy.arm("flip", "up", method="PUT")
    blob.upload_blob(bytes(1000), overwrite=True)
    assert blob.download_blob().readall() == bytes(500) + b"\x01" + bytes(499)


@pytest.mark.parametrize("kind", ["cut", "stall"])
def test_an_upload_that_is_broken_does_not_reach_the_service(proxy, blob, kind):
    fault = proxy.arm(kind, "up", method="PUT")
    with pytest.raises(Exception):  # noqa: B017
        blob.upload_blob(b"new", overwrite=True)
    assert fault.fired == 1
    assert blob.download_blob().readall() == bytes(1000)


def test_nobody_listens_at_a_dead_endpoint():
    with pytest.raises(Exception, match="refused"):
        client(dead_endpoint(), **once()).get_account_information()

"""Events as Azure's own SDK and documentation write them, and what is not believed of them."""

import base64
import json
import time

import pytest
from azure.core.messaging import CloudEvent

from deployments.bridge.messages import MOST_BYTES, NotAllowed, Told, cloud_event, read_events, to_event
from deployments.configuration.events import EventsConfig

TOPIC = "/subscriptions/0/resourceGroups/rg/providers/Microsoft.Storage/storageAccounts/mine"
GRID = {
    "topic": TOPIC,
    "subject": "/blobServices/default/containers/data/blobs/a/new file.jsonl",
    "eventType": "Microsoft.Storage.BlobCreated",
    "eventTime": "2017-06-26T18:41:00.9584103Z",
    "id": "831e1650-001e-001b-66ab-eeb76e069631",
    "data": {
        "api": "PutBlockList",
        "eTag": "0x8D4BCC2E4835CD0",
        "contentLength": 524288,
        "blobType": "BlockBlob",
        "url": "https://mine.blob.core.windows.net/data/a/new%20file.jsonl",
        "sequencer": "00000000000004420000000000028963",
    },
    "dataVersion": "",
    "metadataVersion": "1",
}
"""As in learn.microsoft.com/azure/event-grid/event-schema-blob-storage."""
VERSION = "ab" * 32
NOTHING = EventsConfig()


def body(said) -> bytes:
    return json.dumps(said).encode()


def sdk(type_: str, *, subject="dataset/corpus", **said) -> dict:
    """A CloudEvent, checked and completed by the SDK, as its JSON is."""
    event = CloudEvent(source="/sender/7", type=type_, subject=subject, **said)
    kept = {name: getattr(event, name) for name in ("id", "source", "type", "specversion", "subject", "data")}
    return {**kept, "time": event.time.isoformat(), **(event.extensions or {})}


def ours(name: str, **said) -> Told:
    return cloud_event(sdk(f"headway.{name}", **said))


def test_event_grid_schema_is_read_one_or_many():
    (one,) = read_events(body(GRID))
    assert (one.source, one.identity, one.type) == (TOPIC, GRID["id"], "Microsoft.Storage.BlobCreated")
    assert one.url == GRID["data"]["url"]
    assert one.occurred == pytest.approx(1498502460.95841)
    assert len(read_events(body([GRID, {**GRID, "id": "2", "unknown": {"deep": [1]}}]))) == 2


def test_cloud_events_are_read_as_the_sdk_writes_them():
    made = sdk("Microsoft.Storage.BlobCreated", data=GRID["data"], extensions={"traceparent": "00-1"})
    (one,) = read_events(body(made))
    again = CloudEvent.from_json(json.dumps(made))
    assert (one.source, one.identity, one.type) == (again.source, again.id, again.type)
    assert (one.occurred, one.url) == (pytest.approx(again.time.timestamp()), GRID["data"]["url"])
    packed = {**made, "data_base64": base64.b64encode(body(GRID["data"])).decode()}
    del packed["data"]
    assert [told.url for told in read_events(body([made, packed]))] == [GRID["data"]["url"]] * 2


@pytest.mark.parametrize(
    ("time_", "epoch"),
    [
        ("2026-01-01T00:00:00Z", 1767225600.0),
        ("2026-01-01T05:30:00+05:30", 1767225600.0),
        ("2025-12-31t16:00:00.000-08:00", 1767225600.0),
    ],
)
def test_times_of_any_zone(time_, epoch):
    assert read_events(body({**GRID, "eventTime": time_}))[0].occurred == epoch


@pytest.mark.parametrize(
    "time_", ["2026-01-01T00:00:00", "1767225600", "yesterday", "2026-13-01T00:00:00Z", 1767225600]
)
def test_what_is_no_time_is_refused(time_):
    with pytest.raises(ValueError, match=r"(?i)time|month|string"):
        read_events(body({**GRID, "eventTime": time_}))


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"specversion": "1.0", "id": NaN}',
        body({"hello": 1}),
        body([GRID, 7]),
        body({**GRID, "id": ""}),
        body({**GRID, "id": 7}),
        body({key: value for key, value in GRID.items() if key != "id"}),
        body({key: value for key, value in GRID.items() if key != "topic"}),
        body({**GRID, "id": "a\x1b[2Jb"}),
        body({**GRID, "topic": "x" * 2049}),
        body({**sdk("a"), "specversion": "0.3"}),
        body({key: value for key, value in sdk("a").items() if key != "id"}),
        body({key: value for key, value in sdk("a").items() if key != "time"}),
        body({**sdk("a"), "data_base64": "%%%"}),
        body([GRID] * 5001),
        body({**GRID, "data": {"x": "y" * MOST_BYTES}}),
    ],
)
def test_what_is_neither_schema_is_refused(said):
    with pytest.raises(ValueError):
        read_events(said)


def test_the_handshake_is_known_by_its_type_only():
    said = {
        **GRID,
        "eventType": "Microsoft.EventGrid.SubscriptionValidationEvent",
        "data": {"validationCode": "512d38b6"},
    }
    assert read_events(body(said))[0].handshake == "512d38b6"
    assert read_events(body({**GRID, "data": {"validationCode": "512d38b6"}}))[0].handshake == ""


@pytest.mark.parametrize(
    ("name", "subject", "object_"),
    [
        ("dataset.published", "dataset/corpus", f"dataset/corpus@{VERSION}"),
        ("endpoint.anomaly", "endpoint/coder", "window 2026-01-01T00"),
        ("model.degraded", "model/coder", f"model/coder@{VERSION}"),
        ("model.tampered", "model/coder", ""),
    ],
)
def test_events_of_our_own_senders(name, subject, object_):
    said = {"object": object_, "note": "by hand", "connection": "AccountKey=" + "k" * 40}
    before = time.time()
    event = to_event(ours(name, subject=subject, data=said), NOTHING, "webhook")
    assert (event.name, event.subject, event.object, event.channel) == (name, subject, object_, "webhook")
    assert (event.source, event.data["note"]) == ("/sender/7", "by hand")
    assert "kkkk" not in str(event.data), "a secret is not kept"
    assert event.occurred >= before - 1


@pytest.mark.parametrize(
    ("name", "said", "why"),
    [
        ("data.arrived", {}, "from nobody else"),
        ("dataset.deleted", {}, "there is no event"),
        ("dataset.published", {"subject": "model/coder"}, "the subject of"),
        ("dataset.published", {"subject": "corpus"}, "the subject of"),
        ("dataset.published", {"subject": "dataset/../../etc"}, "the subject of"),
        ("dataset.published", {"subject": f"dataset/corpus@{VERSION}"}, "the subject of"),
        ("dataset.published", {"data": {"object": f"dataset/other@{VERSION}"}}, "the object of"),
        ("dataset.published", {"data": {"object": "dataset/corpus@abcd1234"}}, "64 hex digits"),
        ("dataset.published", {"data": {"object": 7}}, "is text"),
        ("model.degraded", {"subject": "model/coder", "data": {"big": "x" * 20_000}}, "at most 16384"),
        ("model.degraded", {"subject": "model/coder", "data": {"x": float("inf")}}, "plain JSON"),
    ],
)
def test_what_our_own_senders_may_not_say(name, said, why):
    with pytest.raises(NotAllowed, match=why):
        to_event(ours(name, **said), NOTHING, "webhook")


@pytest.mark.parametrize(
    "type_", ["Microsoft.Storage.BlobDeleted", "Microsoft.Storage.BlobRenamed", "com.example.thing"]
)
def test_other_types_are_refused_with_the_reason(type_):
    (told,) = read_events(body({**GRID, "eventType": type_}))
    with pytest.raises(NotAllowed, match="nothing starts by an event of type"):
        to_event(told, NOTHING, "queue")

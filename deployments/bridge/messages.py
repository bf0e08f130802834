"""Events as Azure and other systems write them (Event Grid schema, CloudEvents 1.0), and what they are to us.

Reading is for the queue and for the webhook. Whether a blob may be told of, and what it is now, is blobs.py; whether the sender
is who it says it is was asked before. See docs/events.md.
"""

from __future__ import annotations

import base64
import re
from datetime import datetime
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from deployments.bridge.blobs import NotAllowed as NotAllowed
from deployments.bridge.blobs import Places, read_again
from deployments.configuration.events import EventsConfig
from tasks.artifacts import parse_ref
from tasks.common.redaction import redact_value
from tasks.common.validation import explain
from tasks.config.base import canonical_json
from tasks.events.event import NAMES, Channel, Event

E = TypeVar("E", bound=BaseModel)
BLOB_CREATED = "Microsoft.Storage.BlobCreated"
VALIDATION = "Microsoft.EventGrid.SubscriptionValidationEvent"
OURS = "headway."
"""Before the name of an event of our own senders: `headway.dataset.published`."""
MOST_BYTES = 1 << 20
"""Of a body; Event Grid sends no more."""
MOST_EVENTS = 5000
"""In a body; Event Grid sends no more."""
MOST_DATA_BYTES = 16 << 10
"""Of what an event of our own senders says besides, as JSON."""
_TIME = re.compile(r"\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d:\d\d(\.\d{1,12})?([Zz]|[+-]\d\d:\d\d)")


def _seconds(text: str) -> str:
    """Checks a time of RFC 3339. Raises ValueError: also for one without its time zone, which is no time."""
    if not _TIME.fullmatch(text):
        raise ValueError("it is no time of RFC 3339 with its zone")
    datetime.fromisoformat(text.upper())
    return text


def _printable(text: str) -> str:
    """What people are shown, and what is compared, has nothing hidden in it."""
    if not text.isprintable():
        raise ValueError("it holds characters that cannot be shown")
    return text


Shown = Annotated[str, Field(max_length=2048), AfterValidator(_printable)]
Said = Annotated[Shown, Field(min_length=1)]
Time = Annotated[str, Field(max_length=64), AfterValidator(_seconds)]


class Told(NamedTuple):
    """An event as its sender tells it: nothing of it is believed yet."""

    format: Literal["event_grid", "cloud_events"]
    source: str
    """The topic of Event Grid, the source of CloudEvents."""
    identity: str
    """Id, unique within the source."""
    type: str
    subject: str
    occurred: float
    """Seconds since the epoch."""
    data: dict[str, Any]
    """Empty where it was no JSON object."""

    @property
    def url(self) -> str:
        """Where it says that the blob lies."""
        return self._said("url")

    @property
    def handshake(self) -> str:
        """The code that Event Grid wants to hear again before it sends; empty for every other event."""
        return self._said("validationCode") if self.type == VALIDATION else ""

    def _said(self, key: str) -> str:
        value = self.data.get(key)
        return value if isinstance(value, str) else ""


class _GridEvent(BaseModel):
    """https://learn.microsoft.com/azure/event-grid/event-schema"""

    model_config = ConfigDict(extra="ignore", strict=True, hide_input_in_errors=True)

    id: Said
    topic: Said
    subject: Shown = ""
    eventType: Said  # noqa: N815
    eventTime: Time  # noqa: N815
    data: Any = None


class _CloudEvent(BaseModel):
    """https://github.com/cloudevents/spec/blob/v1.0.2/cloudevents/spec.md. Its `time` is optional there, and needed here."""

    model_config = ConfigDict(extra="ignore", strict=True, hide_input_in_errors=True)

    specversion: Literal["1.0"]
    id: Said
    source: Said
    type: Said
    subject: Shown = ""
    time: Time
    data: Any = None
    data_base64: str | None = None


def read_events(body: bytes) -> list[Told]:
    """The events of a body: one or several, of either schema. Raises ValueError for anything else, and says what is wrong."""
    if len(body) > MOST_BYTES:
        raise ValueError(f"it has {len(body)} bytes, and at most {MOST_BYTES} are taken")
    output = from_json(body, allow_inf_nan=False)
    each = output if isinstance(output, list) else [output]
    if not each or len(each) > MOST_EVENTS:
        raise ValueError(f"it holds {len(each)} events, and 1 to {MOST_EVENTS} are taken")
    results: list[Told] = []
    for one in each:
        if not isinstance(one, dict):
            raise ValueError("an event is a JSON object")
        if "specversion" in one:
            results.append(cloud_event(one))
        elif "eventType" in one:
            event = _checked(_GridEvent, one)
            data = event.data if isinstance(event.data, dict) else {}
            what = (event.topic, event.id, event.eventType, event.subject, _epoch(event.eventTime), data)
            results.append(Told("event_grid", *what))
        else:
            raise ValueError(
                "it is neither of Event Grid's schema (`eventType`) nor of CloudEvents 1.0 (`specversion`)"
            )
    return results


def cloud_event(output: dict[str, Any]) -> Told:
    """An event of CloudEvents 1.0, by its attributes and `data`. Raises ValueError."""
    event = _checked(_CloudEvent, output)
    data = event.data
    if event.data_base64 is not None:
        data = from_json(base64.b64decode(event.data_base64, validate=True), allow_inf_nan=False)
    data = data if isinstance(data, dict) else {}
    return Told("cloud_events", event.source, event.id, event.type, event.subject, _epoch(event.time), data)


def to_event(payload: Told, config: EventsConfig, channel: Channel, listed: Places | None = None) -> Event:
    """What an event is to us; a blob is looked at where it lies, unless it was `listed` just now (blobs.list_many).

    Raises NotAllowed with the reason, and Missing while storage is away: then the sender is to try again.
    """
    if payload.type.startswith(OURS):
        return _of_ours(payload, channel)
    if payload.type != BLOB_CREATED:
        raise NotAllowed(
            f"nothing starts by an event of type {payload.type[:100]!r}: {BLOB_CREATED} and {OURS}NAME are taken"
        )
    # Whatever the event says of the blob, the blob's address and ETag are those that storage has.
    blob = read_again(payload.url, config, listed)
    return Event(
        name="data.arrived",
        subject=f"dataset/{blob.container.dataset}",
        source=payload.source,
        identity=payload.identity,
        object=blob.object,
        occurred=payload.occurred,
        channel=channel,
        data={"url": blob.url, "bytes": blob.size, "version": blob.version},
    )


def _of_ours(payload: Told, channel: Channel) -> Event:
    """An event of a sender of our own. `data.object` is the version that it is about. Raises NotAllowed."""
    text = payload.type.removeprefix(OURS)
    if text == "data.arrived":
        raise NotAllowed("data.arrived comes from storage or from a watched folder, and from nobody else")
    name = next((each for each in NAMES if each == text), None)
    if name is None:
        raise NotAllowed(f"there is no event {text[:100]!r}; there are {', '.join(NAMES)}")
    kind = name.partition(".")[0]
    try:
        if parse_ref(payload.subject, kind=kind)[2] or not payload.subject.startswith(f"{kind}/"):
            raise ValueError("it names a version")
    except ValueError:
        raise NotAllowed(f"the subject of {payload.type} is {kind}/NAME, not {payload.subject[:100]!r}") from None
    # Of a dataset or a model a whole version, as lineage knows it.
    about = payload.data.get("object", "")
    if not isinstance(about, str) or not about.isprintable() or len(about) > 2048:
        raise NotAllowed("`object` is text of at most 2048 characters")
    if about and kind != "endpoint" and not re.fullmatch(f"{re.escape(payload.subject)}@[0-9a-f]{{64}}", about):
        raise NotAllowed(
            f"the object of {payload.type} is {payload.subject}@VERSION with 64 hex digits, not {about[:100]!r}"
        )
    data = {key: value for key, value in payload.data.items() if key != "object"}
    try:
        size = len(canonical_json(data).encode())
    except ValueError as error:
        raise NotAllowed(f"its data is no plain JSON: {error}") from None
    if size > MOST_DATA_BYTES:
        raise NotAllowed(
            f"its data has {size} bytes, and at most {MOST_DATA_BYTES} are taken: name where it lies instead"
        )
    return Event(
        name=name,
        subject=payload.subject,
        source=payload.source,
        identity=payload.identity,
        object=about,
        occurred=payload.occurred,
        channel=channel,
        data=redact_value(data),
    )


def _checked(form: type[E], output: Any) -> E:
    try:
        return form.model_validate(output)
    except ValidationError as error:
        raise ValueError(explain(error, form, values=False)) from error


def _epoch(time: str) -> float:
    return datetime.fromisoformat(time.upper()).timestamp()

"""An event: something that happened to data, a model or an endpoint, wherever the word of it came from. See docs/events.md."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import Field

from tasks.artifacts import Value

EventName = Literal[
    "data.arrived",
    "dataset.published",
    "endpoint.anomaly",
    "model.tampered",
    "model.revalidated",
    "model.degraded",
    "model.stale",
    "estate.drifted",
]
"""data.arrived: a file or blob landed where one is watched for; the bridge makes a dataset version of all that landed.
dataset.published: a dataset has a new current version. endpoint.anomaly: its answers are not as they were. model.tampered: a
champion's files are not what was signed. model.revalidated: with the verdict. model.degraded: so in as many revalidations in a
row as `windows` says. model.stale: not revalidated within its period. estate.drifted: Azure's side is not as it was rendered.
"""
NAMES: tuple[EventName, ...] = get_args(EventName)
Channel = Literal["folder", "store", "queue", "webhook", "hand", "headway"]
"""Which way it came in: a watched folder, a watched store, a storage queue, the HTTP bridge, `headway events send`, or a part of
Headway that found it."""
Text = Annotated[str, Field(max_length=2048)]


class Event(Value):
    """Something that happened. Two with the same source and identity are one; so are two of one name and object."""

    name: EventName
    subject: Text
    """What it is about: dataset/NAME, model/NAME, endpoint/NAME, estate/SUBSCRIPTION."""
    source: Text
    """Who says so, as CloudEvents means it: the topic of Event Grid, the path of a folder, `headway/FLOW`."""
    identity: Text
    """The source's own id of it."""
    object: Text = ""
    """The version of what it is about, where there is one: dataset/NAME@VERSION, a blob's URL with its ETag. An object is told
    of once: a second event of the same name and object is a duplicate."""
    occurred: float
    """Seconds since the epoch, by the source's clock."""
    channel: Channel
    data: dict[str, Any] = Field(default={})
    """What else is known, small: never the data itself, never a secret."""

"""Settings of events: where they come from, whom the bridge believes, and what they start. Part of
deployments/configuration/platform.py."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, ConfigDict, Field, field_validator, model_validator

from tasks.config.access import EntraConfig
from tasks.config.base import Name, Positive, Settings
from tasks.events.event import EventName
from tasks.storage.settings import Identity


def _by_name(value: str) -> str:
    """Who writes a secret where its variable's name belongs must not find it in a message too."""
    if value and not re.fullmatch(r"env:[A-Za-z_]\w*", value):
        raise ValueError("a secret is never written here: name the variable that holds it, as env:NAME")
    return value


Secret = Annotated[str, AfterValidator(_by_name)]
"""env:NAME of the variable that holds a secret; empty: none."""
Host = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]{0,252}[a-z0-9])?$")]


class FolderConfig(Settings):
    """A folder whose files are a dataset: when one lands or changes, all of them are published as a new version."""

    path: str
    """The folder; a relative one is below the directory where `headway up --config FILE` is called, and kept as a whole path."""
    dataset: Name
    """Name of the dataset that is made of it."""
    include: str = "*"
    """Files that count, as a pattern of their names."""


class ContainerConfig(Identity):
    """A container of Azure Blob whose blobs are a dataset. Events about any other account, container or prefix are refused."""

    url: Annotated[str, Field(pattern=r"^https?://[^/@?#\s]+(/[a-z0-9-]+){1,2}$")]
    """https://ACCOUNT.blob.core.windows.net/CONTAINER, written as Azure writes it."""
    prefix: Annotated[str, Field(pattern=r"^([^/\\].*/)?$")] = ""
    """Blobs below it; empty, or it ends with a slash."""
    include: str = "*"
    """Blobs that count, as a pattern of the last part of their names."""
    dataset: Name
    """Name of the dataset that is made of them."""


class QueueConfig(Identity):
    """A Storage Queue that Event Grid delivers to."""

    url: Annotated[str, Field(pattern=r"^https?://[^/@?#\s]+(/[a-z0-9-]+){1,2}$")]
    """https://ACCOUNT.queue.core.windows.net/QUEUE."""
    poll_seconds: float = Field(1.0, gt=0)
    """Time between two looks while it is empty."""
    max_deliveries: Positive = 5
    """Times that a message is tried; then it is set aside, in the queue of the same name with `-poison`."""
    visibility_seconds: Positive = 60
    """Time that a message is ours before others see it again."""


class WebhookConfig(Settings):
    """The HTTP bridge: events by POST, each proven by a token, a shared secret or a signature."""

    model_config = ConfigDict(hide_input_in_errors=True)

    host: str = "127.0.0.1"
    """Address that it listens on. Any but loopback needs `open`."""
    port: int | None = Field(None, ge=1, le=65535)
    """Empty: a free one, which it keeps."""
    open: bool = False
    """Whether it may listen on other addresses than loopback. A proxy with TLS belongs before it."""
    entra: EntraConfig | None = None
    """Event Grid with Entra ID."""
    secret: Secret = ""
    """env:NAME of a shared secret: Event Grid sends it in the header `X-Headway-Secret`, as a delivery property."""
    hmac: Secret = ""
    """env:NAME of the key of senders of our own: header `X-Headway-Signature: t=SECONDS,v1=HEX`."""
    max_age_seconds: float = Field(300.0, gt=0)
    """Oldest time stamp of a signature, and farthest ahead, that is believed."""
    max_bytes: int = Field(1 << 20, gt=0, le=1 << 20)
    """Largest body. Event Grid sends at most 1 MiB."""
    topics: tuple[str, ...] = ()
    """Topics (`source` in CloudEvents) that may send and subscribe, as Azure writes them; empty: all that prove themselves."""
    origins: tuple[Host, ...] = ("eventgrid.azure.net",)
    """Names (`WebHook-Request-Origin`) that learn, when they ask with HTTP OPTIONS, that they may send CloudEvents here."""

    @model_validator(mode="after")
    def _proven(self) -> WebhookConfig:
        if not (self.entra or self.secret or self.hmac):
            raise ValueError("a webhook needs a way for senders to prove themselves: entra, secret or hmac")
        if self.host not in ("127.0.0.1", "::1", "localhost") and not self.open:
            raise ValueError(
                f"host {self.host} is not loopback: set `open: true` when a proxy with TLS stands before it"
            )
        return self


class TriggerConfig(Settings):
    """Which event starts which deployment."""

    event: EventName
    """What starts it."""
    subject: str = "*"
    """Whose: dataset/NAME, model/NAME or endpoint/NAME, as a pattern."""
    start: str
    """FLOW/NAME of a deployment, for example revalidate/local. It gets the dataset of the event, where the event has one."""
    dataset: str = ""
    """Dataset of the run where the event names none; empty: the deployment's."""
    set: tuple[str, ...] = ()
    """Settings that differ from the deployment's, as A.B=VALUE: approval.before_retrain=true."""
    cooldown_minutes: float = Field(10.0, ge=0)
    """Least time between two starts. What comes meanwhile waits, and is covered by one run then."""


class EventsConfig(Settings):
    """Events: where they come from, and what they start."""

    folders: tuple[FolderConfig, ...] = ()
    """Folders of this machine that are watched."""
    containers: tuple[ContainerConfig, ...] = ()
    """Containers that events may be about; all others are refused."""
    queues: tuple[QueueConfig, ...] = ()
    """Storage Queues that are polled."""
    webhook: WebhookConfig | None = None
    """The HTTP bridge; empty: none."""
    triggers: tuple[TriggerConfig, ...] = ()
    """What starts by itself."""
    settle_seconds: float = Field(2.0, ge=0)
    """Time without a change after which what landed is published: many files at once are one version."""
    integrity_minutes: float = Field(15.0, gt=0)
    """Time between two looks at the files of every champion, and of what serves."""

    @field_validator("triggers")
    @classmethod
    def _no_circle(cls, value: tuple[TriggerConfig, ...]) -> tuple[TriggerConfig, ...]:
        """A revalidation must not start a revalidation, for ever; nor a file that lands a run without it."""
        for trigger in value:
            if trigger.event == "data.arrived":
                raise ValueError(
                    "data.arrived starts nothing: dataset.published says that all of it has landed; name that"
                )
            if trigger.event == "model.revalidated" and trigger.start.startswith("revalidate/"):
                raise ValueError(f"{trigger.event} starting {trigger.start} would never end")
        return value

    @model_validator(mode="after")
    def _one_source(self) -> EventsConfig:
        """Two sources of one dataset would take turns in being its newest version."""
        names = [*(each.dataset for each in self.folders), *(each.dataset for each in self.containers)]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"{', '.join(twice)}: made of two folders or containers; give each a dataset of its own")
        return self

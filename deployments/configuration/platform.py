"""Settings of the platform: what is deployed, when it runs, who is told, what is watched. One YAML file, every part optional.

`headway up --config FILE` checks it and keeps a copy as `.headway/platform.yaml`, which later starts use. What one run does is
tasks/config/flows.py.
"""

from __future__ import annotations

import os
import re
from datetime import UTC, datetime
from functools import cache
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Annotated, Literal
from zoneinfo import available_timezones

from pydantic import Field, field_validator

from deployments.configuration.events import EventsConfig
from tasks.common.errors import Missing
from tasks.config.base import Positive, Settings
from tasks.config.database import FORM, parse
from tasks.config.files import load_file

RANDOM = re.compile(r"[HR]($|[(/])", re.IGNORECASE)
"""A field that stands for times by chance: what Prefect does not take (a bare one), or draws anew at every look."""
Occasion = Literal["failed", "gate_closed", "approval_needed", "alert"]


class ScheduleConfig(Settings):
    """When a deployment runs by itself."""

    deployment: str
    """FLOW/NAME of a deployment, for example retrain/local."""
    cron: str
    """Five fields: minute, hour, day of month, month, day of week."""
    timezone: str = "UTC"
    """IANA name, for example Europe/Berlin: the clock that `cron` is read on, daylight saving time among it."""
    jitter_seconds: int = Field(0, ge=0)
    """Largest random delay of each start, so that many schedules do not start at once."""
    missed: Literal["run_once", "skip", "run_all"] = "run_once"
    """What becomes of times that passed while nothing ran: the newest one, none, or all one after the other."""
    dataset: str = ""
    """Dataset of the runs; empty: the configuration's."""
    set: tuple[str, ...] = ()
    """Settings that differ from the deployment's, as A.B=VALUE."""
    active: bool = True
    """Whether it fires."""

    @field_validator("cron")
    @classmethod
    def _five_fields(cls, value: str) -> str:
        fields, read = value.split(), _prefects_croniter()
        if len(fields) != 5 or any(RANDOM.match(field) for field in fields) or not read.croniter.is_valid(value):
            raise ValueError(
                f"{value!r} is not a cron line of five fields that Prefect reads (minute, hour, day of month, month, "
                "day of week); '0 3 * * 1' is every Monday at 03:00"
            )
        try:
            read.croniter(value, datetime.now(UTC)).get_next()
        except read.CroniterBadDateError as error:
            raise ValueError(f"{value!r} never comes: no month of the line has such a day") from error
        return value

    @field_validator("timezone")
    @classmethod
    def _known_zone(cls, value: str) -> str:
        if value not in available_timezones() - {"localtime", "Factory"}:
            raise ValueError(f"{value!r} is not a time zone; Europe/Berlin and UTC are")
        return value


class NotificationConfig(Settings):
    """Somebody who is notified."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")]
    """Name of the channel."""
    url: Annotated[str, Field(repr=False)]
    """Where to: an Apprise address (mailto://, msteams://, slack://, json://host/path), or env:NAME to read it from there."""
    occasions: tuple[Occasion, ...] = ("failed", "gate_closed", "approval_needed", "alert")
    """What of. (Not `on`: YAML reads that word as true.)"""

    @field_validator("url")
    @classmethod
    def _an_address(cls, value: str) -> str:
        """What was given is not told: an address holds passwords."""
        if not re.fullmatch(r"env:[A-Za-z_][A-Za-z0-9_]*|[a-z][a-z0-9+.-]*://.+", value):
            raise ValueError("it is neither an address (mailto://, slack://, jsons://, ...) nor env:NAME")
        return value


class AlertsConfig(Settings):
    """Limits whose breach is reported, once when it begins and once when it is over."""

    job_without_progress_minutes: float = Field(15.0, gt=0)
    """A running stage that reports nothing new for so long."""
    schedule_missed_minutes: float = Field(10.0, gt=0)
    """A scheduled run that has not started so long after its time."""
    disk_free_gb: float = Field(5.0, ge=0)
    """Least free space (10^9 bytes) on the disk that holds the state."""
    champion_revalidated_days: float = Field(8.0, gt=0)
    """Longest time since a champion was deployed or revalidated."""
    failed_hours: float = Field(24.0, gt=0)
    """A failed run or a closed gate stays an alert until a later run of the same kind and model succeeds, or for so long."""
    denials: Positive = 5
    """Refusals of one name, or from one place, within `denials_minutes`."""
    denials_minutes: float = Field(10.0, gt=0)
    """Time in which refusals are counted."""
    download_gb: float = Field(500.0, gt=0)
    """Most (10^9 bytes) that one name reads of artifacts within an hour."""
    download_artifacts: Positive = 500
    """Most artifacts that one name reads within an hour."""
    download_times_usual: float = Field(20.0, gt=1)
    """Most that one name reads within an hour, in times of what an hour of that name usually comes to."""
    new_place_hours: float = Field(24.0, gt=0)
    """A name at a host or account where it never was before stays an alert for so long."""


class TelemetryConfig(Settings):
    """Where metrics, traces and logs go."""

    interval_seconds: float = Field(5.0, gt=0)
    """Time between two looks at the host and at the runs, whose traces and logs are exported then."""
    metrics_seconds: float = Field(60.0, gt=0)
    """Time between two exports of all metrics; /metrics always has those of the last look."""
    prometheus: bool = True
    """Whether /metrics is served on loopback."""
    file: bool = True
    """Whether spans, metrics and logs are written under telemetry/ as JSON lines."""
    otlp_endpoint: str = ""
    """Address of an OTLP/HTTP collector; empty: none."""
    azure_connection_string: str = ""
    """env:NAME of the variable that holds the connection string of Application Insights; empty: none."""

    @field_validator("azure_connection_string")
    @classmethod
    def _by_name(cls, value: str) -> str:
        if value and not value.startswith("env:"):
            raise ValueError("a connection string is a secret: name the variable that holds it, as env:NAME")
        return value

    def azure_secret(self) -> str:
        """The connection string itself. Raises Missing when its variable is not set."""
        name = self.azure_connection_string.removeprefix("env:")
        if not os.environ.get(name):
            raise Missing(f"{name} is not set", remedy=f"export {name}='InstrumentationKey=...;IngestionEndpoint=...'")
        return os.environ[name]


class PlatformConfig(Settings):
    """The platform."""

    schedules: tuple[ScheduleConfig, ...] = ()
    """When deployments run by themselves."""
    notifications: tuple[NotificationConfig, ...] = ()
    """Who is told of failures, closed gates, approvals that are needed, and alerts."""
    alerts: AlertsConfig = AlertsConfig()
    """What is watched."""
    telemetry: TelemetryConfig = TelemetryConfig()
    """Where metrics, traces and logs go."""
    events: EventsConfig = EventsConfig()
    """What is watched for, and what starts by itself when it comes."""
    database: str = ""
    """PostgreSQL in which Prefect and MLflow keep what they know, as postgresql://USER@HOST:5432/DATABASE, or env:NAME of the
    variable that holds the address, with its password; empty: files of the home. Several hosts need one."""
    overlap: Literal["queue", "refuse"] = "queue"
    """What becomes of a run of a deployment that is started while another one is running: it waits, or is cancelled."""
    queued_runs: Positive = 20
    """Scheduled runs of a deployment that wait behind another one (`overlap: queue`); of more, the newest are cancelled. What
    `missed: run_all` makes up for does not count."""
    on_crash: Literal["resume", "mark"] = "resume"
    """What becomes of a flow run whose process died: it continues from its last finished stage, or is marked as crashed."""
    max_resumes: int = Field(3, ge=0)
    """Times that one flow run is resumed after its process died."""
    parallel_runs: Positive = 4
    """Flow runs that may be running at once. One that waits for an approval does not count."""

    @field_validator("database")
    @classmethod
    def _without_password(cls, value: str) -> str:
        if re.fullmatch(r"env:[A-Za-z_]\w*", value) or not value:
            return value
        if parse(value)[1]:
            raise ValueError("it holds a password: name the variable that holds the whole address, as env:NAME")
        return value

    def database_address(self) -> str:
        """The address itself; empty: files of the home. Raises Missing when its variable is not set."""
        if not self.database.startswith("env:"):
            return self.database
        name = self.database.removeprefix("env:")
        if not os.environ.get(name):
            raise Missing(f"{name} is not set, which the setting `database` names", remedy=f"export {name}='{FORM}'")
        return os.environ[name]


@cache
def _prefects_croniter() -> ModuleType:
    """What Prefect reads cron lines with. It is loaded beside Prefect, which must not be imported before `prepare`."""
    prefect = find_spec("prefect")
    if prefect is None or prefect.origin is None:
        raise Missing("Prefect is not installed", remedy="pip install -c constraints.txt -e '.[local]'")
    path = Path(prefect.origin).parent / "_vendor" / "croniter" / "croniter.py"
    spec = spec_from_file_location("headway_prefects_croniter", path)
    assert spec is not None and spec.loader is not None, path
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def kept(home: Path) -> Path:
    """The platform's settings of a home."""
    return home / "platform.yaml"


def load_settings(home: Path) -> PlatformConfig:
    """The platform's settings: as kept, or the defaults. Raises ValueError."""
    return load_file(PlatformConfig, kept(home)) if kept(home).exists() else PlatformConfig()


def current_settings(home: Path, config: PlatformConfig) -> PlatformConfig:
    """The settings of now, for who runs with `config`. A kept file that somebody broke by hand changes nothing."""
    try:
        return load_settings(home)
    except ValueError:
        return config

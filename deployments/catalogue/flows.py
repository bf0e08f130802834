"""What is deployed: every flow with every shipped configuration, as values; the same values make prefect.yaml.

Who tells a Prefect server of them is deployments/services/registration.py. A deployment is FLOW/NAME; its parameters are the
shipped configuration of that name, so the form in Prefect's page starts from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from deployments.catalogue import routes
from deployments.configuration.files import SHIPPED, changed, load
from deployments.configuration.platform import PlatformConfig, ScheduleConfig
from tasks.config.base import Settings, digest
from tasks.config.flows import BackupConfig, QualifyConfig, RetrainConfig, RevalidateConfig, ValidateConfig, WatchConfig

POOL = "headway"
OURS = "headway-"
"""What the names of our schedules at Prefect begin with; all others are people's."""
FORMS: dict[str, type[Settings]] = {
    "retrain": RetrainConfig,
    "revalidate": RevalidateConfig,
    "validate": ValidateConfig,
    "qualify": QualifyConfig,
    "backup": BackupConfig,
    "watch": WatchConfig,
}
"""The flows, and what each takes as `config`. The flow of a name is flows.NAME.NAME."""
WITHOUT_DATASET = ("qualify", "backup", "watch")
REFUSED = ("Deployment concurrency limit reached.", "Deployment concurrency slot lost during provisioning")
"""How Prefect's words begin when it cancels a run because another one of its deployment is at work."""
APART = ("backup", "watch")
"""Flows whose settings are no part of a retraining run's: they start from the defaults of their class."""
PURPOSE = {
    "retrain": "The whole lifecycle: a dataset becomes a served model.",
    "revalidate": "The model in production, verified and measured on the newest data. Stops only what serves changed files.",
    "validate": "A dataset, judged by itself; what breaks a rule is set aside.",
    "qualify": "The cluster, measured anew and judged.",
    "backup": "Key assets into a store of backups; proved by a drill, where wanted.",
    "watch": "What endpoints answered since the last look, against what is usual; what stands out becomes an event.",
}


@dataclass(frozen=True)
class Schedule:
    """When a deployment runs by itself."""

    slug: str
    cron: str
    timezone: str
    active: bool
    parameters: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Deployment:
    """A flow with where and when."""

    flow: str
    name: str
    description: str
    parameters: dict[str, Any]
    overlap: str
    schedules: tuple[Schedule, ...] = ()

    @property
    def full_name(self) -> str:
        return f"{self.flow}/{self.name}"

    @property
    def entrypoint(self) -> str:
        """As a module: a file's path would be another module than the one that everybody imports."""
        return f"flows.{self.flow}.{self.flow}"

    @property
    def tags(self) -> list[str]:
        return ["headway", self.flow, self.name]

    @property
    def collision(self) -> str:
        """Prefect's word for what becomes of a run that starts while another one is at work."""
        return {"queue": "ENQUEUE", "refuse": "CANCEL_NEW"}[self.overlap]


def catalogue(config: PlatformConfig) -> list[Deployment]:
    """All deployments. Raises ValueError for a schedule or a trigger of a deployment that there is not, or whose settings do not
    hold."""
    made = [_deployment(flow, preset, config) for flow in FORMS for preset in presets()]
    known = [deployment.full_name for deployment in made]
    for schedule in config.schedules:
        if schedule.deployment not in known:
            raise ValueError(f"schedules: there is no deployment {schedule.deployment!r}; there are {', '.join(known)}")
    routes.check(config.events, known)
    for number, trigger in enumerate(config.events.triggers):
        flow, _, preset = trigger.start.partition("/")
        _changed(f"events.triggers.{number} ({trigger.start})", flow, preset, trigger.dataset, trigger.set)
    return made


def presets() -> list[str]:
    """Names of the shipped configurations that say what is trained; one that says only where belongs on top of such a one."""
    results = sorted(path.stem for path in SHIPPED.glob("*.yaml"))
    return [name for name in results if "training" in load(name, []).model_fields_set]


def parameters(
    flow: str, source: str | Sequence[str], dataset: str = "", overrides: tuple[str, ...] = ()
) -> dict[str, Any]:
    """What a flow is called with for a configuration: by names or paths, with settings changed as A.B=VALUE."""
    form = FORMS[flow]
    if flow in APART:
        return {"config": changed(form, overrides).model_dump(mode="json")}
    whole = load(source, list(overrides))
    payload = {**whole.model_dump(mode="json"), "model": whole.training.model}
    part = form.model_validate({key: value for key, value in payload.items() if key in form.model_fields})
    config = {"config": part.model_dump(mode="json")}
    return config if flow in WITHOUT_DATASET else {"dataset": dataset or whole.dataset, **config}


def as_prefect_yaml(config: PlatformConfig) -> str:
    """The catalogue as the file that `prefect deploy --all` takes."""
    result = {
        "prefect-version": "3.8.8",
        "name": "headway",
        "pull": [],
        "deployments": [_as_yaml(deployment) for deployment in catalogue(config)],
    }
    return yaml.safe_dump(result, sort_keys=False, width=120, allow_unicode=True)


def _deployment(flow: str, preset: str, config: PlatformConfig) -> Deployment:
    return Deployment(
        flow=flow,
        name=preset,
        description=f"{PURPOSE[flow]} Settings start from the configuration `{preset}`.",
        parameters=parameters(flow, preset),
        overlap=config.overlap,
        schedules=tuple(_schedules(flow, preset, config)),
    )


def _schedules(flow: str, preset: str, config: PlatformConfig) -> Iterator[Schedule]:
    numbers = {slug_of(schedule): number for number, schedule in enumerate(config.schedules)}
    for slug, schedule in by_slug(config).items():
        if schedule.deployment == f"{flow}/{preset}":
            yield _schedule(flow, preset, f"schedules.{numbers[slug]} ({schedule.deployment})", schedule)


def _schedule(flow: str, preset: str, where: str, schedule: ScheduleConfig) -> Schedule:
    payload = _changed(where, flow, preset, schedule.dataset, schedule.set)
    return Schedule(
        slug=slug_of(schedule),
        cron=schedule.cron,
        timezone=schedule.timezone,
        active=schedule.active,
        parameters=payload,
    )


def _changed(where: str, flow: str, preset: str, dataset: str, overrides: tuple[str, ...]) -> dict[str, Any]:
    """Parameters that differ from the deployment's: none, where nothing does."""
    try:
        return parameters(flow, preset, dataset, overrides) if dataset or overrides else {}
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def by_slug(config: PlatformConfig) -> dict[str, ScheduleConfig]:
    """The schedules of the settings by their names at Prefect. Two that start the same at the same times are one: the later."""
    return {slug_of(schedule): schedule for schedule in config.schedules}


def slug_of(schedule: ScheduleConfig) -> str:
    """The name of a schedule at Prefect, made of what it starts and when: it stays when others come before it, or go."""
    what = (schedule.deployment, schedule.cron, schedule.timezone, schedule.dataset, *schedule.set)
    return f"{OURS}{digest(what)[:12]}"


def _as_yaml(deployment: Deployment) -> dict[str, Any]:
    return {
        "name": deployment.name,
        "description": deployment.description,
        "tags": deployment.tags,
        "entrypoint": deployment.entrypoint,
        "parameters": deployment.parameters,
        "enforce_parameter_schema": True,
        "concurrency_limit": {"limit": 1, "collision_strategy": deployment.collision},
        "work_pool": {"name": POOL},
        "schedules": [_schedule_as_yaml(schedule) for schedule in deployment.schedules],
    }


def _schedule_as_yaml(schedule: Schedule) -> dict[str, Any]:
    return {
        "cron": schedule.cron,
        "timezone": schedule.timezone,
        "active": schedule.active,
        "slug": schedule.slug,
        "parameters": schedule.parameters,
    }

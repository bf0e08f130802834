"""What is deployed: every flow with every shipped configuration, as values; the same values make prefect.yaml.

Who tells a Prefect server of them is deployments/services/registration.py. A deployment is FLOW/NAME; NAME is the preset
that its runs start from, and the fields of its form are the flow's arguments (flows/support/inputs.py).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from deployments.catalogue import routes
from deployments.configuration.platform import PlatformConfig, ScheduleConfig
from tasks.config.base import Settings, digest
from tasks.config.files import changed, load, part_of, presets
from tasks.config.flows import (
    AuditConfig,
    BackupConfig,
    QualifyConfig,
    RehearseConfig,
    RetrainConfig,
    RevalidateConfig,
    ValidateConfig,
    WatchConfig,
)

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
    "audit": AuditConfig,
    "rehearse": RehearseConfig,
}
"""The flows, and what each takes as `config`. The flow of a name is flows.NAME.NAME."""
WITHOUT_DATASET = ("qualify", "backup", "watch", "audit", "rehearse")
REFUSED = ("Deployment concurrency limit reached.", "Deployment concurrency slot lost during provisioning")
"""How Prefect's words begin when it cancels a run because another one of its deployment is at work."""
APART = ("backup", "watch", "audit", "rehearse")
"""Flows whose settings are no part of a retraining run's: they start from the defaults of their class."""
PURPOSE = {
    "retrain": "The whole lifecycle: a dataset becomes a served model.",
    "revalidate": "The model in production, verified and measured on the newest data. Stops only what serves changed files.",
    "validate": "A dataset, judged by itself; what breaks a rule is set aside.",
    "qualify": "The cluster, measured now and judged.",
    "backup": "Key assets into a store of backups; proved by a drill, where wanted.",
    "watch": "What endpoints answered since the last look, against what is usual; what stands out becomes an event.",
    "audit": "Azure's side and this home, judged by Microsoft's recommendations; what left the templates becomes an event.",
    "rehearse": "Faults on purpose, in a home of its own: whether what is promised holds, on these machines and settings.",
}

COLLISIONS = {"queue": "ENQUEUE", "refuse": "CANCEL_NEW"}
"""Prefect's words for what becomes of a run that starts while another one is at work."""
HEAD = """\
# What `prefect deploy --all` deploys: each flow with each preset. `headway deployments --prefect-yaml` makes it.
name: headway
pull: []
definitions:
  all: &all
    enforce_parameter_schema: true
    concurrency_limit: {{limit: 1, collision_strategy: {collision}}}
    work_pool:
{pool}"""
"""The file for Prefect, to its first flow."""
PROCESSES = f"""\
      name: {POOL}
      # Named where HEADWAY_HOME is set while this is deployed; else the worker's own counts.
      job_variables: {{env: {{HEADWAY_HOME: "{{{{ HEADWAY_HOME }}}}"}}}}"""
CONTAINERS = """\
      name: {POOL}-docker
      job_variables:
        image: {image}
        image_pull_policy: IfNotPresent
        auto_remove: true
        # HEADWAY_HOME, as it is set while this is deployed, names the home on the machine of the Docker engine.
        volumes: ["{{{{ HEADWAY_HOME }}}}:{IN_IMAGE}"]
        env: {{HEADWAY_HOME: {IN_IMAGE}}}"""
"""Where its flows run: as processes of a worker, or each in a container."""
IN_IMAGE = "/var/lib/headway"
"""The home in docker/orchestrator.Dockerfile."""


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
        return COLLISIONS[self.overlap]


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


def parameters(
    flow: str, source: str | Sequence[str], dataset: str = "", overrides: tuple[str, ...] = ()
) -> dict[str, Any]:
    """What a flow is called with for a configuration: by names or paths, with settings changed as A.B=VALUE."""
    form = FORMS[flow]
    if flow in APART:
        own = (f"configuration={source}",) if flow == "rehearse" and source in presets() else ()
        return {"config": changed(form, (*own, *overrides)).model_dump(mode="json")}
    whole = load(source, list(overrides))
    config = {"config": form.model_validate(part_of(form, whole)).model_dump(mode="json")}
    return config if flow in WITHOUT_DATASET else {"dataset": dataset or whole.dataset, **config}


def changes(flow: str, preset: str, dataset: str, overrides: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a run is started with that differs from its deployment, and all that it comes to. Raises ValueError."""
    whole = parameters(flow, preset, dataset, overrides)
    if flow in APART:
        return (whole if overrides else {}), whole
    named = {"dataset": "" if flow in WITHOUT_DATASET else dataset, "overrides": list(overrides)}
    return {key: value for key, value in named.items() if value}, whole


def as_prefect_yaml(config: PlatformConfig, *, image: str = "") -> str:
    """The catalogue as the file that `prefect deploy --all` takes: what several deployments share is said once.

    With an image, its flows are for a work pool of type docker, each run in a container of that image.
    """
    pool = CONTAINERS.format(POOL=POOL, image=json.dumps(image), IN_IMAGE=IN_IMAGE) if image else PROCESSES
    lines, made = [HEAD.format(pool=pool, collision=COLLISIONS[config.overlap])], catalogue(config)
    for flow in FORMS:
        lines += [f"  {flow}: &{flow}", "    <<: *all", f"    entrypoint: flows.{flow}.{flow}"]
        lines += [f"    description: {json.dumps(PURPOSE[flow])}"]
    lines += ["deployments:"]
    for one in made:
        tags, parameters_ = json.dumps(one.tags), json.dumps(one.parameters)
        schedules = f", schedules: {json.dumps([asdict(each) for each in one.schedules])}" if one.schedules else ""
        lines += [f"- {{<<: *{one.flow}, name: {one.name}, tags: {tags},", f"   parameters: {parameters_}{schedules}}}"]
    return "\n".join(lines) + "\n"


def _deployment(flow: str, preset: str, config: PlatformConfig) -> Deployment:
    # Little enough to be read: the run looks its preset up. Raises ValueError for a preset that does not hold.
    whole = parameters(flow, preset)
    named = {key: value for key, value in whole.items() if key == "dataset"}
    of_deployment = whole if flow in APART else {**named, "preset": preset}
    numbers = {slug_of(schedule): number for number, schedule in enumerate(config.schedules)}
    schedules = []
    for slug, schedule in by_slug(config).items():
        if schedule.deployment == f"{flow}/{preset}":
            where = f"schedules.{numbers[slug]} ({schedule.deployment})"
            made = Schedule(
                slug=slug_of(schedule),
                cron=schedule.cron,
                timezone=schedule.timezone,
                active=schedule.active,
                parameters=_changed(where, flow, preset, schedule.dataset, schedule.set),
            )
            schedules.append(made)
    return Deployment(
        flow=flow,
        name=preset,
        description=PURPOSE[flow],
        parameters=of_deployment,
        overlap=config.overlap,
        schedules=tuple(schedules),
    )


def _changed(where: str, flow: str, preset: str, dataset: str, overrides: tuple[str, ...]) -> dict[str, Any]:
    """Parameters that differ from the deployment's: none, where nothing does."""
    try:
        return changes(flow, preset, dataset, overrides)[0]
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def by_slug(config: PlatformConfig) -> dict[str, ScheduleConfig]:
    """The schedules of the settings by their names at Prefect. Two that start the same at the same times are one: the later."""
    return {slug_of(schedule): schedule for schedule in config.schedules}


def slug_of(schedule: ScheduleConfig) -> str:
    """The name of a schedule at Prefect, made of what it starts and when: it stays when others come before it, or go."""
    what = (schedule.deployment, schedule.cron, schedule.timezone, schedule.dataset, *schedule.set)
    return f"{OURS}{digest(what)[:12]}"

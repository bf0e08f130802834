"""What is an alert: for each rule a name, what it says, what to do, and a pure function from what was seen to what fires.

Nothing is remembered or told here: that is deployments/watch/alerts.py. The same rules as Prometheus and Azure Monitor know them
are rendered by deployments/telemetry/monitors.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

from deployments.configuration.platform import AlertsConfig
from deployments.telemetry import instruments as of
from deployments.telemetry.measure import failing
from deployments.telemetry.runs import RunView
from tasks.registry.model_integrity import Untrusting
from tasks.security import access
from tasks.security.access import Habits, Unusual


@dataclass(frozen=True)
class Champion:
    """A champion, when it was last found good (deployed or revalidated), and what its newest revalidation said."""

    model: str
    since: float
    verdict: str = ""
    """Empty when there was none, or none that said anything."""
    why: str = ""


@dataclass(frozen=True)
class Seen:
    """What was seen at one moment. None is not known just now: then what fires goes on, and nothing new begins."""

    now: float
    runs: Sequence[RunView] = ()
    disk_free: int | None = None
    champions: Sequence[Champion] | None = None
    late: Sequence[Mapping[str, Any]] | None = None
    """Scheduled runs that did not start in time: `deployment`, `name`, `expected` in seconds since the epoch."""
    down: Sequence[Mapping[str, Any]] | None = None
    """Parts of the platform that do not run: `name`, `details`."""
    broken: Mapping[str, str] | None = None
    """Sources of events that are broken, and why."""
    anomalies: Mapping[str, Mapping[str, Any]] | None = None
    """Endpoints that do not answer as they did: `columns` with what moved in each, `model`."""
    tampered: Mapping[str, Mapping[str, Any]] | None = None
    """Models whose files are not what was signed, by reference: `said`."""
    untrusted: Sequence[Untrusting] | None = None
    """Endpoints whose model is signed by a key that does not count."""
    habits: Habits | None = None
    """Who read what, who was refused, and where each name was seen."""
    firing: frozenset[str] = frozenset()
    """Instances that fire already, as RULE/INSTANCE."""


@dataclass(frozen=True)
class Instance:
    """One thing that a rule fires for. `name` is the same as long as it is the same thing."""

    name: str
    summary: str
    details: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    url: str = ""


Found = list[Instance] | None


def clock(time: float) -> str:
    """A time for people."""
    return datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%d %H:%M UTC")


DAY = 86_400.0
VERSION_CUT = 64 - 12
"""Digits of a version that are not shown."""


def stale(seen: Seen, limits: AlertsConfig) -> Found:
    if seen.champions is None:
        return None
    old = (c for c in seen.champions if seen.now - c.since > limits.champion_revalidated_days * DAY)
    return [
        Instance(
            champion.model,
            f"the champion of {champion.model} was not revalidated in time",
            f"last found good {clock(champion.since)}",
            {"model": champion.model},
        )
        for champion in old
    ]


def degraded(seen: Seen, limits: AlertsConfig) -> Found:
    """Until it is found valid, or another model is the champion."""
    if seen.champions is None:
        return None
    return [
        Instance(
            champion.model,
            f"the champion of {champion.model} was found {champion.verdict}",
            champion.why,
            {"model": champion.model},
        )
        for champion in seen.champions
        if champion.verdict in ("degraded", "invalid")
    ]


def unusual_answers(seen: Seen, limits: AlertsConfig) -> Found:
    if seen.anomalies is None:
        return None
    return [
        Instance(
            name,
            f"endpoint/{name} does not answer as it did: {', '.join(item['columns'])}",
            "; ".join(f"{column}: {', '.join(moved)}" for column, moved in item["columns"].items()),
            {"endpoint": name, "model": str(item["model"])},
        )
        for name, item in seen.anomalies.items()
    ]


def tampered(seen: Seen, limits: AlertsConfig) -> Found:
    if seen.tampered is None:
        return None
    return [
        Instance(
            model, f"the files of {model[:-VERSION_CUT]} are not what was signed", str(item["said"]), {"model": model}
        )
        for model, item in seen.tampered.items()
    ]


def untrusted(seen: Seen, limits: AlertsConfig) -> Found:
    """Until another model is served there, it is signed anew, or it is stopped."""
    if seen.untrusted is None:
        return None
    return [
        Instance(
            one.endpoint,
            f"endpoint/{one.endpoint} serves {one.model[:-VERSION_CUT]}, whose signature does not count",
            one.why,
            {"endpoint": one.endpoint, "model": one.model},
        )
        for one in seen.untrusted
    ]


DISK_MARGIN = 1.05
"""Room must be so many times the limit before a full disk counts as over: it would come and go otherwise."""


@dataclass(frozen=True)
class Rule:
    """An alert as a value."""

    name: str
    when: str
    """For the documentation; numbers come from `alerts` in the settings."""
    remedy: str
    severity: Literal["critical", "warning"]
    find: Callable[[Seen, AlertsConfig], Found]
    promql: Callable[[AlertsConfig], str]


def _fires(name: str) -> Callable[[AlertsConfig], str]:
    """For what only the watch can see: its own word."""
    return lambda limits: f'{of.ALERT.prometheus}{{alert="{name}"}} == 1'


def _gone_wrong(status: str) -> Callable[[AlertsConfig], str]:
    name = of.FAILING.prometheus
    return lambda limits: f'time() - {name}{{status="{status}"}} < {limits.failed_hours * 3600:.0f}'


def _ended(status: str, words: str) -> Callable[[Seen, AlertsConfig], Found]:
    """Runs that ended so, until one of the same flow and subject succeeds, or for `failed_hours`."""

    def find(seen: Seen, limits: AlertsConfig) -> Found:
        result = []
        for run in failing(seen.runs):
            if run.status != status or seen.now - run.last_sign >= limits.failed_hours * 3600:
                continue
            stage = str(run.error.get("stage") or run.stage)
            at = f" at {stage}" if stage else ""
            labels = {"flow": run.flow, "subject": run.subject, "stage": stage, "run": run.identity}
            text = str(run.error.get("message") or "the run left no word") + f" ({clock(run.last_sign)})"
            name, summary = f"{run.flow}.{run.subject}", f"{run.flow} of {run.subject} {words}{at}"
            result.append(Instance(name, summary, text, labels, run.url))
        return result

    return find


def _standing(seen: Seen, limits: AlertsConfig) -> Found:
    """Running stages that did nothing new for long; waiting for a person or for another run is no standstill."""
    patience = limits.job_without_progress_minutes * 60
    still = (run for run in seen.runs if run.stage and not run.waiting and seen.now - run.moved > patience)
    return [
        Instance(
            f"{run.identity}.{run.stage}",
            f"{run.stage} of {run.subject} makes no progress",
            f"nothing new since {clock(run.moved)}",
            {"flow": run.flow, "subject": run.subject, "stage": run.stage, "run": run.identity},
            run.url,
        )
        for run in still
        if run.status == "running"
    ]


def _missed(seen: Seen, limits: AlertsConfig) -> Found:
    if seen.late is None:
        return None
    patience, late = limits.schedule_missed_minutes * 60, {}
    for run in sorted(seen.late, key=lambda run: -float(run["expected"])):
        if seen.now - float(run["expected"]) > patience:
            late[str(run["deployment"])] = run
    return [
        Instance(
            name,
            f"a scheduled run of {name} did not start",
            f"{run['name']}: {clock(run['expected'])}",
            {"deployment": name},
        )
        for name, run in late.items()
    ]


def _full(seen: Seen, limits: AlertsConfig) -> Found:
    if seen.disk_free is None:
        return None
    limit = limits.disk_free_gb * 1e9 * (DISK_MARGIN if "disk_nearly_full/home" in seen.firing else 1.0)
    if seen.disk_free >= limit:
        return []
    room = f"{seen.disk_free / 1e9:.0f} GB free, wanted are {limits.disk_free_gb:g} GB"
    return [Instance("home", "the disk that holds the state is nearly full", room)]


def _down(seen: Seen, limits: AlertsConfig) -> Found:
    if seen.down is None:
        return None
    return [
        Instance(
            str(part["name"]), f"{part['name']} does not run", str(part.get("details", "")), {"part": str(part["name"])}
        )
        for part in seen.down
    ]


def _broken(seen: Seen, limits: AlertsConfig) -> Found:
    if seen.broken is None:
        return None
    return [Instance(name, f"no events come from {name}", why, {"source": name}) for name, why in seen.broken.items()]


def _habit(judge: Callable[[Habits, float, AlertsConfig], list[Unusual]]) -> Callable[[Seen, AlertsConfig], Found]:
    """What is unusual, as a rule of tasks/security/access.py judges it."""

    def find(seen: Seen, limits: AlertsConfig) -> Found:
        if seen.habits is None:
            return None
        result = judge(seen.habits, seen.now, limits)
        return [Instance(one.name, one.summary, one.details, one.labels) for one in result]

    return find


RULES = (
    Rule(
        "run_failed",
        "A run failed, and none of the same flow and model has succeeded since; ends by itself after `failed_hours`.",
        "Read the run's page and log. The same command, or Retry on the page, continues after the last finished stage.",
        "critical",
        _ended("failed", "failed"),
        _gone_wrong("failed"),
    ),
    Rule(
        "gate_closed",
        "A gate stayed closed, and no run of the same flow and model has succeeded since; ends by itself after `failed_hours`.",
        "The report names each failed check, its value and its limit. Fix the data or the settings, and run again.",
        "warning",
        _ended("gate_closed", "was stopped by a closed gate"),
        _gone_wrong("gate_closed"),
    ),
    Rule(
        "flow_run_died",
        "The process of a run has ended without a result, and the run was not resumed.",
        "`headway status` shows whether it is resumed. If not: the same command continues after the last finished stage.",
        "critical",
        _ended("died", "died"),
        _gone_wrong("died"),
    ),
    Rule(
        "job_without_progress",
        "A running stage made no progress for `job_without_progress_minutes`.",
        "Read the log of its job under jobs/. If it hangs, cancel the run; a new one continues from the last checkpoint.",
        "warning",
        _standing,
        lambda limits: f"time() - {of.MOVED.prometheus} > {limits.job_without_progress_minutes * 60:.0f}",
    ),
    Rule(
        "schedule_missed",
        "A scheduled run has not started `schedule_missed_minutes` after its time.",
        "`headway status` shows whether the worker runs and what it is doing; `headway up` starts what is missing.",
        "warning",
        _missed,
        _fires("schedule_missed"),
    ),
    Rule(
        "disk_nearly_full",
        "Less than `disk_free_gb` is free on the disk that holds the state.",
        "Free space: old folders under jobs/ and reports/, datasets that are not needed. Training stops when the disk is full.",
        "critical",
        _full,
        lambda limits: f'{of.DISK.prometheus}{{state="free"}} < {limits.disk_free_gb * 1e9:.0f}',
    ),
    Rule(
        "champion_not_revalidated",
        "A champion was neither deployed nor revalidated for `champion_revalidated_days`.",
        "Run the deployment revalidate, or find out why its schedule does not.",
        "warning",
        stale,
        _fires("champion_not_revalidated"),
    ),
    Rule(
        "model_degraded",
        "The newest revalidation of a champion found it degraded or invalid; ends when one finds it valid, or with "
        "another champion.",
        "The page of its evidence shows what changed. Fix the data, or `headway retrain`; `headway rollback` restores "
        "the champion before.",
        "warning",
        degraded,
        _fires("model_degraded"),
    ),
    Rule(
        "endpoint_anomaly",
        "An endpoint does not answer as before: two windows in a row stood out, too many requests fail, or callers call "
        "fewer answers right.",
        "Look at its requests and its log. `headway revalidate` judges the model, `headway rollback` restores the "
        "champion before.",
        "warning",
        unusual_answers,
        _fires("endpoint_anomaly"),
    ),
    Rule(
        "model_tampered",
        "Files of a champion, or of what an endpoint serves, differ from what was signed; ends when the bytes are right again.",
        "Find out who changed them: `headway audit-log`. Train it again with `headway retrain`, or `headway rollback`.",
        "critical",
        tampered,
        _fires("model_tampered"),
    ),
    Rule(
        "endpoint_untrusted",
        "An endpoint serves a model whose key was revoked, is not known or may not sign it; ends when that is no longer so.",
        "Deploy another model, or `headway endpoint stop`. If you vouch for the model: `headway sign REF --reason TEXT`.",
        "critical",
        untrusted,
        _fires("endpoint_untrusted"),
    ),
    Rule(
        "platform_part_down",
        "A part of the platform does not run, and could not be restarted.",
        "`headway doctor` names what is missing; the part's log is in its folder under platform/ or prefect/. Then `headway up`.",
        "critical",
        _down,
        _fires("platform_part_down"),
    ),
    Rule(
        "event_source_broken",
        "A source of events does not work: a watched folder is missing, a port is taken, a secret is not set, a queue is "
        "unreachable.",
        "`headway status` and `headway doctor` name each source and the reason. What arrived meanwhile is processed when "
        "it works again.",
        "warning",
        _broken,
        _fires("event_source_broken"),
    ),
    Rule(
        "many_denials",
        "A name, or several from one place, was refused `denials` times within `denials_minutes`.",
        "`headway audit-log --person NAME` shows what was tried and from where. `headway person renew NAME` ends a token.",
        "warning",
        _habit(
            lambda habits, now, limits: access.many_denials(
                habits, now, most=limits.denials, minutes=limits.denials_minutes
            )
        ),
        _fires("many_denials"),
    ),
    Rule(
        "bulk_download",
        "A name read more from artifacts within an hour than `download_gb`, `download_artifacts` or "
        "`download_times_usual` allow.",
        "`headway audit-log --access --person NAME` lists what was read. `headway person remove NAME` ends their token.",
        "warning",
        _habit(
            lambda habits, now, limits: access.bulk_downloads(
                habits,
                now,
                most_gb=limits.download_gb,
                most_artifacts=limits.download_artifacts,
                times_usual=limits.download_times_usual,
            )
        ),
        _fires("bulk_download"),
    ),
    Rule(
        "new_place",
        "A name was seen on a host or account for the first time; ends by itself after `new_place_hours`.",
        "Ask that person. If it was somebody else, `headway person renew NAME` ends the token, and the audit log shows "
        "what was done.",
        "warning",
        _habit(lambda habits, now, limits: access.new_places(habits, now, hours=limits.new_place_hours)),
        _fires("new_place"),
    ),
)

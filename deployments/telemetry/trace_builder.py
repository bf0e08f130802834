"""The events of one run as spans, log records and counts: a fold, pure. The same events give the same ids, always.

A trace is a flow run; under its span lies one for every stage. A run that was resumed has a span for each time that it was
opened, all in one trace. What becomes of these values is in sinks.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Severity = Literal["DEBUG", "INFO", "WARN", "ERROR"]
Value = str | bool | int | float
SEVERITIES: dict[str, Severity] = {"failed": "ERROR", "died": "ERROR", "gate_closed": "WARN", "cancelled": "WARN"}
WELL = ("completed", "ran", "reused", "cancelled", "not_run", "pending")


@dataclass(frozen=True)
class Span:
    """A stretch of time with a name. Times are seconds since the epoch."""

    trace: int
    identity: int
    parent: int | None
    kind: Literal["run", "stage"]
    name: str
    start: float
    end: float
    status: str
    message: str
    attributes: Mapping[str, Value]

    @property
    def ok(self) -> bool:
        return self.status in WELL


@dataclass(frozen=True)
class Log:
    """Something that happened."""

    name: str
    time: float
    severity: Severity
    body: str
    attributes: Mapping[str, Value]
    trace: int = 0
    span: int = 0


@dataclass
class Told:
    """What some events came to."""

    spans: list[Span] = field(default_factory=list)
    logs: list[Log] = field(default_factory=list)


@dataclass
class Story:
    """A run so far. State: the opening that goes on, and the stages that are at work in it."""

    run: str
    openings: int = 0
    flow: str = ""
    subject: str = ""
    began: float = 0.0
    last: float = 0.0
    attributes: dict[str, Value] = field(default_factory=dict)
    working: dict[str, float] = field(default_factory=dict)
    spans: int = 0

    @property
    def trace(self) -> int:
        return _number(self.run, 32)

    @property
    def root(self) -> int:
        return _number(f"{self.run}/{self.openings}", 16)

    def take(self, end: int, event: Mapping[str, Any]) -> Told:
        """Move on by an event that ends at an offset of the log; what it came to."""
        spans = Told()
        kind, time = str(event["event"]), float(event["time"])
        if kind == "opened":
            # A run that is opened again without having closed died: what it was at ended with its last word.
            if self.openings and self.began:
                text = "the process of the flow run died"
                self._stop_working(spans, "died", text)
                spans.spans.append(self._root_span("died", text, self.last))
            self.openings, self.spans, self.began, self.working = self.openings + 1, 0, time, {}
            self.flow, self.subject = str(event.get("flow")), str(event.get("subject"))
            result = {
                "headway.flow": self.flow,
                "headway.subject": self.subject,
                "headway.run": self.run,
                "headway.opening": self.openings,
                "headway.config_digest": event.get("config"),
                "headway.url": (event.get("flow_run") or {}).get("url"),
            }
            self.attributes = {key: value for key, value in result.items() if value}
        elif kind == "started":
            self.working[str(event.get("stage"))] = time
        elif kind == "ended":
            # A gate that closes between stages ends its stage a second time: that tells nothing new.
            outcome = event.get("outcome") or {}
            stage, status = str(outcome.get("name")), str(outcome.get("status"))
            if stage in self.working:
                # Its key, its inputs and outputs, its job, and every figure that it measured.
                facts: dict[str, Value] = {"headway.key": str(outcome.get("key") or "")}
                facts |= {f"headway.{n}": ", ".join(map(str, outcome.get(n) or [])) for n in ("inputs", "outputs")}
                job, figures = outcome.get("job") or {}, outcome.get("metrics") or {}
                facts |= {f"headway.job.{n}": job[n] for n in ("id", "attempts", "submissions") if n in job}
                facts |= {f"headway.metric.{n}": v for n, v in figures.items() if isinstance(v, int | float)}
                facts = {key: value for key, value in facts.items() if value != ""}
                spans.spans.append(self._stage_span(stage, status, _why(outcome), time, facts))
        elif kind == "closed":
            status, error = str(event.get("status")), event.get("error") or {}
            message = str(error.get("message", ""))
            self._stop_working(spans, status, message)
            facts = {"error.type": str(error["type"])} if error.get("type") else {}
            facts |= {"headway.stage": str(error["stage"])} if error.get("stage") else {}
            spans.spans.append(self._root_span(status, message, time, facts))
            self.began = 0.0
        self.last = time
        if kind != "progress":
            status, text, facts = _said(kind, event)
            log = Log(
                name=f"headway.{kind}",
                time=time,
                severity=SEVERITIES.get(status, "INFO"),
                body=f"{self.flow} of {self.subject}: {text}",
                attributes={**self.attributes, **facts, "log.record.uid": f"{self.run}:{end}"},
                trace=self.trace,
                span=self.root,
            )
            spans.logs.append(log)
        return spans

    def _stop_working(self, payload: Told, status: str, message: str) -> None:
        payload.spans += [self._stage_span(stage, status, message, self.last, {}) for stage in list(self.working)]

    def _stage_span(self, stage: str, status: str, message: str, end: float, facts: Mapping[str, Value]) -> Span:
        self.spans += 1
        return Span(
            trace=self.trace,
            identity=_number(f"{self.run}/{self.openings}/{self.spans}/{stage}", 16),
            parent=self.root,
            kind="stage",
            name=stage,
            start=self.working.pop(stage),
            end=end,
            status=status,
            message=message,
            attributes={**self.attributes, "headway.stage": stage, "headway.status": status, **facts},
        )

    def _root_span(self, status: str, message: str, end: float, facts: Mapping[str, Value] | None = None) -> Span:
        return Span(
            trace=self.trace,
            identity=self.root,
            parent=None,
            kind="run",
            name=f"{self.flow} {self.subject}",
            start=self.began,
            end=end,
            status=status,
            message=message,
            attributes={**self.attributes, "headway.status": status, **(facts or {})},
        )


def _said(kind: str, event: Mapping[str, Any]) -> tuple[str, str, dict[str, Value]]:
    """Of an event: the status that it tells, in words what happened, and facts beside it."""
    if kind == "started":
        stage = str(event.get("stage"))
        return "", f"{stage} began", {"headway.stage": stage}
    if kind == "ended":
        outcome = event.get("outcome") or {}
        stage, status = str(outcome.get("name")), str(outcome.get("status"))
        text = f"{stage} {status.replace('_', ' ')}, {float(outcome.get('seconds') or 0):.1f} s"
        return status, f"{text}{_colon(_why(outcome))}", {"headway.stage": stage, "headway.status": status}
    if kind == "closed":
        status, error = str(event.get("status")), event.get("error") or {}
        facts: dict[str, Value] = {"headway.status": status}
        if error and status in ("failed", "died"):
            facts |= {"exception.type": str(error.get("type")), "exception.message": str(error.get("message"))}
        return status, f"{status.replace('_', ' ')}{_colon(str(error.get('message') or ''))}", facts
    if kind == "job":
        return "", str(event.get("text")), {"headway.stage": str(event.get("stage"))}
    if kind == "waiting":
        return "", f"waits for {event.get('for')}", {}
    return "", kind, {}


def _colon(text: str) -> str:
    return f": {text}" if text else ""


def _why(outcome: Mapping[str, Any]) -> str:
    """Which checks kept a gate closed; of other outcomes nothing, for their error closes the run."""
    if outcome.get("status") != "gate_closed":
        return ""
    failed = [check for check in outcome.get("checks") or [] if not check.get("passed", False)]
    return "; ".join(f"{c.get('name')}: {c.get('measured')}, limit {c.get('limit')}" for c in failed)


def _number(text: str, digits: int) -> int:
    """A number of so many hex digits that stands for a text; never 0, which is no id."""
    return int(hashlib.sha256(text.encode()).hexdigest()[:digits], 16) or 1

"""How a new model takes the traffic, step by step, and how it loses it again: one course for every kind of endpoint.

A kind of endpoint brings a `TrafficPort`: tasks/serving/local/rollout.py for this machine, tasks/serving/azureml/endpoint.py for
Azure ML. What is too slow or wrong is tasks/serving/protocol/judge.py, pure; what a deployer that died leaves to the next one is
journal.py. See docs/rollout.md.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from tasks.common.errors import GateFailed, HeadwayError
from tasks.config.serving import RolloutConfig
from tasks.serving.journal import Journal
from tasks.serving.protocol.judge import Check, Judge, Measures, Seen

POLL_SECONDS = 0.25
HOLD_POLL_SECONDS = 2.0
"""While a step holds, which may take hours."""
log = logging.getLogger("headway.rollout")
Role = Literal["blue", "green"]
"""`blue` is the model in service, `green` the new one. How they are called where they run is the port's business."""


class TrafficPort(Protocol):
    """The traffic of one endpoint while a new model takes it. Every call may be repeated after a crash: what is done is done.

    A port is made for one pair of models: green runs beside blue, has answered every golden prompt, and has no traffic yet.
    """

    def set_traffic(self, weights: Mapping[Role, int], *, mirror: int = 0) -> None:
        """Send shares of the requests, in per cent, to each; they sum to 100, always, also while this is at work.

        `mirror` per cent of the requests to blue are also sent to green, its answers thrown away. Returns once it holds. Raises
        Missing when whoever carries the traffic does not answer.
        """

    def observe(self) -> Mapping[Role, Seen]:
        """What was seen of both. Of green since the last `set_traffic`; of blue also the minutes before, to compare with."""

    def asked_back(self) -> str:
        """Why somebody wants the traffic back on blue at once, `headway rollback` for example; empty: nobody does."""

    def promote(self) -> None:
        """Green is the model in service from now on, in the endpoint's own record too; blue is kept warm, or goes."""

    def withdraw(self) -> None:
        """Stop and remove green, which has no traffic any more. It may never have started."""


@dataclass(frozen=True)
class Step:
    """Traffic as it stays until it was judged."""

    name: str
    weights: Mapping[Role, int]
    mirror: int = 0

    def render(self) -> dict[str, Any]:
        """For the journal."""
        return {"step": self.name, "weights": dict(self.weights), "mirror": self.mirror}


BEFORE: Mapping[Role, int] = {"blue": 100, "green": 0}
AFTER: Mapping[Role, int] = {"blue": 0, "green": 100}


def steps_of(config: RolloutConfig) -> Iterator[Step]:
    """Mirrored at 0 %, where that is wanted, then each share."""
    if config.mirror:
        yield Step("mirror", BEFORE, config.mirror)
    for share in config.steps:
        yield Step(f"{share} %", {"blue": 100 - share, "green": share})


def compared_in(steps: Sequence[Step]) -> int:
    """Number of the step that must know whether the new model is slow: the last one in which both answer callers, if any does."""
    return len(steps) - 2 if len(steps) > 1 and not steps[-2].mirror else len(steps) - 1


def roll_out(
    port: TrafficPort,
    config: RolloutConfig,
    journal: Journal,
    *,
    reference: Measures | None = None,
    barred: str = "",
    report: Callable[[str, dict[str, Any]], None] = lambda event, details: None,
    pause: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Take green to all of the traffic; the journal has a change open for it already, which this ends.

    `report` hears of each step before it is taken, and of one that holds for want of evidence. The line `commit` says of each
    step whether it was `passed` or `not judged`. Raises GateFailed, with the limits that were passed, when green lost the traffic
    again: blue has all of it by then, and green is gone. The same for any other HeadwayError, of the port for example.

    `barred` says why no request may go back to blue. Green is then judged by copies of requests only, and is committed before it
    gets any share, so that nothing, not even a kill, gives a share back to blue.
    """
    judge, outcomes = Judge(config, reference=reference), dict[str, str]()
    try:
        steps = [step for step in steps_of(config) if step.mirror or not barred]
        if barred:
            log.warning(
                "there is no way back to the model in service: %s. The new one takes all of the traffic at once", barred
            )
            report("one way", {"why": barred})
        for number, step in enumerate(steps):
            journal.write("step", **step.render())
            report("step", step.render())
            port.set_traffic(step.weights, mirror=step.mirror)
            times = number == compared_in(steps)
            outcomes[step.name] = _prove(
                port, config, step, judge, times=times, report=report, pause=pause, clock=clock
            )
        journal.write("commit", outcomes=outcomes)
    except BaseException as error:  # a full disk, a cancelled flow: whatever ends it before `commit`, the way is back
        # What cannot be given back now is by the next start; the first error is the one to tell.
        try:
            give_back(port, journal, why=str(error) or type(error).__name__)
        except (HeadwayError, ValueError, OSError) as second:
            log.error("the traffic could not be given back, the next start does it: %s", second)
        raise
    report("switched", {"outcomes": outcomes})
    finish(port, journal)


def take_over(
    port: TrafficPort, journal: Journal, *, report: Callable[[str, dict[str, Any]], None] = lambda event, details: None
) -> None:
    """Give green all of the traffic at once, where no blue runs; ends the open change as `roll_out` does.

    Only what held is committed: whoever cannot carry green's traffic now could not do so at the next start either.
    """
    try:
        port.set_traffic(AFTER)
        journal.write("commit")
    except (HeadwayError, ValueError) as error:
        give_back(port, journal, why=str(error))
        raise
    report("switched", {})
    finish(port, journal)


def finish(port: TrafficPort, journal: Journal) -> None:
    """After `commit` there is one way: forward. Also what the next start does for a deployer that died here."""
    port.set_traffic(AFTER)
    port.promote()
    journal.write("done")


def give_back(port: TrafficPort, journal: Journal, *, why: str) -> None:
    """Before `commit` there is one way: back. Also what the next start does for a deployer that died here."""
    journal.write("revert", why=why)
    port.set_traffic(BEFORE)
    port.withdraw()
    journal.write("reverted", why=why)


def settle(port: TrafficPort, journal: Journal) -> str | None:
    """Finish or revert what a deployer left open: `done` or `reverted`, None when there was nothing.

    Only for who holds the endpoint's lock: then nobody is at work on it.
    """
    change = journal.open_change()
    if change is None:
        return None
    if change.committed:
        finish(port, journal)
        return "done"
    give_back(port, journal, why=change.last("revert").get("why", "whoever deployed it died"))
    return "reverted"


def _prove(
    port: TrafficPort,
    config: RolloutConfig,
    step: Step,
    judge: Judge,
    *,
    times: bool,
    report: Callable[[str, dict[str, Any]], None],
    pause: Callable[[float], None],
    clock: Callable[[], float],
) -> str:
    """Return when a step is over: `passed`, or `not judged` where the settings let it end so. Raises GateFailed otherwise.

    A step that is not judged holds its share, and waits. Copies harm nobody, so the mirrored step ends by its time.
    """
    began, holds = clock(), False
    judge.begin_step()
    while True:
        if why := port.asked_back():
            raise _breach(step, ({"name": "traffic", "measured": why, "limit": "nobody wants it back"},))
        seen, waited = port.observe(), clock() - began
        verdict = judge.look(seen["green"], seen["blue"], waited=waited, last=step.weights == AFTER, times=times)
        if verdict.outcome == "back":
            raise _breach(step, verdict.checks)
        if verdict.outcome == "passed":
            return "passed"
        if verdict.outcome == "not judged":
            if step.mirror or not config.step_requests:
                return "not judged"
            if waited >= config.step_seconds + config.hold_seconds:
                raise _not_judged(step, verdict.checks, waited)
            if not holds:
                holds = True
                log.warning(
                    "the step %s holds its share for up to %.0f s more, evidence is missing: %s. Where nobody asks enough, set "
                    "rollout.step_requests to 0",
                    step.name,
                    config.hold_seconds,
                    _words(verdict.checks),
                )
                report("holding", {**step.render(), "missing": list(verdict.checks)})
        pause(HOLD_POLL_SECONDS if holds else POLL_SECONDS)


def _breach(step: Step, checks: tuple[Check, ...]) -> GateFailed:
    return GateFailed(
        f"the new model lost its traffic at the step {step.name}: {_words(checks)}",
        stage="deploy",
        checks=list(checks),
        remedy="The model before it serves as it did. See docs/rollout.md for the limits.",
    )


def _not_judged(step: Step, checks: tuple[Check, ...], waited: float) -> GateFailed:
    return GateFailed(
        f"the new model was not judged at the step {step.name}, within {waited:.0f} s: {_words(checks)}",
        stage="deploy",
        checks=list(checks),
        remedy="The model before it serves as it did. Deploy when the endpoint is asked more, raise rollout.hold_seconds, or "
        "set rollout.step_requests to 0: steps then end by rollout.step_seconds without enough evidence.",
    )


def _words(checks: tuple[Check, ...]) -> str:
    return "; ".join(f"{check['name']}: {check['measured']}, {check['limit']}" for check in checks)

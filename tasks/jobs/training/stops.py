"""Why a run stops before its last step, always with a checkpoint: a limit of hours or money, or its machine is to be taken.

A request by SIGTERM is tasks/jobs/node/elastic.py. Ranks tell each other in the step's collective (watch.py), save after that
step, and end. See docs/training.md, "Stops".
"""

from __future__ import annotations

import json
import math
import os
import statistics
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tasks.common.process import read_json, write_json
from tasks.config.training import ExecutionConfig, LimitsConfig, NoticesConfig, SafetyConfig, TrainingConfig
from tasks.config.training import Reaction as Kind
from tasks.jobs.checkpoint.files import create_only, digest
from tasks.jobs.node.elastic import Asked, process_age
from tasks.jobs.node.runtime import Ended, Rank
from tasks.jobs.training.records import last_records

# Whether a step is good: finite, and no spike. What is done about one that is not is the loop's. Pure but for its
# memory.
#
# What a run did about steps that were no good outlives its processes: it comes first here. See docs/training.md,
# "Safety".


# What a run did about steps that were no good, kept in `JOB/safety/`: a kill in between does not undo it.
#
#     safety/reaction-0001.json    create-only, one file a reaction, written before anything is done about it
#
# A batch whose gradient was skipped is skipped whenever it is met again. After a rollback the batches from the
# checkpoint's to the bad one's are left out of the order for good, so the position in the data alone says what comes
# next.


FOLDER = "safety"


@dataclass(frozen=True)
class Reaction:
    """One reaction of a run."""

    step: int
    """The step that was no good."""
    position: int
    """Samples of the order before its batch."""
    kind: Kind
    why: str
    begin: int = 0
    """First sample that a rollback leaves out of the order."""
    end: int = 0
    """First one after those."""
    attempt: int = 0


def note(job: Path, number: int, reaction: Reaction) -> None:
    """Write down the reaction of a number, which counts from 1; rank 0 does."""
    create_only(job / FOLDER / f"reaction-{number:04d}.json", asdict(reaction))


def noted(job: Path) -> list[Reaction]:
    """All reactions of a run, oldest first."""
    paths = sorted((job / FOLDER).glob("reaction-*.json"))
    return [Reaction(**json.loads(path.read_bytes())) for path in paths]


def next_position(position: int, reactions: Iterable[Reaction]) -> int:
    """Where a position in the data goes on: after the batches that rollbacks left out."""
    for reaction in sorted(reactions, key=lambda known: known.begin):
        if reaction.begin <= position < reaction.end:
            position = reaction.end
    return position


def losses_before(log: Path, step: int, safety: SafetyConfig) -> list[tuple[int, float]]:
    """The newest good steps up to a step, with their losses, from `metrics.jsonl`: what a spike is compared with."""
    if safety.spike_factor is None or not log.exists():
        return []
    good = [record for record in last_records(log) if record["step"] <= step and "skipped" not in record]
    return [(record["step"], record["loss"]) for record in good[-safety.spike_window :]]


@dataclass(frozen=True)
class Verdict:
    """What to do about a step that is no good."""

    kind: Kind
    why: str
    known: bool = False
    """Whether the run reacted to it before, and was killed since."""


class Guard:
    """One run's judge of its steps; equal numbers on all ranks give equal verdicts."""

    def __init__(self, config: TrainingConfig) -> None:
        self.config, self.safety = config, config.safety
        self.losses: dict[int, float] = {}
        """Of the newest good steps, by step."""
        self.reactions: list[Reaction] = []
        """All of this run, its starts before this one too."""

    def remember(self, losses: Iterable[tuple[int, float]], reactions: Iterable[Reaction]) -> None:
        """Take over what a run knows at a step that it goes on from."""
        self.losses, self.reactions = dict(losses), list(reactions)

    def judge(self, step: int, position: int, loss: float, norm: float) -> Verdict | None:
        """What to do about the step whose batch begins at a position in the data; None: it is good.

        Raises FloatingPointError for `stop`, and when there were reactions enough.
        """
        if any(known.kind == "skip" and known.position == position for known in self.reactions):
            return Verdict("skip", "left out before", known=True)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return self.reaction(step, self.safety.not_finite, f"the loss is {loss}, the gradient's norm {norm}")
        if why := self._spike(loss):
            return self.reaction(step, self.safety.spike, why)
        self.losses[step] = loss
        self.losses.pop(step - self.safety.spike_window, None)
        return None

    def reaction(self, step: int, kind: Kind, why: str) -> Verdict:
        """The verdict that is asked for, within the bound; raises FloatingPointError where it is to stop."""
        text = f"step {step}: {why}"
        if kind == "stop":
            raise FloatingPointError(
                f"{text}. Lower training.learning_rate ({self.config.learning_rate}) or raise "
                f"training.warmup_steps ({self.config.warmup_steps})"
            )
        if len(self.reactions) >= self.safety.at_most:
            before = ", ".join(f"{known.kind} at step {known.step}" for known in self.reactions)
            raise FloatingPointError(
                f"{text}, and there were {len(self.reactions)} reactions before ({before}), "
                f"training.safety.at_most is {self.safety.at_most}"
            )
        return Verdict(kind, why)

    def _spike(self, loss: float) -> str:
        window, factor = self.safety.spike_window, self.safety.spike_factor
        if factor is None or len(self.losses) < window:
            return ""
        usual = statistics.median(list(self.losses.values())[-window:])
        return f"the loss is {loss:.4g}, more than {factor:g} times {usual:.4g}" if loss > factor * usual else ""


# How long a run has held its machines: starts, checkpoints, restarts and standstills are paid for as steps are.
#
# Rank 0 leaves when a submission's first process began and when one was last alive, in `safety/held-NNNN.json` of the
# job folder. Between two submissions no machine is held.


EVERY_SECONDS = 5.0
"""How often it is written; what a submission's last process did after that is not counted."""


class Held:
    """State: when this process and the first one of its submission began. `before` are all seconds before this process."""

    def __init__(self, job: Path) -> None:
        known = os.environ.get("HEADWAY_SUBMISSION") or (read_json(job / "job.json") or {}).get("submission")
        self._path = job / FOLDER / f"held-{int(known or 1):04d}.json"
        self._age, self._made = process_age(), time.monotonic()
        start = time.time() - self._age
        mine = read_json(self._path)
        self._began = min(float(mine["began"]), start) if mine else start
        others = (path for path in self._path.parent.glob("held-*.json") if path != self._path)
        self.before = sum(map(_seconds, others)) + start - self._began

    def seconds(self) -> float:
        """All of them until now."""
        return self.before + self._age + time.monotonic() - self._made

    def note(self) -> None:
        """Write down that this process is alive."""
        write_json(self._path, {"began": self._began, "latest": time.time()})

    def keep(self) -> None:
        """Note it from now on, beside the training; rank 0 does."""
        self.note()
        threading.Thread(target=self._keep, name="held", daemon=True).start()

    def _keep(self) -> None:
        while True:
            time.sleep(EVERY_SECONDS)
            with suppress(OSError):  # a folder that is away for a moment: the next note counts this time too
                self.note()


def _seconds(path: Path) -> float:
    noted = read_json(path)
    return max(0.0, float(noted["latest"]) - float(noted["began"]))


ENDING = ("Preempt", "Terminate", "Reboot", "Redeploy")
"""Scheduled Events after which the machine's processes are gone; of the others, `Freeze` only pauses it for seconds."""
ANSWER_SECONDS = 5.0
OWN_NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"


class Stops:
    """This rank's reasons to stop; `held` is how long the run has its machines."""

    def __init__(self, rank: Rank, execution: ExecutionConfig, asked: Asked, *, held: Held) -> None:
        self.rank, self.limits, self.asked = rank, execution.limits, asked
        self.elastic = bool(rank.settings.get("elastic"))
        self.held = held
        ours = execution.notices.ask and int(os.environ.get("LOCAL_RANK", "0")) == 0
        self.notices = Notices(execution.notices, rank.folder) if ours else None

    def here(self) -> tuple[bool, ...]:
        """In the order of agreement.REASONS; only rank 0's clock counts for limits."""
        noticed = self.notices is not None and self.notices.noticed
        return (self.asked.here, noticed, self.rank.rank == 0 and bool(self.limit()))

    def limit(self) -> str:
        """The limit that is reached, in words; empty while none is."""
        return reached(self.limits, self.held.seconds())

    def require_room(self) -> None:
        """Raise Ended when the starts before this one used up a limit."""
        if why := reached(self.limits, self.held.before):
            raise limited(why)

    def end(self, reasons: Iterable[str], step: int) -> None:
        """Raise Ended, with the class of failure that says what to do next; of an elastic run only for a limit.

        There torchrun starts the ranks again, here or on the machines that are left, as after SIGTERM.
        """
        if "limit" in reasons:
            raise limited(self.limit() or "a limit of execution.limits", step)
        if "notice" in reasons and not self.elastic:
            raise Ended(
                f"step {step}: a machine is about to be taken (Scheduled Events); training is saved",
                failure="preempted",
                remedy="Run the same command again to continue from this step.",
            )


def limited(why: str, step: int | None = None) -> Ended:
    """What ends a run that reached a limit: `step` is saved, or it did not start."""
    where = "" if step is None else f"step {step} is saved: "
    return Ended(
        f"{where}{why}",
        failure="limit",
        remedy="Raise it, and run the same command again: it continues from the checkpoint.",
    )


def reached(limits: LimitsConfig, seconds: float) -> str:
    """The limit that so many seconds of holding the machines reach, in words; empty when there is room."""
    hours, cost = seconds / 3600, seconds / 3600 * limits.cost_per_hour
    if limits.max_hours is not None and hours >= limits.max_hours:
        return f"execution.limits.max_hours {limits.max_hours:g} is reached after {hours:.4g} hours"
    if limits.max_cost is not None and cost >= limits.max_cost:
        where = "execution.limits, or planning.spending"
        return f"max_cost {limits.max_cost:g} is reached ({where}): {hours:.4g} hours cost {cost:.4g}"
    return ""


class Notices:
    """A thread that asks Scheduled Events whether this machine is about to be taken. An event counts once in a run.

    The answer is that of Azure's Scheduled Events for Linux VMs: {"Events": [{"EventId", "EventType", "Resources": [names]}]}.
    It tells of all machines of the scale set, so the machine's own name is asked for first; where that is not known, all count.
    """

    def __init__(self, config: NoticesConfig, job: Path, *, ask: Callable[[str], bytes] | None = None) -> None:
        self.config, self.job, self.noticed = config, job, False
        self._ask, self._name = ask or _asked, ""
        self._thread = threading.Thread(target=self._watch, name="scheduled-events", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self.noticed:
            try:
                self._name = self._name or self._own_name()
                events = json.loads(self._ask(self.config.address)).get("Events", [])
                ours = [e for e in events if not self._name or self._name in e.get("Resources", [])]
                self.noticed = any([self._is_new(event) for event in ours if event.get("EventType") in ENDING])
            except Exception:  # noqa: BLE001 late, odd or no answers while the host is serviced: the next one may be better
                pass
            time.sleep(self.config.every_seconds)

    def _own_name(self) -> str:
        parts = urlsplit(self.config.address)
        try:
            return self._ask(f"{parts.scheme}://{parts.netloc}{OWN_NAME}").decode().strip()
        except OSError:
            return ""

    def _is_new(self, event: dict[str, Any]) -> bool:
        path = self.job / "safety" / f"notice-{digest(event['EventId'])[:16]}.json"
        return create_only(path, {"event": event, "machine": self._name, "time": time.time()})


def _asked(address: str) -> bytes:
    """No proxy: the address is the machine's own."""
    request = urllib.request.Request(address, headers={"Metadata": "true"})
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(request, timeout=ANSWER_SECONDS) as answer:
        return bytes(answer.read())

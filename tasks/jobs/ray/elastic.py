"""An elastic job on Ray: its driver places one machine after the other, each in a placement group of its own.

Machines that qualified before the job come first. A part whose machine is lost is placed again, on any that the job may have.
The holder of the rendezvous store (tasks/jobs/node/rendezvous.py) runs under its parent beside the driver: its
`rendezvous/exit.json` is how the job ended. See docs/elastic.md.
"""

from __future__ import annotations

import hashlib
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tasks.common.process import read_json
from tasks.jobs.ray.agent import NODE_ID, Agent, Machine, candidates, machines, words
from tasks.jobs.ray.driver import PLACE_SECONDS, POLL_SECONDS, Driver, Refused, make_agent, no_folder

PREFER_SECONDS = 10.0
"""For which a place on a machine that qualified is waited for before any other will do."""
LEAVE_SECONDS = 10.0
"""That machines get to leave by themselves when the job has ended, as in tasks/compute/elastic.py."""
STAYS_AWAY = ("timeout", "cancelled")
"""Reasons of its end after which a part does not come again."""
OF_A_START = (".lock", "beat", "exit.json", "handle.json", "node.json")
"""Marks of a part's start, which are not those of the next one."""


@dataclass
class Part:
    """One machine of the job, from the question for a place to its end."""

    number: int
    group: Any
    """Its placement group."""
    wanted: tuple[str, ...]
    """Ids of the machines that it was to be placed on."""
    since: float
    agent: Any = None
    """Its actor, once it has a place."""
    asked: Any = None
    """The actor's answer that is still to come."""
    place: Machine | None = None
    step: Literal["where", "sees", "start", "poll"] = "where"
    """What it was asked: `poll`, once its processes run."""


class ElasticDriver(Driver):
    """One elastic submission. State beside that of `Driver`: the parts that live, by number, and what became of the others."""

    def __init__(self, folder: Path, spec: dict[str, Any]) -> None:
        super().__init__(folder, spec)
        self.parts: dict[int, Part] = {}
        self.holder = Agent()
        self.tries: dict[int, list[str]] = {number: [] for number in range(spec["elastic"]["max_nodes"])}
        """How far the job was at each start of a part."""
        self.away: set[int] = set()
        """Numbers of parts that do not come again."""
        self.blind: set[str] = set()
        """Names of machines that do not see the job's folder."""
        self.last: tuple[str, int] | Refused = ("no machine was there", 1)
        """How the last part ended: why, and its exit code."""
        self.why = "ended"
        self._looked = float("-inf")
        self._output: tuple[str, str] = ("", "")

    def run(self) -> int:
        """From the first place to what the holder of the store says of the end. Raises Refused."""
        import ray

        ray.init(log_to_driver=False, configure_logging=False)
        signal.signal(signal.SIGTERM, self._ask_to_stop)
        self._must_fit()
        self.started = True
        self._hold()
        try:
            while not self.stopping:
                for part in list(self.parts.values()):
                    self._look_at(part)
                if ended := read_json(self.folder / "rendezvous" / "exit.json"):
                    self.why = ended["reason"]
                    self._wait_for_leaving()
                    return int(ended["code"])
                if self.holder.poll() is not None:
                    self._hold()  # somebody killed it: the machines meet anew
                if not self._take_in() and not self.parts and not (self.folder / "result.json").exists():
                    if isinstance(self.last, Refused):
                        raise self.last
                    self.why, code = self.last
                    return code
                self._tell()
                time.sleep(POLL_SECONDS)
            return 1
        finally:
            self.holder.stop()  # first, so that no machine comes again
            agents = [part.agent for part in self.parts.values() if part.agent]
            if agents:
                ray.wait([agent.stop.remote() for agent in agents], num_returns=len(agents), timeout=40.0)

    def reason(self) -> str:
        return "cancelled" if self.stopping else self.why

    def _hold(self) -> None:
        """Start the store's holder on this machine, under the address by which Ray's machines know it."""
        import ray

        own = ray.get_runtime_context().get_node_id()
        address = next(machine.address for machine in machines(ray.nodes()) if machine.id == own)
        self.holder.start(self.spec["elastic"]["holder"], {**self.spec["environment"], "HEADWAY_LEADER": address})

    def _look_at(self, part: Part) -> None:
        """Take a part one step further, from its place to its end."""
        import ray

        if part.agent is None:
            if part.group.wait(POLL_SECONDS / 10):
                part.agent = make_agent(self.spec, part.group, 0)
                part.asked = part.agent.where.remote()
            return
        if not self._has_answered(part):
            return
        answer = ray.get(part.asked)
        match part.step:
            case "where":
                part.place = {machine.id: machine for machine in machines(ray.nodes())}.get(answer)
                if part.place is None:  # lost in this moment
                    self._let_go(part)
                    return
                seconds = self.spec["shared_seconds"]
                part.asked = part.agent.sees.remote(str(self.folder), self.spec["submission"], seconds)
                part.step = "sees"
            case "sees":
                self._start_part(part, sees=answer)
            case "start":
                part.asked, part.step = part.agent.poll.remote(), "poll"
            case "poll" if answer is None:
                part.asked = part.agent.poll.remote()
            case _:
                place = self.folder / "nodes" / str(part.number)
                ended = read_json(place / "exit.json") or {"code": 1, "reason": "ended"}
                self.last = f"the last machine left: {ended['reason']}", int(ended["code"]) or 1
                if ended["reason"] in STAYS_AWAY or ended["code"] == 0:
                    self.away.add(part.number)
                self._let_go(part)

    def _has_answered(self, part: Part) -> bool:
        """Whether its actor has; one that died is let go."""
        import ray
        from ray.exceptions import ActorDiedError, ActorUnavailableError

        if not ray.wait([part.asked], timeout=0)[0]:
            return False
        try:
            ray.get(part.asked)
        except ActorUnavailableError:  # Ray itself decides when a machine that does not answer is dead
            if part.step == "poll":
                part.asked = part.agent.poll.remote()
            else:
                self._let_go(part)
            return False
        except ActorDiedError as error:
            if part.place:
                self.last = self._lost(part.number, part.place, error)
            self._let_go(part)
            return False
        return True

    def _start_part(self, part: Part, *, sees: bool) -> None:
        """Start the part on its machine. Raises Refused when the first one does not see the job's folder."""
        assert part.place
        if not sees:
            if not any(self.tries.values()):
                raise no_folder(self.folder, part.place.name)
            print(f"{part.place.name} does not see {self.folder}: the job does without it", flush=True)
            self.blind.add(part.place.name)
            self._let_go(part)
            return
        for name in OF_A_START:
            (self.folder / "nodes" / str(part.number) / name).unlink(missing_ok=True)
        self.tries[part.number].append(self._progress())
        own = {"HEADWAY_NODE_NAME": part.place.name}
        part.asked = part.agent.start.remote(self.spec["commands"][part.number], {**self.spec["environment"], **own})
        part.step = "start"

    def _let_go(self, part: Part) -> None:
        """Give its place back, with whatever is left on it."""
        from ray.util.placement_group import remove_placement_group

        remove_placement_group(part.group)
        del self.parts[part.number]
        self._looked = float("-inf")

    def _take_in(self) -> bool:
        """Ask for a place for one more machine, unless one is asked for; whether another may come."""
        import ray

        now = self._progress()
        able = [n for n in self.tries if n not in self.parts and n not in self.away and self._tries_since(n, now)]
        waiting = next((part for part in self.parts.values() if part.agent is None), None)
        if time.monotonic() - self._looked < PLACE_SECONDS or not (able or waiting):
            return bool(able)
        self._looked = time.monotonic()
        existing = machines(ray.nodes())
        used = [part.place.id for part in self.parts.values() if part.place]
        free = candidates(self.spec, existing, used=used, out=[*self.blind, *self._bad()])
        proven = [machine for machine in free if machine.known_as(self.spec["elastic"]["proven"])]
        patient = waiting is None or time.monotonic() - waiting.since < PREFER_SECONDS
        wanted = tuple(sorted(machine.id for machine in (proven if proven and patient else free)))
        if waiting and waiting.wanted != wanted:
            self._let_go(waiting)
            self._ask_for(waiting.number, wanted, existing, since=waiting.since)
        elif not waiting and all(part.place for part in self.parts.values()):
            self._ask_for(able[0], wanted, existing, since=time.monotonic())
        return True

    def _ask_for(self, number: int, wanted: tuple[str, ...], existing: list[Machine], *, since: float) -> None:
        """Ask Ray for the place of a part, where any machine will do.

        A cluster that adds machines is told those that will not do instead, so that it adds one."""
        from ray.util.placement_group import placement_group

        adds = self.spec["autoscales"] and not self.spec["only"]
        if not (wanted or adds):
            return
        if adds:
            others = sorted({machine.id for machine in existing} - set(wanted))
            where = f"!in({','.join(others)})" if others else ""
        else:
            where = f"in({','.join(wanted)})"
        labels = [{NODE_ID: where}] if where else None
        group = placement_group([self.spec["bundle"]], strategy="PACK", bundle_label_selector=labels)
        self.parts[number] = Part(number, group, wanted, since)

    def _tell(self) -> None:
        """Say how many machines are there, where that changed."""
        most, bad = len(self.tries), ", ".join(dict.fromkeys(self._bad()))
        without = f"; without {bad}, which checks found bad" if bad else ""
        joined = sum(
            (self.folder / "nodes" / str(n) / "node.json").exists() for n, p in self.parts.items() if p.step == "poll"
        )
        placed = sum(part.agent is not None for part in self.parts.values())
        if joined:
            fewer = f"{joined} of at most {most} machines" if joined < most else ""
            output = "running", f"{fewer}{without}".removeprefix("; ")
        elif placed:
            output = "starting", f"{placed} of at most {most} machines are made ready{without}"
        else:
            output = "queued", f"waits for a machine with {words(self.spec['bundle'])} that is free{without}"
        if output != self._output:
            self._output = output
            self.say(*output)

    def _wait_for_leaving(self) -> None:
        """Let the machines end by themselves: the job has."""
        until = time.monotonic() + LEAVE_SECONDS
        while (
            any(part.step == "poll" for part in self.parts.values()) and time.monotonic() < until and not self.stopping
        ):
            for part in list(self.parts.values()):
                self._look_at(part)
            time.sleep(POLL_SECONDS)

    def _bad(self) -> list[str]:
        """Machines that a check named, as `bad_machines` of tasks/compute/elastic.py."""
        reports = [read_json(path) or {} for path in sorted((self.folder / "errors").glob("node-*.json"))]
        checked = [
            report
            for report in reports
            if report.get("class") == "node" and report.get("type") not in ("NodeLost", "NodeMissing")
        ]
        return [name for report in checked for name in report.get("nodes", [])]

    def _progress(self) -> str:
        name = self.spec["elastic"]["progress"]
        file = self.folder / name
        return hashlib.sha256(file.read_bytes()).hexdigest() if name and file.is_file() else ""

    def _tries_since(self, number: int, now: str) -> bool:
        """Whether a part may be started once more: it was not too often since the job last got on."""
        starts = self.tries[number]
        return starts[-1 - self.spec["elastic"]["restarts"] :].count(now) <= self.spec["elastic"]["restarts"]

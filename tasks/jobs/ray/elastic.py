"""An elastic job on Ray: its driver places one machine after the other, each in a placement group of its own.

Machines that qualified before the job come first. A part whose machine is lost is placed again, on any that the job may have.
The holder of the rendezvous store (tasks/jobs/node/rendezvous.py) runs under its parent beside the driver: its
`rendezvous/exit.json` is how the job ended. See docs/elastic.md.
"""

from __future__ import annotations

import hashlib
import signal
import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from tasks.common.process import read_json
from tasks.jobs.ray.agent import NODE_ID, Agent, Machine, candidates, lacking, machines, words
from tasks.jobs.ray.driver import PLACE_SECONDS, POLL_SECONDS, Driver, Refused, make_agent, no_folder

PREFER_SECONDS = 10.0
"""For which a place on a machine that qualified is waited for before any other will do."""
ANSWER_SECONDS = 120.0
"""For an actor to be there, and to say that it sees the job's folder; that may take `shared_seconds` more."""
NOBODY_SECONDS = 120.0
"""For which a job without machines waits where the cluster has none that it could run on: one may be booting."""
LEAVE_SECONDS = 10.0
"""That machines get to leave by themselves when the job has ended, as in tasks/compute/elastic.py."""
OF_A_START = (".lock", "beat", "exit.json", "handle.json", "node.json")
"""Marks of a part's start, which are not those of the next one."""


@dataclass
class Part:
    """One machine of the job, from the question for a place to its end."""

    number: int
    group: Any
    """Its placement group."""
    where: str
    """Ray's label selector for the machines that it may be placed on."""
    since: float
    """When its place was first asked for."""
    agent: Any = None
    """Its actor, once it has a place."""
    asked: Any = None
    """The actor's answer that is still to come."""
    place: Machine | None = None
    step: Literal["where", "sees", "start", "poll", "ending"] = "where"
    """What it was asked: `poll`, once its processes run."""
    asked_at: float = 0.0


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
        self.unfit: set[str] = set()
        """Names of machines on which a part cannot start."""
        self.last: tuple[str, int] | Refused = ("no machine was there", 1)
        """How the last part ended: why, and its exit code."""
        self.why = "ended"
        self._nobody_since: float | None = None
        self._looked = float("-inf")
        self._output: tuple[str, str] = ("", "")

    def run(self) -> int:
        """From the first place to what the holder of the store says of the end. Raises Refused."""
        import ray

        if find_spec("torch") is None:
            raise Refused(
                "Missing",
                f"an elastic job's machines meet at a store of torch on Ray's head, and {sys.executable} there has no torch",
                "missing",
                remedy="Set cluster.python to a Python that has torch, on the head and on the nodes: pip install -e '.[train]'.",
            )
        ray.init(log_to_driver=False, configure_logging=False)
        signal.signal(signal.SIGTERM, self._ask_to_stop)
        self._must_fit()
        self.started = True
        self._hold()
        try:
            while not self.stopping:
                self._require_own_folder()
                for part in list(self.parts.values()):
                    (self._look_at if part.agent else self._await_place)(part)
                left = self.holder.poll() is not None
                if ended := read_json(self.folder / "rendezvous" / "exit.json"):
                    self.why = ended["reason"]
                    self._wait_for_leaving()
                    return int(ended["code"])
                if left:
                    self._hold()  # somebody killed it: the machines meet anew
                if not (self.folder / "result.json").exists() and not self._take_in() and not self.parts:
                    if isinstance(self.last, Refused):
                        raise self.last
                    self.why, code = self.last
                    return code
                self._tell()
                time.sleep(POLL_SECONDS)
            return 1
        finally:
            self.holder.stop()  # first, so that no machine comes again
            agents = [part.agent for part in self.parts.values() if part.place]
            if agents:
                ray.wait([agent.stop.remote() for agent in agents], num_returns=len(agents), timeout=40.0)

    def reason(self) -> str:
        return "cancelled" if self.stopping else self.why

    def _require_own_folder(self) -> None:
        """End at once, without a word in the folder, where another submission has it."""
        if (read_json(self.folder / "ray.json") or {}).get("submission") != self.spec["submission"]:
            print(f"another submission has {self.folder}, or it is gone: this one ends", flush=True)
            sys.exit(1)

    def _hold(self) -> None:
        """Start the store's holder on this machine, under the address by which Ray's machines know it."""
        import ray

        own = ray.get_runtime_context().get_node_id()
        address = next(machine.address for machine in machines(ray.nodes()) if machine.id == own)
        self.holder.start(
            self.spec["elastic"]["holder"], {**self.spec["environment"], "HEADWAY_RENDEZVOUS_HOST": address}
        )

    def _await_place(self, part: Part) -> None:
        if part.group.wait(POLL_SECONDS / 10):
            part.agent = make_agent(self.spec, part.group, 0)
            self._ask(part, "where")

    def _look_at(self, part: Part) -> None:
        """Take a part that has a place one step further."""
        answered, answer = self._answer(part)
        if not answered:
            return
        match part.step:
            case "where":
                self._take_place(part, str(answer))
            case "sees" if answer:
                self._start_part(part)
            case "sees":
                assert part.place
                if not any(self.tries.values()):
                    raise no_folder(self.folder, part.place.name)
                self._leave_out(part, f"it does not see {self.folder}")
            case "poll" if answer is not None:
                self._ask(part, "ending", str(self.folder / "nodes" / str(part.number)))
            case "start" | "poll":
                self._ask(part, "poll")
            case _:
                ended = answer or {"code": 1, "reason": "ended"}
                self.last = ended["reason"], int(ended["code"]) or 1
                if ended["reason"] == "timeout":  # the others reach the limit soon; nobody begins a whole one now
                    self.away.update(self.tries)
                elif ended["reason"] == "cancelled" or ended["code"] == 0:
                    self.away.add(part.number)
                self._let_go(part)

    def _take_place(self, part: Part, node: str) -> None:
        """Ask whether the machine that a part was placed on sees the job's folder."""
        import ray

        place = next((machine for machine in machines(ray.nodes()) if machine.id == node), None)
        # It was lost in this moment, or came to the cluster after the place was asked for, and is none for this job.
        if place is None or not candidates(self.spec, [place], used=self._used(), out=self._out()):
            self._let_go(part)
            return
        part.place = place
        self._ask(part, "sees", str(self.folder), self.spec["submission"], self.spec["shared_seconds"])

    def _ask(self, part: Part, step: Literal["where", "sees", "start", "poll", "ending"], *words: Any) -> None:
        part.asked = getattr(part.agent, step).remote(*words)
        part.step, part.asked_at = step, time.monotonic()

    def _answer(self, part: Part) -> tuple[bool, Any]:
        """Whether its actor has answered, and what; a part whose actor failed is let go."""
        import ray
        from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError

        if not ray.wait([part.asked], timeout=0)[0]:
            patience = ANSWER_SECONDS + (self.spec["shared_seconds"] if part.step == "sees" else 0.0)
            if part.step in ("where", "sees", "start") and time.monotonic() - part.asked_at > patience:
                self._let_go(part)  # on a machine that died before Ray noticed, its actor waits for ever
            return False, None
        try:
            return True, ray.get(part.asked)
        except ActorUnavailableError:  # Ray itself decides when a machine that does not answer is dead
            if part.step == "poll":
                self._ask(part, "poll")
            else:
                self._let_go(part)
        except ActorDiedError as error:
            if part.place:
                self.last = self._lost(part.number, part.place, error)
            else:
                self.tries[part.number].append(self._progress())
            self._let_go(part)
        except RayError as error:
            self._leave_out(part, str(error).strip().splitlines()[-1].strip())
        return False, None

    def _leave_out(self, part: Part, why: str) -> None:
        """Go on without the machine of a part that cannot start there; of a place that is not known yet, it counts as a try."""
        name = part.place.name if part.place else "a machine of Ray's"
        print(f"the job does without {name}: {why}", flush=True)
        self.last = Refused("NotStarted", f"no part of the job starts on {name}: {why}", "infrastructure")
        if part.place:
            self.unfit.add(part.place.name)
        else:
            self.tries[part.number].append(self._progress())
        self._let_go(part)

    def _start_part(self, part: Part) -> None:
        assert part.place
        for name in OF_A_START:
            (self.folder / "nodes" / str(part.number) / name).unlink(missing_ok=True)
        self.tries[part.number].append(self._progress())
        environment = {**self.spec["environment"], "HEADWAY_NODE_NAME": part.place.name}
        self._ask(part, "start", self.spec["commands"][part.number], environment)

    def _let_go(self, part: Part) -> None:
        """Give its place back, with whatever is left on it."""
        from ray.util.placement_group import remove_placement_group

        remove_placement_group(part.group)
        del self.parts[part.number]
        self._looked = float("-inf")

    def _take_in(self) -> bool:
        """Ask for a place for one more machine, unless one is asked for; whether another may come. Raises Refused."""
        import ray

        now = self._progress()
        able = [n for n in self.tries if n not in self.parts and n not in self.away and self._tries_since(n, now)]
        waiting = next((part for part in self.parts.values() if part.agent is None), None)
        if time.monotonic() - self._looked < PLACE_SECONDS or not (able or waiting):
            return bool(able)
        self._looked = time.monotonic()
        existing = machines(ray.nodes())
        free = candidates(self.spec, existing, used=self._used(), out=self._out())
        proven = [machine for machine in free if machine.known_as(self.spec["elastic"]["proven"])]
        patient = waiting is None or time.monotonic() - waiting.since < PREFER_SECONDS
        adds = self.spec["autoscales"] and not self.spec["only"] and not (proven and patient)
        wanted = tuple(sorted(machine.id for machine in (proven if proven and patient else free)))
        self._require_somebody(existing, some=bool(wanted or adds or self.parts))
        # A cluster that adds machines is told those that will not do instead, so that it adds one.
        others = sorted({machine.id for machine in existing} - set(wanted))
        where = f"in({','.join(wanted)})" if not adds else f"!in({','.join(others)})" if others else ""
        since = time.monotonic()
        if waiting and waiting.where != where:
            able, since = [waiting.number], waiting.since
            self._let_go(waiting)
        elif waiting or not all(part.place for part in self.parts.values()):
            return True
        if wanted or adds:
            self._ask_for(able[0], where, since)
        return True

    def _require_somebody(self, existing: list[Machine], *, some: bool) -> None:
        """Raise Refused where for a while nobody was there, and no machine of the cluster could come."""
        if some:
            self._nobody_since = None
            return
        self._nobody_since = self._nobody_since or time.monotonic()
        if time.monotonic() - self._nobody_since > NOBODY_SECONDS:
            if isinstance(self.last, Refused):
                raise self.last
            left = [machine for machine in existing if not machine.known_as(self._out())]
            why = lacking(self.spec, left) or "its machines are taken away from it"
            raise Refused("NoMachineLeft", f"no machine of the elastic job is left: {why}", "infrastructure")

    def _ask_for(self, number: int, where: str, since: float) -> None:
        """Ask Ray for the place of a part, on a machine whose id a label selector names; empty: any."""
        from ray.util.placement_group import placement_group

        labels = [{NODE_ID: where}] if where else None
        group = placement_group([self.spec["bundle"]], strategy="PACK", bundle_label_selector=labels)
        self.parts[number] = Part(number, group, where, since)

    def _used(self) -> list[str]:
        """Ids of the machines that the job has."""
        return [part.place.id for part in self.parts.values() if part.place]

    def _out(self) -> list[str]:
        """Names of the machines that the job does without."""
        return [*self.unfit, *self._bad()]

    def _tell(self) -> None:
        """Say how many machines are there, where that changed."""
        most, bad = len(self.tries), ", ".join(dict.fromkeys(self._bad()))
        without = f"; without {bad}, which checks found bad" if bad else ""
        runs = [number for number, part in self.parts.items() if part.step in ("poll", "ending")]
        joined = sum((self.folder / "nodes" / str(number) / "node.json").exists() for number in runs)
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
        for part in [part for part in self.parts.values() if part.step not in ("poll", "ending")]:
            self._let_go(part)
        until = time.monotonic() + LEAVE_SECONDS
        while self.parts and time.monotonic() < until and not self.stopping:
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

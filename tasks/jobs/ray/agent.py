"""What runs on each machine of a job on Ray: one actor that starts the machine's part (tasks/jobs/node/__main__.py under its
parent) and watches it.

The process dies with the actor, and the actor with the job's driver or its machine. Who makes the actors is driver.py.

The machines themselves are values here: what a job needs of them, and what is missing. No Ray is imported: who asks Ray is
driver.py. See docs/ray.md.
"""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.common.process import die_with_parent, read_json

NODE_ID = "ray.io/node-id"
"""Label that Ray gives to every node."""
GIB = 2**30


@dataclass(frozen=True)
class Machine:
    """One living node of the cluster."""

    id: str
    name: str
    """The node's name where no other living node has it (Ray's default is its address), else with its id."""
    address: str
    host: str
    resources: Mapping[str, float]
    """All that it has, free or not."""

    def known_as(self, names: Sequence[str]) -> bool:
        """Whether one of the names means this machine."""
        return bool({self.id, self.name, self.address, self.host} & set(names))

    def holds(self, bundle: Mapping[str, float]) -> int:
        """How many bundles it could hold if it were free."""
        return min((int(self.resources.get(kind, 0) // amount) for kind, amount in bundle.items() if amount), default=0)


def machines(nodes: Sequence[Mapping[str, Any]]) -> list[Machine]:
    """The living nodes of `ray.nodes()`."""
    living = [node for node in nodes if node["Alive"]]
    names = [str(node["NodeName"]) for node in living]
    return [
        Machine(
            id=node["NodeID"],
            name=name if names.count(name) == 1 else f"{name}-{node['NodeID'][:8]}",
            address=node["NodeManagerAddress"],
            host=node["NodeManagerHostname"],
            resources=node["Resources"],
        )
        for node, name in zip(living, names, strict=True)
    ]


def allowed(spec: Mapping[str, Any], existing: Sequence[Machine]) -> list[Machine]:
    """The machines that the job may run on."""
    left = [machine for machine in existing if not machine.known_as(spec["excluded"])]
    return [machine for machine in left if machine.known_as(spec["only"])] if spec["only"] else left


def candidates(
    spec: Mapping[str, Any], existing: Sequence[Machine], *, used: Sequence[str], out: Sequence[str]
) -> list[Machine]:
    """The machines that one more part of an elastic job could be placed on if they were free.

    `used` are ids of those that have one; `out` are names of those that the job does without."""
    return [
        machine
        for machine in allowed(spec, existing)
        if machine.holds(spec["bundle"]) and not machine.known_as(out) and machine.id not in used
    ]


def selector(spec: Mapping[str, Any], existing: Sequence[Machine]) -> str:
    """Ray's label selector for the ids of the machines that the job may run on; empty: any."""
    may = {machine.id for machine in allowed(spec, existing)}
    if spec["only"]:
        return f"in({','.join(sorted(may))})"
    out = sorted(machine.id for machine in existing if machine.id not in may)
    return f"!in({','.join(out)})" if out else ""


def lacking(spec: Mapping[str, Any], existing: Sequence[Machine]) -> str:
    """Why the cluster could never hold the job, in words; empty when it could."""
    bundle, wanted = spec["bundle"], int(spec["nodes"])
    left = allowed(spec, existing)
    spread = spec["strategy"] == "STRICT_SPREAD" or "elastic" in spec
    room = sum(min(machine.holds(bundle), 1 if spread else wanted) for machine in left)
    if room >= wanted:
        return ""
    why = "" if "elastic" in spec else " (ray.strategy is STRICT_SPREAD)"
    apart = f" of its own each{why}" if spread and wanted > 1 else ""
    excluded = f", {len(existing) - len(left)} more are excluded" if len(left) < len(existing) else ""
    has = "; ".join(f"{machine.name}: {words(_of_interest(machine, bundle))}" for machine in left) or "no machine"
    return (
        f"the job needs {wanted} machine(s){apart} with {words(bundle)}, and the Ray cluster can hold {room}{excluded}. "
        f"It has {has}. {_remedy(bundle, left, spread=spread and 'elastic' not in spec)}"
    )


def words(resources: Mapping[str, float]) -> str:
    """Resources as people read them: 2 CPU, 1 GPU, 4 GiB memory."""
    payload = {kind: amount / GIB if kind == "memory" else amount for kind, amount in resources.items()}
    return ", ".join(f"{payload[kind]:g} {'GiB memory' if kind == 'memory' else kind}" for kind in payload) or "nothing"


def _of_interest(machine: Machine, bundle: Mapping[str, float]) -> dict[str, float]:
    return {kind: machine.resources.get(kind, 0.0) for kind, amount in bundle.items() if amount}


def _remedy(bundle: Mapping[str, float], left: Sequence[Machine], *, spread: bool) -> str:
    """What to change: the kind of resource that no machine has enough of, else the number of machines."""
    short = [kind for kind, amount in bundle.items() if amount and all(m.resources.get(kind, 0) < amount for m in left)]
    settings = {
        "CPU": "cluster.ranks_per_node or cluster.threads_per_rank",
        "GPU": "cluster.gpus_per_node",
        "memory": "cluster.memory_gib",
    }
    lower = " and ".join(settings.get(kind, f"ray.resources.{kind}") for kind in short)
    if short:
        return f"No machine has enough {', '.join(short)}: lower {lower}, or add such machines to the cluster"
    pack = ", set ray.strategy to PACK" if spread else ""
    return f"Lower cluster.nodes{pack}, or add machines; where machines are added by themselves, set ray.autoscales"


STOP_SECONDS = 35.0
"""For the parent of a machine's part to end it; it gives the ranks 30 s."""


class Agent:
    """One machine's process. All methods return at once but `sees` and `stop`, for an actor does one thing at a time."""

    def __init__(self) -> None:
        self.child: subprocess.Popen[bytes] | None = None

    def where(self) -> str:
        """The id of the node that it runs on."""
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def sees(self, folder: str, submission: int, seconds: float) -> bool:
        """Whether this machine sees the job folder as it is now, at the latest after `seconds`: file systems have caches."""
        until = time.monotonic() + seconds
        while (read_json(Path(folder) / "ray.json") or {}).get("submission") != submission:
            if time.monotonic() > until:
                return False
            time.sleep(0.2)
        return True

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> int:
        """Start the machine's part; it dies with this process. Returns its process id."""
        self.child = subprocess.Popen(
            list(command),
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            preexec_fn=_fresh,
        )
        atexit.register(self.stop)
        return self.child.pid

    def poll(self) -> int | None:
        """The exit code of the machine's part; None while it runs."""
        return self.child.poll() if self.child else None

    def ending(self, place: str) -> dict[str, Any] | None:
        """How the part ended, as its own machine sees its folder: other machines may see it later."""
        return read_json(Path(place) / "exit.json")

    def stop(self) -> int | None:
        """End the machine's part and all of its ranks; returns when they are gone."""
        if self.child is None or self.child.poll() is not None:
            return self.poll()
        self.child.send_signal(signal.SIGTERM)
        try:
            return self.child.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.child.kill()
            return self.child.wait()


def _fresh() -> None:
    """In the new process: Ray's workers ignore signals that a program of its own must hear."""
    die_with_parent()
    signal.pthread_sigmask(signal.SIG_SETMASK, set())
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)

"""The machines of a Ray cluster as values, what a job needs of them, and what is missing. Pure: no Ray in it.

Who asks Ray, and who starts something, is driver.py. See docs/ray.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
    spread = spec["strategy"] == "STRICT_SPREAD"
    room = sum(min(machine.holds(bundle), 1 if spread else wanted) for machine in left)
    if room >= wanted:
        return ""
    apart = " of its own each (ray.strategy is STRICT_SPREAD)" if spread and wanted > 1 else ""
    excluded = f", {len(existing) - len(left)} more are excluded" if len(left) < len(existing) else ""
    has = "; ".join(f"{machine.name}: {words(_of_interest(machine, bundle))}" for machine in left) or "no machine"
    return (
        f"the job needs {wanted} machine(s){apart} with {words(bundle)}, and the Ray cluster can hold {room}{excluded}. "
        f"It has {has}. {_remedy(bundle, left, spread=spread)}"
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

"""The machines of a Slurm cluster: which may take a job, what `headway doctor` finds of them, and draining.

Nodes are taken out of service with a reason, and put back: `scontrol`, and a look whether it came to it. What Headway drained is
told by its reason, which begins with `headway: `. A node that somebody else drained is neither drained again nor put back. It
needs the rights of a Slurm operator; without them nothing changes, and the answer says so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tasks.common.errors import HeadwayError, Missing
from tasks.compute.nodes import Drained, Finding, Machines, network_finding, require_executed
from tasks.compute.slurm.commands import Login, Said, open_login, silent
from tasks.compute.slurm.states import PARTITIONS, parse_partitions
from tasks.config.cluster import ClusterConfig

SECONDS = 10.0
PYXIS = (
    "Have the administrator install pyxis and enroot (CycleCloud's Slurm workspace has both), or leave cluster.image empty and "
    "install Headway on the nodes."
)
OUT = re.compile(r"down|drain|fail|unk|no_respond|maint|reboot|\*$")
"""Node states of sinfo in which no job starts there."""
OURS = "headway: "
LONGEST = 200
"""Characters of a reason: `sinfo -R` shows the first twenty, `scontrol show node` all."""
_STATE, _REASON = re.compile(r" State=(\S+)"), re.compile(r" Reason=(.*?) \[([^\s@\]]+)@[^\s\]]+\]")


class SlurmMachines(Machines):
    """The nodes of the configured partition."""

    def findings(self) -> Iterator[Finding]:
        yield from slurm_findings(self.config)

    def usable(self) -> set[str]:
        output = open_login(self.config).run(("sinfo", "--noheader", "--all", "--Node", "--format=%P|%N|%T"))
        if output.code:
            raise silent(f"sinfo: {output.text}")
        wanted = self.config.slurm.partition
        rows = [line.split("|") for line in output.out.split()]
        mine = [row for row in rows if row[0].rstrip("*") in wanted.split(",") or (not wanted and "*" in row[0])]
        return {name for _, name, state in mine if name not in self.config.exclude and not OUT.search(state)}

    def execute(self, node: str, script: str, *, handle: Mapping[str, Any]) -> None:
        beside = (f"--jobid={handle['job']}", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={node}")
        ran = open_login(self.config).run(("srun", *beside, "sh", "-c", script))
        require_executed(node, ran.code, ran.text)

    def drain(self, reasons: Mapping[str, str]) -> tuple[Drained, ...]:
        return drain(open_login(self.config), reasons)

    def resume(self, nodes: Iterable[str] = ()) -> tuple[Drained, ...]:
        return resume(open_login(self.config), nodes)


def slurm_findings(config: ClusterConfig) -> Iterator[Finding]:
    """Findings, the scheduler first; without an answer there is nothing more to ask."""
    try:
        login = open_login(config)
        version, partitions = login.run(("sinfo", "--version"), seconds=SECONDS), login.run(PARTITIONS, seconds=SECONDS)
    except (HeadwayError, ValueError) as error:
        yield "slurm scheduler", False, str(error), getattr(error, "remedy", "") or "Correct cluster.slurm."
        return
    if partitions.code:
        yield "slurm scheduler", False, partitions.text, "Look at `scontrol ping` on the login node."
        return
    yield "slurm scheduler", True, f"{version.out} answers", ""
    yield _partition(config, partitions.out)
    # Without accounting all works; it is said because Slurm then forgets finished jobs.
    try:
        output = login.run(("sacct", "--noheader", "--allocations", "--starttime=now"), seconds=SECONDS)
    except HeadwayError as error:
        output = Said(1, "", str(error))
    source = "sacct answers" if not output.code else "no sacct: ends of jobs are read from squeue and the job folder"
    yield "slurm accounting", True, source, ""
    yield from _containers(config, login)
    if config.slurm.sku:
        yield network_finding("slurm sku", config.slurm.sku, "Correct cluster.slurm.sku, or leave it empty.")


def _partition(config: ClusterConfig, text: str) -> Finding:
    known = parse_partitions(text)
    wanted = config.slurm.partition
    chosen = next((p for p in known if (p.name == wanted if wanted else p.default)), None)
    names = ", ".join(p.name for p in known)
    if chosen is None:
        return (
            "slurm partition",
            False,
            f"{wanted or 'no default'}: the cluster has {names}",
            "Set cluster.slurm.partition.",
        )
    seen = f"{chosen.name}: {chosen.nodes} node(s), {chosen.state}"
    return (
        "slurm partition",
        chosen.nodes >= config.nodes and chosen.state == "UP",
        seen,
        "Lower cluster.nodes, or take another.",
    )


def _containers(config: ClusterConfig, login: Login) -> Iterator[Finding]:
    """pyxis is a part of srun; enroot is on the compute nodes and may be on the login node."""
    try:
        pyxis = "--container-image" in login.run(("srun", "--help"), seconds=SECONDS).out
        enroot = login.run(("sh", "-c", "command -v enroot && enroot version"), seconds=SECONDS)
    except HeadwayError as error:
        yield "slurm pyxis", not config.image, str(error), PYXIS
        return
    needed = bool(config.image)
    seen = "srun has --container-image" if pyxis else "srun has no --container-image"
    yield "slurm pyxis", pyxis or not needed, seen + ("" if needed else " (cluster.image is empty)"), PYXIS
    version = re.search(r"[\d.]+$", enroot.out)
    text = f"enroot {version.group()}" if version else "enroot is not on the login node; the compute nodes need it"
    yield "slurm enroot", bool(version) or not needed or pyxis, text, PYXIS


@dataclass(frozen=True)
class Node:
    """A node as Slurm has it now."""

    name: str
    state: str
    reason: str = ""
    by: str = ""

    @property
    def drained(self) -> bool:
        return "DRAIN" in self.state

    @property
    def ours(self) -> bool:
        return self.drained and self.reason.startswith(OURS)


def drain(login: Login, reasons: Mapping[str, str]) -> tuple[Drained, ...]:
    """Drain nodes, each for its reason. Never raises: what went wrong is in the answer."""
    # One line that Slurm can print: it puts who and when in brackets behind it.
    return tuple(
        _answer(
            login, name, _drain, (OURS + " ".join(why.replace("[", "(").replace("]", ")").split()))[:LONGEST].strip()
        )
        for name, why in reasons.items()
    )


def resume(login: Login, names: Iterable[str] = ()) -> tuple[Drained, ...]:
    """Put nodes back that Headway drained; without names all of them. Raises Missing when Slurm does not answer."""
    wanted = list(names) or [node.name for node in nodes(login) if node.ours]
    return tuple(_answer(login, name, _resume, "") for name in wanted)


def nodes(login: Login, name: str = "") -> list[Node]:
    """All nodes, or one of them; none when Slurm does not know it."""
    output = login.run(("scontrol", "show", "node", *([name] if name else []), "--oneliner"))
    return [_node(line) for line in output.out.splitlines() if line.startswith("NodeName=")]


def _answer(login: Login, name: str, act: Callable[[Login, Node, str], Drained], why: str) -> Drained:
    try:
        result = nodes(login, name)
        if not result:
            return Drained(node=name, done=False, said="Slurm does not know it")
        return act(login, result[0], why)
    except Missing as error:
        return Drained(node=name, done=False, said=error.message)


def _drain(login: Login, node: Node, why: str) -> Drained:
    if node.ours:
        return Drained(node=node.name, done=True, said=f"was drained by Headway before: {node.reason}")
    if node.drained:
        text = (
            f"was drained before by {node.by or 'somebody'}, and is left as it is: {node.reason or 'without a reason'}"
        )
        return Drained(node=node.name, done=False, said=text)
    output = login.run(("scontrol", "update", f"NodeName={node.name}", "State=DRAIN", f"Reason={why}"))
    now = next(iter(nodes(login, node.name)), node)
    done = now.drained and now.reason == why
    return Drained(node=node.name, done=done, said=f"{now.state}: {now.reason}" if done else _refused(output, now))


def _resume(login: Login, node: Node, _: str) -> Drained:
    if not node.ours:
        text = f"not drained by Headway, and left as it is: {node.state} {node.reason}".strip()
        return Drained(node=node.name, done=False, said=text)
    output = login.run(("scontrol", "update", f"NodeName={node.name}", "State=UNDRAIN"))
    now = next(iter(nodes(login, node.name)), node)
    return Drained(node=node.name, done=not now.drained, said=now.state if not now.drained else _refused(output, now))


def _refused(payload: Said, now: Node) -> str:
    if payload.code:
        return f"scontrol: {payload.text}; the account needs the rights of a Slurm operator"
    return f"scontrol said nothing, and the node is {now.state} {now.reason}".strip()


def _node(line: str) -> Node:
    state, reason = _STATE.search(line), _REASON.search(line)
    name = line.removeprefix("NodeName=").split()[0]
    by = {"reason": reason[1], "by": reason[2]} if reason else {}
    return Node(name, state[1] if state else "", **by)

"""Nodes of a Slurm cluster taken out of service with a reason, and put back: `scontrol`, and a look whether it came to it.

What Headway drained is told by its reason, which begins with `headway: `. A node that somebody else drained is neither drained
again nor put back. It needs the rights of a Slurm operator; without them nothing changes, and the answer says so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from tasks.common.errors import Missing
from tasks.compute.draining import Drained
from tasks.compute.slurm.commands import Login, Said

OURS = "headway: "
LONGEST = 200
"""Characters of a reason: `sinfo -R` shows the first twenty, `scontrol show node` all."""
_STATE, _REASON = re.compile(r" State=(\S+)"), re.compile(r" Reason=(.*?) \[([^\s@\]]+)@[^\s\]]+\]")


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

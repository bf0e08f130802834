"""A verdict, as values: of machines, of pairs, of the cluster. Each reason names machine, check, measured, limit, source."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from tasks.config.qualification import Verdict

WORST: tuple[Verdict, ...] = ("unknown", "failed", "degraded", "healthy")


class Value(BaseModel):
    """Base: frozen, and written as JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Reason(Value):
    """One sentence of a verdict."""

    node: str
    """Empty: the cluster as a whole."""
    check: str
    where: str = ""
    measured: float | str | None
    unit: str = ""
    limit: str
    """With its direction: >= 431."""
    source: str
    verdict: Verdict
    said: str = ""
    remedy: str = ""
    nodes: tuple[str, ...] = ()
    """Of a reason of the cluster: the machines that took part; without one of them it says nothing about the others."""

    @property
    def sentence(self) -> str:
        """For people."""
        of = " ".join(part for part in (self.node or "the cluster", self.where) if part)
        shown = f"{self.measured:.4g}" if isinstance(self.measured, float) else str(self.measured)
        if self.measured is None:
            shown = self.said or "nothing was measured"
        unit = f" {self.unit}" if self.unit and self.measured is not None else ""
        return f"{of}: {self.check} is {self.verdict}: {shown}{unit}, limit {self.limit} ({self.source})"


class NodeVerdict(Value):
    """A machine's."""

    name: str
    verdict: Verdict
    reasons: tuple[Reason, ...] = ()
    """Why it is not healthy."""
    rates: dict[str, float] = {}
    """What its worst part reached, by check, such as matmul_bf16 or all_reduce of node. Its history is made of these."""
    standing: float = 1.0
    """Lowest share of the fastest group of machines that it reached in anything that was compared."""


class PairVerdict(Value):
    """Of two machines: the bus bandwidth at the largest message."""

    a: str
    b: str
    busbw_gb_s: float | None
    verdict: Verdict
    blamed: Literal["a", "b", "link", "network", ""] = ""
    said: str = ""


class ClusterVerdict(Value):
    """All of it."""

    verdict: Verdict
    """Of the machines that are left when those that may be excluded are."""
    sku: str
    sku_digest: str
    nodes: tuple[NodeVerdict, ...] = ()
    pairs: tuple[PairVerdict, ...] = ()
    reasons: tuple[Reason, ...] = ()
    """Of the cluster as a whole, such as a collective over all machines."""
    together: tuple[tuple[str, ...], ...] = ()
    """Sets of three and more machines that did a collective together as well as they must."""
    groups: tuple[tuple[str, ...], ...] = ()
    """Machines that are sound among themselves, while the network between such groups is bad; the largest first."""

    def named(self, *verdicts: Verdict) -> tuple[str, ...]:
        """Machines with one of these verdicts."""
        return tuple(node.name for node in self.nodes if node.verdict in verdicts)


def worst(*verdicts: Verdict) -> Verdict:
    """The worst of some; healthy when there is none."""
    return min(verdicts, key=WORST.index, default="healthy")

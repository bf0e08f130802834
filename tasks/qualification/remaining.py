"""Which machines a run may use after a verdict: without those that failed, and only with proof of the rest together."""

from __future__ import annotations

from tasks.qualification.verdicts import ClusterVerdict, Reason, Value
from tasks.qualification_config import BenchmarkConfig
from tasks.qualification_names import Verdict


class Remaining(Value):
    """What is left of a cluster."""

    nodes: tuple[str, ...]
    """Machines that may be used, healthiest first."""
    excluded: dict[str, str]
    """The others, each with why, as a sentence."""
    enough: bool
    """Whether as many are left as are needed."""
    verdict: Verdict
    """Of those that are left, together; unknown when they are not enough."""
    reasons: tuple[Reason, ...] = ()
    """Of the cluster, that hold for those that are left."""
    needs_fresh_run: bool = False
    """Nothing proves the rest together: qualify them once more by themselves."""


def remaining(verdict: ClusterVerdict, config: BenchmarkConfig, needed: int) -> Remaining:
    """What is left when the machines that config.act leaves out are out; `needed`: config.act.min_nodes or cluster.nodes."""
    raise NotImplementedError

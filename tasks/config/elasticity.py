"""What each backend can do when machines of one submission come and go, as data; docs/elastic.md prints the table.

How it is done does not live here: tasks/compute/elastic.py has the place where machines meet, tasks/jobs/node/elastic.py the
training.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Elasticity:
    """One backend's row."""

    grows: bool
    """Machines that come later join."""
    shrinks: bool
    """It goes on with fewer when one is lost."""
    survives_first: bool
    """Also when that one is the first."""
    how: str
    """How, or why an elastic job is refused."""

    @property
    def refused(self) -> bool:
        return not (self.grows or self.shrinks)


def _refused(reason: str) -> Elasticity:
    return Elasticity(grows=False, shrinks=False, survives_first=False, how=reason)


ELASTICITY = {
    "local": _refused("there is one machine, and nothing to grow to"),
    "ssh": _refused("its machines are listed and all there from the start; give the number of them as `nodes`"),
    "slurm": Elasticity(
        grows=True,
        shrinks=True,
        survives_first=True,
        how="one job of one node for each machine; a lost one is queued again and joins",
    ),
    "azureml": _refused("Azure ML starts all nodes of a job at once and ends it when one fails"),
    "ray": _refused("a placement group keeps its size, and a lost node's group waits for a whole new node"),
}
"""A row a backend. Open MPI is refused everywhere: mpirun ends all ranks when one is lost."""


def refusal(backend: str) -> str:
    """Why a backend takes no elastic jobs; empty when it does."""
    row = ELASTICITY[backend]
    able = " or ".join(name for name, other in ELASTICITY.items() if not other.refused)
    return (
        f"backend {backend} takes no elastic jobs: {row.how}. Leave elastic empty, or use backend {able}"
        if row.refused
        else ""
    )


def table() -> str:
    """The rows as Markdown."""
    lines = [
        "| backend | grows | shrinks | survives the loss of the first node | how, or why not |",
        "|---|---|---|---|---|",
    ]
    for name, row in ELASTICITY.items():
        words = (
            ["refused"] * 3
            if row.refused
            else [("yes" if flag else "no") for flag in (row.grows, row.shrinks, row.survives_first)]
        )
        lines.append(f"| {name} | {' | '.join(words)} | {row.how} |")
    return "\n".join(lines)

"""What a cluster must show before a training run starts on it, and what happens to a machine that does not, as settings.

A field's docstring is its help text, in docs/configuration.md. See docs/qualification.md.
"""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import Field

from tasks.config.base import Fraction, Positive, Settings

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "alltoall", "broadcast", "sendrecv"]
COLLECTIVES: tuple[Collective, ...] = get_args(Collective)
Verdict = Literal["healthy", "degraded", "failed", "unknown"]


CheckName = Literal["health", "compute", "memory", "collectives", "pairs", "storage", "training", "soak"]
QUICK: tuple[CheckName, ...] = ("health", "compute", "memory", "collectives", "pairs")
Depth = Literal["quick", "standard", "full"]
FULL: tuple[CheckName, ...] = (*QUICK, "storage", "training", "soak")


DRAIN_SHARE = 0.10
"""Left out where it is written, so that the stage's key is the one of releases that did not have it, and their records count."""


class ActConfig(Settings):
    """What happens to machines that fail."""

    exclude: bool = True
    """Whether failed and unknown machines are left out of the jobs to come, and the run continues when enough remain."""
    degraded: Literal["use", "exclude"] = "use"
    """Whether degraded machines are used, or left out too."""
    min_nodes: Positive | None = None
    """Fewest machines with which the run continues; empty: cluster.nodes."""
    drain: bool = False
    """Whether machines that failed are drained in Slurm, with the reason; `headway qualify --resume` undoes it."""
    drain_share: Fraction = Field(DRAIN_SHARE, exclude_if=lambda share: share == DRAIN_SHARE)
    """Largest share of the machines that is drained without asking anyone, and one machine in any case: where more failed at
    once, a common cause is more likely. Then none is drained, and someone decides with `headway qualify --drain`."""


class BenchmarkConfig(Settings):
    """What a cluster must show before a training run starts on it."""

    sku: str = ""
    """Hardware that machines are judged as: a name of `headway hardware`, or the path of a YAML file of the same form. Empty: the
    VM size of the cluster's section; where ranks compute on the CPU and nothing is known of that size, local-cpu."""
    depth: Depth = "quick"
    """How much is measured; standard has every rate `rounds` times and more pairs, so that small faults are seen; full has every
    collective and size, every pair, storage, a training probe and a thermal soak too."""
    checks: tuple[CheckName, ...] = ()
    """Groups of checks that run; empty: those of the depth."""
    spare_nodes: int = Field(0, ge=0)
    """Machines that are qualified beyond cluster.nodes, or elastic.min_nodes, so that enough remain when one fails."""
    nodes: tuple[str, ...] = ()
    """Machines to qualify, by name; empty: as many as the cluster has and spare_nodes more, whichever the scheduler gives. Of an
    elastic job empty means elastic.min_nodes, and machines that come later measure themselves; where names are given, all of them
    are measured before it, and no other joins."""
    seconds: float = Field(2.0, gt=0)
    """Time that each measurement of a rate takes."""
    matmul_size: Positive = 512
    """Side of the square matrices that are multiplied on a CPU; GPUs multiply 8192 and more."""
    largest_megabytes: Positive = 16
    """Largest message of a collective on CPUs, in MB (10^6 bytes); GPUs go up to the largest size of the hardware's file."""
    min_of_peers: Fraction = 0.70
    """A rank, machine or pair below this share of the fastest group of the others has failed; of pairs on CPUs, half of it."""
    rounds: Positive = 3
    """Most times that what is slow is measured, and times of every rate with the depths standard and full; the best counts.
    Other work comes and goes, a bad part stays."""
    collective_seconds: float = Field(60.0, gt=0)
    """Longest time of one collective's sweep; what takes longer is unknown."""
    check_seconds: float = Field(300.0, gt=0)
    """Longest time of one group of checks on a machine; what takes longer is unknown."""
    probe_steps: Positive = 10
    """Steps of the training probe that are timed, after two that are not."""
    soak_seconds: float = Field(60.0, gt=0)
    """Length of the thermal soak."""
    set_clocks: bool = False
    """Whether application clocks of GPUs are set to their maximum first; needs rights on the machine."""
    aznhc: Literal["auto", "never"] = "auto"
    """Whether Azure's node health checks run where they are installed."""
    aznhc_seconds: float = Field(900.0, gt=0)
    """Longest time of Azure's node health checks on a machine, which take 5 to 8 minutes; what takes longer is unknown."""
    max_age_hours: float = Field(24.0, gt=0)
    """A passed qualification older than this is measured again."""
    act: ActConfig = ActConfig()

    @property
    def repeats(self) -> int:
        """Times that every rate of a machine is measured, whether or not one is slow."""
        return 1 if self.depth == "quick" else self.rounds

    @property
    def groups(self) -> tuple[CheckName, ...]:
        """The groups of checks that run."""
        return self.checks or (FULL if self.depth == "full" else QUICK)

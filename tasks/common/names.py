"""Names that measuring, judging and the hardware's files share."""

from __future__ import annotations

from typing import Literal, get_args

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "alltoall", "broadcast", "sendrecv"]
COLLECTIVES: tuple[Collective, ...] = get_args(Collective)
Verdict = Literal["healthy", "degraded", "failed", "unknown"]

"""What a library really sent its messages over. A silent fall back to TCP passes many a bandwidth check and ruins a training."""

from __future__ import annotations

from collections.abc import Iterator

from tasks.hardware.sku import Sku
from tasks.qualification.limits import cited
from tasks.qualification.merged import Merged
from tasks.qualification.verdicts import Reason

NETWORK = ("NET", "tcp")
BETWEEN = {"node": (*NETWORK, "SHM"), "pair": NETWORK, "all": NETWORK, "part": NETWORK}
"""What stands in for the right transport when it is not there. Within a machine shared memory does, and slower."""


FALL_BACK = (
    "See why NCCL did not take it: NCCL_DEBUG=INFO, InfiniBand's driver, NCCL_IB_DISABLE, NCCL_NET, the topology file."
)
UNSAID = "Run it with NCCL_DEBUG=INFO and NCCL_DEBUG_SUBSYS=INIT,NET,GRAPH, so that the log says it."


def of_transport(sweep: Merged, sku: Sku) -> Iterator[Reason]:
    """A transport that is not the hardware's, or that nobody knows."""
    scope = "node" if len(sweep.nodes) == 1 else "all" if sweep.scope == "part" else sweep.scope
    wanted = next((allowed for name, allowed in sku.transports.items() if name == scope), ())
    if not wanted or sweep.status != "measured":
        return
    if not sweep.transport:
        yield _reason(sweep, sku, wanted, "")
        return
    others = [used for used in sweep.transport if not _is_one(used, wanted) and _is_one(used, BETWEEN[scope])]
    if others or not any(_is_one(used, wanted) for used in sweep.transport):
        yield _reason(sweep, sku, wanted, ", ".join(others or sweep.transport))


def _is_one(used: str, names: tuple[str, ...]) -> bool:
    """NET/IB/GDR is a NET/IB; NET/IB is no NET/IB/GDR."""
    return any(used == name or used.startswith(f"{name}/") for name in names)


def _reason(sweep: Merged, sku: Sku, wanted: tuple[str, ...], used: str) -> Reason:
    key = sku.section_sources.get("transports", "")
    return Reason(
        node="",
        check=f"{sweep.collective} transport",
        measured=used or None,
        limit=f"one of {', '.join(wanted)}",
        source=cited(sku, key) if key else f"{sku.name}: its transports",
        verdict="failed" if used else "unknown",
        said=f"it fell back to {used}" if used else "the library did not say what it used",
        remedy=FALL_BACK if used else UNSAID,
    )

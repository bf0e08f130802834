"""Whether machines are of the size as which they are judged: by the limits of another one a verdict says little."""

from __future__ import annotations

from collections.abc import Iterator

from tasks.hardware.sku import Sku, plain_name
from tasks.qualification.measured import RankReport
from tasks.qualification.verdicts import Reason

ANY = ("local-cpu", "local-gpu")
"""Hardware of no size: any machine may be judged as it."""


def of_another_size(report: RankReport, sku: Sku) -> Iterator[Reason]:
    """A machine whose own name for its size is none of the hardware's. Limits for CPUs hold on machines of any size."""
    size = report.machine.get("vm_size", "")
    names = (sku.name, *sku.aliases, *sku.sizes)
    if not size or sku.vendor == "cpu" or sku.name in ANY or plain_name(size) in map(plain_name, names):
        return
    yield Reason(
        node=report.node,
        check="vm_size",
        measured=size,
        limit=f"= {sku.name}",
        source="Azure's metadata service, beside the hardware that it is judged as",
        verdict="degraded",
        said=f"a {size} is judged as {sku.name}",
        remedy=f"Set benchmark.sku to {plain_name(size)}; a file of your own that holds for it names it in `sizes`.",
    )

"""Versions of drivers and libraries: equal on all machines, and those of the image that the hardware's file knows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from tasks.hardware.sku import Image, Sku
from tasks.qualification.limits import cited, same
from tasks.qualification.measured import Measurement
from tasks.qualification.verdicts import Reason

PREFIX = "version_"
NONE = "not reported"
RENEW = "Put the same image on all machines, or update this one, and qualify it again."


def by_node(measurement: Measurement) -> dict[str, dict[str, str]]:
    """Versions of each machine by name; of ranks that disagree all are named."""
    found: dict[str, dict[str, set[str]]] = {}
    for report in measurement.ranks:
        mine = found.setdefault(report.node, {})
        probes = {
            p.check.removeprefix(PREFIX): str(p.measured) for p in report.probes if _is_version(p.check, p.measured)
        }
        for name, value in (*report.versions.items(), *probes.items()):
            mine.setdefault(name, set()).add(value)
    return {node: {name: " and ".join(sorted(values)) for name, values in mine.items()} for node, mine in found.items()}


def _is_version(check: str, measured: float | str | None) -> bool:
    return check.startswith(PREFIX) and measured is not None


def unequal(versions: Mapping[str, Mapping[str, str]]) -> Iterator[Reason]:
    """The machines that are fewer; all where no version has more machines than every other."""
    for name in sorted({name for mine in versions.values() for name in mine}):
        counts = Counter(mine.get(name, NONE) for mine in versions.values())
        if len(counts) == 1:
            continue
        (usual, most), (_, second) = counts.most_common(2)
        decided = most > second and usual != NONE
        for node, mine in sorted(versions.items()):
            if not decided or mine.get(name, NONE) != usual:
                yield _unequal(node, name, mine.get(name, NONE), usual if decided else "", counts)


def _unequal(node: str, name: str, mine: str, usual: str, counts: Counter[str]) -> Reason:
    shown = ", ".join(f"{value} on {number}" for value, number in sorted(counts.items()))
    return Reason(
        node=node,
        check=f"{PREFIX}{name}",
        measured=mine,
        limit=f"= {usual}" if usual else "the same on all machines",
        source="most machines" if usual else "the machines, none of which are most",
        verdict="degraded",
        said=f"machines have {shown}",
        remedy=RENEW,
    )


def unlike_image(node: str, mine: Mapping[str, str], sku: Sku) -> Iterator[Reason]:
    """What differs from the image that the machine says it has, else from the nearest one that the file knows."""
    named = [image for image in sku.images if image.urn == mine.get("image")]
    known = named or ([] if "image" in mine else list(sku.images))
    if not known:
        return
    nearest = min(known, key=lambda image: (len(_differing(mine, image)), image.urn))
    for name in _differing(mine, nearest):
        yield Reason(
            node=node,
            check=f"{PREFIX}{name}",
            measured=mine[name],
            limit=f"= {nearest.versions[name]}",
            source=f"{nearest.urn}: {cited(sku, nearest.source)}",
            verdict="degraded",
            said=f"not as in {nearest.urn}",
            remedy=RENEW,
        )


def _differing(mine: Mapping[str, str], image: Image) -> list[str]:
    return [name for name, value in sorted(image.versions.items()) if name in mine and not same(mine[name], value)]

"""What the report of a run says of `qualification.json`: a rate a rank, the all-reduce, and what both must be.

Read leniently, as plain values: what is not there is left out. The page of the qualification itself is page.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

MATMULS = ("matmul_bf16", "matmul_fp16", "matmul_tf32", "matmul_fp32")
"""The first that was measured is shown."""


def qualification_in_short(payload: dict[str, Any]) -> dict[str, Any]:
    """Fields of QualificationReport."""
    measured, sku, verdict = payload["measured"] or {}, payload.get("sku") or {}, payload.get("verdict") or {}
    rates = {name: list(_rates(measured, name)) for name in MATMULS}
    shown = next((name for name in MATMULS if rates[name]), MATMULS[-1])
    limit = ((sku.get("limits") or {}).get(shown) or {}).get("fail")
    sweeps = [sweep for sweep in measured.get("sweeps") or () if _of_all(sweep)]
    return {
        "verdict": verdict.get("verdict") or "unknown",
        "baseline": {
            "name": sku.get("name") or "",
            "matmul_gflops_per_rank": limit * 1000 if isinstance(limit, int | float) else None,
            "allreduce_gigabytes_per_second": _floor(sku),
        },
        "ranks": rates[shown],
        "allreduce": _largest(sweeps),
        "checks": payload.get("checks") or (),
    }


def _rates(measured: dict[str, Any], check: str) -> Iterator[dict[str, Any]]:
    for report in measured.get("ranks") or ():
        for probe in report.get("probes") or ():
            if probe.get("check") == check and isinstance(probe.get("measured"), int | float):
                yield {"rank": report["rank"], "host": report["node"], "matmul_gflops": probe["measured"] * 1000}


def _of_all(sweep: dict[str, Any]) -> bool:
    return (sweep.get("collective"), sweep.get("scope")) == ("all_reduce", "all")


def _largest(sweeps: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Bus bandwidth of the largest message of the newest sweep."""
    rows = [row for row in (sweeps[-1].get("rows") or () if sweeps else ()) if row.get("busbw") is not None]
    row = max(rows, key=lambda row: row["bytes"], default=None)
    return row and {"megabytes": row["bytes"] / 1e6, "gigabytes_per_second": row["busbw"]}


def _floor(sku: dict[str, Any]) -> Any:
    """What the all-reduce of all machines must reach, at the largest message that has a limit."""
    limits = [one for one in sku.get("collectives") or () if _of_all(one) and one.get("fail")]
    return max(limits, key=lambda one: one["bytes"])["fail"] if limits else None

"""How the rehearsals of a home ended, by the `report.json` of each: for `headway status` and the audit of the estate.

What is in it is written by deployments/rehearsal/run.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tasks.common.process import read_json


def last_rehearsal(home: Path) -> dict[str, Any] | None:
    """How the newest `headway rehearse` ended; None when there was none that came to its end."""
    for path in sorted(home.glob("rehearsals/*/report.json"), reverse=True):
        if report := read_json(path):
            verdicts = [result["verdict"] for result in report["results"]]
            counts = {
                verdict.replace(" ", "_"): verdicts.count(verdict) for verdict in ("passed", "failed", "not tried")
            }
            broken = [check["name"] for check in report["invariants"] if not check["passed"]]
            return {"began": report["began"], **counts, "broken": broken, "report": str(path.with_name("report.html"))}
    return None

"""Memory of a GPU, predicted against published: each case of planning_memory.yaml, median and worst error.

    python -m benchmarks.planning_memory [--worst N]

Throughput is planning.py. A row that is marked (*) is further off than 10 %, and the file says why; the median is over all rows.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from tasks.hardware.machines import machine_of_gpu
from tasks.planning.case import Network
from tasks.planning.memory import judged, memory, memory_of_stage
from tasks.planning.prediction import GIB, Divided, Division, Memory

CASES = Path(__file__).with_suffix(".yaml")


@dataclass(frozen=True)
class Row:
    """A case with what was said and what was seen, in GiB."""

    name: str
    engine: str
    published: float
    predicted: float
    fit: str
    explained: str

    @property
    def error(self) -> float:
        """Share by which the prediction is over what was published."""
        return self.predicted / self.published - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worst", type=int, default=0, help="print only so many rows, the worst ones")
    many = parser.parse_args().worst
    rows = [compared(case) for case in yaml.safe_load(CASES.read_text())["cases"]]
    shown = sorted(rows, key=lambda row: -abs(row.error))[:many] if many else rows
    print(f"{'case':44} {'published':>9} {'predicted':>9} {'error':>7}  judged")
    for row in shown:
        mark = " *" if row.explained else ""
        print(f"{row.name:44} {row.published:9.2f} {row.predicted:9.2f} {row.error:+7.1%}  {row.fit}{mark}")
    print_errors(rows)
    for row in rows:
        if row.explained:
            print(f"* {row.name}: {row.explained}")


def compared(case: dict[str, Any]) -> Row:
    """One case of the file. Cards of 96 GB are judged as the GPU that is named."""
    machine = machine_of_gpu(case["gpu"])
    taken = predicted(case, machine=machine)
    return Row(
        name=case["name"],
        engine=case["engine"],
        published=case["gib"],
        predicted=taken.total / GIB,
        fit=judged(taken, machine),
        explained=case.get("expected", ""),
    )


def predicted(case: dict[str, Any], *, machine: Any) -> Memory:
    """Of the stage whose GPU was read, or of the fullest."""
    network = Network.model_validate(case["network"])
    division = Division(
        **case["parallel"],
        micro=case["batch"]["micro"],
        recompute=case["recompute"],
        precision=case["precision"],
        engine=case["engine"],
    )
    of = Divided(network, division, case["sequence"], case["batch"]["global"], case.get("flash_attention", True))
    return memory_of_stage(of, machine, stage=case["stage"]) if "stage" in case else memory(of, machine)


def print_errors(rows: list[Row]) -> None:
    """Median, worst and share within 10 %: over all, without the explained ones, by engine."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups["all"].append(row)
        groups[row.engine].append(row)
        if not row.explained:
            groups["all but (*)"].append(row)
    print(f"\n{'rows':14} {'n':>4} {'median':>8} {'bias':>8} {'worst':>8} {'within 10 %':>12}")
    for name, found in groups.items():
        errors = [abs(row.error) for row in found]
        bias = median(row.error for row in found)
        within = sum(error <= 0.1 for error in errors) / len(errors)
        print(f"{name:14} {len(found):4} {median(errors):8.1%} {bias:+8.1%} {max(errors):8.1%} {within:12.0%}")


if __name__ == "__main__":
    main()

"""Units encoded on several processes of one machine; how they live and die is tasks/data/corpus/pool.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from tasks.data.corpus.inputs import Unit
from tasks.data.corpus.pool import on_processes
from tasks.data.tokenizing.engine import Engine
from tasks.data.tokenizing.units import Work, encode_unit, read_receipt


def encode_parallel(
    units: Sequence[Unit],
    work: Work,
    parts: Path,
    *,
    engine: Engine,
    workers: int,
    report: Callable[[int], None] = lambda read: None,
) -> int:
    """Encode what has no receipt yet on `workers` processes; returns how many units were there already.

    `report` hears the bytes that were read, in this process. Raises what a worker raised, after all of them are gone.
    """
    parts.mkdir(parents=True, exist_ok=True)
    receipts = [read_receipt(unit, work, parts) for unit in units]
    left = [unit for unit, receipt in zip(units, receipts, strict=True) if not receipt]
    already = sum(receipt.bytes_read for receipt in receipts if receipt)

    def do(unit: Unit, report: Callable[[int], None]) -> None:
        encode_unit(unit, work, parts, engine=engine, report=report)

    on_processes(left, do, workers=workers, already=already, report=report)
    return len(units) - len(left)

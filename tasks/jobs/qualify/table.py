"""The output table of nccl-tests, for the rank's log: who knows it reads ours. Reading such tables is tasks/formats' part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tasks.common.names import Collective
from tasks.jobs.qualify.operations import DIVIDED, ELEMENT_BYTES, REDUCED
from tasks.qualification.measured import Row

COLUMNS = "#{:>12}  {:>12}  {:>8}  {:>6}  {:>6}  {:>8}  {:>6}  {:>6}  {:>6}  {:>8}  {:>6}  {:>6}  {:>6}"


def begun(collective: Collective, *, tool: str, nodes: Sequence[str], ranks: int) -> str:
    """What stands above the rows."""
    places = "#{:>72}  {:>32}".format("out-of-place", "in-place")
    names = ("size", "count", "type", "redop", "root", *("time", "algbw", "busbw", "#wrong") * 2)
    units = ("(B)", "(elements)", "", "", "", *("(us)", "(GB/s)", "(GB/s)", "") * 2)
    return "\n".join(
        (
            f"# Collective test starting: {collective}_perf",
            f"# {tool}, {ranks} ranks on {', '.join(nodes)}",
            "#",
            places,
            COLUMNS.format(*names),
            COLUMNS.format(*units),
        )
    )


def line(collective: Collective, row: Row, ranks: int) -> str:
    """One size."""
    count = row.bytes // ELEMENT_BYTES // (ranks if collective in DIVIDED else 1)
    redop, root = "sum" if collective in REDUCED else "none", "0" if collective == "broadcast" else "-1"
    out = _cells(row.microseconds, row.algbw, row.busbw, row.wrong)
    here = _cells(row.microseconds_in_place, row.algbw_in_place, row.busbw_in_place, row.wrong_in_place)
    return COLUMNS.replace("#{:>12}", "{:>13}").format(row.bytes, count, "float", redop, root, *out, *here)


def ended(collective: Collective, rows: Sequence[Row]) -> str:
    """What stands below them."""
    wrong = sum(number for row in rows for number in (row.wrong, row.wrong_in_place) if number)
    rates = [rate for row in rows for rate in (row.busbw, row.busbw_in_place) if rate is not None]
    average = sum(rates) / len(rates) if rates else 0.0
    return "\n".join(
        (
            f"# Out of bounds values : {wrong} {'FAILED' if wrong else 'OK'}",
            f"# Avg bus bandwidth    : {average:g}",
            "#",
            f"# Collective test concluded: {collective}_perf",
        )
    )


def _cells(microseconds: float | None, algbw: float | None, busbw: float | None, wrong: int | None) -> Iterator[str]:
    yield from ("N/A" if value is None else f"{value:.2f}" for value in (microseconds, algbw, busbw))
    yield "N/A" if wrong is None else str(wrong)

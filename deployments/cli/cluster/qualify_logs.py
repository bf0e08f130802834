"""`headway qualify --from`: the verdict on a cluster that Headway cannot reach, by logs that are there. Nothing is run or kept.

What is read and how it is judged: tasks/qualification/from_logs.py; docs/qualification.md.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deployments.cli.output import CommandError, say

if TYPE_CHECKING:
    from tasks.qualification.from_logs import JudgedLog, LogsVerdict
    from tasks.qualification.verdicts import Reason

GOOD = ("healthy", "degraded")
REMEDY = (
    "Bring the logs that are missing, repair or leave out the machines that are named, or measure: `headway qualify`."
)
SHOWN = 12
"""Most reasons of one machine or log that are shown to people."""


def judge_logs(paths: list[Path], *, sku: str, as_json: bool) -> None:
    """Judge logs, files or folders of them. Raises GateFailed in a CommandError for failed and unknown (exit code 3)."""
    from tasks.common.errors import GateFailed
    from tasks.common.home import home
    from tasks.common.redaction import redact, redact_value
    from tasks.config.qualification import BenchmarkConfig
    from tasks.hardware.files import find_sku, read_sku
    from tasks.qualification import from_logs
    from tasks.qualification.log_files import read_logs

    own = home() / "hardware"
    hardware = read_sku(find_sku(sku, own), own)
    now = datetime.datetime.now(datetime.UTC)
    result = from_logs.judge_logs(read_logs(paths), hardware, BenchmarkConfig(), now=now)
    fields, words = redact_value(_fields(result)), redact("\n".join(_page(result)))
    if result.verdict in GOOD:
        say(fields, words, as_json=as_json)
        return
    if not as_json:
        print(words)
    checks = redact_value([_check(reason) for reason in _all(result) if reason.verdict not in GOOD])
    message = f"the logs show no sound cluster: its verdict is {result.verdict}" + _first(result)
    raise CommandError(GateFailed(redact(message), stage="qualify", checks=checks, remedy=REMEDY), fields)


def _fields(result: LogsVerdict) -> dict[str, Any]:
    return {
        "verdict": result.verdict,
        "sku": result.sku,
        "expires": result.expires.isoformat(timespec="seconds"),
        "nodes": [
            {"name": node.name, "verdict": node.verdict, "reasons": [_reason(reason) for reason in node.reasons]}
            for node in result.nodes
        ],
        "pairs": [pair.model_dump(include={"a", "b", "busbw_gb_s", "verdict"}) for pair in result.pairs],
        "reasons": [_reason(reason) | {"said": reason.said} for reason in result.reasons],
        "logs": [_log(judged) for judged in result.logs],
    }


def _reason(reason: Reason) -> dict[str, Any]:
    measured = reason.measured if reason.measured is not None else reason.said or None
    return {
        "check": f"{reason.check} {reason.where}".strip() if reason.check == "aznhc" else reason.check,
        "measured": measured,
        "unit": reason.unit,
        "limit": reason.limit,
        "source": reason.source,
    }


def _log(judged: JudgedLog) -> dict[str, Any]:
    from tasks.qualification.nccl_findings import rows_of

    log, run = judged.log, judged.log.nccl
    names = ("bytes", "algbw", "busbw", "wrong", "algbw_in_place", "busbw_in_place", "wrong_in_place")
    return {
        "path": log.path,
        "tool": log.tool or None,
        "collective": (run.collective or None) if run else None,
        "ranks": run.world if run else log.training.world if log.training else None,
        "verdict": judged.verdict,
        "rows": [{name: getattr(row, name) for name in names} for row in (rows_of(run) if run else ())],
        "average_printed": run.average_printed if run else None,
        "average_recomputed": run.average if run else None,
    }


def _all(result: LogsVerdict) -> list[Reason]:
    return [*(reason for node in result.nodes for reason in node.reasons), *result.reasons]


def _check(reason: Reason) -> dict[str, Any]:
    name = " ".join(part for part in (reason.node, reason.check, reason.where) if part)
    return {
        "name": name,
        "measured": reason.measured if reason.measured is not None else reason.said,
        "limit": reason.limit,
    }


def _first(result: LogsVerdict) -> str:
    """The worst reason, in a sentence."""
    worst = next((reason for reason in _all(result) if reason.verdict == result.verdict), None)
    return f". {worst.sentence}" if worst else ""


def _page(result: LogsVerdict) -> Iterator[str]:
    """For people: the verdict, machines, pairs, logs."""
    counts = f"{len(result.nodes)} machines in {len(result.logs)} logs"
    yield f"{result.verdict}: {counts}, judged as {result.sku}; until {result.expires:%Y-%m-%d %H:%M} UTC"
    yield from _table("machines", [[node.name, node.verdict] for node in result.nodes])
    yield from _table(
        "pairs", [[f"{pair.a} - {pair.b}", pair.verdict, _figure(pair.busbw_gb_s)] for pair in result.pairs]
    )
    yield from _table("logs", [_line(judged) for judged in result.logs])
    unjudged = [reason for judged in result.logs if judged.soft for reason in judged.reasons]
    sentences = list(dict.fromkeys(_sentence(reason) for reason in (*_all(result), *unjudged)))
    if sentences:
        yield from ("", "why", *(f"  {sentence}" for sentence in sentences[: SHOWN * max(len(result.nodes), 1)]))


def _line(judged: JudgedLog) -> list[str]:
    run = judged.log.nccl
    largest = max(run.rows, key=lambda row: row.bytes, default=None) if run else None
    return [
        judged.log.path,
        judged.verdict,
        judged.log.tool or "not read",
        (run.collective if run else "") or "-",
        f"{run.world} ranks" if run and run.world else "-",
        f"{_figure(largest.out.busbw)} at {largest.bytes}" if largest else "-",
        f"mean {_figure(run.average)}, printed {_figure(run.average_printed)}" if run and run.rows else "-",
    ]


def _table(title: str, rows: list[list[str]]) -> Iterator[str]:
    if not rows:
        return
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    yield from ("", title)
    for row in rows:
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} GB/s"


def _sentence(reason: Reason) -> str:
    text = f"; {reason.said}" if reason.said and reason.measured is not None else ""
    return reason.sentence + text

"""`headway watch`: what an endpoint answered lately, against what is usual. See docs/watch.md.

The same look is the flow watch, and a duty of the platform's own watch: what one of them said, the others know.
"""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from deployments.cli.operations.users import As, asked
from deployments.cli.options import Json
from deployments.cli.output import aligned, say, short_number, short_ref
from tasks.common.home import home

MARKS = {"anomaly": "ANOMALY", "none": "ok", "insufficient": "-"}
SHOWN = ("requests", "length", "latency", "entropy", "repetition", "characters", "errors", "labels", "accuracy")
"""Of a window, for people; --json has all."""


def watch(
    endpoint: Annotated[str, typer.Argument(help="The name of the endpoint.")],
    window: Annotated[int, typer.Option(min=1, help="Requests per row of the series.")] = 200,
    windows: Annotated[int, typer.Option(min=1, max=1000, help="Number of rows of the series, the newest ones.")] = 12,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show anomalies, but send no event and complete no window.")
    ] = False,
    as_: As = "",
    as_json: Json = False,
) -> None:
    """Check an endpoint's answers since the last check; an anomaly becomes an event, with the evidence in a file.

    Answers are compared with earlier ones, or with the model's answers at its export. An anomaly is reported when two windows in
    a row stand out; too many failures, and a loss of accuracy, are reported at once.
    """
    from tasks.serving.known import require_known
    from tasks.serving.monitor.watch import brief, history, look

    name = require_known(home(), endpoint)
    with asked("run", as_, what=f"watch endpoint/{name}"):
        seen = next(iter(look(home(), time.time(), only=(name,), dry=dry_run)), None)
    rows = history(home(), name, requests=window, windows=windows)
    columns = (seen.told or {}).get("columns", []) if seen else []
    fields = {**brief(name, seen), "dry_run": dry_run, "columns": columns, "windows": rows}
    say(fields, "\n".join(_words(fields)), as_json=as_json)


def _words(payload: dict[str, Any]) -> list[str]:
    lines = [f"endpoint/{payload['endpoint']}: {payload['verdict']}"]
    if "model" in payload:
        against = "the model's own reference" if payload["against"] == "model" else "what was answered before"
        lines.append(
            f"{short_ref(payload['model'])}: {payload['requests']} requests and {payload['labels']} labels since the last "
            f"window, against {payload['reference_requests']} ({against})"
        )
    if payload["said"]:
        lines.append(f"Said: {', '.join(payload['said'])}. Evidence: {payload['evidence']}")
    if payload["standing"]:
        lines.append(f"Stands: {', '.join(payload['standing'])}")
    if payload["columns"]:
        rows = [("measure", "verdict", "before", "now", "p", "what moved")]
        for column in payload["columns"]:
            before, now, p = (short_number(column[key]) for key in ("reference", "new", "p_value"))
            rows.append((column["name"], MARKS[column["verdict"]], before, now, p, ", ".join(column["moved"])))
        lines += ["", *aligned(rows)]
    if payload["windows"]:
        times = [time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(row["begins"])) for row in payload["windows"]]
        cells = [[short_number(row[key]) for key in SHOWN] for row in payload["windows"]]
        figures = ([at, *row] for at, row in zip(times, cells, strict=True))
        lines += ["", *aligned([("since (UTC)", *SHOWN), *figures])]
    return lines

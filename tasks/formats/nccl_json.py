"""The JSON that nccl-tests write with -J: the same run as its text has, and the machine's environment without its secrets.

Pure. The form is NVIDIA/nccl-tests @a0b82b2, src/util.cu, JSON_FILE_VERSION 3. Booleans and not-a-number are strings there, a
run that was killed leaves the object open. Nothing is raised: what is missing or of another form is said in `unread`.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

from tasks.common.redaction import MARK, redact, without_secrets
from tasks.formats.nccl_run import Figures, NcclRun, Rank, TestRow, collective_by_figures, collective_of, finite

_INFINITE = re.compile(r"(?<=[:\[,])\s*-?(?:inf|nan)(?=[,}\]])")


def read_nccl_json(text: str, name: str = "") -> NcclRun | None:
    """The run of a file of -J; None when it is none. What a killed run left open is closed."""
    output, problems = _parsed(text)
    if not isinstance(output, dict) or not {"results", "config", "nccl_version"} & set(output):
        return None
    config, results = _dict(output.get("config")), _list(output.get("results"))
    rows = [_row(_dict(result)) for result in results]
    unread = [*problems, *(f"result {n} has no size" for n, row in enumerate(rows) if row is None)]
    run = NcclRun(
        tool="nccl-tests",
        library=_version(output.get("nccl_version")),
        collective=_collective(output, name),
        ranks=tuple(_rank(_dict(device)) for device in _list(config.get("devices"))),
        rows=tuple(row for row in rows if row),
        header="results" in output,
        out_of_bounds=_integer(_dict(output.get("out_of_bounds")).get("count")),
        average_printed=finite(_dict(output.get("average_bus_bandwidth")).get("bandwidth")),
        average_accepted={"true": True, "false": False}.get(
            str(_dict(output.get("average_bus_bandwidth")).get("okay")).lower()
        ),
        validated=None if "validation" not in config else bool(_integer(config.get("validation"))),
        failures=tuple(redact(str(error))[:300] for error in _list(output.get("errors")) if error),
        unread=tuple(unread),
        environment=environment_of(_list(output.get("env"))),
    )
    return replace(run, collective=run.collective or collective_by_figures(run))


def environment_of(entries: list[Any]) -> dict[str, str]:
    """NAME=VALUE as a dict; a value that is a secret, by its name or its form, is a mark."""
    split = (str(entry).partition("=") for entry in entries)
    output = {name: value for name, _, value in split}
    safe = without_secrets(output)
    return {name: redact(value) if name in safe else MARK for name, value in output.items()}


def _parsed(text: str) -> tuple[Any, list[str]]:
    """The value, and that it was cut off where it was."""
    text = _INFINITE.sub('"nan"', text.strip())
    try:
        return json.loads(text), []
    except (ValueError, RecursionError):
        pass
    return _closed(text), ["the file ends in the middle: the run did not finish"]


def _closed(text: str) -> Any:
    """The longest beginning that is a value once its brackets are closed; None when there is none."""
    open_brackets, ends = "", []
    quoted = escaped = False
    for place, sign in enumerate(text):
        if quoted:
            quoted, escaped = escaped or sign != '"', sign == "\\" and not escaped
        elif sign == '"':
            quoted = True
        elif sign in "{[":
            open_brackets += "}" if sign == "{" else "]"
        elif sign in "}]":
            if not open_brackets.endswith(sign):
                return None
            open_brackets = open_brackets[:-1]
            ends.append((place + 1, open_brackets))
    for place, still in reversed(ends[-4:]):
        try:
            return json.loads(text[:place] + still[::-1])
        except (ValueError, RecursionError):
            continue
    return None


def _collective(output: dict[str, Any], name: str) -> str:
    args = _list(output.get("args"))
    return (collective_of(str(args[0])) if args else "") or collective_of(name)


def _rank(device: dict[str, Any]) -> Rank:
    return Rank(
        _integer(device.get("rank")) or 0,
        str(device.get("hostname") or ""),
        _integer(device.get("group")) or 0,
        _integer(device.get("device")) or 0,
        str(device.get("device_info") or ""),
    )


def _row(result: dict[str, Any]) -> TestRow | None:
    size = _integer(result.get("size"))
    if size is None:
        return None
    return TestRow(
        bytes=size,
        type=str(result.get("type") or ""),
        redop=str(result.get("redop") or ""),
        root=_integer(result.get("root")),
        out=_figures(_dict(result.get("out_of_place"))),
        in_place=_figures(_dict(result.get("in_place"))),
    )


def _figures(output: dict[str, Any]) -> Figures:
    time = output.get("time", output.get("cpu_time"))
    time, algbw, busbw = (
        None if value is None or value < 0 else value
        for value in (finite(time), finite(output.get("alg_bw")), finite(output.get("bus_bw")))
    )
    return Figures(time, algbw, busbw, _integer(output.get("nwrong")))


def _version(code: Any) -> str:
    """23003 is 2.30.3; before 2.9 it was four digits: 2804 is 2.8.4."""
    number = _integer(code)
    if not number:
        return ""
    major, minor, patch = (
        (number // 10000, number // 100 % 100, number % 100)
        if number >= 10000
        else (number // 1000, number // 100 % 10, number % 100)
    )
    return f"{major}.{minor}.{patch}"


def _integer(value: Any) -> int | None:
    number = finite(value)
    return None if number is None else int(number)


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []

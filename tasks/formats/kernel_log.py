"""Log files of a machine as if `dmesg` had printed them: seconds since the machine's start, and the message.

Pure. syslog and messages have the time of day, in one of two forms; what is older than the machine's start is left out.
"""

from __future__ import annotations

import datetime
import re

BSD = re.compile(r"^([A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d) \S+ (.*)")
ISO = re.compile(r"^(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d:?\d\d)) \S+ (.*)")
KERNEL = re.compile(r"^kernel: (?:\[\s*\d+\.\d+\]\s*)?")


def as_dmesg(text: str, *, now: float, uptime: float) -> str:
    """Lines of a log file in the form of `dmesg`. `now` is the time of day in seconds, `uptime` since the machine's start."""
    lines = []
    for line in text.splitlines():
        match = ISO.match(line) or BSD.match(line)
        if match and (at := _seconds(match[1], now)) is not None:
            since_start = at - (now - uptime)
            if since_start > 0:
                lines.append(f"[{since_start:12.6f}] {KERNEL.sub('', match[2])}")
    return "\n".join(lines)


def _seconds(stamp: str, now: float) -> float | None:
    if stamp[:1].isdigit():
        return datetime.datetime.fromisoformat(stamp).timestamp()
    year = datetime.datetime.fromtimestamp(now).year
    nearest = [at for y in (year, year - 1) if (at := _bsd(stamp, y)) is not None]
    return min(nearest, key=lambda at: abs(at - now), default=None)


def _bsd(stamp: str, year: int) -> float | None:
    try:
        return datetime.datetime.strptime(f"{year} {stamp}", "%Y %b %d %H:%M:%S").timestamp()
    except ValueError:  # 29 February
        return None

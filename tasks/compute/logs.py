"""The logs of a job, as its folder has them: the failing rank first."""

from __future__ import annotations

from pathlib import Path


def tail_of_failure(folder: Path, lines: int = 20) -> str:
    """The end of the log of the rank that reported first, else the launcher's; a rank that a signal killed reports nothing."""
    reports = sorted((folder / "errors").glob("rank-*.json"), key=lambda path: path.stat().st_mtime)
    failing = [folder / "logs" / f"{report.stem}.log" for report in reports[:1]]
    tails = (_tail(path, lines) for path in (*failing, folder / "launcher.log", folder / "logs" / "rank-0.log"))
    return next(filter(None, tails), "")


def _tail(path: Path, lines: int) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) if path.is_file() else ""

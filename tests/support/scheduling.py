"""Which worker of pytest-xdist runs what: a file is one worker's; the files that need the finished lifecycle share one worker.

So that lifecycle, of half a minute, is made once. (Groups by mark: xdist 3.8 changes ids, which pytest 9.2 does not heed.)
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from xdist.scheduler import LoadFileScheduling

ROOT = Path(__file__).parents[2]
NEEDS = re.compile(r"^def \w+\((?:home, |alone, )?done\b", re.MULTILINE)


class ByFile(LoadFileScheduling):
    """xdist's own scheduling by file, with one more rule."""

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid.partition("::")[0])


@cache
def scope_of(file: str) -> str:
    """The file itself, or `done` for the files whose tests share the lifecycle."""
    path = ROOT / file
    needed = path.exists() and NEEDS.search(path.read_text(encoding="utf-8"))
    return "done" if needed else file

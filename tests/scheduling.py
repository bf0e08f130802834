"""Which worker of pytest-xdist runs what: a file is one worker's, and files that need the finished lifecycle are all one's.

So that lifecycle, of a minute and more, is made once. (Groups by mark: xdist 3.8 changes ids, which pytest 9.2 does not heed.)
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from xdist.scheduler import LoadFileScheduling

ROOT = Path(__file__).parents[1]
NEEDS = re.compile(r"^def \w+\([^)]*\bdone\b", re.MULTILINE)


class ByFile(LoadFileScheduling):
    """xdist's own scheduling by file, with one more rule."""

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid.partition("::")[0])


@cache
def scope_of(file: str) -> str:
    """The file itself, or the lifecycle that its tests share."""
    return "done" if NEEDS.search((ROOT / file).read_text(encoding="utf-8")) else file

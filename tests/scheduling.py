"""Which worker of pytest-xdist runs what: a file is one worker's, and files that need the finished lifecycle are two workers'.

So that lifecycle, of half a minute and more, is made twice, and half of those tests run beside the others. (Groups by mark: xdist
3.8 changes ids, which pytest 9.2 does not heed.)
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from xdist.scheduler import LoadFileScheduling

ROOT = Path(__file__).parents[1]
NEEDS = re.compile(r"^def \w+\((?:home, |alone, )?done\b", re.MULTILINE)
APART = ("deployments/", "flows/test_approval.py", "flows/test_retrain.py")


class ByFile(LoadFileScheduling):
    """xdist's own scheduling by file, with one more rule."""

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid.partition("::")[0])


@cache
def scope_of(file: str) -> str:
    """The file itself, or the lifecycle that its tests share."""
    path = ROOT / file
    if not path.exists() or not NEEDS.search(path.read_text(encoding="utf-8")):
        return file
    return "done, apart" if file.removeprefix("tests/").startswith(APART) else "done"

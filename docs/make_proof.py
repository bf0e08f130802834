"""Writes docs/proof/index.md out of docs/proof/figures.yaml: `python docs/make_proof.py`. A test compares the two.

`--dates` first asks git for the commit that wrote each figure, and keeps its date in the file.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

DOCS = Path(__file__).parent
FIGURES, PAGE = DOCS / "proof" / "figures.yaml", DOCS / "proof" / "index.md"
MISSING = "not recorded"
HEAD = """\
# What was measured

<!-- Written by `python docs/make_proof.py` out of docs/proof/figures.yaml. -->

Every figure that the README states, and the main ones of the other pages: on which machine, when, and by which command. What
nobody wrote down is *not recorded*. *Written* is the date of the commit that wrote the figure into its page, not of the
measurement. Nothing here was measured on a GPU or in Azure: [what is proven where](../../README.md#what-is-proven-where).

How often each judgement is right, by simulations with known truth: [verdicts](verdicts.md), and of [machines](machines.md).
What may fail on the first day on Azure, and the test of each: [day one](azure_day_one.md). `make gpu` and `make azure` would
write pages of their own beside this one; neither was run yet on what they are for.
"""


def figures() -> list[dict[str, Any]]:
    return yaml.safe_load(FIGURES.read_text(encoding="utf-8"))


def render() -> str:
    """The whole page."""
    lines = [HEAD]
    for one in figures():
        path, _, anchor = one["page"].partition("#")
        link = path.removeprefix("proof/") if path.startswith("proof/") else f"../{path}"
        cells = (
            f"`{one['command']}`",
            *(one.get(key, MISSING) for key in ("machine", "written")),
            f"[{path}]({link}#{anchor})",
        )
        lines += [
            f"## {one['name']}\n",
            f"{one['shown'][0].upper()}{one['shown'][1:]}.\n",
            "| command | machine | written | in full |",
            "| --- | --- | --- | --- |",
            f"| {' | '.join(map(str, cells))} |\n",
        ]
    return "\n".join(lines)


def add_dates() -> None:
    """Of each figure the first commit whose page had its text, wherever the page lies today."""
    text = FIGURES.read_text(encoding="utf-8")
    for one in figures():
        words = ["git", "log", "--reverse", "--format=%ad", "--date=short", f"-S{one['text']}", "--", "docs"]
        dates = subprocess.run(words, cwd=DOCS.parent, check=True, capture_output=True, text=True).stdout.split()
        if dates and "written" not in one:
            text = re.sub(rf"(?m)^(- name: {re.escape(one['name'])}\n)", rf"\g<1>  written: {dates[0]}\n", text)
    FIGURES.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] == ["--dates"]:
        add_dates()
    PAGE.write_text(render(), encoding="utf-8")

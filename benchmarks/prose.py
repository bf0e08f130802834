"""Looks for phrases that this project writes differently, as `make check` does: `python -m benchmarks.prose [--strings]`.

Of pages (README.md, CONTRIBUTING.md, CHANGELOG.md, docs/) it reads all but code; with `--strings`, of the product what users
see: strings of deployments/cli, of errors that are raised, and of `help=` and `remedy=`. The phrases are in prose.yaml.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
CODE = re.compile(r"^```.*?^```|`[^`]+`|\]\([^)]*\)", re.MULTILINE | re.DOTALL)
Finding = tuple[int, str, str]
"""A line number, the phrase in it, and the better words."""


@cache
def vocabulary() -> dict[re.Pattern[str], str]:
    """The phrases to avoid, as regular expressions in which a space is any white space, with the better words."""
    phrases = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return {re.compile(rf"\b(?:{old})\b".replace(" ", r"\s+"), re.IGNORECASE): new for old, new in phrases.items()}


def in_text(text: str, first_line: int = 1) -> Iterator[Finding]:
    """Find each phrase in a text of prose, across line breaks too."""
    for pattern, better in vocabulary().items():
        for match in pattern.finditer(text):
            yield first_line + text.count("\n", 0, match.start()), " ".join(match[0].split()), better


def in_page(text: str) -> Iterator[Finding]:
    """Find each phrase in a page of Markdown, outside of code and of the targets of links."""
    return in_text(CODE.sub(lambda code: re.sub(r"[^\n]", "_", code[0]), text))


def in_module(text: str, *, command: bool) -> Iterator[Finding]:
    """Find each phrase in the strings of a module that users see: of a command all, else errors, `help=` and `remedy=`."""
    tree = ast.parse(text)
    shown: list[ast.AST] = [tree] if command else [node for node in ast.walk(tree) if isinstance(node, ast.Raise)]
    shown += [node.value for node in ast.walk(tree) if isinstance(node, ast.keyword) and node.arg in ("help", "remedy")]
    strings = {
        (node.lineno, node.col_offset): node.value
        for root in shown
        for node in ast.walk(root)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    for (line, _), string in strings.items():
        yield from in_text(string, line)


def main() -> int:
    """Print every phrase with its place; returns 1 when there is one."""
    files = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    if sys.argv[1:] == ["--strings"]:
        files += [path for top in ("flows", "tasks", "deployments") for path in (ROOT / top).rglob("*.py")]
    wrong = 0
    for path in sorted(files):
        text, name = path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix()
        findings = in_page(text) if path.suffix == ".md" else in_module(text, command="deployments/cli/" in name)
        for line, phrase, better in sorted(findings):
            print(f"{name}:{line}: {phrase!r}: write {better!r}")
            wrong += 1
    print(f"{wrong} phrases to write differently in {len(files)} files")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())

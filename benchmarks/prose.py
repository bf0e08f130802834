"""Looks for phrases that this project writes differently, as `make check` does: `python -m benchmarks.prose [--strings]`.

Of pages (README.md, CONTRIBUTING.md, CHANGELOG.md, docs/) it reads all but code; with `--strings`, of the product what users
may see: strings, docstrings of commands, and the sentences of tasks/compute/failures.json. The phrases are in prose.yaml.
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
    """Find each phrase in the strings of a module, in docstrings only of a command's: `--help` shows those."""
    nodes = list(ast.walk(ast.parse(text)))
    docstrings = {node.value for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and (command or node not in docstrings):
            for line, phrase, better in in_text(node.value, node.lineno):
                yield min(line, node.end_lineno or line), phrase, better  # a line break may be written as \n


def in_failures(text: str) -> Iterator[Finding]:
    """Find each phrase in the sentences and remedies of failures.json; its patterns are of other programs' words."""
    for number, line in enumerate(text.splitlines(), 1):
        if shown := re.search(r'"(?:sentence|remedy)": "(.*?[^\\])"', line):
            yield from in_text(shown[1], number)


def main() -> int:
    """Print every phrase with its place; returns 1 when there is one."""
    files = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    if sys.argv[1:] == ["--strings"]:
        files += [path for top in ("flows", "tasks", "deployments") for path in (ROOT / top).rglob("*.py")]
        files.append(ROOT / "tasks" / "compute" / "failures.json")
    wrong = 0
    for path in sorted(files):
        text, name = path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix()
        if path.suffix == ".py":
            findings = in_module(text, command="deployments/cli/" in name)
        else:
            findings = in_page(text) if path.suffix == ".md" else in_failures(text)
        for line, phrase, better in sorted(findings):
            print(f"{name}:{line}: {phrase!r}: write {better!r}")
            wrong += 1
    print(f"{wrong} phrases to write differently in {len(files)} files")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())

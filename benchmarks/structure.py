"""Measures the shape of the code, as `make check` prints it: `python -m benchmarks.structure`; `--largest` names the worst.

A code line has code in it: blank lines, comments and docstrings do not count. A helper with one caller is a function or method
whose name begins with one underscore and is read exactly once in its file. A circle is a set of files that import each other at
the top of their modules, directly or through others. A row whose goal was reached once (`REACHED`) must not lose it again.
"""

from __future__ import annotations

import argparse
import ast
import io
import statistics
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PRODUCT = ("flows", "tasks", "deployments")
DEFS = (ast.FunctionDef, ast.AsyncFunctionDef)
QUIET = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


EMPTY_NAMES = ("said", "told", "found", "here", "there")
"""A search for them finds everything, and they tell a reader nothing."""


def _name_given(node: ast.AST) -> str:
    """The name that a node gives to a value: of a variable or a parameter; empty for any other node."""
    if isinstance(node, ast.arg):
        return node.arg
    return node.id if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else ""


@dataclass(frozen=True)
class Module:
    """One file of the product."""

    name: str
    path: Path
    text: str
    tree: ast.Module

    @property
    def docstrings(self) -> set[int]:
        """Lines of strings that stand alone: docstrings of modules, classes, functions and attributes."""
        alone = (
            node for node in ast.walk(self.tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        )
        return {
            line
            for node in alone
            if isinstance(node.value.value, str)
            for line in range(node.lineno, node.end_lineno + 1)
        }

    @property
    def code_lines(self) -> int:
        """Lines with code in them."""
        lines: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type not in QUIET:
                lines.update(range(token.start[0], token.end[0] + 1))
        return len(lines - self.docstrings)

    @property
    def comments(self) -> int:
        """Comments, those for tools (`noqa`, `type:`) aside."""
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        said = [token.string for token in tokens if token.type == tokenize.COMMENT]
        return sum(not text.startswith(("# noqa", "# type:", "#!")) for text in said)

    @property
    def functions(self) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
        """All functions and methods."""
        return [node for node in ast.walk(self.tree) if isinstance(node, DEFS)]

    @property
    def single_caller_helpers(self) -> list[str]:
        """Names of private functions that are read once in this file."""
        read = Counter(node.id for node in ast.walk(self.tree) if isinstance(node, ast.Name))
        read += Counter(node.attr for node in ast.walk(self.tree) if isinstance(node, ast.Attribute))
        names = [function.name for function in self.functions]
        return [name for name in names if name.startswith("_") and not name.startswith("__") and read[name] == 1]

    @property
    def empty_names(self) -> list[str]:
        """Variables and parameters whose name tells nothing, as `name:line`. Fields are not meant: JSON has their names."""
        named = [(name, node) for node in ast.walk(self.tree) if (name := _name_given(node)) in EMPTY_NAMES]
        if not named:
            return []
        fields = {
            id(name)
            for node in ast.walk(self.tree)
            if isinstance(node, ast.ClassDef)
            for statement in node.body
            if isinstance(statement, ast.Assign | ast.AnnAssign)
            for name in ast.walk(statement)
        }
        return [f"{name}:{node.lineno}" for name, node in named if id(node) not in fields]

    def imports(self, known: set[str], *, top: bool) -> Iterator[str]:
        """Modules of the product that this one imports; at its top only, or anywhere."""
        for node in self.tree.body if top else ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    full = f"{node.module}.{alias.name}"
                    yield from {full if full in known else node.module} & known
            elif isinstance(node, ast.Import):
                yield from {alias.name for alias in node.names} & known


@cache
def product() -> dict[str, Module]:
    """Every file of the product by the name of its module."""
    modules = {}
    for path in sorted(path for top in PRODUCT for path in (ROOT / top).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        text = path.read_text(encoding="utf-8")
        modules[name] = Module(name, path.relative_to(ROOT), text, ast.parse(text))
    return modules


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Strongly connected components of more than one module (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in graph[node]:
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            group = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(group) > 1:
                found.append(sorted(group))

    for node in graph:
        if node not in index:
            visit(node)
    return found


REACHED = (
    "lines of the longest file",
    "siblings under tasks/",
    "files in the fullest folder",
    "circles of files",
    "lines of the longest function",
    "values called said, told, found, here, there",
)
"""Rows whose goal is reached: `make check` fails when one is lost again."""


def siblings() -> list[str]:
    """What lies directly under tasks/: the stages and the folders of subjects."""
    hidden = ("__init__.py", "__pycache__")
    return sorted(
        path.name for path in (ROOT / "tasks").iterdir() if path.name not in hidden and not path.name.startswith(".")
    )


def main(*, largest: bool) -> int:
    """Print the table, and with `largest` the worst of each row; 1 when what was reached once is lost again, else 0."""
    modules = product()
    known = set(modules)
    functions = [(function, module) for module in modules.values() for function in module.functions]
    lengths = {(module.name, f.name): f.end_lineno - f.lineno + 1 for f, module in functions}
    helpers = {module.name: module.single_caller_helpers for module in modules.values()}
    files = {module.path: len(module.text.splitlines()) for module in modules.values()}
    folders: defaultdict[Path, int] = defaultdict(int)
    for path in files:
        folders[path.parent] += path.name != "__init__.py"
    rings = circles({name: set(module.imports(known, top=True)) - {name} for name, module in modules.items()})
    anywhere, above = (
        sum(len([*module.imports(known, top=top)]) for module in modules.values()) for top in (False, True)
    )
    rows = {
        "product files": (len(files), 480),
        "lines of the longest file": (max(files.values()), 600),
        "code lines": (sum(module.code_lines for module in modules.values()), 62_000),
        "siblings under tasks/": (len(siblings()), 32),
        "files in the fullest folder": (max(folders.values()), 20),
        "private helpers with one caller, % of functions": (
            100 * sum(map(len, helpers.values())) // len(functions),
            15,
        ),
        "circles of files": (len(rings), 0),
        "lines of the longest function": (max(lengths.values()), 90),
        "lines of the median function": (statistics.median(lengths.values()), None),
        "imports of ours inside functions": (anywhere - above, None),
        "values called said, told, found, here, there": (
            sum(len(module.empty_names) for module in modules.values()),
            0,
        ),
        "comments": (sum(module.comments for module in modules.values()), None),
    }
    print(f"{'':<50}{'now':>8}{'goal':>8}")
    for name, (now, goal) in rows.items():
        print(f"{name:<50}{now:>8g}{goal if goal is not None else '':>8}")
    lost = [name for name in REACHED if rows[name][0] > (rows[name][1] or 0)]
    for name in lost:
        print(f"{name}: over its goal, which was reached before; `python -m benchmarks.structure --largest` names them")
    if largest:
        print("\nlongest files:", *(f"{lines} {path}" for path, lines in Counter(files).most_common(10)), sep="\n  ")
        print(
            "\nfullest folders:", *(f"{count} {path}" for path, count in Counter(folders).most_common(12)), sep="\n  "
        )
        print(
            "\nlongest functions:",
            *(f"{count} {'.'.join(name)}" for name, count in Counter(lengths).most_common(10)),
            sep="\n  ",
        )
        empty = [f"{module.path}:{name}" for module in modules.values() for name in module.empty_names]
        print("\nvalues without a name:", *empty, sep="\n  ")
        print("\ncircles:", *(" ".join(ring) for ring in rings), sep="\n  ")
        most = Counter({name: len(names) for name, names in helpers.items()}).most_common(20)
        print("\nmost helpers with one caller:", *(f"{count} {name}" for name, count in most), sep="\n  ")
    return int(bool(lost))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--largest", action="store_true", help="Name the worst of each row too.")
    sys.exit(main(**vars(parser.parse_args())))

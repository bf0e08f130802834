"""Draws docs/images/dataflow.svg and docs/images/packages.svg from the code: `python docs/make_architecture.py`.

The first has what each stage of a retraining makes and reads, by the types in its signature; the second who imports whom, in the
order of the layers in pyproject.toml, so that an import upward would stand below the diagonal.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections import Counter
from pathlib import Path

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks.structure import product  # noqa: E402
from tasks.config.flows import STAGES  # noqa: E402

IMAGES = Path(__file__).with_name("images")
MADE, READ, CONTEXT = "#1a5fb4", "#1a5fb4", "#9a9996"
GIVEN = "Dataset"
SUBJECTS = {"Qualification": "Cluster"}
"""Gates that are handed on as what they judge, where that has another name."""


def signatures() -> dict[str, tuple[set[str], set[str], str]]:
    """By stage: types of what its key is made of, of what only stands around it (`on=`, `under=`), and of what it returns."""
    found = {}
    for name in STAGES:
        tree = ast.parse((ROOT / "tasks" / f"{name}.py").read_text(encoding="utf-8"))
        body = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name and n.decorator_list)
        positional = {word for arg in body.args.args for word in _names(arg.annotation)}
        around = {word for arg in body.args.kwonlyargs for word in _names(arg.annotation)}
        (made,) = _names(body.returns)
        found[name] = (positional, around - positional, made)
    return found


def _names(annotation: ast.expr | None) -> set[str]:
    return set(re.findall(r"\b[A-Z]\w+\b", ast.unparse(annotation))) if annotation else set()


def dataflow() -> None:
    """A row for each artifact, a column for each stage: filled where it is made, open where it is read."""
    stages = signatures()
    rows = [GIVEN, *(made for _, _, made in stages.values())]
    figure, axes = plt.subplots(figsize=(9, 4.6))
    for y, artifact in enumerate(rows):
        names = {artifact, SUBJECTS.get(artifact, artifact)}
        made = next((x for x, (_, _, out) in enumerate(stages.values()) if out == artifact), -1)
        read = [x for x, (key, _, _) in enumerate(stages.values()) if names & key and x > made]
        around = [x for x, (_, context, _) in enumerate(stages.values()) if names & context and x > made]
        ends = [made, *read, *around]
        axes.plot([made, max(ends)], [y, y], color="#c0bfbc", linewidth=2, zorder=1)
        axes.scatter(around, [y] * len(around), s=70, facecolor="white", edgecolor=CONTEXT, linewidth=1.6, zorder=2)
        axes.scatter(read, [y] * len(read), s=90, facecolor="white", edgecolor=READ, linewidth=2.2, zorder=3)
        axes.scatter([made], [y], s=130, color=MADE if made >= 0 else "#2ec27e", zorder=3)
    _frame(axes, list(stages), rows, left=-1.4)
    axes.set_xlabel(
        "filled: made (green: published by a person or an event)   open: read, in the stage's key   grey: on=, under="
    )
    axes.xaxis.set_label_position("bottom")
    _save(figure, "dataflow.svg")


def layers() -> list[str]:
    """The packages from the top layer to the lowest; stages are one, and so is what runs on the cluster."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    outer, inner = (one["layers"] for one in contracts if "layers" in one)
    top = [name.strip().removeprefix("deployments.") for row in inner for name in row.split("|")]
    rest = [name.strip().removeprefix("tasks.") for row in outer[1:] for name in row.split("|")]
    folders = {path.parent.name for path in (ROOT / "tasks").glob("*/__init__.py")}
    below = [name for name in rest if name in folders]
    ports = below.index("compute")
    lowest = [name for name in below if name not in ("config", "common")]
    return [*top, "flows", "stages", *lowest[:ports], "jobs", *lowest[ports:], "artifacts", "config", "common"]


def package_of(module: str) -> str:
    """The row of a module: a folder of tasks/ or deployments/, or what stands for several files."""
    top, *names = module.split(".")
    if top == "flows" or not names:
        return top
    if top == "tasks" and not (ROOT / "tasks" / names[0]).is_dir():
        return "artifacts" if names[0] == "artifacts" else "stages"
    return names[0]


def packages() -> None:
    """A row for each package, and a column for each that it imports; the dot grows with the number of imports."""
    modules, order = product(), layers()
    counted: Counter[tuple[str, str]] = Counter()
    for name, module in modules.items():
        for other in module.imports(set(modules), top=False):
            counted[package_of(name), package_of(other)] += 1
    files = Counter(package_of(name) for name in modules)
    figure, axes = plt.subplots(figsize=(9, 8.4))
    for (importer, imported), count in counted.items():
        if importer in order and imported in order and importer != imported:
            x, y = order.index(imported), order.index(importer)
            axes.scatter([x], [y], s=14 + 9 * count**0.75, color=MADE if x > y else "#c01c28", alpha=0.8, linewidth=0)
    axes.plot([-0.5, len(order) - 0.5], [-0.5, len(order) - 0.5], color="#c0bfbc", linewidth=1, zorder=0)
    _frame(axes, order, [f"{name}  {files[name]}" for name in order], left=-0.6)
    axes.tick_params(axis="x", rotation=90)
    axes.set_xlabel(
        "row: who imports, with its files   column: what is imported   a dot below the diagonal would be an import upward"
    )
    axes.xaxis.set_label_position("bottom")
    _save(figure, "packages.svg")


def _frame(axes: Axes, columns: list[str], rows: list[str], *, left: float) -> None:
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)
    axes.set_xlim(left, len(columns) - 0.5)
    axes.set_ylim(len(rows) - 0.5, -0.6)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.grid(color="#eeeeec", zorder=0)
    axes.set_axisbelow(True)
    for side in axes.spines.values():
        side.set_visible(False)


def _save(figure: plt.Figure, name: str) -> None:
    figure.savefig(IMAGES / name, bbox_inches="tight", facecolor="white", metadata={"Date": None, "Creator": None})
    plt.close(figure)


if __name__ == "__main__":
    plt.rcParams.update(
        {"svg.hashsalt": "headway", "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9}
    )
    dataflow()
    packages()

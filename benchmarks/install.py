"""What each extra costs to install, and whether it is whole: the table of docs/install.md.

    python -m benchmarks.install [EXTRA ...] [--tool uv|pip] [--folder FOLDER]

Each extra is installed alone, from a wheel of this tree and with the versions of constraints.txt, into a new virtual environment:
seconds, megabytes, distributions. Then every module of its role is imported there, and whatever third-party package such a module
imports in a function. What cannot be imported is named, and the exit code is 1. An environment is deleted once it is measured.
"""

from __future__ import annotations

import argparse
import ast
import json
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PRODUCT = ("flows", "tasks", "deployments")
ROLES = {
    "": "deployments.cli.main tasks.common tasks.config tasks.storage",
    "data": "tasks.data tasks.jobs.preprocess tasks.jobs.profile tasks.jobs.divide tasks.jobs.drift",
    "orchestrator": "flows deployments tasks tasks.data.gx",
    "tracking": "tasks.lineage",
    "report": "tasks.report",
    "train": "tasks.jobs tasks.data.tokenizing.tokenizer tasks.storage.blob.ranges",
    "export": "tasks.jobs.export tasks.jobs.exporting",
    "measure": "tasks.jobs.evaluate tasks.jobs.evaluation",
    "serve": "tasks.jobs.serve tasks.jobs.serving tasks.jobs.gateway tasks.jobs.routing tasks.common.http_server",
    "azure": "tasks.azure tasks.compute.azureml tasks.serving.azureml tasks.signing.vault tasks.storage.azureml_registry"
    " tasks.storage.blob deployments.bridge.blobs deployments.bridge.queues",
    "ray": "tasks.compute.ray tasks.jobs.ray",
    "deepspeed": "tasks.jobs.training.deepspeed_engine",
}
"""Extra -> the modules and packages of its role. A module belongs to the longest name that it lies below."""
ELSEWHERE = {
    "deployments.telemetry.sinks": "azure",  # where telemetry is sent to Azure Monitor
    "tasks.storage.blob.credentials": "azure",
    "deployments.services.database": "psycopg2",  # of `tracking`, where the settings name a PostgreSQL
}
"""Module -> the package that it imports in a function, and only where an extra of another role is installed too."""
IMPORT = """
import importlib, json, sys
failed = []
for name in json.load(sys.stdin):
    try:
        importlib.import_module(name)
    except BaseException as error:
        failed.append(f"{name}: {type(error).__name__}: {error}")
sys.stdout.write("\\n" + json.dumps(failed))
"""


def modules() -> Iterator[tuple[str, Path]]:
    """Every module of the product, by its dotted name."""
    for top in PRODUCT:
        for path in sorted((ROOT / top).rglob("*.py")):
            yield ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"), path


@cache
def imports(path: Path) -> dict[str, bool]:
    """Third-party modules that a file imports, by their dotted names; True for one that only a function imports."""
    names: dict[str, bool] = {}
    waiting: list[tuple[ast.AST, bool]] = [(ast.parse(path.read_text(encoding="utf-8")), False)]
    while waiting:
        node, lazily = waiting.pop()
        if isinstance(node, ast.Import):
            modules = [one.name for one in node.names]
        else:
            modules = [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []
        for name in modules:
            if name.split(".")[0] not in (*sys.stdlib_module_names, *PRODUCT):
                names[name] = names.get(name, True) and lazily
        if isinstance(node, ast.stmt | ast.Module | ast.ExceptHandler | ast.match_case):
            lazily = lazily or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            waiting += [(child, lazily) for child in ast.iter_child_nodes(node)]
    return names


def role_of(module: str) -> str | None:
    """The role that a module belongs to: the one that names the most of its path."""
    tops = [
        (len(top), role) for role, words in ROLES.items() for top in words.split() if f"{module}.".startswith(f"{top}.")
    ]
    return max(tops)[1] if tops else None


def needed_by(role: str) -> list[str]:
    """What an environment of this role must be able to import: its modules, and what their functions import."""
    names: dict[str, None] = {}
    for name, path in modules():
        if path.name != "__main__.py" and role_of(name) == role:
            lazy = [one for one, lazily in imports(path).items() if lazily and one.split(".")[0] != ELSEWHERE.get(name)]
            names |= dict.fromkeys([name, *lazy])
    return list(names)


def measure(extra: str, tool: str, wheel: Path, folder: Path) -> list[str]:
    """Install one extra into `folder`, print its row, and return what cannot be imported there."""
    python = folder / "bin" / "python"
    target = f"{wheel}[{extra}]" if extra else str(wheel)
    if tool == "uv":
        subprocess.run(["uv", "venv", "--quiet", "--python", sys.executable, folder], check=True)
        install = ["uv", "pip", "install", "--quiet", "--python", str(python)]
    else:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    empty = megabytes(folder)
    began = time.monotonic()
    subprocess.run([*install, "-c", str(ROOT / "constraints.txt"), target], check=True)
    seconds = time.monotonic() - began
    installed = len(list(folder.glob("lib/python3*/site-packages/*.dist-info")))
    print(f"| `{extra or 'none'}` | {seconds:.0f} | {megabytes(folder) - empty:,.0f} | {installed} |", flush=True)
    command = [python, "-c", IMPORT]
    names = [name for role in dict.fromkeys([extra, ""]) for name in needed_by(role)]
    run = subprocess.run(command, cwd=folder, input=json.dumps(names), stdout=subprocess.PIPE, text=True, check=True)
    return list(json.loads(run.stdout.splitlines()[-1]))


def megabytes(folder: Path) -> float:
    return sum(path.lstat().st_blocks for path in folder.rglob("*")) * 512 / 1e6


def main(words: Sequence[str] | None = None) -> int:
    """Build the wheel, measure each extra."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("extras", nargs="*", metavar="EXTRA", default=[*ROLES, "local"], help=f"of {', '.join(extras)}")
    parser.add_argument("--tool", choices=("uv", "pip"), default="uv" if shutil.which("uv") else "pip")
    parser.add_argument("--folder", type=Path, help="where the environments are made; by default a temporary folder")
    given = parser.parse_args(words)
    lost = 0
    with tempfile.TemporaryDirectory(dir=given.folder) as temporary:
        folder = Path(temporary)
        source = folder / "source"
        for name in (*PRODUCT, "pyproject.toml", "README.md", "LICENSE"):  # a build leaves its folders behind
            (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, source / name)
        build = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, source]
        subprocess.run([sys.executable, "-m", "pip", *build], check=True)
        (wheel,) = folder.glob("*.whl")
        print(f"| extra | seconds with {given.tool} | MB | distributions |\n| --- | --- | --- | --- |")
        for extra in given.extras:
            failed = measure(extra, given.tool, wheel, folder / "environment")
            lost += len(failed)
            for line in failed:
                print(f"{extra or 'none'} cannot import {line}", file=sys.stderr, flush=True)
            shutil.rmtree(folder / "environment")
    print(f"\n{lost} modules cannot be imported." if lost else "\nEvery module of each role can be imported.")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())

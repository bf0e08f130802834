"""`headway --help` imports no command, and CONTRIBUTING's recipe adds one."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
RECIPE = (ROOT / "CONTRIBUTING.md").read_text().partition("## Add a command\n")[2].partition("\n## ")[0]
STEPS = re.findall(r"^\d\. `([^`]+)`", RECIPE, re.MULTILINE)
FUNCTION = '''"""`headway thing`: greet somebody."""

from __future__ import annotations

from typing import Annotated

import typer

from deployments.cli.options import Json
from deployments.cli.output import say


def thing(name: Annotated[str, typer.Argument(help="Whom to greet.")], as_json: Json = False) -> None:
    """Greet somebody. They will be glad."""
    if not name.isalpha():
        raise ValueError(f"{name!r} is no name: give letters only")
    say({"greeting": f"Hello {name}"}, f"Hello {name}", as_json=as_json)
'''
TEST = """import json

from typer.testing import CliRunner

from deployments.cli.main import app


def test_it_greets():
    assert CliRunner().invoke(app, ["thing", "Ada"]).stdout == "Hello Ada\\n"
    assert json.loads(CliRunner().invoke(app, ["thing", "Ada", "--json"]).stdout)["greeting"] == "Hello Ada"
    assert isinstance(CliRunner().invoke(app, ["thing", "4"]).exception, ValueError)
"""
HELD = (
    "tests/unit/deployments/test_command_table.py::test_every_row_is_what_its_function_says",
    "tests/unit/deployments/test_command_table.py::test_every_command_stands_in_one_panel_with_an_example_or_two",
    "tests/e2e/test_documentation.py::test_every_command_and_option_of_headway_is_explained",
    "tests/e2e/test_documentation.py::test_what_others_rely_on_is_what_the_committed_file_says",
)
"""What holds a command that was added to the recipe."""


def test_help_imports_no_command():
    code = (
        "import sys; from deployments.cli.main import app; before = set(sys.modules)\n"
        "try: app(['--help'])\n"
        "finally: print([name for name in set(sys.modules) - before if name.startswith(('deployments', 'tasks'))])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "Usage" in ran.stdout and ran.stdout.rstrip().endswith("[]"), ran.stdout + ran.stderr


def follow(root, steps):
    """Do these steps of the recipe in a copy of the repository, each by what its file's name asks for."""
    for path in steps:
        if path.endswith("SUBJECT/thing.py"):
            (root / path.replace("SUBJECT", "data")).write_text(FUNCTION)
        elif path.startswith("tests/"):
            (root / path).write_text(TEST)
        elif path.endswith("commands.py"):
            text, row = (root / path).read_text(), '    "thing": Row("data.thing:thing", "Greet somebody."),\n'
            text = text.replace("COMMANDS = {\n", "COMMANDS = {\n" + row)
            (root / path).write_text(
                text.replace('"Data": {\n', '"Data": {\n        "thing": ("headway thing Ada",),\n')
            )
        elif path == "docs/commands.md":
            (root / path).write_text((root / path).read_text() + "\n`headway thing` greets somebody.\n")
        else:
            made = re.search(rf"`{path}`, which `python ([^`]+)` writes", RECIPE)[1]
            run(root, made)


def run(root, *words):
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(root), "HOME": str(root)}
    return subprocess.run([sys.executable, *words], cwd=root, capture_output=True, text=True, env=environment)


def held(root):
    """Whether the tests of the repository, with the recipe's own, have nothing to say of what was done."""
    (own,) = (step for step in STEPS if step.startswith("tests/"))
    return run(root, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", own, *HELD)


@pytest.fixture
def copy(tmp_path):
    """The repository's files that are in git, elsewhere."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (tmp_path / "copy" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / "copy" / name)
    return tmp_path / "copy"


@pytest.mark.parametrize("missing", [None, *(pytest.param(step, marks=pytest.mark.long) for step in STEPS)])
def test_the_recipe_adds_a_command_and_each_of_its_steps_is_needed(copy, missing):
    by_hand = [step for step in STEPS if (copy / step).exists() and f"`{step}`, which `python" not in RECIPE]
    assert len(STEPS) == 5 and len(by_hand) <= 2
    follow(copy, [step for step in STEPS if step != missing])
    ran = held(copy)
    assert (ran.returncode == 0) == (missing is None), ran.stdout + ran.stderr

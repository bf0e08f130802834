"""The Makefile on a fresh clone, where nothing is installed yet: make says what it would do, and does none of it."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TARGETS = [*re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.M)]


@pytest.mark.parametrize("target", TARGETS)
def test_a_fresh_clone_has_a_rule_for_everything_that_a_target_needs(tmp_path: Path, target: str) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    # `constraints` calls make again, and a make called like that runs even here.
    made = subprocess.run(["make", "-n", target, "MAKE=true"], cwd=tmp_path, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    assert target in ("clean", "images", "images-refresh") or "pip install" in made.stdout


def test_the_targets_that_a_reader_is_told_of_are_there() -> None:
    documented = {
        target
        for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
        for target in re.findall(r"`make ([a-z][a-z-]*)", page.read_text())
    }
    assert documented <= {*TARGETS}, documented - {*TARGETS}
    assert {"retrain", "test", "check", "long"} <= documented

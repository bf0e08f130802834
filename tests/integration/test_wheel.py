"""A wheel holds the product whole: an editable install hides a file that packaging leaves behind."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from support import Home, publish_tiny
from waiting import limit

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("flows", "tasks", "deployments")
EXAMPLES = ("deployments/cases/",)
"""What pages point to in a checkout, and no program reads by itself."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel's content, as it lies in site-packages."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in PRODUCT:
        shutil.copytree(ROOT / name, folder / "source" / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, folder / "source" / name)
    words = ["wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", folder / "made"]
    subprocess.run([sys.executable, "-m", "pip", *words, folder / "source"], check=True, timeout=limit(120))
    (made,) = (folder / "made").glob("*.whl")
    with zipfile.ZipFile(made) as packed:
        packed.extractall(folder / "site")
    return folder / "site"


def files_of(folder):
    found = (path.relative_to(folder) for top in PRODUCT for path in (folder / top).rglob("*") if path.is_file())
    return {path.as_posix() for path in found if "__pycache__" not in path.parts}


def test_a_wheel_holds_every_file_of_the_product(wheel):
    assert {path for path in files_of(ROOT) - files_of(wheel) if not path.startswith(EXAMPLES)} == set()


class Installed(Home):
    """A home whose `headway` is the wheel's, although the checkout is installed here too."""

    def environment(self):
        return {**super().environment(), "PYTHONPATH": str(self.path.parent / "site"), "TESTS_FORK_SERVER": ""}

    def command(self, *words):
        return [sys.executable, "-c", "from deployments.cli.main import run; run()", *map(str, words)]


@pytest.mark.long
def test_the_tiny_lifecycle_runs_from_the_wheel(wheel, tmp_path):
    (tmp_path / "site").symlink_to(wheel)
    home = Installed(tmp_path / "home")
    where = [
        sys.executable,
        "-c",
        "import flows, tasks, deployments as d; print(flows.__path__, tasks.__path__, d.__path__)",
    ]
    said = subprocess.run(where, env=home.environment(), cwd=tmp_path, capture_output=True, text=True, check=True)
    assert said.stdout.count(os.fspath(tmp_path / "site")) == 3
    try:
        publish_tiny(home)
        done = home.retrain()
        assert done.code == 0, done.stderr
        assert home.ok("complete", "tiny", "def ").said["completion"]
    finally:
        home.stop()

"""What holds for the tiers (tiers.py): unit tests import nothing heavy and start nothing, and no test forgets its home."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from execnet.gateway_io import popen_bootstrapline
from tiers import SLOWEST

SUPPORT = Path(__file__).parents[1] / "support"
HEAVY = ("torch", "transformers", "onnxruntime", "prefect", "mlflow", "great_expectations", "ray", "azure.ai.ml")
COLLECT = f"""
import sys
import pytest
code = pytest.main(["--collect-only", "-qq", "-m", "unit", "-p", "no:cacheprovider"])
print([name for name in {HEAVY} if name in sys.modules])
sys.exit(code)
"""
WRONG = """
import os, socket, subprocess, sys
from pathlib import Path
import pytest

os.environ["TESTS_SLOWER"] = "3"

@pytest.mark.unit
def test_starts():
    subprocess.run([sys.executable, "--version"])

@pytest.mark.unit
def test_opens():
    socket.create_server(("127.0.0.1", 0))

@pytest.fixture
def forgotten():
    path = Path(os.environ["HEADWAY_HOME"])
    path.mkdir()
    (path / "store").touch()

def test_forgets_its_home(forgotten):
    pass

@pytest.mark.unit
def test_does_nothing():
    pass

def test_may_start():
    subprocess.run([sys.executable, "--version"])

@pytest.mark.timeout(100)
def test_names_a_limit(request):
    assert request.node.get_closest_marker("timeout").args == (300.0,)

@pytest.mark.long
def test_takes_long():
    pass
"""


def pytest_of(*words, cwd):
    """The end of a run of pytest in a process of its own, with the tests' plugin."""
    argv = [sys.executable, "-m", "pytest", "-p", "tiers", "-p", "no:cacheprovider", "-q", *words]
    environment = {**os.environ, "PYTHONPATH": str(SUPPORT)}
    return subprocess.run(argv, cwd=cwd, env=environment, capture_output=True, text=True)


def test_unit_tests_import_nothing_heavy():
    said = subprocess.run([sys.executable, "-c", COLLECT], cwd=SUPPORT.parents[1], capture_output=True, text=True)
    assert said.returncode == 0 and said.stdout.rstrip().endswith("\n[]"), said.stdout[-2000:]


@pytest.mark.parametrize("workers", [pytest.param("0", marks=pytest.mark.long), "2"])
def test_what_a_tier_does_not_allow_fails_with_its_reason(tmp_path, workers):
    (tmp_path / "test_wrong.py").write_text(WRONG)
    said = pytest_of("-m", "not long", "-n", workers, cwd=tmp_path)
    assert "a unit test starts a process" in said.stdout and "a unit test opens a socket" in said.stdout
    assert "gave a process no home of its own; it wrote ['store']" in said.stdout
    assert "2 failed, 4 passed" in said.stdout and "1 error" in said.stdout, said.stdout
    assert "left out: 1 tests marked long; `make long` runs them" in said.stdout


def test_where_unit_tests_are_asked_for_nothing_else_runs(tmp_path):
    (tmp_path / "test_wrong.py").write_text(WRONG)
    (tmp_path / "test_heavy.py").write_text("import nothing_of_this_name")
    said = pytest_of("-m", "unit", cwd=tmp_path)
    assert "2 failed, 1 passed, 4 deselected" in said.stdout, said.stdout


def test_files_are_shared_out_in_the_order_in_which_they_were_collected(tmp_path):
    """Which is the one of tiers.py, the slowest first, and not xdist's, by the number of their tests."""
    (tmp_path / "test_few.py").write_text("def test_one(): pass")
    (tmp_path / "test_many.py").write_text("\n".join(f"def test_{number}(): pass" for number in range(5)))
    said = pytest_of("-vv", "-n", "1", "--dist", "loadfile", cwd=tmp_path)
    assert said.stdout.index("PASSED test_few.py") < said.stdout.index("PASSED test_many.py"), said.stdout


@pytest.mark.unit
def test_the_slowest_files_are_there():
    names = [name for name in SLOWEST if name != "done"]
    assert [name for name in names if not (SUPPORT.parent / name).is_file()] == []


def test_a_worker_of_xdist_is_known_by_what_it_runs():
    """Else it would quietly import everything by itself."""
    assert f'WORKER = "{popen_bootstrapline}"' in (SUPPORT / "forks" / "sitecustomize.py").read_text()

"""Modules that moved still start, and are imported, under the names that stand outside the code."""

import importlib
import subprocess
import sys
from dataclasses import asdict
from importlib.util import find_spec

import pytest
from waiting import limit

from tasks.common import process
from tasks.common.old_names import MOVED

STARTED = sorted(name for name in MOVED if name.startswith("tasks.") and name != "tasks.settings")


@pytest.mark.unit
@pytest.mark.parametrize("old", STARTED)
def test_a_program_is_found_under_its_old_name(old):
    """Of two names the second is where the file lies: `python -m` runs the code that the loader gives."""
    spec = find_spec(old)
    assert spec is not None and find_spec(MOVED[old]) is not None
    assert spec.loader.get_code(old).co_filename == find_spec(MOVED[old]).origin


@pytest.mark.unit
def test_a_module_of_an_old_name_is_the_module_itself():
    """Else its errors would be other classes than those that callers catch."""
    before = process.__spec__
    assert importlib.import_module("tasks.process") is process
    assert process.__spec__ is before and before.name == "tasks.common.process"


@pytest.mark.unit
def test_what_never_was_a_name_is_none():
    for name in ("tasks.proces", "tasks.jobs.scratches", "deployments.cli.configurations"):
        with pytest.raises(ModuleNotFoundError, match=name):
            importlib.import_module(name)


def test_a_script_of_a_queued_job_starts_after_the_upgrade(tmp_path):
    """The parent of a process, as every batch script of an earlier release starts it."""
    ran = tmp_path / "ran"
    spec = process.ProcessSpec(argv=[sys.executable, "-c", f"open({str(ran)!r}, 'w').write('yes')"])
    process.write_json(tmp_path / "process.json", asdict(spec), seal=True)
    subprocess.run([sys.executable, "-m", "tasks.process", str(tmp_path)], timeout=limit(60), check=True)
    assert ran.read_text() == "yes" and process.read_json(tmp_path / "exit.json")["code"] == 0


def test_the_example_of_the_last_readme_imports():
    code = (
        "from deployments.cli.configuration import load; from deployments.platform import prefect_server; "
        "from tasks.settings import home; print(load.__module__, prefect_server.__name__, home.__module__)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=limit(60), check=True)
    assert ended.stdout.split() == [
        "tasks.config.files",
        "deployments.services.prefect_server",
        "tasks.common.home",
    ]

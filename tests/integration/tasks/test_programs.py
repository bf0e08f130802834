"""Every program that a stage names exists, and answers to the launcher's contract."""

import importlib.util
import re
from pathlib import Path

import tasks

ROOT = Path(tasks.__file__).parent


def named_programs():
    # Names of before, which test_old_names.py looks at, and a module that is copied for MLflow's users, not started.
    others = {ROOT / "common" / "old_names.py", ROOT / "lineage" / "model_folder.py"}
    for path in set(ROOT.rglob("*.py")) - others:
        yield from re.findall(r"""["'](tasks\.jobs\.[\w.]+)["']""", path.read_text())


def test_every_named_program_exists_and_ends_with_main():
    found = set(named_programs())
    stages = ("preprocess", "benchmark", "train", "train_megatron", "evaluate", "export")
    assert {f"tasks.jobs.{name}" for name in stages} <= found
    for program in found:
        spec = importlib.util.find_spec(program)
        assert spec and spec.origin, program
        program_file = (
            Path(spec.origin).with_name("__main__.py") if spec.submodule_search_locations else Path(spec.origin)
        )
        assert 'if __name__ == "__main__":' in program_file.read_text(), program

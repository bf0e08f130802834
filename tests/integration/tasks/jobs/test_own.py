"""A program of the user's own as a rank: its own log, its own modules, its own arguments and exit code."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[4]
PROGRAM = """
import sys
import sibling
print("rank says", sibling.WORD, *sys.argv[1:])
sys.exit(3)
"""


def test_it_has_its_own_log_modules_arguments_and_exit_code(tmp_path):
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "sibling.py").write_text("WORD = 'hello'\n")
    (theirs / "program.py").write_text(PROGRAM)
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"settings": {}, "inputs": {}}))
    command = [sys.executable, "-m", "tasks.jobs.node.user_program", str(theirs / "program.py"), "a b", "c"]
    place = {"HEADWAY_JOB": str(folder), "RANK": "1", "WORLD_SIZE": "2", "PYTHONSAFEPATH": "1", "PYTHONPATH": str(ROOT)}
    ran = subprocess.Popen(command, env={**os.environ, **place})
    assert ran.wait() == 3
    assert (folder / "logs" / "rank-1.log").read_text() == "rank says hello a b c\n"
    assert json.loads((folder / "ranks" / "1.json").read_text())["pid"] == ran.pid

"""The recipe "Add a stage" of CONTRIBUTING.md, followed to the letter in a copy of the tree: nothing else is touched.

The stage of this test counts lines of a dataset. What is added to each file stands in `ADDED`; which of it is added, the recipe
says. The stage's own test then runs in the copy, so a step that the recipe lacks or does not tell whole fails it.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import limit

ROOT = Path(__file__).parents[3]
MOST_FILES = 5
SETTINGS = '''
class CensusConfig(Settings):
    """How lines are counted."""

    shortest: Positive = 1
    """Characters of a line that counts."""


'''
ARTIFACT = '''
class Census(Artifact):
    """Lines of a dataset."""

    KIND = "census"


'''
PROGRAM = '''"""Dataset -> its lines, counted."""

import json
import sys
from typing import Any

from tasks.data.corpus.inputs import find_shards
from tasks.jobs.node.runtime import Rank, main


def run(rank: Rank) -> dict[str, Any]:
    shards = find_shards([rank.inputs["dataset"]])
    lines = [line for shard in shards for line in shard.path.read_bytes().splitlines()]
    counted = sum(len(line) >= rank.settings["census"]["shortest"] for line in lines)
    (rank.output / "census.json").write_text(json.dumps({"lines": counted}))
    return {"metrics": {"lines": float(counted)}}


if __name__ == "__main__":
    sys.exit(main(run))
'''
STAGE = '''"""Dataset -> Census."""

from tasks.artifacts import Census, Cluster, Dataset
from tasks.config.flows import CensusConfig
from tasks.orchestration.job_spec import Program
from tasks.orchestration.observers import Shown
from tasks.orchestration.stage import stage
from tasks.orchestration.stage_context import publish, run_job


@stage(version=1, shown=Shown(line="{lines:.0f} lines", metrics=("lines",)))
def census(dataset: Dataset, config: CensusConfig, *, on: Cluster) -> Census:
    """Count the lines of a dataset."""
    program = Program("tasks.jobs.census", {"census": config.model_dump(mode="json")}, {"dataset": dataset}, ranks=1)
    job = run_job(program, on=on)
    return publish(job.output, Census, name=dataset.name, metrics=job.result["metrics"])
'''
CALL = "    census(dataset, config.census, on=unqualified(config.cluster))\n"
TEST = '''"""The stage that counts lines: its job runs, the rest is a dry run of the chain, which needs no server."""

import pytest
from support import STAGES, Home, publish_tiny

from tasks.config.files import load
from flows.support.inputs import resolve
from tasks.artifacts import unqualified
from tasks.census import census
from tasks.orchestration.run import lifecycle


def dry(home, *words):
    return home.ok("retrain", "-c", "tiny", "--to", "census", "--dry-run", *words).stage("census")


def test_it_runs_is_reused_and_counts_anew_for_other_settings(tmp_path, monkeypatch):
    home = Home(tmp_path / "home")  # no server: nothing to stop
    publish_tiny(home)
    assert dry(home)["status"] == "pending"
    monkeypatch.setenv("HEADWAY_HOME", str(home.path))
    config = load("tiny", [])
    with lifecycle("retrain", config, subject="tiny", stages=STAGES) as run:
        call = census._call((resolve("tiny"), config.census), {"on": unqualified(config.cluster)})
        outcome = run.outcome_for("census", census.shown)
        made = census._reuse_or_execute(run, outcome, call)
    assert outcome.status == "ran" and outcome.shown.text(outcome.metrics).endswith(" lines")
    again = dry(home)
    assert (again["status"], again["outputs"]) == ("reused", [made.ref]) and again["metrics"]["lines"] > 0
    other = dry(home, "--set", "census.shortest=80")
    assert other["status"] == "pending" and "80" in other["why"]
    with pytest.raises(ValueError, match="census.shortest"):
        load("tiny", ["census.shortest=0"])
'''
ADDED = {
    "tasks/config/flows.py": {
        "\nStageName = Literal[": f'{SETTINGS}\nStageName = Literal["census", ',
        "    approval: Approval": "    census: CensusConfig = CensusConfig()\n    approval: Approval",
    },
    "tasks/artifacts.py": {
        '    "audit",\n)': '    "audit",\n    "census",\n)',
        "\nclass Check(Value):": f"{ARTIFACT}class Check(Value):",
    },
    "tasks/jobs/thing.py": PROGRAM,
    "tasks/thing.py": STAGE,
    "flows/retrain.py": {
        "from tasks.artifacts import ": "from tasks.census import census\nfrom tasks.artifacts import unqualified, ",
        "    validation = validated(": f"{CALL}    validation = validated(",
    },
    "tests/integration/flows/test_thing.py": TEST,
}
"""By the file that the recipe names: a new one whole; of one that exists, what takes which place."""


def recipe() -> tuple[list[str], list[str]]:
    """The files of the recipe's steps, and the commands that it ends with."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    section = text[text.index("## Add a stage\n") + 3 :].partition("\n## ")[0]
    commands = re.findall(r"`((?:python docs/make_|headway )[^`]*)`", section)
    return re.findall(r"^\d+\. `(\S+)`", section, re.MULTILINE), commands


def follow(steps: list[str], copy: Path) -> None:
    """Make a copy of the tree, and in it what the steps say."""
    for name in ("flows", "tasks", "deployments", "benchmarks", "docs", "tests"):
        ignored = shutil.ignore_patterns("__pycache__", "node_modules", "proof")
        shutil.copytree(ROOT / name, copy / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, copy / name)
    for step in steps:
        path, added = copy / step.replace("thing", "census"), ADDED[step]
        if isinstance(added, str):
            path.write_text(added)
            continue
        text = path.read_text()
        for place, new in added.items():
            assert text.count(place) == 1, f"{place!r} in {step}"
            text = text.replace(place, new)
        path.write_text(text)


def run(copy: Path, *argv: str, seconds: float = 240) -> "subprocess.CompletedProcess[str]":
    """A program of this environment, with the copy's packages."""
    kept = {name: value for name, value in os.environ.items() if name != "TESTS_FORK_SERVER"}
    return subprocess.run(
        argv,
        cwd=copy,
        env={**kept, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=limit(seconds),
    )


def own_test(copy: Path) -> "subprocess.CompletedProcess[str]":
    words = ("-p", "no:xdist", "-p", "no:cacheprovider", "-q", "-x")
    return run(copy, sys.executable, "-P", "-m", "pytest", *words, "tests/integration/flows/test_census.py")


def test_the_recipe_is_enough(tmp_path):
    steps, _ = recipe()
    assert [step.startswith("tests/") for step in steps] == [False] * (len(steps) - 1) + [True]
    assert len(steps) - 1 <= MOST_FILES
    follow(steps, tmp_path)
    ran = own_test(tmp_path)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    stage = tmp_path / "tasks" / "census.py"
    stage.write_text(stage.read_text() + "from tasks.train import train\n")
    refused = run(tmp_path, str(Path(sys.executable).parent / "lint-imports"))
    assert refused.returncode == 1 and "tasks.census is not allowed to import tasks.train" in refused.stdout
    assert refused.stdout.count("is not allowed to import") == 1, "but for that import, it keeps every contract"


@pytest.mark.long
def test_what_the_recipe_has_written_down_names_the_new_stage(tmp_path):
    steps, commands = recipe()
    follow(steps, tmp_path)
    binaries = Path(sys.executable).parent
    for command in commands:
        ran = run(tmp_path, "bash", "-c", re.sub(r"^(python|headway)", rf"{binaries}/\1", command))
        assert ran.returncode == 0, ran.stderr
    for written in ("docs/configuration.md", "docs/surface.json"):
        assert "census" in (tmp_path / written).read_text(), written


@pytest.mark.long
@pytest.mark.parametrize("missing", [name for name in ADDED if not name.startswith("tests/")])
def test_no_step_can_be_left_out(tmp_path, missing):
    steps, _ = recipe()
    follow([step for step in steps if step != missing], tmp_path)
    assert own_test(tmp_path).returncode in (1, 2)  # 2: not even its imports are there

"""A backend that is added by the recipe of CONTRIBUTING.md runs a job, and no step of the recipe is without need."""

import pytest
from recipes import Copy, steps_of

STEPS = steps_of("Add a backend")
NEW = {
    "tasks/config/backends/NAME.py": '''
from tasks.config.backends import BackendSettings, Capabilities, Elasticity


class NohupConfig(BackendSettings):
    """A process that nobody waits for."""

    capabilities = Capabilities(
        backend="tasks.compute.nohup.backend:NohupBackend",
        machines="tasks.compute.nohup.backend:NohupMachines",
        elasticity=Elasticity("there is one machine"),
        cannot_choose="there is one machine",
        cannot_drain="nobody else has jobs on it",
        preemptible_price="low-priority",
    )
    nice: int = 0
    """How much it gives way to others."""

    def require_complete(self) -> None:
        if self.nice < 0:
            raise ValueError(f"nohup.nice {self.nice} needs a superuser: give 0 or more")
''',
    "tasks/compute/NAME/backend.py": """
import os
import socket
import subprocess

from tasks.common import process
from tasks.compute.job import JobState, Rendered
from tasks.compute.nodes import Machines
from tasks.compute.nodes import ended_state, node_command, node_environment, write_nodes


class NohupMachines(Machines):
    def findings(self):
        yield "nohup", True, f"{socket.gethostname()}, nice {self.config.nohup.nice}", ""

    def usable(self):
        return {socket.gethostname()}


class NohupBackend:
    poll_seconds = 0.1

    def __init__(self, config):
        self.config = config.nohup

    def render(self, job, folder):
        who = {"HEADWAY_LEADER": "127.0.0.1", "HEADWAY_NODE_NAME": socket.gethostname()}
        command = ("nice", "-n", str(self.config.nice), *node_command(job, folder, 0))
        return Rendered(backend="nohup", command=command, environment={**node_environment(job), **who})

    def submit(self, job, folder):
        write_nodes(job, folder)
        made = self.render(job, folder)
        with (folder / "nohup.log").open("w") as log:
            child = subprocess.Popen(
                made.command, env={**os.environ, **made.environment}, stdout=log, stderr=log, start_new_session=True
            )
        process.write_json(folder / "nohup.json", {"pid": child.pid, "name": job.submission_id})
        return {"pid": child.pid}

    def find(self, job, folder):
        mark = process.read_json(folder / "nohup.json")
        return {"pid": mark["pid"]} if mark and mark["name"] == job.submission_id else None

    def states(self, jobs):
        return [ended_state(folder) or JobState(state="running") for _, folder in jobs]

    def cancel(self, handle, folder):
        process.stop(folder / "nodes" / "0")
""",
    "deployments/configs/NAME.yaml": "cluster:\n  name: nohup\n  backend: nohup\n  ranks_per_node: 1\n  nohup: {nice: 1}\n",
    "docs/NAME.md": "# nohup\n\nA process that nobody waits for.\n",
}
EDITS = {
    "tasks/config/cluster.py": [
        ('"azureml", "ray"]', '"azureml", "ray", "nohup"]'),
        (
            '    "ray": RayConfig.capabilities,\n',
            '    "ray": RayConfig.capabilities,\n    "nohup": NohupConfig.capabilities,\n',
        ),
        (
            "    ray: RayConfig = RayConfig()\n",
            "    ray: RayConfig = RayConfig()\n    nohup: NohupConfig = NohupConfig()\n",
        ),
        (
            "from tasks.config.backends.ray import",
            "from tasks.config.backends.nohup import NohupConfig\nfrom tasks.config.backends.ray import",
        ),
    ],
    "pyproject.toml": [('"tasks.compute.ray"]', '"tasks.compute.ray", "tasks.compute.nohup"]')],
    "docs/compute.md": [("| `ray` | a Ray", "| `nohup` | this one | [nohup.md](nohup.md) |\n| `ray` | a Ray")],
}
LISTED = """
import sys, tomllib
from pathlib import Path
from tasks.config.files import SHIPPED, load_cluster
from tasks.config.cluster import BACKENDS

contracts = tomllib.loads(Path("pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
(apart,) = [one["modules"] for one in contracts if one["name"] == "Backends do not import each other"]
table = Path("docs/compute.md").read_text()
for name, declared in BACKENDS.items():
    if f"tasks.compute.{name}" not in apart:
        print(name, "is in no contract")
    if f"| `{name}` |" not in table:
        print(name, "has no line in docs/compute.md")
    if not declared.this_machine and not Path(f"docs/{name}.md").is_file():
        print(name, "has no page")
    if not (SHIPPED / f"{name}.yaml").is_file():
        print(name, "has no configuration")
    else:
        load_cluster(name, [])
"""
RUN = """
import sys, tempfile
from pathlib import Path
from deployments.cli.operations.doctor import backend_findings
from tasks.config.files import load_cluster
from tasks.compute import machines_of, open_backend
from tasks.compute.job import Job
from tasks.compute.polling import Watch
from tasks.compute.supervisor import run
from tasks.planning.spending import kind_of_preemptible
from tasks.registry.records import StoreJournal
from tasks.storage import open_store

home = Path(tempfile.mkdtemp(dir=sys.argv[1]))
program = home / "adds.py"
program.write_text('''
import sys
from tasks.jobs.node.runtime import main

if __name__ == "__main__":
    sys.exit(main(lambda rank: {"sum": rank.settings["a"] + 1}))
''')
cluster = load_cluster("nohup", [])
job = Job(name="adds", token="c" * 32, program=str(program), module=False, settings={"a": 41}, inputs={})
done = run(job, backend=open_backend(cluster), folder=home / "jobs" / job.id, journal=StoreJournal(open_store(home)),
           watch=Watch(), cluster=cluster)
assert done.result["sum"] == 42, done
assert [one.name for one in backend_findings(cluster)] == ["nohup"]
assert machines_of(cluster).count() == 1 and kind_of_preemptible("nohup") == "low-priority"
try:
    load_cluster("nohup", ["cluster.nohup.nice=-1"])
except ValueError as error:
    assert "needs a superuser" in str(error)
else:
    print("require_complete is not asked")
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    return Copy(tmp_path_factory.mktemp("headway"))


def test_the_backends_that_there_are_are_listed_where_the_recipe_says(copy):
    assert copy.problems(LISTED) == ""


def test_the_recipe_touches_few_files_and_says_all_that_a_backend_needs(copy, tmp_path):
    files = [file for step in STEPS for file in step]
    assert sorted(files) == sorted([*NEW, *EDITS])
    assert len(EDITS) <= 4
    try:
        copy.follow(files, "nohup", NEW, EDITS)
        assert copy.problems(LISTED) == ""
        assert copy.problems(RUN, str(tmp_path)) == ""
    finally:
        copy.undo()


@pytest.mark.long
@pytest.mark.parametrize("left_out", [file for step in STEPS for file in step])
def test_no_step_is_without_need(copy, tmp_path, left_out):
    try:
        copy.follow([file for step in STEPS for file in step if file != left_out], "nohup", NEW, EDITS)
        assert copy.problems(LISTED) or copy.problems(RUN, str(tmp_path))
    finally:
        copy.undo()

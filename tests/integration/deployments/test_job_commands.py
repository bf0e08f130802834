"""`headway job`, `jobs`, `submit`: a program of the user's own is run, adopted, retried, cancelled, and told of."""

import hashlib
import json
import signal
import time
from pathlib import Path

import mlflow
import psutil
import pytest
from support import Home, Ran
from waiting import limit

from deployments.cli.cluster.job import age, said
from deployments.cli.cluster.submit import job_of_program
from deployments.cli.main import app
from tasks.common.errors import Unknown
from tasks.compute.jobs_book import JobEntry
from tasks.config.base import digest
from tasks.config.cluster import ClusterConfig

PROGRAM = """
import json, os, sys, time
from pathlib import Path

folder = Path(os.environ["HEADWAY_JOB"])
spec = json.loads((folder / "config.json").read_text())
print("hello", sys.argv[1:], sorted(spec["inputs"]), flush=True)
if sys.argv[1] == "wait":
    while not Path(sys.argv[2]).exists():
        time.sleep(0.05)
if sys.argv[1] == "fail":
    sys.exit("this rank fails" if os.environ["RANK"] == sys.argv[2] else 0)
with open(folder / "metrics.jsonl", "a") as metrics:
    for step in range(3):
        metrics.write(json.dumps({"step": step, "speed": 1.5 * step, "time": time.time()}) + "\\n")
"""
QUICK = ("--set", "cluster.retry.attempts=1", "--set", "cluster.retry.back_off_seconds=0")
ALONE = ("--ranks", "1", *QUICK)


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    made = Home(tmp_path_factory.mktemp("submit") / "home")
    (made.path.parent / "mine.py").write_text(PROGRAM)
    (made.path.parent / "corpus").mkdir()
    (made.path.parent / "corpus" / "a.txt").write_text("a document")
    made.ok("dataset", "publish", "corpus", made.path.parent / "corpus")
    yield made
    made.run("down", "--yes")


def test_the_size_of_the_machines_makes_no_other_job(tmp_path):
    """A job that an earlier release submitted, which knew no sizes, is found again."""
    (tmp_path / "mine.py").write_text(PROGRAM)
    sizes = ("", "Standard_ND96isr_H100_v5")
    clusters = [ClusterConfig.model_validate({"backend": "slurm", "slurm": {"sku": size}}) for size in sizes]
    one, two = (job_of_program(tmp_path / "mine.py", (), cluster, {}) for cluster in clusters)
    assert two.size and one.token == two.token
    known = {**one.model_dump(mode="json", exclude={"token", "retry", "watch", "size"}), "backend": "slurm"}
    content = hashlib.sha256(PROGRAM.encode()).hexdigest()
    assert one.token == digest([known, content, ""])[:32]


def start(here, *arguments, options=ALONE):
    """The command; what follows `--` is the program's own."""
    return here.start("submit", "mine.py", *options, "--json", "--", *arguments)


def submit(here, *arguments, options=ALONE):
    command = start(here, *arguments, options=options)
    out, err = command.communicate(timeout=limit(100))
    return Ran(command.returncode, json.loads(out), err)


def test_a_program_of_ones_own_runs_to_its_end_and_its_metrics_are_in_mlflow(here):
    told = submit(here, "first", options=(*ALONE, "--input", "text=dataset/corpus")).said
    assert (told["backend"], told["submissions"], told["attempts"], told["adopted"]) == ("local", 1, 1, False)
    logs = here.ok("job", "logs", told["id"]).said
    assert any("hello ['first'] ['text']" in line for log in logs["logs"] for line in log["lines"])
    client = mlflow.MlflowClient(f"sqlite:///{here.path / 'mlflow' / 'mlflow.db'}")
    run = client.get_run(told["mlflow_run"]["id"])
    assert (run.info.status, run.data.metrics["speed"]) == ("FINISHED", 3.0)
    assert [point.step for point in client.get_metric_history(run.info.run_id, "speed")] == [0, 1, 2]
    (job,) = here.ok("jobs", "--all").said["jobs"]
    assert (job["id"], job["state"], job["said"], job["step"]) == (told["id"], "done", "done", 2)
    assert here.ok("jobs").said["jobs"] == []
    shown = here.ok("job", "show", "mine").said
    assert shown["job"]["artifacts"]["text"].startswith("dataset/corpus@")
    assert [one["outcome"] for one in shown["submissions"]] == ["done"]


def test_a_killed_command_is_adopted_by_the_same_one_and_another_one_is_refused_meanwhile(here):
    gate = here.path.parent / "go-adopted"
    first = start(here, "wait", gate)
    job = at_work(here)
    refused = submit(here, "wait", gate)
    assert refused.code == 2 and refused.said["error"]["type"] == "Conflict" and job["id"] in refused.stderr
    first.send_signal(signal.SIGKILL)
    first.communicate()
    (orphan,) = here.ok("jobs").said["jobs"]
    assert (orphan["state"], orphan["supervised"]) == ("running", False)
    (found,) = here.ok("reconcile").said["found"]
    assert (found["id"], found["verdict"]) == (job["id"], "orphan")
    gate.write_text("")
    again = submit(here, "wait", gate).said
    assert (again["id"], again["adopted"], again["submissions"]) == (job["id"], True, 1)
    other = submit(here, "wait", gate, options=(*ALONE, "--again")).said
    assert other["id"] != job["id"] and not other["adopted"]


def test_cancel_ends_the_program_and_the_command_says_so(here):
    command = start(here, "wait", "never")
    job = at_work(here)
    following = here.start("job", "logs", "-f", job["id"])
    cancelled = here.ok("job", "cancel", job["id"][:12], "--reason", "an example").said
    assert cancelled["cancelled"] and cancelled["said"].startswith("running")
    out, err = command.communicate(timeout=limit(30))
    assert command.returncode == 4 and "cancelled by hand" in json.loads(out)["error"]["message"], err
    assert "hello ['wait', 'never']" in following.communicate(timeout=limit(30))[0]
    assert here.run("job", "cancel", job["id"], "--reason", "twice").code == 2
    assert here.ok("job", "show", job["id"]).said["state"] == "cancelled"
    assert alive_with("mine.py", "never") == []


@pytest.mark.long
def test_one_rank_that_fails_is_a_failed_job_with_its_words(here):
    ran = submit(here, "fail", "1", options=("--ranks", "2", *QUICK))
    assert ran.code == 4 and ran.said["error"]["type"] == "JobFailed"
    logs = here.ok("job", "logs", ran.said["id"], "--lines", "400").said
    assert any("this rank fails" in line for log in logs["logs"] for line in log["lines"])
    told = here.ok("job", "show", ran.said["id"]).said
    assert told["state"] == "failed" and told["said"] == f"failed: {told['failure']}"
    assert told["submissions"][0]["failure"] in ("user", "infrastructure")


WRONG = {
    "there is no program none.py": ("submit", "none.py"),
    "only settings of cluster count here": ("submit", "mine.py", "--set", "training.steps=3"),
    "is not of the form NAME=KIND/NAME": ("submit", "mine.py", "--input", "dataset/corpus"),
    "dataset/none": ("submit", "mine.py", "--input", "text=dataset/none"),
    "--driver is for backend ray": ("submit", "mine.py", "--driver"),
    "backend local has one machine": ("submit", "mine.py", "--nodes", "2"),
    "no job 'nothing'": ("job", "show", "nothing"),
    "'plan' is no stage that runs a job": ("job", "render", "--stage", "plan"),
}


@pytest.mark.parametrize("words", WRONG)
def test_a_mistake_is_named(here, words, monkeypatch):
    monkeypatch.setenv("HEADWAY_HOME", str(here.path))
    monkeypatch.chdir(here.path.parent)
    with pytest.raises((ValueError, Unknown)) as raised:
        app(list(WRONG[words]), standalone_mode=False)
    assert words in str(raised.value)


def test_render_needs_no_data_and_names_what_is_not_made_yet(here):
    told = here.ok("job", "render", "-c", "tiny", "-c", "slurm", "--dataset", "nothing").said
    assert told["backend"] == "slurm" and told["command"][0] == "sbatch"
    assert told["pending"] == [
        "tokens/nothing: preprocess makes it",
        "token: the stage's key is known when its inputs are",
    ]
    assert told["job"]["program"] == "tasks.jobs.train" and told["job"]["nodes"] == 2
    known = here.ok("job", "render", "-c", "tiny", "--stage", "validate", "--dataset", "corpus").said
    assert known["pending"] == [] and known["backend"] == "local"
    folder = Path(known["job"]["inputs"]["dataset"])
    assert folder.name == "files" and list(folder.iterdir())


def entry(**fields):
    return JobEntry(
        **{
            "id": "train-0123", "folder": "/nowhere", "stage": "train", "backend": "slurm", "token": "0", "submission": 1,
            "submission_id": "headway-train-0123-1", "state": "running", **fields,
        }
    )  # fmt: skip


WORDS = {
    "running, step 7": {"step": 7},
    "running": {},
    "queued: Resources": {"state": "queued", "reason": "Resources"},
    "failed: node": {"state": "failed", "failure": "node", "reason": "machine n2 went silent"},
    "retrying: it failed": {"state": "retrying", "reason": "it failed\nat length"},
    "done": {"state": "done"},
}


@pytest.mark.parametrize("words", WORDS)
def test_a_jobs_state_in_words(words):
    assert said(entry(**WORDS[words])) == words


def test_a_time_for_people():
    assert [age(s) for s in (1, 119, 120, 7199, 7200, 172800)] == ["1 s", "119 s", "2 min", "120 min", "2 h", "2 d"]


def at_work(here, timeout=60.0):
    """The one job that is open, once its program runs."""
    deadline = time.monotonic() + limit(timeout)
    while time.monotonic() < deadline:
        jobs = here.ok("jobs").said["jobs"]
        if (
            jobs
            and jobs[0]["state"] == "running"
            and any(
                "hello" in line for log in here.ok("job", "logs", jobs[0]["id"]).said["logs"] for line in log["lines"]
            )
        ):
            return jobs[0]
    raise AssertionError("no job came to run")


def alive_with(*words):
    """Processes whose command line has all of these words."""
    lines = [" ".join(one.info["cmdline"] or ()) for one in psutil.process_iter(["cmdline"])]
    return [line for line in lines if all(word in line for word in words)]


def test_the_table_of_failures_in_the_documentation_is_that_of_the_data():
    root = Path(__file__).parents[3]
    classes = json.loads((root / "tasks" / "compute" / "failures.json").read_text())["classes"]
    page = (root / "docs" / "compute.md").read_text()
    told = {line.split("`")[1]: line for line in page.splitlines() if line.startswith("| `") and line.count("|") == 5}
    assert told.keys() == classes.keys()
    for name, row in told.items():
        what, again, left_out = [cell.strip() for cell in row.strip("|").split("|")][1:]
        known = classes[name]
        assert what == known["sentence"], name
        assert (again == "no") == (known["again"] == "never"), name
        assert (left_out != "none") == bool(known.get("excludes_nodes")), name

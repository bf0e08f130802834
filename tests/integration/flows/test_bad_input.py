"""What a person gets wrong, or a machine lacks: one clear sentence, the right exit code, nothing half-published."""

import json
import socket
import subprocess
import sys

import pytest
from support import STAGES, Home, everything_reused


def refused(ran, code, *words):
    """The command failed with a code, its one error names these words, and no trace was printed at the user."""
    assert ran.code == code == ran.said["exit_code"], ran.stderr
    said = ran.said["error"]["message"] + ran.said["error"]["remedy"]
    assert all(word in said for word in words), said
    assert "Traceback" not in ran.stderr
    return ran


@pytest.fixture(scope="module")
def unstarted(tmp_path_factory):
    """A home with a dataset, in which nothing ever starts."""
    made = Home(tmp_path_factory.mktemp("unstarted") / "home")
    (made.path.parent / "a.txt").write_text("text\n" * 10)
    made.ok("dataset", "publish", "tiny", made.path.parent / "a.txt")
    return made


@pytest.mark.parametrize(
    "setting, words",
    [
        ("training.learning_rat=1", ("training.learning_rat", "did you mean training.learning_rate?")),
        ("training.steps=many", ("training.steps", "'many'")),
        ("training.global_batch_size=6", ("global_batch_size 6", "4 x 2 = 8")),
        ("training.network.hidden_size=66", ("hidden_size 66", "heads 4")),
        ("benchmark.sku=no-such", ("no-such", "local-cpu")),
        ("nonsense", ("nonsense", "a.b=value")),
    ],
)
def test_a_wrong_setting_is_named_before_anything_starts(unstarted, setting, words):
    refused(unstarted.retrain("--set", setting), 2, *words)
    assert not (unstarted.path / "prefect").exists() and not (unstarted.path / "lineage").exists()


def test_unknown_names_are_told_what_there_is(home, done):
    refused(home.retrain("--dataset", "no-such"), 2, "dataset/no-such", "tiny")
    refused(home.run("retrain", "-c", "no-such"), 2, "no-such", "local", "tiny")
    refused(home.retrain("--from", "fly"), 2, "'fly'", "validate")
    refused(home.run("verify", "model/none"), 2, "model/none", "tiny")
    refused(home.run("verify", "nonsense"), 2, "nonsense", "KIND/NAME")
    refused(home.run("complete", "none", "x"), 2, "none", "tiny")
    refused(home.run("retrain", "--no-such-option"), 2, "--no-such-option")


def test_an_empty_or_binary_corpus_is_not_published(fresh):
    folder = fresh.path.parent / "corpus"
    folder.mkdir()
    refused(fresh.run("dataset", "publish", "x", folder), 2, "no text found", "corpus")
    (folder / "program").write_bytes(bytes(range(256)) * 100)
    refused(fresh.run("dataset", "publish", "x", folder), 2, "program", "binary")
    refused(fresh.run("dataset", "publish", "x", folder / "none"), 2, "does not exist")
    refused(fresh.run("dataset", "publish", "Bad Name", folder), 2, "Bad Name")
    assert fresh.ok("dataset", "list").said["datasets"] == []


def publish_lines(home, name, texts):
    path = home.path.parent / f"{name}.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    home.ok("dataset", "publish", name, path)


@pytest.mark.long
def test_a_corpus_that_is_no_text_closes_the_gate(home, done):
    publish_lines(home, "noise", ["\x01\x02\x03" * 50 + str(i) for i in range(20)])
    ran = refused(home.retrain("--dataset", "noise"), 3, "control characters")
    assert ran.statuses() == {**dict.fromkeys(STAGES, "not_run"), "validate": "gate_closed"}
    publish_lines(home, "few", ["one", "two"])
    refused(home.retrain("--dataset", "few"), 3, "documents", ">= 5")


@pytest.mark.long
def test_a_broken_line_is_named_by_shard_and_line(home, done):
    path = home.path.parent / "broken.jsonl"
    path.write_text('{"text": "a"}\n{"text": "b"\n')
    home.ok("dataset", "publish", "broken", path, "--text-field", "")
    ran = refused(
        home.retrain("--dataset", "broken", "--set", "validation.min_documents=1"), 3, "unreadable", "<= 0.00% of lines"
    )
    dry = home.retrain("--dataset", "broken", "--set", "validation.min_documents=1", "--dry-run")
    assert (dry.code, dry.statuses()["validate"], dry.statuses()["train"]) == (0, "pending", "pending")
    assert dry.stage("validate")["why"] == "its gate was closed last time", "a run would measure it again"
    told = home.run("validate", "broken", "-c", "tiny", "--set", "validation.min_documents=1").said["checks"]
    assert ran.statuses()["validate"] == "gate_closed"
    assert next(each["samples"][0] for each in told if each["name"] == "unreadable").startswith(
        "broken.jsonl:2: not a JSON line"
    )


@pytest.mark.long
def test_a_heldout_split_without_documents_is_refused(home, done):
    publish_lines(home, "small", [f"document number {i} " * 20 for i in range(10)])
    ran = home.retrain("--dataset", "small", "--set", "preprocessing.heldout_fraction=0.000001")
    refused(ran, 2, "heldout split has no documents", "raise")
    assert ran.statuses()["preprocess"] == "failed" and ran.said["error"]["stage"] == "preprocess"


@pytest.mark.long
def test_a_run_that_takes_too_long_or_too_much_memory_is_not_started(home, done):
    ran = refused(home.retrain("--set", "planning.max_minutes=0.0001"), 3, "training time", "planning.max_minutes")
    assert ran.statuses()["plan"] == "gate_closed" and ran.statuses()["train"] == "not_run"
    refused(home.retrain("--set", "planning.memory_per_rank_gib=0.001"), 3, "memory per rank")


def test_a_port_in_use_is_found_before_anything_is_spent(home, done):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ran = refused(home.retrain("--set", f"deployment.port={port}"), 2, str(port), "deployment.port")
    assert ran.said["stages"] == []


@pytest.mark.long
def test_a_loss_that_is_no_number_ends_the_job_with_its_own_error(home, done):
    ran = home.retrain("--set", "training.learning_rate=1e30", "--set", "training.gradient_clip=1e30")
    assert ran.code == 4, ran.stderr
    assert ran.statuses()["train"] == "failed" and "step" in ran.said["error"]["message"]
    assert "Traceback" not in ran.said["error"]["message"].splitlines()[0]


def test_no_room_on_the_disk_is_said_before_the_copy(fresh):
    disk = fresh.path.parent / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("a small disk can only be made by root")
    try:
        corpus = fresh.path.parent / "large.txt"
        corpus.write_text("some text\n" * 300_000)
        small = type(fresh)(disk / "home")
        ran = refused(small.run("dataset", "publish", "x", corpus), 6, "HEADWAY_HOME")
        assert "room" in ran.said["error"]["message"].lower() or "space" in ran.said["error"]["message"].lower()
        assert small.ok("dataset", "list").said["datasets"] == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.long
def test_the_home_works_on_after_all_of_this(home, done):
    ran = home.retrain()
    assert ran.code == 0, ran.stderr
    assert ran.statuses() in (everything_reused(), {**everything_reused(), "deploy": "ran"})


def test_doctor_names_what_is_broken(home, done, fresh):
    assert all(finding["ok"] for finding in home.ok("doctor").said["findings"])
    locked = type(fresh)(fresh.path.parent / "file")
    locked.path.write_text("no folder")
    ran = locked.run("doctor")
    assert ran.code == 6 and "HEADWAY_HOME" in ran.said["error"]["remedy"]
    refused(locked.retrain(), 2, "HEADWAY_HOME", str(locked.path))


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("retrain",),
        *(
            pytest.param(words, marks=pytest.mark.long)
            for words in (("dataset", "publish"), ("lineage",), ("endpoint", "stop"))
        ),
    ],
)
def test_help_teaches_without_importing_what_is_heavy(words):
    code = (
        "import sys; from deployments.cli.main import app; sys.argv = ['headway', *sys.argv[1:], '--help']\n"
        "try: app()\n"
        "finally: print([m for m in ('prefect', 'mlflow', 'torch', 'pandas', 'great_expectations') if m in sys.modules])"
    )
    said = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    assert said.returncode == 0 and "Usage" in said.stdout and said.stdout.rstrip().endswith("[]")

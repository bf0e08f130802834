"""What somebody who may write to the store, and to nothing else, cannot have done by what they write there.

Links are in test_local_store.py, approvals in test_approvals.py, the chain of the audit log in test_chained.py.
"""

import os
import socket
import threading
from pathlib import Path

import pytest
from pydantic import ValidationError
from waiting import limit

from tasks.artifacts import Cluster, Model
from tasks.common.errors import IntegrityError, Missing, Refused
from tasks.common.process import locked
from tasks.compute.job import Job
from tasks.compute.ray.backend import RayBackend
from tasks.compute.slurm.render import script
from tasks.compute.supervisor import with_lessons
from tasks.config.backends.ray import RayConfig
from tasks.config.backends.slurm import SlurmConfig
from tasks.config.cluster import ClusterConfig
from tasks.orchestration.stage import stage
from tasks.registry.backup.snapshot import is_taken
from tasks.registry.records import Record
from tasks.security.policy import RIGHTS, add_person, require_of
from tasks.storage.local import LocalStore
from tasks.storage.manifest import Provenance

JOB = Job(name="train", token="0" * 64, program="tasks.jobs.train", settings={}, inputs={})
NAMES = ["n1'\"\n#SBATCH --exclude=n2\n(id) > /tmp/x\n#", "n1\n", "-x", "n1;id", "$(id)", "", "n" * 300]


@stage(version=1)
def exported() -> Model:
    raise AssertionError("only its records are read")


@pytest.mark.parametrize("version", ["b4669226", "b466", "B" * 64, "0" * 65])
def test_a_record_that_names_a_version_by_its_first_digits_is_damaged(version):
    """Two look-ups of one reference could mean two versions: the one that is signed, and another one that is served."""
    value = {"name": "tiny", "version": version, "uri": "", "metrics": {}}
    record = Record(
        stage="exported", key="k" * 64, arguments={}, inputs=(), context=(), outputs=(), value=value, metrics={},
        seconds=0.0, created=0.0,
    )  # fmt: skip
    with pytest.raises(IntegrityError, match="damaged: version"):
        exported._value(record)


@pytest.mark.parametrize("name", NAMES)
def test_a_name_of_a_machine_in_the_journal_that_is_none_submits_nothing(name):
    with pytest.raises(IntegrityError, match="no name of one"):
        with_lessons(JOB, {"excluded_nodes": ["n2", name]})


@pytest.mark.parametrize("name", NAMES)
def test_a_record_of_a_cluster_with_such_a_name_is_damaged(name):
    sound = Cluster(name="c", backend="slurm", nodes=1, ranks_per_node=1, threads_per_rank=1, config=ClusterConfig())
    told = sound.model_dump(mode="json")
    for damaged in ({**told, "proven": [name]}, {**told, "config": {**told["config"], "exclude": [name]}}):
        with pytest.raises(ValidationError):
            Cluster.model_validate(damaged)
    assert Cluster.model_validate({**told, "proven": ["n1", "10.0.0.7:22", "vm_3", "n[1-4,7]"]})


def test_no_option_of_a_batch_script_begins_a_line_of_its_own(tmp_path):
    """Also where a name came another way than by the journal."""
    with pytest.raises(ValueError, match="line break"):
        script(JOB.model_copy(update={"excluded_nodes": (NAMES[0],)}), SlurmConfig(), tmp_path)


def test_no_ray_cluster_is_asked_but_the_one_of_the_settings(tmp_path):
    """The token of the cluster would go to whatever address a handle in the store names."""
    with socket.create_server(("127.0.0.1", 0)) as elsewhere:
        address = f"http://127.0.0.1:{elsewhere.getsockname()[1]}"
        backend = RayBackend(ClusterConfig(backend="ray", ray=RayConfig(address="http://127.0.0.1:1")))
        handle = {"submission_id": "headway-train-1", "address": address}
        (state,) = backend.states([(handle, tmp_path)])
        assert state.state == "unknown" and address in state.reason
        with pytest.raises(Missing, match="cluster.ray.address is http://127.0.0.1:1"):
            backend.cancel(handle, tmp_path)
        elsewhere.settimeout(0.2)
        with pytest.raises(TimeoutError):
            elsewhere.accept()


@pytest.mark.parametrize("place", ["documents/refs/tiny", "artifacts/model/tiny/" + "0" * 64 + "/manifest.json"])
def test_a_fifo_in_the_place_of_a_file_is_refused_and_not_waited_for(tmp_path, place):
    store = LocalStore(tmp_path)
    (tmp_path / place).parent.mkdir(parents=True)
    os.mkfifo(tmp_path / place)
    ended = []

    def look():
        with pytest.raises(IntegrityError, match="no plain file"):
            store.read("refs/tiny") if "documents" in place else store.manifest("model", "tiny", "0" * 64)
        ended.append(True)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(limit(10))
    assert ended


def test_a_lock_that_is_no_file_is_an_error_and_no_wait(tmp_path):
    os.mkfifo(tmp_path / ".lock")
    with pytest.raises(OSError, match="plain file"), locked(tmp_path / ".lock"):
        pass


def test_a_run_goes_no_further_than_those_who_handed_it_over(tmp_path, monkeypatch):
    """What `automatic` lets the platform do is not done for a person who may not, and used `headway run`."""
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path))
    require_of(tmp_path, frozenset(["ben"]), "promote", what="without a policy")
    add_person(tmp_path, "anna", RIGHTS)
    add_person(tmp_path, "ben", ("run",))
    for names in (frozenset(), frozenset(["anna"])):
        require_of(tmp_path, names, "promote", what="a model")
    for names, why in ((frozenset(["anna", "ben"]), "ben may not promote"), (None, "it is not known who")):
        with pytest.raises(Refused, match=why):
            require_of(tmp_path, names, "promote", what="a model")


@pytest.mark.parametrize("top", ["documents", "artifacts"])
def test_in_a_home_with_a_policy_the_tops_of_the_store_are_no_links_either(tmp_path, top):
    """A backup of the documents would have the keys of a home in it whose folder they are a link to."""
    (tmp_path / "home" / "keys").mkdir(parents=True)
    (tmp_path / "home" / "keys" / "signing.pem").write_text("PRIVATE KEY")
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / top).symlink_to(tmp_path / "home")
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "file").write_text("text")
    store = LocalStore(tmp_path / "store", home=tmp_path / "home")

    def publish():
        store.publish(tmp_path / "made", kind="tokens", inputs=(), provenance=Provenance(name="code"))

    def read():
        store.read("keys/signing.pem")

    def write():
        store.create("keys/new", b"text")

    for act in (store.list, read, write) if top == "documents" else (publish,):
        with pytest.raises(IntegrityError, match="link"):
            act("") if act == store.list else act()
    assert sorted(path.name for path in (tmp_path / "home").rglob("*")) == ["keys", "signing.pem"]


def test_a_backup_brings_back_nothing_but_what_backups_have():
    taken = (
        "policy.yaml",
        "keys/signing.pem",
        "endpoints/tiny/endpoint.json",
        "access/2026-11-27.jsonl",
        "mlflow/mlflow.db",
    )
    planted = (
        "endpoints/tiny/servers/aa/process.json", "endpoints/tiny/journal.jsonl", "jobs/x/cluster.json", "keys/approvals.key",
        "keys/decisions.jsonl", "platform/watch/process.json", "policy.yaml/x", "keys/deep/x.pub", "prefect/prefect.db",
    )  # fmt: skip
    assert [name for name in taken if not is_taken(Path(name))] == []
    assert [name for name in planted if is_taken(Path(name))] == []

"""`headway artifacts --history`, `diff`, `rollback` and `prune` as a person uses them."""

import json
import os
import sqlite3
import time
from dataclasses import dataclass, field

import pytest
from made_versions import backdate, make, make_many
from support import Home
from waiting import limit

from tasks.common.process import boot_id, process_started
from tasks.registry.refs import move_ref, read_ref
from tasks.security.signatures import sign
from tasks.storage import open_store
from tasks.storage.store import find


@dataclass(frozen=True)
class Desk(Home):
    """A home as one person sees it."""

    told: dict = field(default_factory=dict)

    def environment(self):
        kept = {name: value for name, value in super().environment().items() if not name.startswith("HEADWAY_")}
        return {**kept, "HEADWAY_HOME": str(self.path), **self.told}

    def words(self, *words):
        process = self.start(*words)
        out, err = process.communicate(timeout=limit(60))
        assert process.returncode == 0, err
        return out.splitlines()

    def refused(self, *words):
        ran = self.run(*words)
        assert ran.code == 2, ran.stderr
        return ran.said["error"]["message"]


@pytest.fixture
def desk(tmp_path):
    return Desk(tmp_path / "home")


@pytest.fixture
def store(desk):
    return open_store(desk.path)


def test_of_five_versions_the_second_is_meant_by_everything_after_a_rollback(desk, store, tmp_path):
    said = [{"metrics": {"documents": float(number)}} for number in range(1, 6)]
    made = [make(store, tmp_path / f"{n}", "dataset/tiny", {"data": f"{n}"}, **one).ref for n, one in enumerate(said)]
    second = made[1].partition("@")[2]
    ran = desk.ok("rollback", "dataset/tiny", "--to", second[:8], "--reason", "three is broken").said
    shown = {key: ran[key] for key in ("ref", "before", "changed", "dry_run", "moves_champion")}
    assert shown == {"ref": made[1], "before": made[4], "changed": True, "dry_run": False, "moves_champion": False}
    assert desk.ok("retrain", "-c", "tiny", "--dataset", "tiny", "--dry-run").said["dataset"] == made[1]
    assert desk.ok("lineage", "dataset/tiny").said["root"] == made[1]
    assert desk.ok("verify", "dataset/tiny").said["ref"] == made[1]

    told = desk.ok("artifacts", "tiny", "--history").said
    assert (told["name"], told["current"]) == ("dataset/tiny", second)
    assert [row["number"] for row in told["history"]] == [6, 5, 4, 3, 2, 1]
    newest, *_, first = told["history"]
    assert (newest["action"], newest["reason"], newest["version"]) == ("rollback", "three is broken", second)
    assert newest["before"] == made[4].partition("@")[2] and newest["there"] and newest["who"]
    assert [row["current"] for row in told["history"]] == [True, *[False] * 5]
    assert newest["changed"]["files"] == {"added": 0, "removed": 0, "changed": 1}
    documents = {"name": "documents", "before": 5.0, "after": 2.0, "difference": -3.0}
    assert newest["changed"]["metrics"] == [documents] and first["changed"] is None

    entry = desk.ok("audit-log").said["entries"][0]
    assert (entry["action"], entry["what"], entry["reason"]) == ("rollback", made[1], "three is broken")
    assert not desk.ok("rollback", "dataset/tiny", "--to", second, "--reason", "again").said["changed"]
    assert len(desk.ok("artifacts", "tiny", "--history").said["history"]) == 6


def test_people_read_what_happened(desk, store, tmp_path):
    made = make_many(store, tmp_path / "made", "dataset/tiny", 3)
    assert desk.words("rollback", "dataset/tiny", "--dry-run") == [
        f"dataset/tiny@{made[1].version[:12]} would become the current one; before: {made[2].version[:12]}",
        "files: 0 added, 0 removed, 1 changed, 0 the same",
        "  ~ data  17 -> 17 bytes",
    ]
    assert find(store, "dataset", "tiny").version == made[2].version
    done = desk.words("rollback", "dataset/tiny", "--reason", "wrong")
    assert done[0] == f"dataset/tiny@{made[1].version[:12]} is the current one; before: {made[2].version[:12]}"
    title, first, *rest = desk.words("artifacts", "dataset/tiny", "--history")
    assert title == "dataset/tiny" and [line[0] for line in (first, *rest)] == ["*", " ", " ", " "]
    assert first.split()[1] == made[1].version[:12] and first.endswith("files ~1  (wrong)")
    assert desk.words("diff", made[0].ref, made[0].ref) == [
        f"dataset/tiny@{made[0].version[:12]} and dataset/tiny@{made[0].version[:12]} are the same version"
    ]


def test_a_long_difference_is_cut_for_people_and_whole_for_programs(desk, store, tmp_path):
    one = make(store, tmp_path / "one", "dataset/tiny", {"same": "1"}, metrics={"documents": 1.0})
    many = {"same": "1", **{f"{number:03}": "new" for number in range(50)}}
    two = make(store, tmp_path / "two", "dataset/other", many, metrics={"documents": 51.0}, config={"a": {"b": 1}})
    lines = desk.words("diff", one.ref, two.ref)
    assert lines[1] == "files: 50 added, 0 removed, 0 changed, 1 the same"
    assert lines[2] == "  + 000  3 bytes" and lines[22] == "  and 30 more: see --json"
    assert lines[23:] == ["configuration:", "  a.b  None -> 1", "metrics:", "  documents  1 -> 51  (+50)"]
    said = desk.ok("diff", "dataset/tiny", "dataset/other").said
    assert len(said["files"]["added"]) == 50 and said["files"]["unchanged"] == 1 and not said["same"]
    assert (said["before"], said["after"]) == (one.ref, two.ref)
    assert said["code"] == {"before": None, "after": None} and said["inputs"] == []


def test_what_cannot_be_done_is_said_and_nothing_changes(desk, store, tmp_path):
    made = make_many(store, tmp_path / "made", "dataset/tiny", 2)
    make(store, tmp_path / "tokens", "tokens/tiny", {"data": "1"})
    for words, said in (
        (("rollback", "dataset/tiny"), "say why"),
        (("rollback", "endpoint/tiny", "--reason", "x"), "there is no endpoint 'tiny'"),
        (("diff", "dataset/tiny", "tokens/tiny"), "different kinds"),
        (("diff", "dataset/tiny", "endpoint/tiny"), "is no artifact"),
        (("artifacts", "tiny", "--history"), "name one of them"),
        (("artifacts", "dataset/tiny"), "add --history"),
        (("prune", "--apply"), "say why"),
        (("prune", "tiny"), "is not a kind"),
        (("prune", made[0].ref), "is no name of versions"),
    ):
        assert said in desk.refused(*words), words
    assert find(store, "dataset", "tiny").version == made[1].version


def test_who_has_not_the_right_is_refused(desk, store, tmp_path):
    made = make_many(store, tmp_path / "made", "dataset/tiny", 4)
    backdate(store, 7200)
    anna = Desk(desk.path, {"HEADWAY_PERSON": "anna", "HEADWAY_TOKEN": desk.ok("person", "add", "anna").said["token"]})
    token = anna.ok("person", "add", "ben", "--may", "roll_back").said["token"]
    ben = Desk(desk.path, {"HEADWAY_PERSON": "ben", "HEADWAY_TOKEN": token})
    assert "name" in desk.refused("rollback", "dataset/tiny", "--reason", "x")
    assert "override" in ben.refused("prune", "--keep", "2", "--apply", "--reason", "x")
    assert len(list(store.manifests("dataset"))) == 4
    ben.ok("rollback", "dataset/tiny", "--reason", "x")
    told = desk.ok("artifacts", "tiny", "--history").said["history"][0]
    assert (told["who"], told["version"]) == ("ben", made[2].version)
    assert [one["ref"] for one in anna.ok("prune", "--keep", "2", "--apply", "--reason", "x").said["goes"]] == [
        made[0].ref
    ]


def test_who_may_roll_back_crowns_no_model_that_never_was_champion(desk, store, tmp_path):
    made = make_many(store, tmp_path / "made", "model/tiny", 3)
    for model in made:
        sign(store, desk.path, model)
    move_ref(store, "tiny/champion", made[1].ref, inputs=(), reason="deployed")
    anna = Desk(desk.path, {"HEADWAY_PERSON": "anna", "HEADWAY_TOKEN": desk.ok("person", "add", "anna").said["token"]})
    token = anna.ok("person", "add", "ben", "--may", "roll_back").said["token"]
    ben = Desk(desk.path, {"HEADWAY_PERSON": "ben", "HEADWAY_TOKEN": token})
    ben.ok("rollback", "model/tiny", "--to", made[1].version, "--reason", "x")
    assert "may not promote" in ben.refused("rollback", "model/tiny", "--to", made[2].version, "--reason", "x")
    assert read_ref(store, "tiny/champion") == made[1].ref


def test_a_model_that_is_rolled_back_is_the_champion_again_in_mlflow_too(desk, store, tmp_path):
    models = make_many(store, tmp_path / "made", "model/tiny", 2)
    for model in models:
        sign(store, desk.path, model)
        move_ref(store, "tiny/champion", model.ref, inputs=(), reason="deployed")
    ran = desk.ok("rollback", "model/tiny", "--reason", "worse on tickets").said
    assert ran["moves_champion"] and read_ref(store, "tiny/champion") == models[0].ref
    desk.wait_for("lineage/*/done")
    with sqlite3.connect(desk.path / "mlflow" / "mlflow.db") as database:
        query = (
            "select alias, value from registered_model_aliases a join model_version_tags t "
            "on a.name = t.name and a.version = t.version and t.key = 'headway.uri'"
        )
        assert dict(database.execute(query).fetchall()) == {"champion": store.uri_of(models[0])}


def test_what_endpoints_serve_and_runs_at_work_use_is_never_pruned(desk, store, tmp_path):
    data = make_many(store, tmp_path / "made", "dataset/tiny", 5)
    models = [make(store, tmp_path / f"m{n}", "model/tiny", {"onnx": f"{n}"}, inputs=[of]) for n, of in enumerate(data)]
    backdate(store, 7200)
    (desk.path / "endpoints" / "tiny").mkdir(parents=True)
    record = {"model_ref": models[0].ref, "previous": {"model_ref": models[3].ref}}
    (desk.path / "endpoints" / "tiny" / "endpoint.json").write_text(json.dumps(record))
    run_at_work(desk, pid=os.getpid(), inputs=[data[1].ref])
    run_at_work(desk, pid=2**22 + 1, inputs=[data[2].ref])  # one that is dead
    said = desk.ok("prune", "--keep", "2").said
    why = {one["ref"]: one["why"] for one in said["kept"]}
    assert why[models[0].ref] == ["endpoint/tiny serves it"]
    assert "endpoint/tiny would go back to it" in why[models[3].ref]
    assert why[data[0].ref] == [f"model/tiny@{models[0].version[:12]} stands on it"]
    assert why[data[1].ref] == [f"the run {str(os.getpid())[:8]} uses it"]
    goes = [data[2], models[1], models[2]]
    assert [one["ref"] for one in said["goes"]] == [manifest.ref for manifest in goes] and not said["applied"]
    assert said["bytes"] == sum(manifest.bytes for manifest in goes) and said["failed"] == []
    assert all(store.present(manifest) for manifest in goes)
    lines = desk.words("prune", "dataset/tiny", "--keep", "2")
    assert [line.split()[0] for line in lines[:-1]] == ["stays", "stays", "goes", "stays", "stays"]
    assert lines[-1].startswith("1 of 5 version(s) would go")

    done = desk.ok("prune", "--keep", "2", "--apply", "--reason", "room").said
    assert done["applied"] and [one["ref"] for one in done["goes"]] == [manifest.ref for manifest in goes]
    assert not any(store.present(manifest) for manifest in goes)
    assert desk.ok("prune", "--keep", "2").said["goes"] == []
    told = desk.ok("artifacts", "dataset/tiny", "--history").said["history"]
    assert [(row["action"], row["there"], row["reason"]) for row in told[:1]] == [("delete", False, "room")]


def run_at_work(desk, *, pid, inputs):
    """The folder of a flow run as its process leaves it while it works."""
    folder = desk.path / "runs" / str(pid)
    folder.mkdir(parents=True)
    handle = {"pid": pid, "started": process_started(os.getpid()), "boot_id": boot_id(), "host": os.uname().nodename}
    (folder / "handle.json").write_text(json.dumps(handle))
    outcome = {"inputs": inputs, "outputs": []}
    event = {"event": "ended", "time": time.time(), "outcome": outcome}
    (folder / "events.jsonl").write_text(json.dumps(event) + "\n")


def test_what_could_not_be_deleted_is_told_and_the_rest_is_gone(desk, store, tmp_path):
    made = {name: make_many(store, tmp_path / name, f"dataset/{name}", 3) for name in ("free", "stuck")}
    backdate(store, 7200)
    lock = store.root / "artifacts" / "dataset" / "stuck" / ".lock"
    lock.unlink()
    lock.mkdir()
    ran = desk.run("prune", "dataset", "--keep", "2", "--apply", "--reason", "room")
    assert ran.code == 6 and "1 of 2 version(s) could not be deleted" in ran.said["error"]["message"]
    assert [one["ref"] for one in ran.said["goes"]] == [made["free"][0].ref]
    assert [one["ref"] for one in ran.said["failed"]] == [made["stuck"][0].ref]

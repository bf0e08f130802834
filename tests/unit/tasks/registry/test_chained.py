"""`headway verify` of everything: a document that is gone, forged, or lost its seal is told; what older releases wrote is not."""

import json
import shutil
import time
from datetime import UTC, datetime

import pytest
from made_versions import make

from tasks.common.seal import opened, sealed
from tasks.registry import approvals, records, verification
from tasks.registry.promoting import roll_back, way_back
from tasks.registry.refs import move_ref
from tasks.registry.retention import Rule, judge, prune
from tasks.registry.transfer import copy_artifact
from tasks.registry.verification import everything
from tasks.security.signatures import sign
from tasks.storage import open_store
from tasks.storage.local import LocalStore

pytestmark = pytest.mark.unit


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home with two signed models, the second champion, a record, and an approval of one of two questions."""
    monkeypatch.setattr(verification, "ANOTHER_LOOK_SECONDS", 0.0)
    home = tmp_path / "home"
    store = open_store(home)
    for number in "12":
        model = make(
            store, tmp_path / f"model{number}", "model/tiny", {"onnx": number}, created=datetime.now(UTC).isoformat()
        )
        sign(store, home, model)
        move_ref(store, "tiny/challenger", model.ref, inputs=(), reason="exported")
        move_ref(store, "tiny/champion", model.ref, inputs=(), reason="deployed")
    record = records.Record(
        stage="train", key="k" * 64, arguments={}, inputs=(), context=(), outputs=(model.ref,), value={}, metrics={},
        seconds=1.0, created=time.time(),
    )  # fmt: skip
    records.save(store, record)
    given = approvals.Approval(
        kind="deploy", subject=model.ref, person="anna", reason="good", time=time.time(), flow_run="f"
    )
    approvals.keep(home, store, given)
    return home


def documents(home):
    return home / "store" / "documents"


def damaged(home):
    return {name: found[0] for name, found in everything(open_store(home), keys=home / "keys") if found}


def strip(path):
    """As an editor, or an older release, would write it: without a seal."""
    data = opened(path.read_bytes(), where="here")
    assert data != path.read_bytes()
    path.write_bytes(data)


def edit(path, **changes):
    """As a forger would, who makes seals."""
    said = json.loads(opened(path.read_bytes(), where="here"))
    path.write_bytes(sealed(json.dumps({**said, **changes}).encode()))


@pytest.mark.parametrize(
    "pattern",
    ["refs/tiny/champion.json", "records/train/*.json", "history/model/tiny/00000002.json", "heads/audit.json",
     "journal/approvals/deploy/model/tiny/*/*/*.json"],
)  # fmt: skip
def test_a_document_that_lost_its_seal_is_damaged(home, pattern):
    assert damaged(home) == {}
    (path,) = documents(home).glob(pattern)
    strip(path)
    found = damaged(home)
    assert list(found) == [path.relative_to(documents(home)).as_posix()] and found.popitem()[1].actual == "no seal"


def test_a_manifest_that_lost_its_seal_is_damaged(home):
    path = min((home / "store" / "artifacts").rglob("manifest.json"))
    strip(path)
    assert [(name.partition("@")[0], found.actual) for name, found in damaged(home).items()] == [
        ("model/tiny", "no seal")
    ]


@pytest.mark.parametrize("name", ["journal.jsonl", "endpoint.json"])
def test_a_file_of_an_endpoint_that_lost_a_seal_is_damaged(home, name):
    path = home / "endpoints" / "tiny" / name
    path.parent.mkdir(parents=True)
    values = [{"event": event, "time": time.time()} for event in ("begin", "done")][: 2 if name.endswith("l") else 1]
    lines = [sealed(json.dumps(value).encode()) for value in values]
    cut = [b'{"event": "cut'] if name.endswith("l") else []
    path.write_bytes(b"\n".join([*lines, *cut]))
    assert damaged(home) == {}, "a line that a kill cut is none"
    path.write_bytes(b"\n".join([opened(lines[0], where=""), *lines[1:], *cut]))
    assert "has no seal" in damaged(home)[f"endpoints/tiny/{name}"].actual


def test_a_champion_whose_ref_is_deleted_or_put_back_is_told(home):
    ref = documents(home) / "refs" / "tiny" / "champion.json"
    kept = ref.read_bytes()
    first, second = (json.loads(opened(kept, where=""))[key] for key in ("before", "target"))
    ref.unlink()
    assert damaged(home)["refs/tiny/champion.json"].problem == "missing"
    ref.write_bytes(kept)
    edit(ref, target=first, before=None, past=[])
    assert damaged(home)["refs/tiny/champion.json"].actual == first
    ref.write_bytes(kept)
    assert damaged(home) == {} and second
    shutil.copytree(ref.parent, ref.parent.with_name("other"))
    assert damaged(home)["refs/other/champion.json"].actual == "none", "no entry of the audit log made it"


def test_the_last_change_of_a_history_that_is_deleted_is_told(home):
    (documents(home) / "history" / "model" / "tiny" / "00000002.json").unlink()
    (problem,) = damaged(home).values()
    assert (problem.path, problem.problem) == ("history/model/tiny", "missing") and "publish" in problem.expected


def test_a_gap_in_a_history_is_told(home):
    (documents(home) / "history" / "model" / "tiny" / "00000001.json").unlink()
    assert "history/model/tiny/00000002.json" in damaged(home)


@pytest.mark.parametrize("with_seal", [False, True])
@pytest.mark.parametrize("with_entry", [False, True])
def test_a_forged_change_of_a_history_is_told(home, with_seal, with_entry):
    last = documents(home) / "history" / "model" / "tiny" / "00000002.json"
    first = json.loads(opened(last.with_name("00000001.json").read_bytes(), where=""))
    forged = {**first, "number": 3, "action": "rollback", "time": time.time()}
    forged = forged if with_entry else {**forged, "entry": None, "entry_hash": ""}
    data = json.dumps(forged).encode()
    last.with_name("00000003.json").write_bytes(sealed(data) if with_seal else data)
    assert list(damaged(home)) == ["history/model/tiny/00000003.json"]


def test_an_approval_that_is_copied_to_another_question_is_told(home):
    (path,) = documents(home).glob("journal/approvals/deploy/model/tiny/*/*/*.json")
    other = path.parent.with_name("0" * 16) / path.name
    other.parent.mkdir()
    shutil.copy(path, other)
    (problem,) = damaged(home).values()
    assert "another question" in problem.actual and ("0" * 16) in problem.path


def test_what_is_done_by_commands_is_sound(home, tmp_path):
    """Published again, rolled back, promoted, copied, deleted: each leaves what the audit log says."""
    store, keys = open_store(home), home / "keys"
    made = [make(store, tmp_path / f"data{n}", "dataset/tiny", {"data": str(n)}) for n in range(4)]
    make(store, tmp_path / "data3", "dataset/tiny", {"data": "3"})
    roll_back(store, way_back(store, "dataset/tiny"), keys=keys, reason="wrong")
    roll_back(store, way_back(store, "model/tiny"), keys=keys, reason="wrong")
    make(store, tmp_path / "data3", "dataset/tiny", {"data": "3"})
    target = LocalStore(tmp_path / "target")
    copy_artifact(store, target, made[3].ref, home=home, reason="to others")
    for path in (home / "store" / "artifacts").rglob("manifest.json"):
        path.touch()
    verdicts = [v for v in judge(store, Rule(keep=2), kind="dataset", name="tiny", used={})]
    assert list(
        prune(
            store, [v.model_copy(update={"why": ()}) for v in verdicts if v.manifest.ref == made[0].ref], reason="old"
        )
    )
    assert damaged(home) == {}
    assert dict(verification.chained(target)) == {}


def test_a_change_that_was_killed_and_made_again_is_sound(home, tmp_path, monkeypatch):
    store = open_store(home)
    last = documents(home) / "history" / "dataset" / "tiny" / "00000001.json"
    make(store, tmp_path / "data", "dataset/tiny", {"data": "1"})
    last.unlink()  # as if killed before it was written
    assert list(damaged(home)) == [next(iter(damaged(home)))] and "history/dataset/tiny" in next(iter(damaged(home)))
    make(store, tmp_path / "data", "dataset/tiny", {"data": "1"})
    assert damaged(home) == {}


def test_what_was_written_before_there_were_seals_is_sound_without(home):
    """As a home of an earlier release, in which the newest release then published."""
    for path in [*documents(home).rglob("*.json"), *(home / "store" / "artifacts").rglob("manifest.json")]:
        path.write_bytes(opened(path.read_bytes(), where="here"))
    assert damaged(home) != {}
    log = documents(home) / "audit"
    for path in sorted(log.glob("*.json")):
        said = json.loads(path.read_bytes())
        path.write_text(json.dumps({key: value for key, value in said.items() if key != "seals"}, indent=1))
    assert {name.partition("/")[0] for name in damaged(home)} <= {"audit log", "history", "journal", "model"}, (
        "edited hashes only"
    )
    assert verification.read_chain(open_store(home)).sealing[1] == float("inf")
    assert not any(found.actual == "no seal" for found in damaged(home).values())

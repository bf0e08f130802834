"""Rolling back: what becomes current, what refuses to, and what a kill at any point leaves."""

import json
import multiprocessing
import os

import pytest
from made_versions import make, make_many
from waiting import limit

from tasks.common.errors import Conflict, IntegrityError, Unknown
from tasks.registry.promoting import roll_back, way_back
from tasks.registry.refs import made_from, move_ref, read_ref
from tasks.security.audit import entries
from tasks.security.signatures import sign
from tasks.security.trust import OWN, add_key, revoke_key
from tasks.signing.keys import LocalKey, ensure_key
from tasks.storage import open_store
from tasks.storage.history import changes, note_change
from tasks.storage.local import LocalStore
from tasks.storage.store import find

pytestmark = pytest.mark.unit

fork = multiprocessing.get_context("fork")


@pytest.fixture
def store(tmp_path):
    return open_store(tmp_path / "home")


@pytest.fixture
def keys(tmp_path):
    return tmp_path / "home" / "keys"


@pytest.fixture
def five(store, tmp_path):
    return make_many(store, tmp_path / "made", "dataset/tiny", 5)


@pytest.fixture
def models(store, keys, tmp_path):
    """Three signed models, each from a checkpoint of its own; the last one is the champion."""
    made = []
    for number, checkpoint in enumerate(make_many(store, tmp_path / "checkpoints", "checkpoint/tiny", 3)):
        model = make(store, tmp_path / f"model{number}", "model/tiny", {"onnx": f"{number}"}, inputs=[checkpoint])
        sign(store, keys.parent, model)
        move_ref(store, "tiny/champion", model.ref, inputs=model.provenance.inputs, reason="deployed")
        made.append(model)
    return made


def back(store, keys, ref, *, to="", **how):
    return roll_back(store, way_back(store, ref, to=to), keys=keys, reason="it was wrong", **how)


def test_the_old_version_is_current_again_and_everybody_can_read_why(store, keys, five):
    change = back(store, keys, "dataset/tiny")
    assert find(store, "dataset", "tiny").version == five[3].version
    assert (change.number, change.action, change.before) == (6, "rollback", five[4].version)
    assert changes(store, "dataset", "tiny")[-1] == change and change.reason == "it was wrong"
    entry = next(entries(store))
    assert (entry.action, entry.right, entry.what) == ("rollback", "roll_back", five[3].ref)
    assert (entry.before, entry.after, entry.reason) == (five[4].version, five[3].version, "it was wrong")
    assert not store.verify(find(store, "dataset", "tiny"))


def test_without_a_version_each_goes_further_back_until_nothing_is_before(store, keys, five):
    found = []
    for _ in range(4):
        back(store, keys, "dataset/tiny")
        found.append(find(store, "dataset", "tiny").version)
    assert found == [manifest.version for manifest in reversed(five[:4])]
    with pytest.raises(ValueError, match="nothing stood before dataset/tiny@.*--to"):
        way_back(store, "dataset/tiny")


def test_publishing_goes_on_from_what_was_rolled_back_to(store, keys, five, tmp_path):
    back(store, keys, "dataset/tiny", to=five[1].version[:8])
    six = make(store, tmp_path / "six", "dataset/tiny", {"data": "six"})
    assert find(store, "dataset", "tiny").version == six.version
    assert way_back(store, "dataset/tiny").after.version == five[1].version


def test_equal_content_published_after_a_rollback_is_current_again(store, keys, five, tmp_path):
    back(store, keys, "dataset/tiny")
    again = make(store, tmp_path / "made" / "5", "dataset/tiny", {"data": "5 of dataset/tiny"})
    assert again.version == five[4].version == find(store, "dataset", "tiny").version


def test_the_current_one_needs_nothing(store, five):
    assert not way_back(store, "dataset/tiny", to=five[4].version).needed
    assert len(changes(store, "dataset", "tiny")) == 5


def test_a_damaged_version_is_refused_before_anything_is_written(store, keys, five):
    path = store.fetch(five[1]) / "data"
    path.chmod(0o644)
    path.write_text("2 of dataset/tinz")
    logged = len(list(entries(store)))
    with pytest.raises(IntegrityError, match=r"does not become current: .* data \(sha256\)") as caught:
        back(store, keys, "dataset/tiny", to=five[1].version)
    assert "headway artifacts dataset/tiny --history" in caught.value.remedy
    assert find(store, "dataset", "tiny").version == five[4].version
    assert len(changes(store, "dataset", "tiny")) == 5 and len(list(entries(store))) == logged


def test_an_unsigned_model_and_one_signed_by_another_key_are_refused(store, keys, models, tmp_path):
    (store.root / "artifacts" / "model" / "tiny" / models[1].version / "signature.json").unlink()
    with pytest.raises(IntegrityError, match="does not become current"):
        back(store, keys, "model/tiny")
    sign(store, tmp_path / "other", models[0])
    with pytest.raises(IntegrityError, match="does not become current"):
        back(store, keys, "model/tiny", to=models[0].version)
    assert read_ref(store, "tiny/champion") == models[2].ref == find(store, "model", "tiny").ref


def test_what_a_revoked_key_signed_does_not_become_current(store, keys, models, tmp_path):
    add_key(keys.parent, "other", LocalKey(ensure_key(tmp_path / "other")).public_key(), ("*/*",))
    revoke_key(keys.parent, OWN, "it leaked")
    with pytest.raises(IntegrityError, match="does not become current: .* is revoked since .*: it leaked"):
        back(store, keys, "model/tiny")
    assert read_ref(store, "tiny/champion") == models[2].ref == find(store, "model", "tiny").ref


def test_a_models_champion_goes_with_it_and_is_told(store, keys, models):
    crowned = []
    back(store, keys, "model/tiny", when_champion=crowned.append)
    assert read_ref(store, "tiny/champion") == models[1].ref and [m.ref for m in crowned] == [models[1].ref]
    assert made_from(store, "tiny/champion") == list(models[1].provenance.inputs)
    assert find(store, "model", "tiny").version == models[1].version


def test_a_champion_that_is_another_version_stays(store, keys, models):
    move_ref(store, "tiny/champion", models[0].ref, inputs=models[0].provenance.inputs, reason="better after all")
    crowned = []
    assert not way_back(store, "model/tiny").moves_champion
    back(store, keys, "model/tiny", when_champion=crowned.append)
    assert read_ref(store, "tiny/champion") == models[0].ref and not crowned
    assert find(store, "model", "tiny").version == models[1].version


@pytest.fixture
def refused(store, keys, tmp_path):
    """Four signed models: the first and the third were promoted, the second and the fourth only exported."""
    made = []
    for number in range(4):
        model = make(store, tmp_path / f"model{number}", "model/tiny", {"onnx": f"{number}"})
        sign(store, keys.parent, model)
        if number in (0, 2):
            move_ref(store, "tiny/champion", model.ref, inputs=(), reason="deployed")
        made.append(model)
    return made


def test_a_model_that_never_was_champion_is_not_crowned_by_the_right_to_roll_back(store, keys, refused):
    first, second, third, fourth = refused
    back(store, keys, "model/tiny", to=third.version)
    assert read_ref(store, "tiny/champion") == third.ref == find(store, "model", "tiny").ref
    for never in (second, fourth):
        assert way_back(store, "model/tiny", to=never.version).right == "promote"
    assert way_back(store, "model/tiny", to=first.version).right == "roll_back"
    back(store, keys, "model/tiny", to=first.version)
    assert way_back(store, "model/tiny", to=third.version).right == "roll_back", "forward again"


def test_from_a_champion_one_goes_back_to_the_champion_before(store, keys, refused):
    first, _, third, _ = refused
    back(store, keys, "model/tiny", to=third.version)
    step = way_back(store, "model/tiny")
    assert (step.after.version, step.right) == (first.version, "roll_back")
    move_ref(
        store,
        "tiny/champion",
        first.ref,
        inputs=(),
        reason="as a rollback that was killed before its history",
        back=True,
    )
    back(store, keys, "model/tiny")
    assert read_ref(store, "tiny/champion") == first.ref == find(store, "model", "tiny").ref


@pytest.mark.parametrize(
    ("ref", "to", "said"),
    [
        ("endpoint/tiny", "", "is no artifact: `headway rollback endpoint/NAME`"),
        ("dataset/tiny@12345678", "", "say `headway rollback dataset/tiny --to 12345678`"),
        ("tiny", "", "is not a reference"),
        ("dataset/tiny", "xyz", "is not a reference"),
        ("dataset/tiny", "0" * 64, "is not in"),
        ("dataset/other", "", "is not in"),
    ],
)
def test_what_cannot_be_rolled_back_is_said(store, five, ref, to, said):
    with pytest.raises((ValueError, Unknown), match=said):
        way_back(store, ref, to=to)


def test_what_validation_left_never_becomes_current(store, five, tmp_path):
    left = make(store, tmp_path / "left", "dataset/tiny", {"data": "less"}, inputs=[five[4]], stage="validate")
    with pytest.raises(ValueError, match="what validation left"):
        way_back(store, "dataset/tiny", to=left.version)


def test_what_is_published_meanwhile_is_not_rolled_back_unseen(store, keys, five, tmp_path):
    step = way_back(store, "dataset/tiny")
    six = make(store, tmp_path / "six", "dataset/tiny", {"data": "six"})
    with pytest.raises(Conflict, match="became current meanwhile"):
        roll_back(store, step, keys=keys, reason="late")
    assert find(store, "dataset", "tiny").version == six.version
    assert next(entries(store)).outcome == "failed"


def test_a_promotion_made_meanwhile_is_not_undone(store, keys, models):
    step = way_back(store, "model/tiny")
    move_ref(store, "tiny/champion", models[0].ref, inputs=(), reason="better after all")
    crowned = []
    with pytest.raises(Conflict, match="became the champion meanwhile"):
        roll_back(store, step, keys=keys, reason="late", when_champion=crowned.append)
    assert read_ref(store, "tiny/champion") == models[0].ref and not crowned


class Dying(LocalStore):
    """The store of a process that is killed just before or after it writes a document."""

    def __init__(self, root, prefix, after):
        super().__init__(root)
        self.prefix, self.after = prefix, after

    def create(self, key, data):
        return self._or_die(key, lambda: LocalStore.create(self, key, data))

    def replace(self, key, data, *, etag):
        return self._or_die(key, lambda: LocalStore.replace(self, key, data, etag=etag))

    def _or_die(self, key, write):
        if not key.startswith(self.prefix):
            return write()
        if self.after:
            write()
        os._exit(9)


@pytest.mark.integration
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("prefix", ["audit", "refs", "history"])
def test_a_kill_leaves_the_old_or_the_new_and_the_same_command_completes_it(store, keys, models, prefix, after):
    dying = Dying(store.root, prefix, after)
    process = fork.Process(target=lambda: back(dying, keys, "model/tiny"))
    process.start()
    process.join(limit(60))
    assert process.exitcode == 9
    done = prefix == "history" and after
    assert find(store, "model", "tiny").version == models[1 if done else 2].version
    rolled = [change for change in changes(store, "model", "tiny") if change.action == "rollback"]
    told = [entry for entry in entries(store) if entry.action == "rollback"]
    assert len(told) >= len(rolled) == int(done)  # never a change without its entry
    crowned = []
    if not done:
        back(store, keys, "model/tiny", when_champion=crowned.append)
        assert [model.ref for model in crowned] == [models[1].ref]
    assert find(store, "model", "tiny").ref == read_ref(store, "tiny/champion") == models[1].ref
    assert [c.version for c in changes(store, "model", "tiny") if c.action == "rollback"] == [models[1].version]


@pytest.mark.integration
def test_of_two_at_once_the_history_tells_both(store, keys, five):
    meet = fork.Barrier(2)

    def one():
        mine = LocalStore(store.root)
        step = way_back(mine, "dataset/tiny")
        meet.wait(limit(20))
        try:
            roll_back(mine, step, keys=keys, reason="both")
        except Conflict:
            mine.create(f"told/{os.getpid()}", b"")

    processes = [fork.Process(target=one) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(limit(60))
    rolled = [change.version for change in changes(store, "dataset", "tiny") if change.action == "rollback"]
    assert len(rolled) + len(store.list("told")) == 2
    assert set(rolled) == {five[3].version}  # both meant the same step: none went two back
    assert find(store, "dataset", "tiny").version == five[3].version


def test_rolling_back_moves_no_bytes(store, keys, five):
    before = {path: path.stat().st_mtime_ns for path in (store.root / "artifacts").rglob("*") if path.is_file()}
    back(store, keys, "dataset/tiny", to=five[0].version)
    assert before == {
        path: path.stat().st_mtime_ns
        for path in (store.root / "artifacts").rglob("*")
        if path.is_file() and path.name != ".lock"
    } | {path: stamp for path, stamp in before.items() if path.name == ".lock"}


def test_a_history_of_another_headway_is_read_on(store, keys, five):
    """A change with fields that this Headway does not know counts like any other."""
    change = note_change(store, "dataset", "tiny", action="rollback", version=five[0].version)
    path = store.root / "documents" / "history" / "dataset" / "tiny" / f"{change.number:08d}.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "approved_by": "anna"}))
    assert way_back(store, "dataset/tiny", to=five[2].version).before.version == five[0].version

"""Champion, challenger and previous stay true; only what is sound and signed is promoted; of two promotions one wins."""

import json
import multiprocessing

import pytest
from made_versions import make, make_many
from waiting import limit

from tasks.common.errors import Conflict, IntegrityError, Unknown
from tasks.registry.promoting import compared_with, promote, roll_back, way_back, would_promote
from tasks.registry.refs import aliases, move_ref, place_of, read_ref
from tasks.registry.retention import Rule, judge
from tasks.security.audit import entries
from tasks.security.signatures import sign
from tasks.security.trust import OWN, add_key, revoke_key
from tasks.signing.keys import LocalKey, ensure_key
from tasks.storage import open_store
from tasks.storage.local import LocalStore

fork = multiprocessing.get_context("fork")


@pytest.fixture
def store(tmp_path):
    return open_store(tmp_path / "home")


@pytest.fixture
def keys(tmp_path):
    return tmp_path / "home" / "keys"


@pytest.fixture
def models(store, keys, tmp_path):
    """Four signed models; nobody is champion."""
    made = []
    for number, checkpoint in enumerate(make_many(store, tmp_path / "checkpoints", "checkpoint/tiny", 4)):
        model = make(store, tmp_path / f"model{number}", "model/tiny", {"onnx": f"{number}"}, inputs=[checkpoint])
        sign(store, keys.parent, model)
        made.append(model)
    return made


def names(store, models):
    """The aliases, each with the number of its model."""
    number = {model.ref: place for place, model in enumerate(models)}
    return {alias: number[ref] for alias, ref in aliases(store, "tiny").items()}


def make_champion(store, model):
    move_ref(store, "tiny/champion", model.ref, inputs=model.provenance.inputs, reason="better")


def export(store, model):
    move_ref(store, "tiny/challenger", model.ref, inputs=model.provenance.inputs, reason="exported, not promoted")


def test_the_names_are_true_after_each_export_promotion_and_rollback(store, keys, models):
    assert names(store, models) == {}
    export(store, models[0])
    assert names(store, models) == {"challenger": 0}
    make_champion(store, models[0])
    assert names(store, models) == {"champion": 0}
    export(store, models[1])
    assert names(store, models) == {"champion": 0, "challenger": 1}
    export(store, models[2])  # nobody promoted the one before
    make_champion(store, models[2])
    export(store, models[3])
    assert names(store, models) == {"champion": 2, "previous": 0, "challenger": 3}
    promote(store, models[3].ref, keys=keys, reason="by hand")
    assert names(store, models) == {"champion": 3, "previous": 2}
    roll_back(store, way_back(store, "model/tiny"), keys=keys, reason="it was wrong")
    assert names(store, models) == {"champion": 2, "previous": 0}  # not what was rolled back from
    promote(store, models[0].ref, keys=keys, reason="the first was best")
    assert names(store, models) == {"champion": 0, "previous": 2}
    move_ref(store, "tiny/champion", models[2].ref, inputs=(), reason="after all not", back=True)
    assert names(store, models) == {"champion": 2}


def test_a_ref_of_an_older_release_knows_what_was_before(store, models):
    old = {"target": models[1].ref, "inputs": [], "before": models[0].ref, "time": 1.0}
    assert store.replace("refs/tiny/champion.json", json.dumps(old).encode(), etag=None)
    assert names(store, models) == {"champion": 1, "previous": 0}
    make_champion(store, models[2])
    assert names(store, models) == {"champion": 2, "previous": 1}


def test_only_what_was_promoted_is_kept_for_good(store, models):
    for model in models[:3]:
        export(store, model)
    make_champion(store, models[1])
    why = {verdict.manifest.ref: verdict.why for verdict in judge(store, Rule(keep=2), kind="model", used={})}
    assert any("refs/tiny/champion" in said for said in why[models[1].ref])
    assert any("refs/tiny/challenger points" in said for said in why[models[2].ref])
    assert not any("refs" in said for said in why[models[0].ref])


def test_a_promotion_is_in_the_audit_log_before_it_happens_with_its_reason(store, keys, models):
    make_champion(store, models[0])
    told = []
    made = promote(
        store, f"model/tiny@{models[1].version[:12]}", keys=keys, reason="better on tickets", when_champion=told.append
    )
    assert (made.model, made.before, made.changed, told) == (models[1], models[0].ref, True, [models[1]])
    last = next(entries(store))
    assert (last.action, last.right, last.what, last.outcome) == ("move_ref", "promote", "refs/tiny/champion", "done")
    assert (last.before, last.after, last.reason) == (models[0].ref, models[1].ref, "better on tickets")
    assert not promote(store, models[1].ref, keys=keys, reason="again", when_champion=told.append).changed
    assert len(told) == 2 and next(entries(store)) == last  # told again: the first telling may have been killed


def test_a_model_that_was_compared_with_another_champion_does_not_become_the_champion(store, keys, models):
    nobody = place_of(store, "tiny/champion")
    make_champion(store, models[0])
    with pytest.raises(Conflict, match="became the champion after"):  # compared when there was none
        compared_with(store, models[1].ref, seen=nobody)
    seen = place_of(store, "tiny/champion")
    assert compared_with(store, models[1].ref, seen=seen) == seen
    assert compared_with(store, models[1].ref, seen="now") == "now"  # a first model is compared with nobody
    promote(store, models[2].ref, keys=keys, reason="meanwhile")
    with pytest.raises(Conflict, match=f"{models[2].ref} became the champion after {models[1].ref} was compared"):
        compared_with(store, models[1].ref, seen=seen)
    assert compared_with(store, models[2].ref, seen=seen) == "now"  # it is the champion already
    assert read_ref(store, "tiny/champion") == models[2].ref


def damage(store, model):
    path = store.fetch(model) / "onnx"
    path.chmod(0o644)
    path.write_text("x")


def unsign(store, model):
    (store.root / "artifacts" / "model" / "tiny" / model.version / "signature.json").unlink()


@pytest.mark.parametrize(("spoil", "said"), [(damage, r"onnx \(s"), (unsign, "sign")])
def test_what_is_damaged_or_unsigned_is_not_promoted(store, keys, models, spoil, said):
    make_champion(store, models[0])
    spoil(store, models[1])
    logged = len(list(entries(store)))
    with pytest.raises(IntegrityError, match=f"it is not promoted: .*{said}"):
        promote(store, models[1].ref, keys=keys, reason="better")
    assert names(store, models) == {"champion": 0} and len(list(entries(store))) == logged


def test_what_another_or_a_revoked_key_signed_is_not_promoted(store, keys, models, tmp_path):
    make_champion(store, models[0])
    unsign(store, models[1])
    sign(store, tmp_path / "other", models[1])
    with pytest.raises(IntegrityError, match="it is not promoted"):
        promote(store, models[1].ref, keys=keys, reason="better")
    add_key(keys.parent, "other", LocalKey(ensure_key(tmp_path / "other")).public_key(), ("*/*",))
    revoke_key(keys.parent, OWN, "it leaked")
    with pytest.raises(IntegrityError, match="it is not promoted: .* is revoked since .*: it leaked"):
        promote(store, models[2].ref, keys=keys, reason="better")
    assert names(store, models) == {"champion": 0}


def test_what_is_no_model_has_no_champion(store, models):
    with pytest.raises(ValueError, match="is no model"):
        would_promote(store, "checkpoint/tiny")
    with pytest.raises(Unknown):
        would_promote(store, "model/other")
    assert would_promote(store, "model/tiny").model == models[3]


class Meeting(LocalStore):
    """A store whose user waits for another one between looking and moving, as two people who verify at once do."""

    meet = None

    def verify(self, manifest):
        found = super().verify(manifest)
        self.meet.wait(limit(60))
        return found


@pytest.mark.parametrize("start", [None, 0], ids=["no champion yet", "a champion"])
def test_of_two_promotions_at_once_one_wins_and_the_other_is_told(store, keys, models, start):
    if start is not None:
        make_champion(store, models[start])
    meet, told = fork.Barrier(2), fork.Queue()

    def one(number):
        mine = Meeting(store.root)
        mine.meet = meet
        try:
            promote(mine, models[number].ref, keys=keys, reason=f"race {number}")
            told.put((number, "won"))
        except Conflict as error:
            told.put((number, error.remedy))

    racers = [fork.Process(target=one, args=(number,)) for number in (1, 2)]
    for racer in racers:
        racer.start()
    said = dict(told.get(timeout=limit(60)) for _ in racers)
    for racer in racers:
        racer.join(limit(60))
    (winner,) = [number for number, word in said.items() if word == "won"]
    assert read_ref(store, "tiny/champion") == models[winner].ref
    assert names(store, models) == {"champion": winner} | ({} if start is None else {"previous": start})
    assert "headway audit-log --what tiny/champion" in said[3 - winner]
    moves = {entry.reason: entry.outcome for entry in entries(store) if entry.reason.startswith("race")}
    assert moves == {f"race {winner}": "done", f"race {3 - winner}": "failed"}

"""What stays and why, what goes, and what is left when a deletion is killed, fails or is overtaken."""

import multiprocessing
import os

import pytest
from made_versions import backdate, forget_history, make, make_many
from waiting import limit

from tasks.common.errors import Unknown
from tasks.registry.promoting import roll_back, way_back
from tasks.registry.records import StoreJournal
from tasks.registry.refs import move_ref
from tasks.registry.retention import Rule, judge, prune
from tasks.security.audit import entries
from tasks.storage import open_store
from tasks.storage.history import changes
from tasks.storage.local import LocalStore
from tasks.storage.store import find

pytestmark = pytest.mark.unit

fork = multiprocessing.get_context("fork")
TWO = Rule(keep=2)


@pytest.fixture
def store(tmp_path):
    return open_store(tmp_path / "home")


def old(store, tmp_path, count, ref="dataset/tiny"):
    made = make_many(store, tmp_path / "made" / ref, ref, count)
    backdate(store, 7200)
    return made


def staying(store, rule=TWO, *, used=None, **which):
    """Reasons by reference."""
    return {v.manifest.ref: v.why for v in judge(store, rule, used=used or {}, **which)}


def numbers(made, verdicts):
    """The numbers (from 1) of the versions that stay."""
    return [number for number, manifest in enumerate(made, 1) if verdicts.get(manifest.ref)]


def apply(store, rule=TWO, **which):
    return list(prune(store, judge(store, rule, used={}, **which), reason="the disk is full"))


@pytest.mark.parametrize(
    ("keep", "every", "left"),
    [(2, 0, [8, 9]), (3, 0, [7, 8, 9]), (2, 3, [3, 6, 8, 9]), (2, 9, [8, 9]), (20, 0, list(range(1, 10)))],
)
def test_the_last_ones_and_every_nth_stay(store, tmp_path, keep, every, left):
    made = old(store, tmp_path, 9)
    assert numbers(made, staying(store, Rule(keep=keep, every=every))) == left


@pytest.mark.parametrize("keep", [-1, 0, 1])
def test_fewer_than_two_are_never_kept(store, tmp_path, keep):
    old(store, tmp_path, 3)
    with pytest.raises(ValueError, match=f"--keep {keep} leaves nothing to go back to"):
        judge(store, Rule(keep=keep), used={})


def test_every_nth_stays_every_nth_however_often_one_prunes(store, tmp_path):
    made = old(store, tmp_path, 7)
    rule = Rule(keep=2, every=3)
    assert numbers(made, staying(store, rule)) == [3, 6, 7]
    apply(store, rule)
    made += [make(store, tmp_path / f"new{n}", "dataset/tiny", {"data": f"new {n}"}) for n in (8, 9, 10)]
    backdate(store, 7200)
    for _ in range(2):
        apply(store, rule)
        left = {manifest.version for manifest in store.manifests("dataset", "tiny")}
        assert [n for n, manifest in enumerate(made, 1) if manifest.version in left] == [3, 6, 9, 10]


def test_what_is_deleted_is_in_the_audit_log_and_the_history_and_only_that(store, tmp_path):
    made = old(store, tmp_path, 4)
    done = apply(store)
    assert [deletion.manifest.version for deletion in done] == [m.version for m in made[:2]]  # oldest first
    assert not any(deletion.error for deletion in done)
    logged = [entry for entry in entries(store) if entry.action == "delete"]
    assert [entry.what for entry in reversed(logged)] == [m.ref for m in made[:2]]
    assert {(entry.right, entry.reason) for entry in logged} == {("override", "the disk is full")}
    noted = changes(store, "dataset", "tiny")[4:]
    assert [(c.action, c.version, c.current) for c in noted] == [("delete", m.version, False) for m in made[:2]]
    assert find(store, "dataset", "tiny").version == made[3].version
    assert [store.verify(m) for m in made[2:]] == [[], []]
    assert all(store.manifest("dataset", "tiny", m.version) is None for m in made[:2])
    assert apply(store) == []


def test_what_was_rolled_back_to_and_what_stood_before_it_stay(store, tmp_path):
    made = old(store, tmp_path, 6)
    roll_back(store, way_back(store, "dataset/tiny", to=made[2].version), keys=tmp_path / "keys", reason="better")
    found = staying(store)
    assert numbers(made, found) == [2, 3, 5, 6]
    assert found[made[2].ref] == ("current",) and found[made[1].ref] == ("rollback goes to it",)


def test_the_young_stay(store, tmp_path):
    made = old(store, tmp_path, 4)
    young = make_many(store, tmp_path / "young", "dataset/other", 4)
    assert numbers(young, staying(store)) == [1, 2, 3, 4]
    backdate(store, 3500)
    assert numbers(young, staying(store)) == [1, 2, 3, 4]
    backdate(store, 200)
    assert numbers(young, staying(store)) == numbers(made, staying(store)) == [3, 4]


@pytest.fixture
def chain(store, tmp_path):
    """Five generations: dataset -> tokens -> checkpoint (under a plan) -> model; by kind."""
    made = {"dataset": old(store, tmp_path, 5)}

    def each(kind, of, under=None):
        for number, source in enumerate(made[of]):
            context = [made[under][number]] if under else []
            folder = tmp_path / kind / str(number)
            manifest = make(store, folder, f"{kind}/tiny", {"data": f"{number}"}, inputs=[source], context=context)
            made.setdefault(kind, []).append(manifest)

    each("tokens", "dataset")
    each("plan", "tokens")
    each("checkpoint", "tokens", under="plan")
    each("model", "checkpoint")
    backdate(store, 7200)
    return made


def test_what_a_champion_of_any_time_stands_on_stays(store, chain):
    for model in (chain["model"][0], chain["model"][1]):
        move_ref(store, "tiny/champion", model.ref, inputs=model.provenance.inputs, reason="better")
    found = staying(store)
    assert all(numbers(made, found) == [1, 2, 4, 5] for made in chain.values())
    assert found[chain["model"][1].ref] == ("refs/tiny/champion points to it",)
    assert found[chain["model"][0].ref] == ("refs/tiny/champion pointed to it",)
    assert found[chain["plan"][0].ref] == (f"model/tiny@{chain['model'][0].version[:12]} stands on it",)
    assert found[chain["dataset"][0].ref] == found[chain["plan"][0].ref]


def test_what_a_champion_was_made_from_stays_when_its_own_manifest_is_gone(store, chain):
    model = chain["model"][1]
    move_ref(store, "tiny/champion", model.ref, inputs=model.provenance.inputs, reason="better")
    store.delete(model)
    assert numbers(chain["dataset"], staying(store)) == [2, 4, 5]


def test_what_is_in_use_stays_with_all_below_it_and_nothing_above(store, chain):
    found = staying(store, used={chain["checkpoint"][2].ref: "endpoint/tiny serves it"})
    assert numbers(chain["model"], found) == [4, 5]
    assert found[chain["checkpoint"][2].ref] == ("endpoint/tiny serves it",)
    assert all(numbers(chain[kind], found) == [3, 4, 5] for kind in ("dataset", "tokens", "plan", "checkpoint"))


def test_what_a_model_that_stays_was_made_from_stays(store, chain, tmp_path):
    """A model of the last ones may still be approved: then it has its lineage."""
    later = [make(store, tmp_path / f"later{n}", "dataset/tiny", {"data": f"later {n}"}) for n in range(1, 6)]
    backdate(store, 7200)
    found = staying(store)
    assert numbers(later, found) == numbers(chain["dataset"], found) == [4, 5]
    models = [f"model/tiny@{model.version[:12]} stands on it" for model in chain["model"]]
    assert found[chain["dataset"][3].ref] == (models[3],)
    assert numbers(chain["model"], found) == [4, 5]


def test_what_a_job_without_an_end_was_handed_stays(store, chain):
    journal = StoreJournal(store)
    for number in (0, 1):
        inputs = {"tokens": str(store.fetch(chain["tokens"][number]))}
        journal.put(f"jobs/token{number}/0001/intent", {"job": {"name": "train", "inputs": inputs}})
    journal.put("jobs/token1/0001/end", {"outcome": "done"})
    found = staying(store, kind="tokens")
    assert numbers(chain["tokens"], found) == [1, 4, 5]
    assert found[chain["tokens"][0].ref] == ("the job train has no end yet",)
    assert numbers(chain["dataset"], staying(store)) == [1, 4, 5]


def test_only_what_is_named_is_judged(store, chain, tmp_path):
    old(store, tmp_path, 3, "dataset/other")
    assert {ref.split("@")[0] for ref in staying(store, kind="dataset")} == {"dataset/tiny", "dataset/other"}
    assert {ref.split("@")[0] for ref in staying(store, kind="dataset", name="tiny")} == {"dataset/tiny"}
    assert len(staying(store)) == 28
    with pytest.raises(Unknown, match="no dataset/small"):
        judge(store, TWO, kind="dataset", name="small", used={})


def test_what_validation_left_is_counted_by_itself(store, tmp_path):
    made = old(store, tmp_path, 4)
    left = [
        make(store, tmp_path / f"left{n}", "dataset/tiny", {"data": f"{n}"}, inputs=[source], stage="validate")
        for n, source in enumerate(made)
    ]
    backdate(store, 7200)
    found = staying(store, Rule(keep=3))
    assert numbers(made, found) == numbers(left, found) == [2, 3, 4]


def test_versions_of_before_there_was_a_history_are_judged_too(store, tmp_path):
    made = old(store, tmp_path, 4)
    forget_history(store)
    assert numbers(made, staying(store)) == [3, 4]
    assert [d.manifest.version for d in apply(store)] == [m.version for m in made[:2]]
    assert find(store, "dataset", "tiny").version == made[3].version


def test_one_that_cannot_be_deleted_does_not_stop_the_others(store, tmp_path):
    stuck, made = old(store, tmp_path, 3, "dataset/stuck"), old(store, tmp_path, 3)
    lock = store.root / "artifacts" / "dataset" / "stuck" / ".lock"
    lock.unlink()
    lock.mkdir()
    done = {deletion.manifest.ref: deletion.error for deletion in apply(store)}
    assert "directory" in done[stuck[0].ref] and done[made[0].ref] == ""
    assert not store.verify(stuck[0]) and store.manifest("dataset", "tiny", made[0].version) is None
    assert [c.action for c in changes(store, "dataset", "stuck")] == ["publish"] * 3
    told = {(entry.what, entry.outcome) for entry in entries(store) if entry.action == "delete"}
    assert told == {(stuck[0].ref, "failed"), (made[0].ref, "done")}


def test_what_becomes_current_meanwhile_stays(store, tmp_path):
    made = old(store, tmp_path, 4)
    verdicts = judge(store, TWO, used={})
    roll_back(store, way_back(store, "dataset/tiny", to=made[0].version), keys=tmp_path / "keys", reason="better")
    done = list(prune(store, verdicts, reason="old"))
    assert [deletion.error for deletion in done] == ["it has become the current one", ""]
    assert not store.verify(find(store, "dataset", "tiny"))


class Dying(LocalStore):
    """The store of a process that is killed at its second deletion: before it, or when it is done and not noted."""

    def __init__(self, root, after):
        super().__init__(root)
        self.after, self.count = after, 0

    def delete(self, manifest):
        self.count += 1
        if self.count == 2 and not self.after:
            os._exit(9)
        super().delete(manifest)
        if self.count == 2:
            os._exit(9)


@pytest.mark.integration
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_who_is_killed_prunes_again(store, tmp_path, after):
    made = old(store, tmp_path, 5)
    process = fork.Process(target=lambda: apply(Dying(store.root, after)))
    process.start()
    process.join(limit(60))
    assert process.exitcode == 9
    apply(store)
    assert [m.version for m in store.manifests("dataset", "tiny")] == [m.version for m in reversed(made[3:])]
    told = [entry.what for entry in entries(store) if entry.action == "delete"]
    assert set(told) == {manifest.ref for manifest in made[:3]}  # nothing went untold

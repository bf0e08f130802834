"""The past of a name, as its history tells it, and what differs between two versions."""

import pytest
from made_versions import forget_history, make, make_many

from tasks.common.errors import Unknown
from tasks.registry.versions import difference, kind_of, past
from tasks.storage import open_store
from tasks.storage.history import note_change

pytestmark = pytest.mark.unit


@pytest.fixture
def store(tmp_path):
    return open_store(tmp_path / "home")


@pytest.fixture
def five(store, tmp_path):
    return [manifest.version for manifest in make_many(store, tmp_path, "dataset/tiny", 5)]


def named(five, versions):
    return "".join("ABCDE"[five.index(version)] for version in versions)


def history(store, five, actions):
    """Rollbacks (a letter) and publications (+ and a letter), after five versions were published."""
    for action in actions.split():
        kind = "publish" if action[0] == "+" else "rollback"
        note_change(store, "dataset", "tiny", action=kind, version=five["ABCDE".index(action[-1])])
    return past(store, "dataset", "tiny")


@pytest.mark.parametrize(
    ("actions", "stack"),
    [
        ("", "ABCDE"),
        ("D", "ABCD"),
        ("D C", "ABC"),  # two in a row go further back
        ("B", "AB"),
        ("B +C", "ABC"),  # what was undone and is published again is the newest, on what stood then
        ("B E", "ABE"),  # forward again: before it is what it replaced, not what was taken back
        ("B E B", "AB"),
        ("+A", "ABCDEA"),  # one version, current twice
        ("+A E", "ABCDE"),
        ("+A E D C B A", "A"),
    ],
)
def test_a_rollback_takes_off_what_it_undid(store, five, actions, stack):
    found = history(store, five, actions)
    assert named(five, found.stack()) == stack
    before = found.before(found.stack()[-1])
    assert (named(five, [before.version]) if before else None) == (stack[-2] if len(stack) > 1 else None)


def test_what_is_deleted_is_no_way_back(store, five):
    store.delete(store.manifest("dataset", "tiny", five[3]))
    found = past(store, "dataset", "tiny")
    assert named(five, [found.before(five[4]).version]) == "C"


def test_versions_of_before_there_was_a_history_come_first(store, five):
    forget_history(store)
    found = history(store, five, "")
    assert [change.number for change in found.changes] == [0] * 5
    assert named(five, found.stack()) == "ABCDE"
    assert [change.before for change in found.changes] == [None, *five[:-1]]
    assert named(five, history(store, five, "D").stack()) == "ABCD"
    assert named(five, history(store, five, "C").stack()) == "ABC"


def test_what_validation_left_is_in_the_history_and_never_current(store, five, tmp_path):
    source = store.manifest("dataset", "tiny", five[4])
    left = make(store, tmp_path / "left", "dataset/tiny", {"data": "less"}, inputs=[source], stage="validate")
    found = past(store, "dataset", "tiny")
    assert left.version == found.changes[-1].version
    assert named(five, found.stack()) == "ABCDE"


def test_a_bare_name_means_the_only_kind_that_has_it(store, five, tmp_path):
    assert kind_of(store, "tiny") == "dataset"
    with pytest.raises(Unknown, match="nothing is called 'small'"):
        kind_of(store, "small")
    make(store, tmp_path / "tokens", "tokens/tiny", {"data": "1"})
    with pytest.raises(ValueError, match="dataset/tiny, tokens/tiny; name one of them"):
        kind_of(store, "tiny")
    with pytest.raises(Unknown, match="no dataset/small"):
        past(store, "dataset", "small")


@pytest.fixture
def two_models(store, tmp_path):
    """Of two datasets, under one plan and another; one setting and one metric differ."""
    made = []
    for number, dataset in enumerate(make_many(store, tmp_path / "data", "dataset/tiny", 2)):
        plan = make(store, tmp_path / f"plan{number}", "plan/tiny", {"plan.json": f"{number}"})
        files = {"same": "same", "changed": "x" * (10 + number), "flipped": f"{number}", f"only-{number}/file": "abc"}
        config = {"training": {"rate": 0.1 + number, "steps": 60}, "seed": 1, **({"new": [1]} if number else {})}
        metrics = {"loss": 2.0 - number / 2, "same": 1.0, **({"old": 3.0} if not number else {})}
        said = {"config": config, "metrics": metrics, "commit": f"{number}" * 40}
        made.append(make(store, tmp_path / f"m{number}", "model/tiny", files, inputs=[dataset], context=[plan], **said))
    return made


def test_a_difference_names_files_settings_metrics_inputs_and_code(two_models):
    found = difference(*two_models).model_dump()
    assert found["files"] == {
        "added": ({"path": "only-1/file", "before": None, "after": 3},),
        "removed": ({"path": "only-0/file", "before": 3, "after": None},),
        "changed": (
            {"path": "changed", "before": 10, "after": 11},
            {"path": "flipped", "before": 1, "after": 1},
        ),
        "unchanged": 1,
    }
    assert found["configuration"] == (
        {"key": "new", "before": None, "after": [1]},
        {"key": "training.rate", "before": 0.1, "after": 1.1},
    )
    assert found["metrics"] == (
        {"name": "loss", "before": 2.0, "after": 1.5, "difference": -0.5},
        {"name": "old", "before": 3.0, "after": None, "difference": None},
    )
    assert [one["name"] for one in found["inputs"]] == ["dataset/tiny", "plan/tiny"]
    old, new = (m.provenance.inputs[0].rpartition("@")[2] for m in two_models)
    assert (found["inputs"][0]["before"], found["inputs"][0]["after"]) == ((old,), (new,))
    assert found["code"] == ("0" * 40, "1" * 40)


def test_the_other_way_round_everything_is_turned(two_models):
    there, back = difference(*two_models), difference(*reversed(two_models))
    assert [f.path for f in there.files.added] == [f.path for f in back.files.removed] == ["only-1/file"]
    assert (there.metrics[0].difference, back.metrics[0].difference) == (-0.5, 0.5)


def test_a_version_does_not_differ_from_itself_and_kinds_are_not_compared(two_models, five, store):
    found = difference(two_models[0], two_models[0])
    assert found.same and not (found.files.added or found.files.changed or found.configuration or found.metrics)
    assert not difference(*two_models).same
    with pytest.raises(ValueError, match="of different kinds"):
        difference(two_models[0], store.manifest("dataset", "tiny", five[0]))

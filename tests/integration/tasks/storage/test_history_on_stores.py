"""Rollback and retention on every kind of store: five versions, back to the second, prune, and every byte is the right one."""

import pytest
from made_versions import backdate, make
from store_stand import contents

from tasks.registry.promoting import roll_back, way_back
from tasks.registry.retention import Rule, judge, prune
from tasks.registry.versions import past
from tasks.storage.blob.layout import files_folder
from tasks.storage.store import find

KINDS = pytest.mark.parametrize(
    "stand",
    ["versions", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("local", "snapshots"))],
    indirect=True,
)
"""In a folder the same is shown by test_rollback.py and test_retention.py of the registry."""


SECOND = {"same": b"same", "changes": b"2", "only-2": b"xx"}


def files(number):
    """One file stays, one changes, one comes, one goes."""
    return {"same": "same", "changes": f"{number}", f"only-{number}": "x" * number}


@pytest.fixture
def five(stand, tmp_path):
    store = stand.open()
    return [make(store, tmp_path / f"{n}", "dataset/tiny", files(n)) for n in range(1, 6)]


def back(stand, tmp_path, **how):
    store = stand.open()
    return roll_back(store, way_back(store, "dataset/tiny", **how), keys=tmp_path / "keys", reason="three on")


@KINDS
def test_the_second_of_five_is_current_again_and_nothing_is_lost(stand, five, tmp_path):
    def do():
        back(stand, tmp_path, to=five[1].version)

    if stand.is_blob:  # what we send is a few documents: bytes are promoted by the service
        assert [target for target in stand.written(do) if "/documents/" not in target] == []
    else:
        do()
    if stand.kind == "versions":  # others that read the stable paths see the old version too
        folder = f"some/prefix/{files_folder(five[1])}"
        names = [blob.name for blob in stand.blobs().list_blobs(name_starts_with=folder)]
        stable = {name.removeprefix(folder): stand.blobs().download_blob(name).readall() for name in names}
        assert stable == SECOND
    later = stand.open()
    now = find(later, "dataset", "tiny")
    assert now.version == five[1].version and contents(later.fetch(now)) == SECOND
    assert [change.action for change in past(later, "dataset", "tiny").changes] == ["publish"] * 5 + ["rollback"]
    back(stand, tmp_path)
    assert find(later, "dataset", "tiny").version == five[0].version
    again = make(later, tmp_path / "again", "dataset/tiny", files(4))
    assert again.version == five[3].version == find(later, "dataset", "tiny").version
    assert all(later.verify(manifest) == [] for manifest in later.manifests("dataset", "tiny"))


@KINDS
def test_what_is_pruned_is_gone_and_what_stays_is_whole(stand, five, tmp_path):
    back(stand, tmp_path, to=five[1].version)
    store = stand.open()
    backdate(store, 7200)
    done = list(prune(store, judge(store, Rule(keep=2), used={}), reason="room"))
    assert [(deletion.manifest.version, deletion.error) for deletion in done] == [(five[2].version, "")]
    later = stand.open()
    left = list(later.manifests("dataset", "tiny"))
    assert {manifest.version for manifest in left} == {five[n].version for n in (0, 1, 3, 4)}
    assert all(later.verify(manifest) == [] for manifest in left)
    assert contents(later.fetch(find(later, "dataset", "tiny"))) == SECOND
    assert list(prune(later, judge(later, Rule(keep=2), used={}), reason="room")) == []

"""What stands on what, both ways: over manifests, and over the index, which must always say what the store says."""

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import limit

from tasks.common.errors import HeadwayError
from tasks.registry.ancestry import SCHEMA, LineageIndex, ask, walk
from tasks.storage.local import LocalStore
from tasks.storage.manifest import Provenance

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[4]
ASKER = """
import sys
from pathlib import Path
from tasks.registry.ancestry import walk
from tasks.storage.local import LocalStore
base = Path(sys.argv[1])
found = walk(LocalStore(base / "store"), sys.argv[2], direction="up", index=base / "index" / "lineage.db")
print(len(found["nodes"]))
"""


class Family:
    """A store, and references of what was published in it, by name."""

    def __init__(self, base):
        self.base, self.store, self.index = base, LocalStore(base / "store"), base / "index" / "lineage.db"
        self.made = {}

    def make(self, name, kind, inputs=(), context=(), *, data="", **provenance):
        folder = self.base / "made" / f"{kind}-{name}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "data").write_text(data or name)
        read = tuple(self.made[other] for other in inputs)
        said = Provenance(
            name=name,
            inputs=read,
            context=tuple(self.made[other] for other in context),
            stage=f"make-{kind}",
            **provenance,
        )
        versions = tuple(ref.rpartition("@")[2] for ref in read)
        manifest = self.store.publish(folder, kind=kind, inputs=versions, provenance=said)
        self.made[name] = manifest.ref
        return manifest

    def up(self, name, **options):
        return walk(self.store, self.made.get(name, name), direction="up", index=self.index, **options)

    def names(self, found):
        names = {ref: name for name, ref in self.made.items()}
        return {names.get(node["ref"], node["ref"]) for node in found["nodes"]}

    def read(self):
        """How many manifests a question now reads anew."""
        opened = []
        manifest = self.store.manifest
        self.store.manifest = lambda *parts: (opened.append(parts), manifest(*parts))[1]
        try:
            ask(self.index, self.store, LineageIndex.damaged)
        finally:
            del self.store.manifest
        return len(opened)

    def manifest_of(self, name):
        kind, _, rest = self.made[name].partition("/")
        return self.base / "store" / "artifacts" / kind / rest.replace("@", "/") / "manifest.json"


@pytest.fixture
def family(tmp_path):
    """raw -> tokens -> first (on a cluster) -> coder; a second checkpoint of the tokens; another dataset that nobody read."""
    made = Family(tmp_path)
    config = {"training": {"steps": 3}}
    made.make("raw", "dataset", commit="c" * 40, dirty=False, config=config, config_digest="d" * 64)
    made.make("other", "dataset")
    made.make("cluster", "qualification")
    made.make(
        "tokens", "tokens", ["raw"], config=config, host="here", sku="small", environment="packages:1", flow_run="f"
    )
    made.make("first", "checkpoint", ["tokens"], ["cluster"])
    made.make("second", "checkpoint", ["tokens"])
    made.make("coder", "model", ["first"], created="2026-11-21T10:00:00+00:00")
    return made


@pytest.mark.parametrize("name", ["raw", "other", "cluster", "tokens", "first", "second", "coder"])
def test_the_index_says_what_the_manifests_say(family, name):
    ref = family.made[name]
    plain, indexed = walk(family.store, ref), walk(family.store, ref, index=family.index)
    assert indexed == {**plain, "edges": indexed["edges"], "nodes": indexed["nodes"]}
    assert sorted(indexed["nodes"], key=str) == sorted(plain["nodes"], key=str)
    assert sorted(indexed["edges"], key=str) == sorted(plain["edges"], key=str)
    assert walk(family.store, ref, direction="up") == family.up(name)


def test_forward_names_the_models_and_endpoints_and_how_they_stand_on_it(family):
    family.make("judged", "model", ["second"], ["coder"])
    found = family.up(
        "coder", serving={"live": family.made["coder"], "stale": family.made["judged"], "gone": "model/x@" + "0" * 64}
    )
    assert family.names(found) == {"coder", "judged", "endpoint/live", "endpoint/stale"}
    assert [(each["ref"], each["through"]) for each in found["models"]] == [(family.made["judged"], "verdict")]
    assert {each["ref"]: each["through"] for each in found["endpoints"]} == {
        "endpoint/live": "data",
        "endpoint/stale": "verdict",
    }
    assert {"output": "endpoint/live", "input": family.made["coder"], "how": "serves"} in found["edges"]
    raw = family.up("raw", serving={"live": family.made["coder"]})
    assert {(each["ref"], each["through"]) for each in (*raw["models"], *raw["endpoints"])} == {
        (family.made["coder"], "data"), (family.made["judged"], "data"), ("endpoint/live", "data"),
    }  # fmt: skip


def test_forward_finds_what_was_made_of_the_same_bytes_under_another_name(family):
    raw = family.store.manifest(*_parts(family.made["raw"]))
    twin = family.make("copied", "dataset", data="raw")
    assert twin.version == raw.version
    family.make("tokens-of-copy", "tokens", ["copied"], data="other bytes")
    found = family.up("raw")
    assert {"copied", "tokens-of-copy", "coder"} <= family.names(found)
    assert {"output": family.made["copied"], "input": family.made["raw"], "how": "same"} in found["edges"]


def test_forward_of_an_endpoint_is_the_endpoint_alone(family):
    found = walk(family.store, "endpoint/live", direction="up", serves=family.made["coder"])
    assert [node["ref"] for node in found["nodes"]] == ["endpoint/live"] and found["edges"] == found["models"] == []


def test_what_is_gone_still_leads_to_what_was_made_of_it(family):
    """After a poisoning the dataset is deleted first, and asked about later."""
    family.store.delete(family.store.manifest(*_parts(family.made["raw"])))
    found = family.up("raw")
    assert family.names(found) == {"raw", "tokens", "first", "second", "coder"}
    assert found["nodes"][0]["stage"] is None and len(found["models"]) == 1
    assert walk(family.store, family.made["raw"][:30], direction="up", index=family.index)["root"] == family.made["raw"]
    with pytest.raises(HeadwayError, match="is not in"):
        walk(family.store, family.made["raw"], index=family.index)
    with pytest.raises(HeadwayError, match="is not in"):
        walk(family.store, "dataset/raw@" + "0" * 64, direction="up", index=family.index)


def test_only_what_is_new_is_read(family):
    assert family.read() == 7
    assert family.read() == 0
    family.make("third", "checkpoint", ["tokens"])
    family.make("more", "model", ["third"])
    assert family.read() == 2
    assert {"third", "more"} <= family.names(family.up("raw"))
    assert family.read() == 0


def test_what_was_deleted_is_no_more_in_the_index_and_comes_back_when_it_is_made_again(family):
    family.up("raw")
    manifest = family.store.manifest(*_parts(family.made["coder"]))
    family.store.delete(manifest)
    assert family.up("raw")["models"] == []
    family.make("coder", "model", ["first"], created="2027-01-01T00:00:00+00:00")
    assert [each["created"][:4] for each in family.up("raw")["models"]] == ["2027"]


def test_a_manifest_that_nobody_can_read_is_named_and_hides_nothing_else(family):
    family.make("last", "model", ["second"])
    path = family.manifest_of("second")
    whole = path.read_bytes()
    path.unlink()
    path.write_bytes(whole.replace(b'"inputs"', b'"outputs"'))
    found = family.up("raw")
    assert found["damaged"] == [family.made["second"]] and len(found["models"]) == 1
    for index in (None, family.index):
        assert walk(family.store, family.made["last"], index=index)["damaged"] == [family.made["second"]]
        assert walk(family.store, family.made["coder"], index=index)["damaged"] == []
        with pytest.raises(HeadwayError, match="is damaged"):
            walk(family.store, family.made["second"], index=index)
    path.write_bytes(whole)
    assert family.up("raw")["damaged"] == [] and "second" in family.names(family.up("raw"))


def test_what_a_node_tells(family):
    node = next(node for node in family.up("raw")["nodes"] if node["kind"] == "tokens")
    told = {
        key: node[key]
        for key in ("stage", "host", "sku", "environment", "flow_run", "files", "bytes", "dirty", "config")
    }
    assert told == {
        "stage": "make-tokens", "host": "here", "sku": "small", "environment": "packages:1", "flow_run": "f", "files": 1,
        "bytes": 6, "dirty": None, "config": {"training": {"steps": 3}},
    }  # fmt: skip
    raw = family.up("raw")["nodes"][0]
    assert (raw["commit"], raw["dirty"], raw["config_digest"]) == ("c" * 40, False, "d" * 64)


@pytest.mark.parametrize("damage", ["text", "half", "other schema", "no table", "bad row", "other store"])
def test_a_damaged_index_is_made_anew(family, damage):
    whole = family.up("raw")
    if damage == "text":
        family.index.write_text("this is no database\n" * 100)
    if damage == "half":
        with open(family.index, "r+b") as file:
            file.seek(4096)
            file.write(os.urandom(8192))
    statement = {
        "other schema": f"PRAGMA user_version = {SCHEMA + 1}",
        "no table": "DROP TABLE edge",
        "bad row": "UPDATE config SET value = 'x'",
        "other store": "UPDATE about SET store = 'az://elsewhere/c/p'",
    }.get(damage)
    if statement:
        with sqlite3.connect(family.index) as database:
            database.execute(statement)
    assert family.up("raw") == whole
    assert family.read() == 0


def test_an_index_that_cannot_be_written_costs_time_only(family):
    family.index.parent.parent.joinpath("index").write_text("a file where the folder should be")
    assert "coder" in family.names(family.up("raw"))


@pytest.mark.integration
def test_several_may_ask_at_once(family):
    commands = [[sys.executable, "-c", ASKER, str(family.base), family.made["raw"]] for _ in range(2)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    asking = [subprocess.Popen(each, env=environment, stdout=subprocess.PIPE, text=True) for each in commands]
    assert [process.communicate(timeout=limit(60))[0].strip() for process in asking] == ["5"] * 2
    assert family.read() == 0


def test_a_long_way_down_is_no_recursion(tmp_path):
    family = Family(tmp_path)
    family.make("c0", "checkpoint")
    for number in range(1, 150):
        family.make(f"c{number}", "checkpoint", [f"c{number - 1}"])
    assert len(family.up("c0")["nodes"]) == 150
    assert len(walk(family.store, family.made["c149"], index=family.index)["edges"]) == 149
    json.dumps(walk(family.store, family.made["c149"]))


def _parts(ref):
    kind, _, rest = ref.partition("/")
    name, _, version = rest.partition("@")
    return kind, name, version

"""What is true about the past: records, refs that one of many moves, the audit log's chain, what was made from what."""

import hashlib
import json
import multiprocessing
import os
import re

import pytest
from waiting import limit

from tasks.common.errors import Conflict, HeadwayError
from tasks.formats.mmididx import TokenWriter
from tasks.registry import records
from tasks.registry.ancestry import walk
from tasks.registry.records import Record, StoreJournal
from tasks.registry.refs import made_from, move_ref, place_of, read_ref
from tasks.registry.verification import problems_of
from tasks.security.audit import audit
from tasks.storage import open_store
from tasks.storage.local import LocalStore
from tasks.storage.manifest import Provenance

pytestmark = pytest.mark.unit

fork = multiprocessing.get_context("fork")


@pytest.fixture
def store(tmp_path):
    return open_store(tmp_path)


def record(key="k" * 64, **fields):
    plain = {"stage": "train", "arguments": {"stage": "train"}, "inputs": ("tokens/t@1",), "context": (), "outputs": ()}
    return Record(key=key, **{**plain, "value": {"name": "x"}, "metrics": {}, "seconds": 1.0, "created": 0.0, **fields})


def in_processes(*calls):
    processes = [fork.Process(target=call) for call in calls]
    for process in processes:
        process.start()
    for process in processes:
        process.join(limit(60))
    return [process.exitcode for process in processes]


def test_a_record_comes_back_and_the_last_one_of_a_key_counts(store):
    assert records.load(store, "train", "k" * 64) is None
    records.save(store, record())
    assert records.load(store, "train", "k" * 64) == record()
    records.save(store, record(metrics={"loss": 0.5}))
    assert records.load(store, "train", "k" * 64).metrics == {"loss": 0.5}
    assert records.load(store, "evaluate", "k" * 64) is None


def test_a_record_holds_plain_fields_only(store):
    records.save(store, record())
    (key,) = store.list("records")
    assert key == f"records/train/{'k' * 64}.json"
    value = json.loads(store.read(key).data)
    assert value["schema"] == "headway/record/1"
    assert value["inputs"] == ["tokens/t@1"]


def test_a_record_of_another_schema_is_none(store):
    store.create("records/train/new.json", b'{"schema": "headway/record/9", "what": "ever"}')
    records.save(store, record(key="old"))
    assert records.load(store, "train", "new") is None
    assert records.newest(store, "train").key == "old"


def test_the_newest_record_is_the_one_that_was_made_last(store):
    assert records.newest(store, "train") is None
    for key, created in (("a", 5.0), ("b", 9.0), ("c", 7.0)):
        records.save(store, record(key=key, created=created))
    records.save(store, record(key="z", stage="training", created=99.0))
    assert records.newest(store, "train").key == "b"


@pytest.mark.integration
def test_many_that_save_one_record_all_succeed(tmp_path, store):
    def save():
        records.save(open_store(tmp_path), record(seconds=float(os.getpid())))

    assert in_processes(*[save] * 6) == [0] * 6
    assert records.load(store, "train", "k" * 64).seconds > 0


def test_a_ref_moves_and_says_where_it_was(store):
    assert read_ref(store, "coder/champion") is None
    assert made_from(store, "coder/champion") == []
    assert move_ref(store, "coder/champion", "model/coder@1", inputs=("checkpoint/coder@1",), reason="first") is None
    before = move_ref(store, "coder/champion", "model/coder@2", inputs=("checkpoint/coder@2",), reason="better")
    assert before == "model/coder@1"
    assert read_ref(store, "coder/champion") == "model/coder@2"
    assert made_from(store, "coder/champion") == ["checkpoint/coder@2"]
    moves = [entry for entry, _ in log(store)]
    assert [(m["ref"], m["before"], m["after"], m["reason"]) for m in moves] == [
        ("coder/champion", None, "model/coder@1", "first"),
        ("coder/champion", "model/coder@1", "model/coder@2", "better"),
    ]


def test_a_ref_that_is_there_already_is_not_moved(store):
    for _ in range(2):
        move_ref(store, "coder/champion", "model/coder@1", inputs=(), reason="again")
    assert len(log(store)) == 1


class SlowReader(LocalStore):
    """A store of somebody who looks at a ref, and is overtaken before acting on it."""

    def read(self, key):
        document = super().read(key)
        if key.startswith("refs/") and not self.list("audit"):
            move_ref(LocalStore(self.root), "coder/champion", "model/coder@1", inputs=(), reason="faster")
        return document


def test_who_was_overtaken_between_looking_and_moving_is_told_and_moves_nothing(store):
    with pytest.raises(Conflict, match="moved by somebody else"):
        move_ref(SlowReader(store.root), "coder/champion", "model/coder@2", inputs=(), reason="slower")
    assert read_ref(store, "coder/champion") == "model/coder@1"
    told = [(entry["reason"], entry["outcome"], entry.get("of")) for entry, _ in log(store)]
    assert told == [("faster", "done", None), ("slower", "done", None), ("slower", "failed", 2)]


@pytest.mark.parametrize("seen_at", ["no place", "another place"])
def test_what_was_decided_on_an_older_place_moves_nothing(store, seen_at):
    """Who compared with a champion that is none any more is told, although nobody moves it at the same moment."""
    if seen_at == "another place":
        move_ref(store, "coder/champion", "model/coder@1", inputs=(), reason="first")
    seen = place_of(store, "coder/champion")
    move_ref(store, "coder/champion", "model/coder@2", inputs=(), reason="meanwhile")
    with pytest.raises(Conflict, match="moved by somebody else"):
        move_ref(store, "coder/champion", "model/coder@3", inputs=(), reason="decided before", start=seen)
    assert read_ref(store, "coder/champion") == "model/coder@2"


@pytest.mark.integration
def test_of_many_promotions_at_once_each_wins_or_is_told_and_the_log_holds_the_winners_in_order(tmp_path, store):
    meet = fork.Barrier(6)

    def promote(number):
        mine, told = open_store(tmp_path), 0
        meet.wait(limit(20))
        for turn in range(5):
            try:
                move_ref(mine, "coder/champion", f"model/coder@{number}-{turn}", inputs=(), reason="race")
            except Conflict:
                told += 1
        mine.create(f"told/{number}", str(told).encode())

    assert in_processes(*[lambda number=number: promote(number) for number in range(6)]) == [0] * 6
    told = sum(int(store.read(key).data) for key in store.list("told"))
    failed = {entry["of"] for entry, _ in log(store) if entry["outcome"] == "failed"}
    entries = [entry for entry, _ in log(store) if entry["outcome"] == "done" and entry["number"] not in failed]
    assert len(failed) == told and len(entries) + told == 30
    moves = {entry["before"]: entry["after"] for entry in entries}
    assert len(moves) == len(entries)  # no two started from the same place
    place = None
    while place in moves:
        place = moves.pop(place)
    assert moves == {}
    assert place == read_ref(store, "coder/champion")
    assert broken_link(store) is None


def log(store):
    """Entries of the audit log with their bytes, in order."""
    documents = [store.read(key).data for key in store.list("audit")]
    return [(json.loads(data), data) for data in documents]


def broken_link(store):
    """The place of the first entry that does not name the hash of the one before it; None when the chain holds."""
    previous = None
    for number, (entry, data) in enumerate(log(store)):
        if entry["previous"] != previous:
            return number
        previous = hashlib.sha256(data).hexdigest()
    return None


@pytest.fixture
def audited(store):
    for number in range(5):
        audit(store, "delete", ref=f"model/coder@{number}", reason="old")
    return store


def test_the_audit_log_is_a_chain(audited):
    assert broken_link(audited) is None
    entries = [entry for entry, _ in log(audited)]
    assert [entry["ref"] for entry in entries] == [f"model/coder@{number}" for number in range(5)]
    assert all(entry["who"] and entry["time"] and entry["action"] == "delete" for entry in entries)


def test_an_edited_or_missing_entry_breaks_the_chain(audited, tmp_path):
    key = audited.list("audit")[2]
    document = audited.read(key)
    audited.replace(key, document.data.replace(b"old", b"new"), etag=document.etag)
    assert broken_link(audited) == 3
    audited.replace(key, document.data, etag=audited.read(key).etag)
    assert broken_link(audited) is None
    (tmp_path / "store" / "documents" / key).unlink()
    assert broken_link(audited) == 2


@pytest.mark.integration
def test_entries_of_many_processes_are_one_chain(tmp_path, store):
    def write():
        for _ in range(5):
            audit(open_store(tmp_path), "move", who_else=os.getpid())

    assert in_processes(*[write] * 4) == [0] * 4
    assert len(log(store)) == 20
    assert broken_link(store) is None


def test_the_journal_is_create_only_and_numbers_what_is_appended(store):
    journal = StoreJournal(store)
    assert journal.put("jobs/t/0001/intent", {"spec": 1})
    assert not journal.put("jobs/t/0001/intent", {"spec": 2})
    assert journal.get("jobs/t/0001/intent") == {"spec": 1}
    assert journal.get("jobs/t/0002/intent") is None
    for number in range(3):
        journal.append("endpoints/local", {"number": number})
    assert journal.list("endpoints/local") == [f"endpoints/local/{n:06d}" for n in (1, 2, 3)]
    assert [journal.get(key)["number"] for key in journal.list("endpoints/local")] == [0, 1, 2]


@pytest.fixture
def family(store, tmp_path):
    """References by name: raw -> tokens -> checkpoint (on a qualification) -> model; a second checkpoint of the tokens."""
    made = {}

    def make(name, kind, inputs=(), context=()):
        (tmp_path / name).mkdir()
        (tmp_path / name / "data").write_text(name)
        read = tuple(made[other] for other in inputs)
        provenance = Provenance(
            name=name,
            inputs=read,
            context=tuple(made[other] for other in context),
            stage=f"make-{kind}",
            commit="c" * 40,
        )
        versions = tuple(ref.rpartition("@")[2] for ref in read)
        made[name] = store.publish(tmp_path / name, kind=kind, inputs=versions, provenance=provenance).ref

    make("raw", "dataset")
    make("other", "dataset")
    make("cluster", "qualification")
    make("tokens", "tokens", ["raw"])
    make("first", "checkpoint", ["tokens"], ["cluster"])
    make("second", "checkpoint", ["tokens"])
    make("coder", "model", ["first"])
    return made


def named(family, found):
    """Nodes and edges by short names."""
    names = {ref: name for name, ref in family.items()}
    edges = {(names.get(e["output"], e["output"]), names.get(e["input"], e["input"])) for e in found["edges"]}
    assert len(edges) == len(found["edges"])
    return {names.get(node["ref"], node["ref"]) for node in found["nodes"]}, edges


def test_down_leads_to_the_raw_data_and_to_what_the_work_ran_on(store, family):
    found = walk(store, "model/coder")
    nodes, edges = named(family, found)
    assert found["root"] == family["coder"]
    assert nodes == {"coder", "first", "tokens", "raw", "cluster"}
    assert edges == {("coder", "first"), ("first", "tokens"), ("first", "cluster"), ("tokens", "raw")}
    tokens = next(node for node in found["nodes"] if node["name"] == "tokens")
    assert (tokens["kind"], tokens["stage"], tokens["commit"]) == ("tokens", "make-tokens", "c" * 40)
    assert re.fullmatch(r"file:///.*/tokens/tokens/[0-9a-f]{64}", tokens["uri"])


def test_up_leads_to_all_that_was_made_of_it(store, family):
    nodes, edges = named(family, walk(store, family["tokens"][:-50], direction="up"))
    assert nodes == {"tokens", "first", "second", "coder"}
    assert edges == {("first", "tokens"), ("second", "tokens"), ("coder", "first")}
    assert named(family, walk(store, "qualification/cluster", direction="up"))[0] == {"cluster", "first", "coder"}
    assert named(family, walk(store, "dataset/other", direction="up")) == ({"other"}, set())


def test_an_endpoint_leads_to_what_it_serves(store, family):
    found = walk(store, "endpoint/local", serves=family["coder"])
    nodes, edges = named(family, found)
    assert found["root"] == "endpoint/local"
    assert found["nodes"][0]["kind"] == "endpoint"
    assert nodes == {"endpoint/local", "coder", "first", "tokens", "raw", "cluster"}
    assert ("endpoint/local", "coder") in edges
    with pytest.raises(HeadwayError, match="endpoint/local serves nothing"):
        walk(store, "endpoint/local")


def test_what_was_deleted_keeps_its_name_in_the_lineage(store, family, tmp_path):
    raw = family["raw"].rpartition("@")[2]
    (tmp_path / "store" / "artifacts" / "dataset" / "raw" / raw / "manifest.json").unlink()
    node = next(node for node in walk(store, "model/coder")["nodes"] if node["name"] == "raw")
    assert (node["version"], node["uri"], node["stage"]) == (raw, None, None)
    with pytest.raises(HeadwayError, match="dataset/raw is not in"):
        walk(store, "dataset/raw")


def tokens_folder(folder, last, files):
    """Four documents of a vocabulary of 300 with end of document 0, in files; the last one ends with `last`."""
    folder.mkdir(parents=True)
    for number, name in enumerate(files):
        writer = TokenWriter(folder / name, 300)
        for document in ([5, 6, 0], [7, 0], [8, 0], [8, 299, last])[number :: len(files)]:
            writer.add_document(document)
        writer.close()
    about = {"vocab_size": 300, "eod_id": 0, "splits": {"train": {}}}
    (folder / "tokens.json").write_text(json.dumps(about | ({"files": {"train": files}} if len(files) > 1 else {})))
    return folder


@pytest.mark.parametrize(("last", "said"), [(0, None), (9, "(9, 1))"), (300, "token 300; the vocabulary has 300")])
@pytest.mark.parametrize("files", [["train_text_document"], ["train-00000_text_document", "train-00001_text_document"]])
def test_verify_looks_into_token_files(store, tmp_path, last, said, files):
    made = store.publish(
        tokens_folder(tmp_path / "in", last, files), kind="tokens", inputs=(), provenance=Provenance(name="t")
    )
    _, problems = problems_of(store, made.ref, keys=tmp_path / "keys")
    assert [problem.problem for problem in problems] == (["format"] if said else [])
    assert not said or said in problems[0].actual

"""Seals of documents and manifests: every changed bit is refused by name, and what older releases wrote is read."""

import hashlib
import json
import shutil

import pytest
from store_stand import fill, put

from tasks.common.errors import IntegrityError
from tasks.common.seal import opened, opened_lines, sealed
from tasks.registry import records, refs
from tasks.registry.verification import everything, problems_of
from tasks.registry.versions import publish
from tasks.security import audit_chain
from tasks.storage import open_store
from tasks.storage.manifest import Provenance

pytestmark = pytest.mark.unit
VALUES = ({"a": 1}, {"target": None, "past": []}, {"hash": "0" * 64}, {"text": "ä " * 40}, {"seal": "x"})


@pytest.fixture
def home(tmp_path):
    """A home with artifacts, a record, a ref, a history and an audit log."""
    home = tmp_path / "home"
    store = open_store(home)
    folder = fill(tmp_path / "made", a__b=b"1" * 300, c=b"2")
    made = Provenance(name="tiny", stage="publish", config={"seed": 1, "steps": 60}, config_digest="0" * 64)
    one = publish(store, folder, kind="dataset", inputs=(), provenance=made)
    record = records.Record(
        stage="train", key="k" * 64, arguments={}, inputs=(), context=(), outputs=(one.ref,), value={}, metrics={},
        seconds=1.0, created=1.0,
    )  # fmt: skip
    records.save(store, record)
    refs.move_ref(store, "tiny/champion", one.ref, inputs=(), reason="first")
    return home


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("indent", [None, 1])
def test_what_was_sealed_is_opened_as_it_was_and_is_json(value, indent):
    data = json.dumps(value, indent=indent, ensure_ascii=False).encode()
    assert opened(sealed(data), where="x") == data
    assert json.loads(sealed(data)) == {**value, "seal": hashlib.sha256(data).hexdigest()}


@pytest.mark.parametrize("value", VALUES)
def test_what_an_older_release_wrote_has_no_seal_and_is_read(value):
    data = json.dumps(value).encode()
    assert opened(data, where="x") == data


def test_every_flipped_bit_of_a_sealed_document_is_refused_by_name():
    data = sealed(json.dumps({"target": "model/tiny@" + "a" * 64, "time": 1.5}).encode())
    for place in range(len(data)):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[place] ^= 1 << bit
            with pytest.raises(IntegrityError, match=r"refs/tiny is damaged"):
                opened(bytes(flipped), where="refs/tiny")


def test_one_flipped_bit_in_any_file_of_a_store_is_found_by_verify_and_named(home):
    store, keys = open_store(home), home / "keys"
    assert {name: found for name, found in everything(store, keys=keys) if found} == {}
    files = [path for path in sorted((home / "store").rglob("*")) if path.is_file() and path.stat().st_size]
    assert len(files) >= 8
    for number, path in enumerate(files):
        kept = path.read_bytes()
        flipped = bytearray(kept)
        flipped[(number * 37) % len(kept)] ^= 1 << (number % 8)
        mode = path.stat().st_mode
        path.chmod(0o600)
        path.write_bytes(flipped)
        found = {name: problems for name, problems in everything(store, keys=keys) if problems}
        assert found, path
        path.write_bytes(kept)
        path.chmod(mode)


def test_a_manifest_that_was_forged_with_its_history_is_not_the_one_of_the_audit_log(home):
    """Whoever may write into the store can make seals; what was published is in the chain of the audit log too."""
    store, keys = open_store(home), home / "keys"
    (path,) = (home / "store" / "artifacts").rglob("manifest.json")
    said = opened(path.read_bytes(), where="here").replace(b'"steps": 60', b'"steps": 90')
    path.write_bytes(sealed(said))
    (manifest,) = store.manifests()
    (problem,) = problems_of(store, manifest.ref, keys=keys)[1]
    assert (problem.path, problem.actual) == ("manifest.json", manifest.digest)
    (history,) = (home / "store" / "documents" / "history").rglob("*.json")
    noted = json.loads(opened(history.read_bytes(), where="here"))
    history.write_bytes(sealed(json.dumps({**noted, "manifest": manifest.digest}).encode()))
    assert problems_of(store, manifest.ref, keys=keys)[1] == [problem]
    entry = home / "store" / "documents" / "audit" / f"{noted['entry']:08d}.json"
    entry.write_text(json.dumps({**json.loads(entry.read_text()), "manifest": manifest.digest}, indent=1))
    edited = {**noted, "manifest": manifest.digest, "entry_hash": audit_chain.hash_of(entry.read_bytes())}
    history.write_bytes(sealed(json.dumps(edited).encode()))
    (problem,) = problems_of(store, manifest.ref, keys=keys)[1]
    assert problem.expected == "an entry of the audit log", "the entry after it names another one"


def test_what_was_damaged_and_is_published_again_is_as_the_audit_log_says(home, tmp_path):
    store = open_store(home)
    (path,) = (home / "store" / "artifacts").rglob("b")
    shutil.rmtree(path.parents[2])
    folder = fill(tmp_path / "again", a__b=b"1" * 300, c=b"2")
    made = Provenance(name="tiny", stage="publish", config={"seed": 2}, config_digest="1" * 64)
    manifest = publish(store, folder, kind="dataset", inputs=(), provenance=made)
    assert problems_of(store, manifest.ref, keys=home / "keys")[1] == []


def test_a_version_of_an_older_release_has_no_digest_and_verifies(tmp_path):
    store = open_store(tmp_path / "home")
    manifest = put(store, fill(tmp_path / "made", a=b"1"))
    assert problems_of(store, manifest.ref, keys=tmp_path / "home" / "keys")[1] == []


def test_every_flipped_bit_of_a_file_of_sealed_lines_is_refused_but_a_cut_line_is_read():
    lines = [sealed(json.dumps({"event": event, "time": 1.5}).encode()) for event in ("begin", "commit", "done")]
    data = b"\n".join(lines) + b"\n"
    assert [json.loads(line)["event"] for line in opened_lines(data, where="journal")] == ["begin", "commit", "done"]
    for place in range(len(data)):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[place] ^= 1 << bit
            with pytest.raises(IntegrityError, match=r"journal, line [123], is damaged"):
                list(opened_lines(bytes(flipped), where="journal"))
    for end in range(len(lines[0])):
        cut = lines[0][:end]
        assert list(opened_lines(cut + b"\n" + lines[1], where="journal")) == [
            *([cut] if cut else []),
            opened(lines[1], where=""),
        ]

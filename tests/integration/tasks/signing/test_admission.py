"""Where shards may come from: sources, paths and signers, on real signatures of real versions."""

import json

import pytest

from tasks.artifacts import parse_ref
from tasks.common.errors import IntegrityError, Missing
from tasks.config.data import AdmissionConfig
from tasks.data.admission import refused
from tasks.signing.bundle import SIGNATURES, sign_folder, signed_files
from tasks.signing.keys import LocalKey, ensure_key, load_public_key, public_key_of
from tasks.storage import open_store
from tasks.storage.manifest import describe
from tasks.storage.store import find


@pytest.fixture
def keys(tmp_path):
    """Two people's private keys."""
    return [ensure_key(tmp_path / name) for name in ("anna", "ben")]


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    (folder / "deep").mkdir(parents=True)
    for name in ("a.jsonl", "b.jsonl", "deep/c.jsonl"):
        (folder / name).write_text(json.dumps({"text": name}) + "\n")
    return folder


def digests(folder):
    return {entry.path: entry.sha256 for entry in describe(folder)}


def admitted(folder, signatures=(), **policy):
    return refused(digests(folder), {}, [each.decode() for each in signatures], AdmissionConfig(**policy))


def test_everything_is_admitted_unless_something_is_asked(corpus):
    assert admitted(corpus) == {}


def test_paths_and_sources_are_asked_of_each_shard(corpus):
    assert admitted(corpus, paths=("*.jsonl",)) == {}
    assert admitted(corpus, paths=("a.*", "deep/*")) == {"b.jsonl": "no path of a.*, deep/*"}
    sources = {"a.jsonl": ["/ok/a.jsonl"], "b.jsonl": ["/ok/x.txt", "/tmp/b"]}
    found = refused(digests(corpus), sources, [], AdmissionConfig(sources=("/ok/*",)))
    assert found == {"b.jsonl": "from /tmp/b", "deep/c.jsonl": "from an unknown place"}


def test_a_shard_is_admitted_by_its_exact_bytes(corpus, keys, tmp_path):
    anna, ben = (str(public_key_of(key)) for key in keys)
    by_anna = sign_folder(corpus, LocalKey(keys[0]))
    assert admitted(corpus, [by_anna], signers=(anna,)) == {}
    assert admitted(corpus, [by_anna], signers=(ben, anna)) == {}
    assert admitted(corpus, [by_anna], signers=(ben,)).keys() == digests(corpus).keys()
    assert admitted(corpus, [], signers=(anna,)).keys() == digests(corpus).keys()
    (corpus / "b.jsonl").rename(corpus / "renamed.jsonl")
    assert admitted(corpus, [by_anna], signers=(anna,)) == {}
    (corpus / "a.jsonl").write_text(json.dumps({"text": "A.jsonl"}) + "\n")
    assert admitted(corpus, [by_anna], signers=(anna,)) == {"a.jsonl": f"signed by none of {anna}"}


def test_several_signers_cover_what_each_has_signed(corpus, keys, tmp_path):
    anna, ben = (str(public_key_of(key)) for key in keys)
    by_anna = sign_folder(corpus / "deep", LocalKey(keys[0]))
    assert sorted(admitted(corpus, [by_anna], signers=(anna, ben))) == ["a.jsonl", "b.jsonl"]
    part = tmp_path / "part"
    part.mkdir()
    (part / "b.jsonl").write_bytes((corpus / "b.jsonl").read_bytes())
    both = [by_anna, sign_folder(part, LocalKey(keys[1]))]
    assert list(admitted(corpus, both, signers=(anna, ben))) == ["a.jsonl"]
    assert sorted(admitted(corpus, both, signers=(ben,))) == ["a.jsonl", "deep/c.jsonl"]


def test_a_forged_signature_lets_nothing_in(corpus, keys):
    import base64

    path = public_key_of(keys[0])
    key = load_public_key(path)
    bundle = json.loads(sign_folder(corpus, LocalKey(keys[0])))
    assert signed_files(json.dumps(bundle).encode(), key) == digests(corpus)
    payload = json.loads(base64.b64decode(bundle["dsseEnvelope"]["payload"]))
    payload["predicate"]["resources"][0]["digest"] = "0" * 64
    bundle["dsseEnvelope"]["payload"] = base64.b64encode(json.dumps(payload).encode()).decode()
    forged = json.dumps(bundle).encode()
    with pytest.raises(IntegrityError, match="not made over this content by the key"):
        signed_files(forged, key)
    assert admitted(corpus, [forged], signers=(str(path),)).keys() == digests(corpus).keys()
    bundle["dsseEnvelope"]["signatures"] = []
    with pytest.raises(IntegrityError):
        signed_files(json.dumps(bundle).encode(), key)


def test_a_signer_that_is_no_key_is_the_configurations_mistake(corpus, keys, tmp_path):
    (tmp_path / "no.pem").write_text("no key")
    by_anna = sign_folder(corpus, LocalKey(keys[0]))
    with pytest.raises(ValueError, match="holds no public key"):
        admitted(corpus, [by_anna], signers=(str(tmp_path / "no.pem"),))
    with pytest.raises(Missing, match="none.pem"):
        admitted(corpus, [by_anna], signers=(str(tmp_path / "none.pem"),))


def test_publishing_keeps_where_from_by_whom_and_earlier_signatures(fresh, tmp_path, keys):
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": name}) + "\n")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "one.txt").write_text("one")
    first = fresh.ok("dataset", "publish", "x", tmp_path / "a.jsonl", "--sign-key", keys[0]).said
    second = fresh.ok("dataset", "publish", "x", tmp_path / "a.jsonl", tmp_path / "b.jsonl", tmp_path / "texts").said
    assert (first["signatures"], second["signatures"]) == (1, 1)
    store = open_store(fresh.path)
    manifest = find(store, *parse_ref(second["ref"]))
    assert manifest.provenance.model_extra["sources"] == {
        "a.jsonl": [str(tmp_path / "a.jsonl")],
        "b.jsonl": [str(tmp_path / "b.jsonl")],
        "shard-00000.jsonl": [f"{tmp_path / 'texts'}/"],
    }
    assert manifest.provenance.model_extra["published_by"]
    shards = {entry.path: entry.sha256 for entry in manifest.content.files}
    signatures = json.loads(store.attachment(manifest, SIGNATURES))
    policy = AdmissionConfig(signers=(str(public_key_of(keys[0])),))
    assert sorted(refused(shards, {}, signatures, policy)) == ["b.jsonl", "shard-00000.jsonl"]
    bundle = tmp_path / "ben.json"
    bundle.write_bytes(sign_folder(fresh.folder_of(second["ref"]) / "files", LocalKey(keys[1])))
    paths = (tmp_path / "a.jsonl", tmp_path / "b.jsonl", tmp_path / "texts")
    again = fresh.ok("dataset", "publish", "x", *paths, "--signature", bundle).said
    assert again["ref"] == second["ref"] and again["signatures"] == 2
    assert fresh.run("dataset", "publish", "x", *paths, "--sign-key", tmp_path / "none").code == 2
    assert "a.jsonl" in fresh.ok("dataset", "list").said["datasets"][0]["from"]

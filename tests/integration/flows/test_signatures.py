"""What leaves training is signed; nothing unsigned, revoked or copied from elsewhere is exported, registered or deployed."""

import base64
import json
import shutil
from contextlib import contextmanager

import pytest
from support import Home

from tasks.common.seal import opened, sealed
from tasks.registry.refs import read_ref
from tasks.signing.keys import LocalKey, ensure_key, key_id, load_public_key, pem_of
from tasks.storage import open_store


@pytest.fixture
def alone(home, done, tmp_path):
    """The store and keys of the finished lifecycle, as a home of their own."""
    made = Home(tmp_path / "home")
    for name in ("store", "keys"):
        shutil.copytree(home.path / name, made.path / name)
    return made


def refs(done):
    """The checkpoint and the model of the run."""
    made = [*done.stage("train")["outputs"], *done.stage("export")["outputs"]]
    return tuple(next(ref for ref in made if ref.startswith(kind)) for kind in ("checkpoint/", "model/"))


def statement(home, ref):
    envelope = json.loads((home.folder_of(ref) / "statement.json").read_bytes())
    return json.loads(base64.b64decode(envelope["payload"]))


@contextmanager
def changed(path, data):
    """A file that is something else, or not there, inside the block."""
    before = path.read_bytes()
    path.unlink() if data is None else path.write_bytes(data)
    try:
        yield
    finally:
        path.write_bytes(before)


def test_checkpoint_and_model_are_signed_with_what_they_are(alone, done):
    checkpoint, model = refs(done)
    key = key_id(load_public_key(alone.path / "keys" / "signing.pub"))
    for ref, base in ((checkpoint, None), (model, checkpoint.rpartition("@")[2])):
        said = statement(alone, ref)
        assert said["subject"] == [{"name": ref.partition("@")[0], "digest": {"sha256": ref.rpartition("@")[2]}}]
        assert (said["predicate"]["base"], said["predicate"]["key"]) == (base, key)
        assert alone.ok("verify", ref).said["ok"]
    signed = [entry for entry in alone.ok("audit-log").said["entries"] if entry["action"] == "sign"]
    assert {checkpoint, model} <= {entry["what"] for entry in signed}


@contextmanager
def anothers_statement(home, done):
    """A good statement, of another artifact."""
    checkpoint, model = refs(done)
    other = (home.folder_of(checkpoint) / "statement.json").read_bytes()
    with changed(home.folder_of(model) / "statement.json", other):
        yield "kind checkpoint, and not model"


@contextmanager
def revoked_key(home, done):
    home.ok("trust", "revoke", "home", "--reason", "stolen")
    try:
        yield "is revoked"
    finally:
        (home.path / "trust.yaml").unlink()


@pytest.mark.long
@pytest.mark.parametrize(("wrong", "error"), [(anothers_statement, "IntegrityError"), (revoked_key, "Untrusted")])
def test_nothing_whose_signature_does_not_count_is_deployed(home, done, wrong, error):
    """The endpoint and the champion stay what they are."""
    serving, champion = home.ok("endpoint", "list").said, read_ref(open_store(home.path), "tiny/champion")
    with wrong(home, done) as said:
        ran = home.retrain("--from", "deploy")
    assert (ran.code, ran.said["error"]["type"]) == (5, error)
    assert said in ran.said["error"]["message"] and "sign" in ran.said["error"]["remedy"]
    assert ran.statuses()["deploy"] == "failed"
    assert home.ok("endpoint", "list").said["endpoints"] == serving["endpoints"]
    assert read_ref(open_store(home.path), "tiny/champion") == champion


@pytest.mark.long
def test_what_was_killed_between_publishing_and_signing_is_signed_by_the_next_run(home, done):
    _, model = refs(done)
    for name in ("signature.json", "statement.json"):
        (home.folder_of(model) / name).unlink()
    assert home.run("verify", model).code == 5
    ran = home.retrain("--from", "export")
    assert ran.code == 0, ran.stderr
    assert home.ok("verify", done.said["endpoint"]["model"]).said["ok"]


def test_a_checkpoint_that_is_not_signed_is_not_exported(home, done):
    checkpoint, _ = refs(done)
    with changed(home.folder_of(checkpoint) / "statement.json", None):
        ran = home.retrain("--from", "export")
    assert (ran.code, ran.statuses()["export"], ran.statuses()["deploy"]) == (5, "failed", "not_run")
    assert "signed in the old form" in ran.said["error"]["message"]
    assert f"headway sign {checkpoint}" in ran.said["error"]["remedy"]


def test_a_key_is_rotated_and_the_old_one_revoked(alone, done, tmp_path):
    """From the commands alone: what the old key signed is refused until somebody stands by it with the new one."""
    _, model = refs(done)
    new = ensure_key(tmp_path / "new")
    (tmp_path / "new.pub").write_bytes(pem_of(LocalKey(new).public_key()))
    assert alone.run("trust", "add", "new", tmp_path / "new.pub", "--may-sign", "model/*").code == 2
    added = alone.ok("trust", "add", "new", tmp_path / "new.pub", "--may-sign", "model/*", "--reason", "rotation").said
    assert alone.ok("verify", model).said["ok"]
    assert alone.run("trust", "revoke", "home").code == 2
    alone.ok("trust", "revoke", "home", "--reason", "rotation")
    refused = alone.run("verify", model)
    assert refused.code == 5 and [problem["problem"] for problem in refused.said["problems"]] == ["signature"]
    assert "is revoked" in refused.said["error"]["message"]
    assert alone.run("sign", model, "--reason", "with a revoked key").code == 5
    trust = alone.path / "trust.yaml"
    trust.write_text(f"{trust.read_text()}sign_with:\n  key: {new}\n")
    assert alone.run("sign", model).code == 2
    assert alone.ok("sign", model, "--reason", "it is ours").said["key"] == added["key"]
    assert alone.ok("verify", model).said["ok"]
    assert alone.run("sign", refs(done)[0], "--reason", "it may sign models only").code == 5
    listed = alone.ok("trust", "list").said
    assert [(key["name"], bool(key["revoked"])) for key in listed["keys"]] == [("home", True), ("new", False)]
    told = [(entry["action"], entry["reason"]) for entry in alone.ok("audit-log").said["entries"]]
    for entry in (("trust key", "rotation"), ("revoke key", "rotation"), ("sign", "it is ours")):
        assert entry in told


def test_a_record_in_the_store_does_not_choose_the_program_that_runs(home, done, tmp_path):
    """The qualification's record has the configuration of the cluster: who may write there could name a program."""
    evil, ran_it = tmp_path / "python", tmp_path / "ran"
    evil.write_text(f"#!/bin/sh\ntouch {ran_it}\nexit 1\n")
    evil.chmod(0o755)
    key = done.stage("benchmark")["key"]
    record = home.path / "store" / "documents" / "records" / "benchmark" / f"{key}.json"
    said = json.loads(opened(record.read_bytes(), where="x"))
    said["value"]["subject"]["config"] |= {"python": str(evil), "environment": {"EVIL": "1"}}
    with changed(record, sealed(json.dumps(said).encode())):
        ran = home.retrain("--from", "evaluate", "--to", "evaluate")
    assert ran.statuses()["benchmark"] == "reused"
    assert not ran_it.exists()
    assert (ran.code, ran.statuses()["evaluate"]) == (0, "ran"), ran.stderr


def test_only_what_leaves_training_is_signed_and_only_when_it_is_whole(alone, done):
    _, model = refs(done)
    assert alone.run("sign", "dataset/tiny", "--reason", "x").code == 2
    path = next(path for path in (alone.folder_of(model) / "files").iterdir() if path.is_file())
    with changed(path, path.read_bytes() + b"x"):
        ran = alone.run("sign", model, "--reason", "x")
    assert ran.code == 5 and [problem["path"] for problem in ran.said["error"]["problems"]] == [path.name]

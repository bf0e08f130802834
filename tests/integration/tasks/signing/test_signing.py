"""A signed artifact passes as it was signed, and in no other state: bytes, bundle, statement, lineage, place in the history."""

import base64
import hashlib
import json
import os
import random
import shutil
import stat

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tasks.common.errors import IntegrityError, Missing
from tasks.common.seal import opened, sealed
from tasks.registry.verification import problems_of
from tasks.registry.versions import publish
from tasks.security.signatures import require_signed, sign
from tasks.signing.bundle import SIGNATURE, sign_files, sign_folder, signed_files
from tasks.signing.keys import LocalKey, ensure_key, key_id, load_public_key, pem_of, public_key_of
from tasks.signing.statement import STATEMENT, open_statement, seal_statement
from tasks.storage import open_store
from tasks.storage.history import note_change
from tasks.storage.manifest import Provenance
from tasks.storage.store import find

pytestmark = pytest.mark.unit

BASE = "c" * 64


def made(folder, text="{}"):
    (folder / "deep").mkdir(parents=True)
    (folder / "model.onnx").write_bytes(b"graph")
    (folder / "model.onnx.data").write_bytes(bytes(range(256)) * 64)
    (folder / "deep" / "tokenizer.json").write_text(text)
    return folder


def put(home, folder, name="tiny", kind="model", **fields):
    said = {"inputs": (f"checkpoint/tiny@{BASE}",), "stage": "export", "commit": "abc", **fields}
    return publish(
        open_store(home),
        folder,
        kind=kind,
        inputs=(BASE,),
        provenance=Provenance.model_validate({"name": name, **said}),
    )


@pytest.fixture(scope="module")
def signed(tmp_path_factory):
    """A home with one signed model: read only, tests copy it."""
    home = tmp_path_factory.mktemp("signing")
    sign(open_store(home), home, put(home, made(home / "in")))
    return home


@pytest.fixture
def home(signed, tmp_path):
    made = shutil.copytree(signed, tmp_path / "home")
    for path in (made / "store" / "artifacts").rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)  # published files are read-only, for all but root
    return made


def place(home, ref="model/tiny"):
    manifest = find(open_store(home), *ref.split("/"))
    return home / "store" / "artifacts" / ref / manifest.version


def check(home, ref="model/tiny"):
    """Through the same door as a deployment, by attachments and manifest alone."""
    store = open_store(home)
    return require_signed(store, home, find(store, *ref.split("/")))


def problems(home, ref="model/tiny"):
    return {problem.path: problem.problem for problem in problems_of(open_store(home), ref, keys=home / "keys")[1]}


def flip(folder):
    data = bytearray((folder / "model.onnx.data").read_bytes())
    data[1000] ^= 1
    (folder / "model.onnx.data").write_bytes(data)


def remove(folder):
    (folder / "deep" / "tokenizer.json").unlink()


def add(path):
    def tamper(folder):
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text("payload")

    return tamper


def link_file(folder):
    (folder / "model.onnx").rename(folder.parent / "elsewhere")
    (folder / "model.onnx").symlink_to(folder.parent / "elsewhere")


def link_folder(folder):
    (folder / "deep").rename(folder.parent / "deep")
    (folder / "deep").symlink_to(folder.parent / "deep")


def hard_link(folder):
    os.link(folder / "model.onnx", folder.parent / "second-name")


def pipe(folder):
    os.mkfifo(folder / "pipe")


def rename(folder):
    (folder / "model.onnx").rename(folder / "model2.onnx")


CASES = [
    (flip, {"model.onnx.data": "sha256"}),
    (remove, {"deep/tokenizer.json": "missing"}),
    (add("extra.bin"), {"extra.bin": "extra"}),
    (add(".hidden"), {".hidden": "extra"}),
    (add(".git/hook"), {".git/hook": "extra"}),
    (add(".gitignore"), {".gitignore": "extra"}),
    (add("__pycache__/x.pyc"), {"__pycache__/x.pyc": "extra"}),
    (link_file, {"model.onnx": "link"}),
    (link_folder, {"deep": "extra", "deep/tokenizer.json": "missing"}),
    (hard_link, {"model.onnx": "link"}),
    (pipe, {"pipe": "extra"}),
    (rename, {"model.onnx": "missing", "model2.onnx": "extra"}),
]


@pytest.mark.parametrize(("tamper", "expected"), CASES, ids=lambda case: getattr(case, "__name__", None))
def test_every_change_of_the_files_is_named(home, tamper, expected):
    assert problems(home) == {}
    tamper(place(home) / "files")
    assert problems(home) == expected


@pytest.mark.integration
@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.long)])
def test_a_seeded_sweep_of_flips_and_cuts_finds_no_hole(home, every):
    """One bit of every seventh byte of bundle and statement, or of every one, seeded bytes of the files, and cuts of all."""
    dice = random.Random(20261121)
    for name in (SIGNATURE, STATEMENT):
        path = place(home) / name
        whole = path.read_bytes()
        for at in range(0, len(whole), every):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << dice.randrange(8)]) + whole[at + 1 :])
            with pytest.raises(IntegrityError):
                check(home)
        for end in dice.sample(range(len(whole)), 21 // every):
            path.write_bytes(whole[:end])
            with pytest.raises(IntegrityError):
                check(home)
        path.write_bytes(whole)
    for path in [path for path in (place(home) / "files").rglob("*") if path.is_file()]:
        whole = path.read_bytes()
        for at in dice.sample(range(len(whole)), min(105 // every, len(whole))):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << dice.randrange(8)]) + whole[at + 1 :])
            assert problems(home) == {path.relative_to(place(home) / "files").as_posix(): "sha256"}
            path.write_bytes(whole[:at])
            assert set(problems(home).values()) == {"size"}
        path.write_bytes(whole)
    assert problems(home) == {} and check(home).name == "tiny"


def test_the_statement_says_what_it_is_and_what_it_was_made_from(home):
    said = check(home)
    manifest = find(open_store(home), "model", "tiny")
    assert (said.kind, said.name, said.version, said.base, said.index) == ("model", "tiny", manifest.version, BASE, 1)
    assert said.key == key_id(load_public_key(home / "keys" / "signing.pub"))


def test_the_librarys_own_verifier_takes_our_bundle_and_we_take_what_it_says(home, tmp_path):
    """Interoperable both ways: https://github.com/sigstore/model-transparency."""
    from model_signing import hashing, signing, verifying

    bundle, files, key = place(home) / SIGNATURE, place(home) / "files", home / "keys" / "signing.pem"
    plain = hashing.Config().set_ignored_paths(paths=[], ignore_git_paths=False)
    verifier = verifying.Config().use_elliptic_key_verifier(public_key=public_key_of(key)).set_hashing_config(plain)
    verifier.verify(files, bundle)
    signing.Config().use_elliptic_key_signer(private_key=key).set_hashing_config(plain).sign(files, tmp_path / "sig")
    theirs = signed_files((tmp_path / "sig").read_bytes(), load_public_key(public_key_of(key)))
    assert theirs == {file.path: file.sha256 for file in find(open_store(home), "model", "tiny").content.files}
    flip(files)
    with pytest.raises(ValueError, match="Hash mismatch"):
        verifier.verify(files, bundle)


def refused(home, ref="model/tiny"):
    with pytest.raises(IntegrityError) as error:
        check(home, ref)
    assert error.value.remedy
    return error.value.message


def beside(home, ref="model/tiny"):
    return {name: (place(home, ref) / name).read_bytes() for name in (SIGNATURE, STATEMENT)}


def lay(home, files, ref="model/tiny"):
    for name, data in files.items():
        (place(home, ref) / name).write_bytes(data)


def test_the_same_files_under_another_name_or_kind_are_not_signed(home):
    """Version and bundle are the same: only the statement tells them apart."""
    for kind, name in (("model", "other"), ("checkpoint", "tiny")):
        put(home, home / "in", name=name, kind=kind)
        assert "it is not signed" in refused(home, f"{kind}/{name}")
        lay(home, beside(home), f"{kind}/{name}")
    assert "name tiny, and not other" in refused(home, "model/other")
    assert "kind model, and not checkpoint" in refused(home, "checkpoint/tiny")


def test_an_older_signature_under_a_newer_version_is_refused(home):
    old = beside(home)
    second = put(home, made(home / "second", text="[]"))
    sign(open_store(home), home, second)
    new = beside(home)
    lay(home, old)
    assert f"and not {second.version[:16]}" in refused(home)
    lay(home, {STATEMENT: new[STATEMENT]})
    assert "not the one that the statement is about" in refused(home)


def test_an_older_version_that_is_put_forward_as_newly_published_is_refused(home):
    """Rolling back is no new publishing, and passes; whoever writes a publishing into the history without a signature fails."""
    store, first = open_store(home), find(open_store(home), "model", "tiny")
    second = put(home, made(home / "second", text="[]"))
    assert sign(store, home, second).index == 2
    note_change(store, "model", "tiny", action="rollback", version=first.version)
    assert check(home).version == first.version
    note_change(store, "model", "tiny", action="publish", version=first.version)
    assert "change 1 of the name, and the history has it as published in change 4" in refused(home)
    assert sign(store, home, first).index == 4
    assert check(home).version == first.version


@pytest.mark.parametrize(
    "change", [{"commit": "def"}, {"inputs": []}, {"context": ["plan/x@" + "a" * 64]}, {"dirty": True}]
)
def test_a_manifest_with_another_lineage_is_refused(home, change):
    path = place(home) / "manifest.json"
    said = json.loads(opened(path.read_bytes(), where="here"))
    said["provenance"] = {**said["provenance"], "host": "elsewhere", "blob_versions": {"model.onnx": "v"}}
    path.write_bytes(sealed(json.dumps(said).encode()))
    assert check(home)
    path.write_bytes(sealed(json.dumps({**said, "provenance": {**said["provenance"], **change}}).encode()))
    assert "lineage" in refused(home)


def test_files_and_manifest_changed_together_are_another_version_and_not_signed(home):
    files = place(home) / "files"
    old = beside(home)
    (files / "deep" / "tokenizer.json").write_text("[]")
    changed = put(home, files)
    lay(home, old)
    assert f"and not {changed.version[:16]}" in refused(home)


def test_only_a_key_that_the_home_trusts_counts(home, tmp_path):
    """A stranger signs everything anew, rightly, or only one of the two; what they say of the key helps them nothing."""
    ours, stranger = beside(home), LocalKey(ensure_key(tmp_path / "stranger"))
    files = {file.path: file.sha256 for file in find(open_store(home), "model", "tiny").content.files}
    bundle = sign_files(files, stranger)
    digest = hashlib.sha256(bundle).hexdigest()
    theirs = check(home).model_copy(update={"key": key_id(stranger.public_key()), "bundle": digest})
    envelope = seal_statement(theirs, stranger)
    lay(home, {SIGNATURE: bundle, STATEMENT: envelope})
    assert "does not know the key" in refused(home)
    lay(home, {SIGNATURE: ours[SIGNATURE], STATEMENT: envelope})
    assert "does not know the key" in refused(home)
    lay(home, {SIGNATURE: bundle, STATEMENT: ours[STATEMENT]})
    assert "not the one that the statement is about" in refused(home)
    forged = json.loads(envelope)
    said = json.loads(base64.b64decode(forged["payload"]))
    said["predicate"]["key"] = check_key = key_id(load_public_key(home / "keys" / "signing.pub"))
    payload = json.dumps(said, sort_keys=True, separators=(",", ":")).encode()
    forged["payload"], forged["signatures"][0]["keyid"] = base64.b64encode(payload).decode(), check_key
    lay(home, {SIGNATURE: bundle, STATEMENT: json.dumps(forged, sort_keys=True, separators=(",", ":")).encode()})
    assert "not made over this content by the key" in refused(home)
    with pytest.raises(IntegrityError, match="names the key"):
        open_statement(envelope, load_public_key(home / "keys" / "signing.pub"))


def test_the_old_form_is_told_apart_and_can_be_signed_anew(home):
    (place(home) / STATEMENT).unlink()
    assert "signed in the old form" in refused(home)
    assert problems(home) == {SIGNATURE: "signature"}
    store = open_store(home)
    sign(store, home, find(store, "model", "tiny"))
    assert check(home) and problems(home) == {}
    (place(home) / SIGNATURE).unlink()
    assert "it is not signed" in refused(home)


def test_a_bundle_that_leaves_files_unchecked_is_refused_though_our_key_made_it(home, tmp_path):
    from model_signing import signing

    key = home / "keys" / "signing.pem"
    signing.Config().use_elliptic_key_signer(private_key=key).sign(place(home) / "files", tmp_path / "lax.sig")
    with pytest.raises(IntegrityError, match="leaves files unchecked"):
        signed_files((tmp_path / "lax.sig").read_bytes(), LocalKey(key).public_key())


@pytest.mark.parametrize("broken", [b"", b"{}", b"[]", b"\xff\xfe", b'{"dsseEnvelope": {"payload": "AAAA"}}'])
def test_what_is_no_bundle_is_an_integrity_error(home, broken):
    with pytest.raises(IntegrityError, match="no model-signing bundle"):
        signed_files(broken, LocalKey(home / "keys" / "signing.pem").public_key())
    lay(home, {STATEMENT: broken})
    assert "no statement" in refused(home)


def test_signing_a_folder_leaves_it_as_it_was_and_refuses_links(tmp_path):
    folder, key = made(tmp_path / "model"), LocalKey(ensure_key(tmp_path / "keys"))
    names = signed_files(sign_folder(folder, key), key.public_key())
    assert sorted(names) == ["deep/tokenizer.json", "model.onnx", "model.onnx.data"]
    assert sorted(path.name for path in folder.rglob("*")) == sorted(
        ["deep", *(name.rpartition("/")[2] for name in names)]
    )
    link_file(folder)
    with pytest.raises(IntegrityError, match=r"model\.onnx: it is a symbolic link"):
        sign_folder(folder, key)


def test_the_key_is_private_and_stays(tmp_path):
    key = ensure_key(tmp_path / "keys")
    before = key.read_bytes()
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert stat.S_IMODE(key.parent.stat().st_mode) == 0o700
    assert key.stat().st_nlink == 1
    public_key_of(key).unlink()
    assert ensure_key(tmp_path / "keys").read_bytes() == before
    assert sorted(path.name for path in key.parent.iterdir()) == ["signing.pem", "signing.pub"]
    key.chmod(0o644)
    with pytest.raises(ValueError, match="chmod 600"):
        ensure_key(tmp_path / "keys")
    with pytest.raises(ValueError, match="read by everybody"):
        LocalKey(key)
    with pytest.raises(Missing):
        LocalKey(tmp_path / "none.pem")
    with pytest.raises(Missing):
        load_public_key(tmp_path / "none.pub")


@pytest.mark.parametrize("curve", [ec.SECP256R1(), ec.SECP384R1(), ec.SECP521R1()], ids=lambda curve: curve.name)
def test_keys_on_every_curve_sign_what_the_library_verifies(curve, tmp_path):
    from model_signing import verifying

    path, folder = tmp_path / "k.pem", made(tmp_path / "model")
    private = ec.generate_private_key(curve)
    form = serialization.PrivateFormat.PKCS8
    path.write_bytes(private.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))
    path.chmod(0o600)
    public_key_of(path).write_bytes(pem_of(private.public_key()))
    bundle = sign_folder(folder, LocalKey(path))
    (tmp_path / "sig").write_bytes(bundle)
    verifying.Config().use_elliptic_key_verifier(public_key=public_key_of(path)).verify(folder, tmp_path / "sig")
    assert len(signed_files(bundle, private.public_key())) == 3
    with pytest.raises(IntegrityError, match="not made over this content"):
        signed_files(bundle, ec.generate_private_key(curve).public_key())

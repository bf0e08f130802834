"""Whose signatures count: the trust policy, what each key may sign, and revoked keys."""

import pytest
import yaml
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from tasks.common.errors import IntegrityError, Refused, Unknown
from tasks.registry.versions import publish
from tasks.security.signatures import require_signed, require_signer, sign
from tasks.security.trust import add_key, held_keys, revoke_key, signer_of, trusted_key
from tasks.signing.keys import LocalKey, ensure_key, key_id, parse_public_key, pem_of
from tasks.storage import open_store
from tasks.storage.manifest import Provenance

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def unnamed(monkeypatch):
    monkeypatch.delenv("HEADWAY_TRUST", raising=False)


@pytest.fixture
def ci(tmp_path):
    """A second key, of somebody else."""
    return LocalKey(ensure_key(tmp_path / "ci"))


def model(home, text="weights", kind="model", name="tiny"):
    folder = home / text
    folder.mkdir(exist_ok=True)
    (folder / "weights.bin").write_text(text)
    return publish(open_store(home), folder, kind=kind, inputs=(), provenance=Provenance(name=name))


def own(home):
    return LocalKey(ensure_key(home / "keys")).public_key()


def pem(key):
    return pem_of(key.public_key()).decode()


def write(home, keys, mode=0o600, **more):
    path = home / "trust.yaml"
    path.write_text(keys if isinstance(keys, str) else yaml.safe_dump({"keys": keys, **more}))
    path.chmod(mode)
    return path


def entry(key, *may, **more):
    return {"public_key": pem(key), "may_sign": list(may), **more}


def test_without_a_policy_the_homes_own_key_counts_for_everything(tmp_path, ci):
    assert held_keys(tmp_path) == []
    store = open_store(tmp_path)
    for kind in ("model", "checkpoint"):
        assert sign(store, tmp_path, model(tmp_path, kind=kind)).key == key_id(own(tmp_path))
    (tmp_path / "keys" / "signing.pub").write_bytes(pem_of(ci.public_key()))
    assert [held.id for held in held_keys(tmp_path)] == [key_id(own(tmp_path))]
    (tmp_path / "keys" / "signing.pem").unlink()
    assert [held.id for held in held_keys(tmp_path)] == [key_id(ci.public_key())]


def test_a_key_signs_what_it_may_and_nothing_else(tmp_path, ci):
    write(tmp_path, {"ci": entry(ci, "model/tiny*", "checkpoint/*")}, sign_with={"key": "ci/signing.pem"})
    store, names = open_store(tmp_path), [("model", "tiny-2"), ("checkpoint", "other")]
    for kind, name in names:
        assert require_signer(tmp_path, kind, name).public_key() == ci.public_key()
        assert sign(store, tmp_path, model(tmp_path, kind=kind, name=name)).key == key_id(ci.public_key())
    with pytest.raises(IntegrityError, match=r"ci .* may sign model/tiny\*, checkpoint/\*, and not model/other"):
        sign(store, tmp_path, model(tmp_path, name="other"))
    with pytest.raises(IntegrityError, match="does not know the key"):
        trusted_key(tmp_path, key_id(own(tmp_path)), "model/tiny")


def test_a_key_that_may_not_sign_leaves_the_signature_that_counts(tmp_path, ci):
    store, made = open_store(tmp_path), model(tmp_path)
    before = sign(store, tmp_path, made)
    write(
        tmp_path, {"home": {"public_key": "keys/signing.pub", "may_sign": ["*/*"]}}, sign_with={"key": "ci/signing.pem"}
    )
    with pytest.raises(IntegrityError, match="does not know the key"):
        sign(store, tmp_path, made)
    assert require_signed(store, tmp_path, made) == before


def test_what_a_revoked_key_signed_before_and_after_counts_for_nothing(tmp_path, ci):
    store, made = open_store(tmp_path), model(tmp_path)
    sign(store, tmp_path, made)
    add_key(tmp_path, "ci", ci.public_key(), ("*/*",))
    assert [held.name for held in held_keys(tmp_path)] == ["home", "ci"]
    revoke_key(tmp_path, "home", "the laptop was stolen")
    with pytest.raises(IntegrityError, match="home .* is revoked since .*: the laptop was stolen"):
        require_signed(store, tmp_path, made)
    with pytest.raises(IntegrityError, match="is revoked"):
        sign(store, tmp_path, made)
    path = tmp_path / "trust.yaml"
    path.write_text(f"sign_with:\n  key: ci/signing.pem\n{path.read_text()}")
    assert sign(store, tmp_path, made).key == key_id(ci.public_key())
    with pytest.raises(ValueError, match="the trust policy has this already: home"):
        add_key(tmp_path, "again", own(tmp_path), ("*/*",))
    with pytest.raises(Unknown, match="nobody"):
        revoke_key(tmp_path, "nobody", "x")


def test_revoked_under_one_name_is_revoked_under_all(tmp_path, ci):
    since = {"reason": "lost", "since": "2026-01-02"}
    write(tmp_path, {"new": entry(ci, "*/*"), "old": entry(ci, "*/*", revoked=since)})
    with pytest.raises(IntegrityError, match="old .* is revoked since 2026-01-02: lost"):
        trusted_key(tmp_path, key_id(ci.public_key()), "model/tiny")


BROKEN = {
    "a misspelt key": lambda ci: yaml.safe_dump({"keys": {"ci": entry(ci, "*/*", revokd={"reason": "x"})}}),
    "a misspelt section": lambda ci: yaml.safe_dump({"key": {}}),
    "a kind that is not signed": lambda ci: yaml.safe_dump({"keys": {"ci": entry(ci, "modle/*")}}),
    "nothing to sign": lambda ci: yaml.safe_dump({"keys": {"ci": entry(ci)}}),
    "a revocation without a reason": lambda ci: yaml.safe_dump({"keys": {"ci": entry(ci, "*/*", revoked={})}}),
    "no key": lambda ci: yaml.safe_dump({"keys": {"ci": {"public_key": "-----BEGIN x", "may_sign": ["*/*"]}}}),
    "a key that is not there": lambda ci: yaml.safe_dump(
        {"keys": {"ci": {"public_key": "x.pub", "may_sign": ["*/*"]}}}
    ),
    "one name twice": lambda ci: "keys:\n  a: 1\n  a: 2\n",
    "no YAML": lambda ci: "keys: [",
    "a list": lambda ci: "- 1",
    "a secret in it": lambda ci: yaml.safe_dump({"sign_with": {"key": "x", "secret": "hunter2"}}),
}


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN.keys())
def test_a_damaged_policy_trusts_nobody(tmp_path, ci, text):
    store, made = open_store(tmp_path), model(tmp_path)
    sign(store, tmp_path, made)
    write(tmp_path, text(ci))
    with pytest.raises(Refused, match="no signature counts"):
        require_signed(store, tmp_path, made)
    with pytest.raises(Refused, match="no signature counts"):
        signer_of(tmp_path)


@pytest.mark.parametrize("mode", [0o666, 0o620, 0o602])
def test_a_policy_or_key_that_others_may_write_trusts_nobody(tmp_path, ci, mode):
    own(tmp_path)
    path = write(tmp_path, {"home": {"public_key": "keys/signing.pub", "may_sign": ["*/*"]}}, mode)
    with pytest.raises(Refused, match=r"trust\.yaml can be written by others"):
        held_keys(tmp_path)
    path.chmod(0o644)
    assert held_keys(tmp_path)
    (tmp_path / "keys" / "signing.pub").chmod(mode)
    with pytest.raises(Refused, match=r"signing\.pub can be written by others"):
        held_keys(tmp_path)


def test_a_named_policy_that_is_not_there_trusts_nobody(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWAY_TRUST", str(tmp_path / "shared.yaml"))
    with pytest.raises(Refused, match="HEADWAY_TRUST names"):
        held_keys(tmp_path)
    add_key(tmp_path, "ci", ec.generate_private_key(ec.SECP384R1()).public_key(), ("model/*",))
    assert [held.name for held in held_keys(tmp_path)] == ["home", "ci"]
    assert not (tmp_path / "trust.yaml").exists()


@pytest.mark.parametrize(
    ("key", "said"),
    [
        (ec.generate_private_key(ec.SECP256K1()), "secp256k1"),
        (ec.generate_private_key(ec.SECP224R1()), "secp224r1"),
        (rsa.generate_private_key(65537, 2048), "no elliptic curve key"),
    ],
    ids=["k1", "224", "rsa"],
)
def test_keys_of_other_kinds_are_refused(tmp_path, key, said):
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    with pytest.raises(ValueError, match=said):
        parse_public_key(key.public_key().public_bytes(serialization.Encoding.PEM, form), "x")
    path = tmp_path / "k.pem"
    plain = serialization.NoEncryption()
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain))
    path.chmod(0o600)
    with pytest.raises(ValueError, match=said):
        LocalKey(path)

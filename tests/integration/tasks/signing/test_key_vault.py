"""Keys that stay in Azure Key Vault: what they sign, what reaches the vault, what it refuses; and the commands with one."""

import base64
import hashlib

import pytest
import requests
import yaml
from cryptography.hazmat.primitives.asymmetric import ec
from key_vault import SECRET, TENANT, TOKEN, VERSION, Identity, Vault, serving
from support import Home

from tasks.common.errors import IntegrityError, Missing
from tasks.registry.versions import publish
from tasks.security.signatures import require_signed, sign
from tasks.security.trust import add_key, signer_of
from tasks.signing.bundle import SIGNATURE, sign_files, signed_files
from tasks.signing.keys import key_id, require_signature
from tasks.signing.statement import STATEMENT, seal_statement
from tasks.signing.vault import VaultKey
from tasks.storage import open_store
from tasks.storage.history import published_as
from tasks.storage.manifest import Provenance

KEY = "https://acme.vault.azure.net/keys/ci"


def model(home):
    folder = home / "in"
    folder.mkdir(parents=True)
    (folder / "weights.bin").write_text("weights")
    return publish(open_store(home), folder, kind="model", inputs=(), provenance=Provenance(name="tiny"))


def sign_with(home, **said):
    path = home / "trust.yaml"
    before = yaml.safe_load(path.read_text()) if path.exists() else {}
    path.write_text(yaml.safe_dump({**before, "sign_with": {"key": KEY, **said}}))
    path.chmod(0o600)


@pytest.fixture(scope="module")
def vault(tmp_path_factory):
    keys = {"ci": ec.SECP256R1(), "large": ec.SECP384R1(), "no-right": ec.SECP256R1()}
    made = Vault({name: ec.generate_private_key(curve) for name, curve in keys.items()}, refused=("no-right",))
    made.keys["odd"] = ec.generate_private_key(ec.SECP256K1())
    with serving(made, tmp_path_factory.mktemp("vault")) as running:
        yield running


def held_in(vault, name, token=None):
    identity = Identity(token) if token else Identity()
    return VaultKey(f"https://acme.vault.azure.net/keys/{name}", identity, **vault.client())


@pytest.mark.parametrize("name", ["ci", "large"])
def test_a_vault_signs_and_only_digests_reach_it(vault, name):
    key = held_in(vault, name)
    assert key_id(key.public_key()) == key_id(vault.keys[name].public_key())
    for data in (b"", b"statement" * 1000):
        require_signature(key.public_key(), key.sign(data), data)
        assert len(vault.signed[-1]) == 2 * (48 if name == "large" else 32)
    files = {"a": "1" * 64, "b/c": "2" * 64}
    assert signed_files(sign_files(files, key), vault.keys[name].public_key()) == files
    with pytest.raises(IntegrityError, match="not made over this content"):
        signed_files(sign_files(files, key), vault.keys["no-right"].public_key())


def test_what_a_vault_signed_is_verified_without_it(vault, tmp_path):
    """The whole signature by the vault's key; the vault itself is then asked nothing."""
    key, store, made = held_in(vault, "ci"), open_store(tmp_path), model(tmp_path)
    mine = sign(store, tmp_path, made)
    bundle = sign_files({file.path: file.sha256 for file in made.content.files}, key)
    said = {"key": key_id(key.public_key()), "bundle": hashlib.sha256(bundle).hexdigest()}
    store.attach(made, SIGNATURE, bundle)
    store.attach(made, STATEMENT, seal_statement(mine.model_copy(update=said), key))
    add_key(tmp_path, "vault", key.public_key(), ("model/*",))
    asked = len(vault.signed)
    assert require_signed(store, tmp_path, made).key == said["key"]
    assert len(vault.signed) == asked and published_as(store, "model", "tiny", made.version) == 1


def test_the_vault_of_these_tests_refuses_as_the_service_does(vault):
    """Without a token, with an unknown api-version, with a digest that does not fit the algorithm, with a field too many."""
    good = {"alg": "ES256", "value": base64.urlsafe_b64encode(bytes(32)).decode()}

    def code(body, token=TOKEN, version="7.6"):
        url = f"https://acme.vault.azure.net/keys/ci/{VERSION}/sign?api-version={version}"
        headers = {"Authorization": f"Bearer {token}"}
        way = vault.client()
        answer = requests.post(url, json=body, headers=headers, proxies=way["proxies"], verify=way["connection_verify"])
        return answer.status_code

    assert code(good) == 200
    assert [code(good, token=""), code(good, version="1999-01-01")] == [401, 400]
    assert [code({**good, "value": "AAAA"}), code({**good, "alg": "ES384"}), code({**good, "x": 1})] == [400, 400, 400]


def test_a_vault_that_refuses_says_why(vault, tmp_path):
    with pytest.raises(Missing, match="does not accept who we are"):
        held_in(vault, "ci", token="of-somebody-else")
    with pytest.raises(Missing, match="there is no key"):
        held_in(vault, "none")
    with pytest.raises(Missing, match="Caller is not authorized"):
        held_in(vault, "no-right").sign(b"x")
    with pytest.raises(ValueError, match="P-256K"):
        held_in(vault, "odd")
    with pytest.raises(Missing, match="not recognized"):
        VaultKey("https://acme.vault.azure.net/keys/ci", Identity(), **vault.client(), api_version="7.0-preview")
    for name in (
        "https://acme.example.com/keys/ci",
        "http://acme.vault.azure.net/keys/ci",
        "https://acme.vault.azure.net/secrets/ci",
    ):
        with pytest.raises(ValueError, match="is no key"):
            VaultKey(name, Identity(), **vault.client())
    sign_with(tmp_path, credential="connection_string")
    with pytest.raises(ValueError, match="connection string"):
        signer_of(tmp_path)


def test_the_commands_sign_by_a_vault_with_the_credential_that_is_named(vault, tmp_path):
    """The real command, the real SDK, a login by secret: the key is let in, signs, and verifying needs neither."""

    class Behind(Home):
        def environment(self):
            return {**super().environment(), **vault.environment(), "VAULT_SECRET": SECRET, "WRONG_SECRET": "wrong-one"}

    home = Behind(tmp_path / "home")
    made = model(home.path)
    principal = {"credential": "service_principal", "tenant": TENANT, "client": "an-id", "secret": "env:VAULT_SECRET"}
    sign_with(home.path, **principal)
    added = home.ok("trust", "add", "vault", KEY, "--may-sign", "model/*", "--reason", "the vault signs").said
    assert added["key"] == key_id(vault.keys["ci"].public_key())
    before = len(vault.signed)
    assert home.ok("sign", made.ref, "--reason", "first").said["key"] == added["key"]
    assert len(vault.signed) == before + 2
    assert Home(home.path).ok("verify", made.ref).said["ok"]
    assert not (home.path / "keys").exists()
    for name, said in (("NOT_SET", "NOT_SET is not set"), ("WRONG_SECRET", "does not accept who we are")):
        sign_with(home.path, **{**principal, "secret": f"env:{name}"})
        refused = home.run("sign", made.ref, "--reason", "again")
        assert refused.code == 6 and said in refused.said["error"]["message"]
        assert SECRET not in refused.stderr and TOKEN not in refused.stderr
    assert Home(home.path).ok("verify", made.ref).said["ok"]

"""How a store in Azure is named, opened and looked at; what it promises is in test_contract.py."""

import logging
import re
import time
from datetime import UTC, datetime, timedelta

import pytest
import yaml
from azure.storage.blob import AccountSasPermissions, ResourceTypes, generate_account_sas
from azurite import ACCOUNT, KEY
from store_stand import SECRET, fill, put, write_stores
from support import Home
from waiting import limit

from tasks.common.errors import HeadwayError, Missing
from tasks.storage import open_files, open_named
from tasks.storage.blob import versions
from tasks.storage.blob.client import Container, open_container
from tasks.storage.blob.credentials import token_credential
from tasks.storage.settings import Identity, load_stores

URI = "az://someaccount/container/team/x"
OF_ACCOUNT = f"DefaultEndpointsProtocol=https;AccountName=someaccount;AccountKey={KEY};EndpointSuffix=core.windows.net"
WRONG = {
    "a secret itself": ({"credential": "connection_string", "secret": OF_ACCOUNT}, "name the variable"),
    "no secret": ({"credential": "connection_string"}, "needs secret"),
    "half a principal": ({"credential": "service_principal", "tenant": "t", "secret": "env:S"}, "needs client"),
    "a way out": ({"uri": f"{URI}/../other"}, "no .."),
    "no container": ({"uri": "az://someaccount"}, "uri"),
    "no account": ({"uri": "az://Some.Account/container"}, "uri"),
    "no kind": ({"credential": "default"}, "managed_identity"),
}
KINDS = {
    "managed_identity": "ManagedIdentityCredential",
    "cli": "AzureCliCredential",
    "service_principal": "ClientSecretCredential",
    "workload_identity": "WorkloadIdentityCredential",
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_store_that_is_configured_wrong_is_refused_and_no_secret_shown(tmp_path, wrong):
    said, why = WRONG[wrong]
    write_stores(tmp_path, **{"uri": URI, **said})
    with pytest.raises(ValueError, match="does not say which stores there are") as refused:
        load_stores(tmp_path)
    assert why in str(refused.value) and KEY not in str(refused.value)


@pytest.mark.parametrize("kind", KINDS)
def test_the_kind_that_is_named_is_the_kind_that_is_made(monkeypatch, tmp_path, kind):
    (tmp_path / "token").write_text("t")
    monkeypatch.setenv("AZURE_FEDERATED_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("S", "secret")
    known = token_credential(Identity(credential=kind, tenant="t", client="c", secret="env:S"), of=URI)
    assert type(known).__name__ == KINDS[kind]


def test_an_identity_that_is_not_here_is_said_and_no_other_is_tried(monkeypatch, tmp_path):
    for name in ("AZURE_FEDERATED_TOKEN_FILE", "AZURE_TENANT_ID", "AZURE_CLIENT_ID"):
        monkeypatch.delenv(name, raising=False)
    write_stores(tmp_path, URI, credential="workload_identity")
    with pytest.raises(Missing, match="workload_identity cannot be used here") as refused:
        open_named(tmp_path, "cloud")
    assert "none is tried by itself" in refused.value.remedy


def test_without_a_sign_in_the_command_line_is_said_and_no_other_is_tried(monkeypatch, tmp_path):
    """A service principal's variables would do for a credential that falls through."""
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("AZURE_TENANT_ID", "AZURE_CLIENT_ID", "AZURE_CLIENT_SECRET"):
        monkeypatch.setenv(name, "x")
    write_stores(tmp_path, URI, credential="cli")
    began = time.monotonic()
    with pytest.raises(Missing, match="the credential cli gives no token") as refused:
        open_named(tmp_path, "cloud").list("audit")
    assert "az login" in refused.value.remedy and time.monotonic() - began < limit(10)


def test_the_kind_is_logged_and_nothing_secret(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv(SECRET, OF_ACCOUNT)
    write_stores(tmp_path, URI, credential="connection_string", secret=f"env:{SECRET}")
    with caplog.at_level(logging.DEBUG):
        Container(load_stores(tmp_path).stores["cloud"])
    assert f"{URI} is opened as connection_string" in caplog.text and KEY not in caplog.text


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (OF_ACCOUNT.replace("someaccount", "otheraccount"), "is of otheraccount"),
        ("BlobEndpoint=https://otheraccount.blob.core.windows.net;SharedAccessSignature=sv=x", "is of otheraccount"),
        ("AccountName=someaccount", "neither AccountKey nor SharedAccessSignature"),
    ],
)
def test_a_connection_string_that_does_not_fit_is_refused(monkeypatch, tmp_path, text, why):
    monkeypatch.setenv(SECRET, text)
    write_stores(tmp_path, URI, credential="connection_string", secret=f"env:{SECRET}")
    with pytest.raises(ValueError, match=why) as refused:
        open_named(tmp_path, "cloud")
    assert KEY not in str(refused.value)


def test_only_an_address_with_the_account_in_its_path_is_an_emulators(monkeypatch, tmp_path):
    write_stores(tmp_path, URI, credential="connection_string", secret=f"env:{SECRET}")
    monkeypatch.setenv(SECRET, OF_ACCOUNT)
    assert not open_container(load_stores(tmp_path).stores["cloud"]).emulator
    monkeypatch.setenv(SECRET, f"{OF_ACCOUNT};BlobEndpoint=http://127.0.0.1:1/someaccount")
    assert open_container(load_stores(tmp_path).stores["cloud"]).emulator


@pytest.mark.parametrize("stand", ["snapshots"], indirect=True)
def test_an_account_without_versions_is_refused_before_anything_is_uploaded(stand, tmp_path):
    """Azurite stands for it: it keeps no versions, and is told apart from an account by its address alone."""
    container = open_container(load_stores(stand.home).stores["cloud"])
    container.emulator = False
    with pytest.raises(Missing, match="makes no version") as refused:
        versions.detect(container)
    assert "--enable-versioning true" in refused.value.remedy
    with pytest.raises(HeadwayError):
        put(stand.open(), fill(tmp_path / "source", a=b"a"))
    assert [each.name for each in stand.blobs().list_blobs()] == ["some/prefix/store.json"]


@pytest.mark.parametrize("stand", ["snapshots"], indirect=True)
def test_a_shared_access_signature_is_enough_for_a_rollback_too(stand, tmp_path, monkeypatch):
    """The service reads the old version in its own name: the signature must be in what it is told to read."""
    until, may = datetime.now(UTC) + timedelta(hours=1), AccountSasPermissions.from_string("rwdlacup")
    sas = generate_account_sas(ACCOUNT, KEY, ResourceTypes.from_string("sco"), may, until)
    monkeypatch.setenv(SECRET, f"BlobEndpoint={stand.azurite.url};SharedAccessSignature={sas}")
    store, source = stand.open(), fill(tmp_path / "source", a=b"first")
    old = put(store, source)
    put(store, fill(source, a=b"second"))
    store.promote(old)
    assert stand.blobs().download_blob("some/prefix/artifacts/dataset/corpus/files/a").readall() == b"first"


def findings(stand, code):
    ran = Home(stand.home).run("doctor")
    assert ran.code == code, ran.stderr
    return {finding["name"]: finding for finding in ran.said["findings"]}


@pytest.mark.parametrize(
    ("stand", "kept", "warned"),
    [("versions", "keeps versions", True), ("snapshots", "snapshots replace them", False)],
    indirect=["stand"],
)
def test_doctor_says_how_a_store_keeps_what_was_and_warns_of_folders_of_jobs_in_an_account_that_keeps_versions(
    stand, kept, warned
):
    path = stand.home / "stores.yaml"
    told = yaml.safe_load(path.read_text())
    told["stores"]["folders"] = {**told["stores"]["cloud"], "uri": f"{told['stores']['cloud']['uri']}/of-jobs"}
    path.write_text(yaml.safe_dump({**told, "jobs": "folders"}))
    every = findings(stand, 0)
    assert kept in every["store cloud"]["said"] and every["store"]["said"] == "0 artifact(s)"
    found = every["store folders"]
    assert found["ok"] and found["warned"] == warned == ("An account for jobs" in found["remedy"])
    assert open_files(stand.home).keeps_versions() == open_files(stand.home).jobs.keeps_versions() == warned


def test_the_store_of_jobs_is_another_one_on_azure_blob(tmp_path):
    cloud = {"uri": "az://account/models"}
    for told, words in (
        ({"jobs": "cloud", "use": "cloud"}, "is also `use` or `audit_copy`, which need versions"),
        ({"jobs": "attic"}, "jobs: 'attic' is no store in Azure Blob"),
        ({"jobs": "none"}, "jobs: 'none' is no store in Azure Blob"),
    ):
        (tmp_path / "stores.yaml").write_text(
            yaml.safe_dump({**told, "stores": {"cloud": cloud, "attic": {"uri": "/x"}}})
        )
        with pytest.raises(ValueError, match=re.escape(words)):
            load_stores(tmp_path)


@pytest.mark.parametrize("stand", ["snapshots"], indirect=True)
def test_doctor_names_a_container_that_is_not_there(stand):
    write_stores(stand.home, f"az://{ACCOUNT}/nowhere/prefix", credential="connection_string", secret=f"env:{SECRET}")
    found = findings(stand, 6)
    assert "no such container" in found["store cloud"]["said"]
    assert "az storage container create" in found["store cloud"]["remedy"]

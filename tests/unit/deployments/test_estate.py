"""The estate: what its templates come to, who may do what in it, and that it is what `doctor --rights` and jobs ask for."""

import datetime
import ipaddress
import json
import re
import runpy
import time
from pathlib import Path

import pytest
import yaml
from arm_template import SUBSCRIPTION, Estate
from typer.testing import CliRunner
from waiting import limit

from deployments.azure.connect import check, outputs_of, read_outputs, settings
from deployments.azure.names import IDENTITIES
from deployments.azure.readme import notes, readme, write
from deployments.azure.render import files, grants, role_table
from deployments.azure.settings import PRESETS, estate_of, load_estate
from deployments.cli.main import app
from tasks.azure.rights import FOLDER_DAYS, Uses, optional_rights, rights
from tasks.config.files import load
from tasks.planning.prices.book import open_book

pytestmark = pytest.mark.unit
PERSON = "00000000-0000-0000-0000-00000000000a"
GIVEN = {"subscription_id": SUBSCRIPTION, "region": "westeurope"}
FULL = {
    "people": [{"object_id": PERSON, "parts": ["submitter", "pusher", "creator"]}],
    "alert_emails": ["a@example.com"],
    "budget": {"monthly": 1000, "start": "2027-01-01", "emails": ["a@example.com"]},
}
HOST = {"host": {"ssh_key": "ssh-ed25519 AAAA me"}}
LUSTRE = {"file_system": {"storage": "lustre-125", "tib": 16}}
FILE_SYSTEMS = {"production": LUSTRE, "isolated": {"file_system": {"storage": "netapp-premium", "tib": 4}}, "small": {}}
NAMES = sorted(path.stem for path in PRESETS.glob("*.yaml"))


def settings_of(preset, **other):
    host = {} if preset == "small" else HOST
    return estate_of({"based_on": preset, **GIVEN, **FULL, **host, **FILE_SYSTEMS[preset], **other}, "a test")


@pytest.fixture(scope="module", params=NAMES)
def preset(request):
    return request.param


@pytest.fixture(scope="module")
def made(preset):
    """Settings, files and what the template comes to, of one preset."""
    estate = settings_of(preset)
    texts = files(estate)
    main = json.loads(texts["main.json"])
    given = {name: "p" * 20 for name in main["parameters"] if name == "databasePassword"}
    return estate, texts, Estate(main, given)


def test_the_presets_are_the_three_that_are_documented():
    assert NAMES == ["isolated", "production", "small"]


def test_the_same_settings_make_the_same_bytes_within_two_seconds(made, preset):
    began = time.process_time()
    assert files(settings_of(preset)) == made[1]
    assert time.process_time() - began < limit(2)


def test_every_name_is_once_and_as_azure_takes_it(made):
    estate = made[2]
    ids = [one.id.lower() for one in estate.resources]
    assert len(ids) == len(set(ids))
    forms = {
        "Microsoft.Storage/storageAccounts": r"[a-z0-9]{3,24}",
        "Microsoft.KeyVault/vaults": r"[a-zA-Z][a-zA-Z0-9-]{1,22}[a-zA-Z0-9]",
        "Microsoft.ContainerRegistry/registries": r"[a-zA-Z0-9]{5,50}",
        "Microsoft.MachineLearningServices/workspaces": r"[a-zA-Z0-9][\w-]{2,32}",
        "Microsoft.DBforPostgreSQL/flexibleServers": r"[a-z0-9][a-z0-9-]{1,61}[a-z0-9]",
        "Microsoft.Compute/virtualMachines": r"[a-zA-Z0-9][a-zA-Z0-9-]{0,62}[a-zA-Z0-9]",
    }
    for type_, form in forms.items():
        assert [one.name for one in estate.of(type_) if not re.fullmatch(form, one.name)] == []


def test_a_resource_waits_only_for_what_is_made_and_reads_only_what_it_waits_for(made):
    estate = made[2]
    ids = {one.id.lower() for one in estate.resources}
    for one in estate.resources:
        assert set(one.after) <= ids, one.id
        assert one.reads <= estate.before(one), one.id


def named_ids(value):
    """Every id of Azure's that a body names."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from named_ids(key)
            yield from named_ids(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from named_ids(inner)
    elif isinstance(value, str) and value.startswith("/subscriptions/"):
        yield value.lower()


def test_what_a_resource_names_is_made_before_it(made):
    estate = made[2]
    subnets = {
        f"{net.id}/subnets/{one['name']}".lower(): net.id.lower()
        for net in estate.of("Microsoft.Network/virtualNetworks")
        for one in net.body["properties"]["subnets"]
    }
    for one in estate.resources:
        for id_ in named_ids(one.body):
            if "/roledefinitions/" not in id_:
                assert subnets.get(id_, id_) in estate.before(one), (one.id, id_)


def test_nobody_waits_in_a_circle(made):
    estate = made[2]
    assert [one.id for one in estate.resources if one.id.lower() in estate.before(one)] == []


def test_roles_are_of_a_closed_list_on_single_resources_that_are_made(made):
    settings_, _, estate = made
    ids, table = {one.id.lower() for one in estate.resources}, role_table()["roles"]
    assert not {"Owner", "Contributor", "User Access Administrator"} & set(table)
    assignments = estate.of("Microsoft.Authorization/roleAssignments")
    assert len(assignments) == len(grants(settings_)) == len({one.name for one in assignments})
    for one in assignments:
        assert one.body["properties"]["roleDefinitionId"].rpartition("/")[2] in table.values()
        scope = one.id.lower().partition("/providers/microsoft.authorization/")[0]
        assert scope in ids and "/providers/" in scope, one.id


def test_the_name_of_an_assignment_depends_on_nothing_that_is_drawn(made, preset):
    again = Estate(
        json.loads(files(settings_of(preset))["main.json"]), {"databasePassword": "x"} if preset != "small" else {}
    )
    kind = "Microsoft.Authorization/roleAssignments"
    assert [one.name for one in again.of(kind)] == [one.name for one in made[2].of(kind)]


def test_five_identities_and_nobody_else_but_people_and_what_azure_makes(made):
    estate = made[2]
    assert len(estate.of("Microsoft.ManagedIdentity/userAssignedIdentities")) == len(IDENTITIES) == 5
    assert {one.who for one in grants(made[0])} <= {*IDENTITIES, PERSON, "workspace", "topic"}


def test_nothing_has_a_public_way_in_when_isolated():
    estate = Estate(json.loads(files(settings_of("isolated"))["main.json"]), {"databasePassword": "x" * 16})
    text = json.dumps([one.body for one in estate.resources])
    assert estate.of("Microsoft.Network/publicIPAddresses") == []
    assert '"publicNetworkAccess": "Enabled"' not in text and '"Allow"' not in text
    access = re.findall(r'"publicNetworkAccess\w*": "(\w+)"', text)
    assert len(access) > 10 and set(access) == {"Disabled"}
    assert '"enableNodePublicIp": true' not in text and '"AllowOnlyApprovedOutbound"' in text


def test_only_isolated_is_without_a_public_way_in(made, preset):
    """The test above can fail: what it asks for is not so elsewhere."""
    text = json.dumps([one.body for one in made[2].resources])
    assert ('"publicNetworkAccess": "Enabled"' in text) == (preset != "isolated")


def test_each_private_endpoint_has_its_zones_and_no_addresses_overlap(made):
    estate = made[2]
    zones = {one.id.lower() for one in estate.of("Microsoft.Network/privateDnsZones")}
    linked = {
        one.id.lower().partition("/virtualnetworklinks/")[0]
        for one in estate.of("Microsoft.Network/privateDnsZones/virtualNetworkLinks")
    }
    assert zones == linked
    groups = estate.of("Microsoft.Network/privateEndpoints/privateDnsZoneGroups")
    used = {
        c["properties"]["privateDnsZoneId"].lower()
        for one in groups
        for c in one.body["properties"]["privateDnsZoneConfigs"]
    }
    assert used == zones
    assert len(groups) == len(estate.of("Microsoft.Network/privateEndpoints"))
    for net in estate.of("Microsoft.Network/virtualNetworks"):
        whole = ipaddress.ip_network(net.body["properties"]["addressSpace"]["addressPrefixes"][0])
        parts = [ipaddress.ip_network(one["properties"]["addressPrefix"]) for one in net.body["properties"]["subnets"]]
        assert all(part.subnet_of(whole) for part in parts)
        assert not any(a.overlaps(b) for a in parts for b in parts if a != b)


def test_jobs_lie_where_no_version_is_kept_and_artifacts_where_each_is(made):
    properties = {
        one.name: one.body["properties"] for one in made[2].of("Microsoft.Storage/storageAccounts/blobServices")
    }
    versions = {name: one["isVersioningEnabled"] for name, one in properties.items()}
    jobs = next(name for name in versions if "jobs" in name)
    assert not versions[jobs] and not properties[jobs]["deleteRetentionPolicy"]["enabled"]
    assert versions[next(name for name in versions if "art" in name)]
    (policy,) = made[2].of("Microsoft.Storage/storageAccounts/managementPolicies")
    (rule,) = policy.body["properties"]["policy"]["rules"]
    assert rule["definition"]["actions"]["baseBlob"]["delete"] == {"daysAfterModificationGreaterThan": FOLDER_DAYS}
    assert rule["definition"]["filters"]["prefixMatch"] == ["jobs/jobs/"]


@pytest.fixture(scope="module")
def home(made, tmp_path_factory):
    """The settings that come of the outputs."""
    folder = tmp_path_factory.mktemp("home")
    outputs = outputs_of({"properties": {"outputs": {"headway": {"value": made[2].outputs["headway"]}}}}, "a test")
    write(folder, settings(outputs))
    check(folder, outputs)
    return folder


def uses_of(folder, cluster):
    trained = [] if "based_on: azureml\n" not in (folder / f"{cluster}.yaml").read_text() else ["tiny"]
    config = load([*trained, str(folder / f"{cluster}.yaml")], [])
    stores = yaml.safe_load((folder / "stores.yaml").read_text())["stores"]
    azure = config.cluster.azureml
    return config, Uses(
        where=azure,
        store=stores["azure"]["uri"],
        jobs=stores["folders"]["uri"],
        compute=azure.compute,
        cluster_identity=azure.cluster_identity,
        image=config.cluster.image,
        endpoint_identity=config.deployment.azureml.identity,
        endpoint_image=config.deployment.azureml.image,
    )


def granted(estate, principals):
    """Roles by who and where, as the templates give them."""
    by_id = {value: name for name, value in role_table()["roles"].items()}
    for one in estate.of("Microsoft.Authorization/roleAssignments"):
        scope = one.id.lower().partition("/providers/microsoft.authorization/")[0]
        who = principals.get(one.body["properties"]["principalId"], one.body["properties"]["principalId"])
        yield who, by_id[one.body["properties"]["roleDefinitionId"].rpartition("/")[2]], scope


def test_every_right_that_doctor_asks_for_is_granted(made, home):
    """`headway doctor --rights` of what `connect` wrote, against the template: for the identity, and for the person."""
    settings_, _, estate = made
    states = {
        one.id.lower(): estate.state(one.id, whole=False)
        for one in estate.of("Microsoft.ManagedIdentity/userAssignedIdentities")
    }
    principals = {state["principalId"]: id_.rpartition("-")[2] for id_, state in states.items()}
    given = set(granted(estate, principals))
    storage = {one.name: one.id for one in estate.of("Microsoft.Storage/storageAccounts")}
    (registry,) = estate.of("Microsoft.ContainerRegistry/registries")
    for cluster in settings_.clusters:
        _, uses = uses_of(home, cluster.name)
        words = {"$STORAGE": storage[uses.store.split("/")[2]], "$JOBS": storage[uses.jobs.split("/")[2]]}
        words[f"$REGISTRY_{registry.name.upper()}"] = registry.id
        needed = [*rights(uses), *optional_rights(uses)]
        assert len(needed) > 8
        for right in needed:
            scope = right.scope
            for word, value in words.items():
                scope = scope.replace(word, value)
            whom = {
                "SUBMITTER": ["submitter", "platform", PERSON],
                "CLUSTER_PRINCIPAL": ["cluster"],
                "ENDPOINT_PRINCIPAL": ["endpoint"],
                "CREATOR": [PERSON],
                "PUSHER": [PERSON],
            }[right.who]
            for who in whom:
                assert (who, right.role, scope.lower()) in given, (who, right.role, scope)


def test_the_documented_rights_of_events_and_signatures_are_granted():
    """docs/events.md names these of the bridge, tasks/signing/vault.py that of the vault."""
    roles = {(one.who, one.role) for one in grants(settings_of("production"))}
    text = Path("docs/events.md").read_text()
    for role in (
        "Storage Queue Data Message Processor",
        "Storage Queue Data Message Sender",
        "Storage Blob Data Reader",
    ):
        assert role in text and ("bridge", role) in roles
    assert ("platform", "Key Vault Crypto User") in roles


def test_a_job_finds_the_cluster_the_datastore_and_the_registry_that_were_made(made, home):
    from tasks.azure.datastore import Datastore

    settings_, _, estate = made
    computes = {
        one.name.rpartition("/")[2]: one.body
        for one in estate.of("Microsoft.MachineLearningServices/workspaces/computes")
    }
    stores = {
        one.name.rpartition("/")[2]: one.body["properties"]
        for one in estate.of("Microsoft.MachineLearningServices/workspaces/datastores")
    }
    (registry,) = estate.of("Microsoft.ContainerRegistry/registries")
    assert set(computes) == {cluster.name for cluster in settings_.clusters}
    for cluster in settings_.clusters:
        config, uses = uses_of(home, cluster.name)
        body = computes[config.cluster.azureml.compute]
        assert body["properties"]["properties"]["vmSize"] == config.cluster.azureml.size
        assert list(body["identity"]["userAssignedIdentities"]) == [config.cluster.azureml.cluster_identity]
        assert config.cluster.preemptible == (body["properties"]["properties"]["vmPriority"] == "LowPriority")
        assert config.cluster.azureml.public_address == body["properties"]["properties"]["enableNodePublicIp"]
        assert config.cluster.image.startswith(f"{registry.name}.azurecr.io/")
        for uri in (uses.store, uses.jobs):
            account, container = uri.split("/")[2:4]
            store = stores[Datastore(config.cluster.azureml, uri).name]
            assert (store["accountName"], store["containerName"]) == (account, container)
            assert store["credentials"] == {"credentialsType": "None"}


def test_the_first_hour_of_the_documentation_has_the_names_that_are_made(tmp_path):
    """docs/azure.md, From templates: its estate.yaml renders, and its commands name what `connect` then writes."""
    section = Path("docs/azure.md").read_text().partition("## From templates")[2].partition("## By hand")[0]
    given = re.search(r"estate.yaml <<END\n(.*?)\nEND\n", section, re.DOTALL)[1]
    given = re.sub(r"\$\(az account[^)]*\)", SUBSCRIPTION, re.sub(r"\$\(az ad[^)]*\)", PERSON, given))
    estate = estate_of(yaml.safe_load(given), "docs/azure.md")
    texts = files(estate)
    made = Estate(json.loads(texts["main.json"]), {})
    outputs = outputs_of({"outputs": {"headway": {"value": made.outputs["headway"]}}}, "a test")
    written = settings(outputs)
    write(tmp_path, written)
    check(tmp_path, outputs)
    assert set(re.findall(r"settings/([\w.]+)", section)) <= set(written)
    assert {name for name in re.findall(r"estate/([\w.]+)", section) if name != "README.md"} <= set(texts)
    modules = {Path(name).stem: json.loads(text) for name, text in texts.items() if name.startswith("modules/")}
    page = readme(estate, modules, book=open_book(tmp_path), today=datetime.date(2026, 11, 29))
    assert re.findall(r"stack sub create --name (\S+)", section) == re.findall(r"stack sub create --name (\S+)", page)
    (cluster,) = estate.clusters
    assert f"-c tiny -c settings/{cluster.name}.yaml" in section
    registry = re.search(r"^  image: ([^/]*)/", written[f"{cluster.name}.yaml"], re.MULTILINE)[1]
    config = yaml.safe_load(written[f"{cluster.name}.yaml"])
    pushed = {f"{registry}/headway/{name}:0.2.0" for name in re.search(r"for image in ([\w -]+);", section)[1].split()}
    assert pushed == {config["cluster"]["image"], config["deployment"]["azureml"]["image"]}
    rights_of = {right.role for right in rights(uses_of(tmp_path, cluster.name)[1])}
    assert rights_of <= {one.role for one in grants(estate)}


REFUSED = {
    "isolated with addresses": (
        {"based_on": "isolated", "allowed_addresses": ["20.1.2.3"]},
        "allowed_addresses does not go with",
    ),
    "host without network": ({"based_on": "small", **HOST}, "host needs a virtual network"),
    "zones where none are": ({"based_on": "production", "region": "westus"}, "no availability zones in westus"),
    "standby in one zone": ({"based_on": "production", "zones": False}, "database.standby is a server in another zone"),
    "no InfiniBand": (
        {
            "based_on": "small",
            "clusters": [{"name": "gpu", "size": "Standard_NC96ads_A100_v4", "max_nodes": 2, "infiniband": True}],
        },
        "has no InfiniBand; set infiniband: false",
    ),
    "unknown size": (
        {
            "based_on": "small",
            "clusters": [{"name": "gpu", "size": "Standard_ND1", "max_nodes": 2, "infiniband": True}],
        },
        "is not known; set infiniband: false",
    ),
    "one name twice": (
        {"based_on": "small", "clusters": [{"name": "gpu", "size": "Standard_ND1", "max_nodes": 2}] * 2},
        "clusters has one name twice (gpu, gpu)",
    ),
    "misspelt": ({"based_on": "small", "event": True}, "there is no such key; did you mean events?"),
    "no preset": ({"based_on": "large"}, "is no preset of the estate; there are isolated, production, small"),
    "a range that is private": (
        {"based_on": "production", "allowed_addresses": ["10.0.0.0/8"]},
        "storage takes public addresses",
    ),
    "not the first": (
        {"based_on": "small", "budget": {**FULL["budget"], "start": "2027-01-02"}},
        "is not the first day of a month, as Azure asks for: take 2027-01-01",
    ),
    "Lustre where nothing leaves": (
        {"based_on": "isolated", **LUSTRE},
        "a way to Azure's own services, which isolated closes",
    ),
    "a file system without a network": ({"based_on": "small", **LUSTRE}, "file_system lustre-125 needs a network"),
    "a size that Lustre has not": (
        {"based_on": "production", "file_system": {"storage": "lustre-250", "tib": 20}},
        "lustre-250 is made in steps of 8 TiB up to 128, and 20 is none: take 16",
    ),
    "a volume that is too large": (
        {"based_on": "production", "file_system": {"storage": "netapp-ultra", "tib": 200}},
        "up to 100, and 200 is none: take 100",
    ),
    "no room for Lustre": (
        {"based_on": "production", "address_space": "10.1.0.0/23", **LUSTRE},
        "16 TiB of Managed Lustre need a subnet of /24, and a quarter of address_space is /25: take a range of /22",
    ),
    "a name with a dash": (
        {"based_on": "small", "name": "contoso-llm"},
        "name: 'contoso-llm' must be 3 to 10 lower-case letters and digits, beginning with a letter, because storage accounts'",
    ),
    "a name that ends its line": ({"based_on": "small", "name": "headway\n"}, "name: 'headway\\n' must be 3 to 10"),
    "a region as the portal writes it": (
        {"based_on": "small", "region": "West Europe"},
        "region: 'West Europe' must be",
    ),
    "a cluster with an underscore": (
        {"based_on": "small", "clusters": [{"name": "my_gpu", "size": "Standard_ND1", "max_nodes": 2}]},
        "clusters.0.name: 'my_gpu' must be 3 to 16 lower-case letters",
    ),
    "an expression": ({"based_on": "small", "tags": {"a": "b"}, "name": "[resourceGroup()]"}, "name"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_contradicts_itself_is_refused_by_name(case):
    value, words = REFUSED[case]
    with pytest.raises(ValueError, match=re.escape(words)):
        estate_of({**GIVEN, **value}, "estate.yaml")


def test_the_file_system_has_a_subnet_of_its_own(made, preset):
    subnets = {
        one["name"]: one["properties"]
        for net in made[2].of("Microsoft.Network/virtualNetworks")
        for one in net.body["properties"]["subnets"]
    }
    lustre = made[2].of("Microsoft.StorageCache/amlFilesystems")
    volumes = made[2].of("Microsoft.NetApp/netAppAccounts/capacityPools/volumes")
    used = [one.body["properties"]["filesystemSubnet"] for one in lustre]
    used += [one.body["properties"]["subnetId"] for one in volumes]
    assert (len(lustre), len(volumes)) == {"production": (1, 0), "isolated": (0, 1), "small": (0, 0)}[preset]
    assert {one.rpartition("/")[2] for one in used} == {"file-system"} & set(subnets)
    delegated = {name for name, one in subnets.items() if one.get("delegations")}
    assert delegated == ({"file-system"} if volumes else set())


def test_a_setting_does_not_leave_its_place(tmp_path):
    """Text of people is text in every file, whatever it looks like."""
    odd = {"team": "a: [b] {{ c }} 'd' \"e\" # f", "expr": "[subscription().tenantId]"}
    with pytest.raises(ValueError, match="tags"):
        settings_of("small", tags=odd)
    estate = settings_of("small", tags={"team": odd["team"]})
    template = json.loads(files(estate)["main.json"])
    assert template["parameters"]["tags"]["defaultValue"]["team"] == odd["team"]


def test_the_commands_write_what_they_name(tmp_path, monkeypatch):
    """`render`, a deployment of what it wrote, and `connect`; then `render` into a folder that somebody has changed."""
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path / "home"))
    (tmp_path / "estate.yaml").write_text(yaml.safe_dump({"based_on": "isolated", **GIVEN}))
    rendering = ["estate", "render", "-c", str(tmp_path / "estate.yaml"), "--to", str(tmp_path / "out"), "--json"]
    ran = CliRunner().invoke(app, rendering)
    output = json.loads(ran.stdout)
    assert ran.exit_code == 0 and all(Path(name).is_file() for name in output["files"])
    main = json.loads((tmp_path / "out" / "main.json").read_text())
    put_out = {
        "outputs": {
            "headway": {"type": "Object", "value": Estate(main, {"databasePassword": "x" * 16}).outputs["headway"]}
        }
    }
    (tmp_path / "outputs.json").write_text(json.dumps(put_out))
    connecting = ["estate", "connect", str(tmp_path / "outputs.json"), "--to", str(tmp_path / "set"), "--json"]
    ran = CliRunner().invoke(app, connecting)
    assert ran.exit_code == 0 and json.loads(ran.stdout)["clusters"] == ["gpu", "cpu"], ran.output
    assert sorted(path.name for path in (tmp_path / "set").iterdir()) == [
        "cpu.yaml",
        "gpu.yaml",
        "platform.yaml",
        "stores.yaml",
    ]
    (tmp_path / "out" / "main.json").write_text("{}")
    assert isinstance(CliRunner().invoke(app, rendering).exception, ValueError)
    assert (tmp_path / "out" / "main.json").read_text() == "{}"


def test_a_file_that_was_cut_off_is_refused(tmp_path):
    (tmp_path / "outputs.json").write_text('{"outputs": {"headway"')
    with pytest.raises(ValueError, match="is not JSON, or was cut off"):
        read_outputs(tmp_path / "outputs.json")


def test_outputs_of_something_else_are_refused(made):
    good = made[2].outputs["headway"]
    for value, words in (
        ({"outputs": {"other": {"value": 1}}}, "has no outputs of an estate"),
        ({**good, "schema": "headway/estate/2"}, "has no outputs of an estate"),
        ({**good, "registry": "evil.example.com"}, "outputs.headway: registry"),
        ({**good, "artifacts": "az://x/y; rm -rf /"}, "outputs.headway: artifacts"),
        ({key: value for key, value in good.items() if key != "jobs"}, "jobs is missing"),
    ):
        with pytest.raises(ValueError, match=re.escape(words)):
            outputs_of(value, "outputs.json")


def test_a_file_that_somebody_changed_is_not_written_over(tmp_path):
    write(tmp_path, {"a": "1", "b": "2"})
    (tmp_path / "b").write_text("mine")
    with pytest.raises(ValueError, match="other files of these names: b;"):
        write(tmp_path, {"a": "3", "b": "2"} | {"a": "1"})
    assert (tmp_path / "b").read_text() == "mine"


def test_the_readme_names_what_is_not_known_and_every_role(made):
    import datetime

    from tasks.planning.prices.book import open_book

    settings_, texts, _ = made
    templates = {name[8:-5]: json.loads(text) for name, text in texts.items() if name.startswith("modules/")}
    text = readme(settings_, templates, book=open_book(None), today=datetime.date(2026, 11, 29))
    assert "not in the price list" in text and "az deployment sub what-if" in text
    assert all(one.role in text for one in grants(settings_))


def page_of(estate):
    """The README as `render` writes it with the shipped prices, and its notes."""
    modules = {Path(name).stem: json.loads(text) for name, text in files(estate).items() if name.startswith("modules/")}
    today, book = datetime.date(2026, 11, 29), open_book(None)
    return readme(estate, modules, book=book, today=today), notes(estate, book=book, today=today)


def test_the_readme_names_the_quota_of_clusters_and_endpoints():
    text, _ = page_of(settings_of("production"))
    assert "| 4 nodes of gpu, Standard_ND96isr_H100_v5 | Azure ML: standardNDSH100v5Family | 384 |" in text
    assert "| 4 nodes of spot, Standard_NC96ads_A100_v4 | Azure ML: low-priority, all families | 384 |" in text
    assert "Standard_DS3_v2, and room to upgrade it | Azure ML: Standard DSv2 Family | 8 |" in text
    assert "| virtual machines: the family of Standard_D4s_v5 | 1 x those of Standard_D4s_v5 |" in text
    assert "locations/westeurope/usages" in text and "az vm list-usage --location westeurope" in text
    for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL):
        assert "`" not in block  # Bash would run it
    assert text.index("## Deploy it") < text.index("az stack sub create") < text.index("## Quota")


def test_a_price_of_another_region_is_marked_and_counted():
    text, told = page_of(settings_of("production"))
    row = next(line for line in text.splitlines() if line.startswith("| a node of gpu"))
    assert "98.32 an hour" in row and "**of eastus, not of westeurope**" in row and "2025-03-01" in row
    assert told == [
        "6 of 6 prices in README.md are not of westeurope: run `headway prices update --region westeurope`, and render again "
        "into a new folder"
    ]
    text, told = page_of(settings_of("production", region="eastus"))
    row = next(line for line in text.splitlines() if line.startswith("| a node of gpu"))
    assert "98.32 an hour" in row and "not of" not in row
    assert told[0].startswith("3 of 6 prices")  # low priority, the host's size and Lustre are in no list


def test_alerts_that_reach_nobody_are_pointed_out():
    text, told = page_of(settings_of("small", alert_emails=[]))
    assert told[0].startswith("alert_emails is empty") and told[0] in text
    text, told = page_of(settings_of("small"))
    assert "alert_emails" not in text + "".join(told)


def test_alerts_link_to_the_runbooks_at_the_address_that_is_given():
    site = "https://docs.example.com/runbooks.html"
    texts = files(settings_of("production", runbooks=site))
    links = re.findall(r"Runbook: (\S+?)\"", texts["main.json"])
    assert len(links) > 15 and all(link.startswith(f"{site}#") for link in links), links
    with pytest.raises(ValueError, match="runbooks"):
        settings_of("production", runbooks="https://docs.example.com/a page")


def test_the_readme_says_where_a_colleague_stops_and_which_way_in_is_not_made(made, preset):
    text, _ = page_of(made[0])
    assert text.index("az stack sub show") < text.index("**Stop here") < text.index("headway estate connect")
    assert ("## What is needed and not made" in text) == ("Azure Bastion" in text) == (preset != "small")
    text, _ = page_of(settings_of("production", allowed_addresses=["20.1.2.3"]))
    assert "reached from 20.1.2.3 and from its virtual network" in text


def test_connect_takes_the_whole_answer_and_the_outputs_alone(made):
    value = made[2].outputs["headway"]
    outputs = {"headway": {"type": "Object", "value": value}}
    (text,) = re.findall(r"```json\n(\{.*?)```", Path("docs/estate.md").read_text(), re.DOTALL)
    shown = json.loads(text)  # the documentation's example, shortened there
    assert set(shown["outputs"]["headway"]["value"]) <= set(value)
    whole = {**shown, "outputs": outputs}
    forms = [whole, {"properties": whole}, {"outputs": outputs}, outputs, outputs["headway"], value]
    assert len({outputs_of(form, "a test").model_dump_json() for form in forms}) == 1
    with pytest.raises(ValueError, match="has no outputs of an estate"):
        outputs_of({**shown, "outputs": None}, "a test")


def test_the_committed_summary_and_picture_are_of_these_templates():
    """`python docs/make_estate.py` writes them; test_estate_types.py is to be run when they change."""
    code = runpy.run_path("docs/make_estate.py")
    assert {name: Path("docs", name).read_text() == text for name, text in code["rendered"]().items()} == {
        "estate.json": True,
        "images/estate.svg": True,
        "estate.md": True,
    }


def test_the_example_of_the_documentation_is_an_estate(tmp_path):
    (text,) = re.findall(r"```yaml\n(# estate.yaml\n.*?)```", Path("docs/estate.md").read_text(), re.DOTALL)
    (tmp_path / "estate.yaml").write_text(text)
    assert files(load_estate(tmp_path / "estate.yaml"))["main.json"]


def test_the_file_of_settings_is_read_back_as_the_same(made, tmp_path):
    (tmp_path / "estate.yaml").write_text(made[1]["estate.yaml"])
    assert load_estate(tmp_path / "estate.yaml") == made[0]

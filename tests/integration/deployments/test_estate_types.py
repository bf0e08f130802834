"""Every resource of the estate against Microsoft's own types at its API version; and that these types find what is wrong.

HEADWAY_BICEP_TYPES names a clone of https://github.com/Azure/bicep-types-az; without it these tests are skipped by name.
"""

import copy
import json
from pathlib import Path

import pytest
from arm_template import SUBSCRIPTION, Estate
from arm_types import VARIABLE, Types, clone

from deployments.azure.render import files
from deployments.azure.settings import PRESETS, estate_of

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        not clone() or not Path(clone()).is_dir(), reason=f"{VARIABLE} names no clone of bicep-types-az"
    ),
]
NOT_LISTED = {
    (
        ".properties.hardwareProfile.vmSize",
        "Standard_D4s_v5",
    ): "the list of sizes ends in 2018, as its description says itself",
}
"""Values that no list has, with the reason why they are right."""
SETTINGS = {
    "subscription_id": SUBSCRIPTION,
    "region": "westeurope",
    "people": [{"object_id": "00000000-0000-0000-0000-00000000000a", "parts": ["submitter", "pusher", "creator"]}],
    "alert_emails": ["a@example.com"],
    "budget": {"monthly": 1000, "start": "2027-01-01", "emails": ["a@example.com"]},
}

FILE_SYSTEMS = {"production": {"storage": "lustre-125", "tib": 16}, "isolated": {"storage": "netapp-premium", "tib": 4}}


@pytest.fixture(scope="module")
def types():
    return Types(clone())


@pytest.fixture(scope="module")
def bodies():
    """Every resource of the three presets, as it would be sent; of each kind and shape one."""
    result = {}
    for preset in sorted(path.stem for path in PRESETS.glob("*.yaml")):
        host = {} if preset == "small" else {"host": {"ssh_key": "ssh-ed25519 AAAA me"}}
        addresses = {"allowed_addresses": ["20.1.2.3"]} if preset == "production" else {}
        shared = {"file_system": FILE_SYSTEMS[preset]} if preset in FILE_SYSTEMS else {}
        estate = estate_of({"based_on": preset, **SETTINGS, **host, **addresses, **shared}, preset)
        main = json.loads(files(estate)["main.json"])
        given = {"databasePassword": "x" * 16} if "databasePassword" in main["parameters"] else {}
        for one in Estate(main, given).resources:
            if one.type != "Microsoft.Resources/deployments":
                result[preset, one.id] = one.body
    return result


def reasoned(problem):
    return any(problem.startswith(f"{path}: {value!r} ") for path, value in NOT_LISTED)


def test_every_resource_is_what_microsofts_types_ask_for(types, bodies):
    problems = {key: [one for one in types.problems(body) if not reasoned(one)] for key, body in bodies.items()}
    assert {key: noticed for key, noticed in problems.items() if noticed} == {}
    assert len({body["type"] for body in bodies.values()}) > 40 and len(bodies) > 350


def places(value, path=()):
    """Every object, and every value that is none, within a body, by its path."""
    yield path, value
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from places(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from places(inner, (*path, index))


def changed(body, path, change):
    result = copy.deepcopy(body)
    inner = result
    for key in path[:-1]:
        inner = inner[key]
    change(inner, path[-1])
    return result


def free(path):
    """Whether a value lies where any name or value goes: rules of policies, tags, names that people choose."""
    return bool(
        {
            "tags",
            "policyRule",
            "parameters",
            "metadata",
            "userAssignedIdentities",
            "name",
            "type",
            "apiVersion",
            "scope",
        }
        & set(path)
    )


def test_an_unknown_name_and_a_value_of_another_kind_are_found_everywhere(types, bodies):
    """Each kind of resource once: a key more in each object, a number where text or a truth belongs, and the other way round."""
    missed, tried = [], 0
    for (_, id_), body in {body["type"]: (key, body) for key, body in bodies.items()}.values():
        for path, value in list(places(body)):
            if not path or free(path):
                continue
            if isinstance(value, dict) and value:
                wrong = changed(body, path, lambda inner, key: inner[key].update(notOfAzure=1))
            elif isinstance(value, bool | int):
                wrong = changed(body, path, lambda inner, key: inner.__setitem__(key, "x"))
            elif isinstance(value, str):
                wrong = changed(body, path, lambda inner, key: inner.__setitem__(key, {"x": 1}))
            else:
                continue
            tried += 1
            if not [one for one in types.problems(wrong) if not reasoned(one)]:
                missed.append((id_.rpartition("/providers/")[2], path))
    assert tried > 300
    # Any name goes in them; of an alert's criteria the REST specification itself says so (MultiMetricCriteria).
    open_objects = {"outboundRules", "notifications", "features", "allOf"}
    assert [one for one in missed if not open_objects & set(one[1])] == []


def test_what_is_required_is_missed_when_it_is_away(types, bodies):
    """Each key that the types ask for is taken away once; how many there are keeps the test from asking nothing."""
    noticed = 0
    for body in {body["type"]: body for body in bodies.values()}.values():
        for path, _ in list(places(body)):
            if not path or free(path) or isinstance(path[-1], int):
                continue
            without = changed(body, path, lambda inner, key: inner.pop(key))
            noticed += any(
                f".{path[-1]} is missing" in one or f".{path[-1]}: None" in one for one in types.problems(without)
            )
    assert noticed > 60


@pytest.mark.parametrize(
    ("type_", "path", "value"),
    [
        ("Microsoft.Storage/storageAccounts", ("sku", "name"), "Standard_XRS"),
        ("Microsoft.Storage/storageAccounts", ("properties", "minimumTlsVersion"), "TLS2"),
        ("Microsoft.MachineLearningServices/workspaces", ("properties", "systemDatastoresAuthMode"), "identity"),
        ("Microsoft.MachineLearningServices/workspaces/computes", ("properties", "computeType"), "AMLCompute"),
        ("Microsoft.MachineLearningServices/workspaces/computes", ("properties", "properties", "vmPriority"), "Spot"),
        ("Microsoft.KeyVault/vaults/keys", ("properties", "curveName"), "P256"),
        ("Microsoft.ContainerRegistry/registries", ("sku", "name"), "premium"),
        ("Microsoft.DBforPostgreSQL/flexibleServers", ("properties", "highAvailability", "mode"), "Zones"),
        ("Microsoft.Authorization/roleAssignments", ("properties", "principalType"), "Person"),
        ("Microsoft.Maintenance/maintenanceConfigurations", ("properties", "maintenanceScope"), "Guest"),
        ("Microsoft.Consumption/budgets", ("properties", "timeGrain"), "Month"),
        ("Microsoft.StorageCache/amlFilesystems", ("properties", "maintenanceWindow", "dayOfWeek"), "Sun"),
        ("Microsoft.NetApp/netAppAccounts/capacityPools", ("properties", "serviceLevel"), "premium-1"),
    ],
)
def test_a_word_that_no_list_has_is_found(types, bodies, type_, path, value):
    body = next(one for one in bodies.values() if one["type"] == type_)
    wrong = changed(body, path, lambda inner, key: inner.__setitem__(key, value))
    assert [one for one in types.problems(wrong) if repr(value) in one]

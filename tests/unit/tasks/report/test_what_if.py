"""What left the templates, as what-if reports it: drift is found, noise passed over, and what is not known is no "no drift"."""

import json

import pytest

from tasks.report.estate.what_if import read_what_if

pytestmark = pytest.mark.unit
ID = (
    "/subscriptions/00000000-0000-0000-0000-000000000001/resourceGroups/a/providers/Microsoft.Storage/storageAccounts/x"
)
NESTED = "/subscriptions/s/resourceGroups/a/providers/Microsoft.Resources/deployments/storage"


def read(tmp_path, *changes, **more):
    path = tmp_path / "what-if.json"
    path.write_text(json.dumps({"status": "Succeeded", "error": None, "changes": list(changes), **more}))
    return read_what_if(path)


def change(kind, *delta, id_=ID, **more):
    return {"resourceId": id_, "changeType": kind, "before": None, "after": None, "delta": list(delta) or None, **more}


def delta(path, kind, before=None, after=None, *children):
    return {
        "path": path,
        "propertyChangeType": kind,
        "before": before,
        "after": after,
        "children": list(children) or None,
    }


DRIFT = {
    "a resource is gone": (change("Create"), "gone", ()),
    "it would be deleted": (change("Delete"), "to be deleted", ()),
    "public access": (
        change("Modify", delta("properties.allowBlobPublicAccess", "Modify", True, False)),
        "changed",
        ("properties.allowBlobPublicAccess",),
    ),
    "an address more": (
        change(
            "Modify",
            delta("properties.networkAcls.ipRules", "Array", None, None, delta("0", "Delete", {"value": "0.0.0.0/0"})),
        ),
        "changed",
        ("properties.networkAcls.ipRules.0",),
    ),
    "inside an element": (
        change(
            "Modify",
            delta(
                "properties.rules",
                "Array",
                None,
                None,
                delta("1", "Modify", None, None, delta("port", "Modify", 22, 443)),
            ),
        ),
        "changed",
        ("properties.rules.1.port",),
    ),
    "a tag more": (change("Modify", delta("tags.owner", "Delete", "bob")), "changed", ("tags.owner",)),
}


@pytest.mark.parametrize("case", DRIFT)
def test_drift_is_found(case, tmp_path):
    given, kind, paths = DRIFT[case]
    result = read(tmp_path, given, change("NoChange", id_=f"{ID}2"))
    assert result.verdict == "drifted" and result.as_rendered == 1
    assert [(one.resource, one.kind, one.what) for one in result.changes] == [(ID, kind, paths)]
    assert result.digest == read(tmp_path, given).digest != read(tmp_path, change("NoChange")).digest


@pytest.mark.parametrize(
    "noise",
    [
        delta("sku.tier", "NoEffect", "Standard", "Premium"),
        delta("properties.encryption", "Delete", {"keySource": "Microsoft.Storage"}),
        delta("properties.principalId", "Modify", "3f", "[reference(resourceId('a'))]"),
        delta("location", "Modify", "West Europe", "westeurope"),
    ],
    ids=lambda one: one["path"],
)
def test_noise_that_microsoft_documents_is_no_drift(noise, tmp_path):
    result = read(tmp_path, change("Modify", noise), change("Ignore", id_=f"{ID}3"))
    assert (result.verdict, result.noise, result.as_rendered) == ("as rendered", 1, 1)
    beside = read(tmp_path, change("Modify", noise, delta("properties.isHnsEnabled", "Modify", True, False)))
    assert beside.verdict == "drifted" and beside.changes[0].what == ("properties.isHnsEnabled",)


UNCLEAR = {
    "an unknown type of change": (change("Reconsider"), {}),
    "no type of change": ({"resourceId": ID}, {}),
    "Deploy": (change("Deploy"), {}),
    "Unsupported": (change("Unsupported", unsupportedReason="extension"), {}),
    "Modify without a delta": (change("Modify"), {}),
    "an unknown change of a property": (change("Modify", delta("tags", "Swap")), {}),
    "a nested deployment was not looked into": (change("Ignore", id_=NESTED), {}),
    "it may change": (change("NoChange"), {"potentialChanges": [change("Modify")]}),
    "a diagnostic": (
        change("NoChange"),
        {"diagnostics": [{"level": "Warning", "code": "NestedDeploymentShortCircuited"}]},
    ),
    "no object": ("NoChange", {}),
}


@pytest.mark.parametrize("case", UNCLEAR)
def test_what_is_not_known_is_never_no_drift(case, tmp_path):
    given, more = UNCLEAR[case]
    result = read(tmp_path, given, **more)
    assert result.verdict == "unknown" and [one.kind for one in result.changes] == ["unclear"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"changes": [', "cut off"),
        ("[]", "no list of changes"),
        ('{"status": "Failed", "error": {"code": "InvalidTemplate"}, "changes": []}', "InvalidTemplate"),
    ],
)
def test_what_is_no_answer_is_refused(text, words, tmp_path):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError, match=words):
        read_what_if(tmp_path / "a.json")

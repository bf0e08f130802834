"""`headway quota` as a person uses it: what fits, what does not and what to file."""

import pytest
from support import Home

H100 = "Standard_ND96isr_H100_v5"
LIMITS = "azureml: {eastus: {date: 2026-11-20, dedicated: {Standard NDSH100v5 Family: 384}, low_priority: 96}}\n"


@pytest.fixture
def desk(tmp_path):
    made = Home(tmp_path / "home")
    made.path.mkdir()
    (made.path / "limits.yaml").write_text(LIMITS)
    return made


def test_what_fits_is_told_with_every_limit(desk):
    said = desk.ok("quota", H100, "--nodes", "4", "--days", "20").said
    assert [check["outcome"] for check in said["checks"]] == ["passed"] * 3 and said["source"].endswith("limits.yaml")
    assert desk.ok("quota").said["limits"]["limits.yaml"]["azureml"]["eastus"]["low_priority"] == 96


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--nodes", "5"], "new limit 480 vCPUs (5 x Standard_ND96isr_H100_v5 of 96 vCPUs)"),
        (["--nodes", "2", "--low-priority"], "low-priority vCPUs, all families, new limit 192 vCPUs"),
        (["--days", "22"], "train in 2 jobs"),
        (["--days", "8", "--low-priority"], "or dedicated ones"),
    ],
)
def test_what_does_not_fit_is_a_closed_gate_with_the_request_to_file(desk, words, said):
    ran = desk.run("quota", H100, *words)
    assert ran.code == 3 and said in ran.said["error"]["remedy"] and ran.said["error"]["checks"]


def test_an_unknown_quota_is_a_warning(desk):
    checks = desk.ok("quota", H100, "--region", "westus").said["checks"]
    assert checks[0]["outcome"] == "warned" and "96 vCPUs" in checks[0]["remedy"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["Standard_X1"], "nothing is known of it"),
        (["local-cpu"], "no size of Azure"),
        ([H100, "--nodes", "0"], "nodes 0"),
        (["update", "-c", "tiny"], "no workspace is configured"),
    ],
)
def test_mistakes_are_told(desk, words, said):
    ran = desk.run("quota", *words)
    assert ran.code == 2 and said in ran.said["error"]["message"]

"""An account's quota, asked of Azure ML at its HTTP edge through the SDK's own operations."""

from types import SimpleNamespace

import pytest
from azure.core.credentials import AccessToken
from azureml_service import TOKEN, Trouble, serving
from azurite import Endpoint

from tasks.common.errors import Missing
from tasks.compute.azureml.client import account_usages
from tasks.config.cluster import ClusterConfig
from tasks.planning.quota import of_usages

FAMILY = "Standard NDSH100v5 Family Cluster Dedicated vCPUs"


@pytest.fixture
def service(tmp_path):
    with serving(Endpoint(1), tmp_path, {}) as service:
        name = {"value": FAMILY, "localizedValue": FAMILY}
        service.usages = [{"id": "a", "type": "t", "unit": "Count", "currentValue": 96, "limit": 384, "name": name}]
        yield service


def ask(service, **changed):
    credential = SimpleNamespace(get_token=lambda *_, **__: AccessToken(service.token, 4102444800))
    workspace = {
        "subscription_id": "s",
        "resource_group": "g",
        "workspace": "w",
        "compute": "cpu",
        "endpoint": service.url,
    }
    cluster = ClusterConfig(azureml={**workspace, **changed})
    return account_usages(cluster, lambda store: SimpleNamespace(token=lambda: credential))


def test_the_region_of_the_workspace_and_its_quota_are_told(service):
    region, usages = ask(service)
    assert region == "eastus" and service.token == TOKEN
    told = of_usages(usages)
    assert told["dedicated"] == {"Standard NDSH100v5 Family": 384} and told["used"] == {"Standard NDSH100v5 Family": 96}


def test_a_workspace_that_nobody_named_is_the_users_mistake(service):
    with pytest.raises(ValueError, match="no workspace is configured"):
        ask(service, workspace="")


def test_who_may_not_look_is_told_so(service):
    service.trouble = [Trouble("GET", "usages", 403, code="AuthorizationFailed", message="no role")]
    with pytest.raises((Missing, ValueError), match="no role"):
        ask(service)

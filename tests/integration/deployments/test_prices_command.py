"""`headway prices` and `headway prices update` as a person uses them, with Azure's service at its HTTP edge."""

import datetime
import json
from dataclasses import dataclass

import pytest
from retail_prices import Trouble, item, retail_prices, stored
from support import Home
from waiting import limit

A100 = "Standard_ND96amsr_A100_v4"
ITEMS = [
    item(),
    item(price=3.5, skuName="ND96amsr A100 v4 Spot", meterName="ND96amsr A100 v4 Spot"),
    item(price=192_720.0, type="Reservation", reservationTerm="1 Year"),
    item(price=60.0, productName="Virtual Machines NDamsrA100v4 Series Windows"),
    stored("Blob Storage", "Hot LRS Data Stored", 0.0208),
]


@dataclass(frozen=True)
class Desk(Home):
    """A home whose Azure is the test's."""

    url: str = "http://127.0.0.1:9/nobody"

    def environment(self):
        return {**super().environment(), "HEADWAY_PRICES_URL": self.url}

    def words(self, *words):
        process = self.start(*words)
        out, err = process.communicate(timeout=limit(60))
        assert process.returncode == 0, err
        return out


@pytest.fixture
def azure():
    with retail_prices(ITEMS, page=2) as server:
        yield server


@pytest.fixture
def desk(tmp_path, azure):
    return Desk(tmp_path / "home", azure.url)


def test_before_azure_was_asked_the_shipped_prices_are_shown_as_old(desk):
    said = desk.ok("prices", A100, "--region", "eastus").said
    (row,) = said["machines"]
    assert row["hours"] == {"on-demand": 32.77, "spot": 3.6047} and row["date"] == "2025-03-01"
    assert any("days old" in warning for warning in said["warnings"])
    assert "are old" in desk.words("prices")


def test_after_it_todays_prices_are_shown_and_the_others_stay(desk, azure):
    ran = desk.ok("prices", "update", "--region", "eastus").said
    assert ran["regions"]["eastus"]["machines"] == {A100: {"on-demand": 32.77, "spot": 3.5, "reserved-1y": 22.0}}
    said = desk.ok("prices", A100).said
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    east = next(row for row in said["machines"] if row["region"] == "eastus")
    assert (east["hours"]["reserved-1y"], east["date"], east["warnings"]) == (22.0, today, [])
    assert {row["region"] for row in said["machines"]} == {"eastus", "eastus2", "southcentralus"}
    assert "Azure Retail Prices API" in desk.words("prices", A100, "--region", "eastus")
    azure.troubles = [Trouble(403)]
    failed = desk.run("prices", "update", "--region", "eastus")
    assert failed.code == 6 and "The prices of before stay" in failed.said["error"]["remedy"]
    assert desk.ok("prices", A100).said["machines"] == said["machines"]


def test_a_machine_of_your_own_has_the_price_that_you_write(desk):
    own = desk.path / "prices/own.yaml"
    own.parent.mkdir(parents=True)
    own.write_text("machines: {local-cpu: {any: {on-demand: 0.0}}}\n")
    (row,) = desk.ok("prices", "local-cpu").said["machines"]
    assert row["hours"] == {"on-demand": 0.0} and row["warnings"] == []
    own.write_text("machines: {local-cpu: {any: {on-demand: cheap}}}\n")
    refused = desk.run("prices", "local-cpu")
    assert (
        refused.code == 2
        and "own.yaml" in refused.said["error"]["message"]
        and "cheap" in refused.said["error"]["message"]
    )


def test_mistakes_are_told_with_the_remedy(desk, azure):
    unknown = desk.run("prices", "Standard_X1")
    assert unknown.code == 2 and "no price of Standard_X1 is known" in unknown.said["error"]["message"]
    spelt = desk.run("prices", "update", "--region", "East US")
    assert spelt.code == 2 and "eastus" in spelt.said["error"]["message"]
    assert azure.requests == 0


def test_a_gpu_is_priced_by_the_size_that_has_it(desk):
    said = json.loads(desk.words("prices", "A100 80GB", "--region", "eastus", "--json"))
    assert said["machines"][0]["hours"]["on-demand"] == pytest.approx(32.77 / 8)

"""Prices as data, Azure's meters as prices, and asking for them at a real HTTP edge that fails in every way."""

import datetime
import json

import pytest
import yaml
from retail_prices import Trouble, item, retail_prices, stored

from tasks.common.errors import Missing
from tasks.hardware.files import known_skus
from tasks.hardware.sku import plain_name
from tasks.planning.money import Spending, cost
from tasks.planning.prices.book import machine_price, open_book, read_list, storage_prices
from tasks.planning.prices.update import BEFORE, FETCHED, known_sizes, prices_of, update

pytestmark = pytest.mark.unit

TODAY = datetime.date(2026, 11, 22)
A100, H100 = "Standard_ND96amsr_A100_v4", "Standard_ND96isr_H100_v5"
PLANS = [
    {"unitPrice": 22.9, "retailPrice": 22.9, "term": "1 Year"},
    {"unitPrice": 15.4, "retailPrice": 15.4, "term": "3 Years"},
]
A_REGION = [
    item(savingsPlan=PLANS),
    item(price=60.25, productName="Virtual Machines NDamsrA100v4 Series Windows"),
    item(price=3.6, skuName="ND96amsr A100 v4 Spot", meterName="ND96amsr A100 v4 Spot"),
    item(price=6.55, skuName="ND96amsr A100 v4 Low Priority", meterName="ND96amsr A100 v4 Low Priority"),
    item(price=192_720.0, type="Reservation", reservationTerm="1 Year"),
    item(price=394_200.0, type="Reservation", reservationTerm="3 Years"),
    item(price=20.0, type="DevTestConsumption"),
    item(H100, 98.32),
    item(H100, 98.32, skuName="ND96isr H100 v5 Spot", meterName="ND96isr H100 v5 Spot"),
    stored("Blob Storage", "Hot LRS Data Stored", 0.0208),
    stored("Blob Storage", "Hot LRS Data Stored", 0.0200, tierMinimumUnits=51_200.0),
    stored("Blob Storage", "Cool LRS Data Stored", 0.0115),
    stored("Azure NetApp Files", "Premium Capacity", 0.000403, "1 GiB/Hour"),
    stored("Rtn Preference: MGN", "Standard Data Transfer Out", 0.0, "1 GB"),
    stored("Rtn Preference: MGN", "Standard Data Transfer Out", 0.087, "1 GB", tierMinimumUnits=100.0),
    stored("Rtn Preference: MGN", "Standard Data Transfer Out", 0.083, "1 GB", tierMinimumUnits=10_340.0),
]


def found(*items, sizes=(A100, H100), today=TODAY):
    return prices_of(items, sizes, region="eastus", today=today)


def fetch(home, server, *, regions=("eastus",), today=TODAY):
    return update(home, server.url, regions=regions, sizes=[A100, H100], today=today)


def test_the_shipped_list_has_the_catalogues_prices_and_none_of_its_mistakes():
    book = open_book()
    hours = {size: machine_price(book, size, today=TODAY).hours for size in known_sizes(book)}
    assert hours[H100]["on-demand"] == 98.32 and hours[H100]["spot"] is None, (
        "the catalogue repeats the on-demand price"
    )
    assert hours["Standard_NC40ads_H100_v5"]["on-demand"] == 6.98 and hours["Standard_NC40ads_H100_v5"]["spot"] is None
    assert hours[A100] == {**dict.fromkeys(hours[A100]), "on-demand": 32.77, "spot": 3.6047}
    assert machine_price(book, H100, region="westus", today=TODAY).hours["on-demand"] == 127.816
    of_eight = machine_price(book, "H100", gpus=8, today=TODAY)
    assert of_eight.hours["on-demand"] == pytest.approx(98.32), "8 GPUs, not 12"
    one = machine_price(book, "a100 80gb", today=TODAY)
    assert one.hours["on-demand"] == pytest.approx(32.77 / 8) and "shared out by its 8 GPUs" in one.warnings[0]


def test_every_size_of_the_shipped_list_is_hardware_that_we_know():
    endpoints = {"ds3_v2"}  # no job is planned on it
    assert {plain_name(size) for size in known_sizes(open_book())} - endpoints <= set(known_skus())


def test_what_is_not_known_is_none_and_says_so():
    price = machine_price(open_book(), "Standard_ND96isr_MI300X_v5", today=TODAY)
    assert not price.hours and "no price of Standard_ND96isr_MI300X_v5 is known" in price.warnings[0]
    assert machine_price(open_book(), "Standard_DS3_v2", region="eastus", today=TODAY).warnings == (
        "no price of Standard_DS3_v2 is known: `headway prices update` fetches it",
    )
    elsewhere = machine_price(open_book(), H100, region="westeurope", today=TODAY)
    assert not elsewhere.hours and "known are eastus, eastus2, westus" in elsewhere.warnings[0]
    assert storage_prices(open_book(), region="westeurope", today=TODAY).warnings == (
        "no prices of storage are known in westeurope",
    )


def test_old_prices_say_how_old_and_undated_ones_that_nobody_knows():
    book = open_book()
    assert "631 days old (2025-03-01)" in machine_price(book, A100, today=TODAY).warnings[0]
    a_month_on = datetime.date(2025, 3, 31)
    assert machine_price(book, A100, today=a_month_on).warnings == ()
    assert "no date" in storage_prices(book, today=TODAY).warnings[0]


def test_your_own_list_comes_first_and_may_say_that_a_machine_is_free(tmp_path):
    own = tmp_path / "prices/own.yaml"
    own.parent.mkdir()
    own.write_text(f"machines:\n  local-cpu: {{any: {{on-demand: 0.0}}}}\n  {A100}: {{eastus: {{on-demand: 20.5}}}}\n")
    book = open_book(tmp_path)
    local = machine_price(book, "local-cpu", today=TODAY)
    assert local.hours["on-demand"] == 0.0 and local.warnings == () and local.source == "your own list"
    assert machine_price(book, A100, today=TODAY).hours["on-demand"] == 20.5
    assert machine_price(book, A100, region="southcentralus", today=TODAY).hours["on-demand"] == 39.324


def both_lists(home, own):
    """Your list beside one that was fetched today, in dollars."""
    (home / "prices").mkdir()
    (home / "prices/own.yaml").write_text(own)
    fetched = {
        "sources": {"azure": {"what": "Azure of the day", "date": TODAY.isoformat()}},
        "machines": {A100: {"eastus": {"on-demand": 33.0, "spot": 3.5, "low-priority": 6.5, "source": "azure"}}},
    }
    (home / FETCHED).write_text(yaml.safe_dump(fetched))
    return open_book(home)


@pytest.mark.parametrize("region", ["eastus", "any"])
def test_your_own_on_demand_price_hides_no_spot_price_that_was_fetched(tmp_path, region):
    price = machine_price(
        both_lists(tmp_path, f"machines: {{{A100}: {{{region}: {{on-demand: 20.5}}}}}}\n"), A100, today=TODAY
    )
    assert (price.hours["on-demand"], price.hours["spot"], price.hours["low-priority"]) == (20.5, 3.5, 6.5)
    assert price.hours["reserved-1y"] is None and price.source == "your own list"
    assert (price.origin("spot").source, price.origin("spot").date) == ("Azure of the day", "2026-11-22")
    told = {kind: cost(Spending(1, 3600, mix={kind: 1.0}), price).plain() for kind in ("on-demand", "spot")}
    assert (told["on-demand"]["total"], told["on-demand"]["price_source"]) == (20.5, "your own list")
    assert (told["spot"]["total"], told["spot"]["price_date"]) == (3.5, "2026-11-22")


def test_a_price_in_another_currency_does_not_complete_your_list(tmp_path):
    book = both_lists(tmp_path, f"currency: EUR\nmachines: {{{A100}: {{eastus: {{on-demand: 20.5}}}}}}\n")
    price = machine_price(book, A100, today=TODAY)
    assert (price.currency, price.hours["on-demand"], price.hours["spot"]) == ("EUR", 20.5, None)
    said = cost(Spending(1, 3600, mix={"spot": 1.0}), price)
    assert said.total is None and "listed in USD and your own list is in EUR" in said.warnings[0]
    assert not any("USD" in warning for warning in cost(Spending(1, 3600), price).warnings)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("machines: {x: {any: {on-demand: -1}}}", "machines.x.any.on-demand"),
        ("machines: {x: {any: {on-demand: .nan}}}", "machines.x.any.on-demand"),
        ("machines: {x: {any: {on_demnd: 1}}}", "on_demnd"),
        ("machines: {x: {any: {spot: 1, source: nobody}}}", "nobody"),
        ("", "no price list"),
        ("- 1", "no price list"),
        ("a: [", "prices"),
    ],
)
def test_a_damaged_list_is_refused_by_name(tmp_path, text, said):
    path = tmp_path / "own.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=said):
        read_list(path)


def test_meters_become_prices_of_linux_by_kind():
    prices = found(*A_REGION)
    assert prices.machines[A100] == {
        "on-demand": 32.77,
        "spot": 3.6,
        "low-priority": 6.55,
        "reserved-1y": 22.0,  # 192,720 over 8,760 hours
        "reserved-3y": 15.0,  # 394,200 over 26,280
        "savings-1y": 22.9,
        "savings-3y": 15.4,
    }
    assert prices.storage["blob-hot"] == 0.0208 and prices.storage["blob-cool"] == 0.0115
    assert prices.storage["netapp-premium"] == pytest.approx(0.27399, abs=1e-5)
    assert prices.egress == 0.087, "100 GB are free, and the dearest step counts for the rest"


def test_a_spot_price_that_is_the_on_demand_price_is_not_known():
    prices = found(*A_REGION)
    assert prices.machines[H100] == {"on-demand": 98.32}
    assert any(H100 in said and "spot" in said for said in prices.left_out)


def test_a_reservation_that_is_dearer_than_none_is_not_believed():
    prices = found(item(), item(price=400_000.0, type="Reservation", reservationTerm="1 Year"))
    assert prices.machines[A100] == {"on-demand": 32.77} and "reserved-1y at 45.6" in prices.left_out[0]


def test_of_doubles_the_primary_and_the_newest_counts_and_of_equals_the_dearer():
    old = item(price=99.0, effectiveStartDate="2022-01-01T00:00:00Z")
    secondary = item(price=11.0, isPrimaryMeterRegion=False, effectiveStartDate="2026-01-01T00:00:00Z")
    future = item(price=40.0, effectiveStartDate="2027-01-01T00:00:00Z")
    assert found(old, item(), secondary, future, item()).machines[A100] == {"on-demand": 32.77}
    twice = found(item(price=33.0), item())
    assert twice.machines[A100] == {"on-demand": 33.0} and "32.77 and at 33" in twice.left_out[0]


@pytest.mark.parametrize("price", [0.0, -1.0, None, "32.77", True, float("nan"), float("inf")])
def test_a_price_that_is_none_leaves_a_gap(price):
    assert found(item(price=price)).machines == {}


def test_meters_of_others_are_left_out():
    others = [
        item(armRegionName="westus"),
        item("Standard_D4s_v5", 0.19),
        item(unitOfMeasure="1/Month"),
        item(productName="NDamsrA100v4 Series Cloud Services"),
        item(type="Reservation", reservationTerm="5 Years"),
    ]
    assert found(*others).machines == {}


@pytest.mark.integration
def test_a_region_is_fetched_page_by_page_and_kept_with_its_date(tmp_path):
    with retail_prices(A_REGION, page=2) as server:
        fetch(tmp_path, server)
        assert server.requests > len(server.asked)
        assert all("armRegionName eq 'eastus'" in condition for condition in server.asked)
    price = machine_price(open_book(tmp_path), A100, today=TODAY)
    assert (price.hours["reserved-3y"], price.date, price.warnings) == (15.0, "2026-11-22", ())
    assert price.source.startswith("Azure Retail Prices API (http://127.0.0.1")
    later = TODAY + datetime.timedelta(days=31)
    assert "31 days old" in machine_price(open_book(tmp_path), A100, today=later).warnings[0]
    assert storage_prices(open_book(tmp_path), today=TODAY).gb_month["blob-hot"] == 0.0208


@pytest.mark.integration
def test_other_regions_stay_with_their_date_and_the_list_before_is_kept(tmp_path):
    early = TODAY - datetime.timedelta(days=40)
    west = [{**one, "armRegionName": "westus"} for one in A_REGION]
    with retail_prices([*A_REGION, *west]) as server:
        fetch(tmp_path, server, regions=("eastus", "westus"), today=early)
        server.items = [item(price=30.0), *west]
        fetch(tmp_path, server)
    book = open_book(tmp_path)
    east, west_ = (machine_price(book, A100, region=region, today=TODAY) for region in ("eastus", "westus"))
    assert (east.hours["on-demand"], east.date) == (30.0, TODAY.isoformat())
    assert east.hours["spot"] is None, "what Azure lists no more is not known any more"
    assert (west_.hours["on-demand"], west_.date) == (32.77, early.isoformat())
    assert read_list(tmp_path / BEFORE).machines[A100]["eastus"].on_demand == 32.77
    fetched = read_list(tmp_path / FETCHED)
    assert "eastus" not in fetched.storage and "westus" in fetched.storage


@pytest.mark.integration
def test_it_is_asked_again_when_it_is_busy_breaks_off_or_answers_half(tmp_path, monkeypatch):
    waits = []
    monkeypatch.setattr("tasks.planning.prices.update.time.sleep", waits.append)
    with retail_prices(A_REGION) as server:
        server.troubles = [
            Trouble(429, headers={"Retry-After": "7"}),
            Trouble(500, b"<html>"),
            Trouble(200, b'{"BillingCurrency": "USD", "Items": [{"retailPri'),
        ]
        fetch(tmp_path, server)
        assert server.requests == len(server.asked) + 3
    assert waits == [7.0, 2.0, 4.0], "as long as it asks, else longer each time"
    assert (tmp_path / FETCHED).exists()


WORSE = [
    ([Trouble(503)] * 4, "503"),
    ([Trouble(200, b"{}")] * 4, "no Items"),
    ([Trouble(200, json.dumps({"Items": [1], "BillingCurrency": "USD"}).encode())] * 4, "no object"),
    ([Trouble(200, b'{"Items": []', whole=False)] * 4, "4 attempts"),
    ([Trouble(429, headers={"Retry-After": "3600"})], "wait 3600 s"),
    ([Trouble(403, b"blocked")], "403: blocked"),
]


@pytest.mark.integration
@pytest.mark.parametrize(("troubles", "said"), WORSE, ids=[said for _, said in WORSE])
def test_nothing_is_written_over_by_half_an_answer(tmp_path, monkeypatch, troubles, said):
    monkeypatch.setattr("tasks.planning.prices.update.time.sleep", lambda seconds: None)
    with retail_prices(A_REGION) as server:
        fetch(tmp_path, server)
        before = (tmp_path / FETCHED).read_bytes()
        server.items = [item(price=1.0)]
        first = server.requests
        server.troubles = list(troubles)
        with pytest.raises(Missing, match=said) as failed:
            fetch(tmp_path, server)
        assert server.requests - first == len(troubles)
    assert "The prices of before stay" in failed.value.remedy
    assert (tmp_path / FETCHED).read_bytes() == before


@pytest.mark.integration
def test_a_failure_in_the_middle_keeps_the_list_whole(tmp_path, monkeypatch):
    monkeypatch.setattr("tasks.planning.prices.update.time.sleep", lambda seconds: None)
    with retail_prices(A_REGION, page=1) as server:
        fetch(tmp_path, server)
        before, size = (tmp_path / FETCHED).read_bytes(), server.requests
        server.items = [{**one, "retailPrice": 1.5} for one in A_REGION]

        class Late(list):
            """Trouble from the middle on."""

            def __bool__(self):
                return server.requests > size + size // 2

            def pop(self, _):
                return Trouble(500)

        server.troubles = Late()
        with pytest.raises(Missing, match="500"):
            fetch(tmp_path, server)
    assert (tmp_path / FETCHED).read_bytes() == before and not (tmp_path / BEFORE).exists()


@pytest.mark.integration
@pytest.mark.parametrize("link", ["itself", "https://prices.example.com/api/retail/prices?$skip=100"])
def test_pages_that_go_in_a_circle_or_elsewhere_are_not_followed(tmp_path, link):
    with retail_prices(A_REGION) as server:
        server.next_link = f"{server.url}?api-version=2023-01-01-preview&currencyCode='USD'&$filter=serviceName eq 'x'"
        server.next_link = server.next_link if link == "itself" else link
        with pytest.raises(Missing, match="circle" if link == "itself" else "another place"):
            fetch(tmp_path, server)
        assert server.requests <= 3
    assert not (tmp_path / FETCHED).exists()


@pytest.mark.integration
def test_another_currency_is_refused(tmp_path):
    with retail_prices(A_REGION) as server:
        server.currency = "EUR"
        with pytest.raises(Missing, match="asked for USD and answers in EUR"):
            fetch(tmp_path, server)


@pytest.mark.integration
def test_a_region_without_such_machines_changes_nothing(tmp_path):
    with retail_prices(A_REGION) as server, pytest.raises(Missing, match="no machine with GPUs in westindia"):
        fetch(tmp_path, server, regions=("eastus", "westindia"))
    assert not (tmp_path / FETCHED).exists()


@pytest.mark.integration
@pytest.mark.parametrize("region", ["East US", "eastus' or 1 eq 1", "", "EASTUS"])
def test_a_region_is_written_as_azure_writes_it(tmp_path, region):
    with retail_prices([]) as server:
        with pytest.raises(ValueError, match="region"):
            fetch(tmp_path, server, regions=(region,) if region else ())
        assert server.requests == 0


@pytest.mark.integration
def test_the_edge_refuses_what_azure_refuses(tmp_path):
    with retail_prices(A_REGION) as server, pytest.raises(Missing, match="400"):
        update(tmp_path, server.url + "s", regions=["eastus"], sizes=[A100], today=TODAY)


@pytest.mark.integration
def test_nobody_there_is_said_with_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setattr("tasks.planning.prices.update.time.sleep", lambda seconds: None)
    with pytest.raises(Missing, match="4 attempts"):
        update(tmp_path, "http://127.0.0.1:9/prices", regions=["eastus"], sizes=[A100], today=TODAY)


@pytest.mark.integration
def test_the_file_is_a_list_that_a_person_can_read(tmp_path):
    with retail_prices(A_REGION) as server:
        done = fetch(tmp_path, server)
    text = done.path.read_text()
    assert text.startswith("# Written by `headway prices update`")
    assert yaml.safe_load(text)["machines"][A100]["eastus"]["reserved-1y"] == 22.0

"""What a training costs, by hand-made sums; what is not known is never 0."""

import math

import pytest

from tasks.planning.money import MachinePrice, Spending, StoragePrices, cost, hour_of_term, kept_in

pytestmark = pytest.mark.unit

A100 = MachinePrice(
    "Standard_ND96amsr_A100_v4", {"on-demand": 32.77, "spot": 3.6047}, "eastus", source="a list", date="2026-11-01"
)
TEN = MachinePrice(
    "ten", {"on-demand": 10.0, "spot": 2.0, "reserved-1y": 6.0, "reserved-3y": None}, source="a list", date="2026-11-01"
)
STORAGE = StoragePrices({"blob-hot": 0.02, "lustre-500": None}, 0.05, source="another", date="2026-10-01")


def test_gpt3_on_1024_gpus_for_34_days():
    """Narayanan et al. 2021, section 5.1: 175 billion parameters, 300 billion tokens, 34 days on 1,024 A100; 128 x 816 h."""
    found = cost(Spending(machines=128, train_seconds=34 * 86400), A100)
    assert found.machine_hours == 104_448 and found.total == pytest.approx(3_422_760.96)
    assert (found.currency, found.price_source, found.price_date) == ("USD", "a list", "2026-11-01")


def test_the_parts_are_what_the_hours_cost_and_sum_to_the_total():
    spent = Spending(
        machines=4,
        train_seconds=36_000,
        goodput=0.8,
        qualification_seconds=1_800,
        idle_seconds=900,
        checkpoint_gb=730,
        egress_gb=100,
    )
    found = cost(spent, TEN, STORAGE)
    assert found.parts == {
        "training": 400.0,
        "failures": pytest.approx(100.0),
        "qualification": 20.0,
        "idle": 10.0,
        "checkpoints": pytest.approx(0.265),  # 730 GB for 13.25 of 730 hours at 0.02
        "data": 0.0,
        "egress": 5.0,
    }
    assert found.total == pytest.approx(535.265) == math.fsum(found.parts.values())
    assert found.machine_hours == pytest.approx(53.0)
    assert (found.price_source, found.price_date) == ("a list; another", "2026-10-01"), "the oldest date counts"


def test_storage_is_kept_as_long_as_one_says():
    months = Spending(machines=1, train_seconds=3600, data_gb=1000, kept_days=365 / 12 * 3)
    assert cost(months, TEN, STORAGE).parts["data"] == pytest.approx(60.0)


def test_hours_may_be_paid_by_several_kinds_of_price():
    mixed = Spending(machines=1, train_seconds=36_000, mix={"spot": 0.75, "on-demand": 0.25})
    found = cost(mixed, TEN)
    assert found.hour == pytest.approx(4.0) and found.total == pytest.approx(40.0)


def test_a_discount_of_your_contract_is_off_the_on_demand_price_and_comes_before_the_list():
    own = Spending(machines=1, train_seconds=3600, mix={"reserved-1y": 1.0}, discounts={"reserved-1y": 0.3})
    assert cost(own, TEN).hour == pytest.approx(7.0)
    unlisted = Spending(machines=1, train_seconds=3600, mix={"savings-3y": 1.0}, discounts={"savings-3y": 0.5})
    assert cost(unlisted, TEN).hour == pytest.approx(5.0)


def test_a_commitment_says_that_the_rest_of_its_term_is_paid_too():
    found = cost(Spending(machines=1, train_seconds=3600, mix={"reserved-1y": 1.0}), TEN)
    assert found.total == 6.0 and any("paid for one year" in said for said in found.warnings)


@pytest.mark.parametrize("kind", ["reserved-3y", "savings-1y", "low-priority"])
def test_an_unknown_price_leaves_the_total_open_and_says_so(kind):
    found = cost(Spending(machines=2, train_seconds=3600, goodput=0.9, egress_gb=100, mix={kind: 1.0}), TEN, STORAGE)
    assert found.total is None and found.hour is None and found.parts["training"] is None is found.parts["failures"]
    assert found.known == 5.0 and any(f"the {kind} price of ten" in said for said in found.warnings)
    assert found.plain()["total"] is None


@pytest.mark.parametrize(
    ("stored", "part"),
    [
        ({"checkpoint_gb": 1, "checkpoint_storage": "lustre-500"}, "checkpoints"),
        ({"data_gb": 1, "data_storage": "tape"}, "data"),
    ],
)
def test_storage_without_a_price_leaves_the_total_open(stored, part):
    found = cost(Spending(machines=1, train_seconds=3600, **stored), TEN, STORAGE)
    assert found.parts[part] is None and found.total is None and found.known == 10.0
    assert any(part in said for said in found.warnings)


def test_of_a_file_system_all_that_is_ordered_is_paid_for():
    both = StoragePrices({"blob-hot": 0.02, "lustre-125": 0.1, "lustre-500": None})
    assert kept_in(both, "lustre-125", gb=500, ordered_gb=17_592) == ("lustre-125", 17_592, "")
    assert kept_in(both, "blob-hot", gb=500) == ("blob-hot", 500, "")
    choice, gb, said = kept_in(both, "lustre-500", gb=500, ordered_gb=17_592)
    assert (choice, gb) == ("blob-hot", 500) and "lustre-500 of 18 TB is not known and not in the cost" in said


def test_nothing_stored_costs_nothing_whatever_its_price():
    assert cost(Spending(machines=1, train_seconds=3600), TEN).total == 10.0


def test_two_currencies_are_not_added():
    euros = StoragePrices({"blob-hot": 0.02}, currency="EUR")
    found = cost(Spending(machines=1, train_seconds=3600, data_gb=10), TEN, euros)
    assert found.total is None and "EUR and machines in USD" in found.warnings[0]


def test_a_machine_that_costs_nothing_is_not_an_unknown_one():
    free = MachinePrice("local-cpu", {"on-demand": 0.0})
    assert cost(Spending(machines=1, train_seconds=3600), free).total == 0.0


def test_warnings_of_the_prices_are_handed_on():
    old = MachinePrice("x", {"on-demand": 1.0}, warnings=("the prices of x are 99 days old",))
    assert cost(Spending(machines=1, train_seconds=1), old).warnings == ("the prices of x are 99 days old",)


def test_less_goodput_and_more_machines_never_cost_less():
    totals = [cost(Spending(machines=8, train_seconds=1e6, goodput=share), TEN).total for share in (1.0, 0.9, 0.5, 0.1)]
    assert totals == sorted(totals) and totals[-1] == pytest.approx(10 * totals[0])


def test_a_reservations_price_is_of_its_whole_term():
    assert hour_of_term(8760.0, "1y") == 1.0 and hour_of_term(26280.0, "3y") == 1.0


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"machines": 0}, "machines 0"),
        ({"machines": -3}, "machines -3"),
        ({"machines": math.inf}, "machines inf"),
        ({"train_seconds": -1}, "train_seconds -1"),
        ({"train_seconds": math.nan}, "train_seconds nan"),
        ({"goodput": 0}, "goodput 0"),
        ({"goodput": 1.01}, "goodput 1.01"),
        ({"goodput": math.nan}, "goodput nan"),
        ({"kept_days": -1}, "kept_days -1"),
        ({"mix": {"spot": 0.5}}, "sum to 0.5"),
        ({"mix": {}}, "sum to 0"),
        ({"mix": {"spot": 1.5, "on-demand": -0.5}}, "spot 1.5"),
        ({"mix": {"gratis": 1.0}}, "'gratis'"),
        ({"discounts": {"spot": 1.0}}, "spot 1.0"),
        ({"discounts": {"spot": math.nan}}, "spot nan"),
    ],
)
def test_what_cannot_be_is_refused_by_value(wrong, said):
    with pytest.raises(ValueError, match=said):
        cost(Spending(**{"machines": 1, "train_seconds": 3600, **wrong}), TEN)


def test_a_huge_training_is_only_dear():
    found = cost(Spending(machines=1e6, train_seconds=1e12), TEN)
    assert found.total == pytest.approx(1e12 / 3600 * 1e7)

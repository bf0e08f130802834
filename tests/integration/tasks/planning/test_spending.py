"""The plan's money: what is over budget or over quota is not started, and neither is what has a limit and no price."""

import datetime

import pytest
import yaml

from tasks.artifacts import Cluster, Plan, unqualified
from tasks.config.cluster import ClusterConfig
from tasks.config.planning import SpendingConfig
from tasks.config.training import ExecutionConfig
from tasks.planning.spending import Use, checks, cost_of, cost_per_hour, known_cost
from tasks.train import within_budget

H100 = "Standard_ND96isr_H100_v5"
TODAY = datetime.date.today().isoformat()
WORKSPACE = {
    "subscription_id": "s",
    "resource_group": "g",
    "workspace": "w",
    "compute": "c",
    "environment": "azureml:own:1",
}
USE = Use(seconds=36_000.0, goodput=0.8, checkpoint_bytes=0.0)


@pytest.fixture
def home(tmp_path):
    (tmp_path / "prices").mkdir()
    prices = {
        "sources": {"list": {"what": "our contract", "date": TODAY}},
        "machines": {H100: {"eastus": {"on-demand": 100.0, "spot": 30.0}}, "desk": {"any": {"on-demand": 0.5}}},
    }
    (tmp_path / "prices" / "own.yaml").write_text(yaml.safe_dump(prices))
    return tmp_path


def cluster(backend="azureml", nodes=2, sku=H100):
    return Cluster(name="c", backend=backend, nodes=nodes, ranks_per_node=8, threads_per_rank=12, sku=sku)


def judged(home, config, on):
    spent = cost_of(USE, config, on, home=home)
    return spent, checks(USE, spent, config, on, home=home)


def test_a_run_costs_its_machines_for_as_long_as_it_takes_with_its_failures(home):
    spent, found = judged(home, SpendingConfig(max_cost=2500.0), cluster())
    assert spent.total == pytest.approx(2 * 100 * 12.5)  # ten hours at a goodput of 0.8
    assert found[0].passed and found[0].measured == pytest.approx(2500.0) and known_cost(spent) == {"cost": spent.total}
    spent, found = judged(home, SpendingConfig(max_cost=2499.0), cluster())
    assert not found[0].passed and "planning.spending.max_cost" in found[0].remedy
    assert judged(home, SpendingConfig(price="spot"), cluster())[0].total == pytest.approx(750.0)
    assert judged(home, SpendingConfig(discount=0.4), cluster())[0].total == pytest.approx(1500.0)


def test_hardware_of_a_file_of_its_own_has_no_quota_family(home):
    _, found = judged(home, SpendingConfig(), cluster(sku="a name that only a file has"))
    assert found == ()


def test_preemptible_machines_are_not_priced_on_demand(home):
    """A plan of them costs the low-priority price of Azure ML, elsewhere the Spot price, and no discount of another kind."""
    prices = yaml.safe_load((home / "prices" / "own.yaml").read_text())
    prices["machines"][H100]["eastus"]["low-priority"] = 40.0
    (home / "prices" / "own.yaml").write_text(yaml.safe_dump(prices))
    for backend, hour in (("azureml", 40.0), ("slurm", 30.0)):
        taken = cluster(backend).model_copy(
            update={"config": ClusterConfig(backend=backend, azureml=WORKSPACE, nodes=2, preemptible=True)}
        )
        spent, _ = judged(home, SpendingConfig(discount=0.4), taken)
        assert spent.total == pytest.approx(2 * hour * 12.5)


def test_an_hour_costs_what_all_machines_cost_in_it(home):
    spent, _ = judged(home, SpendingConfig(), cluster(nodes=10))
    assert cost_per_hour(spent, cluster(nodes=10)) == pytest.approx(1000.0)
    unpriced = cluster(backend="slurm", sku="nobody_knows")
    assert cost_per_hour(judged(home, SpendingConfig(), unpriced)[0], unpriced) == 0.0


def test_a_limit_without_a_price_closes_the_gate_and_no_limit_asks_for_none(home):
    on = cluster(backend="slurm", sku="nobody_knows")
    spent, found = judged(home, SpendingConfig(max_cost=10.0), on)
    assert spent.total is None and known_cost(spent) == {}
    (check,) = found
    assert not check.passed and check.measured == "not known" and "nobody_knows" in check.remedy
    assert judged(home, SpendingConfig(), on)[1] == ()


def test_storage_without_a_price_leaves_the_cost_of_the_machines(home):
    kept = Use(seconds=36_000.0, goodput=0.8, checkpoint_bytes=1e13)
    on, config = cluster(), SpendingConfig(max_cost=2600.0, region="nowhere")
    prices = yaml.safe_load((home / "prices" / "own.yaml").read_text())
    prices["machines"][H100]["nowhere"] = {"on-demand": 100.0}
    (home / "prices" / "own.yaml").write_text(yaml.safe_dump(prices))
    spent = cost_of(kept, config, on, home=home)
    assert spent.total is None
    check = checks(kept, spent, config, on, home=home)[0]
    assert check.passed and check.warned and check.measured == pytest.approx(2500.0)


def test_quota_is_judged_where_azure_ml_brings_the_machines(home):
    limits = {"azureml": {"eastus": {"date": TODAY, "dedicated": {"standardNDSH100v5Family": 96}}}}
    (home / "limits.yaml").write_text(yaml.safe_dump(limits))
    config = SpendingConfig()  # of the usual region
    _, found = judged(home, config, cluster(nodes=2))
    (vcpus,) = [check for check in found if "vCPUs" in check.name]
    assert (vcpus.measured, vcpus.passed) == (192.0, False) and "new limit 192 vCPUs" in vcpus.remedy
    assert all(check.passed for check in judged(home, config, cluster(nodes=1))[1])
    limits["azureml"]["eastus"] |= {"low_priority": 10_000, "used": {"standardNDSH100v5Family": 96}}
    (home / "limits.yaml").write_text(yaml.safe_dump(limits))
    assert all(check.passed for check in judged(home, config, cluster(nodes=1))[1])  # it may be what is in use
    spot = cluster(nodes=4).model_copy(update={"config": ClusterConfig(preemptible=True)})
    assert all(check.passed for check in judged(home, config, spot)[1])
    assert judged(home, config, cluster(backend="local", sku="desk"))[1] == ()
    assert judged(home, config, cluster(backend="slurm"))[1] == ()  # its machines are there already
    _, found = judged(home, config, cluster(nodes=101))
    assert {check.name for check in found if not check.passed} >= {"machines of one Azure ML job with RDMA"}


def plan(**changed):
    numbers = {"steps": 10, "checkpoint_every_steps": 5, "keep_checkpoints": 2, "seconds": 5.0, "parameters": 100}
    return Plan(name="p", version="0" * 64, uri="", checks=(), **numbers, **changed)


def test_the_budget_is_a_limit_of_training_unless_one_is_configured():
    how, on = ExecutionConfig(), unqualified(ClusterConfig())
    limited = within_budget(how, plan(max_cost=50.0, cost_per_hour=200.0), on=on).limits
    assert (limited.max_cost, limited.cost_per_hour) == (50.0, 200.0)
    own = ExecutionConfig(limits={"max_cost": 7.0, "cost_per_hour": 1.0})
    assert within_budget(own, plan(max_cost=50.0, cost_per_hour=200.0), on=on) == own
    for none in (plan(max_cost=50.0), plan(cost_per_hour=200.0)):
        assert within_budget(how, none, on=on) == how
    elastic = {"backend": "slurm", "elastic": {"min_nodes": 2, "max_nodes": 6}}
    grows = unqualified(ClusterConfig.model_validate(elastic)).model_copy(update={"nodes": 2})
    assert within_budget(how, plan(max_cost=50.0, cost_per_hour=200.0), on=grows).limits.cost_per_hour == 600.0
